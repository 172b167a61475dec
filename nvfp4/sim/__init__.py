"""The simulated machine: runs kernels unmodified on a CPU, repeats exactly, and says what is wrong with them.

It needs NumPy and greenlet only. See docs and ``nvfp4.simulate``.
"""

from __future__ import annotations

from .atomics import OPERATIONS
from .engine import Block, Dim3, Thread, Warp, this_thread
from .errors import (
    DataRace,
    Deadlock,
    DivergentBarrier,
    Finding,
    InvalidOperand,
    Livelock,
    Misaligned,
    OutOfBounds,
    ReadOnlyWrite,
    Trap,
    UnwrittenRead,
    WarpMaskError,
)
from .location import model
from .machine import AsyncOperation, Machine, current_machine, default_machine, simulate
from .memory import GlobalMemory, GlobalPointer, SharedMemory
from .order import Clock, fence
from .trace import Trace

__all__ = [
    "OPERATIONS",
    "AsyncOperation",
    "Block",
    "Clock",
    "DataRace",
    "Deadlock",
    "Dim3",
    "DivergentBarrier",
    "Finding",
    "GlobalMemory",
    "GlobalPointer",
    "InvalidOperand",
    "Livelock",
    "Machine",
    "Misaligned",
    "OutOfBounds",
    "ReadOnlyWrite",
    "SharedMemory",
    "Thread",
    "Trace",
    "Trap",
    "UnwrittenRead",
    "Warp",
    "WarpMaskError",
    "current_machine",
    "default_machine",
    "fence",
    "model",
    "simulate",
    "this_thread",
]
