"""Weights repacked into the order in which Hopper's products read them.

The layout is that of docs/decisions.md D13. A warp makes a stripe of 16 rows by 64 columns: lane
4 g + t reads eight columns from 8 t on of both halves of rows g and g + 8, and writes the 16 (or
two times 16) bytes that the same lane of ``matmul_decode`` reads. Warps of a block lie along the
columns, blocks along columns (x), stripes of rows (y) and matrices (z), each axis in strides of the
grid.

The scales of the MX formats are rebased by a power of two for each matrix, which depends on the
largest and the smallest scale of a block that is not zero. Four launches, in the header of the
matrix's scales alone: clear three words, find (``prepare_search``), repack, and ``prepare_finish``,
which puts the factor, and what products on FP8 tensor cores need (D25), in their place. nvfp4 needs
the last two only.

Constraints: blockDim.x is 32 in ``prepare``, and in ``prepare_search`` blocks have whole warps;
out_codes and out_scales begin at multiples of 16 bytes, with ALIGNED codes too.

Compile-time constants: ELEMENT, SCALE, LAYOUT, ALIGNED.
"""

from __future__ import annotations

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_u32,
    and_u32,
    clz,
    eq_u32,
    gt_u32,
    lt_u32,
    max_u32,
    ne_u32,
    or_u32,
    prmt,
    select_u32,
    shl_u32,
    sub_u32,
)
from ..ptx.memory import (
    ld_global_u8,
    ld_global_u32,
    membar_gl,
    red_max_global_u32,
    st_global_u32,
    st_global_v4_u32,
)
from ..ptx.warp import redux_max_u32, shfl_xor_u32
from .elements import code_bytes, load_codes8
from .prepared import (
    HEADER,
    bias,
    load_words,
    mixed,
    prepared_codes,
    prepared_scales,
    record_bytes,
    stripe_bytes,
)
from .quantize import ELEMENT_CONSTANTS, scale_bytes, scale_place
from .warps import thread_index

ELEMENT = "e2m1"
SCALE = "e8m0"
ALIGNED = True

ALL_LANES = 0xFFFFFFFF
NAN_E8M0 = 255
NAN_E4M3 = 0x7F
#: Scale bytes of blocks of zeros.
DEAD_E8M0 = 127
DEAD_E4M3 = 0x50
STORED_NAN_E4M3 = 0xAC
#: 512 as a float32.
FACTOR_E4M3 = 0x44000000
#: What the largest scale is at the least where products on FP8 tensor cores are considered, how
#: many scales there may be up to it, and what becomes of it as a bfloat16's exponent.
LOWEST_TOP, FP8_POWERS, FP8_TOP = 20, 15, 139
#: A scale must be so far above the exponent of the factor, in prepare_search's words.
REACH = 256 - 20


# What the scales of a matrix have in common -------------------------------------------------------


def exponent_of_factor(largest):
    """C of the factor 2^c, of 1 + the largest scale byte (0: there is none)."""
    top = 255 - bias(ELEMENT)
    return sub_u32(max_u32(largest, top), top)


def is_plain(c, smallest, special):
    """Whether scales stay as they are, of 256 - the smallest scale byte (0: there is none)."""
    if ELEMENT == "e2m1":  # `special` is of something else
        return gt_u32(add_u32(smallest, c), REACH)
    else:
        return ne_u32(special, 0) | gt_u32(add_u32(smallest, c), REACH)


def fp8_facts(c, plain, largest, smallest, special):
    """Words 1 and 2 of a header (D25): zeros where not all values are e4m3 values up to a factor.

    Of what prepare_search left; `special` is not 0 where a scale is NaN.
    """
    top = sub_u32(max_u32(largest, LOWEST_TOP + 1), 1)
    lowest = sub_u32(256, smallest)
    wide = ne_u32(smallest, 0) & gt_u32(sub_u32(top, lowest), FP8_POWERS - 1)
    none = plain | wide | ne_u32(special, 0)
    less = sub_u32(sub_u32(add_u32(top, bias(ELEMENT)), c), FP8_TOP)
    return (
        select_u32(none, 0, shl_u32(sub_u32(top, 6), 23)),
        select_u32(none, 0, or_u32(shl_u32(less, 7), shl_u32(less, 23))),
    )


