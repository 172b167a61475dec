"""mbarriers of the simulated machine: phases, arrivals, expected bytes, and who may use them when.

Source: PTX ISA, ``mbarrier``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import InvalidOperand, MBarrierError, Misaligned, MissingFence, WrongParity
from .order import Access, Agent, Clock, fenced, ordered

if TYPE_CHECKING:
    from .block import Block
    from .thread import Thread

#: Most arrivals, and most bytes either way, that an mbarrier counts.
LIMIT = (1 << 20) - 1


class MBarrier:
    """One mbarrier.

    Attributes
    ----------
    count, pending, transactions
        Arrivals a phase takes, arrivals that the present one lacks, bytes that it waits for.
    phase
        Number of phases that have completed; the present one's parity is its lowest bit.
    agent
        Counts the copies that report here.
    """

    def __init__(self, thread: Thread, address: int, count: int) -> None:
        self.block = thread.block
        self.address = address
        self.count = self.pending = count
        self.transactions = 0
        self.phase = 0
        self.made = (thread, thread.clock)
        self.agent = Agent(thread.block)
        #: Numbers of the copies that have not completed.
        self.flying: set[int] = set()
        self.clock = Clock()
        self.done = Clock()
        #: Thread -> the last phase that it has waited for.
        self.seen: dict[int, int] = {}

    def __str__(self) -> str:
        return (
            f"mbarrier {self.address:#x}, in phase {self.phase} (parity {self.phase & 1}), which "
            f"lacks {self.pending} of {self.count} arrivals and {self.transactions} bytes"
        )

    @property
    def image(self) -> int:
        """What its 8 bytes hold; the card's are another secret."""
        return 0x6D62_6172_0000_0000 | self.address

    def expect(self, nbytes: int) -> None:
        """Change the bytes that the present phase waits for."""
        self.transactions += nbytes
        if not -LIMIT <= self.transactions <= LIMIT:
            raise MBarrierError(
                f"{self}: an mbarrier counts up to {LIMIT} bytes", address=self.address
            )

    def arrive(self, count: int) -> None:
        """Count arrivals, and begin the next phase if this one is complete."""
        if count > self.pending:
            raise MBarrierError(
                f"too many arrivals: {self}; {count} more came", address=self.address
            )
        self.pending -= count
        self.advance()

    def complete(self, number: int, nbytes: int) -> None:
        """Count a copy that has completed."""
        self.flying.discard(number)
        self.expect(-nbytes)
        self.advance()

    def advance(self) -> None:
        """Begin the next phase if nothing lacks in this one."""
        if self.pending or self.transactions:
            return
        self.phase += 1
        self.pending = self.count
        landed = min(self.flying) - 1 if self.flying else self.agent.issued
        self.clock.add(self.block, self.agent, landed)
        self.done = self.clock.copy()


def _barriers(block: Block) -> dict[int, MBarrier]:
    table: dict[int, MBarrier] = block.state.setdefault("mbarriers", {})
    return table


def find(thread: Thread, address: int, what: str, block: Block | None = None) -> MBarrier:
    """Return the mbarrier at an address, as `thread` may use it now; `block`: of its cluster."""
    block = thread.block if block is None else block
    barrier = _barriers(block).get(address)
    if barrier is None:
        raise MBarrierError(
            f"{what}: there is no mbarrier at {address:#x}: none was initialised there, or it was "
            "invalidated",
            address=address,
        )
    maker = barrier.made[0]
    checked = thread.machine.checks.races
    if checked and maker is not thread and not ordered(barrier.made, thread):
        raise MBarrierError(
            f"{what}: the mbarrier at {address:#x} is initialised by thread "
            f"{tuple(maker.thread_index)}, and nothing orders that before (a barrier would)",
            address=address,
        )
    offset = address - block.shared.base
    if int.from_bytes(block.shared.data[offset : offset + 8], "little") != barrier.image:
        raise MBarrierError(
            f"{what}: something has overwritten the mbarrier at {address:#x}", address=address
        )
    return barrier


