"""Products of two quantised operands on the block-scaled tensor cores of sm_120a and sm_121a.

nvfp4 x nvfp4, mxfp4 x mxfp4, and mxfp8 or mxfp4 with mxfp8 or mxfp4. Codes and scales are
multiplied as they are (``scaled_tiles``), and the sums are float32; their order is the tensor
cores', so results are the golden model's bit for bit where the sums are exact, and within the
rounding of float32 sums elsewhere.

A block of 256 threads makes 128 rows and 128 columns of the product, or one of 128 threads 16 rows:
few rows need the matrix of the other side as fast as memory has it, and no more. (For a range of
more rows it then makes all 128 of a tile, one sixteen after the other.) Warps whose rows do not
exist multiply nothing.

In a product with pairs of columns the rows of B of a tile are gate, up, gate, up..., so that a
thread has both.

Constraints: ALIGNED; rows of codes are multiples of 16 bytes; depth is a multiple of both blocks;
OUTPUT is not "codes". Grid: (row tiles, column tiles of 128 columns of the product); grouped:
(allocated tiles of 128 rows, column tiles). Shared memory: ``shared_bytes``.

Compile-time constants: those of ``matmul_naive`` and of ``scaled_tiles``.
"""

from __future__ import annotations

import functools

from .._numba import cuda
from ..program import Kernel
from ..ptx.memory import ptr_address
from .groups import expert_of, find_tile, load_index, source_row
from .matmul_naive import grouped_matmul_kernel, matmul_kernel
from .matmul_sm80 import row_of_b, store_dense_row, store_grouped_row
from .products import blocks_of, matrix_scales, result_columns, row_units
from .scaled_tiles import COLUMNS, LINE, STAGES, first_scale, steps_of, sums

A_ELEMENT = "e2m1"
A_SCALE = "e8m0"
A_LAYOUT = "tcgen"
B_ELEMENT = "e2m1"
B_SCALE = "e8m0"
B_LAYOUT = "tcgen"
A_STARTS = "none"
ROWS = 128
THREADS = 256


def shared_bytes(kind: str, rows: int) -> int:
    """Shared memory of a block: four stages of lines and of their scales."""
    return STAGES * (rows + COLUMNS) * (LINE + (8 if kind == "nvfp4" else 4))


# A thread's rows ---------------------------------------------------------------------------------


def row_of_a(a, row, rows, a_stride):
    """Address of a row of A, -1 where there is none."""
    return ptr_address(a, row * a_stride) if 0 <= row < rows else -1


def row_in_b(b, matrix, local, first_column, columns, depth):
    """Address of the row of B that is row `local` of the tile, -1 where there is none."""
    row = matrix * columns + row_of_b(local, first_column, columns)
    there = first_column + local < columns
    return ptr_address(b, row * row_units(depth, B_ELEMENT)) if there else -1


def rows_in_b(b, matrix, thread, first_column, columns, depth):
    """Addresses of this thread's rows of B."""
    line = thread >> 2
    if THREADS == 256:
        return (
            row_in_b(b, matrix, line, first_column, columns, depth),
            row_in_b(b, matrix, line + 64, first_column, columns, depth),
        )
    else:
        return (
            row_in_b(b, matrix, line, first_column, columns, depth),
            row_in_b(b, matrix, line + 32, first_column, columns, depth),
            row_in_b(b, matrix, line + 64, first_column, columns, depth),
            row_in_b(b, matrix, line + 96, first_column, columns, depth),
        )


def scales_in_b(matrix, thread, first_column, columns, depth):
    """Where the scales of this thread's row of B begin, -1 where it has none."""
    local = thread
    if THREADS == 256:
        local = thread - ROWS
    place = first_scale(row_of_b(local, first_column, columns), blocks_of(depth, B_SCALE), B_LAYOUT)
    there = local >= 0 and first_column + local < columns
    return matrix * matrix_scales(columns, depth, B_SCALE, B_LAYOUT) + place if there else -1


# Results -----------------------------------------------------------------------------------------


def first_row_of(acc):
    """What a thread has of the first of its two rows of 16: pairs of neighbouring columns."""
    return (acc[0], acc[1], acc[4], acc[5], acc[8], acc[9], acc[12], acc[13])


def second_row_of(acc):
    """The same of the second row, 8 further on."""
    return (acc[2], acc[3], acc[6], acc[7], acc[10], acc[11], acc[14], acc[15])


def store_dense(to, row, rows, width, n, columns, acc, factors):
    """Store a thread's two rows of 16."""
    store_dense_row(to, row, rows, width, n, columns, first_row_of(acc), factors)
    store_dense_row(to, row + 8, rows, width, n, columns, second_row_of(acc), factors)


