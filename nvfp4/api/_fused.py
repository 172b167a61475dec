"""Quantisers that make what they quantise: what all of them check and do.

The public functions say what becomes of their input (`Front`); this runs it: dense, up to a count
of rows in each matrix, or by ranges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, layouts
from .._parts import check_contiguous, check_device, check_dtype, check_option
from ..arrays import Array, Spec
from ..formats import SCALE_LAYOUTS, BlockFormat
from ..tensor import Parts, QTensor
from . import _place
from ._encode import Encode, check_rounding, encode_kind, read_encode_scale
from ._out import (
    Shapes,
    Target,
    check_apart,
    check_dense,
    check_out,
    check_out_tensor,
    check_result,
)
from ._out import store as store_on_host
from ._place import Place
from ._ranges import Ranges, read_counts, read_ranges
from ._repeat import Repeated
from .dense import matrix_view
from .grouped import _grouped_kind, _out_parts

__all__ = ["Front", "Options", "quantize_front"]


class Front(NamedTuple):
    """What becomes of the input before it is quantised."""

    #: As ``plans.fused_quantize`` calls it.
    name: str
    #: The input and its name as an argument.
    x: Array
    x_name: str
    #: K of the result.
    columns: int
    #: The golden model: input and residual [..., ] -> h and the sum with the residual.
    golden: Callable[[np.ndarray, np.ndarray | None], tuple[np.ndarray, np.ndarray]]
    #: More of the plans' keyword arguments.
    facts: Mapping[str, Any] = {}
    weight: Array | None = None
    residual: Array | None = None
    residual_out: Array | None = None
    norm_out: Array | None = None

    @property
    def inputs(self) -> tuple[tuple[str, Array | None], ...]:
        """What is read, by argument."""
        named = ((self.x_name, self.x), ("weight", self.weight), ("residual", self.residual))
        return tuple((name, array) for name, array in named if array is not None)


class Options(NamedTuple):
    """The keyword arguments that all quantisers share, as the caller gave them."""

    row_offsets: Any
    expert_ids: Any
    row_indices: Any
    row_counts: Any
    encode_scale: Any
    scale_rounding: Any
    scale_layout: Any
    return_hidden: bool
    out: Any
    stream: Any

    @classmethod
    def among(cls, arguments: Mapping[str, Any]) -> Options:
        """Those of a function that has all of them, out of its arguments."""
        return cls(*[arguments[name] for name in cls._fields])


class _Call(NamedTuple):
    """A call whose arguments are in order."""

    front: Front
    format: BlockFormat
    encode: Encode
    kind: str
    rounding: str
    layout: str
    ranges: Ranges | None
    experts: int | None
    counts: Array | None
    #: Of the result.
    shape: tuple[int, ...]
    shapes: Shapes
    parts: Parts | None
    where: Place
    target: Target


def quantize_front(
    front: Front, fmt: BlockFormat, options: Options, again: Repeated | None = None
) -> Any:
    """Make and quantise; the QTensor, or it and h.

    `again` is the call as ``_repeat.repeat`` knows it, where nothing is allocated.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As the public functions say.
    """
    if not isinstance(options.return_hidden, bool | np.bool_):
        raise TypeError(f"return_hidden must be True or False; got {options.return_hidden!r}")
    call = _checked(front, fmt, options)
    hidden = front.norm_out
    if call.where.golden:
        q, made = _on_host(call, options.return_hidden)
        hidden = made if hidden is None else hidden
    else:
        if hidden is None and options.return_hidden:
            spec = front.x.spec
            stream = call.where.stream
            hidden = arrays.empty(call.shape, spec.dtype, front.x, stream=stream)
        q = _in_kernels(call, hidden, again)
    if not options.return_hidden:
        return q
    return q, hidden.owner if isinstance(hidden, Array) else hidden


# Checks -------------------------------------------------------------------------------------------


def _checked(front: Front, fmt: BlockFormat, options: Options) -> _Call:
    x, stream = front.x, options.stream
    check_option("scale_layout", options.scale_layout, SCALE_LAYOUTS)
    encode = read_encode_scale(options.encode_scale, stream)
    check_rounding(options.scale_rounding, fmt, encode.given != "none")
    ranges = counts = experts = None
    if options.row_offsets is None:
        for name in ("expert_ids", "row_indices"):
            if getattr(options, name) is not None:
                raise ValueError(f"{name} belongs to row_offsets, which are missing")
        if options.row_counts is not None:
            counts = read_counts(options.row_counts, x, front.x_name, stream)
        shape = (*x.shape[:-1], front.columns)
        kind, shapes = _dense_shapes(encode, fmt, shape, options.scale_layout, x.spec)
    else:
        if options.row_counts is not None:
            raise ValueError("row_counts and row_offsets must not be given together")
        if encode.given == "amax":
            raise ValueError(
                "encode_scale must not be 'amax' here: the maximum over all experts would make "
                "each one's bytes depend on the others'; 'row_amax' and an array [E] do not"
            )
        if len(x.shape) != 2:
            raise ValueError(f"{front.x_name} must have two axes with row_offsets; got {x.shape}")
        if encode.array is not None and len(encode.array.shape) == 1:
            experts = encode.array.shape[0]
        ranges = read_ranges(
            options.row_offsets,
            options.expert_ids,
            options.row_indices,
            x,
            front.x_name,
            experts,
            stream,
        )
        shape = (ranges.rows, front.columns)
        kind = _grouped_kind(encode, fmt, experts, ranges, x)
        decode = (ranges.rows, 1) if kind in ("row", "row_amax") else (ranges.groups,)
        scales = layouts.scale_shape(fmt, shape, options.scale_layout)
        if options.scale_layout == "tcgen":
            scales = (layouts.allocated_tiles(ranges.rows, ranges.groups), *scales[1:])
        shapes = Shapes(layouts.codes_shape(fmt, shape), scales, decode)
    _check_residual(front, shape, ranges)
    inputs = (
        *front.inputs,
        *(() if ranges is None else ranges.named),
        ("row_counts", counts),
        ("encode_scale", encode.array),
    )
    parts = None
    if options.out is not None:
        parts = _checked_out(options.out, fmt, shape, options.scale_layout, shapes, ranges, inputs)
        if ranges is not None:
            shapes = shapes._replace(scales=parts.scales.shape)
    where = _place.place(inputs, stream)
    _check_all_apart(front, inputs, parts)
    groups = None if ranges is None else ranges.offsets
    target = Target(fmt, shape, options.scale_layout, groups, options.out, parts)
    return _Call(
        front,
        fmt,
        encode,
        kind,
        options.scale_rounding,
        options.scale_layout,
        ranges,
        experts,
        counts,
        shape,
        shapes,
        parts,
        where,
        target,
    )


@functools.lru_cache(maxsize=1024)
def _dense_kind(
    given: str, encode: Spec | None, fmt: BlockFormat, shape: tuple[int, ...], layout: str, x: Spec
) -> tuple[str, Shapes]:
    scales = layouts.scale_shape(fmt, shape, layout)
    lead = shape[:-1]
    shapes: dict[str, tuple[int, ...]] = {"array": (), "row": (*lead, 1)}
    if len(shape) == 3:
        shapes["batch"] = (shape[0],)
    elif encode is not None and encode.shape == (1,):
        shapes["array"] = (1,)
    kind = encode_kind(given, encode, fmt, shapes, x)
    decode: tuple[int, ...] = ()
    if kind in ("row", "row_amax"):
        decode = (*lead, 1)
    elif kind == "batch":
        decode = shapes["batch"]
    return kind, Shapes(layouts.codes_shape(fmt, shape), scales, decode)


def _dense_shapes(
    encode: Encode, fmt: BlockFormat, shape: tuple[int, ...], layout: str, x: Spec
) -> tuple[str, Shapes]:
    return _dense_kind(encode.given, encode.spec, fmt, shape, layout, x)


def _check_residual(front: Front, shape: tuple[int, ...], ranges: Ranges | None) -> None:
    x = front.x.spec
    if front.residual is not None:
        spec = front.residual.spec
        check_dtype("residual", spec, (x.dtype,), f", and {front.x_name} is of {x.dtype}")
        if spec.shape != x.shape:
            raise ValueError(
                f"residual must have the shape of {front.x_name}, {x.shape}; got {spec.shape}"
            )
        check_device("residual", spec, x, front.x_name)
        check_contiguous("residual", spec)
    elif front.residual_out is not None:
        raise ValueError("residual_out belongs to residual, which is missing")
    for name, array in (("residual_out", front.residual_out), ("norm_out", front.norm_out)):
        if array is not None:
            check_result(name, array.spec, shape, x.dtype, x)


def _in_place(front: Front) -> bool:
    """Whether residual_out is residual itself."""
    before, after = front.residual, front.residual_out
    if before is None or after is None:
        return False
    return before.pointer == after.pointer and before.spec[1:5] == after.spec[1:5]


def _checked_out(
    out: Any,
    fmt: BlockFormat,
    shape: tuple[int, ...],
    layout: str,
    shapes: Shapes,
    ranges: Ranges | None,
    inputs: tuple[tuple[str, Array | None], ...],
) -> Parts:
    if ranges is not None:
        rows, columns = shape
        return _out_parts(out, fmt, (rows, columns), layout, shapes.decode, ranges, inputs)
    parts = check_out_tensor(out, fmt)
    check_dense(out)
    specs = (
        out.shape,
        out.scale_layout,
        parts.codes.spec,
        parts.scales.spec,
        parts.decode_scale.spec,
    )
    check_out(specs, shape, layout, shapes.decode, inputs[0][1].spec)  # type: ignore[union-attr]
    return parts


def _check_all_apart(
    front: Front, inputs: tuple[tuple[str, Array | None], ...], parts: Parts | None
) -> None:
    """No output shares memory with another array, but residual_out may be residual itself."""
    in_place = _in_place(front)
    if in_place and any(name == "row_indices" and array is not None for name, array in inputs):
        raise ValueError(
            "residual_out must not be residual itself with row_indices: a row could be read after "
            "another one was written in its place"
        )
    named = [
        (name, array)
        for name, array in inputs
        if array is not None and not (in_place and name == "residual")
    ]
    written = [
        (name, array)
        for name, array in (("residual_out", front.residual_out), ("norm_out", front.norm_out))
        if array is not None
    ]
    if parts is not None:
        own = zip(("codes", "scales", "decode_scale"), parts[:3], strict=True)
        written += [(f"out.{name}", array) for name, array in own]
    check_apart(
        [name for name, _ in named],
        [array for _, array in named],
        [array for _, array in written],
        [name for name, _ in written],
    )


# Work ---------------------------------------------------------------------------------------------


def _on_host(call: _Call, return_hidden: bool) -> tuple[QTensor, Any]:
    """By the golden model; the tensor, and h as the caller's library has it."""
    from .. import golden
    from ..golden.grouped import assign_rows, gather_rows

    front, encode, ranges = call.front, call.encode, call.ranges
    x = arrays.host(front.x)
    h, sums = front.golden(x, None if front.residual is None else arrays.host(front.residual))
    options: dict[str, Any] = {
        "encode_scale": None if call.kind == "none" else encode.for_golden(),
        "scale_rounding": call.rounding,
        "scale_layout": call.layout,
    }
    if ranges is None:
        if call.counts is not None:
            beyond = np.arange(x.shape[1]) >= arrays.host(call.counts)[:, None]
            h, sums = (np.where(beyond[..., None], 0, v).astype(v.dtype) for v in (h, sums))
        results = golden.quantize(h, call.format, **options)
    else:
        starts = None if call.parts is None else call.parts.tile_starts
        given = ranges.for_golden()
        results = golden.grouped_quantize(
            h,
            call.format,
            **given,
            **options,
            tile_starts=None if starts is None else arrays.host(starts),
            tiles=call.shapes.scales[0] if call.layout == "tcgen" else None,
        )
        rows = assign_rows(ranges.rows, given["row_offsets"], given["expert_ids"], call.experts)
        live = rows.expert >= 0
        h, sums = (gather_rows(v, given["row_indices"], live) for v in (h, sums))
    if front.residual_out is not None:
        store_on_host(front.residual_out, sums)
    if front.norm_out is not None:
        store_on_host(front.norm_out, h)
    # Stored last: nothing of `out` has been read, and results are the caller's from here on.
    q = call.target.stored(results, front.x)
    made = None
    if return_hidden and front.norm_out is None:
        made = arrays.from_host(np.ascontiguousarray(h), front.x)
    return q, made


