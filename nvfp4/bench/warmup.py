"""Build what a suite needs before anything is timed: several processes, into the cache."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .. import compile as compiler
from .. import warm
from ..program import Program

__all__ = ["build", "missing", "usable_cpus"]

Calls = Sequence[dict[str, Any]]
Identity = tuple[str, int] | None


def usable_cpus(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPUs that this process may use: a container often has fewer than the machine."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # "max 100000", or microseconds and a period
        most, period = quota.read_text().split()
        count = min(count, max(1, int(most) // int(period)))
    return count


def _programs(calls: Calls, arch: str, card: Identity) -> list[Program]:
    return warm.programs([one for call in calls for one in warm.expand(call)], arch, card)


def missing(calls: Calls, arch: str, card: Identity = None) -> list[int]:
    """Which of the programs that calls need are not in the cache: their places."""
    found = _programs(calls, arch, card)
    return [i for i, program in enumerate(found) if compiler.find(program, arch) is None]


def _build_some(calls: Calls, arch: str, card: Identity, places: Sequence[int]) -> list[str]:
    """Build programs, in a process of its own; what could not be built."""
    found = _programs(calls, arch, card)
    errors = []
    for place in places:
        try:
            compiler.build(found[place], arch)
        except Exception as error:
            errors.append(f"{found[place].label}: {' '.join(str(error).split())}")
    return errors


def build(
    calls: Calls,
    arch: str,
    *,
    card: Identity = None,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[int, float]:
    """Build what is missing.

    Parameters
    ----------
    calls
        As ``nvfp4 compile --shapes`` takes them.
    arch
    card
        Name and multiprocessors, which plans and their tables go by.
    jobs
        Processes; as many as CPUs that may be used by default.
    say
        Told how far it is.

    Returns
    -------
    int, float
        Programs that were built, and seconds.

    Raises
    ------
    RuntimeError
        Something does not build.
    """
    began = time.monotonic()
    places = missing(calls, arch, card)
    if not places:
        return 0, time.monotonic() - began
    jobs = min(jobs or usable_cpus(), len(places))
    say(f"build {len(places)} kernels in {jobs} processes")
    errors: list[str] = []
    if jobs == 1:
        errors += _build_some(calls, arch, card, places)
    else:
        # Dealt out like cards: neighbours are alike, and take alike long. A process that ends
        # early does not help the others, but each pays for starting its compiler only once.
        hands = [places[i::jobs] for i in range(jobs)]
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            tasks = [pool.submit(_build_some, calls, arch, card, hand) for hand in hands]
            for task in as_completed(tasks):
                errors += task.result()
    if errors:
        raise RuntimeError("; ".join(errors))
    return len(places), time.monotonic() - began
