from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

from nvfp4 import golden
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, NVFP4
from nvfp4.layouts import scale_shape
from tests import exact

ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
FLT_MAX = np.finfo(np.float32).max
NAN, INF = np.nan, np.inf


def normal(shape, seed=0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def linear(x, fmt, **options):
    codes, scales, _ = golden.quantize(x, fmt, scale_layout="linear", **options)
    return codes, scales


def same(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


def block_bytes(fmt, first, **options):
    """Scale byte and unpacked codes of a block that begins with `first`, zeros after it."""
    x = np.zeros((1, fmt.block), np.float32)
    x[0, : len(first)] = first
    codes, scales = linear(x, fmt, **options)
    if fmt.codes_per_byte == 2:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(1, -1)
    return int(scales[0, 0]), codes[0].tolist()


@ALL
def test_special_blocks_have_exactly_these_bytes(fmt):
    fp4 = fmt.codes_per_byte == 2
    nan_scale = 0x7F if fmt is NVFP4 else 0xFF
    inf_scale = 0x7E if fmt is NVFP4 else 254
    nan_code = 7 if fp4 else 0x7F
    top = {"e2m1": 7, "e4m3": 0x7E, "e5m2": 0x7B}[fmt.element]
    sign = 8 if fp4 else 0x80
    rest = fmt.block - 2
    assert block_bytes(fmt, []) == (0, [0] * fmt.block)
    assert block_bytes(fmt, [-0.0, 0.0]) == (0, [sign, 0] + [0] * rest)
    assert block_bytes(fmt, [NAN, 1.0]) == (nan_scale, [nan_code] * fmt.block)
    assert block_bytes(fmt, [NAN, INF]) == (nan_scale, [nan_code] * fmt.block)
    assert block_bytes(fmt, [INF, -INF]) == (inf_scale, [top, top | sign] + [0] * rest)
    assert block_bytes(fmt, [-INF, -1e-30]) == (inf_scale, [top | sign, sign] + [0] * rest)
    s, codes = block_bytes(fmt, [2.0**-149, -(2.0**-149)])
    assert s == 0  # the denormal: nvfp4's scale is 0, an MX scale byte 0 is 2^-127
    assert codes == [0, sign] + [0] * rest


@pytest.mark.parametrize("fmt", [f for f in FORMATS.values() if f is not NVFP4], ids=str)
@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil", "even"])
def test_zero_infinite_and_nan_blocks_have_the_same_scale_in_every_rounding(fmt, rounding):
    for first, byte in (([], 0), ([INF], 254), ([NAN], 255), ([NAN, INF], 255)):
        assert block_bytes(fmt, first, scale_rounding=rounding)[0] == byte


@pytest.mark.parametrize("g", [1.0, 2.0**-126, FLT_MAX, 0.37, 2688.0])
def test_extreme_encode_scales_give_the_bytes_of_the_rational_definition(g):
    rng = np.random.default_rng(3)
    patterns = rng.integers(0, 1 << 32, (96, 32), dtype=np.uint32)
    x = patterns.view(np.float32)
    x[:32] = rng.standard_normal((32, 32)) * np.ldexp(1.0, rng.integers(-140, 120, (32, 1)))
    x[32:64][~np.isfinite(x[32:64])] = 1
    x[-1], x[-2, 3], x[-3, 3] = 0, np.inf, -np.inf
    for fmt in (NVFP4, MXFP4):
        got = linear(x, fmt, encode_scale=np.float32(g))
        same(got, exact.quantize(x, fmt, np.float32(g)))


@ALL
def test_an_encode_scale_that_is_not_usable_counts_as_1(fmt):
    x = normal((4, 64))
    plain = linear(x, fmt)
    for g in (0.0, -0.0, -1.0, NAN, INF, -INF, 2.0**-127, 2.0**-149):
        same(linear(x, fmt, encode_scale=np.float32(g)), plain)
        assert golden.quantize(x, fmt, encode_scale=np.float32(g))[2] == 1
    by_row = np.float32([[0.0], [1.0], [NAN], [2.0**-149]])
    same(linear(x, fmt, encode_scale=by_row), plain)


@ALL
def test_the_decode_scale_is_the_rounded_reciprocal_and_1_for_mxfp8(fmt):
    x = normal((3, 64))
    for g in (3.0, 2.0**-126, FLT_MAX, 0.1):
        decode = golden.quantize(x, fmt, encode_scale=np.float32(g))[2]
        expected = 1 if fmt.element != "e2m1" else exact.div(1.0, float(np.float32(g)))
        assert decode.dtype == np.float32
        assert decode.shape == ()
        assert decode == np.float32(expected)


def test_mxfp8_takes_any_encode_scale_as_1():
    x = normal((3, 64))
    plain = linear(x, MXFP8_E4M3)
    for g in (np.float32(100), "amax", np.float32([[1], [2], [3]])):
        same(linear(x, MXFP8_E4M3, encode_scale=g), plain)


def test_mxfp4_with_an_encode_scale_of_1_gives_the_bytes_without_one():
    x = np.arange(1 << 16, dtype=np.uint32).astype(np.uint32) << np.uint32(16)
    x = x.view(np.float32).reshape(-1, 32)
    same(linear(x, MXFP4, encode_scale=np.float32(1)), linear(x, MXFP4))


@DTYPES
def test_rows_with_their_own_encode_scale_depend_on_no_other_row(dtype):
    x = (normal((40, 64)) * np.ldexp(1.0, np.arange(40)[:, None] % 9)).astype(dtype)
    g = np.float32(np.linspace(0.1, 900, 40))[:, None]
    for fmt in (NVFP4, MXFP4):
        codes, scales, decode = golden.quantize(x, fmt, encode_scale=g, scale_layout="linear")
        assert decode.shape == (40, 1)
        for r in range(40):
            one = golden.quantize(x[r : r + 1], fmt, encode_scale=g[r, 0], scale_layout="linear")
            same(one, (codes[r : r + 1], scales[r : r + 1], decode[r, 0]))


@DTYPES
def test_row_amax_is_amax_of_each_row_alone(dtype):
    x = (normal((5, 64)) * np.float32([[1], [1e-3], [0], [1e3], [7]])).astype(dtype)
    x[4, 2] = np.nan
    codes, scales, decode = golden.quantize(
        x, NVFP4, encode_scale="row_amax", scale_layout="linear"
    )
    assert decode.shape == (5, 1)
    for r in range(5):
        one = golden.quantize(x[r : r + 1], NVFP4, encode_scale="amax", scale_layout="linear")
        same(one, (codes[r : r + 1], scales[r : r + 1], decode[r, 0]))
    assert scales.max() == 0x7F  # the row with a NaN, and only its block
    assert (scales == 0x7F).sum() == 1


def test_a_stack_of_matrices_takes_an_encode_scale_each():
    x = normal((3, 5, 32))
    g = np.float32([0.5, 3, 100])
    codes, scales, decode = golden.quantize(x, NVFP4, encode_scale=g)
    assert decode.shape == (3,)
    for e in range(3):
        one = golden.quantize(x[e], NVFP4, encode_scale=g[e])
        same(one, (codes[e], scales[e], decode[e]))
    rows = golden.quantize(x, NVFP4, encode_scale=np.repeat(g, 5).reshape(3, 5, 1))
    same(rows[:2], (codes, scales))
    assert rows[2].shape == (3, 5, 1)


@ALL
@DTYPES
@pytest.mark.parametrize("rows", [0, 1, 31, 33, 127, 128, 129])
def test_every_row_count_gives_the_bytes_of_its_rows_in_both_layouts(fmt, dtype, rows):
    x = normal((129, 96), dtype=dtype)
    codes, scales = linear(x, fmt)
    got = golden.quantize(x[:rows], fmt)
    same(got[:2], (codes[:rows], golden.interleave_scales(scales[:rows])))
    same(linear(x[:rows], fmt), (codes[:rows], scales[:rows]))


@ALL
@pytest.mark.parametrize("columns", [0, 32, 64, 96, 480, 1088, 1856, 2880])
def test_every_column_count_gives_the_bytes_of_its_blocks(fmt, columns):
    x = normal((3, 2880))
    codes, scales = linear(x, fmt)
    got = golden.quantize(x[:, :columns], fmt)
    assert got[1].shape == scale_shape(fmt, (3, columns), "tcgen")
    same(
        got[:2],
        (
            codes[:, : columns // fmt.codes_per_byte],
            golden.interleave_scales(scales[:, : columns // fmt.block]),
        ),
    )


@ALL
@DTYPES
def test_views_of_any_stride_are_read_as_the_arrays_they_show(fmt, dtype):
    base = normal((64, 6, 64), dtype=dtype)
    views = [base[:, 0], base[::3, 1], base[::-1, 2], base.transpose(1, 2, 0)[0], base[:, 2, ::-1]]
    for view in views:
        same(linear(view, fmt), linear(np.ascontiguousarray(view), fmt))
    three = base.transpose(1, 0, 2)
    same(golden.quantize(three, fmt), golden.quantize(np.ascontiguousarray(three), fmt))
    by_row = golden.quantize(base[::2, 0], NVFP4, encode_scale="row_amax")
    same(by_row, golden.quantize(base[::2, 0].copy(), NVFP4, encode_scale="row_amax"))


def test_leading_axes_are_kept_in_the_linear_layout():
    x = normal((2, 3, 4, 32))
    codes, scales = linear(x, NVFP4)
    assert codes.shape == (2, 3, 4, 16)
    assert scales.shape == (2, 3, 4, 2)
    flat = linear(x.reshape(24, 32), NVFP4)
    same((codes.reshape(24, 16), scales.reshape(24, 2)), flat)
    one = linear(x[0, 0, 0], NVFP4)
    same(one, (codes[0, 0, 0], scales[0, 0, 0]))


@ALL
def test_results_do_not_depend_on_how_the_work_is_cut(fmt, monkeypatch):
    x = normal((37, 448))
    x[3, 5], x[20, 100], x[30, 40] = np.nan, np.inf, -np.inf
    g = np.float32(np.linspace(0.5, 2, 37))[:, None] if fmt.element == "e2m1" else None
    whole = linear(x, fmt, encode_scale=g)
    for piece in (1, 64, 160, 1000, 4480):
        monkeypatch.setattr(sys.modules["nvfp4.golden.quantize"], "_PIECE", piece)
        same(linear(x, fmt, encode_scale=g), whole)


@ALL
def test_the_input_is_left_as_it_was(fmt):
    x = normal((4, 64))
    x.flags.writeable = False
    before = x.copy()
    golden.quantize(x, fmt, encode_scale="amax")
    np.testing.assert_array_equal(x, before)


@ALL
def test_no_finite_input_gives_a_nan(fmt):
    patterns = np.random.default_rng(5).integers(0, 1 << 32, (512, 64), dtype=np.uint32)
    x = patterns.view(np.float32)
    x[~np.isfinite(x)] = FLT_MAX
    for g in (None, np.float32(FLT_MAX), np.float32(2.0**-126), "amax"):
        codes, scales, decode = golden.quantize(x, fmt, encode_scale=g, scale_layout="linear")
        assert not (scales == (0x7F if fmt is NVFP4 else 0xFF)).any()
        values = golden.dequantize(codes, scales, decode, fmt, shape=x.shape, scale_layout="linear")
        assert not np.isnan(values).any()


@ALL
def test_a_nan_block_dequantises_to_nan_and_leaves_the_others_alone(fmt):
    x = normal((2, 4 * fmt.block))
    clean = linear(x, fmt)
    x[1, fmt.block + 3] = np.nan
    codes, scales, decode = golden.quantize(x, fmt, scale_layout="linear")
    values = golden.dequantize(codes, scales, decode, fmt, shape=x.shape, scale_layout="linear")
    expected = np.zeros(x.shape, bool)
    expected[1, fmt.block : 2 * fmt.block] = True
    np.testing.assert_array_equal(np.isnan(values), expected)
    scales[1, 1] = clean[1][1, 1]
    np.testing.assert_array_equal(scales, clean[1])


def test_tiny_blocks_of_mxfp8_give_no_nan():
    """Flashinfer issue 2440: amax / 448 underflows e8m0 to 0, whose reciprocal was infinite."""
    x = normal((4, 1024))
    x[:, 480:512] = np.float32(np.linspace(9.18e-40, 5.7e-35, 32))
    x = x.astype(ml_dtypes.bfloat16)
    codes, scales, decode = golden.quantize(x, MXFP8_E4M3, scale_layout="linear")
    values = golden.dequantize(
        codes, scales, decode, MXFP8_E4M3, shape=x.shape, scale_layout="linear"
    )
    tiny = x[:, 480:512].astype(np.float32)
    error = np.abs(values[:, 480:512] - tiny)
    assert np.isfinite(values).all()
    assert (error <= np.abs(tiny) / 16 + 2.0**-132).all()


def test_all_zero_and_dead_inputs_give_zeros_under_amax():
    """vLLM issues 42601 and 45212, flashinfer 2595: 1/0 of a dead expert's scale."""
    for x in (np.zeros((4, 64), np.float32), np.full((4, 64), 1e-44, np.float32)):
        for g in ("amax", "row_amax", None, np.float32(0)):
            codes, scales, decode = golden.quantize(x, NVFP4, encode_scale=g, scale_layout="linear")
            values = golden.dequantize(
                codes, scales, decode, NVFP4, shape=x.shape, scale_layout="linear"
            )
            assert np.isfinite(values).all()
            assert np.isfinite(decode).all()
            assert (np.abs(values) <= 1e-43).all()


def test_blocks_beyond_the_range_saturate_without_an_encode_scale_and_not_with_amax():
    """Issue kekzl/imp 1544: without an encode scale blocks above 2688 are clipped, by design."""
    x = np.full((1, 16), 5000, np.float32)
    for g, value in ((None, 2688), ("amax", 5000)):
        codes, scales, decode = golden.quantize(x, NVFP4, encode_scale=g, scale_layout="linear")
        assert scales[0, 0] == 0x7E
        got = golden.dequantize(codes, scales, decode, NVFP4, shape=x.shape, scale_layout="linear")
        np.testing.assert_allclose(got, value, rtol=1e-6)
