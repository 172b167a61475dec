"""What a CUDA thread waits for: a warp operation, a barrier, or something that becomes true."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import WarpMaskError
from .order import meet

if TYPE_CHECKING:
    from .block import Block, Warp
    from .thread import Thread


class Payloads(dict[int, Any]):
    """Operands of a warp operation by lane; to read a lane that has no part is an error."""

    collective: Collective

    def __missing__(self, lane: int) -> Any:
        what = self.collective
        raise WarpMaskError(
            f"{what.name} with mask {what.mask:#010x} reads lane {lane}, which takes no part: its "
            "value is undefined"
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
        """End the phase and wake those who wait; `last` does not, and gets what they get."""
        result = None if self.resolve is None else self.resolve(self.payloads)
        waiting = self.waiting
        acquiring = waiting if last is None else [*waiting, last]
        if self.members:
            meet(self.members, acquiring)
        trace = self.block.launch.trace
        if trace is not None:
            trace.barrier(self, acquiring)
        self.reset()
        ready = self.block.launch.ready
        # Thread.wake, without the calls.
        for thread in waiting:
            thread.result = result
            thread.waiting = None
            warp = thread.warp
            warp.ready.append(thread)
            if not warp.queued:
                warp.queued = True
                ready.append(warp)
        return result

    def __str__(self) -> str:
        name = (
            "syncthreads (barrier 0)"
            if self.id == 0 and self.count is None
            else f"barrier {self.id}"
        )
        count = len(self.block.threads) if self.count is None else self.count
        return f"{name}, reached by {self.arrived} of {count} threads"


class Predicate:
    """What a thread waits for that is neither a barrier nor a warp operation."""

    __slots__ = ("holds", "reason")

    def __init__(self, holds: Callable[[], bool], reason: str | Callable[[], str]) -> None:
        self.holds = holds
        self.reason = reason

    def __str__(self) -> str:
        return self.reason if isinstance(self.reason, str) else self.reason()


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
