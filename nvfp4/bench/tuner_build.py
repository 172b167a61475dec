"""Build the kernels that a search needs, in several processes, while others are timed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any

from .. import compile as compiler
from .. import warm
from ..program import Program
from ..tuning import Choice
from .tuner import Product, forced, said
from .warmup import usable_cpus

__all__ = ["Builder", "build_one"]


def _programs(
    call: Mapping[str, Any], card: tuple[str, int], arch: str, choice: Choice | None
) -> list[Program]:
    with forced(choice):
        return warm.programs([call], arch, card)


def build_one(
    call: Mapping[str, Any], card: tuple[str, int], arch: str, choice: Choice | None, place: int
) -> tuple[str, int]:
    """Build one of the programs of a call, in a process of its own.

    Returns
    -------
    str, int
        Why it does not build, and bytes of registers that do not fit.
    """
    try:
        program = _programs(call, card, arch, choice)[place]
        binary = compiler.find(program, arch) or compiler.build(program, arch)
        return "", max(binary.spill_bytes)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}", 0


class Builder:
    """A pool of processes that builds; what is asked for first is built first.

    Parameters
    ----------
    jobs
        Processes; as many as CPUs that may be used by default.
    pool
        Takes their place.
    """

    def __init__(self, jobs: int | None = None, pool: Executor | None = None) -> None:
        self._before = set(multiprocessing.active_children())
        self._pool = pool or ProcessPoolExecutor(jobs or usable_cpus(), get_context("spawn"))
        self._tasks: dict[Program, Future[tuple[str, int]]] = {}
        self._needs: dict[Any, list[Future[tuple[str, int]]]] = {}

    @property
    def waiting(self) -> int:
        """Programs that are not built yet."""
        return sum(not task.done() for task in self._tasks.values())

    def want(self, product: Product, choices: Sequence[Choice]) -> None:
        """Begin to build what a product needs by the formulas and under each choice."""
        facts = (product.call, product.card, product.arch)
        for choice in (None, *choices):
            needed = []
            for place, program in enumerate(_programs(*facts, choice)):
                if program not in self._tasks:
                    self._tasks[program] = self._begin(program, facts, choice, place)
                needed.append(self._tasks[program])
            self._needs[_key(product, choice)] = needed

    def _begin(
        self, program: Program, facts: Any, choice: Choice | None, place: int
    ) -> Future[tuple[str, int]]:
        binary = compiler.find(program, facts[2])
        if binary is None:
            return self._pool.submit(build_one, facts[0], facts[1], facts[2], choice, place)
        done: Future[tuple[str, int]] = Future()
        done.set_result(("", max(binary.spill_bytes)))
        return done

    def usable(
        self, product: Product, choices: Sequence[Choice], seconds: float
    ) -> tuple[list[Choice], list[str]]:
        """What is built after so many seconds at most; and why other choices cannot be timed.

        Raises
        ------
        RuntimeError
            The formulas' own division does not build.
        TimeoutError
            It is not built yet.
        """
        every = {c: self._needs[_key(product, c)] for c in (None, *choices)}
        tasks = [task for needed in every.values() for task in needed]
        wait(tasks, timeout=max(0.0, seconds))
        found: list[Choice] = []
        notes = []
        for choice, needed in every.items():
            why = _why(needed, choice is not None)
            if choice is None:
                if why == _LATE:
                    raise TimeoutError(f"{product.label}: {why}")
                if why:
                    raise RuntimeError(f"the plan's own kernel does not build: {why}")
            elif why:
                notes.append(f"{said(choice)}: {why}")
            else:
                found.append(choice)
        return found, notes

    def close(self) -> None:
        """End it, and what is being built."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - self._before:
            child.terminate()


_LATE = "not built in time"


def _key(product: Product, choice: Choice | None) -> Any:
    return id(product), choice


def _why(needed: Sequence[Future[tuple[str, int]]], strict: bool) -> str:
    """Why a choice cannot be timed; strict: registers that do not fit are a reason."""
    if not all(task.done() for task in needed):
        return _LATE
    for task in needed:
        try:
            why, spilled = task.result()
        except Exception as error:  # the pool is broken, say
            why, spilled = f"{type(error).__name__}: {error}", 0
        if why:
            return why
        if spilled and strict:
            return f"spills {spilled} bytes"
    return ""
