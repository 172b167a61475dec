"""quantize: codes and block scales of an array."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from .. import arrays, layouts
from .._parts import FLOATS, check_dtype, check_option, contiguous_call
from ..arrays import Array, Spec
from ..formats import FORMATS, SCALE_LAYOUTS, SCALE_ROUNDINGS, BlockFormat, block_format
from ..tensor import Parts, QTensor
from . import _place
from ._encode import check_rounding, encode_kind, read_encode_scale
from ._out import Shapes, Target, check_apart, check_dense, check_out, check_out_tensor, extent
from ._repeat import repeat

__all__ = ["check_floats", "matrix_view", "quantize", "rows_of"]


def quantize(
    x: Any,
    format: str | BlockFormat,
    *,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
    row_counts: Any = None,
    out: QTensor | None = None,
    stream: Any = None,
) -> QTensor:
    """Quantise an array, block by block along its last axis.

    Sections 2, 3 and 5 of the arithmetic definition; the same bytes on every backend.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16, [..., K]
        K a multiple of the block (16 for nvfp4, 32 for the others). The tcgen layout takes [M, K],
        or [E, N, K], each matrix laid out by itself. On a GPU the last axis must be contiguous;
        the others may have any strides.
    format : {"nvfp4", "mxfp4", "mxfp8_e4m3" (or "mxfp8"), "mxfp8_e5m2"} or BlockFormat
    encode_scale : optional
        What the block scales are multiplied by: None (1), a number, or an array of float32: of
        shape (); [..., 1], one by row; [E] for x of [E, N, K]. Finite and at least 2^-126.
        ``"amax"``: 2688 / max |x| for nvfp4 (1 for the MX formats); ``"row_amax"``: the same by
        row, nvfp4 only. mxfp8 takes it as 1, whatever it is.
    scale_rounding : {"rceil", "floor", "ceil", "even"}
        How the scale of an MX block is rounded to a power of two; "rceil" alone for nvfp4 and with
        an encode scale.
    scale_layout : {"tcgen", "linear"}
        "tcgen": 128 x 4 tiles, as tensor cores and cuBLAS read them; "linear": [..., K/V].
    row_counts : array of int32, int64 or uint32, [E], optional
        For x of [E, capacity, K]: only the first row_counts[e] rows of matrix e count; the others
        are taken as zeros, so that their codes and scales are 0.
    out : QTensor, optional
        Of the same format, shape and layout; its arrays are written, every byte of them, and it is
        returned.
    stream : optional
        None (the current stream of the library of `x`), an int, or an object with
        ``__cuda_stream__``.

    Returns
    -------
    QTensor
        Its arrays are of the library of `x`. decode_scale is 1 / encode_scale: of shape (), of the
        shape of the encode scale, or [..., 1] for "row_amax"; for mxfp8 it is 1.

    Raises
    ------
    TypeError
        `x`, `encode_scale` or `out` is of the wrong kind or dtype.
    ValueError
        An unknown option, or one that the format does not take; a shape (the message names the
        multiple that K must be); an encode scale that is not finite or is below 2^-126, where the
        host can read it; `row_counts` that are not from 0 to the capacity, where the host can read
        them; arrays on different devices or overlapping ones; a tensor that requires
        grad while grad mode is on.
    UnsupportedError
        There is no kernel for this GPU.
    """
    if row_counts is not None:
        return _counted(
            x, format, encode_scale, scale_rounding, scale_layout, row_counts, out, stream
        )
    again = "quantize", (format, scale_rounding, scale_layout), (x, encode_scale, out)
    if out is not None and repeat(again, stream):
        return out
    fmt = block_format(format)
    if not (isinstance(scale_rounding, str) and isinstance(scale_layout, str)):
        # Before they key a cache: a list cannot.
        check_option("scale_rounding", scale_rounding, SCALE_ROUNDINGS)
        check_option("scale_layout", scale_layout, SCALE_LAYOUTS)
    source = arrays.as_array(x, "x", stream=stream)
    encode = read_encode_scale(encode_scale, stream)
    parts: Parts | None = None
    out_key = None
    if out is not None:
        parts = check_out_tensor(out, fmt)
        check_dense(out)
        out_key = (
            out.shape,
            out.scale_layout,
            parts.codes.spec,
            parts.scales.spec,
            parts.decode_scale.spec,
        )
    options = (fmt.name, encode.given, encode.spec, scale_rounding, scale_layout, out_key)
    call = _dense_call(source.spec, *options)
    where = _place.place((("x", source), ("encode_scale", encode.array)), stream)
    if parts is not None:
        inputs = (source, encode.array)
        check_apart(("x", "encode_scale"), inputs, parts[:3], extents=call.extents)
    target = Target(fmt, source.shape, scale_layout, None, out, parts)
    if where.golden:
        from .. import golden

        results = golden.quantize(
            arrays.host(source),
            fmt,
            encode_scale=None if call.encode == "none" else encode.for_golden(),
            scale_rounding=scale_rounding,
            scale_layout=scale_layout,
        )
        return target.stored(results, source)
    if call.view is None:
        source = _place.copied_or_refused("x", source, where)
        call = _dense_call(source.spec, *options)
    result, codes, scales, decode = target.written(call.shapes, source, where.stream)
    aligned = not (source.pointer | codes.pointer | scales.pointer | call.steps) & 15
    buffers = {
        "x": source,
        "codes": codes,
        "scales": scales,
        "decode_scale": decode,
        "encode_scale": encode.value,
    }
    _place.launch(
        where,
        "quantize",
        call.facts,
        buffers,
        outputs=("codes", "scales", "decode_scale"),
        strided="x",
        launches=call.launches,
        again=None if out is None else again,
        aligned=aligned,
    )
    return result


def _counted(
    x: Any,
    format: str | BlockFormat,
    encode_scale: Any,
    scale_rounding: str,
    scale_layout: str,
    row_counts: Any,
    out: QTensor | None,
    stream: Any,
) -> QTensor:
    """Quantise the rows that count."""
    again = (
        "quantize by counts",
        (format, scale_rounding, scale_layout),
        (x, row_counts, encode_scale, out),
    )
    if out is not None and repeat(again, stream):
        return out
    from ._fused import Front, Options, quantize_front

    fmt = block_format(format)
    source = arrays.as_array(x, "x", stream=stream)
    check_floats("x", source.spec)
    front = Front(
        "plain", source, "x", source.shape[-1] if source.shape else 0, lambda x, _: (x, x)
    )
    options = Options(
        *(None, None, None, row_counts, encode_scale, scale_rounding, scale_layout, False),
        *(out, stream),
    )
    counted: QTensor = quantize_front(front, fmt, options, None if out is None else again)
    return counted


class _DenseCall(NamedTuple):
    """What the metadata of a call determine."""

    encode: str
    shapes: Shapes
    view: Mapping[str, int] | None
    #: Bytes from row to row and from batch to batch, or-ed: whether all rows can be aligned.
    steps: int
    #: First and last byte of x, encode_scale, and out's arrays, from their pointers.
    extents: tuple[tuple[int, int], ...]
    facts: Mapping[str, Any]
    launches: dict[Any, Any]


@functools.lru_cache(maxsize=4096)
def _dense_call(
    x: Spec,
    format: str,
    given: str,
    encode: Spec | None,
    scale_rounding: str,
    scale_layout: str,
    out: tuple[Any, ...] | None,
) -> _DenseCall:
    """Every check that depends on metadata alone; done once for calls that are alike."""
    fmt = FORMATS[format]
    check_floats("x", x)
    check_option("scale_layout", scale_layout, SCALE_LAYOUTS)
    check_rounding(scale_rounding, fmt, given != "none")
    scales = layouts.scale_shape(fmt, x.shape, scale_layout)
    lead = x.shape[:-1]
    stack = len(x.shape) == 3
    shapes: dict[str, tuple[int, ...]] = {"array": (), "row": (*lead, 1)}
    if stack:
        shapes["batch"] = (x.shape[0],)
    elif encode is not None and encode.shape == (1,):
        shapes["array"] = (1,)
    kind = encode_kind(given, encode, fmt, shapes, x)
    decode = (
        (*lead, 1) if kind in ("row", "row_amax") else shapes["batch"] if kind == "batch" else ()
    )
    if out is not None:
        check_out(out, x.shape, scale_layout, decode, x)
    view = matrix_view(x, stack and (scale_layout == "tcgen" or kind == "batch"))
    strides = view or {"row_stride": 0, "batch_stride": 0}
    inputs = [x] if encode is None else [x, encode]
    return _DenseCall(
        kind,
        Shapes(layouts.codes_shape(fmt, x.shape), scales, decode),
        view,
        (strides["row_stride"] | strides["batch_stride"]) * x.itemsize,
        tuple(extent(spec) for spec in [*inputs, *(out or ())[2:]]),
        {
            "format": format,
            "dtype": x.dtype,
            **strides,
            "scale_layout": scale_layout,
            "scale_rounding": scale_rounding,
            "encode": kind,
        },
        {},
    )


def check_floats(name: str, spec: Spec) -> None:
    """The dtypes that can be quantised."""
    if spec.dtype == "float64":
        raise TypeError(
            f"{name} must be of dtype {', '.join(FLOATS)}; got float64: convert it to float32 "
            "first, so that the rounding is yours"
        )
    check_dtype(name, spec, FLOATS)


def matrix_view(spec: Spec, stacked: bool) -> dict[str, int] | None:
    """An array as batches of rows of contiguous columns, strides in elements; None: it is not.

    Parameters
    ----------
    spec : Spec
    stacked : bool
        Whether the first of three axes must stay a batch.
    """
    *lead, columns = spec.shape
    *steps, last = spec.strides
    size = spec.itemsize
    if 0 in spec.shape:
        batches, rows = (lead[0], lead[1]) if stacked else (1, math.prod(lead))
        return _view(batches, rows, columns, rows * columns, columns)
    if (columns > 1 and last != size) or any(step % size for step in steps):
        return None
    axes = [(n, step // size) for n, step in zip(lead, steps, strict=True)]
    if stacked:
        (batches, batch_step), (rows, row_step) = axes
        return _view(batches, rows, columns, batch_step, row_step)
    merged: list[tuple[int, int]] = []
    for n, step in axes:
        if n == 1:
            continue
        if merged and merged[-1][1] == n * step:
            merged[-1] = (merged[-1][0] * n, step)
        else:
            merged.append((n, step))
    if len(merged) > 2:
        return None
    (batches, batch_step), (rows, row_step) = [(1, 0)] * (2 - len(merged)) + merged
    return _view(batches, rows, columns, batch_step, row_step)


def _view(
    batches: int, rows: int, columns: int, batch_stride: int, row_stride: int
) -> dict[str, int]:
    # A stride over one row or one matrix is never taken: one value for it, and one plan.
    return {
        "batches": batches,
        "rows": rows,
        "columns": columns,
        "batch_stride": batch_stride if batches > 1 else 0,
        "row_stride": row_stride if rows > 1 else columns,
    }


def rows_of(name: str, a: Array, where: _place.Place) -> tuple[Array, int]:
    """An array as kernels can read its rows, and the elements from row to row."""
    view = matrix_view(a.spec, False)
    if view is None or view["batches"] != 1:
        if view is not None and where.machine is None:
            raise ValueError(
                f"{name} must have all rows at the same distance on a GPU; got strides "
                f"{a.spec.strides} bytes for shape {a.spec.shape}: pass "
                f"{contiguous_call(name, a.spec)}"
            )
        a = _place.copied_or_refused(name, a, where)
        return a, a.shape[-1]
    return a, view["row_stride"]
