"""Products, copies of scales and commits of tcgen05 on the simulated machine.

What an operation reads and writes is checked when it is issued; it is computed when the schedule
picks it, the operations of one thread in order. Source: PTX ISA, tcgen05.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from ..golden.casts import decode_e2m1, decode_e4m3, decode_e5m2, decode_e8m0
from .clusters import in_block, members
from .copies import joined
from .errors import (
    Finding,
    InvalidDescriptor,
    InvalidOperand,
    MissingFence,
    NotAwaited,
    TensorMemoryError,
)
from .matrices import multiply_add
from .mbarriers import find_for_engine
from .order import Access, Agent
from .tcgen05 import blocks_of, now_of, state_of
from .tensor_memory import LANES, TensorMemory, Touch, tensor_memory

if TYPE_CHECKING:
    from .block import Block
    from .thread import Thread

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
    state = state_of(thread)
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
        known=now_of(thread),
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
    view = state_of(thread).view
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


def tcgen05_cp(thread: Thread, target: int, descriptor: int, blocks: int = 1) -> None:
    """Model of ``tcgen05.cp.32x128b.warpx4``; of a pair: in both, each from its own memory."""
    name = "tcgen05.cp"
    group = blocks_of(thread, blocks, name)
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
    state_of(thread)
    group = blocks_of(thread, blocks, name)
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
    state = state_of(thread)
    blocks_of(thread, 2 if mask else 1, name)
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
