"""Each function of Modular's module, called by its name with the seed's argument names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4.compat import modular

from .modular_cases import (
    BF16,
    E4M3,
    E8M0,
    PLACES,
    at,
    empty,
    expected,
    outputs,
    rows_of,
    same,
    tiled,
)

places = pytest.mark.parametrize("place", PLACES)
formats = pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8_e4m3"])
VECTOR = {"nvfp4": 16, "mxfp4": 32, "mxfp8_e4m3": 32}


# Quantisers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [*PLACES, "sm_80", "sm_100a"])
@formats
def test_quantize_dynamic_block_scaled(place: str, format: str) -> None:
    x = rows_of(1, 130, 96)
    output, scales = outputs(format, 130, 96)
    with at(place):
        q = modular.quantize_dynamic_block_scaled(
            output_device=output,
            scales_device=scales,
            input_device=x,
            tensor_sf=0.43,
            ctx=None,
            SF_VECTOR_SIZE=VECTOR[format],
            target="gpu",
        )
    codes, blocks = expected(x, format, np.float32(0.43))
    same(output, codes)
    same(scales, tiled(blocks))
    assert q.format == format
    factor = 1 if format == "mxfp8_e4m3" else np.float32(1) / np.float32(0.43)
    assert q.decode_scale == factor
    assert np.shares_memory(q.codes, output) and np.shares_memory(q.scales, scales)


@places
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3"])
def test_quantize_dynamic_block_scaled_with_scales_of_two_axes_is_amds(
    place: str, format: str
) -> None:
    x = rows_of(2, 5, 64)
    output, scales = outputs(format, 5, 64, "linear")
    with at(place):
        modular.quantize_dynamic_block_scaled(output, scales, x, 1.0, SF_VECTOR_SIZE=32)
    codes, blocks = expected(x, format, None, "even" if format == "mxfp4" else "rceil")
    same(output, codes)
    same(scales, blocks)


@places
@formats
def test_quantize_dynamic_scaled_fp4fp8(place: str, format: str) -> None:
    x = rows_of(3, 3, 160)
    output, scales = outputs(format, 3, 160)
    with at(place):
        modular.quantize_dynamic_scaled_fp4fp8(
            ctx=None,
            output_tile=output,
            scales_tile=scales,
            input_tile=x,
            num_cols=160,
            num_cols_padded=160,
            tensor_sf=2.0,
            SF_VECTOR_SIZE=VECTOR[format],
            num_max_threads=512,
        )
    codes, blocks = expected(x, format, np.float32(2))
    same(output, codes)
    same(scales, tiled(blocks))
    again, more = outputs(format, 3, 160)
    modular.quantize_dynamic_scaled_fp4fp8(
        None, again, more, x, 160, 160, 2.0, SF_VECTOR_SIZE=VECTOR[format]
    )
    same(again, codes)
    same(more, tiled(blocks))


@places
def test_quantize_dynamic_scaled_fp4_async(place: str) -> None:
    x = rows_of(4, 129, 128)
    output, scales = outputs("nvfp4", 129, 128)
    with at(place):
        modular.quantize_dynamic_scaled_fp4_async(
            ctx=None,
            output_tensor_tile=output,
            scales_tensor_tile=scales,
            input_tensor_tile=x,
            tensor_sf=0.5,
            SF_VECTOR_SIZE=16,
        )
    codes, blocks = expected(x, "nvfp4", np.float32(0.5))
    same(output, codes)
    same(scales, tiled(blocks))


OFFSETS = np.array([0, 100, 100, 150, 157], np.uint32)
SCALES_OFFSETS = np.array([0, 1, 1, 1], np.uint32)
IDS = np.array([2, 0, 1, -1], np.int32)
FACTORS = np.array([1, 0.43, 0.5], np.float32)
RANGES: dict[str, Any] = {"row_offsets": OFFSETS, "expert_ids": IDS, "sf_tensor": FACTORS}


def grouped_expected(
    x: np.ndarray, format: str, sources: np.ndarray, tiles: int, starts: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and 5-D scales of the ranges above, row by row."""
    rows = np.zeros((len(sources), x.shape[1]), np.float32)
    factor = np.ones(len(sources), np.float32)
    place = np.zeros(len(sources), np.int64)
    for i, expert in enumerate(IDS):
        for r in range(OFFSETS[i], OFFSETS[i + 1]):
            place[r] = 128 * starts[i] + r - OFFSETS[i]
            if expert >= 0 and 0 <= sources[r] < len(x):
                rows[r], factor[r] = x[sources[r]], FACTORS[expert]
    covered = int(OFFSETS[-1])
    codes, blocks = expected(rows, format, factor)
    return codes, tiled(blocks[:covered], tiles, place)


