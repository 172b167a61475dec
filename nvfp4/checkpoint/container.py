"""Reading a safetensors file: a strict header parser and views of the mapped file.

The container is 8 bytes of little-endian header length, a JSON header, and the data. The
``safetensors`` package can only load whole tensors and knows no eight-bit floats in NumPy; here a
file of any size costs the pages that are looked at, and `TensorFile.release` gives them back.

The parser accepts less than the format's text allows, never more than the ``safetensors`` package
does: the data of the tensors must fill the file without gap or overlap, sizes must equal dtype
times shape, and a name may occur once.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .errors import CheckpointError, printable

__all__ = ["DTYPES", "HEADER_LIMIT", "Dtype", "Entry", "TensorFile", "parse_header"]

HEADER_LIMIT = 100_000_000
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Dtype:
    """An element type of the container: bits, and the NumPy or ml_dtypes name (None: no array)."""

    bits: int
    numpy: str | None


# In the order in which the safetensors package sorts types: a file that is written largest type
# first keeps every tensor aligned to its element.
DTYPES: dict[str, Dtype] = {
    "BOOL": Dtype(8, "bool"),
    "F4": Dtype(4, None),
    "F6_E2M3": Dtype(6, None),
    "F6_E3M2": Dtype(6, None),
    "U8": Dtype(8, "uint8"),
    "I8": Dtype(8, "int8"),
    "F8_E5M2": Dtype(8, "float8_e5m2"),
    "F8_E4M3": Dtype(8, "float8_e4m3fn"),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu"),
    "I16": Dtype(16, "int16"),
    "U16": Dtype(16, "uint16"),
    "F16": Dtype(16, "float16"),
    "BF16": Dtype(16, "bfloat16"),
    "I32": Dtype(32, "int32"),
    "U32": Dtype(32, "uint32"),
    "F32": Dtype(32, "float32"),
    "C64": Dtype(64, "complex64"),
    "F64": Dtype(64, "float64"),
    "I64": Dtype(64, "int64"),
    "U64": Dtype(64, "uint64"),
}
_OF_ML_DTYPES = {"bfloat16", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu"}
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: type, shape, and its bytes ``start`` to ``stop`` of the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


def byte_count(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, exactly.

    Raises
    ------
    CheckpointError
        Unknown dtype, or sub-byte elements that do not fill whole bytes.
    """
    if dtype not in DTYPES:
        raise CheckpointError(
            f"unknown dtype '{printable(dtype)}'; allowed are {', '.join(DTYPES)}"
        )
    bits = math.prod(shape) * DTYPES[dtype].bits
    if bits % 8:
        raise CheckpointError(f"{dtype} {list(shape)} does not fill whole bytes")
    return bits // 8


def numpy_dtype(dtype: str) -> np.dtype[Any] | None:
    """The NumPy type of a container type; None for types of less than a byte."""
    name = DTYPES[dtype].numpy
    if name is None:
        return None
    if name in _OF_ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name).newbyteorder("<") if DTYPES[dtype].bits > 8 else np.dtype(name)


