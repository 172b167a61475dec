"""The grouped products of FlashInfer, and mm_fp4."""

from __future__ import annotations

from typing import Any

from ... import arrays
from ..._parts import check_tile_starts
from ...api import _flashinfer as device
from ...api import grouped_matmul, matmul
from ...arrays import Array
from ...errors import UnsupportedError
from ...formats import FORMAT_ALIASES, FORMATS
from ...layouts import TILE_ROWS, scale_k_tiles, scale_tiles
from ...layouts_flashinfer import flashinfer_tiles
from ...tensor import QTensor
from ._arguments import (
    bytes_of,
    check_bool,
    check_member,
    check_out,
    contiguous,
    dtype_of_result,
    float32_of,
    read_bytes,
    read_codes,
)
from ._layouts import SfLayout, to_tensor
from ._offsets import read_indptr

__all__ = [
    "group_gemm_mxfp4_nt_groupwise",
    "group_gemm_mxfp8_mxfp4_nt_groupwise",
    "group_gemm_nvfp4_nt_groupwise",
    "mm_fp4",
]

_FLOAT8 = {"float8_e4m3fn": "mxfp8_e4m3", "float8_e5m2": "mxfp8_e5m2"}
_A_FORMATS = {
    **{name: name for name in _FLOAT8.values()},
    **{alias: name for alias, name in FORMAT_ALIASES.items()},
    **_FLOAT8,
    "e4m3": "mxfp8_e4m3",
    "e5m2": "mxfp8_e5m2",
}
_BACKENDS = (*("auto", "cudnn", "trtllm", "cutlass", "cute-dsl", "cutedsl_low_latency", "b12x"),)


def group_gemm_mxfp8_mxfp4_nt_groupwise(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    m_indptr: Any,
    mma_sm: int = 1,
    tile_m: int = 128,
    tile_n: int = 128,
    tile_k: int = 128,
    swap_ab: bool = True,
    out: Any = None,
    out_dtype: Any = None,
    *,
    a_format: str | None = None,
    skip_check: bool = False,
) -> Any:
    """The product of each group of rows of an mxfp8 `a` with the group's mxfp4 matrix, transposed.

    Parameters
    ----------
    a : array of float8_e4m3fn or float8_e5m2, [cum_m, k]
        Or of uint8 with `a_format`. k a multiple of 128.
    b : array of uint8, [G, n, k/2]
        Two e2m1 a byte, the low nibble first. n a multiple of 8.
    a_scale : array of uint8 (e8m0), [floor((cum_m + 127 G) / 128) * 128, k/32]
        In the 128x4 layout, each group by itself, from row floor((m_indptr[i] + 127 i) / 128) * 128
        on. Any shape with these bytes; as many tiles of 128 rows as the groups need will do.
    b_scale : array of uint8 (e8m0), [G, ceil(n/128) * 128, k/32]
        In the 128x4 layout, each matrix by itself. Any shape with these bytes.
    m_indptr : array of int32, [G+1]
        Group i is rows m_indptr[i] to m_indptr[i+1] - 1; groups may be empty, and need not be
        multiples of four.
    mma_sm, tile_m, tile_n, tile_k, swap_ab
        Checked, without effect.
    out : array of bfloat16 or float16, [cum_m, n], optional
        Written and returned.
    out_dtype : optional
        bfloat16 or float16; by default that of `out`, or bfloat16.
    a_format : {"mxfp8_e4m3", "mxfp8_e5m2"}, optional
        What a uint8 `a` holds; also "e4m3", "e5m2" and the names of the dtypes.
    skip_check : bool
        Accepted; checks are always made, once for calls that are alike.

    Returns
    -------
    array of `out_dtype`, [cum_m, n]
        Rows that are in no group are 0.

    Raises
    ------
    ValueError
        A dtype, shape or tuning argument that FlashInfer refuses; also numbers of scales that do
        not fit, arrays on different devices or not contiguous, and offsets that do not start at 0,
        decrease or go beyond cum_m, where the host can read them.
    """
    check_bool("skip_check", skip_check)
    codes, rows, format = _mxfp8(a, a_format)
    b_codes, b_array = read_codes("b", b)
    a_scale, a_scales = read_bytes("a_scale", a_scale, "float8_e8m0fnu")
    b_scale, b_scales = read_bytes("b_scale", b_scale, "float8_e8m0fnu")
    check_member("mma_sm", mma_sm, (1, 2))
    _check_tiles(tile_m, tile_n, tile_k, swap_ab, (32, 64, 128, 192, 256))
    return _grouped(
        ((codes, rows), (a_scale, a_scales), format),
        ((b_codes, b_array), (b_scale, b_scales), "mxfp4"),
        m_indptr,
        None,
        out,
        out_dtype,
    )


