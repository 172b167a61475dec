"""The seed's arrays as QTensors: which format they hold, and what shape belongs to it.

The seed takes the format from the dtypes of codes and scales and from ``SF_VECTOR_SIZE``. So do
these functions; where an array library has no eight-bit floats, bytes are taken, and what they
leave open (which scales, which codes) is asked for.
"""

from __future__ import annotations

import threading
from typing import Any

from ... import arrays, layouts
from ..._parts import check_contiguous, check_dtype
from ...arrays import Array, Spec
from ...formats import MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat, block_format
from ...tensor import QTensor

__all__ = [
    "as_array",
    "check_shape",
    "one",
    "operand",
    "operand_format",
    "output_format",
    "target",
    "vector_size",
]

_SCALES = {"float8_e4m3fn": 16, "float8_e8m0fnu": 32}


def as_array(name: str, value: Any, axes: str, ctx: Any) -> Array:
    """An array of as many axes as `axes` names, such as ``"M N"``."""
    array = arrays.as_array(value, name, stream=ctx)
    wanted = axes.split()
    if len(array.shape) != len(wanted):
        raise ValueError(f"{name} must have shape [{', '.join(wanted)}]; got {array.shape}")
    return array


def check_shape(name: str, spec: Spec, shape: tuple[int, ...], why: str = "") -> None:
    """The one shape that an array can have."""
    if spec.shape != shape:
        raise ValueError(f"{name} must have shape {shape}{why}; got {spec.shape}")


def vector_size(name: str, scales: Spec, given: int | None) -> int:
    """``SF_VECTOR_SIZE``: 16 for scales of e4m3, 32 for e8m0.

    Raises
    ------
    TypeError
        `scales` are neither of the two, nor bytes.
    ValueError
        `given` is another number, or not that of the dtype; or it is None where bytes do not say.
    """
    check_dtype(name, scales, (*_SCALES, "uint8"))
    if given not in (None, 16, 32) or isinstance(given, bool):
        raise ValueError(
            f"SF_VECTOR_SIZE must be 16 (nvfp4) or 32 (mxfp4 and mxfp8); got {given!r}"
        )
    own = _SCALES.get(scales.dtype, given)
    if own is None:
        raise ValueError(
            f"SF_VECTOR_SIZE must be given, 16 or 32, where {name} is of uint8: it says whether "
            "the bytes are e4m3 or e8m0"
        )
    if given not in (None, own):
        raise ValueError(f"SF_VECTOR_SIZE must be {own} for {name} of {scales.dtype}; got {given}")
    return own


def output_format(name: str, output: Spec, x_name: str, columns: int, size: int) -> BlockFormat:
    """The format of codes that are to be written, of rows of `columns` elements.

    Raises
    ------
    TypeError
        `output` is of another dtype.
    ValueError
        Its last axis is neither half of `columns` nor, for mxfp8, as long; `columns` is not a
        multiple of the block.
    """
    check_dtype(name, output, ("uint8", "float8_e4m3fn"))
    float8 = output.dtype == "float8_e4m3fn"
    if float8 and size != 32:
        raise ValueError(f"{name} of float8_e4m3fn (mxfp8) needs scales of e8m0; got e4m3")
    # Bytes as long as the input are mxfp8's, of a library that has no float8.
    wide = float8 or (size == 32 and columns > 0 and output.shape[-1] == columns)
    fmt = NVFP4 if size == 16 else MXFP8_E4M3 if wide else MXFP4
    if columns % fmt.block:
        raise ValueError(
            f"{x_name} must have a number of columns that is a multiple of {fmt.block} for "
            f"{fmt.name}, whose last block may not be partial (the seed takes multiples of 8 for "
            f"nvfp4 and then has no maximum of its own for that block); got {columns}"
        )
    width = columns // fmt.codes_per_byte
    if output.shape[-1] != width:
        raise ValueError(
            f"{name} must have {width} columns for {columns} columns of {x_name} in {fmt.name}; "
            f"got shape {output.shape}"
        )
    return fmt


