"""fp4_quantize and its named cases, mxfp8_quantize."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

import numpy as np

from ... import arrays
from ...api import quantize
from ...arrays import Array
from ...errors import UnsupportedError
from ...formats import FORMATS
from ._arguments import as_float8, check_backend, check_bool, float32_of, is_number, viewed
from ._layouts import SfLayout, from_linear, layout_of, scale_extent

__all__ = ["fp4_quantize", "mxfp4_quantize", "mxfp8_quantize", "nvfp4_quantize"]

_FLOATS = ("bfloat16", "float16", "float32")
#: What a_global_sf is with per_token_activation: 1 / (448 * 6).
_BASE = 1.0 / 2688.0


def fp4_quantize(
    input: Any,
    global_scale: Any = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    is_global_scale_inversed: bool = False,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
) -> tuple[Any, Any]:
    """Quantise to nvfp4 (blocks of 16, e4m3 scales) or mxfp4 (blocks of 32, e8m0 scales).

    Parameters
    ----------
    input : array of bfloat16, float16, float32 or float8_e4m3fn, [..., K]
        K a multiple of `sf_vec_size`. One whose last but one axis is contiguous is quantised along
        that axis, and the results are transposed views. float8 is widened exactly.
    global_scale : array of float32 with one element or [M], or a number, optional
        The encode scale of nvfp4, by default 1; [M]: one by row. Without effect for mxfp4. Other
        float dtypes are converted.
    sf_vec_size, sf_use_ue8m0 : (16, False) or (32, True)
    is_sf_swizzled_layout, is_sf_8x4_layout : bool
        Scales in tiles of 128 x 4, of 8 x 4, or linear.
    is_global_scale_inversed : bool
        `global_scale` is 1 / g.
    enable_pdl, backend
        Checked, without effect.

    Returns
    -------
    x_q : array of uint8, [..., K/2]
    sf : array of uint8, two axes
        M rows up to the multiple of the tile's and K / sf_vec_size columns up to the multiple of 4,
        in the order of memory of the tiles; or [M, K / sf_vec_size], linear. Padding is 0.

    Raises
    ------
    ValueError
        Another dtype, shape, K or backend; a global scale that is not finite or below 2^-126, where
        the host can read it.
    UnsupportedError
        `sf_vec_size` is another one, or the kind of scales belongs to the other one.
    """
    if sf_vec_size not in (16, 32):
        raise UnsupportedError(f"sf_vec_size can only be 16 or 32, but got {sf_vec_size!r}")
    check_bool("sf_use_ue8m0", sf_use_ue8m0)
    if sf_use_ue8m0 != (sf_vec_size == 32):
        raise UnsupportedError(
            "e4m3 scales belong to sf_vec_size 16 (nvfp4), e8m0 scales (sf_use_ue8m0) to "
            f"sf_vec_size 32 (mxfp4); got sf_vec_size {sf_vec_size} with sf_use_ue8m0 "
            f"{sf_use_ue8m0}"
        )
    check_bool("is_sf_swizzled_layout", is_sf_swizzled_layout)
    check_bool("is_sf_8x4_layout", is_sf_8x4_layout)
    check_bool("is_global_scale_inversed", is_global_scale_inversed)
    check_backend(backend, enable_pdl)
    layout = SfLayout.layout_linear
    if is_sf_swizzled_layout:
        layout = SfLayout.layout_8x4 if is_sf_8x4_layout else SfLayout.layout_128x4
    format = "mxfp4" if sf_use_ue8m0 else "nvfp4"
    encode = None
    if global_scale is not None and format == "nvfp4":
        encode = float32_of(global_scale, "global_scale")
        if is_global_scale_inversed:
            encode = _inverse(encode)
    return _quantized("input", input, format, encode, layout)


def _inverse(scale: Any) -> Any:
    """1 / scale; of 0 infinite, which is refused as any other scale that is not finite."""
    if is_number(scale) and scale == 0:
        return math.inf
    with np.errstate(divide="ignore", over="ignore"):
        return 1.0 / scale


def nvfp4_quantize(
    a: Any,
    a_global_sf: Any,
    sfLayout: Any = SfLayout.layout_128x4,
    do_shuffle: bool = False,
    sf_vec_size: int = 16,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    *,
    per_token_activation: bool = False,
    expanded_idx_to_permuted_idx: Any = None,
) -> tuple[Any, ...]:
    """Quantise to nvfp4.

    Parameters
    ----------
    a, a_global_sf, enable_pdl, backend
        As `input`, `global_scale`... of :func:`fp4_quantize`.
    sfLayout : SfLayout
    do_shuffle : False
        The order of rows of one backend of FlashInfer is not made here.
    sf_vec_size : 16
    per_token_activation : bool
        An encode scale for each row, 2688 / max |row|; `a_global_sf` is then 1 / 2688, a number or
        an array on the host.
    expanded_idx_to_permuted_idx : None

    Returns
    -------
    x_q : array of uint8, [..., K/2]
    sf : array of uint8, two axes
        As of :func:`fp4_quantize`.
    per_token_scale : array of float32, [M]
        With `per_token_activation`: 1 / (the row's encode scale).

    Raises
    ------
    ValueError, UnsupportedError
        As in :func:`fp4_quantize`; `do_shuffle`, `expanded_idx_to_permuted_idx` and another base
        scale by token are not supported.
    """
    layout = layout_of("sfLayout", sfLayout)
    check_bool("do_shuffle", do_shuffle)
    check_bool("per_token_activation", per_token_activation)
    check_backend(backend, enable_pdl)
    if do_shuffle:
        raise UnsupportedError(
            "do_shuffle=True orders the rows of weights for FlashInfer's trtllm backend; products "
            "here take them in their own order: leave it False"
        )
    if sf_vec_size != 16:
        raise ValueError(f"nvfp4_quantize only supports sf_vec_size=16, got {sf_vec_size!r}")
    if not per_token_activation:
        if expanded_idx_to_permuted_idx is not None:
            raise ValueError(
                "expanded_idx_to_permuted_idx is only supported with per_token_activation=True"
            )
        return _quantized("a", a, "nvfp4", float32_of(a_global_sf, "a_global_sf"), layout)
    if expanded_idx_to_permuted_idx is not None:
        raise UnsupportedError(
            "expanded_idx_to_permuted_idx is not supported; nvfp4.grouped_quantize(..., "
            "row_indices=) gathers rows"
        )
    _check_base(a_global_sf)
    return _quantized("a", a, "nvfp4", "row_amax", layout)


def mxfp4_quantize(
    a: Any,
    backend: str = "cuda",
    enable_pdl: bool | None = None,
    sfLayout: Any = SfLayout.layout_128x4,
) -> tuple[Any, Any]:
    """Quantise to mxfp4, scales rounded up ("rceil").

    Parameters
    ----------
    a : array of bfloat16, float16, float32 or float8_e4m3fn, [..., K]
        K a multiple of 32.
    backend, enable_pdl
        Checked, without effect.
    sfLayout : SfLayout

    Returns
    -------
    x_q : array of uint8, [..., K/2]
    sf : array of uint8, two axes
        As of :func:`fp4_quantize`.

    Raises
    ------
    ValueError
        Another dtype, shape, K, layout or backend.
    """
    check_backend(backend, enable_pdl)
    layout = layout_of("sfLayout", sfLayout)
    return _quantized("a", a, "mxfp4", None, layout)


def mxfp8_quantize(
    input: Any,
    is_sf_swizzled_layout: bool = True,
    alignment: int = 32,
    enable_pdl: bool | None = None,
    backend: str = "cuda",
    sf_swizzle_layout: Any = None,
) -> tuple[Any, Any]:
    """Quantise to mxfp8 of e4m3, scales rounded up ("rceil").

    Parameters
    ----------
    input : array of bfloat16, float16, float32 or float8_e4m3fn, [..., K]
        Row-major, K a multiple of 32. float8 is widened exactly.
    is_sf_swizzled_layout : bool
        Scales in tiles of 128 x 4, or linear.
    alignment : int
        A multiple of 32: the result has columns of zeros up to a multiple of it. If that is not K,
        the input is copied.
    enable_pdl, backend
        Checked, without effect.
    sf_swizzle_layout : SfLayout, optional
        Instead of `is_sf_swizzled_layout`.

    Returns
    -------
    x_q : array of float8_e4m3fn, [..., K up to a multiple of `alignment`]
        uint8 for CuPy.
    sf : array of uint8, flat

    Raises
    ------
    ValueError
        Another dtype, shape, K, alignment, layout or backend.
    """
    check_bool("is_sf_swizzled_layout", is_sf_swizzled_layout)
    check_backend(backend, enable_pdl)
    if sf_swizzle_layout is not None:
        layout = layout_of("sf_swizzle_layout", sf_swizzle_layout)
    else:
        layout = SfLayout.layout_128x4 if is_sf_swizzled_layout else SfLayout.layout_linear
    try:
        aligned = operator.index(alignment)
    except TypeError:
        raise ValueError(f"alignment must be an int, but got {alignment!r}") from None
    if aligned < 32 or aligned % 32:
        raise ValueError(f"alignment must be a positive multiple of 32, but got {alignment}")
    if _is_column_major(input):
        raise ValueError("input must be row-major, but got one whose last axis is not contiguous")
    source, array = _rows("input", input, 32)
    lead = arrays.as_array(input, "input").shape[:-1]
    columns = array.shape[1]
    padded = -(-columns // aligned) * aligned
    if padded != columns:
        # As integers, which every library can copy.
        words = f"int{8 * array.spec.itemsize}"
        wide = arrays.full((array.shape[0], padded), 0, words, array)
        wide[:, :columns] = viewed(source, words)
        source = viewed(wide, array.dtype)
    q = quantize(source, "mxfp8_e4m3", scale_layout=_kind(layout))
    codes = as_float8(q.codes.reshape((*lead, padded)), "float8_e4m3fn")
    return codes, from_linear(q, layout)


def _check_base(value: Any) -> None:
    """The base scale by token is 1 / (448 * 6)."""
    if not is_number(value):
        array = arrays.as_array(value, "a_global_sf")
        if array.device is not None:
            raise UnsupportedError(
                "a_global_sf must be a number or on the host with per_token_activation: nothing is "
                "read back from a GPU; pass 1 / (448 * 6)"
            )
        if array.size != 1:
            raise ValueError(f"a_global_sf must have one element, but got shape {array.shape}")
        value = float(arrays.host(array).reshape(-1)[0])
    if np.float32(value) != np.float32(_BASE):
        raise UnsupportedError(
            f"a_global_sf must be 1 / (448 * 6) with per_token_activation, but got {value!r}"
        )


def _kind(layout: SfLayout) -> str:
    return "tcgen" if layout is SfLayout.layout_128x4 else "linear"


def _is_column_major(value: Any) -> bool:
    """Whether the last but one axis has neighbouring elements, and the last has not."""
    spec = arrays.as_array(value, "input").spec
    if len(spec.shape) < 2 or spec.strides[-2] != spec.itemsize:
        return False
    # With one row or one column, strides say nothing; such an array is row-major too.
    return spec.strides[-1] != spec.itemsize and min(spec.shape[-2:]) > 1


def _rows(name: str, value: Any, block: int) -> tuple[Any, Array]:
    """The array as a matrix of floats [M, K], transposed first if it is column-major."""
    array = arrays.as_array(value, name)
    if array.dtype == "float8_e4m3fn":
        library = sys.modules["torch"] if array.library == "torch" else None
        value = (
            value.to(library.bfloat16) if library else value.astype(arrays.numpy_dtype("bfloat16"))
        )
        array = arrays.as_array(value, name)
    if array.dtype not in _FLOATS:
        raise ValueError(
            f"{name} must be of dtype {', '.join(_FLOATS)} or float8_e4m3fn, but got {array.dtype}"
        )
    if not array.shape:
        raise ValueError(f"{name} must have at least one axis, but got shape ()")
    if _is_column_major(value):
        value = value.swapaxes(-2, -1)
        array = arrays.as_array(value, name)
    columns = array.shape[-1]
    if columns % block:
        raise ValueError(f"{name}.shape[-1] must be a multiple of {block}, but got {columns}")
    if len(array.shape) != 2:
        rows = array.size // columns if columns else 0
        value = value.reshape((rows, columns))
        array = arrays.as_array(value, name)
    return value, array


def _quantized(
    name: str, value: Any, format: str, encode: Any, layout: SfLayout
) -> tuple[Any, ...]:
    """Codes and scales, and the decode scale by row for "row_amax"."""
    block = FORMATS[format].block
    source, array = _rows(name, value, block)
    by_row = isinstance(encode, str)
    if encode is not None and not by_row and not is_number(encode):
        encode = _encode_scale(encode, array.shape[0])
    q = quantize(source, format, encode_scale=encode, scale_layout=_kind(layout))
    transposed = _is_column_major(value)
    shape = arrays.as_array(value, name).shape
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    codes = q.codes.reshape((*shape[:-1], shape[-1] // 2))
    scales = from_linear(q, layout).reshape(
        scale_extent(layout, array.shape[0], array.shape[1] // block)
    )
    if transposed:
        codes, scales = codes.swapaxes(-2, -1), scales.swapaxes(-2, -1)
    return (codes, scales, q.decode_scale.reshape((-1,))) if by_row else (codes, scales)


def _encode_scale(value: Any, rows: int) -> Any:
    """A global scale of one element as (), one by row as [M, 1]."""
    array = arrays.as_array(value, "global_scale")
    if array.size == 1:
        return value.reshape(())
    if array.size == rows and array.shape in ((rows,), (rows, 1)):
        return value.reshape((rows, 1))
    raise ValueError(
        f"global_scale must have one element, or {rows}, one by row, but got shape {array.shape}"
    )
