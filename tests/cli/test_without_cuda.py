"""Golden model, simulator and demonstration run where no CUDA package is, as on a Mac."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "numba_cuda", "llvmlite", "cupy", "cuda"}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
"""

CALLS = """
import numpy as np
import nvfp4

x = np.linspace(-3, 3, 128, dtype=np.float32).reshape(4, 32)
b = nvfp4.quantize(x, "mxfp4")
offsets = np.array([0, 1, 4], np.int32)

def calls():
    q = nvfp4.quantize(x, "nvfp4", encode_scale="amax")
    g = nvfp4.grouped_quantize(x, "mxfp8", row_offsets=offsets)
    return [q.codes, q.scales, g.codes, g.scales, q.dequantize(), nvfp4.matmul(q, b)]

golden = calls()
with nvfp4.simulate():
    simulated = calls()
assert all(a.tobytes() == b.tobytes() for a, b in zip(golden, simulated, strict=True))
print("same")
"""

DEMO = """
from nvfp4.cli.main import main

sys.argv = ["nvfp4", "demo", "--rows", "32", "--format", "nvfp4", "--json", "--out", "picture.png"]
main()
"""


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + code],
        capture_output=True, text=True, timeout=120, check=False, cwd=folder,
    )  # fmt: skip


def test_public_calls_give_the_same_bytes_in_the_simulator(tmp_path: Path) -> None:
    done = run(CALLS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same\n"


def test_the_demonstration_runs(tmp_path: Path) -> None:
    done = run(DEMO, tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
