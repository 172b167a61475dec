"""tcgen05 on the simulated machine: products and copies that run later, loads, stores, commits.

What a product or copy reads and writes is checked when it is issued; it is computed when the
schedule picks it, the operations of one thread in order. Loads and stores move their values when
they are issued, and may be looked at, or overwritten, behind their wait only. Source: PTX ISA,
tcgen05; the layouts are described in ``nvfp4.ptx.tcgen05``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from ..golden.casts import decode_e2m1, decode_e4m3, decode_e5m2, decode_e8m0
from .clusters import in_block, members, owner
from .copies import joined
from .errors import (
    Finding,
    InvalidDescriptor,
    InvalidOperand,
    Misaligned,
    MissingFence,
    NotAwaited,
    TensorMemoryError,
)
from .matrices import multiply_add
from .mbarriers import find_for_engine
from .order import Access, Agent, Seen, learn
from .tensor_memory import COLUMNS, LANES, TensorMemory, Touch, tensor_memory

if TYPE_CHECKING:
    from .block import Block, Warp
    from .thread import Thread

_ALL = 0xFFFFFFFF
_EVERY = slice(0, 4)
_BYTES = np.arange(256, dtype=np.uint8)
#: Element or scale type -> the value of each byte, float64; of e2m1: of each of a byte's codes.
_VALUES = {
    "e4m3": decode_e4m3(_BYTES).astype(np.float64),
    "e5m2": decode_e5m2(_BYTES).astype(np.float64),
    "e2m1": decode_e2m1(np.stack([_BYTES & 15, _BYTES >> 4], 1)).astype(np.float64),
    "ue8m0": decode_e8m0(_BYTES).astype(np.float64),
    "ue4m3": decode_e4m3(_BYTES & 0x7F).astype(np.float64),
}


class _Warp:
    """What a warp's loads and stores are counted by."""

    def __init__(self, thread: Thread) -> None:
        self.loads = Agent(thread.block)
        self.stores = Agent(thread.block)


class _State:
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


def _state(thread: Thread) -> _State:
    machine = thread.machine
    if machine.cc not in ((10, 0), (10, 3)) or not machine.arch.endswith("a"):
        raise UnsupportedError(
            f"tcgen05 exists on sm_100a and sm_103a only; the machine is {machine.arch}"
        )
    memo = thread.memo()
    if "tcgen05" not in memo:
        memo["tcgen05"] = _State(thread)
    state: _State = memo["tcgen05"]
    return state


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
    _state(thread)
    memory = tensor_memory(thread.block)
    name = f"tcgen05.alloc of {columns}"
    _group(thread, blocks, name)
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
    state = _state(thread)
    memory = tensor_memory(thread.block)
    name = f"tcgen05.dealloc of {columns}"
    _group(thread, blocks, name, alive=False)
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
                seen=_now(thread),
                known=_now(thread),
                own=_own_warp(state),
                issuer=thread.warp,
            )
            memory.write(touch, _EVERY, start, columns, "to give them back")
        memory.release(found[0])

    _whole_warp(thread, name, base, resolve)


def tcgen05_relinquish(thread: Thread, blocks: int = 1) -> None:
    """Model of ``tcgen05.relinquish_alloc_permit``."""
    _state(thread)
    _group(thread, blocks, "tcgen05.relinquish_alloc_permit")
    memory = tensor_memory(thread.block)

    def resolve(_: list[Any]) -> None:
        memory.relinquished = True

    _whole_warp(thread, "tcgen05.relinquish_alloc_permit", None, resolve)


# Fences ------------------------------------------------------------------------------------------


def tcgen05_fence_before(thread: Thread) -> None:
    """Model of ``tcgen05.fence::before_thread_sync``."""
    state = _state(thread)
    learn(thread, state.warp.loads, state.loads)
    learn(thread, state.warp.stores, state.stores)
    for one in tensor_memory(thread.block).allocations:
        if one.warp is thread.warp:
            one.told.setdefault(thread, thread.clock)


def tcgen05_fence_after(thread: Thread) -> None:
    """Model of ``tcgen05.fence::after_thread_sync``."""
    _state(thread).view = _now(thread)


