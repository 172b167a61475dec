"""A card that is not there: GPU arrays in host memory, launches that are recorded, or simulated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nvfp4 import _readers, arrays, launch, plans, sim
from nvfp4._array import Array

from . import stubs


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> stubs.Cupy:
    """The stub of CuPy, imported."""
    module = stubs.Cupy()
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.fixture
def memory() -> Any:
    """Pretended device memory."""
    from .repeated import Memory

    return Memory()


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> stubs.Torch:
    """The stub of PyTorch, imported, even where there is a real one."""
    module = stubs.Torch()
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(_readers, "_TORCH_DTYPES", {})
    return module


class Card:
    """What was launched: plans with their facts, and the buffers that they got."""

    def __init__(self) -> None:
        #: Plan, buffers, stream and device of each launch, on whichever way.
        self.outcomes: list[tuple[Any, ...]] = []
        self.arch = "sm_90a"
        self.planned: list[tuple[str, dict[str, Any]]] = []
        self.launched: list[tuple[dict[str, Any], dict[str, Any]]] = []
        #: Calls that went straight to a prepared launch: (values by name, stream).
        self.repeated: list[tuple[dict[str, Any], int]] = []
        self.simulate = False

    @property
    def buffers(self) -> dict[str, Any]:
        """Those of the last launch."""
        return self.launched[-1][0]

    @property
    def facts(self) -> dict[str, Any]:
        """Those of the last plan."""
        return self.planned[-1][1]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, cupy: stubs.Cupy) -> Iterator[Card]:
    """A card of architecture sm_90a that records what it is given."""
    from nvfp4.api import _place, _repeat, dense

    card = Card()
    run = launch.run

    class Plans:
        def __getattr__(self, name: str) -> Any:
            def plan(arch: str, **facts: Any) -> Any:
                card.planned.append((name, {"arch": arch, **facts}))
                if card.simulate:
                    return getattr(plans, name)(arch, **facts)
                return ((name, *sorted(facts.items())),)

            return plan

    def run_or_record(launches: Any, buffers: Any, **where: Any) -> None:
        card.launched.append((dict(buffers), where))
        card.outcomes.append((launches, _plain(buffers), where["stream"], where["device"]))
        if card.simulate:
            run(launches, _on_host(buffers), machine=sim.Machine(card.arch))

    class Prepared:
        def __init__(self, launches: Any, device: int, stream: int) -> None:
            self.launches, self.device = launches, device
            # What a launch is given are addresses: of memory that looked like this. The launches
            # may be those of several runs.
            given: dict[str, Any] = {}
            count = 0
            for (buffers, _), (made, *_) in zip(
                reversed(card.launched), reversed(card.outcomes), strict=False
            ):
                given, count = {**buffers, **given}, count + len(made)
                if count >= len(launches):
                    break
            self.buffers = {
                name: Array(None, value.spec, value.pointer) if isinstance(value, Array) else value
                for name, value in given.items()
            }
            self.names = tuple(name for name, value in self.buffers.items() if value is not None)

        def bind(self, values: Any) -> Any:
            named = dict(zip(self.names, values, strict=True))

            def launch(stream: int) -> None:
                card.repeated.append((named, stream))
                card.outcomes.append((self.launches, _plain(named), stream, self.device))
                if card.simulate:
                    moved = {
                        name: _moved(value, named.get(name)) for name, value in self.buffers.items()
                    }
                    run(self.launches, _on_host(moved), machine=sim.Machine(card.arch))

            return launch

    monkeypatch.setattr(launch, "prepare", lambda *args, **more: Prepared(*args, **more))
    monkeypatch.setattr(launch, "architecture", lambda device: card.arch)
    info = SimpleNamespace(name="a card", processors=132)
    monkeypatch.setattr(launch, "device_info", lambda device: info)
    monkeypatch.setattr(launch, "run", run_or_record)
    monkeypatch.setattr(_place, "_planner", Plans)
    dense._dense_call.cache_clear()
    _repeat.forget()
    yield card
    dense._dense_call.cache_clear()
    _repeat.forget()


def _plain(buffers: dict[str, Any]) -> dict[str, int | bytes]:
    """Addresses, and the bytes of numbers, of the buffers that are given."""
    return {
        name: value.pointer
        if isinstance(value, Array)
        else value
        if type(value) is int and value > 1 << 20
        else np.float32(value).tobytes()
        for name, value in buffers.items()
        if value is not None
    }


def _on_host(buffers: dict[str, Any]) -> dict[str, Any]:
    """The same memory, said to be the host's: the stubs' GPU memory is."""
    return {
        name: Array(value.owner, value.spec._replace(device=None, library="stub"), value.pointer)
        if isinstance(value, arrays.Array)
        else value
        for name, value in buffers.items()
    }


def _moved(buffer: Any, value: Any) -> Any:
    """A buffer at another address, or another number."""
    if isinstance(buffer, Array):
        return Array(buffer.owner, buffer.spec, value)
    return value
