"""Stacks of expert matrices of which only the first rows count, quantised to nvfp4."""

from __future__ import annotations

from typing import Any

from ... import arrays
from ...api import quantize, swiglu_quantize
from ...tensor import QTensor
from ._arguments import as_float8, float32_of, is_number, permuted

__all__ = ["scaled_fp4_grouped_quantize", "silu_and_mul_scaled_nvfp4_experts_quantize"]

_FLOATS = ("bfloat16", "float16", "float32")


def scaled_fp4_grouped_quantize(a: Any, mask: Any, a_global_sf: Any) -> tuple[Any, Any]:
    """Quantise the first ``mask[b]`` rows of each matrix of a stack.

    Parameters
    ----------
    a : array of bfloat16, float16 or float32, [B, M, K]
        K a multiple of 16.
    mask : array of int32, [B]
        Rows that count, from 0 to M.
    a_global_sf : array of float32, [B]
        The encode scale of each matrix; with one element, of all.

    Returns
    -------
    codes : array of uint8, [M, K/2, B]
        A view of contiguous [B, M, K/2].
    scales : array of float8_e4m3fn (uint8 for CuPy), [32, 4, ceil(M/128), 4, ceil(K/64), B]
        A view of contiguous [B, ceil(M/128), ceil(K/64), 32, 4, 4]. Both are 0 for the rows that do
        not count (FlashInfer leaves them unwritten).

    Raises
    ------
    ValueError
        Another dtype or shape; a mask out of range, where the host can read it.
    """
    encode = _encode_scale(a, mask, a_global_sf, 16)
    q = quantize(a, "nvfp4", row_counts=mask, encode_scale=encode)
    return _logical(q)


def silu_and_mul_scaled_nvfp4_experts_quantize(
    a: Any, mask: Any, a_global_sf: Any
) -> tuple[Any, Any]:
    """Quantise ``silu(a[..., :K]) * a[..., K:]``, the first ``mask[b]`` rows of each matrix.

    The product is rounded to the dtype of `a` before it is quantised, as
    :func:`nvfp4.swiglu_quantize` defines it.

    Parameters
    ----------
    a : array of bfloat16, float16 or float32, [B, M, 2K]
        K a multiple of 16.
    mask, a_global_sf
        As in :func:`scaled_fp4_grouped_quantize`.

    Returns
    -------
    codes, scales
        As of :func:`scaled_fp4_grouped_quantize`.

    Raises
    ------
    ValueError
        As in :func:`scaled_fp4_grouped_quantize`.
    """
    encode = _encode_scale(a, mask, a_global_sf, 32)
    q = swiglu_quantize(a, "nvfp4", row_counts=mask, encode_scale=encode)
    return _logical(q)


def _encode_scale(a: Any, mask: Any, a_global_sf: Any, multiple: int) -> Any:
    """Check the arguments; the encode scale as the public functions take it."""
    array = arrays.as_array(a, "a")
    if array.dtype not in _FLOATS:
        raise ValueError(f"a must be of dtype {', '.join(_FLOATS)}, but got {array.dtype}")
    if len(array.shape) != 3:
        raise ValueError(f"a must have shape (B, M, K), but got {array.shape}")
    if array.shape[2] % multiple:
        raise ValueError(f"a.shape[2] must be a multiple of {multiple}, but got {array.shape[2]}")
    counts = arrays.as_array(mask, "mask")
    if counts.dtype != "int32":
        raise ValueError(f"mask must be a int32 tensor, but got {counts.dtype}")
    encode = float32_of(a_global_sf, "a_global_sf")
    if not is_number(encode):
        given = arrays.as_array(encode, "a_global_sf")
        if given.size == 1 and array.shape[0] != 1:
            encode = encode.reshape(())
        elif given.size == array.shape[0]:
            encode = encode.reshape((array.shape[0],))
        else:
            raise ValueError(
                f"a_global_sf must have shape ({array.shape[0]},), but got {given.shape}"
            )
    return encode


def _logical(q: QTensor) -> tuple[Any, Any]:
    """The shapes that FlashInfer's masked products take."""
    scales = as_float8(q.scales, "float8_e4m3fn")
    return permuted(q.codes, (1, 2, 0)), permuted(scales, (3, 4, 1, 5, 2, 0))
