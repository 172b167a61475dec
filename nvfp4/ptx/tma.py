"""Copies of boxes of a tensor between global and shared memory (TMA), by a tensor map.

One thread issues a copy. `descriptor` is the address of a tensor map (``nvfp4.ptx.tensor_map``) in
global memory, 64-byte aligned; coordinates count elements, innermost first, and may be beyond the
end, those of loads negative too: what is outside of the tensor arrives as zero, and is not stored.
The box begins a multiple of 16 bytes from the start of a row (an H200 calls anything else, and a
store with a negative coordinate, an illegal instruction). The shared address is a multiple of 128;
with a swizzle, of 8 rows of it (256, 512, 1024 bytes). A load counts the
bytes of the whole box at its mbarrier, outside parts too; stores are groups as in ``bulk``. A map
that a kernel has written is read behind :func:`fence_tensormap_acquire`, executed once in a block.
Source: PTX ISA, ``cp.async.bulk.tensor``, ``fence.proxy.tensormap``.
"""

from __future__ import annotations

from .instruction import instruction
from .machine import engines, thread

_HOPPER = (9, 0)


def _load(rank, hint=""):
    coordinates = ", ".join(f"${i + 2}" for i in range(rank))
    policy = f", ${rank + 3}" if hint else ""
    return (
        f"cp.async.bulk.tensor.{rank}d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        f"{hint} [$0], [$1, {{{coordinates}}}], [${rank + 2}]{policy};"
    )


def _store(rank):
    coordinates = ", ".join(f"${i + 1}" for i in range(rank))
    return (
        f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
        f" [$0, {{{coordinates}}}], [${rank + 1}];"
    )


_HINT = ".L2::cache_hint"


@instruction("void(u32, i64, i32, u32)", asm=_load(1), memory=True, min_cc=_HOPPER)
def tma_load_1d(target, descriptor, x, mbarrier):
    """Load the box at element x to shared `target`."""
    engines().tma_load(thread(), target, descriptor, (x,), mbarrier)


@instruction("void(u32, i64, i32, i32, u32)", asm=_load(2), memory=True, min_cc=_HOPPER)
def tma_load_2d(target, descriptor, x, y, mbarrier):
    """Load the box at (x, y), x along the innermost dimension."""
    engines().tma_load(thread(), target, descriptor, (x, y), mbarrier)


@instruction("void(u32, i64, i32, i32, i32, u32)", asm=_load(3), memory=True, min_cc=_HOPPER)
def tma_load_3d(target, descriptor, x, y, z, mbarrier):
    """Load the box at (x, y, z)."""
    engines().tma_load(thread(), target, descriptor, (x, y, z), mbarrier)


@instruction("void(u32, i64, i32, i32, i32, i32, u32)", asm=_load(4), memory=True, min_cc=_HOPPER)
def tma_load_4d(target, descriptor, x, y, z, w, mbarrier):
    """Load the box at (x, y, z, w)."""
    engines().tma_load(thread(), target, descriptor, (x, y, z, w), mbarrier)


@instruction(
    "void(u32, i64, i32, i32, i32, i32, i32, u32)", asm=_load(5), memory=True, min_cc=_HOPPER
)
def tma_load_5d(target, descriptor, x, y, z, w, v, mbarrier):
    """Load the box at (x, y, z, w, v)."""
    engines().tma_load(thread(), target, descriptor, (x, y, z, w, v), mbarrier)


@instruction("void(u32, i64, i32, i32, u32, i64)", asm=_load(2, _HINT), memory=True, min_cc=_HOPPER)
def tma_load_2d_hint(target, descriptor, x, y, mbarrier, policy):
    """:func:`tma_load_2d` with a cache policy of ``bulk``."""
    engines().tma_load(thread(), target, descriptor, (x, y), mbarrier)


@instruction(
    "void(u32, i64, i32, i32, i32, u32, i64)", asm=_load(3, _HINT), memory=True, min_cc=_HOPPER
)
def tma_load_3d_hint(target, descriptor, x, y, z, mbarrier, policy):
    """:func:`tma_load_3d` with a cache policy of ``bulk``."""
    engines().tma_load(thread(), target, descriptor, (x, y, z), mbarrier)


@instruction("void(i64, i32, u32)", asm=_store(1), memory=True, min_cc=_HOPPER)
def tma_store_1d(descriptor, x, source):
    """Store shared `source` to the box at element x, in the thread's open bulk group."""
    engines().tma_store(thread(), descriptor, (x,), source)


@instruction("void(i64, i32, i32, u32)", asm=_store(2), memory=True, min_cc=_HOPPER)
def tma_store_2d(descriptor, x, y, source):
    """Store to the box at (x, y)."""
    engines().tma_store(thread(), descriptor, (x, y), source)


@instruction("void(i64, i32, i32, i32, u32)", asm=_store(3), memory=True, min_cc=_HOPPER)
def tma_store_3d(descriptor, x, y, z, source):
    """Store to the box at (x, y, z)."""
    engines().tma_store(thread(), descriptor, (x, y, z), source)


@instruction("void(i64, i32, i32, i32, i32, u32)", asm=_store(4), memory=True, min_cc=_HOPPER)
def tma_store_4d(descriptor, x, y, z, w, source):
    """Store to the box at (x, y, z, w)."""
    engines().tma_store(thread(), descriptor, (x, y, z, w), source)


@instruction("void(i64, i32, i32, i32, i32, i32, u32)", asm=_store(5), memory=True, min_cc=_HOPPER)
def tma_store_5d(descriptor, x, y, z, w, v, source):
    """Store to the box at (x, y, z, w, v)."""
    engines().tma_store(thread(), descriptor, (x, y, z, w, v), source)


# Tensor maps -------------------------------------------------------------------------------------


@instruction(
    "void(i64)",
    asm="fence.proxy.tensormap::generic.acquire.gpu [$0], 128;",
    memory=True,
    min_cc=_HOPPER,
)
def fence_tensormap_acquire(descriptor):
    """See the map at this address as a kernel or thread has written and released it.

    Executed by the thread that copies, or by one that a barrier orders before it. The simulated
    machine demands it of every block: in this package, maps are written by a kernel.
    """
    engines().tensormap_acquire(thread(), descriptor)


@instruction(
    "void()", asm="fence.proxy.tensormap::generic.release.gpu;", memory=True, min_cc=_HOPPER
)
def fence_tensormap_release():
    """Publish the maps that this thread has written by ordinary stores."""
    engines().tensormap_release(thread())


@instruction("void(i64)", asm="prefetch.tensormap [$0];", memory=True, min_cc=_HOPPER)
def prefetch_tensormap(descriptor):
    """Bring the map to its cache."""
    engines().tensormap_prefetch(thread(), descriptor)
