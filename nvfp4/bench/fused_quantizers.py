"""Quantisers of the suite ``quantize`` that do more: scales of maxima, counted rows, gates, norms.

Each is one call with ``out=``, compared with the speed of a copy of an input of that size. Bytes
are what must be read and written: the input twice where its largest magnitude is looked for first,
gates and ups, a residual and its sum, of counted rows only the input of those that count.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import api, golden
from ..formats import FORMATS
from ..golden.hidden import rmsnorm, swiglu
from ..layouts import codes_shape, scale_shape
from ..tensor import QTensor
from .correct import check_quantized, written_alike
from .report import failed, row
from .run import Options, Pool, Run
from .targets import quantizer_bytes
from .timing import Timing, rotations

__all__ = ["Shape", "calls", "elements", "measure"]

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
    def matrix(self) -> str:
        """Such as ``8192 x 7168``."""
        return f"{self.rows} x {self.columns}"


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
    options
        Keyword arguments of the call that hold no arrays.
    """

    name: str
    formats: tuple[str, ...]
    widths: float
    options: tuple[tuple[str, Any], ...] = ()

    def label(self, shape: Shape) -> str:
        """Of the table."""
        if self.name == "counted rows":
            each = shape.rows // shape.experts
            return f"{shape.experts} x {each} x {shape.columns}, half of the rows counted"
        return f"{shape.matrix}, {self.name}"


KINDS = (
    Kind("scale of the amax", ("nvfp4",), 2, (("encode_scale", "amax"),)),
    Kind("scales of the rows' amax", ("nvfp4",), 1, (("encode_scale", "row_amax"),)),
    Kind("counted rows", _FORMATS, 0.5),
    Kind("swiglu", _FORMATS, 2, (("kind", "silu"), ("halves", "split"))),
    Kind("swiglu of gpt-oss", _FORMATS, 2, (("kind", "gpt-oss"), ("halves", "interleaved"))),
    Kind("rmsnorm", _FORMATS, 1),
    Kind("rmsnorm of a sum", _FORMATS, 3),
)


def chosen(options: Options, shape: Shape) -> Iterator[tuple[Kind, str]]:
    """Kinds and formats that were asked for."""
    for kind in KINDS:
        if options.wants(kind.label(shape)):
            yield from ((kind, name) for name in options.chosen(kind.formats))


def elements(options: Options, shape: Shape = SHAPE) -> tuple[int, int]:
    """Elements of the largest input, and how many of them are rotated."""
    most = max((k.widths for k, _ in chosen(options, shape)), default=0)
    size = shape.rows * shape.columns
    return (2 * size, _count(shape, 2.0)) if most else (0, 0)


def calls(options: Options, shape: Shape = SHAPE) -> list[dict[str, Any]]:
    """What is called, as ``nvfp4 compile --shapes`` takes it."""
    made = []
    for kind, name in chosen(options, shape):
        call: dict[str, Any] = {"format": name, **dict(kind.options)}
        if kind.name == "counted rows":
            each = shape.rows // shape.experts
            call |= {"call": "quantize", "shape": [shape.experts, each, shape.columns]}
            call["row_counts"] = True
        elif "swiglu" in kind.name:
            call |= {"call": "swiglu_quantize", "shape": [shape.rows, 2 * shape.columns]}
        elif "rmsnorm" in kind.name:
            call |= {"call": "rmsnorm_quantize", "shape": [shape.rows, shape.columns]}
            call["residual"] = kind.name.endswith("sum")
        else:
            call |= {"call": "quantize", "shape": [shape.rows, shape.columns]}
        made.append(call)
    return made


def _count(shape: Shape, widths: float) -> int:
    return rotations(int(2 * widths * shape.rows * shape.columns))


# --- calls ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """Calls of one kind, and what is made of rows of their inputs before they are quantised."""

    calls: list[Callable[[], Any]]
    inputs: list[Any]
    results: list[QTensor]
    hidden: Callable[[int, np.ndarray, np.ndarray], np.ndarray] | None = None
    encode: Any = None


def _results(run: Run, name: str, shape: Shape, count: int, row_scales: bool) -> list[QTensor]:
    fmt, size = FORMATS[name], (shape.rows, shape.columns)
    made = []
    for _ in range(count):
        codes = run.device.full(codes_shape(fmt, size), 0xAA, "uint8")
        scales = run.device.full(scale_shape(fmt, size, "tcgen"), 0xAA, "uint8")
        decode = run.device.full((shape.rows, 1) if row_scales else (1,), 1.0, "float32")
        decode = decode if row_scales else decode.reshape(())
        made.append(QTensor.from_parts(codes, scales, fmt, shape=size, decode_scale=decode))
    return made


