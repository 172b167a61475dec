"""Shared memory: bounds, alignment, what was written, and who touched it."""

from __future__ import annotations

from typing import Any, Protocol

from .atomics import ITEMSIZE, combine, from_bits, to_bits
from .current import running_thread
from .errors import Misaligned, OutOfBounds, UnwrittenRead
from .order import Access, Record, Shadow, fence

#: What memory holds before something is written to it.
POISON = 0xAA

#: Shared-memory address of a block's first dynamic byte: 1024-byte aligned and not 0, so that a
#: forgotten base shows.
SHARED_BASE = 0x400


class Region(Protocol):
    """What an array proxy reports its accesses to."""

    def note_read(self, address: int, nbytes: int, atomic: bool = False) -> None:
        """Check and remember a read."""

    def note_write(
        self, address: int, nbytes: int, atomic: bool = False, silent: bool = False
    ) -> None:
        """Check and remember a write; `silent` where it stores what is there."""

    def synchronise(self, address: int) -> None:
        """Order the threads that meet in an atomic operation at this address."""


class SharedMemory:
    """Bytes with 32-bit addresses from `base` on, bounds and alignment checked and nothing else."""

    __slots__ = ("base", "data", "name", "size")

    def __init__(self, size: int, base: int = SHARED_BASE, name: str = "shared memory") -> None:
        self.base = base
        self.size = size
        self.name = name
        self.data = bytearray([POISON]) * size

    def load(self, address: int, nbytes: int, order: str = "weak") -> int:
        """Return `nbytes` (1, 2, 4, 8, 16) bytes as a little-endian integer.

        `order` is ``"weak"``, ``"relaxed"`` or ``"acquire"``, as for :meth:`GlobalPointer.load`.
        """
        offset = address - self.base
        if offset < 0 or offset + nbytes > self.size or address % nbytes:
            raise self._bad("load", address, nbytes)
        return int.from_bytes(self.data[offset : offset + nbytes], "little")

    def store(self, address: int, nbytes: int, value: int, order: str = "weak") -> None:
        """Store the low `nbytes` bytes of an integer; `order` may be ``"release"``."""
        offset = address - self.base
        if offset < 0 or offset + nbytes > self.size or address % nbytes:
            raise self._bad("store", address, nbytes)
        self.data[offset : offset + nbytes] = (int(value) & ((1 << 8 * nbytes) - 1)).to_bytes(
            nbytes, "little"
        )

    def atomic(
        self, operation: str, address: int, value: Any, dtype: str = "u32", compare: Any = None
    ) -> Any:
        """Do an operation of ``atomics.OPERATIONS``, or ``cas``; return what was there."""
        nbytes = ITEMSIZE[dtype]
        offset = address - self.base
        if offset < 0 or offset + nbytes > self.size or address % nbytes:
            raise self._bad("atomic", address, nbytes)
        self._note_atomic(address, nbytes)
        old = from_bits(int.from_bytes(self.data[offset : offset + nbytes], "little"), dtype)
        new = to_bits(combine(operation, dtype, old, value, compare), dtype)
        self.data[offset : offset + nbytes] = new.to_bytes(nbytes, "little")
        thread = running_thread()
        if thread is not None:
            thread.spin()
        return old

    def read(self, address: int, nbytes: int) -> bytes:
        """Return any number of bytes, as an engine's copy reads them; no alignment is asked for."""
        offset = address - self.base
        if offset < 0 or offset + nbytes > self.size:
            raise self._bad("read", address, nbytes)
        self.note_read(address, nbytes)
        return bytes(self.data[offset : offset + nbytes])

    def write(self, address: int, data: bytes) -> None:
        """Store any number of bytes."""
        offset = address - self.base
        if offset < 0 or offset + len(data) > self.size:
            raise self._bad("write", address, len(data))
        if data:
            self.note_write(address, len(data))
        self.data[offset : offset + len(data)] = data

    def note_read(self, address: int, nbytes: int, atomic: bool = False) -> None:
        """Check and remember a read of bytes that are in bounds."""

    def note_write(
        self, address: int, nbytes: int, atomic: bool = False, silent: bool = False
    ) -> None:
        """Check and remember a write of bytes that are in bounds."""

    def begin_read(self, access: Access | None, address: int, nbytes: int) -> None:
        """Check that an engine may read these bytes from now on; `access` where races are."""
        self._check_bounds("read", address, nbytes)

    def begin_write(self, access: Access | None, address: int, nbytes: int) -> None:
        """Check that an engine may write these bytes from now on."""
        self._check_bounds("write", address, nbytes)

    def readers(self, address: int, nbytes: int) -> list[Record]:
        """Who has read these bytes since they were written, where races are checked."""
        return []

    def take(self, address: int, nbytes: int) -> bytes:
        """Return bytes as they are when an engine reads them, which has been checked."""
        offset = address - self.base
        return bytes(self.data[offset : offset + nbytes])

    def put(self, address: int, data: bytes) -> None:
        """Store bytes when an engine writes them."""
        offset = address - self.base
        self.data[offset : offset + len(data)] = data

    def forget(self, address: int, nbytes: int) -> None:
        """Leave bytes undefined, in bounds: what an engine says it does not write."""
        self.put(address, bytes([POISON]) * nbytes)

    def _check_bounds(self, what: str, address: int, nbytes: int) -> None:
        offset = address - self.base
        if offset < 0 or offset + nbytes > self.size:
            raise self._bad(what, address, nbytes)

    def synchronise(self, address: int) -> None:
        """Order the threads that meet in an atomic operation at this address."""

    def _note_atomic(self, address: int, nbytes: int) -> None:
        pass

    def _bad(self, what: str, address: int, nbytes: int) -> OutOfBounds | Misaligned:
        place = f"{what} of {nbytes} bytes at {address:#x} of {self.name}"
        offset = address - self.base
        if 0 <= offset and offset + nbytes <= self.size:
            return Misaligned(
                f"{place}: misaligned, the address is not a multiple of {nbytes}",
                address=address,
                buffer=self.name,
            )
        end = self.base + self.size
        return OutOfBounds(
            f"{place}: out of bounds, the block has {self.size} bytes there, from {self.base:#x} "
            f"to {end:#x}",
            address=address,
            buffer=self.name,
        )


