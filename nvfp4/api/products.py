"""matmul and grouped_matmul: products with block-scaled operands."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import arrays
from ..arrays import Array
from ..formats import PREPARED
from ..tensor import QTensor
from . import _place
from ._fp8 import Rows, read_left
from ._operands import (
    Alpha,
    Operand,
    ReadEpilogue,
    check_depth,
    read_alpha,
    read_epilogue,
    read_operand,
)
from ._ranges import Ranges, read_counts, read_ranges
from ._repeat import Repeated, repeat
from ._result import Result
from ._tile import asked
from .dense import rows_of

__all__ = ["grouped_matmul", "matmul"]


def matmul(
    a: Any,
    b: QTensor,
    *,
    alpha: Any = 1.0,
    out: Any = None,
    out_dtype: Any = "bfloat16",
    epilogue: Any = None,
    compute: str | None = None,
    a_scale: Any = None,
    batch_invariant: bool = False,
    stream: Any = None,
) -> Any:
    """The product of `a` [M, K] with `b` [N, K] transposed.

    ``out[m, n] = cast(epilogue(alpha' * sum_k a[m, k] * b[n, k]))`` with element * scale in place
    of each element and ``alpha' = RN(RN(alpha * dA) * dB)`` of the decode scales; float32 sums.
    Section 7 of the arithmetic definition.

    Parameters
    ----------
    a : QTensor, or array of bfloat16 or float16, [M, K]
        An array is multiplied as it is (weight-only quantisation).
    b : QTensor, [N, K]
        Of any format, not only that of `a`; as it is, or as :func:`nvfp4.prepare_weights` made it.
    alpha : number, or array of float32 of shape ()
        On the device of `a`, if it is an array there.
    out : array of `out_dtype`, [M, N], or QTensor, optional
        Written and returned; a QTensor where `out_dtype` is a format.
    out_dtype : {"bfloat16", "float16", "float32"}, or the name of a block format
        Also a dtype object. A format: the float32 result is quantised, encode scale 1, in the
        layout of `out` ("tcgen" without `out`).
    epilogue : nvfp4.Epilogue or function, optional
        Compiled into the kernel; a function ``fn(value, row, column, expert)`` is an Epilogue
        without arrays.
    compute : {None, "bfloat16", "fp8"}
        "fp8": rows of `a` are e4m3 with one scale each, products go to FP8 tensor cores where the
        weights' values are e4m3 values up to a power of two, found when they are prepared. `a` is
        then an array of e4m3 codes (uint8, or a library's float8_e4m3fn), or of bfloat16 or
        float16, whose rows are quantised first as :func:`nvfp4.quantize_rows` does, into memory
        that this call allocates. `b` is prepared mxfp4 or nvfp4. On sm_90a. Each element of `a`
        is rounded by 2^-4 of itself at most (2^-10 of its row's scale, if that is more); docs/
        decisions.md, D25, has the definition and what tensor cores do to sums.
    a_scale : array of float32, [M, 1] or [M], optional
        The scales of rows of e4m3 codes.
    batch_invariant : bool
        Whether the bytes of a row of the result are those that it has alone, whatever M is and
        whatever the other rows hold: kernel, instructions and order of sums are then chosen by N,
        K, formats and architecture alone. Costs time where the choice by M would be another one;
        docs/products.md says how much. `a` and `b` must begin at multiples of 16 bytes.
    stream : optional
        None (the current stream of the library of `a`), an int, or an object with
        ``__cuda_stream__``.

    Returns
    -------
    array of `out_dtype`, [M, N], or QTensor
        Of the library of `a`; N/2 columns of an epilogue of pairs.

    Raises
    ------
    TypeError
        `a` or `b` is of another kind (a tuple of codes and scales, an array of float32...), or a
        dtype is another one.
    ValueError
        Shapes that do not fit; arrays on different devices; an `out` that overlaps an operand;
        ``compute="fp8"`` and weights that are not prepared; with `batch_invariant` or prepared
        weights, addresses that are no multiples of 16 (on a GPU).
    UnsupportedError
        There is no kernel for this GPU and these formats; ``compute="fp8"`` elsewhere than on
        sm_90a, or with other formats.
    """
    if batch_invariant is not False:
        _check_flag(batch_invariant)
    options = out_dtype, compute, batch_invariant
    again = "matmul", options, (a, b, alpha, epilogue, out, a_scale)
    if out is not None and repeat(again, stream):
        return out
    right = read_operand("b", b, ("N", "K"), plain=False, stream=stream)
    left = read_left(a, a_scale, right, ("M", "K"), compute, stream)
    for operand in (left, right):
        if operand.parts is not None and operand.parts.groups is not None:
            raise ValueError(f"{operand.name} is a grouped QTensor: use nvfp4.grouped_matmul")
    depth = check_depth(left, right)
    call = _Product(
        left, right, read_alpha(alpha, None, stream), read_epilogue(epilogue, stream), None
    )
    facts = {
        "rows": left.shape[0],
        "columns": right.shape[0],
        "depth": depth,
        "batch_invariant": batch_invariant,
    }
    return call.run(again, left.shape[0], facts, out, out_dtype, stream)


def grouped_matmul(
    a: Any,
    b: QTensor,
    *,
    row_offsets: Any = None,
    expert_ids: Any = None,
    row_indices: Any = None,
    row_counts: Any = None,
    alpha: Any = None,
    out: Any = None,
    out_dtype: Any = "bfloat16",
    epilogue: Any = None,
    compute: str | None = None,
    a_scale: Any = None,
    batch_invariant: bool = False,
    stream: Any = None,
) -> Any:
    """The product of each range of rows of `a` with the matrix of its expert, transposed.

    Section 7 of the arithmetic definition, ranges and experts as in section 6. Either ranges of the
    rows of one array (`row_offsets`), or a matrix of an equal number of rows for each expert, of
    which only the first count (`row_counts`).

    Parameters
    ----------
    a : QTensor, or array of bfloat16 or float16, [R, K], or [M, K] with `row_indices`
        A grouped QTensor has these `row_offsets` as its groups. With `row_indices`, a QTensor with
        linear scales. With `row_counts` [E, capacity, K]; a QTensor then as
        ``nvfp4.quantize(..., row_counts=)`` makes it.
    b : QTensor, [E, N, K]
        As in :func:`nvfp4.matmul`.
    row_offsets : array of int32, int64 or uint32, [G+1], optional
        Range i is rows row_offsets[i] to row_offsets[i+1] - 1 of the R rows of the result.
    expert_ids : array of int32 or int64, [G], optional
        Expert of each range, by default i. Negative: the range is switched off.
    row_indices : array of int32 or int64, [R], optional
        Row r of the result is made of row row_indices[r] of `a`; zero where there is no such row.
    row_counts : array of int32, int64 or uint32, [E], optional
        Instead of all three: only the first row_counts[e] rows of matrix e of `a` count, whatever
        the others hold. On a GPU, where nobody looks at them, a count below 0 counts as 0, and
        one beyond the capacity as the capacity.
    alpha : None, number, or array of float32, () or [E], optional
        One factor, or one by expert.
    out, out_dtype, epilogue, compute, a_scale, batch_invariant, stream
        As in :func:`nvfp4.matmul`; the result has R rows. Quantised, it is a grouped QTensor; with
        `row_counts` a stack of matrices. An epilogue then sees row e * capacity + r for row r of
        matrix e, and its arrays have E * capacity rows.

    Returns
    -------
    array of `out_dtype`, [R, N], with `row_counts` [E, capacity, N], or QTensor
        Rows of a switched-off range, rows that no range covers, rows whose index is out of
        range and rows behind the count are **0**.

    Raises
    ------
    TypeError
        As in :func:`nvfp4.matmul`; index arrays that are not of integers; neither `row_offsets`
        nor `row_counts`.
    ValueError
        As in :func:`nvfp4.matmul`; offsets that do not start at 0, decrease or go beyond R, ids
        from E on and counts that are not from 0 to the capacity, where the host can read them;
        `row_counts` together with one of the other three index arrays.
    UnsupportedError
        There is no kernel for this GPU and these formats.
    """
    if batch_invariant is not False:
        _check_flag(batch_invariant)
    again = (
        "grouped_matmul",
        (out_dtype, compute, batch_invariant, asked()),
        (a, b, row_offsets, expert_ids, row_indices, row_counts, alpha, epilogue, out, a_scale),
    )
    if out is not None and repeat(again, stream):
        return out
    axes: tuple[str, ...] = ("R", "K")
    if row_counts is not None:
        _check_no_ranges(row_offsets, expert_ids, row_indices)
        axes = ("E", "capacity", "K")
    elif row_offsets is None:
        raise TypeError("row_offsets must be an array without row_counts; both are None")
    right = read_operand("b", b, ("E", "N", "K"), plain=False, stream=stream)
    left = read_left(a, a_scale, right, axes, compute, stream)
    depth = check_depth(left, right)
    experts, columns = right.shape[:2]
    if row_counts is None:
        ranges = read_ranges(row_offsets, expert_ids, row_indices, left.first, "a", experts, stream)
        _check_grouped_operand(left, ranges)
    else:
        ranges = _counted_ranges(row_counts, left, experts, stream)
    call = _Product(
        left, right, read_alpha(alpha, experts, stream), read_epilogue(epilogue, stream), ranges
    )
    facts = {
        "input_rows": left.shape[0] if ranges.capacity is None else ranges.rows,
        "rows": ranges.rows,
        "columns": columns,
        "depth": depth,
        "experts": experts,
        "batch_invariant": batch_invariant,
        "tile": again[1][-1],
        **ranges.facts(),
    }
    return call.run(again, ranges.rows, facts, out, out_dtype, stream)


def _check_flag(batch_invariant: Any) -> None:
    if batch_invariant is not False and batch_invariant is not True:
        raise TypeError(f"batch_invariant must be True or False; got {batch_invariant!r}")


def _check_no_ranges(row_offsets: Any, expert_ids: Any, row_indices: Any) -> None:
    """Counts stand alone."""
    for name, given in (
        ("row_offsets", row_offsets),
        ("expert_ids", expert_ids),
        ("row_indices", row_indices),
    ):
        if given is not None:
            raise ValueError(
                f"{name} must not be given together with row_counts: the rows that count are "
                "the first of each matrix of a, and matrix e belongs to expert e"
            )


def _counted_ranges(row_counts: Any, a: Operand | Rows, experts: int, stream: Any) -> Ranges:
    """The rows that count, of a stack of matrices."""
    counts = read_counts(row_counts, a.first, "a", stream)
    matrices, capacity = a.shape[:2]
    if matrices != experts:
        raise ValueError(
            "a and b must have the same first axis (E) with row_counts; got "
            f"{matrices} matrices of a and {experts} of b"
        )
    return Ranges(counts, None, None, matrices, matrices * capacity, capacity)


def _check_grouped_operand(a: Operand | Rows, ranges: Ranges) -> None:
    """How a quantised `a` goes with the ranges."""
    q, parts = a.q, a.parts
    if q is None or parts is None:
        return
    if ranges.indices is not None:
        if q.scale_layout != "linear":
            raise ValueError(
                "a must have linear scales together with row_indices; got scale_layout "
                f"{q.scale_layout!r}"
            )
        if parts.groups is not None:
            raise ValueError(
                "a must not be a grouped QTensor together with row_indices, which picks rows one "
                "by one: quantise the rows with nvfp4.quantize"
            )
    if parts.groups is None:
        if q.scale_layout == "tcgen":
            raise ValueError(
                "a must be a grouped QTensor, whose ranges start on scale tiles of their own, "
                "or have linear scales; got a dense one with scale_layout 'tcgen'"
            )
        return
    if parts.groups.shape != ranges.offsets.shape:
        raise ValueError(
            f"row_offsets must be the groups of a, which has {parts.groups.shape[0] - 1} "
            f"ranges; got {ranges.groups}"
        )
    if ranges.offsets.device is None and not np.array_equal(
        arrays.host(parts.groups), arrays.host(ranges.offsets)
    ):
        raise ValueError("row_offsets must be the groups of a; got other values")


class _Product(NamedTuple):
    """A checked product, ready to get its result."""

    a: Operand | Rows
    b: Operand
    alpha: Alpha
    epilogue: ReadEpilogue
    ranges: Ranges | None

    @property
    def inputs(self) -> tuple[tuple[str, Array | None], ...]:
        """All arrays that are read, the one that decides where to run first."""
        index = () if self.ranges is None else self.ranges.named
        return (
            *self.a.named,
            *self.b.named,
            *index,
            ("alpha", self.alpha.array),
            *self.epilogue.named,
        )

    def run(
        self,
        again: Repeated,
        rows: int,
        facts: dict[str, Any],
        out: Any,
        out_dtype: Any,
        stream: Any,
    ) -> Any:
        """Check `out`, choose where to run, run."""
        columns = self.epilogue.columns(facts["columns"])
        self.epilogue.check(rows, columns, facts.get("experts", 1))
        shape = (rows, columns) if self.ranges is None else self.ranges.shape(columns)
        result = Result(out_dtype, shape, out, self.inputs, self.ranges, stream)
        where = _place.place(self.inputs, stream)
        if where.golden:
            return result.stored(self._golden(result.dtype))
        buffers = {
            **result.allocated(where),
            **self.a.buffers(),
            **self.b.buffers(),
            **self.epilogue.buffers(),
            "alpha": self.alpha.number if self.alpha.array is None else self.alpha.array,
        }
        facts |= {
            **self.a.facts(),
            **self.b.facts(),
            **result.facts(),
            **self.epilogue.facts(),
            "alpha": self.alpha.kind,
        }
        steps = 0
        if self.a.plain is not None:
            buffers["a"], facts["a_row_stride"] = rows_of("a", self.a.plain, where)
            steps = facts["a_row_stride"] * self.a.plain.spec.itemsize
        read = (buffers["a"] or buffers["a_codes"], buffers["b_codes"])
        first = read[0].pointer
        if facts["b_layout"] == PREPARED:  # its scales are read in pieces, too
            steps |= buffers["b_scales"].pointer
            if self.a.plain is None:  # eight elements at a time
                first &= 7
        facts["processors"] = _place.processors(where)
        facts["card"] = _place.card(where)
        facts["aligned"] = not (first | read[1].pointer | steps) & 15
        facts["map_alignment"] = _map_alignment(buffers)
        if self.ranges is not None:
            starts = None if self.a.parts is None else self.a.parts.tile_starts
            facts["starts_dtype"] = None if starts is None else starts.dtype
            buffers |= {**self.ranges.buffers(), "tile_starts": starts}
            if self.ranges.capacity is not None:
                # Matrices of A are ranges of its rows.
                kind = facts["decode_a"]
                facts["decode_a"] = {"batch": "group", "batch_row": "row"}.get(kind, kind)
        _place.launch(
            where,
            again[0],
            facts,
            buffers,
            outputs=result.outputs,
            strided="a",
            again=None if out is None or (isinstance(self.a, Rows) and self.a.made) else again,
        )
        return result.out

    def _golden(self, dtype: str) -> np.ndarray:
        from .. import golden

        more = {
            "alpha": self.alpha.for_golden(),
            "decode_a": self.a.decode(),
            "decode_b": self.b.decode(),
            "out_dtype": dtype,
            "epilogue": self.epilogue.for_golden(),
        }
        a, b = self.a.values(), self.b.values()
        if self.ranges is None:
            return golden.matmul(a, b, **more)
        return golden.grouped_matmul(a, b, **self.ranges.for_golden(), **more)


def _map_alignment(buffers: dict[str, Any]) -> int:
    """What the codes of both operands are multiples of, up to 32, for tensor copies.

    0 for a plain A, and where scales are not multiples of 16.
    """
    if (
        buffers["a_scales"] is None
        or (buffers["a_scales"].pointer | buffers["b_scales"].pointer) & 15
    ):
        return 0
    together = buffers["a_codes"].pointer | buffers["b_codes"].pointer
    return 0 if together & 15 else 16 if together & 31 else 32
