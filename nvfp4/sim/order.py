"""What is ordered before what: vector clocks of threads, and the shadow that finds data races.

Each thread counts epochs (`clock`) and knows of every thread of its block up to which epoch it has
seen it (`seen`, one list that all threads share which met in a barrier). An access is recorded with
its thread's epoch; another thread's access to the same bytes is ordered behind it if that thread
has seen the epoch, and a race otherwise, whichever of the two really came first in this run. So a
race is found in every interleaving, not only where it does harm.

What orders: barriers, ``syncwarp``, and a release and an acquire of the same :class:`Clock` (an
mbarrier, or an atomic operation behind a fence). Blocks are ordered only by the latter. What does
not: shuffles and votes.

An engine's operation (a copy, a matrix product) is an :class:`Access`, which stands where a thread
stands for a thread's own accesses. It happens behind all that its issuer knew when it was issued,
and before what a thread does that has waited for it: engines count their operations, too, in places
of the lists behind those of the threads (:class:`Agent`). Lists are therefore of different lengths;
what is missing counts as 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .errors import DataRace, MissingFence, NotAwaited
from .location import is_kernel_code, line_of

if TYPE_CHECKING:
    from types import CodeType

    from .block import Block
    from .thread import Thread

# One access: (thread or Access, its epoch, code of the kernel, instruction in it, is it atomic).
Record = tuple[Any, int, Any, int, bool]


class Agent:
    """A counter of operations in the vector clocks: of an mbarrier, a thread's copies, a warp."""

    __slots__ = ("block", "issued", "slot")

    def __init__(self, block: Block) -> None:
        self.block = block
        count: int = len(block.threads)
        self.slot: int = block.state.setdefault("slots", count)
        block.state["slots"] += 1
        self.issued = 0


class Access:
    """An operation of an engine, as one that reads and writes memory.

    Attributes
    ----------
    name, wait
        What it is, and what one must do to be ordered behind it, for messages.
    linear, clock
        The places of its agents, each of which counts it as this number.
    seen, foreign
        What is known to be done before it.
    issuers
        The threads that issued it together, which know what is before it.
    home
        The block whose clocks count it.
    generic
        Whether it is of the ordinary proxy (cp.async).
    """

    __slots__ = (
        "block",
        "clock",
        "foreign",
        "generic",
        "home",
        "issuers",
        "linear",
        "name",
        "seen",
        "wait",
        "warp",
    )

    def __init__(
        self,
        name: str,
        wait: str,
        issuers: list[Thread],
        agents: list[Agent],
        number: int,
        *,
        generic: bool = False,
    ) -> None:
        first = issuers[0]
        self.name = name
        self.wait = wait
        self.block = first.block
        self.home = agents[0].block
        #: Its group among the readers of a cell.
        self.warp = agents[0]
        self.linear = tuple(agent.slot for agent in agents)
        self.clock = number
        self.issuers = issuers
        self.generic = generic
        if len(issuers) == 1:
            self.seen: list[int] = first.seen.copy()
            self.seen[first.linear] = first.clock
        else:
            # Only what all of them have seen is before it.
            views = [*{id(thread.seen): thread.seen for thread in issuers}.values()]
            size = max(map(len, views))
            self.seen = list(map(min, *(_padded(view, size) for view in (*views, views[0]))))
        self.foreign = first.foreign


def learn(thread: Thread, agent: Agent, number: int) -> None:
    """`thread` has waited for an agent's operations up to this number."""
    seen = _padded(thread.seen, agent.slot + 1)
    if seen[agent.slot] < number:
        seen = seen.copy()
        seen[agent.slot] = number
        thread.seen = seen


def _padded(view: list[int], size: int) -> list[int]:
    return view if len(view) >= size else view + [0] * (size - len(view))


def _upper(one: list[int], other: list[int]) -> list[int]:
    if len(one) != len(other):
        size = max(len(one), len(other))
        one, other = _padded(one, size), _padded(other, size)
    return list(map(max, one, other))


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

    def add(self, block: Block, agent: Agent, number: int) -> None:
        """An agent's operations up to this number are known to whoever acquires this later."""
        _merge(self.known, {block: [0] * agent.slot + [number]})

    def hand_on(self, view: Seen) -> None:
        """What a thread had seen is known to whoever acquires this later."""
        _merge(self.known, {**view.foreign, view.block: view.seen})

    def copy(self) -> Clock:
        """Return one that knows the same, and what is released to this from now on no more."""
        made = Clock()
        made.known = self.known.copy()
        return made


