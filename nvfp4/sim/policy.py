"""Who runs next: the one place where a simulated run could go another way.

Every choice of the machine (which warp runs, which asynchronous operation completes, whether a
request for a block is refused) is a call of :meth:`Policy.choose`, so a run is determined by its
policy and nothing else. 0 is always the plainest choice: the warp that waited longest, an operation
only when no warp can run, and no refusal. A failing sequence of choices therefore shrinks to one
that differs from round-robin where it must.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .thread import Thread

Schedule = str | int | Sequence[int] | Callable[[int], int]


class Policy:
    """Round-robin: warps in the order in which they became ready, blocks one after the other."""

    #: True where :meth:`choose` is always 0 and :meth:`arrange` does nothing, so that neither need
    #: be called.
    plain = True
    #: How many blocks are resident at once, as long as they can run.
    residents = 1

    def choose(self, count: int) -> int:
        """Return one of ``range(count)``; called for two alternatives or more."""
        return 0

    def arrange(self, lanes: list[Thread]) -> None:
        """Order the lanes of a warp's turn, in place."""


class Seeded(Policy):
    """Uniform random choices, the same for the same seed."""

    plain = False

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.residents = self._random.randint(1, 4)

    def choose(self, count: int) -> int:
        """Return one of ``range(count)``."""
        return self._random.randrange(count)

    def arrange(self, lanes: list[Thread]) -> None:
        """Shuffle."""
        self._random.shuffle(lanes)


class Given(Policy):
    """Choices from a sequence of integers, 0 after its end.

    A number ``c`` chooses alternative ``c % count``; where ``c // count`` is odd, the lanes of that
    turn run from the highest to the lowest.
    """

    plain = False
    residents = 2

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = iter(numbers)
        self._reverse = False

    def choose(self, count: int) -> int:
        """Return one of ``range(count)``."""
        turn, choice = divmod(next(self._numbers, 0), count)
        self._reverse = turn % 2 == 1
        return choice

    def arrange(self, lanes: list[Thread]) -> None:
        """Reverse, where the number said so."""
        if self._reverse:
            lanes.reverse()
            self._reverse = False


class Asked(Policy):
    """Choices by a function: ``choose(count)``, such as a draw of Hypothesis."""

    plain = False
    residents = 2

    def __init__(self, choose: Callable[[int], int]) -> None:
        self._choose = choose

    def choose(self, count: int) -> int:
        """Return one of ``range(count)``."""
        return self._choose(count) % count


def make_policy(schedule: Any) -> Policy:
    """Return the policy of ``simulate``'s argument `schedule`.

    Raises
    ------
    TypeError
        It is none of a string, an integer, a sequence of integers, a function.
    ValueError
        An unknown string, or a negative number in the sequence.
    """
    if isinstance(schedule, str):
        if schedule != "round_robin":
            raise ValueError(
                "`schedule` must be 'round_robin', a seed, or a sequence of integers; got "
                f"{schedule!r}"
            )
        return Policy()
    if isinstance(schedule, int) and not isinstance(schedule, bool):
        return Seeded(schedule)
    if callable(schedule):
        return Asked(schedule)
    if isinstance(schedule, Sequence) and not isinstance(schedule, bytes):
        if not all(isinstance(number, int) for number in schedule):
            raise TypeError("`schedule` must hold integers only")
        if any(number < 0 for number in schedule):
            raise ValueError("`schedule` must hold no negative number")
        return Given(schedule)
    raise TypeError(
        "`schedule` must be 'round_robin', a seed, a sequence of integers, or a function of the "
        "number of "
        f"alternatives; got {type(schedule).__name__}"
    )
