"""The dense product by the reference kernel, whatever there is that is faster."""

from __future__ import annotations

from typing import Any

from ..tensor import QTensor
from ._operands import check_depth, read_alpha, read_epilogue, read_operand
from .products import _Product

__all__ = ["reference_matmul"]


def reference_matmul(
    a: Any, b: QTensor, *, alpha: Any, out: Any, out_dtype: Any, epilogue: Any, stream: Any
) -> Any:
    """As :func:`nvfp4.matmul`, k ascending: the golden model's result bit for bit."""
    again = "matmul", (out_dtype, "reference"), (a, b, alpha, epilogue, out)
    left = read_operand("a", a, ("M", "K"), plain=True, stream=stream)
    right = read_operand("b", b, ("N", "K"), plain=False, stream=stream)
    call = _Product(
        left, right, read_alpha(alpha, None, stream), read_epilogue(epilogue, stream), None
    )
    facts = {
        "rows": left.shape[0],
        "columns": right.shape[0],
        "depth": check_depth(left, right),
        "reference": True,
    }
    return call.run(again, left.shape[0], facts, out, out_dtype, stream)
