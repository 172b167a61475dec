"""Array libraries that need no GPU: what the package sees of CuPy and PyTorch, over NumPy memory.

Each stub has the attributes that the package may use and no others, so that a use of anything else
fails. Addresses are those of host memory; a stub's "GPU" is a number that it carries.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class DLPackOnly:
    """A host array known by DLPack alone, as of a library that nobody has heard of."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


class OldDLPackOnly(DLPackOnly):
    """The same, from before DLPack 1.0: no max_version."""

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.values.__dlpack__(stream=stream)


class CudaInterfaceOnly:
    """A device array known by ``__cuda_array_interface__`` alone."""

    def __init__(
        self, values: np.ndarray, device: int = 0, stream: int | None = None, readonly: bool = False
    ) -> None:
        self.values, self._device = values, device
        self.dtype = values.dtype
        contiguous = values.flags.c_contiguous
        self.__cuda_array_interface__ = {
            "shape": values.shape,
            "typestr": values.dtype.str,
            "data": (values.__array_interface__["data"][0], readonly),
            "strides": None if contiguous else values.strides,
            "version": 3,
            **({} if stream is None else {"stream": stream}),
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self._device)


# --- CuPy -----------------------------------------------------------------------------------------


class _Memory:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id


class CupyArray:
    """``cupy.ndarray``: dtype, shape, strides, data, views."""

    def __init__(self, values: np.ndarray, device: int = 0) -> None:
        self.values, self._device = values, device
        self._memory: tuple[Any, ...] = None, None

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.values.strides

    @property
    def _c_contiguous(self) -> bool:
        return self.values.flags.c_contiguous

    @property
    def data(self) -> _Memory:
        """The same object as long as the memory is, as CuPy's is."""
        values, memory = self._memory
        if values is not self.values:
            memory = _Memory(self.values.__array_interface__["data"][0], self._device)
            self._memory = self.values, memory
        return memory

    def view(self, dtype: Any) -> CupyArray:
        return CupyArray(self.values.view(dtype), self._device)

    def reshape(self, shape: tuple[int, ...]) -> CupyArray:
        return CupyArray(self.values.reshape(shape), self._device)

    def swapaxes(self, first: int, second: int) -> CupyArray:
        return CupyArray(self.values.swapaxes(first, second), self._device)

    def transpose(self, axes: tuple[int, ...]) -> CupyArray:
        return CupyArray(self.values.transpose(axes), self._device)

    def __getitem__(self, index: Any) -> CupyArray:
        return CupyArray(self.values[index], self._device)


CupyArray.__module__, CupyArray.__qualname__, CupyArray.__name__ = "cupy", "ndarray", "ndarray"


class Cupy(types.ModuleType):
    """The module ``cupy``. `allocated` lists what was allocated: (shape, dtype name, device,
    stream)."""

    def __init__(self) -> None:
        super().__init__("cupy")
        self.ndarray = CupyArray
        self.allocated: list[tuple[Any, ...]] = []
        self.current_device = 0
        self.streams = {0: 0}  # device -> its current stream
        self.cuda = types.SimpleNamespace(
            Device=self._device,
            Stream=types.SimpleNamespace(from_external=self._from_external),
            get_current_stream=self._current_stream,
        )

    def asarray(self, values: Any, dtype: Any = None, device: int | None = None) -> CupyArray:
        where = self.current_device if device is None else device
        return CupyArray(np.array(values, dtype=dtype, copy=True), where)

    def empty(self, shape: Any, dtype: Any) -> CupyArray:
        stream = self._current_stream().ptr
        self.allocated.append((shape, np.dtype(dtype).name, self.current_device, stream))
        poison = np.full(np.empty(shape, dtype).nbytes, 0xAA, np.uint8)
        return CupyArray(poison.view(dtype).reshape(shape), self.current_device)

    def full(self, shape: Any, value: Any, dtype: Any) -> CupyArray:
        made = self.empty(shape, dtype)
        made.values[...] = value
        return made

    def _current_stream(self, device_id: int | None = None) -> types.SimpleNamespace:
        where = self.current_device if device_id is None else device_id
        return types.SimpleNamespace(ptr=self.streams.get(where, 0))

    @contextlib.contextmanager
    def _device(self, ordinal: int) -> Any:
        before, self.current_device = self.current_device, ordinal
        try:
            yield
        finally:
            self.current_device = before

    def _from_external(self, stream: Any) -> Any:
        _, ptr = stream.__cuda_stream__()
        return self._on_stream(ptr)

    @contextlib.contextmanager
    def _on_stream(self, ptr: int) -> Any:
        device = self.current_device
        before, self.streams[device] = self.streams.get(device, 0), ptr
        try:
            yield
        finally:
            self.streams[device] = before


