"""Tensor memory of a simulated block: what is in it, who may use it, and who touched it.

128 lanes of 512 columns of 32 bits. Everything that instructions touch is whole quarters of the
lanes (a warp's 32), so allocation, definedness and order are kept for each quarter and column: a
*cell*. An operation that touches cells is a :class:`Touch`; like an engine's access to shared
memory (``order.Access``) it is checked when it is issued, so that a wait or fence that is missing
is found in every schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import MissingFence, NotAwaited, OutOfBounds, TensorMemoryError, UnwrittenRead
from .order import Agent, Record, Seen, here, who

if TYPE_CHECKING:
    from .block import Block, Warp
    from .thread import Thread

LANES = 128
COLUMNS = 512
QUARTERS = 4


class Touch:
    """An operation that reads or writes cells.

    Attributes
    ----------
    what
        ``"mma"``, ``"cp"``, ``"ld"``, ``"st"`` or ``"dealloc"``.
    agent, number
        Who counts it, and as which number.
    seen, known
        What is ordered before it: as its thread's last fence leaves it, and without regard to
        fences.
    own
        Whether it is behind an operation of its own thread or warp, that "reads" or "writes".
    shape
        Of an mma: address and columns of its accumulators.
    issuer
        The thread that issued it, or the warp.
    """

    __slots__ = ("agent", "issuer", "known", "number", "own", "record", "seen", "shape", "what")

    def __init__(
        self,
        what: str,
        agent: Agent | None,
        number: int,
        thread: Thread,
        *,
        seen: Seen,
        known: Seen,
        own: Callable[[Touch, str], bool],
        issuer: Thread | Warp,
        shape: tuple[int, int] | None = None,
    ) -> None:
        self.what = what
        self.agent = agent
        self.number = number
        self.seen = seen
        self.known = known
        self.own = own
        self.issuer = issuer
        self.shape = shape
        self.record: Record = here(thread)

    def describe(self, block: Block) -> str:
        """``tcgen05.mma of thread (32, 0, 0) at file:line``."""
        return f"the tcgen05.{self.what} of {who(self.record, block)}"


class Allocation:
    """Columns that a warp has been given.

    `told`: lanes of the warp that have executed fence::before_thread_sync since, and their epochs.
    """

    def __init__(self, warp: Warp, base: int, columns: int) -> None:
        self.warp = warp
        self.base = base
        self.columns = columns
        self.told: dict[Thread, int] = {}


_WAITS = {
    "mma": "tcgen05.commit and a wait for its mbarrier",
    "cp": "tcgen05.commit and a wait for its mbarrier",
    "ld": "tcgen05.wait::ld, fence::before_thread_sync and a barrier or arrival",
    "st": "tcgen05.wait::st, fence::before_thread_sync and a barrier or arrival",
    "dealloc": "nothing",
}


class TensorMemory:
    """The tensor memory of a block.

    Attributes
    ----------
    data
        uint32 [128, 512].
    defined
        bool [4, 512]: whether a cell has been written since it was allocated.
    """

    def __init__(self, block: Block) -> None:
        self.block = block
        self.data = np.full((LANES, COLUMNS), 0xAAAAAAAA, np.uint32)
        self.defined = np.zeros((QUARTERS, COLUMNS), bool)
        self.owner: list[Allocation | None] = [None] * COLUMNS
        self.released = np.zeros(COLUMNS, bool)
        self.allocations: list[Allocation] = []
        self.relinquished = False
        self._touches: list[Touch | None] = [None]
        self._writer = np.zeros((QUARTERS, COLUMNS), np.int64)
        self._readers: dict[Agent, np.ndarray] = {}

    # Allocation ----------------------------------------------------------------------------------

    def free_base(self, columns: int) -> int | None:
        """The first column of a free aligned run, None where there is none.

        The last there is, so that a base that is forgotten shows.
        """
        for base in range(COLUMNS - columns, -1, -columns):
            if all(one is None for one in self.owner[base : base + columns]):
                return base
        return None

    def allocate(self, warp: Warp, base: int, columns: int) -> Allocation:
        """Give columns to a warp; what is in them is undefined."""
        made = Allocation(warp, base, columns)
        self.allocations.append(made)
        self.owner[base : base + columns] = [made] * columns
        part = slice(base, base + columns)
        self.released[part] = False
        self.defined[:, part] = False
        self.data[:, part] = 0xAAAAAAAA
        return made

    def release(self, one: Allocation) -> None:
        """Take columns back."""
        part = slice(one.base, one.base + one.columns)
        self.allocations.remove(one)
        self.owner[part] = [None] * one.columns
        self.released[part] = True
        self._writer[:, part] = 0
        for cells in self._readers.values():
            cells[:, part] = 0

    def check_end(self) -> None:
        """Raise where the block leaves with columns that it has not given back."""
        if self.allocations:
            left = ", ".join(f"{one.columns} from {one.base} on" for one in self.allocations)
            raise TensorMemoryError(
                f"tensor memory never released: the block ends and has not given back {left} "
                "(tcgen05.dealloc)"
            )

    def check_owned(self, thread: Thread, what: str, first: int, count: int) -> None:
        """Raise unless these columns are allocated, as `thread` may know."""
        if first < 0 or first + count > COLUMNS:
            raise OutOfBounds(
                f"{what}: out of bounds, columns {first} to {first + count - 1} of tensor memory, "
                f"which has {COLUMNS}",
                address=first,
                buffer="tensor memory",
            )
        for column in range(first, first + count):
            if self.owner[column] is None:
                when = "after its release" if self.released[column] else "before its allocation"
                raise TensorMemoryError(
                    f"{what}: column {column} of tensor memory is used {when}", address=column
                )
        if not thread.machine.checks.races:
            return
        view = _state_view(thread)
        for one in {id(found): found for found in self.owner[first : first + count]}.values():
            if one is None or one.warp is thread.warp:
                continue
            if not any(
                view.reached(lane.block, lane.linear, epoch) for lane, epoch in one.told.items()
            ):
                raise MissingFence(
                    f"missing fence: {what} uses columns that warp {one.warp.index} allocated, and "
                    "tcgen05.fence::before_thread_sync in that warp, a barrier, and "
                    "fence::after_thread_sync here do not stand between",
                    address=first,
                )

    # Order ---------------------------------------------------------------------------------------

    def read(self, touch: Touch | None, quarters: slice, first: int, count: int, name: str) -> None:
        """Note a read of cells; name says what they are to it."""
        part = quarters, slice(first, first + count)
        if touch is not None:
            self._order(touch, self._touched(self._writer[part]), "reads", "writes", name, first)
            if touch.agent is not None:
                if touch.agent not in self._readers:
                    self._readers[touch.agent] = np.zeros((QUARTERS, COLUMNS), np.int64)
                self._readers[touch.agent][part] = self._number(touch)
        if self.block.machine.checks.unwritten and not self.defined[part].all():
            hole = first + int(np.argwhere(~self.defined[part])[0][1])
            raise UnwrittenRead(
                f"unwritten read: {name}: column {hole} of tensor memory was never written",
                address=hole,
                buffer="tensor memory",
            )

    def write(
        self, touch: Touch | None, quarters: slice, first: int, count: int, name: str
    ) -> None:
        """Note a write of cells, which are defined from now on."""
        part = quarters, slice(first, first + count)
        if touch is not None:
            self._order(touch, self._touched(self._writer[part]), "writes", "writes", name, first)
            for cells in self._readers.values():
                self._order(touch, self._touched(cells[part]), "writes", "reads", name, first)
                cells[part] = 0
            self._writer[part] = self._number(touch)
        self.defined[part] = True

    def writers(self, quarters: slice, first: int, count: int) -> list[Touch]:
        """What has written these cells last."""
        return self._touched(self._writer[quarters, first : first + count])

    def _number(self, touch: Touch) -> int:
        if self._touches[-1] is not touch:
            self._touches.append(touch)
        return len(self._touches) - 1

    def _touched(self, cells: np.ndarray) -> list[Touch]:
        found = (self._touches[number] for number in np.unique(cells))
        return [touch for touch in found if touch is not None]

    def _order(
        self, touch: Touch, earlier: Iterable[Touch], does: str, did: str, name: str, first: int
    ) -> None:
        for one in earlier:
            if one is touch or touch.own(one, did):
                continue
            agent = one.agent
            if agent is None or touch.seen.reached(agent.block, agent.slot, one.number):
                continue
            where = f"the tcgen05.{touch.what} {does} columns from {first} on ({name})"
            if touch.known.reached(agent.block, agent.slot, one.number):
                raise MissingFence(
                    f"missing fence: {where}, which {one.describe(self.block)} {did}; that is "
                    "waited for, but tcgen05.fence::after_thread_sync does not stand behind the "
                    "wait",
                    address=first,
                )
            raise NotAwaited(
                f"not waited for: {where}, which {one.describe(self.block)} {did}, and nothing "
                f"orders the two ({_WAITS[one.what]} would)",
                address=first,
                buffer="tensor memory",
            )


def _state_view(thread: Thread) -> Seen:
    found: Seen = thread.memo()["tcgen05"].view
    return found


def tensor_memory(block: Block) -> TensorMemory:
    """The block's tensor memory; its end is checked when the block ends."""
    found: Any = block.state.get("tensor memory")
    if found is None:
        found = block.state["tensor memory"] = TensorMemory(block)
        block.state.setdefault("at end", []).append(found.check_end)
    made: TensorMemory = found
    return made
