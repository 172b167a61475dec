"""Tensor maps that launches need: what they say, and those that are on a device.

A plan knows shapes and no addresses, so a launch says by :class:`MapOf` which buffer a map is of.
When its arguments are bound, the device's :class:`DeviceMaps` has the map of that address, or makes
it. Once there, a map stays for the life of the process: see docs/decisions.md D10.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import driver as _driver
from .driver import check, on_device, uncaptured
from .ptx.tensor_map import TensorMap, encode, encode_on_card

__all__ = ["DeviceMaps", "MapOf", "maps_on"]

MAP_BYTES = 128
#: Maps for which memory is taken at a time: 64 KiB.
MAPS_AT_A_TIME = 512


@dataclass(frozen=True)
class MapOf:
    """A tensor map of a buffer; beside the buffer's name, as :class:`TensorMap` has it.

    Element 0 is `offset` bytes behind the buffer's first.
    """

    buffer: str
    element: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0
    offset: int = 0

    def at(self, address: int) -> TensorMap:
        """The map where the buffer is at this address.

        Raises
        ------
        ValueError
            It breaks a rule of :class:`TensorMap`.
        """
        return TensorMap(
            *(address + self.offset, self.element, self.shape),
            *(self.strides, self.box, self.swizzle),
        )

    def simulated(self, address: int) -> np.ndarray:
        """16 words, uint64, as the simulated machine reads them, 64-byte aligned."""
        memory = np.zeros(MAP_BYTES + 64, np.uint8)
        start = -memory.ctypes.data % 64
        made = memory[start : start + MAP_BYTES]
        made[:] = np.frombuffer(encode(self.at(address)), np.uint8)
        words: np.ndarray = made.view(np.uint64)
        return words


Write = Callable[[int, Sequence[int], int], None]


class DeviceMaps:
    """The tensor maps on one device. Threads share it.

    Parameters
    ----------
    ordinal
    write
        Puts 16 words at an address, on a stream.
    """

    def __init__(self, ordinal: int, write: Write) -> None:
        self._ordinal, self._write = ordinal, write
        self._lock = threading.Lock()
        self._known: dict[tuple[MapOf, int], int] = {}
        self._free: list[int] = []
        self._memory: list[Any] = []
        cuda = _driver.driver()
        kind = cuda.CUstream_flags.CU_STREAM_NON_BLOCKING
        with on_device(ordinal), uncaptured(cuda):
            self._stream = check(cuda.cuStreamCreate(int(kind)), "making a stream for tensor maps")
            # Here already, so that a capture that comes later finds memory.
            self._more()

    def __len__(self) -> int:
        return len(self._known)

    def address(self, one: MapOf, buffer: int) -> int:
        """Address of the map of a buffer at an address, which is made if it is not there.

        A map that is made is there when this returns: the host waits for the kernel that writes it,
        on a stream of its own, whatever the caller's stream is doing or capturing.
        """
        key = one, buffer
        found = self._known.get(key)
        return self._make(key) if found is None else found

    def _make(self, key: tuple[MapOf, int]) -> int:
        one, buffer = key
        words = struct.unpack("<16Q", encode_on_card(one.at(buffer)))
        cuda = _driver.driver()
        with self._lock, on_device(self._ordinal), uncaptured(cuda):
            found = self._known.get(key)
            if found is not None:
                return found
            if not self._free:
                self._more()
            place = self._free.pop()
            self._write(place, words, int(self._stream))
            check(cuda.cuStreamSynchronize(self._stream), "writing a tensor map")
            self._known[key] = place
            return place

    def _more(self) -> None:
        cuda = _driver.driver()
        memory = check(cuda.cuMemAlloc(MAPS_AT_A_TIME * MAP_BYTES), "memory for tensor maps")
        self._memory.append(memory)
        start = int(memory)
        self._free += [start + MAP_BYTES * i for i in reversed(range(MAPS_AT_A_TIME))]


_maps: dict[int, DeviceMaps] = {}
_making = threading.RLock()


def maps_on(ordinal: int, write: Write) -> DeviceMaps:
    """The maps of a device; made with `write` if it has none yet."""
    with _making:
        if ordinal not in _maps:
            _maps[ordinal] = DeviceMaps(ordinal, write)
        return _maps[ordinal]
