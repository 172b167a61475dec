"""Kernels, programs, and the binding of one body to two worlds.

A :class:`Kernel` is an undecorated function, its parameter types and its compile-time constants. A
:class:`Program` is a kernel with the constants fixed. :meth:`Program.bind` makes, from the *same
code objects*, functions over new globals: constants become values, helper functions are bound in
turn, and every instruction becomes what the world makes of it. See docs/decisions.md D3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from opcode import opmap
from types import CodeType, FunctionType, ModuleType
from typing import Any, Protocol

from ._numba import cuda as _cuda_placeholder
from .ptx.instruction import Instruction

Constant = int | float | bool | str

_EXTENDED_ARG, _LOAD_GLOBAL, _LOAD_NAME = (
    opmap[name] for name in ("EXTENDED_ARG", "LOAD_GLOBAL", "LOAD_NAME")
)


class World(Protocol):
    """What binding needs to know of a world: the card or the simulated machine."""

    #: Replaces the `cuda` placeholder.
    cuda: Any

    def instruction(self, instruction: Instruction) -> Any:
        """What an instruction becomes: a plain function is bound in turn, like a helper."""

    def helper(self, function: FunctionType) -> Any:
        """What a bound helper function becomes."""


@dataclass(frozen=True)
class Kernel:
    """A kernel body and what is known about it.

    Attributes
    ----------
    name
        The name users give to ``nvfp4 compile``.
    body
        Undecorated Python; its parameters are typed by `parameters`.
    parameters
        Types in order: ``"u8*"``, ``"i64"``, ``"f32"``... (docs/decisions.md D2).
    constants
        Name of each compile-time constant -> the values it may take. Each is a module-level name of
        the body's or a helper's module.
    min_cc
        Smallest compute capability the kernel runs on.
    architectures
        None, or the only architectures it is made for, such as ``("sm_100a", "sm_103a")``.
    threads
        Threads a block, where fixed: the launch bound. A kernel whose bound depends on its
        constants has a constant THREADS instead.
    blocks_per_sm
        Launch bound: resident blocks that registers must allow (0: not stated). A kernel whose
        bound depends on its constants has a constant BLOCKS_PER_SM instead.
    """

    name: str
    body: Any
    parameters: tuple[str, ...]
    constants: Mapping[str, tuple[Constant, ...]] = field(default_factory=dict)
    min_cc: tuple[int, int] = (8, 0)
    architectures: tuple[str, ...] | None = None
    threads: int = 0
    blocks_per_sm: int = 0

    def __post_init__(self) -> None:
        count = self.body.__code__.co_argcount
        if count != len(self.parameters):
            raise ValueError(
                f"kernel {self.name}: {len(self.parameters)} types for {count} parameters"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.body))

    def program(self, **constants: Any) -> Program:
        """Fix the constants.

        Raises
        ------
        ValueError
            A constant is missing, unknown, or not one of the values it may take.
        """
        if constants.keys() != self.constants.keys():
            raise ValueError(
                f"kernel {self.name} has the constants {sorted(self.constants)}; "
                f"got {sorted(constants)}"
            )
        for name, allowed in self.constants.items():
            if allowed and constants[name] not in allowed:
                raise ValueError(
                    f"kernel {self.name}: {name} must be one of {allowed}; got {constants[name]!r}"
                )
        return Program(self, tuple(sorted(constants.items())))


@dataclass(frozen=True)
class Program:
    """A kernel with its constants fixed, and functions of the user's (epilogues) put in.

    `functions` maps a name that the body calls to the function that it shall call.
    """

    kernel: Kernel
    constants: tuple[tuple[str, Any], ...]
    functions: tuple[tuple[str, FunctionType], ...] = ()

    @property
    def label(self) -> str:
        """The kernel's name and its constants, for people."""
        values = ",".join(f"{name}={value}" for name, value in self.constants)
        return f"{self.kernel.name}[{values}]" if values else self.kernel.name

    @property
    def threads(self) -> int:
        """Threads a block, where fixed (0: not stated)."""
        return int(dict(self.constants).get("THREADS", self.kernel.threads))

    @property
    def blocks_per_sm(self) -> int:
        """Launch bound: resident blocks that registers must allow (0: not stated)."""
        return int(dict(self.constants).get("BLOCKS_PER_SM", self.kernel.blocks_per_sm))

    def bind(self, world: World) -> FunctionType:
        """The body as a function over the world's names."""
        return _Binder(world, dict(self.constants), dict(self.functions)).function(self.kernel.body)

    def sources(self) -> Iterator[FunctionType]:
        """The body and every helper function that it reaches, each once."""
        seen: set[int] = set()
        todo: list[FunctionType] = [self.kernel.body, *(function for _, function in self.functions)]
        while todo:
            function = todo.pop()
            if id(function) in seen:
                continue
            seen.add(id(function))
            yield function
            for value in _used_values(function).values():
                if isinstance(value, Instruction):
                    value = value.software
                if isinstance(value, FunctionType):
                    todo.append(value)


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """The names that code takes from its module, and those of functions inside it.

    Not ``co_names``: attributes are in there too, and ``threadIdx.x`` has nothing to do with a
    module's ``x``.
    """
    names = set()
    operations, arguments = code.co_code[::2], code.co_code[1::2]
    # Searches in C: a loop in Python takes a millisecond of a process's first call.
    for load, shift in ((_LOAD_GLOBAL, 1), (_LOAD_NAME, 0)):  # a global's lowest bit: for a call
        at = operations.find(load)
        while at >= 0:
            argument, place = arguments[at], at
            while place and operations[place - 1] == _EXTENDED_ARG:
                place -= 1
                argument |= arguments[place] << 8 * (at - place)
            names.add(code.co_names[argument >> shift])
            at = operations.find(load, at + 1)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names(constant)
    return frozenset(names)


