"""Instructions on the host, compiled by Numba: models and software forms at a speed that allows
sweeps.

What is compiled are the package's functions, from the same code objects. Only what reads and makes
bit patterns, and what rounds, has a form of its own here.
"""

import math
from types import FunctionType

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from nvfp4.program import Kernel, Program
from nvfp4.ptx.instruction import Instruction

# Helpers of the models (nvfp4.ptx.rounding) ------------------------------------------------------


def bits_of(value):
    return np.int64(np.float32(value).view(np.uint32))


def float_of(bits):
    return np.uint32(bits & 0xFFFFFFFF).view(np.float32)


def to_f32(value):
    return np.uint32(0x7FFFFFFF).view(np.float32) if math.isnan(value) else np.float32(value)


_HELPERS = (("bits_of", bits_of), ("float_of", float_of), ("to_f32", to_f32))


# Instructions ------------------------------------------------------------------------------------


def _float_as_uint(a):
    return np.int64(np.float32(a).view(np.uint32))


def _uint_as_float(a):
    return np.uint32(a & 0xFFFFFFFF).view(np.float32)


def _add_rn(a, b):
    return np.uint32(0x7FFFFFFF).view(np.float32) if math.isnan(a + b) else a + b


def _mul_rn(a, b):
    # The host's multiplication keeps a NaN's sign.
    return np.uint32(0x7FFFFFFF).view(np.float32) if math.isnan(a * b) else a * b


def _fma_rn(a, b, c):
    # Rounded once where the product is a float32, as it is in the software forms.
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def _min_f32(a, b):
    if math.isnan(a):
        return b
    return b if b < a else a


def _max_f32(a, b):
    if math.isnan(a):
        return b
    return b if b > a else a


def _abs_f32(a):
    return np.float32(abs(a))


def _select_f32(condition, a, b):
    return a if condition else b


_FLOATS = {
    function.__name__[1:]: njit(function)
    for function in (
        _float_as_uint,
        _uint_as_float,
        _add_rn,
        _mul_rn,
        _fma_rn,
        _min_f32,
        _max_f32,
        _abs_f32,
        _select_f32,
    )
}


class _Host:
    """A world (``nvfp4.program``) in which everything is compiled for the host."""

    cuda = None

    def __init__(self, software: bool) -> None:
        self.software = software

    def instruction(self, instruction: Instruction):
        if self.software and instruction.software is not None:
            return instruction.software
        if instruction.name in _FLOATS:
            return _FLOATS[instruction.name]
        return bind(instruction.model, self.software)

    def helper(self, function: FunctionType):
        return njit(function)


def bind(function: FunctionType, software: bool):
    """A function of the package, and all that it calls, compiled for the host."""
    kernel = Kernel(function.__name__, function, ("u32",) * function.__code__.co_argcount)
    return njit(Program(kernel, (), _HELPERS).bind(_Host(software)))


def model(instruction: Instruction):
    return bind(instruction.model, software=False)


def software(instruction: Instruction):
    return bind(instruction.software, software=True)


def sweep_pairs(function):
    """``sweep(hi, lo)`` of float32 arrays: the results as uint32."""

    @njit
    def sweep(hi, lo):
        out = np.empty(hi.size, np.uint32)
        for i in range(hi.size):
            out[i] = function(hi[i], lo[i])
        return out

    return sweep


def sweep_codes(function, limit: int):
    """An array of the results, as patterns, for the codes 0..limit-1."""

    @njit
    def sweep():
        out = np.empty(limit, np.uint32)
        for code in range(limit):
            out[code] = _pattern(function(code))
        return out

    return sweep()


@njit
def _pattern(value):
    if isinstance(value, np.float32):
        return np.float32(value).view(np.uint32)
    return np.uint32(value)


def patterns(count: int = 1 << 24) -> np.ndarray:
    """Evenly spaced float32 patterns with changing low bits, as float32."""
    step = (1 << 32) // count
    index = np.arange(count, dtype=np.uint64)
    return (index * step + index * 0x9E3779B1 % step).astype(np.uint32).view(np.float32)


def near(values) -> np.ndarray:
    """Each float32 with its two neighbours, of both signs; infinities, NaNs, zeros, subnormals."""
    middle = np.asarray(values, np.float32).view(np.uint32)
    special = [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000]
    special += [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FFFFFFF]
    around = np.concatenate([middle - 1, middle, middle + 1, np.array(special, np.uint32)])
    around = around & np.uint32(0x7FFFFFFF)
    return np.unique(np.concatenate([around, around | np.uint32(0x80000000)])).view(np.float32)


# Lowerings that are LLVM instructions ------------------------------------------------------------

_NUMBA = {
    "bool": types.boolean,
    "i32": types.int32,
    "u32": types.uint32,
    "i64": types.int64,
    "f32": types.float32,
}


def lowered(instruction: Instruction, cc: tuple[int, int] = (9, 0)):
    """The instruction's lowering for `cc`, made by its builder, for the host's processor."""
    build = instruction.lowering_for(cc).build
    signature = _NUMBA[instruction.result](*(_NUMBA[kind] for kind in instruction.parameters))

    def typing(typingctx, *given):
        return signature, lambda context, builder, sig, values: build(builder, ir, values)

    names = ", ".join(instruction.names)
    scope = {"typing": typing}
    exec(f"def made(typingctx, {names}):\n    return typing(typingctx, {names})", scope)
    made = intrinsic(scope["made"])
    scope = {"made": made}
    exec(f"def call({names}):\n    return made({names})", scope)
    return njit(scope["call"])
