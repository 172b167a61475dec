"""What the parts of a QTensor must be, and what is said when they are not.

Source: sections 1 (codes), 4 (decode scale), 5 and 6 (scale layouts, tiles of ranges) of the
arithmetic definition. Metadata is checked everywhere; values only where the host can read them.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from . import layouts
from .arrays import Array, Spec, host
from .formats import PREPARED, TENSOR_LAYOUTS, BlockFormat

__all__ = [
    "FLOATS",
    "OFFSET_DTYPES",
    "check_byte_dtype",
    "check_device",
    "check_dtype",
    "check_offsets",
    "check_option",
    "check_tile_starts",
    "code_dtypes",
    "codes_and_scales",
    "decode_kind",
    "groups_spec",
    "logical_shape",
    "scale_bytes",
    "scale_dtypes",
    "shape_of_codes",
]

#: What is quantised, and what products are.
FLOATS = ("float32", "float16", "bfloat16")
OFFSET_DTYPES = ("int32", "int64", "uint32")


def check_option(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """A string out of a few."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def check_dtype(name: str, spec: Spec, allowed: tuple[str, ...], hint: str = "") -> None:
    """The dtype of an array."""
    if spec.dtype not in allowed:
        raise TypeError(f"{name} must be of dtype {' or '.join(allowed)}; got {spec.dtype}{hint}")


def check_device(name: str, spec: Spec, like: Spec, like_name: str) -> None:
    """An array where another one is."""
    if spec.device != like.device:
        raise ValueError(
            f"{name} must be on the same device as {like_name}: {like_name} is on {like.where} "
            f"({like.library}), {name} on {spec.where} ({spec.library})"
        )


def check_contiguous(name: str, spec: Spec) -> None:
    """C order, for arrays that kernels take by their pointer alone (a host array is copied)."""
    if spec.device is not None and not spec.contiguous:
        raise ValueError(
            f"{name} must be contiguous on a GPU; got strides {spec.strides} bytes for shape "
            f"{spec.shape}: pass {contiguous_call(name, spec)}"
        )


def contiguous_call(name: str, spec: Spec) -> str:
    """What makes an array contiguous, in the words of its library."""
    if spec.library == "torch":
        return f"{name}.contiguous()"
    module = "cupy" if spec.library == "cupy" else "numpy"
    return f"{module}.ascontiguousarray({name}), or .contiguous()"


