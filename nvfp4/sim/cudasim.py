"""Users' own ``@cuda.jit`` kernels on the simulated machine, with ``NUMBA_ENABLE_CUDASIM=1``.

Importing this module replaces the block scheduler of Numba's simulator, and the ``cuda`` that
kernels see, by this package's: kernels launch as before, shuffles and votes work, and mistakes are
reported. The machine is the one of the enclosing ``nvfp4.simulate``, else one of architecture
sm_90a with all checks. Arguments, their copies to the "device" and back, and everything outside of
kernels stay Numba's.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from greenlet import getcurrent

from .. import _numba
from . import facade
from .arrays import CheckedArray
from .errors import Finding
from .libdevice import model as libdevice_model
from .machine import Machine, current_machine, default_machine
from .memory import GlobalRegion

__all__ = ["install", "uninstall"]


class _Swap:
    """Where the module ``numba.cuda`` is replaced during a launch: globals and closures."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._globals: dict[int, tuple[dict[str, Any], list[str]]] = {}
        self._cells: dict[int, Any] = {}

    def enter(self, function: Any) -> None:
        """Replace it for a function, if that is not done yet."""
        scope = function.__globals__
        if id(scope) not in self._globals:
            names = [name for name, value in scope.items() if value is self.module]
            self._globals[id(scope)] = scope, names
            for name in names:
                scope[name] = facade.cuda
        for cell in function.__closure__ or ():
            if id(cell) not in self._cells and _contents(cell) is self.module:
                self._cells[id(cell)] = cell
                cell.cell_contents = facade.cuda

    def leave(self) -> None:
        """Put the module back everywhere."""
        for scope, names in self._globals.values():
            for name in names:
                if scope.get(name) is facade.cuda:
                    scope[name] = self.module
        for cell in self._cells.values():
            cell.cell_contents = self.module


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


class _Runner:
    """What a kernel's call does in place of Numba's."""

    def __init__(self, module: Any, kernel: Any) -> None:
        self.module = module
        self.kernel = kernel
        self.swap: _Swap | None = None
        self.lock = threading.RLock()

    def call(self, dispatcher: Any, *args: Any) -> Any:
        """Run a kernel, or call a device function from the running kernel."""
        if hasattr(getcurrent(), "thread"):
            if self.swap is not None:
                self.swap.enter(dispatcher.fn)
            return dispatcher.fn(*args)
        if dispatcher._device:
            return dispatcher.fn(*args)
        grid, block = self.kernel.normalize_kernel_dimensions(
            dispatcher.grid_dim, dispatcher.block_dim
        )
        with self.lock:
            write_back: list[Callable[[], Any]] = []
            prepared = [self._argument(dispatcher, argument, write_back) for argument in args]
            machine = current_machine() or default_machine()
            names = dispatcher.fn.__code__.co_varnames
            prepared = [
                _plain(argument, name, machine.checks.races)
                for argument, name in zip(prepared, names[: len(prepared)], strict=True)
            ]
            self.swap = _Swap(self.module)
            self.swap.enter(dispatcher.fn)
            try:
                # A grid without blocks (``forall(0)``) is nothing to do, here as on the card.
                if all(grid):
                    self._run(machine, dispatcher, grid, block, prepared)
            finally:
                self.swap.leave()
                self.swap = None
            for copy in write_back:
                copy()
        return None

    def _run(
        self, machine: Machine, dispatcher: Any, grid: Any, block: Any, args: list[Any]
    ) -> None:
        function = dispatcher.fn
        if dispatcher._debug:
            function = _with_division_errors(function)
        try:
            machine.run(function, grid, block, dispatcher.dynshared_size, args)
        except Finding:
            raise
        except Exception as error:
            # As Numba's simulator reports it.
            thread = getattr(error, "simulated_thread", None)
            if thread is None:
                raise
            place = f"tid={list(thread.thread_index)} ctaid={list(thread.block.block_index)}"
            message = f"{place}: {error}" if str(error) else place
            try:
                named = type(error)(message)
            except Exception:
                raise error from None
            raise named.with_traceback(error.__traceback__) from error

    def _argument(self, dispatcher: Any, argument: Any, write_back: list[Callable[[], Any]]) -> Any:
        """Return what the kernel gets for an argument, as Numba's simulator makes it."""
        kernel = self.kernel
        for extension in dispatcher.extensions:
            _, argument = extension.prepare_args(None, argument, stream=0, retr=write_back)
        if isinstance(argument, np.ndarray) and argument.ndim > 0:
            argument = kernel.InOut(argument).to_device(write_back)
        elif isinstance(argument, kernel.ArgHint):
            argument = argument.to_device(write_back)
        elif isinstance(argument, np.void):
            argument = kernel.FakeCUDAArray(argument)
        if isinstance(argument, kernel.FakeCUDAArray):
            argument = kernel.FakeWithinKernelCUDAArray(argument)
        return argument


