"""What the warps of a product with tensor memory that bring operands and multiply do.

Warp 4 brings codes by tensor copies and scales by bulk copies, TILE_K of the depth a stage. One
thread of warp 5 copies the scales to tensor memory and issues the products. Warps 0 to 3
(``sm100_results``) read the accumulators. Two rings hand on: stages of shared memory (full, empty),
and accumulators (made, taken). All jobs go through the same tiles and find out by themselves what
belongs to each.

Compile-time constants: see ``sm100_layout`` and ``products``; A_ELEMENT, B_ELEMENT.
"""

from __future__ import annotations

from .._numba import cuda
from ..ptx.arith import i64_of_u32
from ..ptx.bulk import bulk_load
from ..ptx.cluster import cluster_rank, map_shared
from ..ptx.mbarrier import (
    fence_proxy_async_shared,
    mbarrier_arrive_expect_tx,
    mbarrier_wait_parity,
)
from ..ptx.memory import (
    ptr_address,
    st_shared_u8,
    st_shared_u16,
)
from ..ptx.tcgen05 import (
    tcgen05_commit,
    tcgen05_cp_scales,
    tcgen05_fence_after_thread_sync,
    tcgen05_mma_mxf4,
    tcgen05_mma_mxf8f6f4,
    tcgen05_mma_nvf4,
)
from ..ptx.tcgen05_descriptors import tcgen05_descriptor, tcgen05_product
from ..ptx.tcgen05_pair import (
    tcgen05_commit_pair,
    tcgen05_cp_scales_pair,
    tcgen05_mma_mxf4_pair,
    tcgen05_mma_mxf8f6f4_pair,
    tcgen05_mma_nvf4_pair,
    tcgen05_product_pair,
    tma_load_2d_pair,
)
from ..ptx.tma import fence_tensormap_acquire, prefetch_tensormap, tma_load_2d
from ..ptx.warp import elect, syncwarp
from .products import (
    blocks_of,
    matrix_scales,
)
from .sm100_layout import (
    SCALE_TILE,
    TILE_M,
    counted,
    first_work,
    full_base,
    halves,
    left_scales_base,
    left_scales_column,
    made_base,
    next_accumulators,
    next_stage,
    product_rows,
    right_base,
    right_rows,
    right_scale_tiles,
    right_scales_base,
    right_scales_column,
    right_scales_stage,
    row_bytes,
    scale_groups,
    step_depth,
    tile_of,
    work_step,
)

A_ELEMENT = "e2m1"
B_ELEMENT = "e2m1"
B_SCALE = "e4m3"
PAIR = "none"
PAIR_OF_BLOCKS = False
KIND = "nvf4"
TILE_N = 128
TILE_K = 256
MMA_N = 128
SWIZZLE = 128
STAGES = 4
SWAP = False
GROUPED = False

WARP = 0xFFFFFFFF


# Warp 4: copies to shared memory -----------------------------------------------------------------


def counted_of_stage():
    """Bytes of the codes of a stage that the copies count."""
    if SWAP:
        return counted(TILE_M, B_ELEMENT) + counted(TILE_N, A_ELEMENT)
    else:
        return counted(TILE_M, A_ELEMENT) + counted(right_rows(), B_ELEMENT)


