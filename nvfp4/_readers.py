"""How an array of each library is read: metadata and pointer, never data.

No library is imported: an array can only come from one that is.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from . import _dlpack
from ._array import Array, Spec
from ._streams import dlpack_stream

__all__ = ["as_array", "describe"]

_ACCEPTED = (
    "an array (NumPy, PyTorch, CuPy, Numba, JAX, or anything with __cuda_array_interface__ or "
    "DLPack)"
)


def as_array(obj: Any, name: str, *, stream: Any = None) -> Array:
    """View of a caller's array.

    Parameters
    ----------
    obj
        The array.
    name : str
        The argument's name, for messages.
    stream
        The call's ``stream`` argument. Libraries with streams of their own that we cannot see
        (JAX, and those known by DLPack alone) are asked to have the data ready on it.

    Raises
    ------
    TypeError
        Not an array, or of a kind that cannot be read (masked, sparse, on neither host nor CUDA
        device).
    ValueError
        A PyTorch tensor that requires grad while grad mode is on, or a lazily negated one; an
        array on a GPU whose address no kernel can read its elements from.
    """
    kind = type(obj)
    reader = _READERS.get(kind)
    if reader is None:
        reader = _reader(obj, name)
        _READERS[kind] = reader
    array = reader(obj, name, stream)
    spec = array.spec
    if spec.device is not None and array.pointer % spec.itemsize:
        raise ValueError(
            f"{name} must begin at a multiple of {spec.itemsize} bytes, the size of its elements; "
            f"its address is {array.pointer:#x}: pass a copy"
        )
    return array


_Reader = Callable[[Any, str, Any], Array]


@functools.lru_cache(maxsize=256)
def _name_of(dtype: np.dtype[Any]) -> str:
    """Its name. NumPy makes it anew each time, in half the time that reading an array takes."""
    return dtype.name


def _from_numpy(array: np.ndarray, name: str, stream: Any = None) -> Array:
    dtype = array.dtype
    if not dtype.isnative:
        raise TypeError(f"{name} must be in this machine's byte order; got dtype {dtype.str}")
    spec = Spec(
        "numpy",
        _name_of(dtype),
        array.shape,
        array.strides,
        dtype.itemsize,
        None,
        not array.flags.writeable,
    )
    return Array(array, spec, array.__array_interface__["data"][0])


def _refuse_masked(array: Any, name: str, stream: Any) -> NoReturn:
    raise TypeError(
        f"{name} must be a plain array; got a masked one, whose mask would be dropped silently"
    )


def _torch_dtypes() -> dict[Any, tuple[str, int]]:
    """Every dtype of PyTorch -> (name, bytes)."""
    torch = sys.modules["torch"]
    kinds = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {kind: (str(kind).removeprefix("torch."), kind.itemsize) for kind in kinds}


_TORCH_DTYPES: dict[Any, tuple[str, int]] = {}


def _from_torch(tensor: Any, name: str, stream: Any = None) -> Array:
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError(
            f"{name} is a tensor that requires grad, and nvfp4 computes no gradients: call it "
            f"under torch.no_grad(), or pass {name}.detach()"
        )
    device = tensor.device
    ordinal: int | None
    if device.type == "cuda":
        ordinal = device.index
    elif device.type == "cpu":
        ordinal = None
    else:
        raise TypeError(f"{name} must be on a CUDA device or on the CPU; got a tensor on {device}")
    if tensor.layout is not sys.modules["torch"].strided:
        raise TypeError(f"{name} must be a dense (strided) tensor; got layout {tensor.layout}")
    if tensor.is_neg():
        raise ValueError(f"{name} is a lazily negated view; pass {name}.resolve_neg()")
    if not _TORCH_DTYPES:
        _TORCH_DTYPES.update(_torch_dtypes())
    dtype, itemsize = _TORCH_DTYPES[tensor.dtype]
    strides = tuple([step * itemsize for step in tensor.stride()])
    spec = Spec("torch", dtype, tuple(tensor.shape), strides, itemsize, ordinal, False)
    return Array(tensor, spec, tensor.data_ptr())


def _from_cupy(array: Any, name: str, stream: Any = None) -> Array:
    dtype, memory = array.dtype, array.data
    spec = Spec(
        "cupy",
        _name_of(dtype),
        array.shape,
        array.strides,
        dtype.itemsize,
        memory.device_id,
        False,
    )
    return Array(array, spec, memory.ptr)


def _from_cuda_array_interface(array: Any, name: str, stream: Any = None) -> Array:
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        _refuse_masked(array, name, stream)
    dtype = np.dtype(interface["typestr"])
    # The interface has no type string for bfloat16 and the small floats ("<V2"): ask the array
    # itself.
    if dtype.kind == "V":
        try:
            own = np.dtype(array.dtype)
        except (AttributeError, TypeError):
            own = dtype
        dtype = own if own.itemsize == dtype.itemsize else dtype
    if not dtype.isnative:
        raise TypeError(f"{name} must be in this machine's byte order; got dtype {dtype.str}")
    pointer, readonly = interface["data"]
    shape = tuple(int(n) for n in interface["shape"])
    strides = interface.get("strides")
    strides = (
        _dlpack.contiguous_strides(shape, dtype.itemsize)
        if strides is None
        else tuple(int(step) for step in strides)
    )
    device = _device_of(array, int(pointer or 0))
    spec = Spec(
        _library(array), _name_of(dtype), shape, strides, dtype.itemsize, device, bool(readonly)
    )
    return Array(array, spec, int(pointer or 0))


def _from_dlpack(array: Any, name: str, stream: Any = None) -> Array:
    kind, _ = array.__dlpack_device__()
    if kind in _dlpack.CUDA_DEVICES:
        tensor = _dlpack.read(array, stream=dlpack_stream(stream))
    elif kind in _dlpack.CPU_DEVICES:
        tensor = _dlpack.read(array)
    else:
        raise TypeError(
            f"{name} must be on a CUDA device or on the host; got DLPack device type {int(kind)}"
        )
    device = tensor.device[1] if tensor.device[0] in _dlpack.CUDA_DEVICES else None
    library = _library(array)
    # JAX arrays are values: whatever their capsule says, nothing may write to them.
    readonly = tensor.readonly or library == "jax"
    spec = Spec(
        library, tensor.dtype, tensor.shape, tensor.strides, tensor.itemsize, device, readonly
    )
    return Array(array, spec, tensor.pointer, tensor.capsule)


_READERS: dict[type, _Reader] = {np.ndarray: _from_numpy}


def _library(array: Any) -> str:
    root = type(array).__module__.partition(".")[0]
    return {"jaxlib": "jax"}.get(root, root)


def _reader(obj: Any, name: str) -> _Reader:
    """How arrays of this class are read; decided once per class."""
    kind = type(obj)
    ancestors = {(c.__module__.partition(".")[0], c.__name__) for c in kind.__mro__}
    if ("numpy", "MaskedArray") in ancestors:
        return _refuse_masked
    if isinstance(obj, np.ndarray):
        return _from_numpy
    if ("torch", "Tensor") in ancestors:
        return _from_torch
    if ("cupy", "ndarray") in ancestors:
        return _from_cupy
    if _library(obj) != "jax" and hasattr(obj, "__cuda_array_interface__"):
        return _from_cuda_array_interface
    if hasattr(obj, "__dlpack__") and hasattr(obj, "__dlpack_device__"):
        return _from_dlpack
    raise TypeError(f"{name} must be {_ACCEPTED}; got {describe(obj)}")


def describe(obj: Any) -> str:
    """What was passed in place of an array, for messages."""
    kind = type(obj)
    if kind.__name__ == "QTensor":
        return "a QTensor (its .dequantize() gives an array)"
    if isinstance(obj, (list, tuple)):
        return f"a {kind.__name__} (numpy.asarray makes an array of it)"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _device_of(array: Any, pointer: int) -> int:
    """Ordinal of an array's GPU, which ``__cuda_array_interface__`` does not tell."""
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    try:
        return int(array.gpu_data.context.device.id)  # Numba
    except AttributeError:
        return _device_of_pointer(pointer)


def _device_of_pointer(pointer: int) -> int:
    if pointer == 0:  # only an empty array has no memory
        return 0
    from .driver import check, driver

    cuda = driver()
    what = cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(check(cuda.cuPointerGetAttribute(what, pointer), "finding the GPU of an array"))
