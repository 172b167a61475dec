"""Plans of the quantisers that make what they quantise; ``nvfp4.plans`` has all plans."""

from __future__ import annotations

import functools
from typing import Any

from .formats import FORMATS
from .kernels.fused import FUSED, ROW_STATE
from .kernels.quantize import AMAX_CLEAR, AMAX_FINISH
from .launch import Launch
from .layouts import TILE_BLOCKS, TILE_ROWS, allocated_tiles
from .tiling import (
    MAX_X,
    MAX_YZ,
    ONE,
    PIECE,
    Launches,
    ceil_div,
    check_rows,
    expert_limit,
    index_constants,
)

__all__ = ["fused_quantize", "grouped_fused_quantize"]

#: Threads of a row, at most, and of a block, at least: so that rows come and go in small steps.
_MOST_THREADS, _LEAST_THREADS = 512, 128
#: Threads that registers shall leave room for on a multiprocessor; with ranges, which need more.
_RESIDENT, _RESIDENT_RANGES = 1280, 1024
#: Bytes of a row that waits in shared memory; a longer one is read twice.
_MOST_HELD = 64 * 1024
#: Rows that a block serves once it has found the range of their tile.
_LINES = 8

_BUFFERS = (
    *("x", "weight", "residual", "residual_out", "hidden", "codes", "scales"),
    *("row_offsets", "expert_ids", "row_indices", "tile_starts", "row_counts"),
)


@functools.lru_cache(maxsize=1024)
def fused_quantize(
    arch: str,
    *,
    front: str,
    format: str,
    dtype: str,
    rows: int,
    columns: int,
    batches: int,
    row_stride: int,
    batch_stride: int,
    scale_layout: str,
    scale_rounding: str,
    encode: str,
    counts_dtype: str | None,
    halves: str = "split",
    weight: str = "none",
    residual: str = "none",
    hidden: bool = False,
    eps: float = 0.0,
    aligned: bool = False,
) -> Launches:
    """Make and quantise a stack of matrices [batches, rows, columns].

    Parameters
    ----------
    arch, format, dtype, scale_layout, scale_rounding, encode
        As in ``plans.quantize``.
    front : {"plain", "silu", "gpt-oss", "rms"}
        What becomes of ``x``: nothing, a gated activation, a norm.
    rows, columns, batches : int
        Of the result.
    row_stride, batch_stride : int
        Of ``x``, in elements.
    counts_dtype : {"int32", "int64"} or None
        Of ``row_counts`` [batches]; None: all rows count.
    halves : {"split", "interleaved"}
        Where gates lie.
    weight : {"none", "same", "float32"}
        The norm's: of the dtype of x, or float32.
    residual : {"none", "in", "out"}
        Whether ``residual`` is added, and whether the sum is stored in ``residual_out``.
    hidden : bool
        Whether h is stored, in ``hidden``.
    eps : float
    aligned : bool
        Whether all arrays, and the strides of x, are multiples of 16 bytes.

    Returns
    -------
    tuple of Launch
        Buffers ``x, weight, residual, residual_out, hidden, codes, scales, row_counts,
        encode_scale, decode_scale``.
    """
    tcgen = scale_layout == "tcgen"
    all_rows = ceil_div(rows, TILE_ROWS) * TILE_ROWS if tcgen else rows
    options = {
        **_constants(front, format, dtype, scale_layout, scale_rounding, aligned),
        **index_constants(None, None, None, None),
        "HALVES": halves,
        "WEIGHT": weight,
        "RANGES": False,
        "COUNTS": counts_dtype or "none",
    }
    hold, block, shared = _rows(front, format, dtype, columns, scale_layout, encode)
    lines = block[1]
    units = ceil_div(all_rows, lines)
    grid = (min(MAX_X, max(1, units)), 1, min(MAX_YZ, max(1, batches)))
    sizes = (0, rows, columns, batches, row_stride, batch_stride, units, lines, 0, 0, 0, 0)
    scale = _encode_arguments(encode, ("array", "batch", "row"))
    args = (*_BUFFERS, *scale, "decode_scale", eps, *sizes)
    program = FUSED.program(
        **options,
        **_bounds(block),
        UNIT=encode == "none",
        ENCODE=encode,
        HOLD=hold,
        TASK="quantize",
        RESIDUAL=residual,
        HIDDEN=hidden,
    )
    main = Launch(program, grid, block, shared, args)
    if encode != "amax":
        return (main,)
    hold, block, shared = _rows(front, format, dtype, columns, "linear", "none")
    units = ceil_div(rows, block[1])
    grid = (min(MAX_X, max(1, units)), 1, min(MAX_YZ, max(1, batches)))
    sizes = (0, rows, columns, batches, row_stride, batch_stride, units, block[1], 0, 0, 0, 0)
    program = FUSED.program(
        **{**options, "LAYOUT": "linear"},
        **_bounds(block),
        UNIT=True,
        ENCODE="none",
        HOLD=hold,
        TASK="amax",
        RESIDUAL="none" if residual == "none" else "in",
        HIDDEN=False,
    )
    args = (*_BUFFERS, "decode_scale", 1.0, "decode_scale", eps, *sizes)
    return (
        Launch(AMAX_CLEAR.program(), ONE, ONE, 0, ("decode_scale",)),
        Launch(program, grid, block, shared, args),
        main,
        Launch(AMAX_FINISH.program(), ONE, ONE, 0, ("decode_scale",)),
    )


