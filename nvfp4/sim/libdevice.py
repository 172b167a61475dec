"""``numba.cuda.libdevice`` on the simulated machine.

Numba's simulator has these functions, and each returns None. Here those that have a plain meaning
compute it, in double and rounded once to the function's type (where the card's own is not correctly
rounded, the last bits differ), and the others say that they are missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from . import scalar

_UNARY: dict[str, Callable[[Any], Any]] = {
    "acos": np.arccos, "acosh": np.arccosh, "asin": np.arcsin, "asinh": np.arcsinh,
    "atan": np.arctan, "atanh": np.arctanh, "cbrt": np.cbrt, "ceil": np.ceil, "cos": np.cos,
    "cosh": np.cosh, "erf": math.erf, "erfc": math.erfc, "exp": np.exp, "exp2": np.exp2,
    "exp10": lambda x: np.float64(10) ** x, "expm1": np.expm1, "fabs": np.fabs, "floor": np.floor,
    "log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2, "nearbyint": np.rint,
    "rint": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "sinh": np.sinh,
    "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc,
}  # fmt: skip
_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "atan2": np.arctan2, "copysign": np.copysign, "fmax": np.fmax, "fmin": np.fmin,
    "fmod": np.fmod, "hypot": np.hypot, "nextafter": np.nextafter, "pow": np.power,
}  # fmt: skip
_ROUNDED = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
_BITS: dict[str, tuple[Any, Any]] = {
    "float_as_int": (np.float32, np.int32),
    "int_as_float": (np.int32, np.float32),
    "double_as_longlong": (np.float64, np.int64),
    "longlong_as_double": (np.int64, np.float64),
}
_INTEGERS: dict[str, tuple[Any, Callable[..., Any]]] = {
    "abs": (np.int32, np.abs), "llabs": (np.int64, np.abs),
    "max": (np.int32, np.maximum), "min": (np.int32, np.minimum),
    "umax": (np.uint32, np.maximum), "umin": (np.uint32, np.minimum),
    "llmax": (np.int64, np.maximum), "llmin": (np.int64, np.minimum),
    "ullmax": (np.uint64, np.maximum), "ullmin": (np.uint64, np.minimum),
    "popc": (np.int32, scalar.popc), "popcll": (np.int64, scalar.popc),
    "clz": (np.int32, scalar.clz), "clzll": (np.int64, scalar.clz),
    "brev": (np.uint32, scalar.brev), "brevll": (np.uint64, scalar.brev),
    "ffs": (np.int32, scalar.ffs), "ffsll": (np.int64, scalar.ffs),
}  # fmt: skip


def _floats(function: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    def compute(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return kind(function(*(np.float64(kind(argument)) for argument in arguments)))

    return compute


def _same_type(function: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    def compute(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return function(*(kind(argument) for argument in arguments))

    return compute


def model(name: str) -> Callable[..., Any]:
    """Return what a function of libdevice computes, or one that raises UnsupportedError."""
    tables: dict[str, Callable[..., Any]] = {**_UNARY, **_BINARY}
    if name == "nextafterf":
        return _same_type(np.nextafter, np.float32)
    if name in tables:
        return _floats(tables[name], np.float64)
    if name.endswith("f") and name[:-1] in tables:
        return _floats(tables[name[:-1]], np.float32)
    if name in _BITS:
        source, target = _BITS[name]
        return lambda value: source(value).view(target)
    if name in _INTEGERS:
        kind, function = _INTEGERS[name]
        return _same_type(function, lambda x: np.uint64(int(x) % (1 << 64)).astype(kind))
    real: Any = np.float32 if name[:1] == "f" else np.float64
    if name[1:].removesuffix("_rn") in _ROUNDED and name.endswith("_rn"):
        return _same_type(_ROUNDED[name[1:-3]], real)
    if name in ("frcp_rn", "drcp_rn"):
        return _same_type(lambda x: real(1) / x, real)
    if name in ("fsqrt_rn", "dsqrt_rn"):
        return _same_type(np.sqrt, real)
    if name in ("fmaf", "fmaf_rn", "fma", "fma_rn"):
        return _same_type(scalar.fma, np.float32 if "fmaf" in name else np.float64)

    def missing(*arguments: Any) -> Any:
        raise UnsupportedError(f"libdevice.{name} has no model on the simulated machine")

    return missing