#: The name that it had first: "mxfp4" is the weights' format.
group_gemm_mxfp4_nt_groupwise = group_gemm_mxfp8_mxfp4_nt_groupwise


def group_gemm_nvfp4_nt_groupwise(
    a: Any,
    b: Any,
    a_scale: Any,
    b_scale: Any,
    m_indptr: Any,
    alpha: Any = None,
    tile_m: int = 128,
    tile_n: int = 128,
    tile_k: int = 128,
    swap_ab: bool = True,
    out: Any = None,
    out_dtype: Any = None,
    *,
    skip_check: bool = False,
) -> Any:
    """The product of each group of rows of an nvfp4 `a` with the group's nvfp4 matrix, transposed.

    Parameters
    ----------
    a : array of uint8, [cum_m, k/2]
    b : array of uint8, [G, n, k/2]
    a_scale : array of uint8 (e4m3), [floor((cum_m + 127 G) / 128) * 128, k/16]
    b_scale : array of uint8 (e4m3), [G, ceil(n/128) * 128, k/16]
        Both as in :func:`group_gemm_mxfp8_mxfp4_nt_groupwise`.
    m_indptr : array of int32, [G+1]
    alpha : array of float32, [G], optional
        The factor of each group; None or an empty array: 1.
    tile_m, tile_n, tile_k, swap_ab, out, out_dtype, skip_check
        As in :func:`group_gemm_mxfp8_mxfp4_nt_groupwise`.

    Returns
    -------
    array of `out_dtype`, [cum_m, n]
        Rows that are in no group are 0.

    Raises
    ------
    ValueError
        As in :func:`group_gemm_mxfp8_mxfp4_nt_groupwise`.
    """
    check_bool("skip_check", skip_check)
    codes, rows = read_codes("a", a)
    b_codes, b_array = read_codes("b", b)
    a_scale, a_scales = read_bytes("a_scale", a_scale, "float8_e4m3fn")
    b_scale, b_scales = read_bytes("b_scale", b_scale, "float8_e4m3fn")
    _check_tiles(tile_m, tile_n, tile_k, swap_ab, (32, 64, 128))
    return _grouped(
        ((codes, rows), (a_scale, a_scales), "nvfp4"),
        ((b_codes, b_array), (b_scale, b_scales), "nvfp4"),
        m_indptr,
        alpha,
        out,
        out_dtype,
    )


