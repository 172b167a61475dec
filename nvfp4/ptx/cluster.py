"""Clusters: blocks that run at the same time and reach each other's shared memory (sm_90).

A launch says how many blocks beside each other are one. An address in shared memory has the rank of
its block in bits 31:24; :func:`map_shared` gives that of the same place in another block. What
another block shall use must be there before a barrier of the cluster, and no block may leave the
kernel while others still use its memory: a barrier at the end, too. Source: PTX ISA,
``barrier.cluster``, ``mapa``, ``mbarrier.arrive``, ``cp.async.bulk.tensor``.
"""

from __future__ import annotations

from . import lower
from .instruction import instruction
from .machine import engines, thread

_HOPPER = (9, 0)


@instruction("u32()", asm="mov.u32 $0, %cluster_ctarank;", min_cc=_HOPPER)
def cluster_rank():
    """Which block of its cluster this one is."""
    return thread().block.rank


@instruction("u32()", asm="mov.u32 $0, %cluster_nctarank;", min_cc=_HOPPER)
def cluster_size():
    """Number of blocks of the cluster."""
    return len(thread().block.cluster.blocks)


@instruction("void()")
def cluster_arrive():
    """Arrive at the cluster's barrier; releases what this thread did before."""
    engines().cluster_arrive(thread())


@instruction("void()")
def cluster_wait():
    """Wait until all threads of the cluster have arrived, and see what they released."""
    engines().cluster_wait(thread())


def _together(target, text):
    def build(builder, ir, arguments):
        lower.together(builder, ir, text, "", arguments, memory=True)

    target.lowering(memory=True, min_cc=_HOPPER)(build)


_together(cluster_arrive, "barrier.cluster.arrive.release.aligned;")
_together(cluster_wait, "barrier.cluster.wait.acquire.aligned;")


@instruction("u32(u32, u32)", asm="mapa.shared::cluster.u32 $0, $1, $2;", min_cc=_HOPPER)
def map_shared(address, rank):
    """The address of the same place in the shared memory of another block."""
    return engines().cluster_map(thread(), address, rank)


@instruction(
    "void(u32)",
    asm="mbarrier.arrive.release.cluster.shared::cluster.b64 _, [$0];",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_arrive_cluster(address):
    """Arrive once at an mbarrier of any block of the cluster."""
    engines().cluster_arrive_remote(thread(), address)


@instruction(
    "void(u32, u32)",
    asm="{ .reg .pred p; again_${:uid}:"
    " mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$0], $1;"
    " @!p bra again_${:uid}; }",
    memory=True,
    min_cc=_HOPPER,
)
def mbarrier_wait_parity_cluster(address, parity):
    """Wait for a phase of an own mbarrier, and see what threads of other blocks released to it."""
    engines().mbarrier_wait(thread(), address, parity)


@instruction(
    "void(u32, i64, i32, i32, u32, u16)",
    asm="cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".multicast::cluster [$0], [$1, {$2, $3}], [$4], $5;",
    memory=True,
    min_cc=_HOPPER,
)
def tma_load_2d_multicast(target, descriptor, x, y, mbarrier, mask):
    """Load the box at (x, y) to the same place in each block of a mask of ranks.

    Each block's mbarrier at the place of `mbarrier` counts the box.
    """
    engines().tma_load_multicast(thread(), target, descriptor, (x, y), mbarrier, mask)