def _now(thread: Thread) -> Seen:
    return Seen(thread.block, thread.seen, thread.foreign)


# Products and copies -----------------------------------------------------------------------------


def _column(name: str, which: str, address: int, lanes: int = 0xFFFF) -> int:
    """The column of an address in lane 0; `lanes`: the bits of the lane that count."""
    if address >> 16 & lanes:
        raise InvalidOperand(
            f"{name}: the address {address:#x} of {which} is in lane {address >> 16 & lanes}, "
            "not 0",
            address=address,
        )
    return address & 0xFFFF


def _descriptor(name: str, which: str, bits: int) -> Any:
    from ..ptx.tcgen05_descriptors import decode_operand

    try:
        return decode_operand(bits)
    except ValueError as error:
        raise InvalidDescriptor(
            f"{name}: the descriptor of {which}, {bits & (1 << 64) - 1:#018x}: {error}"
        ) from error


def _ordered_of_issuer(
    agent: Agent, what: str, shape: tuple[int, int] | None
) -> Callable[[Touch, str], bool]:
    """Which operations of the same thread one is behind without a wait.

    Products on the same accumulators, copies before products, copies before copies. And a copy
    behind the products that read its target: the manual does not say so, all known kernels do it.
    """

    def own(one: Touch, did: str) -> bool:
        if one.agent is not agent:
            return False
        if what == "mma":
            return one.what == "cp" or one.shape == shape
        return one.what == "cp" or did == "reads"

    return own


def _begin(
    thread: Thread, what: str, name: str, shape: tuple[int, int] | None = None
) -> tuple[Touch | None, Access | None]:
    """An operation's part in the order of things: in tensor memory, and in shared memory."""
    state = _state(thread)
    agent = state.agent
    agent.issued += 1
    if not thread.machine.checks.races:
        return None, None
    own = _ordered_of_issuer(agent, what, shape)
    touch = Touch(
        what,
        agent,
        agent.issued,
        thread,
        seen=state.view,
        known=_now(thread),
        own=own,
        issuer=thread,
        shape=shape,
    )
    wait = "tcgen05.commit and a wait for its mbarrier"
    return touch, Access(name, wait, [thread], [agent], agent.issued)


def _read_shared(
    thread: Thread, block: Block, access: Access | None, pieces: list[tuple[int, int]]
) -> None:
    """Check that an operation may read these bytes of a block; fences count."""
    shared = block.shared
    if access is None:
        for start, nbytes in pieces:
            shared.begin_read(None, start, nbytes)
        return
    known = access.seen, access.foreign
    view = _state(thread).view
    fenced = view.seen.copy()
    fenced[thread.linear] = thread.clock
    access.seen, access.foreign = fenced, view.foreign
    try:
        for start, nbytes in pieces:
            shared.begin_read(access, start, nbytes)
    except (NotAwaited, MissingFence) as error:
        access.seen, access.foreign = known
        try:
            shared.begin_read(access, start, nbytes)
        except Finding:
            raise error from None
        raise MissingFence(
            f"missing fence: the {access.name} reads shared memory from {start:#x} on, which has "
            "been waited for, but tcgen05.fence::after_thread_sync does not stand behind the wait",
            address=start,
        ) from error


def _issue(thread: Thread, name: str, complete: Callable[[], None]) -> None:
    block = thread.block

    def checked() -> None:
        if not all(one.live for one in block.cluster.blocks):
            raise Finding(
                f"the {name} is still in flight when its block, {tuple(block.block_index)}, or one "
                "of its cluster has left the kernel"
            )
        complete()

    engine = f"tensor core, thread {thread.linear} of block {tuple(block.block_index)}"
    thread.machine.issue(name, checked, engine=engine)
    thread.spin()


def _group(thread: Thread, blocks: int, name: str, alive: bool = True) -> list[Block]:
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


