"""The nvfp4 quantisers against each other: by plain loads and stores, and by tensor copies.

``python -m nvfp4.bench.quantize_kernels`` times the dense quantiser at memory speed
(``kernels.quantize_stream``, the default) and the one by tensor copies (``kernels.quantize_tma``)
in each of its ways, beside a copy; and the grouped ones, by plain stores as is the default
(``kernels.grouped_rows`` or ``kernels.grouped_stream``, by size) and the one whose scales leave by
bulk stores (``kernels.grouped_quantize_tma``), by their bytes a second. In CUDA graphs, on rotated
buffers; bytes are checked. Which of them is the default is decided by its figures.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from .. import compile as compiler
from .. import launch, plans, warm
from ..api import _repeat, dense
from ..driver import current_device
from ..formats import NVFP4
from ..plans_tma import GROUPED_WAYS, WAYS
from ..program import Program
from .devices import find_device
from .quantizers import Variant, buffers, dense_call, grouped_call, measure_copy
from .report import Report
from .run import Options, Pool, Run
from .shapes import GroupedShape
from .timing import Deadline, rotations

__all__ = ["GROUPED_SHAPES", "SHAPES", "build_ahead", "main", "taking"]

SHAPES = ((8192, 7168), (8192, 2880), (512, 7168))
GROUPED_SHAPES = (
    GroupedShape(256, 256 * 192),
    GroupedShape(128, 128 * 192),
    GroupedShape(256, 256 * 192, skewed=True),
    GroupedShape(48, 48 * 48),
    GroupedShape(256, 8, decode=True),
)
#: What is measured -> how the quantiser by tensor copies runs, "" for the other one.
KERNELS = {"stream": "", **{f"tma-{way}": way for way in WAYS}}
GROUPED_KERNELS = {
    "grouped-plain": "",
    **{f"grouped-tma-{way}": way for way in GROUPED_WAYS},
}


@contextlib.contextmanager
def taking(way: str) -> Iterator[None]:
    """Let calls take a quantiser by tensor copies in one of its ways; with "", none."""
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
    for way, calls in _calls(kernels):
        with taking(way):
            wanted |= dict.fromkeys(warm.programs(calls, arch))
    missing = [one for one in wanted if compiler.find(one, arch) is None]
    if missing:
        jobs = min(os.cpu_count() or 1, len(missing))
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            list(pool.map(_build, missing, [arch] * len(missing)))


def _calls(kernels: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The calls that are measured of each kernel, and its way."""
    quantize = {"call": "quantize", "format": "nvfp4"}
    dense = [
        {**quantize, "shape": list(shape), "encode_scale": scale}
        for shape in SHAPES
        for scale in (None, "array")
    ]
    grouped = [
        {
            **{**quantize, "call": "grouped_quantize", "groups": one.experts},
            **{"shape": [one.rows, one.columns], "encode_scale": "by_expert"},
        }
        for one in GROUPED_SHAPES
    ]
    for name in kernels:
        if name in KERNELS:
            yield KERNELS[name], dense
        else:
            yield GROUPED_KERNELS[name], grouped


def _build(program: Program, arch: str) -> None:
    compiler.build(program, arch)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m nvfp4.bench.quantize_kernels")
    parser.add_argument("--rounds", type=int, default=2, help="how often everything is measured")
    every = [*KERNELS, *GROUPED_KERNELS]
    parser.add_argument("--kernels", nargs="+", choices=every, default=every)
    options = parser.parse_args(arguments)
    device = find_device()
    build_ahead(options.kernels)
    run = Run(device, Options(), Deadline(1e9), Report("quantize_kernels", {}))
    for known, measure in ((KERNELS, _dense), (GROUPED_KERNELS, _grouped)):
        chosen = {name: known[name] for name in options.kernels if name in known}
        if chosen:
            measure(run, chosen, options.rounds)


def _dense(run: Run, kernels: dict[str, str], rounds: int) -> None:
    counts = {shape: rotations(2 * shape[0] * shape[1]) for shape in SHAPES}
    pool = Pool.for_sizes(run.device, [(m * k, counts[m, k]) for m, k in SHAPES])
    sink = run.device.full((pool.elements,), 0, "bfloat16")
    print(f"{'shape':>12} {'kernel':>8} {'g':>6} {'us':>8} {'TB/s':>6} {'of copy':>7}  bytes")
    for (rows, columns), count in counts.items():
        for _ in range(rounds):
            copy = measure_copy(run, rows, columns, count, pool, sink)
            speed = 4 * rows * columns / copy.median
            shape = f"{rows}x{columns}"
            print(f"{shape:>12} {'copy':>8} {'':>6} {copy.median * 1e6:8.2f} {speed / 1e12:6.2f}")
            for scaled in (False, True):
                variant = Variant(NVFP4, scaled)
                for name, way in kernels.items():
                    with taking(way):
                        timing, checked = dense_call(run, variant, rows, columns, pool, count)
                    there = variant.bytes(rows, columns) / timing.median
                    print(
                        f"{shape:>12} {name:>8} {'array' if scaled else 'none':>6} "
                        f"{timing.median * 1e6:8.2f} {there / 1e12:6.2f} {there / speed:7.3f}  "
                        f"{checked}",
                        flush=True,
                    )
                    run.device.release()


def _grouped(run: Run, kernels: dict[str, str], rounds: int) -> None:
    counts = {shape: buffers(shape) for shape in GROUPED_SHAPES}
    pool = Pool.for_sizes(run.device, [(s.rows * s.columns, n) for s, n in counts.items()])
    variant = Variant(NVFP4, True)
    print(f"{'ranges':>32} {'kernel':>15} {'us':>8} {'TB/s':>6}  bytes")
    for shape, count in counts.items():
        for _ in range(rounds):
            for name, way in kernels.items():
                with taking(way):
                    timing, checked = grouped_call(run, variant, shape, pool, count)
                speed = variant.bytes(shape.rows, shape.columns) / timing.median
                print(
                    f"{shape.label:>32} {name:>15} {timing.median * 1e6:8.2f} "
                    f"{speed / 1e12:6.2f}  {checked}",
                    flush=True,
                )
                run.device.release()


if __name__ == "__main__":
    main()
