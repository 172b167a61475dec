"""The grouped quantiser's kernel, byte for byte, on the simulated machine."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4 import golden
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, NVFP4
from nvfp4.layouts import allocated_tiles

from . import checks, vectors
from .checks import Out, assert_bytes, index_facts
from .simulated import Simulated


def offsets(sizes: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(dtype)


def values(seed: int, rows: int, columns: int, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-9, 9, (rows, 1)))).astype(
        dtype
    )


@pytest.mark.parametrize("case", vectors.sampled("grouped_quantize", 15_000, 3))
def test_every_vector_comes_out_byte_for_byte(quick_run: Simulated, case: Any) -> None:
    vectors.grouped_quantize(quick_run, case)


SIZES = {
    "no ranges": [],
    "one empty": [0],
    "all empty": [0, 0, 0],
    "one": [5],
    "uniform": [4, 4, 4],
    "skewed": [200, 0, 56, 192],
    "around a tile": [127, 128, 129, 1],
    "40": [0, 1] * 20,
    "60": [1] + [0] * 58 + [2],
    "1100": [0] * 700 + [3] + [0] * 398 + [1],
}


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_any_ranges(run: Simulated, sizes: list[int], layout: str) -> None:
    row_offsets = offsets(sizes)
    rows = int(row_offsets[-1]) + 3  # the last of which no range covers
    x = values(len(sizes), rows, 32)
    checks.grouped_quantize(run, x, NVFP4, row_offsets=row_offsets, scale_layout=layout)


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
def test_no_rows(run: Simulated, layout: str) -> None:
    for groups in (0, 1, 3):
        none = np.zeros((0, 64), np.float32)
        more = {"row_offsets": offsets([0] * groups), "scale_layout": layout}
        checks.grouped_quantize(run, none, MXFP4, **more)


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
def test_rows_of_an_input_that_has_none_are_zeros(run: Simulated, layout: str) -> None:
    none = np.zeros((0, 64), np.float32)
    for fmt in (NVFP4, MXFP8_E4M3):
        checks.grouped_quantize(
            run,
            none,
            fmt,
            row_offsets=offsets([2, 1]),
            row_indices=np.array([0, -1, 3], np.int32),
            scale_layout=layout,
        )


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("columns", [32, 96, 480])
def test_formats_and_columns(run: Simulated, columns: int, fmt: Any) -> None:
    x = values(columns, 9, columns, np.float32)
    checks.grouped_quantize(run, x, fmt, row_offsets=offsets([2, 0, 5]), gap=4)


KINDS = {
    NVFP4: ("none", "number", "one", "expert", "row", "row_amax"),
    MXFP4: ("none", "number", "one", "expert", "row"),
    MXFP8_E4M3: ("none", "number", "expert"),
}


@pytest.mark.parametrize(
    ("fmt", "kind"),
    [
        pytest.param(fmt, kind, id=f"{fmt.name}-{kind}")
        for fmt, kinds in KINDS.items()
        for kind in kinds
    ],
)
def test_encode_scales(run: Simulated, fmt: Any, kind: str) -> None:
    rng = np.random.default_rng(1)
    scales: dict[str, Any] = {
        "none": None,
        "number": np.float32(0.43),
        "one": np.asarray(np.float32(3)),
        # A dead expert's scale of 0, and what else cannot be one, counts as 1.
        "expert": np.array([0.43, 0, np.nan, 2, np.inf], np.float32),
        "row": rng.random((9, 1), np.float32),
    }
    checks.grouped_quantize(
        run,
        values(2, 9, 96),
        fmt,
        row_offsets=offsets([2, 1, 0, 3, 1]),
        expert_ids=np.array([3, 0, 1, -1, 2], np.int32),
        encode_scale=scales.get(kind, kind),
    )


def test_ids_from_the_number_of_experts_on_are_switched_off(run: Simulated) -> None:
    """Where they lie on a device no host can refuse them."""
    scale = np.array([0.3, 3], np.float32)
    for ids in ([1, 2, 0], [5, 1, -7], [2**31 - 1, -(2**31), 1]):
        checks.grouped_quantize(
            run,
            values(3, 6, 64),
            NVFP4,
            row_offsets=offsets([2, 2, 2]),
            expert_ids=np.array(ids, np.int32),
            encode_scale=scale,
        )
    # Without ids, range i is expert i, and there may be more ranges than experts.
    checks.grouped_quantize(
        run, values(3, 6, 64), NVFP4, row_offsets=offsets([2, 2, 2]), encode_scale=scale
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_rows_are_gathered_and_those_out_of_range_are_zero(run: Simulated, dtype: Any) -> None:
    wild = np.iinfo(dtype)
    indices = np.array([4, 0, 0, -1, 5, 3, wild.max, wild.min, 2], dtype)
    for kind in (None, "row_amax"):
        checks.grouped_quantize(
            run,
            values(4, 5, 64),
            NVFP4,
            row_offsets=offsets([3, 0, 5], np.int64),
            expert_ids=np.array([1, 0, 0], dtype),
            row_indices=indices,
            encode_scale=kind,
        )


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_offsets_of_any_dtype(run: Simulated, dtype: Any) -> None:
    checks.grouped_quantize(run, values(5, 9, 32), MXFP4, row_offsets=offsets([2, 0, 5], dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_tile_starts_are_data(run: Simulated, dtype: Any) -> None:
    """The rule of another library, and tiles in any order with some left free."""
    sizes = [3, 0, 130, 1]
    row_offsets = offsets(sizes)
    flashinfer = (row_offsets[:-1] + 127 * np.arange(4)) // 128
    for starts in (flashinfer, np.array([6, 9, 2, 0])):
        for kind in (None, np.array([1, 2, 3, 4], np.float32)):
            checks.grouped_quantize(
                run,
                values(6, 140, 32),
                NVFP4,
                row_offsets=row_offsets,
                expert_ids=np.array([1, 2, 3, -1], np.int32),
                encode_scale=kind,
                tile_starts=starts.astype(dtype),
                tiles=9,
            )


def sane(row_offsets: np.ndarray, rows: int) -> np.ndarray:
    """Offsets as the kernels take them, whatever they are: within 0..rows, and never decreasing."""
    return np.maximum.accumulate(np.clip(row_offsets.astype(np.int64), 0, rows))


HOSTILE = {
    "decreasing": [0, 5, 2, 9],
    "beyond the rows": [0, 4, 900, 2000],
    "negative": [0, -5, 3, 6],
    "not from 0": [2, 4, 4, 9],
    "nothing at both ends": [2, 4, 4, 6],
    "all beyond": [50, 60, 70, 80],
    "nothing but negative": [-4, -3, -2, -1],
    "wild": [7, -(2**31), 2**31 - 1, 3],
}


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE)
def test_offsets_that_no_host_could_refuse_harm_nobody(
    run: Simulated, bad: list[int], layout: str
) -> None:
    """Nothing is read or written out of bounds, and no byte of the result stays unwritten."""
    rows, row_offsets = 9, np.array(bad, np.int32)
    good = sane(row_offsets, rows)
    x = values(7, rows, 32)
    codes, scales, decode = golden.grouped_quantize(
        x, NVFP4, row_offsets=good, scale_layout=layout, tiles=allocated_tiles(rows, 3)
    )
    before = int(good[0])
    codes[:before] = 0
    if layout == "linear":
        scales[:before] = 0
    checks.grouped_quantize(
        run,
        x,
        NVFP4,
        row_offsets=row_offsets,
        scale_layout=layout,
        expected=(codes, scales, decode),
    )


@pytest.mark.parametrize("starts", [[0, 0, 0], [-1, 2, 900], [7, 3, -(2**31)]])
def test_tile_starts_out_of_range_write_nothing_outside(
    quick_run: Simulated, starts: list[int]
) -> None:
    row_offsets = offsets([2, 3, 4])
    x = values(8, 9, 32)
    codes, _, _ = golden.grouped_quantize(x, NVFP4, row_offsets=row_offsets)
    facts = {
        "format": "nvfp4",
        "dtype": "bfloat16",
        "input_rows": 9,
        "rows": 9,
        "columns": 32,
        "row_stride": 32,
        "groups": 3,
        "tiles": 4,
        "scale_layout": "tcgen",
        "scale_rounding": "rceil",
        "encode": "none",
        "experts": None,
        "aligned": False,
        **index_facts(row_offsets, None, None, np.array(starts, np.int32)),
    }
    buffers = {
        "x": x,
        "encode_scale": None,
        "row_offsets": row_offsets,
        "expert_ids": None,
        "row_indices": None,
        "tile_starts": np.array(starts, np.int32),
    }
    outputs = {
        "codes": Out(codes.shape, np.uint8),
        "scales": Out((4, 1, 32, 4, 4), np.uint8),
        "decode_scale": Out((3,), np.float32),
    }
    # Ranges that share tiles race for them; what is asked here is only that all stay inside.
    got = quick_run("grouped_quantize", facts, buffers, outputs)
    assert_bytes("codes", got["codes"], codes)


@pytest.mark.parametrize("block", [(1, 1, 1), (31, 1, 1), (1, 33, 1), (4, 9, 1)])
def test_blocks_of_any_number_of_threads(block: tuple[int, int, int]) -> None:
    row_offsets = offsets([3, 0, 2] + [0] * 40 + [1])
    tiles = allocated_tiles(8, 44)
    run = Simulated(block=block, grid=(tiles, 2, 1))
    checks.grouped_quantize(run, values(9, 8, 96), NVFP4, row_offsets=row_offsets)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_warps_changes_nothing(seed: int) -> None:
    checks.grouped_quantize(
        Simulated(schedule=seed),
        values(10, 9, 64),
        MXFP8_E4M3,
        row_offsets=offsets([3, 0, 4]),
        tile_starts=np.array([2, 0, 1], np.int32),
    )
