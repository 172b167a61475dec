"""Barriers of a block, and launch control.

Source: PTX ISA, ``bar``, ``griddepcontrol``, ``nanosleep``, ``trap``.
"""

from __future__ import annotations

from . import lower
from .instruction import instruction
from .machine import thread


@instruction("void(u32, u32)", asm="bar.sync $0, $1;", memory=True)
def bar_sync(barrier, count):
    """Wait at barrier 0..15 until `count` threads, a multiple of 32, have come.

    Orders their accesses to memory.
    """
    thread().barrier(barrier, count, kind="arrive_wait")


@instruction("void(u32, u32)", asm="bar.arrive $0, $1;", memory=True)
def bar_arrive(barrier, count):
    """Count as one that has come to the barrier, without waiting."""
    thread().barrier(barrier, count, kind="arrive")


@instruction("void()", asm="griddepcontrol.wait;", memory=True, min_cc=(9, 0))
def griddepcontrol_wait():
    """Wait until the kernels that this one depends on have ended and their writes are seen.

    Does nothing before sm_90.
    """


@instruction("void()", asm="griddepcontrol.launch_dependents;", memory=True, min_cc=(9, 0))
def griddepcontrol_launch_dependents():
    """Let the kernels that depend on this one start; orders nothing. Does nothing before sm_90."""


griddepcontrol_wait.lowering(memory=True)(lower.nothing)
griddepcontrol_launch_dependents.lowering(memory=True)(lower.nothing)


@instruction("void(u32)", asm="nanosleep.u32 $0;", memory=True)
def nanosleep(duration):
    """Give way to other warps for about so many nanoseconds."""
    thread().spin()


@instruction("void()", asm="trap;", memory=True)
def trap():
    """Abort the kernel."""
    from ..sim import Finding

    raise Finding("the kernel executed trap")
