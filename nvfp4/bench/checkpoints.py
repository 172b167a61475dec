"""Speed and peak memory of checkpoint commands on a synthetic sharded model.

    python -m nvfp4.bench.checkpoints [--gigabytes 4] [--workers 2] [--folder PLACE]

Makes a bfloat16 checkpoint of shards of 0.4 GB, quantises it (and verifies it once), and prints for
each run the source's bytes by second of wall time and of processor time, and the largest resident
memory of one process. Where there is a GPU, it is used in a run of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ..checkpoint import TensorWriter
from ..checkpoint.model import INDEX

__all__ = ["main", "make_model"]

_ROWS, _COLUMNS = 14336, 4096
# The command, then its peak; children are counted by the system, the largest of them.
_RUN = """
import json, resource, sys
from nvfp4.cli.main import program
if __name__ == "__main__":
    try: program.main(sys.argv[1:])
    except SystemExit as end: code = end.code
    own, others = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    lines = open("/proc/self/status").read().split("\\n")
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    cpu = sum(u.ru_utime + u.ru_stime for u in (own, others))
    print(json.dumps([code, max(peak, others.ru_maxrss) * 1024, cpu]), file=sys.stderr)
"""


def make_model(folder: Path, gigabytes: float) -> int:
    """Write a sharded checkpoint of about that size; the bytes of its tensors."""
    import ml_dtypes

    folder.mkdir()
    values = np.random.default_rng(0).standard_normal((2048, _COLUMNS), dtype=np.float32)
    block = (values * np.float32(0.02)).astype(ml_dtypes.bfloat16)
    shard = {"gate_proj": _ROWS, "up_proj": _ROWS, "down_proj": _ROWS, "o_proj": 4096}
    shard_bytes = sum(shard.values()) * _COLUMNS * 2
    count = max(2, round(gigabytes * 1e9 / shard_bytes))
    table: dict[str, str] = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        tensors = {
            f"model.layers.{i}.{name}.weight": ("BF16", (rows, _COLUMNS))
            for name, rows in shard.items()
        }
        with TensorWriter(folder / file, tensors, {"format": "pt"}) as writer:
            for name, (_, (rows, _)) in tensors.items():
                for start in range(0, rows, len(block)):
                    writer.append(name, block[: rows - start])
                table[name] = file
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    (folder / "config.json").write_text("{}")
    return shard_bytes * count


def _measure(what: str, size: int, arguments: list[str], script: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    seconds = time.monotonic() - began
    code, peak, cpu = json.loads(done.stderr.splitlines()[-1])
    if code:
        raise SystemExit(done.stdout + done.stderr)
    print(
        f"{what:<28} {seconds:7.1f} s  {size / seconds / 1e9:6.2f} GB/s  "
        f"{size / cpu / 1e9:6.2f} GB/CPU-s  {peak / 1e6:6.0f} MB",
        flush=True,
    )


def main() -> None:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        source, out = Path(place) / "in", Path(place) / "out"
        size = make_model(source, options.gigabytes)
        largest = _ROWS * _COLUMNS * 2
        print(f"Python {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} cores")
        print(f"{size / 1e9:.2f} GB of bfloat16, the largest tensor {largest / 1e6:.0f} MB")
        print(f"bound on memory: {(3 * largest + 300e6) / 1e6:.0f} MB")
        script = Path(place) / "run.py"
        script.write_text(_RUN)
        base = ["quantize", str(source), "-o", str(out), "--overwrite", "--json"]
        runs = [(f, ["--format", f, "--device", "cpu"]) for f in ("nvfp4", "mxfp4", "mxfp8")]
        try:
            import cupy

            if cupy.cuda.runtime.getDeviceCount():
                runs.append(("nvfp4, GPU", ["--device", "cuda"]))
                runs.append(("nvfp4, GPU again", ["--device", "cuda"]))
        except Exception:  # no CuPy, no driver, no card: then there is nothing to measure
            print("no GPU")
        runs.append(("nvfp4, mse", ["--method", "mse", "--device", "cpu"]))
        several = ["--workers", str(options.workers), "--device", "cpu"]
        try:
            import distributed  # noqa: F401

            runs.append((f"nvfp4, {options.workers} workers", several))
        except ImportError:
            print("no dask.distributed")
        for what, more in runs:
            _measure(what, size, [*base, *more], script)
        _measure("verify", size, ["verify", str(source), str(out), "--json"], script)


if __name__ == "__main__":
    main()
