"""prepare_weights: weights in the order in which the products' kernels read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import arrays, layouts
from ..arrays import Array
from ..formats import FORMATS, PREPARED
from ..tensor import Parts, QTensor, check_scale_bytes
from . import _place
from ._out import Shapes, Target, check_apart, check_qtensor, check_writable
from ._repeat import repeat

__all__ = ["prepare_weights"]

_NAMES = ("b.codes", "b.scales", "b.decode_scale")
_OUT_NAMES = ("out.codes", "out.scales", "out.decode_scale")


def prepare_weights(b: QTensor, *, out: Any = None, stream: Any = None) -> QTensor:
    """Weights repacked for the kernels of :func:`nvfp4.matmul` and :func:`nvfp4.grouped_matmul`.

    Done once, when weights are loaded; the products then read them as they lie in memory. There is
    one layout whatever the number of rows they are multiplied with. Nothing is lost: the result
    dequantises to the same float32 values. Products take weights that are not prepared, too.

    The layout is described in docs/decisions.md, D13. Bytes of padding are fixed, so that equal
    weights give equal bytes.

    Parameters
    ----------
    b : QTensor, [N, K] or [E, N, K]
        With linear or tcgen scales.
    out : QTensor, optional
        A result of this function for weights of the same format and shape: it is written and
        returned, so that its arrays stay where they are (weights that change under a captured
        graph). Nothing is allocated then.
    stream : optional
        None (the current stream of the library of ``b.codes``), an int, or an object with
        ``__cuda_stream__``.

    Returns
    -------
    QTensor, of the format and shape of `b`
        Its ``scale_layout`` is "sm90": codes [ceil(N/16), ceil(K/64), 512 or 1024] and scales [16 +
        ceil(N/16) * ceil(K/64) * 1024/V], both after E if there is one; it has a decode scale of
        its own. Saved as three arrays, it is made again by :meth:`QTensor.from_parts`, by the same
        version of this package: the order of the bytes may change with it, and nothing in them
        says which they are. Products read prepared weights before a kernel directly ahead in the
        stream has ended, if it lets them begin; the kernels of this package that write weights do
        not. Another kernel that writes them, by a programmatic launch, must not either.

    Raises
    ------
    TypeError
        `b` or `out` is no QTensor.
    ValueError
        `b` is prepared already, grouped, or of another number of axes; `out` has another format,
        shape or layout, is elsewhere, overlaps `b`, or does not start at a multiple of 16 bytes; an
        nvfp4 scale has bit 7 set, where the host can read it.
    """
    again = "prepare_weights", (), (b, out)
    if out is not None and repeat(again, stream):
        return out  # type: ignore[no-any-return]
    parts = _checked(b)
    fmt = FORMATS[b.format]
    shapes = Shapes(
        layouts.codes_shape(fmt, b.shape, PREPARED),
        layouts.scale_shape(fmt, b.shape, PREPARED),
        parts.decode_scale.shape,
    )
    inputs = tuple(zip(_NAMES, parts[:3], strict=True))
    out_parts = None if out is None else _checked_out(out, b, parts)
    target = Target(fmt, b.shape, PREPARED, None, out, out_parts)
    where = _place.place(inputs, stream)
    if where.golden:
        from .. import golden

        check_scale_bytes("b.scales", b)
        made = golden.prepare_weights(
            arrays.host(parts.codes),
            arrays.host(parts.scales),
            fmt,
            shape=b.shape,
            scale_layout=b.scale_layout,
        )
        decode = np.array(arrays.host(parts.decode_scale))
        return target.stored((*made, decode), parts.codes)
    result, codes, scales, decode_scale = target.written(shapes, parts.codes, where.stream)
    _check_addresses((codes, scales))
    stacked = len(b.shape) == 3
    facts = {
        "format": b.format,
        "rows": b.shape[-2],
        "columns": b.shape[-1],
        "batches": b.shape[0] if stacked else 1,
        "scale_layout": b.scale_layout,
        "decodes": math.prod(parts.decode_scale.shape),
        "aligned": not parts.codes.pointer & 15,
    }
    buffers = {
        "codes": parts.codes,
        "scales": parts.scales,
        "decode_scale": parts.decode_scale,
        "out_codes": codes,
        "out_scales": scales,
        "out_decode_scale": decode_scale,
    }
    outputs = ("out_codes", "out_scales", "out_decode_scale")
    kept = None if out is None else again
    _place.launch(where, "prepare_weights", facts, buffers, outputs=outputs, again=kept)
    return result


def _checked(b: Any) -> Parts:
    """The parts of weights that can be prepared."""
    check_qtensor("b", b)
    if b.scale_layout == PREPARED:
        raise ValueError(
            f"b must have linear or tcgen scales; got scale_layout {PREPARED!r}: it is prepared "
            "already"
        )
    parts: Parts = b.parts
    if parts.groups is not None:
        raise ValueError(
            "b must not be a grouped QTensor: weights are [N, K], or [E, N, K] with a matrix an "
            "expert"
        )
    if len(b.shape) not in (2, 3):
        raise ValueError(f"b must have shape [N, K] or [E, N, K]; got {b.shape}")
    return parts


def _checked_out(out: Any, b: QTensor, parts: Parts) -> Parts:
    """The parts of a prepared QTensor that is to be written."""
    check_qtensor("out", out)
    for name, got, wanted in (
        ("format", out.format, b.format),
        ("shape", out.shape, b.shape),
        ("scale_layout", out.scale_layout, PREPARED),
    ):
        if got != wanted:
            raise ValueError(f"out must have {name} {wanted!r}; got {got!r}")
    out_parts: Parts = out.parts
    if out_parts.decode != parts.decode:
        raise ValueError(
            f"out.decode_scale must have the shape of that of b, {parts.decode_scale.shape}; got "
            f"{out_parts.decode_scale.shape}"
        )
    for name, part in zip(_OUT_NAMES, out_parts[:3], strict=True):
        check_writable(name, part.spec, parts.codes.spec)
    check_apart(_NAMES, parts[:3], out_parts[:3], _OUT_NAMES)
    return out_parts


def _check_addresses(written: tuple[Array, Array]) -> None:
    """Where kernels write in pieces of 16 bytes."""
    for name, array in zip(_OUT_NAMES, written, strict=False):
        if array.pointer & 15:
            raise ValueError(
                f"{name} must start at a multiple of 16 bytes; got {array.pointer & 15} bytes "
                "after one"
            )
