"""Peak memory: at most three times the largest tensor, and 300 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nvfp4.checkpoint import TensorWriter
from tests.checkpoint.helpers import ROOT

# ru_maxrss starts from the parent's at fork; VmHWM is this process's own.
PEAK = (
    "import sys\n"
    "from nvfp4.cli.main import program\n"
    "try: program.main(sys.argv[1:])\n"
    "except SystemExit as end: assert not end.code, end.code\n"
    "lines = open('/proc/self/status').read().splitlines()\n"
    "print(next(l.split()[1] for l in lines if l.startswith('VmHWM')), file=sys.stderr)\n"
)


def peak(*arguments: object) -> int:
    """Peak resident bytes of a command."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)],
        capture_output=True, text=True, cwd=ROOT, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return int(done.stderr.split()[-1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    block = rng.standard_normal((1024, 8192)).astype("float32")
    rows, copies = 24576, 24  # 805 MB each
    source = tmp_path / "in.safetensors"
    tensors = {f"{n}.weight": ("F32", (rows, 8192)) for n in "ab"}
    with TensorWriter(source, {**tensors, "c.embed.weight": ("F32", (rows, 8192))}) as writer:
        for name in [*tensors, "c.embed.weight"]:
            for _ in range(copies):
                writer.append(name, block)
    largest = rows * 8192 * 4
    limit = 300_000_000  # three tensors more would be allowed; streaming needs none of them
    for options in ([], ["--method", "mse", "--include", "a.weight"]):
        out = tmp_path / "out.safetensors"
        used = peak("quantize", source, "-o", out, "--device", "cpu", "--overwrite", *options)
        assert used < largest + limit, f"{used / 1e6:.0f} MB"
    assert peak("verify", source, out) < largest + limit
    assert peak("inspect", out) < largest + limit
    assert peak("convert", out, "-o", tmp_path / "m.safetensors", "--to", "modelopt") < (
        largest + limit
    )
