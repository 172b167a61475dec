"""The simulated machine's speed beside Numba's simulator: ``python -m nvfp4.bench.simulator``.

The kernel is one of 32 blocks of 128 threads with one barrier: each thread stores into a shared
array, and after the barrier loads what another stored. It is an ordinary ``@cuda.jit`` kernel and
runs in both. Each time is the best of some runs; the results are compared with NumPy's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BLOCKS, THREADS = 32, 128

#: ``numba.cuda``, put here by :func:`measure`.
cuda: Any = None


def reverse(x: Any, out: Any) -> None:
    """Reverse each block's part of x: the kernel that is timed."""
    shared = cuda.shared.array(THREADS, np.float32)
    i = cuda.threadIdx.x
    shared[i] = x[cuda.grid(1)]
    cuda.syncthreads()
    out[cuda.grid(1)] = shared[THREADS - 1 - i]


def _best(run: Callable[[], None], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(repeats: int = 5) -> dict[str, float]:
    """Return seconds by simulator, in a process with ``NUMBA_ENABLE_CUDASIM=1``.

    Raises
    ------
    ToolchainError
        The process was not started so, or numba-cuda is missing.
    RuntimeError
        A result is wrong.
    """
    from .. import _numba
    from ..sim import cudasim, simulate

    module, *_ = _numba.simulator_modules()
    # Numba's simulator wants the module as a global of the kernel.
    globals()["cuda"] = module
    kernel = module.jit(reverse)  # type: ignore[attr-defined]
    x = np.arange(BLOCKS * THREADS, dtype=np.float32)
    out = np.zeros_like(x)

    def run() -> None:
        out[:] = np.nan
        kernel[BLOCKS, THREADS](x, out)
        expected = x.reshape(BLOCKS, THREADS)[:, ::-1].ravel()
        if not np.array_equal(out, expected):
            raise RuntimeError("the simulated kernel gave a wrong result")

    cudasim.uninstall()
    times = {"numba": _best(run, max(1, repeats // 2))}
    cudasim.install()
    for name, checks in (("nvfp4, checks off", False), ("nvfp4, all checks", True)):
        with simulate(checks=checks):
            times[name] = _best(run, repeats)
    return times


def main() -> None:
    """Measure in a process of its own, and print a line for each simulator."""
    parser = argparse.ArgumentParser(prog="python -m nvfp4.bench.simulator", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the best counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options = parser.parse_args()
    if os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
        command = [sys.executable, "-m", "nvfp4.bench.simulator", *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=environment).returncode)
    times = measure(options.repeats)
    if options.json:
        print(json.dumps({"kernel": f"{BLOCKS} blocks of {THREADS} threads", "seconds": times}))
        return
    print(f"{BLOCKS} blocks of {THREADS} threads, one barrier:")
    for name, seconds in times.items():
        print(f"  {name:20} {seconds * 1e3:9.1f} ms   {times['numba'] / seconds:6.1f}x")


if __name__ == "__main__":
    main()
