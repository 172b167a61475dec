"""Models against exact arithmetic, and lowerings that the host can run against models."""

import itertools
import math
import operator
import random
from fractions import Fraction

import numpy as np
import pytest

import tests.ptx.host as host
from nvfp4.ptx import arith, bits
from nvfp4.ptx.instruction import Instruction
from nvfp4.ptx.rounding import bits_of, float_of, sum_to_odd

NAN = 0x7FFFFFFF
WORDS = [0, 1, 2, 3, 5, 30, 31, 32, 33, 63, 64, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFE, 0x7FFFFFFF]
WORDS += [0x80000000, 0x80000001, 0xAAAAAAAA, 0xDEADBEEF, 0xFFFF0000, 0xFFFFFFFE, 0xFFFFFFFF]
FLOATS = [0, 1, 2, 0x3FFFFF, 0x400000, 0x7FFFFF, 0x800000, 0x800001, 0x0C000000, 0x33800000]
FLOATS += [0x34000000, 0x3EAAAAAB, 0x3F000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x3FFFFFFF]
FLOATS += [0x40000000, 0x40490FDB, 0x4B000000, 0x4B000001, 0x4EFFFFFF, 0x4F000000, 0x4F7FFFFF]
FLOATS += [0x4F800000, 0x7E800000, 0x7F000000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000]
FLOATS += [bits | 0x80000000 for bits in FLOATS]


def signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def random_words(count: int, seed: int = 1) -> list[int]:
    generator = random.Random(seed)
    return [generator.getrandbits(32) for _ in range(count)]


# float32 -----------------------------------------------------------------------------------------


def exact(word: int) -> Fraction:
    """The value of a finite float32's pattern."""
    exponent = word >> 23 & 0xFF
    significand = word & 0x7FFFFF | (0x800000 if exponent else 0)
    value = Fraction(significand) * Fraction(2) ** (max(exponent, 1) - 150)
    return -value if word >> 31 else value


def rounded(value: Fraction, zero: int) -> int:
    """The pattern of the float32 nearest to a value, ties to even; `zero` is the pattern of 0."""
    if value == 0:
        return zero
    sign = 0x80000000 if value < 0 else 0
    value = abs(value)
    exponent = max(value.numerator.bit_length() - value.denominator.bit_length() - 1, -126)
    while exponent > -126 and value < Fraction(2) ** exponent:
        exponent -= 1
    while value >= Fraction(2) ** (exponent + 1):
        exponent += 1
    steps = round(value / Fraction(2) ** (exponent - 23))
    return sign | min(((exponent + 126) << 23) + steps, 0x7F800000)


def special(word: int) -> str:
    magnitude = word & 0x7FFFFFFF
    return "nan" if magnitude > 0x7F800000 else "inf" if magnitude == 0x7F800000 else ""


def wanted(name: str, *words: int) -> int:
    """The result's pattern by IEEE 754, with exact arithmetic; NaN is the canonical one."""
    if any(special(word) == "nan" for word in words):
        return NAN
    if name == "fma_rn":
        a, b, c = words
        if special(a) or special(b):
            return wanted("add_rn", wanted("mul_rn", a, b), c)
        if special(c):
            return c
        value = exact(a) * exact(b) + exact(c)
        sign = (a ^ b) >> 31
        zero = 0x80000000 if sign and c >> 31 else 0
        if exact(a) * exact(b) != 0:
            zero = 0
        return rounded(value, zero)
    if name == "sub_rn":
        return wanted("add_rn", words[0], words[1] ^ 0x80000000)
    if name == "rcp_rn":
        return wanted("div_rn", 0x3F800000, words[0])
    if name == "sqrt_rn":
        (a,) = words
        if a in (0, 0x80000000):
            return a
        if a >> 31:
            return NAN
        if special(a):
            return a
        return _root(a)
    a, b = words
    sign = (a ^ b) & 0x80000000
    zero_a, zero_b = a & 0x7FFFFFFF == 0, b & 0x7FFFFFFF == 0
    if name == "add_rn":
        if special(a) or special(b):
            return NAN if special(a) and special(b) and sign else (a if special(a) else b)
        return rounded(exact(a) + exact(b), a & b & 0x80000000)
    if name == "mul_rn":
        if special(a) or special(b):
            return NAN if zero_a or zero_b else sign | 0x7F800000
        return rounded(exact(a) * exact(b), sign)
    assert name == "div_rn"
    if special(a):
        return NAN if special(b) else sign | 0x7F800000
    if special(b):
        return sign
    if zero_b:
        return NAN if zero_a else sign | 0x7F800000
    return rounded(exact(a) / exact(b), sign)


