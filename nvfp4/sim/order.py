"""What is ordered before what: vector clocks of threads, and the shadow that finds data races.

Each thread counts epochs (`clock`) and knows of every thread of its block up to which epoch it has
seen it (`seen`, one list that all threads share which met in a barrier). An access is recorded with
its thread's epoch; another thread's access to the same bytes is ordered behind it if that thread
has seen the epoch, and a race otherwise, whichever of the two really came first in this run. So a
race is found in every interleaving, not only where it does harm.

What orders: barriers, ``syncwarp``, and a release and an acquire of the same :class:`Clock` (an
mbarrier, or an atomic operation behind a fence). Blocks are ordered only by the latter. What does
not: shuffles and votes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import DataRace
from .location import is_kernel_code, line_of

if TYPE_CHECKING:
    from types import CodeType

    from .block import Block
    from .thread import Thread

# One access: (thread, its epoch, code of the kernel, instruction in it, is it atomic).
Record = tuple[Any, int, Any, int, bool]


class Clock:
    """What a synchronisation object hands from those who release it to those who acquire it."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: dict[Block, list[int]] = {}

    def release(self, thread: Thread) -> None:
        """All that `thread` has done or seen is known to whoever acquires this later."""
        if not thread.machine.checks.races:
            return
        _merge(self.known, _knowledge(thread))
        thread.clock += 1

    def acquire(self, thread: Thread) -> None:
        """`thread` has seen what the releasing threads had done."""
        _learn(thread, self.known)


def _knowledge(thread: Thread) -> dict[Block, list[int]]:
    seen = thread.seen.copy()
    seen[thread.linear] = thread.clock
    return {**thread.foreign, thread.block: seen}


def _merge(into: dict[Block, list[int]], other: Mapping[Block, list[int]]) -> None:
    for block, clocks in other.items():
        mine = into.get(block)
        into[block] = clocks if mine is None else list(map(max, mine, clocks))


def _learn(thread: Thread, known: dict[Block, list[int]]) -> None:
    for block, clocks in known.items():
        if block is thread.block:
            thread.seen = list(map(max, thread.seen, clocks))
        else:
            # `foreign` is shared with the threads met in a barrier: never changed in place.
            mine = thread.foreign.get(block)
            merged = clocks if mine is None else list(map(max, mine, clocks))
            thread.foreign = {**thread.foreign, block: merged}


def meet(threads: Iterable[Thread], acquiring: Iterable[Thread] | None = None) -> None:
    """Order all that `threads` did before all that they, or the `acquiring`, do from now on."""
    threads = list(threads)
    views = {id(thread.seen): thread.seen for thread in threads}
    joined = list(map(max, *views.values())) if len(views) > 1 else threads[0].seen.copy()
    abroad = {id(thread.foreign): thread.foreign for thread in threads if thread.foreign}
    foreign: dict[Block, list[int]] = {}
    if abroad:
        for known in abroad.values():
            _merge(foreign, known)
    for thread in threads:
        joined[thread.linear] = thread.clock
        thread.clock += 1
    for thread in threads if acquiring is None else acquiring:
        thread.seen = joined
        if abroad:
            thread.foreign = foreign


def fence(thread: Thread) -> None:
    """Let the thread's next atomic stores publish what it has done and seen (``membar``)."""
    if not thread.machine.checks.races:
        return
    thread.published = _knowledge(thread)
    thread.clock += 1


def _ordered(record: Record, thread: Thread) -> bool:
    other = record[0]
    if other.block is thread.block:
        return bool(record[1] <= thread.seen[other.linear])
    known = thread.foreign.get(other.block)
    return known is not None and record[1] <= known[other.linear]


def _here(thread: Thread, atomic: bool) -> Record:
    frame = sys._getframe(2)
    while not is_kernel_code(frame.f_code):
        back = frame.f_back
        if back is None:
            break
        frame = back
    return (thread, thread.clock, frame.f_code, frame.f_lasti, atomic)


