"""Search divisions of products with prepared weights on the present card (``nvfp4 tune``).

Divisions that a plan may have, and neighbours of theirs, are ranked by the time that the formulas
of plans take them for: there is no other model. The best of the ranking are built, several at once,
and timed as ``nvfp4 bench`` times. One that is faster than that of the formulas by more than GAIN,
twice, becomes a row of a table (``nvfp4.tuning``). Formulas that are not beaten stay: then a row
that there was goes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import api, plans_prepared, plans_products, plans_sm90, tuning, warm
from ..api import _repeat
from ..formats import block_format
from ..launch import Launch
from ..tiling import ceil_div
from ..tuning import Choice, Key, Table
from . import dense_products, grouped_products
from .correct import sample_rows
from .devices import Device
from .grouped_products import MOST_CALLS, Routing, routings
from .run import Options
from .timing import calls_in_graph, least_calls, replay_seconds
from .weights import copies_of, prepared_copies

__all__ = ["GAIN", "Outcome", "Product", "candidates", "decode_times", "division", "forced",
           "product_of", "said", "search", "sm90_times", "suite_products", "timer",
           "tune"]  # fmt: skip

#: What a row must save at least.
GAIN = 0.02
#: Divisions of each kernel that are worth a try; half as many of the one that formulas do not take.
MOST = {"decode": 14, "sm90": 12}
#: Times by the formulas, in units of the best's, up to which they are.
WORSE = 1.5
#: Rows of a range, in the mean, up to which the kernel of few rows is tried: grouped, dense.
FEW = (24, 256)
#: Rows of a range, in the mean, from which on that of many rows is.
MANY = min(many for _, many in plans_sm90.MANY_ROWS)


@dataclass(frozen=True)
class Product:
    """A call of a file of shapes, and what plans know of it.

    Attributes
    ----------
    call
    key
    launch
        What the formulas give.
    card, arch
    rows, groups
    name
        What it is called, if it has a name.
    """

    call: Mapping[str, Any]
    key: Key
    launch: Launch
    card: tuple[str, int]
    arch: str
    rows: int
    groups: int | None
    name: str = ""

    @property
    def constants(self) -> dict[str, Any]:
        """Of the formulas' kernel, as plans of both kernels read them."""
        function = "none" if self.call.get("epilogue") is None else "function"
        return {**dict(self.launch.program.constants), "EPILOGUE": function}

    @property
    def label(self) -> str:
        """Such as ``64 x 5760 x 2880, 32 ranges, bfloat16 x mxfp4``."""
        if self.name:
            return self.name
        ranges = f", {self.groups} ranges" if self.groups else ""
        shape = f"{self.rows} x {self.key.columns} x {self.key.depth}"
        return f"{shape}{ranges}, {self.key.a} x {self.key.b}"


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes
    ----------
    choice
        Better than the formulas; None: nothing is.
    formula_us, us
        Microseconds of the formulas' division, and of the best one.
    tried
        Divisions that were timed.
    notes
        Of those that were not: why.
    best
        The best of the others, better or not; None: none was timed.
    """

    choice: Choice | None
    formula_us: float
    us: float
    tried: int
    notes: tuple[str, ...] = ()
    best: Choice | None = None


def product_of(
    call: Mapping[str, Any], card: tuple[str, int], arch: str, name: str = ""
) -> Product:
    """A call of a file of shapes (``nvfp4 compile --shapes``), with prepared weights.

    Raises
    ------
    ValueError
        Not a product of bfloat16 rows with a plain result, or one of nothing.
    """
    called = call.get("call")
    if called not in ("matmul", "grouped_matmul"):
        raise ValueError(f"call must be matmul or grouped_matmul to be tuned; got {called!r}")
    if call["a"] != "bfloat16":
        raise ValueError(f"a must be bfloat16 to be tuned; got {call['a']!r}")
    if call.get("out_dtype", "bfloat16") not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"out_dtype must be a float dtype to be tuned; got {call['out_dtype']!r}")
    for option in ("compute", "batch_invariant", "row_counts"):
        if call.get(option):
            raise ValueError(f"{option} must be left out to be tuned; got {call[option]!r}")
    for size in ("m", "n", "k", "experts"):
        if call.get(size) == 0:
            raise ValueError(f"{size} must be at least 1 to be tuned; got 0")
    call = {**call, "prepared": True}
    if called == "grouped_matmul":
        call["b_decode_scale"] = "by_expert"  # as the weights have it that are timed
    with forced(None):
        launch = _launches(call, card, arch)[-1]
    groups = None
    if called == "grouped_matmul":
        groups = call.get("groups") or call["experts"]
    rows = call.get("row_indices") or call["m"]
    constants = dict(launch.program.constants)
    key = tuning.key_of(constants, rows, call["n"], call["k"], groups)
    return Product(call, key, launch, card, arch, rows, groups, name)


def suite_products(
    suites: Iterable[str], options: Options, card: tuple[str, int], arch: str
) -> list[Product]:
    """What suites of ``nvfp4 bench`` measure with bfloat16 rows, the rows with targets first."""
    made: list[tuple[bool, Product]] = []
    for suite in dict.fromkeys(suites):
        module = {"matmul": dense_products, "grouped-matmul": grouped_products}[suite]
        for label, call, judged in module.tunable(options):
            made.append((not judged, product_of(call, card, arch, label)))
    made.sort(key=lambda one: one[0])
    return [product for _, product in made]


def _launches(call: Mapping[str, Any], card: tuple[str, int], arch: str) -> list[Launch]:
    with warm.recording(arch, card) as launches:
        warm.CALLS[call["call"]](**{key: value for key, value in call.items() if key != "call"})
    return launches


# --- candidates -----------------------------------------------------------------------------------


def candidates(product: Product) -> list[Choice]:
    """Divisions that are worth a try, the most promising first, no two of them alike.

    Those of the two kernels take turns: a budget may end before all are timed.
    """
    found: dict[str, list[Choice]] = {"decode": [], "sm90": []}
    mean = product.rows / (product.groups or 1)
    own = "sm90" if product.launch.program.kernel.name == "matmul_sm90" else "decode"
    if mean <= FEW[product.groups is None] or own == "decode":
        found["decode"] = _promising(decode_times(product))
    if product.arch == "sm_90a" and (mean >= MANY or own == "sm90"):
        found["sm90"] = _promising(sm90_times(product))
    seen = {_identity(product.launch)}
    kept: dict[str, list[Choice]] = {kernel: [] for kernel in found}
    for kernel, choices in found.items():
        for choice in choices:
            if len(kept[kernel]) == MOST[kernel] // (1 if kernel == own else 2):
                break
            with forced(choice):
                launch = _launches(product.call, product.card, product.arch)[-1]
            if _identity(launch) not in seen:
                seen.add(_identity(launch))
                kept[kernel].append(choice)
    first, second = kept[own], kept["decode" if own == "sm90" else "sm90"]
    paired = [c for pair in zip(first, second, strict=False) for c in pair]
    return paired + [c for c in (*first, *second) if c not in paired]


def _identity(launch: Launch) -> Any:
    return launch.program, launch.grid, launch.block, launch.shared_bytes


def _promising(times: Mapping[Choice, float]) -> list[Choice]:
    """Those that do not take much longer than the best, the best first."""
    most = WORSE * min(times.values(), default=0.0)
    return sorted((c for c in times if times[c] <= most), key=times.__getitem__)


def decode_times(product: Product) -> dict[Choice, float]:
    """Divisions by ``kernels.matmul_decode``, and how long the formulas take them to be."""
    key, constants = product.key, product.constants
    steps = ceil_div(key.depth, 64)
    across = ceil_div(ceil_div(key.columns, 16), plans_prepared.passes(constants))
    times = {}
    for chunk in (8, 16):
        chunks = plans_prepared.chunks_of(product.rows, chunk, product.groups)
        for stripes in (1, 2):
            items = max(1, chunks * ceil_div(across, stripes))
            for cut in _cuts(product, chunk, stripes):
                choice = Choice("decode", *cut[:1], *cut[2:], warps=cut.warps)
                if plans_prepared.chosen(choice, constants, key.depth) is not None:
                    times[choice] = plans_prepared.time_of(
                        cut, constants, items, steps, product.card[1]
                    )
    return times


def _cuts(product: Product, chunk: int, stripes: int) -> Iterator[plans_prepared.Cut]:
    """What the formulas choose among, whatever the items are, and their neighbours."""
    constants, depth = product.constants, product.key.depth
    steps = ceil_div(depth, 64)
    each = (0.0, math.inf)  # items of a multiprocessor
    facts = (constants, chunk, stripes, depth, product.groups, None)
    found = [cut for few in each for cut in plans_prepared._cuts(*facts, few)]
    cuts = {cut._replace(slots=max(1, min(cut.slots, steps // cut.team))) for cut in found}
    blocks = {(cut.warps, cut.resident) for cut in cuts}
    smaller = (4, 6)[:stripes]  # of six with one stripe all that were timed were slow
    blocks |= {(w, r * 8 // w) for warps, r in blocks if warps == 8 for w in smaller}
    blocks |= {(warps, r - 1) for warps, r in blocks if r > 1}
    yield from sorted(cuts)
    for warps, resident in sorted(blocks, reverse=True):
        for team in (n for n in range(1, warps + 1) if warps % n == 0 and n <= steps):
            for slots in sorted({min(n, steps // team) for n in (2, 3, 4)}):
                yield plans_prepared.Cut(chunk, warps, team, stripes, slots, resident)


def sm90_times(product: Product) -> dict[Choice, float]:
    """Divisions by ``kernels.matmul_sm90``, and how long the formulas take them to be.

    Those with as many blocks a multiprocessor as the formulas have are before others like them.
    """
    key = product.key
    shape = plans_sm90.shape_of(
        *(product.constants, product.rows, key.columns, key.depth, product.groups),
        product.card[1],
    )
    tiles = sorted(
        plans_sm90.tiles_of(shape),
        key=lambda tile: tile.split == 1 and tile != plans_sm90.alone(tile.tokens, shape),
    )
    return {
        Choice(
            "sm90", tokens=tile.tokens, split=tile.split, resident=tile.resident
        ): plans_sm90.time_of(tile, shape)
        for tile in tiles
    }


def _spread(rows: int, groups: int) -> list[Routing]:
    """Rows in ranges, as a random routing spreads them."""
    if rows <= groups // 2:
        return routings(rows, groups, 1)
    rng = np.random.default_rng(4242)
    return [Routing.of(rng.integers(0, groups, (rows, 1)), groups) for _ in range(4)]


# --- one division ---------------------------------------------------------------------------------


@contextlib.contextmanager
def forced(choice: Choice | None) -> Iterator[None]:
    """Plan all products by a choice, or by the formulas; nothing planned outside counts inside."""
    with tuning.trying(choice):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    plans_products.matmul.cache_clear()
    plans_products.grouped_matmul.cache_clear()
    _repeat.forget()


def said(choice: Choice) -> str:
    """A division in words."""
    names = ["chunk", "warps", "team", "stripes", "slots", "resident"]
    if choice.kernel == "sm90":
        names = ["tokens", "split", "resident"]
    return " ".join([choice.kernel, *(f"{name} {getattr(choice, name)}" for name in names)])


def division(launch: Launch) -> str:
    """The division of a launch, in the same words."""
    made = dict(launch.program.constants)
    more = {"resident": made["BLOCKS_PER_SM"]}
    if launch.program.kernel.name == "matmul_sm90":
        return said(Choice("sm90", tokens=made["CHUNK"], split=made["SPLIT"], **more))
    names = ("chunk", "team", "stripes", "slots", "warps")
    return said(Choice("decode", **more, **{name: made[name.upper()] for name in names}))


# --- timing ---------------------------------------------------------------------------------------


def timer(device: Device, product: Product) -> Callable[[Choice | None], float]:
    """What times a choice, None for the formulas: seconds of a call, weights from memory.

    Raises
    ------
    ValueError
        (By what is returned.) The result differs from that of the formulas by more than rounding.
    """
    call, fmt = product.call, block_format(product.call["b"])
    n, k = call["n"], call["k"]
    gathered = bool(call.get("row_indices"))
    epilogue = warm.ready_epilogue(call.get("epilogue"))
    wide = n // 2 if product.key.pair != "none" else n
    kind = call.get("out_dtype", "bfloat16")
    a = device.random(call["m"] * k).reshape(call["m"], k)
    out = device.full((product.rows, wide), float("nan"), kind)
    more = {"out": out, "out_dtype": kind, "epilogue": epilogue}
    if product.groups is None:
        weights, _ = prepared_copies(device, fmt, (n, k), copies_of(fmt, (n, k)))
        calls = [_dense(a, b, more) for b in weights]
    else:
        shape = (call["experts"], n, k)
        weights, _ = prepared_copies(device, fmt, shape, copies_of(fmt, shape))
        ids = {}
        if call.get("expert_ids"):
            ids["expert_ids"] = device.array(
                (np.arange(product.groups) % call["experts"]).astype(np.int32)
            )
        ranges = []
        for routing in _spread(product.rows, product.groups):
            options = {"row_offsets": device.array(routing.offsets), **ids}
            if gathered:
                rows = (np.arange(product.rows) % call["m"]).astype(np.int32)
                options["row_indices"] = device.array(rows)
            ranges.append(options)
        calls = [_grouped(a, b, one | more) for b in weights for one in ranges][:MOST_CALLS]
    some = sample_rows(product.rows)
    expected: list[np.ndarray] = []

    def measure(choice: Choice | None) -> float:
        with forced(choice):
            device.fill(out, float("nan"))
            calls[0]()
            device.wait()
            got = device.rows(out, some).astype(np.float32)
            if not expected:
                expected.append(got)
            size = float(np.abs(expected[0]).max())
            if not np.allclose(got, expected[0], rtol=2**-6, atol=size * 2**-8):
                raise ValueError("another result than the formulas' division")
            first = device.mark()
            for one in calls:
                one()
            each = device.seconds(first, device.mark()) / len(calls)
            count = calls_in_graph(len(calls), least_calls(each))
            replay = device.capture([calls[i % len(calls)] for i in range(count)])
            return replay_seconds(device, replay, count, budget=0.1).median

    return measure


def _dense(a: Any, b: Any, more: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: api.matmul(a, b, **more)


def _grouped(a: Any, b: Any, more: Mapping[str, Any]) -> Callable[[], Any]:
    return lambda: api.grouped_matmul(a, b, **more)


# --- searching ------------------------------------------------------------------------------------


def search(
    choices: Sequence[Choice],
    measure: Callable[[Choice | None], float],
    over: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Time all, and the best once more beside the formulas.

    Parameters
    ----------
    choices
    measure
        Seconds of a call; None: by the formulas.
    over
        Whether no time is left; what was not timed by then is left out.
    """
    formula = measure(None)
    seconds: dict[Choice, float] = {}
    notes = []
    for choice in choices:
        if over():
            notes.append("the budget is spent")
            break
        try:
            seconds[choice] = measure(choice)
        except Exception as error:  # the others are worth having
            notes.append(f"{said(choice)}: {type(error).__name__}: {error}")
    if not seconds:
        return Outcome(None, formula * 1e6, formula * 1e6, 0, tuple(notes), None)
    best = min(seconds, key=seconds.__getitem__)
    slow = seconds[best]
    if slow < formula * (1 - GAIN):
        # A second look: the card may have been slow or fast at the first.
        formula, slow = min(formula, measure(None)), max(slow, measure(best))
    better = best if slow < formula * (1 - GAIN) else None
    return Outcome(better, formula * 1e6, slow * 1e6, len(seconds), tuple(notes), best)


def tune(table: Table, product: Product, outcome: Outcome) -> str:
    """Put an outcome into a table; what came of it, in words."""
    table.choices.pop(product.key, None)
    table.notes.pop(product.key, None)
    text = f"{product.label}: formulas {outcome.formula_us:.2f} us"
    if outcome.choice is None:
        return f"{text}, best of {outcome.tried} others {outcome.us:.2f} us: formulas kept"
    table.choices[product.key] = outcome.choice
    table.notes[product.key] = {
        "us": round(outcome.us, 3),
        "formula_us": round(outcome.formula_us, 3),
        "rows": product.rows,
        "tried": outcome.tried,
    }
    return f"{text}, {said(outcome.choice)} {outcome.us:.2f} us"
