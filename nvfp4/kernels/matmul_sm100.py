"""Products of two quantised operands on Blackwell's tensor cores (tcgen05), dense and grouped.

A tile of the result is 128 rows of TILE_N columns. Blocks take tiles with the grid as stride, each
warp with one job: warp 4 brings codes by tensor copies and scales by bulk copies, TILE_K of the
depth a stage; one thread of warp 5 copies the scales to tensor memory and issues the products;
warps 0 to 3 read the accumulators, 32 lanes each, multiply by the factors, call the epilogue and
store.
Three rings hand on: stages of shared memory (full, empty), and accumulators (made, taken), two of
them where they fit, so that the products of a tile overlap the epilogue of the one before.

Every element times its scale is exact, and so is each product; sums are float32 in the order and
rounding of the tensor cores. Results are the golden model's bit for bit where sums are exact.

KIND says which instruction: "nvf4" (two nvfp4), "mxf4" (two mxfp4), "mxf8" (mxfp8 and mxfp8 or
mxfp4, whose codes are spread to 16 bytes of shared memory for 16 of them). Scales come as they lie
in the tcgen layout, 512 bytes for 128 rows of 4 scales. With PAIR = "halves" a tile is TILE_N / 2
columns of gate and as many of up, two products of MMA_N = TILE_N / 2 columns each.

Constraints: tcgen scales of both operands; depth a multiple of 64 ("nvf4", "mxf4": no instruction
may see the padding of a row's scales, which can be anything), 32, or 128 with mxfp4 beside mxfp8;
scales multiples of 16 bytes, codes of 16, of 32 where they are spread; "halves": columns a multiple
of 2 TILE_N / 2 where TILE_N is 128, of 256 where it is 256. No row_indices. THREADS threads, any
grid of one dimension, shared memory: :func:`shared_bytes`.

Compile-time constants: those of ``matmul_naive`` for factors and results; KIND, TILE_N, TILE_K,
MMA_N, SWIZZLE (bytes of a row of an atom: TILE_K's, at most 128), STAGES, ACCS (accumulators),
COLUMNS (of tensor memory), GROUPED.
"""

from __future__ import annotations

import functools

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import i64_of_u32, mul_rn, u32_of_i64
from ..ptx.bits import float_as_uint, uint_as_float
from ..ptx.bulk import bulk_load
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from ..ptx.memory import (
    ld_shared_f32,
    ld_shared_u32,
    ld_shared_v4_u32,
    ptr_address,
    shared_base,
    st_shared_v4_u32,
)
from ..ptx.tcgen05 import (
    st_shared_row,
    tcgen05_alloc,
    tcgen05_commit,
    tcgen05_cp_scales,
    tcgen05_dealloc,
    tcgen05_fence_after_thread_sync,
    tcgen05_fence_before_thread_sync,
    tcgen05_ld,
    tcgen05_mma_mxf4,
    tcgen05_mma_mxf8f6f4,
    tcgen05_mma_nvf4,
    tcgen05_relinquish,
    tcgen05_wait_ld,
)
from ..ptx.tcgen05_descriptors import tcgen05_descriptor, tcgen05_product
from ..ptx.tma import fence_tensormap_acquire, prefetch_tensormap, tma_load_2d
from ..ptx.warp import elect, syncwarp
from .elements import store_one
from .groups import expert_of, find_tile, load_index, row_of_none, source_row
from .matmul_naive import grouped_matmul_kernel, matmul_kernel
from .products import (
    blocks_of,
    decode_of_b,
    epilogue,
    factor_of_row,
    matrix_scales,
    pair_epilogue,
    result_columns,
)

A_ELEMENT = "e2m1"
B_ELEMENT = "e2m1"
B_SCALE = "e4m3"
PAIR = "none"
A_STARTS = "none"
KIND = "nvf4"
TILE_N = 128
TILE_K = 256
MMA_N = 128
SWIZZLE = 128
STAGES = 4
ACCS = 2
COLUMNS = 512
GROUPED = False

ZERO = np.float32(0.0)
THREADS = 192
WARP = 0xFFFFFFFF
PRODUCER, ISSUER = 4, 5  # warps
TILE_M = 128
SCALE_TILE = 512
#: What becomes of a row of a tile.
NOTHING, VALUES, ZEROS = 0, 1, 2


# Geometry: the same for the kernel, whose constants are globals, and for plans -------------------


def shared_bytes(kind: str, tile_n: int, tile_k: int, stages: int, pair: str) -> int:
    """Dynamic shared memory of a block, the room to align it to 1024 bytes included."""
    row = tile_k if kind == "mxf8" else tile_k // 2
    groups = tile_k // (64 if kind == "nvf4" else 128)
    b_tiles = 2 if pair == "halves" else (tile_n + 127) // 128
    stage = (TILE_M + tile_n) * row + SCALE_TILE * groups * (1 + b_tiles)
    strip = 4 * 32 * 4 * (36 if pair == "none" else 68)
    return 1024 + stages * stage + strip + 16 * stages + 32 + 16


