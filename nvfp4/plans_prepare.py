"""Plans of prepared weights: how they are made, and their values; ``nvfp4.plans`` has all plans."""

from __future__ import annotations

import functools
from typing import Any

from .formats import FORMATS, PREPARED
from .kernels.dequantize_prepared import DEQUANTIZE_PREPARED
from .kernels.prepare import PREPARE, PREPARE_CLEAR, PREPARE_FINISH, PREPARE_SEARCH
from .launch import Launch
from .layouts import prepared_grid, scale_shape
from .tiling import MAX_X, MAX_YZ, THREADS, Launches, block_for, ceil_div, grid_for

__all__ = ["dequantize_prepared", "prepare_weights"]

_WARPS = THREADS // 32


@functools.lru_cache(maxsize=1024)
def prepare_weights(
    arch: str,
    *,
    format: str,
    rows: int,
    columns: int,
    batches: int,
    scale_layout: str,
    decodes: int,
    aligned: bool,
) -> Launches:
    """Repack a stack of matrices [batches, rows, columns].

    Parameters
    ----------
    arch : str
        Such as ``"sm_90a"``.
    format : str
        Canonical name.
    rows, columns, batches : int
    scale_layout : {"linear", "tcgen"}
        Of ``scales``.
    decodes : int
        Elements of ``decode_scale``.
    aligned : bool
        Whether ``codes`` are at a multiple of 16 bytes; what is written must be.

    Returns
    -------
    tuple of Launch
        Buffers ``codes, scales, decode_scale, out_codes, out_scales, out_decode_scale``.
    """
    fmt = FORMATS[format]
    constants: dict[str, Any] = {
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale,
        "LAYOUT": scale_layout,
        "ALIGNED": aligned,
    }
    (matrix_bytes,) = scale_shape(fmt, (rows, columns), PREPARED)
    words = matrix_bytes // 4
    shape = (rows, columns, batches)
    down, across = prepared_grid((rows, columns))
    threads = (THREADS, 1, 1)

    def flat(count: int) -> tuple[int, int, int]:
        return min(1024, ceil_div(count, THREADS)), 1, 1

    grid = (min(MAX_X, ceil_div(across, _WARPS)), min(MAX_YZ, down), min(MAX_YZ, batches))
    repack = Launch(
        PREPARE.program(**constants),
        grid,
        (32, _WARPS, 1),
        0,
        ("codes", "scales", "out_codes", "out_scales", *shape),
    )
    finish = Launch(
        PREPARE_FINISH.program(ELEMENT=fmt.element, SCALE=fmt.scale),
        flat(max(batches, decodes)),
        threads,
        0,
        ("out_scales", "decode_scale", "out_decode_scale", batches, words, decodes),
    )
    if fmt.scale == "e4m3":
        return repack, finish
    clear = Launch(
        PREPARE_CLEAR.program(), flat(batches), threads, 0, ("out_scales", batches, words)
    )
    blocks = columns // fmt.block
    wide = (ceil_div(blocks, 32), ceil_div(ceil_div(rows, _WARPS), 4), min(MAX_YZ, batches))
    search = Launch(
        PREPARE_SEARCH.program(**constants),
        (min(64, wide[0]), min(1024, wide[1]), wide[2]),
        (32, _WARPS, 1),
        0,
        ("codes", "scales", "out_scales", *shape, words),
    )
    return clear, search, repack, finish


def dequantize_prepared(
    format: str, rows: int, columns: int, batches: int, dtype: str, decode: str, aligned: bool
) -> Launches:
    """Values of prepared weights; see ``plans.dequantize``."""
    fmt = FORMATS[format]
    block = block_for(ceil_div(columns, 8), rows)
    program = DEQUANTIZE_PREPARED.program(
        ELEMENT=fmt.element,
        SCALE=fmt.scale,
        OUTPUT=dtype,
        ALIGNED=aligned,
        DECODE="row" if decode == "batch_row" else decode,
    )
    args = ("codes", "scales", "decode_scale", "out", rows, columns, batches)
    return (Launch(program, grid_for(block, columns // 8, rows, batches), block, 0, args),)
