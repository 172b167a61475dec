"""Products on the tensor cores of every architecture from sm_80 on: ``mma.sync`` of bfloat16.

A block of 128 threads makes a tile of 64 x 64 of the result. Operands are brought to bfloat16 on
the way to shared memory, which holds every element times its scale exactly, and the products are
summed in float32; the order of the sums is the tensor cores', so results are the golden model's
bit for bit where the sums are exact, and within the rounding of float32 sums elsewhere. float16
elements of A have three bits more than bfloat16: they become two, a = hi + lo exactly.

What bfloat16 cannot hold exactly, and what tensor cores might flush, is not clipped: e8m0 scales
below 2^-107 or above 2^107 of blocks that are not zero; beside float16 elements, scales above 2^72
and infinite e5m2 elements, whose products with the two halves would not add up. A block of threads
that meets one makes its tile again in the way of ``matmul_naive``.

Rows of A beyond the last, and rows of B beyond the columns, are zeros in shared memory. In a
product with pairs of columns the rows of B of a tile are gate, up, gate, up..., so that a thread
has both.

Constraints: ALIGNED; depth a multiple of both blocks; OUTPUT is not "codes". Grid: (row tiles,
column tiles of 64 columns of the product); grouped: (allocated tiles of 128 rows, times 2, column
tiles). Shared memory: 16 KB, for float16 24 KB.

Compile-time constants: those of ``matmul_naive``.
"""

from __future__ import annotations

import functools

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    mul_rn,
)
from .elements import store_one
from .groups import expert_of, find_tile, load_index, row_of_none, source_row
from .matmul_naive import VARIANTS as NAIVE_VARIANTS
from .matmul_naive import element, grouped_matmul_kernel, matmul_kernel
from .mma_tiles import THREADS, TILE, sums
from .products import (
    decode_of_b,
    epilogue,
    factor_of_row,
    matrix_scales,
    pair_epilogue,
    result_columns,
    row_units,
)

A_ELEMENT = "none"
A_LAYOUT = "linear"
B_ELEMENT = "e2m1"
B_SCALE = "e8m0"
B_LAYOUT = "tcgen"
PAIR = "none"
A_STARTS = "none"

ZERO = np.float32(0.0)


# Results -----------------------------------------------------------------------------------------


def row_of_b(tile_row, first_column, columns):
    """The row of B that is row `tile_row` of a tile that begins at a column of the product."""
    if PAIR == "halves":
        return first_column // 2 + (tile_row >> 1) + (tile_row & 1) * (columns // 2)
    else:
        return first_column + tile_row


def store_two(out, row, at, n, columns, c, d, factor, b_decode, expert, e0, e1, e2, e3):
    """Store two neighbouring columns of the product, from column `n` of a tile on, or their pair.

    `at` is the first element of the row of the result, `row` its number.
    """
    if PAIR == "none":
        if n < columns:
            v = mul_rn(c, mul_rn(factor, decode_of_b(b_decode, expert, n, columns)))
            v = np.float32(epilogue(v, row, n, expert, e0, e1, e2, e3))
            store_one(out, at + n, v)
        if n + 1 < columns:
            v = mul_rn(d, mul_rn(factor, decode_of_b(b_decode, expert, n + 1, columns)))
            v = np.float32(epilogue(v, row, n + 1, expert, e0, e1, e2, e3))
            store_one(out, at + n + 1, v)
    else:
        column = n // 2
        if column < columns // 2:
            if PAIR == "halves":
                gate_row = column
                up_row = column + columns // 2
            else:
                gate_row = n
                up_row = n + 1
            gate = mul_rn(c, mul_rn(factor, decode_of_b(b_decode, expert, gate_row, columns)))
            up = mul_rn(d, mul_rn(factor, decode_of_b(b_decode, expert, up_row, columns)))
            v = np.float32(pair_epilogue(gate, up, row, column, expert, e0, e1, e2, e3))
            store_one(out, at + column, v)


