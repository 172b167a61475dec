"""What ``compute="fp8"`` asks of the operands of a product (docs/decisions.md, D25)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import arrays
from .._parts import check_contiguous, check_dtype
from ..arrays import Array
from ..errors import UnsupportedError
from ..formats import PREPARED
from ..tensor import QTensor
from ._operands import PLAIN, Operand, check_depth, read_operand
from .rows import quantize_rows

__all__ = ["COMPUTE", "Rows", "read_left"]

COMPUTE = ("bfloat16", "fp8")
_CODES = ("uint8", "float8_e4m3fn")


@dataclass(frozen=True)
class Rows:
    """Rows of e4m3 with a scale each: an ``Operand`` like others to what follows."""

    codes: Array
    scale: Array
    #: Whether they were made in this call.
    made: bool
    name: str = "a"
    plain: None = None
    q: None = None
    parts: None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[M, K]."""
        return self.codes.shape

    @property
    def first(self) -> Array:
        """The array that stands for the operand."""
        return self.codes

    @property
    def named(self) -> tuple[tuple[str, Array | None], ...]:
        """All its arrays, by names for messages."""
        return (("a", self.codes), ("a_scale", self.scale))

    def values(self) -> np.ndarray:
        """The elements, for the golden model."""
        from .. import golden

        return golden.decode_e4m3(arrays.host(self.codes))

    def decode(self) -> np.ndarray:
        """The row scales, for the golden model."""
        return arrays.host(self.scale).reshape(-1, 1)

    def facts(self) -> dict[str, Any]:
        """As plans take it."""
        return {
            **{"a_format": "e4m3", "a_dtype": None, "a_layout": None, "decode_a": "row"},
            "compute": "fp8",
        }

    def buffers(self) -> dict[str, Any]:
        """By the names of kernels' buffers."""
        return {"a": None, "a_codes": self.codes, "a_scales": None, "a_decode": self.scale}


def read_left(
    a: Any, a_scale: Any, b: Operand, axes: tuple[str, ...], compute: Any, stream: Any
) -> Operand | Rows:
    """The first operand of a product, of which the second is `b`.

    With ``compute="fp8"``, rows of bfloat16 or float16 are quantised here.

    Raises
    ------
    TypeError, ValueError
        As :func:`read_operand`; an unknown `compute`; `a_scale` where there is none, or none where
        there must be one.
    UnsupportedError
        Weights that are not made for FP8 tensor cores.
    """
    if compute is None or compute == "bfloat16":
        if a_scale is not None:
            raise ValueError("a_scale must be None without compute='fp8'; got an array")
        return read_operand("a", a, axes, plain=True, stream=stream)
    if not isinstance(compute, str):
        raise TypeError(f"compute must be None, 'bfloat16' or 'fp8'; got {compute!r}")
    if compute not in COMPUTE:
        raise ValueError(f"compute must be None, 'bfloat16' or 'fp8'; got {compute!r}")
    _check_weights(b)
    if len(axes) != 2:
        raise UnsupportedError(
            "row_counts must be None with compute='fp8', which takes rows [R, K] and row_offsets"
        )
    if isinstance(a, QTensor):
        raise UnsupportedError(
            f"a must be an array of rows with compute='fp8'; got a QTensor of {a.format}, whose "
            "blocks have scales of their own: pass rows of bfloat16, or what "
            "nvfp4.quantize_rows gives as a and a_scale"
        )
    array = arrays.as_array(a, "a", stream=stream)
    if len(array.shape) != 2:
        raise ValueError(f"a must have shape [{', '.join(axes)}]; got {array.shape}")
    if array.dtype in _CODES:
        rows = _given(a, array, a_scale, stream)
        check_depth(rows, b)
        return rows
    if array.dtype not in PLAIN:
        raise TypeError(
            f"a must be of dtype {' or '.join((*PLAIN, *_CODES))} with compute='fp8'; got "
            f"{array.dtype}"
        )
    if a_scale is not None:
        raise ValueError(
            f"a_scale belongs to rows of e4m3 codes; got it with an a of {array.dtype}, whose "
            "scales are found in the call"
        )
    check_depth(array, b)
    codes, scale = quantize_rows(a, stream=stream)
    return Rows(arrays.as_array(codes, "a"), arrays.as_array(scale, "a_scale"), True)


def _given(a: Any, array: Array, a_scale: Any, stream: Any) -> Rows:
    """Rows that the caller has quantised."""
    if a_scale is None:
        raise ValueError(
            "a_scale must be given with rows of e4m3 codes: float32, one a row, as "
            "nvfp4.quantize_rows gives it; got None"
        )
    check_contiguous("a", array.spec)
    if array.device is not None and array.pointer & 15:
        raise ValueError(
            f"a must start at a multiple of 16 bytes with compute='fp8'; got {array.pointer & 15} "
            "bytes after one"
        )
    if array.dtype != "uint8":
        array = arrays.as_array(arrays.as_bytes(a, array), "a", stream=stream)
    scale = arrays.as_array(a_scale, "a_scale", stream=stream)
    check_dtype("a_scale", scale.spec, ("float32",))
    rows = array.shape[0]
    if scale.shape not in ((rows,), (rows, 1)):
        raise ValueError(
            f"a_scale must have shape ({rows}, 1) or ({rows},), one a row of a; got {scale.shape}"
        )
    check_contiguous("a_scale", scale.spec)
    return Rows(array, scale, False)


def _check_weights(b: Operand) -> None:
    """Weights are prepared, and of four-bit elements."""
    q = b.q
    if q is None:
        return
    if q.format not in ("mxfp4", "nvfp4"):
        raise UnsupportedError(
            f"b must be mxfp4 or nvfp4 with compute='fp8'; got {q.format}, whose elements times "
            "their scales are not rebased to e4m3"
        )
    if q.scale_layout != PREPARED:
        raise ValueError(
            "b must be prepared by nvfp4.prepare_weights with compute='fp8'; got scale_layout "
            f"{q.scale_layout!r}"
        )
