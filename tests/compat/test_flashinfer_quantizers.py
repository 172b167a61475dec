"""FlashInfer's quantisers by their names: bytes against exact arithmetic, layouts, round trips."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import formats, golden
from nvfp4.compat import flashinfer
from nvfp4.compat.flashinfer import SfLayout
from tests import exact
from tests.compat import flashinfer_cases as cases

TILES = {SfLayout.layout_128x4: 128, SfLayout.layout_8x4: 8, SfLayout.layout_linear: 0}
layouts = pytest.mark.parametrize("layout", TILES, ids=lambda layout: layout.name)


def values(m: int, k: int, dtype: Any = np.float32) -> np.ndarray:
    """Normal values of rows of very different sizes, with zeros, a large and a tiny block."""
    random = np.random.default_rng((m, k))
    x = random.standard_normal((m, k)) * np.exp2(random.integers(-8, 8, (m, 1)))
    x[:, :3] = 0, -0.0, 6
    if m > 2:
        x[m // 2, :] = 0
    x[0, -16:] *= 2.0**-14
    return x.astype(dtype)


def arranged(linear: np.ndarray, layout: SfLayout) -> np.ndarray:
    """Linear scales as FlashInfer returns them."""
    if layout is SfLayout.layout_linear:
        return linear
    return cases.swizzled(linear, TILES[layout]).reshape(-1, -(-linear.shape[1] // 4) * 4)


def options(layout: SfLayout) -> dict[str, bool]:
    return {
        "is_sf_swizzled_layout": layout is not SfLayout.layout_linear,
        "is_sf_8x4_layout": layout is SfLayout.layout_8x4,
    }


def check(got: tuple[Any, ...], codes: np.ndarray, scales: np.ndarray, layout: SfLayout) -> None:
    assert (got[0].dtype, got[0].shape) == (np.uint8, codes.shape)
    assert got[0].tobytes() == codes.tobytes()
    expected = arranged(scales, layout)
    assert (got[1].dtype, got[1].shape) == (np.uint8, expected.shape)
    assert got[1].tobytes() == expected.tobytes()


@layouts
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(("m", "k"), [(1, 16), (9, 48), (130, 80)])
def test_nvfp4_bytes(layout: SfLayout, dtype: Any, m: int, k: int) -> None:
    x = values(m, k, dtype)
    g = np.float32(2688) / np.abs(x).max().astype(np.float32)
    codes, scales = exact.quantize(x.astype(np.float32), formats.NVFP4, g)
    for scale in (g, float(g), np.array([g]), np.array(g)):
        check(flashinfer.fp4_quantize(x, scale, **options(layout)), codes, scales, layout)
        check(flashinfer.nvfp4_quantize(x, scale, layout), codes, scales, layout)


@layouts
@pytest.mark.parametrize(("m", "k"), [(1, 32), (9, 96), (130, 160)])
def test_mxfp4_bytes(layout: SfLayout, m: int, k: int) -> None:
    x = values(m, k, ml_dtypes.bfloat16)
    codes, scales = exact.quantize(x.astype(np.float32), formats.MXFP4)
    check(flashinfer.mxfp4_quantize(x, sfLayout=layout), codes, scales, layout)
    # FlashInfer passes a global scale that e8m0 scales do not take.
    for scale in (None, 7.0, np.array([3.0], np.float32)):
        got = flashinfer.fp4_quantize(x, scale, 32, True, **options(layout))
        check(got, codes, scales, layout)


@layouts
@pytest.mark.parametrize("alignment", [32, 64, 128])
def test_mxfp8_bytes_and_columns_up_to_the_alignment(layout: SfLayout, alignment: int) -> None:
    x = values(9, 96, np.float16)
    wide = np.zeros((9, -(-96 // alignment) * alignment), np.float32)
    wide[:, :96] = x
    codes, scales = exact.quantize(wide, formats.MXFP8_E4M3)
    got, flat = flashinfer.mxfp8_quantize(x, alignment=alignment, sf_swizzle_layout=layout)
    assert (got.dtype, got.shape) == (ml_dtypes.float8_e4m3fn, wide.shape)
    assert got.tobytes() == codes.tobytes()
    assert flat.ndim == 1 and flat.tobytes() == arranged(scales, layout).tobytes()


def test_mxfp8_is_swizzled_unless_told_otherwise() -> None:
    x = values(9, 64)
    linear = flashinfer.mxfp8_quantize(x, False)[1].reshape(9, 2)
    assert flashinfer.mxfp8_quantize(x)[1].tobytes() == cases.swizzled(linear).tobytes()
    both = flashinfer.mxfp8_quantize(x, True, sf_swizzle_layout=SfLayout.layout_linear)
    assert both[1].tobytes() == linear.tobytes()


@layouts
def test_the_kernels_give_the_same_bytes(layout: SfLayout) -> None:
    x = values(9, 96, ml_dtypes.bfloat16)
    calls = (
        lambda: flashinfer.nvfp4_quantize(x, 2.0, layout),
        lambda: flashinfer.mxfp4_quantize(x, sfLayout=layout),
        lambda: flashinfer.mxfp8_quantize(x, sf_swizzle_layout=layout),
    )
    for call in calls:
        expected = call()
        with nvfp4.simulate("sm_90a"):
            got = call()
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
            assert ours.tobytes() == theirs.tobytes()


@layouts
def test_leading_axes_are_rows(layout: SfLayout) -> None:
    x = values(6, 64).reshape(2, 3, 64)
    flat = flashinfer.nvfp4_quantize(x.reshape(6, 64), 1.0, layout)
    codes, scales = flashinfer.nvfp4_quantize(x, 1.0, layout)
    assert codes.shape == (2, 3, 32) and codes.tobytes() == flat[0].tobytes()
    assert scales.shape == flat[1].shape and scales.tobytes() == flat[1].tobytes()
    assert flashinfer.mxfp8_quantize(x)[0].shape == (2, 3, 64)
    row = flashinfer.nvfp4_quantize(x[0, 0], 1.0, SfLayout.layout_linear)
    assert row[0].shape == (32,) and row[1].shape == (1, 4)


def test_column_major_input_is_quantised_along_its_columns() -> None:
    x = values(9, 64)
    codes, scales = flashinfer.fp4_quantize(x, 2.0)
    for turned in (x.T, np.asfortranarray(x.T)):
        got, got_scales = flashinfer.fp4_quantize(turned, 2.0)
        assert got.shape == (32, 9) and np.array_equal(got, codes.T)
        assert got_scales.shape == (4, 128) and np.array_equal(got_scales, scales.T)
    stack = np.stack([x, 2 * x])
    codes, scales = flashinfer.fp4_quantize(stack, 2.0)
    got, got_scales = flashinfer.fp4_quantize(stack.swapaxes(1, 2), 2.0)
    assert np.array_equal(got, codes.swapaxes(1, 2)) and np.array_equal(got_scales, scales.T)


def test_a_single_row_is_never_column_major() -> None:
    x = values(1, 32)
    for one in (x, np.asfortranarray(x), x.T.copy().T):
        assert flashinfer.fp4_quantize(one, 1.0)[0].shape == (1, 16)


def test_rows_may_lie_apart() -> None:
    x = values(9, 128)[:, :64]
    got = flashinfer.fp4_quantize(x, 2.0)
    expected = flashinfer.fp4_quantize(x.copy(), 2.0)
    assert all(map(np.array_equal, got, expected))


def test_the_inverse_of_the_global_scale_is_the_same_scale() -> None:
    x = values(9, 64)
    expected = flashinfer.fp4_quantize(x, 4.0)
    for inverse in (0.25, np.array([0.25], np.float32), np.array(0.25, np.float32)):
        got = flashinfer.fp4_quantize(x, inverse, is_global_scale_inversed=True)
        assert all(map(np.array_equal, got, expected))


def test_global_scales_of_other_float_types_are_converted() -> None:
    x = values(9, 64)
    expected = flashinfer.fp4_quantize(x, 1.5)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        got = flashinfer.fp4_quantize(x, np.array([1.5], dtype))
        assert all(map(np.array_equal, got, expected))
    assert all(map(np.array_equal, flashinfer.fp4_quantize(x), flashinfer.fp4_quantize(x, 1.0)))


def test_one_global_scale_a_row() -> None:
    x = values(9, 64)
    by_row = np.exp2(np.arange(9) - 4).astype(np.float32)
    codes, scales = exact.quantize(x, formats.NVFP4, by_row)
    for given in (by_row, by_row[:, None]):
        got = flashinfer.fp4_quantize(x, given, is_sf_swizzled_layout=False)
        check(got, codes, scales, SfLayout.layout_linear)


@layouts
def test_per_token_scales(layout: SfLayout) -> None:
    x = values(9, 64)
    amax = np.abs(x).max(axis=1)
    by_row = np.where(amax == 0, 1, np.float32(2688) / np.where(amax == 0, 1, amax))
    codes, scales = exact.quantize(x, formats.NVFP4, by_row.astype(np.float32))
    for base in (1 / 2688, np.float32(1 / 2688), np.array([1 / 2688], np.float32)):
        *got, factors = flashinfer.nvfp4_quantize(x, base, layout, per_token_activation=True)
        check(tuple(got), codes, scales, layout)
        assert factors.shape == (9,) and factors.dtype == np.float32
        assert np.array_equal(factors, 1 / by_row.astype(np.float32))


def test_float8_input_is_widened_exactly() -> None:
    x = values(9, 96).astype(ml_dtypes.float8_e4m3fn)
    wide = x.astype(np.float32)
    for call in (
        lambda v: flashinfer.fp4_quantize(v, 2.0),
        flashinfer.mxfp4_quantize,
        flashinfer.mxfp8_quantize,
    ):
        assert all(map(np.array_equal, call(x), call(wide)))


@pytest.mark.parametrize("m", [0, 1])
@pytest.mark.parametrize("k", [0, 32])
@layouts
def test_no_rows_or_no_columns_are_legal(m: int, k: int, layout: SfLayout) -> None:
    codes, scales = flashinfer.nvfp4_quantize(np.zeros((m, k), np.float32), 1.0, layout)
    assert codes.shape == (m, k // 2)
    tile = TILES[layout] or 1
    columns = k // 16 if layout is SfLayout.layout_linear else -(-k // 64) * 4
    assert scales.shape == (-(-m // tile) * tile, columns)
    assert flashinfer.mxfp8_quantize(np.zeros((m, k), np.float32))[0].shape == (m, k)


def test_flashinfers_own_layout_objects_are_taken() -> None:
    from enum import Enum

    theirs = Enum("SfLayout", {"layout_128x4": 0, "layout_8x4": 1, "layout_linear": 2})
    x = values(9, 64)
    for ours, other in zip(SfLayout, theirs, strict=True):
        got = flashinfer.nvfp4_quantize(x, 1.0, other)
        assert all(map(np.array_equal, got, flashinfer.nvfp4_quantize(x, 1.0, ours)))


# Special values, for which FlashInfer has other bytes or none -------------------------------------


def test_special_blocks_have_the_bytes_of_the_arithmetic() -> None:
    x = np.ones((3, 32), np.float32)
    x[0, 3] = np.nan
    x[1, 3] = np.inf
    x[2] = 1e-30
    codes, scales = flashinfer.nvfp4_quantize(x, 1.0, SfLayout.layout_linear)
    assert scales.tolist() == [[0x7F, 0x23], [0x7E, 0x23], [0, 0]]
    assert (codes[0, :8] == 0x77).all() and (codes[2] == 0).all()
    _, scales = flashinfer.mxfp4_quantize(x, sfLayout=SfLayout.layout_linear)
    assert scales[:2].tolist() == [[255], [254]]


# Round trips --------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("simulated", [False, True])
def test_what_was_quantised_comes_back(layout: SfLayout, simulated: bool) -> None:
    x = values(9, 96, ml_dtypes.bfloat16)
    g = np.float32(2.5)
    back = np.array([1 / g], np.float32)
    expected = nvfp4.quantize(x, "nvfp4", encode_scale=g, scale_layout="linear").dequantize()

    def run() -> tuple[np.ndarray, np.ndarray]:
        codes, scales = flashinfer.nvfp4_quantize(x, g, layout)
        first = flashinfer.e2m1_and_ufp8sf_scale_to_float(
            codes, scales.reshape(-1), back, 16, 1, **options(layout)
        )
        codes, scales = flashinfer.mxfp4_quantize(x, sfLayout=layout)
        return first, flashinfer.mxfp4_dequantize(codes, scales, layout)

    if simulated:
        with nvfp4.simulate("sm_90a"):
            first, second = run()
    else:
        first, second = run()
    assert first.dtype == second.dtype == np.float32
    assert np.array_equal(first, expected)
    assert np.array_equal(second, nvfp4.quantize(x, "mxfp4", scale_layout="linear").dequantize())


def test_every_scale_byte_decodes_as_the_arithmetic_says() -> None:
    codes = np.full((256, 16), 0x22, np.uint8)  # 1.0 everywhere
    scales = np.arange(256, dtype=np.uint8)
    got = flashinfer.e2m1_and_ufp8sf_scale_to_float(codes, scales, None, 32, 0, False)
    assert np.array_equal(got, np.repeat(golden.decode_e8m0(scales), 32).reshape(256, 32), True)
    assert got[0, 0] == 2.0**-127 and np.isnan(got[255]).all()
    scales = np.arange(128, dtype=np.uint8)
    got = flashinfer.e2m1_and_ufp8sf_scale_to_float(
        codes[:128, :8], scales, np.float32(0.5), is_sf_swizzled_layout=False
    )
    expected = np.repeat(golden.decode_e4m3(scales) * np.float32(0.5), 16).reshape(128, 16)
    assert np.array_equal(got, expected, True)


def test_scales_as_float8_are_the_same_scales() -> None:
    codes, scales = flashinfer.mxfp4_quantize(values(9, 64))
    expected = flashinfer.mxfp4_dequantize(codes, scales)
    got = flashinfer.mxfp4_dequantize(codes, scales.view(ml_dtypes.float8_e8m0fnu))
    assert np.array_equal(got, expected)


# block_scale_interleave ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(1, 1), (130, 7), (128, 4), (2, 33, 5), (3, 1, 8), (0, 4), (4, 0)]
)
@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.bfloat16], ids=["uint8", "bfloat16"])
@pytest.mark.parametrize("simulated", [False, True])
def test_scales_are_swizzled(shape: tuple[int, ...], dtype: Any, simulated: bool) -> None:
    words = np.random.default_rng(shape).integers(1, 250, shape)
    scales = words.astype(np.uint8 if dtype is np.uint8 else np.float32).astype(dtype)
    if simulated:
        with nvfp4.simulate("sm_90a"):
            got = flashinfer.block_scale_interleave(scales)
    else:
        got = flashinfer.block_scale_interleave(scales)
    stack = scales if scales.ndim == 3 else scales[None]
    expected = np.concatenate([cases.swizzled(one) for one in stack])
    assert (got.dtype, got.shape) == (np.dtype(dtype), expected.shape)
    assert got.tobytes() == expected.tobytes()


def test_the_old_name_of_block_scale_interleave() -> None:
    assert flashinfer.nvfp4_block_scale_interleave is flashinfer.block_scale_interleave


# Stacks of experts --------------------------------------------------------------------------------

MASK = np.array([5, 0, 130], np.int32)


def stack_of_experts(columns: int, dtype: Any) -> np.ndarray:
    x = np.random.default_rng(columns).standard_normal((3, 130, columns)).astype(dtype)
    x[0, 5:] = np.nan  # rows that do not count are not looked at
    x[1] = np.inf
    return x


def check_experts(got: tuple[Any, Any], h: np.ndarray, g: np.ndarray) -> None:
    codes, scales = got
    width = h.shape[2]
    across = -(-width // 64)
    assert (codes.dtype, codes.shape) == (np.uint8, (130, width // 2, 3))
    assert (scales.dtype, scales.shape) == (ml_dtypes.float8_e4m3fn, (32, 4, 2, 4, across, 3))
    assert codes.transpose(2, 0, 1).flags.c_contiguous
    physical = scales.transpose(5, 2, 4, 0, 1, 3)
    assert physical.flags.c_contiguous
    for e, rows in enumerate(MASK):
        q = nvfp4.quantize(h[e, :rows], "nvfp4", encode_scale=g[e], scale_layout="linear")
        expected, linear = q.codes, q.scales
        whole = np.zeros((130, width // 2), np.uint8)
        whole[:rows] = expected
        assert np.array_equal(codes[..., e], whole)
        all_rows = np.zeros((130, width // 16), np.uint8)
        all_rows[:rows] = linear
        assert physical[e].tobytes() == cases.swizzled(all_rows).tobytes()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_rows_of_experts_that_count_are_quantised(dtype: Any) -> None:
    x, g = stack_of_experts(80, dtype), np.array([0.5, 1, 20], np.float32)
    check_experts(flashinfer.scaled_fp4_grouped_quantize(x, MASK, g), x, g)
    same = np.full(3, 2, np.float32)
    for one in (2.0, np.array([2], np.float32), np.array(2, np.float32)):
        check_experts(flashinfer.scaled_fp4_grouped_quantize(x, MASK, one), x, same)


def test_silu_and_mul_rounds_before_it_quantises() -> None:
    x, g = stack_of_experts(160, ml_dtypes.bfloat16), np.array([0.5, 1, 20], np.float32)
    wide = np.where(np.isfinite(x.astype(np.float32)), x, 0).astype(np.float32)
    gate, up = wide[..., :80], wide[..., 80:]
    h = (gate / (1 + np.exp(-gate.astype(np.float64))) * up).astype(ml_dtypes.bfloat16)
    _, ours = nvfp4.swiglu_quantize(
        np.nan_to_num(x.astype(np.float32)).astype(x.dtype), "nvfp4", return_hidden=True
    )
    counted = np.arange(130) < MASK[:, None]
    step = np.abs(h.view(np.int16).astype(int) - ours.view(np.int16).astype(int))[counted]
    assert step.max() <= 1 and (step == 0).mean() > 0.95
    got = flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(x, MASK, g)
    check_experts(got, ours, g)


def test_experts_in_the_kernels() -> None:
    x, g = stack_of_experts(64, ml_dtypes.bfloat16), np.array([0.5, 1, 20], np.float32)
    x, mask = x[:, :20], np.array([5, 0, 20], np.int32)
    for function in (
        flashinfer.scaled_fp4_grouped_quantize,
        flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize,
    ):
        expected = function(x, mask, g)
        with nvfp4.simulate("sm_90a"):
            got = function(x, mask, g)
        for ours, theirs in zip(got, expected, strict=True):
            assert ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
