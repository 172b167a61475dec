"""Many float16 rows times prepared weights: each element is multiplied as two of bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import plans_products, plans_sm90
from nvfp4.formats import FORMATS

from .products_sm100 import aligned
from .test_matmul_prepared import SWIGLU, check, planned, planned_launch, weights
from .test_matmul_prepared_codes import check as check_codes

F16 = np.float16


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel of many rows makes whatever product."""
    yield from planned("sm90", monkeypatch)


@pytest.fixture
def tokens(sm90: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Rows of a tile."""
    made: int = request.param
    monkeypatch.setattr(plans_sm90, "tokens_of", lambda *_: made)
    return made


def rows_of_eleven_bits(shape: tuple[int, int], seed: int) -> Any:
    """Values of which bfloat16 holds none, half of them 0; their products have exact sums."""
    rng = np.random.default_rng(seed)
    odd = 2 * rng.integers(512, 1024, shape) + 1
    values = odd * np.exp2(rng.integers(-10, -7, shape)) * rng.choice([-1, 1], shape)
    return aligned((values * (rng.random(shape) < 0.5)).astype(F16))


@pytest.mark.parametrize("tokens", [24], indirect=True)
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_every_format_and_ragged_extents(tokens: int, fmt: str) -> None:
    """The warps that split rows have one turn of 16, and half of one."""
    depth = {"nvfp4": 80, "mxfp4": 96}.get(fmt, 32)
    a = rows_of_eleven_bits((tokens - 1, depth), 2)
    check("sm90", a, weights(fmt, 40, depth), checks=fmt == "mxfp4")


@pytest.mark.parametrize("tokens", [40, 64], indirect=True)
def test_tiles_of_more_rows_than_are_split_at_a_time(tokens: int) -> None:
    """Turns of two together, twice, and before half of one; results of 16 bits and of 32."""
    a, b = rows_of_eleven_bits((tokens, 32), 3), weights("mxfp4", 16, 32)
    check("sm90", a, b, out_dtype="float16" if tokens == 40 else "float32", checks=False)


def test_rings_go_on_from_tile_to_tile(sm90: str) -> None:
    """Ranges of several tiles, gathered rows, ids that are negative, rows that are not there."""
    rng = np.random.default_rng(5)
    indices = rng.integers(0, 20, 24).astype(np.int32)
    indices[[0, 4, 20]] = [-1, 20, np.iinfo(np.int32).max]
    options: dict[str, Any] = {"row_offsets": np.array([0, 3, 3, 20, 22, 23], np.int64)}
    options |= {"expert_ids": np.array([1, 1, 0, -1, 0], np.int32), "row_indices": indices}
    a, b = rows_of_eleven_bits((20, 96), 4), weights("mxfp4", 2, 40, 96)
    out = check(sm90, a, b, processors=1, out_dtype="bfloat16", **options)
    there = [1, 2, 3, 5, 19, 22]
    assert out[there].any(axis=1).all() and not out[[0, 4, 20, 21, 23]].any()


def test_infinities_nan_and_subnormal_elements(sm90: str) -> None:
    """What is left of an infinity is nothing, not NaN; of subnormal elements nothing is lost."""
    a = rows_of_eleven_bits((17, 64), 6)
    a[5:7] = np.round(a[5:7])  # for exact sums with the largest element
    a[2, 1], a[3, 2], a[4, 1], a[5, 1], a[6, 2] = np.inf, -np.inf, np.nan, 65504, -65504
    a[7] = (np.arange(64) * 15 - 480) * 2.0**-24
    a[8] = a[8] * F16(2.0**-14)
    q = np.full((24, 64), 1, np.float32)
    q[::2, 3] = 0
    b = nvfp4.quantize(q, "mxfp4")
    out = check(sm90, a, b)
    assert np.isposinf(out[2]).all() and np.isneginf(out[3]).all() and np.isnan(out[4]).all()
    assert np.isfinite(np.delete(out, [2, 3, 4], 0)).all() and out[7].any()


def test_plain_matrices_are_multiplied_one_by_one(sm90: str) -> None:
    b = weights("mxfp4", 24, 64, seed=19, scale_layout="linear")
    b.scales[3, 0], b.scales[7, 1] = 5, 250
    check(sm90, rows_of_eleven_bits((4, 64), 7), b, checks=False)


def test_blocks_of_a_cluster_share_the_depth(sm90: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans_sm90, "split_of", lambda *_: (2, 16))
    a = rows_of_eleven_bits((11, 160), 8)
    check(sm90, a, weights("mxfp4", 40, 160), out_dtype="bfloat16", checks=False)


@pytest.mark.parametrize("halves", [True, False])
def test_pairs(sm90: str, halves: bool) -> None:
    options: dict[str, Any] = {"epilogue": SWIGLU(halves=halves), "out_dtype": "bfloat16"}
    check(sm90, rows_of_eleven_bits((5, 32), 9), weights("nvfp4", 64, 32), checks=False, **options)


def test_quantised_results(sm90: str) -> None:
    a, b = rows_of_eleven_bits((5, 32), 10), weights("mxfp4", 1, 32, 32)
    check_codes(sm90, a, b, "nvfp4", row_offsets=np.array([0, 4], np.int32), checks=False)


def test_counted_rows(sm90: str) -> None:
    a = rows_of_eleven_bits((10, 32), 11).reshape(2, 5, 32)
    b = weights("mxfp4", 2, 24, 32)
    options: dict[str, Any] = {"row_counts": np.array([5, 2], np.int32), "out_dtype": "float32"}
    expected = np.asarray(nvfp4.grouped_matmul(a, b, **options))
    out = aligned(np.full(expected.shape, np.nan, np.float32))
    with nvfp4.simulate("sm_90a", checks=False):
        nvfp4.grouped_matmul(a, nvfp4.prepare_weights(b), out=out, **options)
    assert out.tobytes() == expected.tobytes() and not out[1, 2:].any()


def test_rows_have_the_same_bytes_among_any_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are rounded here; tiles and kernel do not depend on the rows."""
    monkeypatch.setattr(plans_sm90, "INVARIANT_TILES", 0)
    monkeypatch.setattr(plans_sm90, "INVARIANT_TOKENS", 16)
    rng = np.random.default_rng(12)
    a = rng.standard_normal((19, 96)).astype(F16)
    b = nvfp4.quantize(rng.standard_normal((8, 96)).astype(np.float32), "mxfp4")
    prepared = nvfp4.prepare_weights(b)
    plans_products.matmul.cache_clear()
    made = []
    for picked in (np.arange(19), np.array([18]), np.array([3, 17])):
        with nvfp4.simulate("sm_90a", checks=False):
            got = nvfp4.matmul(
                aligned(a[picked]), prepared, out_dtype="float32", batch_invariant=True
            )
        made.append(np.asarray(got))
    plans_products.matmul.cache_clear()
    assert made[1].tobytes() == made[0][[18]].tobytes()
    assert made[2].tobytes() == made[0][[3, 17]].tobytes()
    np.testing.assert_allclose(made[0], nvfp4.matmul(a, b, out_dtype="float32"), rtol=1e-4)


# Plans -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, columns, groups, kernel",
    [
        *((127, 98 * 256, None, "decode"), (4096, 98 * 256, None, "sm90")),
        *((8 * 128 - 1, 11 * 256, 128, "decode"), (8 * 128, 11 * 256, 128, "sm90")),
        *((24 * 8 - 1, 16 * 256, 8, "decode"), (24 * 8, 16 * 256, 8, "sm90")),
    ],
)
def test_which_kernel_makes_products_of_how_many_rows(
    rows: int, columns: int, groups: int | None, kernel: str
) -> None:
    launch = planned_launch(rows, groups, a_dtype="float16", columns=columns)
    assert launch.program.label.startswith(f"matmul_{kernel}"), launch.program.label


@pytest.mark.parametrize("groups", [None, 2048])
@pytest.mark.parametrize("fmt", FORMATS)
def test_four_stages_fit_into_the_shared_memory_of_a_multiprocessor(
    monkeypatch: pytest.MonkeyPatch, fmt: str, groups: int | None
) -> None:
    monkeypatch.setattr(plans_sm90, "many_rows", lambda **_: 0)
    monkeypatch.setattr(plans_sm90, "tokens_of", lambda mean, groups, most, *_: most)
    plans_products.matmul.cache_clear()
    plans_products.grouped_matmul.cache_clear()
    launch = planned_launch(1 << 16, groups, a_dtype="float16", columns=1 << 17, b_format=fmt)
    constants = dict(launch.program.constants)
    assert launch.shared_bytes <= 227 << 10 and constants["STAGES"] >= 4
    assert constants["BLOCKS_PER_SM"] == constants["STEPS"] == 1
    assert launch.block == (512, 1, 1)
    plans_products.matmul.cache_clear()
    plans_products.grouped_matmul.cache_clear()
