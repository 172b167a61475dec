"""The plans of the quantisers by tensor and bulk copies.

``kernels.quantize_tma`` and, for ranges of rows, ``kernels.grouped_quantize_tma``.
"""

from __future__ import annotations

from typing import Any

from .architectures import capability
from .formats import BlockFormat
from .kernels import grouped_quantize_tma as _grouped
from .kernels.quantize_tma import QUANTIZE_TMA, shared_bytes
from .launch import Launch
from .layouts import TILE_BLOCKS, TILE_BYTES, TILE_ROWS, allocated_tiles
from .tensor_maps import MapOf
from .tiling import MAX_YZ, PIECE, ceil_div, magic

__all__ = ["GROUPED_WAYS", "WAYS", "grouped_quantize_tma", "quantize_tma"]

#: Ways to run it: stages, threads of a block, resident blocks of a processor.
WAYS = {
    "1": (1, 160, 8),
    "2": (2, 160, 5),
    "3": (3, 160, 3),
    "4": (4, 160, 3),
    "2w": (2, 288, 4),
    "3w": (3, 288, 3),
    "4w": (4, 288, 3),
}
#: Ways to run the grouped one: tiles of 512 bytes of scales that a block stores.
GROUPED_WAYS = {"k1": 1, "k2": 2, "k4": 4, "k8": 8}
#: Processors of the largest card of an architecture: more blocks than are resident do no harm.
_PROCESSORS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 160, "sm_120a": 188}


def quantize_tma(
    arch: str,
    fmt: BlockFormat,
    constants: dict[str, Any],
    buffers: tuple[str | float, ...],
    encode: str,
    way: str,
    rows: int,
    columns: int,
    batches: int,
    row_stride: int,
    batch_stride: int,
) -> Launch | None:
    """The quantiser by tensor copies, where it takes this call.

    Parameters
    ----------
    arch : str
    fmt : BlockFormat
    constants : dict
        Of the kernels of quantisers.
    buffers : tuple
        x, codes, scales, encode_scale, encode_number, decode_scale.
    encode : str
    way : str
        Of `WAYS`; of another there is no launch. With one stage a block takes one tile; with more,
        about as many blocks as are resident at once take equally many.
    rows, columns, batches, row_stride, batch_stride : int
        As ``plans.quantize`` has them.

    Returns
    -------
    Launch or None
        None for another format, layout, architecture or dtype, for stacks of matrices, and for rows
        that a tensor map cannot take: K no multiple of 32 (codes of 16 bytes), or overlapping.
    """
    across = ceil_div(columns, TILE_BLOCKS * fmt.block)
    down = ceil_div(rows, TILE_ROWS)
    if not (
        fmt.name == "nvfp4"
        and way in WAYS
        and capability(arch)[0] >= 9
        and constants["LAYOUT"] == "tcgen"
        and constants["INPUT"] != "float32"
        and encode in ("none", "scalar", "array", "row", "amax")
        and batches == 1
        and rows > 0
        and columns % 32 == 0
        and across > 1
        and columns <= row_stride < 1 << 31
        and down * across < 1 << 31
    ):
        return None
    stages, threads, resident = WAYS[way]
    program = QUANTIZE_TMA.program(
        **{name: constants[name] for name in ("INPUT", "ELEMENT", "SCALE", "ROUNDING", "UNIT")},
        ENCODE=encode,
        STAGES=stages,
        THREADS=threads,
        BLOCKS_PER_SM=resident,
    )
    box = (TILE_BLOCKS * fmt.block, TILE_ROWS)
    maps = (
        ("x_map", MapOf("x", "u16", (columns, rows), (2 * row_stride,), box, 128)),
        (
            "codes_map",
            MapOf("codes", "u8", (columns // 2, rows), (columns // 2,), (box[0] // 2, box[1]), 32),
        ),
        (
            "scales_map",
            MapOf(
                "scales",
                "u8",
                (16, 32, across, down),
                (16, TILE_BYTES, TILE_BYTES * across),
                (16, 32, 1, 1),
            ),
        ),
    )
    tiles = down * across
    grid = tiles
    if stages > 1:
        rounds = ceil_div(tiles, _PROCESSORS.get(arch, 148) * resident)
        grid = ceil_div(tiles, rounds)
    return Launch(
        program,
        (grid, 1, 1),
        (threads, 1, 1),
        shared_bytes(stages),
        (*(name for name, _ in maps), *buffers, rows, across, tiles, *magic(across)),
        programmatic=True,
        maps=maps,
    )


def grouped_quantize_tma(
    arch: str,
    fmt: BlockFormat,
    constants: dict[str, Any],
    buffers: tuple[str | float, ...],
    encode: str,
    way: str,
    facts: tuple[int, int, int, int],
    columns: int,
    row_bytes: int,
    tiles: int,
) -> Launch | None:
    """The grouped quantiser whose scales leave by bulk stores, where it takes this call.

    Parameters
    ----------
    arch : str
    fmt : BlockFormat
    constants : dict
        Of the kernels of grouped quantisers.
    buffers : tuple
        x, codes, scales, row_offsets, expert_ids, row_indices, tile_starts, encode_scale,
        encode_number, decode_scale.
    encode : str
    way : str
        Of `GROUPED_WAYS`; of another there is no launch.
    facts : tuple
        Rows of x, rows, ranges, experts.
    columns : int
    row_bytes : int
        From a row of x to the next.
    tiles : int
        Row tiles of the scales.

    Returns
    -------
    Launch or None
        None for linear scales and for an architecture without bulk copies. Every format, dtype and
        number of columns that there is will do.
    """
    _, rows, groups, _ = facts
    least = allocated_tiles(rows, groups)
    down = max(least, tiles)
    pieces = columns // PIECE
    if not (
        way in GROUPED_WAYS
        and capability(arch)[0] >= 9
        and constants["LAYOUT"] == "tcgen"
        and encode in ("none", "scalar", "array", "expert", "row")
        and 0 < rows < 1 << 31
        and groups > 0
        and pieces
        and down <= MAX_YZ
        and 0 <= row_bytes < 1 << 32
        and (constants["STARTS"] != "none" or tiles == least)
    ):
        return None
    k_tiles = GROUPED_WAYS[way]
    across = ceil_div(columns, TILE_BLOCKS * fmt.block)
    runs = constants["STARTS"] == "none" and groups <= 1024
    narrow = fmt.element == "e2m1" and constants["INPUT"] != "float32"
    program = _grouped.GROUPED_QUANTIZE_TMA.program(
        **{name: value for name, value in constants.items() if name not in ("ALIGNED", "LAYOUT")},
        ENCODE=encode,
        SEARCH="runs" if runs else "steps",
        K_TILES=k_tiles,
        BLOCKS_PER_SM=10 if runs and narrow and capability(arch)[0] != 12 else 8,
    )
    sizes = (pieces, row_bytes, columns // fmt.codes_per_byte, across, tiles)
    return Launch(
        program,
        (ceil_div(across, k_tiles), down, 1),
        (_grouped.THREADS, 1, 1),
        _grouped.shared_bytes(k_tiles, constants["STARTS"] != "none"),
        (*buffers, *facts, *sizes),
        programmatic=True,
    )
