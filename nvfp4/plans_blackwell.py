"""Plans of the products on Blackwell's tensor memory (``kernels.matmul_sm100``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .kernels.matmul_sm100 import (
    ARCHITECTURES,
    THREADS,
    grouped_matmul_sm100_kernel,
    matmul_sm100_kernel,
    shared_bytes,
    tile_constants,
)
from .kernels.matmul_sm100_pair import (
    OFFSETS_OF_RANGES,
    PAIR_ROWS,
    grouped_matmul_sm100_pair_kernel,
    matmul_sm100_pair_kernel,
    pair_constants,
    pair_shared_bytes,
)
from .kernels.sm100_layout import TILE_M
from .launch import Launch
from .program import Program
from .ptx.tensor_map import PADDED
from .tensor_maps import MapOf
from .tiling import ceil_div

__all__ = ["kind_of", "paired", "product", "swapped", "tile_of"]

#: Processors of the largest card of an architecture; a block stays on each.
PROCESSORS = {"sm_100a": 148, "sm_103a": 160}


def kind_of(constants: Mapping[str, Any]) -> str | None:
    """Which kind of product two operands make: "nvf4", "mxf4", "mxf8"; None: none."""
    elements = constants["A_ELEMENT"], constants["B_ELEMENT"]
    scales = constants["A_SCALE"], constants["B_SCALE"]
    if "none" in elements or scales[0] != scales[1]:
        return None
    if scales[0] == "e4m3":
        return "nvf4"
    return "mxf4" if elements == ("e2m1", "e2m1") else "mxf8"


def tile_of(kind: str, pair: str, row_tiles: int, columns: int, depth: int, blocks: int) -> Any:
    """Columns and depth of a tile.

    192 columns where blocks then still have two tiles or more: fewer reads of A, and two sets of
    accumulators fit. Not measured: there was no card.
    """
    tile_k = 128 if kind == "mxf8" or depth <= 128 else 256
    if pair == "halves":
        return 128, tile_k
    if columns <= 64:
        return 64, tile_k
    wide = ceil_div(columns, 192)
    waste = wide * 192 - columns
    enough = row_tiles * wide >= 2 * blocks and waste <= ceil_div(columns, 128) * 128 - columns
    return (192 if enough else 128), tile_k


def swapped(pair: str, rows: int, columns: int, groups: int | None) -> bool:
    """Whether columns of the result become the rows of an instruction, and the other way round.

    For few rows, 64 or fewer in a range: tiles of 64 rows and 128 columns then bring half of the
    rows of A that tiles of 128 rows would bring, most of them for nothing.
    """
    return pair == "none" and columns > 64 and rows <= 64 * (groups or 1)


def paired(
    kind: str,
    pair: str,
    rows: int,
    columns: int,
    depth: int,
    blocks: int,
    groups: int | None = None,
) -> tuple[int, int] | None:
    """Columns and depth of a tile of 256 rows by two blocks; None where one block makes a tile.

    Where ranges have 256 rows or more on average, and all pairs of blocks two tiles or more. Of 192
    columns or of 128, what reads fewer rows of A and B. Not measured: there was no card.

    At an average of 256 rows, whatever their number, a range has 1.5 pairs of tiles of which two
    blocks read 448 rows of A and B together (tiles of 192 columns), or 2.5 single tiles, each of
    which reads 320: 16% less for 20% more products. From there on it gets better at both ends.
    """
    if kind != "mxf8" and depth % 64:
        return None
    tile_k = 128 if kind == "mxf8" or depth <= 128 else 256
    widths = (128,) if pair == "halves" else (192, 128)
    # A block of a pair reads its 128 rows of A, and of B half of the tile's.
    tile_n = min(widths, key=lambda width: ceil_div(columns, width) * (TILE_M + width // 2))
    tiles = ceil_div(rows, PAIR_ROWS) * ceil_div(columns, tile_n)
    if rows < PAIR_ROWS * (groups or 1) or tiles < blocks:
        return None
    return tile_n, tile_k


def product(
    arch: str,
    constants: Mapping[str, Any],
    *,
    rows: int,
    columns: int,
    depth: int,
    row_tiles: int,
    scale_tiles: int,
    experts: int | None,
    groups: int | None,
    alignment: int,
    dtypes: tuple[str, ...],
    args: tuple[Any, ...],
    with_epilogue: Callable[[Program], Program],
    tile: tuple[int, int, int, bool] | None = None,
    fixed: bool = False,
) -> Launch | None:
    """A product of two quantised operands, where the kernels with tensor memory take it.

    Parameters
    ----------
    arch : str
    constants : dict
        Of the reference kernels.
    rows, columns, depth : int
    row_tiles : int
        Tiles of 128 rows; grouped: as many as ranges may need.
    scale_tiles : int
        Tiles of 128 rows that the scales of A have.
    experts, groups : int or None
        None in a dense product.
    alignment : int
        What the addresses of both operands' codes are multiples of, 32 at most; 0 where scales are
        not multiples of 16.
    dtypes : tuple of str
        Of the epilogue's arrays.
    args : tuple
        Of the reference kernel.
    with_epilogue : function
        Puts the caller's epilogue into a program.
    tile : tuple of int, or None
        What the caller asks for: blocks that make a tile together, its columns, its depth, whether
        columns become rows of the instruction. Where there is no such tile, and with None, it is
        chosen here.
    fixed : bool
        One kernel and one tile whatever rows and ranges there are, and addresses that it does not
        take are errors.

    Returns
    -------
    Launch or None
        None for other architectures, operands that have no product of blocks (plain, or scales of
        two kinds), linear scales, results of codes, rows picked by index, and depths, column counts
        and addresses that the copies do not take: see ``kernels.matmul_sm100``.

    Raises
    ------
    ValueError
        Such addresses, where the kernel is `fixed`.
    """
    kind = kind_of(constants)
    if arch not in ARCHITECTURES or kind is None:
        return None
    spread = kind == "mxf8" and "e2m1" in (constants["A_ELEMENT"], constants["B_ELEMENT"])
    step = 128 if spread else 32
    pair = constants["PAIR"]
    if not (
        constants["A_LAYOUT"] == constants["B_LAYOUT"] == "tcgen"
        and constants["OUTPUT"] != "codes"
        and constants.get("INDICES", "none") == "none"
        and rows > 0
        and columns > 0
        and depth > 0
        and depth % step == 0
        and (experts or 1) > 0
        and max(rows, columns * (experts or 1), depth) < 1 << 31
        and (pair != "halves" or columns % 128 == 0)
    ):
        return None
    wanted = 32 if spread else 16
    if alignment < wanted:
        if fixed:
            raise ValueError(
                f"codes of a and b must begin at multiples of {wanted} bytes, and their scales at "
                "multiples of 16, with batch_invariant=True, so that the kernel is the same for "
                "all: pass copies"
            )
        return None
    blocks = PROCESSORS[arch]
    tile = None if pair == "halves" else tile
    if fixed:
        tile, together = None, None
    elif tile is None:
        together = paired(kind, pair, rows, columns, depth, blocks, groups)
    else:
        together = None
        if tile[0] == 2 and (kind == "mxf8" or depth % 64 == 0):
            together = max(tile[1], 64), tile[2]
    ranges = constants.get("OFFSETS", OFFSETS_OF_RANGES[0]) in OFFSETS_OF_RANGES
    if together is not None and ranges and scale_tiles > 0:
        return _paired(
            constants,
            kind,
            together,
            rows=rows,
            columns=columns,
            depth=depth,
            blocks=blocks,
            experts=experts,
            groups=groups,
            scale_tiles=scale_tiles,
            dtypes=dtypes,
            args=args,
            with_epilogue=with_epilogue,
        )
    if fixed:
        tile_n, tile_k = tile_of(kind, pair, 1, columns, depth, blocks)
        swap = False
    elif tile is None:
        tile_n, tile_k = tile_of(kind, pair, row_tiles, columns, depth, blocks)
        swap = swapped(pair, rows, columns, groups)
        if swap:
            tile_n = min(tile_n, 64)
    else:
        tile_n, tile_k = max(tile[1], 64), tile[2]
        swap = tile[3] and tile_n <= TILE_M and pair == "none"
    chosen = tile_constants(kind, tile_n, tile_k, pair, swap=swap)
    grouped = experts is not None
    kernel = (grouped_matmul_sm100_kernel if grouped else matmul_sm100_kernel)(dtypes)
    given = {**constants, **chosen, "GROUPED": grouped}
    program = kernel.program(**{name: given[name] for name in kernel.constants})
    boxes = (given["MMA_N"], TILE_M) if swap else (TILE_M, given["MMA_N"])
    maps = (
        ("a_map", _map("a_codes", given["A_ELEMENT"], rows, depth, boxes[0], given)),
        (
            "b_map",
            _map(
                "b_codes",
                given["B_ELEMENT"],
                columns * (experts or 1),
                depth,
                boxes[1],
                given,
            ),
        ),
    )
    across = ceil_div(columns // 2 if pair == "halves" else columns, boxes[1])
    parts = TILE_M // tile_n if swap else 1
    return Launch(
        with_epilogue(program),
        (min(row_tiles * across * parts, blocks), 1, 1),
        (THREADS, 1, 1),
        shared_bytes(kind, tile_n, tile_k, given["STAGES"], pair),
        ("a_map", "b_map", *(args if not grouped else (*args[:-1], row_tiles))),
        programmatic=True,
        maps=maps,
    )


def _paired(
    constants: Mapping[str, Any],
    kind: str,
    tile: tuple[int, int],
    *,
    rows: int,
    columns: int,
    depth: int,
    blocks: int,
    experts: int | None,
    groups: int | None,
    scale_tiles: int,
    dtypes: tuple[str, ...],
    args: tuple[Any, ...],
    with_epilogue: Callable[[Program], Program],
) -> Launch:
    """A product by pairs of blocks."""
    pair = constants["PAIR"]
    tile_n, tile_k = tile
    grouped = experts is not None
    kernel = (grouped_matmul_sm100_pair_kernel if grouped else matmul_sm100_pair_kernel)(dtypes)
    given = {**constants, **pair_constants(kind, tile_n, tile_k, pair), "GROUPED": grouped}
    program = kernel.program(**{name: given[name] for name in kernel.constants})
    block_depth = 64 if kind == "nvf4" else 128
    k_tiles = ceil_div(depth, block_depth)
    groups_of_stage = tile_k // block_depth
    matrices = experts or 1
    b_rows = columns * matrices
    b_tiles = ceil_div(columns, TILE_M) * matrices
    maps = (
        ("a_map", _map("a_codes", given["A_ELEMENT"], rows, depth, TILE_M, given)),
        ("b_map", _map("b_codes", given["B_ELEMENT"], b_rows, depth, given["MMA_N"] // 2, given)),
        ("a_scales_map", _scales_map("a_scales", scale_tiles * k_tiles, groups_of_stage)),
        ("b_scales_map", _scales_map("b_scales", b_tiles * k_tiles, groups_of_stage)),
    )
    # As `layouts.allocated_tiles`: each range may have one that is not full.
    down = ceil_div(rows, PAIR_ROWS) + min(groups or 0, rows)
    tiles = down * ceil_div(columns, tile_n)
    return Launch(
        with_epilogue(program),
        (2 * min(tiles, max(blocks // 2, 1)), 1, 1),
        (THREADS, 1, 1),
        pair_shared_bytes(kind, tile_n, tile_k, given["STAGES"], pair),
        (*(name for name, _ in maps), *(args if not grouped else (*args[:-1], down))),
        cluster=(2, 1, 1),
        programmatic=True,
        maps=maps,
    )


def _scales_map(buffer: str, tiles: int, box: int) -> MapOf:
    """The map of tcgen scales: a row a tile of 512 bytes, boxes of `box` of them."""
    return MapOf(buffer, "u16", (256, tiles), (512,), (256, box))


def _map(
    buffer: str, element: str, rows: int, depth: int, box: int, constants: Mapping[str, Any]
) -> MapOf:
    """The map of an operand's codes: boxes of `box` rows of one atom of the swizzle."""
    width = constants["SWIZZLE"]
    if constants["KIND"] == "mxf8" and element == "e2m1":
        return MapOf(buffer, PADDED, (depth, rows), (depth // 2,), (128, box), 128)
    row = depth if constants["KIND"] == "mxf8" else depth // 2
    return MapOf(buffer, "u8", (row, rows), (row,), (width, box), width)
