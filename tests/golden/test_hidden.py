"""Gated activations and norms: every operation rounded once, and close to the true values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4.golden import hidden
from nvfp4.golden.casts import cast_float, widen
from nvfp4.ptx.arith import fma_rn

#: Stored bits of the significand and one more; exponent of the smallest subnormal.
TYPES = {"bfloat16": (ml_dtypes.bfloat16, 8, -133), "float16": (np.float16, 11, -24)}


def last_places(got: np.ndarray, true: np.ndarray, bits: int, smallest: int) -> np.ndarray:
    """Distance from float64 values, in last places of a type."""
    exponent = np.floor(np.log2(np.maximum(np.abs(true), 1e-300)))
    place = 2.0 ** np.maximum(exponent - bits + 1, smallest)
    distance: np.ndarray = np.abs(got.astype(np.float64) - true) / place
    return distance


def exact(gate: np.ndarray, kind: str) -> np.ndarray:
    """The gated activation in float64, for up = 1."""
    with np.errstate(over="ignore"):
        if kind == "silu":
            return gate / (1 + np.exp(-gate))
        gate = np.minimum(gate, 7)
        return 2 * gate / (1 + np.exp(-1.702 * gate))


def activated(gate: np.ndarray, kind: str) -> np.ndarray:
    """h of gates [n], for up = 1."""
    return hidden.swiglu(np.stack([gate, np.ones_like(gate)], 1), kind=kind)[:, 0]


def test_fma_rounds_once_for_any_operands() -> None:
    rng = np.random.default_rng(0)
    a, b, c = rng.integers(0, 1 << 32, (3, 4000), np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        # What is left of the product beyond float32.
        c[::2] = -(a[::2].astype(np.float64) * b[::2]).astype(np.float32)
        got = hidden.fma(a, b, c)
    expected = np.array([fma_rn(*some) for some in zip(a, b, c, strict=True)], np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", hidden.KINDS)
@pytest.mark.parametrize("dtype", TYPES)
def test_every_gate_of_sixteen_bits_is_within_seven_tenths_of_a_last_place(
    dtype: str, kind: str
) -> None:
    scalar, bits, smallest = TYPES[dtype]
    gate = np.arange(1 << 16, dtype=np.uint16).view(scalar)
    h = activated(gate, kind)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wide = widen(gate).astype(np.float64)
    finite = np.isfinite(wide)
    assert last_places(h[finite], exact(wide[finite], kind), bits, smallest).max() < 0.7
    assert np.isnan(widen(h[np.isnan(wide)])).all()
    low, high = (activated(np.array([v], scalar), kind)[0] for v in (-np.inf, np.inf))
    assert low == 0 and high == (np.inf if kind == "silu" else 14)


@pytest.mark.parametrize("kind", hidden.KINDS)
def test_float32_is_within_three_last_places(kind: str) -> None:
    rng = np.random.default_rng(1)
    gate = np.concatenate([rng.standard_normal(40000) * 4, rng.uniform(-45, 45, 40000)])
    gate = gate.astype(np.float32)
    distance = last_places(activated(gate, kind), exact(gate.astype(np.float64), kind), 24, -149)
    assert distance.max() < 3


def test_small_gates_are_halved_exactly() -> None:
    gate = np.array([2.0**-100, -(2.0**-120), 0.0, -0.0], np.float32)
    h = activated(gate, "silu")
    np.testing.assert_array_equal(h, gate / 2)
    np.testing.assert_array_equal(np.signbit(h), np.signbit(gate))


def test_up_scales_and_is_bounded_for_gpt_oss_alone() -> None:
    gate_up = np.array([[2.0, 100.0], [2.0, -100.0], [9.0, 0.0], [np.nan, 1.0]], np.float32)
    silu = hidden.swiglu(gate_up)[:, 0]
    np.testing.assert_allclose(silu[:3], exact(gate_up[:3, 0], "silu") * gate_up[:3, 1], rtol=1e-6)
    oss = hidden.swiglu(gate_up, kind="gpt-oss")[:, 0]
    half = exact(gate_up[:3, 0], "gpt-oss") / 2
    np.testing.assert_allclose(oss[:3], half * [8, -6, 1], rtol=1e-6)
    assert np.isnan(silu[3]) and np.isnan(oss[3])


def test_halves_and_pairs_are_two_orders_of_the_same() -> None:
    rng = np.random.default_rng(2)
    gate, up = rng.standard_normal((2, 3, 32)).astype(np.float16)
    split = hidden.swiglu(np.concatenate([gate, up], -1))
    paired = hidden.swiglu(np.stack([gate, up], -1).reshape(3, 64), halves="interleaved")
    np.testing.assert_array_equal(split, paired)


def slow_sum(row: np.ndarray) -> np.float32:
    """The order of a row's sum, one operation after the other."""
    total = np.float32(0)
    for first in range(0, len(row), 16 * 1024):
        chunk = row[first : first + 16 * 1024]
        groups = [np.float32(0)] * 32
        for g in range(-(-len(chunk) // 512)):
            pieces = [np.float32(0)] * 32
            for p in range(-(-len(chunk[g * 512 : g * 512 + 512]) // 16)):
                start = g * 512 + p * 16
                for value in chunk[start : start + 16]:
                    pieces[p] = fma_rn(value, value, pieces[p])
            groups[g] = tree(pieces)
        total = np.float32(total + tree(groups))
    return total


def tree(values: list[np.float32]) -> np.float32:
    while len(values) > 1:
        half = len(values) // 2
        values = [np.float32(a + b) for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


@pytest.mark.parametrize("columns", [16, 48, 512, 2880, 16384, 16384 + 1040])
def test_sums_of_squares_have_one_order(columns: int) -> None:
    rng = np.random.default_rng(columns)
    rows = rng.standard_normal((2, columns)).astype(np.float32)
    expected = np.array([slow_sum(row) for row in rows])
    np.testing.assert_array_equal(hidden.row_sums(rows), expected)
    np.testing.assert_allclose(expected, (rows.astype(np.float64) ** 2).sum(1), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_norms_are_close_and_residuals_are_rounded_first(dtype: str) -> None:
    rng = np.random.default_rng(3)
    x, residual = (cast_float(v, dtype) for v in rng.standard_normal((2, 4, 2880)).astype("f4"))
    weight = rng.standard_normal(2880).astype(np.float32)
    h, total = hidden.rmsnorm(x, weight, 1e-5, residual=residual)
    np.testing.assert_array_equal(
        widen(total), widen(cast_float(widen(x) + widen(residual), dtype))
    )
    wide = widen(total).astype(np.float64)
    true = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * weight
    bits, smallest = {"bfloat16": (8, -133), "float16": (11, -24), "float32": (24, -149)}[dtype]
    assert last_places(widen(h), true, bits, smallest).max() < (3 if dtype == "float32" else 0.51)


def test_rows_do_not_depend_on_each_other() -> None:
    rng = np.random.default_rng(4)
    x: Any = rng.standard_normal((70, 2048)).astype(np.float32)
    weight = np.ones(2048, np.float32)
    h, _ = hidden.rmsnorm(x, weight, 0.0)
    np.testing.assert_array_equal(hidden.rmsnorm(x[63:64], weight, 0.0)[0], h[63:64])


def test_there_may_be_no_rows_and_no_columns() -> None:
    assert hidden.swiglu(np.zeros((0, 64), np.float16)).shape == (0, 32)
    assert hidden.swiglu(np.zeros((3, 0), np.float16)).shape == (3, 0)
    h, total = hidden.rmsnorm(np.zeros((2, 0), np.float32), np.zeros(0, np.float32), 1e-5)
    assert h.shape == total.shape == (2, 0)