def place_of(of_rows, column, part, columns, depth):
    """Where the operands of a tile are, for copies.

    (row of the left operand, its tile of scales; row of the right one, in its matrix, the matrix's
    first tile of scales and the last one in it.)
    """
    _, expert, first, _, a_tile, _, _, _ = of_rows
    b_row = expert * columns + column
    b_tile = expert * (matrix_scales(columns, depth, B_SCALE, "tcgen") // SCALE_TILE)
    k_tiles = (blocks_of(depth, B_SCALE) + 3) // 4
    if SWAP:
        return (b_row, b_tile + column // 128 * k_tiles, first + part, part, a_tile * k_tiles, 0)
    else:
        last = (columns - 1) // 128
        # A block of a pair that has no scales brings others: it stores none of these sums.
        return (first, max(a_tile, 0) * k_tiles, b_row, column, b_tile, last)


def load_stage(base, stage, parity, k, maps, scales, place, half_columns, depth):
    """Bring the codes and scales of TILE_K of the depth, from `k` stages on."""
    left_map, right_map = maps
    left_scales, right_scales = scales
    left_row, left_tile, right_row, inside, right_tile, last = place
    k_tiles = (blocks_of(depth, B_SCALE) + 3) // 4
    groups = min(k_tiles - k * scale_groups(), scale_groups())
    nbytes = groups * SCALE_TILE
    full = full_base(base) + 8 * stage
    mbarrier_wait_parity(full + 8 * STAGES, parity ^ 1)
    # Before the copies: they may not complete a phase that does not expect them.
    mbarrier_arrive_expect_tx(
        full,
        counted_of_stage() + nbytes * (1 + halves() * right_scale_tiles()),
    )
    left_to = base + stage * TILE_M * row_bytes()
    right_to = right_base(base) + stage * right_rows() * row_bytes()
    # Coordinates of the copies: bytes of packed codes, elements of spread ones.
    for atom in range(row_bytes() // SWIZZLE):
        x = k * row_bytes() + atom * SWIZZLE
        to = left_to + atom * TILE_M * SWIZZLE
        tma_load_2d(to, ptr_address(left_map, 0), x, left_row, full)
        for half in range(halves()):
            to = right_to + half * MMA_N * row_bytes() + atom * MMA_N * SWIZZLE
            y = right_row + half * half_columns
            tma_load_2d(to, ptr_address(right_map, 0), x, y, full)
    at = (left_tile + k * scale_groups()) * SCALE_TILE
    to = left_scales_base(base) + stage * scale_groups() * SCALE_TILE
    bulk_load(to, ptr_address(left_scales, at), nbytes, full)
    to = right_scales_base(base) + stage * right_scales_stage()
    for half in range(halves()):
        n_tile = (inside + half * half_columns) // 128
        for i in range(right_scale_tiles()):
            tile = right_tile + min(n_tile + i, last) * k_tiles + k * scale_groups()
            bulk_load(
                to + (half * right_scale_tiles() + i) * scale_groups() * SCALE_TILE,
                ptr_address(right_scales, tile * SCALE_TILE),
                nbytes,
                full,
            )


def load_half(base, stage, parity, k, maps, scales, place, half_columns, depth):
    """A block's half of a stage of a pair; block 0's mbarrier counts both.

    Its scales come by tensor copies, too: only these can report to the other block.
    """
    left_row, left_tile, right_row, inside, right_tile, last = place
    k_tiles = (blocks_of(depth, B_SCALE) + 3) // 4
    rank = i64_of_u32(cluster_rank())
    mine = full_base(base) + 8 * stage
    mbarrier_wait_parity(mine + 8 * STAGES, parity ^ 1)
    if rank == 0:
        of_scales = SCALE_TILE * scale_groups() * (1 + halves() * right_scale_tiles())
        mbarrier_arrive_expect_tx(mine, 2 * (counted_of_stage() + of_scales))
    full = map_shared(mine, 0)
    left_to = base + stage * TILE_M * row_bytes()
    right_to = right_base(base) + stage * right_rows() * row_bytes()
    for atom in range(row_bytes() // SWIZZLE):
        x = k * row_bytes() + atom * SWIZZLE
        to = left_to + atom * TILE_M * SWIZZLE
        tma_load_2d_pair(to, ptr_address(maps[0], 0), x, left_row, full)
        for half in range(halves()):
            to = right_to + half * product_rows() * row_bytes() + atom * product_rows() * SWIZZLE
            y = right_row + half * half_columns + rank * product_rows()
            tma_load_2d_pair(to, ptr_address(maps[1], 0), x, y, full)
    # Tiles of 512 bytes: behind the last of a row of tiles come others, which are not used.
    to = left_scales_base(base) + stage * scale_groups() * SCALE_TILE
    y = left_tile + k * scale_groups()
    tma_load_2d_pair(to, ptr_address(scales[0], 0), 0, y, full)
    to = right_scales_base(base) + stage * right_scales_stage()
    for half in range(halves()):
        n_tile = (inside + half * half_columns) // 128
        for i in range(right_scale_tiles()):
            y = right_tile + min(n_tile + i, last) * k_tiles + k * scale_groups()
            at = to + (half * right_scale_tiles() + i) * scale_groups() * SCALE_TILE
            tma_load_2d_pair(at, ptr_address(scales[1], 0), 0, y, full)


def ready(tensor_map):
    """See a map as it was written, and bring it ahead."""
    fence_tensormap_acquire(ptr_address(tensor_map, 0))
    prefetch_tensormap(ptr_address(tensor_map, 0))


def produce(base, maps, scales, of_groups, rows, columns, depth, total):
    """What the warp that brings the operands does."""
    if elect(WARP):
        ready(maps[0])
        ready(maps[1])
        if PAIR_OF_BLOCKS:
            ready(scales[0])
            ready(scales[1])
    syncwarp(WARP)
    steps = (depth + TILE_K - 1) // TILE_K
    stage = 0
    parity = 0
    work = first_work()
    while work < total:
        of_rows, column, part = tile_of(work, of_groups, rows, columns)
        if of_rows[0]:
            if elect(WARP):
                place = place_of(of_rows, column, part, columns, depth)
                for k in range(steps):
                    at, turn = next_stage(stage, parity, k)
                    if PAIR_OF_BLOCKS:
                        load_half(base, at, turn, k, maps, scales, place, columns // 2, depth)
                    else:
                        load_stage(base, at, turn, k, maps, scales, place, columns // 2, depth)
            stage, parity = next_stage(stage, parity, steps)
        work += work_step()


# Warp 5: scales to tensor memory, products -------------------------------------------------------


def product_word():
    """The instruction descriptor."""
    if PAIR_OF_BLOCKS:
        return pair_word()
    elif KIND == "nvf4":
        return tcgen05_product("mxf4nvf4", 16, "e2m1", "e2m1", "ue4m3", MMA_N)
    elif KIND == "mxf4":
        return tcgen05_product("mxf4", 32, "e2m1", "e2m1", "ue8m0", MMA_N)
    elif SWAP:
        return tcgen05_product("mxf8f6f4", 32, B_ELEMENT, A_ELEMENT, "ue8m0", MMA_N)
    else:
        return tcgen05_product("mxf8f6f4", 32, A_ELEMENT, B_ELEMENT, "ue8m0", MMA_N)


def pair_word():
    """That of a pair of blocks."""
    if KIND == "nvf4":
        return tcgen05_product_pair("mxf4nvf4", 16, "e2m1", "e2m1", "ue4m3", MMA_N)
    elif KIND == "mxf4":
        return tcgen05_product_pair("mxf4", 32, "e2m1", "e2m1", "ue8m0", MMA_N)
    else:
        return tcgen05_product_pair("mxf8f6f4", 32, A_ELEMENT, B_ELEMENT, "ue8m0", MMA_N)


def copy_tile(target, source):
    """A tile of scales to tensor memory."""
    descriptor = tcgen05_descriptor(source, 0, 16, 128)
    if PAIR_OF_BLOCKS:
        tcgen05_cp_scales_pair(target, descriptor)
    else:
        tcgen05_cp_scales(target, descriptor)


def commit(mbarrier):
    """Say when all that was issued is done, in both blocks of a pair."""
    if PAIR_OF_BLOCKS:
        tcgen05_commit_pair(mbarrier, 3)
    else:
        tcgen05_commit(mbarrier)


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
    if PAIR_OF_BLOCKS:
        if KIND == "nvf4":
            tcgen05_mma_nvf4_pair(d, a, b, word, a_scales, b_scales, accumulate)
        elif KIND == "mxf4":
            tcgen05_mma_mxf4_pair(d, a, b, word, a_scales, b_scales, accumulate)
        else:
            tcgen05_mma_mxf8f6f4_pair(d, a, b, word, a_scales, b_scales, accumulate)
    elif KIND == "nvf4":
        tcgen05_mma_nvf4(d, a, b, word, a_scales, b_scales, accumulate)
    elif KIND == "mxf4":
        tcgen05_mma_mxf4(d, a, b, word, a_scales, b_scales, accumulate)
    else:
        tcgen05_mma_mxf8f6f4(d, a, b, word, a_scales, b_scales, accumulate)


def copy_scales(base, stage, memory, groups):
    """The scales of a stage to tensor memory."""
    source = left_scales_base(base) + stage * scale_groups() * SCALE_TILE
    for group in range(scale_groups()):
        if group < groups:
            copy_tile(left_scales_column(memory) + 4 * group, source + group * SCALE_TILE)
    source = right_scales_base(base) + stage * right_scales_stage()
    for half in range(halves()):
        for group in range(scale_groups()):
            for i in range(right_scale_tiles()):
                if group < groups:
                    tile = (half * right_scale_tiles() + i) * scale_groups() + group
                    # A group's tiles side by side: columns for all rows of a product.
                    at = (half * scale_groups() + group) * right_scale_tiles() + i
                    copy_tile(right_scales_column(memory) + 4 * at, source + tile * SCALE_TILE)


def multiply_stage(base, stage, memory, accumulators, k, inside, half_columns, depth):
    """Products of a stage; the first of a tile begin its sums.

    `inside`: the first row of the right operand in its matrix, or in its tile of scales.
    """
    left = depth - k * TILE_K
    groups = min((blocks_of(left, B_SCALE) + 3) // 4, scale_groups())
    copy_scales(base, stage, memory, groups)
    word = product_word()
    a = tcgen05_descriptor(base + stage * TILE_M * row_bytes(), SWIZZLE, 16, 8 * SWIZZLE)
    b_at = right_base(base) + stage * right_rows() * row_bytes()
    for step in range(TILE_K // step_depth()):
        if step * step_depth() < left:
            # 32 bytes on in an atom; then the next atom. In units of 16 bytes.
            atom = step * 32 // SWIZZLE
            further = step * 32 % SWIZZLE // 16
            to_a = atom * TILE_M * SWIZZLE // 16 + further
            to_b = atom * product_rows() * SWIZZLE // 16 + further
            group = group_of_step(step)
            for half in range(halves()):
                b_half = b_at + half * product_rows() * row_bytes()
                b = tcgen05_descriptor(b_half, SWIZZLE, 16, 8 * SWIZZLE)
                # A tile may begin at row 64 of a tile of scales.
                inside_tile = (inside + half * half_columns) % 128 // 32
                scales = (half * scale_groups() + group) * right_scale_tiles() * 4
                multiply(
                    accumulators + half * MMA_N,
                    a + to_a,
                    b + to_b,
                    word | place_in_group(step),
                    left_scales_column(memory) + 4 * group,
                    right_scales_column(memory) + scales + inside_tile,
                    k > 0 or step > 0,
                )


def multiply_next(base, stage, parity, memory, acc, k, inside, half_columns, depth):
    """Wait for a stage, multiply, and say when it has been read."""
    full = full_base(base) + 8 * stage
    mbarrier_wait_parity(full, parity)
    tcgen05_fence_after_thread_sync()
    multiply_stage(base, stage, memory, memory + acc * TILE_N, k, inside, half_columns, depth)
    commit(full + 8 * STAGES)


def is_ragged(depth):
    """Whether the last instruction of a row takes scales beyond it, which can be anything."""
    if KIND == "mxf8" or PAIR_OF_BLOCKS:
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
    tile = left_scales_base(base) + (stage * scale_groups() + group) * SCALE_TILE
    clear_scales(tile, depth)
    first = right_scales_base(base) + stage * right_scales_stage()
    for i in range(halves() * right_scale_tiles()):
        clear_scales(first + (i * scale_groups() + group) * SCALE_TILE, depth)
    fence_proxy_async_shared()
    syncwarp(WARP)


def issue(base, memory, of_groups, rows, columns, depth, total):
    """What the warp that multiplies does."""
    steps = (depth + TILE_K - 1) // TILE_K
    ragged = is_ragged(depth)
    whole = steps - 1 if ragged else steps
    stage = 0
    parity = 0
    acc = 0
    acc_parity = 0
    work = first_work()
    while work < total:
        of_rows, column, part = tile_of(work, of_groups, rows, columns)
        inside = part if SWAP else column
        if of_rows[0]:
            made = made_base(base) + 8 * acc
            if elect(WARP):
                mbarrier_wait_parity(made + 16, acc_parity ^ 1)
                tcgen05_fence_after_thread_sync()
                for k in range(whole):
                    at, turn = next_stage(stage, parity, k)
                    multiply_next(base, at, turn, memory, acc, k, inside, columns // 2, depth)
                if not ragged:
                    commit(made)
            if ragged:
                at, turn = next_stage(stage, parity, whole)
                clear_padding(base, at, turn, whole, depth)
                if elect(WARP):
                    multiply_next(base, at, turn, memory, acc, whole, inside, columns // 2, depth)
                    commit(made)
            stage, parity = next_stage(stage, parity, steps)
            acc, acc_parity = next_accumulators(acc, acc_parity)
        work += work_step()
