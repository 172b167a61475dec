"""Which line of a kernel a thread is at: the kernel's, not a model's that it calls."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import greenlet
import numpy

from .errors import Finding

if TYPE_CHECKING:
    from .thread import Thread

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = sysconfig.get_paths()["stdlib"]
# Not the kernel's: this package's machine and models, and what a kernel's Python runs through.
_FOREIGN = (
    os.path.join(_PACKAGE, "sim") + os.sep,
    os.path.join(_PACKAGE, "ptx") + os.sep,
    os.path.join(_PACKAGE, "_numba.py"),
    *(os.path.join(_LIBRARY, name) for name in ("contextlib.", "functools.", "pdb.", "bdb.")),
    *(os.path.dirname(str(module.__file__)) + os.sep for module in (greenlet, numpy)),
    "<frozen",
)
_NUMBAS_SIMULATOR = os.path.join("numba", "cuda", "simulator") + os.sep
_known: dict[CodeType, bool] = {}


def model(function: _Function) -> _Function:
    """Mark a function outside of ``nvfp4.ptx`` as a model: errors in it name its caller's line."""
    _known[function.__code__] = False
    return function


def is_kernel_code(code: CodeType) -> bool:
    """Whether the code is a kernel's body or helper, not the engine's or a model's."""
    known = _known.get(code)
    if known is None:
        name = code.co_filename
        known = not name.startswith(_FOREIGN) and _NUMBAS_SIMULATOR not in name
        _known[code] = known
    return known


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def kernel_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame, from `frame` outwards, that is a kernel's; else None."""
    for candidate in _outward(frame):
        if is_kernel_code(candidate.f_code):
            return candidate
    return None


def call_site(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """Where in the kernel a frame is: code and instruction of each kernel frame, innermost first.

    Instructions and not lines: Python, and Numba after it, makes two copies of a loop's condition,
    and a barrier in the one is another barrier than that in the other.
    """
    return tuple(
        (candidate.f_code, candidate.f_lasti)
        for candidate in _outward(frame)
        if is_kernel_code(candidate.f_code)
    )


def site_text(site: tuple[tuple[CodeType, int], ...]) -> str:
    """``file:line`` of a :func:`call_site`."""
    if not site:
        return "an unknown line"
    code, instruction = site[0]
    return f"{os.path.basename(code.co_filename)}:{line_of(code, instruction)}"


def line_of(code: CodeType, instruction: int) -> int:
    """The line of an instruction given by its byte offset, as in ``frame.f_lasti``."""
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            line = number
    return line


def describe(thread: Thread) -> str:
    """``file:line`` where a suspended thread is."""
    frame = kernel_frame(thread.frame)
    if frame is None:
        return "an unknown line"
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def locate(error: Finding, thread: Thread, frame: FrameType | None = None) -> None:
    """Fill the place into a finding: the given frame's kernel line, or the one of its traceback."""
    if error.kernel is not None:
        return
    error.kernel = thread.block.launch.name
    error.block = thread.block.block_index
    error.thread = thread.thread_index
    found: tuple[CodeType, int] | None = None
    if frame is not None:
        inner = kernel_frame(frame)
        if inner is not None:
            found = inner.f_code, inner.f_lineno
    else:
        traceback: TracebackType | None = error.__traceback__
        while traceback is not None:
            if is_kernel_code(traceback.tb_frame.f_code):
                found = traceback.tb_frame.f_code, traceback.tb_lineno
            traceback = traceback.tb_next
    if found is not None:
        error.file, error.line, error.function = found[0].co_filename, found[1], found[0].co_name
