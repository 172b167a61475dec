"""The CUDA thread that runs now, if one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from greenlet import getcurrent

if TYPE_CHECKING:
    from .thread import Thread


def running_thread() -> Thread | None:
    """Return the running CUDA thread; None for the host, which a launch orders."""
    return getattr(getcurrent(), "thread", None)


def this_thread() -> Thread:
    """Return the CUDA thread that is running.

    Raises
    ------
    RuntimeError
        No simulated kernel is running.
    """
    try:
        return getcurrent().thread  # type: ignore[no-any-return]
    except AttributeError:
        pass
    raise RuntimeError(
        "no simulated kernel is running: this has a meaning in a kernel's thread only"
    )
