"""Tiles of the products with tensor memory: their extents, where their parts are, whose they are.

What the jobs of ``sm100_jobs`` share. An instruction has a *left* operand of 128 rows, one a lane
of tensor memory, and a *right* one of up to 256, a column each: A and B, or, with SWAP, B and A. A
stage of shared memory is TILE_K of the depth of 128 rows of the left and TILE_N of the right, in
atoms of SWIZZLE bytes of a row, and their scales as they lie in the tcgen layout, 512 bytes for 128
rows of 4 scales. Tensor memory has ACCS accumulators of TILE_N columns, then the scales of a stage
of the left and of the right.

With PAIR_OF_BLOCKS two blocks make one instruction's product: 256 rows, of which each has 128 of
the left operand and half of the rows of the right one, and the scales of all of them.

Compile-time constants: KIND, TILE_N, TILE_K, MMA_N, SWIZZLE, STAGES, ACCS, SWAP, GROUPED,
PAIR_OF_BLOCKS: see ``matmul_sm100``; B_SCALE, PAIR, A_STARTS and those of ``groups``.
"""

from __future__ import annotations

from .._numba import cuda
from ..ptx.arith import and_u32, i64_of_u32, popc, u32_of_i64
from ..ptx.cluster import cluster_rank
from ..ptx.memory import shared_base
from ..ptx.warp import ballot, shfl_idx_u32
from .groups import expert_of, find_tile, load_index, lowest_lane, rows_of_ranges, running_sum
from .warps import lane_count, mask_of, thread_index

PAIR = "none"
A_STARTS = "none"
OFFSETS = "int32"
KIND = "nvf4"
TILE_N = 128
TILE_K = 256
MMA_N = 128
SWIZZLE = 128
STAGES = 4
ACCS = 2
SWAP = False
GROUPED = False
PAIR_OF_BLOCKS = False

TILE_M = 128
SCALE_TILE = 512


# Extents -----------------------------------------------------------------------------------------


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


def right_scale_tiles():
    """Tiles of scales that the rows of a product's right operand lie in."""
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


def blocks_together():
    """Blocks that make a tile."""
    if PAIR_OF_BLOCKS:
        return 2
    else:
        return 1


def right_rows():
    """Rows of the right operand that a block has of a tile."""
    return TILE_N // blocks_together()


def product_rows():
    """Rows of the right operand that a block has of one of the products of a tile."""
    return MMA_N // blocks_together()


def right_base(base):
    """Codes of the right operand."""
    return base + STAGES * TILE_M * row_bytes()


def left_scales_base(base):
    """Scales of the left operand."""
    return right_base(base) + STAGES * right_rows() * row_bytes()


def right_scales_base(base):
    """Scales of the right operand."""
    return left_scales_base(base) + STAGES * scale_groups() * SCALE_TILE


def right_scales_stage():
    """Bytes of a stage of scales of the right operand."""
    return halves() * right_scale_tiles() * scale_groups() * SCALE_TILE


def strips_base(base):
    """Strips of accumulators, one a warp."""
    return right_scales_base(base) + STAGES * right_scales_stage()


def full_base(base):
    """mbarriers: a stage has arrived; STAGES further on: a stage has been read."""
    return strips_base(base) + 4 * 32 * strip_pitch()


def made_base(base):
    """mbarriers: accumulators are complete; 16 bytes further on: they have been taken."""
    return full_base(base) + 16 * STAGES


def address_base(base):
    """Where the address of the tensor memory is."""
    return made_base(base) + 32


def left_scales_column(memory):
    """First column of the scales of the left operand."""
    return memory + ACCS * TILE_N


def right_scales_column(memory):
    """First column of the scales of the right operand."""
    return left_scales_column(memory) + 4 * scale_groups()


# Tiles of the result -----------------------------------------------------------------------------


def columns_of_tile():
    """Columns of the product from one tile to the next; "halves": of the result."""
    if SWAP:
        return TILE_M
    else:
        return MMA_N


