"""Products with accumulators in tensor memory are the golden ones where the sums are exact."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import golden, plans_blackwell, plans_products
from nvfp4.compat import flashinfer
from tests.kernels.products_sm100 import (
    Case,
    aligned,
    operands,
    planned,
    room,
    same,
    simulated,
    small_integers,
)

SWIGLU = {"epilogue": nvfp4.epilogues.swiglu()}
INTERLEAVED = {"epilogue": nvfp4.epilogues.swiglu(halves=False)}

CASES = [
    Case("nvfp4", 4, 200, 320, (64, 256), 2),
    Case("nvfp4", 130, 72, 224, (128, 128), 1),
    Case("nvfp4", 3, 600, 256, (192, 128), 1),
    Case("nvfp4", 2, 300, 64, (256, 256), 1),
    Case("mxfp4", 129, 8, 352, (64, 256), 1),
    Case("mxfp4", 1, 136, 128, (128, 128), 1),
    Case("mxfp8-mxfp4", 5, 200, 384, (128, 128), 1),
    Case("mxfp8-mxfp4", 5, 72, 256, (64, 256), 1),
    Case("mxfp8", 5, 200, 160, (192, 128), 1),
    Case("mxfp8", 4, 64, 288, (64, 256), 1),
    Case("nvfp4", 3, 256, 128, None, 1, SWIGLU),
    Case("mxfp4", 3, 512, 96, (256, 128), 1, SWIGLU),
    Case("mxfp8", 3, 200, 96, None, 1, INTERLEAVED),
    Case("nvfp4", 5, 200, 352, (64, 256), 1, {}, True),
    Case("mxfp4", 100, 136, 128, (64, 128), 2, {}, True),
    Case("mxfp8-mxfp4", 3, 264, 256, (128, 128), 1, {}, True),
    Case("mxfp8", (2, 0, 70), 128, 96, (64, 128), 2, {}, True),
    Case("mxfp8-mxfp4", (1, 3), 130, 128, (64, 128), 1, {}, True),
    Case("nvfp4", 140, 200, 320, (128, 256), 2, {}, False, True),
    Case("mxfp4", 3, 300, 192, (192, 128), 4, {}, False, True),
    Case("mxfp8-mxfp4", 130, 264, 256, (256, 128), 2, {}, False, True),
    Case("mxfp8", 260, 72, 160, (64, 128), 2, {}, False, True),
    Case("nvfp4", 3, 256, 128, (128, 256), 2, INTERLEAVED, False, True),
    Case("mxfp8", 3, 256, 96, (128, 128), 2, SWIGLU, False, True),
    Case("nvfp4", (3, 0, 130, 2), 72, 128, (64, 128), 2),
    Case("mxfp4", (1, 5), 200, 32, (192, 128), 1),
    Case("mxfp8-mxfp4", (2, 0, 3), 128, 128, None, 3),
    Case("mxfp8", (0, 7), 40, 64, None, 1),
    Case("mxfp8-mxfp4", (2, 130, 0, 258), 40, 128, (64, 128), 2, {}, False, True),
    Case("mxfp4", (2, 3), 256, 192, (128, 256), 4, SWIGLU, False, True),
    Case("nvfp4", (1, 4), 200, 64, (192, 128), 2, {}, False, True),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_exact_sums_give_the_golden_bits(case: Case) -> None:
    same(*simulated(case))


@pytest.mark.parametrize("schedule", range(4))
@pytest.mark.parametrize(
    "case",
    [
        Case("nvfp4", (3, 0, 2), 130, 320, (64, 128), 1),
        Case("mxfp8-mxfp4", 3, 130, 384, (64, 128), 1),
        Case("mxfp4", (3, 70), 130, 96, (64, 128), 1, {}, True),
        Case("nvfp4", 131, 72, 320, (64, 128), 2, {}, False, True),
        Case("mxfp8", (2, 0, 1), 72, 96, (64, 128), 2, {}, False, True),
    ],
    ids=lambda case: case.id,
)
def test_whatever_the_schedule(case: Case, schedule: int) -> None:
    same(*simulated(case, schedule))


@pytest.mark.parametrize(("swap", "paired"), [(False, False), (True, False), (False, True)])
def test_ranges_without_an_expert_and_rows_without_a_range_are_zero(
    swap: bool, paired: bool
) -> None:
    ids = np.array([1, -1, 0, -2], np.int32)
    alpha = np.array([1, 2, 4], np.float32)
    options = {"expert_ids": ids, "alpha": alpha, "experts": 3, "rows_of_none": 5}
    case = Case("nvfp4", (3, 4, 2, 1), 72, 64, (64, 128), 1 + paired, options, swap, paired)
    got, expected = simulated(case)
    same(got, expected)
    assert (got[3:7] == 0).all() and (got[9:] == 0).all() and got[7:9].any() and got[:3].any()


def test_results_of_sixteen_bits() -> None:
    same(*simulated(Case("nvfp4", 5, 72, 64, None, 1, {"out_dtype": "bfloat16"})))
    same(*simulated(Case("mxfp8", 5, 72, 64, None, 1, {"out_dtype": "float16"})))


def test_scale_tiles_of_a_that_begin_elsewhere() -> None:
    offsets, starts = np.array([0, 3, 5], np.int32), np.array([2, 0], np.int32)
    x = small_integers((5, 64), 5)
    out = room(x.shape, "mxfp8_e4m3", offsets, starts)
    a = nvfp4.grouped_quantize(x, "mxfp8_e4m3", row_offsets=offsets, out=out)
    b = aligned(nvfp4.quantize(small_integers((2, 72, 64), 6), "mxfp8_e4m3"))
    expected = np.asarray(nvfp4.grouped_matmul(a, b, row_offsets=a.groups, out_dtype="float32"))
    with planned(None, 1), nvfp4.simulate("sm_100a"):
        got = nvfp4.grouped_matmul(a, b, row_offsets=a.groups, out_dtype="float32")
    same(np.asarray(got), expected)


@pytest.mark.parametrize("paired", [False, True])
def test_scale_tiles_by_the_rule_of_flashinfer(paired: bool) -> None:
    options = {"flashinfer_tiles": True}
    tile, blocks = (64, 128), 1 + paired
    case = Case("mxfp8-mxfp4", (2, 130, 3), 40, 128, tile, blocks, options, False, paired)
    same(*simulated(case))


@pytest.mark.parametrize("depth", [192, 32, 96, 160, 224, 288])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_poison_in_the_padding_of_scales_is_not_seen(fmt: str, depth: int) -> None:
    a, b = (
        aligned(nvfp4.quantize(small_integers((n, depth), n), fmt, scale_layout="linear"))
        for n in (5, 72)
    )
    expected = np.asarray(nvfp4.matmul(a, b, out_dtype="float32"))
    poisoned = []
    for operand in (a, b):
        rows, blocks = operand.scales.shape
        padded = np.full((128, -(-blocks // 4) * 4), 0x7F if fmt == "nvfp4" else 0xFF, np.uint8)
        padded[:rows, :blocks] = operand.scales
        tiles = golden.interleave_scales(padded)
        made = dataclasses.replace(operand, scales=aligned(tiles), scale_layout="tcgen")
        poisoned.append(made)
    with planned((64, 256), 1), nvfp4.simulate("sm_100a"):
        got = nvfp4.matmul(*poisoned, out_dtype="float32")
    same(np.asarray(got), expected)


def test_a_scale_that_is_nan_makes_its_row_nan() -> None:
    x = small_integers((4, 64), 7)
    x[1, 40] = np.nan
    a = aligned(nvfp4.quantize(x, "mxfp8_e4m3"))
    b = aligned(nvfp4.quantize(small_integers((72, 64), 8), "mxfp8_e4m3"))
    expected = np.asarray(nvfp4.matmul(a, b, out_dtype="float32"))
    with planned(None, 1), nvfp4.simulate("sm_100a"):
        got = np.asarray(nvfp4.matmul(a, b, out_dtype="float32"))
    assert np.isnan(got[1]).all() and not np.isnan(got[[0, 2, 3]]).any()
    same(got, expected)


@pytest.mark.parametrize("exponents", [(100, -100), (-120, 60), (60, 60)])
def test_powers_of_two_of_any_size_are_exact(exponents: tuple[int, int]) -> None:
    a, b = (
        aligned(nvfp4.quantize(small_integers((n, 64), n) * np.float32(2.0**e), "mxfp4"))
        for n, e in zip((3, 72), exponents, strict=True)
    )
    expected = np.asarray(nvfp4.matmul(a, b, out_dtype="float32"))
    with planned(None, 1), nvfp4.simulate("sm_100a"):
        got = nvfp4.matmul(a, b, out_dtype="float32")
    same(np.asarray(got), expected)


def test_a_tile_of_128_x_128_x_256_simulates_within_three_seconds() -> None:
    case = Case("nvfp4", 128, 128, 256, (128, 256), 1)
    started = time.process_time()
    same(*simulated(case))
    assert time.process_time() - started < 3


# Which calls they take ---------------------------------------------------------------------------


def plan(arch: str = "sm_100a", **changes: Any) -> str:
    """The kernel of a large product with these facts."""
    facts = {
        "rows": 512,
        "columns": 512,
        "depth": 512,
        "a_format": "nvfp4",
        "a_dtype": None,
        "a_layout": "tcgen",
        "decode_a": "scalar",
        "b_format": "nvfp4",
        "b_layout": "tcgen",
        "decode_b": "scalar",
        "alpha": "value",
        "out_dtype": "bfloat16",
        "aligned": True,
        "map_alignment": 16,
    }
    launches = plans_products.matmul(arch, **{**facts, **changes})
    return launches[0].program.kernel.name


MIXED = {"a_format": "mxfp8_e4m3", "b_format": "mxfp4"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"arch": "sm_103a"},
        {"depth": 544},
        {"columns": 513},
        {"a_format": "mxfp4", "b_format": "mxfp4"},
        {"a_format": "mxfp8_e5m2", "b_format": "mxfp8_e4m3", "depth": 544},
        {**MIXED, "map_alignment": 32},
        {"epilogue": SWIGLU["epilogue"].code(())},
    ],
)
def test_products_of_blocks_go_to_tensor_memory(changes: dict[str, Any]) -> None:
    assert plan(**changes) == "matmul_sm100"


@pytest.mark.parametrize(
    "changes",
    [
        {"arch": "sm_90a"},
        {"rows": 16},
        {"depth": 528},
        {"map_alignment": 0},
        {"a_layout": "linear"},
        {"b_layout": "linear"},
        {"a_format": "mxfp8_e4m3"},
        {"a_format": None, "a_dtype": "bfloat16", "a_layout": None, "decode_a": "none"},
        {**MIXED, "map_alignment": 16},
        {**MIXED, "map_alignment": 32, "depth": 576},
        {"columns": 576, "epilogue": SWIGLU["epilogue"].code(())},
        {"out_dtype": "nvfp4", "out_layout": "tcgen"},
    ],
)
def test_what_the_copies_or_products_do_not_take_goes_elsewhere(changes: dict[str, Any]) -> None:
    assert plan(**changes) != "matmul_sm100"


def test_tiles_are_wide_where_blocks_have_enough_of_them() -> None:
    assert plans_blackwell.tile_of("nvf4", "none", 64, 7680, 4096, 148) == (192, 256)
    assert plans_blackwell.tile_of("nvf4", "none", 4, 7680, 4096, 148) == (128, 256)
    assert plans_blackwell.tile_of("mxf8", "none", 4, 64, 4096, 148) == (64, 128)
    assert plans_blackwell.tile_of("mxf4", "halves", 4, 7680, 128, 148) == (128, 128)


def test_the_picture_of_the_documentation_can_be_drawn(tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "examples" / "draw_pipeline.py"
    spec = importlib.util.spec_from_file_location("draw_pipeline", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    for row in ("stage 0", "scales to tensor memory", "products", "warp 3: results"):
        assert f">{row}</text>" in text
    # Products of four steps of a stage, four stages a tile, three tiles.
    assert text.count('height="18"') > 3 * 4 * 4


def test_large_products_are_made_by_pairs_of_blocks() -> None:
    assert plan(rows=8192, columns=8192) == "matmul_sm100_pair"
    # An instruction of 64 elements must not see the padding of scales.
    assert plan(rows=8192, columns=8192, depth=544) == "matmul_sm100"
    for options in (SWIGLU, INTERLEAVED):
        epilogue = options["epilogue"].code(())
        assert plan(rows=8192, columns=8192, epilogue=epilogue) == "matmul_sm100_pair"


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "grouped_matmul_sm100_pair"),
        ({"arch": "sm_103a"}, "grouped_matmul_sm100_pair"),
        ({"epilogue": SWIGLU["epilogue"].code(())}, "grouped_matmul_sm100_pair"),
        ({"starts_dtype": "int32", "a_tiles": 64}, "grouped_matmul_sm100_pair"),
        # Fewer than 256 rows in a range.
        ({"rows": 2040}, "grouped_matmul_sm100"),
        # Fewer tiles than two for each pair of blocks.
        ({"columns": 1024}, "grouped_matmul_sm100"),
        ({"depth": 544}, "grouped_matmul_sm100"),
        ({"a_tiles": 0, "starts_dtype": "int32"}, "grouped_matmul_sm100"),
    ],
)
def test_ranges_of_many_rows_are_made_by_pairs_of_blocks(
    changes: dict[str, Any], kernel: str
) -> None:
    facts = {
        "arch": "sm_100a",
        "rows": 2048,
        "columns": 4096,
        "depth": 512,
        "experts": 8,
        "groups": 8,
        "offsets_dtype": "int32",
        "ids_dtype": None,
        "indices_dtype": None,
        "starts_dtype": None,
        "a_format": "nvfp4",
        "a_dtype": None,
        "a_layout": "tcgen_grouped",
        "decode_a": "group",
        "b_format": "nvfp4",
        "b_layout": "tcgen",
        "decode_b": "batch",
        "alpha": "expert",
        "out_dtype": "bfloat16",
        "aligned": True,
        "map_alignment": 16,
        **changes,
    }
    (launch,) = plans_products.grouped_matmul(facts.pop("arch"), input_rows=facts["rows"], **facts)
    assert launch.program.kernel.name == kernel


def test_pairs_of_blocks_take_the_tiles_that_read_least() -> None:
    def paired(columns: int, pair: str = "none", groups: int | None = None) -> Any:
        return plans_blackwell.paired("nvf4", pair, 1 << 20, columns, 4096, 148, groups)

    assert paired(4096) == (192, 256) and paired(384) == (192, 256)
    assert paired(256) == (128, 256) and paired(64) == (128, 256)
    assert paired(4096, "halves") == (128, 256)
    assert paired(4096, "none", 4096) == (192, 256)
    assert paired(4096, "none", 4097) is None


def test_columns_become_rows_where_rows_are_few() -> None:
    assert plans_blackwell.swapped("none", 64, 4096, None)
    assert plans_blackwell.swapped("none", 512, 4096, 8)
    assert not plans_blackwell.swapped("none", 65, 4096, None)
    assert not plans_blackwell.swapped("halves", 16, 4096, 8)
    assert not plans_blackwell.swapped("none", 16, 64, None)


# What callers of FlashInfer's names ask for ------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "kernel", "tile", "swap"),
    [
        ({}, "grouped_matmul_sm100", (64, 128), True),
        ({"mma_sm": 2}, "grouped_matmul_sm100_pair", (128, 128), False),
        (
            {"mma_sm": 2, "tile_n": 256, "tile_k": 256},
            "grouped_matmul_sm100_pair",
            (256, 256),
            False,
        ),
        ({"mma_sm": 2, "tile_n": 32}, "grouped_matmul_sm100_pair", (64, 128), False),
        ({"tile_n": 64, "tile_k": 256}, "grouped_matmul_sm100", (64, 256), True),
        ({"tile_k": 256}, "grouped_matmul_sm100", (128, 256), True),
        ({"tile_n": 192}, "grouped_matmul_sm100", (192, 128), False),
        ({"swap_ab": False}, "grouped_matmul_sm100", (128, 128), False),
    ],
)
def test_tiles_that_are_asked_for_by_flashinfers_arguments(
    asked: dict[str, Any], kernel: str, tile: tuple[int, int], swap: bool
) -> None:
    codes = [np.zeros((4, 256), np.uint8), np.zeros((1, 136, 128), np.uint8)]
    scales = [np.zeros((128, 8), np.uint8), np.zeros((1, 256, 8), np.uint8)]
    offsets = np.array([0, 4], np.int32)
    given = [aligned(array) for array in (*codes, *scales)]
    launches: list[Any] = []
    with planned(None, 2, None, None), nvfp4.simulate("sm_100a") as machine:
        machine.record = launches.append
        flashinfer.group_gemm_mxfp4_nt_groupwise(*given, offsets, a_format="e4m3", **asked)
    constants = dict(launches[-1].program.constants)
    assert launches[-1].program.kernel.name == kernel
    assert (constants["TILE_N"], constants["TILE_K"]) == tile and constants["SWAP"] is swap


def test_a_product_by_flashinfers_name_and_two_blocks() -> None:
    case = Case("mxfp8-mxfp4", (2, 3), 72, 128, options={"flashinfer_tiles": True})
    a, b, _ = operands(case)
    expected = nvfp4.grouped_matmul(a, b, row_offsets=a.groups)
    given = (a.codes, b.codes, a.scales, b.scales, a.groups)
    out = np.full(expected.shape, 77, ml_dtypes.bfloat16)
    with planned(None, 2, None, None), nvfp4.simulate("sm_100a"):
        flashinfer.group_gemm_mxfp4_nt_groupwise(
            *given, mma_sm=2, tile_n=64, out=out, a_format="e4m3"
        )
    same(out, np.asarray(expected))
