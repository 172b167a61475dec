"""Plans of products of two quantised operands on sm_120a and sm_121a."""

from __future__ import annotations

from typing import Any, NamedTuple

from .kernels.matmul_sm120 import (
    ARCHITECTURES,
    grouped_matmul_sm120_kernel,
    matmul_sm120_kernel,
    shared_bytes,
)
from .layouts import TILE_ROWS
from .program import Program
from .tiling import MAX_YZ, Extent, ceil_div

__all__ = ["Choice", "dense", "grouped"]

#: Columns of a tile.
_COLUMNS = 128
#: Rows up to which a tile of so many is enough.
_FEW_ROWS = 16


class Choice(NamedTuple):
    """A program, and how it is launched."""

    program: Program
    grid: Extent
    block: Extent
    shared_bytes: int


def dense(
    arch: str,
    constants: dict[str, Any],
    rows: int,
    columns: int,
    depth: int,
    arrays: tuple[str, ...],
    fixed: bool = False,
) -> Choice | None:
    """The kernel for a dense product, None where none fits.

    `constants` are those of ``matmul_naive``, `arrays` the dtypes of an epilogue's arrays; `fixed`:
    one tile whatever the rows.
    """
    high = _FEW_ROWS if rows <= _FEW_ROWS and not fixed else TILE_ROWS
    grid = (ceil_div(rows, high), ceil_div(columns, _COLUMNS), 1)
    return _choice(arch, matmul_sm120_kernel(arrays), constants, depth, high, grid)


def grouped(
    arch: str,
    constants: dict[str, Any],
    rows: int,
    groups: int,
    tiles: int,
    columns: int,
    depth: int,
    arrays: tuple[str, ...],
    fixed: bool = False,
) -> Choice | None:
    """The kernel for a grouped product of so many allocated tiles, None where none fits."""
    high = _FEW_ROWS if rows <= _FEW_ROWS * groups and not fixed else TILE_ROWS
    grid = (tiles, ceil_div(columns, _COLUMNS), 1)
    return _choice(arch, grouped_matmul_sm120_kernel(arrays), constants, depth, high, grid)


def _choice(
    arch: str, kernel: Any, constants: dict[str, Any], depth: int, high: int, grid: Extent
) -> Choice | None:
    kind = _kind(constants, depth)
    if arch not in ARCHITECTURES or kind is None or grid[1] > MAX_YZ:
        return None
    threads = 128 if high == _FEW_ROWS else 256
    program = kernel.program(**constants, KIND=kind, ROWS=high, THREADS=threads)
    return Choice(program, grid, (threads, 1, 1), shared_bytes(kind, high))


def _kind(constants: dict[str, Any], depth: int) -> str | None:
    """What is multiplied, None if the tensor cores do not, or rows of codes are not aligned."""
    elements = (constants["A_ELEMENT"], constants["B_ELEMENT"])
    scales = (constants["A_SCALE"], constants["B_SCALE"])
    if not constants["ALIGNED"] or "none" in elements or depth % 32 or scales[0] != scales[1]:
        return None
    if elements == ("e2m1", "e2m1"):
        return "nvfp4" if scales[0] == "e4m3" else "mxfp4"
    return ".".join(elements)
