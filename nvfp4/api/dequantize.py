"""dequantize: the values of a QTensor."""

from __future__ import annotations

import math
from typing import Any

from .. import arrays
from ..formats import FORMATS, PREPARED
from ..tensor import QTensor, check_scale_bytes
from . import _place
from ._out import check_apart, check_qtensor, check_result, decode_on_host, store
from ._repeat import repeat
from ._result import float_name

__all__ = ["dequantize"]

_NAMES = ("codes", "scales", "decode_scale", "groups", "tile_starts")


def dequantize(q: QTensor, dtype: Any = "float32", *, out: Any = None, stream: Any = None) -> Any:
    """``QTensor.dequantize``, which says what it does."""
    again = "dequantize", (dtype,), (q, out)
    if out is not None and repeat(again, stream):
        return out
    check_qtensor("q", q)
    name = float_name(dtype, "dtype")
    fmt, parts = FORMATS[q.format], q.parts
    inputs = parts[:5]
    target = None
    if out is not None:
        target = arrays.as_array(out, "out", stream=stream)
        check_result("out", target.spec, q.shape, name, parts.codes.spec)
        check_apart(_NAMES, inputs, (target,), ("out",))
    where = _place.place(tuple(zip(_NAMES, inputs, strict=True)), stream)
    if where.golden:
        from .. import golden

        check_scale_bytes("scales", q)
        values = golden.dequantize(
            arrays.host(parts.codes),
            arrays.host(parts.scales),
            decode_on_host(parts),
            fmt,
            shape=q.shape,
            scale_layout=q.scale_layout,
            dtype=name,
            row_offsets=None if parts.groups is None else arrays.host(parts.groups),
            tile_starts=None if parts.tile_starts is None else arrays.host(parts.tile_starts),
        )
        if target is None:
            return arrays.from_host(values, parts.codes)
        store(target, values)
        return out
    if target is None:
        target = arrays.empty(q.shape, name, parts.codes, stream=where.stream)
    stacked = len(q.shape) == 3 and (q.scale_layout != "linear" or parts.decode == "batch")
    grouped = parts.groups is not None
    # Words of the scales are read of prepared weights only.
    prepared = parts.scales.pointer if q.scale_layout == PREPARED else 0
    facts = {
        "format": q.format,
        "rows": q.shape[1] if stacked else math.prod(q.shape[:-1]),
        "columns": q.shape[-1],
        "batches": q.shape[0] if stacked else 1,
        "scale_layout": q.scale_layout,
        "dtype": name,
        "decode": "batch_row" if stacked and parts.decode == "row" else parts.decode,
        "groups": parts.groups.shape[0] - 1 if parts.groups is not None else None,
        "tiles": parts.scales.shape[0] if grouped and q.scale_layout == "tcgen" else None,
        "offsets_dtype": parts.groups.dtype if parts.groups is not None else None,
        "starts_dtype": parts.tile_starts.dtype if parts.tile_starts is not None else None,
        "aligned": not (parts.codes.pointer | target.pointer | prepared) & 15,
    }
    buffers = {
        "codes": parts.codes,
        "scales": parts.scales,
        "decode_scale": parts.decode_scale,
        "row_offsets": parts.groups,
        "tile_starts": parts.tile_starts,
        "out": target,
    }
    kept = None if out is None else again
    _place.launch(where, "dequantize", facts, buffers, outputs=("out",), again=kept)
    return target.owner if out is None else out
