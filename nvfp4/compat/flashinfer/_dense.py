"""mm_fp4: the dense product."""

from __future__ import annotations

from typing import Any

from ... import arrays
from ...api import _flashinfer as device
from ...api import matmul
from ...errors import UnsupportedError
from ...formats import FORMATS
from ._arguments import (
    check_bool,
    check_member,
    check_out,
    contiguous,
    dtype_of_result,
    is_number,
    new_result,
    read_bytes,
    read_codes,
)
from ._layouts import SfLayout, to_tensor

__all__ = ["mm_fp4"]

_BACKENDS = (*("auto", "cudnn", "trtllm", "cutlass", "cute-dsl", "cutedsl_low_latency", "b12x"),)


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
    format = _check_options(
        block_size, use_8x4_sf_layout, backend, use_nvfp4, enable_pdl, skip_check
    )

    def make() -> Any:
        return _dense(a, b, a_descale, b_descale, alpha, out_dtype, out, format, use_8x4_sf_layout)

    like = read_codes("a", a)[1]
    if like.device is None:
        return make()
    if out is None:
        shapes = like.shape, read_codes("b", b)[1].shape
        if list(map(len, shapes)) != [2, 2]:
            return make()
        out = new_result(like, (shapes[0][0], shapes[1][1]), out_dtype)
    arguments = (a, b, a_descale, b_descale, alpha, *device.workspace(like), out)
    call = ("flashinfer.mm_fp4", (format, use_8x4_sf_layout, out_dtype), arguments)
    return device.repeated(call, ("flashinfer_tile_starts", "matmul"), make)


def _check_options(
    block_size: Any, small: Any, backend: Any, use_nvfp4: Any, enable_pdl: Any, skip_check: Any
) -> str:
    """Check the options of `mm_fp4`; the format of its operands."""
    for name, value in (
        ("use_8x4_sf_layout", small),
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
    return "nvfp4" if use_nvfp4 else "mxfp4"


def _dense(
    a: Any,
    b: Any,
    a_descale: Any,
    b_descale: Any,
    alpha: Any,
    out_dtype: Any,
    out: Any,
    format: str,
    small: bool,
) -> Any:
    """`mm_fp4` with its options checked."""
    block = FORMATS[format].block
    float8 = "float8_e4m3fn" if format == "nvfp4" else "float8_e8m0fnu"
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
    if (2 * left.shape[1]) % block:
        raise ValueError(f"k must be a multiple of {block}, but got k={2 * left.shape[1]}")
    b = b.swapaxes(0, 1)
    contiguous("a", left.spec)
    contiguous("b.T", arrays.as_array(b, "b").spec)
    a_descale, a_scales = read_bytes("a_descale", a_descale, float8)
    contiguous("a_descale", a_scales.spec)
    b_descale, b_scales = read_bytes("b_descale", b_descale, float8)
    if len(b_scales.shape) == 2:
        b_descale = b_descale.swapaxes(0, 1)
        contiguous("b_descale.T", arrays.as_array(b_descale, "b_descale").spec)
    contiguous("b_descale", arrays.as_array(b_descale, "b_descale").spec)
    depth = 2 * left.shape[1]
    layout = SfLayout.layout_8x4 if small else SfLayout.layout_128x4
    dtype = dtype_of_result(None, out_dtype)
    check_out(out, (left.shape[0], right.shape[1]), dtype)
    alpha = _scalar_alpha(alpha)
    space = device.workspace(left)
    rows, columns = (left.shape[0], depth), (right.shape[1], depth)
    x = to_tensor(a, a_descale, format, rows, layout, space.one, name="a_descale")
    wide = SfLayout.layout_128x4
    w = to_tensor(b, b_descale, format, columns, wide, space.one, name="b_descale")
    device.write(space, left)
    return matmul(x, w, alpha=alpha, out=out, out_dtype=dtype)


def _scalar_alpha(alpha: Any) -> Any:
    if alpha is None:
        return 1.0
    if is_number(alpha):
        return alpha
    array = arrays.as_array(alpha, "alpha")
    if array.dtype != "float32" or array.size != 1:
        raise ValueError(
            f"alpha must be a float32 tensor of one element, but got {array.dtype} of shape "
            f"{array.shape}"
        )
    return alpha.reshape(())
