"""What an instruction is: a typed name with a lowering for the card and a model for the simulator.

An :class:`Instruction` is made by the :func:`instruction` decorator from its *model*, a Python
function. Calling the instruction runs the model. Compiling a kernel turns the instruction into a
Numba intrinsic (``nvfp4._numba``), whose code is the lowering: inline PTX, or LLVM instructions
made through a builder.

Signatures are text, ``"u32(u32, f32)"``. Types: ``i32 u32 i64 u64 u16 f32 bool``, ``ptr`` (a
kernel's typed pointer, of any element type), ``void``, and ``u32x4`` (a tuple of four), for any
count. A parameter named as ``imm`` is a compile-time integer or string: it is not passed to the
code, but to the lowering as text or to the builder as a value. ``f32xN`` is a tuple of any length:
all tuples of that kind in one call are equally long, and where no parameter is one, the immediate
called `count` says how long the result is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SCALAR_TYPES = ("bool", "u16", "i32", "u32", "i64", "u64", "f32", "ptr", "imm", "void")
_TUPLE = re.compile(r"^(u16|i32|u32|i64|u64|f32|bool)x(\d+|N)$")

#: The count of a tuple of any length, in :func:`split_tuple`.
ANY = -1
_SIGNATURE = re.compile(r"^\s*(\w+)\s*\((.*)\)\s*$")


def _check_type(text: str) -> str:
    text = text.strip()
    if text not in SCALAR_TYPES and not _TUPLE.match(text):
        allowed = ", ".join(SCALAR_TYPES)
        raise ValueError(f"unknown instruction type {text!r}; allowed: {allowed} and u32x4 etc.")
    return text


def split_tuple(text: str) -> tuple[str, int]:
    """``"u32x4"`` -> ``("u32", 4)``; ``"u32xN"`` -> ``("u32", ANY)``; scalar -> ``(type, 0)``."""
    match = _TUPLE.match(text)
    if match is None:
        return text, 0
    return match.group(1), ANY if match.group(2) == "N" else int(match.group(2))


@functools.cache
def parse_signature(text: str) -> tuple[str, tuple[str, ...]]:
    """``"u32(u32, f32)"`` -> ``("u32", ("u32", "f32"))``."""
    match = _SIGNATURE.match(text)
    if match is None:
        raise ValueError(f"an instruction's signature looks like 'u32(u32, f32)'; got {text!r}")
    parameters = tuple(_check_type(part) for part in match.group(2).split(",") if part.strip())
    return _check_type(match.group(1)), parameters


class Lowering(NamedTuple):
    """One way to make an instruction's code, for compute capabilities from `min_cc` on.

    Attributes
    ----------
    asm
        Inline PTX. Operands are ``$0``, ``$1``...: results first, then parameters. An ``imm``
        parameter's value replaces ``{name}``. Other braces are PTX's own.
    build
        Instead of `asm`: ``build(builder, ir, arguments)`` returning an LLVM value (a list of
        values for a tuple).
    constraints
        Only where the default (one ``=`` register class a result, one a parameter) is wrong.
    memory
        True where the instruction reads or writes memory or has another effect: it is then never
        moved or removed.
    min_cc
        Smallest compute capability, ``(8, 0)``.
    below
        The first compute capability that has it no more; None: all later ones have it.
    min_release
        Oldest CUDA release whose compilers know it, ``(13, 1)``.
    """

    asm: str | None = None
    build: Callable[..., Any] | None = None
    constraints: str | None = None
    memory: bool = False
    min_cc: tuple[int, int] = (0, 0)
    below: tuple[int, int] | None = None
    min_release: tuple[int, int] = (0, 0)


@dataclass(eq=False)
class Instruction:
    """A PTX instruction, or a fixed short sequence: see the module's docstring."""

    name: str
    result: str
    parameters: tuple[str, ...]
    names: tuple[str, ...]
    model: Callable[..., Any]
    lowerings: list[Lowering] = field(default_factory=list)
    #: What a kernel calls where no lowering fits: a function over other instructions.
    software: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.model)

    def __call__(self, *arguments: Any) -> Any:
        """Run the model."""
        return self.model(*arguments)

    def lowering(
        self,
        *,
        asm: str | None = None,
        constraints: str | None = None,
        memory: bool = False,
        min_cc: tuple[int, int] = (0, 0),
        below: tuple[int, int] | None = None,
        min_release: tuple[int, int] = (0, 0),
    ) -> Any:
        """Add a lowering: give `asm`, or decorate a builder function with it."""
        where = (min_cc, below, min_release)
        if asm is not None:
            self.lowerings.append(Lowering(asm, None, constraints, memory, *where))
            return None

        def decorate(build: Callable[..., Any]) -> Callable[..., Any]:
            self.lowerings.append(Lowering(None, build, None, memory, *where))
            return build

        return decorate

    def without_hardware(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate the function that stands in for the instruction where no lowering fits.

        It is bound like a kernel's helper function, so the card runs the code that a test on the
        CPU runs.
        """
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        if names != self.names:
            raise ValueError(f"{self.name}: its software form must take {self.names}; got {names}")
        self.software = function
        return function

    def lowering_for(
        self, cc: tuple[int, int], release: tuple[int, int] | None = None
    ) -> Lowering | None:
        """The lowering with the largest `min_cc` that `cc` satisfies; None where there is none.

        `release` is the compilers' CUDA release; None: newer than all that lowerings ask for.
        """
        fitting = [
            low
            for low in self.lowerings
            if low.min_cc <= cc[:2]
            and (low.below is None or cc[:2] < low.below)
            and (release is None or low.min_release <= release)
        ]
        return max(fitting, key=lambda low: low.min_cc) if fitting else None


def instruction(
    signature: str,
    *,
    asm: str | None = None,
    build: Callable[..., Any] | None = None,
    constraints: str | None = None,
    memory: bool = False,
    min_cc: tuple[int, int] = (0, 0),
    below: tuple[int, int] | None = None,
    min_release: tuple[int, int] = (0, 0),
) -> Callable[[Callable[..., Any]], Instruction]:
    """Make an :class:`Instruction` of the decorated model.

    Parameters
    ----------
    signature
        ``"result(parameters)"`` in the types of the module's docstring.
    asm, build, constraints, memory, min_cc, below, min_release
        The first lowering, see :class:`Lowering`. Without `asm` and `build` add one with
        :meth:`Instruction.lowering`.
    """
    result, parameters = parse_signature(signature)

    def decorate(model: Callable[..., Any]) -> Instruction:
        code = model.__code__
        names = code.co_varnames[: code.co_argcount]
        if len(names) != len(parameters):
            raise ValueError(
                f"{model.__name__}: the signature has {len(parameters)} parameters, "
                f"the model {len(names)}"
            )
        made = Instruction(model.__name__, result, parameters, names, model)
        if asm is not None or build is not None:
            where = (min_cc, below, min_release)
            made.lowerings.append(Lowering(asm, build, constraints, memory, *where))
        return made

    return decorate
