"""Tiles of 64 x 64 sums on tensor cores: operands to bfloat16 in shared memory, and ``mma.sync``.

What ``matmul_sm80`` and its grouped twin share. Every element times its scale is held exactly;
float16 elements of A, which have three bits more than bfloat16, become two: a = hi + lo.

Shared memory: a tile of A, a tile of B, and for float16 a tile of the lower halves of A, 8 KB each;
rows of 64 elements in 8 chunks of 16 bytes, chunk c of row r at c ^ (r % 8).

Compile-time constants: A_ELEMENT, A_SCALE, A_LAYOUT, B_ELEMENT, B_SCALE, B_LAYOUT, INPUT, as in
``matmul_naive``.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..ptx.arith import (
    add_u32,
    and_u32,
    eq_u32,
    gt_u32,
    i64_of_u32,
    ne_u32,
    or_u32,
    shl_u32,
    shr_u32,
    sub_rn,
    sub_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.bits import (
    bf16x2_of_f32,
    f32_of_bf16,
    f32_of_bf16_hi,
    f32_of_f16,
    f32_of_f16_hi,
    float_as_uint,
)
from ..ptx.convert import (
    bf16x2_of_e4m3x2,
    bf16x2_of_e5m2x2,
    f32_of_e4m3,
)
from ..ptx.memory import (
    ld_global_u8,
    ld_global_v2_u32,
    ld_global_v4_u32,
    shared_base,
    st_shared_v4_u32,
)
from ..ptx.mma import ldmatrix_x4, mma_m16n8k16_bf16
from ..ptx.packed import mul_bf16x2
from .products import (
    blocks_of,
)
from .scales import tcgen_place

A_ELEMENT = "none"
A_SCALE = "e8m0"
A_LAYOUT = "linear"
B_ELEMENT = "e2m1"
B_SCALE = "e8m0"
B_LAYOUT = "tcgen"
INPUT = "bfloat16"

ZERO = np.float32(0.0)
THREADS = 128
TILE = 64  # rows, columns and depth of a tile
TILE_BYTES = 8192
LOWEST, HIGHEST = 20, 234  # e8m0 bytes that are ordinary
#: The highest with a float16 A: sums of products with its upper halves, which may be rounded up,
#: must not overflow where the sums themselves do not.
HIGHEST_OF_HALVES = 199


# Operands ----------------------------------------------------------------------------------------


def load_words(p, at, kind: str):
    """Sixteen elements of a row as they lie in memory, in up to eight words; `at` in bytes."""
    if kind == "none":
        a = ld_global_v4_u32(p, at, "")
        b = ld_global_v4_u32(p, at + 16, "")
        return (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])
    elif kind == "e2m1":
        a = ld_global_v2_u32(p, at, "")
        z = xor_u32(a[0], a[0])
        return (a[0], a[1], z, z, z, z, z, z)
    else:
        a = ld_global_v4_u32(p, at, "")
        z = xor_u32(a[0], a[0])
        return (a[0], a[1], a[2], a[3], z, z, z, z)


def piece_bytes(kind: str):
    """Bytes of sixteen elements."""
    if kind == "none":
        return 32
    elif kind == "e2m1":
        return 8
    else:
        return 16


def scale_byte(scales, at, row, piece, depth, scale: str, layout: str):
    """The scale byte of a piece; `at` is where the matrix's scales begin."""
    block = piece
    if scale == "e8m0":
        block = piece >> 1
    blocks = blocks_of(depth, scale)
    if layout == "linear":
        place = row * blocks + block
    else:
        place = tcgen_place(row, block, (blocks + 3) // 4)
    return ld_global_u8(scales, at + place, "")


def scale_pair(byte, scale: str):
    """A scale as bfloat16, twice in a word: exact."""
    if scale == "e4m3":
        one = shr_u32(float_as_uint(f32_of_e4m3(and_u32(byte, 0x7F))), 16)
    elif eq_u32(byte, 0):
        one = shl_u32(1, 6)
    else:
        one = or_u32(shl_u32(byte, 7), shl_u32(u32_of_i64(1 if eq_u32(byte, 255) else 0), 6))
    return or_u32(one, shl_u32(one, 16))


def is_extreme(raw, byte, kind: str, scale: str):
    """Whether a piece needs more than bfloat16 and the tensor cores are sure to hold."""
    if scale == "e4m3":
        return False
    else:
        some = or_u32(raw[0], raw[1])
        mask = 0x77777777
        if kind != "e2m1":
            some = or_u32(some, or_u32(raw[2], raw[3]))
            mask = 0x7F7F7F7F
        if A_ELEMENT == "none" and INPUT == "float16":
            outside = gt_u32(sub_u32(byte, LOWEST), HIGHEST_OF_HALVES - LOWEST)
            if kind == "e5m2":
                outside = outside | has_infinity(raw)
        else:
            outside = gt_u32(sub_u32(byte, LOWEST), HIGHEST - LOWEST)
        return outside & ne_u32(byte, 255) & ne_u32(and_u32(some, mask), 0)


def has_infinity(raw):
    """Whether one of sixteen e5m2 codes is infinite or NaN: times a lower half of 0 it is NaN."""
    a = or_u32(beyond_finite(raw[0]), beyond_finite(raw[1]))
    b = or_u32(beyond_finite(raw[2]), beyond_finite(raw[3]))
    return ne_u32(and_u32(or_u32(a, b), 0x80808080), 0)


def beyond_finite(word):
    """Bit 7 of each byte: whether the e5m2 code there is 0x7C or more without its sign."""
    return add_u32(and_u32(word, 0x7F7F7F7F), 0x04040404)


def e2m1_pair(codes):
    """Two e2m1 codes, in bits 7..0, as a pair of bfloat16."""
    # A code's bits in the places of the lowest bits of a bfloat16's exponent and the highest of
    # its fraction are the value times 2^-126, also where that is subnormal.
    apart = and_u32(or_u32(codes, shl_u32(codes, 12)), 0x000F000F)
    sign = shl_u32(and_u32(apart, 0x00080008), 12)
    small = or_u32(sign, shl_u32(and_u32(apart, 0x00070007), 6))
    return mul_bf16x2(small, 0x7E807E80)


def four_pairs(word, scale):
    """Eight e2m1 codes times a scale, as four pairs of bfloat16."""
    return (
        mul_bf16x2(e2m1_pair(and_u32(word, 255)), scale),
        mul_bf16x2(e2m1_pair(and_u32(shr_u32(word, 8), 255)), scale),
        mul_bf16x2(e2m1_pair(and_u32(shr_u32(word, 16), 255)), scale),
        mul_bf16x2(e2m1_pair(shr_u32(word, 24)), scale),
    )


def two_pairs(word, kind: str, scale):
    """Four eight-bit codes times a scale, as two pairs of bfloat16."""
    low = and_u32(word, 0xFFFF)
    high = shr_u32(word, 16)
    if kind == "e4m3":
        return (
            mul_bf16x2(bf16x2_of_e4m3x2(low), scale),
            mul_bf16x2(bf16x2_of_e4m3x2(high), scale),
        )
    else:
        return (
            mul_bf16x2(bf16x2_of_e5m2x2(low), scale),
            mul_bf16x2(bf16x2_of_e5m2x2(high), scale),
        )


def pairs_of(raw, byte, kind: str, scale: str):
    """Sixteen elements times their scale as eight pairs of bfloat16."""
    if kind == "none":
        return raw
    else:
        factor = scale_pair(byte, scale)
        if kind == "e2m1":
            a = four_pairs(raw[0], factor)
            b = four_pairs(raw[1], factor)
            return (a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])
        else:
            a = two_pairs(raw[0], kind, factor)
            b = two_pairs(raw[1], kind, factor)
            c = two_pairs(raw[2], kind, factor)
            d = two_pairs(raw[3], kind, factor)
            return (a[0], a[1], b[0], b[1], c[0], c[1], d[0], d[1])


