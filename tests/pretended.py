"""A GPU that is not there, for the host time of calls: arrays in host memory, launches of nothing.

Arrays are CuPy's and PyTorch's own where they are installed, so that looking at them costs what it
costs on a card; else those of a stub of CuPy, whose attributes are functions in Python.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

There = Callable[[np.ndarray], Any]


def pretend() -> dict[str, There]:
    """From now on this process has one H200, whose driver does nothing.

    Returns
    -------
    dict
        Name of an array library -> what makes a copy of a NumPy array "on the card".
    """
    from nvfp4 import driver, launch

    from .compile.fake_driver import FakeDriver

    fake = FakeDriver(count=1)
    fake.stack.append(0)
    loaded = SimpleNamespace(handle=1)
    driver.driver = functools.cache(lambda: fake)
    driver._library = lambda binding: _library()
    launch._ready = lambda *args: loaded  # type: ignore[assignment, return-value]
    launch.architecture = lambda device: "sm_90a"  # type: ignore[assignment]
    libraries = {}
    if importlib.util.find_spec("torch") is not None:
        libraries["torch"] = _torch()
    libraries["cupy"] = _stub() if importlib.util.find_spec("cupy") is None else _cupy()
    return libraries


def _library() -> Any:
    """A function in C that is called as the driver's is, and returns 0: it compares pointers."""
    launched = ctypes.CDLL(None).pthread_equal
    return SimpleNamespace(cuLaunchKernelEx=launched, cuCtxGetDevice=lambda place: 0)


def _aligned(size: int) -> np.ndarray:
    """Memory as an allocator of a card's gives it."""
    memory = np.zeros(size + 256, np.uint8)
    skip = -memory.ctypes.data % 256
    return memory[skip : skip + size]


def _copied(x: np.ndarray) -> np.ndarray:
    memory = _aligned(x.nbytes)
    memory[:] = np.array(x, order="C").reshape(-1).view(np.uint8)
    return memory


def _cupy() -> There:
    import cupy

    stream = SimpleNamespace(ptr=0)
    cupy.cuda.get_current_stream = lambda device: stream

    def there(x: np.ndarray) -> Any:
        memory = _copied(x)
        size = max(x.nbytes, 1)
        owned = cupy.cuda.UnownedMemory(memory.ctypes.data, size, memory, device_id=0)
        return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(owned, 0))

    return there


def _stub() -> There:
    from .api import stubs

    sys.modules["cupy"] = cupy = stubs.Cupy()
    stream = SimpleNamespace(ptr=0)
    cupy.cuda.get_current_stream = lambda device: stream
    return lambda x: stubs.CupyArray(np.ndarray(x.shape, x.dtype, _copied(x)))


def _torch() -> There:
    import torch

    from nvfp4 import _readers
    from nvfp4.arrays import Array

    read = _readers._from_torch

    def on_the_card(tensor: Any, name: str, stream: Any = None) -> Array:
        array = read(tensor, name, stream)
        return Array(array.owner, array.spec._replace(device=0), array.pointer)

    _readers._from_torch = on_the_card
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=0)
    torch._C._cuda_getCurrentRawStream = abs  # of device 0

    def there(x: np.ndarray) -> Any:
        memory = torch.from_numpy(_copied(x))
        if x.dtype == ml_dtypes.bfloat16:
            return memory.view(torch.bfloat16).reshape(x.shape)
        return memory.view(getattr(torch, x.dtype.name)).reshape(x.shape)

    return there
