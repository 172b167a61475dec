"""Warp-level products of block-scaled matrices (sm_120a, sm_121a): mma.sync with ``block_scale``.

A product m16n8 adds, over the blocks of k, sA * sB * (the sum of a * b over the block) to C. What
it multiplies is called its `kind`:

* ``"nvfp4"``: e2m1 with e4m3 scales a 16 elements, k 64; a scale word has the four blocks' bytes.
* ``"mxfp4"``: e2m1 with e8m0 scales a 32 elements, k 64; bytes `byte` (0 or 2) and the next.
* ``"e4m3.e2m1"`` and the other pairs of e4m3, e5m2 and e2m1: e8m0 scales, k 32, which is one
  block; byte `byte` (0 to 3).

With g = lane / 4 and t = lane % 4, fragments of the packed kinds (k 64, eight elements a register,
the first in the lowest bits) are::

    a[0] A[g][8t, ..]    a[1] A[g+8][8t, ..]    a[2] A[g][8t+32, ..]    a[3] A[g+8][8t+32, ..]
    b[0] B[8t, ..][g]    b[1] B[8t+32, ..][g]

and of the others (k 32, a byte an element) the same with 4t.. and 4t+16.. as in ``nvfp4.ptx.mma``,
where C's is too; an e2m1 code lies in bits 5..2 of its byte, the other bits are zero. Scales of row
g come from lane 4g + 2 `a_thread`, of row g + 8 from the next lane; those of column g from lane
4g + `b_thread`. All 32 lanes take part.

The models sum in float64 and round once, as ``nvfp4.ptx.mma``'s do: right where the sums are exact.
Source: PTX ISA, ``mma`` with block scaling, ``ldmatrix``.
"""

from __future__ import annotations

from . import lower
from .instruction import instruction
from .machine import engines, thread
from .rounding import MASK

_ALL = 0xFFFFFFFF
_CARDS = (12, 0)
_BYTES = ("e4m3", "e5m2", "e2m1")
#: What can be multiplied, and the bytes that its scales may begin at.
KINDS = {
    "nvfp4": (0,),
    "mxfp4": (0, 2),
    **{f"{a}.{b}": (0, 1, 2, 3) for a in _BYTES for b in _BYTES},
}


def _mnemonic(kind, byte):
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}")
    if byte not in KINDS[kind]:
        raise ValueError(f"byte must be one of {KINDS[kind]} for {kind}; got {byte!r}")
    if kind == "nvfp4":
        return "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
    if kind == "mxfp4":
        return "m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0"
    return f"m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.{kind}.f32.ue8m0"


def _text(kind, byte, d, a, b, c, scales, threads):
    """One product; `d`, `a`, `b`, `c` are the first of their operands."""
    for name, value, allowed in (("a", threads[0], (0, 1)), ("b", threads[1], (0, 1, 2, 3))):
        if value not in allowed:
            raise ValueError(f"{name}_thread must be one of {allowed}; got {value!r}")
    operands = (lower.registers(d, 4), lower.registers(a, 4), lower.registers(b, 2))
    return (
        f"mma.sync.aligned.{_mnemonic(kind, byte)} {', '.join(operands)}, {lower.registers(c, 4)}, "
        f"${scales}, {{{byte}, {threads[0]}}}, ${scales + 1}, {{{byte}, {threads[1]}}};"
    )


def _model(kind, a, b, c, a_scales, b_scales, byte, a_thread, b_threads):
    _text(kind, byte, 0, 0, 0, 0, 0, (a_thread, b_threads[0]))
    name = f"mma {kind} scales {byte}, {a_thread}, {b_threads[0]}"
    operands = (
        tuple(word & MASK for word in a),
        tuple(word & MASK for word in b),
        tuple(c),
        a_scales & MASK,
        b_scales & MASK,
    )
    resolve = engines().scaled_mma_resolver(kind, byte, a_thread, b_threads)
    return thread().collective(name, _ALL, operands, resolve)


@instruction("f32x4(imm, u32x4, u32x2, f32x4, u32, u32, imm, imm, imm)")
def mma_scaled(kind, a, b, c, a_scales, b_scales, byte, a_thread, b_thread):
    """A B + C of 16 rows and 8 columns; see the module's docstring."""
    return _model(kind, a, b, c, a_scales, b_scales, byte, a_thread, (b_thread,))


@mma_scaled.lowering(min_cc=_CARDS)
def _mma_scaled(builder, ir, arguments, kind, byte, a_thread, b_thread):
    text = _text(kind, byte, 0, 4, 8, 10, 14, (a_thread, b_thread))
    return lower.together(builder, ir, text, "ffff", arguments)


@instruction("f32x16(imm, u32x4, u32x8, f32x16, u32, u32, imm, imm)")
def mma_scaled_x4(kind, a, b, c, a_scales, b_scales, byte, a_thread):
    """Four products of the same rows with neighbouring eights of columns.

    Operands and results of the four follow each other; lane 4g + i has the scales of column g of
    the i-th eight.
    """
    return _model(kind, a, b, c, a_scales, b_scales, byte, a_thread, (0, 1, 2, 3))


@mma_scaled_x4.lowering(min_cc=_CARDS)
def _mma_scaled_x4(builder, ir, arguments, kind, byte, a_thread):
    # Sums stay in their registers: a later product's operands are read after the first's results.
    a, b, c, scales = arguments[:4], arguments[4:12], arguments[12:28], arguments[28:]
    text = " ".join(
        _text(kind, byte, 4 * i, 32, 36 + 2 * i, 4 * i, 44, (a_thread, i)) for i in range(4)
    )
    return lower.together(builder, ir, text, "f" * 16, [*c, *a, *b, *scales], tied=16)


@instruction("u32x4(u32)")
def ldmatrix_x4_e2m1(address):
    """Four matrices of 8 rows of 16 packed e2m1 codes, each code a byte's bits 3..0.

    Lanes 8i..8i+7 give the rows of matrix i: 16-byte aligned, eight bytes of codes and eight that
    are not read. Lane L receives codes 4 (L % 4) to 4 (L % 4) + 3 of row L / 4.
    """
    return engines().ldmatrix_e2m1(thread(), address, 4)


@ldmatrix_x4_e2m1.lowering(memory=True, min_cc=(10, 0))
def _ldmatrix_x4_e2m1(builder, ir, arguments):
    text = f"ldmatrix.sync.aligned.m8n16.x4.shared.b8x16.b4x16_p64 {lower.registers(0, 4)}, [$4];"
    return lower.together(builder, ir, text, "rrrr", arguments, memory=True)
