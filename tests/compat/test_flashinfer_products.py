"""FlashInfer's products by their names: values, layouts, what FlashInfer leaves undefined."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4.compat import flashinfer
from nvfp4.layouts_flashinfer import flashinfer_tile_starts, flashinfer_tiles
from tests.compat import flashinfer_cases as cases

BFLOAT16 = ml_dtypes.bfloat16
SKEWED = ([0, 4, 134, 134, 434], [0, 0, 300], [0, 257, 257, 257], [0, 128, 256], [0, 1, 2, 3, 4])


def rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def test_the_import_brings_no_compiler_and_no_array_library() -> None:
    code = (
        "import sys, nvfp4.compat.flashinfer as f; f.mm_fp4\n"
        "print(sorted({'numba', 'llvmlite', 'cupy', 'torch', 'cuda'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


# The scale rows -----------------------------------------------------------------------------------


def test_scale_rows_of_groups_are_flashinfers() -> None:
    # The example that was worked out from FlashInfer's own code.
    indptr = np.array([0, 4, 134, 134, 434], np.int32)
    assert (flashinfer_tile_starts(indptr) * 128).tolist() == [0, 128, 384, 512]
    assert flashinfer_tiles(434, 4) * 128 == 896
    starts = flashinfer_tile_starts(indptr)
    assert starts.dtype == np.int32
    assert flashinfer_tile_starts(np.array([0], np.int32)).shape == (0,)


def test_no_two_groups_share_a_tile_whatever_their_lengths() -> None:
    random = rng(1)
    for _ in range(200):
        lengths = random.integers(0, 300, 9) * random.integers(0, 2, 9)
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        starts = flashinfer_tile_starts(indptr)
        ends = starts + -(-lengths // 128)
        assert (ends[:-1] <= starts[1:]).all()
        assert ends[-1] <= flashinfer_tiles(int(indptr[-1]), 9)


# mxfp8 x mxfp4 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("a_format", ["mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["floor", "rceil"])
def test_flashinfers_own_matrix_at_its_tolerance(a_format: str, out_dtype: str, rule: str) -> None:
    for m, n, k, groups in itertools.product((4, 130), (23, 128), (100, 256), (1, 2, 4)):
        given = cases.quantized(rng(m, n, k), np.arange(groups + 1) * m, n, k, a_format, rule)
        out = flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments, out_dtype=out_dtype)
        expected = cases.cast(given.product(), out_dtype)
        assert out.shape == (groups * m, -(-n // 8) * 8)
        np.testing.assert_allclose(
            out[:, :n].astype(np.float32), expected[:, :n].astype(np.float32), 1e-2, 1e-2
        )


@pytest.mark.parametrize("indptr", SKEWED, ids=str)
@pytest.mark.parametrize("a_format", ["mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_exact_sums_come_out_exactly(indptr: list[int], a_format: str, out_dtype: str) -> None:
    given = cases.exact(rng(2), indptr, 136, 256, a_format=a_format)
    out = flashinfer.group_gemm_mxfp8_mxfp4_nt_groupwise(*given.arguments, out_dtype=out_dtype)
    assert cases.same_bits(out, cases.cast(given.product(), out_dtype))


def test_both_names_are_one_function() -> None:
    assert (
        flashinfer.group_gemm_mxfp4_nt_groupwise is flashinfer.group_gemm_mxfp8_mxfp4_nt_groupwise
    )


@pytest.mark.parametrize("indptr", [[0, 3, 3, 131], [0, 0, 5]], ids=str)
@pytest.mark.parametrize("a_format", ["mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"])
def test_the_kernels_give_the_same_bits(indptr: list[int], a_format: str) -> None:
    given = cases.exact(rng(3), indptr, 8, 128, a_format=a_format, rows=indptr[-1] + 2)
    function = flashinfer.group_gemm_mxfp4_nt_groupwise
    if a_format == "nvfp4":
        function = flashinfer.group_gemm_nvfp4_nt_groupwise
    out = np.full((indptr[-1] + 2, 8), np.nan, BFLOAT16)
    with nvfp4.simulate("sm_90a"):
        assert function(*given.arguments, out=out) is out
    assert cases.same_bits(out, cases.cast(given.product(), "bfloat16"))


def test_rows_outside_of_all_groups_are_zero() -> None:
    given = cases.exact(rng(4), [0, 5, 9], 16, 128, rows=14)
    out = np.full((14, 16), np.nan, BFLOAT16)
    flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments, out=out)
    assert (out[9:].view(np.uint16) == 0).all()
    assert cases.same_bits(out, cases.cast(given.product(), "bfloat16"))


@pytest.mark.parametrize(
    ("rows", "n", "k", "groups"),
    [(0, 16, 128, 2), (6, 0, 128, 2), (6, 16, 0, 2), (6, 16, 128, 0), (0, 0, 0, 0)],
)
def test_an_extent_of_zero_is_legal(rows: int, n: int, k: int, groups: int) -> None:
    indptr = np.linspace(0, rows if groups else 0, groups + 1).astype(np.int32)
    given = cases.exact(rng(5), indptr, n, k, rows=rows)
    out = flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments)
    assert out.shape == (rows, n) and out.dtype == BFLOAT16
    assert cases.same_bits(out, cases.cast(given.product(), "bfloat16"))


def test_scales_may_have_any_shape_with_their_bytes() -> None:
    given = cases.exact(rng(6), [0, 4, 134, 134, 434], 16, 256)
    expected = flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments)
    a, b, a_scale, b_scale, indptr = given.arguments
    for left, right in (
        (a_scale.reshape(-1), b_scale.reshape(-1)),
        (a_scale.view(ml_dtypes.float8_e8m0fnu), b_scale.view(ml_dtypes.float8_e8m0fnu)),
        # What FlashInfer's nvfp4 test allocates: up to the end of the last group.
        (a_scale[: 512 + 384], b_scale),
    ):
        out = flashinfer.group_gemm_mxfp4_nt_groupwise(a, b, left, right, indptr)
        assert out.tobytes() == expected.tobytes()


def test_scales_up_to_the_end_of_the_last_group_will_do() -> None:
    indptr = [0, 130, 131]
    given = cases.exact(rng(7), indptr, 8, 128)
    enough = cases.first_row(given.m_indptr, 1) + 128
    assert enough < len(given.a_scale) or len(given.a_scale) == 384
    a, b, a_scale, b_scale, m_indptr = given.arguments
    out = flashinfer.group_gemm_mxfp4_nt_groupwise(a, b, a_scale[:enough], b_scale, m_indptr)
    assert cases.same_bits(out, cases.cast(given.product(), "bfloat16"))
    with pytest.raises(ValueError, match=r"a_scale must have shape \(384, 4\)"):
        flashinfer.group_gemm_mxfp4_nt_groupwise(a, b, a_scale[: enough - 128], b_scale, m_indptr)


def test_padding_of_scales_is_not_looked_at() -> None:
    given = cases.exact(rng(8), [0, 4, 134, 134, 200], 24, 128)
    a, b, a_scale, b_scale, indptr = given.arguments
    real = cases.scales_by_group(np.ones((200, 4), np.uint8), indptr)
    poisoned_a = np.where(real == 1, a_scale, 255)
    real = cases.scales_of_stack(np.ones((4, 24, 4), np.uint8))
    poisoned_b = np.where(real == 1, b_scale, 255)
    assert (poisoned_a == 255).sum() > 1000 and (poisoned_b == 255).sum() > 1000
    out = flashinfer.group_gemm_mxfp4_nt_groupwise(a, b, poisoned_a, poisoned_b, indptr)
    assert cases.same_bits(out, cases.cast(given.product(), "bfloat16"))


def test_a_nan_scale_reaches_its_rows_and_no_others() -> None:
    given = cases.exact(rng(9), [0, 4, 9], 8, 128)
    a_scale = given.a_scale.copy()
    a_scale.reshape(-1)[128 * 4 + 16] = 255  # the second group's second row, first block
    out = flashinfer.group_gemm_mxfp4_nt_groupwise(
        given.a, given.b, a_scale, given.b_scale, given.m_indptr
    )
    nan = np.isnan(out.astype(np.float32))
    assert nan[5].all() and nan.sum() == 8


def test_bytes_with_a_format_are_the_same_operand() -> None:
    for a_format, names in (
        ("mxfp8_e4m3", ("mxfp8_e4m3", "mxfp8", "e4m3", "float8_e4m3fn")),
        ("mxfp8_e5m2", ("mxfp8_e5m2", "e5m2", "float8_e5m2")),
    ):
        given = cases.exact(rng(10), [0, 3, 7], 8, 128, a_format=a_format)
        a, *others = given.arguments
        expected = flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments)
        for name in names:
            for left in (a, a.view(np.uint8)):
                out = flashinfer.group_gemm_mxfp4_nt_groupwise(left, *others, a_format=name)
                assert out.tobytes() == expected.tobytes()


def test_out_says_the_dtype_where_nothing_else_does() -> None:
    given = cases.exact(rng(11), [0, 3, 7], 8, 128)
    for dtype in (np.float16, BFLOAT16):
        out = np.full((7, 8), np.nan, dtype)
        assert flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments, out=out) is out
        assert cases.same_bits(out, cases.cast(given.product(), np.dtype(dtype).name))
    for name in ("float16", np.float16):
        out = flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments, out_dtype=name)
        assert out.dtype == np.float16


def test_tuning_arguments_change_nothing() -> None:
    given = cases.exact(rng(12), [0, 3, 7], 8, 128)
    expected = flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments)
    for options in (
        (2, 128, 64, 256, False),
        (1, 128, 256, 128, True),
        (1, 128, 32, 128, True),
        (2, 128, 192, 128, True),
    ):
        out = flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments, *options)
        assert out.tobytes() == expected.tobytes()
    out = flashinfer.group_gemm_mxfp4_nt_groupwise(*given.arguments, skip_check=True)
    assert out.tobytes() == expected.tobytes()


# nvfp4 x nvfp4 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("indptr", SKEWED, ids=str)
def test_nvfp4_exact_sums_come_out_exactly(indptr: list[int]) -> None:
    given = cases.exact(rng(13), indptr, 24, 256, a_format="nvfp4")
    alpha = np.exp2(np.arange(len(indptr) - 1) - 1).astype(np.float32)
    for factors in (None, np.zeros(0, np.float32), alpha):
        out = flashinfer.group_gemm_nvfp4_nt_groupwise(*given.arguments, alpha=factors)
        product = given.product(alpha if factors is alpha else None)
        assert cases.same_bits(out, cases.cast(product, "bfloat16"))


def test_nvfp4_factors_are_taken_in_the_sixth_place() -> None:
    given = cases.exact(rng(14), [0, 4, 9], 8, 128, a_format="nvfp4")
    alpha = np.array([0.25, 2], np.float32)
    out = flashinfer.group_gemm_nvfp4_nt_groupwise(
        *given.arguments, alpha, 128, 64, 256, False, None, "float16"
    )
    assert cases.same_bits(out, cases.cast(given.product(alpha), "float16"))


def test_nvfp4_of_real_data_is_near_the_product() -> None:
    random = rng(15)
    indptr = np.array([0, 40, 40, 170], np.int32)
    x = random.standard_normal((170, 256), np.float32)
    w = random.standard_normal((3, 32, 256), np.float32)
    g = np.float32(2688) / np.abs(x).max()
    by_expert = np.float32(2688) / np.abs(w).max(axis=(1, 2))
    codes, scales = flashinfer.fp4_quantize(x, g, is_sf_swizzled_layout=False)
    stacked = nvfp4.quantize(w, "nvfp4", encode_scale=by_expert)
    out = flashinfer.group_gemm_nvfp4_nt_groupwise(
        codes,
        stacked.codes,
        cases.scales_by_group(scales, indptr),
        stacked.scales.reshape(3, 128, 16),
        indptr,
        (1 / (g * by_expert)).astype(np.float32),
    )
    for i in range(3):
        rows = slice(indptr[i], indptr[i + 1])
        expected = x[rows] @ w[i].T
        got = out[rows].astype(np.float32)
        if expected.size:
            cosine = (got * expected).sum() / np.linalg.norm(got) / np.linalg.norm(expected)
            assert cosine > 0.98


# mm_fp4 -------------------------------------------------------------------------------------------


def dense(
    random: np.random.Generator, m: int, n: int, k: int, format: str, tile: int
) -> tuple[tuple[Any, ...], np.ndarray]:
    """Arguments of mm_fp4, and the exact product."""
    a, b = random.integers(0, 16, (m, k), np.uint8), random.integers(0, 16, (n, k), np.uint8)
    if format == "nvfp4":
        block, choice = 16, np.array([0.5, 1, 1.5, 2], ml_dtypes.float8_e4m3fn).view(np.uint8)
    else:
        block, choice = 32, np.array([126, 127, 128], np.uint8)
    scales = [random.choice(choice, (rows, k // block)) for rows in (m, n)]
    factors = [
        cases.e4m3_values(s) if format == "nvfp4" else np.exp2(s.astype(np.float64) - 127)
        for s in scales
    ]
    values = [
        cases.e2m1_values(codes) * np.repeat(factor, block, axis=1)
        for codes, factor in zip((a, b), factors, strict=True)
    ]
    width = -(-k // block // 4) * 4
    left = cases.swizzled(scales[0], tile).reshape(-1, width)
    right = cases.swizzled(scales[1]).reshape(-1, width)
    arguments = (cases.packed(a), cases.packed(b).T, left, right.T)
    return arguments, values[0] @ values[1].T


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 8, 64), (48, 130, 128), (130, 40, 192), (9, 7, 96)])
def test_mm_fp4_gives_exact_sums_exactly(format: str, small: bool, m: int, n: int, k: int) -> None:
    arguments, product = dense(rng(m, n, k), m, n, k, format, 8 if small else 128)
    options = {
        "use_8x4_sf_layout": small,
        "block_size": 16 if format == "nvfp4" else 32,
        "use_nvfp4": format == "nvfp4",
    }
    out = flashinfer.mm_fp4(*arguments, **options)
    assert cases.same_bits(out, cases.cast(product, "bfloat16"))
    alpha = np.array([0.5], np.float32)
    for factor in (alpha, alpha.reshape(()), 0.5):
        given = np.full((m, n), np.nan, np.float16)
        out = flashinfer.mm_fp4(*arguments, factor, np.float16, given, **options)
        assert out is given
        assert cases.same_bits(out, cases.cast(product / 2, "float16"))


@pytest.mark.parametrize("small", [False, True])
def test_mm_fp4_in_the_kernels(small: bool) -> None:
    arguments, product = dense(rng(16), 9, 8, 96, "nvfp4", 8 if small else 128)
    with nvfp4.simulate("sm_90a"):
        out = flashinfer.mm_fp4(*arguments, use_8x4_sf_layout=small, backend="cutlass")
    assert cases.same_bits(out, cases.cast(product, "bfloat16"))


def test_mm_fp4_takes_flat_scales_and_float8_ones() -> None:
    (a, b, left, right), product = dense(rng(17), 9, 16, 64, "nvfp4", 128)
    expected = cases.cast(product, "bfloat16")
    for scales in (
        (left.reshape(-1), right.T.reshape(-1)),
        (left.view(ml_dtypes.float8_e4m3fn), right.T.view(ml_dtypes.float8_e4m3fn).T),
    ):
        assert cases.same_bits(flashinfer.mm_fp4(a, b, *scales), expected)


# Padding offsets ----------------------------------------------------------------------------------


def padded_by_hand(indptr: list[int]) -> tuple[list[int], list[int]]:
    offsets, places = [0], []
    for start, stop in itertools.pairwise(indptr):
        places += [offsets[-1] + i for i in range(stop - start)]
        offsets.append(offsets[-1] + -(-(stop - start) // 4) * 4)
    return offsets, places


@pytest.mark.parametrize(
    "indptr", [[0], [0, 0], [0, 1], [0, 4, 8], [0, 5, 5, 6, 106, 110]], ids=str
)
@pytest.mark.parametrize("simulated", [False, True])
def test_offsets_are_padded_to_multiples_of_four(indptr: list[int], simulated: bool) -> None:
    given = np.array(indptr, np.int32)
    offsets, places = padded_by_hand(indptr)
    for rows in (None, indptr[-1], indptr[-1] + 3):
        options = {} if rows is None else {"rows": rows}
        if simulated:
            with nvfp4.simulate("sm_90a"):
                padded, rank = flashinfer.pad_indptr_to_multiple_of_4(given, **options)
        else:
            padded, rank = flashinfer.pad_indptr_to_multiple_of_4(given, **options)
        assert padded.dtype == rank.dtype == np.int32
        assert padded.tolist() == offsets
        beyond = 0 if rows is None else rows - indptr[-1]
        assert rank.tolist() == places + [-1] * beyond


def test_many_groups_are_padded_by_the_kernel_too() -> None:
    lengths = rng(18).integers(0, 9, 100)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    with nvfp4.simulate("sm_90a"):
        padded, rank = flashinfer.pad_indptr_to_multiple_of_4(indptr)
    assert (padded.tolist(), rank.tolist()) == padded_by_hand(indptr.tolist())
