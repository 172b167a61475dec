"""Weights as e4m3: what a header says of them, by a reader of the text of decisions D13 and D25."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4 import golden
from nvfp4.formats import FORMATS, MXFP4, PREPARED
from tests import prepared

E4M3 = ml_dtypes.float8_e4m3fn


def prepare(codes, scales, fmt=MXFP4):
    shape = (codes.shape[0], codes.shape[1] * fmt.codes_per_byte)
    return golden.prepare_weights(codes, scales, fmt, shape=shape, scale_layout="linear")


def facts(scales):
    """The two words, the first as a number."""
    words = np.frombuffer(scales[4:12].tobytes(), "<u4")
    return float(words[:1].view("<f4")[0]), int(words[1])


def some(rows, columns, lowest, highest, seed=0):
    """All codes, with scales in a window."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, columns // 2), np.uint8)
    scales = rng.integers(lowest, highest + 1, (rows, columns // 32)).astype(np.uint8)
    scales[0, 0], scales[-1, -1] = lowest, highest
    codes[0, :8] = codes[-1, -8:] = np.arange(8) * 0x12 + 0x10  # all magnitudes, both ends
    return codes, scales


def e4m3_bytes(codes, scales):
    """The matrix as FP8 tensor cores have it: [16 R, 64 S] of e4m3."""
    factor, less = facts(scales)
    assert factor > 0
    down, across = codes.shape[:2]
    out = np.full((16 * down, 64 * across), 0x7F, np.uint8)
    for r in range(down):
        for s in range(across):
            stripe = codes[r, s].tobytes()
            record = scales[16 + (r * across + s) * 32 :][:32].tobytes()
            for lane in range(32):
                g, t = divmod(lane, 4)
                for w in range(4):
                    for i, both in enumerate(prepared.registers_of_word(stripe, lane, w, MXFP4)):
                        upper, half = i % 2, i // 2
                        byte = prepared.scale_byte(record, g, t, upper, half, MXFP4)
                        scale = prepared.bfloat16((byte << 7) - (less & 0xFFFF))
                        for odd in (0, 1):
                            product = prepared.bfloat16(both[odd]) * scale
                            bits = int(product.view(np.uint16))
                            assert bits & 0x780F == 0, "no e4m3 value"
                            column = 64 * s + 32 * half + 8 * t + 2 * w + odd
                            out[16 * r + g + 8 * upper, column] = (
                                bits >> 8 & 0x80 | bits >> 4 & 0x7F
                            )
    return out


@pytest.mark.parametrize("top", [34, 100, 128, 129, 141, 254])
def test_every_element_is_an_e4m3_value_times_the_factor(top):
    codes, scales = some(19, 96, top - 14, top, seed=top)
    made = prepare(codes, scales)
    with np.errstate(over="ignore"):
        got = e4m3_bytes(*made).view(E4M3).astype(np.float32) * np.float32(facts(made[1])[0])
    expected = golden.element_scale_product(
        codes, scales, MXFP4, shape=(19, 96), scale_layout="linear"
    )
    np.testing.assert_array_equal(got[:19, :96], expected)
    assert not got[19:].any() and not got[:, 96:].any()


def test_the_factor_is_the_largest_scale_over_that_of_e4m3():
    for top in (34, 128, 200):
        factor, less = facts(prepare(*some(3, 64, top - 2, top))[1])
        assert factor == 2.0 ** (top - 133)
        assert less == (min(top, 128) - 13) * 0x00800080


def test_scales_further_apart_or_nan_leave_zeros():
    assert facts(prepare(*some(3, 64, 100, 115))[1]) == (0, 0)
    assert facts(prepare(*some(3, 64, 100, 255))[1]) == (0, 0)
    codes, scales = some(3, 64, 110, 112)
    scales[1, 1] = 255
    assert facts(prepare(codes, scales)[1]) == (0, 0)
    assert facts(prepare(*some(1, 64, 5, 12))[1]) == (0, 0)  # plain


def test_blocks_without_values_do_not_count():
    codes, scales = some(3, 64, 100, 114)
    scales[1] = 254, 0
    codes[1] &= 0x88
    made = prepare(codes, scales)
    got = e4m3_bytes(*made)
    assert facts(made[1])[0] == 2.0 ** (114 - 133) and set(got[1]) <= {0, 0x80}
    nothing = prepare(codes & 0x88, scales)
    assert not (e4m3_bytes(*nothing) & 0x7F).any()


@pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if f is not MXFP4], ids=lambda f: f.name
)
def test_other_formats_have_zeros(fmt):
    made = golden.prepare_weights(
        *prepared.parts(3, fmt, (17, 96)), fmt, shape=(17, 96), scale_layout="linear"
    )
    assert facts(made[1]) == (0, 0)
    assert golden.dequantize(*made, np.float32(1), fmt, shape=(17, 96), scale_layout=PREPARED).any()
