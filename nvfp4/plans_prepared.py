"""Plans of products with prepared weights; ``nvfp4.plans_products`` asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .architectures import capability
from .kernels.matmul_decode import shared_bytes
from .launch import Launch
from .program import Kernel
from .tiling import ceil_div

__all__ = ["decode"]

#: Ranges whose table fits in shared memory beside the sums.
MOST_GROUPS = 2048


def decode(
    arch: str,
    constants: Mapping[str, Any],
    *,
    rows: int,
    columns: int,
    depth: int,
    groups: int | None,
    processors: int,
    kernel: Kernel,
    args: tuple[int | float | str, ...],
) -> Launch:
    """Products of few rows with each matrix: ``kernels.matmul_decode``.

    Parameters
    ----------
    arch
    constants
        Those of the naive kernels.
    rows, columns, depth
    groups
        None in a dense product.
    processors
    kernel
        For the epilogue's arrays.
    args
        Of the kernel.
    """
    chunk, warps, resident = tile(constants, rows, depth, groups)
    own = {
        "GROUPED": groups is not None,
        "CHUNK": chunk,
        "WARPS": warps,
        "WHOLE": depth % 64 == 0,
        "THREADS": 32 * warps,
        "BLOCKS_PER_SM": resident,
    }
    if groups is None:
        own |= {"OFFSETS": "int32", "IDS": "none", "INDICES": "none", "A_STARTS": "none"}
    given = {**constants, **own}
    program = kernel.program(**{name: given[name] for name in kernel.constants})
    chunks = ceil_div(rows, chunk) + (groups or 0)
    items = max(1, min(chunks, rows) * ceil_div(columns, 16))
    grid = min(items, processors * resident)
    shared = shared_bytes(chunk, warps, groups, constants["PAIR"])
    return Launch(program, grid, 32 * warps, shared, args, programmatic=capability(arch) >= (9, 0))


def tile(
    constants: Mapping[str, Any], rows: int, depth: int, groups: int | None
) -> tuple[int, int, int]:
    """Rows of an item, warps of a block, blocks of a multiprocessor."""
    steps = ceil_div(depth, 64)
    warps = 8 if steps >= 24 else 4 if steps >= 8 else 2
    # How rows spread over the ranges is not known here: the mean must do.
    many = rows > 8 if groups is None else rows > 6 * groups
    chunk = 16 if many else 8
    simple = chunk == 8 and constants["A_ELEMENT"] == "none" and constants["PAIR"] == "none"
    return chunk, warps, max(1, (32 if simple else 16) // warps)
