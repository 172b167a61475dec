"""Which rows, range and expert belong to a scale tile: section 6 of the arithmetic definition.

Ranges are numbered in *tiles* of 128 rows, each range on a fresh one. Every warp walks over the
offsets, 32 ranges a step, each lane one: an inclusive sum gives each range its first tile, and the
lane whose range has the tile tells the others; should offsets decrease, an inclusive maximum makes
them harmless first. So any number of ranges will do, nothing is read back to the host, and no
thread waits for another warp.

Offsets count as they should be: below 0 as 0, beyond the rows as the rows, and never below the one
before. Whatever they hold, every row then belongs to exactly one range, or to none (before the
first offset, or from the last one on), and the tiles left over by the ranges are enough to number
the rows of none.

Instead of offsets there may be counts (OFFSETS begins with "counts_"): rows are those of `groups`
matrices of the same number of rows, the capacity; range i is the first rows of matrix i, and the
others of it are zeros. Nothing is searched then: matrix i has the tiles that it has alone, the next
ones behind those of matrix i - 1, as its scales have; those that no counted row is in, and one
more of each matrix behind all, serve the rows behind the count. Their owner is i + `groups`, which
is no expert's number.

Compile-time constants: OFFSETS, IDS, INDICES, STARTS: the dtypes "int32", "int64", "uint32" of the
index arrays, or "none" where a call has no such array; OFFSETS also "counts_int32"...
"""

from __future__ import annotations

from ..ptx.arith import and_u32, i64_of_i32, i64_of_u32, popc, sub_u32
from ..ptx.memory import ld_global_u32, ld_global_v2_u32
from ..ptx.warp import ballot, shfl_idx_u32, shfl_up_u32, vote_all
from .warps import lane_count, mask_of, thread_index

OFFSETS = "int32"
IDS = "none"
INDICES = "none"
STARTS = "none"


def load_index(p, i, dtype: str):
    """Element i of an index array, 64 bits wide."""
    if dtype == "int32":
        return i64_of_i32(ld_global_u32(p, i * 4, ""))
    elif dtype == "uint32":
        return i64_of_u32(ld_global_u32(p, i * 4, ""))
    else:
        words = ld_global_v2_u32(p, i * 8, "")
        return i64_of_u32(words[0]) + (i64_of_i32(words[1]) << 32)


def counted():
    """Whether there are counts instead of offsets."""
    if OFFSETS == "counts_int32" or OFFSETS == "counts_int64" or OFFSETS == "counts_uint32":
        return True
    else:
        return False


def load_count(row_counts, i, capacity):
    """A count: below 0 it counts as 0, beyond the capacity as the capacity."""
    if OFFSETS == "counts_int64":
        count = load_index(row_counts, i, "int64")
    elif OFFSETS == "counts_uint32":
        count = load_index(row_counts, i, "uint32")
    else:
        count = load_index(row_counts, i, "int32")
    return min(max(count, 0), capacity)


def running_max(mask, value, lane, count):
    """Inclusive maximum over the lanes up to this one, of the lowest `count` lanes."""
    step = 1
    while step < count:
        below = i64_of_u32(shfl_up_u32(mask, value, step))
        if lane >= step:
            value = max(value, below)
        step *= 2
    return value


def running_sum(mask, value, lane, count):
    """Inclusive sum over the lanes up to this one, of the lowest `count` lanes."""
    step = 1
    while step < count:
        below = i64_of_u32(shfl_up_u32(mask, value, step))
        if lane >= step:
            value += below
        step *= 2
    return value


def value_below(mask, value, lane, first):
    """The value of the lane below; `first` in lane 0."""
    below = i64_of_u32(shfl_up_u32(mask, value, 1))
    if lane == 0:
        below = first
    return below


def lowest_lane(votes):
    """Number of the lowest lane in a mask that is not 0."""
    return i64_of_u32(popc(sub_u32(and_u32(votes, sub_u32(0, votes)), 1)))


