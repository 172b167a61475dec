"""grouped_quantize: quantisation by ranges of rows, one range an expert."""

from __future__ import annotations

from typing import Any

from .. import arrays, layouts
from .._parts import check_option, check_tile_starts
from ..arrays import Array
from ..formats import SCALE_LAYOUTS, BlockFormat, block_format
from ..tensor import Parts, QTensor
from . import _place
from ._encode import Encode, check_rounding, encode_kind, read_encode_scale
from ._out import (
    Shapes,
    Target,
    check_apart,
    check_grouped,
    check_out,
    check_out_tensor,
    own_ranges,
)
from ._ranges import Ranges, read_ranges
from ._repeat import repeat
from .dense import check_floats, matrix_view

__all__ = ["grouped_quantize"]


def grouped_quantize(
    x: Any,
    format: str | BlockFormat,
    *,
    row_offsets: Any,
    expert_ids: Any = None,
    row_indices: Any = None,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
    out: QTensor | None = None,
    stream: Any = None,
) -> QTensor:
    """Quantise ranges of rows, each with the encode scale of its expert and scale tiles of its own.

    Section 6 of the arithmetic definition. The bytes of each range are those of quantising it
    alone.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16, [M, K]
        K a multiple of the block (16 for nvfp4, 32 for the others); rows may lie apart, columns
        may not on a GPU.
    format : {"nvfp4", "mxfp4", "mxfp8_e4m3" (or "mxfp8"), "mxfp8_e5m2"} or BlockFormat
    row_offsets : array of int32, int64 or uint32, [G+1]
        Range i is rows row_offsets[i] to row_offsets[i+1] - 1 of the R rows of the result: from 0,
        not decreasing, at most R. Rows from row_offsets[G] on get zero codes and no scales.
    expert_ids : array of int32 or int64, [G], optional
        Expert of each range, by default i. A negative id switches the range off: zero codes, zero
        scales.
    row_indices : array of int32 or int64, [R], optional
        Row r of the result is row row_indices[r] of `x`; zero where there is no such row. By
        default R = M and r.
    encode_scale : optional
        None (1), a number, an array of float32: of shape () for all, [E] by expert, [R, 1] by row;
        ``"row_amax"`` for nvfp4. Finite and at least 2^-126; on a GPU, anything else counts as 1.
    scale_rounding : {"rceil", "floor", "ceil", "even"}
        As in :func:`nvfp4.quantize`.
    scale_layout : {"tcgen", "linear"}
        "tcgen": each range starts on a fresh tile of 128 scale rows, ceil(R/128) + min(G, R) tiles
        in all, unused ones 0. "linear": [R, K/V].
    out : QTensor, optional
        Of the same format, shape and layout, its ``groups`` being `row_offsets`; its arrays are
        written, every byte of them, and it is returned. Its ``tile_starts``, if it has them, say
        where each range's scale tiles begin.
    stream : optional
        None (the current stream of the library of `x`), an int, or an object with
        ``__cuda_stream__``.

    Returns
    -------
    QTensor
        Shape [R, K], groups = `row_offsets`; decode_scale [G], or [R, 1] for encode scales by row.

    Raises
    ------
    TypeError
        An argument is of the wrong kind or dtype.
    ValueError
        As in :func:`nvfp4.quantize`; offsets that do not start at 0, decrease or go beyond R, and
        ids from E on, where the host can read them; ``encode_scale="amax"``, which would let one
        expert's data change another's bytes.
    UnsupportedError
        There is no kernel for this GPU.
    """
    again = (
        "grouped_quantize",
        (format, scale_rounding, scale_layout),
        (x, row_offsets, expert_ids, row_indices, encode_scale, out),
    )
    if out is not None and repeat(again, stream):
        return out
    fmt = block_format(format)
    source = arrays.as_array(x, "x", stream=stream)
    check_floats("x", source.spec)
    if len(source.shape) != 2:
        raise ValueError(f"x must have shape [M, K]; got {source.shape}")
    layouts.block_count(fmt, source.shape[1])
    check_option("scale_layout", scale_layout, SCALE_LAYOUTS)
    encode = read_encode_scale(encode_scale, stream)
    if encode.given == "amax":
        raise ValueError(
            "encode_scale must not be 'amax' here: the maximum over all experts would make "
            "each one's bytes depend on the others'; 'row_amax' and an array [E] do not"
        )
    check_rounding(scale_rounding, fmt, encode.given != "none")
    experts = (
        encode.array.shape[0] if encode.array is not None and len(encode.array.shape) == 1 else None
    )
    ranges = read_ranges(row_offsets, expert_ids, row_indices, source, "x", experts, stream)
    kind = _grouped_kind(encode, fmt, experts, ranges, source)
    shape = (ranges.rows, source.shape[1])
    decode_shape = (ranges.rows, 1) if kind in ("row", "row_amax") else (ranges.groups,)
    inputs = (("x", source), *ranges.named, ("encode_scale", encode.array))
    parts = (
        None
        if out is None
        else _out_parts(out, fmt, shape, scale_layout, decode_shape, ranges, inputs)
    )
    where = _place.place(inputs, stream)
    scales_shape = layouts.scale_shape(fmt, shape, scale_layout)
    if scale_layout == "tcgen":
        tiles = layouts.allocated_tiles(ranges.rows, ranges.groups)
        scales_shape = (tiles if parts is None else parts.scales.shape[0], *scales_shape[1:])
    starts = None if parts is None else parts.tile_starts

    target = Target(fmt, shape, scale_layout, ranges.offsets, out, parts)
    if where.golden:
        from .. import golden

        results = golden.grouped_quantize(
            arrays.host(source),
            fmt,
            **ranges.for_golden(),
            encode_scale=None if kind == "none" else encode.for_golden(),
            scale_rounding=scale_rounding,
            scale_layout=scale_layout,
            tile_starts=None if starts is None else arrays.host(starts),
            tiles=scales_shape[0] if scale_layout == "tcgen" else None,
        )
        return target.stored(results, source)
    view = matrix_view(source.spec, False)
    if view is None:
        source = _place.copied_or_refused("x", source, where)
        view = matrix_view(source.spec, False) or {}
    shapes = Shapes(layouts.codes_shape(fmt, shape), scales_shape, decode_shape)
    result, codes, scales, decode = target.written(shapes, source, where.stream)
    steps = view["row_stride"] * source.spec.itemsize
    facts = {
        "format": fmt.name,
        "dtype": source.dtype,
        "input_rows": source.shape[0],
        "rows": ranges.rows,
        "columns": source.shape[1],
        "row_stride": view["row_stride"],
        "tiles": scales_shape[0] if scale_layout == "tcgen" else None,
        "scale_layout": scale_layout,
        "scale_rounding": scale_rounding,
        "encode": kind,
        "experts": experts,
        **ranges.facts(),
        "starts_dtype": None if starts is None else starts.dtype,
        "aligned": not (source.pointer | codes.pointer | scales.pointer | steps) & 15,
    }
    buffers = {
        "x": source,
        "codes": codes,
        "scales": scales,
        "decode_scale": decode,
        "encode_scale": encode.value,
        "tile_starts": starts,
        **dict(ranges.named),
    }
    outputs = ("codes", "scales", "decode_scale")
    _place.launch(
        where,
        "grouped_quantize",
        facts,
        buffers,
        outputs=outputs,
        strided="x",
        again=None if out is None else again,
    )
    return result


