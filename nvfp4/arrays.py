"""The caller's arrays: what the rest of the package sees of them, whatever their library.

:func:`as_array` turns an array of NumPy, PyTorch, CuPy, Numba, JAX, or of anything that speaks
DLPack or ``__cuda_array_interface__``, into an :class:`Array`: dtype name, shape, strides,
pointer, device. No data is read or copied. Libraries are never imported for that: an array can
only come from one that is. Results are made by the caller's library (:func:`empty`, :func:`full`,
:func:`from_host`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np

from ._array import Array, Spec
from ._readers import as_array, describe
from ._streams import stream_handle
from .errors import ToolchainError

__all__ = [
    "Array",
    "Spec",
    "as_array",
    "as_bytes",
    "dtype_name",
    "empty",
    "from_host",
    "full",
    "host",
    "numpy_dtype",
    "overlap",
    "overlaps_itself",
    "stream_pointer",
]

# --- types ----------------------------------------------------------------------------------------


def dtype_name(value: Any, name: str) -> str:
    """Name of a dtype: given by name, or as a dtype of NumPy, ml_dtypes or PyTorch.

    Raises
    ------
    TypeError
        `value` is no dtype.
    ValueError
        `value` is a string that names none.
    """
    if isinstance(value, str):
        try:
            return numpy_dtype(value).name
        except (TypeError, AttributeError):
            raise ValueError(
                f"{name} must be the name of a dtype, such as 'float32'; got {value!r}"
            ) from None
    if type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    try:
        if value is None:  # float64, says NumPy
            raise TypeError
        return np.dtype(value).name
    except TypeError:
        raise TypeError(
            f"{name} must be the name of a dtype, such as 'float32'; got {describe(value)}"
        ) from None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name, ml_dtypes' for the types that NumPy lacks."""
    if name == "bfloat16" or name.startswith("float8_"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def as_bytes(obj: Any, array: Array) -> Any:
    """An array of eight-bit floats as uint8, in its own library and without a copy."""
    if array.dtype == "uint8":
        return obj
    if array.library == "torch":
        return obj.view(sys.modules["torch"].uint8)
    return obj.view(np.uint8)


# --- data on the host -----------------------------------------------------------------------------


class _Memory:
    """Offers an array's memory to NumPy, and keeps the array alive as long as NumPy looks at it."""

    def __init__(self, array: Array, typestr: str) -> None:
        self.array = array
        self.__array_interface__ = {
            "data": (array.pointer, array.readonly),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": typestr,
            "version": 3,
        }


def host(array: Array) -> np.ndarray:
    """The NumPy array over the memory of a host array, without a copy.

    Raises
    ------
    ValueError
        The array is on a device: nothing is ever copied back silently.
    """
    if array.library == "numpy":
        owner: np.ndarray = array.owner
        return owner.view(np.ndarray)
    if array.device is not None:
        raise ValueError(f"an array on {array.spec.where} cannot be read by the host")
    dtype = numpy_dtype(array.dtype)
    # As unsigned integers first: NumPy's interface has no name for bfloat16.
    memory = np.asarray(_Memory(array, f"<u{dtype.itemsize}" if array.dtype != "bool" else "|b1"))
    return memory.view(dtype)


def overlap(a: Array, b: Array) -> bool:
    """Whether two arrays share a byte (also said where finding out would take too long)."""
    if a.device != b.device:
        return False
    (a_low, a_high), (b_low, b_high) = a.bounds(), b.bounds()
    if a_low >= a_high or b_low >= b_high or a_high <= b_low or b_high <= a_low:
        return False
    if a.spec.contiguous and b.spec.contiguous:
        return True
    try:
        return np.shares_memory(_address_only(a), _address_only(b), max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def _address_only(array: Array) -> np.ndarray:
    """For address arithmetic by NumPy; device memory is never touched through it."""
    return np.asarray(_Memory(array, f"|V{array.spec.itemsize}"))


def overlaps_itself(spec: Spec) -> bool:
    """Whether two elements of an array may share a byte, as in a broadcast one."""
    if 0 in spec.shape:
        return False
    axes = sorted((abs(step), n) for step, n in zip(spec.strides, spec.shape, strict=True) if n > 1)
    reach = spec.itemsize
    for step, n in axes:
        if step < reach:
            return True
        reach += (n - 1) * step
    return False


# --- results --------------------------------------------------------------------------------------


def stream_pointer(array: Array, stream: Any) -> int:
    """Handle of the stream that a call works on.

    Parameters
    ----------
    array : Array
        The first array of the call: None means the current stream of its library on its device.
    stream
        None, an int, or anything with ``__cuda_stream__``.

    Raises
    ------
    TypeError
        `stream` is something else.
    ValueError
        `stream` is a negative int.
    """
    return stream_handle(array.owner, array.library, array.device, stream)


class _Stream:
    """A stream's handle, as other libraries take it."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


#: Where arrays on the host come from that are to be written; from somewhere else where nothing is
#: (``nvfp4.warm``).
host_memory: ContextVar[Callable[[tuple[int, ...], Any], np.ndarray]] = ContextVar(
    "host_memory", default=np.empty
)


def empty(shape: tuple[int, ...], dtype: str, like: Array, *, stream: int | None = None) -> Array:
    """A new array of the library and on the device of `like`, its bytes not yet written.

    `stream` is the stream that will write it: memory pools hand out memory in the order of a
    stream.
    """
    library, device = like.library, like.device
    if library == "torch":
        torch = sys.modules["torch"]
        kind = getattr(torch, dtype)
        with _torch_stream(torch, like, stream):
            return as_array(torch.empty(shape, dtype=kind, device=like.owner.device), "result")
    if device is None:
        return as_array(host_memory.get()(shape, numpy_dtype(dtype)), "result")
    if library == "numba" and dtype != "bfloat16":
        cuda = sys.modules["numba.cuda"]
        with cuda.gpus[device]:
            return as_array(cuda.device_array(shape, numpy_dtype(dtype)), "result")
    cupy = _cupy(library)
    with cupy.cuda.Device(device):
        if stream is None or stream == cupy.cuda.get_current_stream().ptr:
            return as_array(cupy.empty(shape, numpy_dtype(dtype)), "result")
        with cupy.cuda.Stream.from_external(_Stream(stream)):
            return as_array(cupy.empty(shape, numpy_dtype(dtype)), "result")


def full(
    shape: tuple[int, ...], value: float, dtype: str, like: Array, *, stream: int | None = None
) -> Any:
    """A new array of one value, of the library of `like` and where it is.

    `stream` is the stream that will use it; the value is written there.
    """
    library, device = like.library, like.device
    if library == "torch":
        torch = sys.modules["torch"]
        with _torch_stream(torch, like, stream):
            return torch.full(shape, value, dtype=getattr(torch, dtype), device=like.owner.device)
    values = np.full(shape, value, numpy_dtype(dtype))
    if device is None:
        return from_host(values, like)
    if library == "numba":
        cuda = sys.modules["numba.cuda"]
        with cuda.gpus[device]:
            return cuda.to_device(values)  # returns when the copy is made
    cupy = _cupy(library)
    with cupy.cuda.Device(device):
        if stream is None or stream == cupy.cuda.get_current_stream().ptr:
            return cupy.full(shape, value, numpy_dtype(dtype))
        with cupy.cuda.Stream.from_external(_Stream(stream)):
            return cupy.full(shape, value, numpy_dtype(dtype))


def _torch_stream(torch: Any, like: Array, stream: int | None) -> Any:
    """A context in which PyTorch works on a stream; None: on its current one."""
    if like.device is None or stream is None or stream == stream_pointer(like, None):
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=like.owner.device))


def from_host(values: np.ndarray, like: Array) -> Any:
    """A NumPy result as an array of the library of `like`, an array on the host."""
    if like.library == "numpy":
        return values
    if like.library == "torch":
        torch = sys.modules["torch"]
        if values.dtype.name == "bfloat16":
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)
    if hasattr(like.owner, "__array_namespace__"):
        return like.owner.__array_namespace__().asarray(values)
    return values


def _cupy(library: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise ToolchainError(
            f"{library} has no allocator that nvfp4 can use, so results come from CuPy's pool: "
            "install cupy-cuda13x (or cupy-cuda12x), or pass out="
        ) from error
    return cupy
