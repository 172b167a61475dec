"""The functions and kernels of Modular's ``linalg.block_scaled_quantization``, by their names.

Each function has the seed's arguments, in the seed's order, compile-time parameters being keywords,
and writes to the arrays it is given; ``ctx``, the seed's device context, is a stream or None. They
are thin: checks, a view of the arrays as QTensors, and a public function of ``nvfp4``. NumPy arrays
take the golden model or, inside ``nvfp4.simulate``, the simulated machine; GPU arrays the card, any
from compute capability 8.0 on. Where they differ from the seed: docs/modular.md.

The eight kernels, such as ``naive_block_scaled_matmul_kernel``, are programs of this package: what
``nvfp4 compile`` builds under these names, and what a ``nvfp4.launch.Launch`` runs on a card or on
the simulated machine.
"""

from __future__ import annotations

from typing import Any

from .amd import (
    grouped_matmul_block_scaled_amd,
    matmul_dynamic_block_scaled_amd,
    quantize_dynamic_block_scaled_mxfp4,
    quantize_mx_amd,
)
from .products import (
    block_scaled_matmul,
    block_scaled_matmul_with_epilogue,
    naive_block_scaled_matmul,
)
from .quantizers import (
    block_scales_interleave,
    block_scales_interleave_fp4,
    grouped_quantize_dynamic_scaled_fp4_async,
    quantize_dynamic_block_scaled,
    quantize_dynamic_scaled_fp4_async,
    quantize_dynamic_scaled_fp4fp8,
)

#: Names of earlier revisions of the seed.
quantize_mxfp4_amd = quantize_mx_amd
matmul_dynamic_block_scaled_mxfp4 = matmul_dynamic_block_scaled_amd
grouped_matmul_block_scaled_mxfp4 = grouped_matmul_block_scaled_amd

_KERNELS = (
    "block_scales_interleave_fp4_kernel",
    "grouped_matmul_block_scaled_amd_kernel",
    "grouped_quantize_dynamic_scaled_fp4_async_kernel",
    "matmul_dynamic_block_scaled_amd_kernel",
    "naive_block_scaled_matmul_kernel",
    "quantize_dynamic_block_scaled_mxfp4_kernel",
    "quantize_dynamic_scaled_async_fp4_kernel",
    "quantize_dynamic_scaled_fp4fp8_kernel",
)

__all__ = [
    "block_scaled_matmul",
    "block_scaled_matmul_with_epilogue",
    "block_scales_interleave",
    "block_scales_interleave_fp4",
    "grouped_matmul_block_scaled_amd",
    "grouped_matmul_block_scaled_mxfp4",
    "grouped_quantize_dynamic_scaled_fp4_async",
    "matmul_dynamic_block_scaled_amd",
    "matmul_dynamic_block_scaled_mxfp4",
    "naive_block_scaled_matmul",
    "quantize_dynamic_block_scaled",
    "quantize_dynamic_block_scaled_mxfp4",
    "quantize_dynamic_scaled_fp4_async",
    "quantize_dynamic_scaled_fp4fp8",
    "quantize_mx_amd",
    "quantize_mxfp4_amd",
]


def __getattr__(name: str) -> Any:
    if name in _KERNELS:
        from ...kernels.seeds import SEEDS

        return SEEDS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_KERNELS])