class CheckedSharedMemory(SharedMemory):
    """Shared memory that also reports reads of unwritten bytes, and data races."""

    __slots__ = ("_shadow", "_written")

    def __init__(
        self,
        size: int,
        base: int = SHARED_BASE,
        name: str = "shared memory",
        *,
        unwritten: bool = True,
        races: bool = True,
    ) -> None:
        super().__init__(size, base, name)
        self._written = bytearray(size) if unwritten else None
        self._shadow: Shadow | None = None
        if races:
            self._shadow = Shadow(
                size, lambda cell: f"byte {base + cell:#x} of {name}", base.__add__, by_block=False
            )

    def load(self, address: int, nbytes: int, order: str = "weak") -> int:
        """Return bytes as an integer, all of them written before."""
        value = SharedMemory.load(self, address, nbytes)
        atomic = order != "weak"
        self.note_read(address, nbytes, atomic)
        if atomic and self._shadow is not None:
            thread = running_thread()
            if thread is not None:
                self._shadow.synchronise(thread, address - self.base, reads=True, writes=False)
        return value

    def store(self, address: int, nbytes: int, value: int, order: str = "weak") -> None:
        """Store bytes, and remember that they are written and by whom."""
        offset = address - self.base
        before = self.data[offset : offset + nbytes]
        SharedMemory.store(self, address, nbytes, value)
        if order != "weak":
            thread = running_thread()
            if thread is not None and self._shadow is not None:
                if order == "release":
                    fence(thread)
                self._shadow.synchronise(thread, offset, reads=False, writes=True)
        silent = before == self.data[offset : offset + nbytes]
        self.note_write(address, nbytes, order != "weak", silent)

    def note_read(self, address: int, nbytes: int, atomic: bool = False) -> None:
        """Check and remember a read of bytes that are in bounds."""
        offset = address - self.base
        if self._shadow is not None:
            thread = running_thread()
            if thread is not None:
                self._shadow.read(thread, offset, offset + nbytes, atomic)
        self._check_written(address, nbytes)

    def _check_written(self, address: int, nbytes: int) -> None:
        offset = address - self.base
        written = self._written
        if written is not None:
            hole = written.find(0, offset, offset + nbytes)
            if hole >= 0:
                raise UnwrittenRead(
                    f"unwritten read: {nbytes} bytes at {address:#x} of {self.name}, of which byte "
                    f"{self.base + hole:#x} was never written",
                    address=address,
                    buffer=self.name,
                )

    def begin_read(self, access: Access | None, address: int, nbytes: int) -> None:
        """Check that an engine may read these bytes from now on."""
        self._check_bounds("read", address, nbytes)
        offset = address - self.base
        if self._shadow is not None and access is not None:
            self._shadow.read(access, offset, offset + nbytes)
            self._shadow.check_proxy(access, offset, offset + nbytes, "shared")
        self._check_written(address, nbytes)

    def begin_write(self, access: Access | None, address: int, nbytes: int) -> None:
        """Check that an engine may write these bytes from now on."""
        self._check_bounds("write", address, nbytes)
        offset = address - self.base
        if self._shadow is not None and access is not None:
            self._shadow.check_proxy(access, offset, offset + nbytes, "shared")
            self._shadow.write(access, offset, offset + nbytes)

    def readers(self, address: int, nbytes: int) -> list[Record]:
        """Who has read these bytes since they were written, where races are checked."""
        offset = address - self.base
        return [] if self._shadow is None else [*self._shadow.readers(offset, offset + nbytes)]

    def put(self, address: int, data: bytes) -> None:
        """Store bytes when an engine writes them; from now on they are written."""
        super().put(address, data)
        offset = address - self.base
        if self._written is not None:
            self._written[offset : offset + len(data)] = b"\1" * len(data)

    def forget(self, address: int, nbytes: int) -> None:
        """Leave bytes undefined, in bounds; to read them is an error."""
        super().put(address, bytes([POISON]) * nbytes)
        offset = address - self.base
        if self._written is not None:
            self._written[offset : offset + nbytes] = bytes(nbytes)

    def note_write(
        self, address: int, nbytes: int, atomic: bool = False, silent: bool = False
    ) -> None:
        """Check and remember a write of bytes that are in bounds."""
        offset = address - self.base
        if self._written is not None:
            self._written[offset : offset + nbytes] = b"\1" * nbytes
        if self._shadow is not None:
            thread = running_thread()
            if thread is not None:
                self._shadow.write(thread, offset, offset + nbytes, atomic, silent)

    def synchronise(self, address: int) -> None:
        """Order the threads that meet in an atomic operation at this address."""
        thread = running_thread()
        if thread is not None and self._shadow is not None:
            self._shadow.synchronise(thread, address - self.base, reads=True, writes=True)

    def _note_atomic(self, address: int, nbytes: int) -> None:
        if self._written is not None:
            self.note_read_written(address, nbytes)
        if self._shadow is not None:
            thread = running_thread()
            if thread is not None:
                offset = address - self.base
                self._shadow.write(thread, offset, offset + nbytes, atomic=True)
                self._shadow.synchronise(thread, offset, reads=True, writes=True)

    def note_read_written(self, address: int, nbytes: int) -> None:
        """Check that bytes are written, without remembering a read."""
        shadow, self._shadow = self._shadow, None
        try:
            self.note_read(address, nbytes)
        finally:
            self._shadow = shadow
