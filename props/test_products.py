"""Properties 16, 17, 19 and 20: dense products."""

from __future__ import annotations

import sys

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nvfp4 import golden
from props.strategies import exact_operands, floats32, formats, layouts, matrices

sizes = st.integers(1, 9)


def bits(array) -> np.ndarray:
    """Patterns in which the sign of a zero and the pattern of a NaN do not count."""
    clean = np.where(array == 0, np.zeros_like(array), array)
    clean = np.where(np.isnan(clean), np.full_like(clean, np.nan), clean)
    return clean.view(np.dtype(f"u{array.dtype.itemsize}"))


@given(st.data(), formats, formats, sizes, sizes, st.integers(1, 3), layouts)
def test_exact_operands_have_the_exact_product(data, fmt_a, fmt_b, m, n, blocks, layout):
    k = 32 * blocks
    a, b = data.draw(exact_operands(m, k, fmt_a)), data.draw(exact_operands(n, k, fmt_b))
    exponent = data.draw(st.integers(-20, 20))
    got = golden.matmul(a.products(layout), b.products(layout), alpha=np.float32(2.0**exponent))
    # In 64 bits these sums are exact in any order, and they need at most 24 bits.
    sums = a.values @ b.values.T
    assert (np.abs(sums) * 16 < 2**24).all()
    np.testing.assert_array_equal(got.astype(np.float64), np.ldexp(sums, exponent))


@given(st.data(), formats, sizes, sizes)
def test_a_product_is_linear_in_powers_of_two(data, fmt, m, n):
    a, b = data.draw(exact_operands(m, 64, fmt)), data.draw(exact_operands(n, 64, fmt))
    power = data.draw(st.integers(-30, 30))
    plain = golden.matmul(a.products(), b.products(), alpha=np.float32(0.7))
    scaled = golden.matmul(a.products(), b.products(), alpha=np.ldexp(np.float32(0.7), power))
    np.testing.assert_array_equal(scaled, np.ldexp(plain, power))


@given(st.data(), formats)
def test_a_product_with_the_identity_gives_the_dequantised_operand(data, fmt):
    x = data.draw(matrices(fmt, special=False))
    x[np.abs(x) > 2.0**100] = 1  # an infinite value times the identity's zeros would be NaN
    parts = golden.quantize(x, fmt, scale_layout="linear")
    options = {"shape": x.shape, "scale_layout": "linear"}
    a = golden.element_scale_product(*parts[:2], fmt, **options)
    out = golden.matmul(a, np.eye(x.shape[1], dtype=np.float32))
    np.testing.assert_array_equal(bits(out), bits(golden.dequantize(*parts, fmt, **options)))


@given(st.data(), formats, st.integers(1, 6), st.integers(1, 6))
def test_permuting_rows_permutes_the_product(data, fmt, m, n):
    a = data.draw(matrices(fmt, min_rows=m, max_rows=m, max_blocks=1))
    b = data.draw(matrices(fmt, min_rows=n, max_rows=n, max_blocks=1))
    rows, columns = data.draw(st.permutations(range(m))), data.draw(st.permutations(range(n)))
    whole = golden.matmul(a, b)
    np.testing.assert_array_equal(
        bits(golden.matmul(a[rows], b[columns])), bits(whole[np.ix_(rows, columns)])
    )


@given(st.data(), formats, st.integers(1, 40), st.integers(1, 40))
def test_the_size_of_the_tiles_changes_no_byte(data, fmt, tile, columns):
    a = data.draw(matrices(fmt, min_rows=5, max_rows=5, max_blocks=1))
    b = data.draw(matrices(fmt, min_rows=7, max_rows=7, max_blocks=1))
    whole = golden.matmul(a, b)
    module = sys.modules["nvfp4.golden.matmul"]
    before = module._TILE, module._TILE_COLUMNS
    try:
        module._TILE, module._TILE_COLUMNS = max(tile, columns), columns
        cut = golden.matmul(a, b)
    finally:
        module._TILE, module._TILE_COLUMNS = before
    np.testing.assert_array_equal(bits(cut), bits(whole))


@given(st.data(), formats, st.sampled_from([0x00, 0x7F, 0xFF]), sizes, sizes)
def test_padding_of_the_scales_reaches_no_output(data, fmt, poison, m, n):
    a, b = data.draw(exact_operands(m, 96, fmt)), data.draw(exact_operands(n, 96, fmt))
    operands = []
    for x in (a, b):
        used = golden.interleave_scales(np.ones_like(x.scales)) == 1
        scales = np.where(used, golden.interleave_scales(x.scales), np.uint8(poison))
        options = {"shape": x.values.shape, "scale_layout": "tcgen"}
        operands.append(golden.element_scale_product(x.codes, scales, fmt, **options))
    np.testing.assert_array_equal(golden.matmul(*operands), a.values @ b.values.T)


@given(st.lists(floats32(), min_size=1, max_size=20), st.sampled_from(["bfloat16", "float16"]))
def test_a_cast_is_monotone_and_keeps_nan(values, dtype):
    x = np.array(values, np.float32)
    got = golden.cast_float(x, dtype).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    number = ~np.isnan(x)
    order = np.argsort(x[number], kind="stable")
    cast = got[number][order]
    assert (cast[:-1] <= cast[1:]).all()
    # Casting what is already of the type changes nothing.
    np.testing.assert_array_equal(bits(golden.cast_float(got, dtype).astype(np.float32)), bits(got))