@places
@formats
@pytest.mark.parametrize("gathered", [False, True])
def test_grouped_quantize_dynamic_scaled_fp4_async(place: str, format: str, gathered: bool) -> None:
    x = rows_of(5, 40 if gathered else 160, 64)
    sources = np.arange(160, dtype=np.int32)
    more: dict[str, Any] = {}
    if gathered:
        sources = np.random.default_rng(6).integers(-3, 44, 160).astype(np.int32)
        more["row_indices"] = sources
    output, _ = outputs(format, 160, 64)
    tiles = 2 + 4
    scales = empty(
        (tiles, outputs(format, 1, 64)[1].shape[1], 32, 4, 4), outputs(format, 1, 64)[1].dtype
    )
    with at(place):
        q = modular.grouped_quantize_dynamic_scaled_fp4_async(
            output_tensor=output,
            scales_tensor=scales,
            input_tensor=x,
            scales_offsets=SCALES_OFFSETS,
            ctx=None,
            num_threads=128,
            k_tiles_per_block=4,
            **RANGES,
            **more,
        )
    codes, blocks = grouped_expected(x, format, sources, tiles, [0, 1, 1, 2])
    same(output, codes)
    same(scales, blocks)
    assert q.groups is OFFSETS
    without, other = empty(output.shape, output.dtype), empty(scales.shape, scales.dtype)
    with at(place):
        modular.grouped_quantize_dynamic_scaled_fp4_async(
            without, other, x, OFFSETS, None, IDS, FACTORS, **more
        )
    same(without, codes)
    same(other, blocks)


@places
def test_scales_offsets_say_where_the_scale_tiles_of_a_range_are(place: str) -> None:
    x = rows_of(7, 160, 64)
    output, scales = outputs("nvfp4", 160, 64)[0], empty((9, 1, 32, 4, 4), E4M3)
    # Tile of a range: row_offsets // 128 + scales_offsets, here 5, 5, 2 and 1 + 6 = 7.
    with at(place):
        modular.grouped_quantize_dynamic_scaled_fp4_async(
            output,
            scales,
            x,
            scales_offsets=np.array([5, 5, 2, 6], np.uint32),
            **RANGES,
        )
    codes, blocks = grouped_expected(x, "nvfp4", np.arange(160), 9, [5, 5, 2, 7])
    same(output, codes)
    same(scales, blocks)


# Scales ------------------------------------------------------------------------------------------


@places
@pytest.mark.parametrize("dtype", [E4M3, E8M0, np.uint8])
def test_block_scales_interleave(place: str, dtype: Any) -> None:
    scales = np.random.default_rng(8).integers(0, 127, (130, 5)).astype(np.uint8)
    output = empty((2, 2, 32, 4, 4), dtype)
    with at(place):
        made = modular.block_scales_interleave(
            output_scales_device=output,
            input_scales_device=scales.view(dtype),
            ctx=None,
            SF_VECTOR_SIZE={E4M3: 16, E8M0: 32}.get(dtype),
        )
    assert made is output
    same(output, tiled(scales))


