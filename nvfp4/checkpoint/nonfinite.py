"""NaN and infinite elements of a source: counted while it is quantised, and told to the user.

The block scales that are written say where to look, so that nothing is read a second time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..formats import BlockFormat
from ..golden.casts import widen
from .errors import printable
from .numeric import pieces

__all__ = ["NonFinite", "are_counts", "count_nonfinite", "nonfinite_notes"]

#: "nan_blocks": blocks whose scale became NaN; "infinite": infinite elements of the source.
NonFinite = dict[str, int]
_KEYS = {"nan_blocks", "infinite"}
_MOST = 8


def count_nonfinite(x: np.ndarray, scales: np.ndarray, fmt: BlockFormat) -> tuple[int, int]:
    """Blocks that became NaN, and infinite elements, of a piece.

    Parameters
    ----------
    x : numpy.ndarray of float32, float16 or bfloat16, [M, K]
    scales : numpy.ndarray of uint8, [M, K/V]
        What the piece was quantised to.
    fmt : BlockFormat

    Returns
    -------
    nan_blocks, infinite : int

    Notes
    -----
    Source: section 3 of the arithmetic definition. A block with NaN has the scale NaN, one with an
    infinite element the largest scale below it; only rows with one of the two are looked at.
    """
    nan = np.uint8(0x7F if fmt.scale == "e4m3" else 0xFF)
    rows = np.any(scales >= nan - np.uint8(1), axis=1)
    if not rows.any():
        return 0, 0
    infinite = 0
    for start, stop, piece in pieces(x):
        some = np.ascontiguousarray(piece[rows[start:stop]])
        infinite += int(np.count_nonzero(np.isinf(widen(some))))
    return int(np.count_nonzero(scales == nan)), infinite


def are_counts(value: object) -> bool:
    """Whether this is a table of counts by tensor, as a journal should hold it."""
    return isinstance(value, dict) and all(
        isinstance(counts, dict)
        and set(counts) == _KEYS
        and all(type(count) is int for count in counts.values())
        for counts in value.values()
    )


def nonfinite_notes(
    found: Mapping[str, NonFinite], weights: Mapping[str, tuple[BlockFormat, Sequence[int]]]
) -> list[str]:
    """Notes for the user, a tensor each; of many tensors the first.

    Parameters
    ----------
    found : mapping of str to NonFinite
        By tensor of the source.
    weights : mapping of str to (BlockFormat, shape)
        What the tensors became.
    """
    names = sorted(found)
    notes = [_note(name, found[name], *weights[name]) for name in names[:_MOST]]
    if len(names) > _MOST:
        notes.append(
            f"{_count(len(names) - _MOST, 'more tensor')} hold NaN or infinite elements "
            "(--json has the counts of all)"
        )
    return notes


def _note(name: str, counts: NonFinite, fmt: BlockFormat, shape: Sequence[int]) -> str:
    nan_blocks, infinite = counts["nan_blocks"], counts["infinite"]
    parts = []
    if nan_blocks:
        parts.append(
            f"{nan_blocks} of {_count(math.prod(shape) // fmt.block, 'block')} became NaN, "
            "for there is NaN in them"
        )
    if infinite:
        parts.append(
            f"{_count(infinite, 'element')} {'is' if infinite == 1 else 'are'} infinite, which "
            "leaves little of the others in a block"
        )
    if fmt.scale == "e4m3":
        parts.append(
            "the nvfp4 tensor scale of such a matrix, and of those that share it, is 1: too coarse "
            "for small values"
        )
    return f"{printable(name)}: {'; '.join(parts)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
