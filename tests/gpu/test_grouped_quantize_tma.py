"""The grouped quantiser whose scales leave by bulk stores, on the present card."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import golden
from nvfp4.bench.quantize_kernels import taking
from nvfp4.formats import NVFP4
from nvfp4.plans_tma import GROUPED_WAYS
from tests.kernels.test_grouped_quantize_tma import (  # noqa: F401
    compare,
    offsets,
    test_any_ranges,
    test_encode_scales,
    test_formats,
    test_more_columns_than_a_block_takes,
    test_offsets_that_no_host_could_refuse_harm_nobody,
    test_rows_are_gathered_and_those_out_of_range_are_zero,
    test_tile_starts_are_data_and_tiles_between_them_are_zero,
    values,
)

from .card import everything_built, quick_run, run  # noqa: F401

EVERY_WAY = pytest.mark.parametrize("way", GROUPED_WAYS)


@functools.cache
def large() -> tuple[np.ndarray, dict[str, Any], Any]:
    """Ranges of very different sizes, made once for all ways."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(0, 60, 256)
    sizes[7], sizes[200:210] = 1000, 0
    row_offsets = offsets(sizes)
    x = values(1, int(row_offsets[-1]) + 200, 2880)
    scales = np.exp2(rng.integers(-3, 9, 256)).astype(np.float32)
    ids = rng.permutation(256).astype(np.int32)
    ids[5::17] = -1
    options = {"row_offsets": row_offsets, "expert_ids": ids, "encode_scale": scales}
    return x, options, golden.grouped_quantize(x, NVFP4, **options)


@EVERY_WAY
def test_many_tiles(run: Any, way: str) -> None:  # noqa: F811
    x, options, expected = large()
    compare(run, way, x, expected=expected, **options)


def same(cupy: Any, q: Any, expected: Any) -> None:
    for part, right in zip((q.codes, q.scales), expected, strict=False):
        assert np.array_equal(cupy.asnumpy(part), right)


@EVERY_WAY
def test_a_captured_call_replays_to_the_same_bytes(cupy: Any, way: str) -> None:
    x, options, expected = large()
    bits = cupy.asarray(x.view(np.uint16)).view(x.dtype)
    on_card = {name: cupy.asarray(value) for name, value in options.items()}
    with taking(way):
        q = nvfp4.grouped_quantize(bits, "nvfp4", **on_card)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.runtime.deviceSynchronize()
        with stream:
            stream.begin_capture()
            nvfp4.grouped_quantize(bits, "nvfp4", out=q, **on_card)
            graph = stream.end_capture()
            for _ in range(3):
                q.codes.fill(0xA5)
                q.scales.fill(0xA5)
                graph.launch()
            stream.synchronize()
    same(cupy, q, expected)


def calls_behind_each_other(cupy: Any, way: str, times: int) -> None:
    """Each call reads what the one before wrote, and gives the golden bytes."""
    x, options, expected = large()
    source = cupy.asarray(x.view(np.uint16))
    kept, zeros = source.copy(), cupy.zeros_like(source)
    on_card = {name: cupy.asarray(value) for name, value in options.items()}
    bits = source.view(x.dtype)
    with taking(way):
        q = nvfp4.grouped_quantize(bits, "nvfp4", **on_card)
        same(cupy, q, expected)
        for _ in range(times):
            source[...] = zeros
            nvfp4.grouped_quantize(bits, "nvfp4", out=q, **on_card)
            source[...] = kept
            nvfp4.grouped_quantize(bits, "nvfp4", out=q, **on_card)
            same(cupy, q, expected)


def test_calls_behind_each_other_read_what_the_one_before_wrote(cupy: Any) -> None:
    """Programmatic launches: a kernel may start before the one ahead has ended, and must wait."""
    calls_behind_each_other(cupy, "k4", 20)
