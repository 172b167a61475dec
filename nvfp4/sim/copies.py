"""Asynchronous copies of the simulated machine: bulk copies, tensor copies, cp.async.

What a copy touches is checked and remembered when it is issued; the bytes move when the schedule
picks it. Source: PTX ISA, ``cp.async``, ``cp.async.bulk``, ``cp.async.bulk.tensor``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import UnsupportedError
from .clusters import in_block, members, owner
from .errors import Finding, InvalidDescriptor, InvalidOperand, Misaligned, MissingFence
from .mbarriers import MBarrier, find, find_for_engine
from .order import Access, Agent, fence, learn, ordered

if TYPE_CHECKING:
    from .block import Block
    from .launch import AsyncOperation
    from .thread import Thread

#: (address in shared memory, address in global memory or None for zeros, bytes)
Piece = tuple[int, int | None, int]


class Groups:
    """Copies of one thread that are waited for in groups."""

    def __init__(self, thread: Thread) -> None:
        #: Counts the copies as readers of their source, and as writers.
        self.reads = Agent(thread.block)
        self.writes = Agent(thread.block)
        self.issued: list[AsyncOperation] = []
        #: How many copies had been issued when each group was closed.
        self.closed: list[int] = []

    def wait(self, thread: Thread, pending: int, what: str, read_only: bool) -> None:
        """Wait until at most `pending` of the closed groups are not complete."""
        if not isinstance(pending, int) or pending < 0:
            raise InvalidOperand(f"{what}: the number of groups is 0 or more; got {pending}")
        if len(self.closed) <= pending:
            return
        number = self.closed[-1 - pending]
        group = self.issued[:number]
        if not all(operation.done for operation in group):
            thread.wait_until(
                lambda: all(operation.done for operation in group),
                f"the copies of {what} {pending}",
            )
        learn(thread, self.reads, number)
        if not read_only:
            learn(thread, self.writes, number)


def _groups(thread: Thread, kind: str) -> Groups:
    memo = thread.memo()
    if kind not in memo:
        memo[kind] = Groups(thread)
    groups: Groups = memo[kind]
    return groups


def _access(
    thread: Thread, name: str, wait: str, agent: Agent, number: int, generic: bool = False
) -> Access | None:
    if not thread.machine.checks.races:
        return None
    return Access(name, wait, [thread], [agent], number, generic=generic)


def needs(thread: Thread, what: str, cc: tuple[int, int] = (9, 0)) -> None:
    """Raise where the machine is older than this."""
    if thread.machine.cc < cc:
        raise UnsupportedError(
            f"{what} needs sm_{cc[0]}{cc[1]}; the machine is {thread.machine.arch}"
        )


def aligned(what: str, nbytes: int, **values: int) -> None:
    """Raise where an address is not a multiple of so many bytes."""
    for name, value in values.items():
        if value % nbytes:
            raise Misaligned(
                f"{what}: misaligned, the {name} {value:#x} is not a multiple of {nbytes}",
                address=value,
            )


def alive(thread: Thread, name: str, block: Block | None = None) -> None:
    """Raise where the block of an operation that completes has left the kernel."""
    block = thread.block if block is None else block
    if not block.live:
        raise Finding(
            f"the {name} is still in flight when its block, {tuple(block.block_index)}, has left "
            "the kernel"
        )


# Loads -------------------------------------------------------------------------------------------


def reporting(
    thread: Thread, name: str, address: int, block: Block
) -> tuple[MBarrier, int, Access | None]:
    """An operation that reports to an mbarrier: this, its number there, and how it is ordered."""
    barrier: MBarrier = find_for_engine(thread, address, name, block)
    agent = barrier.agent
    agent.issued += 1
    number = agent.issued
    barrier.flying.add(number)
    access = _access(thread, name, f"waiting for mbarrier {address:#x}", agent, number)
    return barrier, number, access


def _load(
    thread: Thread,
    name: str,
    pieces: list[Piece],
    address: int,
    expected: int,
    box: tuple[int, int] | None = None,
    block: Block | None = None,
    reports_to: Block | None = None,
) -> None:
    """Move pieces from global to shared memory and count `expected` bytes at an mbarrier.

    `box`: start and bytes of what is written, where some of it is left undefined. `block`: whose
    shared memory and, unless `reports_to` says another, mbarrier, in the thread's cluster.
    """
    block = thread.block if block is None else block
    barrier, number, access = reporting(thread, name, address, reports_to or block)
    machine, shared = thread.machine, block.shared
    memory = machine.memory
    inside = ((source, nbytes) for _, source, nbytes in pieces if source is not None)
    for source, nbytes in joined(inside):
        memory.begin_read(access, source, nbytes)
    covered = ((target, nbytes) for target, _, nbytes in pieces) if box is None else [box]
    for target, nbytes in joined(covered):
        shared.begin_write(access, target, nbytes)

    def complete() -> None:
        alive(thread, name, block)
        if box is not None:
            shared.forget(*box)
        for target, source, nbytes in pieces:
            data = bytes(nbytes) if source is None else memory.take(source, nbytes)
            shared.put(target, data)
        barrier.complete(number, expected)

    machine.issue(name, complete)
    thread.spin()


def joined(pieces: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join pieces of memory that follow each other."""
    runs: list[tuple[int, int]] = []
    for start, nbytes in sorted(pieces):
        if runs and runs[-1][0] + runs[-1][1] == start:
            runs[-1] = runs[-1][0], runs[-1][1] + nbytes
        else:
            runs.append((start, nbytes))
    return runs


