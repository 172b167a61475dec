"""The committed test vectors as calls of ``checks``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvfp4.golden.scales import decode_scale_of, effective_encode_scale
from tests.vectorlib import cases

from . import checks
from .checks import Quantized, Run


def quantize(run: Run, case: Any) -> None:
    expected = (case.codes, case.scales, np.asarray(case.decode_scale))
    x = case.x
    if x.ndim > 3 and case.scale_layout == "tcgen":
        raise ValueError("the tcgen layout takes at most three axes")
    checks.quantize(
        run,
        x,
        case.format,
        encode_scale=case.encode_scale,
        scale_rounding=case.scale_rounding,
        scale_layout=case.scale_layout,
        expected=expected,
    )


def dequantize(run: Run, case: Any) -> None:
    checks.dequantize(
        run,
        case.codes,
        case.scales,
        np.asarray(case.decode_scale),
        case.format,
        shape=case.shape,
        scale_layout="linear",
        expected=case.values,
    )


def grouped_quantize(run: Run, case: Any) -> None:
    groups = len(case.row_offsets) - 1
    scale = case.encode_scale
    decode = np.ones(groups, np.float32)
    if scale is not None and case.format.element == "e2m1":
        ids = np.arange(groups) if case.expert_ids is None else case.expert_ids
        known = decode_scale_of(effective_encode_scale(scale))
        decode[ids >= 0] = known[ids[ids >= 0]]
    checks.grouped_quantize(
        run,
        case.x,
        case.format,
        row_offsets=case.row_offsets,
        expert_ids=case.expert_ids,
        row_indices=case.row_indices,
        encode_scale=scale,
        expected=(case.codes, case.scales, decode),
    )


def operand(given: Any, row_offsets: Any = None, expert_ids: Any = None) -> Any:
    """An operand of a product's case."""
    if not hasattr(given, "codes"):
        return given.x
    if not given.grouped:
        decode = np.asarray(given.decode_scale)
        return Quantized(given.format, given.codes, given.scales, decode, "linear")
    groups = len(row_offsets) - 1
    decode = np.ones(groups, np.float32)
    if given.encode_scale is not None:
        ids = np.arange(groups) if expert_ids is None else expert_ids
        known = decode_scale_of(effective_encode_scale(given.encode_scale))
        decode[ids >= 0] = known[ids[ids >= 0]]
    return Quantized(given.format, given.codes, given.scales, decode, "tcgen", row_offsets)


def matmul(run: Run, case: Any) -> None:
    checks.matmul(
        run,
        operand(case.a),
        operand(case.b),
        alpha=case.alpha,
        out_dtype=case.out_dtype,
        expected=case.out,
    )


def grouped_matmul(run: Run, case: Any) -> None:
    checks.grouped_matmul(
        run,
        operand(case.a, case.row_offsets, case.expert_ids),
        operand(case.b),
        row_offsets=case.row_offsets,
        expert_ids=case.expert_ids,
        alpha=np.float32(1) if case.alpha is None else case.alpha,
        out_dtype=case.out_dtype,
        expected=case.out,
    )


def sampled(op: str, limit: int, step: int) -> list[Any]:
    """All small cases and every `step`-th large one; the others are for ``make test-slow``."""
    chosen = []
    for i, case in enumerate(cases(op)):
        fast = work(case) <= limit or i % step == 0
        chosen.append(pytest.param(case, id=str(case), marks=() if fast else (pytest.mark.slow,)))
    return chosen


def work(case: Any) -> int:
    """About how much a case costs: elements, or terms of sums."""
    if hasattr(case, "out"):
        return int(case.out.size * case.b.shape[-1])
    return int(case.values.size if hasattr(case, "values") else case.x.size)
