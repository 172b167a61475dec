"""FlashInfer's layouts and offsets, made and read where the arrays are; not public.

``nvfp4.compat.flashinfer`` builds its functions on these and on the public ones. Nothing is read
back from a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .. import arrays, layouts
from ..arrays import Array
from ..layouts_flashinfer import flashinfer_tile_starts
from . import _place
from ._repeat import Repeated, remember, repeat

__all__ = [
    "Workspace",
    "padded_offsets",
    "repeated",
    "swizzled",
    "unswizzled",
    "workspace",
    "write",
]


class Workspace(NamedTuple):
    """What a product with FlashInfer's operands needs beside them, of the operands' library."""

    #: First scale tile of each range, int32, [G].
    tile_starts: Any
    #: 1, float32, (): the decode scale of operands that have none.
    one: Any


#: Of an array on a GPU: (library, device, address, ranges) -> its workspace. What is in it is a
#: function of the memory at that address, and every call writes it anew before it reads it; so it
#: may be used by all calls on that memory, on any stream and in any graph. It is never freed, so
#: that a graph that was captured with it stays right.
_workspaces: dict[tuple[str, int, int, int], Workspace] = {}


def workspace(like: Array, offsets: Array | None = None) -> Workspace:
    """The workspace of offsets of ranges, int32; without them it has no ranges.

    On a GPU it is not yet written: :func:`write` launches what does that.
    """
    if like.device is None:
        values = np.zeros(1, np.int32) if offsets is None else arrays.host(offsets)
        starts = arrays.from_host(flashinfer_tile_starts(values), like)
        return Workspace(starts, arrays.full((), 1.0, "float32", like))
    groups = 0 if offsets is None else offsets.shape[0] - 1
    key = (like.library, like.device, 0 if offsets is None else offsets.pointer, groups)
    found = _workspaces.get(key)
    if found is None:
        starts = arrays.empty((groups,), "int32", like)
        one = arrays.empty((), "float32", like)
        found = _workspaces[key] = Workspace(starts.owner, one.owner)
    return found


def write(space: Workspace, like: Array, offsets: Array | None = None) -> None:
    """Write a workspace on its GPU, on the stream of the call."""
    if like.device is None:
        return
    where = _place.place((("a", like), ("m_indptr", offsets)), None)
    one = arrays.as_array(space.one, "one")
    buffers = {
        "row_offsets": one if offsets is None else offsets,  # without ranges it is not read
        "tile_starts": arrays.as_array(space.tile_starts, "tile_starts"),
        "one": one,
    }
    facts = {"groups": 0 if offsets is None else offsets.shape[0] - 1}
    outputs = ("tile_starts", "one")
    _place.launch(where, "flashinfer_tile_starts", facts, buffers, outputs=outputs)


def repeated(
    call: Repeated, plans: tuple[str, ...], make: Callable[[], Any], *, stream: Any = None
) -> Any:
    """Make a call with ``out``, or repeat one like it; what `make` returns, or `out`.

    Parameters
    ----------
    call
        As ``_repeat.repeat`` takes it; all memory that is launched with is among its arguments, of
        which the last is ``out``.
    plans : tuple of str
        What `make` launches. A call that launched anything else is not remembered: something in it
        was repeated, or allocated.
    make : function
        The call itself, made of several.
    stream : optional
        The call's ``stream`` argument.
    """
    if repeat(call, stream):
        return call[2][-1]
    with _place.noted() as notes:
        result = make()
    if tuple(name for name, *_ in notes) == plans:
        launches = [one for _, planned, _, _ in notes for one in planned]
        where = notes[-1][2]
        buffers = {name: value for *_, given in notes for name, value in given.items()}
        remember(
            call,
            lambda: _place._launcher().prepare(launches, where.device, stream=where.stream),
            buffers,
            ("out", "tile_starts", "one"),
        )
    return result


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
