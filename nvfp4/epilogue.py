"""A function of the user's at the end of a product: what it is given, and what it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

__all__ = ["Epilogue", "EpilogueCode"]


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


def _global_names(function: FunctionType) -> set[str]:
    codes, names = [function.__code__], set()
    while codes:
        code = codes.pop()
        names |= {name for name in code.co_names if name in function.__globals__}
        codes += [item for item in code.co_consts if isinstance(item, CodeType)]
    return names


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
        Of float32, int32, int64 or uint8, contiguous, on the device of the operands. The golden
        model takes float16 and bfloat16 too; kernels do not (UnsupportedError).
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
        `fn` is not a Python function, or takes another number of arguments.
    ValueError
        `axes` are not of these letters, or not as many as there are arrays.
    """

    fn: FunctionType
    arrays: tuple[Any, ...]
    pair: bool
    halves: bool
    axes: tuple[str, ...] | None

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
                    out[i, j] = self.fn(*[value[i, j] for value in inputs], row, j, expert, *arrays)
        return out
