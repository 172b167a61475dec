"""Where a call runs: golden model, simulated machine, or card.

Everything about plans and launches that the public functions need is reached through here.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from .._numba import SIMULATED_PROCESS
from .._parts import contiguous_call
from ..arrays import Array, stream_pointer
from ..errors import ToolchainError, UnsupportedError
from ._repeat import Repeated, remember

__all__ = ["GOLDEN", "Place", "copied", "copied_or_refused", "launch", "noted", "place"]

Named = Sequence[tuple[str, Array | None]]


class Place(NamedTuple):
    """The golden model (no device, no machine), a simulated machine, or a card and a stream."""

    device: int | None
    stream: int
    machine: Any
    #: What kernels are built for, such as "sm_90a"; "" for the golden model.
    arch: str

    @property
    def golden(self) -> bool:
        """Whether the NumPy golden model does the work."""
        return self.device is None and self.machine is None


GOLDEN = Place(None, 0, None, "")


def place(named: Named, stream: Any) -> Place:
    """Where a call with these arrays runs; the first is the one that decides.

    Parameters
    ----------
    named : sequence of (argument name, Array or None)
    stream
        The call's ``stream`` argument.

    Raises
    ------
    TypeError, ValueError
        A bad stream; arrays on different devices; without `stream`, arrays of two libraries that
        work on different streams: one of them could be read before it is written.
    ToolchainError
        GPU arrays without a driver, or under NUMBA_ENABLE_CUDASIM=1.
    UnsupportedError
        A GPU that no kernel is made for.
    """
    first_name, first = named[0]
    if first is None:
        raise ValueError(f"{first_name} must not be None")
    library, device = first.spec.library, first.spec.device
    handle = stream_pointer(first, stream)
    for name, array in named:
        if array is None or array is first:
            continue
        if array.spec.device != device:
            raise ValueError(
                f"{name} must be on the same device as {first_name}: {first_name} is on "
                f"{first.spec.where} ({library}), {name} on {array.spec.where} "
                f"({array.spec.library})"
            )
        if array.spec.library != library and device is not None and stream is None:
            other = stream_pointer(array, None)
            if other != handle:
                raise ValueError(
                    f"{first_name} is of {library} and {name} of {array.spec.library}, whose "
                    "current streams differ: pass stream= to say on which stream both are "
                    "ready"
                )
    if device is not None:
        if SIMULATED_PROCESS:
            raise ToolchainError(
                "NUMBA_ENABLE_CUDASIM is set, so that this process has no GPU: pass NumPy "
                "arrays, which run the kernels on the simulated machine, or start without it"
            )
        return Place(device, handle, None, _launcher().architecture(device))
    machine = _machine()
    return GOLDEN if machine is None else Place(None, 0, machine, machine.arch)


def _machine() -> Any:
    """The machine of the innermost ``with nvfp4.simulate()``, or of the process, or None."""
    if SIMULATED_PROCESS:
        from .. import sim

        return sim.current_machine() or sim.default_machine()
    # Another thread may be importing it at this moment: then nobody has entered a machine here.
    current = getattr(sys.modules.get("nvfp4.sim"), "current_machine", None)
    return None if current is None else current()


def copied(array: Array) -> Array:
    """A contiguous copy of a host array."""
    return arrays.as_array(np.array(arrays.host(array), order="C"), "copy")


def _moved(array: Array) -> Array:
    """A copy of a host array of the same strides, at an address that kernels can read from."""
    low, high = array.bounds()
    values = arrays.host(array)
    offset = array.pointer - low
    moved = np.ndarray(values.shape, values.dtype, bytearray(high - low), offset, values.strides)
    moved[...] = values
    return arrays.as_array(moved, "copy")


def copied_or_refused(name: str, array: Array, where: Place) -> Array:
    """Of rows that kernels cannot read: a copy for the simulated machine, an error on a GPU."""
    if where.machine is not None:
        return copied(array)
    spec = array.spec
    raise ValueError(
        f"{name} must be contiguous along its last axis on a GPU, and its other axes must fold "
        f"into two; got strides {spec.strides} bytes for shape {spec.shape}: pass "
        f"{contiguous_call(name, spec)}"
    )


#: What was launched on a card: name of the plan, launches, place, buffers.
Notes = list[tuple[str, Any, Place, Mapping[str, Any]]]

_notes: ContextVar[Notes | None] = ContextVar("notes", default=None)


@contextlib.contextmanager
def noted() -> Iterator[Notes]:
    """What is launched on a card inside, for a call that is made of several to be remembered."""
    notes: Notes = []
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def processors(where: Place) -> int:
    """Multiprocessors of the card; of a simulated machine those of an H200 by default."""
    if where.device is None:
        return int(where.machine.processors)
    found: int = _launcher().device_info(where.device).processors
    return found


def card(where: Place) -> tuple[str, int] | None:
    """Name and multiprocessors of the card, which tables of divisions go by."""
    if where.device is None:
        named: tuple[str, int] | None = where.machine.card
        return named
    info = _launcher().device_info(where.device)
    return info.name, info.processors


def launch(
    where: Place,
    plan: str,
    facts: Mapping[str, Any],
    buffers: Mapping[str, Any],
    *,
    outputs: tuple[str, ...],
    strided: str = "",
    launches: dict[Any, Any] | None = None,
    again: Repeated | None = None,
    **more: Any,
) -> None:
    """Plan for the architecture at hand, and launch.

    Parameters
    ----------
    where : Place
        Not the golden model.
    plan : str
        Name of the function of ``nvfp4.plans``.
    facts, more
        Its keyword arguments.
    buffers : mapping
        Name of a kernel's buffer -> Array, a number passed by value, or None.
    outputs : tuple of str
        The buffers that are written.
    strided : str
        The buffer whose rows may lie apart; all others are contiguous.
    launches : dict, optional
        Plans made for these facts before: (architecture, *more) -> launches.
    again : optional
        The call as ``_repeat.repeat`` knows it, to be remembered. All that is written is among its
        arguments.
    """
    launcher = _launcher()
    machine = where.machine
    planned = None
    if launches is not None:
        key = (where.arch, *more.values())
        planned = launches.get(key)
    if planned is None:
        planned = _plan(plan, where.arch)(where.arch, **facts, **more)
        if launches is not None:
            launches[key] = planned
    if machine is None:
        launcher.run(planned, buffers, stream=where.stream, device=where.device)
        notes = _notes.get()
        if notes is not None:
            notes.append((plan, planned, where, buffers))
        if again is not None:
            remember(
                again,
                lambda: launcher.prepare(planned, where.device, stream=where.stream),
                buffers,
                outputs,
            )
        return
    # Host arrays may be any views; on a GPU, those were refused.
    own = {
        name: copied(value)
        for name, value in buffers.items()
        if isinstance(value, Array) and name != strided and not value.spec.contiguous
    }
    for name, value in buffers.items():
        if isinstance(value, Array) and name not in own and value.pointer % value.spec.itemsize:
            own[name] = _moved(value)
    launcher.run(planned, {**buffers, **own}, stream=0, machine=machine)
    for name in own.keys() & set(outputs):
        arrays.host(buffers[name])[...] = arrays.host(own[name])


def _plan(name: str, arch: str) -> Callable[..., Any]:
    found: Callable[..., Any] | None = getattr(_planner(), name, None)
    if found is None:
        raise UnsupportedError(
            f"there is no kernel for {name} yet, on {arch} or elsewhere; NumPy arrays outside "
            "`with nvfp4.simulate()` are computed by the golden model"
        )
    return found


@functools.cache
def _launcher() -> ModuleType:
    from .. import launch

    return launch


@functools.cache
def _planner() -> ModuleType:
    from .. import plans

    return plans
