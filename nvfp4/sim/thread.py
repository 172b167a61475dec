"""CUDA threads of the simulated machine.

A CUDA thread runs in a greenlet until it must wait for another; then it switches to the hub, the
greenlet that called :meth:`nvfp4.sim.Machine.run`, which runs the next one
(``nvfp4.sim.launch``). Nothing else switches, so between two waits a thread is plain Python: pdb
steps through it, and a run repeats exactly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import TYPE_CHECKING, Any

from greenlet import greenlet

from .errors import DivergentBarrier, InvalidOperand, Trap, WarpMaskError
from .location import call_site, describe, site_text
from .order import meet
from .waits import Barrier, Collective, Payloads, Predicate, lanes_text, ranges

if TYPE_CHECKING:
    from .block import Block, Dim3, Warp
    from .machine import Machine

FULL_MASK = 0xFFFFFFFF

#: What a worker hands to the hub at the end of a CUDA thread.
FINISHED = object()

#: Warp operations after which the lanes see each other's memory accesses.
ORDERING_COLLECTIVES = ("syncwarp", "bar.warp.sync", "barrier.warp.sync")


class Worker(greenlet):
    """A greenlet that runs CUDA threads, one after the other.

    Starting a greenlet for each thread costs ten times as much.
    """

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
        self.block = self.home = block
        self.warp = warp
        self.machine: Machine = block.machine
        self.linear: int = linear
        self.lane = linear & 31
        self.thread_index = thread_index
        self.seen: list[int] = block.nobody

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

    # Waiting -------------------------------------------------------------------------------------

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

    def wait_until(self, predicate: Callable[[], bool], reason: str | Callable[[], str]) -> None:
        """Wait until `predicate()` is true; it must change nothing.

        `reason`, or what it returns then, says in the report of a deadlock what the thread waits
        for.
        """
        if predicate():
            return
        launch = self.block.launch
        launch.waiters.append(self)
        self._block_on(Predicate(predicate, reason))

    def trap(self) -> None:
        """Abort the kernel (PTX ``trap``)."""
        raise Trap("trap: the kernel stopped itself")

    # Warp operations -----------------------------------------------------------------------------

    def sync_warp(self, mask: int) -> None:
        """Wait for the lanes of `mask`, and see what they have written."""
        self.collective("syncwarp", mask, None, dict)

    def active_mask(self) -> int:
        """Return the lanes of the warp that are at this instruction together.

        The machine lets every lane come that can come without waiting for one that is here, so the
        warp is as convergent as it can be. A card promises less.
        """
        site = call_site(sys._getframe(1))
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
            Called once, when all have come, with lane -> payload in order of lanes; returns lane ->
            result.

        Raises
        ------
        WarpMaskError
            This lane is not in the mask; or a lane of it has left the kernel, or waits in another
            operation that waits for a lane of this one.
        """
        warp = self.warp
        lane = self.lane
        if not mask >> lane & 1:
            raise WarpMaskError(
                f"{name} with mask {mask:#010x}: the calling lane {lane} is not in the mask"
            )
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
                    f"{name} with mask {mask:#010x}: {lanes_text(gone)} of warp {warp.index} never "
                    "comes, it has left "
                    "the kernel"
                )
            mine = Collective(name, mask)
            warp.collectives.append(mine)
        if len(warp.collectives) > 1:
            self._check_mutual(mine)
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

    def _check_mutual(self, mine: Collective) -> None:
        """Refuse to wait for a lane which itself waits for this one."""
        for other in self.warp.collectives:
            if other is mine or not other.mask >> self.lane & 1:
                continue
            for thread in other.threads:
                if mine.mask >> thread.lane & 1:
                    raise WarpMaskError(
                        f"{mine.name} with mask {mine.mask:#010x} waits for lane {thread.lane} of "
                        f"warp {self.warp.index}, which is at {describe(thread)} and waits there "
                        f"for lane {self.lane} in {other.name} with mask {other.mask:#010x}"
                    )

    # Barriers ------------------------------------------------------------------------------------

    def syncthreads(self) -> None:
        """Wait for all threads of the block: :meth:`barrier`, quick where nothing is checked."""
        block = self.block
        checks = self.machine.checks
        if checks.barriers or checks.races or 0 not in block.barriers:
            self.barrier(0)
            return
        barrier = block.barriers[0]
        if barrier.count is not None:
            self.barrier(0)
            return
        barrier.arrived += 1
        if barrier.arrived >= block.live:
            barrier.complete(self)
            return
        barrier.waiting.append(self)
        self.waiting = barrier
        self.spins = 0
        block.launch.to_hub()

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
            Whether all lanes of a warp must execute the same instruction, as PTX demands of ``bar``
            and of ``barrier.aligned``.

        Raises
        ------
        DivergentBarrier
            Lanes of one warp are at different barriers, threads disagree about the count, or some
            have left the kernel.
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
            if barrier_id == 0 and count == len(block.threads):
                count = None
            elif count % 32 or not 0 < count <= len(block.threads):
                raise InvalidOperand(
                    f"a barrier's count is a multiple of 32 up to the block's {len(block.threads)} "
                    f"threads; got {count}"
                )
        if not barrier.arrived:
            barrier.count = count
        elif barrier.count != count:
            text = "all" if count is None else count
            raise DivergentBarrier(
                f"{barrier}: this thread arrives for {text} threads, the first came for others"
            )
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
        site = call_site(sys._getframe(2))
        first = barrier.sites.get(self.warp)
        if first is not None:
            if first[0] != site:
                raise DivergentBarrier(
                    f"divergent barrier: lane {self.lane} of warp {self.warp.index} is here at "
                    f"barrier {barrier.id}, "
                    f"but lane {first[1].lane} of the same warp at {site_text(first[0])}, at "
                    "another instruction"
                )
            return
        barrier.sites[self.warp] = site, self
        for other in self.warp.threads:
            held = other.waiting
            if type(held) is Barrier and held is not barrier and held.sites.get(self.warp):
                raise DivergentBarrier(
                    f"divergent barrier: lane {self.lane} of warp {self.warp.index} arrives at "
                    f"{barrier}, but lane "
                    f"{other.lane} of the same warp waits at {describe(other)} for {held}"
                )
