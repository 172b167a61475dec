"""The plan of ``quantize_rows``; ``nvfp4.plans`` has all plans."""

from __future__ import annotations

import functools

from .kernels.quantize_rows import QUANTIZE_ROWS
from .launch import Launch
from .tiling import MAX_X, Launches, ceil_div

__all__ = ["quantize_rows"]

_ROWS = 4  # of a block, a warp each


@functools.lru_cache(maxsize=1024)
def quantize_rows(
    arch: str, *, dtype: str, rows: int, columns: int, row_stride: int, aligned: bool
) -> Launches:
    """Rows of e4m3 with one scale each.

    Parameters
    ----------
    arch : str
        Such as ``"sm_90a"``.
    dtype : {"bfloat16", "float16", "float32"}
        Of ``x``.
    rows, columns : int
    row_stride : int
        Of ``x``, in elements.
    aligned : bool
        Whether x, its rows and the codes are multiples of 16 bytes.

    Returns
    -------
    tuple of Launch
        Buffers ``x, codes, scales``.
    """
    program = QUANTIZE_ROWS.program(INPUT=dtype, ELEMENT="e4m3", ALIGNED=aligned)
    grid = (min(MAX_X, ceil_div(rows, _ROWS)), 1, 1)
    args = ("x", "codes", "scales", rows, columns, row_stride)
    return (Launch(program, grid, (32, _ROWS, 1), 0, args),)
