"""What several of the functions check, and what they do with arrays of any library."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import arrays
from ...arrays import Array, Spec

__all__ = [
    "as_float8",
    "bytes_of",
    "check_backend",
    "check_bool",
    "check_member",
    "contiguous",
    "dtype_of_result",
    "float32_of",
    "is_number",
    "new_result",
    "permuted",
    "read_bytes",
    "read_codes",
    "viewed",
]

_RESULTS = ("bfloat16", "float16")
_BACKENDS = ("cuda", "cute-dsl")


def check_member(name: str, value: Any, allowed: Sequence[Any]) -> None:
    """One of a few values; FlashInfer's words."""
    if isinstance(value, bool) != isinstance(allowed[0], bool) or value not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, but got {value!r}")


def check_bool(name: str, value: Any) -> None:
    """True or False."""
    check_member(name, value, (True, False))


def check_backend(backend: Any, enable_pdl: Any) -> None:
    """What a quantiser of FlashInfer runs on: checked, without effect."""
    if backend not in _BACKENDS:
        raise ValueError(f"Unknown backend: {backend}. Must be 'cuda' or 'cute-dsl'.")
    if enable_pdl is not None:
        check_bool("enable_pdl", enable_pdl)


def dtype_of_result(out: Any, out_dtype: Any) -> str:
    """Name of the dtype of a product: that of `out`, or bfloat16, where nothing is said."""
    if out_dtype is None:
        if out is None:
            return "bfloat16"
        name = arrays.as_array(out, "out").dtype
    else:
        name = arrays.dtype_name(out_dtype, "out_dtype")
    if name not in _RESULTS:
        raise ValueError(f"out_dtype must be one of {' or '.join(_RESULTS)}, but got {name}")
    return name


def new_result(like: Array, shape: tuple[int, int], out_dtype: Any) -> Any:
    """A new array for a product, of the library of an operand."""
    return arrays.empty(shape, dtype_of_result(None, out_dtype), like).owner


def check_out(out: Any, shape: tuple[int, int], dtype: str) -> None:
    """Shape and dtype of a product's `out`."""
    if out is None:
        return
    spec = arrays.as_array(out, "out").spec
    if spec.shape != shape:
        raise ValueError(f"out.shape must be {shape}, but got {spec.shape}")
    if spec.dtype != dtype:
        raise ValueError(f"out.dtype must be {dtype}, but got {spec.dtype}")


def read_codes(name: str, value: Any) -> tuple[Any, Array]:
    """Packed e2m1 codes: uint8, or PyTorch's dtype of two e2m1."""
    if str(getattr(value, "dtype", "")) == "torch.float4_e2m1fn_x2":
        value = value.view(sys.modules["torch"].uint8)
    array = arrays.as_array(value, name)
    if array.dtype != "uint8":
        raise ValueError(f"{name} must be a uint8 tensor, but got {array.dtype}")
    return value, array


def read_bytes(name: str, value: Any, float8: str) -> tuple[Any, Array]:
    """Block scales: uint8, or the float8 dtype of their format, as uint8."""
    array = arrays.as_array(value, name)
    if array.dtype not in ("uint8", float8):
        raise ValueError(f"{name} must be a uint8 tensor, but got {array.dtype}")
    return bytes_of(value, array)


def bytes_of(value: Any, array: Array) -> tuple[Any, Array]:
    """The same memory as uint8."""
    if array.dtype == "uint8":
        return value, array
    value = arrays.as_bytes(value, array)
    return value, arrays.as_array(value, "bytes")


def contiguous(name: str, spec: Spec) -> None:
    """Bytes that are taken in the order of memory."""
    if not spec.contiguous:
        raise ValueError(
            f"{name} must be contiguous: its bytes are taken as they lie in memory; got strides "
            f"{spec.strides} bytes for shape {spec.shape}"
        )


def is_number(value: Any) -> bool:
    """A number of Python or NumPy, which is passed by value."""
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def float32_of(value: Any, name: str) -> Any:
    """An array as float32, by its own library; numbers stay numbers."""
    if is_number(value):
        return value
    array = arrays.as_array(value, name)
    if array.dtype == "float32":
        return value
    if array.dtype not in ("float16", "bfloat16", "float64"):
        raise ValueError(f"{name} must be a float32 tensor, but got {array.dtype}")
    if array.library == "torch":
        return value.to(sys.modules["torch"].float32)
    return value.astype("float32")


def viewed(value: Any, dtype: str) -> Any:
    """The same memory as another dtype of the same size."""
    if arrays.as_array(value, "array").library == "torch":
        return value.view(getattr(sys.modules["torch"], dtype))
    return value.view(arrays.numpy_dtype(dtype))


def as_float8(value: Any, dtype: str) -> Any:
    """Bytes as their float8 dtype, where the library has it; CuPy has none: uint8 there."""
    known = arrays.as_array(value, "bytes").library in ("torch", "numpy")
    return viewed(value, dtype) if known else value


def permuted(value: Any, axes: tuple[int, ...]) -> Any:
    """A view with its axes in another order."""
    if arrays.as_array(value, "array").library == "torch":
        return value.permute(axes)
    return value.transpose(axes)
