"""Search divisions of products with prepared weights on the present card (``nvfp4 tune``).

Every division that a plan may have is built and timed as ``nvfp4 bench`` times; one that is faster
than the formulas' by more than GAIN, twice, becomes a row of a table (``nvfp4.tuning``). Formulas
that are not beaten stay: then a row that there was goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import numpy as np

from .. import api, plans_prepared, plans_products, tuning, warm
from .. import compile as compiler
from ..api import _repeat
from ..formats import block_format
from ..tuning import Choice, Key, Table
from .devices import Device
from .grouped_products import MOST_CALLS, routings
from .timing import calls_in_graph, least_calls, replay_seconds
from .warmup import usable_cpus
from .weights import copies_of, prepared_copies

__all__ = ["GAIN", "Outcome", "Product", "build", "candidates", "forced", "product_of", "search",
           "timer", "tune"]  # fmt: skip

#: What a row must save at least.
GAIN = 0.02
_TOKENS = (16, 24, 32, 48, 64, 80, 96, 112, 128)


@dataclass(frozen=True)
class Product:
    """A call of a file of shapes, and what plans know of it."""

    call: Mapping[str, Any]
    key: Key
    constants: Mapping[str, Any]
    card: tuple[str, int]
    arch: str
    rows: int
    groups: int | None

    @property
    def label(self) -> str:
        """Such as ``64 x 5760 x 2880, 32 ranges, bfloat16 x mxfp4``."""
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
    """

    choice: Choice | None
    formula_us: float
    us: float
    tried: int
    notes: tuple[str, ...] = ()


def product_of(call: Mapping[str, Any], card: tuple[str, int], arch: str) -> Product:
    """A call of a file of shapes (``nvfp4 compile --shapes``), with prepared weights.

    Raises
    ------
    ValueError
        Not a product of bfloat16 rows with a plain result.
    """
    name = call.get("call")
    if name not in ("matmul", "grouped_matmul"):
        raise ValueError(f"call must be matmul or grouped_matmul to be tuned; got {name!r}")
    if call["a"] != "bfloat16":
        raise ValueError(f"a must be bfloat16 to be tuned; got {call['a']!r}")
    if call.get("out_dtype", "bfloat16") not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"out_dtype must be a float dtype to be tuned; got {call['out_dtype']!r}")
    call = {**call, "prepared": True}
    if name == "grouped_matmul":
        call["b_decode_scale"] = "by_expert"  # as the weights have it that are timed
    with warm.recording(arch, card) as launches:
        warm.CALLS[name](**{key: value for key, value in call.items() if key != "call"})
    constants = dict(launches[-1].program.constants)
    groups = None
    if name == "grouped_matmul":
        groups = call.get("groups") or call["experts"]
    rows = call.get("row_indices") or call["m"]
    key = tuning.key_of(constants, rows, call["n"], call["k"], groups)
    return Product(call, key, constants, card, arch, rows, groups)


def candidates(product: Product) -> list[Choice]:
    """Divisions that are worth a try."""
    constants, steps = product.constants, -(-product.key.depth // 64)
    mean = product.rows / (product.groups or 1)
    found = []
    if mean <= (64 if product.groups else 512):
        for stripes in (2,) if product.key.pair == "halves" else (1, 2):
            for chunk in (8, 16):
                resident = plans_prepared._resident(chunk, stripes, constants)
                for slots in (2, 4) if chunk == 8 and stripes == 1 else (2,):
                    found += [
                        Choice("decode", chunk, team, stripes, slots, resident)
                        for team in (8, 4, 2, 1)
                        if steps >= team
                    ]
    if product.arch == "sm_90a" and mean >= 4:
        most = max(32, 2 * mean)
        found += [Choice("sm90", tokens=t) for t in _TOKENS if t <= most]
    return found


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


# --- building -------------------------------------------------------------------------------------


def _build_some(
    call: Mapping[str, Any], card: tuple[str, int], arch: str, choices: Sequence[Choice | None]
) -> list[tuple[Choice | None, str]]:
    """Build what a call needs under each choice, in a process of its own; why it cannot be used."""
    made = []
    for choice in choices:
        why = ""
        with forced(choice):
            try:
                for program in warm.programs([call], arch, card):
                    binary = compiler.find(program, arch) or compiler.build(program, arch)
                    if choice is not None and any(binary.spill_bytes):
                        why = f"spills {max(binary.spill_bytes)} bytes"
            except Exception as error:
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        made.append((choice, why))
    return made


def build(
    product: Product, choices: Sequence[Choice], jobs: int | None = None
) -> tuple[list[Choice], list[str]]:
    """Build all; which can be used, and why others cannot.

    Raises
    ------
    RuntimeError
        The formulas' own division does not build.
    """
    every: list[Choice | None] = [None, *choices]
    jobs = min(jobs or usable_cpus(), len(every))
    if jobs == 1:
        results = _build_some(product.call, product.card, product.arch, every)
    else:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            hands = [every[i::jobs] for i in range(jobs)]
            facts = (product.call, product.card, product.arch)
            tasks = [pool.submit(_build_some, *facts, hand) for hand in hands]
            results = [result for task in tasks for result in task.result()]
    why = dict(results)
    if why[None]:
        raise RuntimeError(f"{product.label}: the plan's own kernel does not build: {why[None]}")
    usable = [choice for choice in choices if not why[choice]]
    return usable, [f"{_said(choice)}: {why[choice]}" for choice in choices if why[choice]]


def _said(choice: Choice) -> str:
    if choice.kernel == "sm90":
        return f"sm90 tokens {choice.tokens}"
    return (
        f"decode chunk {choice.chunk} team {choice.team} stripes {choice.stripes} slots "
        f"{choice.slots} resident {choice.resident}"
    )


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
        for routing in routings(product.rows, product.groups, 1):
            options = {"row_offsets": device.array(routing.offsets), **ids}
            if gathered:
                rows = (np.arange(product.rows) % call["m"]).astype(np.int32)
                options["row_indices"] = device.array(rows)
            ranges.append(options)
        calls = [_grouped(a, b, one | more) for b in weights for one in ranges][:MOST_CALLS]
    expected: list[np.ndarray] = []

    def measure(choice: Choice | None) -> float:
        with forced(choice):
            device.fill(out, float("nan"))
            calls[0]()
            device.wait()
            got = device.host(out).astype(np.float32)
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
            notes.append(f"{_said(choice)}: {type(error).__name__}: {error}")
    if not seconds:
        return Outcome(None, formula * 1e6, formula * 1e6, 0, tuple(notes))
    best = min(seconds, key=seconds.__getitem__)
    slow = seconds[best]
    if slow < formula * (1 - GAIN):
        # A second look: the card may have been slow or fast at the first.
        formula, slow = min(formula, measure(None)), max(slow, measure(best))
    better = best if slow < formula * (1 - GAIN) else None
    return Outcome(better, formula * 1e6, slow * 1e6, len(seconds), tuple(notes))


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
    return f"{text}, {_said(outcome.choice)} {outcome.us:.2f} us"
