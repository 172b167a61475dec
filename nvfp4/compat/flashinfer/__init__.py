"""FlashInfer's FP4 and MX functions under their own names, for every card and without one.

The same arguments, layouts, dtypes and shapes, for PyTorch tensors, CuPy arrays and NumPy arrays;
bytes are those of this package's arithmetic. ``docs/flashinfer.md`` says argument by argument what
is the same, what is stricter and what is more. The current stream of the arrays' library is used,
and nothing is read back from a GPU (but for one size, see :func:`pad_indptr_to_multiple_of_4`).

Arguments that only tune FlashInfer's kernels are checked and have no effect: results never depend
on them. CuPy has no eight-bit floats: there such arrays are uint8.
"""

from __future__ import annotations

from ._dense import mm_fp4
from ._experts import scaled_fp4_grouped_quantize, silu_and_mul_scaled_nvfp4_experts_quantize
from ._layouts import SfLayout
from ._offsets import pad_indptr_to_multiple_of_4
from ._products import (
    group_gemm_mxfp4_nt_groupwise,
    group_gemm_mxfp8_mxfp4_nt_groupwise,
    group_gemm_nvfp4_nt_groupwise,
)
from ._quantizers import fp4_quantize, mxfp4_quantize, mxfp8_quantize, nvfp4_quantize
from ._scales import (
    block_scale_interleave,
    e2m1_and_ufp8sf_scale_to_float,
    mxfp4_dequantize,
    nvfp4_block_scale_interleave,
)

__all__ = [
    "SfLayout",
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "fp4_quantize",
    "group_gemm_mxfp4_nt_groupwise",
    "group_gemm_mxfp8_mxfp4_nt_groupwise",
    "group_gemm_nvfp4_nt_groupwise",
    "mm_fp4",
    "mxfp4_dequantize",
    "mxfp4_quantize",
    "mxfp8_quantize",
    "nvfp4_block_scale_interleave",
    "nvfp4_quantize",
    "pad_indptr_to_multiple_of_4",
    "scaled_fp4_grouped_quantize",
    "silu_and_mul_scaled_nvfp4_experts_quantize",
]
