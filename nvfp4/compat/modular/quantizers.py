"""The seed's quantisers and its rearrangement of block scales, for tensors in the 5-D layout."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import api, arrays
from ..._parts import check_dtype, check_offsets
from ...api import _place
from ...arrays import Array
from ...layouts import scale_k_tiles, scale_tiles
from ...tensor import QTensor
from ._options import also_named, check_fixed, check_threads, in_words_of
from ._tensors import as_array, output_format, target, vector_size

__all__ = [
    "block_scales_interleave",
    "block_scales_interleave_fp4",
    "grouped_quantize_dynamic_scaled_fp4_async",
    "quantize_dynamic_block_scaled",
    "quantize_dynamic_scaled_fp4_async",
    "quantize_dynamic_scaled_fp4fp8",
]


def quantize_dynamic_block_scaled(
    output_device: Any,
    scales_device: Any,
    input_device: Any,
    tensor_sf: Any,
    ctx: Any = None,
    *,
    SF_VECTOR_SIZE: int | None = None,
    target: str = "gpu",
) -> QTensor:
    """Quantise rows to nvfp4, mxfp4 or mxfp8; :func:`nvfp4.quantize` into the caller's arrays.

    The format is that of the dtypes, as in the seed: output of uint8 with scales of e4m3 is nvfp4,
    with scales of e8m0 mxfp4; output of float8_e4m3fn with scales of e8m0 is mxfp8.

    Parameters
    ----------
    output_device : array of uint8, [M, N/2], or of float8_e4m3fn, [M, N]
        Written. [M, N] of uint8 is mxfp8 too, where a library has no float8.
    scales_device : array, [ceil(M/128), ceil(N/(4V)), 32, 4, 4], or [M, N/V]
        Written, every byte. Of float8_e4m3fn or float8_e8m0fnu, or of uint8 together with
        `SF_VECTOR_SIZE`. Two axes are the seed's layout for CDNA4: mxfp4 then rounds its scales by
        "even", as the seed does there, and `tensor_sf` must be 1.
    input_device : array of bfloat16 (also float16 or float32), [M, N]
        N a multiple of the block V.
    tensor_sf : number, or array of float32 of shape ()
        What block scales are multiplied by: the *inverse* of a checkpoint's input scale. mxfp8
        takes it as 1. Finite, at least 2^-126.
    ctx : optional
        A stream: None (the current one of the input's library), an int, or an object with
        ``__cuda_stream__``.
    SF_VECTOR_SIZE : {16, 32}, optional
        V; needed with scales of uint8.
    target : str
        A label for the seed's traces, not used.

    Returns
    -------
    QTensor
        Over `output_device` and `scales_device`, decode_scale 1 / `tensor_sf`.

    Raises
    ------
    TypeError
        A dtype that is none of these.
    ValueError
        Shapes that do not fit, N that is no multiple of V among them; a `tensor_sf` such as 0.
    """
    scales = arrays.as_array(scales_device, "scales_device", stream=ctx)
    size = vector_size("scales_device", scales.spec, SF_VECTOR_SIZE)
    layout = "linear" if len(scales.shape) == 2 else "tcgen"
    names = "output_device", "scales_device", "input_device"
    return _quantize(names, output_device, scales, input_device, size, layout, tensor_sf, ctx)


@also_named(output="output_tile", scales="scales_tile", input="input_tile")
def quantize_dynamic_scaled_fp4fp8(
    ctx: Any,
    output_tile: Any,
    scales_tile: Any,
    input_tile: Any,
    num_cols: int,
    num_cols_padded: int,
    tensor_sf: Any = 1.0,
    *,
    SF_VECTOR_SIZE: int = 16,
    num_max_threads: int = 512,
) -> QTensor:
    """Quantise rows to nvfp4, mxfp4 or mxfp8, by the seed's kernel without tensor copies.

    Parameters
    ----------
    ctx, output_tile, scales_tile, input_tile, tensor_sf
        As in :func:`quantize_dynamic_block_scaled`, the scales in five axes.
    num_cols, num_cols_padded : int
        Both N, as the seed's own dispatcher passes them.
    SF_VECTOR_SIZE : {16, 32}
    num_max_threads : int
        Checked; it changes nothing here.

    Returns
    -------
    QTensor

    Raises
    ------
    TypeError, ValueError
        As :func:`quantize_dynamic_block_scaled`.
    """
    check_threads("num_max_threads", num_max_threads)
    view = as_array("input_tile", input_tile, "M N", ctx)
    for name, value in (("num_cols", num_cols), ("num_cols_padded", num_cols_padded)):
        if value != view.shape[1]:
            raise ValueError(
                f"{name} must be the number of columns of input_tile, {view.shape[1]}; got {value}"
            )
    scales = arrays.as_array(scales_tile, "scales_tile", stream=ctx)
    size = vector_size("scales_tile", scales.spec, SF_VECTOR_SIZE)
    names = "output_tile", "scales_tile", "input_tile"
    return _quantize(names, output_tile, scales, input_tile, size, "tcgen", tensor_sf, ctx)


@also_named(
    output_tensor="output_tensor_tile",
    scales_tensor="scales_tensor_tile",
    input_tensor="input_tensor_tile",
)
def quantize_dynamic_scaled_fp4_async(
    ctx: Any,
    output_tensor_tile: Any,
    scales_tensor_tile: Any,
    input_tensor_tile: Any,
    tensor_sf: Any = 1.0,
    *,
    SF_VECTOR_SIZE: int = 16,
) -> QTensor:
    """Quantise rows to nvfp4; the seed's kernel by tensor copies (TMA).

    Parameters
    ----------
    ctx, output_tensor_tile, scales_tensor_tile, input_tensor_tile, tensor_sf
        As in :func:`quantize_dynamic_block_scaled`, the scales e4m3 in five axes.
    SF_VECTOR_SIZE : {16}

    Returns
    -------
    QTensor

    Raises
    ------
    TypeError, ValueError
        As :func:`quantize_dynamic_block_scaled`; another format than nvfp4.
    """
    scales = arrays.as_array(scales_tensor_tile, "scales_tensor_tile", stream=ctx)
    check_dtype("scales_tensor_tile", scales.spec, ("float8_e4m3fn", "uint8"))
    check_fixed("SF_VECTOR_SIZE", SF_VECTOR_SIZE, 16, "this function makes nvfp4")
    names = "output_tensor_tile", "scales_tensor_tile", "input_tensor_tile"
    output, x = output_tensor_tile, input_tensor_tile
    return _quantize(names, output, scales, x, 16, "tcgen", tensor_sf, ctx)


def _quantize(
    names: tuple[str, str, str],
    output: Any,
    scales: Array,
    x: Any,
    size: int,
    layout: str,
    tensor_sf: Any,
    ctx: Any,
) -> QTensor:
    codes = as_array(names[0], output, "M columns", ctx)
    rows, columns = as_array(names[2], x, "M N", ctx).shape
    fmt = output_format(names[0], codes.spec, names[2], columns, size)
    if codes.shape[0] != rows:
        raise ValueError(
            f"{names[0]} must have the {rows} rows of {names[2]}; got shape {codes.shape}"
        )
    scale = _encode_scale("tensor_sf", tensor_sf)
    even = fmt.name == "mxfp4" and layout == "linear"
    if even and scale is not None:
        raise ValueError(
            "tensor_sf must be 1 for mxfp4 with scales of two axes, the seed's format for CDNA4, "
            f"which has no factor of the tensor; got {tensor_sf!r:.40}"
        )
    out = target(
        names[:2], codes, scales, fmt, rows=rows, columns=columns, scale_layout=layout, ctx=ctx
    )
    words = {"x": names[2], "out.codes": names[0], "out.scales": names[1]}
    with in_words_of({**words, "encode_scale": "tensor_sf"}):
        return api.quantize(
            x,
            fmt,
            encode_scale=scale,
            scale_rounding="even" if even else "rceil",
            scale_layout=layout,
            out=out,
            stream=ctx,
        )


def _encode_scale(name: str, value: Any) -> Any:
    """``tensor_sf`` as an encode scale: None for 1, which is what kernels need not read."""
    if value is None or isinstance(value, str):
        raise TypeError(f"{name} must be a number or a float32 array; got {value!r}")
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        if not value > 0:
            raise ValueError(
                f"{name} must be finite and at least 2^-126 (a factor of 0 would make every value "
                f"NaN); got {value!r}"
            )
        return None if value == 1 else value
    return value


def grouped_quantize_dynamic_scaled_fp4_async(
    output_tensor: Any,
    scales_tensor: Any,
    input_tensor: Any,
    row_offsets: Any,
    scales_offsets: Any,
    expert_ids: Any,
    sf_tensor: Any,
    ctx: Any = None,
    *,
    row_indices: Any = None,
    num_threads: int = 128,
    k_tiles_per_block: int | None = None,
    SF_VECTOR_SIZE: int | None = None,
) -> QTensor:
    """Quantise ranges of rows, one range an expert: :func:`nvfp4.grouped_quantize`.

    Scale row r of range i is row 128 * start_i + r - row_offsets[i] of the 5-D scales, with start_i
    = row_offsets[i] // 128 + scales_offsets[i].

    Parameters
    ----------
    output_tensor : array of uint8, [R, N/2], or of float8_e4m3fn (mxfp8; also uint8), [R, N]
        Written, every row; rows that no range covers, and those of a range that is switched off,
        are 0.
    scales_tensor : array, [tiles, ceil(N/(4V)), 32, 4, 4]
        Written, every byte: tiles that no range owns are 0. dtypes as in
        :func:`quantize_dynamic_block_scaled`. ceil(R/128) + min(E, R) tiles always suffice.
    input_tensor : array of bfloat16 (also float16 or float32), [R, N], or [T, N] with `row_indices`
    row_offsets : array of uint32 (also int32 or int64), [E+1]
    scales_offsets : array of uint32 (also int32 or int64), [E], or None
        None: each range on the next free tile, which is what the seed's callers pass, without
        reading an array, and with the fastest kernel.
    expert_ids : array of int32 (also int64), [E]
        Expert of each range; negative: the range is switched off.
    sf_tensor : array of float32, [number of experts]
        Factor of the block scales, by expert id.
    ctx : optional
        A stream, as in :func:`quantize_dynamic_block_scaled`.
    row_indices : array of int32 (also int64), [R], optional
        Row r of the output is made of row row_indices[r] of the input; 0 where there is none.
    num_threads, k_tiles_per_block : int
        Tuning numbers of the seed's kernel: checked; they change nothing here.
    SF_VECTOR_SIZE : {16, 32}, optional
        Needed with scales of uint8.

    Returns
    -------
    QTensor
        Over `output_tensor` and `scales_tensor`, grouped by `row_offsets`; decode_scale [E].

    Raises
    ------
    TypeError
        A dtype that is none of these.
    ValueError
        As :func:`quantize_dynamic_block_scaled` and :func:`nvfp4.grouped_quantize`; ranges whose
        tiles overlap or lie outside of `scales_tensor`, where the host can read the offsets.
    """
    check_threads("num_threads", num_threads)
    if k_tiles_per_block is not None and (
        not isinstance(k_tiles_per_block, int) or k_tiles_per_block not in (1, 2, 4, 8)
    ):
        raise ValueError(f"k_tiles_per_block must be None, 1, 2, 4 or 8; got {k_tiles_per_block!r}")
    names = "output_tensor", "scales_tensor"
    output = as_array(names[0], output_tensor, "R columns", ctx)
    source = as_array("input_tensor", input_tensor, "R N", ctx)
    offsets = as_array("row_offsets", row_offsets, "E+1", ctx)
    scales = arrays.as_array(scales_tensor, names[1], stream=ctx)
    size = vector_size(names[1], scales.spec, SF_VECTOR_SIZE)
    fmt = output_format(names[0], output.spec, "input_tensor", source.shape[1], size)
    rows = source.shape[0]
    if row_indices is not None:
        rows = as_array("row_indices", row_indices, "R", ctx).shape[0]
    if output.shape[0] != rows:
        raise ValueError(
            f"{names[0]} must have a row for each of input_tensor, or of row_indices, {rows}; got "
            f"shape {output.shape}"
        )
    groups = offsets.shape[0] - 1
    if groups < 0:
        raise ValueError("row_offsets must have E + 1 elements, one at least; got none")
    if offsets.device is None:
        check_offsets("row_offsets", offsets, rows)
    starts = None
    if scales_offsets is not None:
        starts = _tile_starts(
            offsets, as_array("scales_offsets", scales_offsets, "E", ctx), groups, ctx
        )
    factors = as_array("sf_tensor", sf_tensor, "E", ctx)
    out = target(
        names,
        output,
        scales,
        fmt,
        rows=rows,
        columns=source.shape[1],
        scale_layout="tcgen",
        ctx=ctx,
        groups=row_offsets,
        tile_starts=starts,
        decode_shape=(groups,),
    )
    words = {"x": "input_tensor", "out.codes": names[0], "out.scales": names[1]}
    with in_words_of({**words, "encode_scale": "sf_tensor"}):
        return api.grouped_quantize(
            input_tensor,
            fmt,
            row_offsets=row_offsets,
            expert_ids=expert_ids,
            row_indices=row_indices,
            encode_scale=factors.owner,
            out=out,
            stream=ctx,
        )


def _tile_starts(offsets: Array, scales_offsets: Array, groups: int, ctx: Any) -> Any:
    """First scale tile of each range: row_offsets[i] // 128 + scales_offsets[i]."""
    for name, array in (("row_offsets", offsets), ("scales_offsets", scales_offsets)):
        check_dtype(name, array.spec, ("int32", "int64", "uint32"))
    if scales_offsets.shape[0] != groups:
        raise ValueError(
            f"scales_offsets must have {groups} elements, one less than row_offsets; got "
            f"{scales_offsets.shape[0]}"
        )
    if offsets.device is None:
        first = arrays.host(offsets)[:-1].astype(np.int64) // 128
        return arrays.from_host(first + arrays.host(scales_offsets).astype(np.int64), offsets)
    named = (("row_offsets", offsets), ("scales_offsets", scales_offsets))
    where = _place.place(named, ctx)
    starts = arrays.empty((groups,), "int64", offsets, stream=where.stream)
    facts = {
        "groups": groups,
        "offsets_dtype": offsets.dtype,
        "starts_dtype": scales_offsets.dtype,
    }
    buffers = {**dict(named), "tile_starts": starts}
    _place.launch(where, "seed_tile_starts", facts, buffers, outputs=("tile_starts",))
    return starts.owner


# Scales ------------------------------------------------------------------------------------------


def block_scales_interleave(
    output_scales_device: Any,
    input_scales_device: Any,
    ctx: Any = None,
    *,
    SF_VECTOR_SIZE: int | None = None,
    target: str = "gpu",
) -> Any:
    """Block scales [M, S] in the 5-D layout: :func:`nvfp4.interleave_scales`.

    Parameters
    ----------
    output_scales_device : array, [ceil(M/128), ceil(S/4), 32, 4, 4]
        Of the dtype of the input. Written, every byte: padding is 0.
    input_scales_device : array of float8_e4m3fn, float8_e8m0fnu or uint8, [M, S]
    ctx : optional
        A stream, as in :func:`quantize_dynamic_block_scaled`.
    SF_VECTOR_SIZE : {16, 32}, optional
        It must be that of the dtype; the bytes are moved alike.
    target : str
        A label for the seed's traces, not used.

    Returns
    -------
    array
        `output_scales_device`.

    Raises
    ------
    TypeError
        Other dtypes, or two different ones.
    ValueError
        Shapes that do not fit.
    """
    source = arrays.as_array(input_scales_device, "input_scales_device", stream=ctx)
    if SF_VECTOR_SIZE is not None or source.dtype != "uint8":
        vector_size("input_scales_device", source.spec, SF_VECTOR_SIZE)
    names = "output_scales_device", "input_scales_device"
    return _interleave(names, output_scales_device, input_scales_device, ctx)


@also_named(input_scales="input_scales_tile", output_scales="output_scales_tile")
def block_scales_interleave_fp4(
    ctx: Any,
    input_scales_tile: Any,
    output_scales_tile: Any,
    *,
    SF_VECTOR_SIZE: int = 16,
    num_max_threads: int = 1024,
) -> Any:
    """Block scales [M, S] in the 5-D layout; as :func:`block_scales_interleave`.

    Parameters
    ----------
    ctx, input_scales_tile, output_scales_tile
        As there, in another order.
    SF_VECTOR_SIZE : {16, 32}
        The bytes are moved alike, so that scales of e8m0 go with its default, too.
    num_max_threads : int
        Checked; it changes nothing here.

    Returns
    -------
    array
        `output_scales_tile`.

    Raises
    ------
    TypeError, ValueError
        As :func:`block_scales_interleave`.
    """
    check_threads("num_max_threads", num_max_threads)
    if SF_VECTOR_SIZE not in (16, 32):
        raise ValueError(f"SF_VECTOR_SIZE must be 16 or 32; got {SF_VECTOR_SIZE!r}")
    names = "output_scales_tile", "input_scales_tile"
    return _interleave(names, output_scales_tile, input_scales_tile, ctx)


def _interleave(names: tuple[str, str], output: Any, source: Any, ctx: Any) -> Any:
    view = as_array(names[1], source, "M S", ctx)
    result = as_array(names[0], output, "tiles k_tiles 32 4 4", ctx)
    check_dtype(names[1], view.spec, ("uint8", "float8_e4m3fn", "float8_e8m0fnu"))
    check_dtype(names[0], result.spec, (view.dtype,), f", and {names[1]} is of {view.dtype}")
    rows, blocks = view.shape
    shape = (scale_tiles(rows), scale_k_tiles(blocks), 32, 4, 4)
    if result.shape != shape:
        raise ValueError(
            f"{names[0]} must have shape {shape} for {names[1]} of {view.shape}; got {result.shape}"
        )
    api.interleave_scales(source, out=arrays.as_bytes(output, result), stream=ctx)
    return output
