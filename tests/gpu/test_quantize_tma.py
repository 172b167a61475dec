"""The quantiser by tensor copies on the present card."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import golden
from nvfp4.bench.quantize_kernels import taking
from nvfp4.driver import current_device
from nvfp4.formats import NVFP4
from nvfp4.plans_tma import WAYS
from nvfp4.tensor_maps import _maps
from tests.kernels.test_quantize_tma import (  # noqa: F401
    compare,
    test_encode_scales,
    test_float16_and_rows_that_lie_apart,
    test_tails_of_rows_and_columns,
    values,
)

from .card import everything_built, quick_run, run  # noqa: F401

EVERY_WAY = pytest.mark.parametrize("way", WAYS)


@functools.cache
def large(shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
    """An input and the golden model's result, made once for all ways."""
    x = values(1, shape)
    return x, golden.quantize(x, NVFP4)


@EVERY_WAY
@pytest.mark.parametrize("shape", [(1025, 2880), (2048, 7168), (3, 65536 + 32)])
def test_many_tiles_a_block(run: Any, way: str, shape: tuple[int, int]) -> None:  # noqa: F811
    x, expected = large(shape)
    compare(run, x, way, expected=expected)


def copies(cupy: Any, count: int, shape: tuple[int, int]) -> list[tuple[Any, Any]]:
    """Inputs, and outputs full of poison."""
    made = []
    for seed in range(count):
        x = cupy.asarray(values(seed, shape).view(np.uint16)).view(values(0, (32, 32)).dtype)
        q = nvfp4.quantize(x, "nvfp4")
        for part in (q.codes, q.scales):
            part.fill(0xA5)
        made.append((x, q))
    return made


def same(cupy: Any, x: Any, q: Any) -> None:
    codes, scales, _ = golden.quantize(cupy.asnumpy(x), NVFP4)
    assert np.array_equal(cupy.asnumpy(q.codes), codes)
    assert np.array_equal(cupy.asnumpy(q.scales), scales)


@EVERY_WAY
def test_a_captured_call_makes_its_maps_outside_of_the_graph(cupy: Any, way: str) -> None:
    # Rows that no other test has: its arrays may lie where another's lay, and had maps.
    rows = 300 + [*WAYS].index(way)
    (x0, q0), *others = copies(cupy, 4, (rows, 2880))
    with taking(way):
        # The kernel is built and loaded by this call; the other maps are made in the capture.
        nvfp4.quantize(x0, "nvfp4", out=q0)
        before = len(_maps[current_device()])
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            stream.begin_capture()
            for x, q in others:
                nvfp4.quantize(x, "nvfp4", out=q)
            graph = stream.end_capture()
            assert len(_maps[current_device()]) > before
            for _ in range(3):
                for _, q in others:
                    q.codes.fill(0xA5)
                    q.scales.fill(0xA5)
                graph.launch()
            stream.synchronize()
        for x, q in [(x0, q0), *others]:
            same(cupy, x, q)


def test_maps_are_made_once_and_survive_many_others(cupy: Any) -> None:
    ((x, q),) = copies(cupy, 1, (300, 224))
    with taking("1"):
        nvfp4.quantize(x, "nvfp4", out=q)
        maps = _maps[current_device()]
        count = len(maps)
        nvfp4.quantize(x, "nvfp4", out=q)
        assert len(maps) == count
        for rows in range(1, 300):  # more maps than one piece of memory holds
            whole = nvfp4.quantize(x[:rows], "nvfp4")
            assert whole.shape == (rows, 224)
        assert len(maps) >= count + 2 * 299
        q.codes.fill(0xA5)
        q.scales.fill(0xA5)
        nvfp4.quantize(x, "nvfp4", out=q)
    same(cupy, x, q)


def test_two_streams_at_once(cupy: Any) -> None:
    pairs = copies(cupy, 8, (1025, 2880))
    cupy.cuda.runtime.deviceSynchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    with taking("2"):
        for _ in range(5):
            for i, (x, q) in enumerate(pairs):
                with streams[i % 2]:
                    nvfp4.quantize(x, "nvfp4", out=q)
        for stream in streams:
            stream.synchronize()
    for x, q in pairs:
        same(cupy, x, q)


def test_calls_behind_each_other_read_what_the_one_before_wrote(cupy: Any) -> None:
    """Programmatic launches: a kernel may start before the one ahead has ended, and must wait."""
    ((x, q),) = copies(cupy, 1, (8192, 2880))
    source = x.view(np.uint16)
    other = cupy.zeros_like(source)
    with taking("2"):
        for _ in range(20):
            source[...] = other
            nvfp4.quantize(x, "nvfp4", out=q)
            source[...] = 0x4000
            nvfp4.quantize(x, "nvfp4", out=q)
            assert int((q.codes != 0x77).sum()) == 0
