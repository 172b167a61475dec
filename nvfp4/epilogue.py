"""A function of the user's at the end of a product: what it is given, and what it works on."""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import numpy as np

__all__ = ["Epilogue", "EpilogueCode", "compiled_alike", "seen_function"]


class EpilogueCode:
    """What a kernel is compiled for: the function, and how it is called; no array.

    Equal where the bytecode, the constants that the function reaches (closures, defaults, globals)
    and the types of the arrays are equal, so that a function that is defined anew in every step of
    a loop is compiled once.
    """

    __slots__ = ("dtypes", "fn", "halves", "key", "pair")

    def __init__(self, fn: FunctionType, pair: bool, halves: bool, dtypes: tuple[str, ...]) -> None:
        self.fn = fn
        self.pair = pair
        self.halves = halves
        self.dtypes = dtypes
        self.key = (_identity(fn, ()), pair, halves, dtypes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpilogueCode) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"<epilogue {self.fn.__name__}({', '.join(self.dtypes)})>"


def _identity(value: Any, inside: tuple[FunctionType, ...]) -> Any:
    """A hashable that tells apart whatever may compile differently."""
    if isinstance(value, FunctionType):
        if value in inside:  # recursion; the outer visit has the rest
            return value.__code__
        inside = (*inside, value)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        names = sorted(_global_names(value))
        return (
            value.__code__,
            tuple(_identity(item, inside) for item in value.__defaults__ or ()),
            tuple(_identity(item, inside) for item in cells),
            tuple((name, _identity(value.__globals__[name], inside)) for name in names),
        )
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, tuple):
        return tuple(_identity(item, inside) for item in value)
    if isinstance(value, (bool, int, float, str, np.generic, type(None))):
        return type(value), repr(value)  # 1, 1.0 and True are equal but compile differently
    return id(value)


class _Compiled:
    """Stands for all functions that compile alike; compared by identity."""

    def __init__(self, fn: FunctionType) -> None:
        self.fn = fn  # the ids in its identity stay taken


#: A function, and all that it reached when it was looked at: its code and defaults; what looks at
#: each variable and each other function, what that is given, what it returned. Plain tuples, which
#: are taken apart in a third of the time of named ones.
_Seen = tuple[
    weakref.ref[FunctionType],
    CodeType,
    Any,
    tuple[tuple[Callable[[Any], Any], Any, Any], ...],
    _Compiled,
]

_MOST = 256
_seen: dict[int, _Seen] = {}
_compiled: dict[Any, _Compiled] = {}
_CONTENTS = attrgetter("cell_contents")
_CODE, _DEFAULTS = attrgetter("__code__"), attrgetter("__defaults__")


def compiled_alike(fn: FunctionType) -> object:
    """The same object for functions that are compiled to the same code, as of now.

    A function that is seen again costs a look at each variable that it reaches: that a constant
    was given another value since is noticed.
    """
    seen = _seen.get(id(fn))
    if seen is not None:
        function, code, defaults, reached, compiled = seen
        if function() is fn and fn.__code__ is code and fn.__defaults__ is defaults:
            try:
                for look, at, value in reached:
                    if look(at) is not value:  # 1 and True are equal
                        break
                else:
                    return compiled
            except (KeyError, ValueError):  # a variable is gone
                pass
    return _look_anew(fn)[-1]


def seen_function(fn: FunctionType) -> _Seen:
    """What :func:`compiled_alike` keeps of a function, as of now; the last of it is its result."""
    compiled = compiled_alike(fn)
    seen = _seen.get(id(fn))
    # Another thread may have dropped it, or looked at another time.
    return seen if seen is not None and seen[-1] is compiled else _look_anew(fn)


def _look_anew(fn: FunctionType) -> _Seen:
    identity = _identity(fn, ())
    compiled = _compiled.get(identity)
    if compiled is None:
        if len(_compiled) >= _MOST:
            _compiled.clear()
        compiled = _compiled[identity] = _Compiled(fn)
    if len(_seen) >= _MOST:
        _seen.clear()
    key = id(fn)
    gone = weakref.ref(fn, lambda _: _seen.pop(key, None))
    seen = _seen[key] = gone, fn.__code__, fn.__defaults__, _reached(fn), compiled
    return seen


