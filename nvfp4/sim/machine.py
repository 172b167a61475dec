"""The simulated machine: `simulate`, the launch of a kernel, and the scheduler that runs its threads."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent

from .engine import (
    FINISHED,
    Barrier,
    Block,
    Collective,
    Dim3,
    Predicate,
    Thread,
    Warp,
    Worker,
    lanes_text,
    ranges,
)
from .errors import Deadlock, DivergentBarrier, Finding, Livelock, WarpMaskError
from .location import describe, locate
from .memory import GlobalMemory, GlobalPointer
from .order import Clock
from .policy import Policy, Schedule, make_policy
from .trace import Trace

#: Shared memory that a block can have, by compute capability (CUDA C++ programming guide, technical specifications).
SHARED_LIMITS = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (11, 0): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
CHECKS = ("unwritten", "races", "barriers")

_machine: contextvars.ContextVar[Machine | None] = contextvars.ContextVar("machine", default=None)


@dataclass(frozen=True)
class Checks:
    """Which checks that cost time are made. Bounds, alignment, masks and deadlocks are always reported."""

    unwritten: bool
    races: bool
    barriers: bool


def _make_checks(checks: Any) -> Checks:
    if isinstance(checks, bool):
        return Checks(checks, checks, checks)
    if isinstance(checks, str):
        checks = (checks,)
    names = set(checks)
    if not names <= set(CHECKS):
        raise ValueError(f"`checks` must be a bool or some of {', '.join(CHECKS)}; got {sorted(names)}")
    return Checks(*(name in names for name in CHECKS))


class AsyncOperation:
    """Something that an engine of the machine does later: a copy, a matrix product.

    Attributes
    ----------
    name, engine
        For traces and reports. Operations of one engine complete in the order in which they were issued.
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


