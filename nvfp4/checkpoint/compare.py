"""How much of a checkpoint was lost: a quantised one against its original, tensor by tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..formats import BlockFormat
from ..golden.casts import E4M3_TABLE, E8M0_TABLE, widen
from ..golden.dequantize import element_scale_product
from .container import FLOATS
from .errors import CheckpointError, printable
from .model import Checkpoint, open_checkpoint, row_ranges
from .numeric import CHUNK
from .schemes import StoredWeight

__all__ = ["BINS", "Comparison", "Verification", "verify"]

BINS = 41


@dataclass(frozen=True)
class Comparison:
    """One tensor.

    Attributes
    ----------
    name : str
        Of the original tensor.
    format : str
        Empty for a tensor that is passed through.
    shape : tuple of int
    sqnr : float
        Signal to quantisation noise in dB; infinite where nothing is lost.
    max_error : float
        Largest absolute difference.
    amax : float
        Largest magnitude of the original.
    nans : int
        Values that are NaN in the original or in the quantised tensor.
    status : {"ok", "mismatch", "nan", "noise"}
    message : str
        What is wrong.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    sqnr: float
    max_error: float
    amax: float
    nans: int
    status: str = "ok"
    message: str = ""


@dataclass
class Verification:
    """All tensors.

    ``errors`` counts differences of the quantised weights in units of their block's scale, from -h
    to h in `BINS` bins, h half the widest step between elements (1 for e2m1, 16 for e4m3).
    """

    original: Path
    quantised: Path
    tensors: list[Comparison] = field(default_factory=list)
    errors: dict[str, np.ndarray] = field(default_factory=dict)
    signal: float = 0.0
    noise: float = 0.0

    @property
    def passed(self) -> bool:
        """Nothing is wrong."""
        return all(t.status == "ok" for t in self.tensors)

    @property
    def sqnr(self) -> float:
        """Of all quantised weights together, in dB."""
        return _decibels(self.signal, self.noise)


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if noise == math.inf or signal <= 0:
        return -math.inf
    return 10 * math.log10(signal / noise)


def verify(
    original: str | os.PathLike[str],
    quantised: str | os.PathLike[str],
    *,
    min_sqnr: float | None = None,
    report: Callable[[int], None] | None = None,
) -> Verification:
    """Compare a quantised checkpoint with what it was made from.

    Parameters
    ----------
    original, quantised : path
        Files or folders. The original may be quantised too (after `convert`).
    min_sqnr : float, optional
        dB that every quantised weight must reach.
    report : callable, optional
        Gets the bytes of the original as they are compared.

    Returns
    -------
    Verification
        Tensors that are not quantised must be equal byte for byte; none may be missing or added.

    Raises
    ------
    CheckpointError, OSError
        One of the two cannot be read.
    """
    report = report or (lambda _: None)
    with open_checkpoint(original) as old, open_checkpoint(quantised) as new:
        result = Verification(old.path, new.path)
        seen: set[str] = set()
        for weight in new.found.weights.values():
            comparison, names = _weight(old, new, weight, min_sqnr, result)
            seen.update(names)
            result.tensors.append(comparison)
            report(sum(old.entries[n].nbytes for n in names if n in old.entries))
        rest = list(new.found.plain)
        rest += [n for f in new.found.foreign.values() for n in f.names]
        for name in rest:
            seen.add(name)
            result.tensors.append(_plain(old, new, name))
            report(old.entries[name].nbytes if name in old.entries else 0)
        for name, entry in old.entries.items():
            if name not in seen:
                result.tensors.append(
                    _wrong(name, entry.shape, f"missing from {printable(new.path)}")
                )
    return result


def _wrong(name: str, shape: tuple[int, ...], message: str, format: str = "") -> Comparison:
    return Comparison(name, format, shape, math.nan, math.nan, math.nan, 0, "mismatch", message)


def _plain(old: Checkpoint, new: Checkpoint, name: str) -> Comparison:
    entry = new.entries[name]
    other = old.entries.get(name)
    if other is None:
        return _wrong(name, entry.shape, f"not in {printable(old.path)}")
    if (other.dtype, other.shape) != (entry.dtype, entry.shape):
        return _wrong(
            name, entry.shape,
            f"was {other.dtype} {list(other.shape)}, is {entry.dtype} {list(entry.shape)}",
        )  # fmt: skip
    a, b = old.raw(name), new.raw(name)
    equal, nans = True, 0
    step = 1 << 23
    for start in range(0, a.size, step):
        x, y = a[start : start + step], b[start : start + step]
        equal = equal and bool(np.array_equal(x, y))
        old.release_part(name, start, start + step)
        new.release_part(name, start, start + step)
    if entry.dtype in FLOATS:
        flat = new.array(name).reshape(-1)
        for start in range(0, flat.size, CHUNK):
            nans += int(np.isnan(widen(flat[start : start + CHUNK])).sum())
            first = start * flat.itemsize
            new.release_part(name, first, first + CHUNK * flat.itemsize)
        del flat
    del a, b
    old.release(name)
    new.release(name)
    if not equal:
        return _wrong(name, entry.shape, "its bytes have changed")
    status, message = ("nan", f"{nans} values are NaN") if nans else ("ok", "")
    return Comparison(name, "", entry.shape, math.inf, 0.0, math.nan, nans, status, message)