def _reached(fn: FunctionType) -> tuple[Any, ...]:
    """Functions, cells of closures and globals that a function's code can reach, as they are."""
    reached: list[tuple[Callable[[Any], Any], Any, Any]] = []
    waiting: list[Any] = [fn]
    met: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, tuple):
            waiting += value
        if not isinstance(value, FunctionType) or id(value) in met:
            continue
        met.add(id(value))
        if value is not fn:  # which is not held, so that it can go
            reached += [(_CODE, value, value.__code__), (_DEFAULTS, value, value.__defaults__)]
        for cell in value.__closure__ or ():
            reached.append((_CONTENTS, cell, cell.cell_contents))
            waiting.append(cell.cell_contents)
        variables = value.__globals__
        for name in sorted(_names(value)):
            if name in variables:
                reached.append((variables.__getitem__, name, variables[name]))
                waiting.append(variables[name])
            else:
                reached.append((variables.__contains__, name, False))
        waiting += value.__defaults__ or ()
    return tuple(reached)


def _global_names(function: FunctionType) -> set[str]:
    """Names in a function's code that are globals now."""
    return {name for name in _names(function) if name in function.__globals__}


def _names(function: FunctionType) -> set[str]:
    """Names in a function's code that may be globals."""
    codes = [function.__code__]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names |= _variables(code)
        codes += [item for item in code.co_consts if isinstance(item, CodeType)]
    return names


@functools.lru_cache(maxsize=_MOST)
def _variables(code: CodeType) -> frozenset[str]:
    """Names that a code's instructions use, but for attributes: those of `np.float32` are `np`."""
    if not code.co_names:
        return frozenset()
    return frozenset(
        one.argval
        for one in dis.get_instructions(code)
        if one.opcode in dis.hasname and "ATTR" not in one.opname and one.opname != "LOAD_METHOD"
    )


