"""The public functions: each checks its arguments, chooses where to run, and runs.

Each is imported when it is first used: a process that only quantises imports nothing of products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._lazy import getter

if TYPE_CHECKING:
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

# Public function -> the module that has it.
_HOMES = {
    "deinterleave_scales": "scales",
    "grouped_matmul": "products",
    "grouped_quantize": "grouped",
    "interleave_scales": "scales",
    "matmul": "products",
    "prepare_weights": "prepare",
    "quantize": "dense",
    "quantize_rows": "rows",
    "rmsnorm_quantize": "fused",
    "swiglu_quantize": "fused",
}


__getattr__ = getter(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