def _knowledge(thread: Thread) -> dict[Block, list[int]]:
    seen = thread.seen.copy()
    seen[thread.linear] = thread.clock
    return {**thread.foreign, thread.block: seen}


def _merge(into: dict[Block, list[int]], other: Mapping[Block, list[int]]) -> None:
    for block, clocks in other.items():
        mine = into.get(block)
        into[block] = clocks if mine is None else _upper(mine, clocks)


def _learn(thread: Thread, known: dict[Block, list[int]]) -> None:
    for block, clocks in known.items():
        if block is thread.block:
            thread.seen = _upper(thread.seen, clocks)
        else:
            # `foreign` is shared with the threads met in a barrier: never changed in place.
            mine = thread.foreign.get(block)
            merged = clocks if mine is None else _upper(mine, clocks)
            thread.foreign = {**thread.foreign, block: merged}


def meet(threads: Iterable[Thread], acquiring: Iterable[Thread] | None = None) -> None:
    """Order all that `threads` did before all that they, or the `acquiring`, do from now on."""
    threads = list(threads)
    views = {id(thread.seen): thread.seen for thread in threads}
    if len(views) > 1:
        size = max(map(len, views.values()))
        joined = list(map(max, *(_padded(view, size) for view in views.values())))
    else:
        joined = threads[0].seen.copy()
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


def ordered(record: Record | tuple[Any, int], thread: Thread | Access | View) -> bool:
    """Whether an access is before what `thread` does now."""
    other = record[0]
    home = other.home
    known: Any = thread.seen if home is thread.block else thread.foreign.get(home)
    if known is None:
        return False
    place = other.linear
    if type(place) is int:
        return bool(record[1] <= known[place])
    return all(slot < len(known) and record[1] <= known[slot] for slot in place)


_ordered = ordered


class Seen:
    """What a thread had seen at some time, without what it did itself."""

    __slots__ = ("block", "foreign", "seen")

    def __init__(self, block: Block, seen: list[int], foreign: Mapping[Block, list[int]]) -> None:
        # Neither is changed in place: a thread that learns something gets new ones.
        self.block = block
        self.seen = seen
        self.foreign = foreign

    def reached(self, block: Block, slot: int, number: int) -> bool:
        """Whether it has come to this number in a place of a block's clocks."""
        view = self.seen if block is self.block else self.foreign.get(block)
        return view is not None and slot < len(view) and view[slot] >= number


class View:
    """What a thread had seen at some time."""

    __slots__ = ("block", "foreign", "seen")

    def __init__(self, thread: Thread) -> None:
        self.block = thread.block
        self.seen: list[int] = thread.seen.copy()
        self.seen[thread.linear] = thread.clock
        self.foreign = thread.foreign


# Proxies -----------------------------------------------------------------------------------------


def proxy_fence(thread: Thread, *kinds: str) -> None:
    """Let engines see what `thread` has done and seen, in each of these kinds of memory."""
    if not thread.machine.checks.races:
        return
    made = (thread.clock, View(thread))
    thread.clock += 1
    fences = thread.memo().setdefault("proxy fences", {})
    for kind in kinds:
        fences.setdefault(kind, []).append(made)
        thread.block.state.setdefault("fencing", {})[thread] = None


def _fences(thread: Any, kind: str) -> list[tuple[int, View]]:
    state = getattr(thread, "state", None)
    return [] if state is None else state.get("proxy fences", {}).get(kind, [])


def fenced(record: Record | tuple[Any, int], access: Access, kind: str) -> bool:
    """Whether a fence of this kind stands behind what is recorded, and before `access`."""
    first = record[0]
    writers = first.issuers if isinstance(first, Access) else [first]
    issuers = access.issuers
    candidates = dict.fromkeys([*writers, *issuers[:1]])
    candidates |= dict.fromkeys(access.block.state.get("fencing", ()))
    for thread in candidates:
        for epoch, view in reversed(_fences(thread, kind)):
            if not ordered(record, view):
                break  # those before it know less
            if ordered((thread, epoch), access):
                return True
    # Or each of those who issue it together has executed its own.
    last = [_fences(thread, kind)[-1:] for thread in issuers]
    return all(made and ordered(record, made[0][1]) for made in last)