def tcgen05_cp(thread: Thread, target: int, descriptor: int, blocks: int = 1) -> None:
    """Model of ``tcgen05.cp.32x128b.warpx4``; of a pair: in both, each from its own memory."""
    name = "tcgen05.cp"
    group = _group(thread, blocks, name)
    touch, access = _begin(thread, "cp", name)
    column = _column(name, "its target", target)
    source = _descriptor(name, "its source", descriptor)
    if source.swizzle:
        raise InvalidDescriptor(
            f"{name}: the descriptor of its source has a swizzle of {source.swizzle} bytes; tiles "
            "of scales have none"
        )
    rows = source.chunks(32)[:, 0]
    for block in group:
        memory = tensor_memory(block)
        memory.check_owned(thread, name, column, 4)
        mine = in_block(rows, block)
        _read_shared(thread, block, access, joined((int(row), 16) for row in mine))
        memory.write(touch, _EVERY, column, 4, "scale factors")

    def complete() -> None:
        for block in group:
            shared = block.shared
            places = in_block(rows, block) - shared.base
            words = np.frombuffer(shared.data, np.uint8)[places[:, None] + np.arange(16)]
            data = tensor_memory(block).data
            data[:, column : column + 4] = np.tile(words.view("<u4"), (4, 1))

    _issue(thread, name, complete)


