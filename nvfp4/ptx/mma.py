"""Warp-level matrix products (mma.sync), the loads that feed them (ldmatrix) and their reverse.

With g = lane / 4 and t = lane % 4, fragments of an m16n8k16 product of 16-bit elements are::

    a[0] A[g][2t, 2t+1]    a[1] A[g+8][2t, ..]    a[2] A[g][2t+8, ..]   a[3] A[g+8][2t+8, ..]
    b[0] B[2t, 2t+1][g]    b[1] B[2t+8, ..][g]
    c[0], c[1] C[g][2t], C[g][2t+1]               c[2], c[3] C[g+8][2t], C[g+8][2t+1]

the element with the smaller k in the low half; of an m16n8k32 product of bytes the same with 4t..
and 4t+16.. in place of 2t.. and 2t+8... All 32 lanes take part.

The models compute exact products, sum them and C in float64, and round once: so they are right
where all partial sums are exact in float32, and where they are not the card may differ, whose
order and rounding PTX leaves open. Source: PTX ISA, ``mma``, ``ldmatrix``,
``stmatrix``.
"""

from __future__ import annotations

from . import lower
from .instruction import instruction
from .machine import engines, thread
from .rounding import MASK

_ALL = 0xFFFFFFFF


# ldmatrix ----------------------------------------------------------------------------------------


def _ldmatrix(address, count, trans):
    return engines().ldmatrix(thread(), address, count, trans)


def _lower_ldmatrix(target, count, trans=False):
    text = (
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if trans else ''}.shared.b16 "
        f"{lower.registers(0, count)}, [${count}];"
    )

    def build(builder, ir, arguments):
        made = lower.together(builder, ir, text, "r" * count, arguments, memory=True)
        return made if count > 1 else made[0]

    target.lowering(memory=True)(build)


@instruction("u32(u32)")
def ldmatrix_x1(address):
    """One 8 x 8 matrix of 16-bit elements.

    Lane i below 8 gives the address of row i, 16 bytes, 16-byte aligned. Lane L receives row L / 4,
    elements 2 (L % 4) and the next.
    """
    return _ldmatrix(address, 1, False)[0]


@instruction("u32x2(u32)")
def ldmatrix_x2(address):
    """Two matrices; lanes 8..15 give the rows of the second."""
    return _ldmatrix(address, 2, False)


@instruction("u32x4(u32)")
def ldmatrix_x4(address):
    """Four matrices; lanes 8i..8i+7 give the rows of matrix i."""
    return _ldmatrix(address, 4, False)


@instruction("u32(u32)")
def ldmatrix_x1_trans(address):
    """:func:`ldmatrix_x1` transposed: rows 2 (L % 4) and the next, element L / 4."""
    return _ldmatrix(address, 1, True)[0]


@instruction("u32x2(u32)")
def ldmatrix_x2_trans(address):
    """:func:`ldmatrix_x2` transposed."""
    return _ldmatrix(address, 2, True)


@instruction("u32x4(u32)")
def ldmatrix_x4_trans(address):
    """:func:`ldmatrix_x4` transposed."""
    return _ldmatrix(address, 4, True)


_lower_ldmatrix(ldmatrix_x1, 1)
_lower_ldmatrix(ldmatrix_x2, 2)
_lower_ldmatrix(ldmatrix_x4, 4)
_lower_ldmatrix(ldmatrix_x1_trans, 1, trans=True)
_lower_ldmatrix(ldmatrix_x2_trans, 2, trans=True)
_lower_ldmatrix(ldmatrix_x4_trans, 4, trans=True)


@instruction(
    "void(u32, u32, u32, u32, u32)",
    asm="stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};",
    memory=True,
    min_cc=(9, 0),
)
def stmatrix_x4(address, w0, w1, w2, w3):
    """Store four 8 x 8 matrices of 16-bit elements, whose fragments are as :func:`ldmatrix_x4` has.

    Lane 8i + r gives the address of row r of matrix i, 16 bytes, 16-byte aligned; lane L stores
    elements 2 (L % 4) and the next of row L / 4 of each.
    """
    engines().stmatrix(thread(), address, (w0, w1, w2, w3))


# mma.sync ----------------------------------------------------------------------------------------


def _mma(kind, a, b, c):
    operands = tuple(word & MASK for word in a), tuple(word & MASK for word in b), tuple(c)
    return thread().collective(f"mma {kind}", _ALL, operands, engines().mma_resolver(kind))


def _lower_mma(target, shape, kind, **when):
    text = (
        f"mma.sync.aligned.{shape}.row.col.f32.{kind}.{kind}.f32 {lower.registers(0, 4)}, "
        f"{lower.registers(4, 4)}, {lower.registers(8, 2)}, {lower.registers(10, 4)};"
    )

    def build(builder, ir, arguments):
        return lower.together(builder, ir, text, "ffff", arguments)

    target.lowering(**when)(build)


@instruction("f32x4(u32x4, u32x2, f32x4)")
def mma_m16n8k16_bf16(a, b, c):
    """A B + C of bfloat16, with float32 sums."""
    return _mma("bf16", a, b, c)


@instruction("f32x4(u32x4, u32x2, f32x4)")
def mma_m16n8k16_f16(a, b, c):
    """A B + C of float16, with float32 sums."""
    return _mma("f16", a, b, c)


@instruction("f32x4(u32x4, u32x2, f32x4)")
def mma_m16n8k32_e4m3(a, b, c):
    """A B + C of float8 e4m3. Native on sm_89 and sm_120; elsewhere made of float16 products."""
    return _mma("e4m3", a, b, c)


@instruction("f32x4(u32x4, u32x2, f32x4)")
def mma_m16n8k32_e5m2(a, b, c):
    """A B + C of float8 e5m2; see :func:`mma_m16n8k32_e4m3`."""
    return _mma("e5m2", a, b, c)


_lower_mma(mma_m16n8k16_bf16, "m16n8k16", "bf16")
_lower_mma(mma_m16n8k16_f16, "m16n8k16", "f16")
_lower_mma(mma_m16n8k32_e4m3, "m16n8k32", "e4m3", min_cc=(8, 9))
_lower_mma(mma_m16n8k32_e5m2, "m16n8k32", "e5m2", min_cc=(8, 9))
