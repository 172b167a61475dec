"""The one view of a caller's array that everything below the public functions sees."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["Array", "Spec"]


class Spec(NamedTuple):
    """All that checks and plans depend on; equal specs are treated alike, so they key caches."""

    library: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    device: int | None
    readonly: bool

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        if 0 in self.shape:
            return True  # whatever the strides: libraries differ
        step = self.itemsize
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    @property
    def where(self) -> str:
        """The device, for messages."""
        return "the host" if self.device is None else f"GPU {self.device}"


class Array:
    """One array of the caller's.

    Attributes
    ----------
    owner
        The caller's object.
    spec : Spec
        dtype name, shape, strides in bytes, device...; each is an attribute of the array too.
    pointer : int
        Address of the first element.
    keep
        What keeps the memory alive beside the owner (a DLPack capsule), or None.
    """

    __slots__ = ("keep", "owner", "pointer", "spec")

    def __init__(self, owner: Any, spec: Spec, pointer: int, keep: Any = None) -> None:
        self.owner = owner
        self.spec = spec
        self.pointer = pointer
        self.keep = keep

    def __repr__(self) -> str:
        spec = self.spec
        return f"<{spec.library} array, {spec.dtype}, shape {spec.shape}, on {spec.where}>"

    @property
    def library(self) -> str:
        """Name of the library that owns it: ``"numpy"``, ``"torch"``..."""
        return self.spec.library

    @property
    def dtype(self) -> str:
        """Name such as ``"bfloat16"``."""
        return self.spec.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.spec.shape

    @property
    def strides(self) -> tuple[int, ...]:
        """Its strides, in bytes."""
        return self.spec.strides

    @property
    def device(self) -> int | None:
        """Ordinal of its GPU; None on the host."""
        return self.spec.device

    @property
    def readonly(self) -> bool:
        """Whether its library forbids to write to it."""
        return self.spec.readonly

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.spec.shape:
            count *= length
        return count

    def current_pointer(self) -> int:
        """The pointer as of now: PyTorch and CuPy arrays may have got other memory since."""
        if self.spec.library == "torch":
            return int(self.owner.data_ptr())
        if self.spec.library == "cupy":
            return int(self.owner.data.ptr)
        return self.pointer

    def bounds(self) -> tuple[int, int]:
        """First byte and the one after the last; equal for an empty array."""
        low = high = self.pointer
        for size, stride in zip(self.spec.shape, self.spec.strides, strict=True):
            if size == 0:
                return self.pointer, self.pointer
            if stride < 0:
                low += (size - 1) * stride
            else:
                high += (size - 1) * stride
        return low, high + self.spec.itemsize