def tcgen05_mma(
    thread: Thread,
    kind: str,
    block: int,
    d: int,
    a: int,
    b: int,
    product: int,
    a_scales: int,
    b_scales: int,
    accumulate: Any,
    blocks: int = 1,
) -> None:
    """Model of ``tcgen05.mma`` with block scales.

    Of a pair: each block has 128 rows of A and of the accumulators, half of the rows of B, and the
    scales of its rows of A and of all of B.
    """
    from ..ptx.tcgen05_descriptors import decode_product

    name = f"tcgen05.mma {kind}"
    _state(thread)
    group = _group(thread, blocks, name)
    try:
        what = decode_product(product, kind, block, LANES * blocks)
    except ValueError as error:
        raise InvalidDescriptor(
            f"{name}: the instruction descriptor {product:#010x}: {error}"
        ) from error
    for element in (what.a, what.b):
        if element not in _VALUES:
            raise UnsupportedError(f"{name}: the simulated machine has no {element}")
    columns = what.columns
    first = _column(name, "the accumulators", d)
    touch, access = _begin(thread, "mma", name, (first, columns))
    chunks_a = _chunks(name, "A", a, LANES)
    chunks_b = _chunks(name, "B", b, columns // blocks)
    # Bits 31:30 of an address of scales do not count.
    at_a = _column(name, "scales", a_scales, 0x3FFF)
    at_b = _column(name, "scales", b_scales, 0x3FFF)
    for one in group:
        memory = tensor_memory(one)
        memory.check_owned(thread, f"{name}: its accumulators", first, columns)
        _scales(thread, memory, touch, name, "A", at_a, 4)
        _scales(thread, memory, touch, name, "B", at_b, -(-columns // 32))
        for chunks, element in ((chunks_a, what.a), (chunks_b, what.b)):
            used = 8 if kind == "mxf8f6f4" and element == "e2m1" else 16
            places = in_block(chunks.ravel(), one)
            _read_shared(thread, one, access, joined((int(place), used) for place in places))
        if accumulate:
            memory.read(touch, _EVERY, first, columns, "accumulators that a product is added to")
        memory.write(touch, _EVERY, first, columns, "accumulators")

    def complete() -> None:
        right = np.concatenate([_operand(one, chunks_b, what.b, kind) for one in group])
        for one in group:
            memory = tensor_memory(one)
            left = _operand(one, chunks_a, what.a, kind)
            with np.errstate(all="ignore"):
                left = _scaled(left, _scale_bytes(memory, name, at_a, LANES), what.a_id, what)
                scales = _scale_bytes(memory, name, at_b, columns)
                scaled = _scaled(right, scales, what.b_id, what)
            part = memory.data[:, first : first + columns]
            given = np.zeros(part.shape)
            if accumulate:
                given = np.ascontiguousarray(part).view(np.float32).astype(np.float64)
            part[:] = multiply_add(left, scaled, given).view(np.uint32)

    depth = 32 if kind == "mxf8f6f4" else 64
    _issue(thread, f"{name} {LANES * blocks}x{columns}x{depth}", complete)


def _chunks(name: str, which: str, bits: int, rows: int) -> np.ndarray:
    found = _descriptor(name, which, bits)
    try:
        chunks: np.ndarray = found.chunks(rows)
    except ValueError as error:
        raise InvalidDescriptor(
            f"{name}: the descriptor of {which}, {bits & (1 << 64) - 1:#018x}: {error}"
        ) from error
    return chunks


def _scales(
    thread: Thread,
    memory: TensorMemory,
    touch: Touch | None,
    name: str,
    which: str,
    column: int,
    count: int,
) -> None:
    """Check that scales are in place."""
    if column % 2:
        raise InvalidOperand(
            f"{name}: the scale factors of {which} are at column {column}; whole tiles, or halves, "
            "begin at even ones",
            address=column,
        )
    memory.check_owned(thread, f"{name}: the scale factors of {which}", column, count)
    for writer in memory.writers(_EVERY, column, count):
        if writer.what == "mma":
            raise TensorMemoryError(
                f"{name}: scale factors not in place: columns {column} to {column + count - 1}, "
                f"scales of {which}, hold accumulators of {writer.describe(thread.block)}",
                address=column,
            )
    memory.read(touch, _EVERY, column, count, f"scale factors of {which}, not in place")


def _operand(block: Block, chunks: np.ndarray, element: str, kind: str) -> np.ndarray:
    """The values of a matrix's 32 bytes of each row, float64."""
    shared = block.shared
    places = (in_block(chunks, block) - shared.base)[:, :, None] + np.arange(16)
    data = np.frombuffer(shared.data, np.uint8)[places]
    if element == "e2m1":
        data = data[:, :, :8] if kind == "mxf8f6f4" else data
    return _VALUES[element][data.reshape(len(chunks), -1)].reshape(len(chunks), -1)


def _scale_bytes(memory: TensorMemory, name: str, column: int, rows: int) -> np.ndarray:
    """The scale words of rows, as bytes [rows, 4]; all four quarters must hold the same."""
    count = -(-rows // 32)
    words = memory.data[:, column : column + count].reshape(4, 32, count)
    if (words != words[0]).any():
        raise TensorMemoryError(
            f"{name}: the scale factors from column {column} on differ between the quarters of the "
            "lanes: each must hold them all",
            address=column,
        )
    return np.ascontiguousarray(words[0].T).view(np.uint8).reshape(32 * count, 4)[:rows]


def _scaled(values: np.ndarray, words: np.ndarray, place: int, what: Any) -> np.ndarray:
    scales = _VALUES[what.scale][words[:, place : place + what.scales]]
    made: np.ndarray = values * np.repeat(scales, what.block, axis=1)
    return made


def tcgen05_commit(thread: Thread, address: int, mask: int = 0) -> None:
    """Model of ``tcgen05.commit``; of a pair, `mask` says to which blocks' mbarriers."""
    name = "tcgen05.commit"
    state = _state(thread)
    _group(thread, 2 if mask else 1, name)
    where = members(thread, mask, name) if mask else [thread.block]
    barriers = [find_for_engine(thread, in_block(address, block), name, block) for block in where]
    agent, number, view = state.agent, state.agent.issued, state.view

    def complete() -> None:
        for barrier in barriers:
            # What the operations were behind is before their end, too.
            barrier.clock.hand_on(view)
            barrier.clock.add(agent.block, agent, number)
            barrier.arrive(1)

    _issue(thread, name, complete)


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
        if self.number > _state(self._thread).loads:
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


def _own_warp(state: _State) -> Callable[[Touch, str], bool]:
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
    states = [_state(lane) for lane in lanes]
    return Touch(
        what,
        agent,
        agent.issued,
        thread,
        seen=_least([state.view for state in states]),
        known=_least([_now(lane) for lane in lanes]),
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
    state = _state(thread)
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
    state = _state(thread)
    state.loads = state.warp.loads.issued
    return values.values() if isinstance(values, Loaded) else values


def tcgen05_st(thread: Thread, address: int, values: Any) -> None:
    """Model of ``tcgen05.st.32x32b``."""
    count = len(values)
    name = f"tcgen05.st.x{count}"
    state = _state(thread)
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
    state = _state(thread)
    state.stores = state.warp.stores.issued
