"""Products on the tensor cores of every architecture from sm_80 on: ``mma.sync`` of bfloat16.

A block of 128 threads makes a tile of 64 x 64 of the result. Operands are brought to bfloat16 on
the way to shared memory, which holds every element times its scale exactly, and the products are
summed in float32; the order of the sums is the tensor cores', so results are the golden model's
bit for bit where the sums are exact, and within the rounding of float32 sums elsewhere. float16
elements of A have three bits more than bfloat16: they become two, a = hi + lo exactly.

What bfloat16 cannot hold exactly, and what tensor cores might flush, is not clipped: e8m0 scales
below 2^-107 or above 2^107 of blocks that are not zero; beside float16 elements, scales above 2^72
and infinite e5m2 elements, whose products with the two halves would not add up. A block of threads
that meets one in B makes its tile in the way of ``matmul_naive``, and one in A those rows of it.
So what becomes of a row depends on no other row.

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
from ..ptx.arith import mul_rn
from ..ptx.bits import bf16x2_of_f32, f16x2_of_f32
from ..ptx.memory import ptr_address, st_global_u32
from .activations import may_be_extreme, row_bytes, row_is_extreme
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
OUTPUT = "bfloat16"

ZERO = np.float32(0.0)


# Results -----------------------------------------------------------------------------------------


def row_of_b(tile_row, first_column, columns):
    """The row of B that is row `tile_row` of a tile that begins at a column of the product."""
    if PAIR == "halves":
        return first_column // 2 + (tile_row >> 1) + (tile_row & 1) * (columns // 2)
    else:
        return first_column + tile_row


def first_row_of(c0, c1, c2, c3):
    """What a thread has of the first of its two rows of 16: pairs of neighbouring columns."""
    return (c0[0], c0[1], c1[0], c1[1], c2[0], c2[1], c3[0], c3[1])


def second_row_of(c0, c1, c2, c3):
    """The same of the second row, 8 further on."""
    return (c0[2], c0[3], c1[2], c1[3], c2[2], c2[3], c3[2], c3[3])


def store_two(to, row, width, n, columns, expert, c, d, factor):
    """Store two neighbouring columns of the product, from column `n` on, or what the pair makes."""
    out, b_decode, e0, e1, e2, e3 = to
    at = row * width
    if PAIR == "none":
        v = ZERO
        w = ZERO
        if n < columns:
            v = mul_rn(c, mul_rn(factor, decode_of_b(b_decode, expert, n, columns)))
            v = np.float32(epilogue(v, row, n, expert, e0, e1, e2, e3))
        if n + 1 < columns:
            w = mul_rn(d, mul_rn(factor, decode_of_b(b_decode, expert, n + 1, columns)))
            w = np.float32(epilogue(w, row, n + 1, expert, e0, e1, e2, e3))
        store_neighbours(out, at + n, n, columns, v, w)
    else:
        column = n // 2
        if column < width:
            if PAIR == "halves":
                gate_row = column
                up_row = column + width
            else:
                gate_row = n
                up_row = n + 1
            gate = mul_rn(c, mul_rn(factor, decode_of_b(b_decode, expert, gate_row, columns)))
            up = mul_rn(d, mul_rn(factor, decode_of_b(b_decode, expert, up_row, columns)))
            v = np.float32(pair_epilogue(gate, up, row, column, expert, e0, e1, e2, e3))
            store_one(out, at + column, v)


def store_neighbours(out, at, n, columns, v, w):
    """Store columns `n` and the next of a row, as far as there are such, from element `at` on."""
    # By one store where the two are a word of memory.
    if ((ptr_address(out, 0) | at * 2) & 3) == 0 and n + 1 < columns:
        if OUTPUT == "float32":
            store_one(out, at, v)
            store_one(out, at + 1, w)
        elif OUTPUT == "bfloat16":
            st_global_u32(out, at * 2, bf16x2_of_f32(w, v), "")
        else:
            st_global_u32(out, at * 2, f16x2_of_f32(w, v), "")
    else:
        if n < columns:
            store_one(out, at, v)
        if n + 1 < columns:
            store_one(out, at + 1, w)


def store_row(to, row, width, n, columns, expert, v, factor):
    """Store a row of a thread: four pairs of columns that lie 8 apart."""
    store_two(to, row, width, n, columns, expert, v[0], v[1], factor)
    store_two(to, row, width, n + 8, columns, expert, v[2], v[3], factor)
    store_two(to, row, width, n + 16, columns, expert, v[4], v[5], factor)
    store_two(to, row, width, n + 24, columns, expert, v[6], v[7], factor)


def store_dense_row(to, row, rows, width, n, columns, v, factors):
    """Store a row of a dense product."""
    if row < rows:
        alpha, alpha_number, a_decode = factors
        factor = factor_of_row(alpha, alpha_number, a_decode, 0, row, 0)
        store_row(to, row, width, n, columns, 0, v, factor)


def met_by_block(extreme_a, extreme_b):
    """Whether a thread of the block has met something extreme in A; and in B."""
    of_b = cuda.syncthreads_or(np.int32(extreme_b)) != 0
    of_a = False
    if may_be_extreme():
        of_a = cuda.syncthreads_or(np.int32(extreme_a)) != 0
    return of_a, of_b


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
    c0, c1, c2, c3, c4, c5, c6, c7, extreme_a, extreme_b = sums(
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
    of_a, of_b = met_by_block(extreme_a, extreme_b)
    if not of_b:
        lane = thread % 32
        warp = thread // 32
        row = first_row + (warp // 2) * 32 + lane // 4
        n = first_column + (warp % 2) * 32 + (lane % 4) * 2
        to = (out, b_decode, e0, e1, e2, e3)
        factors = (alpha, alpha_number, a_decode)
        v = first_row_of(c0, c1, c2, c3)
        store_dense_row(to, row, rows, width, n, columns, v, factors)
        v = second_row_of(c0, c1, c2, c3)
        store_dense_row(to, row + 8, rows, width, n, columns, v, factors)
        v = first_row_of(c4, c5, c6, c7)
        store_dense_row(to, row + 16, rows, width, n, columns, v, factors)
        v = second_row_of(c4, c5, c6, c7)
        store_dense_row(to, row + 24, rows, width, n, columns, v, factors)
    if of_a or of_b:
        cuda.syncthreads()
        i = thread + 0
        wide = TILE if PAIR == "none" else TILE // 2
        while i < TILE * wide:
            row = first_row + i // wide
            column = cuda.blockIdx.y * wide + i % wide
            mine = row < rows and column < width
            if mine and not of_b:
                mine = row_is_extreme(a, a_scales, row * row_bytes(a_stride), row, depth)
            if mine:
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


def store_grouped_row(to, local, rows_of_tile, row_indices, width, n, columns, v, factors):
    """Store a row of a range; zeros where it has no source."""
    first, count, owner, expert, head, tail, rows, input_rows = rows_of_tile
    if local < count:
        row = first + local
        if owner < 0:
            row = row_of_none(row, head, tail)
        if row < rows:
            source = -1
            if expert >= 0:
                source = source_row(row_indices, row, input_rows)
            if source >= 0:
                alpha, alpha_number, a_decode = factors
                factor = factor_of_row(alpha, alpha_number, a_decode, expert, source, owner)
                store_row(to, row, width, n, columns, expert, v, factor)
            else:
                zero_row(to[0], row * width, n, columns, width)


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
    c0, c1, c2, c3, c4, c5, c6, c7, extreme_a, extreme_b = sums(
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
    of_a, of_b = met_by_block(extreme_a, extreme_b)
    if not of_b:
        lane = thread % 32
        warp = thread // 32
        local = (warp // 2) * 32 + lane // 4
        n = first_column + (warp % 2) * 32 + (lane % 4) * 2
        to = (out, b_decode, e0, e1, e2, e3)
        factors = (alpha, alpha_number, a_decode)
        of_tile = (first, count, owner, expert, head, tail, rows, input_rows)
        v = first_row_of(c0, c1, c2, c3)
        store_grouped_row(to, local, of_tile, row_indices, width, n, columns, v, factors)
        v = second_row_of(c0, c1, c2, c3)
        store_grouped_row(to, local + 8, of_tile, row_indices, width, n, columns, v, factors)
        v = first_row_of(c4, c5, c6, c7)
        store_grouped_row(to, local + 16, of_tile, row_indices, width, n, columns, v, factors)
        v = second_row_of(c4, c5, c6, c7)
        store_grouped_row(to, local + 24, of_tile, row_indices, width, n, columns, v, factors)
    if of_a or of_b:
        cuda.syncthreads()
        i = thread + 0
        wide = TILE if PAIR == "none" else TILE // 2
        while i < TILE * wide:
            local = i // wide
            column = cuda.blockIdx.y * wide + i % wide
            row = first + local
            mine = local < count and row < rows and column < width
            source = -1
            if mine:
                source = source_row(row_indices, row, input_rows)
            scale_row = source
            if A_LAYOUT == "tcgen":
                scale_row = (a_tile << 7) + below + local
            if mine and not of_b:
                mine = source >= 0
                if mine:
                    at = source * row_bytes(a_stride)
                    mine = row_is_extreme(a, a_scales, at, scale_row, depth)
            if mine:
                value = ZERO
                if source >= 0:
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
