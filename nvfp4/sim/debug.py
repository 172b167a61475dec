"""``breakpoint()`` in a kernel: pdb, which does not step into the machine's models."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any


def _set_trace(*_arguments: Any, **_options: Any) -> None:
    import pdb

    debugger = pdb.Pdb(skip=["nvfp4.sim", "nvfp4.sim.*", "nvfp4.ptx.*", "contextlib"])
    debugger.set_trace(sys._getframe(1))


@contextlib.contextmanager
def breakpoints() -> Iterator[None]:
    """Let ``breakpoint()`` stop in kernels only, where nobody has set another debugger."""
    theirs = sys.breakpointhook is not sys.__breakpointhook__
    if theirs or os.environ.get("PYTHONBREAKPOINT"):
        yield
        return
    sys.breakpointhook = _set_trace
    try:
        yield
    finally:
        sys.breakpointhook = sys.__breakpointhook__
