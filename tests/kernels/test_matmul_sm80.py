"""Products of the tensor cores' kernels are the golden ones where the sums are exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import plans_products

BF16 = ml_dtypes.bfloat16
OFFSETS = np.array([0, 3, 3, 9], np.int32)
IDS = np.array([1, 0, 2], np.int32)


class Case(NamedTuple):
    """A product: rows, columns, depth, and what the operands are."""

    id: str
    shape: tuple[int, int, int]
    a: str | None
    b: str
    dtype: Any = BF16
    options: Mapping[str, Any] = MappingProxyType({})


CASES = [
    Case("weights only", (5, 8, 64), None, "nvfp4"),
    Case("edges of tiles", (67, 70, 48), None, "nvfp4"),
    Case("float16", (5, 40, 96), None, "mxfp8_e5m2", np.float16),
    Case("both nvfp4", (5, 40, 64), "nvfp4", "nvfp4"),
    Case("mxfp8 and mxfp4", (5, 40, 64), "mxfp8_e4m3", "mxfp4"),
    Case("mxfp4 and nvfp4", (5, 40, 64), "mxfp4", "nvfp4"),
    Case("halves", (5, 40, 64), None, "mxfp4", BF16, {"epilogue": nvfp4.epilogues.swiglu()}),
    Case(
        "interleaved",
        (5, 40, 64),
        None,
        "mxfp4",
        BF16,
        {"epilogue": nvfp4.epilogues.swiglu(halves=False)},
    ),
    Case("bfloat16 result", (5, 9, 32), None, "mxfp8_e4m3", BF16, {"out_dtype": "bfloat16"}),
]


@pytest.fixture(autouse=True)
def any_size_is_enough(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plans choose these kernels for large products only."""
    monkeypatch.setattr(plans_products, "_FEW_PRODUCTS", 1)
    for plan in (plans_products.matmul, plans_products.grouped_matmul):
        plan.cache_clear()
    yield
    for plan in (plans_products.matmul, plans_products.grouped_matmul):
        plan.cache_clear()


def small_integers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.integers(-3, 4, shape) * (rng.random(shape) < 0.5)).astype(dtype)


def simulated(function: Any, *args: Any, **options: Any) -> np.ndarray:
    with nvfp4.simulate() as machine:
        names = []
        run = machine.run
        machine.run = lambda *a, **k: (names.append(k.get("name", "")), run(*a, **k))[1]
        result = np.asarray(function(*args, **options))
    assert any("matmul_sm80" in name for name in names)
    return result


def same(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(got.astype(np.float32), np.asarray(expected, np.float32))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_exact_sums_give_the_golden_bytes(case: Case) -> None:
    rows, columns, depth = case.shape
    a = small_integers((rows, depth), case.dtype)
    b = nvfp4.quantize(small_integers((columns, depth), np.float32, 1), case.b)
    options = {"out_dtype": "float32", **case.options}
    operand = a if case.a is None else nvfp4.quantize(a, case.a)
    same(simulated(nvfp4.matmul, operand, b, **options), nvfp4.matmul(operand, b, **options))


@pytest.mark.parametrize("a_format", [None, "mxfp8_e4m3"])
def test_grouped_rows_have_their_experts_and_the_others_are_zero(a_format: str | None) -> None:
    a = small_integers((12, 64), BF16, 2)
    b = nvfp4.quantize(small_integers((3, 24, 64), np.float32, 3), "nvfp4")
    operand: Any = a
    if a_format is not None:
        operand = nvfp4.grouped_quantize(a, a_format, row_offsets=OFFSETS)
    options = {
        "row_offsets": OFFSETS,
        "expert_ids": np.array([1, 0, -1], np.int32),
        "alpha": np.array([1, 2, 4], np.float32),
        "out_dtype": "float32",
    }
    same(
        simulated(nvfp4.grouped_matmul, operand, b, **options),
        nvfp4.grouped_matmul(operand, b, **options),
    )


def test_gathered_rows_of_a() -> None:
    a = small_integers((4, 32), BF16, 4)
    b = nvfp4.quantize(small_integers((3, 16, 32), np.float32, 5), "mxfp4")
    options = {
        "row_offsets": OFFSETS,
        "expert_ids": IDS,
        "row_indices": np.array([3, 0, -1, 2, 9, 1, 1, 0, 2], np.int32),
        "out_dtype": "float32",
    }
    same(simulated(nvfp4.grouped_matmul, a, b, **options), nvfp4.grouped_matmul(a, b, **options))


def test_all_eleven_bits_of_float16_count() -> None:
    a = np.array([[1 + 2.0**-10, -(2.0**-24), 1025, 0] * 8], np.float16)
    b = nvfp4.quantize(np.tile(np.eye(4, dtype=np.float32)[:3], 8), "mxfp4")
    same(
        simulated(nvfp4.matmul, a, b, out_dtype="float32"), nvfp4.matmul(a, b, out_dtype="float32")
    )


@pytest.mark.parametrize(("code", "scale"), [(0x7C, 127), (0xFC, 120), (0x7E, 127), (0x78, 224)])
def test_halves_of_float16_add_up_beside_infinities_and_near_overflow(
    code: int, scale: int
) -> None:
    codes = np.zeros((3, 32), np.uint8)
    codes[0, 5] = code
    b = nvfp4.QTensor.from_parts(
        codes, np.full((3, 1), scale, np.uint8), "mxfp8_e5m2", scale_layout="linear"
    )
    a = np.zeros((5, 32), np.float16)
    a[:, 5] = [65504, -65504, 1, 0, -2.5]
    same(
        simulated(nvfp4.matmul, a, b, out_dtype="float32"), nvfp4.matmul(a, b, out_dtype="float32")
    )


@pytest.mark.parametrize("exponents", [(120, -120), (-126, 100), (-127, 120), (120, -140)])
def test_scales_that_bfloat16_cannot_hold_are_not_clipped(exponents: tuple[int, int]) -> None:
    small = small_integers((3, 32), np.float64, 6)
    with np.errstate(under="ignore"):
        a = nvfp4.quantize((small * 2.0 ** exponents[0]).astype(np.float32), "mxfp8_e5m2")
        b = nvfp4.quantize((small[:2] * 2.0 ** exponents[1]).astype(np.float32), "mxfp8_e5m2")
    same(
        simulated(nvfp4.matmul, a, b, out_dtype="float32"), nvfp4.matmul(a, b, out_dtype="float32")
    )


def test_a_scale_that_is_nan_makes_its_outputs_nan() -> None:
    x = small_integers((4, 64), np.float32, 7)
    x[1, 40] = np.nan
    b = nvfp4.quantize(x, "mxfp4")
    a = small_integers((2, 64), BF16, 8)
    result = simulated(nvfp4.matmul, a, b, out_dtype="float32")
    assert np.isnan(result[:, 1]).all()
    same(result, nvfp4.matmul(a, b, out_dtype="float32"))