def parse_header(header: bytes, data_size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Check the JSON header of a file against the size of its data.

    Parameters
    ----------
    header : bytes
    data_size : int
        Bytes that follow the header.

    Returns
    -------
    entries : dict of str to Entry
        In the order of their data.
    metadata : dict of str to str

    Raises
    ------
    CheckpointError
        Anything that is not exactly as the format says.
    """
    if header[:1] != b"{":
        raise CheckpointError("the header does not begin with '{'")
    try:
        text = header.decode("utf-8")
        parsed = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CheckpointError(f"the header is not JSON in UTF-8: {error}") from error
    except ValueError as error:  # an integer of more digits than Python converts
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the header holds a value that is none: {error}") from error
    metadata = parsed.pop(_METADATA, {})
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{_METADATA} must map strings to strings")
    entries = {name: _entry(name, value) for name, value in parsed.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    end = 0
    for name, entry in ordered:
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a gap"
            raise CheckpointError(
                f"tensor '{printable(name)}' {what}: it starts at {entry.start}, "
                f"the data before it ends at {end}"
            )
        end = entry.stop
    if end != data_size:
        raise CheckpointError(
            f"the tensors take {end} bytes, the file has {data_size} after its header"
            + (": it is truncated" if end > data_size else "")
        )
    return dict(ordered), metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise CheckpointError(f"the header names '{printable(key)}' twice")
        found[key] = value
    for key in found:
        # JSON can spell half a surrogate pair, which no file or terminal can take.
        if any("\ud800" <= c <= "\udfff" for c in key):
            raise CheckpointError(f"the name {key!r} is not valid Unicode")
    return found


def _no_constant(name: str) -> Any:
    raise CheckpointError(f"the header holds {name}, which is not JSON")


def _entry(name: str, value: Any) -> Entry:
    shown = printable(name)
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"tensor '{shown}' must have dtype, shape and data_offsets, and nothing else"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        raise CheckpointError(f"tensor '{shown}': dtype must be a string; got {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise CheckpointError(
            f"tensor '{shown}': shape must be a list of whole numbers from 0 to 2^63 - 1"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise CheckpointError(f"tensor '{shown}': data_offsets must be two whole numbers")
    start, stop = offsets
    try:
        size = byte_count(dtype, tuple(shape))
    except CheckpointError as error:
        raise CheckpointError(f"tensor '{shown}': {error}") from error
    if stop - start != size:
        raise CheckpointError(
            f"tensor '{shown}': {dtype} {shape} takes {size} bytes, "
            f"its data_offsets {offsets} give it {stop - start}"
        )
    return Entry(dtype, tuple(shape), start, stop)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


class TensorFile:
    """A safetensors file, mapped read-only.

    Parameters
    ----------
    path : str or path

    Attributes
    ----------
    path : Path
    entries : dict of str to Entry
        In the order of their data.
    metadata : dict of str to str
    size : int
        Bytes of the file.

    Raises
    ------
    CheckpointError
        The file is not a strict safetensors file; the message says why and names it.
    OSError
        It cannot be opened.

    Notes
    -----
    Arrays are views of the file: they are read-only and valid while it is open.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._map: mmap.mmap | None = None
        mode = os.stat(self.path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # opening a pipe would wait for ever
            raise CheckpointError(f"{printable(self.path)} is not a regular file")
        with open(self.path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            try:
                self._read(file)
            except CheckpointError as error:
                raise CheckpointError(f"{printable(self.path)}: {error}") from error

    def _read(self, file: Any) -> None:
        if self.size < 8:
            raise CheckpointError(f"{self.size} bytes cannot hold a safetensors header")
        length = int.from_bytes(file.read(8), "little")
        if length > HEADER_LIMIT:
            raise CheckpointError(
                f"the header claims {length} bytes; at most {HEADER_LIMIT} are allowed"
            )
        if length > self.size - 8:
            raise CheckpointError(
                f"the header claims {length} bytes, the file has {self.size - 8} after that number"
            )
        header = file.read(length)
        self._data = 8 + length
        self.entries, self.metadata = parse_header(header, self.size - self._data)
        self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file, as soon as no array looks into it any more."""
        self._map = None

    def raw(self, name: str) -> np.ndarray:
        """The bytes of a tensor: uint8, [nbytes], a read-only view of the file.

        Raises
        ------
        KeyError
            No such tensor.
        """
        entry = self.entries[name]
        if self._map is None:
            raise ValueError(f"{self.path} is closed")
        return np.frombuffer(self._map, np.uint8, entry.nbytes, self._data + entry.start)

    def array(self, name: str) -> np.ndarray:
        """A tensor as an array, [*shape], a read-only view of the file.

        Raises
        ------
        KeyError
            No such tensor.
        TypeError
            Elements of less than a byte (F4, F6) have no NumPy type; see `raw`.
        """
        entry = self.entries[name]
        dtype = numpy_dtype(entry.dtype)
        if dtype is None:
            raise TypeError(f"'{printable(name)}' is {entry.dtype}, which no NumPy array can hold")
        return self.raw(name).view(dtype).reshape(entry.shape)

    def release(self, name: str) -> None:
        """Give back the memory that reading this tensor took; it can be read again."""
        entry = self.entries[name]
        self.release_range(entry.start, entry.stop)

    def release_range(self, start: int, stop: int) -> None:
        """Give back the pages that lie wholly in these bytes of the data."""
        if self._map is None or not hasattr(self._map, "madvise"):
            return
        first = -(-(self._data + start) // mmap.PAGESIZE) * mmap.PAGESIZE
        last = min(self._data + stop, self.size) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def file_order(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Names in the order of the safetensors package: larger types first, then by name."""
    for dtype, shape in tensors.values():
        byte_count(dtype, shape)
    rank = {dtype: i for i, dtype in enumerate(DTYPES)}
    return sorted(tensors, key=lambda name: (-rank[tensors[name][0]], name.encode()))
