"""The suite ``grouped-matmul``: expert layers of known models.

Rows are of bfloat16, or of what else is asked for (``activations``). Tokens are routed at random,
to distinct experts each; weights are prepared once; routings and weights are rotated so that no
weight is served from the second-level cache. Of an "up" projection the rows are gathered from the
tokens by the kernel, of a "down" projection they are sorted beforehand. The floor counts the
weights of the experts that are hit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import api
from ..formats import FORMATS, BlockFormat
from ..tensor import QTensor
from .activations import BFLOAT16, Case, Left, cases
from .correct import written_alike_values
from .dense_products import FORMATS_BY_DEFAULT, USUAL, Pace, one_call, timed_product
from .report import failed, row, skipped
from .run import Options, Run
from .shapes import GROUPED_PRODUCTS, TOKENS, Layer
from .targets import Target, grouped_floor
from .weights import bits_of, copies_of, prepared_copies, values_of

__all__ = ["Routing", "calls", "measure", "routings", "tunable"]

GROUP = "Grouped products"
MOST_CALLS = 64


# --- routing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Routing:
    """Which rows belong to which expert.

    Attributes
    ----------
    offsets : int32, [E+1]
        Rows by expert.
    tokens : int32, [R]
        The token of each row.
    slots : int32, [R]
        Which of all choices each row is: ``token * top_k`` and on.
    """

    offsets: np.ndarray
    tokens: np.ndarray
    slots: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, experts: int) -> Routing:
        """Of the experts of each token, [T, top_k]."""
        flat = ids.reshape(-1)
        order = np.argsort(flat, kind="stable")
        counts = np.bincount(flat, minlength=experts)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        tokens = (order // ids.shape[1]).astype(np.int32)
        return cls(offsets, tokens, order.astype(np.int32))

    @property
    def hit(self) -> int:
        """Experts that have rows."""
        return int(np.count_nonzero(np.diff(self.offsets)))


def routings(tokens: int, experts: int, top_k: int, seed: int = 4242) -> list[Routing]:
    """Random routings to rotate: disjoint sets of experts where there are few tokens."""
    rng = np.random.default_rng(seed)
    slots = tokens * top_k
    if slots <= experts // 2:
        order = rng.permutation(experts)
        sets = min(MOST_CALLS, experts // slots)
        chosen = [order[i * slots : (i + 1) * slots].reshape(tokens, top_k) for i in range(sets)]
    else:
        chosen = [
            np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
            for _ in range(8 if slots <= 4096 else 2)
        ]
    return [Routing.of(ids, experts) for ids in chosen]


# --- measuring ------------------------------------------------------------------------------------


def calls(options: Options, layers: Iterable[Layer] = GROUPED_PRODUCTS) -> list[dict[str, Any]]:
    """What is called, as ``nvfp4 compile --shapes`` takes it."""
    made: list[dict[str, Any]] = []
    for fmt in options.chosen(FORMATS_BY_DEFAULT):
        base = {"call": "grouped_matmul", "b": fmt, "prepared": True}
        base["b_decode_scale"] = "by_expert"  # as make_weights has it
        probe = dict(zip(("n", "k", "m", "experts"), _PROBE, strict=True))
        made.append(base | {"a": "bfloat16"} | probe)
        for layer in layers:
            for tokens in TOKENS:
                for case in wanted_cases(options, layer, tokens, fmt):
                    product, *others = _calls(layer, tokens, case)
                    made += [base | product, *others]
    return made


def _calls(layer: Layer, tokens: int, case: Case) -> list[dict[str, Any]]:
    """The product without its weights, and what makes its rows."""
    rows = tokens * layer.top_k
    product = {"n": layer.columns, "k": layer.depth, "experts": layer.experts, **case.called}
    product |= {"m": tokens, "row_indices": rows} if layer.gathered else {"m": rows}
    if case.rows.format is None:
        return [product]
    made = {"format": case.rows.name, "shape": [product["m"], layer.depth]}
    if layer.gathered:
        return [product | {"scale_layout": "linear"},
                {"call": "quantize", "scale_layout": "linear", **made}]  # fmt: skip
    return [product | {"a_decode_scale": "by_expert"},
            {"call": "grouped_quantize", "groups": layer.experts, **made}]  # fmt: skip


def tunable(
    options: Options, layers: Iterable[Layer] = GROUPED_PRODUCTS
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Products of bfloat16 rows: label, call, whether it has a target."""
    for fmt, layer in itertools.product(options.chosen(FORMATS_BY_DEFAULT), layers):
        for tokens in TOKENS:
            if options.wants(layer.label(tokens)):
                (product,) = _calls(layer, tokens, Case(BFLOAT16))
                call = {"call": "grouped_matmul", "b": fmt, **product}
                judged = layer.target(fmt, tokens) is not None
                yield f"{layer.label(tokens)}, {fmt}", call, judged


