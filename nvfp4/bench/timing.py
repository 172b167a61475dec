"""How times are taken.

On the card: a CUDA graph of many calls on rotated buffers is replayed over and over, with events
between the replays; the time of a call is the median of the intervals, divided by the calls. All
replays are put into the stream at once, after one that does not count, so that the card never waits
for the host. What happens between two kernels is inside the figure.

On the host: many calls in a row, a few hundred at a time so that the queue never fills.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Clock", "Deadline", "Timing", "calls_in_graph", "host_seconds", "least_calls",
           "replay_seconds", "rotations"]  # fmt: skip

#: Bytes that rotated buffers have together: several second-level caches.
FOOTPRINT = 512 << 20
MOST_BUFFERS = 2048
#: Buffers where they are to stay in the second-level cache.
BUFFERS_IN_L2 = 16


class Clock(Protocol):
    """What is needed of a card to time replays."""

    def mark(self) -> Any:
        """An event, recorded now."""

    def seconds(self, first: Any, second: Any) -> float:
        """Seconds between two events; waits for the second."""

    def wait(self) -> None:
        """Wait for everything."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one call.

    Attributes
    ----------
    median, low, high
        Of the replays; low and high are the quartiles.
    replays
        How many there were.
    calls
        In each.
    """

    median: float
    low: float
    high: float
    replays: int
    calls: int

    @classmethod
    def of(cls, seconds: list[float], calls: int) -> Timing:
        """Of the durations of replays."""
        each = sorted(value / calls for value in seconds)
        quarter = len(each) // 4
        return cls(statistics.median(each), each[quarter], each[-1 - quarter], len(each), calls)


def rotations(bytes_of_call: int, *, in_l2: bool = False, footprint: int = FOOTPRINT) -> int:
    """Buffers to rotate so that their bytes are several times a second-level cache, or few."""
    if in_l2:
        return BUFFERS_IN_L2
    return max(2, min(MOST_BUFFERS, -(-footprint // max(bytes_of_call, 1))))


def calls_in_graph(buffers: int, least: int = 40) -> int:
    """Calls of a graph: every buffer as often as every other, and at least so many."""
    return buffers * -(-least // buffers)


def least_calls(seconds: float) -> int:
    """Calls that a graph should have: 40, fewer where these would take more than 20 ms."""
    return max(4, min(40, int(0.02 / max(seconds, 1e-9))))


def replay_seconds(
    clock: Clock,
    replay: Callable[[], Any],
    calls: int,
    *,
    budget: float = 0.15,
    least: int = 7,
    most: int = 41,
) -> Timing:
    """Time replays of a graph of `calls` calls.

    Parameters
    ----------
    clock
    replay
        Starts the graph.
    calls
        That it has.
    budget
        Seconds to spend on it.
    least, most
        Replays that count.
    """
    replay()
    clock.wait()
    first = clock.mark()
    replay()
    one = clock.seconds(first, clock.mark())
    count = max(least, min(most, int(budget / max(one, 1e-9))))
    replay()
    marks = [clock.mark()]
    for _ in range(count):
        replay()
        marks.append(clock.mark())
    clock.wait()
    seconds = [clock.seconds(a, b) for a, b in itertools.pairwise(marks)]
    return Timing.of(seconds, calls)


def host_seconds(
    call: Callable[[], Any],
    wait: Callable[[], None],
    *,
    batch: int = 100,
    batches: int = 40,
    now: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Seconds that one call costs the host, what the card does meanwhile left out."""
    call()
    wait()
    seconds = []
    for _ in range(batches):
        start = now()
        for _ in range(batch):
            call()
        seconds.append(now() - start)
        wait()
    return Timing.of(seconds, batch)


class Deadline:
    """A budget of seconds, from now on."""

    def __init__(self, budget: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self.budget = now, budget
        self._began = now()

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return self._now() - self._began

    def over(self, needed: float = 0.0) -> bool:
        """Whether what takes `needed` seconds more does not fit."""
        return self.spent + needed > self.budget
