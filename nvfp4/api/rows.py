"""quantize_rows: rows of e4m3 with one scale each, the activations of ``compute="fp8"``."""

from __future__ import annotations

from typing import Any

from .. import arrays
from ..arrays import Array
from . import _place
from ._out import check_apart, check_result, store
from ._repeat import repeat
from .dense import check_floats, rows_of

__all__ = ["quantize_rows"]

_NAMES = ("out[0]", "out[1]")


def quantize_rows(x: Any, *, out: Any = None, stream: Any = None) -> tuple[Any, Any]:
    """Rows of e4m3 with one float32 scale each: `a` and `a_scale` of ``compute="fp8"``.

    ``g = min(448 / max |row|, 2^126)``, 1 where that maximum is 0, infinite or NaN;
    ``code = e4m3(x * g)``, to nearest even, saturating; ``scale = 1 / g``. Each operation rounds
    once in float32: the same bytes on every backend. Source: docs/decisions.md, D25.

    Parameters
    ----------
    x : array of bfloat16, float16 or float32, [M, K]
        K a multiple of 16.
    out : tuple (codes, scale), optional
        Arrays of the shapes and dtypes of the result; written and returned. Nothing is allocated
        then.
    stream : optional
        None (the current stream of the library of `x`), an int, or an object with
        ``__cuda_stream__``.

    Returns
    -------
    codes : array of uint8, [M, K]
    scale : array of float32, [M, 1]

    Raises
    ------
    TypeError
        `x` or an array of `out` is of the wrong kind or dtype.
    ValueError
        A shape that does not fit; arrays on different devices or overlapping ones.
    UnsupportedError
        There is no kernel for this GPU.
    """
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(f"out must be a tuple (codes, scale); got {type(out).__name__}")
    codes_out, scale_out = out or (None, None)
    given: Any = out
    again = "quantize_rows", (), (x, codes_out, scale_out)
    if out is not None and repeat(again, stream):
        return given  # type: ignore[no-any-return]
    source = arrays.as_array(x, "x", stream=stream)
    check_floats("x", source.spec)
    if len(source.shape) != 2:
        raise ValueError(f"x must have shape [M, K]; got {source.shape}")
    rows, columns = source.shape
    if columns % 16:
        raise ValueError(f"K must be a multiple of 16; got {columns}")
    written = _checked_out(source, codes_out, scale_out, stream) if out is not None else None
    where = _place.place((("x", source),), stream)
    if where.golden:
        from .. import golden

        made = golden.quantize_rows(arrays.host(source))
        if written is None:
            codes, scale = (arrays.from_host(values, source) for values in made)
            return codes, scale
        for target, values in zip(written, made, strict=True):
            store(target, values)
        return given  # type: ignore[no-any-return]
    if written is None:
        written = (
            arrays.empty((rows, columns), "uint8", source, stream=where.stream),
            arrays.empty((rows, 1), "float32", source, stream=where.stream),
        )
    source, row_stride = rows_of("x", source, where)
    steps = row_stride * source.spec.itemsize
    facts = {
        "dtype": source.dtype,
        "rows": rows,
        "columns": columns,
        "row_stride": row_stride,
        "aligned": not (source.pointer | written[0].pointer | steps) & 15,
    }
    _place.launch(
        where,
        "quantize_rows",
        facts,
        {"x": source, "codes": written[0], "scales": written[1]},
        outputs=("codes", "scales"),
        strided="x",
        again=None if out is None else again,
    )
    return given or (written[0].owner, written[1].owner)


def _checked_out(source: Array, codes: Any, scale: Any, stream: Any) -> tuple[Array, Array]:
    """Where the result goes."""
    rows, columns = source.shape
    written = (
        arrays.as_array(codes, _NAMES[0], stream=stream),
        arrays.as_array(scale, _NAMES[1], stream=stream),
    )
    shapes, dtypes = ((rows, columns), (rows, 1)), ("uint8", "float32")
    for name, array, shape, dtype in zip(_NAMES, written, shapes, dtypes, strict=True):
        check_result(name, array.spec, shape, dtype, source.spec)
    check_apart(("x",), (source,), written, _NAMES)
    return written
