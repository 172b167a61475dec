"""Names of the kernels of Modular's ``linalg.block_scaled_quantization``, and what they stand for.

Each is a kernel of this package that does its work, with the constants that make it the seed's.
A name stands for one program; other formats and dtypes of the seed's kernel are other constants
(``nvfp4 compile NAME --set CONSTANT=VALUE``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..program import Program
from .grouped_quantize_tma import GROUPED_QUANTIZE_TMA
from .interleave import INTERLEAVE
from .matmul_naive import GROUPED_MATMUL, MATMUL
from .quantize_stream import QUANTIZE_STREAM
from .quantize_tma import QUANTIZE_TMA

__all__ = ["SEEDS"]

_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "ROUNDING": "rceil", "UNIT": False}
_MXFP4_EVEN = {"ELEMENT": "e2m1", "SCALE": "e8m0", "ROUNDING": "even", "UNIT": True}
_ROWS = {"INPUT": "bfloat16", "ALIGNED": True, "ROWS": 1, "STACK": False, "BLOCKS_PER_SM": 16}
_PRODUCT = {
    **{"INPUT": "bfloat16", "ALIGNED": True, "ALPHA": "value", "PAIR": "none"},
    **{"DECODE_A": "scalar", "DECODE_B": "scalar", "ROUNDING": "rceil", "UNIT": True},
    **{"OUTPUT": "bfloat16", "ELEMENT": "e2m1", "SCALE": "e8m0", "LAYOUT": "linear"},
}


def _operands(scale: str, layout: str) -> dict[str, str]:
    """Both operands in four bits, with these scales."""
    parts = {"ELEMENT": "e2m1", "SCALE": scale, "LAYOUT": layout}
    return {f"{side}_{name}": value for side in "AB" for name, value in parts.items()}


#: The seed's name of each kernel -> our program.
SEEDS: Mapping[str, Program] = MappingProxyType(
    {
        "block_scales_interleave_fp4_kernel": INTERLEAVE.program(),
        "grouped_matmul_block_scaled_amd_kernel": GROUPED_MATMUL.program(
            **_PRODUCT,
            **_operands("e8m0", "linear"),
            **{"OFFSETS": "uint32", "IDS": "int32", "INDICES": "none"},
            **{"STARTS": "none", "A_STARTS": "none"},
        ),
        "grouped_quantize_dynamic_scaled_fp4_async_kernel": GROUPED_QUANTIZE_TMA.program(
            **_NVFP4,
            **{"INPUT": "bfloat16", "ENCODE": "expert", "K_TILES": 4, "BLOCKS_PER_SM": 8},
            **{"OFFSETS": "uint32", "IDS": "int32", "INDICES": "none", "STARTS": "int64"},
            SEARCH="steps",
        ),
        "matmul_dynamic_block_scaled_amd_kernel": MATMUL.program(
            **_PRODUCT, **_operands("e8m0", "linear")
        ),
        "naive_block_scaled_matmul_kernel": MATMUL.program(
            **_PRODUCT, **_operands("e4m3", "tcgen")
        ),
        "quantize_dynamic_block_scaled_mxfp4_kernel": QUANTIZE_STREAM.program(
            **_MXFP4_EVEN, **_ROWS, LAYOUT="linear", ENCODE="none"
        ),
        "quantize_dynamic_scaled_async_fp4_kernel": QUANTIZE_TMA.program(
            **_NVFP4,
            **{"INPUT": "bfloat16", "ENCODE": "scalar"},
            **{"STAGES": 1, "THREADS": 160, "BLOCKS_PER_SM": 8},
        ),
        "quantize_dynamic_scaled_fp4fp8_kernel": QUANTIZE_STREAM.program(
            **_NVFP4, **_ROWS, LAYOUT="tcgen", ENCODE="scalar"
        ),
    }
)
