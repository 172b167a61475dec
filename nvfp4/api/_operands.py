"""Operands of the products: a QTensor or a plain array, as golden model and plans take them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import arrays
from .._parts import check_contiguous, check_dtype
from ..arrays import Array
from ..epilogue import Epilogue
from ..formats import FORMATS, PREPARED
from ..tensor import Parts, QTensor, check_scale_bytes
from ._encode import real_number
from ._out import check_qtensor, decode_on_host

__all__ = ["Operand", "check_depth", "read_alpha", "read_epilogue", "read_operand"]

PLAIN = ("bfloat16", "float16")


class Operand(NamedTuple):
    """One side of a product."""

    name: str
    #: Logical shape, [..., K].
    shape: tuple[int, ...]
    plain: Array | None
    q: QTensor | None

    @property
    def parts(self) -> Parts | None:
        """The arrays of a QTensor."""
        return None if self.q is None else self.q.parts

    @property
    def first(self) -> Array:
        """The array that stands for the operand."""
        if self.plain is not None:
            return self.plain
        if self.parts is None:
            raise ValueError(f"{self.name} has no array")
        return self.parts.codes

    @property
    def named(self) -> tuple[tuple[str, Array | None], ...]:
        """All its arrays, by names for messages."""
        if self.plain is not None or self.parts is None:
            return ((self.name, self.plain),)
        parts = self.parts
        return (
            (f"{self.name}.codes", parts.codes),
            (f"{self.name}.scales", parts.scales),
            (f"{self.name}.decode_scale", parts.decode_scale),
            (f"{self.name}.groups", parts.groups),
            (f"{self.name}.tile_starts", parts.tile_starts),
        )

    def values(self) -> np.ndarray:
        """Element * scale (exact), or the plain values, for the golden model."""
        from .. import golden

        if self.plain is not None:
            return arrays.host(self.plain)
        q, parts = self.q, self.parts
        if q is None or parts is None:
            raise ValueError(f"{self.name} has no array")
        check_scale_bytes(f"{self.name}.scales", q)
        return golden.element_scale_product(
            arrays.host(parts.codes),
            arrays.host(parts.scales),
            FORMATS[q.format],
            shape=q.shape,
            scale_layout=q.scale_layout,
            row_offsets=None if parts.groups is None else arrays.host(parts.groups),
            tile_starts=None if parts.tile_starts is None else arrays.host(parts.tile_starts),
        )

    def decode(self) -> np.ndarray | None:
        """The decode scale for the golden model."""
        return None if self.parts is None else decode_on_host(self.parts)

    def facts(self) -> dict[str, Any]:
        """What plans are told, with the operand's letter in front."""
        letter, q, parts = self.name, self.q, self.parts
        if q is None or parts is None:
            return {
                f"{letter}_format": None,
                f"{letter}_dtype": self.first.dtype,
                f"{letter}_layout": None,
                f"decode_{letter}": "none",
            }
        layout, more = q.scale_layout, {}
        if layout == "tcgen" and parts.groups is not None:
            layout, more = "tcgen_grouped", {f"{letter}_tiles": parts.scales.shape[0]}
        return {
            **more,
            f"{letter}_format": q.format,
            f"{letter}_dtype": None,
            f"{letter}_layout": layout,
            f"decode_{letter}": "batch_row"
            if parts.decode == "row" and len(q.shape) == 3
            else parts.decode,
        }

    def buffers(self) -> dict[str, Any]:
        """Its arrays, by the names of kernels' buffers."""
        letter, parts = self.name, self.parts
        return {
            letter: self.plain,
            f"{letter}_codes": None if parts is None else parts.codes,
            f"{letter}_scales": None if parts is None else parts.scales,
            f"{letter}_decode": None if parts is None else parts.decode_scale,
        }


def read_operand(
    name: str, value: Any, axes: tuple[str, ...], *, plain: bool, stream: Any
) -> Operand:
    """Check the kind and the number of axes of an operand.

    Parameters
    ----------
    name : str
    value
        A QTensor, or an array where `plain` arrays are allowed.
    axes : tuple of str
        Names of its axes, such as ``("N", "K")``.
    plain : bool
    stream
        The call's ``stream`` argument.
    """
    if plain and not isinstance(value, (QTensor, tuple, list)):
        array = arrays.as_array(value, name, stream=stream)
        if array.dtype not in PLAIN:
            raise TypeError(
                f"{name} must be a QTensor, or an array of {' or '.join(PLAIN)}; got an array "
                f"of {array.dtype}: cast it, or quantise it with nvfp4.quantize"
            )
        operand = Operand(name, array.shape, array, None)
    else:
        check_qtensor(name, value)
        if plain and value.scale_layout == PREPARED:
            raise ValueError(
                f"{name} must have linear or tcgen scales; got scale_layout {PREPARED!r}: only b "
                "may be prepared by nvfp4.prepare_weights"
            )
        operand = Operand(name, value.shape, None, value)
    if len(operand.shape) != len(axes):
        raise ValueError(f"{name} must have shape [{', '.join(axes)}]; got {operand.shape}")
    return operand