def rows_of_ranges(row_offsets, base, count, reach, rows, mask, lane):
    """The first row of range `base` + lane, and the one behind its last; of `count` lanes.

    `reach`: the row behind those of the ranges before `base`.
    """
    inside = lane < count
    upper = reach
    if inside:
        upper = min(max(load_index(row_offsets, base + lane + 1, OFFSETS), reach), rows)
    lower = value_below(mask, upper, lane, reach)
    if not vote_all(mask, upper >= lower or not inside):
        upper = running_max(mask, upper, lane, count)
        lower = value_below(mask, upper, lane, reach)
    return lower, upper


def find_tile(row_offsets, tile_starts, groups, rows, tile):
    """Find what belongs to a tile; the lanes of a warp call it together, with the same arguments.

    Returns what :func:`tile_of_ranges` does.
    """
    if counted():
        return tile_of_counts(row_offsets, groups, rows, tile)
    else:
        return tile_of_ranges(row_offsets, tile_starts, groups, rows, tile)


def tile_of_counts(row_counts, groups, rows, tile):
    """:func:`find_tile` with counts."""
    capacity = rows // max(groups, 1)
    each = max((capacity + 127) >> 7, 1)
    owner = tile // each
    number = tile - owner * each
    if owner >= groups:
        owner = tile - groups * each
        number = each
    first_tile = tile
    start = rows
    stop = rows
    if owner < groups:
        count = load_count(row_counts, owner, capacity)
        full = (count + 127) >> 7
        start = owner * capacity
        if number < full:
            first_tile = tile - number
            stop = start + count
        else:
            stop = start + capacity
            start += count + ((number - full) << 7)
            owner += groups
    return owner, first_tile, start, stop, 0, 0, rows, 0


def tile_of_ranges(row_offsets, tile_starts, groups, rows, tile):
    """:func:`find_tile` with offsets.

    Returns (owner, first_tile, start, stop, tiles, head, tail, taken), all of 64 bits: the range
    that owns the tile, its first tile and its rows; owner is -1 where there is none, and only then
    are these known: the tiles of all ranges, and rows below `head` and from `tail` on, which belong
    to no range. taken, with tile_starts: 1 if a range puts its scales into the tile of this number
    (0 without them).
    """
    lanes = lane_count()
    mask = mask_of(lanes)
    lane = thread_index() % 32
    owner = -1
    first_tile = 0
    start = 0
    stop = 0
    tiles = 0
    taken = 0
    head = rows
    if groups > 0:
        head = min(max(load_index(row_offsets, 0, OFFSETS), 0), rows)
    reach = head
    base = 0
    while base < groups and (owner < 0 or STARTS != "none"):
        count = min(lanes, groups - base)
        inside = lane < count
        lower, upper = rows_of_ranges(row_offsets, base, count, reach, rows, mask, lane)
        own = (upper - lower + 127) >> 7
        before = tiles + running_sum(mask, own, lane, count) - own
        votes = ballot(mask, inside and before <= tile and tile < before + own)
        if votes != 0:
            source = lowest_lane(votes)
            owner = base + source
            first_tile = i64_of_u32(shfl_idx_u32(mask, before, source))
            start = i64_of_u32(shfl_idx_u32(mask, lower, source))
            stop = i64_of_u32(shfl_idx_u32(mask, upper, source))
        if STARTS != "none":
            mine = -1
            if inside:
                mine = load_index(tile_starts, base + lane, STARTS)
            if ballot(mask, inside and mine <= tile and tile < mine + own) != 0:
                taken = 1
        tiles = i64_of_u32(shfl_idx_u32(mask, before + own, count - 1))
        reach = i64_of_u32(shfl_idx_u32(mask, upper, count - 1))
        base += lanes
    return owner, first_tile, start, stop, tiles, head, reach, taken


def row_of_none(k, head, tail):
    """The k-th row that belongs to no range; may be beyond the last row."""
    if k < head:
        return k
    else:
        return k - head + tail


def expert_of(expert_ids, owner, experts):
    """The expert of a range, -1 where it is switched off; experts is the number of them."""
    expert = owner
    if IDS != "none":
        expert = load_index(expert_ids, owner, IDS)
    if expert < 0 or expert >= experts:
        expert = -1
    return expert


def source_row(row_indices, row, input_rows):
    """The row of the input that a row reads, -1 where there is no such row."""
    source = row
    if INDICES != "none":
        source = load_index(row_indices, row, INDICES)
    if source < 0 or source >= input_rows:
        source = -1
    return source
