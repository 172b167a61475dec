"""The suite ``grouped-matmul``: expert layers of known models, bfloat16 activations.

Tokens are routed at random, to distinct experts each; weights are prepared once; routings and
weights are rotated so that no weight is served from the second-level cache. Of an "up" projection
the rows are gathered from the tokens by the kernel, of a "down" projection they are sorted
beforehand. The floor counts the weights of the experts that are hit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import api
from ..formats import FORMATS, BlockFormat
from ..tensor import QTensor
from .correct import check_products, written_alike_values
from .dense_products import FORMATS_BY_DEFAULT, Pace, one_call, timed_product
from .report import failed, row, skipped
from .run import Options, Run
from .shapes import GROUPED_PRODUCTS, TOKENS, Layer
from .targets import grouped_floor
from .weights import bits_of, copies_of, prepared_copies, values_of

__all__ = ["Routing", "calls", "measure", "routings"]

GROUP = "Grouped products, bfloat16 activations"
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
        base = {"call": "grouped_matmul", "a": "bfloat16", "b": fmt, "prepared": True}
        base["b_decode_scale"] = "by_expert"  # as make_weights has it
        made.append(base | dict(zip(("n", "k", "m", "experts"), _PROBE, strict=True)))
        for layer in layers:
            shape = {"n": layer.columns, "k": layer.depth, "experts": layer.experts}
            for tokens in TOKENS:
                if options.wants(layer.label(tokens)):
                    rows = tokens * layer.top_k
                    some = {"m": tokens, "row_indices": rows} if layer.gathered else {"m": rows}
                    made.append(base | shape | some)
    return made


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
    wanted = [
        (layer, tokens)
        for layer in layers
        for tokens in TOKENS
        if run.options.wants(layer.label(tokens))
    ]
    paces: dict[str, Pace] = {}
    for name, layer in in_order(
        run.options.chosen(FORMATS_BY_DEFAULT), dict.fromkeys(layer for layer, _ in wanted)
    ):
        if name not in paces:
            paces[name] = Pace()
            if not run.deadline.over():
                run.say(f"{name}: how fast is a small product")
                paces[name] = probe(run, FORMATS[name])
        tokens = [t for one, t in wanted if one is layer]
        _measure_layer(run, layer, tokens, FORMATS[name], paces[name])
        run.device.release()
    if run.options.peers and hasattr(run.device, "matmul"):
        from .peers_products import measure_peers

        measure_peers(run, wanted)
    run.sort()


def in_order(formats: Iterable[str], layers: Iterable[Layer]) -> list[tuple[str, Layer]]:
    """Formats and layers, those that have targets first: a budget may end before the others."""
    every = itertools.product(formats, layers)
    return sorted(every, key=lambda one: not one[1].figures(one[0]))


def _measure_layer(run: Run, layer: Layer, tokens: list[int], fmt: BlockFormat, pace: Pace) -> None:
    shape = (layer.experts, layer.columns, layer.depth)
    weights: list[QTensor] = []
    original: QTensor | None = None
    for count in tokens:
        label, target = layer.label(count), layer.target(fmt.name, count)
        why = pace.too_long(float(count) * layer.top_k * layer.columns * layer.depth)
        if why:
            run.add(skipped(GROUP, label, fmt.name, "nvfp4", why, target))
        elif not run.late(GROUP, label, fmt.name, "nvfp4", target):
            run.say(f"{label}: {fmt.name}")
            if original is None:  # gigabytes: only where something is measured
                copies = copies_of(fmt, shape)
                weights, original = prepared_copies(run.device, fmt, shape, copies)
            try:
                _measure_tokens(run, layer, count, fmt, pace, weights, original)
            except Exception as error:  # the other rows are worth having
                run.add(failed(GROUP, label, fmt.name, error, target))


def _measure_tokens(
    run: Run,
    layer: Layer,
    tokens: int,
    fmt: BlockFormat,
    pace: Pace,
    weights: list[QTensor],
    original: QTensor,
) -> None:
    device = run.device
    rows = tokens * layer.top_k
    input_rows = tokens if layer.gathered else rows
    a = device.random(input_rows * layer.depth).reshape(input_rows, layer.depth)
    out = device.full((rows, layer.columns), float("nan"), "bfloat16")
    chosen = routings(tokens, layer.experts, layer.top_k)
    called = [
        _bound(device, a, b, routing, layer.gathered, out) for b in weights for routing in chosen
    ][:MOST_CALLS]
    work = float(rows) * layer.columns * layer.depth
    timing, _ = timed_product(run, called, pace, work)
    checked = _checked(run, called[0], layer, a, original, chosen[0], out)
    floor = grouped_floor(
        tokens=tokens,
        top_k=layer.top_k,
        columns=layer.columns,
        depth=layer.depth,
        hit=float(np.mean([r.hit for r in chosen])),
        bits=bits_of(fmt),
        gathered=layer.gathered,
    )
    known = layer.figures(fmt.name).get(tokens)
    note = "" if known is None else f"best bfloat16 peer on record: {known[2]:g} us"
    run.add(
        row(
            GROUP, layer.label(tokens), fmt.name, "nvfp4", timing, flops=2 * work, floor=floor,
            target=layer.target(fmt.name, tokens), checked=checked, note=note,
        )
    )  # fmt: skip


def _bound(
    device: Any, a: Any, b: QTensor, routing: Routing, gathered: bool, out: Any
) -> Callable[[], Any]:
    offsets = device.array(routing.offsets)
    indices = device.array(routing.tokens) if gathered else None
    return lambda: api.grouped_matmul(a, b, row_offsets=offsets, row_indices=indices, out=out)


def _checked(
    run: Run,
    call: Callable[[], Any],
    layer: Layer,
    a: Any,
    b: QTensor,
    routing: Routing,
    out: Any,
) -> str:
    device = run.device
    wrong = written_alike_values(device, call, out)
    if wrong:
        return f"WRONG: {wrong}"
    rng = np.random.default_rng(0)
    total = routing.tokens.size
    rows = np.unique(np.concatenate([[0, total - 1], rng.integers(0, total, 4)]))
    columns = np.unique(
        np.concatenate([[0, layer.columns - 1], rng.integers(0, layer.columns, 14)])
    )
    experts = np.searchsorted(routing.offsets, rows, side="right") - 1
    values = np.stack([values_of(device, b, columns, int(e)) for e in experts])
    inputs = device.rows(a, routing.tokens[rows] if layer.gathered else rows)
    return check_products(device.rows(out, rows)[:, columns], inputs, values)