def upper_half(word):
    """The nearest bfloat16 of a pair of float16."""
    return bf16x2_of_f32(f32_of_f16_hi(word), f32_of_f16(word))


def lower_half(word, upper):
    """What is left of a pair of float16: exactly a bfloat16. Nothing of infinities and NaN."""
    hi = f32_of_bf16_hi(upper)
    lo = f32_of_bf16(upper)
    left_hi = sub_rn(f32_of_f16_hi(word), hi)
    left_lo = sub_rn(f32_of_f16(word), lo)
    if left_hi != left_hi:
        left_hi = ZERO
    if left_lo != left_lo:
        left_lo = ZERO
    return bf16x2_of_f32(left_hi, left_lo)


def upper_halves(raw):
    """:func:`upper_half` of eight words."""
    return (
        upper_half(raw[0]),
        upper_half(raw[1]),
        upper_half(raw[2]),
        upper_half(raw[3]),
        upper_half(raw[4]),
        upper_half(raw[5]),
        upper_half(raw[6]),
        upper_half(raw[7]),
    )


def lower_halves(raw, upper):
    """:func:`lower_half` of eight words."""
    return (
        lower_half(raw[0], upper[0]),
        lower_half(raw[1], upper[1]),
        lower_half(raw[2], upper[2]),
        lower_half(raw[3], upper[3]),
        lower_half(raw[4], upper[4]),
        lower_half(raw[5], upper[5]),
        lower_half(raw[6], upper[6]),
        lower_half(raw[7], upper[7]),
    )


