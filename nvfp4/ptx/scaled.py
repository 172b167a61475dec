"""Short forms of long sequences, for operands that a quantiser has: exact, but under a condition.

:func:`e2m1x8_scaled` converts scaled values to e2m1 where the hardware has no such conversion. In
software that takes about 17 instructions an element; a quantiser at the speed of an H200's memory
has 22 for everything. This one takes 6, where a block's largest magnitude shows that
|RN(v * q)| < 7, so that nothing saturates.

How: with P = 2^max(0, floor(log2 |y|)) the spacing of e2m1 at y is P / 2, which is the last place
of a float32 of the size of 2^22 * P. With the sign of y, that number added to y rounds it once,
ties to the even multiple, which has the even code, and leaves the number k of half spacings in the
lowest bits of the sum. Exponent e of P = 2^e and sign are in their own bits, and the code is
8 * sign + 2 * e + k: one multiplication brings the three together in the topmost bits, from where a
funnel shift takes them. Checked for every float32 in (-7, 7).
"""

from __future__ import annotations

from .arith import mul_rn, rcp_rn
from .convert import e2m1x8_of_f32
from .instruction import instruction
from .rounding import NAN

_VALUES = range(8)


def _hardware() -> str:
    names = ", ".join(f"y{i}" for i in _VALUES)
    text = f"{{ .reg .f32 {names}; .reg .b8 b0, b1, b2, b3; "
    text += "".join(f"mul.rn.f32 y{i}, ${i + 1}, $9; " for i in _VALUES)
    text += "".join(f"cvt.rn.satfinite.e2m1x2.f32 b{i}, y{2 * i + 1}, y{2 * i}; " for i in range(4))
    return text + "mov.b32 $0, {b0, b1, b2, b3}; }"


def _by_sum(exponent: str) -> str:
    lines = ["{ .reg .b32 t, s, w, y, p, r; "]
    for i in reversed(_VALUES):
        lines += [
            f"mul.rn.f32 y, ${i + 1}, $9; ",
            exponent,
            "fma.rn.f32 r, p, 0f4A800000, y; ",  # 2^22
            "mad.lo.u32 t, r, 0x10000041, 0x15800000; ",
            # Eight times four bits: what w held at first is gone at the end.
            f"shf.l.wrap.b32 w, t, {'t' if i == 7 else 'w'}, 4; ",
        ]
    return "".join(lines) + "mov.b32 $0, w; }"


_EXPONENT = "and.b32 p, y, 0xFF800000; max.xorsign.abs.f32 p, p, 0f3F800000; "
_EXPONENT_SM80 = (
    "and.b32 p, y, 0x7F800000; max.f32 p, p, 0f3F800000; and.b32 s, y, 0x80000000; or.b32 p, p, s; "
)


@instruction("u32(f32, f32, f32, f32, f32, f32, f32, f32, f32)", asm=_hardware(), min_cc=(10, 0))
def e2m1x8_scaled(v0, v1, v2, v3, v4, v5, v6, v7, q):
    """e2m1 codes of RN(v * q), `v0` in bits 3..0, where every |RN(v * q)| < 7; else any word."""
    values = [mul_rn(v, q) for v in (v0, v1, v2, v3, v4, v5, v6, v7)]
    if not all(abs(value) < 7.0 for value in values):
        # A word that no test of the result overlooks.
        return 0xDEADBEEF
    return e2m1x8_of_f32.model(*values)


e2m1x8_scaled.lowering(asm=_by_sum(_EXPONENT), min_cc=(8, 6))
e2m1x8_scaled.lowering(asm=_by_sum(_EXPONENT_SM80), min_cc=(8, 0))


@instruction(
    "f32(f32)",
    asm="{ .reg .f32 a, e, n; rcp.approx.ftz.f32 a, $1; neg.f32 n, $1;"
    " fma.rn.f32 e, n, a, 0f3F800000; fma.rn.f32 $0, a, e, a; }",
)
def rcp_rn_normal(d):
    """RN(1/d) where 2^-100 <= |d| <= 2^100; NaN for NaN; elsewhere any number (here NaN).

    One Newton step from the hardware's approximation; tests on a card compare it with the division
    for every significand.
    """
    return rcp_rn(d) if 2.0**-100 <= abs(d) <= 2.0**100 else NAN


@instruction(
    "f32(f32)",
    asm="{ .reg .f32 a, e, n; rcp.approx.ftz.f32 a, $1; neg.f32 n, $1;"
    " fma.rn.f32 e, n, a, 0f3F800000; fma.rn.f32 e, e, a, a; max.f32 $0, e, 0f00000000; }",
)
def rcp_rn_or_zero(d):
    """RN(1/d) where 2^-100 <= d <= 2^100; 0 for 0; elsewhere any number (here 0).

    :func:`rcp_rn_normal`, which makes a NaN of 0 (infinity times 0), and a maximum that drops it.
    """
    return rcp_rn(d) if 2.0**-100 <= d <= 2.0**100 else 0.0
