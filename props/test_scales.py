"""Properties 5 to 8: block scales."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as st

from nvfp4 import golden
from nvfp4.formats import MXFP4, NVFP4
from props.strategies import (
    dtypes,
    encode_scales,
    floats32,
    formats,
    matrices,
    mx_formats,
    mx_roundings,
    roundings,
)
from tests import exact


def effective(x, fmt, g):
    """What exact.quantize takes for an encode scale of golden.quantize."""
    if g is None or (fmt.scale == "e8m0" and isinstance(g, str)):
        return None
    if isinstance(g, str):
        return golden.amax_encode_scale(x, fmt)
    return g if 2.0**-126 <= g <= np.finfo(np.float32).max else np.float32(1)


@given(st.data(), formats, dtypes)
def test_codes_and_scales_are_those_of_exact_arithmetic(data, fmt, dtype):
    x = data.draw(matrices(fmt, dtype, max_rows=2, max_blocks=2))
    g = data.draw(encode_scales(fmt))
    rounding = data.draw(roundings(fmt)) if g is None else "rceil"
    codes, scales, decode = golden.quantize(
        x, fmt, encode_scale=g, scale_rounding=rounding, scale_layout="linear"
    )
    used = effective(x, fmt, g)
    expected = exact.quantize(x.astype(np.float32), fmt, used, rounding)
    np.testing.assert_array_equal(scales, expected[1])
    np.testing.assert_array_equal(codes, expected[0])
    whole = used is None or fmt.codes_per_byte == 1
    assert decode == np.float32(1 if whole else exact.div(1.0, float(used)))


def nvfp4_scale(amax) -> int:
    x = np.zeros((1, 16), np.float32)
    x[0, 5] = amax
    return int(golden.quantize(x, NVFP4, scale_layout="linear")[1][0, 0])


@given(st.integers(0, 0x7D), st.integers(-3, 3))
def test_an_nvfp4_scale_is_within_one_ulp_of_the_exact_quotient_even_beside_ties(code, units):
    table = exact.magnitudes("e4m3")
    tie = (table[code] + table[code + 1]) / 2
    amax = np.float32(float(6 * tie)).view(np.uint32)
    amax = np.uint32(int(amax) + units).view(np.float32)
    s = nvfp4_scale(amax)
    assert s == exact.encode(exact.mul(float(amax), exact.div(1.0, 6.0)), "e4m3")
    ulp = table[code + 1] - table[code]
    assert abs(table[s] - Fraction(float(amax)) / 6) <= ulp
    assert s in (code, code + 1)


@given(mx_formats, floats32(special=False))
def test_rceil_is_floor_or_one_more_and_never_saturates(fmt, value):
    amax = np.abs(value)
    rceil = int(golden.e8m0_scale(amax, fmt, "rceil"))
    floor = int(golden.e8m0_scale(amax, fmt, "floor"))
    assert rceil in (floor, floor + 1)
    # Below byte 2 the quotient is subnormal and its rounding may hide one part in 2^22.
    slack = 1 if rceil > 1 else 1 + Fraction(1, 1 << 22)
    bound = Fraction(fmt.qmax) * Fraction(2) ** (rceil - 127)
    assert bound * slack >= Fraction(float(amax))


@given(mx_formats, st.integers(-100, 100))
def test_floor_saturates_where_the_mantissa_exceeds_that_of_qmax(fmt, exponent):
    amax = np.float32(np.ldexp(1.9375, exponent))
    floor = int(golden.e8m0_scale(amax, fmt, "floor"))
    assert Fraction(fmt.qmax) * Fraction(2) ** (floor - 127) < Fraction(float(amax))
    assert int(golden.e8m0_scale(amax, fmt, "rceil")) == floor + 1


@given(mx_formats, mx_roundings, st.data(), st.integers(-40, 40))
def test_a_power_of_two_shifts_an_mx_scale_and_leaves_the_codes(fmt, rounding, data, n):
    x = data.draw(matrices(fmt, special=False, max_rows=2))
    # Small elements may be subnormal products after the shift; amax decides the range.
    amax = np.abs(x.reshape(-1, fmt.block)).max(axis=1)
    assume((amax > 2.0**-60).all() and (amax < 2.0**60).all())
    x[np.abs(x) < 2.0**-80] = 0
    options = {"scale_rounding": rounding, "scale_layout": "linear"}
    codes, scales, _ = golden.quantize(x, fmt, **options)
    shifted = golden.quantize(np.ldexp(x, n), fmt, **options)
    np.testing.assert_array_equal(shifted[0], codes)
    np.testing.assert_array_equal(shifted[1].astype(int), scales.astype(int) + n)


@given(st.data(), st.integers(-30, 30))
def test_a_power_of_two_changes_only_the_encode_scale_of_nvfp4(data, n):
    x = data.draw(matrices(NVFP4, special=False))
    x[np.abs(x) > 2.0**60] = 1
    x[np.abs(x) < 2.0**-60] = 0
    codes, scales, decode = golden.quantize(x, NVFP4, encode_scale="amax")
    shifted = golden.quantize(np.ldexp(x, n), NVFP4, encode_scale="amax")
    np.testing.assert_array_equal(shifted[0], codes)
    np.testing.assert_array_equal(shifted[1], scales)
    expected = np.ldexp(decode, n) if x.any() else decode
    # RN(1 / g) scales exactly while neither is subnormal, which these magnitudes ensure.
    assert shifted[2] == expected


@given(st.data(), formats, st.sampled_from([np.nan, np.inf, -np.inf]))
def test_a_nan_or_an_infinity_marks_its_block_and_no_other(data, fmt, special):
    x = data.draw(matrices(fmt, special=False))
    codes, scales, _ = golden.quantize(x, fmt, scale_layout="linear")
    row = data.draw(st.integers(0, x.shape[0] - 1))
    column = data.draw(st.integers(0, x.shape[1] - 1))
    x[row, column] = special
    got_codes, got_scales, _ = golden.quantize(x, fmt, scale_layout="linear")
    block = column // fmt.block
    nan, inf = (0x7F, 0x7E) if fmt is NVFP4 else (255, 254)
    assert got_scales[row, block] == (nan if np.isnan(special) else inf)
    own = slice(
        block * fmt.block // fmt.codes_per_byte, (block + 1) * fmt.block // fmt.codes_per_byte
    )
    if np.isnan(special):
        byte = 0x77 if fmt.codes_per_byte == 2 else 0x7F
        assert set(got_codes[row, own].tolist()) == {byte}
    got_codes[row, own], got_scales[row, block] = codes[row, own], scales[row, block]
    np.testing.assert_array_equal(got_codes, codes)
    np.testing.assert_array_equal(got_scales, scales)


@given(st.data(), formats)
def test_zeros_of_either_sign_have_zero_scales_and_keep_their_sign(data, fmt):
    signs = np.array(data.draw(st.lists(st.booleans(), min_size=fmt.block, max_size=fmt.block)))
    x = np.where(signs, np.float32(-0.0), np.float32(0.0))[None]
    codes, scales, _ = golden.quantize(x, fmt, scale_layout="linear")
    assert scales.tolist() == [[0]]
    expected = [exact.SIGN_BIT[fmt.element] if s else 0 for s in signs.tolist()]
    assert codes[0].tolist() == exact.pack(expected, fmt)


@given(mx_formats, mx_roundings, st.integers(1, 0x007FFFFF))
@example(MXFP4, "rceil", 0x00400000)
def test_subnormal_blocks_have_byte_0_and_finite_values(fmt, rounding, pattern):
    x = np.zeros((1, fmt.block), np.float32)
    x[0, 3] = np.uint32(pattern).view(np.float32)
    codes, scales, decode = golden.quantize(x, fmt, scale_rounding=rounding, scale_layout="linear")
    assert scales[0, 0] == 0
    values = golden.dequantize(codes, scales, decode, fmt, shape=x.shape, scale_layout="linear")
    assert np.isfinite(values).all()
    assert abs(float(values[0, 3]) - float(x[0, 3])) <= 2.0**-128
