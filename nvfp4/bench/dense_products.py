"""The suite ``matmul``: rows times one quantised matrix, beside cuBLAS in bfloat16.

Rows are of bfloat16, or of what else is asked for (``activations``); the targets are those of
bfloat16. Weights are prepared once, and rotated so that they come from memory. A shape whose call
would take more than a second is left out, and the table says how long it would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from .. import api
from ..formats import FORMATS, BlockFormat
from ..tensor import QTensor
from .activations import BFLOAT16, Case, Left, cases
from .correct import written_alike_values
from .report import failed, row, skipped
from .run import Options, Run
from .shapes import DENSE_PRODUCTS, DenseProduct
from .targets import Target, product_floor
from .timing import FOOTPRINT, Timing, least_calls
from .weights import bits_of, copies_of, prepared_copies, values_of

__all__ = ["FORMATS_BY_DEFAULT", "Pace", "calls", "measure", "timed_product", "tunable"]

GROUP = "Dense products"
FORMATS_BY_DEFAULT = ("mxfp4", "nvfp4", "mxfp8_e4m3")
#: What a batch-invariant plan is compared with.
USUAL = "usual plan"
#: Seconds of one call above which a shape is left out.
LONGEST = 1.0


def calls(
    options: Options, products: Iterable[DenseProduct] = DENSE_PRODUCTS
) -> list[dict[str, Any]]:
    """What is called, as ``nvfp4 compile --shapes`` takes it."""
    made: list[dict[str, Any]] = []
    for fmt in options.chosen(FORMATS_BY_DEFAULT):
        wanted = [
            (p, case)
            for p in products
            for case in cases(options.activations, options.batch_invariant)
            if case.rows.takes(FORMATS[fmt]) and options.wants(p.label + case.suffix)
        ]
        if wanted:
            wanted.insert(0, (DenseProduct(*_PROBE, ratio=0), Case(BFLOAT16)))
        for p, case in wanted:
            shape = {"b": fmt, "m": p.rows, "n": p.columns, "k": p.depth, "prepared": True}
            made.append({"call": "matmul", **case.called, **shape})
            if case.rows.format is not None:
                made.append(
                    {"call": "quantize", "format": case.rows.name, "shape": [p.rows, p.depth]}
                )
    return made


def tunable(
    options: Options, products: Iterable[DenseProduct] = DENSE_PRODUCTS
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Products of bfloat16 rows: label, call, whether it has a target."""
    for fmt in options.chosen(FORMATS_BY_DEFAULT):
        for p in products:
            if options.wants(p.label):
                shape = {"b": fmt, "m": p.rows, "n": p.columns, "k": p.depth}
                yield f"{p.label}, {fmt}", {"call": "matmul", "a": "bfloat16", **shape}, True


# --- shapes that would take too long --------------------------------------------------------------

_PROBE = (1024, 2048, 64)  # columns, depth, rows


class Pace:
    """Multiplications a second seen so far; says what a larger call would take."""

    def __init__(self) -> None:
        self.rate = 0.0

    def saw(self, work: float, seconds: float) -> None:
        """A call took so long."""
        self.rate = max(self.rate, work / seconds)

    def too_long(self, work: float) -> str:
        """Why a call is left out; empty: it is not."""
        seconds = work / self.rate if self.rate else 0.0
        if seconds <= LONGEST:
            return ""
        return f"one call would take {seconds:.1f} s with the present kernel"


def probe(run: Run, fmt: BlockFormat) -> Pace:
    """A small product's pace."""
    columns, depth, rows = _PROBE
    pace = Pace()
    (b,), _ = prepared_copies(run.device, fmt, (columns, depth), 1)
    a = run.device.random(rows * depth).reshape(rows, depth)
    out = run.device.full((rows, columns), 0.0, "bfloat16")
    seconds = one_call(run, lambda: api.matmul(a, b, out=out))
    pace.saw(rows * columns * depth, seconds)
    return pace