def magnitude_bits():
    """All bits of a word of codes but the signs."""
    if ELEMENT == "e2m1":
        return 0x77777777
    else:
        return 0x7F7F7F7F


def special_codes(word):
    """Not 0 where one of four codes is an infinity or a NaN."""
    if ELEMENT == "e4m3":
        return and_u32(add_u32(and_u32(word, 0x7F7F7F7F), 0x01010101), 0x80808080)
    else:
        return and_u32(add_u32(and_u32(word, 0x7C7C7C7C), 0x04040404), 0x80808080)


def special4(words):
    """The same of four words."""
    low = or_u32(special_codes(words[0]), special_codes(words[1]))
    return or_u32(low, or_u32(special_codes(words[2]), special_codes(words[3])))


def flat_thread():
    """Number of this thread in a grid along x, and how many there are."""
    size = cuda.blockDim.x * cuda.blockDim.y
    return cuda.blockIdx.x * size + thread_index(), cuda.gridDim.x * size


def prepare_clear(out_scales, batches, matrix_words):
    """Nothing found yet."""
    batch, threads = flat_thread()
    while batch < batches:
        for i in range(1, 4):
            st_global_u32(out_scales, batch * matrix_words + i, 0, "")
        batch += threads


def prepare_search(codes, scales, out_scales, rows, columns, batches, matrix_words):
    """Leave 1 + the largest, 256 - the smallest scale and special codes in each header.

    e2m1 has no special codes: instead, whether a scale is NaN.
    """
    blocks = columns // 32
    width = code_bytes(columns)
    matrix_scales = scale_bytes(rows, columns)
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        largest = shl_u32(0, 0)
        smallest = shl_u32(0, 0)
        special = shl_u32(0, 0)
        row = cuda.blockIdx.y * cuda.blockDim.y + cuda.threadIdx.y
        while row < rows:
            block = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
            while block < blocks:
                at = (batch * rows + row) * width + code_bytes(block * 32)
                a = load_words(codes, at)
                every = or_u32(or_u32(a[0], a[1]), or_u32(a[2], a[3]))
                if ELEMENT != "e2m1":
                    b = load_words(codes, at + 16)
                    every = or_u32(every, or_u32(or_u32(b[0], b[1]), or_u32(b[2], b[3])))
                    special = or_u32(special, or_u32(special4(a), special4(b)))
                place = batch * matrix_scales + scale_place(row, block, columns)
                byte = ld_global_u8(scales, place, "")
                if ELEMENT == "e2m1":
                    special = or_u32(special, select_u32(eq_u32(byte, NAN_E8M0), 1, 0))
                counts = ne_u32(and_u32(every, magnitude_bits()), 0) & ne_u32(byte, NAN_E8M0)
                largest = max_u32(largest, select_u32(counts, add_u32(byte, 1), 0))
                smallest = max_u32(smallest, select_u32(counts, sub_u32(256, byte), 0))
                block += cuda.gridDim.x * cuda.blockDim.x
            row += cuda.gridDim.y * cuda.blockDim.y
        largest = redux_max_u32(ALL_LANES, largest)
        smallest = redux_max_u32(ALL_LANES, smallest)
        special = redux_max_u32(ALL_LANES, special)
        if thread_index() % 32 == 0:
            red_max_global_u32(out_scales, batch * matrix_words + 1, largest)
            red_max_global_u32(out_scales, batch * matrix_words + 2, smallest)
            red_max_global_u32(out_scales, batch * matrix_words + 3, special)
        batch += cuda.gridDim.z


