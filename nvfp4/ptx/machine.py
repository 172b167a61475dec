"""Where models find the simulated thread that runs them; the simulator is imported when asked."""

from __future__ import annotations

from typing import Any

_this_thread: Any = None
_engines: Any = None


def thread() -> Any:
    """The simulated CUDA thread that is running (``nvfp4.sim.Thread``)."""
    global _this_thread
    if _this_thread is None:
        from ..sim import this_thread

        _this_thread = this_thread
    return _this_thread()


def engines() -> Any:
    """What the simulated machine does asynchronously (``nvfp4.sim.engines``)."""
    global _engines
    if _engines is None:
        from ..sim import engines

        _engines = engines
    return _engines