def target(
    names: tuple[str, str],
    codes: Array,
    scales: Array,
    fmt: BlockFormat,
    *,
    rows: int,
    columns: int,
    scale_layout: str,
    ctx: Any,
    groups: Any = None,
    tile_starts: Any = None,
    decode_shape: tuple[int, ...] = (),
) -> QTensor:
    """A QTensor over the caller's output arrays, with a decode scale of its own, to be written."""
    shape = layouts.scale_shape(fmt, (rows, columns), scale_layout)
    if groups is None:
        check_shape(names[1], scales.spec, shape, f" for {fmt.name} of {(rows, columns)}")
    elif len(scales.shape) != 5 or scales.shape[1:] != shape[1:]:
        raise ValueError(
            f"{names[1]} must have shape [tiles, {', '.join(map(str, shape[1:]))}] for {fmt.name} "
            f"of {columns} columns; got {scales.shape}"
        )
    for name, array in zip(names, (codes, scales), strict=True):
        check_contiguous(name, array.spec)
    decode = arrays.empty(decode_shape, "float32", codes, stream=arrays.stream_pointer(codes, ctx))
    return QTensor(
        arrays.as_bytes(codes.owner, codes),
        arrays.as_bytes(scales.owner, scales),
        decode.owner,
        fmt.name,
        (rows, columns),
        scale_layout,
        groups,
        tile_starts,
    )


def operand_format(
    name: str, codes: Spec, size: int, given: str | BlockFormat | None
) -> BlockFormat:
    """The format of an operand of a product.

    Raises
    ------
    TypeError
        `codes` are of another dtype.
    ValueError
        `given` has other blocks than `size` says, or other codes than the dtype.
    """
    check_dtype(name, codes, ("uint8", "float8_e4m3fn", "float8_e5m2"))
    by_dtype = {"float8_e4m3fn": MXFP8_E4M3, "float8_e5m2": MXFP8_E5M2}.get(codes.dtype)
    own = by_dtype or (NVFP4 if size == 16 else MXFP4)
    if own.block != size:
        raise ValueError(f"{name} of {codes.dtype} (mxfp8) needs scales of e8m0; got e4m3")
    if given is None:
        return own
    fmt = block_format(given)
    if fmt.block != size or (by_dtype is not None and fmt is not by_dtype):
        raise ValueError(
            f"{name} of {codes.dtype} with a scale for {size} elements cannot be {fmt.name}"
        )
    return fmt


def operand(
    names: tuple[str, str],
    codes: Any,
    scales: Any,
    fmt: BlockFormat,
    scale_layout: str,
    decode_scale: Any,
) -> QTensor:
    """An operand of a product, with a decode scale of 1."""
    try:
        return QTensor.from_parts(
            codes, scales, fmt, decode_scale=decode_scale, scale_layout=scale_layout
        )
    except (TypeError, ValueError) as error:
        raise type(error)(f"{names[0]} and {names[1]}: {error}") from None


#: A scalar 1 by library, device and stream: kernels only read it. It was written in the order of
#: its stream, so that each stream has its own. None is given back: a captured graph may read it.
_ones: dict[tuple[str, int | None, int], Any] = {}
_filling = threading.Lock()


def one(like: Array, ctx: Any) -> Any:
    """A float32 scalar 1 of the library and on the stream of a call, for kernels to read."""
    handle = arrays.stream_pointer(like, ctx)
    key = like.library, like.device, handle
    if key in _ones:
        return _ones[key]
    with _filling:
        if key in _ones:
            return _ones[key]
        made = arrays.full((), 1.0, "float32", like, stream=handle)
        # What is allocated while a stream is captured belongs to the graph.
        if like.device is None or not _capturing(handle, like.device):
            _ones[key] = made
        return made


def _capturing(handle: int, device: int) -> bool:
    from ... import driver

    with driver.on_device(device):
        return driver.is_capturing(handle)