# Shared memory: rows of 64 elements in 8 chunks of 16 bytes, chunk c of row r at c ^ (r % 8) ------


def chunk_at(base, row, chunk):
    """Address of a chunk."""
    return add_u32(add_u32(base, shl_u32(row, 7)), shl_u32(xor_u32(chunk, and_u32(row, 7)), 4))


def store_pairs(base, row, piece, w):
    """Store sixteen elements of a row."""
    first = shl_u32(piece, 1)
    st_shared_v4_u32(chunk_at(base, row, first), w[0], w[1], w[2], w[3])
    st_shared_v4_u32(chunk_at(base, row, add_u32(first, 1)), w[4], w[5], w[6], w[7])


def store_a(base, row, piece, raw, byte):
    """Store sixteen elements of A, the lower halves of float16 in a tile of their own."""
    if A_ELEMENT == "none" and INPUT == "float16":
        upper = upper_halves(raw)
        store_pairs(base, row, piece, upper)
        store_pairs(add_u32(base, 2 * TILE_BYTES), row, piece, lower_halves(raw, upper))
    else:
        store_pairs(base, row, piece, pairs_of(raw, byte, A_ELEMENT, A_SCALE))


def products_of(a, b0, b1, c0, c1, c2, c3):
    """Sixteen rows of A with 32 columns: four products m16n8k16."""
    return (
        mma_m16n8k16_bf16(a, (b0[0], b0[1]), c0),
        mma_m16n8k16_bf16(a, (b0[2], b0[3]), c1),
        mma_m16n8k16_bf16(a, (b1[0], b1[1]), c2),
        mma_m16n8k16_bf16(a, (b1[2], b1[3]), c3),
    )


def step(base, a_row, a_chunk, b_row, b_chunk, k, c0, c1, c2, c3, c4, c5, c6, c7):
    """Add the products of 16 of the tile's depth to a warp's 32 x 32 sums."""
    tile_b = add_u32(base, TILE_BYTES)
    b0 = ldmatrix_x4(chunk_at(tile_b, b_row, add_u32(b_chunk, 2 * k)))
    b1 = ldmatrix_x4(chunk_at(tile_b, add_u32(b_row, 16), add_u32(b_chunk, 2 * k)))
    chunk = add_u32(a_chunk, 2 * k)
    low = ldmatrix_x4(chunk_at(base, a_row, chunk))
    high = ldmatrix_x4(chunk_at(base, add_u32(a_row, 16), chunk))
    c0, c1, c2, c3 = products_of(low, b0, b1, c0, c1, c2, c3)
    c4, c5, c6, c7 = products_of(high, b0, b1, c4, c5, c6, c7)
    if A_ELEMENT == "none" and INPUT == "float16":
        rest = add_u32(base, 2 * TILE_BYTES)
        low = ldmatrix_x4(chunk_at(rest, a_row, chunk))
        high = ldmatrix_x4(chunk_at(rest, add_u32(a_row, 16), chunk))
        c0, c1, c2, c3 = products_of(low, b0, b1, c0, c1, c2, c3)
        c4, c5, c6, c7 = products_of(high, b0, b1, c4, c5, c6, c7)
    return c0, c1, c2, c3, c4, c5, c6, c7


