"""Hidden values on their way into a quantiser: gated activations, sums with a residual, norms.

The operations are those of ``golden.hidden``, one by one. Everything works on half pieces as
``stream`` has them: the result is rounded to the dtype of the input, and quantised as if it had
been read.

Compile-time constants: INPUT, ALIGNED, FRONT ("plain", "silu", "gpt-oss", "rms"), HALVES, WEIGHT
(the weight's dtype: "same" as the input, "float32", or "none").
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import (
    abs_f32,
    add_rn,
    add_u32,
    fma_rn,
    max_nan_f32,
    min_f32,
    min_nan_f32,
    mul_rn,
    shl_u32,
    shr_u32,
    sub_rn,
)
from ..ptx.bits import (
    bf16x2_of_f32,
    f16x2_of_f32,
    f32_of_bf16,
    f32_of_f16,
    float_as_uint,
    pack_u16,
    uint_as_float,
)
from ..ptx.memory import (
    ld_global_f32,
    ld_global_u16,
    ld_global_v4_u32,
    st_global_f32,
    st_global_u16,
    st_global_v4_u32,
)
from ..ptx.packed import (
    max_nan_bf16x2,
    max_nan_f16x2,
    min_nan_bf16x2,
    min_nan_f16x2,
)
from ..ptx.scaled import rcp_rn_normal
from .elements import ZEROS
from .stream import amax_piece, larger_words, largest_word, load_half_piece, widen

INPUT = "bfloat16"
ALIGNED = True
FRONT = "silu"
HALVES = "split"
WEIGHT = "same"

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
MAGIC = np.float32(1.5 * 2**23 - 64)
SCALE_DOWN = np.float32(2.0**-64)
USUAL, USUAL_MAGIC = np.float32(68.0), np.float32(1.5 * 2**23)

# -alpha * log2(e), in two parts; and the bounds of the gate and of up.
SILU, SILU_REST = np.float32(-1.4426950216293335), np.float32(-1.925963033500011e-08)
SILU_LOW, SILU_FLAT = np.float32(-105.0), np.float32(40.0)
OSS, OSS_REST = np.float32(-2.4554669857025146), np.float32(2.6109498563187117e-08)
OSS_LOW, OSS_LIMIT, OSS_LOW_UP = np.float32(-62.0), np.float32(7.0), np.float32(-7.0)

# 2^f for |f| <= 1/2.
SHORT_1 = np.float32(0.6932829022407532)
SHORT_2 = np.float32(0.2422109693288803)
SHORT_3 = np.float32(0.05500893294811249)
LONG_1 = np.float32(0.6931471824645996)
LONG_2 = np.float32(0.24022647738456726)
LONG_3 = np.float32(0.055503323674201965)
LONG_4 = np.float32(0.00961843691766262)
LONG_5 = np.float32(0.0013398875016719103)
LONG_6 = np.float32(0.00015353361959569156)


# Half pieces in memory ---------------------------------------------------------------------------


def element_bytes():
    """Bytes of an element of the input."""
    if INPUT == "float32":
        return 4
    else:
        return 2


def zero_half():
    """Eight zeros."""
    if INPUT == "float32":
        return ZEROS
    else:
        zero = shl_u32(0, 0)
        return (zero, zero, zero, zero)


def pair_at(x, at):
    """Two 16-bit elements from byte `at` on, one after the other."""
    return pack_u16(ld_global_u16(x, at + 2, ""), ld_global_u16(x, at, ""))


def one_by_one(x, at):
    """Eight elements from byte `at` on, whatever the address."""
    if INPUT == "float32":
        return (
            ld_global_f32(x, at, ""),
            ld_global_f32(x, at + 4, ""),
            ld_global_f32(x, at + 8, ""),
            ld_global_f32(x, at + 12, ""),
            ld_global_f32(x, at + 16, ""),
            ld_global_f32(x, at + 20, ""),
            ld_global_f32(x, at + 24, ""),
            ld_global_f32(x, at + 28, ""),
        )
    else:
        return (pair_at(x, at), pair_at(x, at + 4), pair_at(x, at + 8), pair_at(x, at + 12))


def load_half(x, at):
    """Eight elements of an array that nobody writes meanwhile, from byte `at` on."""
    if ALIGNED:
        return load_half_piece(x, at)
    else:
        return one_by_one(x, at)


def load_half_written(x, at):
    """Eight elements of an array that this thread may write, from byte `at` on."""
    if ALIGNED and INPUT == "float32":
        a = ld_global_v4_u32(x, at, "")
        b = ld_global_v4_u32(x, at + 16, "")
        return (
            uint_as_float(a[0]),
            uint_as_float(a[1]),
            uint_as_float(a[2]),
            uint_as_float(a[3]),
            uint_as_float(b[0]),
            uint_as_float(b[1]),
            uint_as_float(b[2]),
            uint_as_float(b[3]),
        )
    elif ALIGNED:
        return ld_global_v4_u32(x, at, "")
    else:
        return one_by_one(x, at)


def store_pair(out, at, word):
    """Two 16-bit elements to byte `at` on."""
    st_global_u16(out, at, word, "")
    st_global_u16(out, at + 2, shr_u32(word, 16), "")


def store_half(out, at, raw):
    """Store eight elements from byte `at` on."""
    if ALIGNED and INPUT == "float32":
        st_global_v4_u32(
            out,
            at,
            float_as_uint(raw[0]),
            float_as_uint(raw[1]),
            float_as_uint(raw[2]),
            float_as_uint(raw[3]),
            "",
        )
        st_global_v4_u32(
            out,
            at + 16,
            float_as_uint(raw[4]),
            float_as_uint(raw[5]),
            float_as_uint(raw[6]),
            float_as_uint(raw[7]),
            "",
        )
    elif ALIGNED:
        st_global_v4_u32(out, at, raw[0], raw[1], raw[2], raw[3], "")
    elif INPUT == "float32":
        st_global_f32(out, at, raw[0], "")
        st_global_f32(out, at + 4, raw[1], "")
        st_global_f32(out, at + 8, raw[2], "")
        st_global_f32(out, at + 12, raw[3], "")
        st_global_f32(out, at + 16, raw[4], "")
        st_global_f32(out, at + 20, raw[5], "")
        st_global_f32(out, at + 24, raw[6], "")
        st_global_f32(out, at + 28, raw[7], "")
    else:
        store_pair(out, at, raw[0])
        store_pair(out, at + 4, raw[1])
        store_pair(out, at + 8, raw[2])
        store_pair(out, at + 12, raw[3])


def rounded(v):
    """Eight float32 rounded to the input's dtype, as they lie in memory."""
    if INPUT == "float32":
        return v
    elif INPUT == "bfloat16":
        return (
            bf16x2_of_f32(v[1], v[0]),
            bf16x2_of_f32(v[3], v[2]),
            bf16x2_of_f32(v[5], v[4]),
            bf16x2_of_f32(v[7], v[6]),
        )
    else:
        return (
            f16x2_of_f32(v[1], v[0]),
            f16x2_of_f32(v[3], v[2]),
            f16x2_of_f32(v[5], v[4]),
            f16x2_of_f32(v[7], v[6]),
        )


