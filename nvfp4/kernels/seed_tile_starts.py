"""The first scale tile of each range, by Modular's rule: row_offsets[i] // 128 + scales_offsets[i].

A thread a range, in strides of the grid. Compile-time constants: OFFSETS and STARTS, the dtypes of
the two arrays.
"""

from __future__ import annotations

from .._numba import cuda
from ..program import Kernel
from .groups import load_index

OFFSETS = "uint32"
STARTS = "uint32"


def seed_tile_starts(row_offsets, scales_offsets, tile_starts, groups):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    while i < groups:
        first = load_index(row_offsets, i, OFFSETS) >> 7
        tile_starts[i] = first + load_index(scales_offsets, i, STARTS)
        i += cuda.gridDim.x * cuda.blockDim.x


_INDICES = ("int32", "int64", "uint32")

SEED_TILE_STARTS = Kernel(
    "seed_tile_starts",
    seed_tile_starts,
    ("u8*", "u8*", "i64*", "i64"),
    {"OFFSETS": _INDICES, "STARTS": _INDICES},
)

VARIANTS = (
    {"OFFSETS": "uint32", "STARTS": "uint32"},
    {"OFFSETS": "int64", "STARTS": "int32"},
)