def prepare_finish(out_scales, decode_scale, out_decode_scale, batches, matrix_words, decodes):
    """Factors of the matrices, and the decode scale."""
    thread, threads = flat_thread()
    batch = thread
    while batch < batches:
        header = batch * matrix_words
        if SCALE == "e4m3":
            factor = or_u32(FACTOR_E4M3, 0)
            fp8 = (shl_u32(0, 0), shl_u32(0, 0))
        else:
            largest = ld_global_u32(out_scales, header + 1, "")
            c = exponent_of_factor(largest)
            smallest = ld_global_u32(out_scales, header + 2, "")
            special = ld_global_u32(out_scales, header + 3, "")
            plain = is_plain(c, smallest, special)
            factor = select_u32(plain, 0, shl_u32(add_u32(c, 127), 23))
            fp8 = (shl_u32(0, 0), shl_u32(0, 0))
            if ELEMENT == "e2m1":
                fp8 = fp8_facts(c, plain, largest, smallest, special)
        st_global_u32(out_scales, header, factor, "")
        st_global_u32(out_scales, header + 1, fp8[0], "")
        st_global_u32(out_scales, header + 2, fp8[1], "")
        st_global_u32(out_scales, header + 3, 0, "")
        batch += threads
    i = thread
    while i < decodes:
        out_decode_scale[i] = decode_scale[i]
        i += threads
    membar_gl()  # seen before the last thread leaves: products read weights early (D14)


# Scales -------------------------------------------------------------------------------------------


def rebased_e4m3(byte):
    """A byte with one more exponent bit, of an e4m3 scale without its sign."""
    digits = sub_u32(31, clz(byte))  # of a subnormal
    subnormal = or_u32(
        shl_u32(add_u32(digits, 1), 3), and_u32(shl_u32(byte, sub_u32(3, digits)), 7)
    )
    made = select_u32(lt_u32(byte, 8), subnormal, add_u32(byte, 24))
    made = select_u32(eq_u32(byte, 0), DEAD_E4M3, made)
    return select_u32(eq_u32(byte, NAN_E4M3), STORED_NAN_E4M3, made)


def stored_scale(byte, live, c, plain):
    """What becomes of a scale byte; `live`: its block has a value that is not zero."""
    if SCALE == "e4m3":
        return rebased_e4m3(byte)
    else:
        made = select_u32(live, sub_u32(add_u32(byte, bias(ELEMENT)), c), DEAD_E8M0)
        return select_u32(plain | eq_u32(byte, NAN_E8M0), byte, made)


def kept_codes(byte, plain):
    """Which bits of the codes of a block remain: none below a NaN, signs below an nvfp4 zero."""
    if SCALE == "e4m3":
        kept = select_u32(eq_u32(byte, 0), 0x88888888, 0xFFFFFFFF)
        return select_u32(eq_u32(byte, NAN_E4M3), 0, kept)
    else:
        return select_u32((not plain) & eq_u32(byte, NAN_E8M0), 0, 0xFFFFFFFF)


def scale_of_lane(scales, matrix_at, row, step, half, t, columns, inside):
    """The scale byte of a lane's codes in a half; that of padding outside."""
    if SCALE == "e4m3":
        if inside:
            place = scale_place(row, step * 4 + half * 2 + (t >> 1), columns)
            return and_u32(ld_global_u8(scales, matrix_at + place, ""), 0x7F)
        else:
            return shl_u32(0, 0)
    elif inside:
        return ld_global_u8(scales, matrix_at + scale_place(row, step * 2 + half, columns), "")
    else:
        return shl_u32(DEAD_E8M0, 0)


# Codes --------------------------------------------------------------------------------------------


def codes_of_lane(codes, at, inside):
    """Eight codes of a lane in a half: one word, or two; zeros outside."""
    if inside:
        return load_codes8(codes, at, ELEMENT)
    else:
        return (shl_u32(0, 0), shl_u32(0, 0))