def row_bytes():
    """Bytes of a row of a stage in shared memory."""
    if KIND == "mxf8":
        return TILE_K
    else:
        return TILE_K // 2


def scale_groups():
    """Groups of four scales in a row of a stage."""
    if KIND == "nvf4":
        return TILE_K // 64
    else:
        return TILE_K // 128


def step_depth():
    """K of an instruction."""
    if KIND == "mxf8":
        return 32
    else:
        return 64


def halves():
    """Products side by side in a tile, each of MMA_N columns."""
    if PAIR == "halves":
        return 2
    else:
        return 1


def scale_tiles_of_b():
    """Tiles of scales that a product's rows of B lie in."""
    return (MMA_N + 127) // 128


def counted(rows, element: str):
    """Bytes that a tensor copy of so many rows counts: of spread codes, those in global memory."""
    if KIND == "mxf8" and element == "e2m1":
        return rows * row_bytes() // 2
    else:
        return rows * row_bytes()


def strip_words():
    """Accumulators of a row in a strip: 32, or 32 pairs."""
    if PAIR == "none":
        return 32
    else:
        return 64


def strip_pitch():
    """Bytes from row to row of a strip: four more words, for the row itself; no bank conflicts."""
    return 4 * (strip_words() + 4)


# Where things are --------------------------------------------------------------------------------


def aligned_base():
    """First byte of a block's shared memory that begins an atom of the swizzle."""
    return (i64_of_u32(shared_base()) + 1023) // 1024 * 1024


def b_base(base):
    """Codes of B."""
    return base + STAGES * TILE_M * row_bytes()


def a_scales_base(base):
    """Scales of A."""
    return b_base(base) + STAGES * TILE_N * row_bytes()


def b_scales_base(base):
    """Scales of B."""
    return a_scales_base(base) + STAGES * scale_groups() * SCALE_TILE


def b_scales_stage():
    """Bytes of a stage of scales of B."""
    return halves() * scale_tiles_of_b() * scale_groups() * SCALE_TILE


def strips_base(base):
    """Strips of accumulators, one a warp."""
    return b_scales_base(base) + STAGES * b_scales_stage()


def full_base(base):
    """mbarriers: a stage has arrived; STAGES further on: a stage has been read."""
    return strips_base(base) + 4 * 32 * strip_pitch()


def made_base(base):
    """mbarriers: accumulators are complete; 16 bytes further on: they have been taken."""
    return full_base(base) + 16 * STAGES


def address_base(base):
    """Where the address of the tensor memory is."""
    return made_base(base) + 32


def a_scales_column(memory):
    """First column of the scales of A."""
    return memory + ACCS * TILE_N


def b_scales_column(memory):
    """First column of the scales of B."""
    return a_scales_column(memory) + 4 * scale_groups()


# Tiles of the result -----------------------------------------------------------------------------


def columns_of_tile():
    """Columns of the product from one tile to the next; "halves": of the result."""
    return MMA_N