def _root(word: int) -> int:
    """Nearest float32 to a root, by comparing squares: a root is never half way."""
    value = exact(word)
    guess = rounded(Fraction(math.isqrt(int(value * 4**200))) / Fraction(2) ** 200, 0)
    best = min((guess - 1, guess, guess + 1), key=lambda w: abs(exact(w) ** 2 - value))
    lower_half = (exact(best) + exact(best - 1)) / 2
    upper_half = (exact(best) + exact(best + 1)) / 2
    return best - 1 if value < lower_half**2 else best + 1 if value > upper_half**2 else best


def apply(name: str, *words: int) -> int:
    result = getattr(arith, name)(*(float_of(word) for word in words))
    assert type(result) is np.float32
    return bits_of(result)


@pytest.mark.parametrize("name", ["add_rn", "sub_rn", "mul_rn", "div_rn"])
def test_two_operands_are_rounded_once(name):
    pairs = list(itertools.product(FLOATS, FLOATS))
    words = random_words(4000)
    pairs += zip(words[::2], words[1::2], strict=True)
    # Nearby magnitudes, where sums cancel and quotients are near 1.
    pairs += [(a, (a ^ b & 0x803FFFFF)) for a, b in zip(words[::2], words[1::2], strict=True)]
    for a, b in pairs:
        assert apply(name, a, b) == wanted(name, a, b), f"{name}({a:#x}, {b:#x})"


@pytest.mark.parametrize("name", ["rcp_rn", "sqrt_rn"])
def test_one_operand_is_rounded_once(name):
    for a in FLOATS + random_words(1500):
        assert apply(name, a) == wanted(name, a), f"{name}({a:#x})"


def test_fma_is_rounded_once():
    values = [0, 1, 0x400000, 0x800001, 0x33800001, 0x3F7FFFFF, 0x3F800001, 0x4B000001, 0x7F7FFFFF]
    values += [0x7F800000, 0x7FC00000]
    values += [value | 0x80000000 for value in values]
    triples = list(itertools.product(values, values, values))
    words = random_words(6000, seed=2)
    triples += zip(words[::3], words[1::3], words[2::3], strict=True)
    for a, b, c in triples:
        assert apply("fma_rn", a, b, c) == wanted("fma_rn", a, b, c), f"({a:#x}, {b:#x}, {c:#x})"


def test_fma_is_not_rounded_through_float64():
    # (1 + 2^-12)^2 + c is half way between float32s but for a last bit far below float64's.
    a = float_of(0x3F800800)
    for c in (0x0F000000, 0x8F000000):
        got = bits_of(arith.fma_rn(a, a, float_of(c)))
        assert got == wanted("fma_rn", 0x3F800800, 0x3F800800, c)
    assert sum_to_odd(1.0, 2.0**-80) == math.nextafter(1.0, 2.0)
    assert sum_to_odd(1.0, -(2.0**-80)) == math.nextafter(1.0, 0.0)
    assert sum_to_odd(1.0, 2.0**-52) == 1.0 + 2.0**-52


@pytest.mark.parametrize("name, pick", [("min", min), ("max", max)])
def test_minimum_and_maximum_drop_or_keep_nan_and_order_zeros(name, pick):
    for a, b in itertools.product(FLOATS, FLOATS):
        numbers = [word for word in (a, b) if special(word) != "nan"]
        # -0 is below +0: order by the pattern, as sign and magnitude.
        order = {word: -(word & 0x7FFFFFFF) - 1 if word >> 31 else word for word in numbers}
        dropped = pick(numbers, key=order.get) if numbers else NAN
        kept = dropped if len(numbers) == 2 else NAN
        assert apply(f"{name}_f32", a, b) == dropped
        assert apply(f"{name}_nan_f32", a, b) == kept


def test_magnitude_and_negation_change_the_sign_bit_only():
    for a in FLOATS:
        nan = special(a) == "nan"
        assert apply("abs_f32", a) == (NAN if nan else a & 0x7FFFFFFF)
        assert apply("neg_f32", a) == (NAN if nan else a ^ 0x80000000)


# Integers ----------------------------------------------------------------------------------------

