from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4 import golden
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, NVFP4
from tests.vectorlib import same_values


def normal(shape, seed=0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def in_order(a, b) -> np.ndarray:
    """The sums term by term in float32 scalars, k ascending."""
    out = np.empty((len(a), len(b)), np.float32)
    with np.errstate(all="ignore"):
        for m, n in np.ndindex(*out.shape):
            total = np.float32(0)
            for x, y in zip(a[m], b[n], strict=True):
                total = total + x * y
            out[m, n] = total
    return out


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (5, 7, 96), (33, 2, 64), (2, 40, 160)])
def test_terms_are_added_in_order_with_one_rounding_each(m, n, k):
    a, b = normal((m, k), 1), normal((n, k), 2)
    got = golden.matmul(a, b)
    expected = in_order(a, b)
    assert same_values(got, expected)
    # The order matters for these inputs, so another one would have been seen.
    if k > 1:
        assert not same_values(golden.matmul(a[:, ::-1], b[:, ::-1]), expected)


def test_large_products_are_the_same_as_their_parts():
    a, b = normal((70, 64), 1), normal((2100, 64), 2)
    whole = golden.matmul(a, b)
    for rows, columns in ((slice(0, 1), slice(0, 2100)), (slice(31, 66), slice(1000, 1100))):
        assert same_values(golden.matmul(a[rows], b[columns]), whole[rows, columns])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_plain_half_operands_are_widened_exactly(dtype):
    a, b = normal((4, 64), 1, dtype), normal((3, 64), 2)
    assert same_values(golden.matmul(a, b), golden.matmul(a.astype(np.float32), b))


def test_scales_are_folded_in_the_order_alpha_a_b_and_multiplied_once_after_the_sum():
    a, b = normal((6, 32), 1), normal((5, 32), 2)
    alpha = np.float32(1 / 3)
    d_a, d_b = (
        np.float32(np.linspace(0.1, 9, 6))[:, None],
        np.float32(np.linspace(3, 7, 5))[:, None],
    )
    sums = golden.matmul(a, b)
    expected = sums * ((alpha * d_a) * d_b.T)
    got = golden.matmul(a, b, alpha=alpha, decode_a=d_a, decode_b=d_b)
    assert same_values(got, expected)
    assert not same_values(got, sums * (alpha * (d_a * d_b.T)))
    one = golden.matmul(a, b, alpha=alpha, decode_a=d_a[0, 0], decode_b=d_b[0, 0])
    assert same_values(one, sums * ((alpha * d_a[0, 0]) * d_b[0, 0]))


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_a_nan_scale_makes_every_output_that_uses_its_block_nan_and_no_other(fmt):
    b = normal((4, 64))
    codes, scales, decode = golden.quantize(b, fmt, scale_layout="linear")
    scales[2, 1] = 0x7F if fmt is NVFP4 else 0xFF
    product = golden.element_scale_product(codes, scales, fmt, shape=b.shape, scale_layout="linear")
    a = np.zeros((3, 64), np.float32)
    out = golden.matmul(a, product, decode_b=decode)
    assert np.isnan(out[:, 2]).all()
    assert (out[:, [0, 1, 3]] == 0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_results_that_are_too_large_become_infinite_and_nans_stay(dtype):
    a = np.float32([[3e38], [-3e38], [np.nan], [np.inf]])
    out = golden.matmul(a, np.float32([[10]]), out_dtype=dtype)
    assert out.dtype.name == dtype
    assert np.isposinf(out[0, 0])
    assert np.isneginf(out[1, 0])
    assert np.isnan(out[2, 0])
    assert np.isposinf(out[3, 0])
    ties = golden.matmul(np.float32([[65520], [1.00390625]]), np.float32([[1]]), out_dtype=dtype)
    tops = {"bfloat16": (65536, 1), "float16": (np.inf, 1.00390625), "float32": (65520, 1.00390625)}
    assert ties[:, 0].astype(np.float32).tolist() == list(tops[dtype])


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 32), (3, 0, 32), (3, 4, 0), (0, 0, 0)])
def test_sizes_of_zero_are_legal(m, n, k):
    out = golden.matmul(np.ones((m, k), np.float32), np.ones((n, k), np.float32), alpha=2)
    assert out.shape == (m, n)
    assert not out.any()


