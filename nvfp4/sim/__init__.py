"""The simulated machine: runs kernels unmodified on a CPU and says what is wrong with them.

It needs NumPy and greenlet only. See docs and ``nvfp4.simulate``.
"""

from __future__ import annotations

from . import engines
from .atomics import OPERATIONS
from .block import Block, Dim3, Warp
from .current import this_thread
from .errors import (
    DataRace,
    Deadlock,
    DivergentBarrier,
    Finding,
    InvalidDescriptor,
    InvalidOperand,
    LaunchControlError,
    Livelock,
    MBarrierError,
    Misaligned,
    MissingFence,
    NotAwaited,
    OutOfBounds,
    ReadOnlyWrite,
    RegisterPoolError,
    TensorMemoryError,
    Trap,
    UnwrittenRead,
    WarpMaskError,
    WrongParity,
)
from .facade import cuda
from .launch import AsyncOperation
from .location import model
from .machine import Machine, current_machine, default_machine, simulate
from .memory import GlobalMemory, GlobalPointer, pointer_to
from .order import Clock, fence
from .shared import SharedMemory
from .thread import Thread
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
    "InvalidDescriptor",
    "InvalidOperand",
    "LaunchControlError",
    "Livelock",
    "MBarrierError",
    "Machine",
    "Misaligned",
    "MissingFence",
    "NotAwaited",
    "OutOfBounds",
    "ReadOnlyWrite",
    "RegisterPoolError",
    "SharedMemory",
    "TensorMemoryError",
    "Thread",
    "Trace",
    "Trap",
    "UnwrittenRead",
    "Warp",
    "WarpMaskError",
    "WrongParity",
    "cuda",
    "current_machine",
    "default_machine",
    "engines",
    "fence",
    "model",
    "pointer_to",
    "simulate",
    "this_thread",
]
