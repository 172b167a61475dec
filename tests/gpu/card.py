"""The runner of ``tests/kernels/checks.py`` on the present card, and building ahead for it.

The tests of ``tests/kernels`` that ask for a fixture ``run`` are run again on a card: a module here
imports them, and the fixtures of this file. What they need is built first, by all cores.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest

from nvfp4 import compile as compiler
from nvfp4 import launch
from nvfp4.arrays import as_array
from nvfp4.driver import current_device
from nvfp4.program import Program
from tests.kernels import checks
from tests.kernels.checks import POISON, Out, launches

#: Bytes before and after every buffer on the card.
GUARD = 512


class Card:
    """Run plans on the present card, with guards around the results that must stay as they were."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.arch = launch.architecture(current_device())

    def __call__(
        self,
        plan: str,
        facts: Mapping[str, Any],
        buffers: Mapping[str, Any],
        outputs: Mapping[str, Out],
    ) -> dict[str, np.ndarray]:
        results = {name: out.poisoned() for name, out in outputs.items()}
        whole: dict[str, tuple[Any, int]] = {}
        given: dict[str, Any] = {}
        for name, value in {**buffers, **results}.items():
            given[name] = value
            if isinstance(value, np.ndarray):
                # NaN around what is read, so that a read beside it shows.
                fill = POISON if name in results else 0xFF
                memory, start = self.upload(value, fill)
                whole[name] = memory, start
                given[name] = as_array(memory[start : start + value.nbytes], name)
        planned = launches(plan, self.arch, facts)
        launch.run(planned, given, stream=self.cupy.cuda.get_current_stream().ptr)
        self.cupy.cuda.get_current_stream().synchronize()
        for name, result in results.items():
            on_card, start = whole[name]
            memory = self.cupy.asnumpy(on_card)
            end = start + result.nbytes
            assert (memory[:start] == POISON).all(), f"{name}: written before its first byte"
            assert (memory[end:] == POISON).all(), f"{name}: written behind its last byte"
            results[name] = memory[start:end].view(result.dtype).reshape(result.shape)
        return results

    def upload(self, value: np.ndarray, fill: int) -> tuple[Any, int]:
        """A copy with guards, as far off a multiple of 16 bytes as the original, and its start."""
        data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
        memory = self.cupy.full(data.size + 2 * GUARD, fill, np.uint8)
        start = GUARD - (memory.data.ptr + GUARD) % 16 + value.ctypes.data % 16
        memory[start : start + data.size] = self.cupy.asarray(data)
        return memory, start


class Recorder:
    """A runner that runs nothing and notes what would be built."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.programs: dict[Program, None] = {}

    def __call__(
        self,
        plan: str,
        facts: Mapping[str, Any],
        buffers: Mapping[str, Any],
        outputs: Mapping[str, Out],
    ) -> dict[str, np.ndarray]:
        for one in launches(plan, self.arch, facts):
            if not one.empty:
                self.programs[one.program] = None
        return {name: out.poisoned() for name, out in outputs.items()}


def record(functions: list[tuple[Any, dict[str, Any]]], arch: str) -> list[Program]:
    """What calls of tests with a runner would build."""
    recorder = Recorder(arch)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("assert_bytes", "assert_values"):
            patch.setattr(checks, name, lambda *_: None)
        for function, arguments in functions:
            runners = {name for name in ("run", "quick_run") if name in _parameters(function)}
            try:
                function(**arguments, **dict.fromkeys(runners, recorder))
            except Exception:  # a test that looks at results itself; it will say so when it runs
                continue
    return list(recorder.programs)


def _parameters(function: Any) -> tuple[str, ...]:
    code = function.__code__
    return tuple(code.co_varnames[: code.co_argcount])


def build(program: Program, arch: str) -> None:
    """Build into the disk cache that the environment names; run in a process of its own."""
    compiler.build(program, arch)


def build_all(programs: list[Program], arch: str) -> None:
    """Build with all cores what can be sent to another process: all but users' functions.

    Of several processes of pytest-xdist, which share a cache, each builds its share.
    """
    number = os.environ.get("PYTEST_XDIST_WORKER", "")
    if number.startswith("gw"):
        for program in programs[int(number[2:]) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
            build(program, arch)
        return
    sent = []
    for program in programs:
        try:
            pickle.dumps(program)
        except Exception:  # a function inside a function
            continue
        sent.append(program)
    if not sent:
        return
    workers = min(len(os.sched_getaffinity(0)), len(sent))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(build, program, arch) for program in sent]:
            done.result()


_built: set[str] = set()


@pytest.fixture(scope="session")
def everything_built(request: pytest.FixtureRequest, cache_directory: Any) -> None:
    """Whatever the collected tests with a runner need."""
    arch = launch.architecture(current_device())
    if arch in _built:
        return
    _built.add(arch)
    calls = []
    for item in request.session.items:
        function = getattr(item, "function", None)
        if function is None or not {"run", "quick_run"} & set(_parameters(function)):
            continue
        callspec = getattr(item, "callspec", None)
        calls.append((function, dict(callspec.params) if callspec else {}))
    build_all(record(calls, arch), arch)


@pytest.fixture
def run(cupy: Any, everything_built: None) -> Iterator[Card]:
    """A runner on the present card."""
    yield Card(cupy)


@pytest.fixture
def quick_run(run: Card) -> Card:
    """The same: a card makes no checks."""
    return run
