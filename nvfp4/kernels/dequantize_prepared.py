"""Values of prepared weights: RN(element * f32(scale) * decode_scale), and a cast.

A thread takes eight columns of a row. Threads lie along the columns (x) and rows (y), blocks of
threads along row groups (x), column groups (y) and matrices (z), each axis in strides of the grid.

Compile-time constants: ELEMENT, SCALE, OUTPUT, ALIGNED and DECODE, as in ``dequantize``.
"""

from __future__ import annotations

from .._numba import cuda
from ..program import Kernel
from .elements import store8, times8
from .prepared import prepared8, prepared_codes, prepared_scales
from .quantize import ELEMENT_CONSTANTS

ELEMENT = "e2m1"
SCALE = "e8m0"
DECODE = "scalar"


def dequantize_prepared(codes, scales, decode_scale, out, rows, columns, batches):
    matrix_codes = prepared_codes(rows, columns, ELEMENT)
    matrix_scales = prepared_scales(rows, columns, SCALE)
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        row = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        while row < rows:
            flat_row = batch * rows + row
            if DECODE == "row":
                decode = decode_scale[flat_row]
            elif DECODE == "batch":
                decode = decode_scale[batch]
            else:
                decode = decode_scale[0]
            column = (cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x) * 8
            while column < columns:
                v = prepared8(
                    codes,
                    batch * matrix_codes,
                    scales,
                    batch * matrix_scales,
                    row,
                    column,
                    columns,
                    ELEMENT,
                    SCALE,
                )
                store8(out, flat_row * columns + column, times8(v, decode))
                column += cuda.gridDim.y * cuda.blockDim.x * 8
            row += cuda.gridDim.x * cuda.blockDim.y
        batch += cuda.gridDim.z


DEQUANTIZE_PREPARED = Kernel(
    "dequantize_prepared",
    dequantize_prepared,
    ("u8*", "u8*", "f32*", "u8*", "i64", "i64", "i64"),
    {
        "ELEMENT": ELEMENT_CONSTANTS["ELEMENT"],
        "SCALE": ELEMENT_CONSTANTS["SCALE"],
        "OUTPUT": ("bfloat16", "float16", "float32"),
        "ALIGNED": (False, True),
        "DECODE": ("scalar", "batch", "row"),
    },
)

_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "OUTPUT": "bfloat16", "ALIGNED": True}
_E5M2 = {"ELEMENT": "e5m2", "SCALE": "e8m0", "OUTPUT": "float32", "ALIGNED": False}

VARIANTS = ({**_NVFP4, "DECODE": "batch"}, {**_E5M2, "DECODE": "row"})
SLOW_VARIANTS = (
    {**_NVFP4, "SCALE": "e8m0", "DECODE": "scalar", "OUTPUT": "float16"},
    {**_E5M2, "ELEMENT": "e4m3", "ALIGNED": True, "DECODE": "scalar"},
)
