"""The short forms of ``ptx.scaled`` on the card: every operand that they may have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvfp4 import launch
from nvfp4._numba import cuda
from nvfp4.arrays import as_array
from nvfp4.program import Kernel
from nvfp4.ptx.arith import add_u32, mul_rn, ne_u32, or_u32, rcp_rn
from nvfp4.ptx.bits import float_as_uint, uint_as_float
from nvfp4.ptx.convert import e2m1x8_of_f32
from nvfp4.ptx.memory import red_add_global_u32
from nvfp4.ptx.scaled import e2m1x8_scaled, rcp_rn_normal, rcp_rn_or_zero

ZERO = np.float32(0.0)
SEVEN = 0x40E00000  # the pattern of 7.0


def count_wrong_codes(wrong, q):
    """Compare eight values, of patterns from 8 i on and both signs, with the general conversion."""
    i = (cuda.blockIdx.x * 256 + cuda.threadIdx.x) * 8
    sign = 0x80000000 if cuda.blockIdx.y == 1 else 0
    if i < SEVEN:
        v0 = uint_as_float(or_u32(i, sign))
        v1 = uint_as_float(or_u32(i + 1, sign))
        v2 = uint_as_float(or_u32(i + 2, sign))
        v3 = uint_as_float(or_u32(i + 3, sign))
        v4 = uint_as_float(or_u32(i + 4, sign))
        v5 = uint_as_float(or_u32(i + 5, sign))
        v6 = uint_as_float(or_u32(i + 6, sign))
        v7 = uint_as_float(or_u32(i + 7, sign))
        short = e2m1x8_scaled(v0, v1, v2, v3, v4, v5, v6, v7, q)
        plain = e2m1x8_of_f32(
            mul_rn(v0, q),
            mul_rn(v1, q),
            mul_rn(v2, q),
            mul_rn(v3, q),
            mul_rn(v4, q),
            mul_rn(v5, q),
            mul_rn(v6, q),
            mul_rn(v7, q),
        )
        if ne_u32(short, plain):
            red_add_global_u32(wrong, 0, 1)


def count_wrong_reciprocals(wrong, exponent):
    """Compare the reciprocals of all significands with an exponent with the division's."""
    i = cuda.blockIdx.x * 256 + cuda.threadIdx.x
    d = uint_as_float(add_u32(exponent, i))
    plain = float_as_uint(rcp_rn(d))
    if ne_u32(float_as_uint(rcp_rn_normal(d)), plain):
        red_add_global_u32(wrong, 0, 1)
    if ne_u32(float_as_uint(rcp_rn_or_zero(d)), plain):
        red_add_global_u32(wrong, 0, 1)
    if ne_u32(float_as_uint(rcp_rn_or_zero(mul_rn(d, ZERO))), 0):
        red_add_global_u32(wrong, 0, 1)


CODES = Kernel("count_wrong_codes", count_wrong_codes, ("u32*", "f32"), threads=256)
RECIPROCALS = Kernel(
    "count_wrong_reciprocals", count_wrong_reciprocals, ("u32*", "u32"), threads=256
)


def wrong(cupy: Any, kernel: Kernel, grid: tuple[int, ...], number: float) -> int:
    counter = cupy.zeros(1, cupy.uint32)
    made = launch.Launch(kernel.program(), grid, 256, 0, ("wrong", number))
    launch.run([made], {"wrong": as_array(counter, "wrong")}, stream=0)
    cupy.cuda.runtime.deviceSynchronize()
    return int(counter[0])


@pytest.mark.parametrize("q", [1.0, 0.7310585, 2.0**-100])
def test_every_value_below_seven_has_the_code_of_the_general_conversion(
    cupy: Any, q: float
) -> None:
    blocks = -(-SEVEN // (256 * 8))
    assert wrong(cupy, CODES, (blocks, 2), float(np.float32(q))) == 0


@pytest.mark.parametrize("exponent", [-100, -9, 0, 8, 99])
def test_every_significand_has_the_reciprocal_of_the_division(cupy: Any, exponent: int) -> None:
    assert wrong(cupy, RECIPROCALS, (1 << 23) // 256, (exponent + 127) << 23) == 0