@places
def test_block_scales_interleave_fp4(place: str) -> None:
    scales = np.random.default_rng(9).integers(0, 127, (3, 9)).astype(np.uint8)
    for dtype in (E4M3, E8M0):
        output = empty((1, 3, 32, 4, 4), dtype)
        with at(place):
            modular.block_scales_interleave_fp4(
                ctx=None,
                input_scales_tile=scales.view(dtype),
                output_scales_tile=output,
                SF_VECTOR_SIZE=16,
                num_max_threads=1024,
            )
        same(output, tiled(scales))


def test_the_golden_offsets_of_the_5d_layout() -> None:
    """Worked out by hand in the definition of the layout, for three tiles of a row."""
    places = {
        (0, 0): 0, (0, 1): 1, (1, 0): 16, (31, 3): 499, (32, 0): 4, (37, 6): 598,
        (127, 11): 1535, (128, 0): 1536, (200, 5): 2185,
    }  # fmt: skip
    for (row, block), offset in places.items():
        scales = np.zeros((201, 12), np.uint8)
        scales[row, block] = 77
        output = empty((2, 3, 32, 4, 4), np.uint8)
        modular.block_scales_interleave(output, scales)
        assert np.flatnonzero(output.reshape(-1)).tolist() == [offset]


# Products ----------------------------------------------------------------------------------------