def any_magnitude(words):
    """Not 0 where one of a block's codes is not zero: of 32 columns, the quad's."""
    every = and_u32(or_u32(words[0], words[1]), magnitude_bits())
    every = or_u32(every, shfl_xor_u32(ALL_LANES, every, 1))
    return or_u32(every, shfl_xor_u32(ALL_LANES, every, 2))


def places(word, selector):
    """Both nibbles of a byte, where two bfloat16 have sign and magnitude.

    The selector puts the byte into bytes 0 and 2.
    """
    x = prmt(word, 0, selector)
    low = or_u32(shl_u32(and_u32(x, 0x00000008), 12), shl_u32(and_u32(x, 0x00000007), 6))
    high = or_u32(shl_u32(and_u32(x, 0x00800000), 8), shl_u32(and_u32(x, 0x00700000), 2))
    return or_u32(low, high)


def word_of_pairs(a, b, c, d, byte):
    """A word of e2m1 codes: a byte of each half of row g, `a` and `b`, and of row g + 8."""
    return mixed(places(a[0], byte), places(c[0], byte), places(b[0], byte), places(d[0], byte))


def store_codes(out_codes, at, a, b, c, d):
    """A lane's part of a stripe, of the codes of both halves of both rows."""
    if ELEMENT == "e2m1":
        st_global_v4_u32(
            out_codes,
            at,
            word_of_pairs(a, b, c, d, 0x4040),
            word_of_pairs(a, b, c, d, 0x4141),
            word_of_pairs(a, b, c, d, 0x4242),
            word_of_pairs(a, b, c, d, 0x4343),
            "",
        )
    else:
        store_row(out_codes, at, a, b)
        store_row(out_codes, at + 512, c, d)


def store_row(out_codes, at, a, b):
    """Eight-bit codes of both halves of a row: of the first one in bytes 1 and 3 of a word."""
    st_global_v4_u32(
        out_codes,
        at,
        prmt(a[0], b[0], 0x1504),
        prmt(a[0], b[0], 0x3726),
        prmt(a[1], b[1], 0x1504),
        prmt(a[1], b[1], 0x3726),
        "",
    )


def both(words, mask):
    """Both words, masked."""
    return (and_u32(words[0], mask), and_u32(words[1], mask))


def prepare(codes, scales, out_codes, out_scales, rows, columns, batches):
    g = cuda.threadIdx.x >> 2
    t = cuda.threadIdx.x & 3
    width = code_bytes(columns)
    matrix_scales = scale_bytes(rows, columns)
    stripes = (rows + 15) >> 4
    steps = (columns + 63) >> 6
    batch = cuda.blockIdx.z + 0
    while batch < batches:
        header = batch * prepared_scales(rows, columns, SCALE)
        c = shl_u32(0, 0)
        plain = False
        if SCALE == "e8m0":
            c = exponent_of_factor(ld_global_u32(out_scales, header + 4, ""))
            smallest = ld_global_u32(out_scales, header + 8, "")
            plain = is_plain(c, smallest, ld_global_u32(out_scales, header + 12, ""))
        stripe = cuda.blockIdx.y + 0
        while stripe < stripes:
            row = stripe * 16 + g
            first, second = row < rows, row + 8 < rows
            step = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
            while step < steps:
                column = step * 64 + t * 8
                left, right = column < columns, column + 32 < columns
                at = (batch * rows + row) * width + code_bytes(column)
                down, beside = width * 8, code_bytes(32)
                w0 = codes_of_lane(codes, at, first & left)
                w1 = codes_of_lane(codes, at + beside, first & right)
                w2 = codes_of_lane(codes, at + down, second & left)
                w3 = codes_of_lane(codes, at + down + beside, second & right)
                matrix_at = batch * matrix_scales
                s0 = scale_of_lane(scales, matrix_at, row, step, 0, t, columns, first & left)
                s1 = scale_of_lane(scales, matrix_at, row, step, 1, t, columns, first & right)
                s2 = scale_of_lane(scales, matrix_at, row + 8, step, 0, t, columns, second & left)
                s3 = scale_of_lane(scales, matrix_at, row + 8, step, 1, t, columns, second & right)
                l0, l1, l2, l3 = True, True, True, True
                if SCALE == "e8m0":
                    l0 = ne_u32(any_magnitude(w0), 0)
                    l1 = ne_u32(any_magnitude(w1), 0)
                    l2 = ne_u32(any_magnitude(w2), 0)
                    l3 = ne_u32(any_magnitude(w3), 0)
                place = stripe * steps + step
                codes_at = batch * prepared_codes(rows, columns, ELEMENT)
                store_codes(
                    out_codes,
                    codes_at + place * stripe_bytes(ELEMENT) + (t * 8 + g) * 16,
                    both(w0, kept_codes(s0, plain)),
                    both(w1, kept_codes(s1, plain)),
                    both(w2, kept_codes(s2, plain)),
                    both(w3, kept_codes(s3, plain)),
                )
                upper = or_u32(
                    stored_scale(s0, l0, c, plain), shl_u32(stored_scale(s2, l2, c, plain), 8)
                )
                lower = or_u32(
                    stored_scale(s1, l1, c, plain), shl_u32(stored_scale(s3, l3, c, plain), 8)
                )
                record = header + HEADER + place * record_bytes(SCALE)
                word = or_u32(upper, shl_u32(lower, 16))
                if SCALE == "e4m3":
                    if t & 1 == 0:
                        st_global_u32(out_scales, record + g * 8 + (t >> 1) * 4, word, "")
                elif t == 0:
                    st_global_u32(out_scales, record + g * 4, word, "")
                step += cuda.gridDim.x * cuda.blockDim.y
            stripe += cuda.gridDim.y
        batch += cuda.gridDim.z
    membar_gl()  # as in prepare_finish


