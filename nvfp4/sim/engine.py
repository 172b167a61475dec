"""CUDA threads, warps, blocks and barriers of the simulated machine.

A CUDA thread is a greenlet. It runs until it must wait for another; then it switches to the hub, the greenlet that
called :meth:`nvfp4.sim.Machine.run`, which runs the next one (``nvfp4.sim.machine``). Nothing else switches, so between
two waits a thread is plain Python: pdb steps through it, and a run repeats exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from greenlet import getcurrent, greenlet

from .errors import DivergentBarrier, InvalidOperand, Trap, WarpMaskError
from .location import call_site, describe, site_text
from .memory import CheckedSharedMemory, SharedMemory
from .order import meet

if TYPE_CHECKING:
    from types import CodeType

    from .machine import Launch, Machine

FULL_MASK = 0xFFFFFFFF

#: What a worker hands to the hub at the end of a CUDA thread.
FINISHED = object()

#: Warp operations after which the lanes see each other's memory accesses.
ORDERING_COLLECTIVES = ("syncwarp", "bar.warp.sync", "barrier.warp.sync")


class Dim3(NamedTuple):
    """Three extents or three indices."""

    x: int
    y: int
    z: int


class Payloads(dict[int, Any]):
    """Operands of a warp operation by lane; asking for a lane that does not take part is the kernel's error."""

    __slots__ = ("collective",)

    def __missing__(self, lane: int) -> Any:
        what = self.collective
        raise WarpMaskError(
            f"{what.name} with mask {what.mask:#010x} reads lane {lane}, which takes no part: its value is undefined"
        )


class Collective:
    """A warp operation that not all lanes of its mask have reached."""

    __slots__ = ("mask", "name", "payloads", "threads")

    def __init__(self, name: str, mask: int) -> None:
        self.name = name
        self.mask = mask
        self.payloads = Payloads()
        self.payloads.collective = self
        self.threads: list[Thread] = []

    def __str__(self) -> str:
        arrived = ranges(sorted(self.payloads))
        return f"{self.name} with mask {self.mask:#010x}, reached by {lanes_text(arrived)}"


class Barrier:
    """A block's barrier (PTX ``bar``, named 0 to 15)."""

    __slots__ = (
        "arrived",
        "block",
        "count",
        "id",
        "members",
        "payloads",
        "resolve",
        "sites",
        "waiting",
    )

    def __init__(self, block: Block, identity: int) -> None:
        self.block = block
        self.id = identity
        self.reset()

    def reset(self) -> None:
        """Begin the next phase."""
        self.arrived = 0
        #: Threads that complete the phase; None: all that have not left the kernel.
        self.count: int | None = None
        self.waiting: list[Thread] = []
        self.members: list[Thread] = []
        self.payloads: list[Any] = []
        self.resolve: Callable[[list[Any]], Any] | None = None
        #: Warp -> where its lanes are, and the first of them.
        self.sites: dict[Warp, tuple[Any, Thread]] = {}

    @property
    def expected(self) -> int:
        """Threads that complete the present phase."""
        return self.block.live if self.count is None else self.count

    def complete(self, last: Thread | None = None) -> Any:
        """End the phase: wake those who wait, and return what they and `last`, who does not wait, are to get."""
        result = None if self.resolve is None else self.resolve(self.payloads)
        waiting = self.waiting
        acquiring = waiting if last is None else [*waiting, last]
        if self.members:
            meet(self.members, acquiring)
        trace = self.block.launch.trace
        if trace is not None:
            trace.barrier(self, acquiring)
        self.reset()
        for thread in waiting:
            thread.wake(result)
        return result

    def __str__(self) -> str:
        name = "syncthreads (barrier 0)" if self.id == 0 and self.count is None else f"barrier {self.id}"
        return f"{name}, reached by {self.arrived} of {self.expected} threads"


