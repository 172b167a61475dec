"""What the warps of a product with tensor memory do: bring operands, multiply, store results.

Warp 4 brings codes by tensor copies and scales by bulk copies, TILE_K of the depth a stage. One
thread of warp 5 copies the scales to tensor memory and issues the products. Warps 0 to 3 read the
accumulators, 32 lanes each, multiply by the factors, call the epilogue and store. Three rings hand
on: stages of shared memory (full, empty), and accumulators (made, taken). All jobs go through the
same tiles and find out by themselves what belongs to each.

Compile-time constants: see ``sm100_layout`` and ``products``; A_ELEMENT, B_ELEMENT.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..ptx.arith import i64_of_u32, mul_rn, u32_of_i64
from ..ptx.bits import float_as_uint, uint_as_float
from ..ptx.bulk import bulk_load
from ..ptx.mbarrier import (
    fence_proxy_async_shared,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_wait_parity,
)
from ..ptx.memory import (
    ld_shared_f32,
    ld_shared_v4_u32,
    ptr_address,
    st_shared_u8,
    st_shared_u16,
    st_shared_v4_u32,
)
from ..ptx.tcgen05 import (
    st_shared_row,
    tcgen05_commit,
    tcgen05_cp_scales,
    tcgen05_fence_after_thread_sync,
    tcgen05_fence_before_thread_sync,
    tcgen05_ld,
    tcgen05_mma_mxf4,
    tcgen05_mma_mxf8f6f4,
    tcgen05_mma_nvf4,
    tcgen05_wait_ld,
)
from ..ptx.tcgen05_descriptors import tcgen05_descriptor, tcgen05_product
from ..ptx.tma import fence_tensormap_acquire, prefetch_tensormap, tma_load_2d
from ..ptx.warp import elect, syncwarp
from .elements import store_one
from .groups import row_of_none, source_row
from .products import (
    blocks_of,
    decode_of_b,
    epilogue,
    factor_of_row,
    matrix_scales,
    pair_epilogue,
    result_columns,
)
from .sm100_layout import (
    SCALE_TILE,
    TILE_M,
    a_scales_base,
    a_scales_column,
    b_base,
    b_scales_base,
    b_scales_column,
    b_scales_stage,
    columns_of_tile,
    counted,
    full_base,
    halves,
    made_base,
    next_accumulators,
    next_stage,
    row_bytes,
    scale_groups,
    scale_tiles_of_b,
    step_depth,
    strip_pitch,
    strip_words,
    strips_base,
    tile_of,
    tiles_across,
)

A_ELEMENT = "e2m1"
B_ELEMENT = "e2m1"
B_SCALE = "e4m3"
PAIR = "none"
KIND = "nvf4"
TILE_N = 128
TILE_K = 256
MMA_N = 128
SWIZZLE = 128
STAGES = 4
GROUPED = False

ZERO = np.float32(0.0)
WARP = 0xFFFFFFFF
#: What becomes of a row of a tile.
NOTHING, VALUES, ZEROS = 0, 1, 2


# Warp 4: copies to shared memory -----------------------------------------------------------------


def load_stage(base, stage, parity, k, maps, scales, place, depth):
    """Bring the codes and scales of TILE_K of the depth, from `k` stages on."""
    a_map, b_map = maps
    a_scales, b_scales = scales
    first, a_tile, matrix, column, columns = place
    k_tiles = (blocks_of(depth, B_SCALE) + 3) // 4
    groups = min(k_tiles - k * scale_groups(), scale_groups())
    nbytes = groups * SCALE_TILE
    full = full_base(base) + 8 * stage
    mbarrier_wait_parity(full + 8 * STAGES, parity ^ 1)
    # Before the copies: they may not complete a phase that does not expect them.
    mbarrier_arrive_expect_tx(
        full,
        counted(TILE_M, A_ELEMENT)
        + counted(TILE_N, B_ELEMENT)
        + nbytes * (1 + halves() * scale_tiles_of_b()),
    )
    a_to = base + stage * TILE_M * row_bytes()
    b_to = b_base(base) + stage * TILE_N * row_bytes()
    # Coordinates of the copies: bytes of packed codes, elements of spread ones.
    for atom in range(row_bytes() // SWIZZLE):
        x = k * row_bytes() + atom * SWIZZLE
        tma_load_2d(a_to + atom * TILE_M * SWIZZLE, ptr_address(a_map, 0), x, first, full)
        for half in range(halves()):
            tma_load_2d(
                b_to + half * MMA_N * row_bytes() + atom * MMA_N * SWIZZLE,
                ptr_address(b_map, 0),
                x,
                matrix * columns + column + half * (columns // 2),
                full,
            )
    at = (a_tile * k_tiles + k * scale_groups()) * SCALE_TILE
    to = a_scales_base(base) + stage * scale_groups() * SCALE_TILE
    bulk_load(to, ptr_address(a_scales, at), nbytes, full)
    of_matrix = matrix * matrix_scales(columns, depth, B_SCALE, "tcgen")
    last = (columns - 1) // 128
    to = b_scales_base(base) + stage * b_scales_stage()
    for half in range(halves()):
        n_tile = (column + half * (columns // 2)) // 128
        for i in range(scale_tiles_of_b()):
            at = (min(n_tile + i, last) * k_tiles + k * scale_groups()) * SCALE_TILE
            bulk_load(
                to + (half * scale_tiles_of_b() + i) * scale_groups() * SCALE_TILE,
                ptr_address(b_scales, of_matrix + at),
                nbytes,
                full,
            )


def produce(base, maps, scales, of_groups, rows, columns, depth, total):
    """What the warp that brings the operands does."""
    if elect(WARP):
        fence_tensormap_acquire(ptr_address(maps[0], 0))
        fence_tensormap_acquire(ptr_address(maps[1], 0))
        prefetch_tensormap(ptr_address(maps[0], 0))
        prefetch_tensormap(ptr_address(maps[1], 0))
    syncwarp(WARP)
    across = tiles_across(columns)
    steps = (depth + TILE_K - 1) // TILE_K
    stage = 0
    parity = 0
    work = cuda.blockIdx.x + 0
    while work < total:
        live, expert, first, _, a_tile, _, _, _ = tile_of(work // across, of_groups, rows)
        column = work % across * columns_of_tile()
        if live:
            if elect(WARP):
                place = (first, a_tile, expert, column, columns)
                for k in range(steps):
                    at, turn = next_stage(stage, parity, k)
                    load_stage(base, at, turn, k, maps, scales, place, depth)
            stage, parity = next_stage(stage, parity, steps)
        work += cuda.gridDim.x


# Warp 5: scales to tensor memory, products -------------------------------------------------------


def product_word():
    """The instruction descriptor."""
    if KIND == "nvf4":
        return tcgen05_product("mxf4nvf4", 16, "e2m1", "e2m1", "ue4m3", MMA_N)
    elif KIND == "mxf4":
        return tcgen05_product("mxf4", 32, "e2m1", "e2m1", "ue8m0", MMA_N)
    else:
        return tcgen05_product("mxf8f6f4", 32, A_ELEMENT, B_ELEMENT, "ue8m0", MMA_N)


def group_of_step(step):
    """Which group of four scales a step of a stage uses."""
    if KIND == "nvf4":
        return step
    elif KIND == "mxf4":
        return step // 2
    else:
        return step // 4


def place_in_group(step):
    """Where in its group the scales of a step begin, as the instruction descriptor has it."""
    if KIND == "nvf4":
        place = 0
    elif KIND == "mxf4":
        place = step % 2 * 2
    else:
        place = step % 4
    return place << 29 | place << 4


def multiply(d, a, b, word, a_scales, b_scales, accumulate):
    """One instruction."""
    if KIND == "nvf4":
        tcgen05_mma_nvf4(d, a, b, word, a_scales, b_scales, accumulate)
    elif KIND == "mxf4":
        tcgen05_mma_mxf4(d, a, b, word, a_scales, b_scales, accumulate)
    else:
        tcgen05_mma_mxf8f6f4(d, a, b, word, a_scales, b_scales, accumulate)


def copy_scales(base, stage, memory, groups):
    """The scales of a stage to tensor memory."""
    source = a_scales_base(base) + stage * scale_groups() * SCALE_TILE
    for group in range(scale_groups()):
        if group < groups:
            descriptor = tcgen05_descriptor(source + group * SCALE_TILE, 0, 16, 128)
            tcgen05_cp_scales(a_scales_column(memory) + 4 * group, descriptor)
    source = b_scales_base(base) + stage * b_scales_stage()
    for half in range(halves()):
        for group in range(scale_groups()):
            for i in range(scale_tiles_of_b()):
                if group < groups:
                    tile = half * scale_tiles_of_b() + i
                    descriptor = tcgen05_descriptor(
                        source + (tile * scale_groups() + group) * SCALE_TILE, 0, 16, 128
                    )
                    # A group's tiles side by side: columns for all rows of a product.
                    at = (half * scale_groups() + group) * scale_tiles_of_b() + i
                    tcgen05_cp_scales(b_scales_column(memory) + 4 * at, descriptor)


def multiply_stage(base, stage, memory, accumulators, k, column, columns, depth):
    """Products of a stage; the first of a tile begin its sums."""
    left = depth - k * TILE_K
    groups = min((blocks_of(left, B_SCALE) + 3) // 4, scale_groups())
    copy_scales(base, stage, memory, groups)
    word = product_word()
    a = tcgen05_descriptor(base + stage * TILE_M * row_bytes(), SWIZZLE, 16, 8 * SWIZZLE)
    b_at = b_base(base) + stage * TILE_N * row_bytes()
    for step in range(TILE_K // step_depth()):
        if step * step_depth() < left:
            # 32 bytes on in an atom; then the next atom. In units of 16 bytes.
            atom = step * 32 // SWIZZLE
            inside = step * 32 % SWIZZLE // 16
            to_a = atom * TILE_M * SWIZZLE // 16 + inside
            to_b = atom * MMA_N * SWIZZLE // 16 + inside
            group = group_of_step(step)
            for half in range(halves()):
                b = tcgen05_descriptor(b_at + half * MMA_N * row_bytes(), SWIZZLE, 16, 8 * SWIZZLE)
                # A tile of columns may begin at row 64 of a tile of scales.
                inside_tile = (column + half * (columns // 2)) % 128 // 32
                scales = (half * scale_groups() + group) * scale_tiles_of_b() * 4
                multiply(
                    accumulators + half * MMA_N,
                    a + to_a,
                    b + to_b,
                    word | place_in_group(step),
                    a_scales_column(memory) + 4 * group,
                    b_scales_column(memory) + scales + inside_tile,
                    k > 0 or step > 0,
                )


def multiply_next(base, stage, parity, memory, acc, k, column, columns, depth):
    """Wait for a stage, multiply, and say when it has been read."""
    full = full_base(base) + 8 * stage
    mbarrier_wait_parity(full, parity)
    tcgen05_fence_after_thread_sync()
    multiply_stage(base, stage, memory, memory + acc * TILE_N, k, column, columns, depth)
    tcgen05_commit(full + 8 * STAGES)


def is_ragged(depth):
    """Whether the last instruction of a row takes scales beyond it, which can be anything."""
    if KIND == "mxf8":
        return False
    else:
        return depth % 64 != 0


def clear_scales(tile, depth):
    """Zero the scales of a tile that are half an instruction's, behind the end of the rows."""
    lane = cuda.threadIdx.x % 32
    for quarter in range(4):
        word = tile + lane * 16 + quarter * 4
        if KIND == "nvf4":
            st_shared_u16(word + 2, 0)
        else:
            st_shared_u8(word + depth // 32 % 4, 0)


def clear_padding(base, stage, parity, k, depth):
    """The same of a stage, which is the last of the rows; the whole warp, before the copies."""
    mbarrier_wait_parity(full_base(base) + 8 * stage, parity)
    group = (blocks_of(depth - k * TILE_K, B_SCALE) + 3) // 4 - 1
    tile = a_scales_base(base) + (stage * scale_groups() + group) * SCALE_TILE
    clear_scales(tile, depth)
    first = b_scales_base(base) + stage * b_scales_stage()
    for i in range(halves() * scale_tiles_of_b()):
        clear_scales(first + (i * scale_groups() + group) * SCALE_TILE, depth)
    fence_proxy_async_shared()
    syncwarp(WARP)


def issue(base, memory, of_groups, rows, columns, depth, total):
    """What the warp that multiplies does."""
    across = tiles_across(columns)
    steps = (depth + TILE_K - 1) // TILE_K
    ragged = is_ragged(depth)
    whole = steps - 1 if ragged else steps
    stage = 0
    parity = 0
    acc = 0
    acc_parity = 0
    work = cuda.blockIdx.x + 0
    while work < total:
        live, _, _, _, _, _, _, _ = tile_of(work // across, of_groups, rows)
        column = work % across * columns_of_tile()
        if live:
            made = made_base(base) + 8 * acc
            if elect(WARP):
                mbarrier_wait_parity(made + 16, acc_parity ^ 1)
                tcgen05_fence_after_thread_sync()
                for k in range(whole):
                    at, turn = next_stage(stage, parity, k)
                    multiply_next(base, at, turn, memory, acc, k, column, columns, depth)
                if not ragged:
                    tcgen05_commit(made)
            if ragged:
                at, turn = next_stage(stage, parity, whole)
                clear_padding(base, at, turn, whole, depth)
                if elect(WARP):
                    multiply_next(base, at, turn, memory, acc, whole, column, columns, depth)
                    tcgen05_commit(made)
            stage, parity = next_stage(stage, parity, steps)
            acc, acc_parity = next_accumulators(acc, acc_parity)
        work += cuda.gridDim.x


# Warps 0 to 3: accumulators to results -----------------------------------------------------------


def row_fate(local, facts, input_rows, rows, row_indices):
    """What becomes of a row of a tile: (fate, row of the result, row of A)."""
    _, expert, first, count, _, owner, head, tail = facts
    row = first + local
    fate = NOTHING
    if GROUPED:
        if local < count:
            if owner < 0:
                row = row_of_none(row, head, tail)
            if row < rows:
                fate = ZEROS
                if expert >= 0 and source_row(row_indices, row, input_rows) >= 0:
                    fate = VALUES
    elif local < count:
        fate = VALUES
    return fate, row


def store_element(out, at, v, w, factor, factors_of_b, row, column, expert, e0, e1, e2, e3):
    """One element of the result, of a sum or a pair of sums."""
    db0, db1 = factors_of_b
    v = mul_rn(v, mul_rn(factor, db0))
    if PAIR == "none":
        v = np.float32(epilogue(v, row, column, expert, e0, e1, e2, e3))
    else:
        w = mul_rn(w, mul_rn(factor, db1))
        v = np.float32(pair_epilogue(v, w, row, column, expert, e0, e1, e2, e3))
    store_one(out, at, v)


def store_strip(strip, lane, to, width, n, columns, expert):
    """Store 32 columns of 32 rows: a row after the other, a lane a column, `n` of the result."""
    out, b_decode, e0, e1, e2, e3 = to
    if n < width:
        db0 = ZERO
        db1 = ZERO
        if expert >= 0:
            if PAIR == "none":
                db0 = decode_of_b(b_decode, expert, n, columns)
            elif PAIR == "halves":
                db0 = decode_of_b(b_decode, expert, n, columns)
                db1 = decode_of_b(b_decode, expert, n + width, columns)
            else:
                db0 = decode_of_b(b_decode, expert, 2 * n, columns)
                db1 = decode_of_b(b_decode, expert, 2 * n + 1, columns)
        for r in range(32):
            line = strip + r * strip_pitch()
            words = ld_shared_v4_u32(line + 4 * strip_words())
            row = i64_of_u32(words[1])
            at = row * width + n
            if words[0] == VALUES:
                factor = uint_as_float(words[2])
                if PAIR == "none":
                    v = ld_shared_f32(line + 4 * lane)
                    w = ZERO
                elif PAIR == "halves":
                    v = ld_shared_f32(line + 4 * lane)
                    w = ld_shared_f32(line + 128 + 4 * lane)
                else:
                    v = ld_shared_f32(line + 8 * lane)
                    w = ld_shared_f32(line + 8 * lane + 4)
                dbs = (db0, db1)
                store_element(out, at, v, w, factor, dbs, row, n, expert, e0, e1, e2, e3)
            elif words[0] == ZEROS:
                store_one(out, at, ZERO)


def take_strip(strip, lane, accumulators, chunk):
    """A warp's 32 lanes of 32 columns, or of 32 pairs of columns, to its strip."""
    line = strip + lane * strip_pitch()
    if PAIR == "none":
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + 32 * chunk, 32))
        st_shared_row(line, acc)
    elif PAIR == "halves":
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + 32 * chunk, 32))
        st_shared_row(line, acc)
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + MMA_N + 32 * chunk, 32))
        st_shared_row(line + 128, acc)
    else:
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + 64 * chunk, 32))
        st_shared_row(line, acc)
        acc = tcgen05_wait_ld(tcgen05_ld(accumulators + 64 * chunk + 32, 32))
        st_shared_row(line + 128, acc)


