"""The same launches on the simulated machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4.arrays import as_array
from nvfp4.errors import UnsupportedError
from nvfp4.launch import Launch, run

from .programs import CHAIN, EVERY_TYPE, REVERSE, THREADS, program

POISON = 0xDEADBEEF


def simulate(launches: list[Launch], arch: str = "sm_90a", **buffers: Any) -> None:
    named = {
        name: as_array(value, name) if isinstance(value, np.ndarray) else value
        for name, value in buffers.items()
    }
    with nvfp4.simulate(arch=arch) as machine:
        run(launches, named, machine=machine)


def test_a_program_with_its_constants_and_a_users_function_runs() -> None:
    x = np.arange(200, dtype=np.uint32) * 31
    y = np.full(210, POISON, np.uint32)
    made = program(5, adjust=lambda value: value + 1)
    simulate([Launch(made, 2, THREADS, 0, ("x", "y", 7, 200))], x=x, y=y)
    assert np.array_equal(y[:200], x * np.uint32(5) + np.uint32(8))
    assert (y[200:] == POISON).all()


def test_shared_memory_has_the_size_of_the_launch() -> None:
    x, y = np.arange(64, dtype=np.uint32), np.full(64, POISON, np.uint32)
    simulate([Launch(REVERSE.program(), 1, 64, 256, ("x", "y", 64))], x=x, y=y)
    assert np.array_equal(y, x[::-1])
    with pytest.raises(nvfp4.SimulationError, match="shared memory"):
        simulate([Launch(REVERSE.program(), 1, 64, 252, ("x", "y", 64))], x=x, y=y)


def test_numbers_of_every_type_arrive() -> None:
    numbers = (-2, (1 << 32) - 1, -(1 << 63), 5, -1.5)
    for args, more in (
        (("out", *numbers), {}),
        (("out", "a", "b", "c", "d", "e"), dict(zip("abcde", numbers, strict=True))),
    ):
        out = np.full(6, -7, np.int64)
        simulate([Launch(EVERY_TYPE.program(), 1, 32, 0, args)], out=out, **more)
        assert out.tolist() == [*numbers[:4], 1, -7]


def test_launches_run_in_order_and_empty_ones_not_at_all() -> None:
    a, b = np.zeros(8, np.uint32), np.full(8, POISON, np.uint32)
    there = Launch(CHAIN.program(), 1, THREADS, 0, ("a", "b", 8))
    back = Launch(CHAIN.program(), 1, THREADS, 0, ("b", "a", 8), programmatic=True)
    nothing = Launch(CHAIN.program(), 0, THREADS, 0, ("missing", "a", 8))
    simulate([there, back, nothing, there], a=a, b=b)
    assert (a.tolist(), b.tolist()) == ([2] * 8, [3] * 8)


def test_a_pointer_that_is_none_must_not_be_read() -> None:
    with pytest.raises(nvfp4.SimulationError, match="out of bounds"):
        simulate([Launch(REVERSE.program(), 1, 32, 128, ("x", "y", 32))], x=None, y=None)


def test_a_name_without_a_value_is_reported() -> None:
    with pytest.raises(KeyError, match=r"reverse needs a value for 'y'; got \['x'\]"):
        simulate([Launch(REVERSE.program(), 1, 32, 128, ("x", "y", 32))], x=None)


def test_a_kernel_that_is_not_made_for_the_machine_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="chain is made for"):
        simulate([Launch(CHAIN.program(), 1, THREADS, 0, ("a", "b", 8))], "sm_80", a=None, b=None)