# Gated activations -------------------------------------------------------------------------------


def power_of_two(f):
    """2^f for |f| <= 1/2, about as exactly as the input's dtype can show."""
    if INPUT == "float32":
        p = fma_rn(LONG_6, f, LONG_5)
        p = fma_rn(p, f, LONG_4)
        p = fma_rn(p, f, LONG_3)
        p = fma_rn(p, f, LONG_2)
        p = fma_rn(p, f, LONG_1)
    else:
        p = fma_rn(SHORT_3, f, SHORT_2)
        p = fma_rn(p, f, SHORT_1)
    return fma_rn(p, f, ONE)


def scaled_sigmoid(x, factor, rest, magic, one):
    """1 / (1 + 2^(factor * x)) / one: a power of two keeps both from overflowing.

    The low bits of `magic` and the exponent of `one` go together.
    """
    shifted = fma_rn(x, factor, magic)
    fraction = fma_rn(x, factor, sub_rn(magic, shifted))
    if INPUT == "float32":
        fraction = fma_rn(x, rest, fraction)
    power = float_as_uint(power_of_two(fraction))
    # The low bits of `shifted` are added to the exponent.
    scaled = uint_as_float(add_u32(power, shl_u32(float_as_uint(shifted), 23)))
    return rcp_rn_normal(add_rn(scaled, one))


def bounded(raw, bf16_low, bf16_high, f16_low, f16_high):
    """Half a piece within bounds, which are given as pairs of 16-bit floats; NaN is kept."""
    if INPUT == "bfloat16":
        return (
            min_nan_bf16x2(max_nan_bf16x2(raw[0], bf16_low), bf16_high),
            min_nan_bf16x2(max_nan_bf16x2(raw[1], bf16_low), bf16_high),
            min_nan_bf16x2(max_nan_bf16x2(raw[2], bf16_low), bf16_high),
            min_nan_bf16x2(max_nan_bf16x2(raw[3], bf16_low), bf16_high),
        )
    else:
        return (
            min_nan_f16x2(max_nan_f16x2(raw[0], f16_low), f16_high),
            min_nan_f16x2(max_nan_f16x2(raw[1], f16_low), f16_high),
            min_nan_f16x2(max_nan_f16x2(raw[2], f16_low), f16_high),
            min_nan_f16x2(max_nan_f16x2(raw[3], f16_low), f16_high),
        )


