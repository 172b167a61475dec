"""Block scales from rows to the tcgen layout and back: bytes moved, none computed.

A thread moves the scales of up to 4 blocks of a row, which are neighbours in both layouts. Threads
lie along the blocks (x) and rows (y), blocks of threads along row groups (x), block groups (y) and
matrices (z), each axis in strides of the grid. Padding is written as 0 on the way there and not
read on the way back.
"""

from __future__ import annotations

from .._numba import cuda
from ..program import Kernel
from ..ptx.memory import ld_global_u8, st_global_u8
from .scales import tcgen_place


def interleave(scales, out, rows, blocks, batches):
    k_tiles = (blocks + 3) // 4
    all_rows = (rows + 127) // 128 * 128
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        while row < all_rows:
            k_tile = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
            while k_tile < k_tiles:
                source = (batch * rows + row) * blocks
                target = batch * all_rows * k_tiles * 4 + tcgen_place(row, k_tile * 4, k_tiles)
                for i in range(4):
                    block = k_tile * 4 + i
                    if row < rows and block < blocks:
                        st_global_u8(out, target + i, ld_global_u8(scales, source + block, ""), "")
                    else:
                        st_global_u8(out, target + i, 0, "")
                k_tile += cuda.gridDim.y * cuda.blockDim.x
            row += cuda.gridDim.x * cuda.blockDim.y
        batch += cuda.gridDim.z


def deinterleave(scales, out, rows, blocks, batches):
    k_tiles = (blocks + 3) // 4
    all_rows = (rows + 127) // 128 * 128
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        while row < rows:
            k_tile = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
            while k_tile < k_tiles:
                source = batch * all_rows * k_tiles * 4 + tcgen_place(row, k_tile * 4, k_tiles)
                target = (batch * rows + row) * blocks
                for i in range(4):
                    block = k_tile * 4 + i
                    if block < blocks:
                        st_global_u8(out, target + block, ld_global_u8(scales, source + i, ""), "")
                k_tile += cuda.gridDim.y * cuda.blockDim.x
            row += cuda.gridDim.x * cuda.blockDim.y
        batch += cuda.gridDim.z


_PARAMETERS = ("u8*", "u8*", "i64", "i64", "i64")

INTERLEAVE = Kernel("interleave_scales", interleave, _PARAMETERS)
DEINTERLEAVE = Kernel("deinterleave_scales", deinterleave, _PARAMETERS)
