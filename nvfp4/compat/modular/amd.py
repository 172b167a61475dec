"""The seed's functions for AMD's CDNA4, with that chip's formats, on the cards of this package.

Scales lie in rows, [M, K/32]; those of mxfp4 are rounded by "even", those of mxfp8 up. The bytes
are those of the arithmetic definition: docs/modular.md has the blocks where the seed's differ.
"""

from __future__ import annotations

import math
from typing import Any

from ... import api, arrays
from ..._parts import check_dtype
from ...api._flashinfer import repeated
from ...arrays import Array
from ...formats import MXFP4
from ...tensor import QTensor
from ._options import also_named, check_threads, in_words_of
from ._tensors import (
    as_array,
    check_shape,
    one,
    operand,
    output_format,
    target,
    vector_size,
)

__all__ = [
    "grouped_matmul_block_scaled_amd",
    "matmul_dynamic_block_scaled_amd",
    "quantize_dynamic_block_scaled_mxfp4",
    "quantize_mx_amd",
]

_RESULTS = ("bfloat16", "float32", "float16")


@also_named(output="output_tile", scales="scales_tile", input="input_tile")
def quantize_mx_amd(
    ctx: Any,
    output_tile: Any,
    scales_tile: Any,
    input_tile: Any,
    *,
    num_max_threads: int = 512,
) -> QTensor:
    """Quantise rows to mxfp4 or mxfp8 with scales in rows: :func:`nvfp4.quantize`.

    Parameters
    ----------
    ctx : optional
        A stream: None (the current one of the input's library), an int, or an object with
        ``__cuda_stream__``.
    output_tile : array of uint8, [M, K/2], or of float8_e4m3fn (mxfp8; also uint8), [M, K]
        Written.
    scales_tile : array of float8_e8m0fnu or uint8, [M, K/32]
        Written.
    input_tile : array of bfloat16 (also float16 or float32), [M, K]
        K a multiple of 32.
    num_max_threads : int
        Checked; it changes nothing here.

    Returns
    -------
    QTensor
        Over `output_tile` and `scales_tile`, scale_layout "linear".

    Raises
    ------
    TypeError
        A dtype that is none of these.
    ValueError
        Shapes that do not fit, K that is no multiple of 32 among them.
    """
    check_threads("num_max_threads", num_max_threads)
    output = as_array("output_tile", output_tile, "M columns", ctx)
    source = as_array("input_tile", input_tile, "M K", ctx)
    scales = as_array("scales_tile", scales_tile, "M K/32", ctx)
    vector_size("scales_tile", scales.spec, 32)
    rows, columns = source.shape
    fmt = output_format("output_tile", output.spec, "input_tile", columns, 32)
    check_shape("output_tile", output.spec, (rows, columns // fmt.codes_per_byte))
    names = "output_tile", "scales_tile"
    out = target(
        names,
        output,
        scales,
        fmt,
        rows=rows,
        columns=columns,
        scale_layout="linear",
        ctx=ctx,
    )
    with in_words_of({"x": "input_tile", "out.codes": names[0], "out.scales": names[1]}):
        return api.quantize(
            input_tile,
            fmt,
            scale_rounding="even" if fmt is MXFP4 else "rceil",
            scale_layout="linear",
            out=out,
            stream=ctx,
        )


#: Columns of the matrix that a flat buffer is quantised as, at most.
_ROW = 8192


def quantize_dynamic_block_scaled_mxfp4(
    output: Any, output_scales: Any, input: Any, ctx: Any = None
) -> QTensor:
    """Quantise a buffer to mxfp4, 32 elements after the other, scales rounded by "even".

    Parameters
    ----------
    output : array of uint8 with half as many elements as `input`
        Of any shape, contiguous. Written.
    output_scales : array of float8_e8m0fnu or uint8 with an element for each 32 of `input`
        Of any shape, contiguous. Written.
    input : array of bfloat16 (also float16 or float32), [..., K]
        Contiguous; K a multiple of 32, so that no block goes over the end of a row.
    ctx : optional
        A stream, as in :func:`quantize_mx_amd`.

    Returns
    -------
    QTensor
        Over `output` and `output_scales`, of the input as rows of a matrix; scale_layout "linear".

    Raises
    ------
    TypeError
        A dtype that is none of these.
    ValueError
        Another number of elements, or a K that is no multiple of 32; arrays that are not
        contiguous.
    """
    views = {
        name: arrays.as_array(value, name, stream=ctx)
        for name, value in (
            ("input", input),
            ("output", output),
            ("output_scales", output_scales),
        )
    }
    source = views["input"]
    if not source.shape or source.shape[-1] % 32:
        raise ValueError(
            "input must have a multiple of 32 elements in its last axis, so that no block goes "
            f"over the end of a row; got shape {source.shape}: input.reshape(-1) is one row"
        )
    check_dtype("output", views["output"].spec, ("uint8",))
    vector_size("output_scales", views["output_scales"].spec, 32)
    count = source.size
    for name, size in (("output", count // 2), ("output_scales", count // 32)):
        if views[name].size != size:
            raise ValueError(
                f"{name} must have {size} elements for {count} of input; got shape "
                f"{views[name].shape}"
            )
    for name, view in views.items():
        if not view.spec.contiguous:
            raise ValueError(f"{name} must be contiguous; got strides {view.strides} bytes")
    columns = math.gcd(count, _ROW)
    rows = count // columns if columns else 0
    matrix = _as_matrix(input, rows, columns)
    out = target(
        ("output", "output_scales"),
        arrays.as_array(_as_matrix(output, rows, columns // 2), "output", stream=ctx),
        arrays.as_array(
            _as_matrix(output_scales, rows, columns // 32), "output_scales", stream=ctx
        ),
        MXFP4,
        rows=rows,
        columns=columns,
        scale_layout="linear",
        ctx=ctx,
    )
    with in_words_of({"x": "input", "out.codes": "output", "out.scales": "output_scales"}):
        return api.quantize(
            matrix, MXFP4, scale_rounding="even", scale_layout="linear", out=out, stream=ctx
        )


def _as_matrix(value: Any, rows: int, columns: int) -> Any:
    """A contiguous array as a matrix over the same memory."""
    return value.reshape((rows, columns))


def matmul_dynamic_block_scaled_amd(
    c: Any, a: Any, b: Any, a_scales: Any, b_scales: Any, ctx: Any = None
) -> Any:
    """Write cast(a @ b.T) of mxfp4 matrices with scales in rows: :func:`nvfp4.matmul`.

    Parameters
    ----------
    c : array of bfloat16, float32 or float16, [M, N]
        Written.
    a, b : array of uint8, [M, K/2] and [N, K/2]
    a_scales, b_scales : array of float8_e8m0fnu or uint8, [M, K/32] and [N, K/32]
    ctx : optional
        A stream, as in :func:`quantize_mx_amd`.

    Returns
    -------
    array
        `c`.

    Raises
    ------
    TypeError
        A dtype that is none of these.
    ValueError
        Shapes that do not fit, K that is no multiple of 32 among them.
    """
    like = as_array("a", a, "M K/2", ctx)
    scalar = one(like, ctx)

    def make() -> Any:
        left = _operand("a", a, a_scales, "M", ctx, scalar)
        right = _operand("b", b, b_scales, "N", ctx, scalar)
        result = _result(c, ctx, (left.shape[0], right.shape[0]))
        with in_words_of({"out": "c"}):
            return api.matmul(left, right, out=c, out_dtype=result.dtype, stream=ctx)

    if like.device is None:
        return make()
    arguments = (a, b, a_scales, b_scales, scalar, c)
    return repeated(("modular.amd", (), arguments), ("matmul",), make, stream=ctx)


def grouped_matmul_block_scaled_amd(
    c: Any,
    a: Any,
    b: Any,
    a_scales: Any,
    b_scales: Any,
    row_offsets: Any,
    expert_ids: Any,
    num_active_experts: int,
    ctx: Any = None,
) -> Any:
    """The product of each range of rows with the matrix of its expert; mxfp4, scales in rows.

    Parameters
    ----------
    c : array of bfloat16, float32 or float16, [M, N]
        Written, every row: 0 where no range covers it, and in ranges that are switched off.
    a : array of uint8, [M, K/2]
    b : array of uint8, [E, N, K/2]
    a_scales : array of float8_e8m0fnu or uint8, [M, K/32]
    b_scales : array of float8_e8m0fnu or uint8, [E, N, K/32]
    row_offsets : array of uint32 (also int32 or int64), [num_active_experts + 1] or longer
    expert_ids : array of int32 (also int64), [num_active_experts] or longer
        Negative: the range is switched off.
    num_active_experts : int
        Ranges that count; what lies behind them in the two arrays is not looked at.
    ctx : optional
        A stream, as in :func:`quantize_mx_amd`.

    Returns
    -------
    array
        `c`.

    Raises
    ------
    TypeError
        A dtype that is none of these.
    ValueError
        Shapes that do not fit; what :func:`nvfp4.grouped_matmul` says of offsets and ids.
    """
    if not isinstance(num_active_experts, int) or isinstance(num_active_experts, bool):
        raise TypeError(f"num_active_experts must be an int; got {num_active_experts!r}")
    offsets = _first("row_offsets", row_offsets, num_active_experts, 1, ctx)
    ids = _first("expert_ids", expert_ids, num_active_experts, 0, ctx)

    like = as_array("a", a, "M K/2", ctx)
    scalar = one(like, ctx)

    def make() -> Any:
        left = _operand("a", a, a_scales, "M", ctx, scalar)
        right = _operand("b", b, b_scales, "E N", ctx, scalar)
        result = _result(c, ctx, (left.shape[0], right.shape[1]))
        with in_words_of({"out": "c"}):
            return api.grouped_matmul(
                left,
                right,
                row_offsets=offsets,
                expert_ids=ids,
                out=c,
                out_dtype=result.dtype,
                stream=ctx,
            )

    if like.device is None:
        return make()
    arguments = (a, b, a_scales, b_scales, offsets, ids, scalar, c)
    return repeated(("modular.grouped_amd", (), arguments), ("grouped_matmul",), make, stream=ctx)


def _operand(name: str, codes: Any, scales: Any, rows: str, ctx: Any, scalar: Any) -> QTensor:
    view = as_array(name, codes, f"{rows} K/2", ctx)
    check_dtype(name, view.spec, ("uint8",))
    scales_name = f"{name}_scales"
    vector_size(scales_name, as_array(scales_name, scales, f"{rows} K/32", ctx).spec, 32)
    return operand((name, scales_name), codes, scales, MXFP4, "linear", scalar)


def _result(c: Any, ctx: Any, shape: tuple[int, int]) -> Array:
    result = as_array("c", c, "M N", ctx)
    check_dtype("c", result.spec, _RESULTS)
    check_shape("c", result.spec, shape)
    return result


def _first(name: str, value: Any, active: int, more: int, ctx: Any) -> Any:
    """The elements of an index array that count."""
    view = as_array(name, value, "length", ctx)
    if not 0 <= active <= view.shape[0] - more:
        raise ValueError(
            f"num_active_experts must be from 0 to {view.shape[0] - more}, since {name} has "
            f"{view.shape[0]} elements; got {active}"
        )
    return value if view.shape[0] == active + more else value[: active + more]