@functools.lru_cache(maxsize=1024)
def grouped_fused_quantize(
    arch: str,
    *,
    front: str,
    format: str,
    dtype: str,
    input_rows: int,
    rows: int,
    columns: int,
    row_stride: int,
    groups: int,
    tiles: int | None,
    scale_layout: str,
    scale_rounding: str,
    encode: str,
    experts: int | None,
    has_expert_ids: bool,
    has_row_indices: bool,
    has_tile_starts: bool,
    offsets_dtype: str,
    ids_dtype: str | None,
    indices_dtype: str | None,
    starts_dtype: str | None,
    halves: str = "split",
    weight: str = "none",
    residual: str = "none",
    hidden: bool = False,
    eps: float = 0.0,
    aligned: bool = False,
) -> Launches:
    """Make and quantise ranges of rows.

    Parameters
    ----------
    arch, columns, row_stride, scale_layout, scale_rounding
        As in :func:`fused_quantize`.
    front, format, dtype, halves, weight, residual, hidden, eps, aligned
        As in :func:`fused_quantize`.
    input_rows, rows, groups, tiles, encode, experts
        As in ``plans.grouped_quantize``.
    has_expert_ids, has_row_indices, has_tile_starts : bool
    offsets_dtype, ids_dtype, indices_dtype, starts_dtype : {"int32", "int64", "uint32"} or None

    Returns
    -------
    tuple of Launch
        Buffers as in :func:`fused_quantize`, and ``row_offsets, expert_ids, row_indices,
        tile_starts``.

    Raises
    ------
    UnsupportedError
        2^32 rows or more.
    """
    check_rows(rows)
    hold, block, shared = _rows(front, format, dtype, columns, scale_layout, encode)
    down = max(allocated_tiles(rows, groups), tiles or 0)
    shift = (TILE_ROWS // _LINES).bit_length() - 1
    units = down << shift
    program = FUSED.program(
        **_constants(front, format, dtype, scale_layout, scale_rounding, aligned),
        **index_constants(offsets_dtype, ids_dtype, indices_dtype, starts_dtype),
        **_bounds(block, _RESIDENT_RANGES),
        HALVES=halves,
        WEIGHT=weight,
        RANGES=True,
        COUNTS="none",
        UNIT=encode == "none",
        ENCODE=encode,
        HOLD=hold,
        TASK="quantize",
        RESIDUAL=residual,
        HIDDEN=hidden,
    )
    sizes = (input_rows, rows, columns, 1, row_stride, 0, units, _LINES, shift)
    args = (
        *_BUFFERS,
        *_encode_arguments(encode, ("array", "expert", "row")),
        *("decode_scale", eps, *sizes, groups, expert_limit(experts), tiles or 0),
    )
    return (Launch(program, (min(MAX_X, max(1, units)), 1, 1), block, shared, args),)


def _constants(
    front: str, format: str, dtype: str, layout: str, rounding: str, aligned: bool
) -> dict[str, Any]:
    fmt = FORMATS[format]
    return {
        "FRONT": front,
        "INPUT": dtype,
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale,
        "ROUNDING": rounding,
        "ALIGNED": aligned,
        "LAYOUT": layout,
    }


def _rows(
    front: str, format: str, dtype: str, columns: int, layout: str, encode: str
) -> tuple[str, tuple[int, int, int], int]:
    """Where a row waits, the block (threads of a row, rows), and its shared memory."""
    fmt = FORMATS[format]
    blocks = columns // fmt.block
    if layout == "tcgen":
        blocks = ceil_div(blocks, TILE_BLOCKS) * TILE_BLOCKS
    pieces = max(1, blocks * fmt.block // PIECE)
    turns = ceil_div(pieces, _MOST_THREADS)
    across = 32 * ceil_div(pieces, 32 * turns)
    block = (across, max(1, _LEAST_THREADS // (1 << (across - 1).bit_length())), 1)
    if front != "rms" and encode != "row_amax":
        return "none", block, 0
    state = ROW_STATE * block[1]
    if turns == 1:
        return "registers", block, state
    row = columns * (4 if dtype == "float32" else 2)
    if row <= _MOST_HELD:
        return "shared", block, state + row * block[1]
    return "reread", block, state


def _bounds(block: tuple[int, int, int], resident: int = _RESIDENT) -> dict[str, int]:
    threads = block[0] * block[1]
    return {"THREADS": threads, "BLOCKS_PER_SM": max(1, resident // threads)}


def _encode_arguments(encode: str, pointers: tuple[str, ...]) -> tuple[str | float, ...]:
    # A pointer must point somewhere, whether it is read or not; a number goes by value.
    pointer = "encode_scale" if encode in pointers else "decode_scale"
    return pointer, "encode_scale" if encode == "scalar" else 1.0