UNSIGNED = {
    "add_u32": lambda a, b: a + b,
    "sub_u32": lambda a, b: a - b,
    "mul_u32": lambda a, b: a * b,
    "mulhi_u32": lambda a, b: a * b >> 32,
    "and_u32": operator.and_,
    "or_u32": operator.or_,
    "xor_u32": operator.xor,
    "shl_u32": lambda a, b: a << min(b, 32),
    "shr_u32": lambda a, b: a >> min(b, 32),
    "min_u32": min,
    "max_u32": max,
}
SIGNED = {
    "add_i32": lambda a, b: a + b,
    "sub_i32": lambda a, b: a - b,
    "mul_i32": lambda a, b: a * b,
    "min_i32": min,
    "max_i32": max,
}
RELATIONS = {
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
}
PAIRS = list(itertools.product(WORDS, WORDS))


@pytest.mark.parametrize("name", UNSIGNED)
def test_unsigned_arithmetic_wraps_at_32_bits(name):
    for a, b in PAIRS:
        assert getattr(arith, name)(a, b) == UNSIGNED[name](a, b) & 0xFFFFFFFF


@pytest.mark.parametrize("name", SIGNED)
def test_signed_arithmetic_wraps_at_32_bits(name):
    for a, b in PAIRS:
        a, b = signed(a), signed(b)
        assert getattr(arith, name)(a, b) == signed(SIGNED[name](a, b) & 0xFFFFFFFF)


def test_division_rounds_down_and_by_zero_is_an_error():
    for a, b in PAIRS:
        if b:
            assert (arith.div_u32(a, b), arith.rem_u32(a, b)) == divmod(a, b)
    with pytest.raises(ZeroDivisionError):
        arith.div_u32(1, 0)


def test_an_arithmetic_shift_fills_with_the_sign():
    for a, b in PAIRS:
        assert arith.sar_i32(signed(a), b) == signed(a) >> min(b, 40)


def test_multiply_add_and_complement_wrap():
    for a, b in PAIRS:
        assert arith.mad_u32(a, b, 0xFFFFFFFF) == (a * b - 1) % (1 << 32)
        assert arith.not_u32(a) == 0xFFFFFFFF - a


@pytest.mark.parametrize("relation", RELATIONS)
def test_comparisons_are_unsigned_signed_or_ordered(relation):
    compare = RELATIONS[relation]
    for a, b in PAIRS:
        assert getattr(arith, f"{relation}_u32")(a, b) is compare(a, b)
        assert getattr(arith, f"{relation}_i32")(signed(a), signed(b)) is compare(
            signed(a), signed(b)
        )
    for a, b in itertools.product(FLOATS, FLOATS):
        if "nan" in (special(a), special(b)):
            want = relation == "ne"
        elif special(a) or special(b):
            want = compare(float(float_of(a)), float(float_of(b)))
        else:
            want = compare(exact(a), exact(b))
        assert getattr(arith, f"{relation}_f32")(float_of(a), float_of(b)) is want


def test_operands_count_modulo_32_bits():
    for name in [*UNSIGNED, "lt_u32", "eq_u32", "shf_l", "shf_r", "prmt"]:
        instruction = getattr(arith, name)
        count = len(instruction.parameters)
        for words in itertools.product(WORDS[5:], repeat=count) if count == 2 else [WORDS[12:15]]:
            wide = [word + (5 << 32) for word in words]
            low = [word - (1 << 32) for word in words]
            assert instruction(*wide) == instruction(*words) == instruction(*low), name


# Bits --------------------------------------------------------------------------------------------


def test_counts_and_reversal_of_bits():
    for a in [*WORDS, *random_words(200)]:
        text = f"{a:032b}"
        assert arith.clz(a) == len(text) - len(text.lstrip("0"))
        assert arith.popc(a) == text.count("1")
        assert arith.brev(a) == int(text[::-1], 2)
        assert arith.ffs(a) == (text[::-1].index("1") + 1 if a else 0)


def test_prmt_picks_bytes_and_copies_signs():
    a, b = 0x83828180, 0x07060504
    both = [0x80, 0x81, 0x82, 0x83, 0x04, 0x05, 0x06, 0x07]
    for selector in [*range(0, 1 << 16, 37), 0x3210, 0xFEDC, 0xBA98]:
        want = 0
        for i in range(4):
            choice = selector >> 4 * i & 15
            byte = both[choice & 7]
            if choice & 8:
                byte = 255 if byte & 128 else 0
            want |= byte << 8 * i
        assert arith.prmt(a, b, selector) == want


