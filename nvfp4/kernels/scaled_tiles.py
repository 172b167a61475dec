"""Tiles of sums on the block-scaled tensor cores of sm_120a: copies in stages, and ``mma.sync``.

What ``matmul_sm120`` and its grouped twin share. A tile has ROWS rows of A and 128 rows of B.
Elements and scales are copied to shared memory as they are, four stages deep, and multiplied there:
no element is converted on the way.

A stage has 64 bytes of every row, a *line*: 128 codes where both operands are e2m1 (KIND "nvfp4",
"mxfp4"), 64 elements otherwise, e2m1 beside eight-bit elements as eight bytes of codes in every
sixteen. Chunk c of 16 bytes of line r lies at c ^ (r / 2 % 4), so that the eight lines of a matrix
lie in different banks. Behind the lines of A and B lie the words of their scales: four blocks each,
two a row for nvfp4, one otherwise; two stages of eight-bit elements share a word.

Each of the warps makes 64 (of 128 rows) or 16 (of 16) rows and 32 columns. Lane 4g + t holds the
scales of row g or g + 8 (t even or odd) of one or the other 16 rows of 32 (t / 2), and of column g
of the t-th eight columns: one word a lane, that the products select by thread.

Scale words that are not at multiples of 4 bytes, or that do not end with their row (linear scales
of a number of blocks that is no multiple of 4), are read byte by byte ahead of the products of a
stage and stored behind them. Blocks beyond the depth have scale 0, whatever the padding holds.

Compile-time constants: KIND (``ptx.mma_scaled.KINDS``), ROWS (128 or 16), THREADS (256 or 128);
A_ELEMENT, A_LAYOUT, B_ELEMENT, B_LAYOUT as in ``matmul_naive``.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..ptx.arith import and_u32, or_u32, select_u32, shl_u32, shr_u32
from ..ptx.bulk import (
    cp_async_4,
    cp_async_8,
    cp_async_16,
    cp_async_commit_group,
    cp_async_wait_group,
)
from ..ptx.memory import (
    ld_global_u8,
    ld_shared_u32,
    ld_shared_v2_u32,
    ptr_address,
    shared_base,
    st_shared_u32,
)
from ..ptx.mma import ldmatrix_x4
from ..ptx.mma_scaled import ldmatrix_x4_e2m1, mma_scaled_x4
from .scales import tcgen_place

KIND = "nvfp4"
ROWS = 128
THREADS = 256
A_ELEMENT = "e2m1"
A_LAYOUT = "tcgen"
B_ELEMENT = "e2m1"
B_LAYOUT = "tcgen"

ZERO = np.float32(0.0)
STAGES = 4
IN_FLIGHT = STAGES - 2  # groups of copies that a stage's products need not wait for
COLUMNS = 128  # of a tile
LINE = 64  # bytes of a row of a stage


# Where things lie --------------------------------------------------------------------------------


def words_of_row():
    """Words of scales of a row of a stage."""
    if KIND == "nvfp4":
        return 2
    else:
        return 1


def stage_bytes():
    """Bytes of a stage."""
    return (ROWS + COLUMNS) * (LINE + 4 * words_of_row())


def steps_of(depth):
    """Stages of a product."""
    if KIND == "nvfp4" or KIND == "mxfp4":
        return (depth + 127) // 128
    else:
        return (depth + 63) // 64


def chunk_at(lines, line, chunk):
    """Address of a chunk of a line."""
    return lines + line * LINE + ((chunk ^ (line >> 1 & 3)) << 4)


def first_scale(row, blocks, layout: str):
    """Byte of a row's first scale in its matrix."""
    if layout == "linear":
        return row * blocks
    else:
        return tcgen_place(row, 0, (blocks + 3) // 4)


# Copies ------------------------------------------------------------------------------------------


def copy_chunk(target, row_at, row_bytes, stage, chunk, element: str):
    """Copy a chunk of a line; zeros where there is no row (`row_at` < 0) and beyond its end."""
    if element == "e2m1" and KIND != "nvfp4" and KIND != "mxfp4":
        at = stage * (LINE // 2) + chunk * 8
        cp_async_8(target, row_at + at, select_u32((row_at >= 0) & (at < row_bytes), 8, 0))
    else:
        at = stage * LINE + chunk * 16
        cp_async_16(target, row_at + at, select_u32((row_at >= 0) & (at < row_bytes), 16, 0))


def first_word(stage):
    """The first word of scales of a stage's rows."""
    if KIND == "nvfp4":
        return stage * 2
    elif KIND == "mxfp4":
        return stage
    else:
        return stage >> 1


def word_step(layout: str):
    """Bytes from word to word of a row."""
    if layout == "linear":
        return 4
    else:
        return 512


def blocks_in_word(row_at, blocks, word):
    """How many of a word's four blocks there are, none of a row that is not there."""
    left = blocks - word * 4
    return select_u32(row_at >= 0, max(min(left, 4), 0), 0)


def words_can_be_copied(scales, blocks, layout: str):
    """Whether the words of scales are words in memory."""
    if layout == "linear":
        return ((ptr_address(scales, 0) | blocks) & 3) == 0
    else:
        return (ptr_address(scales, 0) & 3) == 0


def copy_word(target, scales, row_at, blocks, word, layout: str):
    """Copy a word of scales."""
    at = ptr_address(scales, row_at + word * word_step(layout))
    cp_async_4(target, at, blocks_in_word(row_at, blocks, word))


def copy_words(target, scales, row_at, blocks, stage, layout: str):
    """Copy the words of scales of a row of a stage."""
    word = first_word(stage)
    copy_word(target, scales, row_at, blocks, word, layout)
    if KIND == "nvfp4":
        copy_word(target + 4, scales, row_at, blocks, word + 1, layout)


def read_byte(scales, at, place, count):
    """A byte of a word, in its place; 0 from `count` on."""
    if place < count:
        return shl_u32(ld_global_u8(scales, at + place, ""), 8 * place)
    else:
        return shl_u32(0, 0)


def read_word(scales, row_at, blocks, word, layout: str):
    """A word of scales, byte by byte."""
    count = blocks_in_word(row_at, blocks, word)
    at = row_at + word * word_step(layout)
    low = or_u32(read_byte(scales, at, 0, count), read_byte(scales, at, 1, count))
    high = or_u32(read_byte(scales, at, 2, count), read_byte(scales, at, 3, count))
    return or_u32(low, high)


def read_words(scales, row_at, blocks, stage, layout: str):
    """The words of scales of a row of a stage, byte by byte."""
    word = first_word(stage)
    first = read_word(scales, row_at, blocks, word, layout)
    if KIND == "nvfp4":
        return first, read_word(scales, row_at, blocks, word + 1, layout)
    else:
        return first, first


def store_words(target, words):
    """Store the words of scales of a row."""
    st_shared_u32(target, words[0])
    if KIND == "nvfp4":
        st_shared_u32(target + 4, words[1])


def copy_lines(base, stage, thread, a_rows, b_rows, a_bytes, b_bytes):
    """Copy this thread's chunks of a stage: one in each of its rows."""
    line = thread >> 2
    chunk = thread & 3
    lines_b = base + ROWS * LINE
    if THREADS == 256:
        copy_chunk(chunk_at(base, line, chunk), a_rows[0], a_bytes, stage, chunk, A_ELEMENT)
        copy_chunk(chunk_at(base, line + 64, chunk), a_rows[1], a_bytes, stage, chunk, A_ELEMENT)
        copy_chunk(chunk_at(lines_b, line, chunk), b_rows[0], b_bytes, stage, chunk, B_ELEMENT)
        copy_chunk(chunk_at(lines_b, line + 64, chunk), b_rows[1], b_bytes, stage, chunk, B_ELEMENT)
    else:
        if thread < 64:
            copy_chunk(chunk_at(base, line, chunk), a_rows[0], a_bytes, stage, chunk, A_ELEMENT)
        copy_chunk(chunk_at(lines_b, line, chunk), b_rows[0], b_bytes, stage, chunk, B_ELEMENT)
        copy_chunk(chunk_at(lines_b, line + 32, chunk), b_rows[1], b_bytes, stage, chunk, B_ELEMENT)
        copy_chunk(chunk_at(lines_b, line + 64, chunk), b_rows[2], b_bytes, stage, chunk, B_ELEMENT)
        copy_chunk(chunk_at(lines_b, line + 96, chunk), b_rows[3], b_bytes, stage, chunk, B_ELEMENT)


# Products ----------------------------------------------------------------------------------------


def fragment(address, element: str):
    """Four matrices of 8 lines and 16 bytes."""
    if element == "e2m1" and KIND != "nvfp4" and KIND != "mxfp4":
        m = ldmatrix_x4_e2m1(address)
        # From bits 3..0 of each byte to where the product has them.
        return shl_u32(m[0], 2), shl_u32(m[1], 2), shl_u32(m[2], 2), shl_u32(m[3], 2)
    else:
        return ldmatrix_x4(address)


def scales_at(words, row, stage):
    """A row's words for the two halves of a line."""
    if KIND == "nvfp4":
        both = ld_shared_v2_u32(words + row * 8)
        # A sign is no part of a scale.
        return and_u32(both[0], 0x7F7F7F7F), and_u32(both[1], 0x7F7F7F7F)
    elif KIND == "mxfp4":
        word = ld_shared_u32(words + row * 4)
        return word, word
    else:
        word = shr_u32(ld_shared_u32(words + row * 4), 16 * (stage & 1))
        return word, word


def add_products(base, a_line, a_chunk, b_line, b_chunk, half, sa, ta, sb, byte, acc, kind: str):
    """Add the products of half a line to a warp's sums; `sa`, `ta`: scales of 32 rows each."""
    acc0, acc1, acc2, acc3 = acc
    lines_b = base + ROWS * LINE
    x = fragment(chunk_at(lines_b, b_line, b_chunk + half), B_ELEMENT)
    y = fragment(chunk_at(lines_b, b_line + 16, b_chunk + half), B_ELEMENT)
    b = (x[0], x[1], x[2], x[3], y[0], y[1], y[2], y[3])
    a = fragment(chunk_at(base, a_line, a_chunk + half), A_ELEMENT)
    acc0 = mma_scaled_x4(KIND, a, b, acc0, sa, sb, byte, 0)
    if ROWS == 128:
        a = fragment(chunk_at(base, a_line + 16, a_chunk + half), A_ELEMENT)
        acc1 = mma_scaled_x4(KIND, a, b, acc1, sa, sb, byte, 1)
        a = fragment(chunk_at(base, a_line + 32, a_chunk + half), A_ELEMENT)
        acc2 = mma_scaled_x4(KIND, a, b, acc2, ta, sb, byte, 0)
        a = fragment(chunk_at(base, a_line + 48, a_chunk + half), A_ELEMENT)
        acc3 = mma_scaled_x4(KIND, a, b, acc3, ta, sb, byte, 1)
    return acc0, acc1, acc2, acc3


def stage_products(base, stage, warp_row, warp_column, lane, acc):
    """Add the products of a stage to a warp's sums."""
    a_line = warp_row + (lane & 15)
    a_chunk = lane >> 4
    b_line = warp_column + (lane & 7) + (lane >> 4) * 8
    b_chunk = (lane >> 3) & 1
    words_a = base + (ROWS + COLUMNS) * LINE
    words_b = words_a + ROWS * 4 * words_of_row()
    row = (lane & 1) * 8 + (lane >> 2)
    if ROWS == 128:
        row += warp_row + ((lane >> 1) & 1) * 16
    sa = scales_at(words_a, row, stage)
    ta = sa
    if ROWS == 128:
        ta = scales_at(words_a, row + 32, stage)
    sb = scales_at(words_b, warp_column + (lane & 3) * 8 + (lane >> 2), stage)
    acc = add_products(base, a_line, a_chunk, b_line, b_chunk, 0, sa[0], ta[0], sb[0], 0, acc, KIND)
    if KIND == "nvfp4":
        return add_products(
            base, a_line, a_chunk, b_line, b_chunk, 2, sa[1], ta[1], sb[1], 0, acc, KIND
        )
    elif KIND == "mxfp4":
        return add_products(
            base, a_line, a_chunk, b_line, b_chunk, 2, sa[1], ta[1], sb[1], 2, acc, KIND
        )
    else:
        return add_products(
            base, a_line, a_chunk, b_line, b_chunk, 2, sa[1], ta[1], sb[1], 1, acc, KIND
        )


def sums(
    a_rows, b_rows, a_bytes, b_bytes, a_scales, b_scales, a_row_at, b_row_at, blocks, steps, count
):
    """Make this thread's sums of the block's tile: 16 for each 16 rows of its warp.

    Parameters
    ----------
    a_rows, b_rows
        Addresses of the rows of this thread, negative for those that are not there: with 256
        threads, rows thread / 4 and 64 further on; else of A one, of B four, 32 apart.
    a_bytes, b_bytes
        What a row is long.
    a_row_at, b_row_at
        Where the scales of row `thread` of A and of B begin; with 256 threads, B's of row
        thread - 128. Negative: no such row.
    blocks
        Blocks of a row.
    steps
        Stages.
    count
        Rows of A that there are.
    """
    thread = cuda.threadIdx.x + 0
    lane = thread & 31
    warp = thread >> 5
    warp_row = (warp >> 2) * 64
    warp_column = (warp & 3) * 32
    base = shared_base()
    own_a = thread < ROWS
    own_b = True
    word_b = thread
    if THREADS == 256:
        own_b = thread >= ROWS
        word_b = thread - ROWS
    words_a = (ROWS + COLUMNS) * LINE + thread * (4 * words_of_row())
    words_b = (ROWS + COLUMNS) * LINE + (ROWS + word_b) * (4 * words_of_row())
    quick_a = words_can_be_copied(a_scales, blocks, A_LAYOUT)
    quick_b = words_can_be_copied(b_scales, blocks, B_LAYOUT)
    zeros = (
        *(ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO),
        *(ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO, ZERO),
    )
    acc = (zeros, zeros, zeros, zeros)
    none = shl_u32(0, 0)
    step = 1 - STAGES
    while step < steps:
        # The stage that is copied now takes the place of the one whose products were added last.
        ahead = step + STAGES - 1
        target = base + (ahead & (STAGES - 1)) * stage_bytes()
        if step >= 0:
            cp_async_wait_group(IN_FLIGHT)
            cuda.syncthreads()
        read_a = own_a and not quick_a and ahead < steps
        read_b = own_b and not quick_b and ahead < steps
        bytes_a = (none, none)
        bytes_b = (none, none)
        if ahead < steps:
            copy_lines(target, ahead, thread, a_rows, b_rows, a_bytes, b_bytes)
            if own_a and quick_a:
                copy_words(target + words_a, a_scales, a_row_at, blocks, ahead, A_LAYOUT)
            if own_b and quick_b:
                copy_words(target + words_b, b_scales, b_row_at, blocks, ahead, B_LAYOUT)
            if read_a:
                bytes_a = read_words(a_scales, a_row_at, blocks, ahead, A_LAYOUT)
            if read_b:
                bytes_b = read_words(b_scales, b_row_at, blocks, ahead, B_LAYOUT)
        cp_async_commit_group()
        if step >= 0 and warp_row < count:
            acc = stage_products(
                base + (step & (STAGES - 1)) * stage_bytes(),
                step,
                warp_row,
                warp_column,
                lane,
                acc,
            )
        if read_a:
            store_words(target + words_a, bytes_a)
        if read_b:
            store_words(target + words_b, bytes_b)
        step += 1
    return acc
