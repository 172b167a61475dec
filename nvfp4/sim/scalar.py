"""Scalar functions of the ``cuda`` module on NumPy scalars, rounded as the card rounds them."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np


def width(value: Any) -> int:
    """Return the bits of an integer's type.

    A Python int is of 32 bits where it fits, as indices on the card are.
    """
    if isinstance(value, np.generic):
        return 8 * value.dtype.itemsize
    return 32 if -(1 << 31) <= value < 1 << 32 else 64


def _bits(value: Any) -> tuple[int, int]:
    size = max(width(value), 32)
    return int(value) & ((1 << size) - 1), size


def popc(value: Any) -> int:
    """Return the number of bits that are set."""
    return _bits(value)[0].bit_count()


def brev(value: Any) -> int:
    """Return the bits in reverse order."""
    bits, size = _bits(value)
    return int(f"{bits:0{size}b}"[::-1], 2)


def clz(value: Any) -> int:
    """Return the number of zeros before the highest set bit."""
    bits, size = _bits(value)
    return size - bits.bit_length()


def ffs(value: Any) -> int:
    """Return the place of the lowest set bit, counted from 1; 0 where there is none."""
    bits, _ = _bits(value)
    return (bits & -bits).bit_length()


def selp(condition: Any, a: Any, b: Any) -> Any:
    """Return a where the condition holds, else b."""
    return a if condition else b


def _exact(value: Any) -> Fraction:
    return Fraction(float(value))


def fma(a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once, in the widest type of the three.

    A Python float counts as float64.
    """
    kind = np.result_type(*(np.asarray(value) for value in (a, b, c)))
    if not np.issubdtype(kind, np.floating):
        return a * b + c
    with np.errstate(all="ignore"):
        special = np.float64(a) * np.float64(b) + np.float64(c)
        if not all(math.isfinite(float(value)) for value in (a, b, c)):
            return kind.type(special)
    return rounded(_exact(a) * _exact(b) + _exact(c), kind, zero=special)


def rounded(value: Fraction, kind: Any, zero: Any = 0.0) -> Any:
    """Return an exact number rounded to nearest even; `zero` has a zero's sign.

    float64 first, to odd where inexact, so that the second rounding cannot err (it has more than
    two bits to spare).
    """
    dtype = np.dtype(kind)
    if value == 0:
        return dtype.type(math.copysign(0.0, float(zero)))
    try:
        near = float(value)
    except OverflowError:
        near = math.copysign(math.inf, 1 if value > 0 else -1)
    if dtype == np.float64 or math.isinf(near):
        return dtype.type(near)
    error = value - Fraction(near)
    if error and int(np.float64(near).view(np.uint64)) % 2 == 0:
        near = math.nextafter(near, math.inf if error > 0 else -math.inf)
    with np.errstate(over="ignore"):
        return dtype.type(near)


class Float16:
    """``cuda.fp16``: each function is computed exactly or in double, and rounded once."""

    @staticmethod
    def _round(value: Any) -> np.float16:
        with np.errstate(all="ignore"):
            return np.float16(np.float64(value))

    def hadd(self, a: Any, b: Any) -> np.float16:
        """Return a + b."""
        return self._round(np.float64(a) + np.float64(b))

    def hsub(self, a: Any, b: Any) -> np.float16:
        """Return a - b."""
        return self._round(np.float64(a) - np.float64(b))

    def hmul(self, a: Any, b: Any) -> np.float16:
        """Return a * b."""
        return self._round(np.float64(a) * np.float64(b))

    def hdiv(self, a: Any, b: Any) -> np.float16:
        """Return a / b."""
        with np.errstate(all="ignore"):
            return self._round(np.float64(a) / np.float64(b))

    def hfma(self, a: Any, b: Any, c: Any) -> Any:
        """Return a * b + c, rounded once."""
        return fma(np.float16(a), np.float16(b), np.float16(c))

    def hneg(self, a: Any) -> np.float16:
        """Return -a."""
        return -np.float16(a)

    def habs(self, a: Any) -> np.float16:
        """Return the absolute value."""
        return abs(np.float16(a))

    def hmax(self, a: Any, b: Any) -> Any:
        """Return the larger, the number where one of them is NaN."""
        return np.fmax(np.float16(a), np.float16(b))

    def hmin(self, a: Any, b: Any) -> Any:
        """Return the smaller, the number where one of them is NaN."""
        return np.fmin(np.float16(a), np.float16(b))


def _unary(name: str, function: Any) -> None:
    def method(self: Float16, a: Any) -> np.float16:
        with np.errstate(all="ignore"):
            return self._round(function(np.float64(a)))

    method.__name__ = name
    method.__doc__ = f"Return {name[1:]} of a float16."
    setattr(Float16, name, method)


def _compare(name: str, function: Any) -> None:
    def method(self: Float16, a: Any, b: Any) -> bool:
        return bool(function(np.float16(a), np.float16(b)))

    method.__name__ = name
    method.__doc__ = f"Return whether a {name[1:]} b."
    setattr(Float16, name, method)


for _name, _function in {
    "hsin": np.sin,
    "hcos": np.cos,
    "hlog": np.log,
    "hlog2": np.log2,
    "hlog10": np.log10,
    "hexp": np.exp,
    "hexp2": np.exp2,
    "hexp10": lambda x: np.float64(10) ** x,
    "hsqrt": np.sqrt,
    "hrsqrt": lambda x: 1 / np.sqrt(x),
    "hceil": np.ceil,
    "hfloor": np.floor,
    "hrcp": lambda x: 1 / x,
    "htrunc": np.trunc,
    "hrint": np.rint,
}.items():
    _unary(_name, _function)
for _name, _function in {
    "heq": np.equal,
    "hne": np.not_equal,
    "hge": np.greater_equal,
    "hgt": np.greater,
    "hle": np.less_equal,
    "hlt": np.less,
}.items():
    _compare(_name, _function)