def find_for_engine(
    thread: Thread, address: int, what: str, block: Block | None = None
) -> MBarrier:
    """Return the mbarrier that an engine's operation shall report to."""
    barrier = find(thread, address, what, block)
    if thread.machine.checks.races:
        probe = Access(what, "", [thread], [barrier.agent], 0)
        if not fenced(barrier.made, probe, "mbarrier"):
            raise MissingFence(
                f"missing fence: the {what} reports to the mbarrier at {address:#x}, and neither "
                "fence.mbarrier_init nor fence.proxy.async stands between its initialisation and "
                "this",
                address=address,
            )
    return barrier


def mbarrier_init(thread: Thread, address: int, count: int) -> None:
    """Model of ``mbarrier.init``."""
    block = thread.block
    if address % 8:
        raise Misaligned(
            f"mbarrier.init at {address:#x}: misaligned, the address is not a multiple of 8",
            address=address,
        )
    if not 1 <= count <= LIMIT:
        raise InvalidOperand(f"mbarrier.init: the count is 1 to {LIMIT}; got {count}")
    table = _barriers(block)
    if address in table:
        raise MBarrierError(
            f"mbarrier.init at {address:#x}: there is one already, not invalidated",
            address=address,
        )
    barrier = MBarrier(thread, address, count)
    block.shared.store(address, 8, barrier.image)
    table[address] = barrier


def mbarrier_inval(thread: Thread, address: int) -> None:
    """Model of ``mbarrier.inval``."""
    barrier = find(thread, address, "mbarrier.inval")
    if barrier.flying:
        raise MBarrierError(f"mbarrier.inval: copies in flight report to {barrier}")
    del _barriers(thread.block)[address]


def mbarrier_expect_tx(thread: Thread, address: int, nbytes: int) -> None:
    """Model of ``mbarrier.expect_tx``."""
    find(thread, address, "mbarrier.expect_tx").expect(nbytes)


def mbarrier_arrive(thread: Thread, address: int, count: int, block: Block | None = None) -> None:
    """Model of ``mbarrier.arrive``; `block`: where it is, in the thread's cluster."""
    barrier = find(thread, address, "mbarrier.arrive", block)
    barrier.clock.release(thread)
    barrier.arrive(count)
    thread.spin()


def _check_parity(thread: Thread, barrier: MBarrier, parity: int) -> None:
    if parity not in (0, 1):
        raise InvalidOperand(f"a parity is 0 or 1; got {parity}", address=barrier.address)
    last = barrier.seen.get(thread.linear)
    if last is None:
        return
    wanted = last + 1 if (last + 1) & 1 == parity else last
    if wanted > last and barrier.phase >= wanted + 2:
        raise WrongParity(
            f"wrong parity: this thread waits for phase {wanted} (parity {parity}) of {barrier}; "
            "phases are told apart while the next one runs, not longer",
            address=barrier.address,
        )


def _passed(thread: Thread, barrier: MBarrier, parity: int) -> bool:
    if barrier.phase & 1 == parity:
        return False
    barrier.done.acquire(thread)
    barrier.seen[thread.linear] = barrier.phase - 1
    return True


def mbarrier_test(thread: Thread, address: int, parity: int) -> bool:
    """Model of ``mbarrier.test_wait.parity``."""
    barrier = find(thread, address, "mbarrier.test_wait")
    _check_parity(thread, barrier, parity)
    if _passed(thread, barrier, parity):
        return True
    thread.spin()
    return False


def mbarrier_try_wait(thread: Thread, address: int, parity: int) -> bool:
    """Model of ``mbarrier.try_wait.parity``, which gives the others a turn."""
    barrier = find(thread, address, "mbarrier.try_wait")
    _check_parity(thread, barrier, parity)
    if _passed(thread, barrier, parity):
        return True
    thread.yield_now()
    return _passed(thread, barrier, parity)


def mbarrier_wait(thread: Thread, address: int, parity: int) -> None:
    """Wait until the phase of this parity has completed."""
    barrier = find(thread, address, "mbarrier.try_wait")
    _check_parity(thread, barrier, parity)
    while not _passed(thread, barrier, parity):
        thread.wait_until(
            lambda: barrier.phase & 1 != parity,
            lambda: f"the phase of parity {parity} of {barrier}",
        )
