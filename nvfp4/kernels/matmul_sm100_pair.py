"""Dense products on Blackwell's tensor cores by pairs of blocks: tiles of 256 rows.

The two blocks of a cluster make a tile together (cta_group 2): each brings 128 rows of A, half of
the tile's rows of B, and the scales of its rows of A and of all rows of B; block 0 issues the
products for both; each stores its own 128 rows. So a tile of 256 rows reads each row of B once.
The jobs are those of ``matmul_sm100``, and so are results.

Constraints: as there, and: no pairs in halves, depth a multiple of 64 with two operands of four
bits. Grid: a multiple of 2, in clusters of 2. Shared memory: ``shared_bytes`` of half of the
columns.

Compile-time constants: those of ``matmul_sm100``; TILE_N = MMA_N is a multiple of 16.
"""

from __future__ import annotations

import functools

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
    matmul_sm100_kernel,
    shared_bytes,
    tile_constants,
)
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


def meet():
    """All threads of both blocks."""
    tcgen05_fence_before_thread_sync()
    cluster_arrive()
    cluster_wait()
    tcgen05_fence_after_thread_sync()


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
    total = (rows + PAIR_ROWS - 1) // PAIR_ROWS * tiles_across(columns)
    of_groups = (out, out, out, 0, 0, 0)
    if warp == PRODUCER:
        scales = (a_scales_map, b_scales_map)
        produce(base, (a_map, b_map), scales, of_groups, rows, columns, depth, total)
    elif warp == ISSUER:
        if cluster_rank() == 0:
            issue(base, memory, of_groups, rows, columns, depth, total)
    else:
        to = (out, b_decode, e0, e1, e2, e3)
        factors = (alpha, alpha_number, a_decode)
        lane = thread % 32
        shape = (rows, rows)
        finish(base, memory, warp, lane, to, factors, of_groups, out, shape, columns, total)
    meet()
    if warp == ISSUER:
        tcgen05_dealloc_pair(memory, COLUMNS)


@functools.cache
def matmul_sm100_pair_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The kernel for an epilogue with arrays of these dtypes."""
    like = matmul_sm100_kernel(arrays)
    return Kernel(
        "matmul_sm100_pair",
        matmul_sm100_pair,
        ("u64*", "u64*", *like.parameters),
        {
            **like.constants,
            "PAIR": ("none", "interleaved"),
            "SWAP": (False,),
            "PAIR_OF_BLOCKS": (True,),
        },
        architectures=ARCHITECTURES,
        threads=THREADS,
        blocks_per_sm=1,
    )


MATMUL_SM100_PAIR = matmul_sm100_pair_kernel()


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


VARIANTS = {
    "matmul_sm100_pair": tuple(
        {
            **one,
            **pair_constants(one["KIND"], tile_n, one["TILE_K"], "none"),
            "GROUPED": False,
        }
        for one, tile_n in zip(SINGLE_VARIANTS["matmul_sm100"], (192, 256), strict=True)
    )
}
