"""What is in a checkpoint, weight by weight: formats, ranges of scales, and what looks wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..golden.casts import E4M3_TABLE, E8M0_TABLE, widen
from .container import FLOATS
from .errors import CheckpointError
from .model import Checkpoint, open_checkpoint, row_ranges
from .numeric import CHUNK
from .schemes import StoredWeight

__all__ = ["PlainReport", "Survey", "WeightReport", "inspect"]


@dataclass(frozen=True)
class WeightReport:
    """A quantised weight.

    Attributes
    ----------
    module, convention, algorithm, format : str
    shape : tuple of int
        Logical.
    bytes : int
        Of all its tensors.
    tensor_scale : tuple of float or None
        Smallest and largest, as multipliers.
    input_scale : float or None
        Of the activations, a multiplier.
    scales : tuple of float or None
        Smallest and largest block scale that is neither 0 nor NaN.
    blocks, dead_blocks, zero_scales, full_scales, nan_blocks, bad_scales : int
        Blocks in all; with no element but 0; with scale byte 0; with the largest
        scale; with NaN; with a scale byte that the format does not have.
    saturated : float
        Part of the elements with the largest magnitude.
    problem : str
        What a reader must refuse, or nothing.
    """

    module: str
    convention: str
    algorithm: str
    format: str
    shape: tuple[int, ...]
    bytes: int
    tensor_scale: tuple[float, float] | None
    input_scale: float | None
    scales: tuple[float, float] | None
    blocks: int
    dead_blocks: int
    zero_scales: int
    full_scales: int
    nan_blocks: int
    bad_scales: int
    saturated: float
    problem: str = ""


@dataclass(frozen=True)
class PlainReport:
    """A tensor that is not part of a quantised weight of ours; counts are None where not looked at.

    ``kind`` is empty, or says what it belongs to ("fp8", ...).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    amax: float | None = None
    nans: int | None = None
    infinities: int | None = None
    kind: str = ""


@dataclass
class Survey:
    """All of a checkpoint."""

    path: Path
    convention: str | None
    weights: list[WeightReport] = field(default_factory=list)
    plain: list[PlainReport] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(r.bytes for r in self.weights) + sum(r.bytes for r in self.plain)


def inspect(path: str | os.PathLike[str], *, report: Callable[[int], None] | None = None) -> Survey:
    """Look at every tensor of a checkpoint.

    Parameters
    ----------
    path : path
        A .safetensors file, a folder, or a .gguf file.
    report : callable, optional
        Gets the bytes as they are looked at.

    Returns
    -------
    Survey

    Raises
    ------
    CheckpointError, OSError
        It cannot be read, or weights and scales do not belong together.
    """
    report = report or (lambda _: None)
    with open_checkpoint(path) as model:
        survey = Survey(model.path, model.convention)
        for weight in model.found.weights.values():
            survey.weights.append(_weight(model, weight))
            report(survey.weights[-1].bytes)
        for foreign in model.found.foreign.values():
            for name in foreign.names:
                entry = model.entries[name]
                survey.plain.append(
                    PlainReport(name, entry.dtype, entry.shape, entry.nbytes, kind=foreign.kind)
                )
                report(entry.nbytes)
        for name in model.found.plain:
            survey.plain.append(_plain(model, name))
            report(survey.plain[-1].bytes)
    return survey


def _weight(model: Checkpoint, weight: StoredWeight) -> WeightReport:
    fmt = weight.scheme.format
    table = E4M3_TABLE if fmt.scale == "e4m3" else E8M0_TABLE
    histogram = np.zeros(256, np.int64)
    dead = saturated = nan_codes = size = 0
    top = {"e2m1": 7, "e4m3": 0x7E, "e5m2": 0x7B}[fmt.element]
    for start, stop in row_ranges(weight.rows, weight.shape[-1], CHUNK):
        codes, scales = model.codes(weight, start, stop), model.scales(weight, start, stop)
        size += codes.nbytes + scales.nbytes
        histogram += np.bincount(scales.reshape(-1), minlength=256)
        blocks = codes.reshape(stop - start, scales.shape[1], -1)
        magnitudes = 0x77 if fmt.codes_per_byte == 2 else 0x7F
        dead += int(np.count_nonzero(~(blocks & magnitudes).any(axis=-1)))
        if fmt.codes_per_byte == 2:
            saturated += int(np.count_nonzero((codes & 0x07) == top))
            saturated += int(np.count_nonzero((codes & 0x70) == top << 4))
        else:
            saturated += int(np.count_nonzero((codes & 0x7F) == top))
            bad = (blocks & 0x7F) > (0x7E if fmt.element == "e4m3" else 0x7C)
            nan_codes += int(np.count_nonzero(bad.any(axis=-1) & (scales != 0xFF)))
        del codes, scales, blocks
    model.release_weight(weight)
    problem = ""
    tensor_scale = input_scale = None
    try:
        decode = model.decode_scale(weight)
        if "tensor_scale" in weight.parts:
            tensor_scale = float(decode.min()), float(decode.max())
        stored = model.stored_scale(weight, "input_scale")
        if stored is not None:
            input_scale = float((1 / stored if weight.scheme.divides else stored).max())
    except CheckpointError as error:
        problem = str(error)
    values = table[:127] if fmt.scale == "e4m3" else table[:255]
    used = [float(values[b]) for b in np.flatnonzero(histogram[: len(values)]) if values[b] > 0]
    bad_scales = int(histogram[0x80:].sum()) if fmt.scale == "e4m3" else 0
    if bad_scales and not problem:
        problem = f"{bad_scales} block scales are negative"
    blocks_in_all = int(histogram.sum())
    for role in ("tensor_scale", "input_scale"):
        if role in weight.parts:
            size += model.entries[weight.parts[role]].nbytes
    size += sum(model.entries[name].nbytes for name in weight.extras)
    full, nan = (0x7E, 0x7F) if fmt.scale == "e4m3" else (0xFE, 0xFF)
    return WeightReport(
        module=weight.module,
        convention=weight.scheme.convention,
        algorithm=weight.scheme.algorithm,
        format=fmt.name,
        shape=weight.shape,
        bytes=size,
        tensor_scale=tensor_scale,
        input_scale=input_scale,
        scales=(min(used), max(used)) if used else None,
        blocks=blocks_in_all,
        dead_blocks=dead,
        zero_scales=int(histogram[0]),
        full_scales=int(histogram[full]),
        nan_blocks=int(histogram[nan]) + nan_codes,
        bad_scales=bad_scales,
        saturated=saturated / max(1, blocks_in_all * fmt.block),
        problem=problem,
    )


def _plain(model: Checkpoint, name: str) -> PlainReport:
    entry = model.entries[name]
    base = PlainReport(name, entry.dtype, entry.shape, entry.nbytes)
    if entry.dtype not in FLOATS:
        return base
    flat = model.array(name).reshape(-1)
    amax, nans, infinities = 0.0, 0, 0
    for start in range(0, flat.size, CHUNK):
        x = widen(flat[start : start + CHUNK])
        first = start * flat.itemsize
        model.release_part(name, first, first + CHUNK * flat.itemsize)
        finite = np.isfinite(x)
        if not finite.all():
            nans += int(np.isnan(x).sum())
            infinities += int(np.isinf(x).sum())
            x = x[finite]
        amax = max(amax, float(np.max(np.abs(x), initial=0)))
    del flat
    model.release(name)
    return PlainReport(name, entry.dtype, entry.shape, entry.nbytes, amax, nans, infinities)
