"""FlashInfer's functions on GPU arrays, without a GPU: what is launched, allocated and read back.

The arrays are stubs of CuPy and PyTorch over host memory, the card runs the kernels in the
simulated machine (``tests/api/conftest.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4.api import _flashinfer
from nvfp4.compat import flashinfer
from nvfp4.compat.flashinfer import SfLayout
from tests.api import stubs
from tests.api.conftest import Card
from tests.api.conftest import card as card
from tests.api.conftest import cupy as cupy
from tests.api.conftest import torch as torch
from tests.api.repeated import Memory
from tests.compat import flashinfer_cases as cases

INDPTR = [0, 3, 3, 12]
BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def no_workspaces() -> Iterator[None]:
    _flashinfer._workspaces.clear()
    yield
    _flashinfer._workspaces.clear()


def given(a_format: str = "mxfp8_e4m3", rows: int = 14) -> cases.Operands:
    return cases.exact(np.random.default_rng(0), INDPTR, 8, 128, a_format=a_format, rows=rows)


def on_cupy(cupy: stubs.Cupy, operands: cases.Operands) -> tuple[Any, ...]:
    """The arguments as CuPy arrays, the float8 ones as bytes."""
    return tuple(
        cupy.asarray(x.view(np.uint8) if x.dtype.itemsize == 1 else x) for x in operands.arguments
    )


def on_torch(torch: stubs.Torch, operands: cases.Operands) -> tuple[Any, ...]:
    return tuple(stubs.Tensor(torch, x, "cuda:0") for x in operands.arguments)


def plans(card: Card) -> list[str]:
    return [name for name, _ in card.planned]


Function = Callable[..., Any]


@pytest.mark.parametrize("a_format", ["mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"])
def test_cupy_arrays(card: Card, cupy: stubs.Cupy, a_format: str) -> None:
    card.simulate = True
    operands = given(a_format)
    function: Function = flashinfer.group_gemm_mxfp4_nt_groupwise
    options = {"a_format": a_format}
    if a_format == "nvfp4":
        function, options = flashinfer.group_gemm_nvfp4_nt_groupwise, {}
    out = function(*on_cupy(cupy, operands), **options)
    assert isinstance(out, stubs.CupyArray)
    assert cases.same_bits(out.values, cases.cast(operands.product(), "bfloat16"))
    assert plans(card) == ["flashinfer_tile_starts", "grouped_matmul"]


@pytest.mark.parametrize("a_format", ["mxfp8_e4m3", "mxfp8_e5m2"])
def test_torch_tensors_of_float8(card: Card, torch: stubs.Torch, a_format: str) -> None:
    card.simulate = True
    operands = given(a_format)
    out = flashinfer.group_gemm_mxfp4_nt_groupwise(
        *on_torch(torch, operands), out_dtype=torch.float16
    )
    assert isinstance(out, stubs.Tensor) and out.where == "cuda:0"
    assert cases.same_bits(out.values, cases.cast(operands.product(), "float16"))


def test_the_workspace_is_written_by_a_kernel_from_the_offsets(card: Card, cupy: Any) -> None:
    card.simulate = True
    arguments = on_cupy(cupy, given())
    for indptr in (INDPTR, [0, 1, 11, 12]):
        arguments[4].values[:] = indptr
        flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, a_format="e4m3")
        (space,) = _flashinfer._workspaces.values()
        starts = [(offset + 127 * i) // 128 for i, offset in enumerate(indptr[:-1])]
        assert space.tile_starts.values.tolist() == starts
        assert space.one.values == 1


def test_nothing_but_the_result_is_allocated_by_the_second_call(card: Card, cupy: Any) -> None:
    arguments = on_cupy(cupy, given())
    flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, a_format="e4m3")
    cupy.allocated.clear()
    flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, a_format="e4m3")
    assert [(shape, dtype) for shape, dtype, *_ in cupy.allocated] == [((14, 8), "bfloat16")]
    out = cupy.empty((14, 8), BFLOAT16)
    cupy.allocated.clear()
    assert flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, a_format="e4m3", out=out) is out
    assert not cupy.allocated


def test_offsets_elsewhere_have_a_workspace_of_their_own(card: Card, cupy: stubs.Cupy) -> None:
    first, second = on_cupy(cupy, given()), on_cupy(cupy, given())
    for arguments in (first, second, first):
        flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, a_format="e4m3")
    assert len(_flashinfer._workspaces) == 2
    used = [buffers["tile_starts"] for _, buffers, *_ in card.outcomes if "one" in buffers]
    assert used[0] == used[2] != used[1]


@pytest.mark.parametrize("a_format", ["mxfp8_e4m3", "nvfp4"])
def test_a_call_with_out_is_repeated_by_its_two_launches(
    card: Card, cupy: stubs.Cupy, a_format: str
) -> None:
    card.simulate = True
    operands = given(a_format)
    memory = Memory()  # whose arrays are all aligned alike
    arguments = [memory.put(array.values) for array in on_cupy(cupy, operands)]
    function: Function = flashinfer.group_gemm_mxfp4_nt_groupwise
    options: dict[str, Any] = {"a_format": a_format}
    if a_format == "nvfp4":
        function = flashinfer.group_gemm_nvfp4_nt_groupwise
        options = {"alpha": memory.put(np.array([0.5, 1, 2], np.float32))}
    out = memory.put(np.full((14, 8), np.nan, BFLOAT16))
    function(*arguments, **options, out=out)
    expected = out.values.copy()
    planned = len(card.planned)
    # Other offsets in the same memory, and poison in what is made of them.
    changed = given(a_format)._replace(m_indptr=np.array([0, 1, 11, 12], np.int32))
    for indptr in (changed.m_indptr, np.array(INDPTR, np.int32)):
        arguments[4].values[:] = indptr
        out.values[...] = np.nan
        (space,) = _flashinfer._workspaces.values()
        space.tile_starts.values[:] = -7
        space.one.values[...] = 9
        assert function(*arguments, **options, out=out) is out
        assert len(card.planned) == planned
        assert not np.isnan(out.values.astype(np.float32)).any()
    assert len(card.repeated) == 2
    assert out.values.tobytes() == expected.tobytes()
    # Another memory for the result, too.
    other = memory.put(np.full((14, 8), np.nan, BFLOAT16))
    assert function(*arguments, **options, out=other) is other
    assert other.values.tobytes() == expected.tobytes() and len(card.planned) == planned


def test_a_call_whose_product_was_made_otherwise_is_made_whole(card: Card, cupy: Any) -> None:
    card.simulate = True
    operands = given()
    arguments = on_cupy(cupy, operands)
    out = cupy.empty((14, 8), BFLOAT16)
    expected = cases.cast(operands.product(), "bfloat16")
    # The product inside is the same call for both, and is repeated by itself the second time.
    for out_dtype in (None, "bfloat16", "bfloat16", "bfloat16"):
        out.values[...] = np.nan
        flashinfer.group_gemm_mxfp4_nt_groupwise(
            *arguments, a_format="e4m3", out_dtype=out_dtype, out=out
        )
        assert cases.same_bits(out.values, expected)


def test_options_are_checked_in_a_call_like_one_before(card: Card, cupy: stubs.Cupy) -> None:
    arguments = on_cupy(cupy, given())
    out = cupy.empty((14, 8), BFLOAT16)
    for _ in range(2):
        flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, a_format="e4m3", out=out)
    for wrong in ({"tile_n": 96}, {"out_dtype": "float16"}, {"a_format": None}, {"mma_sm": [1]}):
        with pytest.raises(ValueError):
            flashinfer.group_gemm_mxfp4_nt_groupwise(
                *arguments, **{"a_format": "e4m3", "out": out, **wrong}
            )
    for i, wrong in ((0, 1), (2, 16), (3, 4)):
        shorter = [*arguments[:i], arguments[i][:-wrong], *arguments[i + 1 :]]
        with pytest.raises(ValueError):
            flashinfer.group_gemm_mxfp4_nt_groupwise(*shorter, a_format="e4m3", out=out)


def test_overlapping_results_are_refused_though_the_call_was_made_before(
    card: Card, cupy: stubs.Cupy
) -> None:
    arguments = on_cupy(cupy, given())
    out = cupy.empty((14, 8), BFLOAT16)
    flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, a_format="e4m3", out=out)
    inside = stubs.CupyArray(arguments[0].values.reshape(-1)[: 14 * 16].view(BFLOAT16))
    with pytest.raises(ValueError, match="out must not overlap a"):
        flashinfer.group_gemm_mxfp4_nt_groupwise(
            *arguments, a_format="e4m3", out=stubs.CupyArray(inside.values.reshape(14, 8))
        )


def test_the_current_stream_is_used(card: Card, cupy: stubs.Cupy, torch: stubs.Torch) -> None:
    cupy.streams[0] = 77
    flashinfer.group_gemm_mxfp4_nt_groupwise(*on_cupy(cupy, given()), a_format="e4m3")
    torch.stream = 99
    flashinfer.group_gemm_mxfp4_nt_groupwise(*on_torch(torch, given()))
    assert [where["stream"] for _, where in card.launched] == [77, 77, 99, 99]


def test_too_few_scales_are_refused_without_a_look_at_the_offsets(card: Card, cupy: Any) -> None:
    a, b, a_scale, b_scale, indptr = on_cupy(cupy, given())
    with pytest.raises(ValueError, match=r"a_scale must have shape \(384, 4\)"):
        flashinfer.group_gemm_mxfp4_nt_groupwise(
            a, b, a_scale[:128], b_scale, indptr, a_format="e4m3"
        )
    flashinfer.group_gemm_mxfp4_nt_groupwise(a, b, a_scale[:256], b_scale, indptr, a_format="e4m3")


def test_rows_whose_scales_are_not_there_are_zero(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    operands = given()
    arguments = list(on_cupy(cupy, operands))
    arguments[4] = cupy.asarray(np.array([0, 1, 2, 12], np.int32))
    arguments[2] = arguments[2][:256]  # the last group's tile is number 2
    out = flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, a_format="e4m3")
    assert not out.values[2:].any()


# mm_fp4, quantisers, layouts ----------------------------------------------------------------------


def turned(array: Any) -> Any:
    return array.swapaxes(0, 1)


@pytest.mark.parametrize("small", [False, True])
def test_mm_fp4_of_what_was_quantised(card: Card, cupy: stubs.Cupy, small: bool) -> None:
    card.simulate = True
    random = np.random.default_rng(1)
    x, w = (random.integers(-6, 7, (rows, 64)).astype(np.float32) for rows in (9, 24))
    layout = SfLayout.layout_8x4 if small else SfLayout.layout_128x4
    one = cupy.asarray(np.ones(1, np.float32))
    codes, scales = flashinfer.nvfp4_quantize(cupy.asarray(x), one, layout)
    b, b_scales = flashinfer.nvfp4_quantize(cupy.asarray(w), one)
    host = [
        flashinfer.nvfp4_quantize(x, 1.0, layout),
        flashinfer.nvfp4_quantize(w, 1.0),
    ]
    assert codes.values.tobytes() == host[0][0].tobytes()
    assert scales.values.tobytes() == host[0][1].tobytes()
    expected = flashinfer.mm_fp4(
        host[0][0], host[1][0].T, host[0][1], host[1][1].T, use_8x4_sf_layout=small
    )
    out = cupy.empty((9, 24), BFLOAT16)
    for _ in range(3):
        out.values[...] = np.nan
        made = flashinfer.mm_fp4(
            codes, turned(b), scales, turned(b_scales), one, "bfloat16", out,
            use_8x4_sf_layout=small,
        )  # fmt: skip
        assert made is out
        assert cases.same_bits(out.values, expected)
    # Scales in 8x4 are unpacked into new memory: then only the product itself is repeated.
    assert small or len(card.repeated) == 2
    assert plans(card).count("unswizzle") == (3 if small else 0)
    assert plans(card).count("flashinfer_tile_starts") == (3 if small else 1)


def test_mm_fp4_with_another_alpha_in_the_same_memory(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    codes, scales = flashinfer.nvfp4_quantize(cupy.asarray(np.full((9, 64), 6, np.float32)), 1.0)
    alpha = cupy.asarray(np.ones(1, np.float32))
    out = cupy.empty((9, 9), BFLOAT16)
    for value in (1, 2, 4):
        alpha.values[:] = value
        flashinfer.mm_fp4(codes, turned(codes), scales, turned(scales), alpha, out=out)
        assert (out.values.astype(np.float32) == 64 * 36 * value).all()


@pytest.mark.parametrize("layout", SfLayout, ids=lambda layout: layout.name)
def test_quantisers_on_torch_tensors(card: Card, torch: stubs.Torch, layout: SfLayout) -> None:
    card.simulate = True
    x = np.random.default_rng(2).standard_normal((9, 64)).astype(BFLOAT16)
    there = stubs.Tensor(torch, x, "cuda:0")
    codes, scales = flashinfer.mxfp8_quantize(there, sf_swizzle_layout=layout)
    assert codes.dtype is torch.float8_e4m3fn and codes.where == "cuda:0"
    assert scales.dtype is torch.uint8
    expected = flashinfer.mxfp8_quantize(x, sf_swizzle_layout=layout)
    assert codes.values.tobytes() == expected[0].tobytes()
    assert scales.values.tobytes() == expected[1].tobytes()
    codes, scales = flashinfer.mxfp4_quantize(there, sfLayout=layout)
    back = flashinfer.mxfp4_dequantize(codes, scales, layout)
    assert back.dtype is torch.float32 and back.where == "cuda:0"
    assert np.array_equal(
        back.values, flashinfer.mxfp4_dequantize(codes.values, scales.values, layout)
    )


def test_cupy_has_no_float8(card: Card, cupy: stubs.Cupy) -> None:
    x = cupy.asarray(np.ones((2, 9, 64), np.float32))
    assert flashinfer.mxfp8_quantize(x)[0].dtype == np.uint8
    mask = cupy.asarray(np.array([3, 9], np.int32))
    one = cupy.asarray(np.ones(2, np.float32))
    for function in (
        flashinfer.scaled_fp4_grouped_quantize,
        flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize,
    ):
        codes, scales = function(x, mask, one)
        assert codes.dtype == scales.dtype == np.uint8
        assert codes.shape[::2] == (9, 2) and scales.shape[0] == 32 and scales.shape[5] == 2


def test_scales_are_swizzled_on_the_card(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    for scales in (np.arange(33 * 5, dtype=np.uint8), np.arange(33 * 5).astype(BFLOAT16)):
        scales = scales.reshape(33, 5)
        got = flashinfer.block_scale_interleave(cupy.asarray(scales))
        assert got.dtype == scales.dtype
        assert got.values.tobytes() == cases.swizzled(scales).tobytes()


def test_offsets_are_padded_without_a_look_at_them(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    indptr = cupy.asarray(np.array([0, 3, 3, 9], np.int32))
    padded, rank = flashinfer.pad_indptr_to_multiple_of_4(indptr, rows=11)
    assert padded.values.tolist() == [0, 4, 4, 12]
    assert rank.values.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9, -1, -1]


@pytest.mark.parametrize("bad", [[0, 5, 2, 9], [-4, 3, 3, 9], [0, 3, 3, 500]], ids=str)
def test_offsets_that_no_host_could_refuse_write_nothing_outside(
    card: Card, cupy: stubs.Cupy, bad: list[int]
) -> None:
    card.simulate = True  # the simulated machine finds whatever is out of bounds
    indptr = cupy.asarray(np.array(bad, np.int32))
    flashinfer.pad_indptr_to_multiple_of_4(indptr, rows=11)
    arguments = [*on_cupy(cupy, given())[:4], indptr]
    out = flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, a_format="e4m3")
    assert np.isfinite(out.values.astype(np.float32)).all()


def test_a_base_by_token_on_the_card_is_refused_rather_than_read(card: Card, cupy: Any) -> None:
    x = cupy.asarray(np.ones((9, 64), np.float32))
    base = cupy.asarray(np.array([1 / 2688], np.float32))
    with pytest.raises(NotImplementedError, match="nothing is read back"):
        flashinfer.nvfp4_quantize(x, base, per_token_activation=True)
    factors = flashinfer.nvfp4_quantize(x, 1 / 2688, per_token_activation=True)[2]
    assert factors.shape == (9,)
