"""tcgen05 on the simulated machine: allocation, fences, loads and stores.

Loads and stores move their values when they are issued, and may be looked at, or overwritten,
behind their wait only. Products and copies are in ``tcgen05_products``. Source: PTX ISA, tcgen05;
the layouts are described in ``nvfp4.ptx.tcgen05``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from .clusters import owner
from .errors import (
    InvalidOperand,
    Misaligned,
    NotAwaited,
    TensorMemoryError,
)
from .order import Agent, Seen, learn
from .tensor_memory import COLUMNS, Touch, tensor_memory

if TYPE_CHECKING:
    from .block import Block, Warp
    from .thread import Thread

_ALL = 0xFFFFFFFF
_EVERY = slice(0, 4)


class _Warp:
    """What a warp's loads and stores are counted by."""

    def __init__(self, thread: Thread) -> None:
        self.loads = Agent(thread.block)
        self.stores = Agent(thread.block)


class State:
    """What a thread has issued, waited for and fenced."""

    def __init__(self, thread: Thread) -> None:
        #: What it had seen at its last fence::after_thread_sync.
        self.view = Seen(thread.block, thread.block.nobody, {})
        self.agent = Agent(thread.block)
        table: dict[Warp, _Warp] = thread.block.state.setdefault("tcgen05 warps", {})
        if thread.warp not in table:
            table[thread.warp] = _Warp(thread)
        self.warp = table[thread.warp]
        self.loads = self.stores = 0


def state_of(thread: Thread) -> State:
    """The thread's state, on a machine that has tcgen05."""
    machine = thread.machine
    if machine.cc not in ((10, 0), (10, 3)) or not machine.arch.endswith("a"):
        raise UnsupportedError(
            f"tcgen05 exists on sm_100a and sm_103a only; the machine is {machine.arch}"
        )
    memo = thread.memo()
    if "tcgen05" not in memo:
        memo["tcgen05"] = State(thread)
    state: State = memo["tcgen05"]
    return state


def blocks_of(thread: Thread, blocks: int, name: str, alive: bool = True) -> list[Block]:
    """The blocks of an operation: the thread's, or the pair; one kind in a kernel."""
    block = thread.block
    if block.state.setdefault("cta_group", blocks) != blocks:
        raise TensorMemoryError(
            f"{name}: cta_group::{blocks} beside cta_group::{3 - blocks} in one kernel"
        )
    if blocks == 1:
        return [block]
    pair = block.cluster.blocks
    if len(pair) != 2:
        raise TensorMemoryError(
            f"{name}: a pair is a cluster of 2 blocks; this one has {len(pair)}"
        )
    return [owner(thread, one.shared.base, name) for one in pair] if alive else [*pair]


# Allocation --------------------------------------------------------------------------------------


def _whole_warp(
    thread: Thread, name: str, payload: Any, resolve: Callable[[list[Any]], Any]
) -> Any:
    """Meet all lanes of the warp, which must agree; `resolve` gives one result or one a lane."""

    def meet(payloads: dict[int, Any]) -> Any:
        if len(payloads) < 32:
            raise InvalidOperand(f"{name}: it takes 32 lanes; the warp has {len(payloads)}")
        made = resolve(list(payloads.values()))
        return made if isinstance(made, dict) else dict.fromkeys(payloads, made)

    return thread.collective(name, _ALL, payload, meet)


def _one(name: str, values: Sequence[Any], what: str) -> Any:
    first = values[0]
    if any(value != first for value in values):
        raise InvalidOperand(f"{name}: the lanes of the warp disagree about the {what}: {values}")
    return first


def _check_columns(name: str, columns: int) -> None:
    if columns not in (32, 64, 128, 256, 512):
        raise InvalidOperand(f"{name}: columns are 32, 64, 128, 256 or 512; got {columns}")


