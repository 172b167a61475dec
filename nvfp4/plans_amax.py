"""Plans of what a quantiser by the largest magnitude of a tensor has around it."""

from __future__ import annotations

from .kernels.amax import AMAX_FLAT, SHARED, THREADS, VECTORS
from .kernels.quantize import AMAX, AMAX_CLEAR, AMAX_FINISH
from .launch import Launch
from .tiling import ONE, PIECE, Launches, at_least_one, block_for, ceil_div, grid_for

__all__ = ["behind_search", "search"]


def search(
    dtype: str,
    rows: int,
    columns: int,
    batches: int,
    row_stride: int,
    batch_stride: int,
    *,
    aligned: bool,
    reference: bool,
) -> Launch:
    """Find it: as vectors where rows lie one behind the other, else row by row.

    Parameters are those of ``plans.quantize``.
    """
    vectors = batches * rows * columns * (4 if dtype == "float32" else 2) // 16
    no_gaps = row_stride == columns and (batches == 1 or batch_stride == rows * columns)
    if aligned and no_gaps and vectors and not reference:
        blocks = ceil_div(vectors, THREADS * VECTORS)
        program = AMAX_FLAT.program(INPUT=dtype)
        args = ("x", "decode_scale", vectors)
        return Launch(program, (blocks, 1, 1), (THREADS, 1, 1), SHARED, args)
    block = block_for(columns // PIECE, rows)
    x, y, z = grid_for(block, ceil_div(columns, PIECE * 4), rows, batches)
    return Launch(
        AMAX.program(INPUT=dtype, ALIGNED=aligned),
        at_least_one((min(1024, x), min(64, y), min(64, z))),
        block,
        0,
        ("x", "decode_scale", rows, columns, batches, row_stride, batch_stride),
    )


def behind_search(find: Launch, main: Launch) -> Launches:
    """A search that leaves the maximum in ``decode_scale``, and the quantiser that reads it there.

    Before the search it is 0, and in the end the decode scale.
    """
    return (
        Launch(AMAX_CLEAR.program(), ONE, ONE, 0, ("decode_scale",)),
        find,
        main,
        Launch(AMAX_FINISH.program(), ONE, ONE, 0, ("decode_scale",)),
    )