def logical_shape(shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of ints."""
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except TypeError:
        raise TypeError(f"shape must be a tuple of ints; got {shape!r}") from None
    if not sizes or min(sizes) < 0:
        raise ValueError(f"shape must have at least one axis and no negative one; got {sizes}")
    return sizes


def code_dtypes(fmt: BlockFormat) -> tuple[str, ...]:
    """Dtypes that codes may come in, as bytes or as what the bytes are."""
    return ("uint8", {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}.get(fmt.element, "uint8"))


def scale_dtypes(fmt: BlockFormat) -> tuple[str, ...]:
    """Dtypes that block scales may come in."""
    return ("uint8", "float8_e4m3fn" if fmt.scale == "e4m3" else "float8_e8m0fnu")


def check_byte_dtype(name: str, spec: Spec, allowed: tuple[str, ...]) -> None:
    """Bytes: uint8, or the float8 dtype of the format."""
    check_dtype(name, spec, tuple(dict.fromkeys(allowed)))


def shape_of_codes(fmt: BlockFormat, spec: Spec) -> tuple[int, ...]:
    """The logical shape that codes stand for."""
    if not spec.shape:
        raise ValueError("codes must have at least one axis; got shape ()")
    return (*spec.shape[:-1], spec.shape[-1] * fmt.codes_per_byte)


def codes_and_scales(
    fmt: BlockFormat,
    shape: tuple[int, ...],
    layout: str,
    codes: Spec,
    scales: Spec,
    groups: int | None,
    starts: bool,
) -> None:
    """dtype, shape and place of codes and scales.

    Parameters
    ----------
    fmt, shape, layout
        Of the tensor.
    codes, scales : Spec
    groups : int or None
        Number of ranges of a grouped tensor.
    starts : bool
        Whether the first tiles of the ranges are given.
    """
    check_option("scale_layout", layout, TENSOR_LAYOUTS)
    if layout == PREPARED and groups is not None:
        raise ValueError(
            f"groups must be None with scale_layout {PREPARED!r}: prepared weights have no ranges"
        )
    check_dtype("codes", codes, ("uint8",))
    check_dtype("scales", scales, ("uint8",))
    expected = layouts.codes_shape(fmt, shape, layout)
    if codes.shape != expected:
        also = f" with scale_layout {layout!r}" if layout == PREPARED else ""
        raise ValueError(
            f"codes must have shape {expected} for a {fmt.name} tensor of {shape}{also}; got "
            f"{codes.shape}"
        )
    expected = layouts.scale_shape(fmt, shape, layout)
    tiled = layout == "tcgen"
    if groups is None or not tiled:
        if scales.shape != expected:
            raise ValueError(
                f"scales must have shape {expected} for a {fmt.name} tensor of {shape} with "
                f"scale_layout {layout!r}; got "
                f"{scales.shape}{_other_layout(fmt, shape, layout, scales)}"
            )
    else:
        enough = _worst_case_tiles(shape[0], groups)
        if scales.shape[1:] != expected[1:] or len(scales.shape) != len(expected):
            raise ValueError(
                f"scales must have shape [tiles, {', '.join(map(str, expected[1:]))}] for a "
                f"grouped {fmt.name} tensor of {shape} with scale_layout 'tcgen'; got "
                f"{scales.shape}"
            )
        # On a GPU nobody looks at the offsets, so that there must be tiles for the worst of them.
        if scales.device is not None and not starts and scales.shape[0] < enough:
            raise ValueError(
                f"scales must have at least {enough} tiles of 128 rows for {shape[0]} rows in "
                f"{groups} ranges; got {scales.shape[0]}"
            )
    check_device("scales", scales, codes, "codes")
    check_contiguous("codes", codes)
    check_contiguous("scales", scales)


def _worst_case_tiles(rows: int, groups: int) -> int:
    """The most tiles that any offsets of so many rows and ranges need."""
    return (rows + 127 * min(groups, rows)) // 128


def _other_layout(fmt: BlockFormat, shape: tuple[int, ...], layout: str, scales: Spec) -> str:
    other = "linear" if layout == "tcgen" else "tcgen"
    try:
        fits = layouts.scale_shape(fmt, shape, other) == scales.shape
    except ValueError:
        return ""
    return f", which is the shape of scale_layout {other!r}" if fits else ""


def decode_kind(shape: tuple[int, ...], groups: int | None, spec: Spec, codes: Spec) -> str:
    """Check a decode scale; which rows one entry serves: "scalar", "row", "batch" or "group"."""
    check_dtype("decode_scale", spec, ("float32",))
    check_device("decode_scale", spec, codes, "codes")
    check_contiguous("decode_scale", spec)
    got = spec.shape
    allowed = {"scalar": (), "row": (*shape[:-1], 1)}
    if groups is not None:
        allowed["group"] = (groups,)
    elif len(shape) == 3:
        allowed["batch"] = (shape[0],)
    for kind in ("group", "batch", "row", "scalar"):
        if kind in allowed and got == allowed[kind]:
            return kind
    if got == (1,) and groups is None and len(shape) != 3:
        return "scalar"
    shapes = ", ".join(str(value) for value in allowed.values())
    raise ValueError(
        f"decode_scale must have one of the shapes {shapes} for a tensor of {shape}; got {got}"
    )


def groups_spec(name: str, spec: Spec, codes: Spec, shape: tuple[int, ...]) -> int:
    """Check the row offsets' metadata; the number of ranges."""
    if len(shape) != 2:
        raise ValueError(f"a grouped tensor has shape [R, K]; got {shape}")
    return index_array(name, spec, codes, "codes", OFFSET_DTYPES, None) - 1


def index_array(
    name: str,
    spec: Spec,
    like: Spec,
    like_name: str,
    dtypes: tuple[str, ...],
    length: int | None,
    *,
    empty: bool = False,
) -> int:
    """Check the metadata of a one-dimensional integer array; its length.

    Without a `length` to match, at least 1, unless it may be `empty`.

    """
    check_dtype(name, spec, dtypes)
    if len(spec.shape) != 1 or (length is not None and spec.shape[0] != length):
        wanted = "one axis" if length is None else f"shape ({length},)"
        raise ValueError(f"{name} must have {wanted}; got shape {spec.shape}")
    if length is None and not empty and spec.shape[0] < 1:
        raise ValueError(
            f"{name} must have one entry more than there are ranges, so at least one; got "
            "shape (0,)"
        )
    check_device(name, spec, like, like_name)
    check_contiguous(name, spec)
    return spec.shape[0]


def check_offsets(name: str, offsets: Array, rows: int) -> None:
    """The values of row offsets on the host: from 0, not decreasing, within the rows."""
    values = host(offsets).astype(np.int64)
    if values[0] != 0:
        raise ValueError(f"{name} must start at 0; got {values[0]}")
    falls = np.flatnonzero(np.diff(values) < 0)
    if falls.size:
        at = int(falls[0])
        raise ValueError(
            f"{name} must not decrease; got {values[at]} then {values[at + 1]} at index {at + 1}"
        )
    if values[-1] > rows:
        raise ValueError(
            f"{name} must end at or before the number of rows, {rows}; got {values[-1]}"
        )


def check_tile_starts(
    starts: Array | None, offsets: Array, tiles: int, *, written: bool = False
) -> None:
    """First tiles on the host: each range within the tiles, apart from others if `written`."""
    bounds = host(offsets).astype(np.int64)
    counts = layouts.scale_tiles(np.diff(bounds))
    if starts is None:
        needed = int(counts.sum())
        if needed > tiles:
            raise ValueError(
                f"scales must have at least {needed} tiles of 128 rows for these ranges; got "
                f"{tiles}"
            )
        return
    first = host(starts).astype(np.int64)
    used = counts > 0
    bad = np.flatnonzero(used & ((first < 0) | (first + counts > tiles)))
    if bad.size:
        at = int(bad[0])
        raise ValueError(
            f"tile_starts must keep each range within the {tiles} tiles of scales; range {at} "
            f"has {counts[at]} tiles from {first[at]} on"
        )
    order = np.argsort(first[used], kind="stable")
    begin, end = first[used][order], (first + counts)[used][order]
    if written and np.any(end[:-1] > begin[1:]):
        raise ValueError(
            "tile_starts must give no tile of scales to two ranges where they are written"
        )


def scale_bytes(
    name: str,
    scales: Array,
    shape: tuple[int, ...],
    fmt: BlockFormat,
    layout: str,
    groups: Array | None,
    starts: Array | None,
) -> None:
    """No logical nvfp4 scale on the host has bit 7 set (padding may hold anything).

    Of prepared weights, the headers are such as ``prepare_weights`` writes.
    """
    values = host(scales)
    if layout == PREPARED:
        _check_headers(name, values, fmt)
        return
    if fmt.scale != "e4m3" or not (values & 0x80).any():
        return
    blocks = layouts.block_count(fmt, shape[-1])
    if layout == "linear":
        logical = values
    elif groups is None:
        row, block = np.arange(shape[-2])[:, None], np.arange(blocks)
        flat = values.reshape(*shape[:-2], -1)
        logical = flat[..., layouts.tcgen_offset(row, block, layouts.scale_k_tiles(blocks))]
    else:
        offsets = host(groups).astype(np.int64)
        first = layouts.tile_starts(offsets) if starts is None else host(starts)
        lengths = np.diff(offsets)
        row = np.arange(offsets[-1]) + np.repeat(
            128 * first.astype(np.int64) - offsets[:-1], lengths
        )
        logical = values.reshape(-1)[
            layouts.tcgen_offset(row[:, None], np.arange(blocks), layouts.scale_k_tiles(blocks))
        ]
    if (logical & 0x80).any():
        raise ValueError(
            f"{name} of an nvfp4 tensor must be e4m3fn values without a sign, bit 7 of each byte "
            f"being 0; got {int(logical[(logical & 0x80) != 0][0]):#04x}: are these the e8m0 "
            "scales of an MX format?"
        )


def _check_headers(name: str, scales: np.ndarray, fmt: BlockFormat) -> None:
    """The first bytes of prepared scales are a float32 factor that there may be, and zeros.

    Of mxfp4, two words between them for products on FP8 tensor cores: 0 both or neither.
    """
    headers = scales.reshape(-1, scales.shape[-1])[:, : layouts.PREPARED_HEADER]
    factors = np.ascontiguousarray(headers[:, :4]).view(np.float32)[:, 0]
    powers = 2.0 ** np.arange(layouts.PREPARED_BIAS[fmt.element] + 1)
    allowed = [512.0] if fmt.scale == "e4m3" else [0.0, *powers]
    facts = np.ascontiguousarray(headers[:, 4:]).view("<u4")
    if fmt.name == "mxfp4":
        # 2^(s - 133) of the largest scale s; then what stored scales lose, twice, as exponents.
        exponent, less = facts[:, 0] >> 23, facts[:, 1] >> 23
        top = exponent.astype(np.int64) + 6
        fine = (facts[:, 0] & 0x7FFFFF == 0) & (top >= 20) & (top < 255)
        fine &= (less == np.minimum(top, 128) - 13) & (facts[:, 1] == less * 0x00800080)
        fine &= facts[:, 2] == 0
        unlike = ~fine & facts.any(axis=1)
    else:
        unlike = facts.any(axis=1)
    bad = np.flatnonzero(~np.isin(factors, allowed) | unlike)
    if bad.size:
        raise ValueError(
            f"{name} of a prepared {fmt.name} tensor must begin with the 16 bytes that "
            "nvfp4.prepare_weights writes, a float32 factor and what follows from it; got "
            f"{headers[bad[0]].tolist()}: was it never written?"
        )
