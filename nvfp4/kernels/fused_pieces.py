"""Pieces of a row on their way through ``fused``: read, made, normalised, quantised, stored.

Arguments that belong together come as tuples: `inputs` (x, weight, residual), `outputs`
(residual_out, hidden, codes, scales), `places` (the row's first byte in x, in residual, in
residual_out and hidden, in codes, in scales), `sizes` (pieces of a row, without and with the
padding of its last tile).

Compile-time constants: those of ``hidden``, ``stream`` and ``elements``; RESIDUAL, HIDDEN, LAYOUT.
"""

from __future__ import annotations

import numpy as np

from ..ptx.arith import max_nan_f32, select_f32
from ..ptx.memory import st_global_u8_if, st_global_v2_u32, st_global_v4_u32
from ..ptx.warp import shfl_xor_f32
from .elements import code_bytes, store_codes, store_word
from .hidden import (
    added_half,
    element_bytes,
    gated_piece,
    load_half,
    load_half_written,
    load_weight,
    normalised_half,
    store_half,
    zero_half,
)
from .quantize import block_of_piece
from .scales import block_scale
from .stream import amax_piece, quick_scale, scaled_codes, usual_factor, widen

ELEMENT = "e2m1"
SCALE = "e4m3"
LAYOUT = "tcgen"
ALIGNED = True
FRONT = "silu"
RESIDUAL = "none"
HIDDEN = False

ZERO = np.float32(0.0)
WARP = 0xFFFFFFFF


def piece_bytes():
    """Bytes of a piece of plain values."""
    return element_bytes() * 16


def load_piece(x, at):
    """A piece of an array that nobody writes meanwhile."""
    return load_half(x, at), load_half(x, at + (piece_bytes() >> 1))


def load_piece_written(x, at):
    """A piece of an array that may be written."""
    return load_half_written(x, at), load_half_written(x, at + (piece_bytes() >> 1))


def store_piece(out, at, a, b):
    """Store a piece of plain values."""
    store_half(out, at, a)
    store_half(out, at + (piece_bytes() >> 1), b)


def load_front(inputs, places, piece, sizes):
    """A piece of x as it is, or gated; beyond the last piece, the first one."""
    x = inputs[0]
    at = piece if piece < sizes[0] else 0
    if FRONT == "plain" or FRONT == "rms":
        return load_piece(x, places[0] + at * piece_bytes())
    else:
        return gated_piece(x, places[0], at, sizes[0] << 4)


def load_residual(inputs, places, piece, sizes):
    """What is added to a piece; beyond the last piece 0: another thread may be writing."""
    a = zero_half()
    b = zero_half()
    if piece < sizes[0]:
        a, b = load_piece_written(inputs[2], places[1] + piece * piece_bytes())
    return a, b


def add_residual(a, b, v, w, outputs, places, piece, sizes):
    """The sum of a piece and what is added to it; stored, if asked for."""
    a = added_half(a, v)
    b = added_half(b, w)
    if RESIDUAL == "out":
        if piece < sizes[0]:
            store_piece(outputs[0], places[2] + piece * piece_bytes(), a, b)
    return a, b


def front_piece(inputs, outputs, places, piece, sizes):
    """A piece as it is normalised or quantised."""
    a, b = load_front(inputs, places, piece, sizes)
    if RESIDUAL == "none":
        return a, b
    else:
        v, w = load_residual(inputs, places, piece, sizes)
        return add_residual(a, b, v, w, outputs, places, piece, sizes)


def normalised_piece(a, b, inputs, inverse, piece, sizes):
    """A piece after the norm."""
    column = piece << 4 if piece < sizes[0] else 0
    v = load_weight(inputs[1], column)
    w = load_weight(inputs[1], column + 8)
    return normalised_half(a, inverse, v), normalised_half(b, inverse, w)


def amax_if(a, b, live, piece, sizes):
    """Largest magnitude of a piece, 0 where it has no input."""
    return select_f32(live & (piece < sizes[0]), amax_piece(a, b), ZERO)


def store_scale(scales, row_at, piece, sizes, byte, stored):
    """Store the scale of a piece's block."""
    block = block_of_piece(piece)
    if SCALE == "e4m3":
        mine = stored
    else:
        mine = stored & (piece & 1 == 0)
    if LAYOUT == "linear":
        st_global_u8_if(scales, row_at + block, byte, mine & (piece < sizes[0]))
    else:
        place = row_at + (block >> 2 << 9) + (block & 3)
        st_global_u8_if(scales, place, byte, mine & (piece < sizes[1]))


def amax_of_block(a, b, real):
    """Largest magnitude of the block that a piece belongs to; a piece that is not `real` has 0."""
    amax = select_f32(real, amax_piece(a, b), ZERO)
    if SCALE == "e8m0":
        amax = max_nan_f32(amax, shfl_xor_f32(WARP, amax, 1))
    return amax


def store_quantised(a, b, amax, c, r, codes, at, real):
    """Store the codes of a piece where it is `real`, else nothing; the scale byte of its block.

    amax: of the block; c = RN(g * RN(1/6)) and r = RN(1/g) for the encode scale g.
    """
    if ELEMENT == "e2m1":
        byte, q, holds = quick_scale(amax, c, r)
        if holds & usual_factor(c):
            low = scaled_codes(a, q)
            high = scaled_codes(b, q)
            if real:
                if ALIGNED:
                    st_global_v2_u32(codes, at, low, high, "")
                else:
                    store_word(codes, at, low)
                    store_word(codes, at + 4, high)
        else:
            byte, q = block_scale(amax, c, r)
            if real:
                store_codes(codes, at, widen(a), widen(b), q)
    else:
        byte, q = block_scale(amax, c, r)
        if real:
            store_codes(codes, at, widen(a), widen(b), q)
    return byte


def finish_live(a, b, c, r, outputs, places, piece, sizes, stored):
    """Quantise a piece of a row that has an input, and store h; beyond the last, a scale of 0.

    c and r as in ``store_quantised``; `stored`: the row has scales.
    """
    real = piece < sizes[0]
    if HIDDEN:
        if real:
            store_piece(outputs[1], places[2] + piece * piece_bytes(), a, b)
    amax = amax_of_block(a, b, real)
    at = places[3] + code_bytes(piece << 4)
    byte = store_quantised(a, b, amax, c, r, outputs[2], at, real)
    store_scale(outputs[3], places[4], piece, sizes, byte, stored)


def finish_dead(outputs, places, piece, sizes, written, stored):
    """The zeros of a piece without an input: codes and h if the row is `written`, its scale."""
    if written and piece < sizes[0]:
        if HIDDEN:
            place = places[2] + piece * piece_bytes()
            store_piece(outputs[1], place, zero_half(), zero_half())
        codes = outputs[2]
        at = places[3] + code_bytes(piece << 4)
        if ALIGNED and ELEMENT == "e2m1":
            st_global_v2_u32(codes, at, 0, 0, "")
        elif ALIGNED:
            st_global_v4_u32(codes, at, 0, 0, 0, 0, "")
        else:
            store_word(codes, at, 0)
            store_word(codes, at + 4, 0)
            if ELEMENT != "e2m1":
                store_word(codes, at + 8, 0)
                store_word(codes, at + 12, 0)
    store_scale(outputs[3], places[4], piece, sizes, 0, stored)
