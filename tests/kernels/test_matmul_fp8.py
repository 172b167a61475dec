"""compute="fp8" on the simulated machine: the golden bytes of exact sums, by the kernels meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import golden, plans_products, plans_sm90
from nvfp4.api import _place

from . import checks
from .checks import POISON
from .products_sm100 import aligned
from .simulated import Simulated

BF16 = ml_dtypes.bfloat16
OFFSETS = np.array([0, 2, 2, 6, 7], np.int32)
#: How many kernels of many rows there are, and of what; 0: the kernel of few rows.
KERNELS: dict[int, list[tuple[str, ...]]] = {
    0: [("matmul_decode",)],
    1: [("matmul_sm90", "COMPUTE=bfloat16", "MATRICES=all")],
    2: [
        ("matmul_sm90", "COMPUTE=fp8", "MATRICES=narrow"),
        ("matmul_sm90", "COMPUTE=bfloat16", "MATRICES=others"),
    ],
}


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel of many rows makes whatever product; few stages and blocks are used again."""
    plans = (plans_products.matmul, plans_products.grouped_matmul)
    monkeypatch.setattr(plans_sm90, "many_rows", lambda **_: 0)
    monkeypatch.setattr(plans_sm90, "MOST_STAGES", 3)
    monkeypatch.setattr(_place, "processors", lambda where: 2)
    for plan in plans:
        plan.cache_clear()
    yield
    for plan in plans:
        plan.cache_clear()


