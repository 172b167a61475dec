"""wgmma on the simulated machine: products of a warpgroup that run later.

A product is issued when the last of the 128 threads has come to it, and computed when the schedule
picks it; a warpgroup's products are computed in order. Source: PTX ISA, ``wgmma``; the layouts are
described in ``nvfp4.ptx.wgmma``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from .clusters import in_block
from .copies import joined
from .errors import InvalidDescriptor, InvalidOperand, MissingFence, NotAwaited
from .matrices import SIZES, element_values, fragment_a, multiply_add
from .order import Access, Agent, learn

if TYPE_CHECKING:
    from .block import Block
    from .thread import Thread

#: Rows (M) of a product.
ROWS = 64
_LOCAL = np.arange(128)[:, None]


@functools.cache
def _place(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of accumulator i of thread t, each of shape [128, count]."""
    i = np.arange(count)[None, :]
    lane = _LOCAL & 31
    rows = 16 * (_LOCAL >> 5) + (lane >> 2) + 8 * (i >> 1 & 1)
    columns = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1)
    return np.broadcast_to(rows, (128, count)), np.broadcast_to(columns, (128, count))


class Product:
    """One wgmma, from the first thread that comes to it until its result is there."""

    def __init__(self, number: int, what: tuple[Any, ...]) -> None:
        self.number = number
        #: Kind, accumulators a thread, A's and B's descriptors, whether D is added.
        self.what = what
        self.operands: dict[int, tuple[Any, Any]] = {}
        self.result: np.ndarray | None = None

    def __str__(self) -> str:
        return (
            f"wgmma {self.number} of its warpgroup, reached by {len(self.operands)} of 128 threads"
        )

    @property
    def done(self) -> bool:
        """Whether it has been computed."""
        return self.result is not None

    def matrix(self) -> np.ndarray:
        """Return D, [64, N], of a product that has been computed."""
        if self.result is None:
            raise RuntimeError(f"{self}: not computed yet")
        return self.result


class Accumulators(Sequence[Any]):
    """A thread's accumulators, which it may look at when it has waited for them."""

    __slots__ = ("local", "product", "size", "thread", "used")

    def __init__(self, thread: Thread, product: Product, local: int, size: int) -> None:
        self.thread = thread
        self.product = product
        self.local = local
        self.size = size
        #: Whether they have gone into another product.
        self.used = False

    @property
    def awaited(self) -> bool:
        """Whether the thread has waited for the product."""
        return self.product.number < _state(self.thread).awaited

    def values(self) -> tuple[Any, ...]:
        """Return all of them as float32."""
        if not self.awaited:
            raise NotAwaited(
                "not waited for: accumulators of a wgmma are used before wgmma.wait_group (or "
                "their group was never committed)"
            )
        rows, columns = _place(self.size)
        return tuple(self.product.matrix()[rows[self.local], columns[self.local]])

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return self.values()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.values())


class _State:
    """What a thread has issued and waited for.

    `fenced`: whether a wgmma.fence stands behind the last wait, after which registers may have
    been touched.
    """

    def __init__(self) -> None:
        self.fenced = False
        self.issued: list[Product] = []
        self.closed: list[int] = []
        self.awaited = 0


class WarpGroup:
    """Four warps."""

    def __init__(self, block: Block, index: int) -> None:
        self.index = index
        self.threads = block.threads[128 * index : 128 * index + 128]
        self.products: list[Product] = []
        self.agents = [Agent(block) for _ in range(4)]


def _state(thread: Thread) -> _State:
    memo = thread.memo()
    if "wgmma" not in memo:
        memo["wgmma"] = _State()
    state: _State = memo["wgmma"]
    return state


def _group(thread: Thread) -> WarpGroup:
    machine = thread.machine
    if machine.cc != (9, 0) or not machine.arch.endswith("a"):
        raise UnsupportedError(f"wgmma exists on sm_90a only; the machine is {machine.arch}")
    block = thread.block
    index = thread.linear // 128
    if len(block.threads) < 128 * index + 128:
        raise InvalidOperand("wgmma: a warpgroup is 128 threads; the block ends before")
    groups: dict[int, WarpGroup] = block.state.setdefault("warpgroups", {})
    if index not in groups:
        groups[index] = WarpGroup(block, index)
    return groups[index]


def wgmma_fence(thread: Thread) -> None:
    """Model of ``wgmma.fence``."""
    _group(thread)
    _state(thread).fenced = True


def wgmma_commit(thread: Thread) -> None:
    """Model of ``wgmma.commit_group``."""
    _group(thread)
    state = _state(thread)
    state.closed.append(len(state.issued))


