"""Clusters of blocks on the simulated machine: their barrier, and addresses in each other's memory.

A block's shared-memory addresses have its rank in the cluster in bits 31:24, so that an address
says whose it is. Source: PTX ISA, ``barrier.cluster``, ``mapa``, state spaces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import DataRace, DivergentBarrier, Finding, InvalidOperand, OutOfBounds
from .order import Clock, ordered

if TYPE_CHECKING:
    from .block import Block
    from .thread import Thread

#: Where an address has the rank.
RANK_SHIFT = 24
_OFFSET = (1 << RANK_SHIFT) - 1


class Cluster:
    """Blocks that run at the same time and reach each other's shared memory."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        #: Of the barrier: threads that have arrived in this phase, phases that are complete.
        self.arrived = 0
        self.phase = 0
        self.clock = self.done = Clock()

    def __str__(self) -> str:
        threads = sum(len(block.threads) for block in self.blocks)
        return f"the cluster's barrier, reached by {self.arrived} of {threads} threads"


def cluster_arrive(thread: Thread) -> None:
    """Model of ``barrier.cluster.arrive``."""
    cluster, memo = thread.block.cluster, thread.memo()
    if "cluster phase" in memo:
        raise DivergentBarrier(
            "barrier.cluster.arrive: this thread has arrived already, and not waited since"
        )
    memo["cluster phase"] = cluster.phase
    cluster.clock.release(thread)
    cluster.arrived += 1
    if cluster.arrived == sum(len(block.threads) for block in cluster.blocks):
        cluster.arrived = 0
        cluster.phase += 1
        cluster.done = cluster.clock.copy()


def cluster_wait(thread: Thread) -> None:
    """Model of ``barrier.cluster.wait``."""
    cluster, memo = thread.block.cluster, thread.memo()
    phase = memo.pop("cluster phase", None)
    if phase is None:
        raise DivergentBarrier("barrier.cluster.wait: this thread has not arrived")
    thread.wait_until(lambda: cluster.phase > phase, lambda: str(cluster))
    cluster.done.acquire(thread)


def cluster_map(thread: Thread, address: int, rank: int) -> int:
    """Model of ``mapa``: the address at the same place in another block."""
    found: int = in_block(address, _block(thread, rank, "mapa"))
    return found


def in_block(address: Any, block: Block) -> Any:
    """The same place, or places, in a block."""
    return address & _OFFSET | block.rank << RANK_SHIFT


def owner(thread: Thread, address: int, what: str) -> Block:
    """The block of the cluster whose an address is, which must not have left the kernel."""
    block = _block(thread, address >> RANK_SHIFT, what)
    if block is not thread.block and thread.machine.checks.races:
        if "reached by" not in block.state:
            block.state["reached by"] = {}
            block.state.setdefault("at end", []).append(lambda: _check_end(block))
        block.state["reached by"][thread] = thread.clock
    if not block.live:
        raise Finding(
            f"{what} at {address:#x}: the block {tuple(block.block_index)} of the cluster has left "
            "the kernel, and its shared memory is gone",
            address=address,
        )
    return block


def _check_end(block: Block) -> None:
    """Raise where a block leaves, and another one's last use of it is not ordered before that."""
    for thread, epoch in block.state["reached by"].items():
        if not any(ordered((thread, epoch), one) for one in block.threads):
            raise DataRace(
                f"data race: the block {tuple(block.block_index)} of a cluster leaves the kernel, "
                f"and thread {tuple(thread.thread_index)} of block "
                f"{tuple(thread.block.block_index)} uses its shared memory; nothing orders the two "
                "(a barrier of the cluster would)"
            )


def members(thread: Thread, mask: int, what: str) -> list[Block]:
    """The blocks of a mask of ranks."""
    if not 0 < mask < 1 << 16:
        raise InvalidOperand(f"{what}: the mask of blocks is 16 bits, not 0; got {mask:#x}")
    ranks = [rank for rank in range(16) if mask >> rank & 1]
    return [owner(thread, rank << RANK_SHIFT, what) for rank in ranks]


def cluster_arrive_remote(thread: Thread, address: int) -> None:
    """Model of ``mbarrier.arrive.shared::cluster``."""
    from .mbarriers import mbarrier_arrive

    mbarrier_arrive(thread, address, 1, owner(thread, address, "mbarrier.arrive"))


def cluster_load(thread: Thread, address: int, nbytes: int) -> int:
    """Model of ``ld.shared::cluster``: from a block's shared memory, which may be another one's."""
    return owner(thread, address, "ld.shared::cluster").shared.load(address, nbytes)


def _block(thread: Thread, rank: int, what: str) -> Block:
    blocks = thread.block.cluster.blocks
    if rank >= len(blocks):
        raise OutOfBounds(f"{what}: rank {rank} of a cluster of {len(blocks)} blocks")
    return blocks[rank]
