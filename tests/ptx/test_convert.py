"""Conversions: model, software form and golden model give the same codes for the same patterns."""

import bisect
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import tests.ptx.host as host
from nvfp4 import golden
from nvfp4.ptx import convert
from nvfp4.ptx.instruction import Instruction
from nvfp4.ptx.rounding import bits_of, float_of

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
PATTERNS = 1 << 24


def e8m0(values: np.ndarray, up: bool) -> np.ndarray:
    """The bytes by the powers of two themselves."""
    fraction, exponent = np.frexp(np.abs(values))
    exponent -= 1
    if up:
        exponent += fraction > 0.5
    byte = np.where(
        np.isinf(values), 254, np.where(values == 0, 0, np.clip(exponent + 127, 0, 254))
    )
    return np.where(np.isnan(values), 255, byte).astype(np.uint8)


# name -> (golden encoder, bits of a code, values between which to round)
TO = {
    "e2m1x2_of_f32": (golden.encode_e2m1, 4, E2M1),
    "e4m3x2_of_f32": (golden.encode_e4m3, 8, golden.decode_e4m3(np.arange(0x7F))),
    "e5m2x2_of_f32": (golden.encode_e5m2, 8, golden.decode_e5m2(np.arange(0x7C))),
    "ue8m0x2_rp_of_f32": (lambda x: e8m0(x, True), 8, golden.decode_e8m0(np.arange(255))),
    "ue8m0x2_rz_of_f32": (lambda x: e8m0(x, False), 8, golden.decode_e8m0(np.arange(255))),
}


def ties(name: str) -> np.ndarray:
    """All values of the type, the middles between them, what is beyond, and the neighbours."""
    values = np.asarray(TO[name][2], np.float64)
    half = (values[1:] + values[:-1]) / 2
    last = values[-1] + (values[-1] - values[-2]) / 2
    every = np.concatenate([values, half, [last, values[-1] * 1.5]])
    return host.near(np.minimum(every, np.finfo(np.float32).max).astype(np.float32))


def expected(name: str, hi: np.ndarray, lo: np.ndarray) -> np.ndarray:
    encode, bits, _ = TO[name]
    return encode(hi).astype(np.uint32) << np.uint32(bits) | encode(lo)


FORMS = {"model": host.model, "software": host.software}


@pytest.fixture(scope="module", params=TO)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def sweeps(name):
    """Both forms of a conversion, compiled once."""
    return {form: host.sweep_pairs(make(getattr(convert, name))) for form, make in FORMS.items()}


def check(name: str, sweeps: dict, values: np.ndarray) -> None:
    """Compare both forms with golden, each value once as `hi` and once as `lo`."""
    other = values[::-1]
    want = expected(name, values, other)
    for form, sweep in sweeps.items():
        got = sweep(values, other)
        if not np.array_equal(got, want):
            at = np.flatnonzero(got != want)[0]
            pytest.fail(
                f"{form}: {name}({values[at]!r}, {other[at]!r}) = {got[at]:#x}, not {want[at]:#x}"
            )


def test_sixteen_million_patterns_convert_as_the_golden_model_says(name, sweeps):
    check(name, sweeps, host.patterns(PATTERNS))


def test_ties_and_their_neighbours_convert_as_the_golden_model_says(name, sweeps):
    check(name, sweeps, ties(name))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_sixteen_bit_inputs_convert_as_the_golden_model_says(name, sweeps, dtype):
    sixteen = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values = sixteen.view(getattr(ml_dtypes, dtype, np.float16)).astype(np.float32)
    check(name, sweeps, values)


@pytest.mark.slow
def test_all_float32_patterns_convert_alike_in_model_and_software(sweeps):
    model, software = sweeps.values()
    for start in range(0, 1 << 32, 1 << 25):
        values = np.arange(start, start + (1 << 25), dtype=np.uint32).view(np.float32)
        assert np.array_equal(model(values[::2], values[1::2]), software(values[::2], values[1::2]))


def test_the_interpreted_model_gives_what_the_compiled_one_gives(name):
    values = np.concatenate([ties(name), host.patterns(1 << 13)])
    instruction = getattr(convert, name)
    got = [instruction(a, b) for a, b in zip(values, values[::-1], strict=True)]
    assert got == expected(name, values, values[::-1]).tolist()
    assert all(type(word) is int for word in got)


def test_eight_e2m1_codes_are_in_the_order_of_columns():
    values = [np.float32(v) for v in (0.5, -1.0, 1.5, -2.0, 3.0, -4.0, 6.0, -0.0)]
    assert convert.e2m1x8_of_f32(*values) == 0x8_7_E_5_C_3_A_1


