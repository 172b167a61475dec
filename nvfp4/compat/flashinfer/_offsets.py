"""Offsets of groups, as FlashInfer pads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import arrays
from ..._parts import check_contiguous, check_offsets
from ...api import _flashinfer as device
from ...arrays import Array

__all__ = ["pad_indptr_to_multiple_of_4", "read_indptr"]


def read_indptr(m_indptr: Any, rows: int | None) -> Array:
    """Check offsets of groups: int32, [G+1]; on the host from 0, not decreasing, to `rows`."""
    offsets = arrays.as_array(m_indptr, "m_indptr")
    if offsets.dtype != "int32":
        raise ValueError(f"m_indptr must be a int32 tensor, but got {offsets.dtype}")
    if len(offsets.shape) != 1 or offsets.shape[0] < 1:
        raise ValueError(
            f"m_indptr must have shape (num_groups + 1,), but got shape {offsets.shape}"
        )
    check_contiguous("m_indptr", offsets.spec)
    if offsets.device is None:
        check_offsets("m_indptr", offsets, int(arrays.host(offsets)[-1]) if rows is None else rows)
    return offsets


def pad_indptr_to_multiple_of_4(m_indptr: Any, *, rows: int | None = None) -> tuple[Any, Any]:
    """Offsets of the same groups, each up to a multiple of four rows, and where each row goes.

    No function here needs such groups; callers of FlashInfer do.

    Parameters
    ----------
    m_indptr : array of int32, [G+1]
        Offsets of the groups.
    rows : int, optional
        Length of the second result; by default ``m_indptr[-1]``, which is then read back from a
        GPU, as FlashInfer does: the one place where anything is.

    Returns
    -------
    padded_m_indptr : array of int32, [G+1]
        Sums of the lengths rounded up.
    padded_m_rank : array of int32, [rows]
        Row r of group i goes to row ``padded_m_indptr[i] + r - m_indptr[i]``; -1 from row
        ``m_indptr[-1]`` on.

    Raises
    ------
    ValueError
        Another dtype or shape; offsets, where the host can read them, that do not start at 0,
        decrease or go beyond `rows`.
    TypeError
        `rows` is no int.
    """
    if rows is not None:
        if isinstance(rows, bool) or not isinstance(rows, (int, np.integer)):
            raise TypeError(f"rows must be an int; got {rows!r}")
        if rows < 0:
            raise ValueError(f"rows must not be negative; got {rows}")
    offsets = read_indptr(m_indptr, rows)
    if rows is None:
        rows = int(m_indptr[-1])
    return device.padded_offsets(offsets, int(rows))
