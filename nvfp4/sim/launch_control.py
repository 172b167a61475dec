"""Blocks that have not started, given to blocks that run (cluster launch control).

The scheduler starts blocks one by one (``launch``), so those that have not started are what is left
of its iterator. A request takes the next cluster of them when it completes, which the schedule
chooses like any operation's completion. The schedule may also refuse it although blocks are left,
as a card does that has something more urgent to run. Source: PTX ISA, ``clusterlaunchcontrol``;
CUDA programming guide, cluster launch control.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .clusters import in_block, members
from .copies import aligned, alive, needs, reporting
from .errors import LaunchControlError, MissingFence
from .order import Access, fenced, ordered, who

if TYPE_CHECKING:
    from .block import Block
    from .shared import SharedMemory
    from .thread import Thread

_BYTES = 16
#: Of so many choices of a schedule, the last refuses a request.
_CHANCES = 4


def try_cancel(thread: Thread, response: int, barrier: int, everybody: bool) -> None:
    """Model of ``clusterlaunchcontrol.try_cancel``; `everybody`: all blocks get the response."""
    name = "request for a block"
    needs(thread, name, (10, 0))
    aligned(name, _BYTES, response=response)
    _check_refused(thread, name)
    answers: list[tuple[int, int, int] | None] = []
    if everybody:
        for block in members(thread, (1 << len(thread.block.cluster.blocks)) - 1, name):
            places = in_block(response, block), in_block(barrier, block)
            _issue(thread, name, block, *places, answers)
    else:
        _issue(thread, name, thread.block, response, barrier, answers)
    thread.spin()


def _issue(
    thread: Thread,
    name: str,
    block: Block,
    response: int,
    barrier: int,
    answers: list[tuple[int, int, int] | None],
) -> None:
    """Bring the answer to a block; what is first to complete asks for it."""
    from ..ptx.launch_control import encode

    launch = block.launch
    mbarrier, number, access = reporting(thread, name, barrier, block)
    if access is not None:
        _check_reads(access, block.shared, response)
    block.shared.begin_write(access, response, _BYTES)

    def complete() -> None:
        alive(thread, name, block)
        if not answers:
            refused = launch.left and launch.machine.policy.choose(_CHANCES) == _CHANCES - 1
            answers.append(None if refused else launch.cancel())
        if answers[0] is None:
            block.state.setdefault("refused requests", []).append((mbarrier.agent, number))
        block.shared.put(response, encode(answers[0]))
        mbarrier.complete(number, _BYTES)

    thread.machine.issue(name, complete)


def _check_refused(thread: Thread, name: str) -> None:
    """Raise where a thread of the block has waited for a request that was refused."""
    for agent, number in thread.block.state.get("refused requests", ()):
        for one in thread.block.threads:
            if agent.slot < len(one.seen) and one.seen[agent.slot] >= number:
                raise LaunchControlError(
                    f"{name}: the block has seen that an earlier one was refused; what another "
                    "one does is undefined"
                )


def _check_reads(access: Access, shared: SharedMemory, response: int) -> None:
    """Raise where no fence stands between the reads of the last response and the next request."""
    for record in shared.readers(response, _BYTES):
        # Reads that are not ordered before it are a race, which the write reports.
        if ordered(record, access) and not fenced(record, access, "shared"):
            raise MissingFence(
                f"missing fence: the {access.name} overwrites the response that "
                f"{who(record, access.block)} has read by the ordinary proxy, and no "
                "fence.proxy.async of shared memory stands between the two",
                address=response,
            )
