"""What FlashInfer's callers hand over, made or read where the arrays are: offsets and layouts.

``flashinfer_tile_starts`` writes the first scale tile of each range by FlashInfer's rule, a thread
a range, and the 1 that is the operands' decode scale: FlashInfer has none. ``pad_offsets`` writes
offsets whose ranges are multiples of four rows, and where each row goes: one warp a range, which
adds up the ranges before its own. ``swizzle`` moves block scales from rows into tiles of 128 or of
8 rows by 4 blocks, of one byte or two, and ``unswizzle`` bytes back from tiles of 8 rows: threads
as in ``interleave``.

Compile-time constants: OFFSETS, the dtype of row offsets; TILE, rows of a tile; ITEM, bytes of a
scale.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import i64_of_u32
from ..ptx.memory import ld_global_u8, st_global_u8, st_global_u32
from ..ptx.warp import shfl_idx_u32
from .groups import load_index, running_max, running_sum, value_below
from .scales import tcgen_place
from .warps import lane_count, mask_of

OFFSETS = "int32"
TILE = 8
ITEM = 1

ONE = np.float32(1.0)


def flashinfer_tile_starts(row_offsets, tile_starts, one, groups):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if i == 0:
        one[0] = ONE
    if i < groups:
        start = (load_index(row_offsets, i, OFFSETS) + 127 * i) >> 7
        st_global_u32(tile_starts, i * 4, start, "")


def pad_offsets(row_offsets, padded, destinations, groups, rows):
    lanes = lane_count()
    mask = mask_of(lanes)
    lane = cuda.threadIdx.x + 0
    owner = cuda.blockIdx.x + 0
    # Offsets count as clamped to the rows and never decreasing, as in ``groups``.
    reach = min(max(load_index(row_offsets, 0, OFFSETS), 0), rows)
    before = 0
    base = 0
    while base < owner:
        count = min(lanes, owner - base)
        upper = reach
        if lane < count:
            upper = min(max(load_index(row_offsets, base + lane + 1, OFFSETS), reach), rows)
        upper = running_max(mask, upper, lane, count)
        lower = value_below(mask, upper, lane, reach)
        if lane < count:
            before += (upper - lower + 3) >> 2 << 2
        reach = i64_of_u32(shfl_idx_u32(mask, upper, count - 1))
        base += lanes
    # The running sum of the last lane is that of all, and is wanted in every lane.
    total = running_sum(mask, before, lane, lanes)
    total = i64_of_u32(shfl_idx_u32(mask, total, lanes - 1))
    if lane == 0 and owner == 0:
        st_global_u32(padded, 0, 0, "")
    if owner < groups:
        stop = min(max(load_index(row_offsets, owner + 1, OFFSETS), reach), rows)
        if lane == 0:
            own = (stop - reach + 3) >> 2 << 2
            st_global_u32(padded, (owner + 1) * 4, total + own, "")
        row = reach + lane
        while row < stop:
            st_global_u32(destinations, row * 4, total + row - reach, "")
            row += lanes


def place(row, block, k_tiles):
    """Where the scale of (row, block) is, counted in scales."""
    if TILE == 8:
        return (((row >> 3) * k_tiles + (block >> 2)) << 5) + ((row & 7) << 2) + (block & 3)
    else:
        return tcgen_place(row, block, k_tiles)


def swizzle(scales, out, rows, blocks, batches):
    k_tiles = (blocks + 3) // 4
    all_rows = (rows + TILE - 1) // TILE * TILE
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        while row < all_rows:
            k_tile = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
            while k_tile < k_tiles:
                source = (batch * rows + row) * blocks + k_tile * 4
                target = batch * all_rows * k_tiles * 4 + place(row, k_tile * 4, k_tiles)
                for i in range(4):
                    for byte in range(ITEM):
                        value = 0
                        if row < rows and k_tile * 4 + i < blocks:
                            value = ld_global_u8(scales, (source + i) * ITEM + byte, "")
                        st_global_u8(out, (target + i) * ITEM + byte, value, "")
                k_tile += cuda.gridDim.y * cuda.blockDim.x
            row += cuda.gridDim.x * cuda.blockDim.y
        batch += cuda.gridDim.z


def unswizzle(scales, out, rows, blocks):
    k_tiles = (blocks + 3) // 4
    row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while row < rows:
        k_tile = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        while k_tile < k_tiles:
            source = place(row, k_tile * 4, k_tiles)
            for i in range(4):
                block = k_tile * 4 + i
                if block < blocks:
                    value = ld_global_u8(scales, source + i, "")
                    st_global_u8(out, row * blocks + block, value, "")
            k_tile += cuda.gridDim.y * cuda.blockDim.x
        row += cuda.gridDim.x * cuda.blockDim.y


FLASHINFER_TILE_STARTS = Kernel(
    "flashinfer_tile_starts",
    flashinfer_tile_starts,
    ("u8*", "u8*", "f32*", "i64"),
    {"OFFSETS": ("int32",)},
)
PAD_OFFSETS = Kernel(
    "pad_offsets",
    pad_offsets,
    ("u8*", "u8*", "u8*", "i64", "i64"),
    {"OFFSETS": ("int32",)},
)
SWIZZLE = Kernel(
    "swizzle", swizzle, ("u8*", "u8*", "i64", "i64", "i64"), {"TILE": (8, 128), "ITEM": (1, 2)}
)
UNSWIZZLE = Kernel("unswizzle", unswizzle, ("u8*", "u8*", "i64", "i64"), {"TILE": (8,)})

VARIANTS = {
    "flashinfer_tile_starts": ({"OFFSETS": "int32"},),
    "pad_offsets": ({"OFFSETS": "int32"},),
    "swizzle": ({"TILE": 8, "ITEM": 1},),
    "unswizzle": ({"TILE": 8},),
}
SLOW_VARIANTS = {"swizzle": ({"TILE": 128, "ITEM": 2},)}