def tiles_across(columns):
    """Tiles beside each other."""
    if PAIR == "halves":
        return (columns // 2 + MMA_N - 1) // MMA_N
    else:
        return (columns + MMA_N - 1) // MMA_N


def dense_tile(tile, rows):
    """What :func:`grouped_tile` says, of a dense product."""
    first = tile * TILE_M
    return True, 0, first, min(rows - first, TILE_M), tile, 0, 0, 0


def grouped_tile(tile, row_offsets, expert_ids, tile_starts, groups, experts, rows, tiles):
    """A tile of rows: (live, expert, first, count, tile of A's scales, owner, head, tail).

    The lanes of a warp call it together. live: whether there is something to multiply; if not, its
    rows are zeros.
    """
    owner, first_tile, start, stop, used, head, tail, _ = find_tile(
        row_offsets, row_offsets, groups, rows, tile
    )
    expert = -1
    a_tile = tile
    if owner >= 0:
        expert = expert_of(expert_ids, owner, experts)
        first = start + ((tile - first_tile) << 7)
        count = min(stop - first, TILE_M)
        if A_STARTS != "none":
            a_tile = load_index(tile_starts, owner, A_STARTS) + tile - first_tile
    else:
        first = (tile - used) << 7
        count = TILE_M
    if a_tile < 0 or a_tile >= tiles:
        expert = -1
    return expert >= 0 and count > 0, expert, first, count, a_tile, owner, head, tail


def tile_of(tile, of_groups, rows):
    """What belongs to a tile of rows; `of_groups` as the grouped kernel makes it."""
    if GROUPED:
        row_offsets, expert_ids, tile_starts, groups, experts, tiles = of_groups
        return grouped_tile(
            tile, row_offsets, expert_ids, tile_starts, groups, experts, rows, tiles
        )
    else:
        return dense_tile(tile, rows)


def next_stage(stage, parity, count):
    """A place in a ring of STAGES, `count` further on."""
    ahead = stage + count
    turns = ahead // STAGES
    return ahead - turns * STAGES, (parity + turns) % 2


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
            descriptor = tcgen05_descriptor(source + group * SCALE_TILE, 0, 0, 128)
            tcgen05_cp_scales(a_scales_column(memory) + 4 * group, descriptor)
    source = b_scales_base(base) + stage * b_scales_stage()
    for half in range(halves()):
        for group in range(scale_groups()):
            for i in range(scale_tiles_of_b()):
                if group < groups:
                    tile = half * scale_tiles_of_b() + i
                    descriptor = tcgen05_descriptor(
                        source + (tile * scale_groups() + group) * SCALE_TILE, 0, 0, 128
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


def issue(base, memory, of_groups, rows, columns, depth, total):
    """What the warp that multiplies does."""
    across = tiles_across(columns)
    steps = (depth + TILE_K - 1) // TILE_K
    stage = 0
    parity = 0
    acc = 0
    acc_parity = 0
    work = cuda.blockIdx.x + 0
    while work < total:
        live, _, _, _, _, _, _, _ = tile_of(work // across, of_groups, rows)
        column = work % across * columns_of_tile()
        if live:
            if elect(WARP):
                made = made_base(base) + 8 * acc
                mbarrier_wait_parity(made + 16, acc_parity ^ 1)
                tcgen05_fence_after_thread_sync()
                for k in range(steps):
                    at, turn = next_stage(stage, parity, k)
                    full = full_base(base) + 8 * at
                    mbarrier_wait_parity(full, turn)
                    tcgen05_fence_after_thread_sync()
                    accumulators = memory + acc * TILE_N
                    multiply_stage(base, at, memory, accumulators, k, column, columns, depth)
                    tcgen05_commit(full + 8 * STAGES)
                tcgen05_commit(made)
            stage, parity = next_stage(stage, parity, steps)
            acc, acc_parity = next_accumulators(acc, acc_parity)
        work += cuda.gridDim.x


def next_accumulators(acc, parity):
    """The place behind `acc` in the ring of accumulators."""
    if ACCS == 1:
        return 0, parity ^ 1
    else:
        return acc ^ 1, parity ^ acc


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


# Bodies ------------------------------------------------------------------------------------------


def run(maps, scales, to, factors, of_groups, row_indices, shape, columns, depth, row_tiles):
    """A block: set up, the three jobs, give back."""
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
            mbarrier_init(made + 16 + 8 * i, 4)
        fence_mbarrier_init()
    if warp == ISSUER:
        tcgen05_alloc(address_base(base), COLUMNS)
        tcgen05_relinquish()
    tcgen05_fence_before_thread_sync()
    cuda.syncthreads()
    tcgen05_fence_after_thread_sync()
    memory = i64_of_u32(ld_shared_u32(address_base(base)))
    griddepcontrol_wait()
    total = row_tiles * tiles_across(columns)
    if warp == PRODUCER:
        produce(base, maps, scales, of_groups, shape[1], columns, depth, total)
    elif warp == ISSUER:
        issue(base, memory, of_groups, shape[1], columns, depth, total)
    else:
        lane = thread % 32
        finish(base, memory, warp, lane, to, factors, of_groups, row_indices, shape, columns, total)
    tcgen05_fence_before_thread_sync()
    cuda.syncthreads()
    if warp == ISSUER:
        tcgen05_fence_after_thread_sync()
        tcgen05_dealloc(memory, COLUMNS)


def matmul_sm100(
    a_map,
    b_map,
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
        (a_map, b_map),
        (a_scales, b_scales),
        (out, b_decode, e0, e1, e2, e3),
        (alpha, alpha_number, a_decode),
        (out, out, out, 0, 0, 0),
        out,
        (rows, rows),
        columns,
        depth,
        (rows + TILE_M - 1) // TILE_M,
    )


def grouped_matmul_sm100(
    a_map,
    b_map,
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
        (a_map, b_map),
        (a_scales, b_scales),
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

ARCHITECTURES = ("sm_100a", "sm_103a")
#: Constants of ``matmul_naive`` that are the same here.
_KEPT = ("B_ELEMENT", "B_SCALE", "ALPHA", "DECODE_A", "DECODE_B", "PAIR")
_KEPT_OF_GROUPED = ("OFFSETS", "IDS", "A_STARTS")
_OWN = {
    "A_ELEMENT": ("e2m1", "e4m3", "e5m2"),
    "OUTPUT": ("bfloat16", "float16", "float32"),
    "KIND": ("nvf4", "mxf4", "mxf8"),
    "TILE_N": (64, 128, 192, 256),
    "TILE_K": (128, 256),
    "MMA_N": (64, 128, 192, 256),
    "SWIZZLE": (64, 128),
    "STAGES": tuple(range(1, 13)),
    "ACCS": (1, 2),
    "COLUMNS": (128, 256, 512),
}


def _kernel(name: str, body, like: Kernel, kept: tuple[str, ...], grouped: bool) -> Kernel:
    constants = {key: like.constants[key] for key in kept} | _OWN
    constants["GROUPED"] = (grouped,)
    if grouped:
        constants |= {"INDICES": ("none",), "STARTS": ("none",)}
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
def matmul_sm100_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The dense kernel for an epilogue with arrays of these dtypes."""
    return _kernel("matmul_sm100", matmul_sm100, matmul_kernel(arrays), _KEPT, False)


@functools.cache
def grouped_matmul_sm100_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The grouped kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_kernel(arrays)
    kept = (*_KEPT, *_KEPT_OF_GROUPED)
    return _kernel("grouped_matmul_sm100", grouped_matmul_sm100, like, kept, True)


MATMUL_SM100 = matmul_sm100_kernel()
GROUPED_MATMUL_SM100 = grouped_matmul_sm100_kernel()


def tile_constants(
    kind: str, tile_n: int, tile_k: int, pair: str, stages: int | None = None
) -> dict:
    """The constants that follow from a tile's extents; as many stages as fit, if not said."""
    row = tile_k if kind == "mxf8" else tile_k // 2
    accumulators = 1 if tile_n > 192 else 2
    groups = tile_k // (64 if kind == "nvf4" else 128)
    b_tiles = 2 if pair == "halves" else (tile_n + 127) // 128
    needed = accumulators * tile_n + 4 * groups * (1 + b_tiles)
    if stages is None:
        stages = 12
        while shared_bytes(kind, tile_n, tile_k, stages, pair) > SHARED_LIMIT:
            stages -= 1
    return {
        "KIND": kind,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "MMA_N": tile_n // 2 if pair == "halves" else tile_n,
        "SWIZZLE": min(row, 128),
        "STAGES": stages,
        "ACCS": accumulators,
        "COLUMNS": next(columns for columns in (128, 256, 512) if columns >= needed),
    }


#: Shared memory that a block of sm_100 and sm_103 can have.
SHARED_LIMIT = 232448

_NVFP4 = {"A_ELEMENT": "e2m1", "B_ELEMENT": "e2m1", "B_SCALE": "e4m3"}
_MXFP4 = {"A_ELEMENT": "e2m1", "B_ELEMENT": "e2m1", "B_SCALE": "e8m0"}
_MIXED = {"A_ELEMENT": "e4m3", "B_ELEMENT": "e2m1", "B_SCALE": "e8m0"}
_MXFP8 = {"A_ELEMENT": "e4m3", "B_ELEMENT": "e4m3", "B_SCALE": "e8m0"}
_DENSE = {"ALPHA": "value", "DECODE_A": "scalar", "DECODE_B": "scalar", "OUTPUT": "bfloat16"}
_GROUPED = {**_DENSE, "ALPHA": "expert", "DECODE_A": "group", "DECODE_B": "batch"}
_INDEX = {"OFFSETS": "int32", "IDS": "int32", "A_STARTS": "none", "INDICES": "none"}
_INDEX |= {"STARTS": "none"}


def _variant(kind, tile_n, tile_k, operands, grouped, pair="none"):
    made = {**(_GROUPED | _INDEX if grouped else _DENSE), **operands, "PAIR": pair}
    return {**made, **tile_constants(kind, tile_n, tile_k, pair), "GROUPED": grouped}


VARIANTS = {
    "matmul_sm100": (
        _variant("nvf4", 128, 256, _NVFP4, False),
        _variant("mxf8", 256, 128, _MXFP8, False),
    ),
    "grouped_matmul_sm100": (
        _variant("mxf8", 128, 128, _MIXED, True),
        _variant("mxf4", 128, 256, _MXFP4, True, "halves"),
    ),
}
SLOW_VARIANTS = {
    "matmul_sm100": (
        _variant("nvf4", 64, 256, _NVFP4, False),
        _variant("nvf4", 192, 128, _NVFP4, False),
        _variant("nvf4", 256, 256, _NVFP4, False, "interleaved"),
        _variant("mxf4", 128, 256, _MXFP4, False),
    ),
    "grouped_matmul_sm100": (
        _variant("nvf4", 128, 256, _NVFP4, True, "halves"),
        _variant("mxf8", 128, 128, _MXFP8, True, "interleaved"),
        _variant("mxf8", 64, 256, _MIXED, True),
    ),
}