class _Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def check_depth(a: _Shaped, b: Operand) -> int:
    """K, the same for both operands."""
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"a and b must have the same last axis (K), since b is [N, K]; got {a.shape} and "
            f"{b.shape}"
        )
    depth = a.shape[-1]
    if b.q is not None and depth % FORMATS[b.q.format].block:
        raise ValueError(
            f"K must be a multiple of {FORMATS[b.q.format].block} for {b.q.format}; got {depth}"
        )
    return depth


class Alpha(NamedTuple):
    """A factor: a number, or an array of one or of one by expert."""

    kind: str
    number: np.float32 | None
    array: Array | None

    def for_golden(self) -> Any:
        """As the golden model takes it."""
        if self.array is None:
            return self.number
        values = arrays.host(self.array)
        return values if self.kind == "expert" else values.reshape(())


def read_alpha(alpha: Any, experts: int | None, stream: Any) -> Alpha:
    """Check alpha; `experts` is E in a grouped product, else None."""
    if alpha is None and experts is not None:
        return Alpha("value", np.float32(1), None)
    number = real_number(alpha)
    if number is not None:
        return Alpha("value", number, None)
    if alpha is None or isinstance(alpha, (str, bool)):
        raise TypeError(f"alpha must be a number or a float32 array; got {alpha!r}")
    array = arrays.as_array(alpha, "alpha", stream=stream)
    check_dtype("alpha", array.spec, ("float32",))
    check_contiguous("alpha", array.spec)
    if experts is not None and array.shape == (experts,):
        return Alpha("expert", None, array)
    if array.shape == () or (experts is None and array.shape == (1,)):
        return Alpha("array", None, array)
    allowed = "()" if experts is None else f"() or ({experts},), one by expert"
    raise ValueError(
        f"alpha must be a number or a float32 array of shape {allowed}; got {array.shape}"
    )


#: dtypes of epilogue arrays.
_EPILOGUE_DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8")


class ReadEpilogue(NamedTuple):
    """An epilogue and its arrays."""

    epilogue: Epilogue | None
    arrays: tuple[Array, ...]

    @property
    def named(self) -> tuple[tuple[str, Array | None], ...]:
        """The arrays, by names for messages."""
        return tuple((f"epilogue array {i}", array) for i, array in enumerate(self.arrays))

    def columns(self, columns: int) -> int:
        """Columns of the result."""
        return columns if self.epilogue is None else self.epilogue.columns(columns)

    def check(self, rows: int, columns: int, experts: int) -> None:
        """The shapes of the arrays, for a result of this shape."""
        if self.epilogue is not None:
            shapes = [array.shape for array in self.arrays]
            self.epilogue.check_shapes(shapes, rows, columns, experts)

    def for_golden(self) -> Any:
        """As the golden model calls it."""
        if self.epilogue is None:
            return None
        return self.epilogue.with_arrays(tuple(arrays.host(array) for array in self.arrays)).on_host

    def facts(self) -> dict[str, Any]:
        """As plans take it."""
        if self.epilogue is None:
            return {"epilogue": None}
        return {"epilogue": self.epilogue.code(tuple(array.dtype for array in self.arrays))}

    def buffers(self) -> dict[str, Any]:
        """By the names of kernels' buffers."""
        return {f"epilogue_{i}": array for i, array in enumerate(self.arrays)}


def read_epilogue(value: Any, stream: Any) -> ReadEpilogue:
    """Check an epilogue: None, a function, or an `Epilogue`."""
    if value is None:
        return ReadEpilogue(None, ())
    epilogue = value if isinstance(value, Epilogue) else Epilogue(value)
    read = []
    for i, item in enumerate(epilogue.arrays):
        name = f"epilogue array {i}"
        array = arrays.as_array(item, name, stream=stream)
        check_dtype(name, array.spec, _EPILOGUE_DTYPES)
        check_contiguous(name, array.spec)
        read.append(array)
    return ReadEpilogue(epilogue, tuple(read))
