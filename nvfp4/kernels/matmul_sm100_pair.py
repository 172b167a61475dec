"""Products on Blackwell's tensor cores by pairs of blocks: tiles of 256 rows, dense and grouped.

The two blocks of a cluster make a tile together (cta_group 2): each brings 128 rows of A, half of
the tile's rows of B, and the scales of its rows of A and of all rows of B; block 0 issues the
products for both; each stores its own 128 rows. So a tile of 256 rows reads each row of B once.
The jobs are those of ``matmul_sm100``, and so are results. The 256 rows of a tile are of one range;
at the end of a range the second block may have none.

Constraints: as there, and: depth a multiple of 64 with two operands of four bits; scales of A for
one tile or more. Grid: a multiple of 2, in clusters of 2. Shared memory: ``pair_shared_bytes``.

Compile-time constants: those of ``matmul_sm100``, but SWAP.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import i64_of_u32
from ..ptx.cluster import cluster_arrive, cluster_rank, cluster_wait
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.mbarrier import fence_mbarrier_init, mbarrier_init
from ..ptx.memory import ld_shared_u32
from ..ptx.tcgen05 import (
    tcgen05_fence_after_thread_sync,
    tcgen05_fence_before_thread_sync,
)
from ..ptx.tcgen05_pair import (
    tcgen05_alloc_pair,
    tcgen05_dealloc_pair,
    tcgen05_relinquish_pair,
)
from .matmul_sm100 import (
    ARCHITECTURES,
    ISSUER,
    PRODUCER,
    SHARED_LIMIT,
    THREADS,
    grouped_matmul_sm100_kernel,
    matmul_sm100_kernel,
    shared_bytes,
    tile_constants,
)
from .matmul_sm100 import SLOW_VARIANTS as SINGLE_SLOW_VARIANTS
from .matmul_sm100 import VARIANTS as SINGLE_VARIANTS
from .sm100_jobs import issue, produce
from .sm100_layout import (
    address_base,
    aligned_base,
    full_base,
    made_base,
    tiles_across,
)
from .sm100_results import finish

STAGES = 4
ACCS = 2
COLUMNS = 512

#: Rows of a tile.
PAIR_ROWS = 256
#: What says where the ranges of a grouped product are.
OFFSETS_OF_RANGES = ("int32", "int64", "uint32")


def meet():
    """All threads of both blocks."""
    tcgen05_fence_before_thread_sync()
    cluster_arrive()
    cluster_wait()
    tcgen05_fence_after_thread_sync()


def run(maps, to, factors, of_groups, row_indices, shape, columns, depth, row_tiles):
    """A block of a pair: set up, the three jobs, give back."""
    griddepcontrol_launch_dependents()
    base = aligned_base()
    thread = cuda.threadIdx.x + 0
    warp = thread // 32
    full = full_base(base)
    made = made_base(base)
    if thread == 0:
        for i in range(STAGES):
            mbarrier_init(full + 8 * i, 1)
            mbarrier_init(full + 8 * (STAGES + i), 1)
        for i in range(ACCS):
            mbarrier_init(made + 8 * i, 1)
            # Four warps in each block.
            mbarrier_init(made + 16 + 8 * i, 8)
        fence_mbarrier_init()
    if warp == ISSUER:
        tcgen05_alloc_pair(address_base(base), COLUMNS)
        tcgen05_relinquish_pair()
    meet()
    memory = i64_of_u32(ld_shared_u32(address_base(base)))
    griddepcontrol_wait()
    total = row_tiles * tiles_across(columns)
    if warp == PRODUCER:
        scales = (maps[2], maps[3])
        produce(base, (maps[0], maps[1]), scales, of_groups, shape[1], columns, depth, total)
    elif warp == ISSUER:
        if cluster_rank() == 0:
            issue(base, memory, of_groups, shape[1], columns, depth, total)
    else:
        lane = thread % 32
        finish(base, memory, warp, lane, to, factors, of_groups, row_indices, shape, columns, total)
    meet()
    if warp == ISSUER:
        tcgen05_dealloc_pair(memory, COLUMNS)


def matmul_sm100_pair(
    a_map,
    b_map,
    a_scales_map,
    b_scales_map,
    a,
    a_scales,
    a_decode,
    b,
    b_scales,
    b_decode,
    alpha,
    alpha_number,
    out,
    out_scales,
    out_decode,
    e0,
    e1,
    e2,
    e3,
    rows,
    columns,
    depth,
    a_stride,
):
    run(
        (a_map, b_map, a_scales_map, b_scales_map),
        (out, b_decode, e0, e1, e2, e3),
        (alpha, alpha_number, a_decode),
        (out, out, out, 0, 0, 0),
        out,
        (rows, rows),
        columns,
        depth,
        (rows + PAIR_ROWS - 1) // PAIR_ROWS,
    )


def grouped_matmul_sm100_pair(
    a_map,
    b_map,
    a_scales_map,
    b_scales_map,
    a,
    a_scales,
    a_decode,
    b,
    b_scales,
    b_decode,
    row_offsets,
    expert_ids,
    row_indices,
    tile_starts,
    alpha,
    alpha_number,
    out,
    out_scales,
    out_decode,
    out_tile_starts,
    e0,
    e1,
    e2,
    e3,
    input_rows,
    rows,
    columns,
    depth,
    a_stride,
    groups,
    experts,
    tiles,
    row_tiles,
):
    run(
        (a_map, b_map, a_scales_map, b_scales_map),
        (out, b_decode, e0, e1, e2, e3),
        (alpha, alpha_number, a_decode),
        (row_offsets, expert_ids, tile_starts, groups, experts, tiles),
        row_indices,
        (input_rows, rows),
        columns,
        depth,
        row_tiles,
    )


# Kernels -----------------------------------------------------------------------------------------


def _kernel(name: str, body: Callable[..., None], like: Kernel) -> Kernel:
    constants = {**like.constants, "SWAP": (False,), "PAIR_OF_BLOCKS": (True,)}
    if "OFFSETS" in constants:
        # Not the kinds that tell where ranges are in another way.
        constants["OFFSETS"] = OFFSETS_OF_RANGES
    return Kernel(
        name,
        body,
        ("u64*", "u64*", *like.parameters),
        constants,
        architectures=ARCHITECTURES,
        threads=THREADS,
        blocks_per_sm=1,
    )


@functools.cache
def matmul_sm100_pair_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The dense kernel for an epilogue with arrays of these dtypes."""
    return _kernel("matmul_sm100_pair", matmul_sm100_pair, matmul_sm100_kernel(arrays))