def tiles_across(columns):
    """Tiles beside each other."""
    if PAIR == "halves":
        return (columns // 2 + MMA_N - 1) // MMA_N
    else:
        return (columns + columns_of_tile() - 1) // columns_of_tile()


def parts_of_tile():
    """Tiles that the 128 rows of a tile of scales of A are."""
    if SWAP:
        return TILE_M // TILE_N
    else:
        return 1


def dense_tile(tile, rows):
    """What :func:`grouped_tile` says, of a dense product."""
    if PAIR_OF_BLOCKS:
        # The second block of the last tile may have no rows, and any scales then.
        last = (rows - 1) // TILE_M
        tile = tile * 2 + i64_of_u32(cluster_rank())
        first = tile * TILE_M
        return True, 0, first, min(rows - first, TILE_M), min(tile, last), 0, 0, 0
    else:
        first = tile * TILE_M
        return True, 0, first, min(rows - first, TILE_M), tile, 0, 0, 0


def first_work():
    """The first tile of the result that this block, or its pair, makes."""
    return cuda.blockIdx.x // blocks_together()


def work_step():
    """From there to the next."""
    return cuda.gridDim.x // blocks_together()


def grouped_tile(tile, row_offsets, expert_ids, tile_starts, groups, experts, rows, tiles):
    """A tile of rows: (live, expert, first, count, tile of A's scales, owner, head, tail).

    The lanes of a warp call it together. live: whether there is something to multiply; if not, its
    rows are zeros. count may be 0 or less: more tiles are allocated than there are.
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
        count = min(head + rows - tail - first, TILE_M)
    if a_tile < 0 or a_tile >= tiles:
        expert = -1
    return expert >= 0 and count > 0, expert, first, count, a_tile, owner, head, tail


def find_pair(row_offsets, groups, rows, pair):
    """Find what belongs to a pair of tiles: two of a range, or its last one alone.

    Pairs are numbered as tiles are by ``groups.find_tile``, each range from a fresh one on. The
    lanes of a warp call it together. Returns (owner, first_pair, first_tile, start, stop, pairs,
    head, tail): the range, its first pair, its first tile in the numbers of tiles, its rows; where
    owner is -1 the pairs of all ranges, and the rows that belong to none, are known.
    """
    lanes = lane_count()
    mask = mask_of(lanes)
    lane = thread_index() % 32
    owner = -1
    first_pair = 0
    first_tile = 0
    start = 0
    stop = 0
    tiles = 0
    pairs = 0
    head = rows
    if groups > 0:
        head = min(max(load_index(row_offsets, 0, OFFSETS), 0), rows)
    reach = head
    base = 0
    while base < groups and owner < 0:
        count = min(lanes, groups - base)
        inside = lane < count
        lower, upper = rows_of_ranges(row_offsets, base, count, reach, rows, mask, lane)
        own = (upper - lower + 127) >> 7
        before = running_sum(mask, own, lane, count) - own
        # Of a range with an odd number of tiles, half a pair is left over.
        odd = ballot(mask, inside and own % 2 == 1)
        below = i64_of_u32(popc(and_u32(odd, u32_of_i64((1 << lane) - 1))))
        pair_before = pairs + ((before + below) >> 1)
        mine = inside and pair_before <= pair and pair < pair_before + ((own + 1) >> 1)
        votes = ballot(mask, mine)
        if votes != 0:
            source = lowest_lane(votes)
            owner = base + source
            first_pair = i64_of_u32(shfl_idx_u32(mask, pair_before, source))
            first_tile = tiles + i64_of_u32(shfl_idx_u32(mask, before, source))
            start = i64_of_u32(shfl_idx_u32(mask, lower, source))
            stop = i64_of_u32(shfl_idx_u32(mask, upper, source))
        all_own = i64_of_u32(shfl_idx_u32(mask, before + own, count - 1))
        tiles += all_own
        pairs += (all_own + i64_of_u32(popc(odd))) >> 1
        reach = i64_of_u32(shfl_idx_u32(mask, upper, count - 1))
        base += lanes
    return owner, first_pair, first_tile, start, stop, pairs, head, reach


def grouped_pair(pair, row_offsets, expert_ids, tile_starts, groups, experts, rows, tiles):
    """What :func:`grouped_tile` says, of this block's half of a pair of tiles.

    `live` and the expert are the same in both blocks, which multiply together. The second may have
    no rows; and where one of the two tiles has no scales its number is -1, and its rows are zeros.
    """
    owner, first_pair, first_tile, start, stop, used, head, tail = find_pair(
        row_offsets, groups, rows, pair
    )
    rank = i64_of_u32(cluster_rank())
    live = False
    expert = -1
    a_tile = -1
    if owner >= 0:
        expert = expert_of(expert_ids, owner, experts)
        within = (pair - first_pair) * 2
        first = start + ((within + rank) << 7)
        count = min(stop - first, TILE_M)
        if A_STARTS != "none":
            first_tile = load_index(tile_starts, owner, A_STARTS)
        even = first_tile + within
        live = expert >= 0 and even >= -1 and even < tiles
        a_tile = even + rank
        if a_tile >= tiles:
            a_tile = -1
    else:
        first = ((pair - used) * 2 + rank) << 7
        count = min(head + rows - tail - first, TILE_M)
    return live, expert, first, count, a_tile, owner, head, tail


def tile_of(work, of_groups, rows, columns):
    """What belongs to a tile of the result; `of_groups` as the grouped kernel makes it.

    Returns what :func:`grouped_tile` says of its 128 rows, then its first column, and of the rows
    the first. Tiles of the same 128 rows follow each other.
    """
    each = tiles_across(columns) * parts_of_tile()
    tile = work // each
    rest = work - tile * each
    column = rest // parts_of_tile()
    part = (rest - column * parts_of_tile()) * TILE_N
    if GROUPED:
        row_offsets, expert_ids, tile_starts, groups, experts, tiles = of_groups
        if PAIR_OF_BLOCKS:
            live, expert, first, count, a_tile, owner, head, tail = grouped_pair(
                tile, row_offsets, expert_ids, tile_starts, groups, experts, rows, tiles
            )
        else:
            live, expert, first, count, a_tile, owner, head, tail = grouped_tile(
                tile, row_offsets, expert_ids, tile_starts, groups, experts, rows, tiles
            )
    else:
        live, expert, first, count, a_tile, owner, head, tail = dense_tile(tile, rows)
    if SWAP:
        live = live and part < count
    of_rows = (live, expert, first, count, a_tile, owner, head, tail)
    return of_rows, column * columns_of_tile(), part


def next_stage(stage, parity, count):
    """A place in a ring of STAGES, `count` further on."""
    ahead = stage + count
    turns = ahead // STAGES
    return ahead - turns * STAGES, (parity + turns) % 2


def next_accumulators(acc, parity):
    """The place behind `acc` in the ring of accumulators."""
    if ACCS == 1:
        return 0, parity ^ 1
    else:
        return acc ^ 1, parity ^ acc
