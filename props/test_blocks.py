"""Properties 9 to 11: blocks by themselves, quantising twice, and the error."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvfp4 import golden
from nvfp4.formats import MXFP4, MXFP8_E4M3, NVFP4, BlockFormat
from props.strategies import dtypes, encode_scales, formats, matrices, mx_formats, roundings
from tests import exact


def linear(x, fmt, **options):
    codes, scales, _ = golden.quantize(x, fmt, scale_layout="linear", **options)
    return codes, scales


def values_of(codes, scales, fmt, shape) -> np.ndarray:
    options = {"shape": shape, "scale_layout": "linear"}
    return golden.dequantize(codes, scales, np.float32(1), fmt, **options)


def by_block(codes, fmt: BlockFormat) -> np.ndarray:
    """Packed codes as [rows, blocks, bytes of a block]."""
    return codes.reshape(codes.shape[0], -1, fmt.block // fmt.codes_per_byte)


def unpacked(codes, fmt: BlockFormat) -> np.ndarray:
    """Magnitude codes as [rows, blocks, V]."""
    if fmt.codes_per_byte == 2:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    return (codes & (exact.SIGN_BIT[fmt.element] - 1)).reshape(len(codes), -1, fmt.block)


@given(st.data(), formats, dtypes)
def test_permuting_blocks_permutes_their_codes_and_scales(data, fmt, dtype):
    x = data.draw(matrices(fmt, dtype))
    # Any permutation of all blocks of the matrix, across rows.
    blocks = x.size // fmt.block
    order = np.array(data.draw(st.permutations(range(blocks))))
    rounding = data.draw(roundings(fmt))
    codes, scales = linear(x, fmt, scale_rounding=rounding)
    mixed = x.reshape(blocks, fmt.block)[order].reshape(x.shape)
    got_codes, got_scales = linear(mixed, fmt, scale_rounding=rounding)
    flat = codes.reshape(blocks, -1)[order]
    np.testing.assert_array_equal(got_codes.reshape(blocks, -1), flat)
    np.testing.assert_array_equal(got_scales.ravel(), scales.ravel()[order])


@given(st.data(), formats, st.integers(0, 3), st.integers(0, 3))
def test_padding_with_zeros_changes_no_block_and_adds_only_zeros(data, fmt, rows, blocks):
    x = data.draw(matrices(fmt))
    g = data.draw(encode_scales(fmt))
    padded = np.pad(x, ((0, rows), (0, blocks * fmt.block)))
    codes, scales = linear(x, fmt, encode_scale=g)
    got_codes, got_scales = linear(padded, fmt, encode_scale=g)
    expected = np.zeros_like(got_codes)
    expected[: len(codes), : codes.shape[1]] = codes
    np.testing.assert_array_equal(got_codes, expected)
    expected = np.zeros_like(got_scales)
    expected[: len(scales), : scales.shape[1]] = scales
    np.testing.assert_array_equal(got_scales, expected)


def canonical(codes, scales, fmt: BlockFormat) -> np.ndarray:
    """Blocks [rows, blocks] whose scale is the one that their own values ask for.

    An nvfp4 block with a normal scale always has a code of 6, and asks for its scale again. Byte 0
    and the subnormal bytes 1 to 3 are so coarse that the largest code can be less. The largest
    element of an MX block under rceil is above qmax / 2 before it is rounded, and may be rounded
    to qmax / 2: then half the scale would do.
    """
    largest = unpacked(codes, fmt).max(axis=2)
    table = exact.magnitudes(fmt.element)
    if fmt is NVFP4:
        return (largest == 7) & (scales > 0) & (scales < 0x7F)
    needed = next(code for code, value in enumerate(table) if value > table[-1] / 2)
    return (largest >= needed) & (scales > 1) & (scales < 254)


@given(st.data(), formats, dtypes)
def test_quantising_dequantised_canonical_blocks_gives_the_same_bytes(data, fmt, dtype):
    x = data.draw(matrices(fmt, dtype))
    codes, scales = linear(x, fmt)
    values = values_of(codes, scales, fmt, x.shape)
    again = linear(values, fmt)
    # The largest code of a block near the top of float32 may stand for more than float32 holds.
    overflows = np.isinf(values).reshape(*scales.shape, -1).any(axis=2)
    kept = canonical(codes, scales, fmt) & ~overflows
    np.testing.assert_array_equal(again[1][kept], scales[kept])
    np.testing.assert_array_equal(by_block(again[0], fmt)[kept], by_block(codes, fmt)[kept])


@given(st.data())
def test_an_nvfp4_block_with_a_normal_scale_is_canonical(data):
    x = data.draw(matrices(NVFP4))
    codes, scales = linear(x, NVFP4)
    normal = (scales >= 8) & (scales < 0x7F)
    assert canonical(codes, scales, NVFP4)[normal].all()


@given(st.data(), mx_formats)
def test_quantising_dequantised_mx_blocks_keeps_their_values(data, fmt):
    x = data.draw(matrices(fmt, special=False))
    codes, scales = linear(x, fmt)
    values = values_of(codes, scales, fmt, x.shape)
    # Where half the scale would do, the elements are twice as large and still exact.
    inner = np.repeat((scales > 16) & (scales < 254), fmt.block, axis=1)
    again = values_of(*linear(values, fmt), fmt, x.shape)
    assert again[inner].tobytes() == values[inner].tobytes()


@pytest.mark.parametrize(
    ("fmt", "amax", "scale", "code", "scale_again", "code_again"),
    [
        # 3.25 rounds to 3, for which half the scale is enough.
        (MXFP4, 3.25, 127, 5, 126, 7),
        # amax / 6 is 1.5 subnormal steps: scale 2 steps, code 4; 8 / 6 steps rounds to 1 step.
        (NVFP4, 9 * 2.0**-9, 2, 6, 1, 7),
        # amax / 6 is just over half a step: scale 1 step, code 3; 3 / 6 is a tie and goes to 0.
        (NVFP4, 3.0625 * 2.0**-9, 1, 5, 0, 0),
        # The largest float32 rounds up to 2^128, which it reads back as infinity.
        (MXFP8_E4M3, np.finfo(np.float32).max, 247, 0x78, 254, 0x7E),
    ],
)
def test_these_blocks_are_not_canonical(fmt, amax, scale, code, scale_again, code_again):
    x = np.zeros((1, fmt.block), np.float32)
    x[0, 0] = amax
    codes, scales = linear(x, fmt)
    assert (scales[0, 0], codes[0, 0]) == (scale, code)
    codes, scales = linear(values_of(codes, scales, fmt, x.shape), fmt)
    assert (scales[0, 0], codes[0, 0]) == (scale_again, code_again)


@given(st.data(), formats, dtypes)
def test_the_error_is_at_most_half_the_local_spacing_times_the_scale(data, fmt, dtype):
    x = data.draw(matrices(fmt, dtype, max_rows=2, max_blocks=2, special=False)).astype(np.float32)
    codes, scales = linear(x, fmt)
    values = values_of(codes, scales, fmt, x.shape)
    table = exact.magnitudes(fmt.element)
    for r, c in np.ndindex(*x.shape):
        s = int(scales[r, c // fmt.block])
        scale = Fraction(exact.scale_value(s, fmt.scale))
        wanted, got = Fraction(float(x[r, c])), values[r, c]
        if s == 0 and fmt is NVFP4:
            assert got == 0
            continue
        if not np.isfinite(got) or abs(wanted) > table[-1] * scale:
            assert abs(got) == np.float32(table[-1] * scale if np.isfinite(got) else np.inf)
            continue
        above = next(i for i, v in enumerate(table) if v * scale >= abs(wanted))
        spacing = (table[above] - table[max(above - 1, 0)]) * scale
        # x * q and q are each rounded: two parts in 2^24 of the value, and near the bottom of
        # float32 half of its smallest step, which is scaled back with the block.
        slack = abs(wanted) / 2**22 + (scale / 2**149 if fmt is not NVFP4 else 0)
        assert abs(Fraction(float(got)) - wanted) <= spacing / 2 + slack