def _grouped_kind(
    encode: Encode, fmt: BlockFormat, experts: int | None, ranges: Ranges, x: Array
) -> str:
    shapes: dict[str, tuple[int, ...]] = {"array": ()}
    # Any length is right for [E]: nothing else says how many experts there are.
    shapes["expert"] = (experts if experts is not None else ranges.groups,)
    shapes["row"] = (ranges.rows, 1)
    return encode_kind(encode.given, encode.spec, fmt, shapes, x.spec)


def _out_parts(
    out: Any,
    fmt: BlockFormat,
    shape: tuple[int, int],
    scale_layout: str,
    decode: tuple[int, ...],
    ranges: Ranges,
    inputs: tuple[tuple[str, Array | None], ...],
) -> Parts:
    """The parts of a grouped QTensor to be written."""
    parts = check_out_tensor(out, fmt)
    check_grouped("out", parts, "row_offsets")  # else its other shapes would be complained of
    specs = (
        out.shape,
        out.scale_layout,
        parts.codes.spec,
        parts.scales.spec,
        parts.decode_scale.spec,
    )
    check_out(specs, shape, scale_layout, decode, inputs[0][1].spec)  # type: ignore[union-attr]
    own_ranges("out", parts, ranges.offsets, "row_offsets")
    if scale_layout == "tcgen" and ranges.offsets.device is None:
        check_tile_starts(parts.tile_starts, ranges.offsets, parts.scales.shape[0], written=True)
    names, given = zip(*inputs, ("out.tile_starts", parts.tile_starts), strict=True)
    check_apart(names, given, parts[:3])
    return parts
