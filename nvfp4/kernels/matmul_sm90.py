"""Products of many rows with prepared weights on Hopper: ``wgmma`` with weights in registers.

A block makes tiles of 256 columns of the product by CHUNK rows of A, of a list that it finds
itself: items of ``prepared_items``. A step is 64 of the depth; a stage of a ring in shared memory
has the rows of A of one step or two, as they are, codes and scales. Two consumer warpgroups make
bfloat16 of codes, which ``ldmatrix`` hands out in the order that calls for such rows, while
products before are under way: a group of four for a stripe of 64 columns, two stripes for each
warpgroup, weights as the first operand, in registers (``sm90_products``). Other warps bring rows
(``sm90_rows``) and have the weights brought (``sm90_producers``, ``sm90_weights``). Producers and
consumers go over the same items by themselves; full and empty stages are told by mbarriers, so
loads for the next item begin while the last one is written, and the next item is looked up while
the last products are under way.

Where A is quantised, four warps bring its rows, dequantised, one tells consumers of them, and one
asks for weights. Rows of float16 are copied, too; four warps more make two tiles of bfloat16 of
each, of which the second has what the first leaves (``sm90_half_rows``), and consumers multiply a
stripe's weights, made once, by both.

Results that are only scaled and rounded go to shared memory as rows (``sm90_plain_results``);
otherwise sums do, 32 rows of A at a time, so that results are stored along rows, or quantised: the
lanes of a block of columns have it side by side.

Where tiles are few, a cluster of SPLIT blocks shares the depth of one (``sm90_split``).

What bfloat16 cannot hold is multiplied again as in ``matmul_decode``.

Constraints: those of ``matmul_decode``, and codes and scales of B at multiples of 16 bytes; CHUNK
is at most 128 where A is quantised (no more than 64 without spilled registers, which is the plan's
limit). Grid: any number of blocks. Shared memory: :func:`shared_bytes`.

With COMPUTE "fp8" rows of A are e4m3 with one scale each, A_SCALE is "none", and products are of
e4m3: see ``fp8_operands``. MATRICES says which matrices this launch is for: see ``fp8_matrices``.

Compile-time constants: those of ``matmul_decode`` that are not its own; COMPUTE, MATRICES; CHUNK,
rows of A of a tile, a multiple of 8; HALF_TOKENS, half of it; STAGES of the ring, four or more
where rows are made; STEPS of a stage, 2 only where rows are multiplied as they are (WHOLE then says
whether the depth is a multiple of 128); BLOCKS_PER_SM, 2 where registers of small tiles allow it;
EPILOGUE, whether there is a function of the user's; SPLIT, blocks that share the depth of a tile
(1: none do; else GROUPED is False, the result is plain, CHUNK is a multiple of 8 * SPLIT, and the
grid has SPLIT blocks for each item); SHARE, HALF_TOKENS / SPLIT; THREADS: see :func:`threads_of`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_u32,
    and_u32,
    div_u32,
    eq_u32,
    ge_u32,
    i64_of_u32,
    lt_u32,
    max_u32,
    min_u32,
    mul_u32,
    ne_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.cluster import cluster_arrive, cluster_rank, cluster_wait
from ..ptx.control import bar_sync, griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_init
from ..ptx.memory import atom_max_shared_u32, ld_shared_u32, shared_base, st_shared_u32
from ..ptx.warp import syncwarp
from ..ptx.wgmma import setmaxnreg_inc, wgmma_keep, wgmma_wait, wgmma_zeros
from .fp8_matrices import is_ours, number_our_chunks
from .fp8_operands import less_of_matrix
from .matmul_decode import CODES_PARAMETERS, CODES_VARIANT
from .matmul_naive import grouped_matmul_kernel
from .prepared_codes import blank_rest
from .prepared_items import blank_rows_of_none, decode_of_matrix, locate
from .prepared_mma import matrix_records, record_bytes, step_bytes
from .products import result_columns
from .schedule import chunk_count, make_table, table_bytes
from .sm90_block import (
    CONSUMERS,
    barriers_at,
    bringers_of_stage,
    by_copies,
    is_plain,
    results_of_group,
    tellers_of_stage,
    threads_with_flags,
)
from .sm90_plain_results import store_plainly, tile_rows
from .sm90_producers import produce
from .sm90_products import factor_of_sums, multiply_steps, record_of_lane
from .sm90_results import PITCH, leave_and_store, repeat_slowly
from .sm90_split import first_step_of, part_of_item, sums_of_cluster
from .sm90_weights import (
    BLOCKS,
    behind_stages,
    block_of_stage,
    codes_at,
    records_at,
    two_parts,
)

PAIR = "none"
OUTPUT = "bfloat16"
SPLIT = 1
GROUPED = True
CHUNK = 128
HALF_TOKENS = 64
STAGES = 5
STEPS = 1
COMPUTE = "bfloat16"
MATRICES = "all"
BLOCKS_PER_SM = 1

ZERO = np.float32(0.0)
WARP = 0xFFFFFFFF


# Body --------------------------------------------------------------------------------------------


def matmul_sm90(
    codes_map,
    records_map,
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
    out_scales,
    out_decode,
    out_tile_starts,
    out_tiles,
):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()
    thread = u32_of_i64(cuda.threadIdx.x)
    warp = shr_u32(thread, 5)
    lane = and_u32(thread, 31)
    ring = shared_base()
    flags = add_u32(ring, barriers_at() - 16)
    full = add_u32(ring, barriers_at())
    empty = add_u32(full, 8 * STAGES)
    brought = add_u32(full, 16 * STAGES)
    table = add_u32(full, 24 * STAGES)
    row_blocks = shr_u32(add_u32(u32_of_i64(columns), 15), 4)
    steps = shr_u32(add_u32(u32_of_i64(depth), 63), 6)
    if PAIR == "halves":
        across = shr_u32(add_u32(shr_u32(row_blocks, 1), 7), 3)
    else:
        across = shr_u32(add_u32(row_blocks, 15), 4)
    if eq_u32(thread, 0):
        st_shared_u32(flags, 0)
        st_shared_u32(add_u32(flags, 4), 0)
        stage = full
        while lt_u32(stage, empty):
            mbarrier_init(stage, tellers_of_stage())
            mbarrier_init(add_u32(stage, 16 * STAGES), bringers_of_stage())
            mbarrier_init(add_u32(stage, 8 * STAGES), CONSUMERS // 32)
            stage = add_u32(stage, 8)
        fence_mbarrier_init()
    if GROUPED:
        scratch = add_u32(table, u32_of_i64(table_bytes(groups)))
        make_table(row_offsets, groups, rows, table, scratch, thread)
        if MATRICES != "all":
            matrix_bytes = matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            number_our_chunks(b_scales, expert_ids, experts, groups, table, matrix_bytes, thread)
        items = mul_u32(chunk_count(u32_of_i64(groups), table), across)
    else:
        items = mul_u32(div_u32(add_u32(u32_of_i64(rows), CHUNK - 1), CHUNK), across)
        if MATRICES != "all":
            if not is_ours(b_scales, 0, 0):
                items = u32_of_i64(0)
        cuda.syncthreads()
    to = (out, b_decode, e0, e1, e2, e3)
    codes = (out_scales, out_decode, out_tile_starts, out_tiles)
    a_rows = (row_indices, input_rows)
    ranges = (expert_ids, tile_starts, table, groups, experts, tiles, rows)
    if MATRICES == "others":
        pass  # the other launch did
    elif OUTPUT == "codes":
        blank_rest(codes, out, table, groups, rows, result_columns(columns))
    elif GROUPED:
        blank_rows_of_none(out, table, groups, rows, result_columns(columns))
    item = u32_of_i64(cuda.blockIdx.x)
    beyond = u32_of_i64(cuda.gridDim.x)
    rank = sub_u32(thread, thread)
    first_step = rank
    own_steps = steps
    if SPLIT > 1:
        rank = cluster_rank()
        item = div_u32(item, SPLIT)
        beyond = div_u32(beyond, SPLIT)
        first_step = first_step_of(rank, steps)
        own_steps = sub_u32(first_step_of(add_u32(rank, 1), steps), first_step)
    if ge_u32(warp, CONSUMERS // 32):
        work = (item, items, beyond, across, a_stride, depth, own_steps, first_step)
        ahead = sub_u32(warp, CONSUMERS // 32)
        barriers = (full, empty, brought)
        maps = (codes_map, records_map)
        produce(
            maps, a, a_scales, a_rows, ranges, work, ring, barriers, row_blocks, ahead, lane, flags
        )
    else:
        if by_copies():
            if BLOCKS_PER_SM == 2:
                setmaxnreg_inc(96)
            elif two_parts():
                setmaxnreg_inc(208)
            else:
                setmaxnreg_inc(224)
        elif COMPUTE == "fp8":
            setmaxnreg_inc(192)
        else:
            setmaxnreg_inc(184)
        consume(
            b_scales, to, codes, a_rows, ranges, (alpha, alpha_number, a_decode), item, items,
            beyond, across, columns, row_blocks, steps, own_steps, rank, ring, full, empty, warp,
            lane, flags,
        )  # fmt: skip
        # What cannot be right is written again. Here, where no register is short.
        bar_sync(3, threads_with_flags())
        everything = ne_u32(ld_shared_u32(flags), 0)
        again = everything | ne_u32(ld_shared_u32(add_u32(flags, 4)), 0)
        if SPLIT > 1:
            again = again & eq_u32(rank, 0)
        if again:
            group = shr_u32(warp, 2)
            index = and_u32(thread, 127)
            operands = (a, a_scales, b, b_scales, depth, a_stride)
            scalars = (alpha, alpha_number, a_decode)
            while lt_u32(item, items):
                here = locate(item, across, ranges, lane)
                repeat_slowly(
                    to, codes, ranges, a_rows, operands, scalars, here, columns, group, index,
                    everything,
                )  # fmt: skip
                item = add_u32(item, beyond)


def consume(
    b_scales, to, codes, a_rows, ranges, scalars, item, items, beyond,
    across, columns, row_blocks, steps, own_steps, rank, ring, full, empty, warp, lane, flags,
):  # fmt: skip
    """What a consumer warp does."""
    alpha, alpha_number, a_decode = scalars
    group = shr_u32(warp, 2)
    inner = and_u32(warp, 3)
    g = shr_u32(lane, 2)
    t = and_u32(lane, 3)
    index = add_u32(shl_u32(inner, 5), lane)
    results = add_u32(ring, behind_stages())
    base = add_u32(results, mul_u32(group, results_of_group()))
    corner = add_u32(mul_u32(shl_u32(t, 1), PITCH), shl_u32(add_u32(shl_u32(inner, 4), g), 2))
    corner = add_u32(base, corner)
    stage = sub_u32(warp, warp)
    parity = stage
    plain = False
    none = u32_of_i64(0)
    mine = block_of_stage(group, inner)
    code_ring = add_u32(ring, add_u32(codes_at(), shl_u32(lane, 4)))
    code_ring = add_u32(code_ring, mul_u32(mine, STEPS * step_bytes()))
    record_ring = add_u32(ring, add_u32(records_at(), record_of_lane(lane)))
    record_ring = add_u32(record_ring, mul_u32(mine, STEPS * record_bytes()))
    following = locate(min_u32(item, sub_u32(max_u32(items, 1), 1)), across, ranges, lane)
    while lt_u32(item, items):
        here = following
        expert = here[0]
        acc0 = wgmma_zeros(HALF_TOKENS)
        acc1 = wgmma_zeros(HALF_TOKENS)
        less = none
        if COMPUTE == "fp8":
            matrix_bytes = matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            less = less_of_matrix(b_scales, max(expert, 0) * matrix_bytes)
        rings = (ring, code_ring, record_ring, full, empty)
        acc0, acc1, stage, parity, before = multiply_steps(
            acc0, acc1, rings, own_steps, stage, parity, less, lane
        )
        item = add_u32(item, beyond)
        following = locate(min_u32(item, sub_u32(items, 1)), across, ranges, lane)
        acc0 = wgmma_wait(acc0, 0)
        acc1 = wgmma_keep(acc1)
        syncwarp(WARP)
        if eq_u32(lane, 0):
            mbarrier_arrive(before)
        rebase = ZERO
        of_matrix = ZERO
        if expert >= 0:
            header_at = expert * matrix_records(i64_of_u32(row_blocks), i64_of_u32(steps))
            rebase = factor_of_sums(b_scales, header_at)
            of_matrix = decode_of_matrix(to[1], expert)
            if rebase == ZERO:
                plain = True
        factors = (alpha, alpha_number, a_decode, rebase, of_matrix)
        if SPLIT > 1:
            thread = add_u32(shl_u32(warp, 5), lane)
            sum0, sum1 = sums_of_cluster(ring, acc0, acc1, rank, thread)
            where = (base, group, inner, lane)
            mine = part_of_item(here, rank)
            store_plainly(to, sum0, sum1, a_rows, factors, mine, columns, where, 0, 0)
            if tile_rows() > 64:
                store_plainly(to, sum0, sum1, a_rows, factors, mine, columns, where, 1, 64)
            cluster_arrive()
            cluster_wait()
        elif is_plain():
            where = (base, group, inner, lane)
            store_plainly(to, acc0, acc1, a_rows, factors, here, columns, where, 0, 0)
            if CHUNK > 64:
                store_plainly(to, acc0, acc1, a_rows, factors, here, columns, where, 1, 64)
            if CHUNK > 128:
                store_plainly(to, acc0, acc1, a_rows, factors, here, columns, where, 2, 128)
        else:
            where = (base, corner, group, index, lane)
            to_codes = (codes, ranges)
            leave_and_store(to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 0, 0)
            if CHUNK > 32:
                leave_and_store(
                    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 1, 32
                )
            if CHUNK > 64:
                leave_and_store(
                    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 2, 64
                )
            if CHUNK > 96:
                leave_and_store(
                    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 3, 96
                )
            if CHUNK > 128:
                leave_and_store(
                    to, to_codes, acc0, acc1, a_rows, factors, here, columns, where, 4, 128
                )
    if plain:
        atom_max_shared_u32(add_u32(flags, 4), 1)


# Kernels -----------------------------------------------------------------------------------------


#: Threads of the largest blocks.
MOST_THREADS = 512


def threads_of(a_element: str, dtype: str = "bfloat16") -> int:
    """Threads of a block: rows that are made, split, or put into order take four warps more."""
    return 384 if a_element == "none" and dtype == "bfloat16" else MOST_THREADS


def shared_bytes(
    *, tokens: int, stages: int, step: int, groups: int | None, row: int = 128, results: int = 64
) -> int:
    """Bytes of shared memory of a block.

    `stages` are those of one step; `step` is the bytes of 16 rows of the weights in a step, codes
    and scales; `row` those of a row of A; `groups` is None in a dense product; `results` are rows
    of results that are there at a time: 64, or all of a smaller tile, where they are plain.
    """
    table = 0 if groups is None else table_bytes(groups) + 8 * (MOST_THREADS // 32)
    return stages * (tokens * row + BLOCKS * step + 24) + 2 * results * PITCH + 16 + table


_SHARED_WITH_NAIVE = (
    *("A_ELEMENT", "A_SCALE", "A_LAYOUT", "B_ELEMENT", "B_SCALE", "INPUT"),
    *("ALPHA", "DECODE_A", "DECODE_B", "PAIR", "OFFSETS", "IDS", "INDICES", "A_STARTS"),
    *("OUTPUT", "ELEMENT", "SCALE", "LAYOUT", "STARTS", "ROUNDING", "UNIT"),
)
_HERE: dict[str, tuple[Any, ...]] = {
    "INPUT": ("bfloat16", "float16"),
    "EPILOGUE": ("none", "function"),
    "GROUPED": (True, False),
    "CHUNK": tuple(range(16, 161, 8)),
    "HALF_TOKENS": tuple(range(8, 81, 4)),
    "STAGES": tuple(range(2, 17)),
    "STEPS": (1, 2),
    "WHOLE": (True, False),
    "THREADS": (384, 512),
    "A_SCALE": ("e4m3", "e8m0", "none"),
    "COMPUTE": ("bfloat16", "fp8"),
    "MATRICES": ("all", "narrow", "others"),
    "BLOCKS_PER_SM": (1, 2),
    "SPLIT": (1, 2, 4, 8),
    "SHARE": tuple(range(4, 81, 4)),
}


@functools.cache
def matmul_sm90_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_kernel(arrays)
    operands, rest = like.parameters[:12], like.parameters[16:]
    return Kernel(
        "matmul_sm90",
        matmul_sm90,
        ("u64*", "u64*", *operands, "u8*", *rest[:-1], *CODES_PARAMETERS),
        {name: like.constants[name] for name in _SHARED_WITH_NAIVE} | _HERE,
        architectures=("sm_90a",),
    )


MATMUL_SM90 = matmul_sm90_kernel()


def variant(b: str = "mxfp4", tokens: int = 128, **more: object) -> dict:
    """Constants of a usual program, to be changed by name."""
    scale = "e4m3" if b == "nvfp4" else "e8m0"
    rows = (str(more.get("A_ELEMENT", "none")), str(more.get("INPUT", "bfloat16")))
    return {
        **{"A_ELEMENT": "none", "A_SCALE": "e8m0", "A_LAYOUT": "linear", "INPUT": "bfloat16"},
        **{"B_ELEMENT": "e2m1" if b.endswith("fp4") else b[-4:], "B_SCALE": scale},
        **{"ALPHA": "value", "DECODE_A": "none", "DECODE_B": "batch", "PAIR": "none"},
        **{"OFFSETS": "int32", "IDS": "none", "INDICES": "int32", "A_STARTS": "none"},
        **{"OUTPUT": "bfloat16", "EPILOGUE": "none"},
        **{"GROUPED": True, "CHUNK": tokens, "HALF_TOKENS": tokens // 2},
        **{"STAGES": 5, "STEPS": 1, "WHOLE": True},
        **{"ELEMENT": "e2m1", "SCALE": "e8m0", "LAYOUT": "linear", "STARTS": "none"},
        **{"ROUNDING": "rceil", "UNIT": True},
        **{"COMPUTE": "bfloat16", "MATRICES": "all"},
        **{"SPLIT": 1, "SHARE": tokens // 2, "BLOCKS_PER_SM": 1},
        **{"THREADS": threads_of(*rows)},
        **more,
    }


_FP8: dict[str, Any] = {"A_ELEMENT": "e4m3", "A_SCALE": "none", "DECODE_A": "row"}

_DENSE: dict[str, Any] = {"GROUPED": False, "DECODE_B": "scalar", "INDICES": "none"}

VARIANTS = {
    "matmul_sm90": (
        variant(),
        variant("nvfp4", 32, BLOCKS_PER_SM=2),
        variant("mxfp8_e4m3", 64, **_DENSE, SPLIT=4, SHARE=8, STAGES=4, STEPS=2),
        variant(tokens=120, WHOLE=False, STAGES=4),
        variant(**_FP8, COMPUTE="fp8", MATRICES="narrow"),
        variant(PAIR="interleaved", **CODES_VARIANT),
        variant(tokens=144, **_DENSE, INPUT="float16", STAGES=4),
    ),
}
_QUANTIZED: dict[str, Any] = {"A_LAYOUT": "tcgen", "DECODE_A": "group", "INDICES": "none"}
_QUANTIZED |= {"A_STARTS": "int32"}

SLOW_VARIANTS = {
    "matmul_sm90": (
        variant(tokens=112, **_FP8, MATRICES="others"),
        variant("nvfp4", 64, **{**_QUANTIZED, "A_ELEMENT": "e2m1", "A_SCALE": "e4m3"}),
        variant("mxfp4", 40, **_QUANTIZED, A_ELEMENT="e4m3", PAIR="interleaved"),
        variant("mxfp8_e4m3", 128),
        variant("nvfp4", 144, INPUT="float16", STAGES=4),
        variant("mxfp8_e4m3", 96, INPUT="float16", PAIR="halves", **CODES_VARIANT),
        variant("mxfp8_e5m2", 128, **_DENSE, INPUT="float16", STAGES=3, SPLIT=4, SHARE=16),
    )
}
