"""The simulated machine, and `simulate`, which makes one."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from .block import Dim3
from .current import running_thread
from .debug import breakpoints
from .launch import AsyncOperation, Launch
from .memory import GlobalMemory
from .policy import Schedule, make_policy
from .trace import Trace

#: Shared memory that a block can have, by compute capability (CUDA C++ programming guide, technical
#: specifications).
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
    """Which of the checks that cost time are made."""

    unwritten: bool
    races: bool
    barriers: bool


def _make_checks(checks: Any) -> Checks:
    if isinstance(checks, bool):
        return Checks(checks, checks, checks)
    if isinstance(checks, str):
        checks = (checks,)
    try:
        names = set(checks)
    except TypeError:
        raise TypeError(
            f"`checks` must be a bool or some of {', '.join(CHECKS)}; got {checks!r}"
        ) from None
    if not names <= set(CHECKS):
        raise ValueError(
            f"`checks` must be a bool or some of {', '.join(CHECKS)}; got {sorted(names)}"
        )
    return Checks(*(name in names for name in CHECKS))


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
    processors, card
        What plans are made for: multiprocessors, those of an H200, and the name and
        multiprocessors of a card that tables of divisions go by, or None.
    """

    processors = 132
    card: tuple[str, int] | None = None

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
        self._free = threading.Lock()

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
        cluster: Sequence[int] = (1, 1, 1),
        launch_bounds: tuple[int, int] = (0, 0),
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
        cluster
            Extents of a thread block cluster, in blocks: up to 8 beside each other.
        launch_bounds
            Threads of a block and blocks a multiprocessor that the kernel is compiled for (0: not
            stated). ``setmaxnreg`` needs both.

        Raises
        ------
        Finding
            What a check found, or a deadlock.
        UnsupportedError
            A cluster of more than one block before sm_90, or of blocks behind each other.
        ValueError
            Extents or `shared_bytes` that no card takes.
        """
        if running_thread() is not None:
            raise RuntimeError("a simulated kernel cannot launch another one")
        grid_dim, block_dim = _extents(grid, "grid"), _extents(block, "block")
        threads = block_dim.x * block_dim.y * block_dim.z
        if threads > 1024 or block_dim.z > 64:
            raise ValueError(
                f"`block` must have at most 1024 threads, 64 in z; got {tuple(block_dim)}"
            )
        if not 0 <= shared_bytes <= self.shared_limit:
            raise ValueError(
                f"`shared_bytes` must be at most {self.shared_limit} on {self.arch}; got "
                f"{shared_bytes}"
            )
        size = _cluster_size(cluster, grid_dim, self.cc)
        if running_thread() is not None:
            raise RuntimeError("the simulated machine is running a kernel already")
        with self._free:  # threads of the host that share a machine take turns
            self.launch = Launch(
                self,
                function,
                grid_dim,
                block_dim,
                shared_bytes,
                args,
                name,
                size,
                launch_bounds,
            )
            try:
                with breakpoints():
                    self.launch.run()
            finally:
                self.launch = None

    # For models ----------------------------------------------------------------------------------

    def issue(
        self, name: str, complete: Callable[[], Any], *, engine: Any = None
    ) -> AsyncOperation:
        """Queue an operation that completes, by ``complete()``, when the policy picks it.

        That is any time between now and the moment when no thread can go on without it. What
        `complete` finds wrong is reported as it is.
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


def _cluster_size(cluster: Sequence[int], grid: Dim3, cc: tuple[int, int]) -> int:
    """Blocks of a cluster."""
    extents = _extents(cluster, "cluster")
    if extents == (1, 1, 1):
        return 1
    if cc < (9, 0) or extents.y != 1 or extents.z != 1:
        raise UnsupportedError(
            "`cluster` must be (1, 1, 1), or, from sm_90 on, of blocks beside each other; got "
            f"{tuple(extents)}"
        )
    if extents.x > 8 or grid.x % extents.x:
        raise ValueError(
            f"`cluster` must be of up to 8 blocks that divide the grid {tuple(grid)}; got "
            f"{tuple(extents)}"
        )
    return extents.x


def _extents(value: int | Sequence[int], what: str) -> Dim3:
    sizes = (value,) if isinstance(value, (int, np.integer)) else tuple(value)
    if not 1 <= len(sizes) <= 3 or any(size < 1 for size in sizes):
        raise ValueError(f"`{what}` must be one to three extents of 1 or more; got {value}")
    return Dim3(*(int(size) for size in (*sizes, 1, 1)[:3]))


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
        Who runs next: ``"round_robin"``; an integer, the seed of random choices; a sequence of
        integers 0 or more, or a function of the number of alternatives, the choices themselves
        (draw them with Hypothesis, and a failing interleaving shrinks). The same schedule gives the
        same run.
    checks
        True for all checks; False for speed; or some of ``"unwritten"`` (reads of shared memory
        that nothing has written), ``"races"``, ``"barriers"`` (divergence). Bounds, alignment,
        masks and deadlocks are always checked.
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
    if not isinstance(trace, (bool, str, os.PathLike, type(None))):
        raise TypeError(f"`trace` must be a bool or a path; got {trace!r}")
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
    """Return the machine of the running simulated thread, or of the enclosing `simulate`."""
    thread = running_thread()
    return _machine.get() if thread is None else thread.machine


@functools.cache
def default_machine() -> Machine:
    """Return the machine of a process with ``NUMBA_ENABLE_CUDASIM=1``: sm_90a, all checks."""
    return Machine("sm_90a")