_CONSTANTS = {
    "ELEMENT": ELEMENT_CONSTANTS["ELEMENT"],
    "SCALE": ELEMENT_CONSTANTS["SCALE"],
    "LAYOUT": ELEMENT_CONSTANTS["LAYOUT"],
    "ALIGNED": (False, True),
}

PREPARE_CLEAR = Kernel("prepare_clear", prepare_clear, ("u32*", "i64", "i64"))
PREPARE_SEARCH = Kernel(
    "prepare_search",
    prepare_search,
    ("u8*", "u8*", "u32*", "i64", "i64", "i64", "i64"),
    {**_CONSTANTS, "SCALE": ("e8m0",)},
)
PREPARE = Kernel("prepare", prepare, ("u8*", "u8*", "u8*", "u8*", "i64", "i64", "i64"), _CONSTANTS)
PREPARE_FINISH = Kernel(
    "prepare_finish",
    prepare_finish,
    ("u32*", "f32*", "f32*", "i64", "i64", "i64"),
    {"ELEMENT": _CONSTANTS["ELEMENT"], "SCALE": _CONSTANTS["SCALE"]},
)

_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "LAYOUT": "tcgen", "ALIGNED": True}
_MXFP4 = {"ELEMENT": "e2m1", "SCALE": "e8m0", "LAYOUT": "linear", "ALIGNED": False}
_MXFP8 = {"ELEMENT": "e4m3", "SCALE": "e8m0", "LAYOUT": "tcgen", "ALIGNED": True}
_E5M2 = {"ELEMENT": "e5m2", "SCALE": "e8m0", "LAYOUT": "linear", "ALIGNED": True}

VARIANTS = {
    "prepare": (_NVFP4, _MXFP8, _MXFP4),
    "prepare_search": (_MXFP8, _MXFP4),
    "prepare_finish": (
        {"ELEMENT": "e2m1", "SCALE": "e8m0"},
        {"ELEMENT": "e2m1", "SCALE": "e4m3"},
    ),
}
SLOW_VARIANTS = {
    "prepare": (_E5M2,),
    "prepare_search": (_E5M2,),
    "prepare_finish": ({"ELEMENT": "e5m2", "SCALE": "e8m0"},),
}
