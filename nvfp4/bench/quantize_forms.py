"""The forms of the quantisers at memory speed against each other, side by side.

``python -m nvfp4.bench.quantize_forms`` times the dense and the grouped quantiser as plans take
them and with each setting of `SETTINGS`, in CUDA graphs, on rotated buffers, bytes checked: a line
a shape and format, a column a setting. Dense ratios are to a copy's bytes a second, grouped ones to
the dense quantiser on the same rows, both in the column's own setting. Which setting is the default
is decided by these figures.
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
from ..driver import current_device
from ..formats import FORMATS
from ..program import Program
from . import quantize_kernels
from .devices import find_device
from .quantizers import Variant, _call, buffers, dense_call, grouped_call, measure_copy
from .report import Report
from .run import Options, Pool, Run
from .shapes import DenseShape, GroupedShape
from .timing import Deadline

__all__ = ["DENSE_SHAPES", "GROUPED_SHAPES", "SETTINGS", "main", "switched"]

_ALL = 1 << 40
#: What is compared: name -> private switches of ``nvfp4.plans``.
SETTINGS: dict[str, dict[str, Any]] = {
    "long": {"_SHORT": False, "_FEW_GROUPED_PIECES": 0},
    "short": {"_SHORT": True, "_FEW_GROUPED_PIECES": 0},
    "short-12": {"_SHORT": True, "_RESIDENT": 12},
    "rows-1": {"_SHORT": True, "_FEW_GROUPED_PIECES": _ALL, "_GROUPED_PIECES": 1},
    "rows-2": {"_SHORT": True, "_FEW_GROUPED_PIECES": _ALL, "_GROUPED_PIECES": 2},
}
DENSE_SETTINGS = ("long", "short", "short-12")
GROUPED_SETTINGS = ("long", "short", "rows-1", "rows-2")

DENSE_SHAPES = (
    DenseShape(8192, 7168),
    DenseShape(8192, 2880),
    DenseShape(1, 7168, in_l2=True),
    DenseShape(32, 7168, in_l2=True),
    DenseShape(512, 7168),
    DenseShape(65536, 7168),
)
GROUPED_SHAPES = (
    *(GroupedShape(256, rows, decode=True) for rows in (8, 16, 32, 64)),
    GroupedShape(8, 8 * 192),
    GroupedShape(48, 48 * 48),
    GroupedShape(32, 32 * 192),
    GroupedShape(256, 64, decode=True, in_l2=True),
    GroupedShape(128, 128 * 192),
)
NVFP4, MXFP4, MXFP8 = (FORMATS[name] for name in ("nvfp4", "mxfp4", "mxfp8_e4m3"))
DENSE_VARIANTS = (Variant(NVFP4, True), Variant(NVFP4, False), Variant(MXFP4, False))
GROUPED_VARIANTS = (Variant(NVFP4, True), Variant(NVFP4, False), Variant(MXFP8, False))


@contextlib.contextmanager
def switched(setting: str) -> Iterator[None]:
    """Let calls take a setting."""
    switches = SETTINGS[setting]
    before = {name: getattr(plans, name) for name in switches}
    try:
        for name, value in switches.items():
            setattr(plans, name, value)
        quantize_kernels._forget()
        yield
    finally:
        for name, value in before.items():
            setattr(plans, name, value)
        quantize_kernels._forget()


def build_ahead() -> None:
    """Build what will be measured, by all cores."""
    arch = launch.architecture(current_device())
    dense = [_call(v, s.rows, s.columns) for s in DENSE_SHAPES for v in DENSE_VARIANTS]
    dense += [_call(v, s.rows, s.columns) for s in GROUPED_SHAPES for v in GROUPED_VARIANTS]
    grouped = [
        _call(v, s.rows, s.columns, s.experts) for s in GROUPED_SHAPES for v in GROUPED_VARIANTS
    ]
    wanted: dict[Program, None] = {}
    for setting in SETTINGS:
        calls = dense * (setting in DENSE_SETTINGS) + grouped * (setting in GROUPED_SETTINGS)
        with switched(setting):
            wanted |= dict.fromkeys(warm.programs(calls, arch))
    missing = [one for one in wanted if compiler.find(one, arch) is None]
    if missing:
        jobs = min(os.cpu_count() or 1, len(missing))
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            list(pool.map(quantize_kernels._build, missing, [arch] * len(missing)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m nvfp4.bench.quantize_forms")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds, building left out")
    parser.add_argument("--rounds", type=int, default=1, help="how often everything is measured")
    parser.add_argument("--parts", nargs="+", choices=("dense", "grouped"), default=None)
    options = parser.parse_args(arguments)
    device = find_device()
    build_ahead()
    run = Run(device, Options(), Deadline(options.budget), Report("quantize_forms", {}))
    parts = {"grouped": _grouped, "dense": _dense}
    chosen = options.parts or list(parts)
    shapes: list[DenseShape | GroupedShape] = []
    shapes += DENSE_SHAPES if "dense" in chosen else ()
    shapes += GROUPED_SHAPES if "grouped" in chosen else ()
    pool = Pool.for_sizes(device, [(s.rows * s.columns, buffers(s)) for s in shapes])
    for _ in range(options.rounds):
        for name in chosen:
            parts[name](run, pool)
    print(f"{run.deadline.spent:.1f} s")


def _heading(title: str, settings: Sequence[str]) -> None:
    print(f"{title:>24} {'format':>14} " + " ".join(f"{name:>14}" for name in settings))


def _line(shape: str, label: str, cells: Sequence[str]) -> None:
    print(f"{shape:>24} {label:>14} " + " ".join(f"{cell:>14}" for cell in cells), flush=True)


def _dense(run: Run, pool: Pool) -> None:
    sink = run.device.full((pool.elements,), 0, "bfloat16")
    _heading("us, of a copy", DENSE_SETTINGS)
    for shape in DENSE_SHAPES:
        rows, columns, count = shape.rows, shape.columns, buffers(shape)
        if run.deadline.over():
            print(f"{shape.label:>24} left out: the budget is spent")
            continue
        copy = measure_copy(run, rows, columns, count, pool, sink).median
        _line(shape.label, "copy", [f"{copy * 1e6:.2f}"])
        for variant in DENSE_VARIANTS:
            cells = []
            for setting in DENSE_SETTINGS:
                with switched(setting):
                    cell, seconds = _timed(dense_call, run, variant, rows, columns, pool, count)
                if seconds:
                    there = variant.bytes(rows, columns) / seconds
                    cell += f" {there * copy / (4 * rows * columns):.3f}"
                cells.append(cell)
            _line(shape.label, variant.label, cells)


def _grouped(run: Run, pool: Pool) -> None:
    _heading("us, of dense", GROUPED_SETTINGS)
    for shape in GROUPED_SHAPES:
        count = buffers(shape)
        if run.deadline.over():
            print(f"{shape.label:>24} left out: the budget is spent")
            continue
        for variant in GROUPED_VARIANTS:
            dense: dict[str, float] = {}
            if not shape.decode:
                for setting in ("long", "short"):
                    with switched(setting):
                        _, dense[setting] = _timed(
                            dense_call, run, variant, shape.rows, shape.columns, pool, count
                        )
            cells = []
            for setting in GROUPED_SETTINGS:
                with switched(setting):
                    cell, seconds = _timed(grouped_call, run, variant, shape, pool, count)
                reference = dense.get("long" if setting == "long" else "short", 0.0)
                if seconds and reference:
                    cell += f" {reference / seconds:.3f}"
                cells.append(cell)
            _line(shape.label, variant.label, cells)


def _timed(measure: Any, run: Run, *arguments: Any) -> tuple[str, float]:
    """Microseconds as text, and seconds; WRONG or an error's name, and 0, where it fails."""
    try:
        timing, checked = measure(run, *arguments)
    except Exception as error:  # the other columns are worth having
        return type(error).__name__[:14], 0.0
    finally:
        run.device.release()
    if checked.startswith("WRONG"):
        return "WRONG", 0.0
    return f"{timing.median * 1e6:.2f}", timing.median


if __name__ == "__main__":
    main()