def test_eight_e2m1_codes_in_software_are_those_of_the_model():
    model, software = (form(convert.e2m1x8_of_f32) for form in FORMS.values())
    values = np.concatenate([ties("e2m1x2_of_f32"), host.patterns(1 << 20)])
    values = np.concatenate([values, np.roll(values, 3), np.roll(values, 7)])
    for start in range(8):
        rows = values[start : start + (values.size - 8) // 8 * 8].reshape(-1, 8)
        assert np.array_equal(_rows(software)(rows), _rows(model)(rows))


def _rows(function):
    @host.njit
    def sweep(rows):
        out = np.empty(len(rows), np.uint32)
        for i in range(len(rows)):
            r = rows[i]
            out[i] = function(r[0], r[1], r[2], r[3], r[4], r[5], r[6], r[7])
        return out

    return sweep


# From codes --------------------------------------------------------------------------------------

# name -> (golden decoder, bits of a code)
FROM = {
    "f32_of_e2m1": (golden.decode_e2m1, 4),
    "f32_of_e4m3": (golden.decode_e4m3, 8),
    "f32_of_e5m2": (golden.decode_e5m2, 8),
    "f32_of_e8m0": (golden.decode_e8m0, 8),
}


def patterns_of(values: np.ndarray) -> list[int]:
    """Bit patterns, every NaN the canonical one of float32."""
    return np.where(np.isnan(values), np.uint32(0x7FFFFFFF), values.view(np.uint32)).tolist()


@pytest.mark.parametrize("name", FROM)
def test_every_code_has_the_golden_value(name):
    decode, bits = FROM[name]
    instruction = getattr(convert, name)
    want = patterns_of(decode(np.arange(1 << bits)))
    assert [bits_of(instruction(code)) for code in range(1 << bits)] == want
    assert host.sweep_codes(host.software(instruction), 1 << bits).tolist() == want


@pytest.mark.parametrize("name", FROM)
def test_bits_above_a_code_are_ignored(name):
    bits = FROM[name][1]
    instruction = getattr(convert, name)
    software = host.software(instruction)
    for code in range(1 << bits):
        assert bits_of(instruction(code | 0xABCDE << bits)) == bits_of(instruction(code))
        assert bits_of(software(code | 0xABCDE << bits)) == bits_of(instruction(code))


# name -> (golden decoder, bits of a code, dtype)
FROM_PAIRS = {
    "f16x2_of_e2m1x2": (golden.decode_e2m1, 4, np.float16),
    "bf16x2_of_e2m1x2": (golden.decode_e2m1, 4, ml_dtypes.bfloat16),
    "f16x2_of_e4m3x2": (golden.decode_e4m3, 8, np.float16),
    "bf16x2_of_e4m3x2": (golden.decode_e4m3, 8, ml_dtypes.bfloat16),
    "f16x2_of_e5m2x2": (golden.decode_e5m2, 8, np.float16),
    "bf16x2_of_e5m2x2": (golden.decode_e5m2, 8, ml_dtypes.bfloat16),
    "bf16x2_of_ue8m0x2": (golden.decode_e8m0, 8, ml_dtypes.bfloat16),
}


@pytest.mark.parametrize("name", FROM_PAIRS)
def test_every_pair_of_codes_has_the_golden_values_in_its_order(name):
    decode, bits, dtype = FROM_PAIRS[name]
    values = decode(np.arange(1 << bits))
    assert np.array_equal(values.astype(dtype).astype(np.float32), values, equal_nan=True)
    halves = np.where(np.isnan(values), np.uint16(0x7FFF), values.astype(dtype).view(np.uint16))
    codes = np.arange(1 << 2 * bits)
    want = (
        halves[codes >> bits].astype(np.uint32) << np.uint32(16) | halves[codes & (1 << bits) - 1]
    )
    instruction = getattr(convert, name)
    assert [instruction(code) for code in codes.tolist()] == want.tolist()


@pytest.mark.parametrize("name", ["f16x2_of_e5m2x2"])
def test_integer_software_of_pairs_gives_the_models_words(name):
    instruction = getattr(convert, name)
    got = host.sweep_codes(host.software(instruction), 1 << 16)
    assert got.tolist() == [instruction(code) for code in range(1 << 16)]


# An independent word on rounding -----------------------------------------------------------------


@pytest.mark.parametrize("element", ["e2m1", "e4m3", "e5m2"])
def test_the_code_is_the_nearest_and_a_tie_goes_to_the_even_one(element):
    values = [float(value) for value in TO[f"{element}x2_of_f32"][2]]
    instruction = getattr(convert, f"{element}x2_of_f32")
    inputs = ties(f"{element}x2_of_f32")
    for value in inputs[np.isfinite(inputs) & ~np.signbit(inputs)].tolist():
        code = instruction(np.float32(0), np.float32(value))
        if value >= values[-1]:
            assert code == len(values) - 1
            continue
        above = bisect.bisect_right(values, value)
        to_lower = Fraction(value) - Fraction(values[above - 1])
        to_upper = Fraction(values[above]) - Fraction(value)
        if to_lower == to_upper:
            assert code in (above - 1, above) and code % 2 == 0
        else:
            assert code == (above - 1 if to_lower < to_upper else above)


def test_a_software_form_takes_what_its_instruction_takes():
    for value in vars(convert).values():
        if isinstance(value, Instruction) and value.software is not None:
            code = value.software.__code__
            assert code.co_varnames[: code.co_argcount] == value.names
    with pytest.raises(ValueError, match="must take"):
        convert.f32_of_e2m1.without_hardware(lambda other: other)


def test_nan_and_infinity_have_the_hardwares_codes():
    for name, inf, nan in (("e2m1", 7, 7), ("e4m3", 0x7E, 0x7F), ("e5m2", 0x7B, 0x7F)):
        bits = 4 if name == "e2m1" else 8
        instruction = getattr(convert, f"{name}x2_of_f32")
        sign = 1 << (bits - 1)
        assert instruction(np.float32(math.inf), np.float32(-math.inf)) == inf << bits | sign | inf
        for pattern in (0x7F800001, 0x7FC00000, 0xFFC00000, 0xFFFFFFFF):
            assert instruction(float_of(pattern), np.float32(-0.0)) == nan << bits | sign
