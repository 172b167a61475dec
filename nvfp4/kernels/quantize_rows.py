"""Rows of e4m3 with one scale each, docs/decisions.md D25.

A warp finds the maximum of a row, then reads the row again, from a cache mostly.

Constraints: columns is a multiple of 16; blockDim.x is 32. With ALIGNED, x, its row stride and the
codes are multiples of 16 bytes.

Compile-time constants: INPUT, ALIGNED; ELEMENT is "e4m3".
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import div_rn, max_nan_f32, min_f32, rcp_rn
from .elements import amax8, load8, store_codes
from .warps import amax_of_lanes

ELEMENT = "e4m3"

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
MOST = np.float32(448.0)
LARGEST = np.float32(2.0**126)
FLT_MAX = np.float32(3.4028234663852886e38)
WARP = 0xFFFFFFFF


def scale_of_amax(amax):
    """What the elements of a row are multiplied by."""
    if amax > ZERO and amax <= FLT_MAX:
        return min_f32(div_rn(MOST, amax), LARGEST)
    else:
        return ONE


def quantize_rows(x, codes, scales, rows, columns, row_stride):
    row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
    while row < rows:
        at = row * row_stride
        amax = ZERO
        column = cuda.threadIdx.x * 16
        while column < columns:
            amax = max_nan_f32(amax, amax8(load8(x, at + column)))
            amax = max_nan_f32(amax, amax8(load8(x, at + column + 8)))
            column += 512
        g = scale_of_amax(amax_of_lanes(WARP, amax, 32))
        if cuda.threadIdx.x == 0:
            scales[row] = rcp_rn(g)
        column = cuda.threadIdx.x * 16
        while column < columns:
            v = load8(x, at + column)
            w = load8(x, at + column + 8)
            store_codes(codes, row * columns + column, v, w, g)
            column += 512
        row += cuda.gridDim.x * cuda.blockDim.y


QUANTIZE_ROWS = Kernel(
    "quantize_rows",
    quantize_rows,
    ("u8*", "u8*", "f32*", "i64", "i64", "i64"),
    {
        "INPUT": ("bfloat16", "float16", "float32"),
        "ELEMENT": ("e4m3",),
        "ALIGNED": (False, True),
    },
)

VARIANTS = {
    "quantize_rows": (
        {"INPUT": "bfloat16", "ELEMENT": "e4m3", "ALIGNED": True},
        {"INPUT": "float32", "ELEMENT": "e4m3", "ALIGNED": False},
    ),
}
SLOW_VARIANTS = {
    "quantize_rows": ({"INPUT": "float16", "ELEMENT": "e4m3", "ALIGNED": True},),
}
