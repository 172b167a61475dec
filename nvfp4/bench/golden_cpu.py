"""The golden model's speed on one core, beside torchao's if that is installed.

``python -m nvfp4.bench.golden_cpu`` quantises a float32 matrix to nvfp4, once without and once with
a tensor scale, by ``nvfp4.golden.quantize`` and by torchao's ``nvfp4_quantize``, each on one thread
and in turns, so that a busy machine slows both. Both write codes and linear scales.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import io
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import golden
from ..formats import NVFP4

__all__ = ["main"]

Parts = tuple[np.ndarray, np.ndarray]


def ours(x: np.ndarray, encode_scale: Any) -> Parts:
    """Codes and linear scales of the golden model."""
    codes, scales, _ = golden.quantize(x, NVFP4, encode_scale=encode_scale, scale_layout="linear")
    return codes, scales


def torchao_quantizer() -> Callable[[np.ndarray, np.ndarray | None], Parts] | None:
    """The same by torchao on one thread, or None where it is not installed."""
    try:
        # Importing torchao reports, in several ways, kernels that this machine cannot use.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            import torch
            from torchao.prototype.mx_formats.nvfp4_tensor import (  # type: ignore[import-not-found]
                nvfp4_quantize,
            )
    except ImportError:
        return None
    finally:
        logging.disable(logging.NOTSET)
    torch.set_num_threads(1)

    def quantize(x: np.ndarray, encode_scale: np.ndarray | None) -> Parts:
        scale = None if encode_scale is None else torch.from_numpy(1 / encode_scale.reshape(1))
        scales, codes = nvfp4_quantize(torch.from_numpy(x), per_tensor_scale=scale)
        return codes.numpy(), scales.view(torch.uint8).numpy()

    return quantize


def measure(calls: dict[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each call, in turns, after one turn that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeat + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m nvfp4.bench.golden_cpu", description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096, help="a multiple of 16")
    parser.add_argument("--repeat", type=int, default=5, help="turns that count")
    options = parser.parse_args(arguments)
    shape = options.rows, options.columns
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    encode_scale = golden.amax_encode_scale(x, NVFP4)
    peer = torchao_quantizer()

    print(f"nvfp4 of {shape[0]} x {shape[1]} float32, one thread, best (median) of", options.repeat)
    print(f"Python {platform.python_version()}, NumPy {np.__version__},", _processor())
    if peer is None:
        print("torchao is not installed (pip install torch torchao): no comparison")
    else:
        versions = (f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torchao"))
        print(", ".join(versions))
    for title, g in (("no tensor scale", None), ("tensor scale", encode_scale)):
        calls: dict[str, Callable[[], Any]] = {"nvfp4": functools.partial(ours, x, g)}
        if peer is not None:
            calls["torchao"] = functools.partial(peer, x, g)
        seconds = measure(calls, options.repeat)
        line = [f"{title:16}"]
        for name, all_seconds in seconds.items():
            best, median = min(all_seconds), statistics.median(all_seconds)
            line.append(f"{name} {best * 1e3:7.1f} ms ({median * 1e3:.1f})")
        if peer is not None:
            ratio = min(seconds["nvfp4"]) / min(seconds["torchao"])
            equal = [np.mean(a == b) for a, b in zip(ours(x, g), peer(x, g), strict=True)]
            line.append(f"ratio {ratio:.2f}")
            line.append(f"equal bytes: codes {equal[0]:.4%}, scales {equal[1]:.4%}")
        print("  ".join(line))
    return 0


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
