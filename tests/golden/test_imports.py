"""The golden model runs where no CUDA package and no compiler is installed."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "numba_cuda", "llvmlite", "cupy", "cuda", "torch"}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
import numpy as np
import nvfp4.errors, nvfp4.formats, nvfp4.layouts
from nvfp4 import golden

x = np.linspace(-3, 3, 64, dtype=np.float32).reshape(2, 32)
for fmt in nvfp4.formats.FORMATS.values():
    parts = golden.quantize(x, fmt)
    y = golden.dequantize(*parts, fmt, shape=x.shape, scale_layout="tcgen")
    golden.matmul(x, y)
    golden.grouped_quantize(x, fmt, row_offsets=[0, 2])
print(sorted({m.split(".")[0] for m in sys.modules} & {"numba", "cupy", "cuda", "ml_dtypes"}))
"""


def test_the_golden_model_needs_neither_numba_nor_cuda_packages():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
