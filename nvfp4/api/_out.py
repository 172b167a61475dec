"""Checks and writes of ``out``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from .._parts import check_contiguous, check_dtype
from ..arrays import Array, Spec
from ..formats import PREPARED, BlockFormat
from ..tensor import Parts, QTensor, make

__all__ = [
    "Shapes",
    "Target",
    "check_apart",
    "check_dense",
    "check_grouped",
    "check_out",
    "check_out_tensor",
    "check_qtensor",
    "check_result",
    "extent",
    "own_ranges",
    "store",
]


def check_qtensor(name: str, value: Any) -> None:
    """A QTensor, not its parts in a tuple."""
    if not isinstance(value, QTensor):
        raise TypeError(
            f"{name} must be a QTensor; got {type(value).__name__}. Make one with "
            "nvfp4.quantize(...), or of parts that you have with "
            "nvfp4.QTensor.from_parts(codes, scales, format, ...)"
        )


def check_out_tensor(out: Any, fmt: BlockFormat) -> Parts:
    """A QTensor to be written, of this format; its parts."""
    check_qtensor("out", out)
    if out.format != fmt.name:
        raise ValueError(f"out must be a QTensor of format {fmt.name}; got one of {out.format}")
    if out.scale_layout == PREPARED:
        raise ValueError(
            f"out must have linear or tcgen scales; got scale_layout {PREPARED!r}: only "
            "nvfp4.prepare_weights writes prepared weights"
        )
    parts: Parts = out.parts
    return parts


def check_dense(out: QTensor) -> None:
    """A QTensor to be written by a call without ranges has none: it would be read by them."""
    if out.groups is not None:
        raise ValueError(
            "out must not be a grouped QTensor (its groups must be None) for a call without ranges"
        )


def check_out(
    out: tuple[Any, ...],
    shape: tuple[int, ...],
    scale_layout: str,
    decode: tuple[int, ...],
    like: Spec,
) -> None:
    """The metadata of a QTensor to be written.

    `out` is (shape, scale_layout, specs of codes, scales and decode_scale).
    """
    out_shape, out_layout, codes, scales, decode_spec = out
    if out_shape != shape:
        raise ValueError(f"out must have shape {shape}; got {out_shape}")
    if out_layout != scale_layout:
        raise ValueError(f"out must have scale_layout {scale_layout!r}; got {out_layout!r}")
    if decode_spec.shape != decode and not (decode == () and decode_spec.shape == (1,)):
        raise ValueError(
            f"out.decode_scale must have shape {decode} for this encode_scale; got "
            f"{decode_spec.shape}"
        )
    for name, spec in (("codes", codes), ("scales", scales), ("decode_scale", decode_spec)):
        check_writable(f"out.{name}", spec, like)


def check_writable(name: str, spec: Spec, like: Spec) -> None:
    """An array that can be written, where the inputs are."""
    if spec.device != like.device:
        raise ValueError(
            f"{name} must be on the same device as the inputs, {like.where}; got {spec.where}"
        )
    if spec.readonly:
        raise ValueError(f"{name} must be writable; got a read-only array")
    if arrays.overlaps_itself(spec):
        raise ValueError(
            f"{name} must not overlap itself, as a broadcast array does; got strides "
            f"{spec.strides} bytes for shape {spec.shape}"
        )
    check_contiguous(name, spec)


def check_result(name: str, spec: Spec, shape: tuple[int, ...], dtype: str, like: Spec) -> None:
    """The metadata of an array of values to be written."""
    check_dtype(name, spec, (dtype,), ", and the dtype asked for is " + dtype)
    if spec.shape != shape:
        raise ValueError(f"{name} must have shape {shape}; got {spec.shape}")
    check_writable(name, spec, like)


_PARTS = ("out.codes", "out.scales", "out.decode_scale")


def extent(spec: Spec) -> tuple[int, int]:
    """First byte of an array and the one after its last, from its pointer; (0, 0): empty."""
    low = high = 0
    for size, stride in zip(spec.shape, spec.strides, strict=True):
        if size == 0:
            return 0, 0
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high + spec.itemsize


def check_apart(
    names: Sequence[str],
    inputs: Sequence[Array | None],
    outputs: Sequence[Array],
    written: Sequence[str] = _PARTS,
    *,
    extents: Sequence[tuple[int, int]] | None = None,
) -> None:
    """No output shares memory with an input or with another output.

    `extents`, of all inputs that are not None and then of all outputs, save the look at shapes and
    strides where the arrays lie clearly apart.
    """
    if extents is not None:
        present = [array for array in (*inputs, *outputs) if array is not None]
        spans = sorted(
            [
                (a.pointer + low, a.pointer + high)
                for a, (low, high) in zip(present, extents, strict=True)
            ]
        )
        reached = 0
        for low, high in spans:
            if low < reached:
                break
            reached = high
        else:
            return
    for i, output in enumerate(outputs):
        for name, array in zip(names, inputs, strict=True):
            if array is not None and arrays.overlap(array, output):
                raise ValueError(f"{written[i]} must not overlap {name}: they share memory")
        for j in range(i):
            if arrays.overlap(outputs[j], output):
                raise ValueError(f"{written[i]} must not overlap {written[j]}: they share memory")


def decode_on_host(parts: Parts) -> np.ndarray:
    """The decode scale as the golden model takes it: one for a whole tensor has shape ()."""
    values = arrays.host(parts.decode_scale)
    return values.reshape(()) if parts.decode == "scalar" else values


class Shapes(NamedTuple):
    """Of the arrays of a QTensor that a call makes."""

    codes: tuple[int, ...]
    scales: tuple[int, ...]
    decode: tuple[int, ...]


class Target(NamedTuple):
    """The QTensor that a call makes: the caller's `out`, or a new one when it is known where."""

    format: BlockFormat
    shape: tuple[int, ...]
    scale_layout: str
    groups: Array | None
    out: QTensor | None
    parts: Parts | None

    def stored(self, results: Sequence[np.ndarray], like: Array) -> QTensor:
        """Codes, scales and decode scale of the golden model, as the caller gets them."""
        if self.out is not None and self.parts is not None:
            for target, result in zip(self.parts[:3], results, strict=True):
                store(target, result)
            return self.out
        codes, scales, decode = (
            arrays.as_array(arrays.from_host(np.asarray(result), like), "result")
            for result in results
        )
        return self._of(codes, scales, decode)

    def written(
        self, shapes: Shapes, like: Array, stream: int
    ) -> tuple[QTensor, Array, Array, Array]:
        """The tensor and its arrays, for kernels to write."""
        if self.out is not None and self.parts is not None:
            return (self.out, *self.parts[:3])
        codes = arrays.empty(shapes.codes, "uint8", like, stream=stream)
        scales = arrays.empty(shapes.scales, "uint8", like, stream=stream)
        decode = arrays.empty(shapes.decode, "float32", like, stream=stream)
        return self._of(codes, scales, decode), codes, scales, decode

    def _of(self, codes: Array, scales: Array, decode: Array) -> QTensor:
        return make(codes, scales, decode, self.format, self.shape, self.scale_layout, self.groups)


def store(target: Array, values: np.ndarray) -> None:
    """Write a result of the golden model into a host array of the caller's."""
    memory = arrays.host(target)
    memory[...] = np.reshape(values, memory.shape)


def check_grouped(name: str, parts: Parts, offsets_name: str) -> Array:
    """A QTensor to be written by ranges has ranges; where they begin."""
    groups = parts.groups
    if groups is None:
        raise ValueError(
            f"{name}.groups must be {offsets_name}; it is None, so that {name} is not a "
            f"grouped QTensor: dataclasses.replace({name}, groups={offsets_name}) makes it one"
        )
    return groups


def own_ranges(name: str, parts: Parts, offsets: Array, offsets_name: str) -> None:
    """The offsets of a QTensor that is to be written are those of the call, now and afterwards."""
    own = check_grouped(name, parts, offsets_name)
    same = own.spec == offsets.spec and own.pointer == offsets.pointer
    if not same and own.device is None and offsets.device is None:
        same = np.array_equal(arrays.host(own), arrays.host(offsets))
    if not same:
        raise ValueError(
            f"{name}.groups must be {offsets_name} itself, since {name} is read with its "
            f"groups later: pass dataclasses.replace({name}, groups={offsets_name})"
        )
