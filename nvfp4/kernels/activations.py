"""The activations of a product, eight neighbours of a row at a time, as pairs of bfloat16.

A plain row of bfloat16 is taken as it is; of float16 the words are left as they are, for
``mma_tiles.upper_half`` and its twin. Codes are multiplied by their scale, exactly; A_SCALE is
"none" where they have no block scales.

Compile-time constants: A_ELEMENT, A_SCALE, A_LAYOUT, INPUT, as in ``matmul_naive``.
"""

from __future__ import annotations

from ..ptx.arith import and_u32, gt_u32, ne_u32, or_u32, shr_u32, sub_u32
from ..ptx.convert import bf16x2_of_e4m3x2
from ..ptx.memory import ld_global_u32, ld_global_v2_u32, ld_global_v4_u32
from .mma_tiles import HIGHEST, LOWEST, four_pairs, scale_byte, scale_pair, two_pairs

A_ELEMENT = "none"
A_SCALE = "e8m0"
A_LAYOUT = "linear"


def row_bytes(units):
    """Bytes from a row of A to the next; `units` as the plans have it."""
    if A_ELEMENT == "none":
        return units * 2
    else:
        return units


def may_be_extreme():
    """Whether scales may be beyond what bfloat16 and tensor cores hold."""
    if A_ELEMENT == "none":
        return False
    elif A_SCALE == "e8m0":
        return True
    else:
        return False


def is_extreme(some, byte):
    """Whether codes, of which `some` has those that are not zero, have such a scale."""
    outside = gt_u32(sub_u32(byte, LOWEST), HIGHEST - LOWEST)
    return outside & ne_u32(byte, 255) & ne_u32(some, 0)


def row_is_extreme(a, a_scales, at, scale_row, depth):
    """Whether a row has an extreme scale: it alone is then multiplied element by element."""
    extreme = False
    if may_be_extreme():
        column = depth - depth
        while column < depth:
            _, one = chunk(a, a_scales, at, scale_row, column, depth)
            extreme = extreme | one
            column += 8
    return extreme


def chunk(a, a_scales, at, scale_row, column, depth):
    """Elements from `column`, a multiple of 8, of a row that begins at byte `at`.

    Returns four words, and whether their scale is extreme.
    """
    if A_ELEMENT == "none":
        return ld_global_v4_u32(a, at + column * 2, ""), False
    elif A_SCALE == "none":
        words = ld_global_v2_u32(a, at + column, "")
        return (
            bf16x2_of_e4m3x2(and_u32(words[0], 0xFFFF)),
            bf16x2_of_e4m3x2(shr_u32(words[0], 16)),
            bf16x2_of_e4m3x2(and_u32(words[1], 0xFFFF)),
            bf16x2_of_e4m3x2(shr_u32(words[1], 16)),
        ), False
    else:
        byte = scale_byte(a_scales, 0, scale_row, column // 16, depth, A_SCALE, A_LAYOUT)
        factor = scale_pair(byte, A_SCALE)
        if A_ELEMENT == "e2m1":
            word = ld_global_u32(a, at + column // 2, "")
            extreme = False
            if may_be_extreme():
                extreme = is_extreme(and_u32(word, 0x77777777), byte)
            return four_pairs(word, factor), extreme
        else:
            words = ld_global_v2_u32(a, at + column, "")
            low = two_pairs(words[0], A_ELEMENT, factor)
            high = two_pairs(words[1], A_ELEMENT, factor)
            some = and_u32(or_u32(words[0], words[1]), 0x7F7F7F7F)
            return (low[0], low[1], high[0], high[1]), is_extreme(some, byte)
