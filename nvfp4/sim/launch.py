"""One run of a kernel: its blocks, and the scheduler that runs their threads."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import GreenletExit, getcurrent

from .block import Block, Dim3, Warp
from .clusters import Cluster
from .errors import Deadlock, DivergentBarrier, Finding, Livelock, WarpMaskError
from .location import describe, locate
from .memory import GlobalMemory, GlobalPointer
from .order import Clock
from .policy import Policy
from .thread import FINISHED, Thread, Worker
from .waits import Barrier, Collective, Predicate, lanes_text, ranges

if TYPE_CHECKING:
    from .machine import Machine


class AsyncOperation:
    """Something that an engine of the machine does later: a copy, a matrix product.

    Attributes
    ----------
    name, engine
        For traces and reports. Operations of one engine complete in the order in which they were
        issued.
    done
        Whether it has completed.
    """

    __slots__ = ("complete", "done", "engine", "issued", "name")

    def __init__(self, name: str, complete: Callable[[], Any], engine: Any, issued: int) -> None:
        self.name = name
        self.complete = complete
        self.engine = engine
        self.issued = issued
        self.done = False


class GridBarrier:
    """How many threads wait for the whole grid, and what they hand on."""

    def __init__(self) -> None:
        self.arrived = 0
        self.phase = 0
        self.clock = self.done = Clock()


class Launch:
    """One run of a kernel."""

    def __init__(
        self,
        machine: Machine,
        function: Callable[..., Any],
        grid_dim: Dim3,
        block_dim: Dim3,
        shared_bytes: int,
        args: Sequence[Any],
        name: str | None,
        cluster_size: int = 1,
        launch_bounds: tuple[int, int] = (0, 0),
    ) -> None:
        self.machine = machine
        self.launch_bounds = launch_bounds
        self.cluster_size = cluster_size
        self.grid_dim = grid_dim
        self.block_dim = block_dim
        self.shared_bytes = shared_bytes
        self.name: str = name or str(getattr(function, "__name__", "kernel"))
        self.start = functools.partial(function, *args)
        self.hub = getcurrent()
        self.to_hub = self.hub.switch
        self.idle: list[Worker] = []
        # Warnings of NumPy's arithmetic (overflow, division by zero) are no findings: the card has
        # none either.
        self.context = contextvars.copy_context()
        self.context.run(np.seterr, all="ignore")
        self.trace = machine.trace
        self.memory = GlobalMemory([arg for arg in args if isinstance(arg, GlobalPointer)])
        self.ready: deque[Warp] = deque()
        self.waiters: list[Thread] = []
        self.operations: list[AsyncOperation] = []
        self.blocks: list[Block] = []
        self.pending = self._indices()
        self.left = grid_dim.x * grid_dim.y * grid_dim.z
        self.threads = self.left * block_dim.x * block_dim.y * block_dim.z
        width, height, depth = block_dim
        self.thread_indices = [
            Dim3(x, y, z) for z in range(depth) for y in range(height) for x in range(width)
        ]
        self.grid_barrier = GridBarrier()
        self.steps = 0
        self.yields = 0
        self.spinning = 0

    def _indices(self) -> Iterator[tuple[int, int, int]]:
        width, height, depth = self.grid_dim
        for z in range(depth):
            for y in range(height):
                for x in range(width):
                    yield x, y, z

    # The scheduler -------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all blocks to their end."""
        if self.machine.checks.races:
            self.memory.watch()
        if self.trace is not None:
            self.trace.kernel = self.name
        try:
            self._loop(self.machine.policy)
            for operation in [*self.operations]:
                self._complete(operation)
        finally:
            self._abandon()
            self.memory.release()

    def _loop(self, policy: Policy) -> None:
        ready = self.ready
        plain = policy.plain and self.trace is None
        while True:
            while self.left and len(self.blocks) < policy.residents:
                self._bring_in()
            if plain and ready and not self.waiters and not self.spinning:
                self._turn(ready.popleft(), policy)
                continue
            # Nothing more happens by itself if nobody can run, or all who can have only polled.
            idle = not ready or self.spinning >= 2 * len(ready)
            if self.waiters and (idle or not plain or self.steps & 15 == 0):
                idle = not self._poll() and idle
            candidates = self._completable() if self.operations else []
            if idle:
                if candidates:
                    at = policy.choose(len(candidates)) if len(candidates) > 1 else 0
                    self._complete(candidates[at])
                    continue
                if self.left:
                    # Everybody waits, perhaps for a block that is not there yet.
                    self._bring_in()
                    continue
                if not ready:
                    if not self.blocks:
                        return
                    self._stuck()
            count = len(ready) + len(candidates)
            choice = policy.choose(count) if count > 1 else 0
            if choice >= len(ready):
                self._complete(candidates[choice - len(ready)])
                continue
            warp = ready[choice]
            del ready[choice]
            self._turn(warp, policy)

    def _turn(self, warp: Warp, policy: Policy) -> None:
        """Run each lane of a warp that can run until it waits."""
        warp.queued = False
        lanes = warp.ready
        warp.ready = []
        self.steps += 1
        yields = self.yields
        if not policy.plain and len(lanes) > 1:
            policy.arrange(lanes)
        if self.trace is not None:
            self.trace.step = self.steps
            self.trace.turn(warp, len(lanes))
        thread = lanes[0]
        try:
            for thread in lanes:
                if (thread.resume or self._begin(thread))() is FINISHED:
                    self._left(thread)
        except Finding as error:
            locate(error, thread)
            raise
        except Exception as error:
            self._annotate(error, thread)
            raise
        if warp.converging and not warp.ready:
            warp.converge()
        if self.yields == yields:
            self.spinning = 0
        # A turn in which every lane only polled is no progress.
        elif self.yields - yields == len(lanes):
            self.spinning += 1
            if self.spinning > self.machine.spin_limit:
                self._stuck()
        else:
            self.spinning = 0

    def _begin(self, thread: Thread) -> Callable[[], Any]:
        """Give a thread a worker."""
        if self.idle:
            worker = self.idle.pop()
        else:
            worker = Worker(parent=self.hub)
            worker.gr_context = self.context.copy()
        worker.thread = thread
        thread.worker = worker
        resume: Callable[[], Any] = worker.switch
        thread.resume = resume
        return resume

    def _bring_in(self) -> None:
        """Start the next block, with those of its cluster."""
        cluster = Cluster()
        for rank in range(self.cluster_size):
            block = Block(self, next(self.pending), cluster, rank)
            cluster.blocks.append(block)
            for warp in block.warps:
                warp.queued = True
            self.ready.extend(block.warps)
        self.left -= self.cluster_size
        self.blocks += cluster.blocks
        self.spinning = 0

    def cancel(self) -> tuple[int, int, int] | None:
        """Give away the next cluster that has not started: the index of its first block."""
        if not self.left:
            return None
        taken = [next(self.pending) for _ in range(self.cluster_size)]
        self.left -= self.cluster_size
        return taken[0]

    def _left(self, thread: Thread) -> None:
        """Do what follows from a thread's end."""
        block, warp = thread.block, thread.warp
        if thread.worker is not None:
            self.idle.append(thread.worker)
        thread.worker = thread.resume = None
        thread.dead = True
        block.live -= 1
        warp.exited |= 1 << thread.lane
        for pending in warp.collectives:
            if pending.mask >> thread.lane & 1:
                error = WarpMaskError(
                    f"{pending.name} with mask {pending.mask:#010x}: lane {thread.lane} of warp "
                    f"{warp.index} never "
                    "comes, it has left the kernel"
                )
                self._blame(error, pending.threads[0])
        if not block.live:
            self.blocks.remove(block)
            for check in block.state.get("at end", ()):
                try:
                    check()
                except Finding as error:
                    self._blame(error, thread)
            return
        if not block.barriers:
            return
        for barrier in block.barriers.values():
            if barrier.count is None and barrier.waiting:
                if self.machine.checks.barriers:
                    self._blame(
                        DivergentBarrier(
                            f"divergent barrier: {barrier}; thread {tuple(thread.thread_index)} "
                            f"(lane {thread.lane} of "
                            f"warp {warp.index}) has left the kernel and never comes"
                        ),
                        barrier.waiting[0],
                    )
                if barrier.arrived >= block.live:
                    barrier.complete()

    def _poll(self) -> bool:
        """Wake the threads whose predicate holds now, and return whether there was one."""
        still = []
        for thread in self.waiters:
            try:
                holds = thread.waiting.holds()
            except Finding as error:
                locate(error, thread, thread.frame)
                raise
            if holds:
                thread.wake()
            else:
                still.append(thread)
        woken = len(still) < len(self.waiters)
        self.waiters = still
        return woken

    def _completable(self) -> list[AsyncOperation]:
        """Return the oldest operation of each engine."""
        engines = set()
        found = []
        for operation in self.operations:
            key = id(operation) if operation.engine is None else operation.engine
            if key not in engines:
                engines.add(key)
                found.append(operation)
        return found

    def _complete(self, operation: AsyncOperation) -> None:
        self.operations.remove(operation)
        self.steps += 1
        try:
            operation.complete()
        except Finding as error:
            error.kernel = error.kernel or self.name
            raise
        operation.done = True
        self.spinning = 0
        if self.trace is not None:
            self.trace.step = self.steps
            engine = "engine" if operation.engine is None else str(operation.engine)
            self.trace.span(f"{self.name} engines", engine, operation.name, operation.issued)
        self._poll()

    # Ends that are errors ------------------------------------------------------------------------

    def _blame(self, error: Finding, thread: Thread) -> None:
        locate(error, thread, thread.frame)
        raise error

    def _annotate(self, error: Exception, thread: Thread) -> None:
        """Say where an exception that is no finding came from."""
        place = Finding("")
        place.__traceback__ = error.__traceback__
        locate(place, thread)
        error.add_note(f"in the simulated machine{place}")
        error.simulated_thread = thread  # type: ignore[attr-defined]

    def _stuck(self) -> None:
        """Raise what describes best why nobody can go on."""
        threads = [thread for block in self.blocks for thread in block.threads if not thread.dead]
        table = self._table(threads)
        if self.ready:
            first = self.ready[0].ready[0]
            self._blame(
                Livelock(
                    f"livelock: for {self.spinning} turns all threads that run only polled\n{table}"
                ),
                first,
            )
        for thread in threads:
            held = thread.waiting
            if type(held) is not Collective:
                continue
            for lane in range(32):
                if not held.mask >> lane & 1 or lane in held.payloads:
                    continue
                missing = thread.warp.threads[lane]
                if type(missing.waiting) is not Predicate:
                    self._blame(
                        WarpMaskError(
                            f"{held.name} with mask {held.mask:#010x}: lane {lane} of warp "
                            f"{thread.warp.index} never "
                            f"comes, it waits at {describe(missing)} for {missing.waiting}\n{table}"
                        ),
                        thread,
                    )
        if all(type(thread.waiting) is Barrier for thread in threads):
            self._blame(
                DivergentBarrier(
                    f"divergent barrier: {threads[0].waiting}, and no other thread will "
                    f"come\n{table}"
                ),
                threads[0],
            )
        self._blame(Deadlock(f"deadlock: no thread can go on\n{table}"), threads[0])

    def _table(self, threads: list[Thread]) -> str:
        """Return what each warp waits for, a line for each place."""
        places: dict[tuple[Warp, str], list[int]] = {}
        for thread in threads:
            where = "has not started"
            if thread.frame is not None:
                waits = "can run" if thread.waiting is None else f"waits for {thread.waiting}"
                where = f"at {describe(thread)} {waits}"
            places.setdefault((thread.warp, where), []).append(thread.lane)
        lines = [
            f"  block {tuple(warp.block.block_index)} warp {warp.index} "
            f"{lanes_text(ranges(lanes))}: {where}"
            for (warp, where), lanes in places.items()
        ]
        if len(lines) > 40:
            lines[40:] = [f"  ... and {len(lines) - 40} more places"]
        return "\n".join(lines)

    def _abandon(self) -> None:
        """End the threads that an error left behind."""
        for block in self.blocks:
            for thread in block.threads:
                if thread.worker is not None:
                    with contextlib.suppress(BaseException):
                        thread.worker.throw(GreenletExit)
                    thread.worker = thread.resume = None
        for worker in self.idle:
            worker.throw(GreenletExit)
        self.idle.clear()
        self.blocks.clear()
        self.ready.clear()
        self.waiters.clear()