def finish(base, memory, warp, lane, to, factors, of_groups, row_indices, shape, columns, total):
    """What the warps that store do."""
    input_rows, rows = shape
    alpha, alpha_number, a_decode = factors
    across = tiles_across(columns)
    width = result_columns(columns)
    wide = columns_of_tile() // 2 if PAIR == "interleaved" else columns_of_tile()
    strip = strips_base(base) + warp * 32 * strip_pitch()
    mine = memory + (warp << 21)
    acc = 0
    acc_parity = 0
    work = cuda.blockIdx.x + 0
    while work < total:
        facts = tile_of(work // across, of_groups, rows)
        live = facts[0]
        expert = facts[1]
        owner = facts[5]
        fate, row = row_fate(warp * 32 + lane, facts, input_rows, rows, row_indices)
        factor = ZERO
        if fate == VALUES:
            factor = factor_of_row(alpha, alpha_number, a_decode, expert, row, owner)
        first = work % across * wide
        chunks = (min(width - first, wide) + 31) // 32
        # All lanes have read the strip of the tile before.
        syncwarp(WARP)
        words = (u32_of_i64(fate), u32_of_i64(row), float_as_uint(factor))
        line = strip + lane * strip_pitch() + 4 * strip_words()
        st_shared_v4_u32(line, words[0], words[1], words[2], 0)
        made = made_base(base) + 8 * acc
        if live:
            mbarrier_wait_parity(made, acc_parity)
            tcgen05_fence_after_thread_sync()
        for chunk in range(chunks):
            if live:
                take_strip(strip, lane, mine + acc * TILE_N, chunk)
                if chunk == chunks - 1:
                    tcgen05_fence_before_thread_sync()
                    syncwarp(WARP)
                    if elect(WARP):
                        mbarrier_arrive(made + 16)
            syncwarp(WARP)
            n = first + 32 * chunk + lane
            store_strip(strip, lane, to, width, n, columns, expert)
            syncwarp(WARP)
        if live:
            acc, acc_parity = next_accumulators(acc, acc_parity)
        work += cuda.gridDim.x