def not_below(raw, bf16_low, f16_low):
    """Half a piece within a lower bound, given as a pair of 16-bit floats; NaN is kept."""
    if INPUT == "bfloat16":
        return (
            max_nan_bf16x2(raw[0], bf16_low),
            max_nan_bf16x2(raw[1], bf16_low),
            max_nan_bf16x2(raw[2], bf16_low),
            max_nan_bf16x2(raw[3], bf16_low),
        )
    else:
        return (
            max_nan_f16x2(raw[0], f16_low),
            max_nan_f16x2(raw[1], f16_low),
            max_nan_f16x2(raw[2], f16_low),
            max_nan_f16x2(raw[3], f16_low),
        )


def bounded_gates(raw):
    """Half a piece of gates, or of gates and ups that alternate, within the bounds of 16-bit types.

    Pairs at once: half the instructions of bounds on float32, which serve float32 input alone.
    """
    if INPUT == "float32":
        return raw
    elif FRONT == "gpt-oss" and HALVES == "split":
        return bounded(raw, 0xC278C278, 0x40E040E0, 0xD3C0D3C0, 0x47004700)
    elif FRONT == "gpt-oss":
        return bounded(raw, 0xC0E0C278, 0x40E040E0, 0xC700D3C0, 0x47004700)
    elif HALVES == "split":
        return not_below(raw, 0xC2D2C2D2, 0xD690D690)
    else:
        return not_below(raw, 0xFF80C2D2, 0xFC00D690)


def bounded_ups(raw):
    """Half a piece of ups, or of gates and ups that alternate."""
    if HALVES == "interleaved":
        return bounded_gates(raw)
    elif INPUT == "float32" or FRONT == "silu":
        return raw
    else:
        return bounded(raw, 0xC0E0C0E0, 0x40E040E0, 0xC700C700, 0x47004700)


def gated(gate, up):
    """One hidden value."""
    if FRONT == "gpt-oss":
        if INPUT == "float32":
            gate = min_nan_f32(max_nan_f32(gate, OSS_LOW), OSS_LIMIT)
            up = min_nan_f32(max_nan_f32(up, OSS_LOW_UP), OSS_LIMIT)
        sigmoid = scaled_sigmoid(gate, OSS, OSS_REST, MAGIC, SCALE_DOWN)
        return mul_rn(mul_rn(gate, sigmoid), fma_rn(up, SCALE_DOWN, SCALE_DOWN))
    else:
        if INPUT == "float32":
            gate = max_nan_f32(gate, SILU_LOW)
        sigmoid = scaled_sigmoid(min_f32(gate, SILU_FLAT), SILU, SILU_REST, MAGIC, SCALE_DOWN)
        return mul_rn(mul_rn(gate, mul_rn(sigmoid, SCALE_DOWN)), up)


def gated_usual(gate, up):
    """One hidden value of "silu" for |gate| <= 68: the same number without bounds and scaling."""
    sigmoid = scaled_sigmoid(gate, SILU, SILU_REST, USUAL_MAGIC, ONE)
    return mul_rn(mul_rn(gate, sigmoid), up)


def gates_and_ups(a, b):
    """Eight gates and eight ups, of gates and ups, or of 16 elements in which they alternate."""
    v = widen(a)
    w = widen(b)
    if HALVES == "split":
        return v, w
    else:
        return (
            (v[0], v[2], v[4], v[6], w[0], w[2], w[4], w[6]),
            (v[1], v[3], v[5], v[7], w[1], w[3], w[5], w[7]),
        )


def gated_half(a, b):
    """Eight hidden values of gates `a` and ups `b`, or of 16 elements in which they alternate."""
    g, u = gates_and_ups(bounded_gates(a), bounded_ups(b))
    return rounded(
        (
            gated(g[0], u[0]),
            gated(g[1], u[1]),
            gated(g[2], u[2]),
            gated(g[3], u[3]),
            gated(g[4], u[4]),
            gated(g[5], u[5]),
            gated(g[6], u[6]),
            gated(g[7], u[7]),
        )
    )


def gated_usual_half(a, b):
    """The same where ``usual_gates`` says so."""
    g, u = gates_and_ups(a, b)
    return rounded(
        (
            gated_usual(g[0], u[0]),
            gated_usual(g[1], u[1]),
            gated_usual(g[2], u[2]),
            gated_usual(g[3], u[3]),
            gated_usual(g[4], u[4]),
            gated_usual(g[5], u[5]),
            gated_usual(g[6], u[6]),
            gated_usual(g[7], u[7]),
        )
    )


