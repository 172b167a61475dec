"""Grouped quantisation at the speed of memory: the same bytes as ``grouped_quantize``.

A block of 128 threads takes 64 pieces of 16 columns (half of its threads each) of some rows of one
tile of 128. Its warps first find the tile's range, each by itself: every lane adds up the tiles of
a run of ranges, one scan over the lanes tells the run that has the tile, a second one, over the
ranges of that run, tells the range. Then the block goes over its rows as ``quantize_stream`` does,
two neighbouring ones a thread at a time. Where a tile is not full, the block zeroes its part of the
scales first.

Constraints: ALIGNED; no tile_starts; fewer than 1025 ranges; rows below 2^31; a row of x and of the
result below 4 GB; gridDim.y / SPLIT at least ``layouts.allocated_tiles(rows, groups)``. Grid:
(chunks of 64 pieces, tiles * SPLIT), where SPLIT = 16 / PAIRS.

Compile-time constants beside those of ``grouped_quantize`` and ``quantize_stream``: PAIRS, pairs of
rows {2i, 2i + 1} (times four: + {0, 32, 64, 96}) that a block takes: 16, 8, 4, 2, 1.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_u32,
    and_u32,
    eq_u32,
    ffs,
    i64_of_u32,
    le_u32,
    lt_u32,
    max_nan_f32,
    max_u32,
    min_u32,
    mul_rn,
    mul_u32,
    ne_u32,
    or_u32,
    rcp_rn,
    select_f32,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import (
    ld_global_u32,
    ld_global_v2_u32,
    st_global_u8_if,
    st_global_v2_u32_if,
    st_global_v4_u32,
    st_global_v4_u32_if,
)
from ..ptx.warp import ballot, shfl_idx_u32, shfl_up_u32, shfl_xor_f32, vote_all
from .elements import encode_e2m1x8, encode_float8x4
from .grouped_quantize import INDEX_DTYPES, encode_scale_of
from .groups import (
    expert_of,
    find_tile,
    load_index,
)
from .quantize import ELEMENT_CONSTANTS
from .scales import SIXTH, block_scale, usable
from .stream import amax_piece, load_half_piece, quick_scale, scaled_codes, widen

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
LAYOUT = "tcgen"
ENCODE = "none"
OFFSETS = "int32"
INDICES = "none"
PAIRS = 4

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
WARP = 0xFFFFFFFF
THREADS = 128
CHUNK = 64  # pieces that a block takes of a row


def offset_at(row_offsets, i):
    """Offset i in 32 bits; all ones for what does not fit them, which is more than any rows."""
    if OFFSETS == "int64":
        words = ld_global_v2_u32(row_offsets, i64_of_u32(i) * 8, "")
        return or_u32(words[0], select_u32(eq_u32(words[1], 0), 0, WARP))
    else:
        return ld_global_u32(row_offsets, i64_of_u32(i) * 4, "")


def range_tiles(low, high):
    """Tiles of a range of rows."""
    return shr_u32(add_u32(sub_u32(high, low), 127), 7)


def sum_of_lanes_up_to(value, lane):
    """Inclusive sum over the lanes of a full warp."""
    value = add_u32(value, select_u32(lt_u32(lane, 1), 0, shfl_up_u32(WARP, value, 1)))
    value = add_u32(value, select_u32(lt_u32(lane, 2), 0, shfl_up_u32(WARP, value, 2)))
    value = add_u32(value, select_u32(lt_u32(lane, 4), 0, shfl_up_u32(WARP, value, 4)))
    value = add_u32(value, select_u32(lt_u32(lane, 8), 0, shfl_up_u32(WARP, value, 8)))
    return add_u32(value, select_u32(lt_u32(lane, 16), 0, shfl_up_u32(WARP, value, 16)))


def lane_of(votes):
    """Number of the lowest lane in a mask that is not 0."""
    return sub_u32(ffs(votes), 1)


def find_tile_quickly(row_offsets, groups, rows, tile, lane):
    """Find what belongs to a tile, as ``groups.find_tile`` does and with the same results.

    All lanes of a full warp call it; rows are below 2^31. Returns the range (-1: none) in 64 bits;
    first_tile, start, stop, tiles, head, tail in 32. Offsets that decrease or leave the rows go to
    ``find_tile``.
    """
    all_rows = u32_of_i64(rows)
    all_groups = u32_of_i64(groups)
    per = shr_u32(add_u32(all_groups, 31), 5)
    first = min_u32(mul_u32(lane, per), all_groups)
    last = min_u32(add_u32(first, per), all_groups)
    low = offset_at(row_offsets, first)
    head = shfl_idx_u32(WARP, low, 0)
    own = sub_u32(first, first)
    good = le_u32(low, all_rows)
    i = first
    while lt_u32(i, last):
        # Eight loads at once: one after the other they would take eight times as long. Beyond the
        # run the offset before is taken once more: a range of no rows.
        a = offset_at(row_offsets, add_u32(i, 1))
        b = offset_at(row_offsets, min_u32(add_u32(i, 2), last))
        c = offset_at(row_offsets, min_u32(add_u32(i, 3), last))
        d = offset_at(row_offsets, min_u32(add_u32(i, 4), last))
        e = offset_at(row_offsets, min_u32(add_u32(i, 5), last))
        f = offset_at(row_offsets, min_u32(add_u32(i, 6), last))
        g = offset_at(row_offsets, min_u32(add_u32(i, 7), last))
        h = offset_at(row_offsets, min_u32(add_u32(i, 8), last))
        good = good & le_u32(low, a) & le_u32(a, b) & le_u32(b, c) & le_u32(c, d)
        good = good & le_u32(d, e) & le_u32(e, f) & le_u32(f, g) & le_u32(g, h)
        own = add_u32(own, add_u32(range_tiles(low, a), range_tiles(a, b)))
        own = add_u32(own, add_u32(range_tiles(b, c), range_tiles(c, d)))
        own = add_u32(own, add_u32(range_tiles(d, e), range_tiles(e, f)))
        own = add_u32(own, add_u32(range_tiles(f, g), range_tiles(g, h)))
        low = h
        i = add_u32(i, 8)
    good = good & le_u32(low, all_rows)
    if not vote_all(WARP, good):
        wide = find_tile(row_offsets, row_offsets, groups, rows, tile)
        return (
            wide[0],
            u32_of_i64(wide[1]),
            u32_of_i64(wide[2]),
            u32_of_i64(wide[3]),
            u32_of_i64(wide[4]),
            u32_of_i64(wide[5]),
            u32_of_i64(wide[6]),
        )
    target = u32_of_i64(tile)
    upto = sum_of_lanes_up_to(own, lane)
    before = sub_u32(upto, own)
    tiles = shfl_idx_u32(WARP, upto, 31)
    tail = shfl_idx_u32(WARP, low, 31)
    votes = ballot(WARP, le_u32(before, target) & lt_u32(target, upto))
    owner = -1
    first_tile = sub_u32(lane, lane)
    start = first_tile
    stop = first_tile
    if ne_u32(votes, 0):
        source = lane_of(votes)
        base = shfl_idx_u32(WARP, before, source)
        mine = add_u32(mul_u32(source, per), lane)
        inside = lt_u32(lane, per) & lt_u32(mine, all_groups)
        lower = offset_at(row_offsets, min_u32(mine, all_groups))
        upper = offset_at(row_offsets, min_u32(add_u32(mine, 1), all_groups))
        own = select_u32(inside, range_tiles(lower, upper), 0)
        upto = add_u32(base, sum_of_lanes_up_to(own, lane))
        before = sub_u32(upto, own)
        votes = ballot(WARP, inside & le_u32(before, target) & lt_u32(target, upto))
        source = lane_of(votes)
        owner = i64_of_u32(shfl_idx_u32(WARP, mine, source))
        first_tile = shfl_idx_u32(WARP, before, source)
        start = shfl_idx_u32(WARP, lower, source)
        stop = shfl_idx_u32(WARP, upper, source)
    return owner, first_tile, start, stop, tiles, head, tail


def zero_scales(scales, tile_at, share, chunk, across, thread):
    """Zero this block's part of a tile's scales: 32 * PAIRS bytes of each of its 512-byte tiles."""
    k_tiles = 16 if SCALE == "e4m3" else 8
    i = thread
    while i < k_tiles * 2 * PAIRS:
        k = chunk * k_tiles + i // (2 * PAIRS)
        if k < across:
            at = tile_at + k * 512 + share * (32 * PAIRS) + i % (2 * PAIRS) * 16
            st_global_v4_u32(scales, at, 0, 0, 0, 0, "")
        i += THREADS


def row_in_tile(share, line):
    """The first of the two rows of a line of this block, of 128."""
    pair = add_u32(mul_u32(share, PAIRS), shr_u32(line, 2))
    return add_u32(shl_u32(pair, 1), shl_u32(and_u32(line, 3), 5))


def source_of(row_indices, row, input_rows):
    """The input row that a row reads, and whether there is one."""
    if INDICES == "none":
        return row, lt_u32(row, input_rows)
    else:
        source = load_index(row_indices, i64_of_u32(row), INDICES)
        return u32_of_i64(source), (source >= 0) & (source < i64_of_u32(input_rows))


def row_from(base, local, unowned, head, tail):
    """Number of a row of this tile; `base` counts the rows of no range where it is `unowned`."""
    row = add_u32(base, local)
    if unowned and not lt_u32(row, head):
        row = add_u32(sub_u32(row, head), tail)
    return row


def grouped_stream(
    x,
    codes,
    scales,
    row_offsets,
    expert_ids,
    row_indices,
    encode_scale,
    encode_number,
    decode_scale,
    input_rows,
    rows,
    groups,
    experts,
    pieces,
    all_pieces,
    x_row,
    codes_row,
    across,
    tiles,
):
    # across: 512-byte tiles (tcgen) or blocks (linear) of a row. tiles: that the scales have.
    griddepcontrol_launch_dependents()
    thread = u32_of_i64(cuda.threadIdx.x)
    chunk = u32_of_i64(cuda.blockIdx.x)
    split = 16 // PAIRS
    tile = i64_of_u32(u32_of_i64(cuda.blockIdx.y // split))
    share = u32_of_i64(cuda.blockIdx.y % split)
    piece = add_u32(mul_u32(chunk, CHUNK), and_u32(thread, CHUNK - 1))
    beside = shr_u32(thread, 6)
    real = lt_u32(piece, pieces)
    owner = lt_u32(piece, all_pieces)
    if SCALE == "e4m3":
        block = piece
    else:
        block = shr_u32(piece, 1)
        owner = owner & eq_u32(and_u32(piece, 1), 0)
    block_at = add_u32(shl_u32(shr_u32(block, 2), 9), and_u32(block, 3))
    piece_bytes = 64 if INPUT == "float32" else 32
    half = piece_bytes // 2
    x_piece = i64_of_u32(piece) * piece_bytes
    codes_piece = i64_of_u32(piece) * (8 if ELEMENT == "e2m1" else 16)
    all_rows = u32_of_i64(rows)
    all_input = u32_of_i64(input_rows)
    griddepcontrol_wait()
    range_of, first_tile, start, stop, used, head, tail = find_tile_quickly(
        row_offsets, groups, rows, tile, and_u32(thread, 31)
    )
    if ENCODE != "row":
        if eq_u32(chunk, 0) & eq_u32(share, 0):
            store_scales_of_ranges(
                decode_scale, encode_scale, encode_number, expert_ids, groups, experts, tile
            )
    expert = -1
    if range_of >= 0:
        expert = expert_of(expert_ids, range_of, experts)
        first_row = add_u32(start, shl_u32(sub_u32(u32_of_i64(tile), first_tile), 7))
        count = min_u32(sub_u32(stop, first_row), 128)
    else:
        first_row = shl_u32(sub_u32(u32_of_i64(tile), used), 7)
        count = shl_u32(1, 7)
    unowned = range_of < 0
    tile_at = tile * (i64_of_u32(across) * 512)
    if LAYOUT == "tcgen":
        if (lt_u32(count, 128) or expert < 0) and tile < tiles:
            zero_scales(
                scales,
                tile_at,
                i64_of_u32(share),
                i64_of_u32(chunk),
                i64_of_u32(across),
                i64_of_u32(thread),
            )
            cuda.syncthreads()
    line = beside
    if expert < 0:
        # Rows of no range, or of one that is switched off.
        while lt_u32(line, 4 * PAIRS):
            local = row_in_tile(share, line)
            line = add_u32(line, 2)
            row0 = row_from(first_row, local, unowned, head, tail)
            row1 = row_from(first_row, add_u32(local, 1), unowned, head, tail)
            mine0 = lt_u32(local, count) & lt_u32(row0, all_rows)
            mine1 = lt_u32(add_u32(local, 1), count) & lt_u32(row1, all_rows)
            codes0 = i64_of_u32(row0) * i64_of_u32(codes_row) + codes_piece
            codes1 = i64_of_u32(row1) * i64_of_u32(codes_row) + codes_piece
            store_zeros(codes, codes0, real & mine0)
            store_zeros(codes, codes1, real & mine1)
            if LAYOUT == "linear":
                scale0 = i64_of_u32(row0) * i64_of_u32(across) + i64_of_u32(block)
                scale1 = i64_of_u32(row1) * i64_of_u32(across) + i64_of_u32(block)
                st_global_u8_if(scales, scale0, 0, owner & mine0)
                st_global_u8_if(scales, scale1, 0, owner & mine1)
            if ENCODE == "row":
                if eq_u32(piece, 0):
                    if mine0:
                        decode_scale[i64_of_u32(row0)] = ONE
                    if mine1:
                        decode_scale[i64_of_u32(row1)] = ONE
        return
    g = encode_scale_of(encode_scale, encode_number, expert)
    c0 = mul_rn(g, SIXTH)
    r0 = rcp_rn(g)
    c1 = c0
    r1 = r0
    # Rows of a pair are those of the pair's number times two and further on: from `lines` on, none
    # is in the range.
    pairs = min_u32(shr_u32(add_u32(count, 1), 1), mul_u32(add_u32(share, 1), PAIRS))
    lines = sub_u32(max_u32(pairs, mul_u32(share, PAIRS)), mul_u32(share, PAIRS))
    lines = shl_u32(lines, 2)
    while lt_u32(line, lines):
        local = row_in_tile(share, line)
        line = add_u32(line, 2)
        # The same for all lanes of a warp.
        if lt_u32(local, count):
            row0 = add_u32(first_row, local)
            row1 = add_u32(row0, 1)
            mine1 = lt_u32(add_u32(local, 1), count)
            source0, there0 = source_of(row_indices, row0, all_input)
            source1, there1 = source_of(row_indices, row1 if mine1 else row0, all_input)
            live0 = real & there0
            live1 = real & there1 & mine1
            at0 = i64_of_u32(source0) * i64_of_u32(x_row) + x_piece if live0 else 0
            at1 = i64_of_u32(source1) * i64_of_u32(x_row) + x_piece if live1 else 0
            a0 = load_half_piece(x, at0)
            b0 = load_half_piece(x, at0 + half)
            a1 = load_half_piece(x, at1)
            b1 = load_half_piece(x, at1 + half)
            if ENCODE == "row":
                g0 = usable(encode_scale[i64_of_u32(row0)])
                g1 = usable(encode_scale[i64_of_u32(row1 if mine1 else row0)])
                c0 = mul_rn(g0, SIXTH)
                r0 = rcp_rn(g0)
                c1 = mul_rn(g1, SIXTH)
                r1 = rcp_rn(g1)
                if eq_u32(piece, 0):
                    decode_scale[i64_of_u32(row0)] = r0
                    if mine1:
                        decode_scale[i64_of_u32(row1)] = r1
            codes0 = i64_of_u32(row0) * i64_of_u32(codes_row) + codes_piece
            if LAYOUT == "tcgen":
                place = add_u32(shl_u32(and_u32(local, 31), 4), shl_u32(shr_u32(local, 5), 2))
                scale0 = tile_at + i64_of_u32(add_u32(block_at, place))
                scale_step = 16
            else:
                scale0 = i64_of_u32(row0) * i64_of_u32(across) + i64_of_u32(block)
                scale_step = i64_of_u32(across)
            owner1 = owner & mine1
            amax0 = select_f32(live0, amax_piece(a0, b0), ZERO)
            amax1 = select_f32(live1, amax_piece(a1, b1), ZERO)
            if SCALE == "e8m0":
                amax0 = max_nan_f32(amax0, shfl_xor_f32(WARP, amax0, 1))
                amax1 = max_nan_f32(amax1, shfl_xor_f32(WARP, amax1, 1))
            byte0, q0, holds0 = quick_scale(amax0, c0, r0)
            byte1, q1, holds1 = quick_scale(amax1, c1, r1)
            held = holds0 & holds1
            if ELEMENT == "e2m1" and not held:
                byte0, q0 = block_scale(amax0, c0, r0)
                byte1, q1 = block_scale(amax1, c1, r1)
            st_global_u8_if(scales, scale0, byte0, owner)
            st_global_u8_if(scales, scale0 + scale_step, byte1, owner1)
            store_pieces(
                codes,
                codes0,
                codes0 + i64_of_u32(codes_row),
                a0,
                b0,
                a1,
                b1,
                q0,
                q1,
                held,
                live0,
                live1,
                real,
                real & mine1,
            )


def store_scales_of_ranges(
    decode_scale, encode_scale, encode_number, expert_ids, groups, experts, tile
):
    """Write the decode scales of 128 ranges a tile, and those left over with tile 0."""
    i = tile * THREADS + cuda.threadIdx.x
    if i < groups:
        expert = expert_of(expert_ids, i, experts)
        decode_scale[i] = rcp_rn(encode_scale_of(encode_scale, encode_number, expert))
    if tile == 0:
        i += cuda.gridDim.y // (16 // PAIRS) * THREADS
        while i < groups:
            expert = expert_of(expert_ids, i, experts)
            decode_scale[i] = rcp_rn(encode_scale_of(encode_scale, encode_number, expert))
            i += THREADS


def store_pieces(codes, at0, at1, a0, b0, a1, b1, q0, q1, held, live0, live1, mine0, mine1):
    """Store the codes of two pieces where they are `mine`: zeros where they are not `live`."""
    if ELEMENT == "e2m1":
        if held:
            low0 = scaled_codes(a0, q0)
            high0 = scaled_codes(b0, q0)
            low1 = scaled_codes(a1, q1)
            high1 = scaled_codes(b1, q1)
        else:
            low0 = encode_e2m1x8(widen(a0), q0)
            high0 = encode_e2m1x8(widen(b0), q0)
            low1 = encode_e2m1x8(widen(a1), q1)
            high1 = encode_e2m1x8(widen(b1), q1)
        low0 = select_u32(live0, low0, 0)
        high0 = select_u32(live0, high0, 0)
        st_global_v2_u32_if(codes, at0, low0, high0, mine0)
        low1 = select_u32(live1, low1, 0)
        high1 = select_u32(live1, high1, 0)
        st_global_v2_u32_if(codes, at1, low1, high1, mine1)
    else:
        store_float8(codes, at0, a0, b0, q0, live0, mine0)
        store_float8(codes, at1, a1, b1, q1, live1, mine1)


def store_float8(codes, at, a, b, q, live, mine):
    """Store the 8-bit codes of a piece."""
    v = widen(a)
    w = widen(b)
    st_global_v4_u32_if(
        codes,
        at,
        select_u32(live, encode_float8x4(v[0], v[1], v[2], v[3], q), 0),
        select_u32(live, encode_float8x4(v[4], v[5], v[6], v[7], q), 0),
        select_u32(live, encode_float8x4(w[0], w[1], w[2], w[3], q), 0),
        select_u32(live, encode_float8x4(w[4], w[5], w[6], w[7], q), 0),
        mine,
    )


def store_zeros(codes, at, mine):
    """Zero the codes of a piece."""
    if ELEMENT == "e2m1":
        st_global_v2_u32_if(codes, at, 0, 0, mine)
    else:
        st_global_v4_u32_if(codes, at, 0, 0, 0, 0, mine)


GROUPED_STREAM = Kernel(
    "grouped_stream",
    grouped_stream,
    (
        *("u8*", "u8*", "u8*", "u8*", "u8*", "u8*", "f32*", "f32", "f32*"),
        *("i64", "i64", "i64", "i64", "u32", "u32", "u32", "u32", "u32", "i64"),
    ),
    {
        **ELEMENT_CONSTANTS,
        "ALIGNED": (True,),
        "ENCODE": ("none", "scalar", "array", "expert", "row"),
        "OFFSETS": INDEX_DTYPES,
        "IDS": ("none", "int32", "int64"),
        "INDICES": ("none", "int32", "int64"),
        "STARTS": ("none",),
        "PAIRS": (1, 2, 4, 8, 16),
        "BLOCKS_PER_SM": (8, 10),
    },
    threads=THREADS,
)

_COMMON = {
    "INPUT": "bfloat16",
    "ALIGNED": True,
    "LAYOUT": "tcgen",
    "ROUNDING": "rceil",
    "OFFSETS": "int32",
    "IDS": "int32",
    "STARTS": "none",
    "PAIRS": 4,
}
_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "UNIT": False, "ENCODE": "expert", "INDICES": "none"}
_MXFP8 = {"ELEMENT": "e4m3", "SCALE": "e8m0", "BLOCKS_PER_SM": 8}

# Ten blocks a processor have 48 registers a thread, too few on sm_120a for CUDA 13.0's assembler.
_TEN = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a")

VARIANTS = (
    {**_COMMON, **_NVFP4, "BLOCKS_PER_SM": 10, "ARCHITECTURES": _TEN},
    {**_COMMON, **_NVFP4, "BLOCKS_PER_SM": 8, "ARCHITECTURES": ("sm_120a", "sm_121a")},
    {**_COMMON, **_MXFP8, "UNIT": True, "ENCODE": "none", "INDICES": "int32"},
)
