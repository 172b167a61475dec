"""Which threads of a block form a warp, and values that they find together.

Blocks may have any number of threads: the mask of a warp holds the lanes that exist.
"""

from __future__ import annotations

from .._numba import cuda
from ..ptx.arith import max_nan_f32
from ..ptx.warp import shfl_xor_f32


def thread_index():
    """Number of this thread in its block, x first."""
    return cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x


def lane_count():
    """Lanes of this thread's warp that exist."""
    first = thread_index() // 32 * 32
    return min(32, cuda.blockDim.x * cuda.blockDim.y - first)


def mask_of(lanes):
    """Mask of the lowest lanes of a warp."""
    return (1 << lanes) - 1


def amax_of_lanes(mask, amax, width):
    """Largest over groups of `width` lanes, a power of two; NaN if there is one."""
    step = width // 2
    while step > 0:
        amax = max_nan_f32(amax, shfl_xor_f32(mask, amax, step))
        step = step // 2
    return amax
