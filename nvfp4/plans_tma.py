"""The plan of the quantiser by tensor copies (``kernels.quantize_tma``)."""

from __future__ import annotations

from typing import Any

from .architectures import capability
from .formats import BlockFormat
from .kernels.quantize_tma import QUANTIZE_TMA, shared_bytes
from .launch import Launch
from .layouts import TILE_BLOCKS, TILE_BYTES, TILE_ROWS
from .tensor_maps import MapOf
from .tiling import ceil_div, magic

__all__ = ["WAYS", "quantize_tma"]

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
        Of `WAYS`. With one stage a block takes one tile; with more, about as many blocks as are
        resident at once take equally many.
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
        **{
            name: constants[name] for name in ("INPUT", "ELEMENT", "SCALE", "ROUNDING", "UNIT")
        },
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
