"""The arithmetic that checkpoints need, a few million elements at a time.

It is the golden model's (or, on a GPU, the kernels', which give the same bytes); only the search
for better scales is this module's neighbour's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import ToolchainError
from ..formats import BlockFormat
from ..golden.casts import widen
from ..golden.quantize import quantize
from .model import row_ranges

__all__ = ["CHUNK", "CpuBackend", "GpuBackend", "amax_of", "backend", "encode_scale_of", "pieces"]

# Elements of a piece on the CPU: small against the memory bound, large against Python's cost.
CHUNK = 1 << 20
_GPU_CHUNK = 1 << 25
_FLT_MAX = np.finfo(np.float32).max


def pieces(matrix: np.ndarray, elements: int = CHUNK) -> Iterator[tuple[int, int, np.ndarray]]:
    """First row, end, and rows of a matrix, some at a time."""
    rows, columns = matrix.shape
    for start, stop in row_ranges(rows, columns, elements):
        yield start, stop, matrix[start:stop]


def amax_of(matrix: np.ndarray) -> np.float32:
    """Max |x| of a matrix, NaN if there is one, 0 of nothing; reads it piece by piece."""
    bits = np.dtype(f"uint{8 * matrix.itemsize}")
    magnitude = bits.type((1 << (8 * matrix.itemsize - 1)) - 1)
    largest = bits.type(0)
    for _, _, x in pieces(matrix):
        if x.size:
            # The patterns of magnitudes are ordered as the values, NaN above infinity.
            patterns = np.ascontiguousarray(x).view(bits) & magnitude
            largest = max(largest, patterns.max())
    return _value_of(largest, matrix.dtype)


def _value_of(pattern: Any, dtype: np.dtype[Any]) -> np.float32:
    one = np.array([pattern], f"uint{8 * dtype.itemsize}").view(dtype)
    return np.float32(widen(one)[0])


def encode_scale_of(amax: Any) -> np.float32:
    """The nvfp4 encode scale of a largest magnitude: min(RN(2688 / amax), FLT_MAX), or 1.

    Source: section 3 of the arithmetic definition ("amax").
    """
    amax = np.float32(amax)
    if not 0 < amax <= _FLT_MAX:
        return np.float32(1)
    with np.errstate(over="ignore"):
        return np.float32(min(np.float32(2688) / amax, _FLT_MAX))


class CpuBackend:
    """The golden model."""

    name = "CPU"
    chunk = CHUNK

    def amax(self, matrix: np.ndarray) -> np.float32:
        """Largest magnitude of a matrix, as `amax_of`."""
        return amax_of(matrix)

    def quantize(
        self, x: np.ndarray, fmt: BlockFormat, encode_scale: np.float32 | None, rounding: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Codes [M, K/2 or K] and linear scales [M, K/V] of a piece [M, K]."""
        codes, scales, _ = quantize(
            x, fmt, encode_scale=encode_scale, scale_rounding=rounding, scale_layout="linear"
        )
        return codes, scales


class GpuBackend:
    """The kernels, on one GPU, through CuPy."""

    chunk = _GPU_CHUNK

    def __init__(self, device: int = 0) -> None:
        try:
            import cupy

            count = cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            raise ToolchainError(
                "device 'cuda' needs CuPy and a GPU (install nvfp4[cuda13] or nvfp4[cuda12], or "
                f"use device 'cpu', which gives the same bytes); {error}"
            ) from error
        self._cupy = cupy
        self._device = cupy.cuda.Device(device % count)
        self.name = f"GPU {device % count}"

    def amax(self, matrix: np.ndarray) -> np.float32:
        """Largest magnitude of a matrix, as `amax_of`."""
        bits = f"uint{8 * matrix.itemsize}"
        largest = 0
        with self._device:
            for _, _, x in pieces(matrix, self.chunk):
                if x.size:
                    patterns = self._cupy.asarray(np.ascontiguousarray(x).view(bits))
                    patterns &= (1 << (8 * matrix.itemsize - 1)) - 1
                    largest = max(largest, int(patterns.max()))
        return _value_of(largest, matrix.dtype)

    def quantize(
        self, x: np.ndarray, fmt: BlockFormat, encode_scale: np.float32 | None, rounding: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Codes [M, K/2 or K] and linear scales [M, K/V] of a piece [M, K]."""
        from .. import quantize as on_device

        with self._device:
            q = on_device(
                self._cupy.asarray(np.ascontiguousarray(x)),
                fmt,
                encode_scale=None if encode_scale is None else float(encode_scale),
                scale_rounding=rounding,
                scale_layout="linear",
            )
            return self._cupy.asnumpy(q.codes), self._cupy.asnumpy(q.scales)


def backend(device: str, index: int = 0) -> CpuBackend | GpuBackend:
    """Where to quantise: "cpu", "cuda", or "auto", a GPU if there is one.

    Raises
    ------
    ValueError
        Another name.
    ToolchainError
        "cuda" without CuPy or without a GPU.
    """
    if device == "cpu":
        return CpuBackend()
    if device == "cuda":
        return GpuBackend(index)
    if device != "auto":
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda'; got {device!r}")
    try:
        return GpuBackend(index)
    except ToolchainError:
        return CpuBackend()
