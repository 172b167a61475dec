"""The grouped products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ... import arrays
from ...api import _flashinfer as device
from ...api import grouped_matmul
from ...api._tile import Tile, asking
from ...arrays import Array
from ...formats import FORMAT_ALIASES, FORMATS
from ...layouts import TILE_ROWS, scale_k_tiles, scale_tiles
from ...layouts_flashinfer import flashinfer_tile_starts, flashinfer_tiles
from ...tensor import QTensor
from ._arguments import (
    bytes_of,
    check_bool,
    check_member,
    check_out,
    contiguous,
    dtype_of_result,
    float32_of,
    is_number,
    new_result,
    read_bytes,
    read_codes,
)
from ._offsets import read_indptr

__all__ = [
    "group_gemm_mxfp4_nt_groupwise",
    "group_gemm_mxfp8_mxfp4_nt_groupwise",
    "group_gemm_nvfp4_nt_groupwise",
]

_FLOAT8 = {"float8_e4m3fn": "mxfp8_e4m3", "float8_e5m2": "mxfp8_e5m2"}
_A_FORMATS = {
    **{name: name for name in _FLOAT8.values()},
    **{alias: name for alias, name in FORMAT_ALIASES.items()},
    **_FLOAT8,
    "e4m3": "mxfp8_e4m3",
    "e5m2": "mxfp8_e5m2",
}


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
        Checked. The defaults stand for what is best for the call, and so does any choice where no
        kernel has it. Others are taken on sm_100a and sm_103a by products large enough for tensor
        memory: two blocks a tile, which has so many columns (64 or more) and so much depth, and,
        with one block and 128 columns or fewer, columns as rows of the instruction.
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
    check_member("mma_sm", mma_sm, (1, 2))
    _check_tiles(tile_m, tile_n, tile_k, swap_ab, (32, 64, 128, 192, 256))
    tile = _tile(mma_sm, tile_n, tile_k, swap_ab)

    def make(out: Any) -> Any:
        codes, format = _mxfp8(a, a_format)
        left = (codes, read_bytes("a_scale", a_scale, "float8_e8m0fnu"), format)
        right = (read_codes("b", b), read_bytes("b_scale", b_scale, "float8_e8m0fnu"), "mxfp4")
        with asking(tile):
            return _grouped(left, right, m_indptr, None, out, out_dtype)

    arguments = (a, b, a_scale, b_scale, m_indptr, None)
    return _repeated("flashinfer.mxfp4", (out_dtype, a_format, tile), arguments, out, make)


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
    _check_tiles(tile_m, tile_n, tile_k, swap_ab, (32, 64, 128))
    tile = _tile(1, tile_n, tile_k, swap_ab)

    def make(out: Any) -> Any:
        left = (read_codes("a", a), read_bytes("a_scale", a_scale, "float8_e4m3fn"), "nvfp4")
        right = (read_codes("b", b), read_bytes("b_scale", b_scale, "float8_e4m3fn"), "nvfp4")
        with asking(tile):
            return _grouped(left, right, m_indptr, alpha, out, out_dtype)

    arguments = (a, b, a_scale, b_scale, m_indptr, alpha)
    return _repeated("flashinfer.nvfp4", (out_dtype, tile), arguments, out, make)


def _mxfp8(a: Any, a_format: str | None) -> tuple[tuple[Any, Array], str]:
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
    return bytes_of(a, array), own


def _check_tiles(
    tile_m: Any, tile_n: Any, tile_k: Any, swap_ab: Any, narrow: tuple[int, ...]
) -> None:
    check_bool("swap_ab", swap_ab)
    check_member("tile_m", tile_m, (128,))
    check_member("tile_n", tile_n, narrow)
    check_member("tile_k", tile_k, (128, 256))


def _tile(mma_sm: int, tile_n: int, tile_k: int, swap_ab: bool) -> Tile | None:
    """What a caller who has not left all at the defaults asks for."""
    if (mma_sm, tile_n, tile_k, swap_ab) == (1, 128, 128, True):
        return None
    return int(mma_sm), int(tile_n), int(tile_k), bool(swap_ab)


def _repeated(
    name: str,
    options: tuple[Any, ...],
    arguments: tuple[Any, ...],
    out: Any,
    make: Callable[[Any], Any],
) -> Any:
    """A grouped product, or the repetition of one like it into `out`, or into a new array."""
    offsets = arrays.as_array(arguments[4], "m_indptr")
    if offsets.device is None or offsets.dtype != "int32" or not offsets.size:
        return make(out)
    if out is None:
        a, b = arrays.as_array(arguments[0], "a"), read_codes("b", arguments[1])[1]
        if (len(a.shape), len(b.shape)) != (2, 3):
            return make(None)
        out = new_result(a, (a.shape[0], b.shape[1]), options[0])
    space = device.workspace(offsets, offsets)
    call = (name, options, (*arguments, *space, out))
    return device.repeated(call, ("flashinfer_tile_starts", "grouped_matmul"), lambda: make(out))


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
    a_tiles = _tiles_by_group(a_scales, (rows, depth), a_format, offsets)
    b_tiles = _tiles_of_stack(b_scales, (groups, columns, depth), b_format)
    alpha = _alpha_by_group(alpha, groups)
    space = device.workspace(offsets, offsets)
    x = QTensor.from_parts(
        codes,
        a_scale.reshape(a_tiles),
        a_format,
        shape=(rows, depth),
        decode_scale=space.one,
        groups=m_indptr,
        tile_starts=space.tile_starts,
    )
    w = QTensor.from_parts(
        b_codes,
        b_scale.reshape(b_tiles),
        b_format,
        shape=(groups, columns, depth),
        decode_scale=space.one,
    )
    device.write(space, a, offsets)
    return grouped_matmul(x, w, row_offsets=m_indptr, alpha=alpha, out=out, out_dtype=dtype)


def _tiles_by_group(
    view: Array, shape: tuple[int, int], format: str, offsets: Array
) -> tuple[int, ...]:
    """Shape of the left operand's scales as tiles, which are where FlashInfer has them."""
    rows, depth = shape
    groups = offsets.shape[0] - 1
    contiguous("a_scale", view.spec)
    k_tiles = scale_k_tiles(depth // FORMATS[format].block)
    row_bytes = TILE_ROWS * 4 * k_tiles
    most = flashinfer_tiles(rows, groups)
    tiles = view.size // row_bytes if row_bytes else most
    # Callers allocate `most` tiles, or as many as the last group needs: how many that is depends on
    # the offsets, which only the host looks at, but never fewer than this.
    least = scale_tiles(max(rows + 127 * (groups - 2), rows)) if groups and rows else 0
    if offsets.device is None:
        least = max(least, _tiles_in_use(offsets))
    if (row_bytes and view.size % row_bytes) or tiles < least:
        raise ValueError(
            f"a_scale must have shape {(most * TILE_ROWS, 4 * k_tiles)}, padded for {rows} rows in "
            f"{groups} groups, but got {view.shape}"
        )
    return (tiles, k_tiles, 32, 4, 4)


def _tiles_in_use(offsets: Array) -> int:
    """Tiles up to the end of the last group that has rows."""
    values = arrays.host(offsets).astype(np.int64)
    counts = scale_tiles(np.diff(values))
    ends = flashinfer_tile_starts(values) + counts
    return int(ends[counts > 0].max(initial=0))


def _tiles_of_stack(view: Array, shape: tuple[int, int, int], format: str) -> tuple[int, ...]:
    """Shape of the right operand's scales as tiles."""
    groups, columns, depth = shape
    contiguous("b_scale", view.spec)
    k_tiles = scale_k_tiles(depth // FORMATS[format].block)
    tiled = (groups, scale_tiles(columns), k_tiles, 32, 4, 4)
    wanted = (groups, tiled[1] * TILE_ROWS, k_tiles * 4)
    if view.size != wanted[0] * wanted[1] * wanted[2]:
        raise ValueError(f"b_scale must have shape {wanted}, but got {view.shape}")
    return tiled


def _alpha_by_group(alpha: Any, groups: int) -> Any:
    if alpha is None:
        return None
    if is_number(alpha):
        return alpha
    alpha = float32_of(alpha, "alpha")
    array = arrays.as_array(alpha, "alpha")
    if array.size == 0:
        return None
    if array.shape != (groups,):
        raise ValueError(f"alpha must have shape ({groups},), but got {array.shape}")
    return alpha
