"""What becomes of an epilogue on a card: built, not run."""

from __future__ import annotations

from types import FunctionType

import ml_dtypes
import numpy as np
import pytest

from nvfp4 import compile as compiler
from nvfp4 import plans
from nvfp4.epilogue import Epilogue
from nvfp4.program import Program


def scaled_and_shifted(value, row, column, expert, factor, shift):  # type: ignore[no-untyped-def]
    return value * np.float32(factor[column]) + np.float32(shift[row])


def nothing(value, row, column, expert):  # type: ignore[no-untyped-def]
    pass


def program(*dtypes: str, fn: FunctionType = scaled_and_shifted) -> Program:
    """A product with an epilogue, over arrays of these dtypes."""
    arrays = [np.zeros(1, getattr(ml_dtypes, dtype, dtype)) for dtype in dtypes]
    a = {"a_format": None, "a_dtype": "bfloat16", "a_layout": None, "decode_a": "none"}
    b = {"b_format": "mxfp4", "b_layout": "tcgen", "decode_b": "scalar"}
    shape = {"rows": 3, "columns": 4, "depth": 32}
    code = Epilogue(fn, *arrays).code(dtypes)
    (one,) = plans.matmul(
        "sm_90a", **a, **b, **shape, alpha="value", out_dtype="float32", epilogue=code
    )
    return one.program


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float16", "bfloat16")], ids=str)
def test_a_product_and_a_sum_are_never_contracted(dtypes: tuple[str, str]) -> None:
    """Two roundings, as in the golden model and in the simulator."""
    binary, ptx = compiler.inspect(program(*dtypes), "sm_90a")
    assert compiler.faults(binary, ptx) == ()
    assert "fma." not in ptx
    assert "mul.rn.f32" in ptx and "add.rn.f32" in ptx


def test_integer_arrays_build() -> None:
    binary, ptx = compiler.inspect(program("int64", "uint8"), "sm_90a")
    assert compiler.faults(binary, ptx) == ()


def test_an_epilogue_that_cannot_be_compiled_is_named() -> None:
    with pytest.raises(Exception, match=r"[Nn]one") as caught:
        compiler.inspect(program(fn=nothing), "sm_90a")
    assert "with the epilogue nothing compiled into it" in caught.value.__notes__[-1]
