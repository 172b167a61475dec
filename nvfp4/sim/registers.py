"""Registers that warpgroups give back to their block and take from it: ``setmaxnreg``.

A block has the registers that it was launched with, and no others: ``dec`` puts some of a
warpgroup's into the block's pool, ``inc`` waits until the pool has what it asks for. What all
warpgroups want together may be more than that, and then an ``inc`` waits for ever.

Source: PTX ISA, ``setmaxnreg``. How many registers a thread is launched with is no part of it:
:func:`at_launch` says what the assembler writes into kernels that use the instruction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InvalidOperand, RegisterPoolError

if TYPE_CHECKING:
    from .block import Block
    from .thread import Thread

_ALL = 0xFFFFFFFF
#: Most registers that a thread is given; it can name 255 of them.
_MOST = 256


def at_launch(threads: int, blocks: int) -> int:
    """Return the registers of a thread at launch, by the launch bounds.

    A quarter of a multiprocessor has 16384 registers, its warps are a quarter of all warps, and a
    warp gets a multiple of 8 a thread.

    Parameters
    ----------
    threads, blocks
        Threads of a block, and blocks that a multiprocessor shall hold.
    """
    warps = -(-threads // 32) * blocks
    each = 16384 // (32 * -(-warps // 4))
    return min(each // 8 * 8, _MOST)


class _Call:
    """One ``setmaxnreg`` of a warpgroup, from the first warp that comes to it."""

    def __init__(self, action: str, count: int, more: int) -> None:
        self.action = action
        self.count = count
        #: Registers a thread that it still waits for.
        self.more = more
        #: Warps that have come to it.
        self.warps = 0


class _Group:
    """A warpgroup and the registers of each of its threads."""

    def __init__(self, index: int, held: int) -> None:
        self.index = index
        self.held = held
        self.calls: list[_Call] = []
        #: How many calls each of its warps has come to.
        self.reached = [0, 0, 0, 0]


class RegisterPool:
    """What a block's warpgroups hold and have given back, in registers a thread of a warpgroup.

    A warpgroup that has left the kernel keeps its registers: nothing promises that others get them.
    """

    def __init__(self, block: Block, bounds: tuple[int, int]) -> None:
        self.bounds = bounds
        self.launched = at_launch(*bounds)
        self.free = 0
        self.groups = [_Group(index, self.launched) for index in range(len(block.threads) // 128)]
        # The assembler launches with no more than the largest `inc` of a kernel asks for. Which
        # that is shows as the kernel runs, so a first `inc` to less than the bounds allow is wrong
        # only when another asks for more.
        self.largest = 0
        self.least = _MOST

    def come(self, group: _Group, warp: int, action: str, count: int) -> _Call:
        """Take note that a warp of a group is at its next ``setmaxnreg``; return what it is."""
        number = group.reached[warp]
        group.reached[warp] += 1
        if number == len(group.calls):
            if number and group.calls[-1].warps < 4:
                raise RegisterPoolError(
                    f"setmaxnreg.{action}: not all warps of warpgroup {group.index} have come to "
                    "the one before; they must meet between two"
                )
            group.calls.append(self._begin(group, action, count))
        call = group.calls[number]
        if (call.action, call.count) != (action, count):
            raise RegisterPoolError(
                f"setmaxnreg.{action} to {count} in one warp of warpgroup {group.index}, "
                f"setmaxnreg.{call.action} to {call.count} in another: all four execute the same"
            )
        call.warps += 1
        if action == "dec" and call.warps == 4:
            self.free += group.held - count
            group.held = count
        return call

    def _begin(self, group: _Group, action: str, count: int) -> _Call:
        first = not group.calls
        if action == "dec":
            if count > group.held:
                raise self._wrong_way(action, count, group.held)
            return _Call(action, count, 0)
        self.largest = max(self.largest, count)
        if first:
            self.least = min(self.least, count)
        elif count < group.held:
            raise self._wrong_way(action, count, group.held)
        launched = min(self.launched, self.largest)
        if self.least < launched:
            raise self._wrong_way(action, self.least, launched)
        if first:
            group.held = min(group.held, count)
        return _Call(action, count, count - group.held)

    def _wrong_way(self, action: str, count: int, held: int) -> RegisterPoolError:
        threads, blocks = self.bounds
        what = "dec to more" if action == "dec" else "inc to less"
        return RegisterPoolError(
            f"setmaxnreg.{action} to {count} in a warpgroup that has {held} registers a thread: "
            f"{what} is undefined (launch bounds: blocks of {threads} threads, {blocks} a "
            "multiprocessor)"
        )

    def take(self, group: _Group, call: _Call) -> None:
        """Give a call what it waits for, if the pool has that."""
        if call.more <= self.free:
            self.free -= call.more
            group.held += call.more
            call.more = 0

    def lacks(self, group: _Group, call: _Call) -> str:
        """Say what a call waits for, and where the registers are."""
        others = "".join(
            f"warpgroup {other.index} holds {other.held}, "
            for other in self.groups
            if other is not group
        )
        threads, blocks = self.bounds
        return (
            f"{call.more} more registers a thread for warpgroup {group.index}, which has "
            f"{group.held} and wants {call.count} (setmaxnreg.inc): the block's pool has "
            f"{self.free}, {others}and each was launched with {self.launched} (launch bounds: "
            f"blocks of {threads} threads, {blocks} a multiprocessor)"
        )

    def check_end(self) -> None:
        """Report, when the block has ended, a warpgroup of which some warps never came."""
        for group in self.groups:
            if group.calls and group.calls[-1].warps < 4:
                call = group.calls[-1]
                raise RegisterPoolError(
                    f"setmaxnreg.{call.action} to {call.count}: {call.warps} of the 4 warps of "
                    f"warpgroup {group.index} have executed it, the others have left the kernel"
                )


def _pool(thread: Thread) -> RegisterPool:
    block = thread.block
    pool: RegisterPool | None = block.state.get("registers")
    if pool is None:
        threads, blocks = bounds = block.launch.launch_bounds
        if not threads or not blocks:
            raise RegisterPoolError(
                "setmaxnreg: the kernel does not state its launch bounds, threads of a block and "
                f"blocks a multiprocessor (got {threads} and {blocks}); the assembler leaves it "
                "out there"
            )
        pool = block.state["registers"] = RegisterPool(block, bounds)
        block.state.setdefault("at end", []).append(pool.check_end)
    return pool


def setmaxnreg(thread: Thread, action: str, count: int) -> None:
    """Model of ``setmaxnreg``; `action`: ``"inc"`` or ``"dec"``."""
    if not isinstance(count, int) or count % 8 or not 24 <= count <= 256:
        raise InvalidOperand(
            f"setmaxnreg: the number of registers is a multiple of 8 from 24 to 256; got {count}"
        )
    pool = _pool(thread)
    if thread.linear // 128 >= len(pool.groups):
        raise InvalidOperand("setmaxnreg: a warpgroup is 128 threads; the block ends before")
    group = pool.groups[thread.linear // 128]
    warp = thread.linear // 32 % 4
    call: _Call = thread.collective(
        f"setmaxnreg.{action} to {count}",
        _ALL,
        None,
        lambda lanes: dict.fromkeys(lanes, pool.come(group, warp, action, count)),
    )
    while call.more:
        thread.wait_until(lambda: call.more <= pool.free, lambda: pool.lacks(group, call))
        pool.take(group, call)
