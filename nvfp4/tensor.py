"""The container of a quantised tensor: its bytes, format and layout. It computes nothing.

Source of the shapes: sections 1, 4, 5 and 6 of the arithmetic definition.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np

from . import _parts
from .arrays import Array, as_array, as_bytes, full
from .formats import FORMATS, PREPARED, BlockFormat, block_format

__all__ = ["Parts", "QTensor", "check_scale_bytes", "make"]

_NUMBERS = (int, float, np.integer, np.floating)
_LARGEST = float(np.finfo(np.float32).max)


class Parts(NamedTuple):
    """The arrays of a QTensor as the package sees them."""

    codes: Array
    scales: Array
    decode_scale: Array
    groups: Array | None
    tile_starts: Array | None
    #: Which rows an entry of decode_scale serves: "scalar", "row", "batch" or "group".
    decode: str


@dataclass(frozen=True, eq=False, repr=False)
class QTensor:
    """A tensor of block-scaled codes: ``value = element(code) * scale * decode_scale``.

    Made by :func:`nvfp4.quantize`, :func:`nvfp4.grouped_quantize` and
    :func:`nvfp4.prepare_weights`, or from arrays that come from elsewhere by :meth:`from_parts`. It
    is not an array: it has no arithmetic and turns into values by :meth:`dequantize` alone. Two
    QTensors are equal only if they are the same object.

    Attributes
    ----------
    codes : array of uint8, [..., K/2] (nvfp4, mxfp4) or [..., K] (mxfp8)
        Element codes. Of the four-bit formats, column 2i is the low nibble of byte i. Prepared
        (``"sm90"``): [ceil(N/16), ceil(K/64), 512 or 1024] after an optional leading axis.
    scales : array of uint8
        Block scales: e4m3fn for nvfp4, e8m0 for the others. With scale_layout ``"linear"`` [...,
        K/V]; with ``"tcgen"`` [ceil(M/128), ceil(K/(4V)), 32, 4, 4] after an optional leading
        axis, grouped [tiles, ceil(K/(4V)), 32, 4, 4]; with ``"sm90"`` [16 + ceil(N/16) *
        ceil(K/64) * 1024/V] after an optional leading axis.
    decode_scale : array of float32
        A **multiplier**: of shape () for the whole tensor, [..., 1] by row, [E] for stacked [E, N,
        K], [G] by range of a grouped tensor.
    format : str
        Canonical name of the block format.
    shape : tuple of int
        Logical shape, [..., K].
    scale_layout : {"linear", "tcgen", "sm90"}
        The last one is that of weights repacked by :func:`nvfp4.prepare_weights`.
    groups : None or array of int32, int64 or uint32, [G+1]
        The row offsets of a grouped tensor.
    tile_starts : None or array of int32, int64 or uint32, [G]
        First scale tile of each range of a grouped tensor; None: each range on the next free tile.
    """

    codes: Any
    scales: Any
    decode_scale: Any
    format: str
    shape: tuple[int, ...]
    scale_layout: str
    groups: Any = None
    tile_starts: Any = None
    _cached: ClassVar[Parts | None] = None
    #: What ``api._repeat`` found of the arrays, and where.
    _seen: ClassVar[Any] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", block_format(self.format).name)
        object.__setattr__(self, "shape", _parts.logical_shape(self.shape))
        _check_values(self, self.parts)

    @classmethod
    def from_parts(
        cls,
        codes: Any,
        scales: Any,
        format: str | BlockFormat,
        *,
        shape: tuple[int, ...] | None = None,
        decode_scale: Any = None,
        scale_layout: str = "tcgen",
        groups: Any = None,
        tile_starts: Any = None,
    ) -> QTensor:
        """A QTensor of arrays from elsewhere: a checkpoint, another library, a buffer to write to.

        Parameters
        ----------
        codes : array of uint8, [..., K/2] (nvfp4, mxfp4) or [..., K] (mxfp8)
            Of prepared weights, the shapes of the class. For mxfp8 also an array of the format's
            float8 dtype, taken as bytes.
        scales : array of uint8
            In the layout that `scale_layout` names; the shapes are those of the class. Also an
            array of float8_e4m3fn (nvfp4) or float8_e8m0fnu (the others), taken as bytes. A
            swizzled buffer of another shape (as FlashInfer's two-dimensional one) has the same
            bytes: reshape it.
        format : str or BlockFormat
            Never taken from a dtype.
        shape : tuple of int, optional
            Logical shape; by default that of the codes, K columns wide. Must be given for prepared
            weights, whose codes are padded.
        decode_scale : array of float32, or a number, optional
            A multiplier, 1 by default; shapes as in the class. A checkpoint's *encode* scale is
            its reciprocal.
        scale_layout : {"tcgen", "linear", "sm90"}
        groups : array of int32, int64 or uint32, [G+1], optional
            Row offsets of a grouped tensor.
        tile_starts : array of int32, int64 or uint32, [G], optional
            First scale tile of each range, where it is not the next free one.

        Returns
        -------
        QTensor
            Over the same memory: nothing is copied.

        Raises
        ------
        TypeError
            An argument is no array or has another dtype, or `format` is neither a name nor a
            descriptor.
        ValueError
            Unknown format or layout; a shape that does not belong to the others; arrays on
            different devices; device arrays that are not contiguous; offsets or tile starts that
            do not fit. The values of offsets and tile starts are looked at on the host only, those
            of codes and scales not at all: the tensor may be there to be written.
        """
        fmt = block_format(format)
        code_view = as_array(codes, "codes")
        scale_view = as_array(scales, "scales")
        _parts.check_byte_dtype("codes", code_view.spec, _parts.code_dtypes(fmt))
        _parts.check_byte_dtype("scales", scale_view.spec, _parts.scale_dtypes(fmt))
        if shape is None and scale_layout == PREPARED:
            raise ValueError(
                f"shape must be given with scale_layout {PREPARED!r}: prepared codes are padded, "
                "so that they do not tell it"
            )
        if shape is None:
            shape = _parts.shape_of_codes(fmt, code_view.spec)
        if decode_scale is None:
            decode_scale = 1.0
        if isinstance(decode_scale, _NUMBERS) and not isinstance(decode_scale, bool):
            number: Any = decode_scale
            if math.inf > abs(number) > _LARGEST:
                raise ValueError(f"decode_scale must fit a float32; got {number!r:.40}")
            decode_scale = full((), float(number), "float32", code_view)
        return cls(
            as_bytes(codes, code_view),
            as_bytes(scales, scale_view),
            decode_scale,
            fmt.name,
            shape,
            scale_layout,
            groups,
            tile_starts,
        )

    def dequantize(self, dtype: Any = "float32", *, out: Any = None, stream: Any = None) -> Any:
        """The values, ``element(code) * scale * decode_scale``.

        element * scale is exact in float32 (unless it overflows, which only MX formats can); the
        multiplication by decode_scale rounds once, and so does the cast to float16 or bfloat16.
        Section 4 of the arithmetic definition.

        Parameters
        ----------
        dtype : {"float32", "float16", "bfloat16"}
            Also a dtype object of NumPy, ml_dtypes or PyTorch.
        out : array of `dtype`, of the tensor's shape, optional
            Written and returned.
        stream : optional
            None (the current stream of the library of ``codes``), an int, or an object with
            ``__cuda_stream__``.

        Returns
        -------
        array of `dtype`, [..., K]
            Of the library of ``codes``. Rows of a grouped tensor that no range covers are 0.

        Raises
        ------
        TypeError
            `dtype` or the dtype of `out` is another one.
        ValueError
            `out` has another shape or device, is not contiguous on a device, or overlaps the
            tensor; an nvfp4 scale has bit 7 set, where the host can read it.
        """
        return _dequantize()(self, dtype, out=out, stream=stream)

    @property
    def parts(self) -> Parts:
        """The arrays as the package sees them; their metadata is checked the first time.

        The arrays are the caller's, who may have given them other memory since (PyTorch's
        ``tensor.data = ...``): then they are looked at anew.
        """
        cached = self._cached
        if cached is None or not all(map(_still_valid, cached[:5])):
            cached = _check_metadata(self)
            object.__setattr__(self, "_cached", cached)
        return cached

    def __repr__(self) -> str:
        parts = self.parts
        where = "host" if parts.codes.device is None else f"GPU {parts.codes.device}"
        text = f"QTensor({self.format}, shape={self.shape}, scale_layout={self.scale_layout!r}"
        text += f", decode_scale={list(parts.decode_scale.shape)}"
        if parts.groups is not None:
            text += f", groups={parts.groups.shape[0] - 1}"
        if parts.tile_starts is not None:
            text += ", tile_starts given"
        return f"{text}, {parts.codes.library} on {where})"

    # Pointers are of this process and of these arrays: a copy or a pickle finds its own.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    # NumPy then leaves `array * q` to the methods below, instead of trying it element by element.
    __array_ufunc__ = None


@functools.cache
def _dequantize() -> Callable[..., Any]:
    from .api.dequantize import dequantize

    return dequantize


def make(
    codes: Array,
    scales: Array,
    decode_scale: Array,
    fmt: BlockFormat,
    shape: tuple[int, ...],
    scale_layout: str,
    groups: Array | None = None,
    tile_starts: Array | None = None,
) -> QTensor:
    """A QTensor of results of this package, whose values nobody needs to look at."""
    made = object.__new__(QTensor)
    made.__dict__.update(
        codes=codes.owner,
        scales=scales.owner,
        decode_scale=decode_scale.owner,
        format=fmt.name,
        shape=shape,
        scale_layout=scale_layout,
        groups=None if groups is None else groups.owner,
        tile_starts=None if tile_starts is None else tile_starts.owner,
    )
    return made


def _still_valid(array: Array | None) -> bool:
    """Whether an array has its memory and its shape still."""
    if array is None or array.library not in ("numpy", "torch", "cupy"):
        return True
    same = array.pointer == array.current_pointer()
    return same and bool(array.owner.shape == array.spec.shape)


def _check_metadata(q: QTensor) -> Parts:
    fmt = FORMATS[q.format]
    codes = as_array(q.codes, "codes")
    scales = as_array(q.scales, "scales")
    decode_scale = as_array(q.decode_scale, "decode_scale")
    groups = starts = count = None
    if q.groups is not None:
        groups = as_array(q.groups, "groups")
        count = _parts.groups_spec("groups", groups.spec, codes.spec, q.shape)
    if q.tile_starts is not None:
        starts = as_array(q.tile_starts, "tile_starts")
        if count is None or q.scale_layout != "tcgen":
            raise ValueError(
                "tile_starts belong to groups and scale_layout 'tcgen'; one of them is missing"
            )
        _parts.index_array(
            "tile_starts", starts.spec, codes.spec, "codes", _parts.OFFSET_DTYPES, count
        )
    _parts.codes_and_scales(
        fmt, q.shape, q.scale_layout, codes.spec, scales.spec, count, starts is not None
    )
    decode = _parts.decode_kind(q.shape, count, decode_scale.spec, codes.spec)
    return Parts(codes, scales, decode_scale, groups, starts, decode)


def _check_values(q: QTensor, parts: Parts) -> None:
    if parts.codes.device is not None:
        return
    if parts.groups is not None:
        _parts.check_offsets("groups", parts.groups, q.shape[0])
        if q.scale_layout == "tcgen":
            _parts.check_tile_starts(parts.tile_starts, parts.groups, parts.scales.shape[0])


def check_scale_bytes(name: str, q: QTensor) -> None:
    """Where the host reads a tensor: no nvfp4 scale has a sign."""
    parts = q.parts
    _parts.scale_bytes(
        name,
        parts.scales,
        q.shape,
        FORMATS[q.format],
        q.scale_layout,
        parts.groups,
        parts.tile_starts,
    )


def _no_arithmetic(symbol: str) -> Callable[..., NoReturn]:
    use = (
        "nvfp4.matmul(a, b) or nvfp4.grouped_matmul(a, b, ...)"
        if "@" in symbol
        else "q.dequantize()"
    )

    def refuse(self: QTensor, *others: Any) -> NoReturn:
        raise TypeError(f"a QTensor has no operator {symbol}: use {use}")

    return refuse


_OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//",
    "mod": "%", "divmod": "divmod", "pow": "**", "lshift": "<<", "rshift": ">>", "and": "&",
    "xor": "^", "or": "|",
}  # fmt: skip
for _name, _symbol in _OPERATORS.items():
    setattr(QTensor, f"__{_name}__", _no_arithmetic(_symbol))
    setattr(QTensor, f"__r{_name}__", _no_arithmetic(_symbol))
for _name, _symbol in {"neg": "-", "pos": "+", "abs": "abs", "invert": "~"}.items():
    setattr(QTensor, f"__{_name}__", _no_arithmetic(_symbol))
