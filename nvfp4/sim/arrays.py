"""Arrays of users' kernels (shared, local, global) that report what is done with them.

Without checks a kernel gets plain NumPy arrays. With checks it gets a :class:`CheckedArray`, which
behaves as the array does in a kernel and tells a :class:`nvfp4.sim.memory.Region` of each element
that is read or written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .errors import OutOfBounds, UnwrittenRead
from .shared import POISON, Region

_VIEWS = ("reshape", "transpose", "view", "ravel", "squeeze", "swapaxes")


class LocalRegion:
    """A thread's own memory: only whether it is written before it is read."""

    def __init__(self, nbytes: int) -> None:
        self._written = bytearray(nbytes)

    def note_read(self, address: int, nbytes: int, atomic: bool = False) -> None:
        """Check a read."""
        if self._written.find(0, address, address + nbytes) >= 0:
            raise UnwrittenRead(
                f"unwritten read: {nbytes} bytes at {address:#x} of a local array",
                address=address,
                buffer="local array",
            )

    def note_write(
        self, address: int, nbytes: int, atomic: bool = False, silent: bool = False
    ) -> None:
        """Remember a write."""
        self._written[address : address + nbytes] = b"\1" * nbytes

    def synchronise(self, address: int) -> None:
        """No other thread sees it."""


class CheckedArray(np.lib.mixins.NDArrayOperatorsMixin):
    """A NumPy array whose elements' reads and writes are reported.

    Parameters
    ----------
    array
        The memory.
    region
        Who is told.
    shift
        Added to an element's address in this process to give its address in the region.
    name
        For messages.
    """

    __slots__ = ("_array", "_name", "_region", "_shift", "_start")

    def __init__(self, array: np.ndarray, region: Region, shift: int, name: str) -> None:
        self._array = array
        self._region = region
        self._shift = shift
        self._name = name
        self._start = array.ctypes.data + shift

    def _wrap(self, array: np.ndarray) -> CheckedArray:
        return CheckedArray(array, self._region, self._shift, self._name)

    # Elements ------------------------------------------------------------------------------------

    def _address(self, index: Any) -> int:
        """Return the address of one element; `index` has been used, so it is in range."""
        array = self._array
        address = self._start
        if type(index) is not tuple:
            index = (index,)
        for at, size, stride in zip(index, array.shape, array.strides, strict=False):
            address += (at + size if at < 0 else at) * stride
        return int(address)

    def _get(self, index: Any) -> Any:
        try:
            return self._array[index]
        except IndexError as error:
            raise OutOfBounds(
                f"out of bounds: {self._name}[{_text(index)}], its shape is {self._array.shape}",
                buffer=self._name,
            ) from error

    def __getitem__(self, index: Any) -> Any:
        value = self._get(index)
        if type(value) is np.ndarray:
            if np.may_share_memory(value, self._array) or not value.size:
                return self._wrap(value)
            self._note_all(self._array, self._region.note_read)
            return value
        self._region.note_read(self._address(index), self._array.itemsize)
        return value

    def __setitem__(self, index: Any, value: Any) -> None:
        old = self._get(index)
        if isinstance(value, CheckedArray):
            value = value.__array__()
        if type(old) is np.ndarray:
            self._note_all(old, self._region.note_write)
        else:
            silent = bool(old == value)
            self._region.note_write(self._address(index), self._array.itemsize, False, silent)
        self._array[index] = value

    def atomic(self, index: Any, function: Callable[[Any], Any]) -> Any:
        """Replace an element by ``function(old)`` in one step, and return what it was."""
        old = self._get(index)
        address, size = self._address(index), self._array.itemsize
        self._region.note_write(address, size, True)
        self._region.synchronise(address)
        self._array[index] = function(old)
        return old

    # Whole arrays --------------------------------------------------------------------------------

    def _note_all(self, array: np.ndarray, note: Callable[[int, int], Any]) -> None:
        for address, nbytes in _spans(array):
            note(address + self._shift, nbytes)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._note_all(self._array, self._region.note_read)
        return np.array(self._array, dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        arrays = []
        for item in inputs:
            if isinstance(item, CheckedArray):
                item._note_all(item._array, item._region.note_read)
                item = item._array
            arrays.append(item)
        out = options.get("out")
        if out is not None:
            plain = []
            for item in out:
                if isinstance(item, CheckedArray):
                    item._note_all(item._array, item._region.note_write)
                    item = item._array
                plain.append(item)
            options["out"] = tuple(plain)
        return getattr(ufunc, method)(*arrays, **options)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._array, name)
        if isinstance(value, np.ndarray):
            return self._wrap(value)
        if not callable(value):
            return value

        def method(*arguments: Any, **options: Any) -> Any:
            if name == "fill":
                self._note_all(self._array, self._region.note_write)
            elif name not in _VIEWS:
                self._note_all(self._array, self._region.note_read)
            result = value(*arguments, **options)
            if isinstance(result, np.ndarray) and np.may_share_memory(result, self._array):
                return self._wrap(result)
            return result

        return method

    def __len__(self) -> int:
        return len(self._array)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self._array)))

    def __bool__(self) -> bool:
        return bool(self.__array__())

    def __repr__(self) -> str:
        return f"{self._name}: {self._array!r}"


def _text(index: Any) -> str:
    return ", ".join(map(str, index)) if isinstance(index, tuple) else str(index)


def _spans(array: np.ndarray) -> Iterator[tuple[int, int]]:
    """Give the address and length of pieces without gaps that make up an array."""
    if not array.size:
        return
    if array.flags.c_contiguous or array.flags.f_contiguous:
        yield array.ctypes.data, array.nbytes
        return
    for index in np.ndindex(*array.shape):
        offset = sum(at * stride for at, stride in zip(index, array.strides, strict=True))
        yield array.ctypes.data + offset, array.itemsize


def local_array(shape: Any, dtype: np.dtype, checked: bool) -> Any:
    """Return a thread's array, filled with poison."""
    count = math.prod(shape) if isinstance(shape, tuple) else int(shape)
    array = np.full(count * dtype.itemsize, POISON, np.uint8).view(dtype).reshape(shape)
    if not checked or dtype.names is not None:
        return array
    return CheckedArray(array, LocalRegion(array.nbytes), -array.ctypes.data, "local array")
