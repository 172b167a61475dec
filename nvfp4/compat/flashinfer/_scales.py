"""Block scales into the swizzled layout, and values of codes and scales."""

from __future__ import annotations

from typing import Any

from ... import arrays
from ...api import _flashinfer as device
from ...api import interleave_scales
from ...errors import UnsupportedError
from ...layouts import TILE_ROWS
from ._arguments import (
    bytes_of,
    check_bool,
    check_member,
    contiguous,
    float32_of,
    is_number,
    read_codes,
)
from ._layouts import SfLayout, layout_of, to_tensor

__all__ = [
    "block_scale_interleave",
    "e2m1_and_ufp8sf_scale_to_float",
    "mxfp4_dequantize",
    "nvfp4_block_scale_interleave",
]

_FLOAT8_SCALES = ("float8_e4m3fn", "float8_e8m0fnu")


def block_scale_interleave(unswizzled_sf: Any) -> Any:
    """Block scales in the 128x4 layout, flat.

    Parameters
    ----------
    unswizzled_sf : array of uint8 or bfloat16, [M, C] or [E, M, C]
        Also of float8_e4m3fn or float8_e8m0fnu, taken as bytes. Contiguous.

    Returns
    -------
    array of the same dtype (uint8 for float8), [ceil(M/128) * 128 * ceil(C/4) * 4], times E
        Each matrix by itself; padding is 0.

    Raises
    ------
    ValueError
        Another dtype or number of axes.
    """
    array = arrays.as_array(unswizzled_sf, "unswizzled_sf")
    if array.dtype not in ("uint8", "bfloat16", *_FLOAT8_SCALES):
        raise ValueError(f"Input dtype must be uint8 or bfloat16, got {array.dtype}")
    if len(array.shape) not in (2, 3):
        raise ValueError(f"unswizzled_sf must have two or three axes, but got {array.shape}")
    contiguous("unswizzled_sf", array.spec)
    if array.dtype == "bfloat16":
        return device.swizzled("unswizzled_sf", array, TILE_ROWS).reshape((-1,))
    return interleave_scales(bytes_of(unswizzled_sf, array)[0]).reshape((-1,))


#: The name that it had before.
nvfp4_block_scale_interleave = block_scale_interleave


def e2m1_and_ufp8sf_scale_to_float(
    e2m1_tensor: Any,
    ufp8_scale_tensor: Any,
    global_scale_tensor: Any = None,
    sf_vec_size: int = 16,
    ufp8_type: int = 1,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
) -> Any:
    """The values of e2m1 codes with their block scales, times a global scale.

    Parameters
    ----------
    e2m1_tensor : array of uint8, [M, K/2]
    ufp8_scale_tensor : array of uint8, or of the scales' float8 dtype
        Of any shape with the bytes of the layout. Contiguous.
    global_scale_tensor : array of float32 with one element, or a number, optional
        A **multiplier**, 1 / g of the quantiser's g; by default 1.
    sf_vec_size, ufp8_type : (16, 1) or (32, 0)
        nvfp4 (e4m3 scales of 16 elements) or mxfp4 (e8m0 scales of 32).
    is_sf_swizzled_layout, is_sf_8x4_layout : bool
        Swizzled in tiles of 128 x 4 or of 8 x 4, or linear.

    Returns
    -------
    array of float32, [M, K]
        Of the library of the codes, where they are (FlashInfer copies to the host). e8m0 byte 0 is
        2^-127 and 255 is NaN (FlashInfer: 0 and infinity).

    Raises
    ------
    ValueError
        Another dtype, shape or number of scales.
    UnsupportedError
        Scales of the one kind for blocks of the other.
    """
    codes, array = read_codes("e2m1_tensor", e2m1_tensor)
    if len(array.shape) != 2:
        raise ValueError(f"e2m1_tensor must have shape (M, K / 2), but got {array.shape}")
    check_bool("is_sf_swizzled_layout", is_sf_swizzled_layout)
    check_bool("is_sf_8x4_layout", is_sf_8x4_layout)
    check_member("sf_vec_size", sf_vec_size, (16, 32))
    check_member("ufp8_type", ufp8_type, (0, 1))
    if (sf_vec_size, ufp8_type) not in ((16, 1), (32, 0)):
        raise UnsupportedError(
            "e4m3 scales (ufp8_type 1) belong to sf_vec_size 16 (nvfp4), e8m0 scales (ufp8_type 0) "
            f"to sf_vec_size 32 (mxfp4); got sf_vec_size {sf_vec_size} with ufp8_type {ufp8_type}"
        )
    layout = SfLayout.layout_linear
    if is_sf_swizzled_layout:
        layout = SfLayout.layout_8x4 if is_sf_8x4_layout else SfLayout.layout_128x4
    return _dequantized(
        (codes, ufp8_scale_tensor, global_scale_tensor),
        "nvfp4" if sf_vec_size == 16 else "mxfp4",
        layout,
        "ufp8_scale_tensor",
    )


def mxfp4_dequantize(a_fp4: Any, a_sf: Any, sfLayout: Any = SfLayout.layout_128x4) -> Any:
    """The values of an mxfp4 matrix.

    Parameters
    ----------
    a_fp4 : array of uint8, [M, K/2]
    a_sf : array of uint8 or float8_e8m0fnu
        Of any shape with the bytes of the layout. Contiguous.
    sfLayout : SfLayout

    Returns
    -------
    array of float32, [M, K]
        As of :func:`e2m1_and_ufp8sf_scale_to_float`.

    Raises
    ------
    ValueError
        Another dtype, shape, layout or number of scales.
    """
    codes, array = read_codes("a_fp4", a_fp4)
    if len(array.shape) != 2:
        raise ValueError(f"a_fp4 must have shape (M, K / 2), but got {array.shape}")
    return _dequantized((codes, a_sf, None), "mxfp4", layout_of("sfLayout", sfLayout), "a_sf")


def _dequantized(parts: tuple[Any, Any, Any], format: str, layout: SfLayout, name: str) -> Any:
    codes, scales, factor = parts
    rows, width = arrays.as_array(codes, "codes").shape
    block = 16 if format == "nvfp4" else 32
    if 2 * width % block:
        raise ValueError(f"K must be a multiple of {block} for {format}, but got K = {2 * width}")
    array = arrays.as_array(scales, name)
    if array.dtype not in ("uint8", *_FLOAT8_SCALES):
        raise ValueError(f"{name} must be a uint8 tensor, but got {array.dtype}")
    contiguous(name, array.spec)
    scales, array = bytes_of(scales, array)
    if factor is not None:
        factor = float32_of(factor, "global_scale_tensor")
        if not is_number(factor):
            given = arrays.as_array(factor, "global_scale_tensor")
            if given.size != 1:
                raise ValueError(
                    f"global_scale_tensor must have one element, but got shape {given.shape}"
                )
            factor = factor.reshape(())
    q = to_tensor(codes, scales, format, (rows, 2 * width), layout, factor, name=name)
    return q.dequantize("float32")