def test_an_identity_returns_the_dequantised_weights():
    for fmt in FORMATS.values():
        b = normal((20, 64))
        parts = golden.quantize(b, fmt, scale_layout="linear")
        product = golden.element_scale_product(
            *parts[:2], fmt, shape=b.shape, scale_layout="linear"
        )
        out = golden.matmul(np.eye(64, dtype=np.float32), product, decode_b=parts[2])
        values = golden.dequantize(*parts, fmt, shape=b.shape, scale_layout="linear")
        assert same_values(out.T.copy(), values, zero_sign_free=True)


def test_an_epilogue_gets_values_before_the_cast_with_their_rows_columns_and_expert():
    a, b = normal((4, 32), 1), normal((6, 32), 2)
    bias = np.float32(np.arange(6))

    def epilogue(values, rows, columns, expert):
        assert values.dtype == np.float32
        assert rows.shape == (4, 1)
        assert columns.shape == (1, 6)
        assert expert == 0
        return values + bias[columns] + np.float32(10) * rows.astype(np.float32)

    got = golden.matmul(a, b, alpha=0.5, epilogue=epilogue, out_dtype="bfloat16")
    plain = golden.matmul(a, b, alpha=0.5)
    expected = plain + bias + np.float32(10) * np.arange(4, dtype=np.float32)[:, None]
    assert same_values(got, golden.cast_float(expected, "bfloat16"))


def test_an_epilogue_may_halve_the_columns():
    a, b = normal((4, 32), 1), normal((6, 32), 2)
    plain = golden.matmul(a, b)
    got = golden.matmul(a, b, epilogue=lambda v, *_: v[:, 0::2] * v[:, 1::2])
    assert same_values(got, plain[:, 0::2] * plain[:, 1::2])
    empty = golden.grouped_matmul(
        a[:0], b[None], row_offsets=[0, 0], epilogue=lambda v, *_: v[:, 0::2] * v[:, 1::2]
    )
    assert empty.shape == (0, 3)


SPLITS = [[0], [0, 0], [0, 9], [0, 3, 3, 9], [0, 0, 5, 9], [0, 1, 2, 7]]


@pytest.mark.parametrize("offsets", SPLITS, ids=str)
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_a_grouped_product_is_a_loop_of_products_with_zero_rows_elsewhere(offsets, out_dtype):
    a, b = normal((9, 64), 1), normal((3, 5, 64), 2)
    groups = len(offsets) - 1
    ids = [2, 0, 2][:groups]
    alpha = np.float32([0.3, 5, 7])
    d_a, d_b = np.float32(np.linspace(1, 3, groups)), np.float32([2, 3, 1 / 7])
    got = golden.grouped_matmul(
        a,
        b,
        row_offsets=offsets,
        expert_ids=ids,
        alpha=alpha,
        decode_a=d_a,
        decode_b=d_b,
        out_dtype=out_dtype,
    )
    expected = golden.cast_float(np.zeros((9, 5), np.float32), out_dtype)
    for i, e in enumerate(ids):
        own = slice(offsets[i], offsets[i + 1])
        expected[own] = golden.matmul(
            a[own], b[e], alpha=alpha[e], decode_a=d_a[i], decode_b=d_b[e], out_dtype=out_dtype
        )
    assert same_values(got, expected)


def test_rows_of_switched_off_ranges_are_plus_zero_even_if_their_data_are_nan():
    a, b = normal((8, 32), 1), normal((2, 3, 32), 2)
    a[2:4], a[6:] = np.nan, -np.inf
    for off in (-1, -9, 2, 77):
        out = golden.grouped_matmul(a, b, row_offsets=[0, 2, 4, 6], expert_ids=[0, off, 1])
        zero = out[[2, 3, 6, 7]]
        assert not zero.view(np.uint32).any()
        assert np.isfinite(out).all()
        assert out[:2].any()


