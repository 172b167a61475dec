"""The encode scale of a quantiser, as the caller may give it.

Source: section 3 of the arithmetic definition (which values are legal, what "amax" means), section
6 (by expert).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from .._parts import check_dtype, check_option
from ..arrays import Array, Spec
from ..formats import SCALE_ROUNDINGS, BlockFormat

__all__ = ["Encode", "encode_kind", "read_encode_scale", "real_number"]

#: Smallest legal encode scale: the smallest normal float32, so that its reciprocal is finite.
SMALLEST = 2.0**-126
_OF_ARRAYS = ("shape", "__dlpack__", "__cuda_array_interface__")


class Encode(NamedTuple):
    """An encode scale as given: "none", "amax", "row_amax", "scalar" (a number) or "array"."""

    given: str
    number: np.float32 | None = None
    array: Array | None = None

    @property
    def spec(self) -> Spec | None:
        """Metadata of the array, if it is one."""
        return None if self.array is None else self.array.spec

    @property
    def value(self) -> np.float32 | Array | None:
        """What a kernel's buffer of that name is given: a number goes by value."""
        return self.number if self.array is None else self.array

    def for_golden(self) -> Any:
        """As the golden model takes it."""
        if self.array is not None:
            return arrays.host(self.array)
        return self.given if self.given in ("amax", "row_amax") else self.number


_NONE, _AMAX, _ROW_AMAX = Encode("none"), Encode("amax"), Encode("row_amax")


def read_encode_scale(value: Any, stream: Any) -> Encode:
    """Sort out what was passed, and look at the values that the host can read.

    Raises
    ------
    TypeError
        Neither None, a number, an array, nor a string.
    ValueError
        Another string than "amax" and "row_amax"; a value that is not finite or is below 2^-126.
    """
    if value is None:
        return _NONE
    if isinstance(value, str):
        if value == "amax":
            return _AMAX
        if value == "row_amax":
            return _ROW_AMAX
        raise ValueError(
            "encode_scale must be None, a number, a float32 array, 'amax' or 'row_amax'; got "
            f"{value!r}"
        )
    number = real_number(value)
    if number is not None:
        if not (math.isfinite(number) and number >= SMALLEST):
            raise ValueError(f"encode_scale must be finite and at least 2^-126; got {value!r}")
        return Encode("scalar", number)
    if isinstance(value, np.generic) or not any(hasattr(value, name) for name in _OF_ARRAYS):
        raise TypeError(
            "encode_scale must be a number, a float32 array, None, 'amax' or 'row_amax'; got "
            f"{type(value).__name__}"
        )
    array = arrays.as_array(value, "encode_scale", stream=stream)
    check_dtype("encode_scale", array.spec, ("float32",))
    if array.device is None:
        values = arrays.host(array)
        bad = ~(np.isfinite(values) & (values >= np.float32(SMALLEST)))
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            place = f" at index {at}" if at else ""
            raise ValueError(
                "encode_scale must be finite and at least 2^-126 everywhere; got "
                f"{values[at]}{place}"
            )
    return Encode("array", None, array)


def real_number(value: Any) -> np.float32 | None:
    """A number as float32, infinite where it is too large; None for anything else."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.number)):
        return None
    if isinstance(value, np.complexfloating):
        return None
    with np.errstate(over="ignore"):
        try:
            return np.float32(value)
        except OverflowError:
            return np.float32(math.inf)


def check_rounding(scale_rounding: Any, fmt: BlockFormat, encoded: bool) -> None:
    """Check the rounding of MX scales; nvfp4, and any encode scale, take one alone."""
    check_option("scale_rounding", scale_rounding, SCALE_ROUNDINGS)
    if scale_rounding == "rceil":
        return
    if fmt.scale == "e4m3":
        raise ValueError(
            f"scale_rounding must be 'rceil' for {fmt.name}, whose scales are e4m3; got "
            f"{scale_rounding!r}"
        )
    if encoded:
        raise ValueError(
            f"scale_rounding must be 'rceil' together with an encode_scale; got {scale_rounding!r}"
        )


def encode_kind(
    given: str,
    spec: Spec | None,
    fmt: BlockFormat,
    shapes: Mapping[str, tuple[int, ...]],
    like: Spec,
) -> str:
    """What an encode scale means for a format, in the words of the plans.

    Parameters
    ----------
    given : str
        As in `Encode`.
    spec : Spec or None
        Metadata of an array.
    fmt : BlockFormat
    shapes : mapping
        Kind -> the shape that an array of this kind has, such as ``{"array": (), "row": (M, 1)}``.
    like : Spec
        The input, whose device is asked for.

    Returns
    -------
    str
        ``"none"`` where the scale is 1 by definition (mxfp8 always, "amax" of MX formats).
    """
    kind = given
    if given == "row_amax" and fmt.scale != "e4m3":
        raise ValueError(f"encode_scale='row_amax' is for nvfp4; got format {fmt.name}")
    if spec is not None:
        found = [name for name, shape in shapes.items() if spec.shape == shape]
        if not found:
            allowed = ", ".join(str(shape) for shape in dict.fromkeys(shapes.values()))
            raise ValueError(
                f"encode_scale must be a number or have one of the shapes {allowed} here; got "
                f"{spec.shape}"
            )
        if spec.device != like.device:
            raise ValueError(
                f"encode_scale must be on the same device as x: x is on {like.where}, "
                f"encode_scale on {spec.where}; a plain number goes with both"
            )
        if spec.device is not None and not spec.contiguous:
            raise ValueError(
                f"encode_scale must be contiguous on a GPU; got strides {spec.strides} bytes"
            )
        kind = found[0]
    # The maximum serves nvfp4's scales; a power of two fits any maximum (section 3).
    if fmt.scale == "e8m0" and (fmt.element != "e2m1" or kind == "amax"):
        return "none"
    return kind
