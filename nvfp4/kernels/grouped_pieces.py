"""What the grouped quantisers at the speed of memory share: ranges, rows in pairs, pieces.

A *piece* is 16 columns of a row, a thread's (``stream``). Its thread takes the piece in two rows at
a time: what has no branch between is interleaved by the compiler.

Compile-time constants: those of ``stream`` and ``groups``, and ENCODE, of which only "row" matters
here.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..ptx.arith import (
    add_u32,
    eq_u32,
    ffs,
    i64_of_u32,
    le_u32,
    lt_u32,
    max_nan_f32,
    min_u32,
    mul_u32,
    ne_u32,
    or_u32,
    rcp_rn,
    select_f32,
    select_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.memory import ld_global_u32, ld_global_v2_u32, st_global_v2_u32_if, st_global_v4_u32_if
from ..ptx.warp import ballot, shfl_idx_u32, shfl_up_u32, shfl_xor_f32, vote_all
from .elements import encode_e2m1x8, encode_float8x4
from .grouped_quantize import encode_scale_of
from .groups import expert_of, find_tile, load_index
from .scales import block_scale
from .stream import (
    amax_piece,
    exact_factors,
    load_half_piece,
    quick_scale,
    scaled_codes,
    usual_factor,
    widen,
)

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
ENCODE = "none"
OFFSETS = "int32"
INDICES = "none"

ZERO = np.float32(0.0)
WARP = 0xFFFFFFFF
THREADS = 128


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


def load_pair(x, row_indices, row0, row1, mine0, mine1, spare, real, input_rows, x_row, x_piece):
    """Load a piece of two rows, all loads issued before one is used.

    A row that is not `mine` counts as `spare`, which is one of the range's. `real`: the piece is
    one of the row's columns, not its padding. Returns the half pieces of both, and whether each is
    live: what is not reads as element 0, whatever that is.
    """
    half = 32 if INPUT == "float32" else 16
    source0, there0 = source_of(row_indices, row0 if mine0 else spare, input_rows)
    source1, there1 = source_of(row_indices, row1 if mine1 else spare, input_rows)
    live0 = real & there0 & mine0
    live1 = real & there1 & mine1
    at0 = i64_of_u32(source0) * i64_of_u32(x_row) + x_piece if live0 else 0
    at1 = i64_of_u32(source1) * i64_of_u32(x_row) + x_piece if live1 else 0
    a0 = load_half_piece(x, at0)
    b0 = load_half_piece(x, at0 + half)
    a1 = load_half_piece(x, at1)
    b1 = load_half_piece(x, at1 + half)
    return a0, b0, a1, b1, live0, live1


def factors_of_row(encode_scale, row):
    """C and r of a row that has an encode scale of its own."""
    return exact_factors(encode_scale[i64_of_u32(row)])


def scales_of_pair(a0, b0, a1, b1, live0, live1, c0, r0, c1, r1):
    """Scale bytes of two pieces, q of both, and whether both may take the quick conversion."""
    amax0 = select_f32(live0, amax_piece(a0, b0), ZERO)
    amax1 = select_f32(live1, amax_piece(a1, b1), ZERO)
    if SCALE == "e8m0":
        amax0 = max_nan_f32(amax0, shfl_xor_f32(WARP, amax0, 1))
        amax1 = max_nan_f32(amax1, shfl_xor_f32(WARP, amax1, 1))
    byte0, q0, holds0 = quick_scale(amax0, c0, r0)
    byte1, q1, holds1 = quick_scale(amax1, c1, r1)
    held = holds0 & holds1 & usual_factor(c0) & usual_factor(c1)
    if ELEMENT == "e2m1" and not held:
        byte0, q0 = block_scale(amax0, c0, r0)
        byte1, q1 = block_scale(amax1, c1, r1)
    return byte0, byte1, q0, q1, held


def store_scales_of_ranges(
    decode_scale, encode_scale, encode_number, expert_ids, groups, experts, tile, tiles
):
    """Write the decode scales of 128 ranges a tile, and those left over with tile 0."""
    i = tile * THREADS + cuda.threadIdx.x
    if i < groups:
        expert = expert_of(expert_ids, i, experts)
        decode_scale[i] = rcp_rn(encode_scale_of(encode_scale, encode_number, expert))
    if tile == 0:
        i += tiles * THREADS
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
