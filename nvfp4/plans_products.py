"""Plans of the products; ``nvfp4.plans`` has all plans."""

from __future__ import annotations

import functools
from dataclasses import replace
from types import FunctionType
from typing import Any

from . import plans_prepared, plans_sm90, tuning
from .architectures import capability
from .epilogue import EpilogueCode
from .errors import UnsupportedError
from .formats import FORMATS, PREPARED
from .kernels.matmul_decode import matmul_decode_kernel
from .kernels.matmul_naive import (
    EPILOGUE_ARRAYS,
    EPILOGUE_TYPES,
    epilogue_function,
    grouped_matmul_kernel,
    matmul_kernel,
)
from .kernels.matmul_sm90 import matmul_sm90_kernel
from .launch import Launch
from .layouts import TILE_BLOCKS, TILE_ROWS, allocated_tiles
from .program import Program
from .tiling import (
    MAX_X,
    MAX_YZ,
    THREADS,
    Launches,
    at_least_one,
    block_for,
    ceil_div,
    check_rows,
    grid_for,
    index_constants,
)

__all__ = ["grouped_matmul", "matmul"]


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
    b_dtype: None = None,
    out_tiles: None = None,
    out_starts_dtype: None = None,
    aligned: bool = False,
    map_alignment: int = 0,
    compute: str | None = None,
    reference: bool = False,
    batch_invariant: bool = False,
    processors: int = 132,
    card: tuple[str, int] | None = None,
) -> Launches:
    """The product of A [rows, depth] with B [columns, depth] transposed.

    Parameters
    ----------
    arch : str
        Such as ``"sm_90a"``.
    rows, columns, depth : int
    a_format, b_format : str or None
        Canonical names; None for a plain A.
    a_dtype : {"bfloat16", "float16"} or None
        Of a plain A, whose rows begin `a_row_stride` elements apart.
    compute : {None, "fp8"}
        "fp8": `a_format` is "e4m3", rows with one scale each; B is prepared.
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
    b_dtype, out_tiles, out_starts_dtype
        What only other products have: None.
    aligned : bool
        Whether the arrays of elements and codes, and A's rows, are multiples of 16 bytes.
    map_alignment : {0, 16, 32}
        What the codes of both operands are multiples of; 0 where their scales are not of 16.
    reference : bool
        Take the reference kernel, k ascending, whatever there is that is faster.
    batch_invariant : bool
        What decides about the order of sums depends on columns, depth, formats and architecture
        alone.
    processors : int
        Multiprocessors of the card.
    card : (str, int) or None
        Its name and multiprocessors, by which tables of divisions go.

    Returns
    -------
    tuple of Launch
        Buffers ``a`` or ``a_codes, a_scales, a_decode``; ``b_codes, b_scales, b_decode``;
        ``alpha``; ``epilogue_0``...; ``out`` or ``out_codes, out_scales, out_decode``.

    Raises
    ------
    UnsupportedError
        An epilogue with more arrays than kernels take, or of a dtype that they do not read.
    ValueError
        Addresses that the one kernel of a batch-invariant product does not take.
    """
    facts = (a_format, a_dtype, a_layout, decode_a, b_format, b_layout, decode_b, alpha, aligned)
    constants = _operand_constants(*facts) | _result_constants(out_dtype, out_layout, epilogue)
    if compute == "fp8":
        _check_fp8(arch)
    if b_layout == PREPARED:
        indices = ("b_codes",) * 4
        numbers: tuple[int, ...] = (
            rows,
            rows,
            columns,
            depth,
            _row_units(a_format, depth, a_row_stride),
        )
        numbers += (0, 1, ceil_div(rows, TILE_ROWS))
        result = _prepared_result(out_dtype, 0)
        return _prepared(
            *(arch, constants, a_format, alpha, epilogue, indices, numbers, processors, result),
            card=card,
            batch_invariant=batch_invariant,
        )
    program = _with_epilogue(matmul_kernel(_dtypes(epilogue)).program(**constants), epilogue)
    high, wide = _result_extent(rows, columns, out_dtype, out_layout, epilogue)
    block = block_for(wide, high, _smallest_row(out_dtype))
    grid = grid_for(block, wide, high)
    args = (
        *_operand_names(a_format),
        *_alpha_arguments(alpha),
        *_result_names(out_dtype),
        *_epilogue_names(epilogue),
        *(rows, columns, depth, _row_units(a_format, depth, a_row_stride)),
    )
    if out_dtype in FORMATS:
        grid = at_least_one(grid)
    if reference:
        return (Launch(program, grid, block, 0, args),)
    products = rows * columns * depth
    if batch_invariant:
        products = max(products, _FEW_PRODUCTS)  # the kernel of many, whatever the rows
    if products >= _FEW_PRODUCTS and _blackwell(arch):
        from . import plans_blackwell

        launch = plans_blackwell.product(
            arch,
            constants,
            rows=rows,
            columns=columns,
            depth=depth,
            row_tiles=ceil_div(rows, TILE_ROWS),
            scale_tiles=ceil_div(rows, TILE_ROWS),
            experts=None,
            groups=None,
            alignment=map_alignment,
            dtypes=_dtypes(epilogue),
            args=args,
            with_epilogue=functools.partial(_with_epilogue, epilogue=epilogue),
            fixed=batch_invariant,
        )
        if launch is not None:
            return (launch,)
    tiles_down, tiles_across = ceil_div(rows, _TILE), ceil_div(columns, _TILE)
    if batch_invariant:
        _check_aligned(constants)
    if _for_tensor_cores(constants, products, (tiles_down, tiles_across)):
        if _blackwell(arch):
            from . import plans_sm120

            shape = (rows, columns, depth)
            scaled = plans_sm120.dense(arch, constants, *shape, _dtypes(epilogue), batch_invariant)
            if scaled is not None:
                return (Launch(_with_epilogue(scaled.program, epilogue), *scaled[1:], args),)
        from .kernels.matmul_sm80 import matmul_sm80_kernel

        program = _with_epilogue(
            matmul_sm80_kernel(_dtypes(epilogue)).program(**constants), epilogue
        )
        grid, block = (tiles_down, tiles_across, 1), (THREADS, 1, 1)
        return (Launch(program, grid, block, _shared_bytes(constants), args),)
    return (Launch(program, grid, block, 0, args),)


