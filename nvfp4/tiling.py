"""How plans cut shapes into blocks of threads; what several plans share."""

from __future__ import annotations

from .architectures import capability
from .errors import UnsupportedError
from .formats import BlockFormat
from .launch import Launch
from .layouts import TILE_BLOCKS

__all__ = [
    "MAX_X",
    "MAX_YZ",
    "ONE",
    "PIECE",
    "THREADS",
    "Extent",
    "Launches",
    "across",
    "at_least_one",
    "block_for",
    "ceil_div",
    "check_rows",
    "encode_arguments",
    "expert_limit",
    "grid_for",
    "has_dependent_launch",
    "index_constants",
    "magic",
    "padded_pieces",
    "power_of_two",
]

Launches = tuple[Launch, ...]
Extent = tuple[int, int, int]

PIECE = 16  # elements that a thread takes at a time
THREADS = 128
MAX_X = (1 << 31) - 1
MAX_YZ = (1 << 16) - 1
ONE: Extent = (1, 1, 1)


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def power_of_two(number: int, limit: int) -> int:
    """The smallest power of two that is not below `number`, at most `limit`."""
    return min(limit, 1 << max(0, number - 1).bit_length())


def block_for(columns: int, rows: int, smallest: int = 1) -> Extent:
    """Threads of a block along columns (or pieces) and rows: up to a warp along a row."""
    x = max(smallest, power_of_two(columns, 32))
    return x, power_of_two(rows, THREADS // x), 1


def grid_for(block: Extent, columns: int, rows: int, batches: int = 1) -> Extent:
    """Blocks along rows, columns and matrices.

    What is beyond the limits of a grid is reached by the kernels' strides.
    """
    x, y, _ = block
    return (
        min(MAX_X, ceil_div(rows, y)),
        min(MAX_YZ, ceil_div(columns, x)),
        min(MAX_YZ, batches),
    )


def at_least_one(grid: Extent) -> Extent:
    """A grid with a block in it, for a kernel that has something to write whatever the shape."""
    x, y, z = grid
    return max(1, x), max(1, y), max(1, z)


def across(down: int, groups: int) -> int:
    """Blocks beside each other, of `groups` groups of columns.

    Enough to fill a card; where there are many blocks, each takes several groups.
    """
    return min(MAX_YZ, max(1, min(groups, ceil_div(4096, max(1, down)))))


def check_rows(rows: int) -> None:
    """Refuse more rows than ``kernels.groups`` can count.

    Raises
    ------
    UnsupportedError
        2^32 rows or more.
    """
    if rows >= 1 << 32:
        raise UnsupportedError(f"grouped kernels take fewer than 2^32 rows; got {rows}")


def expert_limit(experts: int | None) -> int:
    """The number below which ids of experts count; None: any id from 0 on does."""
    return (1 << 63) - 1 if experts is None else experts


def index_constants(
    offsets: str | None, ids: str | None, indices: str | None, starts: str | None
) -> dict[str, str]:
    """The constants of ``kernels.groups``, of dtypes or None."""
    return {
        "OFFSETS": offsets or "int32",
        "IDS": ids or "none",
        "INDICES": indices or "none",
        "STARTS": starts or "none",
    }


def magic(divisor: int) -> tuple[int, int]:
    """(m, s) with n // divisor == (n * m >> 32) >> s for every n below 2^31.

    Source: T. Granlund, P. Montgomery, "Division by Invariant Integers using Multiplication", PLDI
    1994.
    """
    for shift in range(32):
        factor = -(-(1 << 32 + shift) // divisor)
        if factor < 1 << 32 and (factor * divisor - (1 << 32 + shift)) << 31 < 1 << 32 + shift:
            return factor, shift
    raise ValueError(f"no multiplier for division by {divisor}")


def encode_arguments(encode: str) -> tuple[str, str | float]:
    """The encode scale as quantisers take it, as a pointer and as a number; `encode`: its kind.

    A pointer must point somewhere, whether it is read or not; a number goes by value.
    """
    pointer = "encode_scale" if encode in ("array", "batch", "expert", "row") else "decode_scale"
    return pointer, "encode_scale" if encode == "scalar" else 1.0


def padded_pieces(fmt: BlockFormat, columns: int, layout: str) -> int:
    """Pieces of a row, with those of the padding of its last tile."""
    blocks = columns // fmt.block
    if layout == "tcgen":
        blocks = ceil_div(blocks, TILE_BLOCKS) * TILE_BLOCKS
    return blocks * (fmt.block // PIECE)


def has_dependent_launch(arch: str) -> bool:
    """Whether kernels may start before the ones they depend on have ended (sm_90 on)."""
    return capability(arch)[0] >= 9
