"""Whether what was timed is right.

Quantisers: the timed graph is replayed twice over outputs that hold different poison; the two
results must agree in every byte, so that every byte was written and written alike. Then bytes are
compared with the golden model: all of them where the shape is small, else those of sampled rows,
the first, the last and those at the edges of tiles among them.

Products: sampled elements against float64 sums over the same exact products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import golden
from ..formats import FORMATS
from ..layouts import TILE_ROWS, scale_k_tiles, tcgen_offset, tile_starts
from .devices import Device

__all__ = ["check_products", "check_quantized", "largest_error", "sample_rows", "scale_offsets",
           "written_alike", "written_alike_values"]  # fmt: skip

POISONS = (0xAA, 0x55)
WHOLE = 1 << 20
SAMPLE = 64


def sample_rows(rows: int, count: int = SAMPLE, seed: int = 0) -> np.ndarray:
    """Row numbers, ascending: all, or `count` of them with the edges of tiles."""
    if rows <= count:
        return np.arange(rows)
    edges = [0, 1, 31, 32, 127, 128, rows // 2, rows - 2, rows - 1]
    some = np.random.default_rng(seed).integers(0, rows, count)
    chosen = np.unique(np.concatenate([[e for e in edges if 0 <= e < rows], some]))
    return chosen.astype(np.int64)


def scale_offsets(
    rows: np.ndarray, blocks: int, row_offsets: np.ndarray | None = None
) -> np.ndarray:
    """Offsets in the tcgen buffer of the scales of some rows, [rows, blocks].

    Parameters
    ----------
    rows
        Row numbers.
    blocks
        Of a row.
    row_offsets : [G+1], optional
        Ranges that start on tiles of their own; every row must be in one.
    """
    place = np.asarray(rows, np.int64)
    if row_offsets is not None:
        offsets = np.asarray(row_offsets, np.int64)
        group = np.searchsorted(offsets, place, side="right") - 1
        place = tile_starts(offsets).astype(np.int64)[group] * TILE_ROWS + place - offsets[group]
    return tcgen_offset(place[:, None], np.arange(blocks)[None, :], scale_k_tiles(blocks))


def written_alike(
    device: Device, replay: Callable[[], Any], outputs: Sequence[Any]
) -> tuple[str, list[Any]]:
    """Replay twice over different poison.

    Parameters
    ----------
    outputs
        Arrays of uint8 that are written.

    Returns
    -------
    str
        Empty, or what is wrong.
    """
    results = []
    for poison in POISONS:
        for array in outputs:
            device.fill(array, poison)
        device.wait()
        replay()
        device.wait()
        results.append([device.clone(array) for array in outputs])
    for first, second in zip(*results, strict=True):
        if not device.equal(first, second):
            return "two replays differ, or bytes were not written", results[1]
    return "", results[1]


def check_quantized(
    device: Device,
    replay: Callable[[], Any],
    cases: Sequence[tuple[Any, Any]],
    *,
    encode: Any = None,
    row_offsets: np.ndarray | None = None,
    hidden: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> str:
    """Check the results of a timed graph.

    Parameters
    ----------
    replay
        Writes the results again.
    cases
        Pairs of an input [M, K] and the QTensor that is made of it: some of those rotated.
    encode
        Encode scales: of shape (), or one a range; "row_amax".
    row_offsets
        Of a grouped call.
    hidden
        From rows of an input and their numbers to what of them is quantised: the rows themselves
        by default.

    Returns
    -------
    str
        What was compared, or ``"WRONG: ..."``.
    """
    outputs = [array for _, q in cases for array in (q.codes, q.scales)]
    wrong, _ = written_alike(device, replay, outputs)
    if wrong:
        return f"WRONG: {wrong}"
    said = ""
    for x, q in cases:
        said, wrong = _compare(device, x, q, encode, row_offsets, hidden)
        if wrong:
            return f"WRONG: {wrong}"
    return said


def _compare(
    device: Device,
    x: Any,
    q: Any,
    encode: Any,
    row_offsets: np.ndarray | None,
    hidden: Callable[[np.ndarray, np.ndarray], np.ndarray] | None,
) -> tuple[str, str]:
    """What was compared, and what differs."""
    fmt = FORMATS[q.format]
    count, columns = q.shape
    whole = count * columns <= WHOLE and row_offsets is None
    rows = np.arange(count) if whole else sample_rows(count)
    source = device.rows(x, rows)
    if hidden is not None:
        source = hidden(source, rows)
    g = encode
    if isinstance(encode, np.ndarray) and encode.ndim:
        groups = np.searchsorted(np.asarray(row_offsets), rows, side="right") - 1
        g = encode[groups][:, None]
    layout = "tcgen" if whole else "linear"
    codes, scales, _ = golden.quantize(source, fmt, encode_scale=g, scale_layout=layout)
    got_codes = device.rows(q.codes, rows)
    got_scales = device.host(q.scales)
    if not whole:
        at = scale_offsets(rows, columns // fmt.block, row_offsets)
        got_scales = got_scales.reshape(-1)[at]
    for name, got, want in (("codes", got_codes, codes), ("scales", got_scales, scales)):
        bad = int(np.count_nonzero(got != want))
        if got.shape != want.shape or bad:
            return "", f"{bad:,} of {want.size:,} {name} differ from the golden model's"
    return ("all bytes" if whole else f"{rows.size} rows"), ""


def written_alike_values(device: Device, call: Callable[[], Any], out: Any) -> str:
    """The same for a call that writes values: NaN before the first, 1 before the second.

    Returns
    -------
    str
        Empty, or what is wrong.
    """
    results = []
    for poison in (float("nan"), 1.0):
        device.fill(out, poison)
        device.wait()
        call()
        device.wait()
        results.append(device.clone(out))
    if not device.equal(*results):
        return "two calls differ, or elements were not written"
    return ""


def check_products(
    got: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    factor: float = 1.0,
    *,
    bits: int = 8,
    fp8: bool = False,
) -> str:
    """Compare elements of a product with float64 sums.

    Parameters
    ----------
    got : [rows, columns]
        Sampled elements.
    a : [rows, K]
    b : [rows, columns, K] or [columns, K]
        Element times scale, exact.
    factor
        Of the decode scales.
    bits
        Significant bits of the output type: 8 for bfloat16.
    fp8
        The products were added by FP8 tensor cores, which on Hopper keep about 14 bits of a sum of
        32 products and what was there before. 2^-10 sqrt(K) times the root of the squared products'
        sum is some 15 times the deviation that this gives; an element of another place is off by
        sqrt(2) times that root.

    Source of the formulas: an estimate, of errors that are independent from step to step; not a
    proven bound with `fp8`.

    Returns
    -------
    str
        What was compared, or ``"WRONG: ..."``.
    """
    left = a.astype(np.float64)
    right = b.astype(np.float64)
    exact = _sums(left, right) * factor
    size = _sums(np.abs(left), np.abs(right)) * abs(factor)
    # One rounding to the output type, and float32 sums in any order.
    bound = np.abs(exact) * 2.0**-bits + size * 2.0**-24 * math.sqrt(a.shape[-1]) * 8
    if fp8:
        root = np.sqrt(_sums(left**2, right**2)) * abs(factor)
        bound += root * 2.0**-10 * math.sqrt(a.shape[-1])
    error = np.abs(got.astype(np.float64) - exact)
    bad = ~(error <= bound)  # NaN, and poison, are bad too
    if bad.any():
        return f"WRONG: {int(bad.sum())} of {got.size} sampled elements are out of bounds"
    return f"{got.size} elements"


def largest_error(got: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Of elements as :func:`check_products` has them, in units of the largest exact one."""
    exact = _sums(a.astype(np.float64), b.astype(np.float64))
    return float(np.abs(got.astype(np.float64) - exact).max() / np.abs(exact).max())


def _sums(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Products of rows with all columns, or each with columns of its own."""
    if right.ndim == 2:
        made: np.ndarray = left @ right.T
        return made
    return np.einsum("rk,rck->rc", left, right)
