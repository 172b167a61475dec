"""Arrays of the seed's dtypes, poisoned, and its layouts written out from their definition."""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np

import nvfp4
from nvfp4.formats import FORMATS
from tests import exact

BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
POISON = 0xAA
#: Where calls run: the golden model, or the kernels of an architecture, simulated.
PLACES = ("golden", "sm_90a")
#: Format -> dtypes of codes and scales.
DTYPES = {
    "nvfp4": (np.uint8, E4M3),
    "mxfp4": (np.uint8, E8M0),
    "mxfp8_e4m3": (E4M3, E8M0),
}


def at(place: str) -> Any:
    """A context in which NumPy arrays run there."""
    return contextlib.nullcontext() if place == "golden" else nvfp4.simulate(place)


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that nobody has written: poison."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(size, POISON, np.uint8).view(dtype).reshape(shape)


def outputs(
    format: str, rows: int, columns: int, layout: str = "tcgen"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales to be written."""
    fmt = FORMATS[format]
    codes, scales = DTYPES[format]
    blocks = columns // fmt.block
    shape: tuple[int, ...] = (rows, blocks)
    if layout == "tcgen":
        shape = (-(-rows // 128), -(-blocks // 4), 32, 4, 4)
    return empty((rows, columns // fmt.codes_per_byte), codes), empty(shape, scales)


def tiled(scales: np.ndarray, tiles: int | None = None, first: Any = None) -> np.ndarray:
    """Scales [M, S] in the 5-D layout, padding 0; `first` is the scale row of each row."""
    rows, blocks = scales.shape
    k_tiles = -(-blocks // 4)
    out = np.zeros((-(-rows // 128) if tiles is None else tiles, k_tiles, 32, 4, 4), np.uint8)
    for r in range(rows):
        place = r if first is None else first[r]
        for b in range(blocks):
            out[place // 128, b // 4, place % 32, place % 128 // 32, b % 4] = scales[r, b]
    return out


def expected(
    x: np.ndarray, format: str, g: Any = None, rounding: str = "rceil"
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales [M, S] by exact rational arithmetic."""
    return exact.quantize(x, FORMATS[format], g, rounding)


def same(got: np.ndarray, wanted: np.ndarray) -> None:
    """Equal bytes."""
    np.testing.assert_array_equal(got.view(np.uint8), wanted)


def rows_of(seed: int, rows: int, columns: int, dtype: Any = BF16) -> np.ndarray:
    """Rows of very different size, zeros and signs among them.

    The first block of every other row has a maximum that roundings of scales are at odds about.
    """
    rng = np.random.default_rng(seed)
    size = 2.0 ** rng.integers(-8, 8, (rows, 1))
    x = rng.standard_normal((rows, columns)) * size
    x[rng.random((rows, columns)) < 0.1] = 0
    x[::2, 3] = -1.625 * 8 * size[::2, 0]
    return x.astype(dtype)
