"""Rings of stages in shared memory, each with mbarriers.

Compile-time constant: STAGES.
"""

from __future__ import annotations

from ..ptx.arith import add_u32, eq_u32, shl_u32, xor_u32

STAGES = 2


def next_stage(stage, parity):
    """The stage behind one, and the parity of its mbarriers' phase."""
    stage = add_u32(stage, 1)
    if eq_u32(stage, STAGES):
        stage = shl_u32(0, 0)
        parity = xor_u32(parity, 1)
    return stage, parity
