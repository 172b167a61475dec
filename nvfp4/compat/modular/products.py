"""The seed's products of block-scaled matrices with scales in the 5-D layout."""

from __future__ import annotations

from typing import Any

from ... import api
from ..._parts import check_dtype
from ...api._flashinfer import repeated
from ...api._reference import reference_matmul
from ...arrays import dtype_name
from ...epilogue import Epilogue
from ...formats import BlockFormat
from ._options import check_fixed, element_function, in_words_of
from ._tensors import as_array, check_shape, one, operand, operand_format, vector_size

__all__ = [
    "block_scaled_matmul",
    "block_scaled_matmul_with_epilogue",
    "naive_block_scaled_matmul",
]

_RESULTS = ("bfloat16", "float32", "float16")
_KINDS = {"KIND_MXF4NVF4": "nvfp4", "KIND_MXF4": "mxfp4", "KIND_MXF8F6F4": "mxfp8_e4m3"}


def block_scaled_matmul(
    c_device: Any,
    a_device: Any,
    b_device: Any,
    a_scales_device: Any,
    b_scales_device: Any,
    tensor_sf: Any,
    ctx: Any = None,
    *,
    SF_VECTOR_SIZE: int | None = None,
    transpose_b: bool = True,
    transpose_a: bool = False,
    elementwise_lambda_fn: Any = None,
    elementwise_compute_lambda_fn: Any = None,
    pdl_level: Any = None,
    target: str = "gpu",
    a_format: str | BlockFormat | None = None,
    b_format: str | BlockFormat | None = None,
) -> Any:
    """Write cast(epilogue(tensor_sf * a @ b.T)): :func:`nvfp4.matmul` into the caller's array.

    Parameters
    ----------
    c_device : array of bfloat16 or float32 (also float16), [M, N]
        Written.
    a_device : array of uint8, [M, K/2], or of float8_e4m3fn or float8_e5m2, [M, K]
    b_device : array, [N, K/2] or [N, K]
        Of the dtypes of `a_device`; the two may differ.
    a_scales_device, b_scales_device : array, [ceil(rows/128), ceil(K/(4V)), 32, 4, 4]
        Of float8_e4m3fn (V = 16: nvfp4) or float8_e8m0fnu (V = 32: mxfp4, mxfp8), or of uint8
        together with `SF_VECTOR_SIZE`.
    tensor_sf : number, or array of float32 of shape ()
        Multiplies the sums.
    ctx : optional
        A stream: None (the current one of the library of `a_device`), an int, or an object with
        ``__cuda_stream__``.
    SF_VECTOR_SIZE : {16, 32}, optional
        V of both operands; needed with scales of uint8.
    transpose_b, transpose_a : bool
        True and False: b is [N, K], a is [M, K].
    elementwise_lambda_fn, elementwise_compute_lambda_fn : optional
        One of them: an `nvfp4.Epilogue`, a function ``fn(coords, value)`` with coords (row, column)
        as the seed has it, or ``fn(value, row, column, expert)``. It is compiled into the kernel,
        gets the float32 value, and **returns** what is stored.
    pdl_level, target
        Not used.
    a_format, b_format : optional
        Name of the format, where uint8 holds mxfp8 in a library without float8.

    Returns
    -------
    array
        `c_device`.

    Raises
    ------
    TypeError
        A dtype that is none of these; an epilogue that is no function.
    ValueError
        Shapes that do not fit, any axis of the scales among them; two epilogues.
    """
    if elementwise_lambda_fn is not None and elementwise_compute_lambda_fn is not None:
        raise ValueError(
            "elementwise_lambda_fn and elementwise_compute_lambda_fn must not both be given"
        )
    check_fixed("transpose_a", transpose_a, False, "a is [M, K], and stays as it is")
    lambda_name, function = "elementwise_lambda_fn", elementwise_lambda_fn
    if function is None:
        lambda_name, function = "elementwise_compute_lambda_fn", elementwise_compute_lambda_fn
    return _product(
        _names("_device"),
        (c_device, a_device, b_device, a_scales_device, b_scales_device),
        tensor_sf,
        ctx,
        SF_VECTOR_SIZE,
        transpose_b,
        element_function(lambda_name, function),
        (a_format, b_format),
    )


def block_scaled_matmul_with_epilogue(
    c: Any,
    a: Any,
    b: Any,
    a_scales: Any,
    b_scales: Any,
    tensor_sf: Any,
    ctx: Any = None,
    *,
    SF_VECTOR_SIZE: int | None = None,
    transpose_b: bool = True,
    elementwise_lambda_fn: Any = None,
    a_format: str | BlockFormat | None = None,
    b_format: str | BlockFormat | None = None,
) -> Any:
    """Write cast(epilogue(tensor_sf * a @ b.T)), the epilogue **inside** the product's kernel.

    The seed writes the product, and runs the epilogue in a second kernel that reads it back,
    already rounded to the dtype of `c`.

    Parameters
    ----------
    c, a, b, a_scales, b_scales, tensor_sf, ctx, SF_VECTOR_SIZE, transpose_b, elementwise_lambda_fn
        As in :func:`block_scaled_matmul`.
    a_format, b_format
        As there.

    Returns
    -------
    array
        `c`.

    Raises
    ------
    TypeError, ValueError
        As :func:`block_scaled_matmul`.
    """
    return _product(
        _names(""),
        (c, a, b, a_scales, b_scales),
        tensor_sf,
        ctx,
        SF_VECTOR_SIZE,
        transpose_b,
        element_function("elementwise_lambda_fn", elementwise_lambda_fn),
        (a_format, b_format),
    )


