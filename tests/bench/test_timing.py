"""How times are made of events, on a clock that the test turns."""

from __future__ import annotations

import pytest

from nvfp4.bench.timing import (
    FOOTPRINT,
    Deadline,
    Timing,
    calls_in_graph,
    host_seconds,
    least_calls,
    replay_seconds,
    rotations,
)


class Events:
    """A stream whose n-th replay takes ``durations[n]`` seconds, the last one ever after."""

    def __init__(self, *durations: float) -> None:
        self.durations, self.now, self.replays = durations, 0.0, 0

    def replay(self) -> None:
        self.now += self.durations[min(self.replays, len(self.durations) - 1)]
        self.replays += 1

    def mark(self) -> float:
        return self.now

    def seconds(self, first: float, second: float) -> float:
        return second - first

    def wait(self) -> None:
        pass


def test_the_time_of_a_call_is_the_median_replay_divided_by_the_calls() -> None:
    # One that does not count, one that says how long it takes, one that fills the stream; then 7.
    slow = [5.0, 1.0, 9.0, 1.0, 1.2, 1.1, 30.0, 1.3, 1.4, 1.5]
    events = Events(*slow)
    timing = replay_seconds(events, events.replay, 10, budget=0.0)
    assert (timing.median, timing.replays, timing.calls) == (pytest.approx(0.13), 7, 10)
    assert (timing.low, timing.high) == (pytest.approx(0.11), pytest.approx(0.15))


def test_replays_are_as_many_as_fit_the_budget() -> None:
    for each, wanted in ((0.01, 15), (1.0, 7), (1e-5, 41)):
        events = Events(each)
        assert replay_seconds(events, events.replay, 1, budget=0.155).replays == wanted


def test_the_first_replays_do_not_count() -> None:
    events = Events(100.0, 1.0, 100.0, 1.0)
    assert replay_seconds(events, events.replay, 1).high == pytest.approx(1.0)


def test_rotated_buffers_are_several_caches_large_or_few() -> None:
    assert rotations(8192 * 7168 * 2) == 5
    assert rotations(8192 * 7168 * 2) * 8192 * 7168 * 2 >= FOOTPRINT
    assert rotations(65536 * 7168 * 2) == 2
    assert rotations(1) == 2048
    assert rotations(1, in_l2=True) == 16


@pytest.mark.parametrize("buffers", [2, 5, 16, 40, 41, 2048])
def test_a_graph_has_each_buffer_equally_often(buffers: int) -> None:
    calls = calls_in_graph(buffers)
    assert calls % buffers == 0 and calls >= 40
    assert calls - buffers < 40


def test_host_time_is_that_of_the_calls_without_the_waiting() -> None:
    now = [0.0]

    def call() -> None:
        now[0] += 2e-6

    def wait() -> None:
        now[0] += 1.0

    timing = host_seconds(call, wait, batch=50, batches=5, now=lambda: now[0])
    assert timing.median == pytest.approx(2e-6)
    assert (timing.calls, timing.replays) == (50, 5)


def test_quartiles_are_of_the_calls() -> None:
    timing = Timing.of([4.0, 1.0, 2.0, 3.0, 5.0], 2)
    assert timing == Timing(1.5, 1.0, 2.0, 5, 2)


def test_a_deadline_counts_from_when_it_was_made() -> None:
    now = [100.0]
    deadline = Deadline(10, lambda: now[0])
    assert not deadline.over() and not deadline.over(10) and deadline.over(10.1)
    now[0] = 111.0
    assert deadline.over() and deadline.spent == 11


def test_graphs_of_slow_calls_have_fewer_of_them() -> None:
    found = [least_calls(us * 1e-6) for us in (5, 500, 1000, 5000, 1e6)]
    assert found == [40, 40, 20, 4, 4]