def bulk_load(thread: Thread, target: int, address: int, nbytes: int, barrier: int) -> None:
    """Model of ``cp.async.bulk.shared.global``."""
    _check_bulk(thread, "bulk load", target, address, nbytes)
    _load(thread, "bulk load", [(target, address, nbytes)], barrier, nbytes)


def _check_bulk(thread: Thread, name: str, shared: int, address: int, nbytes: int) -> None:
    needs(thread, name)
    aligned(name, 16, shared=shared, address=address)
    if nbytes <= 0 or nbytes % 16:
        raise InvalidOperand(f"{name}: bytes are a multiple of 16, more than 0; got {nbytes}")


# Stores ------------------------------------------------------------------------------------------


def _store(thread: Thread, name: str, pieces: list[Piece]) -> None:
    """Move pieces from shared to global memory; those without an address are only read."""
    groups = _groups(thread, "bulk copies")
    groups.reads.issued += 1
    number = groups.reads.issued
    reading = _access(thread, name, "cp.async.bulk.wait_group.read", groups.reads, number)
    writing = _access(thread, name, "cp.async.bulk.wait_group", groups.writes, number)
    machine, shared = thread.machine, thread.block.shared
    memory = machine.memory
    for source, nbytes in joined((source, nbytes) for source, _, nbytes in pieces):
        shared.begin_read(reading, source, nbytes)
    inside = ((target, nbytes) for _, target, nbytes in pieces if target is not None)
    for target, nbytes in joined(inside):
        memory.begin_write(writing, target, nbytes)

    def complete() -> None:
        alive(thread, name)
        for source, target, nbytes in pieces:
            if target is not None:
                memory.put(target, shared.take(source, nbytes))

    groups.issued.append(machine.issue(name, complete))
    thread.spin()


def bulk_store(thread: Thread, address: int, source: int, nbytes: int) -> None:
    """Model of ``cp.async.bulk.global.shared``."""
    _check_bulk(thread, "bulk store", source, address, nbytes)
    _store(thread, "bulk store", [(source, address, nbytes)])


def bulk_prefetch(thread: Thread, address: int, nbytes: int) -> None:
    """Model of ``cp.async.bulk.prefetch``: nothing but its rules."""
    _check_bulk(thread, "bulk prefetch", 0, address, nbytes)
    thread.machine.memory.find(address, nbytes)


def bulk_commit(thread: Thread) -> None:
    """Model of ``cp.async.bulk.commit_group``."""
    groups = _groups(thread, "bulk copies")
    groups.closed.append(len(groups.issued))


def bulk_wait(thread: Thread, pending: int, *, read_only: bool) -> None:
    """Model of ``cp.async.bulk.wait_group``."""
    what = "cp.async.bulk.wait_group" + (".read" if read_only else "")
    _groups(thread, "bulk copies").wait(thread, pending, what, read_only)


# cp.async ----------------------------------------------------------------------------------------


