"""The largest magnitude of an array without gaps, at the speed of memory.

What ``amax`` of ``quantize`` finds, for rows that lie one behind the other: the array is 16-byte
vectors, whatever its shape. A thread asks for VECTORS of them before it looks at the first; a block
takes THREADS * VECTORS neighbours and adds one number to the result, since all these go to one
place.

Constraints: ALIGNED; vectors below 2^31 blocks of them.

Compile-time constant: INPUT.
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    abs_f32,
    add_u32,
    and_u32,
    lt_u32,
    max_nan_f32,
    max_u32,
    shl_u32,
    shr_u32,
    u32_of_i64,
)
from ..ptx.bits import (
    f32_of_bf16,
    f32_of_bf16_hi,
    f32_of_f16,
    f32_of_f16_hi,
    float_as_uint,
    uint_as_float,
)
from ..ptx.memory import (
    ld_global_v4_u32,
    ld_shared_u32,
    red_max_global_u32,
    shared_base,
    st_shared_u32,
)
from ..ptx.warp import redux_max_u32
from .quantize import ELEMENT_CONSTANTS
from .stream import larger_words

INPUT = "bfloat16"

VECTORS = 8
THREADS = 256
WARP = 0xFFFFFFFF
ZERO = np.float32(0.0)


def larger(a, b):
    """Of two words of elements the larger magnitudes; NaN for NaN."""
    if INPUT != "float32":
        return larger_words(a, b)
    else:
        # The patterns of magnitudes are ordered as the values, NaN above infinity.
        return max_u32(and_u32(a, 0x7FFFFFFF), and_u32(b, 0x7FFFFFFF))


def largest(v):
    """Of four words."""
    return larger(larger(v[0], v[1]), larger(v[2], v[3]))


def pattern_of(word):
    """The float32 of the largest magnitude of a word of elements, as bits."""
    if INPUT == "bfloat16":
        amax = max_nan_f32(abs_f32(f32_of_bf16(word)), abs_f32(f32_of_bf16_hi(word)))
        return float_as_uint(amax)
    elif INPUT == "float16":
        amax = max_nan_f32(abs_f32(f32_of_f16(word)), abs_f32(f32_of_f16_hi(word)))
        return float_as_uint(amax)
    else:
        return float_as_uint(max_nan_f32(ZERO, uint_as_float(word)))


def vector(x, index, vectors):
    """A vector of the array; beyond the last, the first one."""
    return ld_global_v4_u32(x, (index if index < vectors else 0) * 16, "nc")


def amax_flat(x, decode_scale, vectors):
    first = cuda.blockIdx.x * (THREADS * VECTORS) + cuda.threadIdx.x
    a = vector(x, first, vectors)
    b = vector(x, first + THREADS, vectors)
    c = vector(x, first + 2 * THREADS, vectors)
    d = vector(x, first + 3 * THREADS, vectors)
    e = vector(x, first + 4 * THREADS, vectors)
    f = vector(x, first + 5 * THREADS, vectors)
    g = vector(x, first + 6 * THREADS, vectors)
    h = vector(x, first + 7 * THREADS, vectors)
    word = larger(larger(largest(a), largest(b)), larger(largest(c), largest(d)))
    word = larger(word, larger(larger(largest(e), largest(f)), larger(largest(g), largest(h))))
    pattern = redux_max_u32(WARP, pattern_of(word))
    thread = u32_of_i64(cuda.threadIdx.x)
    at = add_u32(shared_base(), shl_u32(shr_u32(thread, 5), 2))
    if thread & 31 == 0:
        st_shared_u32(at, pattern)
    cuda.syncthreads()
    if lt_u32(thread, 32):
        pattern = shl_u32(0, 0)
        if lt_u32(thread, THREADS // 32):
            pattern = ld_shared_u32(add_u32(shared_base(), shl_u32(thread, 2)))
        pattern = redux_max_u32(WARP, pattern)
        if thread == 0:
            red_max_global_u32(decode_scale, 0, pattern)


#: Shared memory of a block.
SHARED = THREADS // 32 * 4

AMAX_FLAT = Kernel(
    "amax_flat",
    amax_flat,
    ("u8*", "u32*", "i64"),
    {"INPUT": ELEMENT_CONSTANTS["INPUT"]},
    threads=THREADS,
)

VARIANTS = ({"INPUT": "bfloat16"}, {"INPUT": "float16"}, {"INPUT": "float32"})
