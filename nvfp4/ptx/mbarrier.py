"""Barriers in shared memory that count arrivals and bytes (mbarrier), and fences between proxies.

An mbarrier is 8 bytes of shared memory, 8-byte aligned. A phase completes when all arrivals that
:func:`mbarrier_init` stated have come and as many bytes as were expected; then the next begins.
Phases are told apart by their parity, 0 for the first. In a ring of S stages, round ``i`` waits for
the full barrier of stage ``i % S`` with parity ``i // S & 1``, and for the empty barrier with the
opposite parity, which passes at once on a new barrier.

An engine's accesses (bulk and tensor copies, wgmma) belong to the *asynchronous proxy*. What a
thread wrote by a store is not there for an engine before :func:`fence_proxy_async_shared`, executed
behind the stores by the thread that made them, or by one that a barrier orders behind them. What an
engine wrote needs no fence, but a wait. Source: PTX ISA, ``mbarrier``, ``fence.proxy``.
"""

from __future__ import annotations

from .instruction import instruction
from .machine import engines, thread

_HOPPER = (9, 0)


@instruction("void(u32, u32)", asm="mbarrier.init.shared::cta.b64 [$0], $1;", memory=True)
def mbarrier_init(address, count):
    """Make an mbarrier whose phases take `count` arrivals, 1 to 2^20 - 1.

    Other threads see it after :func:`fence_mbarrier_init` and a barrier of the block.
    """
    engines().mbarrier_init(thread(), address, count)


@instruction("void(u32)", asm="mbarrier.inval.shared::cta.b64 [$0];", memory=True)
def mbarrier_inval(address):
    """End an mbarrier, so that its bytes can be used for something else."""
    engines().mbarrier_inval(thread(), address)


@instruction(
    "void(u32)", asm="mbarrier.arrive.shared::cta.b64 _, [$0];", memory=True, min_cc=(9, 0)
)
def mbarrier_arrive(address):
    """Arrive once; releases what this thread did before to who waits for the phase."""
    engines().mbarrier_arrive(thread(), address, 1)


mbarrier_arrive.lowering(
    asm="{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [$0]; }", memory=True
)


@instruction(
    "void(u32, u32)",
    asm="mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_arrive_expect_tx(address, count):
    """Let the present phase wait for `count` more bytes, then arrive once."""
    engines().mbarrier_expect_tx(thread(), address, count)
    engines().mbarrier_arrive(thread(), address, 1)


@instruction(
    "void(u32, u32)",
    asm="mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$0], $1;",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_expect_tx(address, count):
    """Let the present phase wait for `count` more bytes."""
    engines().mbarrier_expect_tx(thread(), address, count)


@instruction(
    "bool(u32, u32)",
    asm="{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [$1], $2;"
    " selp.b32 $0, 1, 0, p; }",
    memory=True,
)
def mbarrier_test_wait_parity(address, parity):
    """Whether the phase of this parity has completed; what was released to it is then seen."""
    return engines().mbarrier_test(thread(), address, parity)


@instruction(
    "bool(u32, u32)",
    asm="{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2;"
    " selp.b32 $0, 1, 0, p; }",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_try_wait_parity(address, parity):
    """As :func:`mbarrier_test_wait_parity`, but it may wait a while before it says no."""
    return engines().mbarrier_try_wait(thread(), address, parity)


@instruction(
    "void(u32, u32)",
    asm="{ .reg .pred p; again_${:uid}: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1;"
    " @!p bra again_${:uid}; }",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_wait_parity(address, parity):
    """Wait until the phase of this parity has completed, and see what was released to it."""
    engines().mbarrier_wait(thread(), address, parity)


# Fences ------------------------------------------------------------------------------------------


@instruction("void()", asm="fence.mbarrier_init.release.cluster;", memory=True, min_cc=_HOPPER)
def fence_mbarrier_init():
    """Let engines, and threads behind a barrier, see the mbarriers that this thread has made."""
    engines().proxy_fence(thread(), "mbarrier")


@instruction("void()", asm="fence.proxy.async.shared::cta;", memory=True, min_cc=_HOPPER)
def fence_proxy_async_shared():
    """Let engines see what this thread has written, and has seen written, in shared memory."""
    engines().proxy_fence(thread(), "shared", "mbarrier")


@instruction("void()", asm="fence.proxy.async.global;", memory=True, min_cc=_HOPPER)
def fence_proxy_async_global():
    """Let engines see what this thread has written, and has seen written, in global memory."""
    engines().proxy_fence(thread(), "global")


@instruction("void()", asm="fence.proxy.async;", memory=True, min_cc=_HOPPER)
def fence_proxy_async():
    """Both of the above; slower."""
    engines().proxy_fence(thread(), "shared", "global", "mbarrier")
