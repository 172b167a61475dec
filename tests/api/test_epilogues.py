"""Epilogues: what a function is given, the ready ones, and what counts as the same code."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import epilogues
from tests.vectorlib import same_values

RNG = np.random.default_rng(9)
M, N, K, E = 5, 8, 64, 3
A = nvfp4.quantize(RNG.standard_normal((M, K)).astype(np.float32), "nvfp4")
B = nvfp4.quantize(RNG.standard_normal((N, K)).astype(np.float32), "mxfp4")
STACK = nvfp4.quantize(RNG.standard_normal((E, N, K)).astype(np.float32), "mxfp4")
X = RNG.standard_normal((M, K)).astype(np.float16)
OFFSETS, IDS = np.array([0, 2, 2, 4], np.int32), np.array([2, 1, 0], np.int32)
PLAIN = nvfp4.matmul(A, B, out_dtype="float32")
GROUPED = nvfp4.grouped_matmul(X, STACK, row_offsets=OFFSETS, expert_ids=IDS, out_dtype="float32")
EXPERT_OF_ROW = np.array([2, 2, 0, 0])


def product(epilogue: Any, **more: Any) -> np.ndarray:
    return nvfp4.matmul(A, B, epilogue=epilogue, **{"out_dtype": "float32", **more})


def grouped(epilogue: Any, **more: Any) -> np.ndarray:
    options = {"row_offsets": OFFSETS, "expert_ids": IDS, "out_dtype": "float32"}
    return nvfp4.grouped_matmul(X, STACK, epilogue=epilogue, **{**options, **more})


def numbers(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_a_function_is_given_the_value_and_where_it_stands() -> None:
    seen = []

    def note(value, row, column, expert):
        seen.append((value, row, column, expert))
        return value + np.float32(1)

    got = product(note)
    assert same_values(got, PLAIN + np.float32(1))
    assert len(seen) == M * N
    for value, row, column, expert in seen:
        assert type(value) is np.float32
        assert value == PLAIN[row, column]
        assert expert == 0
    seen.clear()
    got = grouped(note)
    assert {(row, expert) for _, row, _, expert in seen} == {(0, 2), (1, 2), (2, 0), (3, 0)}
    assert same_values(got[:4], GROUPED[:4] + np.float32(1))
    assert not got[4].any()


def test_a_function_is_given_its_arrays_flat() -> None:
    left, right = numbers(M, N), numbers(N)

    def mix(value, row, column, expert, matrix, vector):
        assert matrix.shape == (M * N,)
        return value * matrix[row * N + column] + vector[column]

    assert same_values(product(nvfp4.Epilogue(mix, left, right)), PLAIN * left + right)
    transposed = np.asfortranarray(left)
    assert same_values(product(nvfp4.Epilogue(mix, transposed, right)), PLAIN * left + right)


def test_it_comes_before_the_cast() -> None:
    def tiny(value, row, column, expert):
        return np.float32(1) + value * np.float32(2**-12)

    exact = np.float32(1) + PLAIN * np.float32(2**-12)
    got = product(tiny, out_dtype="bfloat16")
    assert same_values(got, exact.astype(ml_dtypes.bfloat16))


def test_it_comes_before_the_quantisation() -> None:
    weights = nvfp4.quantize(numbers(32, K), "nvfp4")
    plain = nvfp4.matmul(A, weights, out_dtype="float32")
    for format in ("nvfp4", "mxfp8"):
        got = nvfp4.matmul(A, weights, epilogue=epilogues.relu2(), out_dtype=format)
        expected = nvfp4.quantize(np.where(plain < 0, np.float32(0), plain * plain), format)
        np.testing.assert_array_equal(got.codes, expected.codes)
        np.testing.assert_array_equal(got.scales, expected.scales)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_bias_is_added_by_column(dtype: Any) -> None:
    bias = numbers(N).astype(dtype)
    assert same_values(product(epilogues.bias(bias)), PLAIN + bias.astype(np.float32))
    by_expert = numbers(E, N).astype(dtype)
    expected = GROUPED.copy()
    expected[:4] += by_expert.astype(np.float32)[EXPERT_OF_ROW]
    assert same_values(grouped(epilogues.bias(by_expert)), expected)


@pytest.mark.parametrize("shape", [(M,), (M, 1)])
def test_row_scale_multiplies_rows(shape: tuple[int, ...]) -> None:
    scale = numbers(*shape)
    assert same_values(product(epilogues.row_scale(scale)), PLAIN * scale.reshape(M, 1))
    expected = GROUPED * scale.reshape(M, 1)
    expected[4] = 0
    assert same_values(grouped(epilogues.row_scale(scale)), expected)


def test_residual_add_adds_a_matrix() -> None:
    residual = numbers(M, N)
    assert same_values(product(epilogues.residual_add(residual)), PLAIN + residual)
    expected = GROUPED + residual
    expected[4] = 0
    assert same_values(grouped(epilogues.residual_add(residual)), expected)


def test_relu2_squares_what_is_positive() -> None:
    got = product(epilogues.relu2())
    assert same_values(got, np.where(PLAIN < 0, np.float32(0), PLAIN * PLAIN))
    assert np.isnan(epilogues.relu2().fn(np.float32(np.nan), 0, 0, 0))


def gated(gate: np.ndarray, up: np.ndarray, alpha: float, beta: float, limit: float) -> np.ndarray:
    """The formula in float64."""
    gate, up = (
        np.minimum(gate.astype(np.float64), limit),
        np.clip(up.astype(np.float64), -limit, limit),
    )
    return gate / (1 + np.exp(-alpha * gate)) * (up + beta)


SWIGLU = {
    "swiglu": ({}, (1.0, 0.0, math.inf)),
    "gpt-oss": ({"alpha": 1.702, "beta": 1.0, "limit": 7.0}, (1.702, 1.0, 7.0)),
    "limited": ({"limit": 0.5}, (1.0, 0.0, 0.5)),
}


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize(("options", "formula"), SWIGLU.values(), ids=SWIGLU.keys())
def test_swiglu_gates_pairs_of_columns(options: Any, formula: Any, halves: bool) -> None:
    gate, up = (PLAIN[:, :4], PLAIN[:, 4:]) if halves else (PLAIN[:, 0::2], PLAIN[:, 1::2])
    got = product(epilogues.swiglu(**options, halves=halves))
    assert got.shape == (M, N // 2)
    np.testing.assert_allclose(got, gated(gate, up, *formula), rtol=1e-6, atol=1e-7)
    got = grouped(epilogues.swiglu(**options, halves=halves))
    assert got.shape == (M, N // 2)
    gate, up = (GROUPED[:, :4], GROUPED[:, 4:]) if halves else (GROUPED[:, 0::2], GROUPED[:, 1::2])
    np.testing.assert_allclose(got[:4], gated(gate, up, *formula)[:4], rtol=1e-6, atol=1e-7)
    assert not got[4].any()


@pytest.mark.parametrize("gate", [-3e38, -1e4, -88.0, 0.0, 88.0, 1e4, 3e38])
def test_swiglu_neither_overflows_nor_warns_on_the_way(gate: float) -> None:
    fn = epilogues.swiglu().fn
    got = fn(np.float32(gate), np.float32(1), 0, 0, 0)
    assert type(got) is np.float32
    expected = gate if gate > 0 else gate / (1 + math.exp(min(-gate, 700)))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-37)
    for nan in ((np.float32(np.nan), np.float32(1)), (np.float32(1), np.float32(np.nan))):
        assert np.isnan(fn(*nan, 0, 0, 0))


def test_a_pair_function_is_given_both_and_the_column_of_the_result() -> None:
    def second(gate, up, row, column, expert):
        return up + np.float32(column)

    got = product(nvfp4.Epilogue(second, pair=True, halves=False))
    assert same_values(got, PLAIN[:, 1::2] + np.arange(4, dtype=np.float32))


def test_pairs_need_an_even_number_of_columns() -> None:
    odd = nvfp4.quantize(numbers(7, K), "mxfp4")
    with pytest.raises(ValueError, match=r"even number of columns.*7"):
        nvfp4.matmul(A, odd, epilogue=epilogues.swiglu())


@pytest.mark.parametrize("made", [epilogues.swiglu(), epilogues.relu2()])
def test_an_epilogue_of_no_rows_has_its_columns(made: nvfp4.Epilogue) -> None:
    none = nvfp4.quantize(np.zeros((0, K), np.float32), "nvfp4")
    assert nvfp4.matmul(none, B, epilogue=made).shape == (0, N // 2 if made.pair else N)
    empty = grouped(made, row_offsets=np.array([0]), expert_ids=None)
    assert empty.shape == (M, N // 2 if made.pair else N)
    assert not empty.any()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what", ["relu", 3, (lambda value, row, column, expert: value, 1), math.exp]
)
def test_an_epilogue_is_a_python_function(what: Any) -> None:
    with pytest.raises(TypeError, match="epilogue must be a Python function"):
        product(what)


@pytest.mark.parametrize(
    "fn",
    [
        lambda value: value,
        lambda value, row, column, expert, more: value,
        lambda *values: values[0],
        lambda value, row, column, expert, *, more=1: value,
    ],
)
def test_a_function_takes_what_it_is_given(fn: Any) -> None:
    with pytest.raises(TypeError, match=r"must take \(value, row, column, expert\)"):
        product(fn)
    with pytest.raises(TypeError, match=r"must take \(gate, up, row, column, expert\)"):
        nvfp4.Epilogue(lambda value, row, column, expert: value, pair=True)


def test_a_function_returns_what_is_stored() -> None:
    def forgets(value: Any, row: Any, column: Any, expert: Any) -> Any:
        value *= 2

    for call in (product, grouped):
        with pytest.raises(TypeError, match=r"epilogue forgets must return .*; it returned None"):
            call(forgets)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (epilogues.bias, ()),
        (epilogues.bias, (2, 3, 4)),
        (epilogues.row_scale, (2, 2)),
        (epilogues.residual_add, (4,)),
    ],
)
def test_ready_epilogues_take_arrays_of_their_shapes(make: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must have"):
        make(np.ones(shape, np.float32))
    with pytest.raises(TypeError, match="must be an array"):
        make([1.0])


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (epilogues.bias(numbers(N + 1)), rf"\[N\], here \({N},\); got \({N + 1},\)"),
        (epilogues.bias(numbers(1)), rf"\({N},\)"),
        (epilogues.bias(numbers(E, N)), rf"\(1, {N}\)"),
        (epilogues.row_scale(numbers(M - 1)), rf"\({M},\)"),
        (epilogues.row_scale(numbers(M + 1, 1)), rf"\({M}, 1\)"),
        (epilogues.residual_add(numbers(N, M)), rf"\({M}, {N}\)"),
    ],
)
def test_arrays_of_ready_epilogues_have_the_shape_of_the_result(
    made: nvfp4.Epilogue, shape: str
) -> None:
    with pytest.raises(ValueError, match=f"epilogue array 0.*{shape}"):
        product(made)


def test_arrays_by_expert_have_one_row_an_expert() -> None:
    grouped(epilogues.bias(numbers(E, N)))
    for wrong in (E - 1, E + 1):
        with pytest.raises(ValueError, match=r"epilogue array 0.*\[E, N\]"):
            grouped(epilogues.bias(numbers(wrong, N)))


@pytest.mark.parametrize("axes", [("N", "N"), (), ("K",), "NM"])
def test_axes_are_letters_for_each_array(axes: Any) -> None:
    with pytest.raises(ValueError, match="axes"):
        nvfp4.Epilogue(lambda value, row, column, expert, one: value, numbers(N), axes=axes)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_a_limit_is_positive(limit: float) -> None:
    with pytest.raises(ValueError, match="limit"):
        epilogues.swiglu(limit=limit)


@pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.bool_])
def test_epilogue_arrays_are_of_dtypes_that_kernels_read(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"epilogue array 0.*float32"):
        product(epilogues.bias(np.ones(N, dtype)))


# --- what is compiled once ------------------------------------------------------------------------


def scaled(factor: Any) -> nvfp4.Epilogue:
    def scale(value, row, column, expert):
        return value * factor

    return nvfp4.Epilogue(scale)


def test_a_function_made_anew_with_the_same_constants_is_the_same_code() -> None:
    one, again = scaled(np.float32(2)).code(()), scaled(np.float32(2)).code(())
    assert one.fn is not again.fn
    assert one == again
    assert hash(one) == hash(again)


@pytest.mark.parametrize("other", [np.float32(3), 2, 2.0, True, np.float64(2)])
def test_another_constant_or_type_is_other_code(other: Any) -> None:
    assert scaled(np.float32(2)).code(()) != scaled(other).code(())


def test_flags_types_and_defaults_count() -> None:
    def pair(gate, up, row, column, expert):
        return gate

    def with_default(value, row, column, expert=0):
        return value

    one = nvfp4.Epilogue(pair, pair=True).code(())
    assert one != nvfp4.Epilogue(pair, pair=True, halves=False).code(())
    bias = epilogues.bias(np.ones(4, np.float32))
    assert bias.code(("float32",)) == epilogues.bias(np.zeros(9, np.float32)).code(("float32",))
    assert bias.code(("float32",)) != bias.code(("bfloat16",))
    first = nvfp4.Epilogue(with_default).code(())
    with_default.__defaults__ = (1,)
    assert nvfp4.Epilogue(with_default).code(()) != first


FACTOR = np.float32(2)


def helper(value):
    return value * FACTOR


def calls_helper(value, row, column, expert):
    return helper(value)


def test_globals_and_helpers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = nvfp4.Epilogue(calls_helper).code(())
    assert before == nvfp4.Epilogue(calls_helper).code(())
    monkeypatch.setitem(calls_helper.__globals__, "FACTOR", np.float32(5))
    assert nvfp4.Epilogue(calls_helper).code(()) != before