def _weight(
    old: Checkpoint,
    new: Checkpoint,
    weight: StoredWeight,
    min_sqnr: float | None,
    result: Verification,
) -> tuple[Comparison, tuple[str, ...]]:
    """The comparison of a quantised weight, and the original's tensors that it covers."""
    fmt = weight.scheme.format
    source = old.found.weights.get(weight.module)
    names: tuple[str, ...]
    if source is not None:
        shape, names, label = source.shape, source.names, weight.module
    else:
        name = f"{weight.module}.weight"
        transposed = name not in old.entries and weight.module in old.entries
        name = weight.module if transposed else name
        entry = old.entries.get(name)
        if entry is None:
            message = f"no weight of this name in {printable(old.path)}"
            return _wrong(weight.module, weight.shape, message, fmt.name), ()
        names, label, shape = (name,), name, entry.shape
        if entry.dtype not in FLOATS:
            return _wrong(name, shape, f"the original is {entry.dtype}", fmt.name), names
        if transposed and len(shape) > 1:
            shape = (*shape[:-2], shape[-1], shape[-2])
    if shape != weight.shape:
        message = f"was {list(shape)}, is {list(weight.shape)}"
        return _wrong(label, weight.shape, message, fmt.name), names
    if weight.extras:
        message = f"{printable(weight.extras[0])} changes its product: not comparable"
        return _wrong(label, weight.shape, message, fmt.name), names
    try:
        measured = _measure(old, new, weight, names[0], source, result)
    except CheckpointError as error:
        return _wrong(label, weight.shape, str(error), fmt.name), names
    sqnr, max_error, amax, nans = measured
    status, message = "ok", ""
    if nans:
        status, message = "nan", f"{nans} values are NaN"
    elif max_error == math.inf:
        status, message = "noise", "values are infinite in one of the two"
    elif min_sqnr is not None and not sqnr >= min_sqnr:
        status, message = "noise", f"{sqnr:.2f} dB is under {min_sqnr:g} dB"
    comparison = Comparison(
        label, fmt.name, weight.shape, sqnr, max_error, amax, nans, status, message
    )
    return comparison, names


def _measure(
    old: Checkpoint,
    new: Checkpoint,
    weight: StoredWeight,
    name: str,
    source: StoredWeight | None,
    result: Verification,
) -> tuple[float, float, float, int]:
    """SQNR, largest error, largest magnitude and NaNs; adds to the totals."""
    fmt = weight.scheme.format
    half = 1.0 if fmt.element == "e2m1" else 16.0
    counts = result.errors.setdefault(fmt.name, np.zeros(BINS, np.int64))
    table = E4M3_TABLE if fmt.scale == "e4m3" else E8M0_TABLE
    signal = noise = max_error = amax = 0.0
    nans = 0
    decode = new.scale_of_row(weight)
    originals = _originals(old, weight, name, source)
    with np.errstate(all="ignore"):
        for (start, stop), x in originals:
            scales = new.scales(weight, start, stop)
            if fmt.scale == "e4m3" and (scales & 0x80).any():
                raise CheckpointError("a block scale is negative")
            y = _values(new, weight, fmt, start, stop, decode)
            difference = y - x
            bad = np.isnan(difference)
            nans += int(bad.sum())
            if bad.any():
                difference = np.where(bad, 0, difference)
            x64 = np.where(bad, 0, x).astype(np.float64)
            signal += float(np.sum(x64 * x64))
            noise += float(np.sum(difference.astype(np.float64) ** 2))
            max_error = max(max_error, float(np.max(np.abs(difference), initial=0)))
            amax = max(amax, float(np.max(np.abs(x64), initial=0)))
            if source is None:
                unit = table[scales] * decode[start:stop]
                steps = difference.reshape(*scales.shape, -1) / unit[..., None]
                where = (np.nan_to_num(steps).reshape(-1) + half) * (BINS / (2 * half))
                counts += np.bincount(np.clip(where, 0, BINS - 1).astype(np.intp), minlength=BINS)
            del scales
    result.signal += signal
    result.noise += noise
    new.release_weight(weight)
    if source is not None:
        old.release_weight(source)
    else:
        old.release(name)
    return _decibels(signal, noise), max_error, amax, nans


def _values(
    model: Checkpoint,
    weight: StoredWeight,
    fmt: BlockFormat,
    start: int,
    stop: int,
    decode: np.ndarray,
) -> np.ndarray:
    """Dequantised rows, float32; source: section 4 of the arithmetic definition."""
    product = element_scale_product(
        model.codes(weight, start, stop), model.scales(weight, start, stop), fmt,
        shape=(stop - start, weight.shape[-1]), scale_layout="linear",
    )  # fmt: skip
    return product * decode[start:stop]


def _originals(
    old: Checkpoint, weight: StoredWeight, name: str, source: StoredWeight | None
) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Rows of the original, float32, in the order of the quantised weight's."""
    rows, columns = weight.rows, weight.shape[-1]
    elements = CHUNK // 4
    if source is not None:
        decode = old.scale_of_row(source)
        for start, stop in row_ranges(rows, columns, elements):
            yield (
                (start, stop),
                _values(old, source, source.scheme.format, start, stop, decode),
            )
        return
    array = old.array(name)
    if name.endswith(".weight"):
        matrix = array.reshape(rows, columns)
        for start, stop in row_ranges(rows, columns, elements):
            yield (start, stop), widen(matrix[start:stop])
            width = columns * matrix.itemsize
            old.release_part(name, start * width, stop * width)
        return
    height = weight.shape[-2]
    for index, matrix in enumerate(array.reshape(-1, *array.shape[-2:])):
        for start, stop in row_ranges(height, columns, elements):
            base = index * height
            rows_ = np.ascontiguousarray(matrix.T[start:stop])
            yield (base + start, base + stop), widen(rows_)
