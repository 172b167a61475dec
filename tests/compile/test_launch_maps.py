"""Tensor maps of launches, seen from the driver. On a card: tests/gpu/test_quantize_tma.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from nvfp4 import compile as compiler
from nvfp4 import tensor_maps
from nvfp4.arrays import as_array
from nvfp4.driver import on_device
from nvfp4.kernels.tensor_map import WRITE_TENSOR_MAP
from nvfp4.launch import Launch, prepare, run
from nvfp4.ptx.tensor_map import encode
from nvfp4.sim import Machine
from nvfp4.tensor_maps import MAP_BYTES, MAPS_AT_A_TIME, MapOf

from .fake_driver import OK, RELAXED, FakeDriver
from .programs import REVERSE
from .test_launch import buffer, fake  # noqa: F401

MAP = MapOf("x", "u16", (64, 9), (128,), (64, 128), 128)
OTHER = MapOf("x", "u16", (64, 8), (128,), (64, 128), 128)
MEMORY = 0x7000_0000
OWN_STREAM = 0x99


class Memory:
    """What a driver needs beside launching; all that was asked of it."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.allocated, self.waited, self.streams = driver, 0, 0, 0
        self.modes: list[Any] = []

    def cuMemAlloc(self, count: int) -> Any:
        assert count == MAPS_AT_A_TIME * MAP_BYTES
        self.modes.append(self.driver.mode)
        self.allocated += 1
        return OK, MEMORY * self.allocated

    def cuStreamCreate(self, kind: Any) -> Any:
        self.streams += 1
        return OK, OWN_STREAM

    def cuStreamSynchronize(self, stream: int) -> Any:
        assert stream == OWN_STREAM
        self.modes.append(self.driver.mode)
        self.waited += 1
        return (OK,)


@pytest.fixture
def memory(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:  # noqa: F811
    made = Memory(fake)
    for name in ("cuMemAlloc", "cuStreamCreate", "cuStreamSynchronize"):
        monkeypatch.setattr(fake, name, getattr(made, name), raising=False)
    monkeypatch.setattr(tensor_maps, "_maps", {})
    monkeypatch.setattr(tensor_maps, "encode_on_card", encode)
    yield made


def reverse(one: MapOf = MAP) -> Launch:
    """A launch whose second argument is a map of the buffer x."""
    args = ("y", "x_map", 9)
    return Launch(REVERSE.program(), 2, 64, 0, args, maps=(("x_map", one),))


def words(address: int, one: MapOf = MAP) -> tuple[int, ...]:
    return tuple(int(word) for word in np.frombuffer(encode(one.at(address)), np.uint64))


X, Y = buffer(0xAAAA_0000), buffer(0xBBBB)


def test_a_map_is_written_on_a_stream_of_its_own_before_the_launch(memory: Memory) -> None:
    run([reverse()], {"x": X, "y": Y}, stream=7)
    write, launched = memory.driver.launches
    assert write.stream == OWN_STREAM and launched.stream == 7
    target, *some = write.parameters
    assert tuple(some) == words(0xAAAA_0000)[: len(some)]
    assert launched.parameters == (0xBBBB, target, 9)
    assert MEMORY <= target < MEMORY + MAPS_AT_A_TIME * MAP_BYTES and target % 64 == 0
    assert memory.waited == 1


def test_the_same_map_is_made_once(memory: Memory) -> None:
    one = reverse()
    for stream in (7, 8):
        run([one], {"x": X, "y": Y}, stream=stream)
        run([reverse()], {"x": X, "y": Y}, stream=stream)
    assert memory.waited == 1
    assert len({seen.parameters for seen in memory.driver.launches[1:]}) == 1


def test_another_address_or_shape_has_another_map(memory: Memory) -> None:
    for one, x in ((MAP, X), (OTHER, X), (MAP, buffer(0xCCC0))):
        run([reverse(one)], {"x": x, "y": Y})
    used = [seen.parameters[1] for seen in memory.driver.launches if seen.stream == 0]
    assert len(set(used)) == 3 and memory.waited == 3


def test_memory_is_taken_anew_when_it_is_full_and_no_map_is_lost(memory: Memory) -> None:
    one = reverse()
    for i in range(MAPS_AT_A_TIME + 1):
        run([one], {"x": buffer(0x1000 * (i + 1)), "y": Y})
    run([one], {"x": buffer(0x1000), "y": Y})
    launches = [seen for seen in memory.driver.launches if seen.stream == 0]
    used = [seen.parameters[1] for seen in launches]
    assert memory.allocated == 2
    assert len(set(used)) == MAPS_AT_A_TIME + 1 and used[-1] == used[0]


def test_during_a_capture_nothing_breaks_it(memory: Memory) -> None:
    for program in reverse().programs:
        compiler.build(program, "sm_90a")
    memory.driver.capturing = {5}
    run([reverse()], {"x": X, "y": Y}, stream=5)
    assert [seen.stream for seen in memory.driver.launches] == [OWN_STREAM, 5]
    assert set(memory.modes) == {RELAXED}


def test_each_device_has_its_own(memory: Memory) -> None:
    one = reverse()
    for device in (0, 1, 1):
        run([one], {"x": buffer(0xAAA0, device), "y": buffer(0xB0, device)}, device=device)
    assert [seen.device for seen in memory.driver.launches] == [0, 0, 1, 1, 1]
    assert memory.streams == 2 and memory.waited == 2


def test_prepared_launches_take_buffers_and_find_the_maps_when_bound(memory: Memory) -> None:
    ready = prepare([reverse()], 0)
    assert ready.names == ("y", "x")
    bound = ready.bind((0xBBBB, 0xAAAA_0000))
    assert memory.waited == 1
    bound(3)
    bound(4)
    assert memory.waited == 1
    *_, first, second = memory.driver.launches
    assert first.parameters == second.parameters and first.parameters[0] == 0xBBBB
    with on_device(0):
        run([reverse()], {"x": X, "y": Y})
    assert memory.driver.launches[-1].parameters == first.parameters


def test_a_buffer_that_cannot_have_a_map_is_refused(memory: Memory) -> None:
    with pytest.raises(ValueError, match="`address` must be a multiple of 16; got 0xaaa8"):
        run([reverse()], {"x": buffer(0xAAA8), "y": Y})


def test_a_map_that_is_no_argument_is_refused() -> None:
    with pytest.raises(ValueError, match="the map 'z_map' is no argument"):
        Launch(REVERSE.program(), 1, 64, 0, ("x", "y", 9), maps=(("z_map", MAP),))


def test_a_map_without_its_buffer_is_reported(memory: Memory) -> None:
    with pytest.raises(KeyError, match="needs a value for 'x'"):
        run([reverse()], {"y": Y})


def test_the_kernel_writes_all_words_of_a_map() -> None:
    given = words(0x1230)
    target = np.zeros(16, np.uint64)
    names = tuple(f"w{i}" for i in range(16))
    write = Launch(WRITE_TENSOR_MAP.program(), 1, 1, 0, ("target", *names))
    values = dict(zip(names, given, strict=True))
    run([write], {"target": as_array(target, "target"), **values}, machine=Machine("sm_90a"))
    assert tuple(map(int, target)) == given