@dataclass(frozen=True, init=False, eq=False)
class Epilogue:
    """What happens to each element of a product, in float32, before it is cast.

    ``fn(value, row, column, expert, *arrays)`` gets alpha' times the accumulator, where it stands
    in the result, and the arrays; what it returns is cast and stored. It is compiled into the
    kernel, and runs as it is in the golden model and on the simulated machine; so it may use
    numbers, ``math``, ``numpy`` scalars (``np.float32``), and functions of the same kind, and
    nothing else. Float literals are float64 on a GPU: write ``np.float32(0.5)``.

    Each array reaches `fn` **flat**, in C order, whatever its shape: write ``residual[row *
    columns + column]`` for a [M, N] one, with ``columns`` a plain number that `fn` closes over.
    Arrays are parameters of the kernel: their values may change between calls without a new
    compilation.

    Parameters
    ----------
    fn : function
        ``fn(value, row, column, expert, *arrays) -> value``; with ``pair=True``
        ``fn(gate, up, row, column, expert, *arrays) -> value``. row and column are those of the
        result; expert is 0 in a dense product. Rows that a grouped product writes as zero do not
        pass through it.
    *arrays : arrays
        Of float32, float16, bfloat16, int32, int64 or uint8, contiguous, on the device of the
        operands; an element of a 16-bit float is read as a float32.
    pair : bool
        Two columns of the product make one of the result, which has N/2.
    halves : bool
        Which two: column j and column j + N/2 (True: gates in the first half), or columns 2j and
        2j + 1 (False: interleaved, as gpt-oss stores them).
    axes : sequence of str, optional
        For each array, its axes out of M, N (rows and columns of the result), E (experts, 1 in a
        dense product) and 1, such as ``("EN", "M1")``: another shape is then a ValueError when the
        epilogue is used. Without it nothing keeps `fn` from reading beyond an array on a GPU.

    Raises
    ------
    TypeError
        `fn` is not a Python function, or takes another number of arguments; `pair` or `halves` is
        no bool.
    ValueError
        `axes` are not of these letters, or not as many as there are arrays.
    """

    fn: FunctionType
    arrays: tuple[Any, ...]
    pair: bool
    halves: bool
    axes: tuple[str, ...] | None
    #: What ``api._repeat`` found of function and arrays, and where.
    _seen: ClassVar[Any] = None

    def __init__(
        self,
        fn: Callable[..., Any],
        *arrays: Any,
        pair: bool = False,
        halves: bool = True,
        axes: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(fn, FunctionType):
            raise TypeError(
                "an epilogue must be a Python function, which can be compiled into a kernel; "
                f"got {type(fn).__name__}"
            )
        for name, flag in (("pair", pair), ("halves", halves)):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} must be True or False; got {flag!r}")
        own = ("gate", "up") if pair else ("value",)
        names = (*own, "row", "column", "expert")
        code = fn.__code__
        if (
            code.co_argcount != len(names) + len(arrays)
            or code.co_flags & 0x0C
            or code.co_kwonlyargcount
        ):
            raise TypeError(
                f"the epilogue {fn.__name__} must take ({', '.join(names)}) and one argument "
                f"for each of its {len(arrays)} arrays; it takes "
                f"({', '.join(code.co_varnames[: code.co_argcount])})"
            )
        if axes is not None:
            axes = tuple(axes)
            if len(axes) != len(arrays) or any(set(one) - set("MNE1") for one in axes):
                raise ValueError(
                    "axes must be a string of the letters M, N, E and 1 for each of the "
                    f"{len(arrays)} arrays; got {axes}"
                )
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", arrays)
        object.__setattr__(self, "pair", bool(pair))
        object.__setattr__(self, "halves", bool(halves))
        object.__setattr__(self, "axes", axes)

    # What was seen is of this process and these arrays: a copy or a pickle is looked at anew.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def code(self, dtypes: tuple[str, ...]) -> EpilogueCode:
        """What plans and compilation see of it; `dtypes` are those of its arrays."""
        return EpilogueCode(self.fn, self.pair, self.halves, dtypes)

    def with_arrays(self, arrays: tuple[Any, ...]) -> Epilogue:
        """The same epilogue over other arrays."""
        return Epilogue(self.fn, *arrays, pair=self.pair, halves=self.halves, axes=self.axes)

    def check_shapes(
        self, shapes: Sequence[tuple[int, ...]], rows: int, columns: int, experts: int
    ) -> None:
        """Check the shapes of the arrays for a result of `rows` by `columns`.

        Raises
        ------
        ValueError
            An array has not the shape that its `axes` say.
        """
        sizes = {"M": rows, "N": columns, "E": experts, "1": 1}
        for i, (shape, axes) in enumerate(zip(shapes, self.axes or (), strict=False)):
            wanted = tuple(sizes[letter] for letter in axes)
            if shape != wanted:
                raise ValueError(
                    f"epilogue array {i} of {self.fn.__name__} must have shape "
                    f"[{', '.join(axes)}], here {wanted}; got {shape}"
                )

    def columns(self, columns: int) -> int:
        """Columns of the result of a product of `columns` columns.

        Raises
        ------
        ValueError
            Pairs of an odd number of columns.
        """
        if not self.pair:
            return columns
        if columns % 2:
            raise ValueError(
                f"epilogue with pair=True takes an even number of columns (N); got {columns}"
            )
        return columns // 2

    def on_host(
        self, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, expert: int
    ) -> np.ndarray:
        """Run on NumPy values, element by element; this is what the golden model calls.

        Parameters
        ----------
        values : numpy.ndarray of float32, [M, N]
        rows : numpy.ndarray of int, [M, 1]
            Row of the result that each row of `values` is.
        columns : numpy.ndarray of int, [1, N]
        expert : int

        Returns
        -------
        numpy.ndarray of float32, [M, N], or [M, N/2] of pairs
        """
        half = self.columns(values.shape[1])
        if not self.pair:
            inputs = [values]
        elif self.halves:
            inputs = [values[:, :half], values[:, half:]]
        else:
            inputs = [values[:, 0::2], values[:, 1::2]]
        arrays = [np.ascontiguousarray(array).reshape(-1) for array in self.arrays]
        out = np.empty((values.shape[0], half), np.float32)
        with np.errstate(all="ignore"):
            for i, row in enumerate(rows[:, 0].tolist()):
                for j in range(half):
                    made = self.fn(*[value[i, j] for value in inputs], row, j, expert, *arrays)
                    if made is None:  # which NumPy would store as NaN
                        raise TypeError(
                            f"the epilogue {self.fn.__name__} must return the value that is "
                            "stored; it returned None"
                        )
                    out[i, j] = made
        return out