def matmul_sm120(
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
    first_row = cuda.blockIdx.x * ROWS
    first_column = cuda.blockIdx.y * COLUMNS
    row = first_row + (thread >> 2)
    a_rows = (row_of_a(a, row, rows, a_stride), row_of_a(a, row + 64, rows, a_stride))
    blocks = blocks_of(depth, A_SCALE)
    mine = first_row + thread
    acc0, acc1, acc2, acc3 = sums(
        a_rows,
        rows_in_b(b, 0, thread, first_column, columns, depth),
        row_units(depth, A_ELEMENT),
        row_units(depth, B_ELEMENT),
        a_scales,
        b_scales,
        first_scale(mine, blocks, A_LAYOUT) if mine < rows else -1,
        scales_in_b(0, thread, first_column, columns, depth),
        blocks,
        steps_of(depth),
        rows - first_row,
    )
    width = result_columns(columns)
    lane = thread & 31
    warp = thread >> 5
    row = first_row + (warp >> 2) * 64 + (lane >> 2)
    n = first_column + (warp & 3) * 32 + (lane & 3) * 2
    to = (out, b_decode, e0, e1, e2, e3)
    factors = (alpha, alpha_number, a_decode)
    store_dense(to, row, rows, width, n, columns, acc0, factors)
    if ROWS == 128:
        store_dense(to, row + 16, rows, width, n, columns, acc1, factors)
        store_dense(to, row + 32, rows, width, n, columns, acc2, factors)
        store_dense(to, row + 48, rows, width, n, columns, acc3, factors)


def store_grouped(to, local, of_tile, row_indices, width, n, columns, acc, factors):
    """Store a thread's two rows of 16 of a range."""
    v = first_row_of(acc)
    store_grouped_row(to, local, of_tile, row_indices, width, n, columns, v, factors)
    v = second_row_of(acc)
    store_grouped_row(to, local + 8, of_tile, row_indices, width, n, columns, v, factors)


def source_in_tile(local, first, count, expert, row_indices, input_rows):
    """The row of A that is row `local` of the tile, -1 where there is none."""
    if expert >= 0 and local < count:
        return source_row(row_indices, first + local, input_rows)
    else:
        return -1


def grouped_matmul_sm120(
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
    tile = cuda.blockIdx.x + 0
    first_column = cuda.blockIdx.y * COLUMNS
    owner, first_tile, start, stop, used, head, tail, _ = find_tile(
        row_offsets, row_offsets, groups, rows, tile
    )
    expert = -1
    a_tile = tile
    if owner >= 0:
        expert = expert_of(expert_ids, owner, experts)
        first = start + ((tile - first_tile) << 7)
        left = min(stop - first, 128)
        if A_STARTS != "none":
            a_tile = load_index(tile_starts, owner, A_STARTS) + tile - first_tile
    else:
        first = (tile - used) << 7
        left = 128
    if A_LAYOUT == "tcgen":
        if a_tile < 0 or a_tile >= tiles:
            expert = -1
    scale_row = a_tile << 7
    blocks = blocks_of(depth, A_SCALE)
    matrix = max(expert, 0)
    b_rows = rows_in_b(b, matrix, thread, first_column, columns, depth)
    b_row_at = scales_in_b(matrix, thread, first_column, columns, depth)
    # Blocks without an expert have nothing to sum, but zeros to write.
    steps = steps_of(depth) if expert >= 0 else 0
    width = result_columns(columns)
    lane = thread & 31
    warp = thread >> 5
    n = first_column + (warp & 3) * 32 + (lane & 3) * 2
    to = (out, b_decode, e0, e1, e2, e3)
    factors = (alpha, alpha_number, a_decode)
    while left > 0:
        count = min(left, ROWS)
        line = thread >> 2
        above = source_in_tile(line, first, count, expert, row_indices, input_rows)
        under = source_in_tile(line + 64, first, count, expert, row_indices, input_rows)
        a_rows = (
            row_of_a(a, above, input_rows, a_stride),
            row_of_a(a, under, input_rows, a_stride),
        )
        mine = source_in_tile(thread, first, count, expert, row_indices, input_rows)
        if A_LAYOUT == "tcgen":
            a_row_at = first_scale(scale_row + thread, blocks, A_LAYOUT) if mine >= 0 else -1
        else:
            a_row_at = first_scale(mine, blocks, A_LAYOUT) if mine >= 0 else -1
        acc0, acc1, acc2, acc3 = sums(
            a_rows,
            b_rows,
            row_units(depth, A_ELEMENT),
            row_units(depth, B_ELEMENT),
            a_scales,
            b_scales,
            a_row_at,
            b_row_at,
            blocks,
            steps,
            count,
        )
        local = (warp >> 2) * 64 + (lane >> 2)
        of_tile = (first, count, owner, expert, head, tail, rows, input_rows)
        store_grouped(to, local, of_tile, row_indices, width, n, columns, acc0, factors)
        if ROWS == 128:
            store_grouped(to, local + 16, of_tile, row_indices, width, n, columns, acc1, factors)
            store_grouped(to, local + 32, of_tile, row_indices, width, n, columns, acc2, factors)
            store_grouped(to, local + 48, of_tile, row_indices, width, n, columns, acc3, factors)
        first += ROWS
        scale_row += ROWS
        left -= ROWS
        # The next rows' stages take the places of these rows'.
        cuda.syncthreads()


# Kernels -----------------------------------------------------------------------------------------

ARCHITECTURES = ("sm_120a", "sm_121a")
_ELEMENTS = ("e2m1", "e4m3", "e5m2")
_HERE = {
    **matmul_kernel().constants,
    "A_ELEMENT": _ELEMENTS,
    "ALIGNED": (True,),
    "OUTPUT": ("bfloat16", "float16", "float32"),
    "KIND": ("nvfp4", "mxfp4", *(f"{a}.{b}" for a in _ELEMENTS for b in _ELEMENTS)),
    "ROWS": (128, 16),
    "THREADS": (256, 128),
}


@functools.cache
def matmul_sm120_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The dense kernel for an epilogue with arrays of these dtypes."""
    like = matmul_kernel(arrays)
    return Kernel(
        "matmul_sm120",
        matmul_sm120,
        like.parameters,
        _HERE,
        architectures=ARCHITECTURES,
        blocks_per_sm=1,
    )


@functools.cache
def grouped_matmul_sm120_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The grouped kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_kernel(arrays)
    return Kernel(
        "grouped_matmul_sm120",
        grouped_matmul_sm120,
        like.parameters,
        {**like.constants, **_HERE, "STARTS": ("none",)},
        architectures=ARCHITECTURES,
        blocks_per_sm=1,
    )


MATMUL_SM120 = matmul_sm120_kernel()
GROUPED_MATMUL_SM120 = grouped_matmul_sm120_kernel()

_NV = {"ELEMENT": "e2m1", "SCALE": "e4m3"}
_MX4 = {"ELEMENT": "e2m1", "SCALE": "e8m0"}
_MX8 = {"ELEMENT": "e4m3", "SCALE": "e8m0"}
_LARGE = {"ROWS": 128, "THREADS": 256}
_SMALL = {"ROWS": 16, "THREADS": 128}
_DENSE = {
    **{"INPUT": "bfloat16", "ALIGNED": True, "ALPHA": "value", "PAIR": "none"},
    **{"OUTPUT": "bfloat16", "ELEMENT": "e2m1", "SCALE": "e8m0", "LAYOUT": "linear"},
    **{"ROUNDING": "rceil", "UNIT": True, "DECODE_A": "none", "DECODE_B": "scalar"},
}
_GROUPED = {
    **{**_DENSE, "DECODE_B": "batch", "ALPHA": "expert", "OFFSETS": "int32", "IDS": "int32"},
    **{"INDICES": "none", "STARTS": "none", "A_STARTS": "none"},
}


def _variant(
    like: dict, kind: str, a: dict, b: dict, layouts: tuple[str, str], rows: dict, **changes: object
) -> dict:
    made = {**like, **rows, "KIND": kind, **changes}
    for side, operand, layout in (("A", a, layouts[0]), ("B", b, layouts[1])):
        made |= {f"{side}_{name}": value for name, value in operand.items()}
        made[f"{side}_LAYOUT"] = layout
    return made


_TILED = ("tcgen", "tcgen")
_MIXED = ("linear", "tcgen")

VARIANTS = {
    "matmul_sm120": (
        _variant(_DENSE, "nvfp4", _NV, _NV, _TILED, _LARGE, DECODE_A="scalar"),
        _variant(_DENSE, "e4m3.e2m1", _MX8, _MX4, _MIXED, _LARGE, PAIR="halves"),
    ),
    "grouped_matmul_sm120": (
        _variant(_GROUPED, "e4m3.e2m1", _MX8, _MX4, _MIXED, _LARGE, INDICES="int32"),
        _variant(_GROUPED, "nvfp4", _NV, _NV, _TILED, _SMALL, DECODE_A="group"),
    ),
}
SLOW_VARIANTS = {
    "matmul_sm120": (
        _variant(_DENSE, "mxfp4", _MX4, _MX4, _TILED, _LARGE),
        _variant(_DENSE, "mxfp4", _MX4, _MX4, ("linear", "linear"), _SMALL),
        _variant(_DENSE, "e4m3.e4m3", _MX8, _MX8, _TILED, _LARGE, OUTPUT="float32"),
        _variant(_DENSE, "e4m3.e4m3", _MX8, _MX8, _TILED, _SMALL, PAIR="interleaved"),
        _variant(_DENSE, "e2m1.e4m3", _MX4, _MX8, _TILED, _LARGE),
        _variant(_DENSE, "nvfp4", _NV, _NV, ("linear", "linear"), _LARGE, PAIR="halves"),
    ),
    "grouped_matmul_sm120": (
        _variant(_GROUPED, "nvfp4", _NV, _NV, _TILED, _LARGE, DECODE_A="group", A_STARTS="int32"),
        _variant(_GROUPED, "mxfp4", _MX4, _MX4, _MIXED, _LARGE, INDICES="int32", PAIR="halves"),
        _variant(_GROUPED, "e4m3.e2m1", _MX8, _MX4, _TILED, _SMALL, PAIR="interleaved"),
        _variant(_GROUPED, "e4m3.e4m3", _MX8, _MX8, _TILED, _LARGE, A_STARTS="int32"),
    ),
}
