"""From shapes and an architecture to launches: the one place that knows which kernel serves what, and how it is tiled.

Every function takes plain facts, never an array, and keeps what it returns: call it twice alike and get the same
launches. The buffers of a launch have the names of the public functions' arguments and results; a buffer that a call
does not have is None.
"""

from __future__ import annotations

import functools
from typing import Any

from .epilogue import EpilogueCode
from .errors import UnsupportedError
from .formats import FORMATS, BlockFormat
from .kernels.dequantize import DEQUANTIZE, GROUPED_DEQUANTIZE
from .kernels.grouped_quantize import GROUPED_QUANTIZE
from .kernels.interleave import DEINTERLEAVE, INTERLEAVE
from .kernels.matmul_naive import (
    EPILOGUE_ARRAYS,
    EPILOGUE_TYPES,
    epilogue_function,
    grouped_matmul_kernel,
    matmul_kernel,
)
from .kernels.quantize import AMAX, AMAX_CLEAR, AMAX_FINISH, QUANTIZE
from .launch import Launch
from .layouts import TILE_BLOCKS, TILE_ROWS, allocated_tiles
from .program import Program

__all__ = [
    "deinterleave_scales",
    "dequantize",
    "grouped_matmul",
    "grouped_quantize",
    "interleave_scales",
    "matmul",
    "quantize",
]

Launches = tuple[Launch, ...]

_PIECE = 16  # elements that a thread takes at a time
_THREADS = 128
_MAX_X = (1 << 31) - 1
_MAX_YZ = (1 << 16) - 1