def integers(shape: tuple[int, ...], seed: int, dtype: Any = BF16) -> Any:
    """Small integers, half of them 0, whose products have exact sums; the first of a row is 7."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, shape) * (rng.random(shape) < 0.5)
    values[..., 0] = 7
    return aligned(values.astype(np.float32).astype(dtype))


def weights(fmt: str, *shape: int, seed: int = 1) -> nvfp4.QTensor:
    return nvfp4.quantize(integers(shape, seed, np.float32), fmt, scale_layout="linear")


def with_scale(q: nvfp4.QTensor, place: tuple[int, ...], byte: int) -> nvfp4.QTensor:
    scales = q.scales.copy()
    scales[place] = byte
    return dataclasses.replace(q, scales=scales)


def not_narrow(q: nvfp4.QTensor, *row: int) -> nvfp4.QTensor:
    """A row has its second block alone, with a scale far below the others: sums stay exact."""
    codes = q.codes.copy()
    codes[(*row, slice(0, 16))] = 0
    q = dataclasses.replace(q, codes=codes)
    return with_scale(q, (*row, 1), int(q.scales.max()) - 20)


def check(
    a: Any,
    b: nvfp4.QTensor,
    kernels: int = 2,
    *,
    schedule: Any = "round_robin",
    checked: bool = False,
    **options: Any,
) -> np.ndarray:
    """Multiply over poison on the simulated machine; `kernels` of many rows, 0: the other one."""
    function = nvfp4.grouped_matmul if "row_offsets" in options else nvfp4.matmul
    options = {"out_dtype": "float32", "compute": "fp8", **options}
    w = nvfp4.prepare_weights(b)
    codes, scale = nvfp4.quantize_rows(a)
    expected = np.asarray(function(codes, w, a_scale=scale, **options))
    plain = dict(options, compute=None)
    rounded = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    np.testing.assert_array_equal(  # 7 is the largest: nothing was rounded
        expected.astype(np.float32), np.asarray(function(a, w, **plain)).astype(np.float32)
    )
    assert (rounded == a.astype(np.float32)).all()
    out = aligned(np.zeros(expected.shape, expected.dtype))
    poison = out.reshape(-1).view(np.uint8)
    poison[...] = POISON
    untouched = out.copy()
    names: list[str] = []
    written = []
    machine: Any
    with nvfp4.simulate("sm_90a", schedule=schedule, checks=checked) as machine:
        run = machine.run

        def noted(*args: Any, **named: Any) -> Any:
            names.append(named["name"])
            poison[...] = POISON
            run(*args, **named)
            written.append(out.copy())

        machine.run = noted
        assert function(aligned(codes), w, a_scale=scale, out=out, **options) is out
    assert len(names) == len(KERNELS[kernels])
    for name, parts in zip(names, KERNELS[kernels], strict=True):
        assert all(part in name for part in parts), names
    # Each launch leaves to the other what is the other's.
    bits = f"u{out.itemsize}"
    by = [values.view(bits) != untouched.view(bits) for values in written]
    assert (sum(mask.astype(int) for mask in by) == 1).all()
    got = untouched
    for values, mask in zip(written, by, strict=True):
        got[mask] = values[mask]
    assert got.tobytes() == expected.tobytes()
    return got


# Many rows ---------------------------------------------------------------------------------------


def test_ragged_extents_and_a_ring_that_is_used_again(many: None) -> None:
    check(integers((19, 224), 2), weights("mxfp4", 40, 224), checked=True)


def test_scales_and_codes_of_the_whole_window(many: None) -> None:
    """Each row of the weights has one scale of the fifteen, or two, and elements of all codes."""
    codes = np.zeros((32, 32), np.uint8)
    codes[:, :8] = codes[:, 16:24] = np.arange(8) * 0x11 + np.array([[0], [0x88]] * 16)
    scales = 113 + np.arange(64).reshape(32, 2) % 15
    b = nvfp4.QTensor.from_parts(codes, scales.astype(np.uint8), "mxfp4", scale_layout="linear")
    assert nvfp4.prepare_weights(b).scales[4:8].any()
    a = np.eye(16, 64, dtype=np.float32) + np.eye(16, 64, 33, dtype=np.float32)
    check(aligned((7 * a).astype(BF16)), b)


def test_more_rows_than_a_warp_has_lanes_for(many: None) -> None:
    check(integers((140, 32), 4), weights("mxfp4", 24, 32), schedule=1)


def test_a_matrix_that_is_not_narrow_takes_the_other_products(many: None) -> None:
    wide = not_narrow(weights("mxfp4", 24, 64), 3)
    assert not nvfp4.prepare_weights(wide).scales[4:12].any()
    check(integers((5, 64), 5), wide)


def test_each_expert_takes_its_own(many: None) -> None:
    """Rows gathered, experts switched off, rows of no range, an epilogue that knows places."""
    b = not_narrow(weights("mxfp4", 3, 24, 64), 1, 3)
    made = nvfp4.prepare_weights(b).scales
    assert made[[0, 2], 4:8].any(axis=1).all() and not made[1, 4:8].any()
    options: dict[str, Any] = {
        "row_offsets": OFFSETS,
        "expert_ids": np.array([1, 0, 2, -1], np.int32),
        "row_indices": np.array([3, -1, 2, 9, 1, 1, 3, 0], np.int32),
        "epilogue": nvfp4.epilogues.residual_add(integers((8, 24), 8, np.float32)),
        "alpha": np.array([1, 2, 4], np.float32),
    }
    out = check(integers((4, 64), 6), b, **options)
    assert not out[[1, 3, 6, 7]].any() and out[[0, 2, 4, 5]].any(axis=1).all()


def test_more_ranges_than_a_warp_has_lanes(many: None) -> None:
    """Ranges of both kinds of matrices, most without rows."""
    sizes = np.zeros(70, np.int32)
    sizes[39:41] = 1  # of the same lane
    ids = np.arange(70, dtype=np.int64) % 2
    b = not_narrow(weights("mxfp4", 2, 8, 64), 1, 3)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    check(integers((2, 64), 13), b, row_offsets=offsets, expert_ids=ids)


def test_nvfp4_weights_take_products_of_bfloat16(many: None) -> None:
    check(integers((5, 48), 8), weights("nvfp4", 24, 48), 1)


# Few rows, rows that are quantised in the call ---------------------------------------------------


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_few_rows(fmt: str) -> None:
    check(integers((3, 160), 9), weights(fmt, 40, 160), 0)


@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_rows_are_quantised_in_the_call(dtype: Any) -> None:
    rng = np.random.default_rng(11)
    a = rng.standard_normal((3, 64)).astype(dtype)
    a[:, 1:] = 0  # one product a sum: exact
    w = nvfp4.prepare_weights(weights("mxfp4", 24, 64))
    expected = nvfp4.matmul(a, w, compute="fp8", out_dtype="float32")
    with nvfp4.simulate("sm_90a"):
        got = nvfp4.matmul(a, w, compute="fp8", out_dtype="float32")
    assert got.tobytes() == expected.tobytes() and got.any()


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120a"])
def test_other_architectures_are_refused_by_name(arch: str) -> None:
    w = nvfp4.prepare_weights(weights("mxfp4", 24, 64))
    a = integers((3, 64), 1)
    with nvfp4.simulate(arch), pytest.raises(nvfp4.UnsupportedError, match=f"sm_90a.*got {arch}"):
        nvfp4.matmul(a, w, compute="fp8")
    ranges = {"row_offsets": np.array([0, 3], np.int32)}
    stack = nvfp4.prepare_weights(weights("mxfp4", 1, 24, 64))
    with nvfp4.simulate(arch), pytest.raises(nvfp4.UnsupportedError, match=f"sm_90a.*got {arch}"):
        nvfp4.grouped_matmul(a, stack, compute="fp8", **ranges)


# quantize_rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("aligned_rows", [True, False])
def test_rows_of_all_kinds(dtype: Any, aligned_rows: bool) -> None:
    rng = np.random.default_rng(12)
    x = (rng.standard_normal((11, 560)) * 10 ** rng.uniform(-3, 3, (11, 1))).astype(np.float32)
    x[1] = 0
    x[2, 3], x[3, 559], x[4, 9] = np.nan, np.inf, -np.inf
    x[5] = 0
    x[5, 5] = -(2.0**-133)
    x[6] *= 1e30
    with np.errstate(over="ignore"):
        x = x.astype(dtype)
    wide = np.zeros((11, 568), dtype)
    wide[:, : x.shape[1]] = x
    if aligned_rows:
        rows = checks.spread(x, 0, 0)
    else:
        rows = wide[:, 1:561].copy()
        rows = checks.spread(rows, 0, 1)
    expected = golden.quantize_rows(rows)
    facts = {
        **{"dtype": np.dtype(dtype).name, "rows": 11, "columns": 560},
        **{"row_stride": rows.strides[0] // rows.itemsize, "aligned": aligned_rows},
    }
    outputs = {
        "codes": checks.Out((11, 560), np.uint8),
        "scales": checks.Out((11, 1), np.float32),
    }
    got = Simulated()("quantize_rows", facts, {"x": rows}, outputs)
    checks.assert_bytes("codes", got["codes"], expected[0])
    checks.assert_bytes("scales", got["scales"], expected[1])
