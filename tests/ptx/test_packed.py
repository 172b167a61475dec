"""Pairs of 16-bit floats: one rounding of the exact result, NaN and zeros as PTX says."""

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from nvfp4.ptx import packed

TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
INFINITY = {"bf16": 0x7F80, "f16": 0x7C00}
MANTISSA = {"bf16": 7, "f16": 10}
SMALLEST = {"bf16": -126, "f16": -14}
NAN = 0x7FFF


def codes(name: str) -> list[int]:
    infinity = INFINITY[name]
    one = 0x3F80 if name == "bf16" else 0x3C00
    some = [0, 1, 2, 3, 0x40, (1 << MANTISSA[name]) - 1, 1 << MANTISSA[name], one - 1, one, one + 1]
    some += [one + 5, one + 0x7D, infinity // 2 + 3, infinity - 2, infinity - 1, infinity]
    some += [infinity + 1, NAN]
    return some + [code | 0x8000 for code in some]


def is_nan(name: str, code: int) -> bool:
    return code & 0x7FFF > INFINITY[name]


def value(name: str, code: int) -> Fraction | float:
    number = float(np.uint16(code).view(TYPES[name]).astype(np.float32))
    return Fraction(number) if np.isfinite(number) else number


def encode(name: str, exact: Fraction, zero: int) -> int:
    """The code nearest to a value, ties to even; `zero` is that of 0."""
    if exact == 0:
        return zero
    sign, exact = (0x8000 if exact < 0 else 0), abs(exact)
    estimate = exact.numerator.bit_length() - exact.denominator.bit_length() - 1
    exponent = max(estimate, SMALLEST[name])
    while exact >= Fraction(2) ** (exponent + 1):
        exponent += 1
    steps = round(exact / Fraction(2) ** (exponent - MANTISSA[name]))
    code = ((exponent - SMALLEST[name]) << MANTISSA[name]) + steps
    return sign | min(code, INFINITY[name])


def product(name: str, a: int, b: int) -> int:
    x, y = value(name, a), value(name, b)
    sign = (a ^ b) & 0x8000
    if isinstance(x, float) or isinstance(y, float):
        return NAN if x == 0 or y == 0 else sign | INFINITY[name]
    return encode(name, x * y, sign)


def total(name: str, a: int, b: int) -> int:
    x, y = value(name, a), value(name, b)
    if isinstance(x, float) or isinstance(y, float):
        if isinstance(x, float) and isinstance(y, float) and (a ^ b) & 0x8000:
            return NAN
        return a if isinstance(x, float) else b
    return encode(name, x + y, a & b & 0x8000)


def fused(name: str, a: int, b: int, c: int) -> int:
    x, y, z = (value(name, code) for code in (a, b, c))
    if isinstance(x, float) or isinstance(y, float):
        made = product(name, a, b)
        return NAN if made == NAN else total(name, made, c)
    if isinstance(z, float):
        return c
    zero = (a ^ b) & c & 0x8000 if x * y == 0 else 0
    return encode(name, x * y + z, zero)


WANTED = {
    "add": total,
    "sub": lambda name, a, b: total(name, a, b ^ 0x8000),
    "mul": product,
    "fma": fused,
}


def in_pairs(results: list, instruction, operands: list[tuple]) -> None:
    """Compare, two operations to a call: one in the upper halves, another in the lower."""
    shifted = results[1:] + results[:1], operands[1:] + operands[:1]
    for hi, lo, upper, lower in zip(results, shifted[0], operands, shifted[1], strict=True):
        words = [(a << 16) | b for a, b in zip(upper, lower, strict=True)]
        assert instruction(*words) == (hi << 16) | lo, [hex(word) for word in words]


@pytest.mark.parametrize("operation", WANTED)
@pytest.mark.parametrize("name", TYPES)
def test_the_exact_result_is_rounded_once(name, operation):
    instruction = getattr(packed, f"{operation}_{name}x2")
    operands = list(itertools.product(codes(name), repeat=2))
    if operation == "fma":
        operands = [(*pair, c) for pair in operands for c in codes(name)[::3]]
    results = [
        NAN if any(is_nan(name, code) for code in group) else WANTED[operation](name, *group)
        for group in operands
    ]
    in_pairs(results, instruction, operands)


@pytest.mark.parametrize("half", ["low", "high"])
def test_both_halves_are_multiplied_by_one_half(half):
    """Whatever is in the other half."""
    instruction = getattr(packed, f"mul_bf16x2_{half}")
    operands = list(itertools.product(codes("bf16"), repeat=2))
    results = [
        NAN if any(is_nan("bf16", code) for code in pair) else product("bf16", *pair)
        for pair in operands
    ]
    # Pairs with the same second code stand len(codes) apart.
    step = len(codes("bf16"))
    for i, (a, b) in enumerate(operands):
        j = (i + step) % len(operands)
        other, same = operands[j]
        assert same == b
        for unused in (0, b ^ 0x8001, NAN):
            word = unused << 16 | b if half == "low" else b << 16 | unused
            assert instruction(a << 16 | other, word) == results[i] << 16 | results[j]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("pick", [min, max])
@pytest.mark.parametrize("name", TYPES)
def test_minimum_and_maximum_drop_or_keep_nan_and_order_zeros(name, pick, kept):
    instruction = getattr(packed, f"{pick.__name__}{'_nan' if kept else ''}_{name}x2")
    operands = list(itertools.product(codes(name), repeat=2))
    results = []
    for pair in operands:
        numbers = [code for code in pair if not is_nan(name, code)]
        if not numbers or (kept and len(numbers) == 1):
            results.append(NAN)
        else:
            # -0 is below +0.
            results.append(
                pick(numbers, key=lambda code: (float(value(name, code)), -(code >> 15)))
            )
    in_pairs(results, instruction, operands)


@pytest.mark.parametrize("name", TYPES)
def test_the_larger_magnitude_keeps_nan_and_multiplies_signs(name):
    instruction = getattr(packed, f"amax_{name}x2")
    operands = list(itertools.product(codes(name), repeat=2))
    results = []
    for a, b in operands:
        if is_nan(name, a) or is_nan(name, b):
            results.append(NAN)
        else:
            results.append(max(a & 0x7FFF, b & 0x7FFF) | (a ^ b) & 0x8000)
    in_pairs(results, instruction, operands)


def test_sign_bits_are_cleared_and_flipped_and_nothing_else():
    for word in (0, 0x80008000, 0x7F810001, 0xFFFFFFFF, 0x12349ABC):
        assert packed.abs_16x2(word) == word & 0x7FFF7FFF
        assert packed.neg_16x2(word) == word ^ 0x80008000


# What stands for an instruction that an architecture has not --------------------------------------


def test_fma_stands_for_products_and_sums_before_sm_90():
    one, minus_zero = 0x3F803F80, 0x80008000
    for a, b in itertools.product(codes("bf16"), repeat=2):
        a, b = a * 0x10001, b * 0x10001
        assert packed.fma_bf16x2(a, b, minus_zero) == packed.mul_bf16x2(a, b)
        assert packed.fma_bf16x2(a, b, minus_zero) == packed.mul_bf16x2_low(a, b)
        assert packed.fma_bf16x2(a, b, minus_zero) == packed.mul_bf16x2_high(a, b)
        assert packed.fma_bf16x2(a, one, b) == packed.add_bf16x2(a, b)
        assert packed.fma_bf16x2(b, one | 0x80008000, a) == packed.sub_bf16x2(a, b)