def _ceil(number: int, multiple: int) -> int:
    return -(-number // multiple)


def _power_of_two(number: int, limit: int) -> int:
    """The smallest power of two that is not below `number`, at most `limit`."""
    return min(limit, 1 << max(0, number - 1).bit_length())


def _padded_pieces(fmt: BlockFormat, columns: int, layout: str) -> int:
    """Pieces of a row, with those of the padding of its last tile."""
    blocks = columns // fmt.block
    if layout == "tcgen":
        blocks = _ceil(blocks, TILE_BLOCKS) * TILE_BLOCKS
    return blocks * (fmt.block // _PIECE)


def _block(pieces: int, rows: int, smallest: int = 1) -> tuple[int, int]:
    """Threads along columns and rows: a warp takes up to 512 columns of a row."""
    x = max(smallest, _power_of_two(pieces, 32))
    return x, _power_of_two(rows, _THREADS // x)


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
        What ``encode_scale`` is: nothing; a number; an array of one, of [batches], of [batches * rows]; taken from x as a
        whole or by row (nvfp4). "none" for mxfp8, whatever the caller passed.
    aligned : bool
        Whether x, its strides, the codes and the scales are multiples of 16 bytes.

    Returns
    -------
    tuple of Launch
        Buffers ``x, codes, scales, encode_scale, decode_scale``.
    """
    fmt = FORMATS[format]
    pieces = _padded_pieces(fmt, columns, scale_layout)
    all_rows = _ceil(rows, TILE_ROWS) * TILE_ROWS if scale_layout == "tcgen" else rows
    x, y = _block(pieces, all_rows, fmt.block // _PIECE)
    across = 1 if encode == "row_amax" else min(_MAX_YZ, max(1, _ceil(pieces, x)))
    grid = (min(_MAX_X, max(1, _ceil(all_rows, y))), across, min(_MAX_YZ, max(1, batches)))
    constants = _constants(fmt, dtype, scale_layout, scale_rounding, encode == "none", aligned)
    # A number goes by value; a pointer must point somewhere, whether it is read or not.
    number = "encode_scale" if encode == "scalar" else 1.0
    pointer = "encode_scale" if encode in ("array", "batch", "row") else "decode_scale"
    shape = (rows, columns, batches, row_stride, batch_stride)
    args = ("x", "codes", "scales", pointer, number, "decode_scale", *shape)
    main = Launch(QUANTIZE.program(**constants, ENCODE=encode), grid, (x, y), 0, args)
    if encode != "amax":
        return (main,)
    x, y = _block(columns // _PIECE, rows)
    grid = (
        min(1024, max(1, _ceil(rows, y))),
        min(64, max(1, _ceil(columns, _PIECE * x * 4))),
        min(64, max(1, batches)),
    )
    search = Launch(
        AMAX.program(INPUT=dtype, ALIGNED=aligned), grid, (x, y), 0, ("x", "decode_scale", *shape)
    )
    return (
        Launch(AMAX_CLEAR.program(), 1, 1, 0, ("decode_scale",)),
        search,
        main,
        Launch(AMAX_FINISH.program(), 1, 1, 0, ("decode_scale",)),
    )


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
    has_expert_ids: bool,
    has_row_indices: bool,
    has_tile_starts: bool,
    offsets_dtype: str,
    ids_dtype: str | None,
    indices_dtype: str | None,
    starts_dtype: str | None,
    aligned: bool,
) -> Launches:
    """Quantise ranges of rows.

    Parameters
    ----------
    arch, format, dtype, columns, row_stride, scale_layout, scale_rounding, aligned
        As in :func:`quantize`.
    input_rows, rows : int
        Of ``x``, and of the result.
    groups : int
    tiles : int or None
        Row tiles of the scales; None for linear ones.
    encode : {"none", "scalar", "array", "expert", "row", "row_amax"}
        What ``encode_scale`` is: as in :func:`quantize`; an array of one an expert; of one a row of the result.
    experts : int or None
        Number of experts; None: any id from 0 on is one.
    has_expert_ids, has_row_indices, has_tile_starts : bool
    offsets_dtype, ids_dtype, indices_dtype, starts_dtype : {"int32", "int64", "uint32"} or None

    Returns
    -------
    tuple of Launch
        Buffers ``x, codes, scales, row_offsets, expert_ids, row_indices, tile_starts, encode_scale, decode_scale``.

    Raises
    ------
    UnsupportedError
        2^32 rows or more.
    """
    fmt = FORMATS[format]
    _check_rows(rows)
    pieces = _padded_pieces(fmt, columns, scale_layout)
    x, y = _block(pieces, TILE_ROWS, fmt.block // _PIECE)
    down = max(allocated_tiles(rows, groups), tiles or 0, min(groups, 1))
    across = 1 if encode == "row_amax" else _across(down, _ceil(pieces, x))
    constants = _constants(fmt, dtype, scale_layout, scale_rounding, encode == "none", aligned)
    constants |= _index_constants(offsets_dtype, ids_dtype, indices_dtype, starts_dtype)
    args = (
        *("x", "codes", "scales", "row_offsets", "expert_ids", "row_indices", "tile_starts"),
        "encode_scale" if encode in ("array", "expert", "row") else "decode_scale",
        "encode_scale" if encode == "scalar" else 1.0,
        *("decode_scale", input_rows, rows, columns, row_stride, groups),
        _experts(experts),
        tiles or 0,
    )
    program = GROUPED_QUANTIZE.program(**constants, ENCODE=encode)
    return (Launch(program, (down, across), (x, y), 0, args),)


@functools.lru_cache(maxsize=1024)
def dequantize(
    arch: str,
    *,
    format: str,
    rows: int,
    columns: int,
    batches: int,
    scale_layout: str,
    dtype: str,
    decode: str,
    groups: int | None,
    tiles: int | None,
    has_tile_starts: bool,
    offsets_dtype: str | None,
    starts_dtype: str | None,
    aligned: bool = False,
) -> Launches:
    """Values of a stack of matrices [batches, rows, columns], or of a grouped tensor.

    Parameters
    ----------
    arch, format, rows, columns, batches, scale_layout
        As in :func:`quantize`.
    dtype : {"bfloat16", "float16", "float32"}
        Of ``out``.
    decode : {"scalar", "batch", "row", "batch_row", "group"}
        What ``decode_scale`` has one of; "row" and "batch_row" are the same.
    groups : int or None
        Ranges of a grouped tensor, None for a dense one.
    tiles : int or None
        Row tiles of a grouped tensor's tcgen scales.
    has_tile_starts : bool
    offsets_dtype, starts_dtype : {"int32", "int64", "uint32"} or None
    aligned : bool
        Whether ``codes`` and ``out`` are multiples of 16 bytes.

    Returns
    -------
    tuple of Launch
        Buffers ``codes, scales, decode_scale, row_offsets, tile_starts, out``.

    Raises
    ------
    UnsupportedError
        A grouped tensor of 2^32 rows or more.
    """
    fmt = FORMATS[format]
    pieces = columns // _PIECE
    constants = {
        "ELEMENT": fmt.element,
        "SCALE": fmt.scale,
        "LAYOUT": scale_layout,
        "OUTPUT": dtype,
        "ALIGNED": aligned,
        "DECODE": "row" if decode == "batch_row" else decode,
    }
    if groups is None:
        x, y = _block(pieces, rows)
        program = DEQUANTIZE.program(**constants)
        args = ("codes", "scales", "decode_scale", "out", rows, columns, batches)
        return (Launch(program, _grid(rows, y, pieces, x, batches), (x, y), 0, args),)
    _check_rows(rows)
    x, y = _block(pieces, TILE_ROWS)
    down = allocated_tiles(rows, groups)
    program = GROUPED_DEQUANTIZE.program(
        **constants, OFFSETS=offsets_dtype or "int32", STARTS=starts_dtype or "none"
    )
    buffers = ("codes", "scales", "decode_scale", "row_offsets", "tile_starts", "out")
    grid = (down, _across(down, _ceil(pieces, x)))
    return (Launch(program, grid, (x, y), 0, (*buffers, rows, columns, groups, tiles or 0)),)


@functools.lru_cache(maxsize=1024)
def interleave_scales(arch: str, *, rows: int, blocks: int, batches: int) -> Launches:
    """Linear scales [batches, rows, blocks] to the tcgen layout; buffers ``scales, out``."""
    k_tiles, all_rows = _ceil(blocks, TILE_BLOCKS), _ceil(rows, TILE_ROWS) * TILE_ROWS
    x, y = _block(k_tiles, all_rows)
    grid = _grid(all_rows, y, k_tiles, x, batches)
    args = ("scales", "out", rows, blocks, batches)
    return (Launch(INTERLEAVE.program(), grid, (x, y), 0, args),)


@functools.lru_cache(maxsize=1024)
def deinterleave_scales(arch: str, *, rows: int, blocks: int, batches: int) -> Launches:
    """Scales in the tcgen layout to linear ones [batches, rows, blocks]; buffers ``scales, out``."""
    k_tiles = _ceil(blocks, TILE_BLOCKS)
    x, y = _block(k_tiles, rows)
    grid = _grid(rows, y, k_tiles, x, batches)
    args = ("scales", "out", rows, blocks, batches)
    return (Launch(DEINTERLEAVE.program(), grid, (x, y), 0, args),)


def _grid(rows: int, y: int, columns: int, x: int, batches: int) -> tuple[int, int, int]:
    """A grid for blocks of x by y threads; what is beyond a grid's limits the kernels reach in strides."""
    return min(_MAX_X, _ceil(rows, y)), min(_MAX_YZ, _ceil(columns, x)), min(_MAX_YZ, batches)


@functools.lru_cache(maxsize=1024)
def matmul(
    arch: str,
    *,
    rows: int,
    columns: int,
    depth: int,
    a_format: str | None,
    a_dtype: str | None,
    a_layout: str | None,
    decode_a: str,
    b_format: str,
    b_layout: str,
    decode_b: str,
    alpha: str,
    out_dtype: str,
    out_layout: str | None = None,
    epilogue: EpilogueCode | None = None,
    a_row_stride: int | None = None,
    aligned: bool = False,
    **_: None,
) -> Launches:
    """The product of A [rows, depth] with B [columns, depth] transposed.

    Parameters
    ----------
    arch : str
    rows, columns, depth : int
    a_format, b_format : str or None
        Canonical names; None for a plain A.
    a_dtype : {"bfloat16", "float16"} or None
        Of a plain A, whose rows begin `a_row_stride` elements apart.
    a_layout, b_layout : {"linear", "tcgen"} or None
        Of the scales.
    decode_a, decode_b : {"none", "scalar", "row"}
        What the decode scales have one of.
    alpha : {"value", "array"}
        A number, or an array of one.
    out_dtype : str
        "bfloat16", "float16", "float32", or a format's canonical name.
    out_layout : {"linear", "tcgen"} or None
        Of the scales of a quantised result.
    epilogue : EpilogueCode or None
    a_row_stride : int or None
    aligned : bool
        Whether the arrays of elements and codes, and A's rows, are multiples of 16 bytes.

    Returns
    -------
    tuple of Launch
        Buffers ``a`` or ``a_codes, a_scales, a_decode``; ``b_codes, b_scales, b_decode``; ``alpha``; ``epilogue_0``...;
        ``out`` or ``out_codes, out_scales, out_decode``.

    Raises
    ------
    UnsupportedError
        An epilogue with more arrays than kernels take, or of a dtype that they do not read.
    """
    constants = _product_constants(
        a_format,
        a_dtype,
        a_layout,
        decode_a,
        b_format,
        b_layout,
        decode_b,
        alpha,
        out_dtype,
        out_layout,
        epilogue,
    )
    program = _with_epilogue(
        matmul_kernel(_epilogue_dtypes(epilogue)).program(**constants, ALIGNED=aligned), epilogue
    )
    high, wide = _result_extent(rows, columns, out_dtype, out_layout, epilogue)
    x, y = _block(wide, high, 32 if out_dtype in FORMATS else 1)
    args = (
        *_operand_names(a_format),
        *_alpha_arguments(alpha),
        *_result_names(out_dtype),
        *_epilogue_names(epilogue),
        *(rows, columns, depth, _row_units(a_format, depth, a_row_stride)),
    )
    grid = (min(_MAX_X, max(high and 1, _ceil(high, y))), min(_MAX_YZ, _ceil(wide, x)))
    if out_dtype in FORMATS:
        grid = (
            max(1, grid[0]),
            max(1, grid[1]),
        )  # the decode scale must be written, whatever the shape
    return (Launch(program, grid, (x, y), 0, args),)


@functools.lru_cache(maxsize=1024)
def grouped_matmul(
    arch: str,
    *,
    input_rows: int,
    rows: int,
    columns: int,
    depth: int,
    experts: int,
    groups: int,
    has_expert_ids: bool,
    has_row_indices: bool,
    has_tile_starts: bool,
    offsets_dtype: str,
    ids_dtype: str | None,
    indices_dtype: str | None,
    starts_dtype: str | None,
    a_format: str | None,
    a_dtype: str | None,
    a_layout: str | None,
    decode_a: str,
    b_format: str,
    b_layout: str,
    decode_b: str,
    alpha: str,
    out_dtype: str,
    out_layout: str | None = None,
    out_tiles: int | None = None,
    out_starts_dtype: str | None = None,
    a_tiles: int | None = None,
    epilogue: EpilogueCode | None = None,
    a_row_stride: int | None = None,
    aligned: bool = False,
    **_: None,
) -> Launches:
    """The product of each range of rows of A with the matrix of its expert.

    Parameters
    ----------
    arch, columns, depth, a_format, a_dtype, b_format, b_layout, out_dtype, out_layout, epilogue, a_row_stride, aligned
        As in :func:`matmul`; B is [experts, columns, depth].
    input_rows, rows : int
        Of A, and of the result.
    experts, groups : int
    has_expert_ids, has_row_indices, has_tile_starts : bool
    offsets_dtype, ids_dtype, indices_dtype, starts_dtype, out_starts_dtype : {"int32", "int64", "uint32"} or None
    a_layout : {"linear", "tcgen_grouped"} or None
    decode_a : {"none", "scalar", "row", "group"}
    decode_b : {"scalar", "batch", "batch_row"}
    alpha : {"value", "array", "expert"}
    out_tiles, a_tiles : int or None
        Row tiles of tcgen scales of the result, and of A; None for A: as many as are allocated by default.

    Returns
    -------
    tuple of Launch
        Buffers as in :func:`matmul`, and ``row_offsets, expert_ids, row_indices, tile_starts, out_tile_starts``.

    Raises
    ------
    UnsupportedError
        2^32 rows or more, or an epilogue as in :func:`matmul`.
    """
    _check_rows(rows)
    quantized = out_dtype in FORMATS
    constants = _product_constants(
        a_format,
        a_dtype,
        a_layout,
        decode_a,
        b_format,
        b_layout,
        decode_b,
        alpha,
        out_dtype,
        out_layout,
        epilogue,
    )
    constants |= _index_constants(offsets_dtype, ids_dtype, indices_dtype, out_starts_dtype)
    constants["A_STARTS"] = starts_dtype or "none"
    kernel = grouped_matmul_kernel(_epilogue_dtypes(epilogue))
    program = _with_epilogue(kernel.program(**constants, ALIGNED=aligned), epilogue)
    _, wide = _result_extent(rows, columns, out_dtype, out_layout, epilogue)
    x, y = _block(wide, TILE_ROWS, 32 if quantized else 1)
    tiles = allocated_tiles(rows, groups)
    args = (
        *_operand_names(a_format),
        *("row_offsets", "expert_ids", "row_indices", "tile_starts"),
        *_alpha_arguments(alpha),
        *_result_names(out_dtype),
        "out_tile_starts" if quantized else "tile_starts",
        *_epilogue_names(epilogue),
        *(
            input_rows,
            rows,
            columns,
            depth,
            _row_units(a_format, depth, a_row_stride),
            groups,
            experts,
        ),
        *(tiles if a_tiles is None else a_tiles, out_tiles or 0),
    )
    grid = (max(tiles, out_tiles or 0), min(_MAX_YZ, _ceil(wide, x)))
    if quantized:
        grid = (max(grid[0], min(groups, 1)), max(1, grid[1]))
    return (Launch(program, grid, (x, y), 0, args),)


def _product_constants(
    a_format: str | None,
    a_dtype: str | None,
    a_layout: str | None,
    decode_a: str,
    b_format: str,
    b_layout: str,
    decode_b: str,
    alpha: str,
    out_dtype: str,
    out_layout: str | None,
    epilogue: EpilogueCode | None,
) -> dict[str, Any]:
    a, b, out = FORMATS.get(a_format or ""), FORMATS[b_format], FORMATS.get(out_dtype)
    pair = epilogue is not None and epilogue.pair
    return {
        "A_ELEMENT": "none" if a is None else a.element,
        "A_SCALE": "e8m0" if a is None else a.scale,
        "A_LAYOUT": "tcgen" if a_layout in ("tcgen", "tcgen_grouped") else "linear",
        "B_ELEMENT": b.element,
        "B_SCALE": b.scale,
        "B_LAYOUT": b_layout,
        "INPUT": a_dtype or "bfloat16",
        "ALPHA": alpha,
        "DECODE_A": decode_a,
        "DECODE_B": decode_b,
        "PAIR": ("halves" if epilogue.halves else "interleaved")
        if epilogue is not None and pair
        else "none",
        "OUTPUT": out_dtype if out is None else "codes",
        "ELEMENT": "e2m1" if out is None else out.element,
        "SCALE": "e8m0" if out is None else out.scale,
        "LAYOUT": out_layout or "linear",
        "ROUNDING": "rceil",
        "UNIT": True,
    }


def _result_extent(
    rows: int, columns: int, out_dtype: str, out_layout: str | None, epilogue: EpilogueCode | None
) -> tuple[int, int]:
    """Rows and columns that threads visit: with the padding of a quantised result's scales."""
    if epilogue is not None and epilogue.pair:
        columns //= 2
    if out_layout != "tcgen":
        return rows, columns
    across = FORMATS[out_dtype].block * TILE_BLOCKS
    return _ceil(rows, TILE_ROWS) * TILE_ROWS, _ceil(columns, across) * across


def _operand_names(a_format: str | None) -> tuple[str, ...]:
    return (
        "a" if a_format is None else "a_codes",
        "a_scales",
        "a_decode",
        "b_codes",
        "b_scales",
        "b_decode",
    )


def _row_units(a_format: str | None, depth: int, stride: int | None) -> int:
    """From row to row of A: in elements of a plain array, in bytes of codes."""
    if a_format is None:
        return depth if stride is None else stride
    return depth // FORMATS[a_format].codes_per_byte


def _alpha_arguments(alpha: str) -> tuple[str | float, ...]:
    # What is not used must still be a pointer, or a number.
    return ("b_decode", "alpha") if alpha == "value" else ("alpha", 1.0)


def _result_names(out_dtype: str) -> tuple[str, ...]:
    return (
        ("out_codes", "out_scales", "out_decode")
        if out_dtype in FORMATS
        else ("out", "out", "b_decode")
    )


def _epilogue_dtypes(epilogue: EpilogueCode | None) -> tuple[str, ...]:
    if epilogue is None:
        return ()
    if len(epilogue.dtypes) > EPILOGUE_ARRAYS:
        raise UnsupportedError(
            f"epilogue must have at most {EPILOGUE_ARRAYS} arrays; got {len(epilogue.dtypes)}: put some of them together"
        )
    for dtype in epilogue.dtypes:
        if dtype not in EPILOGUE_TYPES:
            raise UnsupportedError(
                f"epilogue arrays must be of {', '.join(EPILOGUE_TYPES)} in a kernel; got {dtype}: pass it as float32"
            )
    return epilogue.dtypes


def _epilogue_names(epilogue: EpilogueCode | None) -> tuple[str, ...]:
    used = () if epilogue is None else epilogue.dtypes
    names = [f"epilogue_{i}" for i in range(len(used))]
    return (*names, *["b_codes"] * (EPILOGUE_ARRAYS - len(names)))


def _with_epilogue(program: Program, epilogue: EpilogueCode | None) -> Program:
    if epilogue is None:
        return program
    function = epilogue_function(epilogue.fn, len(epilogue.dtypes), epilogue.pair)
    name = "pair_epilogue" if epilogue.pair else "epilogue"
    return Program(program.kernel, program.constants, ((name, function),))


def _check_rows(rows: int) -> None:
    if rows >= 1 << 32:
        raise UnsupportedError(f"grouped kernels take fewer than 2^32 rows; got {rows}")


def _experts(experts: int | None) -> int:
    """The number below which ids count; without a number any id does."""
    return (1 << 62) if experts is None else experts


def _across(down: int, groups: int) -> int:
    """Blocks beside each other: enough to fill a card; more column groups a block where there are many blocks."""
    return min(_MAX_YZ, max(1, min(groups, _ceil(4096, max(1, down)))))


def _index_constants(
    offsets: str | None, ids: str | None, indices: str | None, starts: str | None
) -> dict[str, str]:
    return {
        "OFFSETS": offsets or "int32",
        "IDS": ids or "none",
        "INDICES": indices or "none",
        "STARTS": starts or "none",
    }