def _with_division_errors(function: FunctionType) -> Callable[..., Any]:
    """Return a kernel compiled with ``debug=True``: dividing by zero raises."""

    @functools.wraps(function)
    def debugged(*args: Any) -> None:
        with np.errstate(divide="raise"):
            function(*args)

    return debugged


def _plain(argument: Any, name: str, watched: bool) -> Any:
    """Return an array argument as NumPy's, or as one that reports to the race check.

    Numba's own wrapper of arguments costs a microsecond an access. It is needed for arrays of
    records.
    """
    array = getattr(argument, "_item", None)
    array = getattr(array, "_ary", None)
    if not isinstance(array, np.ndarray) or array.dtype.names is not None or not array.ndim:
        return argument
    if not watched:
        return array
    start = array.ctypes.data
    low, high = np.lib.array_utils.byte_bounds(array) if array.size else (start, start)
    granule = math.gcd(array.itemsize, low, *array.strides) or 1
    return CheckedArray(array, GlobalRegion(low, high, granule, name), 0, name)


#: What :func:`uninstall` puts back: (object, attribute, value).
_replaced: list[tuple[Any, str, Any]] = []


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)


def install() -> None:
    """Put this package's machine in place of the scheduler of Numba's simulator.

    Raises
    ------
    ToolchainError
        The process was not started with ``NUMBA_ENABLE_CUDASIM=1``, or numba-cuda is missing.
    """
    if _replaced:
        return
    module, kernel, libdevice, as_dtype = _numba.simulator_modules()
    runner = _Runner(module, kernel)

    def call(self: Any, *args: Any) -> Any:
        return runner.call(self, *args)

    _replace(kernel.FakeCUDAKernel, "__call__", call)
    for name, kind in kernel.FakeCUDAModule((1, 1, 1), (1, 1, 1), 0).__dict__.items():
        if not name.startswith("_") and name not in ("gridDim", "blockDim"):
            setattr(facade.Cuda, name, kind)
    facade.type_to_dtype = as_dtype
    for name, value in list(vars(libdevice).items()):
        if isinstance(value, FunctionType) and value.__module__ == libdevice.__name__:
            _replace(libdevice, name, libdevice_model(name))
    _replace(module, "jit", _remembering(vars(module)["jit"], kernel.FakeCUDAKernel))


def uninstall() -> None:
    """Put Numba's own scheduler back."""
    while _replaced:
        setattr(*_replaced.pop())


def _remembering(jit: Callable[..., Any], kind: type) -> Callable[..., Any]:
    """Return ``cuda.jit``, noting which functions are to be inlined."""

    @functools.wraps(jit)
    def noting(*args: Any, **options: Any) -> Any:
        made = jit(*args, **options)
        if options.get("inline") not in ("always", True):
            return made
        if isinstance(made, kind):
            facade.inlined.add(made.fn.__code__)  # type: ignore[attr-defined]
            return made

        def decorate(function: Any) -> Any:
            facade.inlined.add(function.__code__)
            return made(function)

        return decorate

    return noting


install()
