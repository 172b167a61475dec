"""Quantisers of the suite ``quantize`` that do more: scales of maxima, counted rows, gates, norms.

Each is one call with ``out=``, compared with the speed of a copy of an input of that size. Bytes
are what must be read and written: the input twice where its largest magnitude is looked for first,
gates and ups, a residual and its sum, of counted rows only the input of those that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .. import api, golden
from ..formats import FORMATS
from ..golden.hidden import rmsnorm, swiglu
from ..tensor import QTensor
from .correct import check_quantized, written_alike
from .outputs import outputs
from .report import failed, row
from .run import Options, Pool, Run
from .targets import quantizer_bytes
from .timing import Timing, rotations

__all__ = ["Shape", "calls", "measure", "sizes"]

GROUP = "Other quantisers, bfloat16 in, tcgen scales"
EPS = 1e-5
_FORMATS = ("nvfp4", "mxfp8_e4m3")


@dataclass(frozen=True)
class Shape:
    """Rows and columns of what is quantised; counted rows are `experts` matrices."""

    rows: int
    columns: int
    experts: int

    @property
    def stack(self) -> tuple[int, int, int]:
        """The same as matrices."""
        return self.experts, self.rows // self.experts, self.columns


SHAPE = Shape(8192, 7168, 128)


@dataclass(frozen=True)
class Kind:
    """What is measured.

    Attributes
    ----------
    name
        Behind the shape in the label.
    formats
    widths
        Elements that are read or written as bfloat16, for each that is quantised.
    call
        Name of the function.
    options
        Its keyword arguments that hold no arrays.
    counted, summed
        Whether rows are counted, and whether a residual is added.
    """

    name: str
    formats: tuple[str, ...]
    widths: float
    call: str = "quantize"
    options: tuple[tuple[str, Any], ...] = ()
    counted: bool = False
    summed: bool = False

    def label(self, shape: Shape) -> str:
        """Of the table."""
        if self.counted:
            return f"{' x '.join(map(str, shape.stack))}, {self.name}"
        return f"{shape.rows} x {shape.columns}, {self.name}"

    def input(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of what is read."""
        gated = self.call == "swiglu_quantize"
        return shape.rows, shape.columns * (2 if gated else 1)

    def count(self, shape: Shape) -> int:
        """Inputs to rotate."""
        return rotations(int(2 * max(1, self.widths) * shape.rows * shape.columns))


def _swiglu(name: str, **options: str) -> Kind:
    return Kind(name, _FORMATS, 2, "swiglu_quantize", tuple(options.items()))


KINDS = (
    Kind("scale of the amax", ("nvfp4",), 2, options=(("encode_scale", "amax"),)),
    Kind("scales of the rows' amax", ("nvfp4",), 1, options=(("encode_scale", "row_amax"),)),
    Kind("half of the rows counted", _FORMATS, 0.5, counted=True),
    _swiglu("swiglu", kind="silu", halves="split"),
    _swiglu("swiglu of gpt-oss", kind="gpt-oss", halves="interleaved"),
    Kind("rmsnorm", _FORMATS, 1, "rmsnorm_quantize"),
    Kind("rmsnorm of a sum", _FORMATS, 3, "rmsnorm_quantize", summed=True),
)


def chosen(options: Options, shape: Shape) -> Iterator[tuple[Kind, str]]:
    """Kinds and formats that were asked for."""
    for kind in KINDS:
        if options.wants(kind.label(shape)):
            yield from ((kind, name) for name in options.chosen(kind.formats))


def sizes(options: Options, shape: Shape = SHAPE) -> list[tuple[int, int]]:
    """Elements of each kind's inputs, and how many of these there are."""
    return [
        (math.prod(kind.input(shape)), kind.count(shape) * (1 + kind.summed))
        for kind, _ in chosen(options, shape)
    ]


def calls(options: Options, shape: Shape = SHAPE) -> list[dict[str, Any]]:
    """What is called, as ``nvfp4 compile --shapes`` takes it."""
    made = []
    for kind, name in chosen(options, shape):
        size = shape.stack if kind.counted else kind.input(shape)
        call = {"call": kind.call, "format": name, "shape": list(size), **dict(kind.options)}
        more = {"row_counts": kind.counted, "residual": kind.summed}
        made.append(call | {key: True for key, value in more.items() if value})
    return made


# --- calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """Calls of one kind, and what is quantised of rows of their inputs, by which encode scale."""

    calls: Sequence[Callable[[], Any]]
    inputs: list[Any]
    results: list[QTensor]
    hidden: Callable[[int, np.ndarray, np.ndarray], np.ndarray] = lambda _, x, __: x
    encode: Callable[[int], Any] = lambda _: None


