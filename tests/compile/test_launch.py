"""Launching, seen from the driver. What the card makes of it is tested in tests/gpu."""

from __future__ import annotations

import ctypes
import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nvfp4 import _card
from nvfp4 import compile as compiler
from nvfp4 import driver as driver_module
from nvfp4 import launch as launch_module
from nvfp4.arrays import Array, Spec
from nvfp4.errors import ToolchainError, UnsupportedError
from nvfp4.launch import Launch, architecture, prepare, run

from .fake_driver import GLOBAL, RELAXED, FakeDriver, Library, real
from .programs import CHAIN, EVERY_TYPE, REVERSE, program

SLOT = (1 << 64) - 1


@pytest.fixture(params=["binding", "library"])
def fake(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[FakeDriver]:
    """A driver of two pretended H200, called through its binding or itself; 0 is current."""
    driver = FakeDriver()
    driver.stack.append(0)
    library = Library(driver) if request.param == "library" else None
    monkeypatch.setattr(driver_module, "_library", lambda binding: library)
    monkeypatch.setattr(driver_module, "driver", lambda: driver)
    monkeypatch.setattr(launch_module, "_loaded", {})
    driver_module.device_info.cache_clear()
    architecture.cache_clear()
    yield driver
    assert driver.stack == [0], "the caller's current device was not restored"
    assert driver.mode == GLOBAL, "the caller's capture mode was not restored"
    driver_module.device_info.cache_clear()
    architecture.cache_clear()


def buffer(pointer: int, device: int = 0) -> Array:
    return Array(None, Spec("cupy", "uint32", (4,), (4,), 4, device, False), pointer)


def copy(grid: Any = 2, shared_bytes: int = 0, **options: Any) -> Launch:
    return Launch(REVERSE.program(), grid, 64, shared_bytes, ("x", "y", 9), **options)


BUFFERS = {"x": buffer(0xAAAA_0000_1111), "y": buffer(0xBBBB), "unused": None}


# Arguments ----------------------------------------------------------------------------------------


def test_each_argument_arrives_in_its_parameter(fake: FakeDriver) -> None:
    run([copy((3, 2))], BUFFERS, stream=7)
    (seen,) = fake.launches
    assert seen.parameters == (0xAAAA_0000_1111, 0xBBBB, 9)
    assert (seen.grid, seen.block, seen.stream) == ((3, 2, 1), (64, 1, 1), 7)
    assert (seen.device, seen.cluster, seen.programmatic) == (0, None, False)


def test_numbers_have_the_bits_of_their_parameters_type(fake: FakeDriver) -> None:
    fake.parameters = 6
    numbers = (-2, (1 << 32) - 1, -(1 << 63), SLOT, -1.5)
    fixed = Launch(EVERY_TYPE.program(), 1, 32, 0, ("out", *numbers))
    named = Launch(EVERY_TYPE.program(), 1, 32, 0, ("out", "a", "b", "c", "d", "e"))
    run([fixed], {"out": buffer(0x10)})
    run([named], {"out": buffer(0x10)} | dict(zip("abcde", numbers, strict=True)))
    first, second = fake.launches
    assert first.parameters == second.parameters
    assert first.parameters[1] & 0xFFFFFFFF == 0xFFFFFFFE
    assert first.parameters[2:5] == (0xFFFFFFFF, 1 << 63, SLOT)
    assert first.parameters[5] == 0xBFC00000


def test_a_float_beyond_float32_is_infinity(fake: FakeDriver) -> None:
    fake.parameters = 6
    run([Launch(EVERY_TYPE.program(), 1, 32, 0, ("out", 0, 0, 0, 0, -1e300))], {"out": None})
    assert fake.launches[0].parameters == (0, 0, 0, 0, 0, 0xFF800000)


def test_none_is_a_null_pointer(fake: FakeDriver) -> None:
    run([copy()], {"x": None, "y": buffer(5)})
    assert fake.launches[0].parameters == (0, 5, 9)


def test_the_same_launch_takes_other_arrays_and_streams_each_time(fake: FakeDriver) -> None:
    launches = (copy(),)
    for i in range(5):
        run(launches, {"x": buffer(i), "y": buffer(10 * i)}, stream=i)
    assert [seen.parameters[:2] for seen in fake.launches] == [(i, 10 * i) for i in range(5)]
    assert [seen.stream for seen in fake.launches] == list(range(5))
    # Laid out once: what repeats costs nothing again.
    assert (fake.configs, len(fake.loaded)) == (1, 1)


def test_a_name_without_a_value_is_reported(fake: FakeDriver) -> None:
    with pytest.raises(KeyError, match=r"reverse needs a value for 'y'; got \['x'\]"):
        run([copy()], {"x": None})


def test_launches_of_a_chain_run_in_order(fake: FakeDriver) -> None:
    run([copy(1), copy(2), copy(3)], BUFFERS)
    assert [seen.grid[0] for seen in fake.launches] == [1, 2, 3]
    assert len(fake.loaded) == 1


def test_an_empty_grid_is_nothing_to_do(fake: FakeDriver) -> None:
    run([copy(0), copy((4, 0, 2))], {})
    prepared = prepare([copy(0)], 0)
    prepared(())
    assert prepared.names == ()
    assert (fake.launches, fake.loaded) == ([], [])


def test_clusters_and_programmatic_launches_are_asked_for(fake: FakeDriver) -> None:
    launch = Launch(CHAIN.program(), 4, 128, 0, ("x", "y", 9), cluster=(2, 1, 1), programmatic=True)
    run([launch], BUFFERS)
    run([copy(programmatic=True)], BUFFERS)
    assert [(s.cluster, s.programmatic) for s in fake.launches] == [
        ((2, 1, 1), True), (None, True),
    ]  # fmt: skip


# Prepared -----------------------------------------------------------------------------------------


def test_a_prepared_chain_takes_one_tuple_of_pointers(fake: FakeDriver) -> None:
    second = Launch(REVERSE.program(), 1, 32, 0, ("y", "z", "n"))
    prepared = prepare([copy(), copy(0), second], 1)
    assert prepared.names == ("x", "y", "z", "n")
    assert fake.launches == []
    prepared((1, 2, 3, 4), 8)
    prepared((5, 6, 7, 8))
    assert [seen.parameters for seen in fake.launches] == [
        (1, 2, 9), (2, 3, 4), (5, 6, 9), (6, 7, 8),
    ]  # fmt: skip
    assert [seen.stream for seen in fake.launches] == [8, 8, 0, 0]
    assert {seen.device for seen in fake.launches} == {1}


def test_threads_that_share_a_launch_do_not_mix_their_arguments(fake: FakeDriver) -> None:
    fake.slow = 0.0005
    prepared = prepare([copy()], 0)

    def work(mine: int) -> None:
        for i in range(20):
            prepared((mine, mine + i), mine)

    threads = [threading.Thread(target=work, args=(1000 * t,)) for t in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launches) == 120
    expected = {(1000 * t, 1000 * t + i, 9) for t in range(1, 7) for i in range(20)}
    assert {seen.parameters for seen in fake.launches} == expected
    assert all(seen.parameters[0] == seen.stream for seen in fake.launches)


# Bound --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2])
def test_bound_launches_go_to_their_device_whichever_is_current(
    fake: FakeDriver, count: int
) -> None:
    zero, one = (prepare([copy()] * count, device).bind((0xA0 + device, 0xB0)) for device in (0, 1))

    def both() -> None:
        before = list(fake.stack)
        for _ in range(2):
            zero(5)
            one(6)
        assert fake.stack == before

    both()
    fake.stack.append(1)
    both()
    fake.stack.pop()
    thread = threading.Thread(target=both)  # which has no context
    thread.start()
    thread.join()
    assert len(fake.launches) == 3 * 4 * count
    assert {(seen.device, seen.stream, seen.parameters) for seen in fake.launches} == {
        (0, 5, (0xA0, 0xB0, 9)), (1, 6, (0xA1, 0xB0, 9)),
    }  # fmt: skip
    # What a call reads is used again: one for each launch and device.
    assert fake.configs == 2


@pytest.mark.parametrize("before", [0, 3])
def test_the_only_device_is_asked_for_where_none_is_current(fake: FakeDriver, before: int) -> None:
    fake.count = 1
    bound = prepare([copy()], 0).bind((1, 2))
    asked: list[int] = []
    for _ in range(before):
        bound(3)
    fake.launches.clear()

    def work() -> None:
        bound(3)
        asked.append(len(fake.stack))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        bound(4)
    assert asked == [0, 0]
    assert [(seen.device, seen.stream) for seen in fake.launches] == [(0, 3), (0, 4)] * 2
    assert fake.configs == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_bound_launch_that_fails_says_so_and_may_be_made_again(
    fake: FakeDriver, count: int
) -> None:
    fake.count = count
    bound = prepare([copy()], 0).bind((1, 2))
    fake.broken["launch"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match=r"launching reverse on device 0.*INVALID_VALUE"):
        bound(3)
    assert fake.attempts == 1
    fake.broken.clear()
    bound(3)
    assert [seen.parameters for seen in fake.launches] == [(1, 2, 9)]
    assert fake.configs == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_bound_launch_goes_to_any_stream_any_number_of_times(
    fake: FakeDriver, count: int
) -> None:
    """Also to more streams than it keeps something for."""
    fake.count = count
    clustered = copy(cluster=(2, 1, 1))
    bound = [prepare([clustered], 0).bind((value, value + 1)) for value in (0x10, 0x20)]
    streams = [5, 6, 5, 5, 6, 6, *[stream for stream in range(12) for _ in range(4)], 1, 2]
    for stream in streams:
        for one in bound:
            one(stream)
            kept = inspect.getclosurevars(one).nonlocals.get("known", {})
            assert len(kept) <= _card._MOST_STREAMS
    for one in bound:
        one()
    streams.append(0)
    assert [seen.stream for seen in fake.launches] == [one for one in streams for _ in bound]
    assert [seen.parameters for seen in fake.launches] == [(16, 17, 9), (32, 33, 9)] * len(streams)
    assert {(seen.device, seen.grid, seen.cluster) for seen in fake.launches} == {
        (0, (2, 1, 1), (2, 1, 1))
    }
    assert fake.configs == 1


@pytest.mark.parametrize("count", [1, 2])
def test_a_bound_launch_that_fails_later_says_so(fake: FakeDriver, count: int) -> None:
    fake.count = count
    bound = prepare([copy()], 0).bind((1, 2))
    for _ in range(3):
        bound(3)
    fake.broken["launch"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError, match=r"launching reverse on device 0.*INVALID_VALUE"):
        bound(3)
    assert fake.attempts == 4
    fake.broken.clear()
    bound(3)
    assert [seen.parameters for seen in fake.launches] == [(1, 2, 9)] * 4


@pytest.mark.parametrize("count", [1, 2])
def test_threads_that_share_a_bound_launch_do_not_mix_their_streams(
    fake: FakeDriver, count: int
) -> None:
    fake.count, fake.slow = count, 0.0002
    bound = prepare([copy()], 0).bind((1, 2))

    def work(stream: int) -> None:
        for _ in range(10):
            bound(stream)
            bound(100)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = [one.stream for one in fake.launches]
    assert sorted(seen) == sorted([*range(6)] * 10 + [100] * 60)
    assert {one.parameters for one in fake.launches} == {(1, 2, 9)}


def test_nothing_is_launched_where_there_is_nothing_to_do(fake: FakeDriver) -> None:
    fake.stack.append(1)
    prepare([copy(0)], 0).bind(())(7)
    fake.stack.pop()
    assert fake.launches == []


def test_pointers_arrive_at_a_function_in_c_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ctypes passes them: what it is given are no numbers."""
    seen: list[tuple[Any, ...]] = []

    def launch(*pointers: Any) -> int:
        seen.append(pointers)
        return 0

    def current(place: int) -> int:
        ctypes.c_int.from_address(place).value = 5
        return 0

    pointer = ctypes.c_void_p
    made = (
        ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(launch),
        ctypes.CFUNCTYPE(ctypes.c_int, pointer)(current),
    )
    process = ctypes.CDLL(None)
    functions = [process._FuncPtr(ctypes.cast(one, pointer).value) for one in made]
    library = SimpleNamespace(cuLaunchKernelEx=functions[0], cuCtxGetDevice=functions[1])
    monkeypatch.setattr(driver_module, "driver", lambda: None)
    monkeypatch.setattr(driver_module, "_library", lambda binding: library)
    function = driver_module.LaunchFunction()
    config, high, here = real.CUlaunchConfig(), 0xFEDC_BA98_7654_3210, ctypes.c_int()
    assert function.call(*function.arguments(config, high, high + 1)) == 0
    assert seen == [(int(config.getPtr()), high, high + 1, None)]
    assert (function.ask(ctypes.byref(here)), here.value) == (0, 5)


# Devices ------------------------------------------------------------------------------------------


def test_a_device_that_is_not_current_is_switched_to_and_back(fake: FakeDriver) -> None:
    for _ in range(2):
        run([copy()], BUFFERS, device=1)
    run([copy()], BUFFERS, device=0)
    run([copy()], BUFFERS)
    assert [seen.device for seen in fake.launches] == [1, 1, 0, 0]
    # The code is loaded once for both.
    assert len(fake.loaded) == 1


def test_a_thread_without_a_context_gets_that_of_the_device(fake: FakeDriver) -> None:
    found: list[Any] = []

    def work() -> None:
        run([copy()], BUFFERS, device=1)
        run([copy()], BUFFERS)
        found.append(list(fake.stack))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]
    assert [seen.device for seen in fake.launches] == [1, 0]


def test_the_device_is_restored_after_an_error(fake: FakeDriver) -> None:
    prepared = prepare([copy()], 1)
    fake.broken["launch"] = real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(RuntimeError):
        prepared((1, 2))
    with pytest.raises(RuntimeError):
        run([copy()], BUFFERS, device=1)
    assert fake.stack == [0]


def test_the_architecture_is_that_of_the_device(fake: FakeDriver) -> None:
    assert architecture(1) == "sm_90a"
    fake.cc = (12, 0)
    assert architecture(0) == "sm_120a"
    with pytest.raises(ValueError, match=r"device must be below 2, the number of GPUs; got 2"):
        architecture(2)


def test_a_card_that_is_too_old_is_refused(fake: FakeDriver) -> None:
    fake.cc = (7, 5)
    with pytest.raises(UnsupportedError, match=r"7\.5"):
        run([copy()], BUFFERS)


def test_a_kernel_that_is_not_made_for_the_card_is_refused(fake: FakeDriver) -> None:
    fake.cc = (8, 0)
    with pytest.raises(UnsupportedError, match="chain is made for"):
        run([Launch(CHAIN.program(), 1, 128, 0, ("x", "y", 9))], BUFFERS)


# Shared memory ------------------------------------------------------------------------------------


def test_more_than_48_kilobytes_of_shared_memory_are_asked_for(fake: FakeDriver) -> None:
    run([copy(shared_bytes=48 * 1024)], BUFFERS)
    assert fake.attributes == []
    run([copy(shared_bytes=48 * 1024 + 16)], BUFFERS)
    run([copy(shared_bytes=200_000)], BUFFERS)
    assert fake.attributes == [(0, 48 * 1024 + 16), (0, 200_000)]
    assert [s.shared_bytes for s in fake.launches] == [48 * 1024, 48 * 1024 + 16, 200_000]


def test_the_limit_is_never_lowered_again(fake: FakeDriver) -> None:
    run([copy(shared_bytes=200_000)], BUFFERS)
    run([copy(shared_bytes=100_000)], BUFFERS)
    assert fake.attributes == [(0, 200_000)]
    run([copy(shared_bytes=100_000)], BUFFERS, device=1)
    assert fake.attributes[1:] == [(1, 100_000)]


def test_more_shared_memory_than_the_card_has_is_refused(fake: FakeDriver) -> None:
    with pytest.raises(ValueError, match=r"reverse needs 232449 bytes .* has 232448"):
        run([copy(shared_bytes=232_449)], BUFFERS)


# Capture ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [5, 0], ids=["captured", "legacy default"])
def test_building_while_a_stream_is_captured_is_an_error_that_says_so(
    stream: int, fake: FakeDriver
) -> None:
    fake.capturing = {5}
    message = r"kernel reverse is not built yet for sm_90a.*captured.*nvfp4 compile --shapes"
    with pytest.raises(RuntimeError, match=message):
        run([copy()], BUFFERS, stream=stream)
    with pytest.raises(RuntimeError, match=message):
        prepare([copy()], 1, stream=stream)
    assert (fake.loaded, fake.launches) == ([], [])
    fake.capturing = set()
    run([copy()], BUFFERS, stream=stream)
    assert len(fake.launches) == 1


def test_a_kernel_in_the_cache_is_loaded_during_capture_without_breaking_it(
    fake: FakeDriver,
) -> None:
    compiler.build(REVERSE.program(), "sm_90a")
    fake.capturing = {5}
    run([copy()], BUFFERS, stream=5)
    assert len(fake.launches) == 1
    assert fake.modes_at_load == [RELAXED, RELAXED]


def test_another_stream_may_build_while_one_is_captured(fake: FakeDriver) -> None:
    fake.capturing = {5}
    run([copy()], BUFFERS, stream=6)
    assert len(fake.launches) == 1


# What fails ---------------------------------------------------------------------------------------


def test_code_that_the_driver_refuses_names_driver_and_compilers(fake: FakeDriver) -> None:
    fake.broken["load"] = real.CUresult.CUDA_ERROR_INVALID_IMAGE
    with pytest.raises(ToolchainError, match=r"reverse for sm_90a \(CUDA_ERROR_INVALID_IMAGE\)"):
        run([copy()], BUFFERS)


def test_a_failed_launch_names_the_program_and_the_error(fake: FakeDriver) -> None:
    fake.broken["launch"] = real.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    message = r"launching reverse on device 0 \(grid \(2, 1, 1\)"
    with pytest.raises(RuntimeError, match=message) as caught:
        run([copy()], BUFFERS)
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (as the test wanted)" in str(caught.value)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("module", r"needs cuda-bindings; install it with: pip install 'nvfp4\[cuda13\]'"),
        ("library", r"needs NVIDIA's driver \(libcuda\).*nvfp4\.simulate"),
        ("device", "the CUDA driver does not start .*CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_a_machine_without_a_driver_is_told_what_is_missing(
    missing: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_found(flags: int) -> Any:
        raise RuntimeError("libcuda.so.1: cannot open shared object file")

    def no_device(flags: int) -> Any:
        return (real.CUresult.CUDA_ERROR_NO_DEVICE,)

    def name(status: Any) -> Any:
        return real.CUresult.CUDA_SUCCESS, status.name.encode()

    calls = {"module": None, "library": not_found, "device": no_device}[missing]
    module = calls and SimpleNamespace(cuInit=calls, cuGetErrorName=name)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", module)
    monkeypatch.setattr("cuda.bindings.driver", module, raising=False)
    if module is None:
        monkeypatch.delattr("cuda.bindings.driver")
    driver_module.driver.cache_clear()
    driver_module.device_info.cache_clear()
    architecture.cache_clear()
    try:
        with pytest.raises(ToolchainError, match=message):
            run([copy()], BUFFERS)
        with pytest.raises(ToolchainError, match=message):
            architecture(0)
    finally:
        driver_module.driver.cache_clear()


# Launches -----------------------------------------------------------------------------------------


def test_extents_are_numbers_or_up_to_three() -> None:
    assert copy(3).grid == (3, 1, 1)
    assert copy((3, 4)).grid == (3, 4, 1)
    assert copy([3, 4, 5]).grid == (3, 4, 5)
    for bad in ((), (1, 2, 3, 4), -1, (2, -1), 1.5):
        with pytest.raises((ValueError, TypeError)):
            copy(bad)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("x", "y"), "reverse takes 3 arguments; got 2"),
        (("x", "y", 1 << 63), "i64 cannot hold"),
        (("x", "y", 0.5), "i64 cannot hold 0.5"),
        (("x", 5, 1), "u32\\* takes the name of a buffer; got 5"),
    ],
)
def test_arguments_that_cannot_be_are_refused_when_the_launch_is_made(
    args: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Launch(REVERSE.program(), 1, 32, 0, args)


def test_a_block_that_breaks_the_launch_bound_is_refused() -> None:
    args = ("x", "y", 1, 5)
    assert Launch(program(), 1, (64, 2), 0, args).block == (64, 2, 1)
    with pytest.raises(ValueError, match=r"multiply runs 128 threads a block; got \(64, 1, 1\)"):
        Launch(program(), 1, 64, 0, args)


def test_launches_are_equal_by_what_they_do(fake: FakeDriver) -> None:
    one, other = copy(), copy()
    run([one], BUFFERS)
    assert one == other and hash(one) == hash(other)
    assert one != copy(3)
    assert "_cards" not in repr(one)


def test_importing_launch_touches_no_driver(cache_directory: Path) -> None:
    import subprocess

    code = (
        "import sys, nvfp4.launch, nvfp4.driver; "
        "print([m for m in ('cuda.bindings.driver', 'cuda.core', 'numba') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        cwd=Path(__file__).resolve().parents[2],
    )  # fmt: skip
    assert done.stdout == "[]\n"
