"""The public functions: each checks its arguments, chooses where to run, and runs."""

from __future__ import annotations

from .dense import quantize
from .fused import rmsnorm_quantize, swiglu_quantize
from .grouped import grouped_quantize
from .prepare import prepare_weights
from .products import grouped_matmul, matmul
from .rows import quantize_rows
from .scales import deinterleave_scales, interleave_scales

__all__ = [
    "deinterleave_scales",
    "grouped_matmul",
    "grouped_quantize",
    "interleave_scales",
    "matmul",
    "prepare_weights",
    "quantize",
    "quantize_rows",
    "rmsnorm_quantize",
    "swiglu_quantize",
]
