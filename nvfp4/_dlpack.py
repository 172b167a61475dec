"""Reading a DLPack capsule: pointer, shape, strides, type and device of another library's array.

NumPy reads DLPack too, but neither device memory nor bfloat16. The structures are those of the
DLPack header (``dlpack.h``, versions 0.x and 1.x). A capsule that is dropped without being renamed
is released by the library that made it, so holding the capsule is all that keeps the memory alive.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

__all__ = ["CPU_DEVICES", "CUDA_DEVICES", "Tensor", "read"]

#: Device types of host memory (kDLCPU, kDLCUDAHost) and of device memory (kDLCUDA, kDLCUDAManaged).
CPU_DEVICES = (1, 3)
CUDA_DEVICES = (2, 13)

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

# (type code, bits) -> name. Codes 7.. are the eight- and four-bit floats of DLPack 1.1.
_DTYPES = {
    (6, 8): "bool",
    (4, 16): "bfloat16",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
    (14, 8): "float8_e8m0fnu",
    **{(0, bits): f"int{bits}" for bits in (8, 16, 32, 64)},
    **{(1, bits): f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{(2, bits): f"float{bits}" for bits in (16, 32, 64)},
    **{(5, bits): f"complex{bits}" for bits in (64, 128)},
}


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    ]


class Tensor(NamedTuple):
    """What a capsule says. `strides` are in bytes; `device` is DLPack's (type, ordinal)."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device: tuple[int, int]
    readonly: bool
    capsule: Any


def _is_valid(capsule: Any, name: bytes) -> bool:
    function = ctypes.pythonapi.PyCapsule_IsValid
    function.restype, function.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    return bool(function(capsule, name))


def _pointer(capsule: Any, name: bytes) -> int:
    function = ctypes.pythonapi.PyCapsule_GetPointer
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(function(capsule, name))


def _export(array: Any, stream: int | None) -> Any:
    arguments: dict[str, Any] = {} if stream is None else {"stream": stream}
    try:
        return array.__dlpack__(max_version=(1, 1), **arguments)
    except TypeError:  # a library from before DLPack 1.0 knows no max_version
        return array.__dlpack__(**arguments)


def read(array: Any, *, stream: int | None = None) -> Tensor:
    """Ask `array` for its DLPack capsule and read it.

    Parameters
    ----------
    array
        Anything with ``__dlpack__``.
    stream : int, optional
        CUDA stream on which the data shall be ready (the legacy default stream is 1); None for
        host memory.

    Raises
    ------
    TypeError
        The capsule's type is a vector or unknown.
    """
    capsule = _export(array, stream)
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = _DLManagedTensorVersioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        tensor, readonly = managed.dl_tensor, bool(managed.flags & _READ_ONLY)
    else:
        tensor, readonly = _DLTensor.from_address(_pointer(capsule, b"dltensor")), False
    kind = tensor.dtype
    dtype = _DTYPES.get((kind.code, kind.bits)) if kind.lanes == 1 else None
    if dtype is None:
        raise TypeError(
            f"a DLPack type of code {kind.code}, {kind.bits} bits and {kind.lanes} lanes is "
            "none that nvfp4 reads"
        )
    itemsize = kind.bits // 8
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides:
        strides = tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim])
    else:
        strides = contiguous_strides(shape, itemsize)
    pointer = (tensor.data or 0) + tensor.byte_offset
    device = (int(tensor.device.device_type), int(tensor.device.device_id))
    return Tensor(pointer, shape, strides, dtype, itemsize, device, readonly, capsule)


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-ordered array."""
    strides = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
