"""A run of a suite: what it has at hand, and what every measurement shares."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from .devices import Device
from .report import Report, Row, brief, skipped
from .targets import Target
from .timing import Deadline, Timing, calls_in_graph, replay_seconds

__all__ = ["SUITES", "Options", "Pool", "Run", "suite"]

#: Name of a suite -> its module and what it measures. A module has ``calls(options)``, the calls
#: whose kernels are built first (``nvfp4.warm``), and ``measure(run)``.
SUITES: dict[str, tuple[str, str]] = {
    "quantize": ("quantizers", "Quantisers, dense and grouped, beside a copy; the host's time."),
    "matmul": ("dense_products", "Products with one quantised matrix, beside cuBLAS."),
    "grouped-matmul": ("grouped_products", "Products with the quantised matrices of experts."),
}


def suite(name: str) -> ModuleType:
    """The module of a suite."""
    return importlib.import_module(f".{SUITES[name][0]}", __package__)


@dataclass(frozen=True)
class Options:
    """What the user chose.

    Attributes
    ----------
    only
        Parts of labels; a shape is measured if one of them is in its label. Empty: all.
    formats
        Canonical names; empty: those of the suite.
    peers
        Whether to measure other libraries too.
    activations
        Kinds of rows of A (``activations.KINDS``).
    batch_invariant
        Whether to measure each with a batch-invariant plan too.
    """

    only: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    peers: bool = True
    activations: tuple[str, ...] = ("bfloat16",)
    batch_invariant: bool = False

    def wants(self, label: str) -> bool:
        """Whether a shape was asked for."""
        plain = label.replace(" ", "").lower()
        return not self.only or any(p.replace(" ", "").lower() in plain for p in self.only)

    def chosen(self, formats: Sequence[str]) -> tuple[str, ...]:
        """Of a suite's formats, those that were asked for."""
        return tuple(f for f in formats if not self.formats or f in self.formats)


@dataclass
class Run:
    """A suite at work.

    Attributes
    ----------
    device, options, deadline, report
    say
        Told what comes next, and what came out.
    """

    device: Device
    options: Options
    deadline: Deadline
    report: Report
    say: Callable[[str], None] = lambda text: None
    #: Speeds of references by shape, kept for the peers.
    references: dict[Any, Any] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take a row into the report; say what came out, should the rest never come."""
        self.report.rows.append(row)
        if row.us is not None or row.wrong:
            self.say(brief(row))

    def late(
        self,
        group: str,
        shape: str,
        format: str,
        what: str,
        target: Target | None = None,
        needed: float = 0.0,
    ) -> bool:
        """Whether the budget is spent; then a row says so."""
        if not self.deadline.over(needed):
            return False
        why = f"the budget of {self.deadline.budget:.0f} s is spent"
        self.add(skipped(group, shape, format, what, why, target))
        return True

    def timed(
        self, calls: Sequence[Callable[[], Any]], *, least: int = 40, budget: float = 0.15
    ) -> tuple[Timing, Callable[[], Any]]:
        """Make calls once each, capture them in turns, time the graph; also what replays it."""
        for call in calls:
            call()
        self.device.wait()
        count = calls_in_graph(len(calls), least)
        replay = self.device.capture([calls[i % len(calls)] for i in range(count)])
        return replay_seconds(self.device, replay, count, budget=budget), replay

    def sort(self) -> None:
        """Put rows of one group, and in it of one shape, beside each other, first come first."""
        place: dict[Any, int] = {}
        for index, row in enumerate(self.report.rows):
            place.setdefault(row.group, index)
            place.setdefault((row.group, row.shape), index)
        self.report.rows.sort(key=lambda r: (place[r.group], place[r.group, r.shape]))


class Pool:
    """Random bfloat16 that inputs of all shapes are cut from: made once."""

    def __init__(self, device: Device, elements: int) -> None:
        self.elements = elements
        self._flat = device.random(elements) if elements else None

    @classmethod
    def for_sizes(cls, device: Device, sizes: Iterable[tuple[int, int]]) -> Pool:
        """Large enough for (elements, buffers) of every shape."""
        return cls(device, max((each * count for each, count in sizes), default=0))

    def cut(self, rows: int, columns: int, count: int) -> list[Any]:
        """`count` matrices that do not overlap."""
        size = rows * columns
        if self._flat is None or size * count > self.elements:
            raise ValueError(f"the pool has {self.elements} elements; {count} of {size} are wanted")
        return [self._flat[i * size : (i + 1) * size].reshape(rows, columns) for i in range(count)]
