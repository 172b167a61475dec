"""Tiles of ``matmul_sm90`` whose depth a cluster of blocks shares.

Each block multiplies a run of the stages. Its sums go to its shared memory, where the ring was,
four of a thread side by side, and each block adds up those of a share of the rows of A: of all
blocks, in the order of their ranks, so the same input gives the same bytes. Nothing goes through
global memory, and no second kernel runs.

Compile-time constants: CHUNK, HALF_TOKENS; STEPS of a stage; SPLIT, blocks of a cluster; SHARE,
HALF_TOKENS / SPLIT.
"""

from __future__ import annotations

from ..ptx.arith import (
    add_u32,
    div_u32,
    min_u32,
    mul_u32,
    shl_u32,
    shr_u32,
    sub_u32,
)
from ..ptx.cluster import cluster_arrive, cluster_wait, map_shared
from ..ptx.control import bar_sync
from ..ptx.wgmma import add_acc, ld_cluster_acc_quads, st_shared_acc_quads

CHUNK = 64
HALF_TOKENS = 32
SPLIT = 1
SHARE = 32
STEPS = 1

#: Threads that have sums, and bytes of a quad of all of them.
CONSUMERS = 256
PITCH = 4096


def first_step_of(rank, steps):
    """Where a block's steps begin: behind those of the ranks before, with a stage."""
    if STEPS == 2:
        stages = shr_u32(add_u32(steps, 1), 1)
        return shl_u32(div_u32(mul_u32(rank, stages), SPLIT), 1)
    else:
        return div_u32(mul_u32(rank, steps), SPLIT)


def part_of_item(here, rank):
    """The share of an item whose results a block stores."""
    expert, owner, first, count, block, tile_row = here
    skip = min_u32(mul_u32(rank, CHUNK // SPLIT), count)
    return expert, owner, add_u32(first, skip), sub_u32(count, skip), block, tile_row


def sums_of_cluster(ring, acc0, acc1, rank, thread):
    """Sums of the cluster's blocks for this block's share of the rows, of both stripes."""
    mine = add_u32(ring, shl_u32(thread, 4))
    second = add_u32(mine, HALF_TOKENS // 4 * PITCH)
    bar_sync(4, CONSUMERS)  # products of all have read the ring
    st_shared_acc_quads(mine, acc0, PITCH)
    st_shared_acc_quads(second, acc1, PITCH)
    cluster_arrive()
    cluster_wait()
    skip = mul_u32(rank, CHUNK // 8 // SPLIT * PITCH)
    sum0 = sum_of_blocks(add_u32(mine, skip))
    sum1 = sum_of_blocks(add_u32(second, skip))
    return sum0, sum1


def sums_of_block(at, rank):
    """What a block has at this place."""
    return ld_cluster_acc_quads(map_shared(at, rank), PITCH, SHARE)


def sum_of_blocks(at):
    """Sums of what the blocks have at this place, in the order of their ranks."""
    total = sums_of_block(at, 0)
    for rank in range(1, SPLIT):
        total = add_acc(total, sums_of_block(at, rank))
    return total
