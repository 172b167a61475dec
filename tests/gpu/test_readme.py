"""The README's CuPy and PyTorch examples on the present card, against the golden model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)

# Appended to the examples: the same calls on the host. Products are compared within the rounding
# of float32 sums (relative to the largest value), quantised bytes exactly.
CUPY = """
host = nvfp4.quantize(w.get(), "mxfp8_e4m3")
assert (weights.codes.get() == host.codes).all() and (weights.scales.get() == host.scales).all()
o = offsets.get()
host_rows = nvfp4.grouped_quantize(x.get(), "mxfp8_e4m3", row_offsets=o)
assert (rows.codes.get() == host_rows.codes).all()
assert (rows.scales.get() == host_rows.scales).all()
wanted = nvfp4.grouped_matmul(host_rows, host, row_offsets=o, out_dtype="float32")
assert type(y) is cp.ndarray and y.shape == (100, 256)
assert abs(y.get() - wanted).max() < 1e-5 * abs(wanted).max()
print("same")
"""
TORCH = """
import ml_dtypes, numpy as np
def bf16(t): return t.cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
host = nvfp4.quantize(bf16(w), "nvfp4", encode_scale="amax")
assert type(q.codes) is torch.Tensor and q.codes.device == w.device
prepared = nvfp4.prepare_weights(host)
assert (q.codes.cpu().numpy() == prepared.codes).all()
assert (q.scales.cpu().numpy() == prepared.scales).all()
wanted = np.asarray(nvfp4.matmul(bf16(x), host, out_dtype="float32"))
assert y.dtype == torch.bfloat16 and y.shape == (16, 256)
assert abs(y.float().cpu().numpy() - wanted).max() < 2.0**-7 * abs(wanted).max()
assert torch.equal(out, y)
print("same")
"""


@pytest.mark.parametrize("library, check", [("cupy", CUPY), ("torch", TORCH)], ids=lambda v: v[:5])
def test_an_example_gives_what_the_golden_model_gives(library: str, check: str) -> None:
    (code,) = [text for text in BLOCKS if f"import {library}" in text]
    result = subprocess.run(
        [sys.executable, "-c", code + check],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("same\n")