class Machine:
    """A simulated GPU; made by :func:`simulate`.

    Attributes
    ----------
    arch, cc
        ``"sm_90a"`` and (9, 0).
    checks
        See :class:`Checks`.
    trace
        A :class:`nvfp4.sim.trace.Trace`, or None.
    spin_limit
        Turns that may pass in which threads only poll, before that is reported as a livelock.
    """

    def __init__(
        self,
        arch: str = "sm_90a",
        schedule: Schedule = "round_robin",
        checks: bool | Sequence[str] = True,
        trace: bool | Trace | None = None,
    ) -> None:
        match = re.fullmatch(r"sm_(\d+)(\d)([af]?)", arch) if isinstance(arch, str) else None
        if match is None:
            raise ValueError(f"`arch` must be like 'sm_90a'; got {arch!r}")
        cc = int(match[1]), int(match[2])
        if cc not in SHARED_LIMITS:
            known = ", ".join(f"sm_{major}{minor}" for major, minor in SHARED_LIMITS)
            raise ValueError(f"`arch` must be one of {known}, with or without a or f; got {arch!r}")
        self.arch = arch
        self.cc = cc
        self.policy = make_policy(schedule)
        self.checks = _make_checks(checks)
        self.trace = Trace() if trace is True else (trace or None)
        self.spin_limit = 20_000
        self.launch: Launch | None = None

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that a block can have."""
        return SHARED_LIMITS[self.cc]

    def run(
        self,
        function: Callable[..., Any],
        grid: int | Sequence[int],
        block: int | Sequence[int],
        shared_bytes: int = 0,
        args: Sequence[Any] = (),
        *,
        name: str | None = None,
    ) -> None:
        """Run a kernel to its end.

        Parameters
        ----------
        function
            The body, its names already bound to models.
        grid, block
            Extents: an integer or up to three.
        shared_bytes
            Dynamic shared memory of a block.
        args
            :class:`GlobalPointer`, numbers, or whatever the body takes.
        name
            For messages; by default the function's.

        Raises
        ------
        Finding
            What a check found, or a deadlock.
        ValueError
            Extents or `shared_bytes` that no card takes.
        """
        if hasattr(getcurrent(), "thread"):
            raise RuntimeError("a simulated kernel cannot launch another one")
        grid_dim, block_dim = _extents(grid, "grid"), _extents(block, "block")
        threads = block_dim.x * block_dim.y * block_dim.z
        if threads > 1024 or block_dim.z > 64:
            raise ValueError(f"`block` must have at most 1024 threads, 64 in z; got {tuple(block_dim)}")
        if not 0 <= shared_bytes <= self.shared_limit:
            raise ValueError(f"`shared_bytes` must be at most {self.shared_limit} on {self.arch}; got {shared_bytes}")
        if self.launch is not None:
            raise RuntimeError("the simulated machine is running a kernel already")
        launch = Launch(self, function, grid_dim, block_dim, shared_bytes, args, name)
        self.launch = launch
        try:
            launch.run()
        finally:
            self.launch = None

    # For models ------------------------------------------------------------------------------------

    def issue(self, name: str, complete: Callable[[], Any], *, engine: Any = None) -> AsyncOperation:
        """Queue an operation that completes, by ``complete()``, when the policy picks it.

        That is any time between now and the moment when no thread can go on without it. What `complete` finds wrong
        is reported as it is.
        """
        launch = self.launch
        if launch is None:
            raise RuntimeError("no simulated kernel is running")
        operation = AsyncOperation(name, complete, engine, launch.steps)
        launch.operations.append(operation)
        return operation

    @property
    def memory(self) -> GlobalMemory:
        """The buffers of the running launch, by address."""
        if self.launch is None:
            raise RuntimeError("no simulated kernel is running")
        return self.launch.memory


def _extents(value: int | Sequence[int], what: str) -> Dim3:
    sizes = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise ValueError(f"`{what}` must be one to three extents of 1 or more; got {value}")
    return Dim3(*(int(size) for size in (*sizes, 1, 1)[:3]))


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
    ) -> None:
        self.machine = machine
        self.grid_dim = grid_dim
        self.block_dim = block_dim
        self.shared_bytes = shared_bytes
        self.name = name or getattr(function, "__name__", "kernel")
        self.start = functools.partial(function, *args)
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None:
            raise TypeError(f"`function` must be a Python function; got {type(function).__name__}")
        self.body: CodeType = code
        self.hub = getcurrent()
        self.to_hub = self.hub.switch
        self.idle: list[Worker] = []
        # Warnings of NumPy's arithmetic (overflow, division by zero) are no findings: the card has none either.
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

    # The scheduler ---------------------------------------------------------------------------------

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
            if not ready or (self.waiters and (not policy.plain or self.steps & 15 == 0)):
                self._poll()
            if plain and ready and not self.waiters:
                warp = ready.popleft()
            else:
                candidates = self._completable() if self.operations else []
                count = len(ready) + len(candidates)
                if not count:
                    if self.left:
                        # Everybody waits, perhaps for a block that is not there yet.
                        self._bring_in()
                        continue
                    if not self.blocks:
                        return
                    self._stuck()
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
        # A turn in which every lane only polled is no progress.
        if self.yields - yields == len(lanes):
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
        self.left -= 1
        block = Block(self, next(self.pending))
        self.blocks.append(block)
        for warp in block.warps:
            warp.queued = True
        self.ready.extend(block.warps)

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
                    f"{pending.name} with mask {pending.mask:#010x}: lane {thread.lane} of warp {warp.index} never "
                    "comes, it has left the kernel"
                )
                self._blame(error, pending.threads[0])
        if not block.live:
            self.blocks.remove(block)
            return
        for barrier in block.barriers.values():
            if barrier.count is None and barrier.waiting:
                if self.machine.checks.barriers:
                    self._blame(
                        DivergentBarrier(
                            f"divergent barrier: {barrier}; thread {tuple(thread.thread_index)} (lane {thread.lane} of "
                            f"warp {warp.index}) has left the kernel and never comes"
                        ),
                        barrier.waiting[0],
                    )
                if barrier.arrived >= block.live:
                    barrier.complete()

    def _poll(self) -> None:
        """Wake the threads whose predicate holds now."""
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
        self.waiters = still

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
        operation.complete()
        operation.done = True
        self.spinning = 0
        if self.trace is not None:
            self.trace.step = self.steps
            engine = "engine" if operation.engine is None else str(operation.engine)
            self.trace.span(f"{self.name} engines", engine, operation.name, operation.issued)
        self._poll()

    # Ends that are errors --------------------------------------------------------------------------

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
                Livelock(f"livelock: for {self.spinning} turns all threads that run only polled\n{table}"), first
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
                            f"{held.name} with mask {held.mask:#010x}: lane {lane} of warp {thread.warp.index} never "
                            f"comes, it waits at {describe(missing)} for {missing.waiting}\n{table}"
                        ),
                        thread,
                    )
        if all(type(thread.waiting) is Barrier for thread in threads):
            self._blame(
                DivergentBarrier(f"divergent barrier: {threads[0].waiting}, and no other thread will come\n{table}"),
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
            f"  block {tuple(warp.block.block_index)} warp {warp.index} {lanes_text(ranges(lanes))}: {where}"
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


# The context ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def simulate(
    arch: str = "sm_90a",
    *,
    schedule: Schedule = "round_robin",
    checks: bool | Sequence[str] = True,
    trace: bool | str | os.PathLike[str] | None = None,
) -> Iterator[Machine]:
    """Run the kernels of calls on NumPy arrays on a simulated machine, in this block.

    Parameters
    ----------
    arch
        The architecture whose kernels run, such as ``"sm_90a"``.
    schedule
        Who runs next: ``"round_robin"``; an integer, the seed of random choices; a sequence of integers 0 or more, or a
        function of the number of alternatives, the choices themselves (draw them with Hypothesis, and a failing
        interleaving shrinks). The same schedule gives the same run.
    checks
        True for all checks; False for speed; or some of ``"unwritten"`` (reads of shared memory that nothing has
        written), ``"races"``, ``"barriers"`` (divergence). Bounds, alignment, masks and deadlocks are always checked.
    trace
        True to record a timeline in ``machine.trace``; a path, to also save it there at the end.

    Yields
    ------
    Machine

    Raises
    ------
    ValueError, TypeError
        An argument outside of what is allowed.
    """
    wanted = trace is not None and trace is not False
    machine = Machine(arch, schedule, checks, wanted)
    token = _machine.set(machine)
    try:
        yield machine
    finally:
        _machine.reset(token)
        if wanted and trace is not True and machine.trace is not None:
            machine.trace.save(trace)  # type: ignore[arg-type]


def current_machine() -> Machine | None:
    """Return the machine of the enclosing :func:`simulate`, or that of the running simulated thread; else None."""
    thread: Thread | None = getattr(getcurrent(), "thread", None)
    return _machine.get() if thread is None else thread.machine


@functools.cache
def default_machine() -> Machine:
    """Return the machine of a process with ``NUMBA_ENABLE_CUDASIM=1``, where no other is chosen: sm_90a, all checks."""
    return Machine("sm_90a")