def _bind(run: Run, kind: Kind, name: str, shape: Shape, pool: Pool, count: int) -> Bound:
    rows, columns, device, more = shape.rows, shape.columns, run.device, dict(kind.options)
    results = _results(run, name, shape, count, more.get("encode_scale") == "row_amax")
    if "swiglu" in kind.name:
        inputs = pool.cut(rows, 2 * columns, count)
        done = [_call(api.swiglu_quantize, x, name, out=q, **more)
                for x, q in zip(inputs, results, strict=True)]  # fmt: skip
        return Bound(done, inputs, results, lambda _, x, __: swiglu(x, **more))
    if "rmsnorm" in kind.name:
        added = kind.name.endswith("sum")
        both = pool.cut(rows, columns, count * (1 + added))
        inputs, others = both[:count], both[count:]
        weight = device.random(columns, seed=1)
        host = device.host(weight)
        sums = [device.full((rows, columns), 0.0, "bfloat16") for _ in range(count * added)]
        done = [
            _call(
                api.rmsnorm_quantize, x, weight, EPS, name, out=q,
                **({"residual": r, "residual_out": s} if added else {}),
            )
            for x, q, r, s in itertools.zip_longest(inputs, results, others, sums)
        ]  # fmt: skip

        def hidden(i: int, x: np.ndarray, at: np.ndarray) -> np.ndarray:
            residual = device.rows(others[i], at) if added else None
            return rmsnorm(x, host, EPS, residual=residual)[0]

        return Bound(done, inputs, results, hidden)
    inputs = pool.cut(rows, columns, count)
    done = [_call(api.quantize, x, name, out=q, **more)
            for x, q in zip(inputs, results, strict=True)]  # fmt: skip
    encode: Any = more.get("encode_scale")
    if encode == "amax":
        encode = [golden.amax_encode_scale(device.host(x), FORMATS[name])
                  for x in (inputs[0], inputs[-1])]  # fmt: skip
    return Bound(done, inputs, results, encode=encode)


def _call(function: Any, *arguments: Any, **more: Any) -> Callable[[], Any]:
    return lambda: function(*arguments, **more)


# --- measuring ------------------------------------------------------------------------------------


def measure(run: Run, pool: Pool, speed: Callable[[], float], shape: Shape = SHAPE) -> None:
    """Every kind that was asked for; `speed` gives a copy's bytes a second."""
    for kind, name in chosen(run.options, shape):
        label = kind.label(shape)
        if run.late(GROUP, label, name, "nvfp4"):
            continue
        run.say(f"{label}: {name}")
        try:
            counted = kind.name == "counted rows"
            one = _counted if counted else _plain
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
    bound = _bind(run, kind, name, shape, pool, _count(shape, max(1.0, kind.widths)))
    timing, replay = run.timed(bound.calls)
    said = ""
    for number, i in enumerate((0, len(bound.inputs) - 1)):
        encode = bound.encode[number] if isinstance(bound.encode, list) else bound.encode
        hidden = None if bound.hidden is None else functools.partial(bound.hidden, i)
        case = (bound.inputs[i], bound.results[i])
        said = check_quantized(run.device, replay, [case], encode=encode, hidden=hidden)
        if said.startswith("WRONG"):
            break
    return timing, said


def counts_of(shape: Shape) -> np.ndarray:
    """From no row of the first matrix to all of the last: half of them all."""
    each = shape.rows // shape.experts
    return np.rint(np.linspace(0, each, shape.experts)).astype(np.int32)


def _counted(run: Run, kind: Kind, name: str, shape: Shape, pool: Pool) -> tuple[Timing, str]:
    device, fmt = run.device, FORMATS[name]
    count, each = _count(shape, 1.0), shape.rows // shape.experts
    size = (shape.experts, each, shape.columns)
    host_counts = counts_of(shape)
    counts = device.array(host_counts)
    inputs = [x.reshape(size) for x in pool.cut(shape.rows, shape.columns, count)]
    results = [api.quantize(x, name, row_counts=counts) for x in inputs]
    done = [_call(api.quantize, x, name, row_counts=counts, out=q)
            for x, q in zip(inputs, results, strict=True)]  # fmt: skip
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
    return timing, f"{some.size} matrices" if same else f"WRONG: {fmt.name}, matrices {some}"