def wanted_cases(options: Options, layer: Layer, tokens: int, fmt: str) -> list[Case]:
    """Kinds of rows and plans that are measured of a layer."""
    return [
        case
        for case in cases(options.activations, options.batch_invariant)
        if case.rows.takes(FORMATS[fmt]) and options.wants(layer.label(tokens) + case.suffix)
    ]


_PROBE = (1024, 2048, 64, 4)  # columns, depth, rows, experts


def probe(run: Run, fmt: BlockFormat) -> Pace:
    """A small product's pace."""
    columns, depth, rows, experts = _PROBE
    pace = Pace()
    (b,), _ = prepared_copies(run.device, fmt, (experts, columns, depth), 1)
    a = run.device.random(rows * depth).reshape(rows, depth)
    out = run.device.full((rows, columns), 0.0, "bfloat16")
    offsets = run.device.array(np.linspace(0, rows, experts + 1).astype(np.int32))
    seconds = one_call(run, lambda: api.grouped_matmul(a, b, row_offsets=offsets, out=out))
    pace.saw(rows * columns * depth, seconds)
    return pace


def measure(run: Run, layers: Iterable[Layer] = GROUPED_PRODUCTS) -> None:
    """Every layer that was asked for in every format; peers after them."""
    layers = list(layers)
    paces: dict[str, Pace] = {}
    for name, layer in in_order(run.options.chosen(FORMATS_BY_DEFAULT), layers):
        wanted = {t: wanted_cases(run.options, layer, t, name) for t in TOKENS}
        if not any(wanted.values()):
            continue
        if name not in paces:
            paces[name] = Pace()
            if not run.deadline.over():
                run.say(f"{name}: how fast is a small product")
                paces[name] = probe(run, FORMATS[name])
        _measure_layer(run, layer, wanted, FORMATS[name], paces[name])
        run.device.release()
    if run.options.peers and hasattr(run.device, "matmul"):
        from .peers_products import measure_peers

        measure_peers(run, [(layer, tokens) for layer in layers for tokens in TOKENS])
    run.sort()


def in_order(formats: Iterable[str], layers: Iterable[Layer]) -> list[tuple[str, Layer]]:
    """Formats and layers, those that have targets first: a budget may end before the others."""
    every = itertools.product(formats, layers)
    return sorted(every, key=lambda one: not one[1].figures(one[0]))


def _measure_layer(
    run: Run, layer: Layer, wanted: dict[int, list[Case]], fmt: BlockFormat, pace: Pace
) -> None:
    shape = (layer.experts, layer.columns, layer.depth)
    weights: list[QTensor] = []
    original: QTensor | None = None
    usual: dict[tuple[int, str], float] = {}  # seconds by tokens and kind of rows
    for tokens, case in ((t, case) for t, some in wanted.items() for case in some):
        group, label = case.rows.group(GROUP), layer.label(tokens) + case.suffix
        target = _target(layer, fmt, tokens, case)
        why = pace.too_long(float(tokens) * layer.top_k * layer.columns * layer.depth)
        if why:
            run.add(skipped(group, label, fmt.name, "nvfp4", why, target))
        elif not run.late(group, label, fmt.name, "nvfp4", target):
            run.say(f"{label}: {fmt.name}")
            try:
                if original is None:  # gigabytes: only where something is measured
                    copies = copies_of(fmt, shape)
                    weights, original = prepared_copies(run.device, fmt, shape, copies)
                plain = usual.get((tokens, case.rows.name)) if case.invariant else None
                seconds = _measure_case(
                    run, layer, tokens, fmt, case, pace, weights, original, plain
                )
            except Exception as error:  # the other rows are worth having
                run.add(failed(group, label, fmt.name, error, target))
            else:
                usual.setdefault((tokens, case.rows.name), seconds)
            run.device.release()


def _target(layer: Layer, fmt: BlockFormat, tokens: int, case: Case) -> Target | None:
    """Those of the suite are of bfloat16 and block-scaled rows, and of the usual plan."""
    asked = case.rows.targeted and not case.invariant
    return layer.target(fmt.name, tokens) if asked else None