# --- PyTorch --------------------------------------------------------------------------------------


class dtype:
    """``torch.dtype``."""

    def __init__(self, name: str, numpy: Any) -> None:
        self.name, self.numpy, self.itemsize = name, np.dtype(numpy), np.dtype(numpy).itemsize

    def __repr__(self) -> str:
        return f"torch.{self.name}"


dtype.__module__ = "torch"


class Device(NamedTuple):
    """``torch.device``."""

    type: str
    index: int | None


class Tensor:
    """``torch.Tensor``, as far as the package may use it."""

    def __init__(self, torch: Torch, values: np.ndarray, device: str = "cpu") -> None:
        self._torch, self.values = torch, values
        kind, _, index = device.partition(":")
        self.device = Device(kind, int(index) if index else None)
        self.requires_grad = False
        self.layout = torch.strided
        self.negated = False

    @property
    def dtype(self) -> dtype:
        return next(
            kind
            for kind in vars(self._torch).values()
            if isinstance(kind, dtype) and kind.numpy == self.values.dtype
        )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.values.itemsize for step in self.values.strides)

    def is_contiguous(self) -> bool:
        return self.values.flags.c_contiguous

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index

    def data_ptr(self) -> int:
        return self.values.__array_interface__["data"][0]

    def is_neg(self) -> bool:
        return self.negated

    def view(self, kind: dtype) -> Tensor:
        return Tensor(self._torch, self.values.view(kind.numpy), self.where)

    def reshape(self, shape: tuple[int, ...]) -> Tensor:
        return Tensor(self._torch, self.values.reshape(shape), self.where)

    def swapaxes(self, first: int, second: int) -> Tensor:
        return Tensor(self._torch, self.values.swapaxes(first, second), self.where)

    def permute(self, axes: tuple[int, ...]) -> Tensor:
        return Tensor(self._torch, self.values.transpose(axes), self.where)

    @property
    def where(self) -> str:
        ordinal = self.device.index
        return self.device.type if ordinal is None else f"{self.device.type}:{ordinal}"


Tensor.__module__ = "torch"


class Torch(types.ModuleType):
    """The module ``torch``. `allocated` lists what was allocated: (shape, dtype, device,
    stream)."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.Tensor, self.dtype, self.strided = Tensor, dtype, "torch.strided"
        for name in ("float32", "float16", "float64", "uint8", "int16", "int32", "int64"):
            setattr(self, name, dtype(name, name))
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"):
            setattr(self, name, dtype(name, getattr(ml_dtypes, name)))
        self.grad_enabled = True
        self.allocated: list[tuple[Any, ...]] = []
        self.stream = 0
        self.cuda = types.SimpleNamespace(
            current_stream=lambda device: types.SimpleNamespace(cuda_stream=self.stream),
            ExternalStream=lambda ptr, device: ptr,
            stream=self._stream,
        )

    def is_grad_enabled(self) -> bool:
        return self.grad_enabled

    def from_numpy(self, values: np.ndarray) -> Tensor:
        return Tensor(self, values)

    def empty(self, shape: Any, *, dtype: dtype, device: Any) -> Tensor:
        where = device.type if device.index is None else f"{device.type}:{device.index}"
        self.allocated.append((shape, dtype.name, where, self.stream))
        poison = np.full(np.empty(shape, dtype.numpy).nbytes, 0xAA, np.uint8)
        return Tensor(self, poison.view(dtype.numpy).reshape(shape), where)

    def full(self, shape: Any, value: Any, *, dtype: dtype, device: Any) -> Tensor:
        made = self.empty(shape, dtype=dtype, device=device)
        made.values[...] = value
        return made

    @contextlib.contextmanager
    def _stream(self, stream: int) -> Any:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before
