"""Which matrices a product is of: those of e4m3 values, or the others (docs/decisions.md D25).

Two launches share a product: chunks of ranges whose matrix is the other launch's have no number, so
that no item is of them. Ranges without a matrix are of the first launch.

Compile-time constants: MATRICES, "narrow" or "others" ("all": nothing of this module is used);
those of ``schedule`` and ``groups``.
"""

from __future__ import annotations

from .._numba import cuda
from ..ptx.arith import (
    add_u32,
    and_u32,
    div_u32,
    eq_u32,
    i64_of_u32,
    le_u32,
    lt_u32,
    min_u32,
    mul_u32,
    ne_u32,
    or_u32,
    select_u32,
    shl_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.memory import ld_global_u32, ld_shared_u32, st_shared_u32
from ..ptx.warp import syncwarp
from .grouped_pieces import sum_of_lanes_up_to
from .groups import expert_of

MATRICES = "all"
THREADS = 512

WARP = 0xFFFFFFFF
NOT_OURS = 0x80000000
NUMBER = 0x7FFFFFFF


def is_ours(b_scales, expert, matrix_bytes):
    """Whether the matrix of an expert (-1: there is none) is this launch's."""
    narrow = True
    if expert >= 0:
        narrow = ne_u32(ld_global_u32(b_scales, expert * matrix_bytes + 4, ""), 0)
    if MATRICES == "narrow":
        return narrow
    else:
        return not narrow


def number_our_chunks(b_scales, expert_ids, experts, groups, table, matrix_bytes, thread):
    """Number the chunks in a table of ranges anew; all threads of the block come here."""
    i = i64_of_u32(thread)
    while i < groups:
        expert = expert_of(expert_ids, i, experts)
        if not is_ours(b_scales, expert, matrix_bytes):
            at = first_chunk_of(table, u32_of_i64(i))
            st_shared_u32(at, or_u32(ld_shared_u32(at), NOT_OURS))
        i += THREADS
    cuda.syncthreads()
    if lt_u32(thread, 32):
        number_by_warp(u32_of_i64(groups), table, thread)
    cuda.syncthreads()


def first_chunk_of(table, i):
    """Where the number of a range's first chunk is."""
    return add_u32(table, add_u32(shl_u32(i, 4), 4))


def chunks_before(number, following):
    """Our chunks of a range, of its number in the table and of the next one's."""
    ours = eq_u32(and_u32(number, NOT_OURS), 0)
    return select_u32(ours, sub_u32(and_u32(following, NUMBER), number), 0)


def number_by_warp(groups, table, lane):
    """What one warp does: each lane a run of ranges."""
    per = div_u32(add_u32(groups, 31), 32)
    first = min_u32(mul_u32(lane, per), groups)
    last = min_u32(add_u32(first, per), groups)
    mine = sub_u32(first, first)
    number = ld_shared_u32(first_chunk_of(table, first))
    following = number
    i = first
    while lt_u32(i, last):
        i = add_u32(i, 1)
        following = ld_shared_u32(first_chunk_of(table, i))
        mine = add_u32(mine, chunks_before(number, following))
        number = following
    upto = sum_of_lanes_up_to(mine, lane)
    chunk = sub_u32(upto, mine)
    # The number behind a lane's run is the first of the next lane's: all have read, now all write.
    syncwarp(WARP)
    i = first
    while lt_u32(i, last):
        number = ld_shared_u32(first_chunk_of(table, i))
        after = following
        if lt_u32(add_u32(i, 1), last):
            after = ld_shared_u32(first_chunk_of(table, add_u32(i, 1)))
        st_shared_u32(first_chunk_of(table, i), chunk)
        chunk = add_u32(chunk, chunks_before(number, after))
        i = add_u32(i, 1)
    if le_u32(31, lane):
        st_shared_u32(first_chunk_of(table, groups), upto)
