"""NVFP4, MXFP4 and MXFP8: quantisation and matrix products, exact, on GPUs and without one.

The names below are the public interface; each is imported when it is first used.
"""

from __future__ import annotations

import os
import time
from importlib import import_module
from typing import TYPE_CHECKING

from ._lazy import getter

__version__ = "0.1.0"

#: When this process began to read the sources, for ``nvfp4.fingerprint``.
_READ_SINCE = time.time_ns()

__all__ = [
    "BlockFormat",
    "Epilogue",
    "QTensor",
    "SimulationError",
    "ToolchainError",
    "UnsupportedError",
    "deinterleave_scales",
    "epilogues",
    "grouped_matmul",
    "grouped_quantize",
    "interleave_scales",
    "matmul",
    "plan_matmul",
    "prepare_weights",
    "quantize",
    "quantize_rows",
    "rmsnorm_quantize",
    "simulate",
    "swiglu_quantize",
]

# Public name -> the module that has it; None: the name is the module.
_HOMES = {
    "BlockFormat": "formats",
    "Epilogue": "epilogue",
    "QTensor": "tensor",
    "SimulationError": "errors",
    "ToolchainError": "errors",
    "UnsupportedError": "errors",
    "deinterleave_scales": "api",
    "epilogues": None,
    "grouped_matmul": "api",
    "grouped_quantize": "api",
    "interleave_scales": "api",
    "matmul": "api",
    "plan_matmul": "planned",
    "prepare_weights": "api",
    "quantize": "api",
    "quantize_rows": "api",
    "rmsnorm_quantize": "api",
    "simulate": "sim",
    "swiglu_quantize": "api",
}


__getattr__ = getter(globals(), _HOMES)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if TYPE_CHECKING:
    from . import epilogues as epilogues
    from .api import deinterleave_scales as deinterleave_scales
    from .api import grouped_matmul as grouped_matmul
    from .api import grouped_quantize as grouped_quantize
    from .api import interleave_scales as interleave_scales
    from .api import matmul as matmul
    from .api import prepare_weights as prepare_weights
    from .api import quantize as quantize
    from .api import quantize_rows as quantize_rows
    from .api import rmsnorm_quantize as rmsnorm_quantize
    from .api import swiglu_quantize as swiglu_quantize
    from .epilogue import Epilogue as Epilogue
    from .errors import SimulationError as SimulationError
    from .errors import ToolchainError as ToolchainError
    from .errors import UnsupportedError as UnsupportedError
    from .formats import BlockFormat as BlockFormat
    from .planned import plan_matmul as plan_matmul
    from .sim import simulate as simulate
    from .tensor import QTensor as QTensor

# In a process that runs kernels in Numba's simulator, this package's machine takes its place.
if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
    from .errors import ToolchainError

    try:
        import_module(".sim.cudasim", __name__)
    except ToolchainError:
        pass  # Numba is not installed: then there are no kernels of users to run.
