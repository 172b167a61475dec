"""Quantised matrices of random bytes to multiply with, and their values where they are sampled."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import api, golden
from ..formats import FORMATS, BlockFormat
from ..layouts import codes_shape, scale_shape
from ..tensor import QTensor
from .correct import scale_offsets
from .devices import Device
from .timing import FOOTPRINT

__all__ = ["bits_of", "copies_of", "make_weights", "prepared_copies", "values_of"]

MOST_COPIES = 64
#: Scale bytes from .. to (not included): values near 1, none of them special.
_SCALES = {"e8m0": (121, 127), "e4m3": (0x30, 0x40)}


def bits_of(fmt: BlockFormat) -> float:
    """Bits of an element with its share of the block scale."""
    return 8 / fmt.codes_per_byte + 8 / fmt.block


def copies_of(fmt: BlockFormat, shape: tuple[int, ...]) -> int:
    """Copies to rotate so that none is served from the second-level cache."""
    each = math.prod(shape) * bits_of(fmt) / 8
    return max(1, min(MOST_COPIES, math.ceil(FOOTPRINT / each)))


def make_weights(device: Device, fmt: BlockFormat, shape: tuple[int, ...]) -> QTensor:
    """Random codes and scales [..., N, K], tcgen layout, decode scale 1."""
    codes = device.random_bytes(codes_shape(fmt, shape))
    if fmt.codes_per_byte == 1:
        codes &= 0xBF  # float8 of any bits would have NaN, and values of any size
    scales = device.random_bytes(scale_shape(fmt, shape, "tcgen"), *_SCALES[fmt.scale])
    lead = shape[:-2]
    decode = device.full(lead, 1.0, "float32")
    return QTensor.from_parts(codes, scales, fmt, shape=shape, decode_scale=decode)


def prepared_copies(
    device: Device, fmt: BlockFormat, shape: tuple[int, ...], count: int
) -> tuple[list[QTensor], QTensor]:
    """So many random weights as products like them best, and what the first of them was made of.

    Of the others the original is gone: the two together may be more than a card holds.
    """
    first = make_weights(device, fmt, shape)
    made = [api.prepare_weights(first)]
    made += [api.prepare_weights(make_weights(device, fmt, shape)) for _ in range(count - 1)]
    return made, first


def values_of(
    device: Device, weights: QTensor, rows: np.ndarray, expert: int | None = None
) -> np.ndarray:
    """Element times scale of some rows of one matrix, float32 and exact, on the host.

    Parameters
    ----------
    weights
        As :func:`make_weights` made it.
    rows
        Row numbers of the matrix.
    expert
        Which matrix, of several.
    """
    fmt = FORMATS[weights.format]
    columns = weights.shape[-1]
    codes: Any = weights.codes if expert is None else weights.codes[expert]
    scales: Any = weights.scales if expert is None else weights.scales[expert]
    at = scale_offsets(rows, columns // fmt.block)
    found = device.rows(scales.reshape(-1), at.reshape(-1)).reshape(at.shape)
    return golden.element_scale_product(
        device.rows(codes, rows), found, fmt, shape=(len(rows), columns), scale_layout="linear"
    )