def here(thread: Thread | Access, atomic: bool = False) -> Record:
    """An access of `thread` at the line of the kernel that runs."""
    frame = sys._getframe(2)
    while not is_kernel_code(frame.f_code):
        back = frame.f_back
        if back is None:
            break
        frame = back
    return (thread, thread.clock, frame.f_code, frame.f_lasti, atomic)


def who(record: Record, block: Block) -> str:
    """The thread or engine of an access, and its line, for messages."""
    other, code = record[0], record[2]
    where = f"{code.co_filename}:{line_of(code, record[3])}"
    if isinstance(other, Access):
        return f"the {other.name} issued at {where}"
    foreign = "" if other.block is block else f" of block {tuple(other.block.block_index)}"
    return f"thread {tuple(other.thread_index)}{foreign} at {where}"


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

    def read(self, thread: Thread | Access, start: int, stop: int, atomic: bool = False) -> None:
        """Note a read of cells start..stop-1; an unordered write of another thread raises."""
        record = here(thread, atomic)
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
        present = readers[start:stop]
        only = present[0]
        if present.count(only) == len(present) and (
            only is None or (type(only) is tuple and (only[0] is thread or _ordered(only, thread)))
        ):
            readers[start:stop] = [record] * len(present)
            return
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

    def _group(self, thread: Thread | Access) -> Any:
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

    def readers(self, start: int, stop: int) -> Iterator[Record]:
        """The reads of cells start..stop-1 since they were written, as far as they are kept."""
        for reader in self._readers[start:stop]:
            if type(reader) is tuple:
                yield reader
            elif reader is not None:
                yield from (one for pair in reader.values() for one in pair if one is not None)

    # Writes --------------------------------------------------------------------------------------

    def write(
        self,
        thread: Thread | Access,
        start: int,
        stop: int,
        atomic: bool = False,
        silent: bool = False,
    ) -> None:
        """Note a write of cells start..stop-1; an unordered access of another thread raises.

        `silent` says that the write stores the value that is there. Two writes of one value are not
        reported: many threads that set the same flag are common, and harmless.
        """
        record = here(thread, atomic)
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

    def check_proxy(self, access: Access, start: int, stop: int, kind: str) -> None:
        """Raise where a thread's write of these cells has no fence before an engine's access."""
        writers = self._writers[start:stop]
        if access.generic or writers.count(None) == len(writers):
            return
        known: dict[tuple[int, int], bool] = {}
        for offset, writer in enumerate(writers):
            if writer is None or getattr(writer[0], "generic", True) is False:
                continue
            key = id(writer[0]), writer[1]
            if key not in known:
                known[key] = fenced(writer, access, kind)
            if not known[key]:
                writing = who(writer, access.block)
                raise MissingFence(
                    f"missing fence: the {access.name} touches {self._name(start + offset)}, which "
                    f"{writing} wrote by the ordinary proxy, and no fence.proxy.async of {kind} "
                    "memory stands between the two",
                    address=self._address(start + offset),
                )

    def _check(self, earlier: Record, record: Record, cell: int, does: str, did: str) -> None:
        thread = record[0]
        if earlier[0] is thread or (earlier[4] and record[4]) or _ordered(earlier, thread):
            return
        other = earlier[0]
        code: CodeType = earlier[2]
        if isinstance(other, Access):
            me = f"the {thread.name}" if isinstance(thread, Access) else "this thread"
            verb = "reads" if did == "read" else "writes"
            raise NotAwaited(
                f"not waited for: {self._name(cell)}: {me} {does} what "
                f"{who(earlier, thread.block)} {verb}, and nothing orders the two "
                f"({other.wait} would)",
                address=self._address(cell),
            )
        if isinstance(thread, Access):
            raise DataRace(
                f"data race: {self._name(cell)}: the {thread.name} {does} what "
                f"{who(earlier, thread.block)} {did}, and nothing orders the two (a barrier "
                "before it is issued would)",
                address=self._address(cell),
            )
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