def integers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Small integers: every sum below is exact, so that any order gives these bytes."""
    rng = np.random.default_rng(seed)
    return (rng.integers(-3, 4, shape) * (rng.random(shape) < 0.6)).astype(np.float32)


def operand(format: str, values: np.ndarray, layout: str = "tcgen") -> tuple[Any, Any, Any]:
    """Codes and scales of a matrix of integers, and the values that they stand for."""
    q = nvfp4.quantize(values, format, scale_layout=layout)
    dtypes = outputs(format, 1, 64)
    codes, scales = (
        part.view(d.dtype) for part, d in zip((q.codes, q.scales), dtypes, strict=True)
    )
    return codes, scales, q.dequantize().astype(np.float64)


@places
@formats
@pytest.mark.parametrize("dtype", [BF16, np.float32, np.float16])
def test_block_scaled_matmul(place: str, format: str, dtype: Any) -> None:
    a, a_scales, av = operand(format, integers(1, (5, 64)))
    b, b_scales, bv = operand(format, integers(2, (9, 64)))
    c = empty((5, 9), dtype)
    with at(place):
        made = modular.block_scaled_matmul(
            c_device=c,
            a_device=a,
            b_device=b,
            a_scales_device=a_scales,
            b_scales_device=b_scales,
            tensor_sf=0.5,
            ctx=None,
            SF_VECTOR_SIZE=VECTOR[format],
            transpose_b=True,
            transpose_a=False,
        )
    assert made is c
    np.testing.assert_array_equal(c.astype(np.float64), (0.5 * av @ bv.T).astype(dtype))


@places
@formats
def test_naive_block_scaled_matmul(place: str, format: str) -> None:
    rng = np.random.default_rng(3)
    a, a_scales, _ = operand(format, rng.standard_normal((3, 96)).astype(np.float32))
    b, b_scales, _ = operand(format, rng.standard_normal((4, 96)).astype(np.float32))
    c = empty((3, 4), np.float32)
    kind = {"nvfp4": "KIND_MXF4NVF4", "mxfp4": "KIND_MXF4", "mxfp8_e4m3": "KIND_MXF8F6F4"}[format]
    with at(place):
        modular.naive_block_scaled_matmul(
            c=c,
            a=a,
            b=b,
            a_scales=a_scales,
            b_scales=b_scales,
            ctx=None,
            alpha=0.3,
            scaling_kind=kind,
            SF_VECTOR_SIZE=VECTOR[format],
            accum_type="float32",
            transpose_b=True,
            BLOCK_DIM=16,
        )
    # k ascending in float32, each operation rounded once.
    left = nvfp4.QTensor.from_parts(a, a_scales, format).dequantize()
    right = nvfp4.QTensor.from_parts(b, b_scales, format).dequantize()
    for m in range(3):
        for n in range(4):
            total = np.float32(0)
            for k in range(96):
                total += np.float32(left[m, k] * right[n, k])
            assert c[m, n] == total * np.float32(0.3)


@places
@formats
def test_block_scaled_matmul_with_epilogue(place: str, format: str) -> None:
    a, a_scales, av = operand(format, integers(4, (5, 64)))
    b, b_scales, bv = operand(format, integers(5, (16, 64)))
    residual = integers(6, (5, 16))

    def add(value, row, column, expert, residual):  # type: ignore[no-untyped-def]
        return value + residual[row * 16 + column]

    def mark(coords, value):  # type: ignore[no-untyped-def]
        row, column = coords
        return value + np.float32(row * 16 + column)

    c = empty((5, 16), BF16)
    parts = {"a": a, "b": b, "a_scales": a_scales, "b_scales": b_scales}
    with at(place):
        modular.block_scaled_matmul_with_epilogue(
            c=c,
            tensor_sf=2.0,
            ctx=None,
            SF_VECTOR_SIZE=VECTOR[format],
            transpose_b=True,
            elementwise_lambda_fn=nvfp4.Epilogue(add, residual),
            **parts,
        )
    wanted = 2 * av @ bv.T
    np.testing.assert_array_equal(c.astype(np.float64), (wanted + residual).astype(BF16))
    with at(place):
        modular.block_scaled_matmul_with_epilogue(
            c=c, tensor_sf=2.0, elementwise_lambda_fn=mark, **parts
        )
    number = np.arange(80).reshape(5, 16)
    np.testing.assert_array_equal(c.astype(np.float64), (wanted + number).astype(BF16))
    half = empty((5, 8), np.float32)
    with at(place):
        modular.block_scaled_matmul_with_epilogue(
            c=half,
            tensor_sf=1.0,
            elementwise_lambda_fn=nvfp4.epilogues.swiglu(),
            **parts,
        )
    gate, up = np.split(av @ bv.T, 2, axis=1)
    np.testing.assert_allclose(half, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-6)


def test_an_epilogue_gets_the_float32_sum_not_what_c_holds() -> None:
    seen = []

    def note(coords, value):  # type: ignore[no-untyped-def]
        seen.append(value)
        return value

    a, a_scales, _ = operand("nvfp4", np.full((1, 64), 3, np.float32))
    b = nvfp4.quantize(np.full((1, 64), 1.5, np.float32), "nvfp4")
    c = empty((1, 1), BF16)
    modular.block_scaled_matmul_with_epilogue(
        c, a, b.codes, a_scales, b.scales.view(E4M3), 1.0009765625, elementwise_lambda_fn=note
    )
    assert [(type(value), float(value)) for value in seen] == [(np.float32, 288.28125)]
    assert float(c[0, 0]) == 288


# AMD ---------------------------------------------------------------------------------------------


@places
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3"])
def test_quantize_mx_amd(place: str, format: str) -> None:
    x = rows_of(10, 7, 96)
    output, scales = outputs(format, 7, 96, "linear")
    with at(place):
        q = modular.quantize_mx_amd(
            ctx=None, output_tile=output, scales_tile=scales, input_tile=x, num_max_threads=512
        )
    codes, blocks = expected(x, format, None, "even" if format == "mxfp4" else "rceil")
    same(output, codes)
    same(scales, blocks)
    assert (q.format, q.scale_layout) == (format, "linear")


@places
@pytest.mark.parametrize("shape", [(96,), (3, 64), (2, 5, 32), (0, 32)])
def test_quantize_dynamic_block_scaled_mxfp4(place: str, shape: tuple[int, ...]) -> None:
    count = int(np.prod(shape))
    flat = rows_of(11, max(count // 32, 1), 32)[: count // 32]
    output, scales = empty((count // 2,), np.uint8), empty((count // 32,), E8M0)
    with at(place):
        modular.quantize_dynamic_block_scaled_mxfp4(
            output=output, output_scales=scales, input=flat.reshape(shape), ctx=None
        )
    codes, blocks = expected(flat, "mxfp4", None, "even")
    same(output, codes.reshape(-1))
    same(scales, blocks.reshape(-1))


@places
def test_matmul_dynamic_block_scaled_amd(place: str) -> None:
    a, a_scales, av = operand("mxfp4", integers(12, (5, 64)), "linear")
    b, b_scales, bv = operand("mxfp4", integers(13, (9, 64)), "linear")
    for dtype in (BF16, np.float32):
        c = empty((5, 9), dtype)
        with at(place):
            made = modular.matmul_dynamic_block_scaled_amd(
                c=c, a=a, b=b, a_scales=a_scales, b_scales=b_scales, ctx=None
            )
        assert made is c
        np.testing.assert_array_equal(c.astype(np.float64), (av @ bv.T).astype(dtype))


@places
def test_grouped_matmul_block_scaled_amd(place: str) -> None:
    a, a_scales, av = operand("mxfp4", integers(14, (12, 64)), "linear")
    stack = nvfp4.quantize(integers(15, (3, 9, 64)), "mxfp4", scale_layout="linear")
    bv = stack.dequantize()
    c = empty((12, 9), BF16)
    with at(place):
        modular.grouped_matmul_block_scaled_amd(
            c=c,
            a=a,
            b=stack.codes,
            a_scales=a_scales,
            b_scales=stack.scales.view(E8M0),
            # What lies behind the active experts is not looked at.
            row_offsets=np.array([0, 4, 4, 7, 10, 99], np.uint32),
            expert_ids=np.array([2, 0, -1, 1, 77], np.int32),
            num_active_experts=4,
            ctx=None,
        )
    wanted = np.zeros((12, 9))
    wanted[:4] = av[:4] @ bv[2].T
    wanted[7:10] = av[7:10] @ bv[1].T
    np.testing.assert_array_equal(c.astype(np.float64), wanted.astype(BF16))
    assert (c[4:7].view(np.uint16) == 0).all() and (c[10:].view(np.uint16) == 0).all()


# Names -------------------------------------------------------------------------------------------


def test_arguments_have_their_names_of_other_revisions_too() -> None:
    x = rows_of(12, 2, 64)
    codes, blocks = expected(x, "nvfp4")
    for function, names, more in (
        ("quantize_dynamic_scaled_fp4fp8", ("output", "scales", "input"), (64, 64)),
        (
            "quantize_dynamic_scaled_fp4_async",
            ("output_tensor", "scales_tensor", "input_tensor"),
            (),
        ),
    ):
        output, scales = outputs("nvfp4", 2, 64)
        keywords = dict(zip(("num_cols", "num_cols_padded"), more, strict=False))
        arrays = dict(zip(names, (output, scales, x), strict=True))
        getattr(modular, function)(ctx=None, **arrays, **keywords)
        same(output, codes)
        same(scales, tiled(blocks))
    with pytest.raises(TypeError, match="got output_tile twice"):
        modular.quantize_mx_amd(None, output_tile=x, output=x, scales_tile=x, input_tile=x)


WITHOUT_CUDA = """
import ml_dtypes, numpy as np, nvfp4
from nvfp4.compat import modular