def test_rows_are_gathered_with_their_own_decode_scale():
    a, b = normal((4, 32), 1), normal((2, 3, 32), 2)
    d_a = np.float32([[2], [3], [5], [7]])
    d_b = np.float32(np.linspace(1, 2, 6)).reshape(2, 3, 1)
    indices = [3, 3, -1, 0, 4, 1]
    out = golden.grouped_matmul(
        a, b, row_offsets=[0, 3, 6], row_indices=indices, decode_a=d_a, decode_b=d_b
    )
    for r, source in enumerate(indices):
        if not 0 <= source < 4:
            assert not out[r].view(np.uint32).any()
            continue
        e = r // 3
        alone = golden.matmul(
            a[source : source + 1], b[e], decode_a=d_a[source, 0], decode_b=d_b[e]
        )
        assert same_values(out[r : r + 1], alone)


def test_a_grouped_epilogue_sees_rows_of_the_whole_result_and_the_expert_and_no_zero_rows():
    a, b = normal((7, 32), 1), normal((3, 4, 32), 2)
    seen = []

    def epilogue(values, rows, columns, expert):
        seen.append((rows.ravel().tolist(), expert))
        return values + np.float32(100) * np.float32(expert + 1)

    out = golden.grouped_matmul(
        a, b, row_offsets=[0, 2, 4, 6], expert_ids=[2, -1, 0], epilogue=epilogue
    )
    assert seen == [([0, 1], 2), ([4, 5], 0)]
    assert not out[[2, 3, 6]].any()
    plain = golden.grouped_matmul(a, b, row_offsets=[0, 2, 4, 6], expert_ids=[2, -1, 0])
    assert same_values(out[:2], plain[:2] + np.float32(300))


@pytest.mark.parametrize("kind", ["none", "matrix", "row"])
def test_a_product_of_counted_rows_is_a_loop_of_products_with_zero_rows_behind(kind):
    rng = np.random.default_rng(71)
    a, b = rng.standard_normal((3, 4, 32), np.float32), rng.standard_normal((3, 5, 32), np.float32)
    alpha = np.float32([1, 2, 3])
    decode = {"none": None, "matrix": alpha * 5, "row": rng.random((3, 4, 1), np.float32)}[kind]
    seen = []

    def note(v, row, column, expert):
        seen.append((expert, row.ravel().tolist()))
        return v + np.float32(1)

    got = golden.grouped_matmul(
        a, b, row_counts=[2, 0, 9], alpha=alpha, decode_a=decode, epilogue=note
    )
    assert got.shape == (3, 4, 5)
    for e, count in enumerate((2, 0, 4)):
        own = None if decode is None else decode[e][:count] if kind == "row" else decode[e]
        expected = golden.matmul(a[e, :count], b[e], alpha=alpha[e], decode_a=own) + np.float32(1)
        np.testing.assert_array_equal(got[e, :count], expected)
        assert not got[e, count:].any()
    assert seen == [(0, [0, 1]), (2, [8, 9, 10, 11])]


@pytest.mark.parametrize("fmts", [(MXFP8_E4M3, MXFP4), (NVFP4, MXFP4), (NVFP4, MXFP8_E4M3)])
def test_operands_may_have_different_formats(fmts):
    operands, values = [], []
    for i, fmt in enumerate(fmts):
        x = normal((4 + i, 64), i)
        parts = golden.quantize(x, fmt, scale_layout="tcgen")
        options = {"shape": x.shape, "scale_layout": "tcgen"}
        operands.append(golden.element_scale_product(*parts[:2], fmt, **options))
        values.append(golden.dequantize(*parts, fmt, **options).astype(np.float64))
    got = golden.matmul(*operands)
    np.testing.assert_allclose(got, values[0] @ values[1].T, rtol=1e-5, atol=1e-5)
