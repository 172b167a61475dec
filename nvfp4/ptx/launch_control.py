"""Cluster launch control: a block that runs takes over one that has not started (sm_100, sm_120).

A grid has a block for each piece of work, and those that run ask for the pieces of others instead
of ending. :func:`clc_try_cancel` asks, asynchronously: 16 bytes of response come to shared memory,
and 16 bytes are counted at an mbarrier. Behind its wait, :func:`clc_is_canceled` says whether a
cluster was given, which then never runs by itself, and :func:`clc_first_block` the index of its
first block. A block that has seen a request refused does not ask again; blocks may be left all the
same, which the card starts. The response is written by the asynchronous proxy: between the threads
that read it and the next request stand a barrier and ``fence_proxy_async_shared``. No block may end
before the responses to its requests are there.

A response, as assembled code takes it apart: bit 64 says whether it gives a cluster, bits 31:0 are
x, 47:32 y and 63:48 z of its first block. Bits 127:96 have a mark of ours in the simulated machine.
Source: PTX ISA, ``clusterlaunchcontrol``.
"""

from __future__ import annotations

import struct

from .instruction import instruction
from .machine import engines, thread

_BLACKWELL = (10, 0)
_MARK = 0x636C6300
_UNDEFINED = 0xAAAAAAAA


def _request(where=""):
    return (
        "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"
        f"{where}.b128 [$0], [$1];"
    )


def _query(first, what, results):
    """The response's words are operands from `first` on."""
    low, high = f"{{${first}, ${first + 1}}}", f"{{${first + 2}, ${first + 3}}}"
    return (
        "{ .reg .b64 low, high; .reg .b128 response; .reg .pred p;"
        f" mov.b64 low, {low}; mov.b64 high, {high}; mov.b128 response, {{low, high}};"
        f" clusterlaunchcontrol.query_cancel.{what}.b128 {results}, response;"
    )


@instruction("void(u32, u32)", asm=_request(), memory=True, min_cc=_BLACKWELL)
def clc_try_cancel(response, mbarrier):
    """Ask for a cluster that has not started; by one thread of a cluster, in practice.

    `response`: shared address of 16 bytes, 16-byte aligned.
    """
    engines().try_cancel(thread(), response, mbarrier, False)


@instruction(
    "void(u32, u32)",
    asm=_request(".multicast::cluster::all"),
    memory=True,
    min_cc=_BLACKWELL,
)
def clc_try_cancel_cluster(response, mbarrier):
    """As :func:`clc_try_cancel`; each block of the cluster gets the response, at the same place."""
    engines().try_cancel(thread(), response, mbarrier, True)


@instruction(
    "bool(u32x4)",
    asm=_query(1, "is_canceled.pred", "p") + " selp.b32 $0, 1, 0, p; }",
    min_cc=_BLACKWELL,
)
def clc_is_canceled(response):
    """Whether the words of a response give a cluster."""
    return decode(response) is not None


@instruction(
    "u32x3(u32x4)",
    asm=_query(3, "get_first_ctaid.v4.b32", "{$0, $1, $2, _}") + " }",
    min_cc=_BLACKWELL,
)
def clc_first_block(response):
    """The index (x, y, z) of the first block of the cluster that a response gives."""
    block = decode(response)
    if block is None:
        from ..sim import LaunchControlError

        raise LaunchControlError(
            "clusterlaunchcontrol.query_cancel.get_first_ctaid of a response that gives no cluster"
        )
    return block


# The simulated machine's responses ---------------------------------------------------------------


def encode(block: tuple[int, int, int] | None) -> bytes:
    """Return the 16 bytes of a response; None: the request was refused."""
    if block is None:
        return struct.pack("<4I", _UNDEFINED, _UNDEFINED, 0, _MARK)
    x, y, z = block
    return struct.pack("<IHHII", x, y, z, 1, _MARK)


def decode(words: tuple[int, int, int, int]) -> tuple[int, int, int] | None:
    """Return the block that the words of a response give; None where the request was refused.

    Raises
    ------
    nvfp4.sim.InvalidDescriptor
        They are no response of the simulated machine.
    """
    x, yz, given, mark = (int(word) for word in words)
    if mark != _MARK or given > 1:
        from ..sim import InvalidDescriptor

        raise InvalidDescriptor(
            "clusterlaunchcontrol.query_cancel: no response of a request: "
            + " ".join(f"{int(word):#010x}" for word in words)
        )
    return (x, yz & 0xFFFF, yz >> 16) if given else None