def cp_async(thread: Thread, target: int, address: int, nbytes: int, count: int) -> None:
    """Model of ``cp.async``: `count` bytes, then zeros up to `nbytes`."""
    name = "cp.async"
    if not 0 <= count <= nbytes:
        raise InvalidOperand(f"{name}: it copies 0 to {nbytes} bytes; got {count}")
    aligned(name, nbytes, shared=target)
    if count:
        aligned(name, nbytes, address=address)
    groups = _groups(thread, "cp.async")
    groups.reads.issued += 1
    number = groups.reads.issued
    access = _access(thread, name, "cp.async.wait_group", groups.reads, number, generic=True)
    machine, shared = thread.machine, thread.block.shared
    memory = machine.memory
    if count:
        memory.begin_read(access, address, count)
    shared.begin_write(access, target, nbytes)

    def complete() -> None:
        alive(thread, name)
        data = memory.take(address, count) if count else b""
        shared.put(target, data + bytes(nbytes - count))

    groups.issued.append(machine.issue(name, complete, engine=_engine(thread)))
    thread.spin()


def _engine(thread: Thread) -> str:
    return f"cp.async of block {tuple(thread.block.block_index)} thread {thread.linear}"


def cp_async_commit(thread: Thread) -> None:
    """Model of ``cp.async.commit_group``."""
    groups = _groups(thread, "cp.async")
    groups.closed.append(len(groups.issued))


def cp_async_wait(thread: Thread, pending: int) -> None:
    """Model of ``cp.async.wait_group``."""
    _groups(thread, "cp.async").wait(thread, pending, "cp.async.wait_group", False)


def cp_async_arrive(thread: Thread, address: int) -> None:
    """Model of ``cp.async.mbarrier.arrive.noinc``: behind this thread's copies so far."""
    barrier = find(thread, address, "cp.async.mbarrier.arrive")
    agent = _groups(thread, "cp.async").reads
    number = agent.issued
    block = thread.block

    def complete() -> None:
        barrier.clock.add(block, agent, number)
        barrier.arrive(1)

    thread.machine.issue("cp.async.mbarrier.arrive", complete, engine=_engine(thread))


# Tensor copies -----------------------------------------------------------------------------------


def _tensor_map(thread: Thread, address: int, name: str) -> Any:
    from ..ptx.tensor_map import decode

    needs(thread, name)
    aligned(name, 64, tensor_map=address)
    acquired = thread.block.state.get("tensor maps", {}).get(address)
    if thread.machine.checks.races:
        if acquired is None or not any(
            one[0] is thread or ordered(one, thread) for one in acquired
        ):
            raise MissingFence(
                f"missing fence: the {name} uses the tensor map at {address:#x} without "
                "fence.proxy.tensormap.acquire before it in this block",
                address=address,
            )
    return decode(thread.machine.memory.take(address, 128), address)


def tensormap_acquire(thread: Thread, address: int) -> None:
    """Model of ``fence.proxy.tensormap.acquire``."""
    pointer, _ = thread.machine.memory.find(address, 128)
    if pointer.region is not None:
        pointer.region.note_read(address, 128)
    table = thread.block.state.setdefault("tensor maps", {})
    table.setdefault(address, []).append((thread, thread.clock))


def tensormap_release(thread: Thread) -> None:
    """Model of ``fence.proxy.tensormap.release``."""
    fence(thread)


def tensormap_prefetch(thread: Thread, address: int) -> None:
    """Model of ``prefetch.tensormap``."""
    thread.machine.memory.find(address, 128)


def _tile(
    thread: Thread, name: str, descriptor: int, place: tuple[int, ...], shared: int
) -> tuple[list[Piece], Any]:
    tensor = _tensor_map(thread, descriptor, name)
    if len(place) != len(tensor.shape):
        raise InvalidOperand(
            f"{name}: {len(place)} coordinates for a tensor map of {len(tensor.shape)} dimensions"
        )
    aligned(name, tensor.alignment, shared=shared)
    _check_start(thread, name, tensor, place[0])
    if name == "tensor store" and min(place) < 0:
        raise InvalidOperand(f"{name}: coordinates must not be negative; got {place}")
    return tensor.pieces(place, shared), tensor


def _check_start(thread: Thread, name: str, tensor: Any, x: int) -> None:
    """Raise where a box may not begin at this element of a row."""
    # As measured on an H200: it ends the kernel with an illegal instruction, as does a negative
    # coordinate of a store.
    if not tensor.padded and x * tensor.itemsize % 16:
        raise InvalidOperand(
            f"{name}: the box begins {x * tensor.itemsize} bytes from the start of a row; "
            "it must be a multiple of 16"
        )
    if tensor.padded:
        needs(thread, f"a {name} of padded 4-bit elements", (10, 0))
        if x % 128:
            raise InvalidOperand(
                f"{name}: with padded 4-bit elements the first coordinate is a multiple of 128; "
                f"got {x}"
            )