def tcgen05_alloc(thread: Thread, address: int, columns: int, blocks: int = 1) -> None:
    """Model of ``tcgen05.alloc``; of a pair: a warp in each, here for its own block."""
    state_of(thread)
    memory = tensor_memory(thread.block)
    name = f"tcgen05.alloc of {columns}"
    blocks_of(thread, blocks, name)
    _check_columns(name, columns)
    if address % 4:
        raise Misaligned(
            f"{name}: misaligned, the shared address {address:#x} is not a multiple of 4",
            address=address,
        )

    def resolve(addresses: list[int]) -> bool:
        if memory.relinquished:
            raise TensorMemoryError(f"{name}: behind tcgen05.relinquish_alloc_permit")
        if memory.allocations and memory.allocations[-1].columns < columns:
            raise TensorMemoryError(
                f"{name}: allocations of a block must not grow; the last one has "
                f"{memory.allocations[-1].columns} columns"
            )
        base = memory.free_base(columns)
        if base is None:
            return False
        memory.allocate(thread.warp, base, columns)
        thread.block.shared.store(_one(name, addresses, "address"), 4, base)
        return True

    while not _whole_warp(thread, name, address, resolve):
        thread.wait_until(
            lambda: memory.free_base(columns) is not None,
            f"{columns} free columns of tensor memory",
        )


def tcgen05_dealloc(thread: Thread, base: int, columns: int, blocks: int = 1) -> None:
    """Model of ``tcgen05.dealloc``."""
    state = state_of(thread)
    memory = tensor_memory(thread.block)
    name = f"tcgen05.dealloc of {columns}"
    blocks_of(thread, blocks, name, alive=False)
    _check_columns(name, columns)

    def resolve(bases: list[int]) -> None:
        start = _one(name, bases, "address")
        found = [one for one in memory.allocations if (one.base, one.columns) == (start, columns)]
        if not found:
            raise TensorMemoryError(
                f"{name} columns from {start} on: there is no such allocation", address=start
            )
        if thread.machine.checks.races:
            touch = Touch(
                "dealloc",
                None,
                0,
                thread,
                seen=now_of(thread),
                known=now_of(thread),
                own=_own_warp(state),
                issuer=thread.warp,
            )
            memory.write(touch, _EVERY, start, columns, "to give them back")
        memory.release(found[0])

    _whole_warp(thread, name, base, resolve)


def tcgen05_relinquish(thread: Thread, blocks: int = 1) -> None:
    """Model of ``tcgen05.relinquish_alloc_permit``."""
    state_of(thread)
    blocks_of(thread, blocks, "tcgen05.relinquish_alloc_permit")
    memory = tensor_memory(thread.block)

    def resolve(_: list[Any]) -> None:
        memory.relinquished = True

    _whole_warp(thread, "tcgen05.relinquish_alloc_permit", None, resolve)


# Fences ------------------------------------------------------------------------------------------


def tcgen05_fence_before(thread: Thread) -> None:
    """Model of ``tcgen05.fence::before_thread_sync``."""
    state = state_of(thread)
    learn(thread, state.warp.loads, state.loads)
    learn(thread, state.warp.stores, state.stores)
    for one in tensor_memory(thread.block).allocations:
        if one.warp is thread.warp:
            one.told.setdefault(thread, thread.clock)


def tcgen05_fence_after(thread: Thread) -> None:
    """Model of ``tcgen05.fence::after_thread_sync``."""
    state_of(thread).view = now_of(thread)


def now_of(thread: Thread) -> Seen:
    """What a thread has seen by now."""
    return Seen(thread.block, thread.seen, thread.foreign)


# Loads and stores --------------------------------------------------------------------------------


