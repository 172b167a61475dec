"""Plans of the quantisers that make what they quantise; ``nvfp4.plans`` has all plans."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from .formats import FORMATS
from .kernels.fused import FUSED
from .kernels.fused_rows import ROW_STATE
from .launch import Launch
from .layouts import TILE_BLOCKS, TILE_BYTES, TILE_ROWS, allocated_tiles
from .plans_ahead import ahead
from .tiling import (
    MAX_X,
    MAX_YZ,
    PIECE,
    Extent,
    Launches,
    ceil_div,
    check_rows,
    encode_arguments,
    expert_limit,
    has_dependent_launch,
    index_constants,
    padded_pieces,
)

__all__ = ["fused_quantize", "grouped_fused_quantize"]

#: Threads of a block, about: small steps, so that the last blocks of a grid end together.
_THREADS = 128
#: Threads of a row, at most; pieces of a row that registers hold, at most.
_MOST_THREADS, _MOST_PIECES = 512, 1024
#: Registers of a thread for what a row waits in.
_WORDS = 32
#: Bytes of a row that waits in shared memory; a longer one is read twice.
_MOST_HELD = 64 * 1024
#: Rows that a block serves once it has found the range of their tile.
_LINES = 8
#: Instructions of a thread: for a piece by what is done with it, and for a row.
_PIECE_WORK = {"plain": 220, "rms": 340, "silu": 520, "gpt-oss": 520}
_ROW_WORK = 200

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
    counts_dtype : {"int32", "int64", "uint32"} or None
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
    options = {
        **_constants(front, format, dtype, scale_rounding, aligned),
        **index_constants(None, None, None, None),
        "HALVES": halves,
        "WEIGHT": weight,
        "RANGES": False,
        "COUNTS": counts_dtype or "none",
    }
    shape = (rows, columns, batches, row_stride, batch_stride)
    if residual == "none":
        made = {
            **_constants(front, format, dtype, scale_rounding, aligned),
            **{"LAYOUT": scale_layout, "HALVES": halves, "WEIGHT": weight, "HIDDEN": hidden},
        }
        one = ahead(arch, FORMATS[format], made, encode, *shape, counts_dtype, eps)
        if one is not None:
            return (one,)
    common = (format, dtype, shape, eps)
    # Between the maximum and what becomes of it, nothing starts early.
    early = has_dependent_launch(arch) and encode != "amax"
    own = {**options, "RESIDUAL": residual, "HIDDEN": hidden}
    main = _dense_launch(own, *common, scale_layout, encode, early=early)
    if encode != "amax":
        return (main,)
    # What the search for the maximum makes, it makes again.
    less = {**options, "RESIDUAL": "none" if residual == "none" else "in", "HIDDEN": False}
    from .plans_amax import behind_search

    return behind_search(_dense_launch(less, *common, "linear", "none", task="amax"), main)


def _dense_launch(
    options: dict[str, Any],
    format: str,
    dtype: str,
    matrix: tuple[int, int, int, int, int],
    eps: float,
    layout: str,
    encode: str,
    task: str = "quantize",
    early: bool = False,
) -> Launch:
    rows, columns, batches, row_stride, batch_stride = matrix
    itemsize = 4 if dtype == "float32" else 2
    plan = _plan_rows(options, format, columns, layout, encode)
    all_rows = ceil_div(rows, TILE_ROWS) * TILE_ROWS if layout == "tcgen" else rows
    lines = plan.block[1]
    units = ceil_div(all_rows, lines)
    codes_row, scales_row = _row_bytes(format, columns, layout)
    scales_matrix = (all_rows // TILE_ROWS if layout == "tcgen" else rows) * scales_row
    program = FUSED.program(
        **options,
        **plan.constants,
        LAYOUT=layout,
        UNIT=encode == "none",
        ENCODE=encode,
        TASK=task,
        WIDE=_wide(rows * batches, row_stride * itemsize, columns * itemsize),
    )
    args = (
        *_BUFFERS,
        *encode_arguments(encode),
        *("decode_scale", "decode_scale", eps, 0, rows, batches, columns // PIECE, plan.all_pieces),
        *(row_stride * itemsize, batch_stride * itemsize, codes_row, scales_row, scales_matrix),
        *(units, lines, 0, 0, 0, 0),
    )
    grid = (min(MAX_X, max(1, units)), 1, min(MAX_YZ, max(1, batches)))
    return Launch(program, grid, plan.block, plan.shared, args, programmatic=early)


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
    options = {
        **_constants(front, format, dtype, scale_rounding, aligned),
        **index_constants(offsets_dtype, ids_dtype, indices_dtype, starts_dtype),
        "HALVES": halves,
        "WEIGHT": weight,
        "RANGES": True,
        "COUNTS": "none",
        "RESIDUAL": residual,
        "HIDDEN": hidden,
    }
    itemsize = 4 if dtype == "float32" else 2
    plan = _plan_rows(options, format, columns, scale_layout, encode)
    down = max(allocated_tiles(rows, groups), tiles or 0)
    shift = (TILE_ROWS // _LINES).bit_length() - 1
    units = down << shift
    codes_row, scales_row = _row_bytes(format, columns, scale_layout)
    program = FUSED.program(
        **options,
        **plan.constants,
        LAYOUT=scale_layout,
        UNIT=encode == "none",
        ENCODE=encode,
        TASK="quantize",
        WIDE=_wide(max(rows, input_rows), row_stride * itemsize, columns * itemsize),
    )
    args = (
        *_BUFFERS,
        *encode_arguments(encode),
        *(
            "decode_scale",
            "decode_scale",
            eps,
            input_rows,
            rows,
            1,
            columns // PIECE,
            plan.all_pieces,
        ),
        *(row_stride * itemsize, 0, codes_row, scales_row, 0),
        *(units, _LINES, shift, groups, expert_limit(experts), tiles or 0),
    )
    grid = (min(MAX_X, max(1, units)), 1, 1)
    early = has_dependent_launch(arch)
    return (Launch(program, grid, plan.block, plan.shared, args, programmatic=early),)


def _constants(front: str, format: str, dtype: str, rounding: str, aligned: bool) -> dict[str, Any]:
    fmt = FORMATS[format]
    return {
        "FRONT": front,
        "INPUT": dtype,
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale,
        "ROUNDING": rounding,
        "ALIGNED": aligned,
    }


class _RowPlan(NamedTuple):
    """Threads of a row and rows of a block; where a row waits."""

    all_pieces: int
    block: Extent
    shared: int
    constants: dict[str, Any]


def _plan_rows(
    options: dict[str, Any], format: str, columns: int, layout: str, encode: str
) -> _RowPlan:
    fmt = FORMATS[format]
    pieces = padded_pieces(fmt, columns, layout)
    itemsize = 4 if options["INPUT"] == "float32" else 2
    waits = options["FRONT"] == "rms" or encode == "row_amax"
    words = 4 * itemsize * (1 if options["RESIDUAL"] == "none" else 2)
    most = min(_WORDS // words, 2 if options["RESIDUAL"] != "none" else 4)
    per, turns = _split(max(1, pieces), most if waits else 4, _PIECE_WORK[options["FRONT"]])
    across = 32 * ceil_div(max(1, pieces), 32 * turns)
    hold = "none"
    if waits:
        # What waits in registers is loaded by every lane, also of a row that has no columns.
        hold = "registers" if turns == per and 0 < pieces <= _MOST_PIECES else "shared"
        if hold == "shared" and columns * itemsize > _MOST_HELD:
            hold = "reread"
    if hold != "registers":
        per = 1
    high = 1
    while across * high * 2 <= _THREADS:
        high *= 2
    threads = across * high
    # Registers for what waits, and for what belongs to a range: less threads at a time.
    held = per * words
    resident = 512 if per > 3 else 640 if options["RANGES"] else 768 if held > 16 else 1024
    constants = {
        "HOLD": hold,
        "PER": per,
        "THREADS": threads,
        "BLOCKS_PER_SM": max(1, resident // threads),
    }
    shared = 0 if hold == "none" else ROW_STATE * high
    if hold == "shared":
        shared += columns * itemsize * high
    return _RowPlan(pieces, (across, high, 1), shared, constants)


def _split(pieces: int, most: int, piece_work: int) -> tuple[int, int]:
    """Pieces a thread, of those that go into registers and in all, for the least work of a row."""
    found = None
    for per in range(1, most + 1):
        warps = ceil_div(pieces, 32 * per)
        if warps * 32 <= _MOST_THREADS:
            work = warps * (per * piece_work + _ROW_WORK)
            if found is None or work < found[0]:
                found = work, per
    if found is not None:
        return found[1], found[1]
    return 1, ceil_div(pieces, _MOST_THREADS)


def _row_bytes(format: str, columns: int, layout: str) -> tuple[int, int]:
    """Bytes of a row's codes, and of its scales: of a row of tiles in the tcgen layout."""
    fmt = FORMATS[format]
    blocks = columns // fmt.block
    scales = ceil_div(blocks, TILE_BLOCKS) * TILE_BYTES if layout == "tcgen" else blocks
    return columns // fmt.codes_per_byte, scales


def _wide(*numbers: int) -> bool:
    # Rows may go backwards: a negative stride is no number of 32 bits without a sign.
    return max(numbers) >= 1 << 31 or min(numbers) < 0
