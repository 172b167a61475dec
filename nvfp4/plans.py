"""From shapes and an architecture to launches: which kernel serves what, and how it is tiled.

Every function takes plain facts, never an array, and keeps what it returns: call it twice alike and
get the same launches. The buffers of a launch have the names of the public functions' arguments and
results; a buffer that a call does not have is None.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from ._lazy import getter
from .architectures import capability
from .formats import FORMATS, BlockFormat
from .kernels.quantize import QUANTIZE
from .launch import Launch
from .layouts import TILE_BLOCKS, TILE_ROWS, allocated_tiles
from .plans_stream import FEW_PIECES, stream
from .tiling import (
    MAX_YZ,
    PIECE,
    Launches,
    across,
    at_least_one,
    block_for,
    ceil_div,
    check_rows,
    encode_arguments,
    expert_limit,
    grid_for,
    has_dependent_launch,
    index_constants,
    padded_pieces,
)

if TYPE_CHECKING:
    from .plans_dequantize import deinterleave_scales, dequantize, interleave_scales
    from .plans_flashinfer import flashinfer_tile_starts, pad_offsets, swizzle, unswizzle
    from .plans_fused import fused_quantize, grouped_fused_quantize
    from .plans_prepare import prepare_weights
    from .plans_products import grouped_matmul, matmul
    from .plans_rows import quantize_rows
    from .plans_seeds import seed_tile_starts

__all__ = [
    "deinterleave_scales",
    "dequantize",
    "flashinfer_tile_starts",
    "fused_quantize",
    "grouped_fused_quantize",
    "grouped_matmul",
    "grouped_quantize",
    "interleave_scales",
    "matmul",
    "pad_offsets",
    "prepare_weights",
    "quantize",
    "quantize_rows",
    "seed_tile_starts",
    "swizzle",
    "unswizzle",
]

#: Plans that are made elsewhere: a process whose first call is another one does not import their
#: kernels, which takes longer than the call.
_HOMES = {
    **dict.fromkeys(("deinterleave_scales", "dequantize", "interleave_scales"), "plans_dequantize"),
    **dict.fromkeys(
        ("flashinfer_tile_starts", "pad_offsets", "swizzle", "unswizzle"), "plans_flashinfer"
    ),
    **dict.fromkeys(("fused_quantize", "grouped_fused_quantize"), "plans_fused"),
    "prepare_weights": "plans_prepare",
    **dict.fromkeys(("grouped_matmul", "matmul"), "plans_products"),
    "quantize_rows": "plans_rows",
    "seed_tile_starts": "plans_seeds",
}


__getattr__ = getter(globals(), _HOMES)


def _constants(
    fmt: BlockFormat, dtype: str, layout: str, rounding: str, unit: bool, aligned: bool
) -> dict[str, Any]:
    return {
        "INPUT": dtype,
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale,
        "ROUNDING": rounding,
        "UNIT": unit,
        "ALIGNED": aligned,
        "LAYOUT": layout,
    }


@functools.lru_cache(maxsize=1024)
def quantize(
    arch: str,
    *,
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
    aligned: bool,
    reference: bool = False,
) -> Launches:
    """Quantise a stack of matrices [batches, rows, columns].

    Parameters
    ----------
    arch : str
        Such as ``"sm_90a"``.
    format : str
        Canonical name.
    dtype : {"bfloat16", "float16", "float32"}
        Of ``x``.
    rows, columns, batches : int
    row_stride, batch_stride : int
        Of ``x``, in elements.
    scale_layout : {"linear", "tcgen"}
    scale_rounding : {"rceil", "floor", "ceil", "even"}
    encode : {"none", "scalar", "array", "batch", "row", "amax", "row_amax"}
        What ``encode_scale`` is: nothing; a number; an array of one, of [batches], of [batches *
        rows]; taken from x as a whole or by row (nvfp4). "none" for mxfp8, whatever the caller
        passed.
    aligned : bool
        Whether x, its strides, the codes and the scales are multiples of 16 bytes.
    reference : bool
        Take the reference kernel, whatever there is that is faster.

    Returns
    -------
    tuple of Launch
        Buffers ``x, codes, scales, encode_scale, decode_scale``.
    """
    fmt = FORMATS[format]
    pieces = padded_pieces(fmt, columns, scale_layout)
    all_rows = ceil_div(rows, TILE_ROWS) * TILE_ROWS if scale_layout == "tcgen" else rows
    block = block_for(pieces, all_rows, fmt.block // PIECE)
    grid = at_least_one(grid_for(block, pieces, all_rows, batches))
    if encode == "row_amax":
        grid = (grid[0], 1, grid[2])
    constants = _constants(fmt, dtype, scale_layout, scale_rounding, encode == "none", aligned)
    shape = (rows, columns, batches, row_stride, batch_stride)
    args = ("x", "codes", "scales", *encode_arguments(encode), "decode_scale", *shape)
    main = Launch(QUANTIZE.program(**constants, ENCODE=encode), grid, block, 0, args)
    if aligned and encode != "row_amax" and not reference:
        tma = None
        if _TMA:
            from .plans_tma import quantize_tma

            tma = quantize_tma(arch, fmt, constants, args[:6], encode, _TMA, *shape)
        main = tma or stream(arch, fmt, constants, args[:6], encode, *shape) or main
    if encode == "row_amax" and not reference:
        from .plans_ahead import PLAIN, ahead

        main = ahead(arch, fmt, constants | PLAIN, encode, *shape) or main
    if encode != "amax":
        return (main,)
    from .plans_amax import behind_search, search

    return behind_search(search(dtype, *shape, aligned=aligned, reference=reference), main)


#: Blocks that fill a large card several times over.
_ENOUGH_BLOCKS = 6000
#: Pieces of 16 elements that are worth a block of the grouped quantiser, which must find its rows.
_ENOUGH_PIECES = 256

#: Pieces up to which a grouped call has blocks of a few rows (``kernels.grouped_rows``).
_FEW_GROUPED_PIECES = 2_000_000


#: How a quantiser by tensor copies is run, of ``plans_tma.WAYS`` or, the grouped one, of
#: ``GROUPED_WAYS``; "": none is taken.
_TMA = ""


@functools.lru_cache(maxsize=1024)
def grouped_quantize(
    arch: str,
    *,
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
    aligned: bool,
    reference: bool = False,
) -> Launches:
    """Quantise ranges of rows.

    Parameters
    ----------
    arch, format, dtype, columns, row_stride, scale_layout, scale_rounding, aligned, reference
        As in :func:`quantize`.
    input_rows, rows : int
        Of ``x``, and of the result.
    groups : int
    tiles : int or None
        Row tiles of the scales; None for linear ones.
    encode : {"none", "scalar", "array", "expert", "row", "row_amax"}
        What ``encode_scale`` is: as in :func:`quantize`; an array of one an expert; of one a row of
        the result.
    experts : int or None
        Number of experts; None: any id from 0 on is one.
    offsets_dtype, ids_dtype, indices_dtype, starts_dtype : {"int32", "int64", "uint32"} or None

    Returns
    -------
    tuple of Launch
        Buffers ``x, codes, scales, row_offsets, expert_ids, row_indices, tile_starts, encode_scale,
        decode_scale``.

    Raises
    ------
    UnsupportedError
        2^32 rows or more.
    """
    fmt = FORMATS[format]
    check_rows(rows)
    pieces = padded_pieces(fmt, columns, scale_layout)
    block = block_for(pieces, TILE_ROWS, fmt.block // PIECE)
    down = max(allocated_tiles(rows, groups), tiles or 0, min(groups, 1))
    beside = 1 if encode == "row_amax" else across(down, ceil_div(pieces, block[0]))
    constants = _constants(fmt, dtype, scale_layout, scale_rounding, encode == "none", aligned)
    constants |= index_constants(offsets_dtype, ids_dtype, indices_dtype, starts_dtype)
    args = (
        *("x", "codes", "scales", "row_offsets", "expert_ids", "row_indices", "tile_starts"),
        *encode_arguments(encode),
        *("decode_scale", input_rows, rows, columns, row_stride, groups),
        expert_limit(experts),
        tiles or 0,
    )
    # The fast ones load something for every lane; of an input without rows there is nothing.
    if aligned and encode != "row_amax" and input_rows and not reference:
        facts = (input_rows, rows, groups, expert_limit(experts))
        sizes = (columns, row_stride * (4 if dtype == "float32" else 2), tiles or 0)
        if _TMA:
            from .plans_tma import grouped_quantize_tma

            tma = grouped_quantize_tma(arch, fmt, constants, args[:10], encode, _TMA, facts, *sizes)
            if tma is not None:
                return (tma,)
        if starts_dtype is None:
            for plan in (_grouped_rows, _grouped_stream):
                stream = plan(arch, fmt, constants, encode, args, facts, *sizes)
                if stream is not None:
                    return (stream,)
    from .kernels.grouped_quantize import GROUPED_QUANTIZE

    program = GROUPED_QUANTIZE.program(**constants, ENCODE=encode)
    return (Launch(program, (down, beside, 1), block, 0, args),)


def _grouped_stream(
    arch: str,
    fmt: BlockFormat,
    constants: dict[str, Any],
    encode: str,
    args: tuple[str | float, ...],
    facts: tuple[int, int, int, int],
    columns: int,
    row_bytes: int,
    tiles: int,
) -> Launch | None:
    """The grouped quantiser at memory speed, where it takes this shape."""
    from .kernels.grouped_stream import GROUPED_STREAM

    _, rows, groups, _ = facts
    tcgen = constants["LAYOUT"] == "tcgen"
    down = allocated_tiles(rows, groups)
    pieces = columns // PIECE
    all_pieces = padded_pieces(fmt, columns, constants["LAYOUT"])
    chunks = ceil_div(pieces, 64)
    split = 1
    enough = min(_ENOUGH_BLOCKS, rows * pieces // _ENOUGH_PIECES)
    while split < 16 and down * chunks * split < enough:
        split *= 2
    if not (
        0 < rows < 1 << 31
        and 0 < groups <= 1024
        and pieces
        and down * split < MAX_YZ
        and 0 <= row_bytes < 1 << 32
        and (not tcgen or tiles == down)
    ):
        return None
    across = all_pieces * PIECE // fmt.block // (TILE_BLOCKS if tcgen else 1)
    wide = constants["INPUT"] == "float32"
    resident = 10 if fmt.element == "e2m1" and not wide and capability(arch)[0] != 12 else 8
    program = GROUPED_STREAM.program(
        **constants, ENCODE=encode, PAIRS=16 // split, BLOCKS_PER_SM=resident
    )
    sizes = (pieces, all_pieces, row_bytes, columns // fmt.codes_per_byte, across, tiles)
    buffers = (*args[:6], *args[7:10])
    return Launch(
        program,
        (chunks, down * split, 1),
        (128, 1, 1),
        0,
        (*buffers, *facts, *sizes),
        programmatic=has_dependent_launch(arch),
    )


def _grouped_rows(
    arch: str,
    fmt: BlockFormat,
    constants: dict[str, Any],
    encode: str,
    args: tuple[str | float, ...],
    facts: tuple[int, int, int, int],
    columns: int,
    row_bytes: int,
    tiles: int,
) -> Launch | None:
    """The grouped quantiser of few rows, where it takes this shape."""
    from .kernels.grouped_rows import GROUPED_ROWS

    _, rows, groups, _ = facts
    pieces = columns // PIECE
    threads_pieces = 1 if rows * pieces <= FEW_PIECES else 2
    down = max(ceil_div(rows, 2 * threads_pieces), tiles)
    if not (
        constants["LAYOUT"] == "tcgen"
        and 0 < rows * pieces <= _FEW_GROUPED_PIECES
        and rows < 1 << 27
        and 0 < groups <= 1024
        and tiles == allocated_tiles(rows, groups)
        and down <= MAX_YZ
        and 0 <= row_bytes < 1 << 32
    ):
        return None
    all_pieces = padded_pieces(fmt, columns, "tcgen")
    across = all_pieces * PIECE // fmt.block // TILE_BLOCKS
    # As many as have the registers that they need.
    resident = 12 if threads_pieces == 1 else 10
    if constants["INPUT"] == "float32":
        resident = 8
    elif groups > 256:
        resident -= 2
    elif capability(arch)[0] == 9 and encode != "row":
        resident = 12
    program = GROUPED_ROWS.program(
        **constants,
        ENCODE=encode,
        PIECES=threads_pieces,
        STEPS=next(n for n in (1, 2, 4, 8, 32) if groups <= 32 * n),
        BLOCKS_PER_SM=resident,
    )
    sizes = (pieces, all_pieces, row_bytes, columns // fmt.codes_per_byte, across, tiles)
    return Launch(
        program,
        (ceil_div(pieces, 64), down, 1),
        (128, 1, 1),
        0,
        (*args[:6], *args[7:10], *facts, *sizes),
        programmatic=has_dependent_launch(arch),
    )