def _in_kernels(call: _Call, hidden: Array | None, again: Repeated | None) -> QTensor:
    """On a card or on the simulated machine."""
    front, where, ranges = call.front, call.where, call.ranges
    x = front.x
    stacked = len(call.shape) == 3 and (
        call.layout == "tcgen" or call.kind == "batch" or call.counts is not None
    )
    view = matrix_view(x.spec, stacked and ranges is None)
    if view is None:
        x = _place.copied_or_refused(front.x_name, x, where)
        view = matrix_view(x.spec, stacked and ranges is None) or {}
    result, codes, scales, decode = call.target.written(call.shapes, x, where.stream)
    residual = "none" if front.residual is None else "in" if front.residual_out is None else "out"
    steps = (view["row_stride"] | view["batch_stride"]) * x.spec.itemsize
    for array in (x, codes, scales, hidden, front.weight, front.residual, front.residual_out):
        steps |= 0 if array is None else array.pointer
    facts: dict[str, Any] = {
        **front.facts,
        "front": front.name,
        "format": call.format.name,
        "dtype": x.dtype,
        "columns": front.columns,
        "row_stride": view["row_stride"],
        "scale_layout": call.layout,
        "scale_rounding": call.rounding,
        "encode": call.kind,
        "residual": residual,
        "hidden": hidden is not None,
        "aligned": not steps & 15,
    }
    starts = None if call.parts is None else call.parts.tile_starts
    buffers: dict[str, Any] = {
        "x": x,
        "weight": front.weight,
        "residual": front.residual,
        "residual_out": front.residual_out,
        "hidden": hidden,
        "codes": codes,
        "scales": scales,
        "decode_scale": decode,
        "encode_scale": call.encode.value,
        "row_counts": call.counts,
        "row_offsets": None,
        "expert_ids": None,
        "row_indices": None,
        "tile_starts": starts,
    }
    plan = "fused_quantize"
    if ranges is None:
        facts |= {name: view[name] for name in ("rows", "batches", "batch_stride")}
        facts["counts_dtype"] = None if call.counts is None else call.counts.dtype
    else:
        plan = "grouped_fused_quantize"
        facts |= {
            "input_rows": x.shape[0],
            "rows": ranges.rows,
            "tiles": call.shapes.scales[0] if call.layout == "tcgen" else None,
            "experts": call.experts,
            **ranges.facts(),
            "starts_dtype": None if starts is None else starts.dtype,
        }
        buffers |= dict(ranges.named)
    outputs = ("codes", "scales", "decode_scale", "residual_out", "hidden")
    _place.launch(where, plan, facts, buffers, outputs=outputs, strided="x", again=again)
    return result