def usual_gates(a, b, c, d):
    """Whether all gates of a piece are at most 68, so that nothing overflows; none is NaN."""
    if HALVES == "split":
        return amax_piece(a, c) <= USUAL
    else:
        m = larger_words(largest_word(a), largest_word(b))
        m = larger_words(m, larger_words(largest_word(c), largest_word(d)))
        if INPUT == "bfloat16":
            return abs_f32(f32_of_bf16(m)) <= USUAL
        else:
            return abs_f32(f32_of_f16(m)) <= USUAL


def gated_halves(a, b, c, d):
    """A piece of hidden values: of gates and ups by turns, in fours of eight elements."""
    if FRONT == "silu" and INPUT != "float32":
        if usual_gates(a, b, c, d):
            return gated_usual_half(a, b), gated_usual_half(c, d)
        else:
            return gated_half(a, b), gated_half(c, d)
    else:
        return gated_half(a, b), gated_half(c, d)


def gated_piece(x, row_at, piece, columns):
    """Hidden values of a piece of 16, of the row that begins at byte `row_at`."""
    half = element_bytes() * 8
    if HALVES == "split":
        gate_at = row_at + piece * (2 * half)
        up_at = gate_at + columns * element_bytes()
        a = load_half(x, gate_at)
        b = load_half(x, up_at)
        c = load_half(x, gate_at + half)
        d = load_half(x, up_at + half)
    else:
        at = row_at + piece * (4 * half)
        a = load_half(x, at)
        b = load_half(x, at + half)
        c = load_half(x, at + 2 * half)
        d = load_half(x, at + 3 * half)
    return gated_halves(a, b, c, d)


# Norms -------------------------------------------------------------------------------------------


def added_half(a, b):
    """Sums of eight elements and eight more, rounded."""
    v = widen(a)
    w = widen(b)
    return rounded(
        (
            add_rn(v[0], w[0]),
            add_rn(v[1], w[1]),
            add_rn(v[2], w[2]),
            add_rn(v[3], w[3]),
            add_rn(v[4], w[4]),
            add_rn(v[5], w[5]),
            add_rn(v[6], w[6]),
            add_rn(v[7], w[7]),
        )
    )


def squares8(v, total):
    """`total` and the squares of eight values, one after the other."""
    total = fma_rn(v[0], v[0], total)
    total = fma_rn(v[1], v[1], total)
    total = fma_rn(v[2], v[2], total)
    total = fma_rn(v[3], v[3], total)
    total = fma_rn(v[4], v[4], total)
    total = fma_rn(v[5], v[5], total)
    total = fma_rn(v[6], v[6], total)
    return fma_rn(v[7], v[7], total)


def squares(a, b):
    """Sum of the squares of a piece."""
    return squares8(widen(b), squares8(widen(a), ZERO))


def load_weight(weight, column):
    """Weights of eight columns as float32."""
    if WEIGHT == "float32" and INPUT != "float32":
        if ALIGNED:
            a = ld_global_v4_u32(weight, column * 4, "nc")
            b = ld_global_v4_u32(weight, column * 4 + 16, "nc")
            return (
                uint_as_float(a[0]),
                uint_as_float(a[1]),
                uint_as_float(a[2]),
                uint_as_float(a[3]),
                uint_as_float(b[0]),
                uint_as_float(b[1]),
                uint_as_float(b[2]),
                uint_as_float(b[3]),
            )
        else:
            at = column * 4
            return (
                ld_global_f32(weight, at, ""),
                ld_global_f32(weight, at + 4, ""),
                ld_global_f32(weight, at + 8, ""),
                ld_global_f32(weight, at + 12, ""),
                ld_global_f32(weight, at + 16, ""),
                ld_global_f32(weight, at + 20, ""),
                ld_global_f32(weight, at + 24, ""),
                ld_global_f32(weight, at + 28, ""),
            )
    else:
        return widen(load_half(weight, column * element_bytes()))


def normalised_half(raw, inverse, w):
    """RN(RN(s * inverse) * weight) of eight elements, rounded."""
    v = widen(raw)
    return rounded(
        (
            mul_rn(mul_rn(v[0], inverse), w[0]),
            mul_rn(mul_rn(v[1], inverse), w[1]),
            mul_rn(mul_rn(v[2], inverse), w[2]),
            mul_rn(mul_rn(v[3], inverse), w[3]),
            mul_rn(mul_rn(v[4], inverse), w[4]),
            mul_rn(mul_rn(v[5], inverse), w[5]),
            mul_rn(mul_rn(v[6], inverse), w[6]),
            mul_rn(mul_rn(v[7], inverse), w[7]),
        )
    )