x = np.linspace(-3, 3, 128).reshape(2, 64).astype(ml_dtypes.bfloat16)
results = []
for place in (None, nvfp4.simulate()):
    output = np.empty((2, 32), np.uint8)
    scales = np.empty((1, 1, 32, 4, 4), ml_dtypes.float8_e4m3fn)
    c = np.empty((2, 2), np.float32)
    if place:
        place.__enter__()
    modular.quantize_dynamic_block_scaled(output, scales, x, 1.0)
    modular.naive_block_scaled_matmul(
        c, output, output, scales, scales, scaling_kind="KIND_MXF4NVF4"
    )
    results.append(output.tobytes() + scales.tobytes() + c.tobytes())
assert results[0] == results[1]
print(modular.naive_block_scaled_matmul_kernel.kernel.name)
"""


def test_no_cuda_package_is_needed() -> None:
    from tests.cli.test_without_cuda import BLOCKED

    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED + WITHOUT_CUDA],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "matmul_naive\n"


def test_the_documentation_has_a_row_for_each_function_and_kernel() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "modular.md").read_text("utf-8")
    rows = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    earlier = {"quantize_mxfp4_amd"}
    earlier |= {name for name in modular.__all__ if "matmul" in name and name.endswith("_mxfp4")}
    kernels = {name for name in dir(modular) if name.endswith("_kernel")}
    assert rows == set(modular.__all__) - earlier | kernels
    assert len(kernels) == 8
    # The message that is quoted is the one that comes.
    output, scales = empty((2, 68), np.uint8), empty((1, 3, 32, 4, 4), E4M3)
    with pytest.raises(ValueError) as refused:
        modular.quantize_dynamic_scaled_fp4fp8(
            None, output, scales, np.ones((2, 136), BF16), 136, 136
        )
    (quoted,) = re.findall("Here: `([^`]+)`", text)
    first, last = quoted.split(" ...")
    assert str(refused.value).startswith(first) and str(refused.value).endswith(last)


def test_earlier_names_are_the_same_functions() -> None:
    assert modular.quantize_mxfp4_amd is modular.quantize_mx_amd
    old = modular.matmul_dynamic_block_scaled_mxfp4
    assert old is modular.matmul_dynamic_block_scaled_amd
    old = modular.grouped_matmul_block_scaled_mxfp4
    assert old is modular.grouped_matmul_block_scaled_amd


def test_bytes_serve_where_a_library_has_no_float8() -> None:
    x = rows_of(13, 5, 64)
    for format, size in (("nvfp4", 16), ("mxfp4", 32), ("mxfp8_e4m3", 32)):
        output, scales = (part.view(np.uint8) for part in outputs(format, 5, 64))
        q = modular.quantize_dynamic_block_scaled(output, scales, x, 1.0, SF_VECTOR_SIZE=size)
        codes, blocks = expected(x, format)
        assert q.format == format
        same(output, codes)
        same(scales, tiled(blocks))
        c, again = empty((5, 5), np.float32), empty((5, 5), np.float32)
        modular.block_scaled_matmul(
            c,
            output,
            output,
            scales,
            scales,
            1.0,
            SF_VECTOR_SIZE=size,
            a_format=format,
            b_format=format,
        )
        nvfp4.matmul(q, q, out=again, out_dtype="float32")
        np.testing.assert_array_equal(c, again)


def test_formats_of_a_product_may_differ() -> None:
    a, a_scales, av = operand("mxfp8_e4m3", integers(16, (5, 64)))
    b, b_scales, bv = operand("mxfp4", integers(17, (9, 64)))
    c = empty((5, 9), np.float32)
    modular.block_scaled_matmul(c, a, b, a_scales, b_scales, 1.0)
    np.testing.assert_array_equal(c, av @ bv.T)


def test_empty_matrices_are_written_as_what_is_left_of_them() -> None:
    output, scales = outputs("nvfp4", 0, 64)
    modular.quantize_dynamic_block_scaled(output, scales, np.zeros((0, 64), BF16), 1.0)
    output, scales = np.zeros((5, 0), np.uint8), np.zeros((1, 0, 32, 4, 4), E4M3)
    modular.quantize_dynamic_block_scaled(output, scales, np.zeros((5, 0), BF16), 1.0)
    c = empty((5, 5), np.float32)
    modular.block_scaled_matmul(c, output, output, scales, scales, 1.0)
    assert (c == 0).all()
