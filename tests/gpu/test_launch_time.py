"""Host time of a launch. The limit for a whole public call is 10 us; a launch is part of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from nvfp4.arrays import as_array
from nvfp4.launch import Launch, prepare, run

from ..compile.programs import CHAIN, THREADS, program

LIMIT = 10e-6
BATCH, BATCHES = 100, 60


def host_time(call: Callable[[], None], wait: Callable[[], None]) -> float:
    """Median over batches of the seconds that one call costs the host; the queue never fills."""
    call()
    wait()
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - start) / BATCH)
        wait()
    return statistics.median(times)


@pytest.fixture
def arrays(cupy: Any) -> dict[str, Any]:
    x, y = cupy.zeros(THREADS, cupy.uint32), cupy.zeros(THREADS, cupy.uint32)
    return {"x": as_array(x, "x"), "y": as_array(y, "y")}


def report(what: str, seconds: float) -> None:
    print(f"{what}: {seconds * 1e6:.2f} us")


def test_run_costs_the_host_at_most_ten_microseconds(cupy: Any, arrays: dict[str, Any]) -> None:
    launches = (Launch(program(), 1, THREADS, 0, ("x", "y", 1, THREADS)),)
    stream = cupy.cuda.Stream(non_blocking=True)
    seconds = host_time(
        lambda: run(launches, arrays, stream=stream.ptr, device=0), stream.synchronize
    )
    report("run, two pointers and two numbers", seconds)
    assert seconds <= LIMIT


def test_a_prepared_launch_costs_less_than_run(cupy: Any, arrays: dict[str, Any]) -> None:
    launches = (Launch(program(), 1, THREADS, 0, ("x", "y", 1, THREADS)),)
    stream = cupy.cuda.Stream(non_blocking=True)
    prepared = prepare(launches, 0)
    pointers = tuple(arrays[name].pointer for name in prepared.names)
    seconds = host_time(lambda: prepared(pointers, stream.ptr), stream.synchronize)
    report("prepared, two pointers and two numbers", seconds)
    assert seconds <= LIMIT


def test_a_programmatic_launch_costs_at_most_ten_microseconds(
    cupy: Any, arrays: dict[str, Any]
) -> None:
    launch = Launch(CHAIN.program(), 1, THREADS, 0, ("x", "y", THREADS), programmatic=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    seconds = host_time(
        lambda: run((launch,), arrays, stream=stream.ptr, device=0), stream.synchronize
    )
    report("run, programmatic", seconds)
    assert seconds <= LIMIT


def test_another_current_device_costs_at_most_ten_microseconds(
    cupy: Any, arrays: dict[str, Any], cards: range
) -> None:
    """Where there is another one; on a machine of one GPU it is the same launch as above."""
    launches = (Launch(program(), 1, THREADS, 0, ("x", "y", 1, THREADS)),)
    stream = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Device(cards[-1]):
        seconds = host_time(
            lambda: run(launches, arrays, stream=stream.ptr, device=0), stream.synchronize
        )
    report(f"run on device 0 while {cards[-1]} is current", seconds)
    assert seconds <= LIMIT
