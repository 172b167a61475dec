"""Tensor copies that pick four rows one by one (TMA gather, sm_100 and sm_120).

The tensor map is of 2 dimensions and its box is one row. The box's columns from `x` on of each of
four rows, in any order and also several times, arrive behind each other in shared memory; a row
outside of the tensor as zeros, as for ``tma``, and the mbarrier counts all four. The shared address
is a multiple of 128; with a swizzle, of 4 rows of it, so that two gathers fill the 8 rows of its
pattern, which goes by addresses. Source: PTX ISA, ``cp.async.bulk.tensor``, ``.tile::gather4``.
"""

from __future__ import annotations

from .instruction import instruction
from .machine import engines, thread


def _gather(space):
    return (
        f"cp.async.bulk.tensor.2d.shared::{space}.global.tile::gather4"
        ".mbarrier::complete_tx::bytes [$0], [$1, {$2, $3, $4, $5, $6}], [$7];"
    )


@instruction(
    "void(u32, i64, i32, i32, i32, i32, i32, u32)",
    asm=_gather("cta"),
    memory=True,
    min_cc=(10, 0),
)
def tma_gather4(target, descriptor, x, row0, row1, row2, row3, mbarrier):
    """Load columns from `x` on of four rows to shared `target`."""
    engines().tma_gather(thread(), target, descriptor, x, (row0, row1, row2, row3), mbarrier)


@instruction(
    "void(u32, i64, i32, i32, i32, i32, i32, u32)",
    asm=_gather("cluster"),
    memory=True,
    min_cc=(10, 0),
    below=(12, 0),
)
def tma_gather4_cluster(target, descriptor, x, row0, row1, row2, row3, mbarrier):
    """As :func:`tma_gather4`; `target` and `mbarrier` are of one block, any of the cluster."""
    rows = (row0, row1, row2, row3)
    engines().tma_gather_cluster(thread(), target, descriptor, x, rows, mbarrier)