def store_row(
    out, row, at, n, columns, i: int, c0, c1, c2, c3, factor, b_decode, expert, e0, e1, e2, e3
):
    """Store one of the two rows that a thread has of 16: elements 0, 1 or 2, 3 of four sums."""
    if i == 0:
        store_two(out, row, at, n, columns, c0[0], c0[1], factor, b_decode, expert, e0, e1, e2, e3)
        store_two(
            out, row, at, n + 8, columns, c1[0], c1[1], factor, b_decode, expert, e0, e1, e2, e3
        )
        store_two(
            out, row, at, n + 16, columns, c2[0], c2[1], factor, b_decode, expert, e0, e1, e2, e3
        )
        store_two(
            out, row, at, n + 24, columns, c3[0], c3[1], factor, b_decode, expert, e0, e1, e2, e3
        )
    else:
        store_two(out, row, at, n, columns, c0[2], c0[3], factor, b_decode, expert, e0, e1, e2, e3)
        store_two(
            out, row, at, n + 8, columns, c1[2], c1[3], factor, b_decode, expert, e0, e1, e2, e3
        )
        store_two(
            out, row, at, n + 16, columns, c2[2], c2[3], factor, b_decode, expert, e0, e1, e2, e3
        )
        store_two(
            out, row, at, n + 24, columns, c3[2], c3[3], factor, b_decode, expert, e0, e1, e2, e3
        )


def row_bytes(units):
    """Bytes from a row of A to the next; `units` as the plans have it."""
    if A_ELEMENT == "none":
        return units * 2
    else:
        return units