def naive_block_scaled_matmul(
    c: Any,
    a: Any,
    b: Any,
    a_scales: Any,
    b_scales: Any,
    ctx: Any = None,
    alpha: Any = 1.0,
    *,
    scaling_kind: str,
    SF_VECTOR_SIZE: int | None = None,
    accum_type: Any = "float32",
    transpose_b: bool = True,
    elementwise_lambda_fn: Any = None,
    BLOCK_DIM: int = 16,
) -> Any:
    """Write cast(epilogue(alpha * a @ b.T)) by the reference kernel: k ascending, at any size.

    Every operation rounds once, so that the result is the golden model's bit for bit.

    Parameters
    ----------
    c, a, b, a_scales, b_scales, ctx, SF_VECTOR_SIZE, transpose_b, elementwise_lambda_fn
        As in :func:`block_scaled_matmul`.
    alpha : number, or array of float32 of shape ()
    scaling_kind : {"KIND_MXF4NVF4", "KIND_MXF4", "KIND_MXF8F6F4"}
        nvfp4, mxfp4, mxfp8, for both operands; ``"UMMAKind."`` may stand in front.
    accum_type : {"float32"}
    BLOCK_DIM : int
        Checked, 1 to 32; it changes nothing here.

    Returns
    -------
    array
        `c`.

    Raises
    ------
    TypeError, ValueError
        As :func:`block_scaled_matmul`; another `scaling_kind`, or one that is not that of the
        arrays.
    """
    kind = str(scaling_kind).removeprefix("UMMAKind.")
    if kind not in _KINDS:
        raise ValueError(
            f"scaling_kind must be one of {', '.join(map(repr, _KINDS))}; got {scaling_kind!r}"
        )
    if dtype_name(accum_type, "accum_type") != "float32":
        raise ValueError(f"accum_type must be float32; got {accum_type!r}")
    if not isinstance(BLOCK_DIM, int) or not 1 <= BLOCK_DIM <= 32:
        raise ValueError(f"BLOCK_DIM must be an int from 1 to 32; got {BLOCK_DIM!r}")
    size = 16 if kind == "KIND_MXF4NVF4" else 32
    if SF_VECTOR_SIZE not in (None, size):
        raise ValueError(f"SF_VECTOR_SIZE must be {size} for {kind}; got {SF_VECTOR_SIZE}")
    return _product(
        _names(""),
        (c, a, b, a_scales, b_scales),
        alpha,
        ctx,
        size,
        transpose_b,
        element_function("elementwise_lambda_fn", elementwise_lambda_fn),
        (_KINDS[kind], _KINDS[kind]),
        reference=True,
    )


_Five = tuple[Any, Any, Any, Any, Any]


def _names(suffix: str) -> _Five:
    c, a, b, a_scales, b_scales = (
        name + suffix for name in ("c", "a", "b", "a_scales", "b_scales")
    )
    return c, a, b, a_scales, b_scales


def _product(
    names: _Five,
    values: _Five,
    alpha: Any,
    ctx: Any,
    given_size: int | None,
    transpose_b: bool,
    epilogue: Epilogue | None,
    formats: tuple[Any, Any],
    *,
    reference: bool = False,
) -> Any:
    check_fixed("transpose_b", transpose_b, True, "b is [N, K]")
    alpha_name = "alpha" if reference else "tensor_sf"

    like = as_array(names[1], values[1], "M columns", ctx)
    scalar = one(like, ctx)
    more = alpha, alpha_name, ctx, given_size, epilogue, formats, reference, scalar

    def make() -> Any:
        return _multiplied(names, values, *more)

    if like.device is None:
        return make()
    c, a, b, a_scales, b_scales = values
    arguments = (a, b, a_scales, b_scales, alpha, epilogue, scalar, c)
    call = ("modular.product", (given_size, formats, reference), arguments)
    return repeated(call, ("matmul",), make, stream=ctx)


def _multiplied(
    names: _Five,
    values: _Five,
    alpha: Any,
    alpha_name: str,
    ctx: Any,
    given_size: int | None,
    epilogue: Epilogue | None,
    formats: tuple[Any, Any],
    reference: bool,
    scalar: Any,
) -> Any:
    c = values[0]
    operands = []
    for side in (1, 2):
        codes = as_array(names[side], values[side], f"{'MN'[side - 1]} columns", ctx)
        scales_name, scales = names[side + 2], values[side + 2]
        view = as_array(scales_name, scales, "tiles k_tiles 32 4 4", ctx)
        size = vector_size(scales_name, view.spec, given_size)
        fmt = operand_format(names[side], codes.spec, size, formats[side - 1])
        given = (names[side], scales_name), values[side], scales
        operands.append(operand(*given, fmt, "tcgen", scalar))
    a, b = operands
    result = as_array(names[0], c, "M N", ctx)
    check_dtype(names[0], result.spec, _RESULTS)
    columns = b.shape[0] if epilogue is None else epilogue.columns(b.shape[0])
    check_shape(names[0], result.spec, (a.shape[0], columns))
    product = reference_matmul if reference else api.matmul
    words = {"a": names[1], "b": names[2], "out": names[0], "alpha": alpha_name}
    with in_words_of(words):
        return product(
            a, b, alpha=alpha, out=c, out_dtype=result.dtype, epilogue=epilogue, stream=ctx
        )
