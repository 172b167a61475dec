"""compute="fp8" and quantize_rows: what they mean on NumPy arrays, allocate and refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import warm

from . import stubs
from .conftest import Card

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
RNG = np.random.default_rng(12)
OFFSETS = np.array([0, 2, 2, 5], np.int32)


def values(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(BF16)


def prepared(format: str, *shape: int) -> nvfp4.QTensor:
    return nvfp4.prepare_weights(nvfp4.quantize(values(*shape), format))


def says(error: type[Exception], *parts: str) -> Any:
    return pytest.raises(error, match="".join(f"(?=.*{part})" for part in parts))


A = values(5, 64)
W = prepared("mxfp4", 24, 64)
STACK = prepared("mxfp4", 3, 24, 64)


# --- quantize_rows --------------------------------------------------------------------------------


def test_rows_are_e4m3_of_the_row_over_its_largest() -> None:
    x = values(6, 96).astype(np.float32) * np.float32(1e-3)
    codes, scale = nvfp4.quantize_rows(x)
    assert (codes.shape, codes.dtype, scale.shape, scale.dtype) == (
        *((6, 96), np.uint8), *((6, 1), np.float32),
    )  # fmt: skip
    largest = np.abs(x).max(axis=1, keepdims=True)
    assert np.abs(scale * 448 / largest - 1).max() < 2.0**-22
    expected = (x * (np.float32(448) / largest)).astype(E4M3)
    assert codes.tobytes() == expected.tobytes()
    error = np.abs(codes.view(E4M3).astype(np.float64) * scale - x)
    bound = np.maximum(np.abs(x) * (2.0**-4 + 2.0**-20), scale * 2.0**-10)
    assert (error <= bound).all() and (error > np.abs(x) * 2.0**-5).any()


def test_rows_that_have_no_largest_have_scale_1() -> None:
    x = np.zeros((4, 16), np.float32)
    x[1, 3], x[2, 0], x[2, 1], x[3, 5] = np.nan, np.inf, 1000.0, -np.inf
    x[0, 2] = -0.0
    codes, scale = nvfp4.quantize_rows(x)
    assert (scale == 1).all()
    assert codes[0, 2] == 0x80 and codes[1, 3] & 0x7F == 0x7F
    assert [codes[2, 0], codes[2, 1], codes[3, 5]] == [0x7E, 0x7E, 0xFE]
    tiny = np.full((1, 16), 2.0**-140, np.float32)
    assert nvfp4.quantize_rows(tiny)[1] == np.float32(2.0**-126)


def test_rows_are_written_where_the_caller_wants_them() -> None:
    codes, scale = nvfp4.quantize_rows(A)
    out = (np.full((5, 64), 0xA5, np.uint8), np.full((5, 1), np.nan, np.float32))
    assert nvfp4.quantize_rows(A, out=out) is out
    assert out[0].tobytes() == codes.tobytes() and out[1].tobytes() == scale.tobytes()
    with says(TypeError, "out must be a tuple"):
        nvfp4.quantize_rows(A, out=out[0])
    with says(ValueError, r"out\[1\] must have shape \(5, 1\); got \(5,\)"):
        nvfp4.quantize_rows(A, out=(out[0], out[1][:, 0]))
    with says(ValueError, "K must be a multiple of 16; got 24"):
        nvfp4.quantize_rows(A[:, :24])
    with says(ValueError, r"x must have shape \[M, K\]"):
        nvfp4.quantize_rows(A[0])


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["mxfp4", "nvfp4"])
def test_a_product_is_that_of_the_quantised_rows(format: str) -> None:
    w = prepared(format, 24, 64)
    codes, scale = nvfp4.quantize_rows(A)
    given = nvfp4.matmul(codes, w, compute="fp8", a_scale=scale, out_dtype="float32")
    made = nvfp4.matmul(A, w, compute="fp8", out_dtype="float32")
    assert given.tobytes() == made.tobytes()
    rows = codes.view(E4M3).astype(np.float64)
    expected = rows @ w.dequantize().astype(np.float64).T * scale
    np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-5)
    assert not np.allclose(given, nvfp4.matmul(A, w, out_dtype="float32"), rtol=1e-3)
    same: Any
    for same in (codes.view(E4M3), codes):
        got = nvfp4.matmul(same, w, compute="fp8", a_scale=scale[:, 0], out_dtype="float32")
        assert got.tobytes() == given.tobytes()


def test_a_grouped_product_takes_the_scales_of_the_rows_it_gathers() -> None:
    indices = np.array([3, 0, 4, -1, 2], np.int32)
    options: dict[str, Any] = {"row_offsets": OFFSETS, "out_dtype": "float32", "compute": "fp8"}
    got = nvfp4.grouped_matmul(A, STACK, row_indices=indices, **options)
    expected = nvfp4.grouped_matmul(A[[3, 0, 4, 0, 2]], STACK, **options)
    expected[3] = 0
    assert got.tobytes() == expected.tobytes() and got[[0, 1, 2, 4]].any(axis=1).all()


def test_bfloat16_is_what_there_is_by_default() -> None:
    for compute in (None, "bfloat16"):
        got = nvfp4.matmul(A, W, compute=compute)
        assert got.tobytes() == nvfp4.matmul(A, W).tobytes()


def test_its_programs_can_be_compiled_beforehand() -> None:
    call = {"call": "matmul", "a": "bfloat16", "b": "mxfp4", "m": 4096, "n": 8192, "k": 4096}
    made = warm.programs([call | {"prepared": True, "compute": "fp8"}], "sm_90a")
    found = {(one.kernel.name, dict(one.constants).get("COMPUTE")) for one in made}
    assert found >= {
        ("quantize_rows", None), ("matmul_sm90", "fp8"), ("matmul_sm90", "bfloat16"),
    }  # fmt: skip


# --- refusals -------------------------------------------------------------------------------------


def test_what_is_refused_is_named() -> None:
    codes, scale = nvfp4.quantize_rows(A)
    fp8: dict[str, Any] = {"compute": "fp8"}
    with says(ValueError, "compute must be None, 'bfloat16' or 'fp8'; got 'fp4'"):
        nvfp4.matmul(A, W, compute="fp4")
    with says(TypeError, "compute must be None, 'bfloat16' or 'fp8'; got 8"):
        nvfp4.matmul(A, W, compute=8)  # type: ignore[arg-type]
    with says(ValueError, "a_scale must be None without compute='fp8'"):
        nvfp4.matmul(A, W, a_scale=scale)
    with says(ValueError, "b must be prepared", "got scale_layout 'tcgen'"):
        nvfp4.matmul(A, nvfp4.quantize(values(24, 64), "mxfp4"), **fp8)
    with says(nvfp4.UnsupportedError, "b must be mxfp4 or nvfp4", "got mxfp8_e4m3"):
        nvfp4.matmul(A, prepared("mxfp8", 24, 64), **fp8)
    with says(nvfp4.UnsupportedError, "a must be an array of rows", "got a QTensor of mxfp8_e4m3"):
        nvfp4.matmul(nvfp4.quantize(A, "mxfp8"), W, **fp8)  # type: ignore[arg-type]
    with says(TypeError, "a must be of dtype bfloat16 or float16 or uint8", "got float32"):
        nvfp4.matmul(A.astype(np.float32), W, **fp8)
    with says(ValueError, "a_scale must be given with rows of e4m3 codes"):
        nvfp4.matmul(codes, W, **fp8)
    with says(ValueError, "a_scale belongs to rows of e4m3 codes"):
        nvfp4.matmul(A, W, a_scale=scale, **fp8)
    with says(ValueError, r"a_scale must have shape \(5, 1\) or \(5,\)", r"got \(4, 1\)"):
        nvfp4.matmul(codes, W, a_scale=scale[:4], **fp8)
    with says(TypeError, "a_scale must be of dtype float32"):
        nvfp4.matmul(codes, W, a_scale=scale.astype(np.float16), **fp8)
    with says(ValueError, "same last axis"):
        nvfp4.matmul(A[:, :32], W, **fp8)
    with says(ValueError, "same last axis"):
        nvfp4.matmul(codes[:, :32], W, a_scale=scale, **fp8)
    counted: dict[str, Any] = {"row_counts": np.array([1, 2, 1], np.int32), **fp8}
    with says(nvfp4.UnsupportedError, "row_counts must be None with compute='fp8'"):
        nvfp4.grouped_matmul(values(3, 2, 64), STACK, **counted)


# --- on a card ------------------------------------------------------------------------------------


def on_device(cupy: stubs.Cupy, q: nvfp4.QTensor) -> nvfp4.QTensor:
    parts: dict[str, Any] = {
        name: cupy.asarray(getattr(q, name)) for name in ("codes", "scales", "decode_scale")
    }
    return dataclasses.replace(q, **parts)


def test_quantised_rows_and_out_need_no_memory_and_are_remembered(
    card: Card, cupy: stubs.Cupy
) -> None:
    card.simulate = True
    rows = cupy.asarray(A)
    w = on_device(cupy, W)
    expected = nvfp4.matmul(A, W, compute="fp8")
    made = (cupy.asarray(np.empty((5, 64), np.uint8)), cupy.asarray(np.empty((5, 1), np.float32)))
    out = cupy.asarray(np.zeros((5, 24), BF16))
    cupy.allocated.clear()
    for _ in range(3):
        made[0].values[...] = 0xA5
        out.values[...] = 0
        assert nvfp4.quantize_rows(rows, out=made) is made
        assert nvfp4.matmul(made[0], w, compute="fp8", a_scale=made[1], out=out) is out
        np.testing.assert_allclose(
            out.values.astype(np.float32), expected.astype(np.float32), rtol=2.0**-7, atol=1e-6
        )
    assert not cupy.allocated
    assert len(card.launched) == 2 and len(card.repeated) == 4


def test_rows_that_are_quantised_in_the_call_take_memory(card: Card, cupy: stubs.Cupy) -> None:
    w, rows = on_device(cupy, W), cupy.asarray(A)
    out = cupy.asarray(np.zeros((5, 24), BF16))
    for _ in range(2):
        cupy.allocated.clear()
        nvfp4.matmul(rows, w, compute="fp8", out=out)
        assert [(shape, dtype) for shape, dtype, *_ in cupy.allocated] == [
            ((5, 64), "uint8"), ((5, 1), "float32"),
        ]  # fmt: skip
    assert [name for name, _ in card.planned] == ["quantize_rows", "matmul"] * 2
    assert card.facts["compute"] == "fp8" and card.facts["a_format"] == "e4m3"
    assert not card.repeated


def test_codes_start_at_a_multiple_of_sixteen_bytes(card: Card, cupy: stubs.Cupy) -> None:
    codes, scale = nvfp4.quantize_rows(A)
    memory = np.zeros(codes.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16 + 4
    moved = memory[start : start + codes.nbytes].reshape(codes.shape)
    with says(ValueError, "a must start at a multiple of 16 bytes", "got 4"):
        nvfp4.matmul(
            stubs.CupyArray(moved), on_device(cupy, W), compute="fp8", a_scale=cupy.asarray(scale)
        )