class Predicate:
    """What a thread waits for that is neither a barrier nor a warp operation."""

    __slots__ = ("holds", "reason")

    def __init__(self, holds: Callable[[], bool], reason: str) -> None:
        self.holds = holds
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


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

    def __init__(self, launch: Launch, index: tuple[int, int, int]) -> None:
        self.launch = launch
        self.machine = launch.machine
        self.block_index = Dim3(*index)
        self.block_dim = launch.block_dim
        self.grid_dim = launch.grid_dim
        self.barriers: dict[int, Barrier] = {}
        #: Static shared arrays by call site (``cuda.shared.array``); and anything else a model keeps for a block.
        self.arrays: dict[Any, Any] = {}
        self.state: dict[Any, Any] = {}
        self.static_bytes = 0
        checks = launch.machine.checks
        if checks.unwritten or checks.races:
            self.shared: SharedMemory = CheckedSharedMemory(
                launch.shared_bytes, unwritten=checks.unwritten, races=checks.races
            )
        else:
            self.shared = SharedMemory(launch.shared_bytes)
        width, height, depth = launch.block_dim
        count = width * height * depth
        self.live = count
        self.nobody: list[int] = [0] * count
        self.warps = [Warp(self, number) for number in range(-(-count // 32))]
        self.threads: list[Thread] = []
        linear = 0
        for z in range(depth):
            for y in range(height):
                for x in range(width):
                    warp = self.warps[linear >> 5]
                    warp.threads.append(Thread(self, warp, linear, Dim3(x, y, z)))
                    linear += 1
        for warp in self.warps:
            warp.exists = (1 << len(warp.threads)) - 1
            warp.ready = warp.threads.copy()
            self.threads += warp.threads

    def __repr__(self) -> str:
        return f"<block {tuple(self.block_index)} of {self.launch.name}>"

    def barrier(self, identity: int) -> Barrier:
        """Return the barrier of this number."""
        barrier = self.barriers.get(identity)
        if barrier is None:
            barrier = self.barriers[identity] = Barrier(self, identity)
        return barrier


class Worker(greenlet):
    """A greenlet that runs CUDA threads, one after the other: starting one anew for each costs ten times as much."""

    #: The CUDA thread that it runs, or ran last.
    thread: Thread

    def run(self) -> None:
        """Run the present thread to its end, tell the hub, and wait for the next."""
        switch = self.parent.switch
        while True:
            self.thread.block.launch.start()
            switch(FINISHED)


class Thread:
    """A CUDA thread.

    Attributes
    ----------
    lane, warp, block, machine
        Where it is.
    thread_index, linear
        Its index in the block (x, y, z), and counted x first.
    waiting
        The Barrier, Collective or Predicate that it waits for; None while it can run.
    dead
        Whether it has left the kernel.
    state
        A dict for models that keep something for a thread; None until :meth:`memo` is called.
    """

    waiting: Any = None
    dead = False
    result: Any = None
    spins = 0
    state: dict[Any, Any] | None = None
    #: From its start to its end.
    worker: Worker | None = None
    resume: Callable[[], Any] | None = None
    # Vector clock, see nvfp4.sim.order.
    clock = 1
    foreign: Mapping[Block, list[int]] = MappingProxyType({})
    published: dict[Block, list[int]] | None = None

    def __init__(self, block: Block, warp: Warp, linear: int, thread_index: Dim3) -> None:
        self.block = block
        self.warp = warp
        self.machine: Machine = block.machine
        self.linear = linear
        self.lane = linear & 31
        self.thread_index = thread_index
        self.seen = block.nobody

    def __repr__(self) -> str:
        return f"<thread {tuple(self.thread_index)} of {self.block!r}>"

    def memo(self) -> dict[Any, Any]:
        """Return the thread's `state`, made when first asked for."""
        if self.state is None:
            self.state = {}
        return self.state

    @property
    def frame(self) -> FrameType | None:
        """The innermost frame of a thread that waits."""
        return None if self.worker is None else self.worker.gr_frame

    # Waiting ---------------------------------------------------------------------------------------

    def _block_on(self, what: Any) -> Any:
        """Run others until somebody wakes this thread; return what that one left in `result`."""
        self.waiting = what
        self.spins = 0
        self.block.launch.to_hub()
        return self.result

    def wake(self, result: Any = None) -> None:
        """Let a waiting thread go on, with the result of what it waited for."""
        self.result = result
        self.waiting = None
        warp = self.warp
        warp.ready.append(self)
        if not warp.queued:
            warp.queued = True
            warp.block.launch.ready.append(warp)

    def yield_now(self) -> None:
        """Let the others run; for loops that poll."""
        launch = self.block.launch
        launch.yields += 1
        self.wake()
        self.spins = 0
        launch.to_hub()

    def spin(self) -> None:
        """Count an operation that a loop may poll with; let the others run now and then."""
        self.spins += 1
        if self.spins >= 64:
            self.yield_now()

    def wait_until(self, predicate: Callable[[], bool], reason: str) -> None:
        """Wait until `predicate()` is true. It must change nothing; `reason` is for reports of a deadlock."""
        if predicate():
            return
        launch = self.block.launch
        launch.waiters.append(self)
        self._block_on(Predicate(predicate, reason))

    def trap(self) -> None:
        """Abort the kernel (PTX ``trap``)."""
        raise Trap("trap: the kernel stopped itself")

    # Warp operations -------------------------------------------------------------------------------

    def sync_warp(self, mask: int) -> None:
        """Wait for the lanes of `mask`, and see what they have written."""
        self.collective("syncwarp", mask, None, dict)

    def active_mask(self) -> int:
        """Return the lanes of the warp that are at this instruction together.

        The machine lets every lane come that can come without waiting for one that is here, so the warp is as
        convergent as it can be. A card promises less.
        """
        site = call_site(sys._getframe(1), self.block.launch.body)
        self.warp.converging.setdefault(site, []).append(self)
        return int(self._block_on(Predicate(lambda: False, "the other lanes, in activemask")))

    def collective(
        self,
        name: str,
        mask: int,
        payload: Any,
        resolve: Callable[[dict[int, Any]], Mapping[int, Any]],
    ) -> Any:
        """Meet the lanes of `mask` in one warp operation and return this lane's result.

        Parameters
        ----------
        name
            The instruction with its qualifiers: lanes that name different ones do not meet.
        mask
            The lanes that take part; lanes beyond the end of the block are left out.
        payload
            This lane's operand.
        resolve
            Called once, when all have come, with lane -> payload in order of lanes; returns lane -> result.

        Raises
        ------
        WarpMaskError
            This lane is not in the mask; or a lane of it has left the kernel, or waits in another operation that waits
            for a lane of this one.
        """
        warp = self.warp
        lane = self.lane
        if not mask >> lane & 1:
            raise WarpMaskError(f"{name} with mask {mask:#010x}: the calling lane {lane} is not in the mask")
        mask &= warp.exists
        mine: Collective | None = None
        for pending in warp.collectives:
            if pending.mask == mask and pending.name == name:
                mine = pending
                break
        if mine is None:
            if mask & warp.exited:
                gone = ranges([at for at in range(32) if mask & warp.exited & (1 << at)])
                raise WarpMaskError(
                    f"{name} with mask {mask:#010x}: {lanes_text(gone)} of warp {warp.index} never comes, it has left "
                    "the kernel"
                )
            if warp.collectives:
                self._check_mutual(name, mask)
            mine = Collective(name, mask)
            warp.collectives.append(mine)
        elif len(warp.collectives) > 1:
            self._check_mutual(name, mask, mine)
        payloads = mine.payloads
        payloads[lane] = payload
        mine.threads.append(self)
        if len(payloads) < mask.bit_count():
            return self._block_on(mine)
        warp.collectives.remove(mine)
        if self.machine.checks.races and name.startswith(ORDERING_COLLECTIVES):
            meet(mine.threads)
        if list(payloads) != sorted(payloads):
            ordered = Payloads(sorted(payloads.items()))
            ordered.collective = mine
            payloads = ordered
        results = resolve(payloads)
        launch = self.block.launch
        if launch.trace is not None:
            launch.trace.instruction(self, name)
        for thread in mine.threads:
            if thread is not self:
                thread.wake(results[thread.lane])
        return results[lane]

    def _check_mutual(self, name: str, mask: int, mine: Collective | None = None) -> None:
        """Refuse to wait for a lane which itself waits for this one."""
        for other in self.warp.collectives:
            if other is mine or not other.mask >> self.lane & 1:
                continue
            for thread in other.threads:
                if mask >> thread.lane & 1:
                    raise WarpMaskError(
                        f"{name} with mask {mask:#010x} waits for lane {thread.lane} of warp {self.warp.index}, which "
                        f"is at {describe(thread)} and waits there for lane {self.lane} in {other.name} with mask "
                        f"{other.mask:#010x}"
                    )

    # Barriers --------------------------------------------------------------------------------------

    def syncthreads(self) -> None:
        """Wait for all threads of the block."""
        self.barrier(0)

    def barrier(
        self,
        barrier_id: int = 0,
        count: int | None = None,
        *,
        kind: str = "arrive_wait",
        payload: Any = None,
        resolve: Callable[[list[Any]], Any] | None = None,
        aligned: bool = True,
    ) -> Any:
        """Arrive at a barrier of the block, and wait for the others.

        Parameters
        ----------
        barrier_id
            0 to 15.
        count
            Threads that complete it, a multiple of 32; None: all threads of the block.
        kind
            ``"arrive_wait"`` (``bar.sync``) or ``"arrive"`` (``bar.arrive``), which does not wait.
        payload, resolve
            For ``bar.red``: ``resolve(payloads)`` is run once and its value returned to all.
        aligned
            Whether all lanes of a warp must execute the same instruction, as PTX demands of ``bar`` and of
            ``barrier.aligned``.

        Raises
        ------
        DivergentBarrier
            Lanes of one warp are at different barriers, threads disagree about the count, or some have left the
            kernel.
        InvalidOperand
            `barrier_id`, `count` or `kind` is none that exists.
        """
        block = self.block
        barrier = block.barriers.get(barrier_id)
        if barrier is None:
            if not 0 <= barrier_id <= 15:
                raise InvalidOperand(f"a barrier's number is 0 to 15; got {barrier_id}")
            barrier = block.barrier(barrier_id)
        if count is not None:
            if count == len(block.threads):
                count = None
            elif count % 32 or not 0 < count <= len(block.threads):
                raise InvalidOperand(
                    f"a barrier's count is a multiple of 32 up to the block's {len(block.threads)} threads; got {count}"
                )
        if not barrier.arrived:
            barrier.count = count
        elif barrier.count != count:
            text = "all" if count is None else count
            raise DivergentBarrier(f"{barrier}: this thread arrives for {text} threads, the first came for others")
        checks = self.machine.checks
        if checks.barriers:
            self._check_barrier(barrier, aligned)
        barrier.arrived += 1
        if checks.races:
            barrier.members.append(self)
        if resolve is not None:
            barrier.payloads.append(payload)
            barrier.resolve = resolve
        if kind in ("arrive_wait", "sync"):
            if barrier.arrived < (block.live if barrier.count is None else barrier.count):
                barrier.waiting.append(self)
                return self._block_on(barrier)
            return barrier.complete(self)
        if kind != "arrive":
            raise InvalidOperand(f"`kind` must be 'arrive_wait' ('sync') or 'arrive'; got {kind!r}")
        if barrier.arrived >= barrier.expected:
            barrier.complete()
        return None

    def _check_barrier(self, barrier: Barrier, aligned: bool) -> None:
        block = self.block
        if barrier.count is None and block.live < len(block.threads):
            gone = ranges([thread.linear for thread in block.threads if thread.dead])
            raise DivergentBarrier(
                f"divergent barrier: {barrier}; threads {gone} have left the kernel and never come"
            )
        if not aligned:
            return
        body: CodeType = block.launch.body
        site = call_site(sys._getframe(2), body)
        first = barrier.sites.get(self.warp)
        if first is not None:
            if first[0] != site:
                raise DivergentBarrier(
                    f"divergent barrier: lane {self.lane} of warp {self.warp.index} is here at barrier {barrier.id}, "
                    f"but lane {first[1].lane} of the same warp at {site_text(first[0])}, at another instruction"
                )
            return
        barrier.sites[self.warp] = site, self
        for other in self.warp.threads:
            held = other.waiting
            if type(held) is Barrier and held is not barrier and held.sites.get(self.warp):
                raise DivergentBarrier(
                    f"divergent barrier: lane {self.lane} of warp {self.warp.index} arrives at {barrier}, but lane "
                    f"{other.lane} of the same warp waits at {describe(other)} for {held}"
                )


def this_thread() -> Thread:
    """Return the CUDA thread that is running.

    Raises
    ------
    RuntimeError
        No simulated kernel is running.
    """
    try:
        return getcurrent().thread  # type: ignore[no-any-return]
    except AttributeError:
        pass
    raise RuntimeError("no simulated kernel is running: this has a meaning in a kernel's thread only")


def ranges(numbers: list[int]) -> str:
    """Return ``"0-3, 7"`` for [0, 1, 2, 3, 7]."""
    parts: list[str] = []
    start = previous = None
    for number in [*numbers, None]:
        if previous is not None and number == previous + 1:
            previous = number
            continue
        if start is not None:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number
    return ", ".join(parts)


def lanes_text(text: str) -> str:
    """Return ``"lane 3"`` or ``"lanes 3-5"``."""
    return f"lane {text}" if text.isdigit() else f"lanes {text}"
