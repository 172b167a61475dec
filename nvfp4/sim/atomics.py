"""What each atomic operation stores, by type."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import InvalidOperand

#: Bits and signedness of the integer types.
INTEGERS = {
    "u8": (8, False),
    "u16": (16, False),
    "u32": (32, False),
    "u64": (64, False),
    "i32": (32, True),
    "i64": (64, True),
}
ITEMSIZE = {name: bits // 8 for name, (bits, _) in INTEGERS.items()} | {"f32": 4}


def wrap(value: int, dtype: str) -> int:
    """Return the value that is left of an integer in a type's width, as storing it does."""
    bits, signed = INTEGERS[dtype]
    value &= (1 << bits) - 1
    if signed and value >> (bits - 1):
        value -= 1 << bits
    return value


def _increment(old: Any, limit: Any) -> Any:
    return old * 0 if old >= limit else old + 1


def _decrement(old: Any, limit: Any) -> Any:
    return limit if old == 0 or old > limit else old - 1


def _float_sum(old: Any, value: Any) -> np.float32:
    """Round the sum once; NaN is the canonical one, and nothing warns."""
    total = float(old) + float(value)
    if total != total:
        return np.uint32(0x7FFFFFFF).view(np.float32)
    return np.float32(ctypes.c_float(total).value)


def _flushed(value: Any) -> Any:
    return value * np.float32(0) if abs(value) < _SMALLEST_NORMAL else value


def _flushed_sum(old: Any, value: Any) -> Any:
    return _flushed(_float_sum(_flushed(old), _flushed(value)))


_SMALLEST_NORMAL = np.float32(2.0**-126)


def _nan_max(old: Any, value: Any) -> Any:
    return np.fmax(old, value) if isinstance(value, np.floating) else max(old, value)


def _nan_min(old: Any, value: Any) -> Any:
    return np.fmin(old, value) if isinstance(value, np.floating) else min(old, value)


#: name -> function of (old, operand) giving the new value. ``inc`` and ``dec`` wrap at the operand
#: (PTX ``atom.inc``).
#: A float's max and min take the number where one of the two is NaN, as PTX does.
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, value: (
        _float_sum(old, value) if isinstance(value, np.floating) else old + value
    ),
    "sub": lambda old, value: old - value,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "min": _nan_min,
    "max": _nan_max,
    "inc": _increment,
    "dec": _decrement,
    # ``atom.add.f32`` in global memory: subnormal operands and results are zeros (PTX ISA, atom).
    "add.ftz": _flushed_sum,
}


def combine(operation: str, dtype: str, old: Any, value: Any, compare: Any = None) -> Any:
    """Return the new value of a cell that holds `old`, in the range of `dtype`.

    Parameters
    ----------
    operation
        A name of `OPERATIONS`, or ``"cas"``, which stores `value` where `old` equals `compare`.
    dtype
        ``"u32"``, ``"f32"``...

    Raises
    ------
    InvalidOperand
        An unknown operation, or one that the type has not.
    """
    if operation == "cas":
        if dtype == "f32":
            raise InvalidOperand("atomic cas takes integers; compare a float's bits")
        return wrap(int(value), dtype) if old == wrap(int(compare), dtype) else old
    function = OPERATIONS.get(operation)
    if function is None:
        raise InvalidOperand(
            f"atomic operation must be one of {', '.join(OPERATIONS)}, cas; got {operation!r}"
        )
    if dtype == "f32":
        if operation not in ("add", "add.ftz", "sub", "exch", "min", "max"):
            raise InvalidOperand(f"atomic {operation} takes integers; got f32")
        return np.float32(function(np.float32(old), np.float32(value)))
    return wrap(int(function(old, wrap(int(value), dtype))), dtype)


def from_bits(bits: int, dtype: str) -> Any:
    """Return the value of a type that an element's bits mean."""
    if dtype == "f32":
        return np.uint32(bits).view(np.float32)
    return wrap(bits, dtype)


def to_bits(value: Any, dtype: str) -> int:
    """Return the bits of a value of a type, as an unsigned integer."""
    if dtype == "f32":
        return int(np.float32(value).view(np.uint32))
    return int(value) & ((1 << 8 * ITEMSIZE[dtype]) - 1)
