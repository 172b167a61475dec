"""Dense quantisation at the speed of memory: the same bytes as ``quantize``, for aligned arrays.

One thread takes a piece of 16 columns (as in ``quantize``) of ROWS rows; all its loads are issued before the first is
used. A block of threads takes neighbouring pieces of a *row group* of 8 rows: in the tcgen layout the rows
{2i, 2i + 1} + {0, 32, 64, 96} of a tile, because their scales fill whole 32-byte sectors, which then leave the L2 cache
complete; in the linear layout 8 neighbouring rows. Pieces of a group are numbered through, so that only the group's last
block has idle threads.

For elements of e2m1 a block whose values are in range takes ``ptx.scaled`` (8 instructions an element), others the
general conversion.

Constraints: ALIGNED; row_stride and batch_stride are multiples of 16 bytes, columns below 2^24; ENCODE is "none",
"number", "array", "batch" or "row". Grid: (row groups, ceil(pieces of a group / ROWS / threads), matrices).
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_u32,
    and_u32,
    eq_u32,
    i64_of_u32,
    lt_u32,
    max_nan_f32,
    mul_rn,
    mul_u32,
    mulhi_u32,
    rcp_rn,
    select_f32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.bits import f32_of_bf16, f32_of_bf16_hi, f32_of_f16, f32_of_f16_hi, uint_as_float
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.memory import ld_global_v4_u32, st_global_u8, st_global_v2_u32
from ..ptx.packed import amax_bf16x2, amax_f16x2
from ..ptx.scaled import e2m1x8_scaled
from ..ptx.warp import shfl_xor_f32
from .elements import amax8, store_codes
from .quantize import ELEMENT_CONSTANTS, encode_scale_for
from .scales import SIXTH, block_scale, usable

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
LAYOUT = "tcgen"
ENCODE = "none"
ROWS = 2

ZERO = np.float32(0.0)
ONE = np.float32(1.0)
SEVEN = np.float32(7.0)
SMALLEST_Q = np.float32(2.0**-100)
GROUP = 8  # rows of a group
WARP = 0xFFFFFFFF


def load_half_piece(x, at):
    """Eight elements from byte `at` on, as they lie in memory: four words of pairs, or eight float32."""
    if INPUT == "float32":
        a = ld_global_v4_u32(x, at, "nc")
        b = ld_global_v4_u32(x, at + 16, "nc")
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
        return ld_global_v4_u32(x, at, "nc")


def widen(raw):
    """Eight float32 of a half piece."""
    if INPUT == "float32":
        return raw
    elif INPUT == "bfloat16":
        return (
            f32_of_bf16(raw[0]),
            f32_of_bf16_hi(raw[0]),
            f32_of_bf16(raw[1]),
            f32_of_bf16_hi(raw[1]),
            f32_of_bf16(raw[2]),
            f32_of_bf16_hi(raw[2]),
            f32_of_bf16(raw[3]),
            f32_of_bf16_hi(raw[3]),
        )
    else:
        return (
            f32_of_f16(raw[0]),
            f32_of_f16_hi(raw[0]),
            f32_of_f16(raw[1]),
            f32_of_f16_hi(raw[1]),
            f32_of_f16(raw[2]),
            f32_of_f16_hi(raw[2]),
            f32_of_f16(raw[3]),
            f32_of_f16_hi(raw[3]),
        )


def amax_piece(a, b):
    """Largest magnitude of a piece, NaN if there is one."""
    if INPUT == "float32":
        return max_nan_f32(amax8(a), amax8(b))
    elif INPUT == "bfloat16":
        m = amax_bf16x2(
            amax_bf16x2(amax_bf16x2(a[0], a[1]), amax_bf16x2(a[2], a[3])),
            amax_bf16x2(amax_bf16x2(b[0], b[1]), amax_bf16x2(b[2], b[3])),
        )
        return uint_as_float(and_u32(amax_bf16x2(m, shl_u32(m, 16)), 0x7FFF0000))
    else:
        m = amax_f16x2(
            amax_f16x2(amax_f16x2(a[0], a[1]), amax_f16x2(a[2], a[3])),
            amax_f16x2(amax_f16x2(b[0], b[1]), amax_f16x2(b[2], b[3])),
        )
        return f32_of_f16(and_u32(amax_f16x2(m, shr_u32(m, 16)), 0x7FFF))


def store_scaled(codes, at, v, w, amax, q):
    """Codes of a piece times q, from byte `at` on; amax is the largest magnitude of the block."""
    if ELEMENT == "e2m1":
        if mul_rn(amax, q) < SEVEN and q >= SMALLEST_Q:
            low = e2m1x8_scaled(v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], q)
            high = e2m1x8_scaled(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], q)
            st_global_v2_u32(codes, at, low, high, "")
        else:
            store_codes(codes, at, v, w, q)
    else:
        store_codes(codes, at, v, w, q)


def quantize_row(a, b, live, codes, codes_at, scales, scale_at, owner, c, r):
    """Quantise a piece, or write the zero scale of one that is not `live`."""
    amax = select_f32(live, amax_piece(a, b), ZERO)
    if SCALE == "e8m0":
        amax = max_nan_f32(amax, shfl_xor_f32(WARP, amax, 1))
    byte, q = block_scale(amax, c, r)
    if live:
        store_scaled(codes, codes_at, widen(a), widen(b), amax, q)
    if owner:
        st_global_u8(scales, scale_at, byte, "")


def encode_factors(encode_scale, encode_number, decode_scale, batch, row):
    """c = RN(g * RN(1/6)) and r = RN(1/g)."""
    if ENCODE == "none":
        return SIXTH, ONE
    else:
        g = encode_scale_for(encode_scale, encode_number, decode_scale, batch, row)
        return mul_rn(g, SIXTH), rcp_rn(g)


def first_thread():
    """Whether this is the first thread for its matrix."""
    return cuda.blockIdx.x == 0 and cuda.blockIdx.y == 0 and cuda.threadIdx.x == 0


def quantize_stream(
    x,
    codes,
    scales,
    encode_scale,
    encode_number,
    decode_scale,
    rows,
    pieces,
    all_pieces,
    magic,
    shift,
    x_row,
    x_matrix,
    codes_row,
    codes_matrix,
    scales_row,
    scales_matrix,
):
    # pieces, all_pieces: of a row, without and with the tile's padding. floor(n / all_pieces) = (n * magic >> 32) >>
    # shift for every n here. Then bytes from a row, or a matrix, to the next; scales_row: of a row of tiles in tcgen.
    # Index arithmetic is 32 bits wide as far as it can be: at memory speed it is a sixth of all instructions.
    griddepcontrol_launch_dependents()
    group = u32_of_i64(cuda.blockIdx.x)
    batch = i64_of_u32(u32_of_i64(cuda.blockIdx.z))
    number = u32_of_i64(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
    g = shr_u32(mulhi_u32(number, magic), shift)
    piece = sub_u32(number, mul_u32(g, all_pieces))
    valid = lt_u32(g, GROUP // ROWS)
    if SCALE == "e4m3":
        block = piece
        owner = valid
    else:
        block = shr_u32(piece, 1)
        owner = valid and eq_u32(and_u32(piece, 1), 0)
    if LAYOUT == "tcgen":
        tile = shr_u32(group, 4)
        pair = and_u32(group, 15)
        low = and_u32(g, 1)
        high = shr_u32(g, 1)
        row = add_u32(add_u32(shl_u32(tile, 7), shl_u32(pair, 1)), add_u32(low, shl_u32(high, 5)))
        place = add_u32(add_u32(shl_u32(pair, 5), shl_u32(low, 4)), shl_u32(high, 2))
        place = add_u32(place, add_u32(shl_u32(shr_u32(block, 2), 9), and_u32(block, 3)))
        scale_at = i64_of_u32(tile) * i64_of_u32(scales_row) + i64_of_u32(place)
        row_step = shl_u32(1, 6)
        scale_step = 8
    else:
        row = add_u32(shl_u32(group, 3), g)
        scale_at = i64_of_u32(row) * i64_of_u32(scales_row) + i64_of_u32(block)
        row_step = shl_u32(1, 2)
        scale_step = i64_of_u32(scales_row) * 4
    real = valid and lt_u32(piece, pieces)
    live_a = real and lt_u32(row, rows)
    piece_bytes = 64 if INPUT == "float32" else 32
    half = piece_bytes // 2
    x_at = batch * x_matrix + i64_of_u32(row) * i64_of_u32(x_row) + i64_of_u32(piece) * piece_bytes
    # Lanes without work read element 0 and write nothing; a branch around the loads would cost moves.
    at_a = x_at if live_a else 0
    griddepcontrol_wait()
    a0 = load_half_piece(x, at_a)
    b0 = load_half_piece(x, at_a + half)
    if ROWS == 2:
        row_b = add_u32(row, row_step)
        live_b = real and lt_u32(row_b, rows)
        at_b = x_at + i64_of_u32(row_step) * i64_of_u32(x_row) if live_b else 0
        a1 = load_half_piece(x, at_b)
        b1 = load_half_piece(x, at_b + half)
    code_piece = 8 if ELEMENT == "e2m1" else 16
    codes_at = batch * codes_matrix + i64_of_u32(row) * i64_of_u32(codes_row) + i64_of_u32(piece) * code_piece
    scale_at += batch * scales_matrix
    if ENCODE == "none":
        if first_thread() and batch == 0:
            decode_scale[0] = ONE
    elif ENCODE == "scalar" or ENCODE == "array":
        if first_thread() and batch == 0:
            decode_scale[0] = rcp_rn(encode_scale_for(encode_scale, encode_number, decode_scale, 0, 0))
    elif ENCODE == "batch":
        if first_thread():
            decode_scale[batch] = rcp_rn(usable(encode_scale[batch]))
    flat = batch * i64_of_u32(rows)
    flat_a = flat + i64_of_u32(row) if live_a else 0
    c, r = encode_factors(encode_scale, encode_number, decode_scale, batch, flat_a)
    if ENCODE == "row":
        if live_a and eq_u32(piece, 0):
            decode_scale[flat_a] = r
    owner_a = owner
    if LAYOUT == "linear":
        owner_a = owner and lt_u32(row, rows)
    quantize_row(a0, b0, live_a, codes, codes_at, scales, scale_at, owner_a, c, r)
    if ROWS == 2:
        owner_b = owner
        if LAYOUT == "linear":
            owner_b = owner and lt_u32(row_b, rows)
        if ENCODE == "row":
            flat_b = flat + i64_of_u32(row_b) if live_b else 0
            c, r = encode_factors(encode_scale, encode_number, decode_scale, batch, flat_b)
            if live_b and eq_u32(piece, 0):
                decode_scale[flat_b] = r
        codes_b = codes_at + i64_of_u32(row_step) * i64_of_u32(codes_row)
        quantize_row(a1, b1, live_b, codes, codes_b, scales, scale_at + scale_step, owner_b, c, r)


QUANTIZE_STREAM = Kernel(
    "quantize_stream",
    quantize_stream,
    ("u8*", "u8*", "u8*", "f32*", "f32", "f32*")
    + ("u32", "u32", "u32", "u32", "u32", "u32", "i64", "u32", "i64", "u32", "i64"),
    {
        **ELEMENT_CONSTANTS,
        "ALIGNED": (True,),
        "ENCODE": ("none", "scalar", "array", "batch", "row"),
        "ROWS": (1, 2),
    },
    threads=128,
)
