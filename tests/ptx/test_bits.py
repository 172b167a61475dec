"""Bit patterns and 16-bit floats."""

import ml_dtypes
import numpy as np
import pytest

import tests.ptx.host as host
from nvfp4.ptx import bits
from nvfp4.ptx.rounding import bits_of, code_of, float_of

CODES = np.arange(1 << 16, dtype=np.uint32)
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def canonical(values: np.ndarray) -> list[int]:
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32)).tolist()


def test_every_pattern_survives_the_way_to_a_float_and_back():
    for word in [*range(0, 1 << 32, 0x1234567), 0x7F800001, 0xFF800001, 0x7FBFFFFF, 0xFFFFFFFF]:
        value = bits.uint_as_float(word)
        assert type(value) is np.float32
        assert bits.float_as_uint(value) == word
        assert bits_of(bits.uint_as_float(word + (1 << 32))) == word


def test_all_float16_codes_widen_exactly_and_nan_is_canonical():
    want = canonical(CODES.astype(np.uint16).view(np.float16).astype(np.float32))
    assert [bits_of(bits.f32_of_f16(code)) for code in CODES.tolist()] == want
    high = [bits_of(bits.f32_of_f16_hi(code << 16 | 0x1234)) for code in CODES.tolist()]
    assert high == want


def test_all_bfloat16_codes_widen_to_their_bits():
    for code in CODES.tolist():
        assert bits_of(bits.f32_of_bf16(code | 0xABCD0000)) == code << 16
        assert bits_of(bits.f32_of_bf16_hi(code << 16 | 0xABCD)) == code << 16


def narrowed(values: np.ndarray, name: str) -> np.ndarray:
    """Codes by the witness's cast; every NaN the canonical one."""
    with np.errstate(all="ignore"):
        codes = values.astype(DTYPES[name]).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), codes)


def values_of_interest(name: str) -> np.ndarray:
    """All codes, all that lies half way between two, and their neighbours."""
    codes = np.arange(0x7F80 if name == "bf16" else 0x7C00, dtype=np.uint16)
    values = codes.view(DTYPES[name]).astype(np.float64)
    half = (values[1:] + values[:-1]) / 2
    last = values[-1] + (values[-1] - values[-2]) / 2
    every = np.concatenate([values, half, [last]])
    return host.near(every[every < 3.4028235e38].astype(np.float32))


@pytest.mark.parametrize("name", DTYPES)
def test_every_tie_and_four_million_patterns_narrow_to_the_nearest_code(name):
    sweep = host.sweep_pairs(host.model(getattr(bits, f"{name}x2_of_f32")))
    for values in (values_of_interest(name), host.patterns(1 << 22)):
        codes = narrowed(values, name).astype(np.uint32)
        got = sweep(values, values[::-1])
        assert np.array_equal(got, codes << np.uint32(16) | codes[::-1])


@pytest.mark.parametrize("name", DTYPES)
def test_the_interpreted_model_narrows_as_the_compiled_one(name):
    values = np.concatenate([values_of_interest(name)[::23], host.patterns(1 << 12)])
    codes = narrowed(values, name).tolist()
    one, two = getattr(bits, f"{name}_of_f32"), getattr(bits, f"{name}x2_of_f32")
    assert [one(value) for value in values] == codes
    pairs = [(hi << 16) | lo for hi, lo in zip(codes, codes[::-1], strict=True)]
    assert [two(hi, lo) for hi, lo in zip(values, values[::-1], strict=True)] == pairs


def test_narrowing_undoes_widening():
    for code in CODES.tolist():
        for narrow, widen, infinity in (
            (bits.bf16_of_f32, bits.f32_of_bf16, 0x7F80),
            (bits.f16_of_f32, bits.f32_of_f16, 0x7C00),
        ):
            nan = code & 0x7FFF > infinity
            assert narrow(widen(code)) == (0x7FFF if nan else code)


def test_halves_come_apart_and_together():
    for word in (0, 0x12345678, 0xFFFF0000, 0x0000FFFF, 0xFFFFFFFF):
        assert bits.pack_u16(bits.hi_u16(word), bits.lo_u16(word)) == word
        assert bits.pack_u16(word, word) == (word & 0xFFFF) * 0x10001
        assert bits.hi_u16(word + (1 << 32)) == word >> 16


def test_codes_go_on_beyond_any_largest_value():
    assert code_of(0.0, 1, 0) == 0
    assert code_of(7.0, 1, 0) == 8
    assert code_of(5e-324, 1, 0) == 0
    assert float_of(0x3F800000) == 1.0