def one_call(run: Run, call: Callable[[], Any]) -> float:
    """Seconds of a call after a first one."""
    call()
    run.device.wait()
    first = run.device.mark()
    call()
    return run.device.seconds(first, run.device.mark())


def timed_product(
    run: Run, calls: Sequence[Callable[[], Any]], pace: Pace, work: float
) -> tuple[Timing, Callable[[], Any]]:
    """Time calls, fewer of them where they are slow."""
    seconds = one_call(run, calls[0])
    pace.saw(work, seconds)
    most = max(1, int(2.0 / max(seconds, 1e-9)))  # of calls in all
    some = calls[: max(1, min(len(calls), most // 4))]
    return run.timed(some, least=min(least_calls(seconds), max(1, most // 8)), budget=0.15)


# --- measuring ------------------------------------------------------------------------------------


def measure(run: Run, products: Iterable[DenseProduct] = DENSE_PRODUCTS) -> None:
    """Every product that was asked for in every format, and cuBLAS."""
    every = list(cases(run.options.activations, run.options.batch_invariant))
    chosen = [p for p in products if any(run.options.wants(p.label + c.suffix) for c in every)]
    speeds = {p: _cublas(run, p) for p in dict.fromkeys(chosen)}
    needed = [p for p in chosen if p.reference == "cuBLAS 8192"]
    cube = _cublas_8192(run) if needed else None
    for name in run.options.chosen(FORMATS_BY_DEFAULT):
        fmt = FORMATS[name]
        pace = Pace()
        if chosen and not run.deadline.over():
            run.say(f"{name}: how fast is a small product")
            pace = probe(run, fmt)
        for p in chosen:
            wanted = [
                case
                for case in every
                if case.rows.takes(fmt) and run.options.wants(p.label + case.suffix)
            ]
            references: dict[str, float] = {}
            if (cublas := speeds[p]) is not None:
                references["cuBLAS"] = cublas
            if cube is not None:
                references["cuBLAS 8192"] = 2.0 * p.rows * p.columns * p.depth / cube
            _measure_product(run, p, fmt, wanted, pace, references)
            run.device.release()
    run.sort()


def _measure_product(
    run: Run, p: DenseProduct, fmt: BlockFormat, wanted: Sequence[Case], pace: Pace,
    references: dict[str, float],
) -> None:  # fmt: skip
    """A product with all kinds of rows, by the same weights."""
    shape = (p.columns, p.depth)
    why = pace.too_long(float(p.rows) * p.columns * p.depth)
    weights: list[QTensor] = []
    original: QTensor | None = None
    usual: dict[str, float] = {}  # seconds by kind of rows
    for case in wanted:
        group, label, target = case.rows.group(GROUP), p.label + case.suffix, _target(p, case)
        if why:
            run.add(skipped(group, label, fmt.name, "nvfp4", why, target))
        elif not run.late(group, label, fmt.name, "nvfp4", target):
            run.say(f"{label}: {fmt.name}")
            try:
                if original is None:
                    weights, original = prepared_copies(
                        run.device, fmt, shape, copies_of(fmt, shape)
                    )
                known = {p.reference: references[p.reference]} if p.reference in references else {}
                if case.invariant and case.rows.name in usual:
                    known = {USUAL: usual[case.rows.name]}
                seconds = _measure(run, p, fmt, case, pace, weights, original, known)
            except Exception as error:  # the other rows are worth having
                run.add(failed(group, label, fmt.name, error, target))
            else:
                usual.setdefault(case.rows.name, seconds)


def _target(p: DenseProduct, case: Case) -> Target | None:
    """Those of the suite are of bfloat16 rows and the usual plan."""
    return p.target() if case == Case(BFLOAT16) else None


def _measure(
    run: Run, p: DenseProduct, fmt: BlockFormat, case: Case, pace: Pace, weights: list[QTensor],
    original: QTensor, references: dict[str, float],
) -> float:  # fmt: skip
    work = float(p.rows) * p.columns * p.depth
    device = run.device
    x = device.random(p.rows * p.depth, dtype=case.rows.dtype).reshape(p.rows, p.depth)
    left = case.rows.dense(device, x)
    out = device.full((p.rows, p.columns), float("nan"), case.rows.dtype)
    called = [_matmul(left, b, out, case) for b in weights]
    timing, _ = timed_product(run, called, pace, work)
    checked, note = _checked(run, called[0], case, left, x, original, out)
    floor = product_floor(
        rows=p.rows, columns=p.columns, depth=p.depth, bits=bits_of(fmt),
        input_bits=case.rows.bits, flops=case.rows.flops(fmt),
    )  # fmt: skip
    run.add(
        row(
            case.rows.group(GROUP), p.label + case.suffix, fmt.name, "nvfp4", timing,
            flops=2 * work, floor=floor, references=references, target=_target(p, case),
            checked=checked, note=note,
        )
    )  # fmt: skip
    return timing.median


def _matmul(left: Left, b: Any, out: Any, case: Case) -> Callable[[], Any]:
    more = left.more | case.more
    return lambda: api.matmul(left.a, b, out=out, **more)


def _checked(
    run: Run, call: Callable[[], Any], case: Case, left: Left, x: Any, b: QTensor, out: Any
) -> tuple[str, str]:
    device = run.device
    wrong = written_alike_values(device, call, out)
    if wrong:
        return f"WRONG: {wrong}", ""
    rng = np.random.default_rng(0)
    rows = np.unique(np.concatenate([[0, x.shape[0] - 1], rng.integers(0, x.shape[0], 6)]))
    columns = np.unique(np.concatenate([[0, b.shape[0] - 1], rng.integers(0, b.shape[0], 30)]))
    got = device.rows(out, rows)[:, columns]
    return case.rows.judged(device, left, x, rows, got, values_of(device, b, columns))


# --- cuBLAS ---------------------------------------------------------------------------------------


def _cublas(run: Run, p: DenseProduct) -> float | None:
    """Seconds of cuBLAS in bfloat16, and its row; None without PyTorch."""
    if not hasattr(run.device, "matmul"):
        return None
    group = BFLOAT16.group(GROUP)
    if run.late(group, p.label, "bfloat16", "cuBLAS"):
        return None
    run.say(f"{p.label}: cuBLAS")
    seconds = _cublas_timing(run, p.rows, p.columns, p.depth)
    floor = product_floor(rows=p.rows, columns=p.columns, depth=p.depth, bits=16)
    flops = 2.0 * p.rows * p.columns * p.depth
    run.add(row(group, p.label, "bfloat16", "cuBLAS", seconds, flops=flops, floor=floor))
    run.device.release()
    return seconds.median


def _cublas_8192(run: Run) -> float | None:
    """Operations a second of cuBLAS at 8192 x 8192 x 8192."""
    label = "8192 x 8192, 8192 rows"
    group = BFLOAT16.group(GROUP)
    if not hasattr(run.device, "matmul") or run.late(group, label, "bfloat16", "cuBLAS"):
        return None
    timing = _cublas_timing(run, 8192, 8192, 8192)
    flops = 2.0 * 8192**3
    run.add(row(group, label, "bfloat16", "cuBLAS", timing, flops=flops))
    return flops / timing.median


def _cublas_timing(run: Run, rows: int, columns: int, depth: int) -> Timing:
    device: Any = run.device
    count = max(2, min(16, -(-FOOTPRINT // (2 * columns * depth))))
    weights = device.random(count * columns * depth).reshape(count, columns, depth)
    a = device.random(rows * depth).reshape(rows, depth)
    out = device.full((rows, columns), 0.0, "bfloat16")
    calls = [_bound_matmul(device, a, weights[i], out) for i in range(count)]
    timing, _ = timed_product(run, calls, Pace(), float(rows) * columns * depth)
    return timing


def _bound_matmul(device: Any, a: Any, b: Any, out: Any) -> Callable[[], Any]:
    return lambda: device.matmul(a, b, out)