def _measure_case(
    run: Run,
    layer: Layer,
    tokens: int,
    fmt: BlockFormat,
    case: Case,
    pace: Pace,
    weights: list[QTensor],
    original: QTensor,
    plain: float | None,
) -> float:
    device = run.device
    rows = tokens * layer.top_k
    input_rows = tokens if layer.gathered else rows
    elements = device.random(input_rows * layer.depth, dtype=case.rows.dtype)
    x = elements.reshape(input_rows, layer.depth)
    out = device.full((rows, layer.columns), float("nan"), case.rows.dtype)
    chosen = routings(tokens, layer.experts, layer.top_k)
    if layer.gathered:
        lefts = [case.rows.dense(device, x, gathered=True)] * len(chosen)
    else:
        lefts = case.rows.sorted(device, x, [routing.offsets for routing in chosen])
    bound = [
        _arguments(device, left, routing, layer.gathered)
        for left, routing in zip(lefts, chosen, strict=True)
    ]
    called = [_bound(a, b, more | case.more, out) for b in weights for a, more in bound]
    called = called[:MOST_CALLS]
    work = float(rows) * layer.columns * layer.depth
    timing, _ = timed_product(run, called, pace, work)
    checked, note = _checked(run, called[0], layer, case, lefts[0], x, original, chosen[0], out)
    floor = grouped_floor(
        tokens=tokens,
        top_k=layer.top_k,
        columns=layer.columns,
        depth=layer.depth,
        hit=float(np.mean([r.hit for r in chosen])),
        bits=bits_of(fmt),
        gathered=layer.gathered,
        input_bits=case.rows.bits,
        flops=case.rows.flops(fmt),
    )
    note = "; ".join(filter(None, [note, _on_record(layer, fmt, tokens, case)]))
    run.add(
        row(
            case.rows.group(GROUP), layer.label(tokens) + case.suffix, fmt.name, "nvfp4", timing,
            flops=2 * work, floor=floor, references={} if plain is None else {USUAL: plain},
            target=_target(layer, fmt, tokens, case), checked=checked, note=note,
        )
    )  # fmt: skip
    return timing.median


def _on_record(layer: Layer, fmt: BlockFormat, tokens: int, case: Case) -> str:
    """What the best peers of another day took."""
    if case.invariant:
        return ""
    found = []
    known = layer.figures(fmt.name).get(tokens)
    if known is not None and case.rows.targeted:
        found.append(f"bfloat16 {known[2]:g} us")
    if layer.e4m3 and tokens in TOKENS and fmt.name == "mxfp4" and case.rows != BFLOAT16:
        found.append(f"e4m3 {layer.e4m3[TOKENS.index(tokens)]:g} us")
    return f"best peer on record: {', '.join(found)}" if found else ""


def _arguments(
    device: Any, left: Left, routing: Routing, gathered: bool
) -> tuple[Any, dict[str, Any]]:
    """A, and what stands beside it."""
    offsets = device.array(routing.offsets)
    indices = device.array(routing.tokens) if gathered else None
    return left.a, {"row_offsets": offsets, "row_indices": indices, **left.more}


def _bound(a: Any, b: QTensor, more: dict[str, Any], out: Any) -> Callable[[], Any]:
    return lambda: api.grouped_matmul(a, b, out=out, **more)


def _checked(
    run: Run,
    call: Callable[[], Any],
    layer: Layer,
    case: Case,
    left: Left,
    x: Any,
    b: QTensor,
    routing: Routing,
    out: Any,
) -> tuple[str, str]:
    device = run.device
    wrong = written_alike_values(device, call, out)
    if wrong:
        return f"WRONG: {wrong}", ""
    rng = np.random.default_rng(0)
    total = routing.tokens.size
    rows = np.unique(np.concatenate([[0, total - 1], rng.integers(0, total, 4)]))
    columns = np.unique(
        np.concatenate([[0, layer.columns - 1], rng.integers(0, layer.columns, 14)])
    )
    experts = np.searchsorted(routing.offsets, rows, side="right") - 1
    values = np.stack([values_of(device, b, columns, int(e)) for e in experts])
    source = routing.tokens[rows] if layer.gathered else rows
    return case.rows.judged(device, left, x, source, device.rows(out, rows)[:, columns], values)