def _bind(run: Run, kind: Kind, name: str, shape: Shape, pool: Pool) -> Bound:
    device, options, count = run.device, dict(kind.options), kind.count(shape)
    cut = pool.cut(*kind.input(shape), count * (1 + kind.summed))
    inputs, residuals = cut[:count], cut[count:]
    encode = options.get("encode_scale")
    results = outputs(
        device, FORMATS[name], shape.rows, shape.columns, count, row_scales=encode == "row_amax"
    )
    if kind.call == "rmsnorm_quantize":
        weight = device.random(shape.columns, seed=1)
        sums = [device.full((shape.rows, shape.columns), 0.0, "bfloat16") for _ in residuals]
        more = [
            {"residual": r, "residual_out": s} for r, s in zip(residuals, sums, strict=True)
        ] or [{}] * count
        norms = [
            partial(api.rmsnorm_quantize, x, weight, EPS, name, out=q, **added)
            for x, q, added in zip(inputs, results, more, strict=True)
        ]
        host = device.host(weight)

        def norm(i: int, x: np.ndarray, rows: np.ndarray) -> np.ndarray:
            residual = device.rows(residuals[i], rows) if kind.summed else None
            return rmsnorm(x, host, EPS, residual=residual)[0]

        return Bound(norms, inputs, results, norm)
    done = [
        partial(getattr(api, kind.call), x, name, out=q, **options)
        for x, q in zip(inputs, results, strict=True)
    ]
    if kind.call == "swiglu_quantize":
        return Bound(done, inputs, results, lambda _, x, __: swiglu(x, **options))

    def scale(i: int) -> Any:
        if encode == "amax":
            return golden.amax_encode_scale(device.host(inputs[i]), FORMATS[name])
        return encode

    return Bound(done, inputs, results, encode=scale)


# --- measuring ------------------------------------------------------------------------------------


def measure(run: Run, pool: Pool, speed: Callable[[], float], shape: Shape = SHAPE) -> None:
    """Every kind that was asked for; `speed` gives a copy's bytes a second."""
    for kind, name in chosen(run.options, shape):
        label = kind.label(shape)
        if run.late(GROUP, label, name, "nvfp4"):
            continue
        run.say(f"{label}: {name}")
        try:
            one = _counted if kind.counted else _plain
            timing, checked = one(run, kind, name, shape, pool)
            fmt = FORMATS[name]
            moved = quantizer_bytes(shape.rows, shape.columns, fmt.block, fmt.codes_per_byte)
            moved += int((kind.widths - 1) * 2 * shape.rows * shape.columns)
            references = {"copy": moved / speed()}
            run.add(row(GROUP, label, name, "nvfp4", timing, moved=moved, references=references,
                        checked=checked))  # fmt: skip
        except Exception as error:  # the other rows are worth having
            run.add(failed(GROUP, label, name, error))
        run.device.release()


def _plain(run: Run, kind: Kind, name: str, shape: Shape, pool: Pool) -> tuple[Timing, str]:
    bound = _bind(run, kind, name, shape, pool)
    timing, replay = run.timed(bound.calls)
    said = ""
    for i in (0, len(bound.inputs) - 1):
        case = (bound.inputs[i], bound.results[i])
        said = check_quantized(
            run.device, replay, [case], encode=bound.encode(i), hidden=partial(bound.hidden, i)
        )
        if said.startswith("WRONG"):
            break
    return timing, said


def counts_of(shape: Shape) -> np.ndarray:
    """From no row of the first matrix to all of the last: half of them all."""
    return np.rint(np.linspace(0, shape.stack[1], shape.experts)).astype(np.int32)


def _counted(run: Run, kind: Kind, name: str, shape: Shape, pool: Pool) -> tuple[Timing, str]:
    device = run.device
    host_counts = counts_of(shape)
    counts = device.array(host_counts)
    inputs = [x.reshape(shape.stack) for x in pool.cut(*kind.input(shape), kind.count(shape))]
    results = [api.quantize(x, name, row_counts=counts) for x in inputs]
    done = [
        partial(api.quantize, x, name, row_counts=counts, out=q)
        for x, q in zip(inputs, results, strict=True)
    ]
    timing, replay = run.timed(done)
    q = results[-1]
    wrong, _ = written_alike(device, replay, [q.codes, q.scales])
    if wrong:
        return timing, f"WRONG: {wrong}"
    some = np.unique([0, shape.experts // 3, shape.experts - 1])
    want = api.quantize(device.rows(inputs[-1], some), name, row_counts=host_counts[some])
    got_codes = device.rows(q.codes, some)
    got_scales = device.host(q.scales).reshape(shape.experts, -1)[some].reshape(-1)
    same = np.array_equal(got_codes, want.codes)
    same = same and np.array_equal(got_scales, np.asarray(want.scales).reshape(-1))
    return timing, f"{some.size} matrices" if same else f"WRONG: one of the matrices {some}"
