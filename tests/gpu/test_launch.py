"""Launching on the card. From the driver's side, without a card: tests/compile/test_launch.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvfp4 import compile as compiler
from nvfp4 import driver, kernels
from nvfp4.architectures import architectures_of
from nvfp4.arrays import as_array
from nvfp4.launch import Launch, architecture, prepare, run

from ..compile.programs import (
    CHAIN,
    CLUSTERS,
    EVERY_TYPE,
    FAR,
    REVERSE,
    THREADS,
    program,
)

POISON = 0xDEADBEEF
ROOT = Path(__file__).resolve().parents[2]


def buffers(**arrays: Any) -> dict[str, Any]:
    return {name: as_array(array, name) for name, array in arrays.items()}


def poisoned(cupy: Any, count: int) -> Any:
    return cupy.full(count, POISON, cupy.uint32)


def multiply(count: int, factor: int = 3, bias: int = 7) -> Launch:
    grid = -(-count // THREADS)
    return Launch(program(factor), grid, THREADS, 0, ("x", "y", bias, count))


def expected(x: np.ndarray, factor: int = 3, bias: int = 7) -> np.ndarray:
    return x * np.uint32(factor) + np.uint32(bias)


# What arrives -------------------------------------------------------------------------------------


def test_a_kernel_writes_what_it_should_and_nothing_else(cupy: Any) -> None:
    count = 100_003
    x = np.random.default_rng(1).integers(0, 1 << 32, count, dtype=np.uint32)
    y = poisoned(cupy, count + 1000)
    run([multiply(count)], buffers(x=cupy.asarray(x), y=y))
    seen = y.get()
    assert np.array_equal(seen[:count], expected(x))
    assert (seen[count:] == POISON).all()


def test_numbers_of_every_type_arrive(cupy: Any) -> None:
    numbers = (-2, (1 << 32) - 5, -(1 << 63) + 9, (1 << 63) - 3, -1.5)
    for args, more in (
        (("out", *numbers), {}),
        (("out", "a", "b", "c", "d", "e"), dict(zip("abcde", numbers, strict=True))),
    ):
        out = cupy.full(6, -7, cupy.int64)
        run([Launch(EVERY_TYPE.program(), 1, 32, 0, args)], buffers(out=out) | more)
        assert out.get().tolist() == [*numbers[:4], 1, -7]


def test_two_axes_of_threads_and_three_of_blocks_run(cupy: Any) -> None:
    x = cupy.arange(64, dtype=cupy.uint32)
    y = poisoned(cupy, 128)
    run([Launch(program(2), (1, 2, 2), (64, 2), 0, ("x", "y", 0, 64))], buffers(x=x, y=y))
    assert np.array_equal(y.get()[:64], 2 * np.arange(64))
    assert (y.get()[64:] == POISON).all()


def test_an_empty_grid_writes_nothing(cupy: Any) -> None:
    y = poisoned(cupy, 8)
    run([Launch(program(), 0, THREADS, 0, ("x", "y", 1, 8))], buffers(x=y, y=y))
    assert (y.get() == POISON).all()


# Shared memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kilobytes", [1, 48, 49, 99, 160, 227])
def test_shared_memory_is_there_to_its_last_byte(kilobytes: int, cupy: Any) -> None:
    limit = driver.device_info(0).shared_bytes
    if kilobytes * 1024 > limit:
        with pytest.raises(ValueError, match=f"has {limit}"):
            prepare([Launch(FAR.program(), 1, THREADS, kilobytes * 1024, ("x", "y", 0))], 0)
        return
    x = np.random.default_rng(kilobytes).integers(0, 1 << 32, THREADS, dtype=np.uint32)
    y = poisoned(cupy, THREADS)
    offset = kilobytes * 1024 - 4 * THREADS
    launch = Launch(FAR.program(), 1, THREADS, kilobytes * 1024, ("x", "y", offset))
    run([launch], buffers(x=cupy.asarray(x), y=y))
    assert np.array_equal(y.get(), x[::-1])


def test_more_shared_memory_than_the_card_has_is_refused() -> None:
    limit = driver.device_info(0).shared_bytes
    with pytest.raises(ValueError, match=f"reverse needs {limit + 1} bytes .* has {limit}"):
        prepare([Launch(REVERSE.program(), 1, 32, limit + 1, ("x", "y", 1))], 0)


# Clusters and programmatic launches ---------------------------------------------------------------


def test_blocks_of_a_cluster_know_each_other(cupy: Any) -> None:
    for size in (1, 2, 4, 8):
        ranks, sizes = poisoned(cupy, 16), poisoned(cupy, 16)
        launch = Launch(CLUSTERS.program(), 16, 32, 0, ("ranks", "sizes"), cluster=size)
        run([launch], buffers(ranks=ranks, sizes=sizes))
        assert ranks.get().tolist() == [i % size for i in range(16)]
        assert sizes.get().tolist() == [size] * 16


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "captured"])
def test_a_programmatic_chain_is_in_order(captured: bool, cupy: Any) -> None:
    count, length = 1 << 20, 40
    x = np.random.default_rng(2).integers(0, 1 << 32, count, dtype=np.uint32)
    names = ["a", "b"]
    launches = [
        Launch(
            CHAIN.program(), count // THREADS, THREADS, 0,
            (names[i % 2], names[(i + 1) % 2], count), programmatic=True,
        )
        for i in range(length)
    ]  # fmt: skip
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        a, b = cupy.asarray(x), poisoned(cupy, count)
        prepared = prepare(launches, 0)
        pointers = [{"a": a, "b": b}[name].data.ptr for name in prepared.names]
        if captured:
            stream.begin_capture()
            prepared(pointers, stream.ptr)
            stream.end_capture().launch(stream)
        else:
            prepared(pointers, stream.ptr)
    stream.synchronize()
    assert np.array_equal(a.get(), x + np.uint32(length))


# Streams and graphs -------------------------------------------------------------------------------


def test_a_launch_waits_for_its_stream_and_for_no_other(cupy: Any) -> None:
    """The input is written on the same stream just before, by a copy that takes long."""
    count = 1 << 24
    stream = cupy.cuda.Stream(non_blocking=True)
    host = cupy.cuda.alloc_pinned_memory(4 * count)
    values = np.frombuffer(host, np.uint32, count)
    values[:] = np.random.default_rng(3).integers(0, 1 << 32, count, dtype=np.uint32)
    x, y = poisoned(cupy, count), poisoned(cupy, count)
    cupy.cuda.runtime.deviceSynchronize()
    launch = multiply(count)
    prepare([launch], 0)
    x.set(values, stream=stream)
    run([launch], buffers(x=x, y=y), stream=stream.ptr)
    stream.synchronize()
    assert np.array_equal(y.get(), expected(values))


def test_a_captured_launch_reads_new_values_at_each_replay(cupy: Any) -> None:
    count = 1000
    stream = cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.zeros(count, cupy.uint32), poisoned(cupy, count)
    launches, named = (multiply(count),), buffers(x=x, y=y)
    run(launches, named, stream=stream.ptr)
    with stream:
        stream.begin_capture()
        run(launches, named, stream=stream.ptr)
        graph = stream.end_capture()
        for seed in (4, 5):
            values = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
            x.set(values)
            y.fill(POISON)
            graph.launch(stream)
            stream.synchronize()
            assert np.array_equal(y.get(), expected(values))


def test_building_during_capture_raises_and_the_capture_goes_on(cupy: Any) -> None:
    count = 64
    stream = cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.arange(count, dtype=cupy.uint32), poisoned(cupy, count)
    built, unbuilt = multiply(count), multiply(count, factor=11)
    named = buffers(x=x, y=y)
    run([built], named, stream=stream.ptr)
    stream.synchronize()
    y.fill(POISON)
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        with pytest.raises(RuntimeError, match=r"multiply\[FACTOR=11\] is not built yet.*captured"):
            run([unbuilt], named, stream=stream.ptr)
        run([built], named, stream=stream.ptr)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(y.get(), expected(np.arange(count, dtype=np.uint32)))


def test_a_kernel_that_is_only_on_disk_can_be_launched_first_in_a_capture(cupy: Any) -> None:
    count = 64
    compiler.build(program(13), architecture(0))
    stream = cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.arange(count, dtype=cupy.uint32), poisoned(cupy, count)
    cupy.cuda.runtime.deviceSynchronize()
    named = buffers(x=x, y=y)
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        run([multiply(count, factor=13)], named, stream=stream.ptr)
        graph = stream.end_capture()
        assert (y.get() == POISON).all()
        graph.launch(stream)
    stream.synchronize()
    assert np.array_equal(y.get(), expected(np.arange(count, dtype=np.uint32), 13))


# Devices and threads ------------------------------------------------------------------------------


def test_every_device_can_be_used_whichever_is_current(cupy: Any, cards: range) -> None:
    """On a machine of one GPU this says little; it is for one of several."""
    launch = multiply(1000)
    for target in cards:
        for current in cards:
            with cupy.cuda.Device(target):
                x = cupy.arange(1000, dtype=cupy.uint32)
                y = poisoned(cupy, 1000)
                stream = cupy.cuda.Stream(non_blocking=True)
                cupy.cuda.runtime.deviceSynchronize()
            with cupy.cuda.Device(current):
                run([launch], buffers(x=x, y=y), stream=stream.ptr, device=target)
                assert cupy.cuda.runtime.getDevice() == current
            with cupy.cuda.Device(target):
                stream.synchronize()
                assert np.array_equal(y.get(), expected(np.arange(1000, dtype=np.uint32)))


def test_large_shared_memory_works_on_every_device(cupy: Any, cards: range) -> None:
    size = driver.device_info(0).shared_bytes
    launch = Launch(FAR.program(), 1, THREADS, size, ("x", "y", size - 4 * THREADS))
    for target in cards:
        with cupy.cuda.Device(target):
            x, y = cupy.arange(THREADS, dtype=cupy.uint32), poisoned(cupy, THREADS)
            cupy.cuda.runtime.deviceSynchronize()
        run([launch], buffers(x=x, y=y), device=target)
        with cupy.cuda.Device(target):
            assert np.array_equal(y.get(), np.arange(THREADS)[::-1])


def test_a_thread_that_never_touched_cuda_can_launch(cupy: Any, cards: range) -> None:
    target = cards[-1]
    with cupy.cuda.Device(target):
        x, y = cupy.arange(500, dtype=cupy.uint32), poisoned(cupy, 500)
        cupy.cuda.runtime.deviceSynchronize()
        named = buffers(x=x, y=y)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            run([multiply(500)], named, device=target)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    with cupy.cuda.Device(target):
        cupy.cuda.runtime.deviceSynchronize()
        assert np.array_equal(y.get(), expected(np.arange(500, dtype=np.uint32)))


def test_threads_share_a_launch_without_mixing_their_arrays(cupy: Any) -> None:
    count, repeats = 2048, 200
    launch = multiply(count)
    prepared = prepare([launch], 0)
    wrong: list[int] = []

    def work(seed: int) -> None:
        values = np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            x = cupy.asarray(values)
            for _ in range(repeats):
                y = poisoned(cupy, count)
                named = {"x": x.data.ptr, "y": y.data.ptr}
                prepared([named[name] for name in prepared.names], stream.ptr)
            if not np.array_equal(y.get(stream=stream), expected(values)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# Errors and the cache -----------------------------------------------------------------------------


def test_a_launch_that_the_driver_refuses_says_which_it_was() -> None:
    prepared = prepare([Launch(REVERSE.program(), (1, 70_000), 32, 0, ("x", "y", 1))], 0)
    with pytest.raises(RuntimeError, match=r"launching reverse on device 0 .*CUDA_ERROR_INVALID"):
        prepared((0, 0))


def test_a_process_whose_kernels_are_on_disk_imports_no_compiler(
    cupy: Any, cache_directory: Path
) -> None:
    compiler.build(program(5), architecture(0))
    code = """
        import sys, time
        import cupy, numpy as np
        x = cupy.arange(100, dtype=cupy.uint32)
        y = cupy.zeros(100, cupy.uint32)
        start = time.perf_counter()
        from nvfp4.arrays import as_array
        from nvfp4.launch import Launch, run
        from tests.compile.programs import program
        launch = Launch(program(5), 1, 128, 0, ("x", "y", 1, 100))
        run([launch], {"x": as_array(x, "x"), "y": as_array(y, "y")})
        took = time.perf_counter() - start
        assert np.array_equal(y.get(), 5 * np.arange(100) + 1)
        print([m for m in ("numba", "llvmlite", "cuda.core") if m in sys.modules], took)
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    modules, _, seconds = done.stdout.rpartition(" ")
    print(f"first launch from the disk cache: {float(seconds) * 1e3:.0f} ms")
    assert modules == "[]"


def test_the_card_loads_every_kernel_that_is_made_for_it(cupy: Any) -> None:
    """Also what registers its blocks need: a kernel of more than the card has does not load."""
    arch = architecture(0)
    refused = []
    for name, kernel in kernels.KERNELS.items():
        if arch not in architectures_of(kernel):
            continue
        made = kernels.variants(name)[0]
        binary = compiler.build(made, arch)
        with driver.on_device(0):
            loaded = driver.load(binary)
            driver.reserve_shared(loaded, 0, 0)
        if compiler.faults(binary):
            refused.append((made.label, compiler.faults(binary)))
    assert refused == []