def _used_values(function: FunctionType) -> dict[str, Any]:
    scope = function.__globals__
    return {name: scope[name] for name in _names(function.__code__) if name in scope}


def used_values(function: FunctionType) -> dict[str, Any]:
    """Every name that a function takes from outside itself, and its value: globals and closure."""
    values = _used_values(function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # a cell not filled yet: a function that will be defined later
            continue
    return values


class _Binder:
    def __init__(
        self, world: World, constants: dict[str, Any], functions: dict[str, FunctionType]
    ) -> None:
        self.world = world
        self.constants = constants
        self.functions = functions
        # In a user's function, names are the user's: a global SCALE has nothing to do with ours.
        self.users = _Binder(world, {}, {}) if functions else self
        self.done: dict[FunctionType, FunctionType] = {}
        self.helpers: dict[FunctionType, Any] = {}

    def function(self, original: FunctionType) -> FunctionType:
        if original in self.done:
            return self.done[original]
        scope: dict[str, Any] = {
            "__name__": original.__module__,
            "__file__": original.__code__.co_filename,
        }
        bound = FunctionType(
            original.__code__,
            scope,
            original.__name__,
            original.__defaults__,
            self._closure(original),
        )
        bound.__kwdefaults__ = original.__kwdefaults__
        bound.__annotations__ = original.__annotations__
        bound.__module__ = original.__module__
        bound.__qualname__ = original.__qualname__
        self.done[original] = bound
        for name, value in _used_values(original).items():
            scope[name] = self.value(name, value, original)
        for name in _names(original.__code__) & (self.constants.keys() | self.functions.keys()):
            scope[name] = self.value(name, None, original)
        return bound

    def _closure(self, original: FunctionType) -> tuple[Any, ...] | None:
        if original.__closure__ is None:
            return None
        return tuple(
            type(cell)(self.value(name, cell.cell_contents, original))
            for name, cell in zip(original.__code__.co_freevars, original.__closure__, strict=True)
        )

    def helper(self, function: FunctionType) -> Any:
        if function not in self.helpers:
            self.helpers[function] = self.world.helper(self.function(function))
        return self.helpers[function]

    def value(self, name: str, value: Any, user: FunctionType) -> Any:
        if name in self.constants:
            return self.constants[name]
        if name in self.functions:
            return self.users.helper(self.functions[name])
        if value is _cuda_placeholder:
            return self.world.cuda
        if isinstance(value, Instruction):
            made = self.world.instruction(value)
            stands_in = isinstance(made, FunctionType) and made is value.software
            return self.helper(made) if stands_in else made
        if isinstance(value, FunctionType):
            return self.helper(value)
        if value is math or (isinstance(value, ModuleType) and value.__name__ == "numpy"):
            return value
        if (
            value is None
            or isinstance(value, (int, float, str, bool, tuple, type))
            or hasattr(value, "dtype")
        ):
            return value
        raise TypeError(
            f"{user.__qualname__} uses the name {name!r}, a {type(value).__name__}: a kernel may "
            "use instructions, helper functions, numbers, tuples, cuda, np and math"
        )


class SimulatorWorld:
    """Instructions become their models, helpers stay Python functions."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def instruction(self, instruction: Instruction) -> Callable[..., Any]:
        """The instruction's model."""
        return instruction.model

    def helper(self, function: FunctionType) -> FunctionType:
        """The function itself."""
        return function


class DeviceWorld:
    """Instructions become Numba intrinsics, helpers device functions, for one architecture.

    `release` is the CUDA release of the compilers, None: that of this process's.
    """

    def __init__(self, cc: tuple[int, int], release: tuple[int, int] | None = None) -> None:
        from . import _numba, toolchain

        self._numba = _numba
        self.cuda = _numba.numba_cuda()
        self.cc = cc
        self.release = toolchain.release() if release is None else release

    def instruction(self, instruction: Instruction) -> Any:
        """A Numba intrinsic; the software form where card or compilers lack the instruction."""
        lowering = instruction.lowering_for(self.cc, self.release)
        if instruction.software is not None and lowering is None:
            return instruction.software
        return self._numba.intrinsic_of(instruction, self.cc, self.release)

    def helper(self, function: FunctionType) -> Any:
        """A device function."""
        return self._numba.device_function(function, self.cc)