def wgmma_wait(thread: Thread, pending: int) -> None:
    """Model of ``wgmma.wait_group``."""
    group, state = _group(thread), _state(thread)
    if not isinstance(pending, int) or not 0 <= pending <= 7:
        raise InvalidOperand(f"wgmma.wait_group: the number of groups is 0 to 7; got {pending}")
    state.fenced = False
    if len(state.closed) <= pending:
        return
    number = state.closed[-1 - pending]
    if number:
        last = state.issued[number - 1]
        if not last.done:
            thread.wait_until(lambda: last.done, lambda: str(last))
        state.awaited = max(state.awaited, number)
        learn(thread, group.agents[thread.linear // 32 % 4], number)


def wgmma_values(acc: Any) -> Any:
    """Accumulators behind a wait: values where they are there, else what is still in flight."""
    return acc.values() if isinstance(acc, Accumulators) and acc.awaited else acc


def wgmma(thread: Thread, kind: str, acc: Any, a: Any, b: int, accumulate: Any) -> Accumulators:
    """Model of ``wgmma.mma_async``."""
    group, state = _group(thread), _state(thread)
    count = len(acc)
    if count % 4 or not 4 <= count <= 128:
        raise InvalidOperand(
            f"wgmma: a product has 4 to 128 accumulators, a multiple of 4; got {count}"
        )
    flying = isinstance(acc, Accumulators) and not acc.awaited
    if flying and acc.used:
        raise NotAwaited(
            "not waited for: these accumulators have gone into another product already"
        )
    registers = isinstance(a, tuple)
    if not state.fenced and (registers or not flying):
        which = "A" if registers else "the accumulators"
        raise MissingFence(
            f"missing fence: a wgmma uses registers of {which} that other instructions may have "
            "touched since the last wait, without wgmma.fence between"
        )
    what = (kind, count, None if registers else a, b, bool(accumulate))
    number = len(state.issued)
    if number == len(group.products):
        group.products.append(Product(number, what))
    product = group.products[number]
    if product.what != what:
        raise InvalidOperand(
            "wgmma: the threads of a warpgroup disagree: kind, accumulators, descriptors of A and "
            f"B and whether D is added are {what} here, {product.what} in another thread"
        )
    state.issued.append(product)
    local = thread.linear % 128
    source = acc if isinstance(acc, Accumulators) else np.array(acc, np.float32)
    product.operands[local] = (source, a if registers else None)
    made = Accumulators(thread, product, local, count)
    if flying:
        acc.used = True
    if len(product.operands) == 128:
        _start(thread, group, product)
    return made


def _start(thread: Thread, group: WarpGroup, product: Product) -> None:
    kind, count, a, b, accumulate = product.what
    depth = 32 // SIZES[kind]
    rows_a = None if a is None else _rows(thread, "A", a, ROWS)
    rows_b = _rows(thread, "B", b, 2 * count)
    shared = thread.block.shared
    access = None
    if thread.machine.checks.races:
        wait = "wgmma.wait_group in all four warps"
        access = Access("wgmma", wait, group.threads, group.agents, product.number + 1)
    for rows in (rows_a, rows_b):
        if rows is not None:
            for start, nbytes in joined((int(chunk), 16) for chunk in rows.ravel()):
                shared.begin_read(access, start, nbytes)

    def gather(rows: np.ndarray) -> np.ndarray:
        """The values of rows whose 16-byte chunks are at these addresses."""
        memory = np.frombuffer(shared.data, np.uint8)
        index = (rows - shared.base)[:, :, None] + np.arange(16)
        return element_values(memory[index].reshape(len(rows), 32), kind)

    def complete() -> None:
        if rows_a is not None:
            left = gather(rows_a)
        else:
            given_a = np.array([product.operands[at][1] for at in range(128)]) & 0xFFFFFFFF
            words = given_a.astype(np.uint32).reshape(4, 32, 4)
            left = np.concatenate([fragment_a(part, kind) for part in words])
        given = _given(product, count) if accumulate else np.zeros((ROWS, 2 * count))
        product.result = multiply_add(left, gather(rows_b), given)
        product.operands = dict.fromkeys(product.operands, (None, None))

    name = f"wgmma m64n{2 * count}k{depth} {kind}"
    engine = f"warpgroup {group.index} of block {tuple(thread.block.block_index)}"
    thread.machine.issue(name, complete, engine=engine)


def _given(product: Product, count: int) -> np.ndarray:
    """Return the matrix D that the threads handed in."""
    d = np.empty((ROWS, 2 * count), np.float64)
    rows, columns = _place(count)
    for local, (source, _) in product.operands.items():
        at = rows[local], columns[local]
        if isinstance(source, Accumulators):
            d[at] = source.product.matrix()[at]
        else:
            d[at] = source
    return d


_WIDTHS = {0: 0, 1: 128, 2: 64, 3: 32}


def _rows(thread: Thread, which: str, descriptor: int, count: int) -> np.ndarray:
    """Return the addresses of each row's two 16-byte chunks, of shape [count, 2]."""
    bits = descriptor & (1 << 64) - 1
    # The descriptor has an offset in the block's own memory: no rank in a cluster.
    start = in_block((bits & 0x3FFF) << 4, thread.block)
    leading, stride = (bits >> 16 & 0x3FFF) << 4, (bits >> 32 & 0x3FFF) << 4
    base, width = bits >> 49 & 7, _WIDTHS[bits >> 62]
    unknown = bits & ~(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 7 << 49 | 3 << 62)
    text = f"wgmma: the descriptor of {which}, {bits:#018x}"
    if unknown:
        raise InvalidDescriptor(f"{text}, has bits set that mean nothing: {unknown:#x}")
    if base:
        raise InvalidDescriptor(f"{text}, has base offset {base}; tiles here begin at whole atoms")
    row, chunk = np.arange(count)[:, None], np.arange(2)[None, :]
    if not width:
        return start + (row >> 3) * stride + (row & 7) * 16 + chunk * leading
    if start % (8 * width) >= width:
        raise InvalidDescriptor(
            f"{text}, begins at {start:#x}: with a swizzle of {width} bytes a tile begins at a "
            f"multiple of {8 * width}"
        )
    if start % width + 32 > width:
        raise InvalidDescriptor(f"{text}, begins at {start:#x}: 32 bytes on, the swizzle atom ends")
    address = start + (row >> 3) * stride + (row & 7) * width + 16 * chunk
    return address ^ (address >> 3 & width - 16)
