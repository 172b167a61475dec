"""Thread blocks and warps of the simulated machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .clusters import RANK_SHIFT, Cluster
from .shared import SHARED_BASE, CheckedSharedMemory, SharedMemory
from .thread import Thread
from .waits import Barrier, Collective

if TYPE_CHECKING:
    from .launch import Launch


class Dim3(NamedTuple):
    """Three extents or three indices."""

    x: int
    y: int
    z: int

    def __str__(self) -> str:
        return f"({self.x}, {self.y}, {self.z})"


class Warp:
    """32 consecutive threads of a block."""

    __slots__ = (
        "block",
        "collectives",
        "converging",
        "exists",
        "exited",
        "index",
        "queued",
        "ready",
        "threads",
    )

    def __init__(self, block: Block, index: int) -> None:
        self.block = block
        self.index = index
        self.threads: list[Thread] = []
        #: Lanes that the block has, and those that have left the kernel, as masks.
        self.exists = 0
        self.exited = 0
        self.ready: list[Thread] = []
        self.queued = False
        self.collectives: list[Collective] = []
        #: Place in the kernel -> lanes that are in activemask there.
        self.converging: dict[Any, list[Thread]] = {}

    def converge(self) -> None:
        """Answer the lanes that ask for the active mask, when no other lane of the warp can run."""
        groups, self.converging = list(self.converging.values()), {}
        for threads in groups:
            mask = sum(1 << thread.lane for thread in threads)
            for thread in threads:
                thread.wake(mask)

    def __repr__(self) -> str:
        return f"<warp {self.index} of block {tuple(self.block.block_index)}>"


class Block:
    """A thread block that is resident: its warps, its barriers and its shared memory."""

    def __init__(
        self, launch: Launch, index: tuple[int, int, int], cluster: Cluster, rank: int
    ) -> None:
        self.launch = launch
        #: The cluster, and which of its blocks this one is.
        self.cluster = cluster
        self.rank = rank
        self.machine = launch.machine
        self.block_index = Dim3(*index)
        self.block_dim = launch.block_dim
        self.grid_dim = launch.grid_dim
        self.barriers: dict[int, Barrier] = {}
        #: Static shared arrays by call site (``cuda.shared.array``); and anything else a model
        #: keeps for a block.
        self.arrays: dict[Any, Any] = {}
        self.state: dict[Any, Any] = {}
        self.static_bytes = 0
        checks = launch.machine.checks
        if checks.unwritten or checks.races:
            self.shared: SharedMemory = CheckedSharedMemory(
                launch.shared_bytes,
                SHARED_BASE | rank << RANK_SHIFT,
                unwritten=checks.unwritten,
                races=checks.races,
            )
        else:
            self.shared = SharedMemory(launch.shared_bytes, SHARED_BASE | rank << RANK_SHIFT)
        count = len(launch.thread_indices)
        self.live: int = count
        self.nobody: list[int] = [0] * count
        self.warps = [Warp(self, number) for number in range(-(-count // 32))]
        self.threads: list[Thread] = [
            Thread(self, self.warps[linear >> 5], linear, index)
            for linear, index in enumerate(launch.thread_indices)
        ]
        for warp in self.warps:
            warp.threads = self.threads[32 * warp.index : 32 * warp.index + 32]
            warp.ready = warp.threads.copy()
            warp.exists = (1 << len(warp.threads)) - 1

    def __repr__(self) -> str:
        return f"<block {tuple(self.block_index)} of {self.launch.name}>"

    def barrier(self, identity: int) -> Barrier:
        """Return the barrier of this number."""
        barrier = self.barriers.get(identity)
        if barrier is None:
            barrier = self.barriers[identity] = Barrier(self, identity)
        return barrier