@functools.cache
def grouped_matmul_sm100_pair_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The grouped kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_sm100_kernel(arrays)
    return _kernel("grouped_matmul_sm100_pair", grouped_matmul_sm100_pair, like)


MATMUL_SM100_PAIR = matmul_sm100_pair_kernel()
GROUPED_MATMUL_SM100_PAIR = grouped_matmul_sm100_pair_kernel()


def pair_shared_bytes(kind: str, tile_n: int, tile_k: int, stages: int, pair: str) -> int:
    """Dynamic shared memory of a block."""
    row = tile_k if kind == "mxf8" else tile_k // 2
    return shared_bytes(kind, tile_n, tile_k, stages, pair) - stages * tile_n // 2 * row


def pair_constants(kind: str, tile_n: int, tile_k: int, pair: str) -> dict:
    """The constants that follow from a tile's extents, with as many stages as fit."""
    stages = 12
    while pair_shared_bytes(kind, tile_n, tile_k, stages, pair) > SHARED_LIMIT:
        stages -= 1
    made = tile_constants(kind, tile_n, tile_k, pair, stages)
    return {**made, "PAIR_OF_BLOCKS": True}


def _paired(of: Kernel, like: Mapping[str, Any], tile_n: int, pair: str = "none") -> dict:
    """A variant of a kernel of single blocks, by pairs of blocks and with tiles of `tile_n`."""
    made = {**like, "PAIR": pair, **pair_constants(like["KIND"], tile_n, like["TILE_K"], pair)}
    return {name: made[name] for name in of.constants}


_DENSE = SINGLE_VARIANTS["matmul_sm100"]
_GROUPED = SINGLE_VARIANTS["grouped_matmul_sm100"]

VARIANTS = {
    "matmul_sm100_pair": (
        _paired(MATMUL_SM100_PAIR, _DENSE[0], 192),
        _paired(MATMUL_SM100_PAIR, _DENSE[1], 256),
    ),
    "grouped_matmul_sm100_pair": (
        _paired(GROUPED_MATMUL_SM100_PAIR, _GROUPED[0], 192),
        _paired(GROUPED_MATMUL_SM100_PAIR, _GROUPED[1], 128, "halves"),
    ),
}
SLOW_VARIANTS = {
    "matmul_sm100_pair": (
        _paired(MATMUL_SM100_PAIR, _DENSE[0], 64, "interleaved"),
        _paired(MATMUL_SM100_PAIR, _DENSE[1], 256, "halves"),
    ),
    "grouped_matmul_sm100_pair": tuple(
        _paired(GROUPED_MATMUL_SM100_PAIR, like, tile_n, pair)
        for like, tile_n, pair in zip(
            SINGLE_SLOW_VARIANTS["grouped_matmul_sm100"],
            (256, 128, 256, 64),
            ("halves", "interleaved", "none", "none"),
            strict=True,
        )
    ),
}
