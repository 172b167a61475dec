"""Products with prepared weights on the simulated machine: the golden bytes of exact sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import plans_products, plans_sm90
from nvfp4.formats import FORMATS

from .checks import POISON, Out, index_facts
from .products_sm100 import aligned
from .simulated import Simulated

BF16 = ml_dtypes.bfloat16
#: Rows a range from which on the second kernel is taken: which of them makes a product.
KERNELS = {"decode": 1 << 60, "sm90": 0}
#: Depths that end inside a step of 64, and their steps: 3 and 4 (16 of 2 and 4 in blocks of 16).
DEPTHS = {"nvfp4": (80, 208), "mxfp4": (160, 224), "mxfp8_e4m3": (160, 224), "mxfp8_e5m2": (96,)}
OFFSETS = np.array([0, 3, 3, 9], np.int32)
SWIGLU = nvfp4.epilogues.swiglu


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel that makes whatever product; few stages, so that small ones use them again."""
    yield from planned(request.param, monkeypatch)


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel of few rows."""
    yield from planned("decode", monkeypatch)


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel of many rows."""
    yield from planned("sm90", monkeypatch)


def planned(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(plans_sm90, "many_rows", lambda **_: KERNELS[name])
    monkeypatch.setattr(plans_sm90, "MOST_STAGES", 3)
    plans = (plans_products.matmul, plans_products.grouped_matmul)
    for plan in plans:
        plan.cache_clear()
    yield name
    for plan in plans:
        plan.cache_clear()


def integers(shape: tuple[int, ...], seed: int, dtype: Any = BF16) -> Any:
    """Small integers, half of them 0, whose products have exact sums."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, shape) * (rng.random(shape) < 0.5)
    return aligned(values.astype(np.float32).astype(dtype))


def weights(fmt: str, *shape: int, seed: int = 1, **options: Any) -> nvfp4.QTensor:
    """Quantised integers."""
    return nvfp4.quantize(integers(shape, seed, np.float32), fmt, **options)


def one_nan(values: np.ndarray) -> bytes:
    """The bytes, with one pattern for all NaN."""
    values = values.copy()
    values[np.isnan(values)] = np.nan
    return values.tobytes()


def check(
    kernel: str,
    a: Any,
    b: nvfp4.QTensor,
    *,
    out_dtype: str = "float32",
    schedule: Any = "round_robin",
    checks: bool = True,
    processors: int = 132,
    **options: Any,
) -> np.ndarray:
    """Multiply by `b` as it is and prepared, over poison, on the simulated machine."""
    function = nvfp4.grouped_matmul if "row_offsets" in options else nvfp4.matmul
    options["out_dtype"] = out_dtype
    expected = np.asarray(function(a, b, **options))
    prepared = nvfp4.prepare_weights(b)
    out = aligned(np.zeros(expected.shape, expected.dtype))
    out.reshape(-1).view(np.uint8)[...] = POISON
    names = []
    machine: Any
    with nvfp4.simulate("sm_90a", schedule=schedule, checks=checks) as machine:
        machine.processors = processors
        run = machine.run

        def noted(*args: Any, **named: Any) -> Any:
            names.append(named["name"])
            return run(*args, **named)

        machine.run = noted
        assert function(a, prepared, out=out, **options) is out
    assert len(names) == 1 and names[0].startswith(f"matmul_{kernel}"), names
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))
    assert one_nan(out) == one_nan(expected)
    return out


# Dense -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("fmt", FORMATS)
def test_few_rows_of_every_format_and_ragged_extents(decode: str, fmt: str, rows: int) -> None:
    for depth in DEPTHS[fmt]:
        check(decode, integers((rows, depth), 2), weights(fmt, 40, depth))


@pytest.mark.parametrize("fmt", FORMATS)
def test_many_rows_of_every_format_and_ragged_extents(sm90: str, fmt: str) -> None:
    depth = {"nvfp4": 80, "mxfp4": 96}.get(fmt, 32)
    check(sm90, integers((19, depth), 2), weights(fmt, 40, depth), checks=fmt == "mxfp4")


@pytest.mark.parametrize("rows, depth", [(31, 96), pytest.param(3, 64 * 4, marks=pytest.mark.slow)])
def test_gathered_rows_of_tiles_that_are_no_multiple_of_16(
    sm90: str, rows: int, depth: int
) -> None:
    """Tiles of 24 rows, a depth that ends in the middle of a step, and every parity."""
    indices = np.random.default_rng(3).permutation(rows).astype(np.int32)
    offsets = np.array([0, rows - 1, rows], np.int32)
    a = integers((rows, depth), 2)
    options = {"row_offsets": offsets, "row_indices": indices}
    check(sm90, a, weights("mxfp4", 2, 40, depth), **options)


def test_rows_that_go_backwards(sm90: str) -> None:
    check(sm90, integers((3, 32), 2)[::-1], weights("mxfp4", 8, 32), checks=False)


def test_a_run_of_steps_longer_than_what_is_under_way(kernel: str) -> None:
    """Slots of the weights and stages of the rows are used again, with both parities."""
    rows, depth = (19, 64 * 11) if kernel == "decode" else (3, 64 * 7)
    check(kernel, integers((rows, depth), 3), weights("mxfp4", 24, depth))


def test_several_tiles_of_rows_and_of_columns(kernel: str) -> None:
    rows = 150 if kernel == "decode" else 40
    check(kernel, integers((rows, 32), 4), weights("mxfp4", 40, 32), out_dtype="bfloat16")
    few: dict[str, Any] = {"out_dtype": "float16", "checks": kernel == "decode"}
    check(kernel, integers((2, 32), 4), weights("mxfp4", 300, 32), **few)


@pytest.mark.parametrize("two, depth, stages", [(0, 96, 3), (32, 32, 2)])
def test_a_block_makes_several_tiles_one_after_the_other(
    sm90: str, monkeypatch: pytest.MonkeyPatch, two: int, depth: int, stages: int
) -> None:
    """A card of one multiprocessor: rings go on from tile to tile, of several matrices.

    With one block of it, two steps a tile in three stages; with two, one step in two stages.
    """
    monkeypatch.setattr(plans_sm90, "TOKENS_OF_TWO", two)
    monkeypatch.setattr(plans_sm90, "MOST_STAGES", stages)
    offsets = np.array([0, 3, 3, 20, 21, 22], np.int64)
    options: dict[str, Any] = {"row_offsets": offsets, "out_dtype": "bfloat16"}
    options["expert_ids"] = np.array([1, 1, 0, -1, 0], np.int32)
    b = weights("mxfp4", 2, 40, depth)
    out = check(sm90, integers((22, depth), 4), b, processors=1, **options)
    assert out[[0, 2, 3, 19, 21]].any(axis=1).all()


@pytest.mark.parametrize("columns, halves", [(288, True), (260, False)])
def test_pairs_of_more_columns_than_a_tile_has(sm90: str, columns: int, halves: bool) -> None:
    """Gate and up of halves come from boxes far apart, of which the last one is not full."""
    options: dict[str, Any] = {"epilogue": SWIGLU(halves=halves), "out_dtype": "bfloat16"}
    b = weights("nvfp4", columns, 32)
    check(sm90, integers((2, 32), 7), b, checks=False, processors=1, **options)


def test_an_epilogue_of_columns_that_are_no_multiple_of_four_reads_no_more(sm90: str) -> None:
    """Out of bounds is an error of the simulated machine."""
    bias = nvfp4.epilogues.bias(np.arange(33, dtype=np.float32))
    check(sm90, integers((3, 32), 7), weights("mxfp4", 33, 32), epilogue=bias)


@pytest.mark.parametrize(
    "split, tokens, rows, depth",
    [
        (2, 32, 19, 160),
        (2, 16, 9, 352),  # stages of two steps, two of them and one
        pytest.param(2, 16, 9, 1056, marks=pytest.mark.slow),  # the last has one step
        pytest.param(4, 32, 21, 288, marks=pytest.mark.slow),
        pytest.param(8, 64, 21, 544, marks=pytest.mark.slow),
        pytest.param(8, 64, 21, 1056, marks=pytest.mark.slow),
    ],
)
def test_blocks_of_a_cluster_share_the_depth_of_a_tile(
    sm90: str, monkeypatch: pytest.MonkeyPatch, split: int, tokens: int, rows: int, depth: int
) -> None:
    """Runs of steps that are not equally long; rows that some of the blocks have none of."""
    monkeypatch.setattr(plans_sm90, "split_of", lambda *_: (split, tokens))
    b = weights("mxfp4", 40, depth)
    check(sm90, integers((rows, depth), 6), b, out_dtype="bfloat16", checks=split < 8)


def test_a_plain_matrix_is_written_again_by_one_block_of_a_cluster(
    sm90: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans_sm90, "split_of", lambda *_: (2, 16))
    b = weights("mxfp4", 40, 128, seed=19, scale_layout="linear")
    b = with_scales(b, {(3, 0): 5, (30, 2): 250})
    check(sm90, integers((5, 128), 6), b, out_dtype="bfloat16", checks=False)


def test_how_many_blocks_share_the_depth() -> None:
    """All that a card has at once, where it gains; none where tiles fill it."""
    split_of = plans_sm90.split_of
    assert split_of(64, 32, 128, 16, 132) == (2, 32)
    assert split_of(128, 32, 128, 32, 132) == (2, 64)
    assert split_of(64, 16, 64, 16, 132) == (4, 64)
    assert split_of(128, 16, 224, 32, 132) == (2, 32)
    assert split_of(128, 132, 128, 128, 132) == (1, 128)
    assert split_of(64, 32, 7, 16, 132) == (1, 16)
    assert split_of(64, 32, 32, 16, 132) == (1, 16)  # sums that come together cost more


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_rows_of_a_tile_of_160(sm90: str, out_dtype: str) -> None:
    """All copies of a lane and all pieces of the results; 97 rows are a tile of 104."""
    for rows in (160, 97):
        b = weights("mxfp4", 16, 32)
        check(sm90, integers((rows, 32), 4), b, checks=False, out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_results_whose_rows_do_not_begin_at_multiples_of_16_bytes(
    sm90: str, out_dtype: str
) -> None:
    """Stored one by one: 33 columns, of which the last eight of a lane has one."""
    a = integers((11, 32), 7)
    check(sm90, a, weights("mxfp4", 33, 32), checks=False, out_dtype=out_dtype)


def test_results_are_zero_where_the_row_of_a_is_not_there(sm90: str) -> None:
    """Also such that are stored 16 bytes at a time."""
    indices = np.array([2, -1, 0, 9, 1], np.int32)
    options: dict[str, Any] = {"row_offsets": np.array([0, 4, 5], np.int32)}
    options |= {"row_indices": indices, "out_dtype": "bfloat16"}
    out = check(sm90, integers((3, 32), 2), weights("mxfp4", 2, 40, 32), **options)
    assert not out[[1, 3]].any() and out[[0, 2, 4]].any(axis=1).all()


def planned_launch(rows: int, groups: int | None, **more: Any) -> Any:
    """The one launch of a product."""
    facts: dict[str, Any] = {**FACTS, **more}
    plan: Any = plans_products.matmul
    if groups:
        plan = plans_products.grouped_matmul
        facts |= {"input_rows": rows, "experts": groups, "groups": groups, "a_row_stride": 32}
        facts |= index_facts(np.zeros(groups + 1, np.int32), None, None, None)
    (launch,) = plan("sm_90a", rows=rows, **facts)
    return launch


@pytest.mark.parametrize(
    "rows, columns, groups, kernel",
    [
        # Dense: from 17 rows on if columns alone make tiles for three quarters of 132, else 128.
        *((16, 99 * 256, None, "decode"), (17, 99 * 256, None, "sm90")),
        *((127, 98 * 256, None, "decode"), (128, 98 * 256, None, "sm90")),
        # Rows of a range, by tiles for each multiprocessor: from 30, 10, 3, 0.9 on, and fewer.
        *((3 * 256 - 1, 16 * 256, 256, "decode"), (3 * 256, 16 * 256, 256, "sm90")),
        *((5 * 128 - 1, 11 * 256, 128, "decode"), (5 * 128, 11 * 256, 128, "sm90")),
        *((6 * 64 - 1, 7 * 256, 64, "decode"), (6 * 64, 7 * 256, 64, "sm90")),
        *((8 * 8 - 1, 16 * 256, 8, "decode"), (8 * 8, 16 * 256, 8, "sm90")),
        *((24 * 4 - 1, 16 * 256, 4, "decode"), (24 * 4, 16 * 256, 4, "sm90")),
    ],
)
def test_which_kernel_makes_products_of_how_many_rows(
    rows: int, columns: int, groups: int | None, kernel: str
) -> None:
    launch = planned_launch(rows, groups, columns=columns)
    assert launch.program.label.startswith(f"matmul_{kernel}"), launch.program.label


@pytest.mark.parametrize("columns, blocks", [(16 * 256, 132), (17 * 256, 264)])
def test_small_tiles_share_multiprocessors_where_there_are_more_of_them(
    columns: int, blocks: int
) -> None:
    """8 ranges of 8 rows: of 128 tiles some multiprocessors would have none, and others two."""
    launch = planned_launch(64, 8, columns=columns)
    assert dict(launch.program.constants)["BLOCKS_PER_SM"] == blocks // 132
    assert launch.grid == (min(blocks, 12 * columns // 256), 1, 1)


def test_few_rows_of_many_ranges_have_no_more_tiles_than_rows() -> None:
    """Rows decide how many matrices are read, where they are fewer."""
    many: Any = plans_sm90.many_rows
    assert many(rows=100, columns=1024, groups=1000, processors=132) == 6
    assert many(rows=1000, columns=1024, groups=1000, processors=132) == 3
    assert many(rows=1000, columns=1024, groups=1000, processors=132, made=True) == 8
    assert many(rows=64, columns=8192, groups=None, processors=132) == 40
    assert many(rows=64, columns=8192, groups=None, processors=132, split=False) == 128


@pytest.mark.parametrize("groups", [None, 2048])
@pytest.mark.parametrize("fmt", FORMATS)
def test_blocks_fit_into_the_shared_memory_of_a_multiprocessor(
    sm90: str, monkeypatch: pytest.MonkeyPatch, fmt: str, groups: int | None
) -> None:
    """228 KiB, of which each block has one of its own; 227 a block at most."""
    monkeypatch.undo()
    monkeypatch.setattr(plans_sm90, "many_rows", lambda **_: 0)
    facts: dict[str, Any] = {**FACTS, "columns": 1 << 17, "b_format": fmt}
    plan: Any = plans_products.matmul
    if groups:
        plan = plans_products.grouped_matmul
        facts |= {"experts": groups, "groups": groups, "a_row_stride": 32}
        facts |= index_facts(np.zeros(groups + 1, np.int32), None, None, None)
    for mean in (16, 32, 33, 160):
        rows = mean * (groups or 1)
        more = {"input_rows": rows} if groups else {}
        (launch,) = plan("sm_90a", rows=rows, **facts, **more)
        constants = dict(launch.program.constants)
        blocks = constants["BLOCKS_PER_SM"]
        assert blocks == (2 if constants["CHUNK"] <= 32 else 1)
        assert launch.grid[0] == 132 * blocks
        assert blocks * (launch.shared_bytes + 1024) <= 228 << 10
        assert launch.shared_bytes <= 227 << 10
        assert constants["STAGES"] >= 2


def test_rows_of_float16_keep_all_their_bits(decode: str) -> None:
    a = integers((3, 160), 5, np.float16)
    a[1, 7] = 1 + 2.0**-10
    a[2, 100] = 2047
    check(decode, a, weights("mxfp4", 40, 160))
    check(decode, a, weights("mxfp8_e4m3", 40, 160), out_dtype="float16")


@pytest.mark.parametrize("fmt, layout", [("mxfp8_e4m3", "tcgen"), ("nvfp4", "linear")])
def test_quantised_rows(kernel: str, fmt: str, layout: str) -> None:
    a = nvfp4.quantize(integers((5, 96), 6), fmt, scale_layout=layout)
    check(kernel, a, weights("nvfp4", 24, 96))


def test_every_row_has_its_own_decode_scale(sm90: str) -> None:
    """In both pieces of a tile's results."""
    scales = np.exp2(np.arange(40) % 11 - 5).astype(np.float32)[:, None]
    a = nvfp4.quantize(integers((40, 32), 6), "nvfp4", encode_scale=scales)
    check(sm90, a, weights("mxfp4", 16, 32), checks=False)


@pytest.mark.parametrize("tokens", [16, 40])
def test_factors_of_rows_lie_beside_the_results_of_a_tile_that_is_smaller_than_64(
    sm90: str, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Not in the results of the other warpgroup, nor behind all."""
    monkeypatch.setattr(plans_sm90, "tokens_of", lambda *_: tokens)
    scales = np.exp2(np.arange(tokens + 1) % 11 - 5).astype(np.float32)[:, None]
    a = nvfp4.quantize(integers((tokens + 1, 32), 6), "nvfp4", encode_scale=scales)
    check(sm90, a, weights("mxfp4", 136, 32), out_dtype="bfloat16")


@pytest.mark.parametrize("halves", [True, False])
def test_pairs_of_columns(kernel: str, halves: bool) -> None:
    options: dict[str, Any] = {"epilogue": SWIGLU(halves=halves), "out_dtype": "bfloat16"}
    check(kernel, integers((5, 64), 7), weights("nvfp4", 64, 64), **options)
    if kernel == "decode":
        check(kernel, integers((19, 160), 7), weights("mxfp8_e5m2", 96, 160), **options)


def test_whatever_the_schedule_the_bytes_are_the_same(kernel: str) -> None:
    """Those of the golden model; other tests have the schedule that is usual."""
    check(kernel, integers((5, 224), 10), weights("mxfp4", 24, 224), schedule=1)


def test_sums_that_are_rounded_have_the_same_bytes_twice(decode: str) -> None:
    rng = np.random.default_rng(11)
    a = aligned(rng.standard_normal((5, 704)).astype(BF16))
    b = nvfp4.quantize(rng.standard_normal((24, 704)).astype(np.float32), "mxfp4")
    prepared = nvfp4.prepare_weights(b)
    made = []
    for schedule in ("round_robin", 1):
        out = aligned(np.zeros((5, 24), np.float32))
        with nvfp4.simulate("sm_90a", schedule=schedule):
            nvfp4.matmul(a, prepared, out=out, out_dtype="float32")
        made.append(out)
    assert made[0].tobytes() == made[1].tobytes()
    expected = nvfp4.matmul(a, b, out_dtype="float32")
    np.testing.assert_allclose(made[0], expected, rtol=1e-5, atol=1e-4)


# Grouped -----------------------------------------------------------------------------------------


def test_ranges_with_and_without_rows_experts_and_factors(kernel: str) -> None:
    """Rows of an expert that is not there, and of no range, are 0."""
    ranges: dict[str, Any] = {"row_offsets": OFFSETS, "expert_ids": np.array([1, 0, -1], np.int32)}
    alpha = np.array([1, 2, 4], np.float32)
    b = weights("nvfp4", 3, 24, 64)
    out = check(kernel, integers((12, 64), 12), b, alpha=alpha, **ranges)
    assert out[:3].any() and not out[3:].any()


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "nvfp4"])
def test_ranges_of_quantised_rows(decode: str, fmt: str) -> None:
    a = nvfp4.grouped_quantize(integers((12, 64), 12), fmt, row_offsets=OFFSETS)
    out = check(decode, a, weights("nvfp4", 3, 24, 64), row_offsets=OFFSETS)
    assert out[3:9].any(axis=1).all() and not out[9:].any()


def test_rows_are_gathered_and_epilogues_know_row_and_column(kernel: str) -> None:
    indices = np.array([3, 0, -1, 2, 9, 1, 1, np.iinfo(np.int32).max, 2], np.int32)
    residual = integers((9, 24), 8, np.float32)
    options: dict[str, Any] = {"row_offsets": OFFSETS, "row_indices": indices, "alpha": 0.5}
    options["epilogue"] = nvfp4.epilogues.residual_add(residual)
    out = check(kernel, integers((4, 64), 13), weights("nvfp4", 3, 24, 64), **options)
    assert not out[[2, 4, 7]].any() and out[[0, 1, 3, 5, 6, 8]].any(axis=1).all()


def test_many_ranges(decode: str) -> None:
    sizes = np.random.default_rng(14).integers(0, 4, 70)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    a = integers((int(offsets[-1]) + 3, 64), 15)
    check(decode, a, weights("mxfp4", 70, 16, 64), row_offsets=offsets)


def test_ranges_of_unequal_sizes(kernel: str) -> None:
    """More rows than a tile has, none, and one."""
    offsets = np.array([0, 0, 20, 20, 21], np.int64)
    out = check(kernel, integers((21, 32), 16), weights("mxfp4", 4, 24, 32), row_offsets=offsets)
    assert out[[0, 19, 20]].any(axis=1).all()


@pytest.mark.parametrize("options", [{}, {"compute": "fp8"}, {"out_dtype": "mxfp8_e4m3"}])
def test_without_experts_there_is_nothing_to_read(options: dict[str, Any]) -> None:
    weight = nvfp4.prepare_weights(nvfp4.quantize(np.zeros((0, 32, 64), np.float32), "mxfp4"))
    index = {"row_offsets": OFFSETS, "expert_ids": np.full(len(OFFSETS) - 1, -1, np.int32)}
    rows: Any = integers((9, 64), 3)
    if "compute" in options:
        rows, options["a_scale"] = nvfp4.quantize_rows(rows)
    with nvfp4.simulate("sm_90a"):
        got = nvfp4.grouped_matmul(rows, weight, **index, **options)
    assert got.shape == (9, 32)
    assert not (got.dequantize() if "out_dtype" in options else got.astype(np.float32)).any()


@pytest.mark.parametrize("name", list(KERNELS))
def test_without_depth_there_is_nothing_to_read_and_the_sums_are_zero(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Tensor maps have no empty extents: such products are made by the kernel without maps."""
    monkeypatch.setattr(plans_sm90, "many_rows", lambda **_: KERNELS[name])
    b = nvfp4.prepare_weights(nvfp4.quantize(np.zeros((32, 0), np.float32), "mxfp4"))
    for rows in (1, 20):
        out = aligned(np.full((rows, 32), np.nan, np.float32))
        with nvfp4.simulate("sm_90a"):
            nvfp4.matmul(np.zeros((rows, 0), BF16), b, out=out, out_dtype="float32")
        assert not out.any() and not np.signbit(out).any()
    b = nvfp4.prepare_weights(nvfp4.quantize(np.zeros((0, 64), np.float32), "mxfp4"))
    with nvfp4.simulate("sm_90a"):
        assert nvfp4.matmul(np.zeros((20, 64), BF16), b).shape == (20, 0)


def test_nothing_but_rows_of_no_range(kernel: str) -> None:
    offsets = np.zeros(3, np.int32)
    out = check(kernel, integers((6, 32), 17), weights("mxfp4", 2, 24, 32), row_offsets=offsets)
    assert not out.any()


@pytest.mark.parametrize("bad", [[0, 5, 2, 9]])
def test_indices_that_no_host_could_refuse_stay_inside(kernel: str, bad: list[int]) -> None:
    """Out of bounds is an error of the simulated machine; and every element must be written."""
    b = nvfp4.prepare_weights(weights("mxfp4", 3, 24, 32))
    offsets = np.array(bad, np.int32)
    facts = {
        **{"input_rows": 9, "rows": 9, "columns": 24, "depth": 32, "experts": 3, "groups": 3},
        **{"a_format": None, "a_dtype": "bfloat16", "a_layout": None, "decode_a": "none"},
        **{"b_format": "mxfp4", "b_layout": "sm90", "decode_b": "scalar", "alpha": "value"},
        **{"out_dtype": "float32", "a_row_stride": 32, "aligned": True},
        **index_facts(offsets, None, None, None),
    }
    buffers = {
        **{"a": integers((9, 32), 18), "a_scales": None, "a_decode": None},
        **{"b_codes": b.codes, "b_scales": b.scales},
        **{"b_decode": b.decode_scale, "alpha": np.float32(1), "row_offsets": offsets},
        **{"expert_ids": None, "row_indices": None, "tile_starts": None},
    }
    out = Simulated()("grouped_matmul", facts, buffers, {"out": Out((9, 24), np.float32)})["out"]
    assert not (out.view(np.uint32) == POISON * 0x01010101).any()
    assert np.isfinite(out).all() and out.any()


@pytest.mark.parametrize("quantised", [False, True])
def test_an_empty_a_of_which_rows_are_picked_is_not_read(kernel: str, quantised: bool) -> None:
    a: Any = np.zeros((0, 64), BF16)
    if quantised:
        a = nvfp4.quantize(a, "mxfp4", scale_layout="linear")
    b = nvfp4.prepare_weights(weights("mxfp4", 2, 32, 64))
    index = {"row_offsets": np.array([0, 2, 3], np.int32)}
    index["row_indices"] = np.array([-1, 0, 5, 1], np.int32)
    out = np.full((4, 32), 77, np.float32)
    with nvfp4.simulate("sm_90a"):
        nvfp4.grouped_matmul(a, b, out=out, out_dtype="float32", **index)
    assert not out.any()


# Addresses ---------------------------------------------------------------------------------------


def moved(values: np.ndarray, off: int) -> Any:
    """A copy that begins `off` bytes behind a multiple of 128."""
    memory = aligned(np.full(values.nbytes + off, POISON, np.uint8))
    made = memory[off:].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


@pytest.mark.parametrize("off", [2, 4])
def test_results_that_do_not_begin_at_a_multiple_of_eight(kernel: str, off: int) -> None:
    a, b = integers((3, 32), 2), weights("mxfp4", 24, 32)
    expected = np.asarray(nvfp4.matmul(a, b))
    out = moved(np.zeros_like(expected), off)
    with nvfp4.simulate("sm_90a", checks=kernel == "decode"):
        nvfp4.matmul(a, nvfp4.prepare_weights(b), out=out)
    assert out.tobytes() == expected.tobytes()


def test_rows_that_do_not_begin_at_a_multiple_of_16_are_refused(kernel: str) -> None:
    a, b = integers((3, 32), 2), nvfp4.prepare_weights(weights("mxfp4", 24, 32))
    wide = aligned(np.zeros((3, 36), BF16))
    for rows in (moved(a, 2), moved(a, 8), wide[:, :32]):
        with nvfp4.simulate("sm_90a"), pytest.raises(ValueError, match="a, its rows, and b must"):
            nvfp4.matmul(rows, b)


def test_codes_of_rows_begin_at_a_multiple_of_eight(decode: str) -> None:
    b = weights("mxfp4", 24, 32)
    a = nvfp4.quantize(integers((3, 32), 2), "mxfp4", scale_layout="linear")
    check(decode, dataclasses.replace(a, codes=moved(a.codes, 8)), b)
    a = dataclasses.replace(a, codes=moved(a.codes, 4))
    with nvfp4.simulate("sm_90a"), pytest.raises(ValueError, match="of a quantised a at multiples"):
        nvfp4.matmul(a, nvfp4.prepare_weights(b))


FACTS: dict[str, Any] = {
    **{"columns": 32, "depth": 32, "a_format": None, "a_dtype": "bfloat16", "a_layout": None},
    **{"decode_a": "none", "b_format": "mxfp4", "b_layout": "sm90", "decode_b": "scalar"},
    **{"alpha": "value", "out_dtype": "float32", "aligned": True},
}


def test_more_rows_than_kernels_number_are_refused() -> None:
    assert plans_products.matmul("sm_90a", rows=(1 << 31) - 1, **FACTS)
    with pytest.raises(nvfp4.UnsupportedError, match="fewer than 2\\^31 rows"):
        plans_products.matmul("sm_90a", rows=1 << 31, **FACTS)


@pytest.mark.parametrize("a_format, least", [(None, 2), ("nvfp4", 4), ("mxfp8_e4m3", 4)])
def test_rows_are_made_by_every_fourth_step_and_so_in_four_stages_or_more(
    sm90: str, monkeypatch: pytest.MonkeyPatch, a_format: str | None, least: int
) -> None:
    """With fewer, parities of a stage that is two turns ahead are those of a free one: deadlock."""
    monkeypatch.setattr(plans_sm90, "MOST_STAGES", 2)
    facts = {**FACTS, "a_format": a_format, "a_dtype": None if a_format else "bfloat16"}
    if a_format:
        facts |= {"a_layout": "linear", "decode_a": "scalar"}
    (launch,) = plans_products.matmul("sm_90a", rows=100, **facts)
    assert dict(launch.program.constants)["STAGES"] == least


# Scales ------------------------------------------------------------------------------------------


def with_scales(q: nvfp4.QTensor, changes: dict[tuple[int, ...], int]) -> nvfp4.QTensor:
    """Other bytes for some of the scales, which are linear."""
    scales = q.scales.copy()
    for place, byte in changes.items():
        scales[place] = byte
    return dataclasses.replace(q, scales=scales)


def test_a_plain_matrix_among_others(kernel: str) -> None:
    b = weights("mxfp4", 2, 24, 64, seed=19, scale_layout="linear")
    b = with_scales(b, {(1, 3, 0): 5, (1, 7, 1): 250})
    factors = nvfp4.prepare_weights(b).scales[:, :4].copy()
    factors = factors.view(np.float32)[:, 0]
    assert factors[0] > 0 and factors[1] == 0
    if kernel == "decode":
        check(kernel, integers((6, 64), 20), b, row_offsets=np.array([0, 2, 6], np.int32))
    else:
        ids: dict[str, Any] = {
            "row_offsets": np.array([0, 6], np.int32),
            "expert_ids": np.array([1], np.int32),
        }
        check(kernel, integers((6, 64), 20), b, checks=False, **ids)


def test_a_plain_matrix_of_more_columns_than_a_warpgroup_has(sm90: str) -> None:
    b = weights("mxfp4", 136, 32, seed=19, scale_layout="linear")
    b = with_scales(b, {(3, 0): 5, (130, 0): 250})
    check(sm90, integers((1, 32), 20), b, checks=False)


@pytest.mark.parametrize("change", [120, 150])
def test_weights_whose_scales_are_rebased(decode: str, change: int) -> None:
    """Their factor is 2 to the power of what large scales exceed bfloat16 by."""
    b = weights("mxfp8_e5m2", 24, 32, seed=21, scale_layout="linear")
    spread = b.scales.max() - b.scales
    b = dataclasses.replace(b, scales=(change - spread).astype(np.uint8))
    factor = nvfp4.prepare_weights(b).scales.reshape(-1)[:4].view(np.float32)[0]
    assert factor == 2.0 ** max(0, change + 112 - 254)
    check(decode, integers((3, 32), 22), b)


def test_extreme_scales_of_rows(kernel: str) -> None:
    a = nvfp4.quantize(integers((5, 64), 23), "mxfp8_e4m3", scale_layout="linear")
    check(kernel, with_scales(a, {(2, 0): 3, (4, 1): 240}), weights("mxfp4", 24, 64))


def test_scales_that_are_nan(kernel: str) -> None:
    """Of a row of A and of a row of the weights."""
    a = nvfp4.quantize(integers((5, 64), 24), "mxfp8_e4m3", scale_layout="linear")
    b = weights("mxfp4", 24, 64, scale_layout="linear")
    out = check(kernel, with_scales(a, {(2, 1): 255}), with_scales(b, {(9, 0): 255}))
    assert np.isnan(out[2]).all() and np.isnan(out[:, 9]).all()
    assert np.isfinite(np.delete(np.delete(out, 2, 0), 9, 1)).all()
    if kernel == "decode":
        b = with_scales(weights("nvfp4", 24, 64, scale_layout="linear"), {(9, 2): 127})
        out = check(kernel, integers((5, 64), 25), b)
        assert np.isnan(out[:, 9]).all() and np.isfinite(np.delete(out, 9, 1)).all()
