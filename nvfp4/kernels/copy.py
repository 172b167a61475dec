"""A copy at the speed of memory: what the quantisers' speed is measured against.

A thread copies UNROLL words of 16 bytes that lie a block's width apart; all its loads are issued
before the first store. Both arrays are multiples of 16 bytes. Grid: words / UNROLL / THREADS.
"""

from __future__ import annotations

from .._numba import cuda
from ..program import Kernel
from ..ptx.memory import ld_global_v4_u32, st_global_v4_u32

UNROLL = 4
THREADS = 256


def copy(x, y, words):
    first = cuda.blockIdx.x * (THREADS * UNROLL) + cuda.threadIdx.x
    last = first + (UNROLL - 1) * THREADS
    if last < words:
        a = ld_global_v4_u32(x, first * 16, "nc.L1::no_allocate")
        b = ld_global_v4_u32(x, (first + THREADS) * 16, "nc.L1::no_allocate")
        c = ld_global_v4_u32(x, (first + 2 * THREADS) * 16, "nc.L1::no_allocate")
        d = ld_global_v4_u32(x, last * 16, "nc.L1::no_allocate")
        st_global_v4_u32(y, first * 16, a[0], a[1], a[2], a[3], "")
        st_global_v4_u32(y, (first + THREADS) * 16, b[0], b[1], b[2], b[3], "")
        st_global_v4_u32(y, (first + 2 * THREADS) * 16, c[0], c[1], c[2], c[3], "")
        st_global_v4_u32(y, last * 16, d[0], d[1], d[2], d[3], "")
    else:
        i = first
        while i < words:
            a = ld_global_v4_u32(x, i * 16, "nc.L1::no_allocate")
            st_global_v4_u32(y, i * 16, a[0], a[1], a[2], a[3], "")
            i += THREADS


COPY = Kernel("copy", copy, ("u8*", "u8*", "i64"), threads=THREADS)
