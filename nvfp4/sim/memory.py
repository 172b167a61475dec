"""Global memory: kernels' typed pointers, their bounds and alignment, and who touched what."""

from __future__ import annotations

from typing import Any

import numpy as np

from .atomics import ITEMSIZE, combine, from_bits, to_bits, wrap
from .current import running_thread
from .errors import InvalidOperand, Misaligned, OutOfBounds, ReadOnlyWrite
from .order import Access, Shadow, fence

_FORMATS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i32": "i", "i64": "q"}


class GlobalRegion:
    """The race shadow of a range of global addresses in one launch."""

    __slots__ = ("_granule", "_low", "_shadow")

    def __init__(self, low: int, high: int, granule: int, name: str) -> None:
        self._granule = granule
        self._low = low - low % granule
        cells = -(-(high - self._low) // granule)
        unit = "byte" if granule == 1 else f"{granule}-byte element"
        self._shadow = Shadow(
            cells,
            lambda cell: f"{unit} {cell} of {name}",
            lambda cell: self._low + cell * granule,
            by_block=True,
        )

    def _cells(self, address: int, nbytes: int) -> tuple[int, int]:
        start = address - self._low
        return start // self._granule, -(-(start + nbytes) // self._granule)

    def note_read(self, address: int, nbytes: int, atomic: bool = False) -> None:
        """Check and remember a read."""
        thread = running_thread()
        if thread is not None:
            start, stop = self._cells(address, nbytes)
            self._shadow.read(thread, start, stop, atomic)
            if atomic:
                self._shadow.synchronise(thread, start, reads=True, writes=False)

    def note_write(
        self, address: int, nbytes: int, atomic: bool = False, silent: bool = False
    ) -> None:
        """Check and remember a write; `silent` where it stores what is there."""
        thread = running_thread()
        if thread is not None:
            start, stop = self._cells(address, nbytes)
            self._shadow.write(thread, start, stop, atomic, silent)
            if atomic:
                self._shadow.synchronise(thread, start, reads=False, writes=True)

    def begin_read(self, access: Access, address: int, nbytes: int) -> None:
        """Check and remember an engine's read."""
        start, stop = self._cells(address, nbytes)
        self._shadow.read(access, start, stop)
        self._shadow.check_proxy(access, start, stop, "global")

    def begin_write(self, access: Access, address: int, nbytes: int) -> None:
        """Check and remember an engine's write."""
        start, stop = self._cells(address, nbytes)
        self._shadow.check_proxy(access, start, stop, "global")
        self._shadow.write(access, start, stop)

    def synchronise(self, address: int) -> None:
        """Order the threads that meet in an atomic operation at this address."""
        thread = running_thread()
        if thread is not None:
            self._shadow.synchronise(thread, self._cells(address, 1)[0], reads=True, writes=True)


class _Bytes:
    """The bytes that an array occupies, from its lowest to its highest; keeps it alive."""

    def __init__(self, array: np.ndarray, low: int, count: int) -> None:
        self._array = array
        self.__array_interface__ = {
            "data": (low, not array.flags.writeable),
            "shape": (count,),
            "typestr": "|u1",
            "version": 3,
        }


def _holes(array: np.ndarray, first: int, span: int) -> bytearray | None:
    """Mark with 1 the bytes of an array's span that hold no element; None: there are none."""
    if array.size * array.itemsize >= span:
        return None
    holes = bytearray(b"\1") * span
    mask = np.frombuffer(holes, np.uint8)[first:] if first < span else np.zeros(0, np.uint8)
    cells = np.lib.stride_tricks.as_strided(
        mask, (*array.shape, array.itemsize), (*array.strides, 1), writeable=True
    )
    cells[...] = 0
    return holes


class GlobalPointer:
    """A kernel's typed pointer to an array's memory: a parameter of type ``"u8*"``, ``"f32*"``...

    Index 0 is the array's first element; elements are of the pointer's type, whatever the array's.
    ``p[i]`` gives a Python int, or np.float32; ``p[i] = v`` stores the low bits of an integer, as
    the card does.

    Parameters
    ----------
    array
        Any shape, dtype and strides (of either sign). The gaps between the rows of a strided array
        are out of bounds.
    dtype
        One of u8, u16, u32, u64, i32, i64, f32.
    name
        The parameter's or buffer's name, for messages.

    Raises
    ------
    TypeError
        `array` is no NumPy array.
    ValueError
        An unknown `dtype`.
    """

    __slots__ = (
        "_bytes",
        "_first",
        "_high",
        "_holes",
        "_low",
        "_view",
        "_writable",
        "address",
        "array",
        "dtype",
        "itemsize",
        "name",
        "region",
    )

    def __init__(self, array: np.ndarray, dtype: str, name: str = "buffer") -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"`array` must be a NumPy array; got {type(array).__name__}")
        if dtype not in ITEMSIZE:
            raise ValueError(f"`dtype` must be one of {', '.join(ITEMSIZE)}; got {dtype!r}")
        self.array = array
        self.dtype = dtype
        self.name = name
        self.itemsize = size = ITEMSIZE[dtype]
        self.address: int = array.ctypes.data
        low, high = (
            np.lib.array_utils.byte_bounds(array) if array.size else (self.address, self.address)
        )
        self._bytes = memoryview(np.asarray(_Bytes(array, low, high - low)))  # type: ignore[arg-type]
        self._writable = array.flags.writeable
        #: Where accesses are reported in a launch with race checks; set by the machine.
        self.region: GlobalRegion | None = None
        # Where element 0 is in the bytes. Elements are counted from there in both directions.
        self._first = self.address - low
        self._holes = _holes(array, self._first, high - low)
        before = self._first // size
        after = (high - self.address) // size
        part = self._bytes[self._first - before * size : self._first + after * size]
        self._view: Any = (
            np.frombuffer(part, np.float32) if dtype == "f32" else part.cast(_FORMATS[dtype])  # type: ignore[call-overload]
        )
        # Indices that need no further look; all others go through load() and store(), which know
        # why.
        usable = self._holes is None and self.address % size == 0
        self._low, self._high = (-before, after) if usable else (0, 0)

    def __repr__(self) -> str:
        return f"GlobalPointer({self.name}: {self.dtype}*, {len(self)} elements)"

    def __len__(self) -> int:
        return (len(self._bytes) - self._first) // self.itemsize

    @property
    def bounds(self) -> tuple[int, int]:
        """Address of the lowest byte, and of the one behind the highest."""
        low = self.address - self._first
        return low, low + len(self._bytes)

    def __getitem__(self, index: int) -> Any:
        if not self._low <= index < self._high:
            return from_bits(self.load(index, self.itemsize), self.dtype)
        if self.region is not None:
            self.region.note_read(self.address + index * self.itemsize, self.itemsize)
        return self._view[index - self._low]

    def __setitem__(self, index: int, value: Any) -> None:
        value = self._converted(value)
        if not self._low <= index < self._high or not self._writable:
            self.store(index, self.itemsize, to_bits(value, self.dtype))
            return
        place = index - self._low
        if self.region is not None:
            address = self.address + index * self.itemsize
            silent = bool(self._view[place] == value)
            self.region.note_write(address, self.itemsize, False, silent)
        self._view[place] = value

    def load(self, index: int, nbytes: int, order: str = "weak") -> int:
        """Return `nbytes` bytes from element `index` on, as a little-endian integer.

        Parameters
        ----------
        index
            In elements of the pointer's type.
        nbytes
            1, 2, 4, 8, 16 or 32; the address must be a multiple of it.
        order
            ``"weak"``, ``"relaxed"`` (``volatile`` too) or ``"acquire"``. All but a weak load may
            meet another thread's atomic store, and then see what that thread published.

        Raises
        ------
        OutOfBounds, Misaligned, DataRace
        """
        offset = self._offset(index, nbytes, "load")
        if self.region is not None:
            self.region.note_read(self.address + index * self.itemsize, nbytes, order != "weak")
        if order != "weak":
            thread = running_thread()
            if thread is not None:
                thread.spin()
        return int.from_bytes(self._bytes[offset : offset + nbytes], "little")

    def store(self, index: int, nbytes: int, value: int, order: str = "weak") -> None:
        """Store the low `nbytes` bytes of an integer from element `index` on; see :meth:`load`.

        `order` is ``"weak"``, ``"relaxed"`` or ``"release"``, which publishes what the thread has
        done.
        """
        offset = self._offset(index, nbytes, "store")
        if not self._writable:
            raise ReadOnlyWrite(
                f"store to {self.name}[{index}]: the array is read-only",
                address=self.address + index * self.itemsize,
                buffer=self.name,
            )
        data = (int(value) & ((1 << 8 * nbytes) - 1)).to_bytes(nbytes, "little")
        if self.region is not None:
            thread = running_thread()
            if thread is not None and order == "release":
                fence(thread)
            silent = self._bytes[offset : offset + nbytes] == data
            address = self.address + index * self.itemsize
            self.region.note_write(address, nbytes, order != "weak", silent)
        self._bytes[offset : offset + nbytes] = data

    def atomic(self, operation: str, index: int, value: Any, compare: Any = None) -> Any:
        """Do an atomic operation on element `index` and return what it held.

        Parameters
        ----------
        operation
            ``add sub min max and or xor exch inc dec``, or ``cas``, which `compare` is for.
        """
        if self.dtype == "f32" and operation in ("add", "sub"):
            value = value if operation == "add" else -value
            operation = "add.ftz"
        size = self.itemsize
        offset = self._offset(index, size, "atomic")
        address = self.address + index * size
        if not self._writable:
            raise ReadOnlyWrite(
                f"atomic {operation} on {self.name}[{index}]: the array is read-only",
                address=address,
                buffer=self.name,
            )
        if self.region is not None:
            self.region.note_write(address, size, atomic=True)
            self.region.synchronise(address)
        old = from_bits(int.from_bytes(self._bytes[offset : offset + size], "little"), self.dtype)
        new = to_bits(combine(operation, self.dtype, old, value, compare), self.dtype)
        self._bytes[offset : offset + size] = new.to_bytes(size, "little")
        thread = running_thread()
        if thread is not None:
            thread.spin()
        return old

    def _converted(self, value: Any) -> Any:
        """Return the value that an element holds after ``p[i] = value``."""
        if isinstance(value, (float, np.floating)) is not (self.dtype == "f32"):
            wanted = "a float" if self.dtype == "f32" else "an integer"
            raise InvalidOperand(
                f"{self.name} is of type {self.dtype}*: store {wanted}; got {type(value).__name__}",
                buffer=self.name,
            )
        return np.float32(value) if self.dtype == "f32" else wrap(int(value), self.dtype)

    def _offset(self, index: int, nbytes: int, what: str) -> int:
        start = self._first + index * self.itemsize
        address = self.address + index * self.itemsize
        place = f"{what} of {nbytes} bytes at {self.name}[{index}]"
        if start < 0 or start + nbytes > len(self._bytes):
            raise OutOfBounds(
                f"{place}: out of bounds, {self.name} has {len(self)} elements of {self.dtype}"
                + (" from its first one on" if self._first else ""),
                address=address,
                buffer=self.name,
            )
        if address % nbytes:
            raise Misaligned(
                f"{place}: misaligned, the address is not a multiple of {nbytes}",
                address=address,
                buffer=self.name,
            )
        if self._holes is not None and self._holes.find(1, start, start + nbytes) >= 0:
            raise OutOfBounds(
                f"{place}: out of bounds, between the elements of an array of shape "
                f"{self.array.shape} and strides "
                f"{self.array.strides} bytes",
                address=address,
                buffer=self.name,
            )
        return start


