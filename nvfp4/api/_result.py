"""The result of a product: an array of values, or a QTensor made of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import arrays, layouts
from .._parts import FLOATS, check_tile_starts
from ..arrays import Array
from ..formats import FORMAT_ALIASES, FORMATS, BlockFormat, block_format
from ..tensor import Parts, QTensor
from ._out import (
    Shapes,
    Target,
    check_apart,
    check_dense,
    check_grouped,
    check_out,
    check_out_tensor,
    check_result,
    own_ranges,
    store,
)
from ._place import Named, Place
from ._ranges import Ranges

__all__ = ["Result", "float_name"]


def float_name(dtype: Any, name: str) -> str:
    """Name of one of the three float dtypes."""
    found = arrays.dtype_name(dtype, name)
    if found not in FLOATS:
        raise TypeError(f"{name} must be one of {', '.join(map(repr, FLOATS))}; got {found!r}")
    return found


class Result:
    """Where a product goes: `out`, checked before anything runs, or what is allocated for it.

    Parameters
    ----------
    out_dtype
        A float dtype, or a block format.
    shape : tuple of int
        (rows, columns), or (matrices, rows, columns).
    out
        The caller's, or None.
    inputs : sequence of (argument name, Array or None)
        What `out` must not overlap; the first says of which library and where the result is.
    ranges : Ranges or None
        Of a grouped product.
    stream
        The call's ``stream`` argument.
    """

    def __init__(
        self,
        out_dtype: Any,
        shape: tuple[int, ...],
        out: Any,
        inputs: Named,
        ranges: Ranges | None,
        stream: Any,
    ) -> None:
        names, read = zip(*inputs, strict=True)
        self.like: Array = read[0]
        self.shape = shape
        #: With counts of rows the result is a stack of matrices like any other.
        self.ranges = None if ranges is None or ranges.capacity is not None else ranges
        self.out = out
        self.target: Array | None = None
        self.parts: Parts | None = None
        self.format = _format_of(out_dtype)
        if self.format is None:
            self.dtype = float_name(out_dtype, "out_dtype")
            if isinstance(out, QTensor):
                raise TypeError(
                    f"out must be an array of {self.dtype} with out_dtype {self.dtype!r}; got a "
                    f"QTensor of {out.format}: pass out_dtype={out.format!r} beside it"
                )
            if out is not None:
                self.target = arrays.as_array(out, "out", stream=stream)
                check_result("out", self.target.spec, shape, self.dtype, self.like.spec)
                check_apart(names, read, (self.target,), ("out",))
            return
        self.dtype = "float32"
        self.layout = "tcgen"
        if out is not None:
            check_out_tensor(out, self.format)
            self.layout = out.scale_layout
        if shape[-1] % self.format.block:
            raise ValueError(
                "the columns of the result (N, or N/2 of an epilogue of pairs) must be a multiple "
                f"of {self.format.block} with out_dtype {self.format.name!r}; got {shape[-1]}"
            )
        scales = layouts.scale_shape(self.format, shape, self.layout)
        if self.ranges is not None and self.layout == "tcgen":
            tiles = layouts.allocated_tiles(self.ranges.rows, self.ranges.groups)
            scales = (tiles, *scales[1:])
        decode: tuple[int, ...] = () if ranges is None else (ranges.groups,)
        self.shapes = Shapes(layouts.codes_shape(self.format, shape), scales, decode)
        groups = None if self.ranges is None else self.ranges.offsets
        if out is not None:
            self.parts = self._checked_parts(out)
            check_apart(names, read, self.parts[:3])
        self.tensor = Target(self.format, shape, self.layout, groups, out, self.parts)

    def _checked_parts(self, out: Any) -> Parts:
        parts: Parts = out.parts
        if self.ranges is not None:
            check_grouped("out", parts, "row_offsets")
        specs = (
            out.shape,
            out.scale_layout,
            parts.codes.spec,
            parts.scales.spec,
            parts.decode_scale.spec,
        )
        check_out(specs, self.shape, self.layout, self.shapes.decode, self.like.spec)
        if self.ranges is not None:
            own_ranges("out", parts, self.ranges.offsets, "row_offsets")
            if self.layout == "tcgen" and parts.codes.device is None:
                check_tile_starts(
                    parts.tile_starts, self.ranges.offsets, parts.scales.shape[0], written=True
                )
            self.shapes = self.shapes._replace(scales=parts.scales.shape)
        else:
            check_dense(out)
        return parts

    def stored(self, values: np.ndarray) -> Any:
        """What the caller gets of the golden model's values (float32, if to be quantised)."""
        if self.format is None:
            if self.target is None:
                return arrays.from_host(values, self.like)
            store(self.target, values)
            return self.out
        return self.tensor.stored(self._quantized(values, self.format), self.like)

    def _quantized(self, values: np.ndarray, fmt: BlockFormat) -> tuple[np.ndarray, ...]:
        from .. import golden

        if self.ranges is None:
            made = golden.quantize(values, fmt, scale_layout=self.layout)
            return (*made[:2], np.broadcast_to(made[2], self.shapes.decode))
        starts = None if self.parts is None else self.parts.tile_starts
        # The rows of a range that is switched off are zeros by now, and zeros have zero codes and
        # scales.
        return golden.grouped_quantize(
            values,
            fmt,
            row_offsets=arrays.host(self.ranges.offsets),
            scale_layout=self.layout,
            tile_starts=None if starts is None else arrays.host(starts),
            tiles=self.shapes.scales[0] if self.layout == "tcgen" else None,
        )

    def allocated(self, where: Place) -> dict[str, Array | None]:
        """Buffers for kernels to write, by their names; `out`, if it was given."""
        if self.format is None:
            if self.target is None:
                self.target = arrays.empty(self.shape, self.dtype, self.like, stream=where.stream)
                self.out = self.target.owner
            return {"out": self.target}
        written = self.tensor.written(self.shapes, self.like, where.stream)
        self.out, codes, scales, decode = written
        starts = None if self.parts is None else self.parts.tile_starts
        return {
            "out_codes": codes,
            "out_scales": scales,
            "out_decode": decode,
            "out_tile_starts": starts,
        }

    outputs = ("out", "out_codes", "out_scales", "out_decode")

    def facts(self) -> dict[str, Any]:
        """As plans take it."""
        if self.format is None:
            return {"out_dtype": self.dtype}
        tiled = self.layout == "tcgen" and (self.ranges is not None or len(self.shape) == 3)
        starts = None if self.parts is None else self.parts.tile_starts
        return {
            "out_dtype": self.format.name,
            "out_layout": self.layout,
            "out_tiles": math.prod(self.shapes.scales[:-4]) if tiled else None,
            "out_starts_dtype": None if starts is None else starts.dtype,
        }


def _format_of(out_dtype: Any) -> BlockFormat | None:
    """The block format that is asked for, None for a dtype."""
    if isinstance(out_dtype, BlockFormat):
        return out_dtype
    if not isinstance(out_dtype, str):
        return None
    if out_dtype in FORMATS or out_dtype in FORMAT_ALIASES:
        return block_format(out_dtype)
    return None
