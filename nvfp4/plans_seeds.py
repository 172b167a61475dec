"""Plans of what only the seeds' interfaces need; ``nvfp4.plans`` has all plans."""

from __future__ import annotations

import functools

from .kernels.seed_tile_starts import SEED_TILE_STARTS
from .launch import Launch
from .tiling import MAX_X, THREADS, Launches, ceil_div

__all__ = ["seed_tile_starts"]


@functools.lru_cache(maxsize=1024)
def seed_tile_starts(arch: str, *, groups: int, offsets_dtype: str, starts_dtype: str) -> Launches:
    """First scale tile of each range, row_offsets[i] // 128 + scales_offsets[i].

    Parameters
    ----------
    arch : str
        Such as ``"sm_90a"``.
    groups : int
    offsets_dtype, starts_dtype : {"int32", "int64", "uint32"}
        Of ``row_offsets`` and ``scales_offsets``.

    Returns
    -------
    tuple of Launch
        Buffers ``row_offsets, scales_offsets, tile_starts``; the last of int64.
    """
    program = SEED_TILE_STARTS.program(OFFSETS=offsets_dtype, STARTS=starts_dtype)
    grid = (min(ceil_div(groups, THREADS), MAX_X), 1, 1)
    args = ("row_offsets", "scales_offsets", "tile_starts", groups)
    return (Launch(program, grid, (THREADS, 1, 1), 0, args),)
