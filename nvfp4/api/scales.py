"""interleave_scales and deinterleave_scales: linear block scales to the tcgen layout and back."""

from __future__ import annotations

import operator
from typing import Any

from .. import arrays
from .._parts import check_contiguous, check_dtype
from ..arrays import Array
from ..layouts import scale_k_tiles, scale_tiles
from . import _place
from ._out import check_apart, check_result, store
from ._repeat import Repeated, repeat

__all__ = ["deinterleave_scales", "interleave_scales"]

_BYTES = ("uint8", "float8_e4m3fn", "float8_e8m0fnu")


def interleave_scales(scales: Any, *, out: Any = None, stream: Any = None) -> Any:
    """Block scales in the tcgen layout, of linear ones.

    Section 5 of the arithmetic definition; the layout of cuBLAS's 128x4 scales. Rows up to the
    multiple of 128 and blocks up to the multiple of 4 are written as byte 0.

    Parameters
    ----------
    scales : array of uint8, [M, blocks] or [E, M, blocks]
        Also of float8_e4m3fn or float8_e8m0fnu, taken as bytes. Contiguous on a GPU.
    out : array of uint8, optional
        Of the shape of the result; written and returned.
    stream : optional
        None (the current stream of the library of `scales`), an int, or an object with
        ``__cuda_stream__``.

    Returns
    -------
    array of uint8, [ceil(M/128), ceil(blocks/4), 32, 4, 4], after E if there is one

    Raises
    ------
    TypeError
        `scales` or `out` is not an array of bytes.
    ValueError
        A shape that does not fit; arrays on different devices or overlapping ones.
    """
    again = "interleave_scales", (), (scales, out)
    if out is not None and repeat(again, stream):
        return out
    source = _bytes("scales", scales, stream)
    if len(source.shape) not in (2, 3):
        raise ValueError(
            f"scales must have shape [M, blocks] or [E, M, blocks]; got {source.shape}"
        )
    *lead, rows, blocks = source.shape
    shape = (*lead, scale_tiles(rows), scale_k_tiles(blocks), 32, 4, 4)
    return _rearrange(again, source, shape, (rows, blocks), out, stream)


def deinterleave_scales(
    scales: Any, shape: tuple[int, int], *, out: Any = None, stream: Any = None
) -> Any:
    """Linear block scales, of those in the tcgen layout.

    Section 5 of the arithmetic definition. The padding of `scales` is not looked at.

    Parameters
    ----------
    scales : array of uint8, [ceil(M/128), ceil(blocks/4), 32, 4, 4], or six axes with a leading E
        Also of float8_e4m3fn or float8_e8m0fnu, taken as bytes. Contiguous on a GPU.
    shape : (M, blocks)
        Rows, and blocks in a row.
    out : array of uint8, optional
        Of the shape of the result; written and returned.
    stream : optional
        None (the current stream of the library of `scales`), an int, or an object with
        ``__cuda_stream__``.

    Returns
    -------
    array of uint8, [M, blocks] or [E, M, blocks]

    Raises
    ------
    TypeError
        `scales` or `out` is not an array of bytes, or `shape` not two ints.
    ValueError
        `scales` does not have the shape that belongs to `shape`; arrays on different devices or
        overlapping ones.
    """
    try:
        rows, blocks = map(operator.index, shape)
    except (TypeError, ValueError):
        raise TypeError(f"shape must be two ints, (M, blocks); got {shape!r}") from None
    again = "deinterleave_scales", (rows, blocks), (scales, out)
    if out is not None and repeat(again, stream):
        return out
    source = _bytes("scales", scales, stream)
    if rows < 0 or blocks < 0:
        raise ValueError(f"shape must not be negative; got {shape}")
    tiles = (scale_tiles(rows), scale_k_tiles(blocks), 32, 4, 4)
    if len(source.shape) not in (5, 6) or source.shape[-5:] != tiles:
        raise ValueError(
            f"scales must have shape {tiles}, after a leading axis if there is one, for {rows} "
            f"rows of {blocks} blocks; got {source.shape}"
        )
    return _rearrange(
        again,
        source,
        (*source.shape[:-5], rows, blocks),
        (rows, blocks),
        out,
        stream,
    )


def _bytes(name: str, value: Any, stream: Any) -> Array:
    array = arrays.as_array(value, name, stream=stream)
    check_dtype(name, array.spec, _BYTES)
    check_contiguous(name, array.spec)
    if array.dtype == "uint8":
        return array
    return arrays.as_array(arrays.as_bytes(value, array), name, stream=stream)


def _rearrange(
    again: Repeated,
    source: Array,
    shape: tuple[int, ...],
    matrix: tuple[int, int],
    out: Any,
    stream: Any,
) -> Any:
    target = None
    if out is not None:
        target = arrays.as_array(out, "out", stream=stream)
        check_result("out", target.spec, shape, "uint8", source.spec)
        check_apart(("scales",), (source,), (target,), ("out",))
    where = _place.place((("scales", source),), stream)
    forward = again[0] == "interleave_scales"
    if where.golden:
        from .. import golden

        values = arrays.host(source)
        result = (
            golden.interleave_scales(values)
            if forward
            else golden.deinterleave_scales(values, matrix)
        )
        if target is None:
            return arrays.from_host(result, source)
        store(target, result)
        return out
    if target is None:
        target = arrays.empty(shape, "uint8", source, stream=where.stream)
    batched = len(source.shape) == (3 if forward else 6)
    facts = {"rows": matrix[0], "blocks": matrix[1], "batches": source.shape[0] if batched else 1}
    buffers = {"scales": source, "out": target}
    kept = None if out is None else again
    _place.launch(where, again[0], facts, buffers, outputs=("out",), again=kept)
    return target.owner if out is None else out
