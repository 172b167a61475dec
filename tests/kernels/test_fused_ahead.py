"""Rows that are fetched a row ahead: every place of a tile and of a block, and who takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import plans, plans_ahead, plans_fused

from .test_fused import EPS, check, data, forget_plans

TYPES = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls take it, however small they are."""
    monkeypatch.setattr(plans_ahead, "_ENOUGH", dict.fromkeys(plans_ahead._ENOUGH, 0))
    forget_plans()
    yield
    forget_plans()


@pytest.mark.parametrize(
    ("layout", "rows"),
    [("tcgen", 1), ("tcgen", 33), ("tcgen", 97), ("tcgen", 130), ("linear", 4), ("linear", 7)],
)
def test_every_number_of_rows_of_a_block_and_of_a_tile(rows: int, layout: str) -> None:
    x, weight = data(rows, 64), data(64, seed=1, special=False)
    options: Any = {"scale_layout": layout}
    check(lambda: nvfp4.quantize(x, "nvfp4", encode_scale="row_amax", **options))
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, "mxfp8", return_hidden=True, **options))
    check(lambda: nvfp4.swiglu_quantize(x, "mxfp4", return_hidden=True, **options))


@pytest.mark.parametrize("columns", [32, 96, 1088, 2048 + 32, 16384])
def test_every_number_of_pieces(columns: int) -> None:
    x, weight = data(3, columns), data(columns, seed=1, special=False)
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, "mxfp8", return_hidden=True))
    gate_up = np.concatenate([x, x], 1)
    check(lambda: nvfp4.swiglu_quantize(gate_up, "mxfp4", scale_layout="linear"))
    if columns % 64 == 0:
        check(lambda: nvfp4.quantize(x, "nvfp4", encode_scale="row_amax"))


@pytest.mark.parametrize("encode", [None, np.float32(0.7), "batch", "row", "row_amax"], ids=str)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("layout", ["tcgen", "linear"])
def test_stacks(layout: str, counted: bool, encode: Any) -> None:
    x, weight = data(3, 6, 64), data(64, seed=1, special=False)
    counts = np.array([6, 0, 4], np.int64) if counted else None
    if isinstance(encode, str) and encode in ("row", "batch"):
        shape = (3, 6, 1) if encode == "row" else (3,)
        encode = np.linspace(0.3, 900.0, int(np.prod(shape))).astype(np.float32).reshape(shape)
    options: Any = {"encode_scale": encode, "row_counts": counts, "scale_layout": layout}
    check(lambda: nvfp4.quantize(x, "nvfp4", **options))
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, "nvfp4", return_hidden=True, **options))
    check(lambda: nvfp4.swiglu_quantize(x, "nvfp4", return_hidden=True, **options))


@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps_gives_the_same(seed: int) -> None:
    x, weight = data(40, 320), np.ones(320, np.float32)
    options: Any = {"encode_scale": "row_amax", "return_hidden": True}
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, "nvfp4", **options), schedule=seed)
    check(lambda: nvfp4.quantize(x, "nvfp4", encode_scale="row_amax"), schedule=seed)
    check(lambda: nvfp4.swiglu_quantize(x, "mxfp8"), schedule=seed)


@TYPES
@pytest.mark.parametrize("halves", ["split", "interleaved"])
def test_pieces_of_usual_gates_have_the_bits_of_the_bounded_ones(halves: str, dtype: str) -> None:
    """Up to 68 in magnitude, and one step beyond, which takes the other way."""
    kind = data(1, dtype=dtype).dtype
    edge = np.array([68.0, -68.0], kind)
    steps = np.nextafter(edge.astype(np.float32), np.float32([100, -100])).astype(kind)
    beyond = np.array([68.5, -68.5], kind)
    small = np.array([0.0, -0.0, 1e-7, -1e-7, 1.0, -1.0, 40.5, -40.5, 66.0, -67.5], kind)
    gates = np.resize(np.concatenate([small, edge, steps]), (8, 64)).astype(kind)
    gates[4:, ::16] = beyond[0]
    gates[6:, 5::16] = beyond[1]
    ups = data(8, 64, dtype=dtype, seed=2)
    x = np.concatenate([gates, ups], 1)
    if halves == "interleaved":
        x = np.stack([gates, ups], 2).reshape(8, 128)
    check(lambda: nvfp4.swiglu_quantize(x, "nvfp4", halves=halves, return_hidden=True))


# Who takes it ------------------------------------------------------------------------------------

FACTS: dict[str, Any] = {
    "front": "rms", "format": "nvfp4", "dtype": "bfloat16", "rows": 8192, "columns": 7168,
    "batches": 1, "row_stride": 7168, "batch_stride": 0, "scale_layout": "tcgen",
    "scale_rounding": "rceil", "encode": "none", "counts_dtype": None, "weight": "same",
    "aligned": True,
}  # fmt: skip


def taken(arch: str = "sm_90a", **facts: Any) -> bool:
    launches = plans_fused.fused_quantize(arch, **{**FACTS, **facts})
    return [one.program.kernel.name for one in launches] == ["fused_ahead_quantize"]


def test_what_it_cannot_do_goes_to_the_other_kernel() -> None:
    assert taken() and taken("sm_100a") and taken(columns=16384, row_stride=16384)
    assert not taken("sm_80") and not taken("sm_120a")
    assert not taken(aligned=False)
    assert not taken(row_stride=-7168)
    assert not taken(columns=16384 + 16)
    assert not taken(rows=1 << 31)
    assert not taken(residual="in")
    assert not taken(encode="amax")
    # Gates and ups of a row do not fit in shared memory.
    assert not taken(front="silu", dtype="float32", columns=16384 * 2)


def test_few_rows_of_norms_and_gates_stay_with_a_row_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    forget_plans()
    assert taken() and not taken(rows=1024)
    assert taken(front="silu", weight="none") and not taken(front="silu", weight="none", rows=2048)
    assert taken(front="plain", weight="none", encode="row_amax", rows=1)


def test_quantize_takes_it_for_scales_of_rows() -> None:
    other = ("front", "counts_dtype", "weight")
    facts = {key: value for key, value in FACTS.items() if key not in other}
    (one,) = plans.quantize("sm_90a", **{**facts, "encode": "row_amax"})
    assert one.program.kernel.name == "fused_ahead_quantize"
    (one,) = plans.quantize("sm_90a", **{**facts, "encode": "row_amax", "aligned": False})
    assert one.program.kernel.name == "quantize"


# The largest magnitude of an array without gaps ---------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", [None, np.nan, np.inf, -400.0, 0.0])
@pytest.mark.parametrize("place", [0, -1, 20000])
def test_the_largest_magnitude_wherever_it_is(place: int, value: float | None, dtype: str) -> None:
    x = data(9, 4096, dtype=dtype, special=False)  # more than a block has, and not a multiple
    if value is not None:
        x.reshape(-1)[place] = value
    if value == 0:
        x[...] = 0
    check(lambda: nvfp4.quantize(x, "nvfp4", encode_scale="amax"))


def test_rows_with_gaps_are_searched_without_them() -> None:
    wide = data(6, 192, special=False)
    wide[:, 128:] = 3e38
    x = wide[:, :128]
    check(lambda: nvfp4.quantize(x, "nvfp4", encode_scale="amax"))
