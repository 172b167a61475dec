"""Ranges of rows: offsets, experts, and rows taken from elsewhere.

Source: section 6 of the arithmetic definition. Metadata is checked everywhere; values on the host
only, since nothing is ever read back from a GPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from .._parts import OFFSET_DTYPES, check_offsets, index_array
from ..arrays import Array

__all__ = ["Ranges", "read_counts", "read_ranges"]

_INDEX_DTYPES = ("int32", "int64")


class Ranges(NamedTuple):
    """The index arrays of a grouped call."""

    #: Offsets; where there is a `capacity`, counts of rows.
    offsets: Array
    experts: Array | None
    indices: Array | None
    groups: int
    #: R, the rows of the result: with counts those of all matrices.
    rows: int
    #: Rows of a matrix.
    capacity: int | None = None

    @property
    def named(self) -> tuple[tuple[str, Array | None], ...]:
        """By their names as arguments."""
        if self.capacity is not None:
            return (("row_counts", self.offsets),)
        return (
            ("row_offsets", self.offsets),
            ("expert_ids", self.experts),
            ("row_indices", self.indices),
        )

    def for_golden(self) -> dict[str, Any]:
        """As the golden model takes them."""
        return {name: None if array is None else arrays.host(array) for name, array in self.named}

    def buffers(self) -> dict[str, Array | None]:
        """By the names of kernels' buffers."""
        return {
            "row_offsets": self.offsets,
            "expert_ids": self.experts,
            "row_indices": self.indices,
        }

    def shape(self, columns: int) -> tuple[int, ...]:
        """Of a result of so many columns."""
        if self.capacity is None:
            return (self.rows, columns)
        return (self.groups, self.capacity, columns)

    def facts(self) -> dict[str, Any]:
        """As plans take them."""
        dtype = self.offsets.dtype
        return {
            "groups": self.groups,
            "offsets_dtype": dtype if self.capacity is None else f"counts_{dtype}",
            "ids_dtype": None if self.experts is None else self.experts.dtype,
            "indices_dtype": None if self.indices is None else self.indices.dtype,
        }


def read_ranges(
    row_offsets: Any,
    expert_ids: Any,
    row_indices: Any,
    x: Array,
    x_name: str,
    experts: int | None,
    stream: Any,
) -> Ranges:
    """Check the index arrays of a call.

    Parameters
    ----------
    row_offsets, expert_ids, row_indices
        As the caller gave them.
    x : Array
        The input, [rows, K].
    x_name : str
        Its name as an argument.
    experts : int or None
        E, where something has one entry an expert.
    stream
        The call's ``stream`` argument.

    Raises
    ------
    TypeError
        Not arrays of integers.
    ValueError
        Other shapes or devices; on the host also offsets that do not start at 0, decrease or go
        beyond the rows, and ids from E on.
    """
    offsets = arrays.as_array(row_offsets, "row_offsets", stream=stream)
    groups = index_array("row_offsets", offsets.spec, x.spec, x_name, OFFSET_DTYPES, None) - 1
    rows = x.shape[0]
    indices = ids = None
    if row_indices is not None:
        indices = arrays.as_array(row_indices, "row_indices", stream=stream)
        rows = index_array(
            "row_indices", indices.spec, x.spec, x_name, _INDEX_DTYPES, None, empty=True
        )
    if expert_ids is not None:
        ids = arrays.as_array(expert_ids, "expert_ids", stream=stream)
        index_array("expert_ids", ids.spec, x.spec, x_name, _INDEX_DTYPES, groups)
    if offsets.device is None:
        check_offsets("row_offsets", offsets, rows)
        if experts is not None:
            _check_experts(ids, groups, experts)
    return Ranges(offsets, ids, indices, groups, rows)


def read_counts(row_counts: Any, x: Array, x_name: str, stream: Any) -> Array:
    """Check counts of rows of the matrices of `x`, [E, capacity, ...].

    Raises
    ------
    TypeError
        Not an array of integers.
    ValueError
        Another shape or device; on the host also counts that are not from 0 to the capacity.
    """
    counts = arrays.as_array(row_counts, "row_counts", stream=stream)
    if len(x.shape) != 3:
        raise ValueError(
            f"{x_name} must have three axes, [E, capacity, ...], with row_counts; got {x.shape}"
        )
    index_array("row_counts", counts.spec, x.spec, x_name, OFFSET_DTYPES, x.shape[0])
    if counts.device is None:
        values = arrays.host(counts)
        bad = np.flatnonzero((values < 0) | (values > x.shape[1]))
        if bad.size:
            at = int(bad[0])
            raise ValueError(
                f"row_counts must be from 0 to the capacity, {x.shape[1]}; got {values[at]} at "
                f"index {at}"
            )
    return counts


def _check_experts(ids: Array | None, groups: int, experts: int) -> None:
    if ids is None:
        if groups > experts:
            raise ValueError(
                f"without expert_ids, range i belongs to expert i: row_offsets has {groups} "
                f"ranges, but there are {experts} experts"
            )
        return
    values = arrays.host(ids)
    bad = np.flatnonzero(values >= experts)
    if bad.size:
        at = int(bad[0])
        raise ValueError(
            f"expert_ids must be below the number of experts, {experts} (negative: switched "
            f"off); got {values[at]} at index {at}"
        )