def tma_load(
    thread: Thread, target: int, descriptor: int, place: tuple[int, ...], barrier: int
) -> None:
    """Model of ``cp.async.bulk.tensor`` to shared memory."""
    pieces, tensor = _tile(thread, "tensor load", descriptor, place, target)
    box = (target, tensor.shared_bytes) if tensor.padded else None
    _load(thread, "tensor load", pieces, barrier, tensor.box_bytes, box)


def tma_load_pair(
    thread: Thread, target: int, descriptor: int, place: tuple[int, ...], barrier: int
) -> None:
    """Model of ``cp.async.bulk.tensor.cta_group::2``: the mbarrier may be the other block's."""
    name = "tensor load of a pair"
    needs(thread, name, (10, 0))
    pieces, tensor = _tile(thread, name, descriptor, place, target)
    box = (target, tensor.shared_bytes) if tensor.padded else None
    home = owner(thread, barrier, name)
    _load(thread, name, pieces, barrier, tensor.box_bytes, box, reports_to=home)


def tma_load_multicast(
    thread: Thread,
    target: int,
    descriptor: int,
    place: tuple[int, ...],
    barrier: int,
    mask: int,
) -> None:
    """Model of ``cp.async.bulk.tensor.multicast::cluster``: the same place in several blocks."""
    name = "tensor load to a cluster"
    for block in members(thread, mask, name):
        at = in_block(target, block)
        pieces, tensor = _tile(thread, name, descriptor, place, at)
        box = (at, tensor.shared_bytes) if tensor.padded else None
        mbarrier = in_block(barrier, block)
        _load(thread, name, pieces, mbarrier, tensor.box_bytes, box, block)


def tma_gather(
    thread: Thread, target: int, descriptor: int, x: int, rows: tuple[int, ...], barrier: int
) -> None:
    """Model of ``cp.async.bulk.tensor.tile::gather4`` to the thread's block."""
    _gather(thread, "gather", target, descriptor, x, rows, barrier, thread.block)


def tma_gather_cluster(
    thread: Thread, target: int, descriptor: int, x: int, rows: tuple[int, ...], barrier: int
) -> None:
    """Model of ``cp.async.bulk.tensor.shared::cluster.tile::gather4``: to any block."""
    name = "gather to a cluster"
    block = owner(thread, target, name)
    if owner(thread, barrier, name) is not block:
        raise InvalidOperand(
            f"{name}: the rows go to block {tuple(block.block_index)}, and the mbarrier at "
            f"{barrier:#x} is another block's",
            address=barrier,
        )
    _gather(thread, name, target, descriptor, x, rows, barrier, block)


def _gather(
    thread: Thread,
    name: str,
    target: int,
    descriptor: int,
    x: int,
    rows: tuple[int, ...],
    barrier: int,
    block: Block,
) -> None:
    """Load one box of one row at (x, row) for each of `rows`, behind each other."""
    needs(thread, name, (10, 0))
    tensor = _tensor_map(thread, descriptor, name)
    if len(tensor.shape) != 2 or tensor.box[1] != 1:
        raise InvalidDescriptor(
            f"{name}: the tensor map must be of 2 dimensions and its box one row; got the box "
            f"{tensor.box}",
            address=descriptor,
        )
    # Not 8 rows of the swizzle: two gathers fill the 8 rows of its pattern.
    aligned(name, max(128, len(rows) * tensor.swizzle), shared=target)
    _check_start(thread, name, tensor, x)
    step = tensor.shared_bytes
    pieces = [
        piece
        for at, row in enumerate(rows)
        for piece in tensor.pieces((x, row), target + at * step)
    ]
    box = (target, len(rows) * step) if tensor.padded else None
    _load(thread, name, pieces, barrier, len(rows) * tensor.box_bytes, box, block)


def tma_store(thread: Thread, descriptor: int, place: tuple[int, ...], source: int) -> None:
    """Model of ``cp.async.bulk.tensor`` to global memory."""
    pieces, tensor = _tile(thread, "tensor store", descriptor, place, source)
    if tensor.padded:
        raise InvalidOperand("tensor store: padded 4-bit elements can be loaded only")
    _store(thread, "tensor store", pieces)