def sums(a, a_scales, a_at, a_scale_row, a_real, b, b_scales, b_at, b_scales_at, n, b_real, depth):
    """The block's tile of sums: this thread's 32 of them, and whether A or B is extreme somewhere.

    This thread brings row thread / 2 of both tiles, half of the depth of a tile; `a_at` and `b_at`
    are where these rows begin, in bytes.
    """
    thread = u32_of_i64(cuda.threadIdx.x)
    base = shared_base()
    tile_row = shr_u32(thread, 1)
    half = i64_of_u32(and_u32(thread, 1))
    lane = and_u32(thread, 31)
    warp = shr_u32(thread, 5)
    a_row = add_u32(shl_u32(shr_u32(warp, 1), 5), and_u32(lane, 15))
    a_chunk = shr_u32(lane, 4)
    b_row = add_u32(
        shl_u32(and_u32(warp, 1), 5), add_u32(and_u32(lane, 7), shl_u32(shr_u32(lane, 4), 3))
    )
    b_chunk = and_u32(shr_u32(lane, 3), 1)
    none = xor_u32(thread, thread)
    zeros = (none, none, none, none, none, none, none, none)
    start = (ZERO, ZERO, ZERO, ZERO)
    c0 = start
    c1 = start
    c2 = start
    c3 = start
    c4 = start
    c5 = start
    c6 = start
    c7 = start
    extreme_a = False
    extreme_b = False
    pieces = depth // 16
    first = 0
    while first < pieces:
        for i in range(2):
            piece = first + half * 2 + i
            raw_a = zeros
            raw_b = zeros
            byte_a = none
            byte_b = none
            if piece < pieces:
                if a_real:
                    raw_a = load_words(a, a_at + piece * piece_bytes(A_ELEMENT), A_ELEMENT)
                    if A_ELEMENT != "none":
                        byte_a = scale_byte(
                            a_scales, 0, a_scale_row, piece, depth, A_SCALE, A_LAYOUT
                        )
                        extreme_a = extreme_a | is_extreme(raw_a, byte_a, A_ELEMENT, A_SCALE)
                if b_real:
                    raw_b = load_words(b, b_at + piece * piece_bytes(B_ELEMENT), B_ELEMENT)
                    byte_b = scale_byte(b_scales, b_scales_at, n, piece, depth, B_SCALE, B_LAYOUT)
                    extreme_b = extreme_b | is_extreme(raw_b, byte_b, B_ELEMENT, B_SCALE)
            in_tile = u32_of_i64(half * 2 + i)
            store_a(base, tile_row, in_tile, raw_a, byte_a)
            store_pairs(
                add_u32(base, TILE_BYTES),
                tile_row,
                in_tile,
                pairs_of(raw_b, byte_b, B_ELEMENT, B_SCALE),
            )
        cuda.syncthreads()
        c0, c1, c2, c3, c4, c5, c6, c7 = step(
            base, a_row, a_chunk, b_row, b_chunk, 0, c0, c1, c2, c3, c4, c5, c6, c7
        )
        c0, c1, c2, c3, c4, c5, c6, c7 = step(
            base, a_row, a_chunk, b_row, b_chunk, 1, c0, c1, c2, c3, c4, c5, c6, c7
        )
        c0, c1, c2, c3, c4, c5, c6, c7 = step(
            base, a_row, a_chunk, b_row, b_chunk, 2, c0, c1, c2, c3, c4, c5, c6, c7
        )
        c0, c1, c2, c3, c4, c5, c6, c7 = step(
            base, a_row, a_chunk, b_row, b_chunk, 3, c0, c1, c2, c3, c4, c5, c6, c7
        )
        cuda.syncthreads()
        first += 4
    return c0, c1, c2, c3, c4, c5, c6, c7, extreme_a, extreme_b