class Loaded(Sequence[Any]):
    """Columns of a thread's lane, which it may look at when it has waited for them."""

    __slots__ = ("_thread", "_values", "number")

    def __init__(self, thread: Thread, values: np.ndarray, number: int) -> None:
        self._thread = thread
        self._values = values
        self.number = number

    def values(self) -> tuple[Any, ...]:
        """All of them as float32."""
        if self.number > state_of(self._thread).loads:
            raise NotAwaited(
                "not waited for: what tcgen05.ld loads is used before tcgen05.wait::ld"
            )
        return tuple(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return self.values()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


def _own_warp(state: State) -> Callable[[Touch, str], bool]:
    """Which loads and stores of the same warp one is behind: those waited for, stores by stores."""
    warp = state.warp

    def own(one: Touch, did: str) -> bool:
        if one.agent is warp.loads:
            return one.number <= state.loads
        return one.agent is warp.stores and one.number <= state.stores

    return own


def _part(thread: Thread, name: str, address: int, count: int) -> int:
    """The first column of a warp's load or store, whose address must be in the warp's lanes."""
    if count not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise InvalidOperand(f"{name}: columns are 1, 2, 4... 128; got {count}")
    lane, column = address >> 16, address & 0xFFFF
    mine = 32 * (thread.warp.index % 4)
    if lane != mine:
        raise InvalidOperand(
            f"{name}: the address {address:#x} is in lane {lane}; warp {thread.warp.index} of its "
            f"block may touch lanes {mine} to {mine + 31} only",
            address=address,
        )
    if column + count > COLUMNS:
        tensor_memory(thread.block).check_owned(thread, name, column, count)
    return column


def _of_warp(thread: Thread, what: str, agent: Agent) -> Touch | None:
    if not thread.machine.checks.races:
        return None
    lanes = thread.warp.threads
    states = [state_of(lane) for lane in lanes]
    return Touch(
        what,
        agent,
        agent.issued,
        thread,
        seen=_least([state.view for state in states]),
        known=_least([now_of(lane) for lane in lanes]),
        own=_own_warp(min(states, key=lambda state: (state.loads, state.stores))),
        issuer=thread.warp,
    )


def _least(views: list[Seen]) -> Seen:
    """What all have seen."""
    first = views[0]
    seen = _lowest([view.seen for view in views])
    foreign = {
        block: _lowest([view.foreign[block] for view in views])
        for block in first.foreign
        if all(block in view.foreign for view in views)
    }
    return Seen(first.block, seen, foreign)


def _lowest(lists: list[list[int]]) -> list[int]:
    distinct = [*{id(one): one for one in lists}.values()]
    if len(distinct) == 1:
        return distinct[0]
    size = min(map(len, distinct))
    return list(map(min, *(one[:size] for one in distinct)))


def tcgen05_ld(thread: Thread, address: int, count: int) -> Loaded:
    """Model of ``tcgen05.ld.32x32b``."""
    name = f"tcgen05.ld.x{count}"
    state = state_of(thread)
    memory = tensor_memory(thread.block)

    def resolve(addresses: list[int]) -> dict[int, Any]:
        column = _part(thread, name, _one(name, addresses, "address"), count)
        quarter = thread.warp.index % 4
        state.warp.loads.issued += 1
        touch = _of_warp(thread, "ld", state.warp.loads)
        memory.check_owned(thread, name, column, count)
        memory.read(touch, slice(quarter, quarter + 1), column, count, "to load them")
        rows = memory.data[32 * quarter : 32 * quarter + 32, column : column + count].copy()
        return dict(enumerate(rows.view(np.float32)))

    values = _whole_warp(thread, name, address, resolve)
    return Loaded(thread, values, state.warp.loads.issued)


def tcgen05_wait_ld(thread: Thread, values: Any) -> Any:
    """Model of ``tcgen05.wait::ld``: the values."""
    state = state_of(thread)
    state.loads = state.warp.loads.issued
    return values.values() if isinstance(values, Loaded) else values


def tcgen05_st(thread: Thread, address: int, values: Any) -> None:
    """Model of ``tcgen05.st.32x32b``."""
    count = len(values)
    name = f"tcgen05.st.x{count}"
    state = state_of(thread)
    memory = tensor_memory(thread.block)

    def resolve(given: list[Any]) -> None:
        column = _part(thread, name, _one(name, [one[0] for one in given], "address"), count)
        quarter = thread.warp.index % 4
        state.warp.stores.issued += 1
        touch = _of_warp(thread, "st", state.warp.stores)
        memory.check_owned(thread, name, column, count)
        memory.write(touch, slice(quarter, quarter + 1), column, count, "to store to them")
        rows = np.array([one[1] for one in given], np.float32).view(np.uint32)
        memory.data[32 * quarter : 32 * quarter + 32, column : column + count] = rows

    _whole_warp(thread, name, (address, tuple(values)), resolve)


def tcgen05_wait_st(thread: Thread) -> None:
    """Model of ``tcgen05.wait::st``."""
    state = state_of(thread)
    state.stores = state.warp.stores.issued
