"""The nvfp4 quantisers against each other: by plain loads, and by tensor copies.

``python -m nvfp4.bench.quantize_kernels`` times the dense quantiser at memory speed
(``kernels.quantize_stream``, the default) and the one by tensor copies (``kernels.quantize_tma``)
in each of its ways, beside a copy, in CUDA graphs on rotated buffers, and checks their bytes. Which
of them is the default is decided by its figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from .. import compile as compiler
from .. import launch, plans, warm
from ..api import _repeat, dense
from ..driver import current_device
from ..formats import NVFP4
from ..plans_tma import WAYS
from ..program import Program
from .devices import find_device
from .quantizers import Variant, dense_call, measure_copy
from .report import Report
from .run import Options, Pool, Run
from .timing import Deadline, rotations

__all__ = ["SHAPES", "build_ahead", "main", "taking"]

SHAPES = ((8192, 7168), (8192, 2880), (512, 7168))
#: What is measured -> how the quantiser by tensor copies runs, "" for the other one.
KERNELS = {"stream": "", **{f"tma-{way}": way for way in WAYS}}


@contextlib.contextmanager
def taking(way: str) -> Iterator[None]:
    """Let calls take the quantiser by tensor copies in one of its ways; with "", not at all."""
    before = plans._TMA
    try:
        plans._TMA = way
        _forget()
        yield
    finally:
        plans._TMA = before
        _forget()


def _forget() -> None:
    plans.quantize.cache_clear()
    plans.grouped_quantize.cache_clear()
    dense._dense_call.cache_clear()
    _repeat.forget()


def build_ahead(kernels: Sequence[str]) -> None:
    """Build what will be measured, by all cores."""
    arch = launch.architecture(current_device())
    wanted: dict[Program, None] = {}
    for name in kernels:
        with taking(KERNELS[name]):
            for shape in SHAPES:
                for scale in (None, "array"):
                    call = {"call": "quantize", "format": "nvfp4", "shape": list(shape)}
                    made = warm.programs([{**call, "encode_scale": scale}], arch)
                    wanted |= dict.fromkeys(made)
    missing = [one for one in wanted if compiler.find(one, arch) is None]
    if missing:
        jobs = min(os.cpu_count() or 1, len(missing))
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            list(pool.map(_build, missing, [arch] * len(missing)))


def _build(program: Program, arch: str) -> None:
    compiler.build(program, arch)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m nvfp4.bench.quantize_kernels")
    parser.add_argument("--rounds", type=int, default=2, help="how often everything is measured")
    parser.add_argument("--kernels", nargs="+", choices=[*KERNELS], default=[*KERNELS])
    options = parser.parse_args(arguments)
    device = find_device()
    build_ahead(options.kernels)
    run = Run(device, Options(), Deadline(1e9), Report("quantize_kernels", {}))
    counts = {shape: rotations(2 * shape[0] * shape[1]) for shape in SHAPES}
    pool = Pool.for_sizes(device, [(m * k, counts[m, k]) for m, k in SHAPES])
    sink = device.full((pool.elements,), 0, "bfloat16")
    print(f"{'shape':>12} {'kernel':>8} {'g':>6} {'us':>8} {'TB/s':>6} {'of copy':>7}  bytes")
    for (rows, columns), count in counts.items():
        for _ in range(options.rounds):
            copy = measure_copy(run, rows, columns, count, pool, sink)
            speed = 4 * rows * columns / copy.median
            shape = f"{rows}x{columns}"
            print(f"{shape:>12} {'copy':>8} {'':>6} {copy.median * 1e6:8.2f} {speed / 1e12:6.2f}")
            for scaled in (False, True):
                variant = Variant(NVFP4, scaled)
                for name in options.kernels:
                    with taking(KERNELS[name]):
                        timing, checked = dense_call(run, variant, rows, columns, pool, count)
                    there = variant.bytes(rows, columns) / timing.median
                    print(
                        f"{shape:>12} {name:>8} {'array' if scaled else 'none':>6} "
                        f"{timing.median * 1e6:8.2f} {there / 1e12:6.2f} {there / speed:7.3f}  "
                        f"{checked}",
                        flush=True,
                    )
                    device.release()


if __name__ == "__main__":
    main()
