"""FlashInfer's layouts and offsets, made and read where the arrays are; not public.

``nvfp4.compat.flashinfer`` builds its functions on these and on the public ones. Nothing is read
back from a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import arrays, layouts
from ..arrays import Array
from ..layouts_flashinfer import flashinfer_tile_starts
from . import _place

__all__ = ["padded_offsets", "swizzled", "tile_starts", "unswizzled"]

#: Of offsets on a GPU: (library, device, address, ranges) -> their first tiles. What is in there is
#: a function of the memory at that address, so it may be written by any call, on any stream and in
#: any graph, that reads the offsets there; and it is never freed, so that a graph that was captured
#: with it stays right.
_starts: dict[tuple[str, int, int, int], Array] = {}


def tile_starts(offsets: Array) -> Any:
    """First scale tile of each range by FlashInfer's rule: int32, [G], as `offsets` are."""
    groups = offsets.shape[0] - 1
    named = (("m_indptr", offsets),)
    where = _place.place(named, None)
    if where.golden:
        return arrays.from_host(flashinfer_tile_starts(arrays.host(offsets)), offsets)
    key = (offsets.library, offsets.device or 0, offsets.pointer, groups)
    starts = None if offsets.device is None else _starts.get(key)
    if starts is None:
        starts = arrays.empty((groups,), "int32", offsets, stream=where.stream)
        if offsets.device is not None:
            _starts[key] = starts
    facts = {"groups": groups, "offsets_dtype": offsets.dtype}
    buffers = {"row_offsets": offsets, "tile_starts": starts}
    _place.launch(where, "flashinfer_tile_starts", facts, buffers, outputs=("tile_starts",))
    return starts.owner


def padded_offsets(offsets: Array, rows: int) -> tuple[Any, Any]:
    """Offsets of ranges of a multiple of four rows, and where each row goes (-1: nowhere)."""
    groups = offsets.shape[0] - 1
    where = _place.place((("m_indptr", offsets),), None)
    destinations = arrays.full((rows,), -1, "int32", offsets)
    if where.golden:
        values = arrays.host(offsets).astype(np.int64)
        lengths = np.diff(values)
        padded = np.concatenate([[0], np.cumsum((lengths + 3) // 4 * 4)]).astype(np.int32)
        moved = np.arange(values[-1]) + np.repeat(padded[:-1] - values[:-1], lengths)
        host = arrays.host(arrays.as_array(destinations, "destinations"))
        host[: values[-1]] = moved
        return arrays.from_host(padded, offsets), destinations
    made = arrays.empty((groups + 1,), "int32", offsets, stream=where.stream)
    buffers = {
        "row_offsets": offsets,
        "padded": made,
        "destinations": arrays.as_array(destinations, "destinations"),
    }
    facts = {"groups": groups, "rows": rows}
    _place.launch(where, "pad_offsets", facts, buffers, outputs=("padded", "destinations"))
    return made.owner, destinations


def swizzled(name: str, scales: Array, tile: int) -> Any:
    """Scales of one byte or two, [M, C] or [E, M, C], in tiles of `tile` rows by 4 blocks.

    Returns an array of the same dtype, [E, ceil(M/tile) * ceil(C/4) * tile * 4], or without E.
    """
    *lead, rows, blocks = scales.shape
    down, across = -(-rows // tile), layouts.scale_k_tiles(blocks)
    shape = (*lead, down * across * tile * layouts.TILE_BLOCKS)
    where = _place.place(((name, scales),), None)
    if where.golden:
        from ..golden import interleave

        values = arrays.host(scales)
        words = values.view(f"u{scales.spec.itemsize}")
        made = (
            interleave.interleave_scales(words)
            if tile == 128
            else interleave.interleave_small_tiles(words)
        )
        return arrays.from_host(made.view(values.dtype).reshape(shape), scales)
    out = arrays.empty(shape, scales.dtype, scales, stream=where.stream)
    facts = {
        "rows": rows,
        "blocks": blocks,
        "batches": lead[0] if lead else 1,
        "tile": tile,
        "itemsize": scales.spec.itemsize,
    }
    _place.launch(where, "swizzle", facts, {"scales": scales, "out": out}, outputs=("out",))
    return out.owner


def unswizzled(name: str, scales: Array, shape: tuple[int, int]) -> Any:
    """The linear scales, [rows, blocks], of a buffer of bytes in tiles of 8 rows by 4 blocks."""
    rows, blocks = shape
    where = _place.place(((name, scales),), None)
    if where.golden:
        from ..golden.interleave import deinterleave_small_tiles

        tiled = (-(-rows // 8), layouts.scale_k_tiles(blocks), 8, 4)
        made = deinterleave_small_tiles(arrays.host(scales).reshape(tiled), shape)
        return arrays.from_host(made, scales)
    out = arrays.empty(shape, "uint8", scales, stream=where.stream)
    facts = {"rows": rows, "blocks": blocks}
    _place.launch(where, "unswizzle", facts, {"scales": scales, "out": out}, outputs=("out",))
    return out.owner
