"""Rows that are fetched a row ahead: every place of a tile and of a block, and who takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import launch, plans, plans_ahead, plans_fused
from nvfp4.arrays import as_array

from .test_fused import EPS, assert_same, check, data, forget_plans

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


@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_warps_gives_the_same(seed: int, layout: str) -> None:
    """Of two warps, and of several rows one after the other in the linear layout."""
    x, weight = data(6, 1088), np.ones(1088, np.float32)
    options: Any = {"encode_scale": "row_amax", "scale_layout": layout}
    check(lambda: nvfp4.quantize(x, "nvfp4", **options), schedule=seed)
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, "nvfp4", **options), schedule=seed)
    gate_up = np.concatenate([x, x], 1)
    check(lambda: nvfp4.swiglu_quantize(gate_up, "mxfp8", scale_layout=layout), schedule=seed)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_everything_is_written_of_rows_that_do_not_count(format: str) -> None:
    """Into arrays full of something else, with pieces for both of a thread's places."""
    x, weight = data(2, 6, 576, special=False), np.ones(576, np.float32)
    counts = np.array([3, 0], np.uint32)
    poisoned = nvfp4.quantize(x, format)
    normed = np.full_like(x, 7)
    for part in (poisoned.codes, poisoned.scales):
        part[...] = 0xAA
    expected = nvfp4.rmsnorm_quantize(x, weight, EPS, format, row_counts=counts, return_hidden=True)
    with nvfp4.simulate():
        nvfp4.rmsnorm_quantize(
            x, weight, EPS, format, row_counts=counts, norm_out=normed, out=poisoned
        )
    assert_same((poisoned, normed), expected)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_counts_that_no_host_looked_at_are_kept_within_the_capacity(dtype: Any) -> None:
    """Launched by hand: on a card nobody reads them before the kernel."""
    x = data(3, 2, 64, special=False)
    wild = [-5 if np.issubdtype(dtype, np.signedinteger) else 0, np.iinfo(dtype).max, 1]
    counts = np.array(wild, dtype)
    expected = nvfp4.quantize(x, "nvfp4", row_counts=np.array([0, 2, 1]))
    out = nvfp4.quantize(x, "nvfp4")
    arrays = {"x": x, "row_counts": counts, "codes": out.codes, "scales": out.scales}
    arrays["decode_scale"] = out.decode_scale
    more = {
        "counts_dtype": np.dtype(dtype).name,
        "front": "plain",
        "columns": 64,
        "rows": 2,
        "batches": 3,
        "row_stride": 64,
    }
    launches = plans_fused.fused_quantize(
        "sm_90a",
        **{**FACTS, **more, "batch_stride": 128, "weight": "none"},
    )
    (one,) = launches
    assert one.program.kernel.name == "fused_ahead_quantize"
    with nvfp4.simulate() as machine:
        buffers = {name: as_array(array, name) for name, array in arrays.items()}
        launch.run(launches, buffers, machine=machine)
    assert_same(out, expected)


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


@TYPES
@pytest.mark.parametrize("halves", ["split", "interleaved"])
def test_gates_decide_which_way_a_piece_goes_and_not_ups(halves: str, dtype: str) -> None:
    gates = np.resize(np.float32([200, -200, -95, -100, -88.5, 103, 0.5, -91]), (4, 64))
    ups = np.resize(np.float32([0.5, -0.25, 0.75, 1]), (4, 64))
    x = np.concatenate([gates, ups], 1)
    if halves == "interleaved":
        x = np.stack([gates, ups], 2).reshape(4, 128)
    x = x.astype(data(1, dtype=dtype).dtype)
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
    assert not taken(row_stride=1 << 31)
    assert not taken(rows=1 << 31)
    assert not taken(rows=1 << 20, batches=1 << 11)
    assert not taken(batches=1 << 16) and taken(batches=(1 << 16) - 1, rows=128)
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
    # Rows of padding do not count: few rows in each of many matrices.
    assert not taken(rows=4, batches=64) and taken(rows=128, batches=64)


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
    stack = data(2, 8, 64, special=False)
    stack[:, 6:] = 3e38
    check(lambda: nvfp4.quantize(stack[:, :6], "nvfp4", encode_scale="amax"))