def mm_fp4(
    a: Any,
    b: Any,
    a_descale: Any,
    b_descale: Any,
    alpha: Any = None,
    out_dtype: Any = "bfloat16",
    out: Any = None,
    block_size: int = 16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
    use_nvfp4: bool = True,
    enable_pdl: bool = True,
    *,
    skip_check: bool = False,
) -> Any:
    """The product of two nvfp4 or two mxfp4 matrices.

    Parameters
    ----------
    a : array of uint8, [m, k/2]
    b : array of uint8, [k/2, n]
        Column-major: the transposed view of contiguous [n, k/2].
    a_descale : array of uint8, or of the scales' float8 dtype
        [ceil(m/128) * 128, ceil(k / block_size / 4) * 4] in the 128x4 layout, or any shape with
        these bytes; with `use_8x4_sf_layout` m up to the multiple of 8, in the 8x4 layout.
    b_descale : array of uint8, or of the scales' float8 dtype
        The transposed view of the same for b, or flat; always in the 128x4 layout.
    alpha : array of float32 with one element, or a number, optional
        1 / (g_a * g_b); by default 1.
    out_dtype
        bfloat16 or float16.
    out : array of `out_dtype`, [m, n], optional
        Written and returned.
    block_size, use_nvfp4 : (16, True) or (32, False)
    use_8x4_sf_layout : bool
        With any backend.
    backend : str
        One of FlashInfer's names, checked, without effect; but not "trtllm", which has another
        order of the rows of b.
    enable_pdl, skip_check : bool
        Checked, without effect.

    Returns
    -------
    array of `out_dtype`, [m, n]

    Raises
    ------
    ValueError
        Another dtype, shape, number of scales or block size, or a `b` that is not column-major.
    UnsupportedError
        ``backend="trtllm"``.
    """
    for name, value in (
        ("use_8x4_sf_layout", use_8x4_sf_layout),
        ("use_nvfp4", use_nvfp4),
        ("enable_pdl", enable_pdl),
        ("skip_check", skip_check),
    ):
        check_bool(name, value)
    check_member("backend", backend, _BACKENDS)
    if backend == "trtllm":
        raise UnsupportedError(
            "backend='trtllm' takes weights whose rows are shuffled for its kernels; pass the "
            "weights in their own order (do_shuffle=False) and another backend, such as 'auto'"
        )
    if use_nvfp4 and block_size != 16:
        raise ValueError(f"nvfp4 only supports block_size = 16, but got {block_size!r}")
    if not use_nvfp4 and block_size != 32:
        raise ValueError(f"mxfp4 only supports block_size = 32, but got {block_size!r}")
    a, left = read_codes("a", a)
    b, right = read_codes("b", b)
    if len(left.shape) != 2 or len(right.shape) != 2:
        raise ValueError(
            f"mm_fp4 accepts 2d tensors, but got shapes {left.shape} and {right.shape}"
        )
    if left.shape[1] != right.shape[0]:
        raise ValueError(
            f"K dimension mismatch in mm_fp4: a has {left.shape[1]} bytes in a row, b has "
            f"{right.shape[0]} in a column"
        )
    if (2 * left.shape[1]) % block_size:
        raise ValueError(f"k must be a multiple of {block_size}, but got k={2 * left.shape[1]}")
    b = b.swapaxes(0, 1)
    contiguous("a", left.spec)
    contiguous("b.T", arrays.as_array(b, "b").spec)
    format, float8 = ("nvfp4", "float8_e4m3fn") if use_nvfp4 else ("mxfp4", "float8_e8m0fnu")
    a_descale, a_scales = read_bytes("a_descale", a_descale, float8)
    contiguous("a_descale", a_scales.spec)
    b_descale, b_scales = read_bytes("b_descale", b_descale, float8)
    if len(b_scales.shape) == 2:
        b_descale = b_descale.swapaxes(0, 1)
        contiguous("b_descale.T", arrays.as_array(b_descale, "b_descale").spec)
    contiguous("b_descale", arrays.as_array(b_descale, "b_descale").spec)
    depth = 2 * left.shape[1]
    layout = SfLayout.layout_8x4 if use_8x4_sf_layout else SfLayout.layout_128x4
    x = to_tensor(a, a_descale, format, (left.shape[0], depth), layout, name="a_descale")
    w = to_tensor(
        b, b_descale, format, (right.shape[1], depth), SfLayout.layout_128x4, name="b_descale"
    )
    dtype = dtype_of_result(None, out_dtype)
    check_out(out, (left.shape[0], right.shape[1]), dtype)
    return matmul(x, w, alpha=_scalar_alpha(alpha), out=out, out_dtype=dtype)


def _scalar_alpha(alpha: Any) -> Any:
    if alpha is None:
        return 1.0
    if isinstance(alpha, (int, float)):
        return alpha
    array = arrays.as_array(alpha, "alpha")
    if array.dtype != "float32" or array.size != 1:
        raise ValueError(
            f"alpha must be a float32 tensor of one element, but got {array.dtype} of shape "
            f"{array.shape}"
        )
    return alpha.reshape(())


def _mxfp8(a: Any, a_format: str | None) -> tuple[Any, Array, str]:
    """The bytes of an mxfp8 operand, and its format."""
    array = arrays.as_array(a, "a")
    named = None
    if a_format is not None:
        check_member("a_format", a_format, tuple(_A_FORMATS))
        named = _A_FORMATS[a_format]
    own = _FLOAT8.get(array.dtype)
    if own is None and array.dtype == "uint8":
        own = named
    if own is None:
        hint = ""
        if array.dtype == "uint8":
            hint = ": a_format='mxfp8_e4m3' or 'mxfp8_e5m2' says what the bytes are"
        raise ValueError(
            f"a must be a float8_e4m3fn or float8_e5m2 tensor, but got {array.dtype}{hint}"
        )
    if named not in (None, own):
        raise ValueError(
            f"a_format must agree with the dtype of a, {array.dtype}; got {a_format!r}"
        )
    return (*bytes_of(a, array), own)


def _check_tiles(
    tile_m: Any, tile_n: Any, tile_k: Any, swap_ab: Any, narrow: tuple[int, ...]
) -> None:
    check_bool("swap_ab", swap_ab)
    check_member("tile_m", tile_m, (128,))
    check_member("tile_n", tile_n, narrow)
    check_member("tile_k", tile_k, (128, 256))


#: An operand: codes, scales (each as given and as it is seen), format.
_Given = tuple[tuple[Any, Array], tuple[Any, Array], str]