class HalfPointer(GlobalPointer):
    """A kernel's pointer to float16 or bfloat16 (``"f16*"``, ``"bf16*"``): read as float32.

    For arrays of epilogues, which only read them.
    """

    __slots__ = ("_format",)

    def __init__(self, array: np.ndarray, dtype: str, name: str = "buffer") -> None:
        super().__init__(array, "u16", name)
        self._format = dtype

    def __getitem__(self, index: int) -> Any:
        bits = super().__getitem__(index)
        if self._format == "bf16":
            return np.uint32(bits << 16).view(np.float32)
        return np.float32(np.uint16(bits).view(np.float16))

    def __setitem__(self, index: int, value: Any) -> None:
        raise InvalidOperand(
            f"{self.name} is of type {self._format}*, which can only be read", buffer=self.name
        )


def pointer_to(array: np.ndarray, dtype: str, name: str = "buffer") -> GlobalPointer:
    """A kernel's pointer of type `dtype`, such as ``"u8"`` or ``"bf16"``, to an array."""
    kind = HalfPointer if dtype in ("f16", "bf16") else GlobalPointer
    return kind(array, dtype, name)


class GlobalMemory:
    """All buffers of a launch, by address."""

    def __init__(self, pointers: list[GlobalPointer]) -> None:
        self.pointers = [pointer for pointer in pointers if len(pointer._bytes)]

    def watch(self) -> None:
        """Give each pointer a region for race checks; pointers to overlapping memory share one."""
        groups: list[list[GlobalPointer]] = []
        end = -1
        for pointer in sorted(self.pointers, key=lambda pointer: pointer.bounds):
            low, high = pointer.bounds
            if low >= end:
                groups.append([])
            groups[-1].append(pointer)
            end = max(end, high)
        for group in groups:
            granule = min(pointer.itemsize for pointer in group)
            low = min(pointer.bounds[0] for pointer in group)
            high = max(pointer.bounds[1] for pointer in group)
            region = GlobalRegion(low, high, granule, group[0].name)
            for pointer in group:
                pointer.region = region

    def release(self) -> None:
        """Forget the regions of :meth:`watch`."""
        for pointer in self.pointers:
            pointer.region = None

    def find(self, address: int, nbytes: int) -> tuple[GlobalPointer, int]:
        """Return the pointer whose memory has these bytes, and the offset of the first in it.

        Raises
        ------
        OutOfBounds
            No buffer of the launch has them all.
        """
        for pointer in self.pointers:
            low, high = pointer.bounds
            if low <= address and address + nbytes <= high:
                return pointer, address - low
        raise OutOfBounds(
            f"access of {nbytes} bytes at global address {address:#x}: out of bounds of every "
            "buffer of the launch",
            address=address,
        )

    def read(self, address: int, nbytes: int) -> bytes:
        """Return any bytes of a buffer, by address."""
        pointer, offset = self.find(address, nbytes)
        if pointer.region is not None:
            pointer.region.note_read(address, nbytes)
        return bytes(pointer._bytes[offset : offset + nbytes])

    def write(self, address: int, data: bytes) -> None:
        """Store bytes into a buffer, by address."""
        pointer, offset = self.find(address, len(data))
        if not pointer._writable:
            raise ReadOnlyWrite(
                f"store to {pointer.name}: the array is read-only",
                address=address,
                buffer=pointer.name,
            )
        if pointer.region is not None:
            silent = pointer._bytes[offset : offset + len(data)] == data
            pointer.region.note_write(address, len(data), silent=silent)
        pointer._bytes[offset : offset + len(data)] = data

    # For engines ---------------------------------------------------------------------------------

    def begin_read(self, access: Access | None, address: int, nbytes: int) -> None:
        """Check that an engine may read these bytes from now on."""
        pointer, _ = self.find(address, nbytes)
        if pointer.region is not None and access is not None:
            pointer.region.begin_read(access, address, nbytes)

    def begin_write(self, access: Access | None, address: int, nbytes: int) -> None:
        """Check that an engine may write these bytes from now on."""
        pointer, _ = self.find(address, nbytes)
        if not pointer._writable:
            raise ReadOnlyWrite(
                f"store to {pointer.name}: the array is read-only",
                address=address,
                buffer=pointer.name,
            )
        if pointer.region is not None and access is not None:
            pointer.region.begin_write(access, address, nbytes)

    def take(self, address: int, nbytes: int) -> bytes:
        """Return bytes as they are when an engine reads them."""
        pointer, offset = self.find(address, nbytes)
        return bytes(pointer._bytes[offset : offset + nbytes])

    def put(self, address: int, data: bytes) -> None:
        """Store bytes when an engine writes them."""
        pointer, offset = self.find(address, len(data))
        pointer._bytes[offset : offset + len(data)] = data
