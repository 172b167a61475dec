"""Writes a tensor map into device memory, from its words as arguments.

The arguments of a launch are copied when it is launched, so that nothing of the host must be kept,
pinned or copied. The release is the counterpart of the acquire in every block that uses the map.
One thread.
"""

from __future__ import annotations

from ..program import Kernel
from ..ptx.tma import fence_tensormap_release


def write_tensor_map(target, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15):
    target[0] = w0
    target[1] = w1
    target[2] = w2
    target[3] = w3
    target[4] = w4
    target[5] = w5
    target[6] = w6
    target[7] = w7
    target[8] = w8
    target[9] = w9
    target[10] = w10
    target[11] = w11
    target[12] = w12
    target[13] = w13
    target[14] = w14
    target[15] = w15
    fence_tensormap_release()


WRITE_TENSOR_MAP = Kernel(
    "write_tensor_map", write_tensor_map, ("u64*",) + ("u64",) * 16, min_cc=(9, 0), threads=1
)