def _grouped(
    left: _Given, right: _Given, m_indptr: Any, alpha: Any, out: Any, out_dtype: Any
) -> Any:
    """Check what both grouped products check, and multiply."""
    (codes, a), (a_scale, a_scales), a_format = left
    (b_codes, b), (b_scale, b_scales), b_format = right
    if len(a.shape) != 2 or len(b.shape) != 3:
        raise ValueError(
            f"a must have two axes and b three, but got shapes {a.shape} and {b.shape}"
        )
    offsets = read_indptr(m_indptr, a.shape[0])
    groups = offsets.shape[0] - 1
    rows, depth = a.shape[0], a.shape[1] * FORMATS[a_format].codes_per_byte
    columns = b.shape[1]
    dtype = dtype_of_result(out, out_dtype)
    if b.shape[0] != groups:
        raise ValueError(
            f"b.shape[0] must equal num_groups (m_indptr.shape[0] - 1), but got b.shape[0] = "
            f"{b.shape[0]} and num_groups = {groups}"
        )
    if depth != 2 * b.shape[2]:
        raise ValueError(
            f"a.shape[1] must equal k, but got k = {depth} of a and {2 * b.shape[2]} of b"
        )
    if columns % 8:
        raise ValueError(f"n must be a multiple of 8, but got n={columns}")
    if depth % 128:
        raise ValueError(f"k must be a multiple of 128, but got k={depth}")
    check_out(out, (rows, columns), dtype)
    x = _rows_by_group(codes, (rows, depth), a_scale, a_scales, a_format, offsets)
    w = _stacked(b_codes, (groups, columns, depth), b_scale, b_scales, b_format)
    return grouped_matmul(
        x,
        w,
        row_offsets=offsets.owner,
        alpha=_alpha_by_group(alpha, groups),
        out=out,
        out_dtype=dtype,
    )


def _rows_by_group(
    codes: Any, shape: tuple[int, int], scales: Any, view: Array, format: str, offsets: Array
) -> QTensor:
    """The left operand, its scales where FlashInfer has them."""
    rows, depth = shape
    groups = offsets.shape[0] - 1
    contiguous("a_scale", view.spec)
    k_tiles = scale_k_tiles(depth // FORMATS[format].block)
    row_bytes = TILE_ROWS * 4 * k_tiles
    tiles = view.size // row_bytes if row_bytes else 0
    # One group may end earlier than the bound by which callers allocate; how early depends on the
    # offsets, which only the host looks at.
    least = -(-max(rows + 127 * (groups - 2), rows) // TILE_ROWS) if groups and rows else 0
    if row_bytes and (view.size % row_bytes or tiles < least):
        wanted = (flashinfer_tiles(rows, groups) * TILE_ROWS, 4 * k_tiles)
        raise ValueError(
            f"a_scale must have shape {wanted}, padded for {rows} rows in {groups} groups, but got "
            f"{view.shape}"
        )
    starts = device.tile_starts(offsets)
    if offsets.device is None:
        check_tile_starts(
            arrays.as_array(starts, "starts"), offsets, tiles if row_bytes else 1 << 40
        )
    return QTensor.from_parts(
        codes,
        scales.reshape((tiles, k_tiles, 32, 4, 4)),
        format,
        shape=shape,
        groups=offsets.owner,
        tile_starts=starts,
    )


def _stacked(
    codes: Any, shape: tuple[int, int, int], scales: Any, view: Array, format: str
) -> QTensor:
    """The right operand."""
    groups, columns, depth = shape
    contiguous("b_scale", view.spec)
    k_tiles = scale_k_tiles(depth // FORMATS[format].block)
    tiled = (groups, scale_tiles(columns), k_tiles, 32, 4, 4)
    wanted = (groups, tiled[1] * TILE_ROWS, k_tiles * 4)
    if view.size != wanted[0] * wanted[1] * wanted[2]:
        raise ValueError(f"b_scale must have shape {wanted}, but got {view.shape}")
    return QTensor.from_parts(codes, scales.reshape(tiled), format, shape=shape)


def _alpha_by_group(alpha: Any, groups: int) -> Any:
    if alpha is None:
        return None
    if isinstance(alpha, (int, float)):
        return alpha
    alpha = float32_of(alpha, "alpha")
    array = arrays.as_array(alpha, "alpha")
    if array.size == 0:
        return None
    if array.shape != (groups,):
        raise ValueError(f"alpha must have shape ({groups},), but got {array.shape}")
    return alpha
