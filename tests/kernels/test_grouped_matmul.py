"""The naive grouped product's kernel on the simulated machine, bit for bit the golden model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvfp4 import epilogues
from nvfp4.epilogue import Epilogue
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from nvfp4.layouts import allocated_tiles

from . import checks, vectors
from .checks import Out, index_facts, quantized
from .simulated import Simulated
from .test_matmul import gated, plain, rng


def offsets(sizes: Any, dtype: Any = np.int32) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))]).astype(dtype)


@pytest.mark.parametrize("case", vectors.sampled("grouped_matmul", 20_000, 4))
def test_every_vector(quick_run: Simulated, case: Any) -> None:
    vectors.grouped_matmul(quick_run, case)


SIZES = {
    "no ranges": [],
    "all empty": [0, 0, 0],
    "uniform": [2, 2, 2],
    "skewed": [130, 0, 1],
    "40": [0, 1] * 20,
    "1100": [0] * 700 + [3] + [0] * 399,
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_any_ranges(run: Simulated, sizes: list[int]) -> None:
    """Rows that no range covers, and those of experts that are not there, are 0."""
    row_offsets = offsets(sizes)
    rows = int(row_offsets[-1]) + 3
    b = quantized(rng(1), MXFP4, (3, 3, 32))
    ids = np.random.default_rng(2).integers(-1, 4, len(sizes)).astype(np.int32)
    for expert_ids in (None, ids):
        more = {"row_offsets": row_offsets, "expert_ids": expert_ids}
        checks.grouped_matmul(run, plain(3, rows, 32), b, **more)


@pytest.mark.parametrize("b", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("a", FORMATS.values(), ids=lambda f: f.name)
def test_every_pair_of_formats(run: Simulated, a: BlockFormat, b: BlockFormat) -> None:
    row_offsets = offsets([2, 0, 3])
    left = quantized(rng(4), a, (6, 64), row_offsets=row_offsets).poison_padding(0x7F)
    right = quantized(rng(5), b, (3, 5, 64)).poison_padding(0xFF)
    for off in (0, 1):
        checks.grouped_matmul(run, left, right, row_offsets=row_offsets, off=off)


@pytest.mark.parametrize("alpha", ["number", "array", "expert"])
@pytest.mark.parametrize("of_b", ["one", "expert", "row"])
@pytest.mark.parametrize("of_a", ["group", "row"])
def test_factors(run: Simulated, of_a: str, of_b: str, alpha: str) -> None:
    row_offsets, ids = offsets([2, 1, 0, 3]), np.array([2, -1, 0, 1], np.int64)
    number = np.float32(0.7)
    alphas = {"number": number, "array": np.asarray(number), "expert": rng(6).random(3, np.float32)}
    scale_b: Any = {
        "one": np.float32(3),
        "expert": rng(7).random(3, np.float32) + np.float32(0.1),
        "row": rng(8).random((3, 5, 1), np.float32) + np.float32(0.1),
    }[of_b]
    scale_a: Any = "row_amax" if of_a == "row" else rng(9).random(3, np.float32) + np.float32(0.1)
    ranges = {"row_offsets": row_offsets, "expert_ids": ids}
    checks.grouped_matmul(
        run,
        quantized(rng(10), NVFP4, (7, 32), encode_scale=scale_a, **ranges),
        quantized(rng(11), NVFP4, (3, 5, 32), encode_scale=scale_b),
        alpha=alphas[alpha],
        **ranges,
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("kind", ["plain", "quantised", "by row"])
def test_rows_are_gathered(run: Simulated, kind: str, dtype: Any) -> None:
    """A row quantised once serves several experts; a row that is not there gives 0."""
    wild = np.iinfo(dtype)
    indices = np.array([4, 0, 0, -1, 5, 3, wild.max, wild.min, 2], dtype)
    scale = rng(12).random((5, 1), np.float32) if kind == "by row" else None
    a: Any = plain(13, 5, 32)
    if kind != "plain":
        a = quantized(rng(14), NVFP4, (5, 32), scale_layout="linear", encode_scale=scale)
    checks.grouped_matmul(
        run,
        a,
        quantized(rng(15), MXFP8_E4M3, (2, 3, 32)),
        row_offsets=offsets([3, 0, 5], dtype),
        expert_ids=np.array([1, 0, 0], dtype),
        row_indices=indices,
        gap=5 if kind == "plain" else 0,
    )


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_tile_starts_of_a_are_data(run: Simulated, dtype: Any) -> None:
    row_offsets = offsets([3, 0, 130, 1], dtype)
    starts = np.array([3, 9, 1, 0], dtype)
    a = quantized(
        rng(16), NVFP4, (136, 32), row_offsets=row_offsets, tile_starts=starts, tiles=7
    ).poison_padding(0x7F)
    b = quantized(rng(17), NVFP4, (4, 2, 32))
    checks.grouped_matmul(run, a, b, row_offsets=row_offsets)


def test_linear_scales_of_a(run: Simulated) -> None:
    row_offsets = offsets([3, 0, 2])
    a = quantized(rng(18), MXFP4, (6, 64), scale_layout="linear", row_offsets=row_offsets)
    checks.grouped_matmul(run, a, quantized(rng(19), NVFP4, (3, 5, 64)), row_offsets=row_offsets)


@pytest.mark.parametrize("name", ["bias", "expert bias", "residual", "halves", "neighbours"])
def test_epilogues_know_row_column_and_expert(run: Simulated, name: str) -> None:
    made = {
        "bias": lambda: epilogues.bias(rng(20).random(6, np.float32)),
        "expert bias": lambda: epilogues.bias(rng(21).random((3, 6), np.float32)),
        "residual": lambda: epilogues.residual_add(rng(22).random((8, 6), np.float32)),
        "halves": lambda: Epilogue(gated, pair=True),
        "neighbours": lambda: Epilogue(gated, pair=True, halves=False),
    }
    checks.grouped_matmul(
        run,
        plain(23, 8, 32),
        quantized(rng(24), MXFP4, (3, 6, 32)),
        row_offsets=offsets([2, 0, 1, 3]),
        expert_ids=np.array([2, 1, -1, 0]),
        epilogue=made[name](),
        out_dtype="bfloat16",
    )


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_results_are_quantised_in_the_kernel(run: Simulated, fmt: BlockFormat, layout: str) -> None:
    checks.grouped_matmul(
        run,
        plain(25, 7, 32),
        quantized(rng(26), NVFP4, (3, fmt.block, 32)),
        row_offsets=offsets([2, 0, 1, 3]),
        expert_ids=np.array([2, 1, -1, 0]),
        out_dtype=fmt.name,
        out_layout=layout,
    )


def test_quantised_results_where_there_is_nothing_to_multiply(run: Simulated) -> None:
    b = quantized(rng(27), NVFP4, (2, 32, 32))
    for sizes, rows in (([], 0), ([], 3), ([0, 0], 0), ([0, 0], 2)):
        row_offsets = offsets(sizes)
        more = {"row_offsets": row_offsets, "out_dtype": "mxfp4"}
        checks.grouped_matmul(run, plain(28, rows, 32), b, **more)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tile_starts_of_a_quantised_result_are_data(run: Simulated, dtype: Any) -> None:
    checks.grouped_matmul(
        run,
        plain(29, 7, 32),
        quantized(rng(30), NVFP4, (3, 16, 32)),
        row_offsets=offsets([2, 0, 3]),
        out_dtype="nvfp4",
        out_starts=np.array([3, 3, 1], dtype),
        out_tiles=5,
        epilogue=epilogues.relu2(),
    )


@pytest.mark.parametrize("bad", [[0, 5, 2, 9], [0, 4, 900, 2000], [-3, -5, 3, 6], [2, 4, 4, 9]])
@pytest.mark.parametrize("starts", [None, [900, -1, 2]])
def test_indices_that_no_host_could_refuse_stay_inside(
    run: Simulated, bad: list[int], starts: list[int] | None
) -> None:
    """Out of bounds is an error of the simulated machine; and every element must be written."""
    a = quantized(rng(31), NVFP4, (9, 32), row_offsets=offsets([2, 3, 4]))
    b = quantized(rng(32), NVFP4, (3, 4, 32))
    row_offsets = np.array(bad, np.int32)
    given = None if starts is None else np.array(starts, np.int32)
    facts = {
        "input_rows": 9,
        "rows": 9,
        "columns": 4,
        "depth": 32,
        "experts": 3,
        "groups": 3,
        "a_format": "nvfp4",
        "a_dtype": None,
        "a_layout": "tcgen_grouped",
        "a_tiles": allocated_tiles(9, 3),
        "decode_a": "group",
        "b_format": "nvfp4",
        "b_layout": "tcgen",
        "decode_b": "scalar",
        "alpha": "value",
        "out_dtype": "float32",
        **index_facts(row_offsets, None, None, given),
    }
    buffers = {
        "a_codes": a.codes,
        "a_scales": a.scales,
        "a_decode": a.decode_scale,
        "b_codes": b.codes,
        "b_scales": b.scales,
        "b_decode": b.decode_scale,
        "alpha": np.float32(1),
        "row_offsets": row_offsets,
        "expert_ids": None,
        "row_indices": None,
        "tile_starts": given,
    }
    out = run("grouped_matmul", facts, buffers, {"out": Out((9, 4), np.float32)})["out"]
    assert np.isfinite(out).all()
    poison = np.full(1, checks.POISON * 0x01010101, np.uint32).view(np.float32)
    assert not (out == poison).any()


@pytest.mark.parametrize("block", [(1, 1, 1), (31, 1, 1), (3, 11, 1), (1, 33, 1)])
def test_blocks_of_any_number_of_threads(block: tuple[int, int, int]) -> None:
    row_offsets = offsets([3, 0, 2] + [0] * 40 + [1])
    run = Simulated(block=block, grid=(allocated_tiles(8, 44), 2, 1))
    b = quantized(rng(33), NVFP4, (44, 3, 32))
    checks.grouped_matmul(run, plain(34, 8, 32), b, row_offsets=row_offsets)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_warps_changes_nothing(seed: int) -> None:
    row_offsets = offsets([3, 0, 4])
    b = quantized(rng(35), NVFP4, (3, 16, 32))
    more = {"row_offsets": row_offsets, "out_dtype": "nvfp4"}
    checks.grouped_matmul(Simulated(schedule=seed), plain(36, 9, 32), b, **more)
