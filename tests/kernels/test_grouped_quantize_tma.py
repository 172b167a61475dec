"""The grouped quantiser whose scales leave by bulk stores gives the golden bytes, in any order."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import golden, plans
from nvfp4.bench.quantize_kernels import taking
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, NVFP4
from nvfp4.layouts import allocated_tiles
from nvfp4.plans_tma import GROUPED_WAYS

from . import checks
from .checks import Out, assert_bytes
from .simulated import Simulated
from .test_grouped_quantize import HOSTILE, offsets, sane, values

SCHEDULES = ("round_robin", 1, 2)
SCALES = np.array([0.43, 2.0, np.nan, 3e30], np.float32)


class Bulk:
    """A runner of this kernel alone: what it is asked for is never the reference kernel."""

    reference_only = True

    def __init__(self, run: Any) -> None:
        self.run = run

    def __call__(
        self,
        plan: str,
        facts: Mapping[str, Any],
        buffers: Mapping[str, Any],
        outputs: Mapping[str, Out],
    ) -> dict[str, np.ndarray]:
        facts = {**facts, "reference": False}
        assert names(facts, getattr(self.run, "arch", "sm_90a")) == ["grouped_quantize_tma"]
        got: dict[str, np.ndarray] = self.run(plan, facts, buffers, outputs)
        return got


def names(facts: Mapping[str, Any], arch: str = "sm_90a") -> list[str]:
    return [one.program.kernel.name for one in plans.grouped_quantize(arch, **facts)]


def compare(run: Any, way: str, x: np.ndarray, fmt: Any = NVFP4, **options: Any) -> None:
    """Every byte of the results, in poisoned memory."""
    with taking(way):
        checks.grouped_quantize(Bulk(run), x, fmt, **options)


SIZES = {
    "one empty": ("k1", 96, [0]),
    "skewed": ("k1", 96, [130, 0, 7, 1]),
    "a whole tile": ("k4", 96, [128, 3]),
    "60": ("k2", 96, [1] + [0] * 58 + [2]),
    # More than a lane's run of 32 each.
    "1100": ("k4", 32, [0] * 700 + [1] + [0] * 398 + [1]),
}


@pytest.mark.parametrize(("way", "columns", "sizes"), SIZES.values(), ids=SIZES)
def test_any_ranges(run: Any, way: str, columns: int, sizes: list[int]) -> None:
    row_offsets = offsets(sizes)
    rows = int(row_offsets[-1]) + 2  # the last of which no range covers
    ids = np.arange(len(sizes), dtype=np.int32) % 4
    ids[1::3] = -1
    # 96 columns: the second tile of scales is half padding.
    compare(
        run,
        way,
        values(len(sizes), rows, columns),
        row_offsets=row_offsets,
        expert_ids=ids,
        encode_scale=SCALES,
    )


@pytest.mark.parametrize("way", GROUPED_WAYS)
def test_more_columns_than_a_block_takes(run: Any, way: str) -> None:
    columns = 64 * GROUPED_WAYS[way] + 16
    ids = np.array([1, -5, 0], np.int32)
    x = values(1, 6, columns)
    x[0, :16] = 0
    x[1, 3] = np.nan
    x[5, columns - 1] = -np.inf
    compare(run, way, x, row_offsets=offsets([2, 1, 3]), expert_ids=ids, encode_scale=SCALES)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("way", ["k1", "k4"])
def test_formats(run: Any, way: str, fmt: Any) -> None:
    dtype = ml_dtypes.bfloat16 if way == "k4" else np.float32
    x = values(3, 9, 160, dtype)
    compare(run, way, x, fmt, row_offsets=offsets([2, 0, 5]), gap=8)


@pytest.mark.parametrize("kind", ["none", "number", "one", "expert", "row"])
@pytest.mark.parametrize("fmt", [NVFP4, MXFP4], ids=lambda fmt: fmt.name)
def test_encode_scales(run: Any, fmt: Any, kind: str) -> None:
    row = np.random.default_rng(1).random((9, 1), np.float32)
    scales = {
        "none": None,
        "number": np.float32(0.43),
        "one": np.asarray(np.float32(3)),
        "expert": SCALES,
        "row": row,
    }
    compare(
        run,
        "k2",
        values(2, 9, 96),
        fmt,
        row_offsets=offsets([2, 1, 0, 3, 1]),
        expert_ids=np.array([3, 0, 1, -1, 2], np.int32),
        encode_scale=scales[kind],
    )


@pytest.mark.parametrize("fmt", [NVFP4, MXFP8_E4M3], ids=lambda fmt: fmt.name)
def test_rows_are_gathered_and_those_out_of_range_are_zero(run: Any, fmt: Any) -> None:
    wild = np.iinfo(np.int32)
    compare(
        run,
        "k4",
        values(4, 5, 64, np.float16),
        fmt,
        row_offsets=offsets([3, 0, 5], np.int64),
        expert_ids=np.array([1, 0, 0]),
        row_indices=np.array([4, 0, 0, -1, 5, 3, wild.max, wild.min, 2], np.int32),
    )


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE)
def test_offsets_that_no_host_could_refuse_harm_nobody(run: Any, bad: list[int]) -> None:
    rows, good = 9, sane(np.array(bad, np.int32), 9)
    x = values(7, rows, 32)
    codes, scales, decode = golden.grouped_quantize(
        x, NVFP4, row_offsets=good, tiles=allocated_tiles(rows, 3)
    )
    codes[: int(good[0])] = 0
    expected = codes, scales, decode
    compare(run, "k1", x, row_offsets=np.array(bad, np.int32), expected=expected)


@pytest.mark.parametrize("starts", [[1, 2, 3, 5], [6, 9, 2, 0]], ids=["in turn", "in any order"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint32])
def test_tile_starts_are_data_and_tiles_between_them_are_zero(
    run: Any, starts: list[int], dtype: Any
) -> None:
    compare(
        run,
        "k2",
        values(6, 140, 80),
        row_offsets=offsets([3, 0, 130, 1]),
        expert_ids=np.array([1, 2, 3, -1], np.int32),
        encode_scale=SCALES,
        tile_starts=np.array(starts, dtype),
        tiles=9,
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_any_order_of_threads_and_copies(arch: str, schedule: Any) -> None:
    compare(
        Simulated(arch, schedule=schedule),
        "k1",
        values(10, 11, 80),
        row_offsets=offsets([3, 0, 4, 2]),
        expert_ids=np.array([0, 1, 2, -1], np.int32),
        encode_scale=SCALES,
        tile_starts=np.array([1, 0, 3, 4], np.int32),
        tiles=6,
    )


@pytest.mark.parametrize("way", ["k1", "k4"])
def test_a_tile_of_128_rows_of_64_columns_simulates_within_two_seconds(way: str) -> None:
    x = values(11, 128, 64)
    started = time.process_time()
    compare(Simulated("sm_100a"), way, x, row_offsets=offsets([128]), encode_scale=SCALES)
    assert time.process_time() - started < 2


def test_the_public_function_takes_it() -> None:
    x = values(5, 9, 96)
    more = {"row_offsets": offsets([4, 3]), "encode_scale": SCALES[:2]}
    expected = nvfp4.grouped_quantize(x, "nvfp4", **more)
    out = nvfp4.grouped_quantize(np.zeros_like(x), "nvfp4", **more)
    for array in (out.codes, out.scales):
        array[...] = checks.POISON
    ran = []
    with taking("k4"), nvfp4.simulate("sm_90a") as machine, pytest.MonkeyPatch.context() as patch:
        run = machine.run
        patch.setattr(machine, "run", lambda *a, **k: (ran.append(k["name"]), run(*a, **k)))
        nvfp4.grouped_quantize(x, "nvfp4", out=out, **more)
    assert [name.partition("[")[0] for name in ran] == ["grouped_quantize_tma"]
    for name in ("codes", "scales", "decode_scale"):
        assert_bytes(name, np.asarray(getattr(out, name)), np.asarray(getattr(expected, name)))


def test_what_it_cannot_do_goes_to_another_kernel() -> None:
    facts: dict[str, Any] = {
        **{"format": "nvfp4", "dtype": "bfloat16", "input_rows": 9, "rows": 9, "columns": 96},
        **{"row_stride": 96, "groups": 3, "tiles": allocated_tiles(9, 3), "encode": "none"},
        **{"scale_layout": "tcgen", "scale_rounding": "rceil", "experts": None},
        **{"offsets_dtype": "int32", "ids_dtype": None, "indices_dtype": None},
        **{"starts_dtype": None, "aligned": True},
    }
    dense = {name: facts[name] for name in ("format", "dtype", "rows", "columns", "encode")}
    dense |= {"batches": 1, "row_stride": 96, "batch_stride": 0, "aligned": True}
    dense |= {"scale_layout": "tcgen", "scale_rounding": "rceil"}
    assert names(facts) == ["grouped_rows"], "the default"
    with taking("k4"):
        for arch in ("sm_90a", "sm_100a", "sm_103a", "sm_120a"):
            assert names(facts, arch) == ["grouped_quantize_tma"]
        assert names({**facts, "starts_dtype": "int32"}) == ["grouped_quantize_tma"]
        assert names(facts, "sm_80") == ["grouped_rows"]
        for other, kernel in (
            ({"scale_layout": "linear", "tiles": None}, "grouped_stream"),
            ({"aligned": False}, "grouped_quantize"),
            ({"encode": "row_amax"}, "grouped_quantize"),
            ({"rows": 0, "input_rows": 0}, "grouped_quantize"),
            ({"reference": True}, "grouped_quantize"),
        ):
            assert names({**facts, **other}) == [kernel], other
        (one,) = plans.quantize("sm_90a", **dense)
        assert one.program.kernel.name == "quantize_stream", "a way of the grouped one only"
    with taking("1"):
        assert names(facts) == ["grouped_rows"], "a way of the dense one only"
