"""Plans of dense quantisers at the speed of memory: ``kernels.quantize_stream``."""

from __future__ import annotations

from typing import Any

from .formats import BlockFormat
from .kernels.quantize_stream import QUANTIZE_STREAM
from .launch import Launch
from .layouts import TILE_BLOCKS, TILE_BYTES, TILE_ROWS
from .tiling import (
    MAX_YZ,
    PIECE,
    THREADS,
    ceil_div,
    has_dependent_launch,
    magic,
    padded_pieces,
)

__all__ = ["FEW_PIECES", "stream"]

#: Pieces of 16 elements up to which one a thread is faster than two: more threads at once.
FEW_PIECES = 400_000


def stream(
    arch: str,
    fmt: BlockFormat,
    constants: dict[str, Any],
    buffers: tuple[str | float, ...],
    encode: str,
    rows: int,
    columns: int,
    batches: int,
    row_stride: int,
    batch_stride: int,
) -> Launch | None:
    """Quantise a stack of matrices, where the kernel takes it.

    Parameters
    ----------
    arch, fmt
    constants
        Those that ``kernels.quantize`` has.
    buffers
        ``x, codes, scales``, then the encode scale as a pointer and as a number, ``decode_scale``.
    encode, rows, columns, batches, row_stride, batch_stride
        As in ``plans.quantize``.
    """
    itemsize = 4 if constants["INPUT"] == "float32" else 2
    tcgen = constants["LAYOUT"] == "tcgen"
    pieces = columns // PIECE
    all_pieces = padded_pieces(fmt, columns, constants["LAYOUT"])
    all_rows = ceil_div(rows, TILE_ROWS if tcgen else 8) * (TILE_ROWS if tcgen else 8)
    few = all_rows * all_pieces * batches <= FEW_PIECES
    threads_rows = 1 if few else 2
    lines = all_rows // threads_rows
    if not (
        0 < rows < 1 << 31
        and 1 < all_pieces
        and lines * all_pieces < 1 << 31
        and 0 < batches <= MAX_YZ
        and 0 <= row_stride * itemsize < 1 << 32
    ):
        return None
    multiplier, shift = magic(all_pieces)
    across = all_pieces * PIECE // fmt.block  # blocks of a row
    codes_row = columns // fmt.codes_per_byte
    scales_row = across // TILE_BLOCKS * TILE_BYTES if tcgen else across
    scales_matrix = all_rows // TILE_ROWS * scales_row if tcgen else rows * across
    wide = itemsize == 4
    resident = 8 if wide else 16 if few else 10 if fmt.scale == "e4m3" else 12
    program = QUANTIZE_STREAM.program(
        **constants,
        ENCODE=encode,
        ROWS=threads_rows,
        STACK=batches > 1,
        BLOCKS_PER_SM=resident,
    )
    sizes = (
        *(rows, pieces, all_pieces, lines, multiplier, shift),
        *(row_stride * itemsize, batch_stride * itemsize),
        *(codes_row, rows * codes_row, scales_row, scales_matrix),
    )
    grid = (ceil_div(lines * all_pieces, THREADS), 1, batches)
    return Launch(
        program,
        grid,
        (THREADS, 1, 1),
        0,
        (*buffers, *sizes),
        programmatic=has_dependent_launch(arch),
    )