def test_lop3_computes_the_function_of_its_table():
    a, b, c = 0xF0F0F0F0, 0xCCCCCCCC, 0xAAAAAAAA
    for table in range(256):
        assert arith.lop3(a, b, c, table) == table * 0x01010101
    for x, y, z in zip(*[iter(random_words(99))] * 3, strict=True):
        assert arith.lop3(x, y, z, 0xF0 & 0xCC | 0xAA) == x & y | z
        assert arith.lop3(x, y, z, 0xF0 ^ 0xCC ^ 0xAA) == x ^ y ^ z


def test_funnel_shifts_take_the_amount_modulo_32():
    for low, high in PAIRS:
        both = high << 32 | low
        for amount in (0, 1, 4, 31, 32, 33, 63):
            shift = amount % 32
            assert arith.shf_l(low, high, amount) == both << shift >> 32 & 0xFFFFFFFF
            assert arith.shf_r(low, high, amount) == both >> shift & 0xFFFFFFFF


# Conversions -------------------------------------------------------------------------------------


def test_integers_become_the_nearest_float():
    for a in [*WORDS, *random_words(500)]:
        assert bits_of(arith.f32_of_u32(a)) == rounded(Fraction(a), 0)
        assert bits_of(arith.f32_of_i32(signed(a))) == rounded(Fraction(signed(a)), 0)


def test_floats_become_integers_clamped_and_nan_becomes_zero():
    for a in [*FLOATS, *random_words(500)]:
        kind = special(a)
        if kind == "nan":
            whole = nearest = Fraction(0)
        elif kind == "inf":
            whole = nearest = Fraction(10**20) * (-1 if a >> 31 else 1)
        else:
            whole, nearest = Fraction(math.trunc(exact(a))), Fraction(round(exact(a)))
        value = float_of(a)
        assert arith.u32_of_f32(value) == min(max(whole, 0), 0xFFFFFFFF)
        assert arith.i32_of_f32(value) == min(max(whole, -(1 << 31)), (1 << 31) - 1)
        assert arith.i32_of_f32_rn(value) == min(max(nearest, -(1 << 31)), (1 << 31) - 1)


def test_widening_keeps_the_value_and_narrowing_the_low_bits():
    for a in WORDS:
        assert arith.i64_of_u32(a) == a
        assert arith.i64_of_i32(signed(a)) == signed(a)
        assert arith.u32_of_i64(a - (1 << 40)) == a
        assert arith.i32_of_i64(a + (1 << 40)) == signed(a)


def test_a_selection_takes_one_of_its_operands():
    for condition in (True, False):
        assert arith.select_u32(condition, 7, 0xFFFFFFFF) == (7 if condition else 0xFFFFFFFF)
        assert arith.select_i32(condition, -7, 7) == (-7 if condition else 7)
        nan = float_of(0xFFC12345)
        assert bits_of(arith.select_f32(condition, nan, np.float32(1))) == (
            0xFFC12345 if condition else 0x3F800000
        )


# Lowerings that are LLVM instructions, run on the host -------------------------------------------


def built() -> list[Instruction]:
    every = {**vars(arith), **vars(bits)}.values()
    made = [value for value in every if isinstance(value, Instruction)]
    return [one for one in made if one.lowering_for((9, 0)).build is not None]


def operands(kind: str) -> list:
    return {
        "bool": [False, True],
        # Passing a signalling NaN to compiled code makes it a quiet one.
        "f32": [float_of(word) for word in FLOATS if word & 0x7FFFFFFF != 0x7F800001],
        "i32": [signed(word) for word in WORDS],
        "i64": [*WORDS, -1, -(1 << 40) + 3, 1 << 33],
        "u32": WORDS,
    }[kind]


@pytest.mark.parametrize("instruction", built(), ids=lambda instruction: instruction.name)
def test_a_lowering_made_of_llvm_instructions_computes_what_the_model_says(instruction):
    function = host.lowered(instruction)
    for arguments in itertools.product(*(operands(kind) for kind in instruction.parameters)):
        if instruction.name in ("div_u32", "rem_u32") and arguments[1] == 0:
            continue
        got, want = function(*_typed(instruction, arguments)), instruction(*arguments)
        if instruction.result == "f32":
            got, want = int(np.float32(got).view(np.uint32)), bits_of(want)
        assert got == want, f"{instruction.name}{arguments}"


def _typed(instruction: Instruction, arguments):
    made = {"u32": np.uint32, "i32": np.int32, "i64": np.int64, "f32": np.float32, "bool": bool}
    return [
        made[kind](value) for kind, value in zip(instruction.parameters, arguments, strict=True)
    ]