#: Rows and columns of a tile of ``kernels.matmul_sm80``.
_TILE = 64
#: Products from which on tensor cores are worth their tiles of 64 x 64; below, the naive kernels
#: are quick as well, and give the bytes of the golden model whatever the operands.
_FEW_PRODUCTS = 1 << 24


def _blackwell(arch: str) -> bool:
    """Whether to ask for Blackwell's kernels, which are imported for it alone."""
    return capability(arch)[0] >= 10


def _for_tensor_cores(constants: dict[str, Any], products: int, tiles: tuple[int, int]) -> bool:
    """Whether ``kernels.matmul_sm80`` makes a product."""
    return (
        constants["ALIGNED"]
        and constants["OUTPUT"] != "codes"
        and products >= _FEW_PRODUCTS
        and tiles[0] <= MAX_X
        and tiles[1] <= MAX_YZ
    )


def _check_aligned(constants: dict[str, Any]) -> None:
    """Operands of a batch-invariant product, whose kernel must not depend on their addresses."""
    if not constants["ALIGNED"] and constants["OUTPUT"] != "codes":
        raise ValueError(
            "a, its rows, and b must begin at multiples of 16 bytes with batch_invariant=True, so "
            "that the kernel is the same for all: pass copies"
        )


def _shared_bytes(constants: dict[str, Any]) -> int:
    """Tiles of A and B, and of the lower halves of a float16 A."""
    split = constants["A_ELEMENT"] == "none" and constants["INPUT"] == "float16"
    return (3 if split else 2) * _TILE * _TILE * 2


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
    b_dtype: None = None,
    aligned: bool = False,
    map_alignment: int = 0,
    compute: str | None = None,
    tile: tuple[int, int, int, bool] | None = None,
    batch_invariant: bool = False,
    processors: int = 132,
    card: tuple[str, int] | None = None,
) -> Launches:
    """The product of each range of rows of A with the matrix of its expert.

    Parameters
    ----------
    arch, columns, depth, a_format, a_dtype, b_format, b_layout, b_dtype
        As in :func:`matmul`; B is [experts, columns, depth].
    out_dtype, out_layout, epilogue, a_row_stride, aligned, map_alignment, compute, batch_invariant
        As in :func:`matmul`.
    input_rows, rows : int
        Of A, and of the result.
    experts, groups : int
    offsets_dtype, ids_dtype, indices_dtype : {"int32", "int64", "uint32"} or None
        offsets_dtype "counts_int32"...: ``row_offsets`` holds counts of rows of as many matrices as
        there are groups, of equal numbers of rows; A has their scales one after the other.
    starts_dtype, out_starts_dtype : {"int32", "int64", "uint32"} or None
        Of the first scale tiles of the ranges, of A and of a quantised result.
    a_layout : {"linear", "tcgen_grouped"} or None
    decode_a : {"none", "scalar", "row", "group"}
    decode_b : {"scalar", "batch", "batch_row"}
    alpha : {"value", "array", "expert"}
    tile : tuple of int, or None
        What the caller asks of tiles, as ``plans_blackwell.product`` takes it.
    out_tiles, a_tiles : int or None
        Row tiles of the tcgen scales of the result and of A; None for A: as many as are
        allocated by default.

    Returns
    -------
    tuple of Launch
        Buffers as in :func:`matmul`, and ``row_offsets, expert_ids, row_indices, tile_starts,
        out_tile_starts``.

    Raises
    ------
    UnsupportedError
        2^32 rows or more, or an epilogue as in :func:`matmul`.
    ValueError
        As in :func:`matmul`.
    """
    check_rows(rows)
    quantized = out_dtype in FORMATS
    facts = (a_format, a_dtype, a_layout, decode_a, b_format, b_layout, decode_b, alpha, aligned)
    constants = _operand_constants(*facts) | _result_constants(out_dtype, out_layout, epilogue)
    constants |= index_constants(offsets_dtype, ids_dtype, indices_dtype, out_starts_dtype)
    constants["A_STARTS"] = starts_dtype or "none"
    if compute == "fp8":
        _check_fp8(arch)
    tiles = allocated_tiles(rows, groups)
    counted = offsets_dtype.startswith("counts_")
    if counted:
        # One more than a matrix has, for its rows behind the count (``kernels.groups``).
        a_tiles = groups * ceil_div(rows // max(groups, 1), TILE_ROWS)
        tiles = a_tiles + groups
    if not experts or not input_rows:
        # No range has an expert, or no row is one of A: nothing may be read, in whatever order.
        constants |= {"B_LAYOUT": "linear"}
        if compute == "fp8":
            constants["A_SCALE"] = "e8m0"
    elif b_layout == PREPARED:
        indices = ("row_offsets", "expert_ids", "row_indices", "tile_starts")
        numbers: tuple[int, ...] = (
            input_rows,
            rows,
            columns,
            depth,
            _row_units(a_format, depth, a_row_stride),
        )
        numbers += (groups, experts, tiles if a_tiles is None else a_tiles)
        return _prepared(
            *(arch, constants, a_format, alpha, epilogue, indices, numbers, processors),
            _prepared_result(out_dtype, out_tiles or 0),
            card=card,
            batch_invariant=batch_invariant,
            grouped=True,
        )
    kernel = grouped_matmul_kernel(_dtypes(epilogue))
    program = _with_epilogue(kernel.program(**constants), epilogue)
    _, wide = _result_extent(rows, columns, out_dtype, out_layout, epilogue)
    block = block_for(wide, TILE_ROWS, _smallest_row(out_dtype))
    down = max(tiles, out_tiles or 0)
    grid = (down, grid_for(block, wide, TILE_ROWS)[1], 1)
    if quantized and groups:
        grid = at_least_one(grid)
    args = (
        *_operand_names(a_format),
        *("row_offsets", "expert_ids", "row_indices", "tile_starts"),
        *_alpha_arguments(alpha),
        *_result_names(out_dtype),
        "out_tile_starts" if quantized else "tile_starts",
        *_epilogue_names(epilogue),
        *(input_rows, rows, columns, depth, _row_units(a_format, depth, a_row_stride)),
        *(groups, experts, tiles if a_tiles is None else a_tiles, out_tiles or 0),
    )
    products = rows * columns * depth
    if batch_invariant:
        products = max(products, _FEW_PRODUCTS)
    if products >= _FEW_PRODUCTS and groups and _blackwell(arch):
        from . import plans_blackwell

        launch = plans_blackwell.product(
            arch,
            constants,
            rows=rows,
            columns=columns,
            depth=depth,
            row_tiles=tiles,
            scale_tiles=tiles if a_tiles is None else a_tiles,
            tile=tile,
            experts=experts,
            groups=groups,
            alignment=map_alignment,
            dtypes=_dtypes(epilogue),
            args=args,
            with_epilogue=functools.partial(_with_epilogue, epilogue=epilogue),
            fixed=batch_invariant,
        )
        if launch is not None:
            return (launch,)
    across = ceil_div(columns, _TILE)
    if batch_invariant:
        _check_aligned(constants)
    if _for_tensor_cores(constants, products, (2 * tiles, across)) and groups:
        if _blackwell(arch):
            from . import plans_sm120

            sizes = (rows, groups, tiles, columns, depth)
            scaled = plans_sm120.grouped(
                arch, constants, *sizes, _dtypes(epilogue), fixed=batch_invariant
            )
            if scaled is not None:
                return (Launch(_with_epilogue(scaled.program, epilogue), *scaled[1:], args),)
        from .kernels.matmul_sm80 import grouped_matmul_sm80_kernel

        kernel = grouped_matmul_sm80_kernel(_dtypes(epilogue))
        program = _with_epilogue(kernel.program(**constants), epilogue)
        grid, block = (2 * tiles, across, 1), (THREADS, 1, 1)
        return (Launch(program, grid, block, _shared_bytes(constants), args),)
    return (Launch(program, grid, block, 0, args),)


def _prepared(
    arch: str,
    constants: dict[str, Any],
    a_format: str | None,
    alpha: str,
    epilogue: EpilogueCode | None,
    indices: tuple[str, ...],
    numbers: tuple[int, ...],
    processors: int,
    result: tuple[int | str, ...],
    *,
    card: tuple[str, int] | None,
    batch_invariant: bool = False,
    grouped: bool = False,
) -> Launches:
    """A product with prepared weights; `numbers` and `result` as the kernels have them."""
    input_rows, rows, columns, depth, _, groups, experts, _ = numbers
    if max(input_rows, rows) >= 1 << 31:
        raise UnsupportedError(
            "products with prepared weights take fewer than 2^31 rows; got "
            f"{max(input_rows, rows)}: multiply a part at a time"
        )
    if not constants["ALIGNED"]:
        raise ValueError(
            "a, its rows, and b must begin at multiples of 16 bytes with prepared weights (codes "
            "of a quantised a at multiples of 8): pass copies"
        )
    args = (
        *_operand_names(a_format),
        *indices,
        *_alpha_arguments(alpha),
        result[0],
        *_epilogue_names(epilogue),
        *numbers,
        *result[1:],
    )
    shape: dict[str, Any] = {
        "rows": rows,
        "columns": columns,
        "depth": depth,
        "groups": groups if grouped else None,
        "processors": processors,
    }
    key = functools.partial(tuning.key_of, constants, rows, columns, depth, shape["groups"])
    narrow = constants["A_SCALE"] == "none" and constants["B_SCALE"] == "e8m0"
    function = "none" if epilogue is None else "function"
    ways = [{**constants, **more, "EPILOGUE": function} for more in (_FP8 if narrow else ({},))]
    choice = None if batch_invariant else tuning.find(card, key)
    shape["choice"] = _possible(choice, arch, ways, **shape)
    shape["matrices"] = experts if batch_invariant else None
    launches: list[Launch | None] = []
    if arch == "sm_90a":
        kernel = matmul_sm90_kernel(_dtypes(epilogue))
        launches += [
            plans_sm90.prefill(way, **shape, kernel=kernel, args=args, experts=experts)
            for way in ways
        ]
    made = [launch for launch in launches if launch is not None]
    if not made:
        kernel = matmul_decode_kernel(_dtypes(epilogue))
        made = [plans_prepared.decode(arch, constants, **shape, kernel=kernel, args=args)]
    return tuple(replace(one, program=_with_epilogue(one.program, epilogue)) for one in made)


def _possible(
    choice: tuning.Choice | None, arch: str, ways: list[dict[str, Any]], **shape: Any
) -> tuning.Choice | None:
    """A table's choice, if each launch of the product can have it; `ways` are their constants."""
    if choice is None:
        return None
    if choice.kernel == "decode":
        has = plans_prepared.chosen(choice, ways[0], shape["depth"]) is not None
    else:
        has = arch == "sm_90a" and all(
            plans_sm90.chosen(choice, plans_sm90.shape_of(way, **shape)) is not None for way in ways
        )
    return choice if has else None


def _prepared_result(out_dtype: str, out_tiles: int) -> tuple[int | str, ...]:
    """Arguments of the result in a product with prepared weights."""
    out, *more = _result_names(out_dtype)
    starts = "out_tile_starts" if out_dtype in FORMATS else "b_codes"
    return (out, *more, starts, out_tiles)


def _check_fp8(arch: str) -> None:
    """Products on FP8 tensor cores are Hopper's."""
    if arch != "sm_90a":
        raise UnsupportedError(
            f'compute="fp8" needs a GPU of sm_90a (Hopper); got {arch}: leave it out, or pass '
            "activations in a block format"
        )


#: What the two launches of a product take on FP8 tensor cores: matrices of e4m3 values, the others.
_FP8 = (
    {"COMPUTE": "fp8", "MATRICES": "narrow"},
    {"COMPUTE": "bfloat16", "MATRICES": "others"},
)


def _operand_constants(
    a_format: str | None,
    a_dtype: str | None,
    a_layout: str | None,
    decode_a: str,
    b_format: str,
    b_layout: str,
    decode_b: str,
    alpha: str,
    aligned: bool,
) -> dict[str, Any]:
    a, b = FORMATS.get(a_format or ""), FORMATS[b_format]
    rows = a_format if a_format == "e4m3" else None  # with one scale each
    return {
        "A_ELEMENT": rows or ("none" if a is None else a.element),
        "A_SCALE": "none" if rows else ("e8m0" if a is None else a.scale),
        "A_LAYOUT": "tcgen" if a_layout in ("tcgen", "tcgen_grouped") else "linear",
        "B_ELEMENT": b.element,
        "B_SCALE": b.scale,
        "B_LAYOUT": b_layout,
        "INPUT": a_dtype or "bfloat16",
        "ALIGNED": aligned,
        "ALPHA": alpha,
        "DECODE_A": decode_a,
        "DECODE_B": decode_b,
    }


def _result_constants(
    out_dtype: str, out_layout: str | None, epilogue: EpilogueCode | None
) -> dict[str, Any]:
    out = FORMATS.get(out_dtype)
    pair = "none"
    if epilogue is not None and epilogue.pair:
        pair = "halves" if epilogue.halves else "interleaved"
    return {
        "PAIR": pair,
        "OUTPUT": out_dtype if out is None else "codes",
        "ELEMENT": "e2m1" if out is None else out.element,
        "SCALE": "e8m0" if out is None else out.scale,
        "LAYOUT": out_layout or "linear",
        "ROUNDING": "rceil",
        "UNIT": True,
    }


def _smallest_row(out_dtype: str) -> int:
    """Threads that lie beside each other: a warp, where blocks of elements find their scale."""
    return 32 if out_dtype in FORMATS else 1


def _result_extent(
    rows: int, columns: int, out_dtype: str, out_layout: str | None, epilogue: EpilogueCode | None
) -> tuple[int, int]:
    """Rows and columns that threads visit: with the padding of a quantised result's scales."""
    if epilogue is not None and epilogue.pair:
        columns //= 2
    if out_layout != "tcgen":
        return rows, columns
    tile = FORMATS[out_dtype].block * TILE_BLOCKS
    return ceil_div(rows, TILE_ROWS) * TILE_ROWS, ceil_div(columns, tile) * tile


def _operand_names(a_format: str | None) -> tuple[str, ...]:
    a = "a" if a_format is None else "a_codes"
    return (a, "a_scales", "a_decode", "b_codes", "b_scales", "b_decode")


def _row_units(a_format: str | None, depth: int, stride: int | None) -> int:
    """From row to row of A: in elements of a plain array, in bytes of codes."""
    if a_format is None:
        return depth if stride is None else stride
    return depth if a_format == "e4m3" else depth // FORMATS[a_format].codes_per_byte


def _alpha_arguments(alpha: str) -> tuple[str | float, ...]:
    # What is not used must still be a pointer, or a number.
    return ("b_decode", "alpha") if alpha == "value" else ("alpha", 1.0)


def _result_names(out_dtype: str) -> tuple[str, ...]:
    if out_dtype in FORMATS:
        return ("out_codes", "out_scales", "out_decode")
    return ("out", "out", "b_decode")


# Epilogues ----------------------------------------------------------------------------------------


def _dtypes(epilogue: EpilogueCode | None) -> tuple[str, ...]:
    """The dtypes of an epilogue's arrays, if kernels can take them."""
    if epilogue is None:
        return ()
    if len(epilogue.dtypes) > EPILOGUE_ARRAYS:
        raise UnsupportedError(
            f"epilogue must have at most {EPILOGUE_ARRAYS} arrays in a kernel; "
            f"got {len(epilogue.dtypes)}: put some of them together"
        )
    for dtype in epilogue.dtypes:
        if dtype not in EPILOGUE_TYPES:
            raise UnsupportedError(
                f"epilogue arrays must be of {', '.join(EPILOGUE_TYPES)} in a kernel; got {dtype}: "
                "pass it as float32"
            )
    return epilogue.dtypes


def _epilogue_names(epilogue: EpilogueCode | None) -> tuple[str, ...]:
    names = [f"epilogue_{i}" for i in range(len(_dtypes(epilogue)))]
    return (*names, *["b_codes"] * (EPILOGUE_ARRAYS - len(names)))


def _with_epilogue(program: Program, epilogue: EpilogueCode | None) -> Program:
    if epilogue is None:
        return program
    name = "pair_epilogue" if epilogue.pair else "epilogue"
    return Program(program.kernel, program.constants, ((name, _function(epilogue)),))


@functools.lru_cache(maxsize=256)
def _function(epilogue: EpilogueCode) -> FunctionType:
    """What a kernel calls: the same object for equal epilogues, so that programs are equal."""
    made: FunctionType = epilogue_function(epilogue.fn, len(epilogue.dtypes), epilogue.pair)
    return made
