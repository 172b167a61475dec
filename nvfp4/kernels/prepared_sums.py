"""Sums of products with prepared weights, one after the other, k ascending: the exact, slow way.

For matrices whose scales could not be rebased, and activations whose scales bfloat16 does not hold.

Compile-time constants: those of ``matmul_naive`` for operands but B_LAYOUT.
"""

from __future__ import annotations

import numpy as np

from .prepared import prepared8, prepared_codes, prepared_scales
from .products import add_products8, operand8, scale_of_piece

A_ELEMENT = "none"
A_SCALE = "e8m0"
A_LAYOUT = "linear"
B_ELEMENT = "e2m1"
B_SCALE = "e8m0"

ZERO = np.float32(0.0)
ONE = np.float32(1.0)


def slow_sum(a, a_scales, a_at, a_scale_row, b, b_scales, expert, n, columns, depth):
    """The sum over k of a[k] * sa * b[k] * sb; `a_at` is where the row begins, in the plans' units.

    `columns` are the rows of each matrix of B, n is one of them.
    """
    codes_at = expert * prepared_codes(columns, depth, B_ELEMENT)
    scales_at = expert * prepared_scales(columns, depth, B_SCALE)
    total = ZERO
    sa = ONE
    k = 0
    while k < depth:
        if A_ELEMENT != "none" and A_SCALE != "none":
            sa = scale_of_piece(a_scales, 0, a_scale_row, k // 16, depth, A_SCALE, A_LAYOUT)
        v = operand8(a, a_at, k, A_ELEMENT, sa)
        w = prepared8(b, codes_at, b_scales, scales_at, n, k, depth, B_ELEMENT, B_SCALE)
        total = add_products8(total, v, w)
        k += 8
    return total