def matmul_sm80(
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
    thread = cuda.threadIdx.x + 0
    first_row = cuda.blockIdx.x * TILE
    first_column = cuda.blockIdx.y * TILE
    width = result_columns(columns)
    a_row = first_row + thread // 2
    n = row_of_b(thread // 2, first_column, columns)
    c0, c1, c2, c3, c4, c5, c6, c7, extreme = sums(
        a,
        a_scales,
        a_row * row_bytes(a_stride),
        a_row,
        a_row < rows,
        b,
        b_scales,
        n * row_units(depth, B_ELEMENT),
        0,
        n,
        first_column + thread // 2 < columns,
        depth,
    )
    if cuda.syncthreads_or(np.int32(extreme)):
        i = thread + 0
        wide = TILE if PAIR == "none" else TILE // 2
        while i < TILE * wide:
            row = first_row + i // wide
            column = cuda.blockIdx.y * wide + i % wide
            if row < rows and column < width:
                value = element(
                    a,
                    a_scales,
                    row * a_stride,
                    row,
                    b,
                    b_scales,
                    b_decode,
                    0,
                    row,
                    column,
                    columns,
                    depth,
                    factor_of_row(alpha, alpha_number, a_decode, 0, row, 0),
                    e0,
                    e1,
                    e2,
                    e3,
                )
                store_one(out, row * width + column, value)
            i += THREADS
        return
    lane = thread % 32
    warp = thread // 32
    row = first_row + (warp // 2) * 32 + lane // 4
    n = first_column + (warp % 2) * 32 + (lane % 4) * 2
    if row < rows:
        factor = factor_of_row(alpha, alpha_number, a_decode, 0, row, 0)
        store_row(
            out,
            row,
            row * width,
            n,
            columns,
            0,
            c0,
            c1,
            c2,
            c3,
            factor,
            b_decode,
            0,
            e0,
            e1,
            e2,
            e3,
        )
    row += 8
    if row < rows:
        factor = factor_of_row(alpha, alpha_number, a_decode, 0, row, 0)
        store_row(
            out,
            row,
            row * width,
            n,
            columns,
            1,
            c0,
            c1,
            c2,
            c3,
            factor,
            b_decode,
            0,
            e0,
            e1,
            e2,
            e3,
        )
    row += 8
    if row < rows:
        factor = factor_of_row(alpha, alpha_number, a_decode, 0, row, 0)
        store_row(
            out,
            row,
            row * width,
            n,
            columns,
            0,
            c4,
            c5,
            c6,
            c7,
            factor,
            b_decode,
            0,
            e0,
            e1,
            e2,
            e3,
        )
    row += 8
    if row < rows:
        factor = factor_of_row(alpha, alpha_number, a_decode, 0, row, 0)
        store_row(
            out,
            row,
            row * width,
            n,
            columns,
            1,
            c4,
            c5,
            c6,
            c7,
            factor,
            b_decode,
            0,
            e0,
            e1,
            e2,
            e3,
        )


def grouped_row(
    out,
    local,
    first,
    count,
    unowned,
    head,
    tail,
    rows,
    row_indices,
    input_rows,
    expert,
    owner,
    alpha,
    alpha_number,
    a_decode,
    width,
    n,
    columns,
    i: int,
    c0,
    c1,
    c2,
    c3,
    b_decode,
    e0,
    e1,
    e2,
    e3,
):
    """Store a row of a range; zeros where it has no source."""
    if local < count:
        row = first + local
        if unowned:
            row = row_of_none(row, head, tail)
        if row < rows:
            source = -1
            if expert >= 0:
                source = source_row(row_indices, row, input_rows)
            if source >= 0:
                factor = factor_of_row(alpha, alpha_number, a_decode, expert, source, owner)
                store_row(
                    out,
                    row,
                    row * width,
                    n,
                    columns,
                    i,
                    c0,
                    c1,
                    c2,
                    c3,
                    factor,
                    b_decode,
                    expert,
                    e0,
                    e1,
                    e2,
                    e3,
                )
            else:
                zero_row(out, row * width, n, columns, width)


def zero_row(out, at, n, columns, width):
    """Zero what a thread has of a row."""
    for j in range(4):
        if PAIR == "none":
            if n + 8 * j < columns:
                store_one(out, at + n + 8 * j, ZERO)
            if n + 8 * j + 1 < columns:
                store_one(out, at + n + 8 * j + 1, ZERO)
        elif (n + 8 * j) // 2 < width:
            store_one(out, at + (n + 8 * j) // 2, ZERO)


def grouped_matmul_sm80(
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
    out_tiles,
):
    thread = cuda.threadIdx.x + 0
    tile = cuda.blockIdx.x // 2
    below = (cuda.blockIdx.x % 2) * TILE
    first_column = cuda.blockIdx.y * TILE
    width = result_columns(columns)
    owner, first_tile, start, stop, used, head, tail, _ = find_tile(
        row_offsets, row_offsets, groups, rows, tile
    )
    expert = -1
    a_tile = tile
    if owner >= 0:
        expert = expert_of(expert_ids, owner, experts)
        first = start + ((tile - first_tile) << 7) + below
        count = min(stop - first, TILE)
        if A_STARTS != "none":
            a_tile = load_index(tile_starts, owner, A_STARTS) + tile - first_tile
    else:
        first = ((tile - used) << 7) + below
        count = TILE
    if A_LAYOUT == "tcgen":
        if a_tile < 0 or a_tile >= tiles:
            expert = -1
    if count <= 0:
        return
    local = thread // 2
    source = -1
    if expert >= 0 and local < count:
        source = source_row(row_indices, first + local, input_rows)
    a_scale_row = source
    if A_LAYOUT == "tcgen":
        a_scale_row = (a_tile << 7) + below + local
    n = row_of_b(local, first_column, columns)
    matrix = max(expert, 0)
    # Blocks without an expert have nothing to sum, but zeros to write.
    c0, c1, c2, c3, c4, c5, c6, c7, extreme = sums(
        a,
        a_scales,
        source * row_bytes(a_stride),
        a_scale_row,
        source >= 0,
        b,
        b_scales,
        (matrix * columns + n) * row_units(depth, B_ELEMENT),
        matrix * matrix_scales(columns, depth, B_SCALE, B_LAYOUT),
        n,
        first_column + local < columns,
        depth if expert >= 0 else 0,
    )
    if cuda.syncthreads_or(np.int32(extreme)):
        i = thread + 0
        wide = TILE if PAIR == "none" else TILE // 2
        while i < TILE * wide:
            local = i // wide
            column = cuda.blockIdx.y * wide + i % wide
            row = first + local
            if local < count and row < rows and column < width:
                source = source_row(row_indices, row, input_rows)
                value = ZERO
                if source >= 0:
                    scale_row = source
                    if A_LAYOUT == "tcgen":
                        scale_row = (a_tile << 7) + below + local
                    value = element(
                        a,
                        a_scales,
                        source * a_stride,
                        scale_row,
                        b,
                        b_scales,
                        b_decode,
                        expert,
                        row,
                        column,
                        columns,
                        depth,
                        factor_of_row(alpha, alpha_number, a_decode, expert, source, owner),
                        e0,
                        e1,
                        e2,
                        e3,
                    )
                store_one(out, row * width + column, value)
            i += THREADS
        return
    lane = thread % 32
    warp = thread // 32
    local = (warp // 2) * 32 + lane // 4
    n = first_column + (warp % 2) * 32 + (lane % 4) * 2
    unowned = owner < 0
    grouped_row(
        out,
        local,
        first,
        count,
        unowned,
        head,
        tail,
        rows,
        row_indices,
        input_rows,
        expert,
        owner,
        alpha,
        alpha_number,
        a_decode,
        width,
        n,
        columns,
        0,
        c0,
        c1,
        c2,
        c3,
        b_decode,
        e0,
        e1,
        e2,
        e3,
    )
    grouped_row(
        out,
        local + 8,
        first,
        count,
        unowned,
        head,
        tail,
        rows,
        row_indices,
        input_rows,
        expert,
        owner,
        alpha,
        alpha_number,
        a_decode,
        width,
        n,
        columns,
        1,
        c0,
        c1,
        c2,
        c3,
        b_decode,
        e0,
        e1,
        e2,
        e3,
    )
    grouped_row(
        out,
        local + 16,
        first,
        count,
        unowned,
        head,
        tail,
        rows,
        row_indices,
        input_rows,
        expert,
        owner,
        alpha,
        alpha_number,
        a_decode,
        width,
        n,
        columns,
        0,
        c4,
        c5,
        c6,
        c7,
        b_decode,
        e0,
        e1,
        e2,
        e3,
    )
    grouped_row(
        out,
        local + 24,
        first,
        count,
        unowned,
        head,
        tail,
        rows,
        row_indices,
        input_rows,
        expert,
        owner,
        alpha,
        alpha_number,
        a_decode,
        width,
        n,
        columns,
        1,
        c4,
        c5,
        c6,
        c7,
        b_decode,
        e0,
        e1,
        e2,
        e3,
    )


# Kernels -----------------------------------------------------------------------------------------

_HERE = {
    **matmul_kernel().constants,
    "ALIGNED": (True,),
    "OUTPUT": ("bfloat16", "float16", "float32"),
}


@functools.cache
def matmul_sm80_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The dense kernel for an epilogue with arrays of these dtypes."""
    like = matmul_kernel(arrays)
    return Kernel(
        "matmul_sm80", matmul_sm80, like.parameters, _HERE, threads=THREADS, blocks_per_sm=2
    )


@functools.cache
def grouped_matmul_sm80_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The grouped kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_kernel(arrays)
    constants = {**like.constants, **_HERE, "STARTS": ("none",)}
    return Kernel(
        "grouped_matmul_sm80",
        grouped_matmul_sm80,
        like.parameters,
        constants,
        threads=THREADS,
        blocks_per_sm=2,
    )


MATMUL_SM80 = matmul_sm80_kernel()
GROUPED_MATMUL_SM80 = grouped_matmul_sm80_kernel()


def _variant(like: dict, **changes: object) -> dict:
    return {**like, "ALIGNED": True, "OUTPUT": "bfloat16", "LAYOUT": "linear", **changes}


VARIANTS = {
    "matmul_sm80": tuple(_variant(one) for one in NAIVE_VARIANTS["matmul_naive"]),
    "grouped_matmul_sm80": tuple(
        _variant(one, STARTS="none") for one in NAIVE_VARIANTS["grouped_matmul_naive"]
    ),
}