class Shadow:
    """Last writer and last readers of each cell of a memory.

    A cell is a byte of shared memory, an element of a global buffer. The readers of a cell are
    None, a record, or, when several threads that are not ordered have read it, a dict: group of
    threads -> the last two records of different threads in it. A group is a warp in shared memory,
    a block in global memory, where no more than four are kept. (Two of a group and four blocks
    suffice: a writer differs from at least one, and is rarely ordered behind some only.)
    """

    __slots__ = ("_address", "_by_block", "_clocks", "_name", "_readers", "_writers")

    def __init__(
        self,
        cells: int,
        name: Callable[[int], str],
        address: Callable[[int], int],
        *,
        by_block: bool,
    ) -> None:
        """`name` and `address` say what a cell is and where, for messages."""
        self._name = name
        self._address = address
        self._writers: list[Record | None] = [None] * cells
        self._readers: list[Any] = [None] * cells
        self._clocks: dict[int, Clock] = {}
        self._by_block = by_block

    # Reads ---------------------------------------------------------------------------------------

    def read(self, thread: Thread, start: int, stop: int, atomic: bool = False) -> None:
        """Note a read of cells start..stop-1; an unordered write of another thread raises."""
        record = _here(thread, atomic)
        writers = self._writers[start:stop]
        first = writers[0]
        if writers.count(first) == len(writers):
            if first is not None:
                self._check(first, record, start, "reads", "wrote")
        else:
            for offset, writer in enumerate(writers):
                if writer is not None:
                    self._check(writer, record, start + offset, "reads", "wrote")
        readers = self._readers
        for cell in range(start, stop):
            previous = readers[cell]
            if previous is None:
                readers[cell] = record
            elif type(previous) is tuple:
                if previous[0] is thread or _ordered(previous, thread):
                    readers[cell] = record
                else:
                    several: dict[Any, Any] = {self._group(previous[0]): (previous, None)}
                    self._add(several, record)
                    readers[cell] = several
            else:
                self._add(previous, record)

    def _group(self, thread: Thread) -> Any:
        return thread.block if self._by_block else thread.warp

    def _add(self, several: dict[Any, Any], record: Record) -> None:
        group = self._group(record[0])
        pair = several.get(group)
        if pair is None:
            if not self._by_block or len(several) < 4:
                several[group] = (record, None)
        elif pair[0][0] is record[0]:
            several[group] = (record, pair[1])
        else:
            several[group] = (record, pair[0])

    # Writes --------------------------------------------------------------------------------------

    def write(
        self, thread: Thread, start: int, stop: int, atomic: bool = False, silent: bool = False
    ) -> None:
        """Note a write of cells start..stop-1; an unordered access of another thread raises.

        `silent` says that the write stores the value that is there. Two writes of one value are not
        reported: many threads that set the same flag are common, and harmless.
        """
        record = _here(thread, atomic)
        writers = self._writers[start:stop]
        readers = self._readers[start:stop]
        count = len(writers)
        for offset in (0,) if writers.count(writers[0]) == count else range(count):
            writer = writers[offset]
            if writer is not None and not silent:
                self._check(writer, record, start + offset, "writes", "wrote")
        for offset in (0,) if readers.count(readers[0]) == count else range(count):
            reader = readers[offset]
            if reader is None:
                continue
            if type(reader) is tuple:
                self._check(reader, record, start + offset, "writes", "read")
            else:
                for pair in reader.values():
                    for one in pair:
                        if one is not None:
                            self._check(one, record, start + offset, "writes", "read")
        self._writers[start:stop] = [record] * count
        self._readers[start:stop] = [None] * count

    def _check(self, earlier: Record, record: Record, cell: int, does: str, did: str) -> None:
        thread = record[0]
        if earlier[0] is thread or (earlier[4] and record[4]) or _ordered(earlier, thread):
            return
        other = earlier[0]
        code: CodeType = earlier[2]
        how = "a barrier"
        if other.block is not thread.block:
            how = "an atomic operation behind a fence"
        elif other.warp is thread.warp:
            how = "a barrier or syncwarp"
        block = "" if other.block is thread.block else f" of block {tuple(other.block.block_index)}"
        raise DataRace(
            f"data race: {self._name(cell)}: this thread {does} what thread "
            f"{tuple(other.thread_index)}{block} {did} at "
            f"{code.co_filename}:{line_of(code, earlier[3])}, "
            f"and nothing orders the two ({how} would)",
            address=self._address(cell),
        )

    # Atomic operations ---------------------------------------------------------------------------

    def synchronise(self, thread: Thread, cell: int, *, reads: bool, writes: bool) -> None:
        """Hand on what threads published by a fence before an atomic operation on this cell."""
        clock = self._clocks.get(cell)
        if clock is not None and reads:
            clock.acquire(thread)
        if writes and thread.published is not None:
            if clock is None:
                clock = self._clocks[cell] = Clock()
            _merge(clock.known, thread.published)
