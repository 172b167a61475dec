"""swiglu_quantize and rmsnorm_quantize: quantisers that make what they quantise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import arrays, layouts
from .._parts import check_contiguous, check_device, check_dtype, check_option
from ..arrays import Array
from ..formats import BlockFormat, block_format
from ..tensor import QTensor
from ._encode import real_number
from ._fused import Front, Options, quantize_front
from ._repeat import Repeated, repeat
from .dense import check_floats

__all__ = ["rmsnorm_quantize", "swiglu_quantize"]

_HALVES = ("split", "interleaved")
_KINDS = ("silu", "gpt-oss")


def swiglu_quantize(
    gate_up: Any,
    format: str | BlockFormat,
    *,
    halves: str = "split",
    kind: str = "silu",
    row_offsets: Any = None,
    expert_ids: Any = None,
    row_indices: Any = None,
    row_counts: Any = None,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
    return_hidden: bool = False,
    out: QTensor | None = None,
    stream: Any = None,
) -> Any:
    """Quantise gated activations, in one kernel: what lies between the two products of an expert.

    The hidden value h is rounded to the dtype of the input and quantised as :func:`nvfp4.quantize`
    quantises it. It is made of float32 operations that round once, so that it is the same on every
    backend; for ``up`` = 1 it lies within 0.7 last places of the true value for 16-bit inputs,
    within 3 for float32.

    Parameters
    ----------
    gate_up : array of float32, float16 or bfloat16, [..., 2K]
        K as in :func:`nvfp4.quantize`; [M, 2K] with `row_offsets`, [E, capacity, 2K] with
        `row_counts`.
    format : {"nvfp4", "mxfp4", "mxfp8_e4m3" (or "mxfp8"), "mxfp8_e5m2"} or BlockFormat
    halves : {"split", "interleaved"}
        Gates are the first K columns, ups the others; or each gate (even) is followed by its up.
    kind : {"silu", "gpt-oss"}
        "silu": gate * sigmoid(gate) * up. "gpt-oss": gate is taken as at most 7 and up within -7
        to 7, then gate * sigmoid(1.702 * gate) * (up + 1).
    row_offsets, expert_ids, row_indices : optional
        Ranges of rows, as in :func:`nvfp4.grouped_quantize`; without `row_offsets` the call is
        dense.
    row_counts : array of int32, int64 or uint32, [E], optional
        Only the first row_counts[e] rows of matrix e count; the others are taken as zeros.
    encode_scale, scale_rounding, scale_layout : optional
        As in :func:`nvfp4.quantize`, or in :func:`nvfp4.grouped_quantize` with `row_offsets`, of
        h.
    return_hidden : bool
        Return h too.
    out : QTensor, optional
        Written, every byte of it, and returned; with `row_offsets` its ``groups`` are those.
    stream : optional
        As in :func:`nvfp4.quantize`.

    Returns
    -------
    QTensor, or (QTensor, array)
        Of shape [..., K], or [R, K] with `row_offsets`; and h, of the dtype of the input.

    Raises
    ------
    TypeError
        An argument is of the wrong kind or dtype.
    ValueError
        As in :func:`nvfp4.quantize` and :func:`nvfp4.grouped_quantize`; an unknown `halves` or
        `kind`; `row_counts` that are not from 0 to the capacity, where the host can read them.
    UnsupportedError
        There is no kernel for this GPU.

    Notes
    -----
    Source: N. Shazeer, "GLU Variants Improve Transformer", arXiv:2002.05202; for "gpt-oss" the
    published code of that model.
    """
    again: Repeated | None = None
    if out is not None and return_hidden is False:  # else something is allocated
        again = (
            "swiglu_quantize",
            (format, halves, kind, scale_rounding, scale_layout),
            (gate_up, row_offsets, expert_ids, row_indices, row_counts, encode_scale, out),
        )
        if repeat(again, stream):
            return out
    options = Options.among(locals())
    fmt = block_format(format)
    check_option("halves", halves, _HALVES)
    check_option("kind", kind, _KINDS)
    source = arrays.as_array(gate_up, "gate_up", stream=stream)
    check_floats("gate_up", source.spec)
    if not source.shape or source.shape[-1] % (2 * fmt.block):
        raise ValueError(
            f"gate_up must have a last axis of 2K, K a multiple of {fmt.block} for {fmt.name}; got "
            f"shape {source.shape}"
        )

    def golden(x: np.ndarray, residual: Any) -> tuple[np.ndarray, np.ndarray]:
        from ..golden.hidden import swiglu

        h = swiglu(x, halves=halves, kind=kind)
        return h, h

    front = Front(kind, source, "gate_up", source.shape[-1] // 2, golden, facts={"halves": halves})
    return quantize_front(front, fmt, options, again)


def rmsnorm_quantize(
    x: Any,
    weight: Any,
    eps: float,
    format: str | BlockFormat,
    *,
    residual: Any = None,
    residual_out: Any = None,
    norm_out: Any = None,
    row_offsets: Any = None,
    expert_ids: Any = None,
    row_indices: Any = None,
    row_counts: Any = None,
    encode_scale: Any = None,
    scale_rounding: str = "rceil",
    scale_layout: str = "tcgen",
    return_hidden: bool = False,
    out: QTensor | None = None,
    stream: Any = None,
) -> Any:
    """Quantise rows divided by their root mean square, in one kernel.

    With s = x + residual, rounded to the dtype of x (x itself without a residual), the hidden value
    is h = s / sqrt(mean(s^2) + eps) * weight, rounded to the dtype of x, and is quantised as
    :func:`nvfp4.quantize` quantises it. The sum over a row has one order, whatever the number of
    threads: the same bytes on every backend.

    Parameters
    ----------
    x : array of float32, float16 or bfloat16, [..., K]
        K as in :func:`nvfp4.quantize`; [M, K] with `row_offsets`, [E, capacity, K] with
        `row_counts`.
    weight : array of the dtype of x, or of float32, [K]
    eps : float
        Finite, at least 0.
    format : {"nvfp4", "mxfp4", "mxfp8_e4m3" (or "mxfp8"), "mxfp8_e5m2"} or BlockFormat
    residual : array of the dtype and shape of x, optional
        Added to x first; rows are picked from it as from x.
    residual_out : array of the dtype of x, of the shape of the result, optional
        Is given s. It may be `residual` itself, but not with `row_indices`. Rows without an input
        get zeros.
    norm_out : array of the dtype of x, of the shape of the result, optional
        Is given h.
    row_offsets, expert_ids, row_indices : optional
        Ranges of rows, as in :func:`nvfp4.grouped_quantize`; without `row_offsets` the call is
        dense.
    row_counts : array of int32, int64 or uint32, [E], optional
        Only the first row_counts[e] rows of matrix e count; the others are written as zeros.
    encode_scale, scale_rounding, scale_layout : optional
        As in :func:`nvfp4.quantize`, or in :func:`nvfp4.grouped_quantize` with `row_offsets`, of
        h.
    return_hidden : bool
        Return h too: `norm_out`, where it is given.
    out : QTensor, optional
        Written, every byte of it, and returned; with `row_offsets` its ``groups`` are those.
    stream : optional
        As in :func:`nvfp4.quantize`.

    Returns
    -------
    QTensor, or (QTensor, array)
        Of shape [..., K], or [R, K] with `row_offsets`; and h, of the dtype of x.

    Raises
    ------
    TypeError
        An argument is of the wrong kind or dtype.
    ValueError
        As in :func:`nvfp4.quantize` and :func:`nvfp4.grouped_quantize`; an `eps` that is negative
        or not finite; `residual_out` without `residual`; `row_counts` that are not from 0 to the
        capacity, where the host can read them.
    UnsupportedError
        There is no kernel for this GPU.

    Notes
    -----
    Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv:1910.07467.
    """
    again: Repeated | None = None
    asked = return_hidden is True
    if out is not None and (norm_out is not None if asked else return_hidden is False):
        again = (
            "rmsnorm_quantize",
            # eps by its kind too: True equals 1, and is refused.
            (format, scale_rounding, scale_layout, type(eps), eps),
            (
                *(x, weight, residual, residual_out, norm_out),
                *(row_offsets, expert_ids, row_indices, row_counts, encode_scale, out),
            ),
        )
        if repeat(again, stream):
            return (out, norm_out) if asked else out
    options = Options.among(locals())
    fmt = block_format(format)
    number = _checked_eps(eps)
    source = arrays.as_array(x, "x", stream=stream)
    check_floats("x", source.spec)
    if not source.shape:
        raise ValueError("x must have at least one axis; got shape ()")
    layouts.block_count(fmt, source.shape[-1])
    weights = arrays.as_array(weight, "weight", stream=stream)
    check_dtype("weight", weights.spec, tuple(dict.fromkeys((source.dtype, "float32"))))
    if weights.shape != source.shape[-1:]:
        raise ValueError(
            f"weight must have shape {source.shape[-1:]}, one by column of x; got {weights.shape}"
        )
    check_device("weight", weights.spec, source.spec, "x")
    check_contiguous("weight", weights.spec)

    def golden(values: np.ndarray, added: Any) -> tuple[np.ndarray, np.ndarray]:
        from ..golden.hidden import rmsnorm

        return rmsnorm(values, arrays.host(weights), number, residual=added)

    front = Front(
        "rms",
        source,
        "x",
        source.shape[-1],
        golden,
        facts={
            "weight": "same" if weights.dtype == source.dtype else weights.dtype,
            "eps": number,
        },
        weight=weights,
        residual=_optional(residual, "residual", stream),
        residual_out=_optional(residual_out, "residual_out", stream),
        norm_out=_optional(norm_out, "norm_out", stream),
    )
    return quantize_front(front, fmt, options, again)


def _optional(value: Any, name: str, stream: Any) -> Array | None:
    return None if value is None else arrays.as_array(value, name, stream=stream)


def _checked_eps(eps: Any) -> float:
    number = real_number(eps)
    if number is None:
        raise TypeError(f"eps must be a number; got {type(eps).__name__}")
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(f"eps must be finite and at least 0; got {eps!r}")
    return float(number)
