"""The grouped quantisers at memory speed give the golden bytes on the simulated machine."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import plans
from nvfp4.formats import FORMATS
from nvfp4.launch import run
from nvfp4.layouts import allocated_tiles, scale_shape
from nvfp4.tiling import Launches

SCALE = np.array([0.5, 2.0, 3.0], np.float32)
FAR = np.array([2.0**-100, 2.0**-60, 2.0**100], np.float32)


class Case(NamedTuple):
    """What is quantised, and how."""

    id: str
    format: str
    columns: int
    offsets: list[int]
    ids: list[int] | None = None
    encode: Any = None
    indices: list[int] | None = None
    layout: str = "tcgen"
    dtype: Any = ml_dtypes.bfloat16
    more: int = 1  # rows behind the ranges
    size: float = 1.0  # of what is quantised


CASES = [
    Case("off and empty ranges", "nvfp4", 64, [0, 7, 7, 20, 24], [2, 0, -1, 1], SCALE),
    Case("a range of two tiles", "nvfp4", 64, [0, 129, 199]),
    Case("linear", "mxfp4", 96, [0, 5, 9], [1, 0], layout="linear"),
    Case("gather", "mxfp8_e4m3", 64, [0, 3, 12], [0, -1], indices=[4, -1, 2, 9, 1] * 3),
    Case("two chunks", "nvfp4", 2064, [0, 3, 4], [0, 1], SCALE, dtype=np.float32),
    Case("e5m2", "mxfp8_e5m2", 96, [0, 0, 0, 2], dtype=np.float16),
    Case("many ranges", "nvfp4", 32, [0, *np.cumsum([1, 0, 2, 0] * 9).tolist()]),
    Case("more ranges than a round has", "mxfp4", 32, [0] * 270 + [2, 2, 5]),
    Case("a number", "mxfp4", 32, [0, 2, 4], encode=0.43),
    Case("by row", "nvfp4", 32, [0, 2, 3], [0, -1], np.array([[1], [2], [3], [4.0]], np.float32)),
    Case("no rows in any range", "nvfp4", 32, [0, 0, 0, 0]),
    Case("rows of none in two tiles", "nvfp4", 32, [0, 3], more=140),
    Case("encode scales far apart", "nvfp4", 32, [0, 2, 4, 6], encode=FAR),
    Case("as large as encode scales are small", "nvfp4", 32, [0, 2], encode=FAR[:1], size=2.0**106),
]


def data(rows: int, columns: int, dtype: Any) -> np.ndarray:
    rng = np.random.default_rng(rows * 1000 + columns)
    x = rng.standard_normal((rows, columns)) * rng.choice([1e-3, 1.0, 100.0], size=(rows, 1))
    x = x.astype(dtype)
    x[0, :16] = 0
    x[-1, 3] = np.nan
    x[rows // 2, 5] = -np.inf
    return x


WAYS = {
    "whole tiles": {"_FEW_GROUPED_PIECES": 0, "_ENOUGH_BLOCKS": 0},
    "shared tiles": {"_FEW_GROUPED_PIECES": 0, "_ENOUGH_BLOCKS": 1 << 30},
    "a piece a thread": {},
    "two pieces a thread": {"FEW_PIECES": 0},
}


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plans take one of the ways."""
    for name, value in WAYS[way].items():
        monkeypatch.setattr(plans, name, value)
    plans.grouped_quantize.cache_clear()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bytes_are_the_golden_ones(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(way, monkeypatch)
    rows = len(case.indices) if case.indices else case.offsets[-1] + case.more
    x = data(5 if case.indices else rows, case.columns, case.dtype)
    x *= np.array(case.size, case.dtype)
    options = {
        "row_offsets": np.array(case.offsets, np.int32),
        "expert_ids": None if case.ids is None else np.array(case.ids, np.int32),
        "row_indices": None if case.indices is None else np.array(case.indices, np.int32),
        "encode_scale": case.encode,
        "scale_layout": case.layout,
    }
    expected = nvfp4.grouped_quantize(x, case.format, **options)
    out = nvfp4.grouped_quantize(x, case.format, **options)
    for part in (out.codes, out.scales):
        part[...] = 0xAA
    with nvfp4.simulate():
        nvfp4.grouped_quantize(x, case.format, out=out, **options)
    np.testing.assert_array_equal(out.codes, expected.codes)
    np.testing.assert_array_equal(out.scales, expected.scales)
    np.testing.assert_array_equal(out.decode_scale, expected.decode_scale)
    plans.grouped_quantize.cache_clear()


def planned(arch: str, rows: int, columns: int, groups: int, **other: Any) -> Launches:
    """The plan of nvfp4 codes of bfloat16 rows, with tcgen scales."""
    facts = {
        **{"format": "nvfp4", "dtype": "bfloat16", "input_rows": rows, "rows": rows},
        **{"columns": columns, "row_stride": columns, "groups": groups},
        **{"tiles": allocated_tiles(rows, groups), "scale_layout": "tcgen"},
        **{"scale_rounding": "rceil", "encode": "none", "experts": None},
        **{"offsets_dtype": "int32", "ids_dtype": None, "indices_dtype": None},
        **{"starts_dtype": None, "aligned": True},
    }
    return plans.grouped_quantize(arch, **{**facts, **other})


@pytest.mark.parametrize(
    "way, blocks",
    [
        ("whole tiles", [10, 8, 8, 10]),
        ("a piece a thread", [12, 12, 12, 12]),
        ("two pieces a thread", [12, 10, 10, 10]),
    ],
)
def test_blocks_are_as_many_as_have_the_registers_that_they_need(
    way: str, blocks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    resident = [
        planned(arch, 9, 32, 3)[0].program.blocks_per_sm
        for arch in ("sm_90a", "sm_120a", "sm_121a", "sm_80")
    ]
    plans.grouped_quantize.cache_clear()
    assert resident == blocks


def test_calls_take_more_rows_at_once_the_more_pieces_there_are() -> None:
    def taken(rows: int, **other: Any) -> tuple[str, Any]:
        program = planned("sm_90a", rows, 4096, 32, **other)[0].program
        return program.kernel.name, dict(program.constants).get("PIECES")

    assert taken(8) == taken(400_000 // 256) == ("grouped_rows", 1)
    assert taken(400_000 // 256 + 1) == taken(2_000_000 // 256) == ("grouped_rows", 2)
    assert taken(2_000_000 // 256 + 1) == ("grouped_stream", None)
    assert taken(8, tiles=None, scale_layout="linear") == ("grouped_stream", None)


@pytest.mark.parametrize(
    "offsets, meant",
    [
        ([0, 5, 3, 8], [0, 5, 5, 8]),
        ([2, 4, 6, 6], [2, 4, 6, 6]),
        ([0, 3, 900, 7], [0, 3, 9, 9]),
        ([-4, 3, 6, 8], [0, 3, 6, 8]),
    ],
    ids=["decreasing", "not from 0", "beyond the rows", "negative"],
)
@pytest.mark.parametrize("way", WAYS)
def test_offsets_that_no_host_has_checked_do_no_harm(
    offsets: list[int], meant: list[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(way, monkeypatch)
    rows, columns, fmt = 9, 32, FORMATS["nvfp4"]
    x = data(rows, columns, ml_dtypes.bfloat16)
    groups = len(offsets) - 1
    tiles = allocated_tiles(rows, groups)
    launches = planned("sm_90a", rows, columns, groups)
    kernel = "grouped_rows" if "thread" in way else "grouped_stream"
    assert [launch.program.kernel.name for launch in launches] == [kernel]
    codes = np.full((rows, columns // 2), 0xAA, np.uint8)
    scales = np.full(scale_shape(fmt, (tiles * 128, columns), "tcgen"), 0xAA, np.uint8)
    decode = np.full(groups, np.nan, np.float32)
    buffers = {
        "x": x.view(np.uint16),
        "codes": codes,
        "scales": scales,
        "row_offsets": np.array(offsets, np.int32),
        "expert_ids": None,
        "row_indices": None,
        "tile_starts": None,
        "encode_scale": None,
        "decode_scale": decode,
    }
    with nvfp4.simulate() as machine:
        from nvfp4.arrays import as_array

        arrays = {
            name: None if value is None else as_array(value, name)
            for name, value in buffers.items()
        }
        run(launches, arrays, machine=machine)
    wanted = np.zeros_like(codes)
    for low, high in itertools.pairwise(meant):
        if high > low:
            wanted[low:high] = nvfp4.quantize(x[low:high], "nvfp4").codes
    np.testing.assert_array_equal(codes, wanted)
    np.testing.assert_array_equal(decode, np.ones(groups, np.float32))
    used = sum(-(-(high - low) // 128) for low, high in itertools.pairwise(meant))
    assert not scales[used:].any()
    plans.grouped_quantize.cache_clear()
