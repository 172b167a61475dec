"""The definition of the package's arithmetic in NumPy; imports no compiler and no CUDA package."""

from __future__ import annotations

from .casts import (
    cast_float,
    decode_e2m1,
    decode_e4m3,
    decode_e5m2,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e5m2,
    widen,
)
from .dequantize import dequantize, element_scale_product
from .grouped import grouped_quantize
from .interleave import deinterleave_scales, interleave_scales
from .matmul import grouped_matmul, matmul
from .prepare import prepare_weights, unprepare_weights
from .quantize import quantize
from .rows import quantize_rows
from .scales import amax_encode_scale, e8m0_scale, row_amax_encode_scale

__all__ = [
    "amax_encode_scale",
    "cast_float",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e5m2",
    "decode_e8m0",
    "deinterleave_scales",
    "dequantize",
    "e8m0_scale",
    "element_scale_product",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e5m2",
    "grouped_matmul",
    "grouped_quantize",
    "interleave_scales",
    "matmul",
    "prepare_weights",
    "quantize",
    "quantize_rows",
    "row_amax_encode_scale",
    "unprepare_weights",
    "widen",
]
