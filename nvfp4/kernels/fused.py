"""Quantisers that make what they quantise: gated activations, norms; rows up to a count; ranges.

A row of blockDim.x threads, whole warps, serves a row of the result (``fused_rows``); a thread
takes pieces of 16 columns. FRONT says what becomes of the input on its way: nothing ("plain"), a
gated activation, or a sum with a residual and a norm.

A unit is `lines` rows of one tile, by one block. In the tcgen layout rows come in groups of 8,
{2i, 2i + 1} + {0, 32, 64, 96} of a tile, because the scales of these share 32-byte sectors, which
then leave the L2 cache complete. Dense rows with `row_counts` (COUNTS) are zero from the count of
their matrix on. With RANGES a block finds the range of its tile as ``grouped_quantize`` does.

TASK "amax" leaves the largest magnitude in decode_scale, and writes nothing else.

Constraints: columns a multiple of the format's block; blockDim.x a multiple of 32, `lines` one of
blockDim.y; with RANGES 128 = lines * 2^shift; with HOLD "registers" PER * blockDim.x at least the
pieces of a row with its padding, which are at most 1024. Shared memory, unless HOLD is "none":
ROW_STATE bytes a row of threads, then with "shared" a row of the input's dtype for each. Ranges:
rows < 2^32; gridDim.z 1.

Compile-time constants beside those of ``quantize``, ``groups``, ``hidden`` and ``fused_rows``:
RANGES, COUNTS ("none" or a dtype), TASK, RESIDUAL ("none", "in", "out": also stored), HIDDEN (store
h), PER (pieces a thread in registers; with a residual at most 2), WIDE (rows, or bytes of a row,
from 2^32 on), THREADS and BLOCKS_PER_SM (launch bounds).
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import i64_of_u32, max_nan_f32, rcp_rn, u32_of_i64
from ..ptx.bits import float_as_uint
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import red_max_global_u32
from ..ptx.warp import redux_max_u32
from .fused_pieces import piece_bytes
from .fused_rows import quantize_row, rows_with_data
from .grouped_quantize import INDEX_DTYPES, clear_tile, encode_scale_of, store_range_scales
from .groups import expert_of, find_tile, load_index, row_of_none, source_row
from .quantize import ELEMENT_CONSTANTS, encode_scale_for
from .scales import usable
from .warps import thread_index

LAYOUT = "tcgen"
ENCODE = "none"
RANGES = False
COUNTS = "none"
STARTS = "none"
TASK = "quantize"
WIDE = False

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
WARP = 0xFFFFFFFF


def times(a, b):
    """Product of numbers that are not negative, and below 2^32 but for WIDE."""
    if WIDE:
        return a * b
    else:
        return i64_of_u32(u32_of_i64(a)) * i64_of_u32(u32_of_i64(b))


def row_of_line(line):
    """The row of a matrix, or of a tile, that is served in this turn."""
    if LAYOUT == "linear":
        return line
    else:
        return (line >> 7 << 7) + ((line & 127) >> 3 << 1) + (line & 1) + ((line >> 1 & 3) << 5)


def scale_row_place(row, scales_row):
    """First byte of the scales of a row, in those of its matrix."""
    if LAYOUT == "linear":
        return times(row, scales_row)
    else:
        return times(row >> 7, scales_row) + ((row & 31) << 4) + ((row & 127) >> 5 << 2)


def serve_dense(inputs, outputs, row_counts, encode, eps, matrix, steps, sizes, work):
    """All rows of this block, of a stack of matrices; returns the largest magnitude for "amax"."""
    encode_scale, encode_number, decode_scale = encode
    rows, batches = matrix
    x_row, x_matrix, codes_row, scales_row, scales_matrix = steps
    units, lines = work
    largest = ZERO
    first = cuda.blockIdx.x == 0 and thread_index() == 0
    if TASK == "quantize" and (ENCODE == "none" or ENCODE == "scalar" or ENCODE == "array"):
        if first and cuda.blockIdx.z == 0:
            g = encode_scale_for(encode_scale, encode_number, decode_scale, 0, 0)
            decode_scale[0] = rcp_rn(g)
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        if TASK == "quantize" and ENCODE == "batch":
            if first:
                decode_scale[batch] = rcp_rn(usable(encode_scale[batch]))
        count = rows_with_data(row_counts, batch, rows)
        unit = cuda.blockIdx.x + 0
        while unit < units:
            turn = 0
            while turn < lines:
                row = row_of_line(unit * lines + turn + cuda.threadIdx.y)
                written = row < rows
                stored = row < (rows + 127) >> 7 << 7
                if LAYOUT == "linear":
                    stored = written
                flat = batch * rows + row
                g = ONE
                if ENCODE != "row_amax" and TASK == "quantize":
                    if written:
                        g = encode_scale_for(encode_scale, encode_number, decode_scale, batch, flat)
                plain_at = times(flat, sizes[0] * piece_bytes())
                places = (
                    batch * x_matrix + times(row, x_row),
                    plain_at,
                    plain_at,
                    times(flat, codes_row),
                    batch * scales_matrix + scale_row_place(row, scales_row),
                )
                live = row < count
                found = quantize_row(
                    inputs,
                    outputs,
                    decode_scale,
                    g,
                    eps,
                    places,
                    sizes,
                    flat,
                    live,
                    written,
                    stored,
                )
                largest = max_nan_f32(largest, found)
                turn += cuda.blockDim.y
            unit += cuda.gridDim.x
        batch += cuda.gridDim.z
    return largest


def serve_ranges(inputs, outputs, ranges, encode, eps, matrix, steps, sizes, work, limits):
    """All rows of this block, of ranges."""
    row_offsets, expert_ids, row_indices, tile_starts = ranges
    encode_scale, encode_number, decode_scale = encode
    input_rows, rows = matrix
    x_row, codes_row, scales_row = steps
    units, lines, shift = work
    groups, experts, tiles = limits
    if ENCODE != "row" and ENCODE != "row_amax":
        store_range_scales(decode_scale, encode_scale, encode_number, expert_ids, groups, experts)
    unit = cuda.blockIdx.x + 0
    while unit < units:
        tile = unit >> shift
        part = unit - (tile << shift)
        owner, first_tile, start, stop, used, head, tail, taken = find_tile(
            row_offsets, tile_starts, groups, rows, tile
        )
        expert = -1
        scale_tile = tile
        if owner >= 0:
            expert = expert_of(expert_ids, owner, experts)
            if STARTS != "none":
                scale_tile = load_index(tile_starts, owner, STARTS) + tile - first_tile
        elif STARTS != "none":
            scale_tile = -1
        has_scales = scale_tile >= 0 and scale_tile < tiles
        range_g = encode_scale_of(encode_scale, encode_number, expert)
        turn = 0
        while turn < lines:
            local = row_of_line(part * lines + turn + cuda.threadIdx.y)
            if owner >= 0:
                row = start + ((tile - first_tile) << 7) + local
                written = row < stop
            else:
                row = row_of_none(((tile - used) << 7) + local, head, tail)
                written = row < rows
            source = -1
            if written and expert >= 0:
                source = source_row(row_indices, row, input_rows)
            g = range_g
            if ENCODE == "row":
                g = usable(encode_scale[row]) if written and expert >= 0 else ONE
            if LAYOUT == "linear":
                stored = written
                scales_at = scale_row_place(row, scales_row)
            else:
                stored = has_scales
                scales_at = scale_row_place((scale_tile << 7) + local, scales_row)
            plain_row = sizes[0] * piece_bytes()
            places = (
                times(source, x_row),
                times(source, plain_row),
                times(row, plain_row),
                times(row, codes_row),
                scales_at,
            )
            live = source >= 0
            quantize_row(
                inputs, outputs, decode_scale, g, eps, places, sizes, row, live, written, stored
            )
            turn += cuda.blockDim.y
        if LAYOUT == "tcgen" and STARTS != "none":
            if taken == 0 and tile < tiles and part == 0:
                clear_tile(outputs[3], tile, sizes[0] << 4)
        unit += cuda.gridDim.x


def fused(
    x,
    weight,
    residual,
    residual_out,
    hidden,
    codes,
    scales,
    row_offsets,
    expert_ids,
    row_indices,
    tile_starts,
    row_counts,
    encode_scale,
    encode_number,
    decode_scale,
    maximum,
    eps,
    input_rows,
    rows,
    batches,
    pieces,
    all_pieces,
    x_row,
    x_matrix,
    codes_row,
    scales_row,
    scales_matrix,
    units,
    lines,
    shift,
    groups,
    experts,
    tiles,
):
    # maximum: decode_scale, as bits. pieces, all_pieces: of a row, without and with the padding of
    # its last tile. Then bytes from a row, or a matrix, to the next; scales_row: of a row of tiles
    # in the tcgen layout.
    griddepcontrol_launch_dependents()
    griddepcontrol_wait()
    inputs = (x, weight, residual)
    outputs = (residual_out, hidden, codes, scales)
    encode = (encode_scale, encode_number, decode_scale)
    sizes = (pieces, all_pieces)
    if RANGES:
        ranges = (row_offsets, expert_ids, row_indices, tile_starts)
        steps = (x_row, codes_row, scales_row)
        work = (units, lines, shift)
        limits = (groups, experts, tiles)
        matrix = (input_rows, rows)
        serve_ranges(inputs, outputs, ranges, encode, eps, matrix, steps, sizes, work, limits)
    else:
        dense_steps = (x_row, x_matrix, codes_row, scales_row, scales_matrix)
        dense_work = (units, lines)
        shape = (rows, batches)
        largest = serve_dense(
            inputs, outputs, row_counts, encode, eps, shape, dense_steps, sizes, dense_work
        )
        if TASK == "amax":
            pattern = redux_max_u32(WARP, float_as_uint(largest))
            if (thread_index() & 31) == 0:
                red_max_global_u32(maximum, 0, pattern)


FUSED = Kernel(
    "fused_quantize",
    fused,
    (
        *("u8*", "u8*", "u8*", "u8*", "u8*", "u8*", "u8*"),
        *("u8*", "u8*", "u8*", "u8*", "u8*", "f32*", "f32", "f32*", "u32*", "f32"),
        *("i64",) * 16,
    ),
    {
        **ELEMENT_CONSTANTS,
        "ENCODE": ("none", "scalar", "array", "batch", "expert", "row", "amax", "row_amax"),
        "FRONT": ("plain", "silu", "gpt-oss", "rms"),
        "HALVES": ("split", "interleaved"),
        "WEIGHT": ("none", "same", "float32"),
        "RESIDUAL": ("none", "in", "out"),
        "HIDDEN": (False, True),
        "HOLD": ("none", "registers", "shared", "reread"),
        "TASK": ("quantize", "amax"),
        "RANGES": (False, True),
        "COUNTS": ("none", "int32", "int64", "uint32"),
        "OFFSETS": INDEX_DTYPES,
        "IDS": ("none", "int32", "int64"),
        "INDICES": ("none", "int32", "int64"),
        "STARTS": ("none", *INDEX_DTYPES),
        "PER": (1, 2, 3, 4),
        "WIDE": (False, True),
        "THREADS": (),
        "BLOCKS_PER_SM": (),
    },
)

_OUTPUT = {"INPUT": "bfloat16", "ROUNDING": "rceil", "ALIGNED": True, "LAYOUT": "tcgen"}
_NVFP4 = {**_OUTPUT, "ELEMENT": "e2m1", "SCALE": "e4m3"}
_MXFP4 = {**_OUTPUT, "ELEMENT": "e2m1", "SCALE": "e8m0"}
_MXFP8 = {**_OUTPUT, "ELEMENT": "e4m3", "SCALE": "e8m0"}
_PLAIN = {
    **{"UNIT": True, "ENCODE": "none", "HALVES": "split", "WEIGHT": "none", "RESIDUAL": "none"},
    **{"HIDDEN": False, "HOLD": "none", "TASK": "quantize", "RANGES": False, "COUNTS": "none"},
    **{"OFFSETS": "int32", "IDS": "none", "INDICES": "none", "STARTS": "none"},
    **{"PER": 1, "WIDE": False, "THREADS": 224, "BLOCKS_PER_SM": 4},
}
_NORM = {"FRONT": "rms", "WEIGHT": "same", "HOLD": "registers", "PER": 2}
_ALL_ARRAYS = {"OFFSETS": "int64", "IDS": "int64", "INDICES": "int32", "STARTS": "uint32"}

VARIANTS = {
    "fused_quantize": (
        {**_PLAIN, **_NVFP4, "FRONT": "silu"},
        {**_PLAIN, **_NVFP4, **_NORM, "RESIDUAL": "out"},
        {**_PLAIN, **_MXFP8, **_ALL_ARRAYS, "FRONT": "gpt-oss", "RANGES": True, "BLOCKS_PER_SM": 2},
    ),
}
SLOW_VARIANTS = {
    "fused_quantize": (
        {**_PLAIN, **_MXFP4, "FRONT": "plain", "COUNTS": "int32"},
        {**_PLAIN, **_NVFP4, "FRONT": "gpt-oss", "HALVES": "interleaved"},
        {**_PLAIN, **_NVFP4, "FRONT": "silu", "TASK": "amax"},
        {**_PLAIN, **_NVFP4, **_NORM, "PER": 4, "THREADS": 128},
        {**_PLAIN, **_NVFP4, **_NORM, "HOLD": "shared", "UNIT": False, "ENCODE": "row_amax"},
        {
            **{**_PLAIN, **_NVFP4, **_NORM, "HOLD": "reread", "RESIDUAL": "out", "HIDDEN": True},
            **{"INPUT": "float32", "ALIGNED": False, "LAYOUT": "linear"},
        },
        {
            **{**_PLAIN, **_MXFP8, **_NORM, **_ALL_ARRAYS, "RANGES": True, "BLOCKS_PER_SM": 2},
            **{"INPUT": "float16", "ELEMENT": "e5m2", "WEIGHT": "float32"},
        },
    ),
}
