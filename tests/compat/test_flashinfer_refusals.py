"""What FlashInfer's functions refuse here: errors of FlashInfer's kinds that say why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4 import UnsupportedError
from nvfp4.compat import flashinfer
from tests.compat import flashinfer_cases as cases

Change = Callable[[dict[str, Any]], dict[str, Any]]


def operands(a_format: str = "mxfp8_e4m3") -> dict[str, Any]:
    given = cases.exact(np.random.default_rng(0), [0, 4, 9], 16, 256, a_format=a_format)
    names = ("a", "b", "a_scale", "b_scale", "m_indptr")
    return dict(zip(names, given.arguments, strict=True))


def to(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda given: {name: change(given[name])}


def put(**values: Any) -> Change:
    return lambda given: values


# What both grouped products refuse, and what the message has.
BOTH: dict[str, tuple[Change, str]] = {
    "b of another dtype": (to("b", lambda x: x.astype(np.int8)), "b must be a uint8 tensor"),
    "scales of floats": (
        to("a_scale", lambda x: x.astype(np.float32)),
        "a_scale must be a uint8 tensor, but got float32",
    ),
    "weights' scales of ints": (
        to("b_scale", lambda x: x.astype(np.int32)),
        "b_scale must be a uint8 tensor, but got int32",
    ),
    "wide offsets": (
        to("m_indptr", lambda x: x.astype(np.int64)),
        "m_indptr must be a int32 tensor, but got int64",
    ),
    "offsets of two axes": (to("m_indptr", lambda x: x[None]), "m_indptr must have shape"),
    "no offsets": (to("m_indptr", lambda x: x[:0]), "m_indptr must have shape"),
    "offsets from 1": (to("m_indptr", lambda x: x + 1), "m_indptr must start at 0; got 1"),
    "offsets that fall": (
        put(m_indptr=np.array([0, 6, 4], np.int32)),
        "m_indptr must not decrease; got 6 then 4",
    ),
    "offsets beyond the rows": (
        put(m_indptr=np.array([0, 4, 10], np.int32)),
        "m_indptr must end at or before the number of rows, 9; got 10",
    ),
    "another number of groups": (
        put(m_indptr=np.array([0, 9], np.int32)),
        "b.shape[0] must equal num_groups (m_indptr.shape[0] - 1), but got b.shape[0] = 2 and "
        "num_groups = 1",
    ),
    "another k": (to("b", lambda x: x[..., :64].copy()), "a.shape[1] must equal k"),
    "a of three axes": (to("a", lambda x: x[None]), "a must have two axes and b three"),
    "b of two axes": (to("b", lambda x: x[0]), "a must have two axes and b three"),
    "n that is no multiple of 8": (
        to("b", lambda x: x[:, :12].copy()),
        "n must be a multiple of 8, but got n=12",
    ),
    "too few scales of a": (to("a_scale", lambda x: x[:128]), "a_scale must have shape (256, "),
    "scales of a that fill no tile": (
        to("a_scale", lambda x: x[:200]),
        "a_scale must have shape (256, ",
    ),
    "too many scales of b": (
        to("b_scale", lambda x: np.concatenate([x, x])),
        "b_scale must have shape (2, 128, ",
    ),
    "scales of a with gaps": (
        to("a_scale", lambda x: np.repeat(x, 2, axis=1)[:, ::2]),
        "a_scale must be contiguous",
    ),
    "scales of b turned": (to("b_scale", lambda x: x.swapaxes(1, 2)), "b_scale must be contiguous"),
    "swap_ab": (put(swap_ab="yes"), "swap_ab must be one of [True, False], but got 'yes'"),
    "tile_m": (put(tile_m=64), "tile_m must be one of [128], but got 64"),
    "tile_n": (put(tile_n=96), "tile_n must be one of [32, 64, 128"),
    "tile_k": (put(tile_k=64), "tile_k must be one of [128, 256], but got 64"),
    "a tile that is no number": (put(tile_m=True), "tile_m must be one of [128], but got True"),
    "out_dtype": (put(out_dtype=np.float32), "out_dtype must be one of bfloat16 or float16"),
    "out of another dtype": (
        put(out=np.zeros((9, 16), np.float32)),
        "out_dtype must be one of bfloat16 or float16, but got float32",
    ),
    "out of another shape": (
        put(out=np.zeros((9, 24), np.float16)),
        "out.shape must be (9, 16), but got (9, 24)",
    ),
    "out against out_dtype": (
        put(out=np.zeros((9, 16), np.float16), out_dtype="bfloat16"),
        "out.dtype must be bfloat16, but got float16",
    ),
}
MXFP4: dict[str, tuple[Change, str]] = {
    "a of bytes without a format": (
        to("a", lambda x: x.view(np.uint8)),
        "a must be a float8_e4m3fn or float8_e5m2 tensor, but got uint8: a_format=",
    ),
    "a of floats": (
        to("a", lambda x: x.astype(np.float32)),
        "a must be a float8_e4m3fn or float8_e5m2 tensor, but got float32",
    ),
    "another float8": (
        to("a", lambda x: x.view(ml_dtypes.float8_e4m3fnuz)),
        "a must be a float8_e4m3fn or float8_e5m2 tensor, but got float8_e4m3fnuz",
    ),
    "an unknown format": (put(a_format="fp8"), "a_format must be one of ["),
    "a format against the dtype": (put(a_format="e5m2"), "a_format must agree with the dtype of a"),
    "mma_sm": (put(mma_sm=3), "mma_sm must be one of [1, 2], but got 3"),
    "k that is no multiple of 128": (
        lambda given: {"a": given["a"][:, :192].copy(), "b": given["b"][..., :96].copy()},
        "k must be a multiple of 128, but got k=192",
    ),
}
NVFP4: dict[str, tuple[Change, str]] = {
    "a of float8": (
        to("a", lambda x: x.view(ml_dtypes.float8_e4m3fn)),
        "a must be a uint8 tensor, but got float8_e4m3fn",
    ),
    "a wide tile_n": (put(tile_n=256), "tile_n must be one of [32, 64, 128], but got 256"),
    "alpha of another length": (
        put(alpha=np.ones(3, np.float32)),
        "alpha must have shape (2,), but got (3,)",
    ),
    "alpha of ints": (put(alpha=np.ones(2, np.int32)), "alpha must be a float32 tensor"),
    "a scale with a sign": (
        to(
            "a_scale", lambda x: np.where(np.arange(len(x))[:, None] == 0, 0xB8, x).astype(np.uint8)
        ),
        "a.scales of an nvfp4 tensor must be e4m3fn values without a sign",
    ),
}


@pytest.mark.parametrize("what", [*BOTH, *MXFP4])
def test_the_mxfp4_product_refuses(what: str) -> None:
    given = operands()
    change, message = {**BOTH, **MXFP4}[what]
    with pytest.raises(ValueError) as error:
        flashinfer.group_gemm_mxfp4_nt_groupwise(**{**given, **change(given)})
    assert message in str(error.value)


@pytest.mark.parametrize("what", [*BOTH, *NVFP4])
def test_the_nvfp4_product_refuses(what: str) -> None:
    given = operands("nvfp4")
    change, message = {**BOTH, **NVFP4}[what]
    with pytest.raises(ValueError) as error:
        flashinfer.group_gemm_nvfp4_nt_groupwise(**{**given, **change(given)})
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["a", "b", "a_scale", "b_scale", "m_indptr"])
def test_what_is_no_array_is_a_type_error(name: str) -> None:
    for value in (None, [1, 2], "x"):
        with pytest.raises(TypeError, match=f"{name} must be an array"):
            flashinfer.group_gemm_mxfp4_nt_groupwise(**{**operands(), name: value})


# mm_fp4 -------------------------------------------------------------------------------------------


def dense() -> dict[str, Any]:
    random = np.random.default_rng(1)
    a, b = (random.integers(0, 256, (rows, 64), np.uint8) for rows in (9, 24))
    return {
        "a": a,
        "b": b.T,
        "a_descale": np.full((128, 8), 0x38, np.uint8),
        "b_descale": np.full((128, 8), 0x38, np.uint8).T,
    }


MM: dict[str, tuple[Change, str]] = {
    "a of floats": (to("a", lambda x: x.astype(np.float32)), "a must be a uint8 tensor"),
    "three axes": (to("a", lambda x: x[None]), "mm_fp4 accepts 2d tensors"),
    "another k": (to("a", lambda x: x[:, :32].copy()), "K dimension mismatch in mm_fp4"),
    "b row-major": (to("b", lambda x: x.copy()), "b.T must be contiguous"),
    "a with gaps": (to("a", lambda x: np.repeat(x, 2, axis=1)[:, ::2]), "a must be contiguous"),
    "scales of b row-major": (
        to("b_descale", lambda x: x.copy()),
        "b_descale.T must be contiguous",
    ),
    "scales of 8x4 for 128x4": (
        to("a_descale", lambda x: x[:16].copy()),
        "a_descale must have 1024 bytes for 9 rows of 8 blocks in layout_128x4",
    ),
    "scales of 128x4 for 8x4": (
        put(use_8x4_sf_layout=True),
        "a_descale must have 128 bytes for 9 rows of 8 blocks in layout_8x4",
    ),
    "too few scales of b": (
        to("b_descale", lambda x: x.T[:64].copy().T),
        "b_descale must have 1024 bytes for 24 rows of 8 blocks in layout_128x4",
    ),
    "scales of floats": (
        to("a_descale", lambda x: x.astype(np.float32)),
        "a_descale must be a uint8 tensor",
    ),
    "two alphas": (put(alpha=np.ones(2, np.float32)), "alpha must be a float32 tensor of one"),
    "alpha of another dtype": (
        put(alpha=np.ones(1, np.float16)),
        "alpha must be a float32 tensor of one element, but got float16",
    ),
    "float32 out": (put(out_dtype="float32"), "out_dtype must be one of bfloat16 or float16"),
    "out of another shape": (
        put(out=np.zeros((9, 25), ml_dtypes.bfloat16)),
        "out.shape must be (9, 24)",
    ),
    "blocks of 32": (put(block_size=32), "nvfp4 only supports block_size = 16, but got 32"),
    "mxfp4 of 16": (put(use_nvfp4=False), "mxfp4 only supports block_size = 32, but got 16"),
    "a backend": (put(backend="magic"), "backend must be one of ['auto', 'cudnn'"),
    "use_nvfp4": (put(use_nvfp4="yes"), "use_nvfp4 must be one of [True, False], but got 'yes'"),
    "k that is no multiple of the block": (
        lambda given: {"a": given["a"][:, :12].copy(), "b": given["b"].T[:, :12].copy().T},
        "k must be a multiple of 16, but got k=24",
    ),
}


@pytest.mark.parametrize("what", MM)
def test_mm_fp4_refuses(what: str) -> None:
    given = dense()
    flashinfer.mm_fp4(**given)
    change, message = MM[what]
    with pytest.raises(ValueError) as error:
        flashinfer.mm_fp4(**{**given, **change(given)})
    assert message in str(error.value)


def test_shuffled_weights_are_not_supported() -> None:
    with pytest.raises(UnsupportedError, match="shuffled") as error:
        flashinfer.mm_fp4(**dense(), backend="trtllm")
    assert isinstance(error.value, NotImplementedError)
    with pytest.raises(UnsupportedError, match="do_shuffle"):
        flashinfer.nvfp4_quantize(np.ones((9, 64), np.float32), 1.0, do_shuffle=True)


# Quantisers ---------------------------------------------------------------------------------------

X = np.ones((9, 64), np.float32)
STACK = np.ones((2, 9, 64), np.float32)
MASK = np.array([3, 9], np.int32)

QUANTIZERS: dict[str, tuple[Callable[[], Any], str]] = {
    "float64": (
        lambda: flashinfer.fp4_quantize(X.astype(np.float64), 1.0),
        "input must be of dtype bfloat16, float16, float32 or float8_e4m3fn, but got float64",
    ),
    "a scalar": (lambda: flashinfer.mxfp4_quantize(np.float32(1)[...]), "at least one axis"),
    "K of nvfp4": (
        lambda: flashinfer.fp4_quantize(X[:, :40].copy(), 1.0),
        "input.shape[-1] must be a multiple of 16, but got 40",
    ),
    "K of mxfp4": (
        lambda: flashinfer.mxfp4_quantize(X[:, :48].copy()),
        "a.shape[-1] must be a multiple of 32, but got 48",
    ),
    "K of mxfp8": (
        lambda: flashinfer.mxfp8_quantize(X[:, :48].copy()),
        "input.shape[-1] must be a multiple of 32, but got 48",
    ),
    "a backend": (
        lambda: flashinfer.fp4_quantize(X, 1.0, backend="magic"),
        "Unknown backend: magic. Must be 'cuda' or 'cute-dsl'.",
    ),
    "enable_pdl": (lambda: flashinfer.mxfp4_quantize(X, enable_pdl="yes"), "enable_pdl must be"),
    "an odd flag": (
        lambda: flashinfer.fp4_quantize(X, 1.0, is_sf_swizzled_layout=2),
        "is_sf_swizzled_layout must be one of [True, False], but got 2",
    ),
    "two global scales": (
        lambda: flashinfer.fp4_quantize(X, np.ones(2, np.float32)),
        "global_scale must have one element, or 9, one by row, but got shape (2,)",
    ),
    "a global scale of ints": (
        lambda: flashinfer.fp4_quantize(X, np.ones(1, np.int32)),
        "global_scale must be a float32 tensor, but got int32",
    ),
    "a global scale of 0": (
        lambda: flashinfer.fp4_quantize(X, np.zeros(1, np.float32)),
        "encode_scale must be finite and at least 2^-126",
    ),
    "blocks of 32 in nvfp4": (
        lambda: flashinfer.nvfp4_quantize(X, 1.0, sf_vec_size=32),
        "nvfp4_quantize only supports sf_vec_size=16, got 32",
    ),
    "a layout": (lambda: flashinfer.nvfp4_quantize(X, 1.0, "128x4"), "sfLayout must be one of"),
    "indices without tokens": (
        lambda: flashinfer.nvfp4_quantize(X, 1.0, expanded_idx_to_permuted_idx=MASK),
        "only supported with per_token_activation=True",
    ),
    "an alignment": (
        lambda: flashinfer.mxfp8_quantize(X, alignment=48),
        "alignment must be a positive multiple of 32, but got 48",
    ),
    "an alignment of 1.5": (
        lambda: flashinfer.mxfp8_quantize(X, alignment=1.5),
        "alignment must be an int, but got 1.5",
    ),
    "a column-major input of mxfp8": (
        lambda: flashinfer.mxfp8_quantize(np.asfortranarray(X)),
        "input must be row-major",
    ),
    "a matrix for a stack": (
        lambda: flashinfer.scaled_fp4_grouped_quantize(X, MASK, 1.0),
        "a must have shape (B, M, K), but got (9, 64)",
    ),
    "K of a stack": (
        lambda: flashinfer.scaled_fp4_grouped_quantize(STACK[..., :24].copy(), MASK, 1.0),
        "a.shape[2] must be a multiple of 16, but got 24",
    ),
    "2K of a stack": (
        lambda: flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize(
            STACK[..., :48].copy(), MASK, 1.0
        ),
        "a.shape[2] must be a multiple of 32, but got 48",
    ),
    "a wide mask": (
        lambda: flashinfer.scaled_fp4_grouped_quantize(STACK, MASK.astype(np.int64), 1.0),
        "mask must be a int32 tensor, but got int64",
    ),
    "a mask beyond the rows": (
        lambda: flashinfer.scaled_fp4_grouped_quantize(STACK, MASK + 1, 1.0),
        "row_counts must be from 0 to the capacity, 9; got 10",
    ),
    "three scales for two": (
        lambda: flashinfer.scaled_fp4_grouped_quantize(STACK, MASK, np.ones(3, np.float32)),
        "a_global_sf must have shape (2,), but got (3,)",
    ),
    "a stack of float64": (
        lambda: flashinfer.scaled_fp4_grouped_quantize(STACK.astype(np.float64), MASK, 1.0),
        "a must be of dtype bfloat16, float16, float32, but got float64",
    ),
    "scales of floats": (
        lambda: flashinfer.block_scale_interleave(X),
        "Input dtype must be uint8 or bfloat16, got float32",
    ),
    "scales of one axis": (
        lambda: flashinfer.block_scale_interleave(np.ones(4, np.uint8)),
        "unswizzled_sf must have two or three axes, but got (4,)",
    ),
    "scales with gaps": (
        lambda: flashinfer.block_scale_interleave(np.ones((4, 8), np.uint8)[:, ::2]),
        "unswizzled_sf must be contiguous",
    ),
    "a wrong number of scales": (
        lambda: flashinfer.mxfp4_dequantize(np.ones((9, 32), np.uint8), np.ones(511, np.uint8)),
        "a_sf must have 512 bytes for 9 rows of 2 blocks in layout_128x4, but got shape (511,)",
    ),
    "codes of one axis": (
        lambda: flashinfer.mxfp4_dequantize(np.ones(32, np.uint8), np.ones(512, np.uint8)),
        "a_fp4 must have shape (M, K / 2), but got (32,)",
    ),
    "a half block": (
        lambda: flashinfer.e2m1_and_ufp8sf_scale_to_float(
            np.ones((9, 12), np.uint8), np.ones(512, np.uint8)
        ),
        "K must be a multiple of 16 for nvfp4, but got K = 24",
    ),
    "two global factors": (
        lambda: flashinfer.e2m1_and_ufp8sf_scale_to_float(
            np.ones((9, 32), np.uint8), np.ones(512, np.uint8), np.ones(2, np.float32)
        ),
        "global_scale_tensor must have one element, but got shape (2,)",
    ),
    "codes of floats": (
        lambda: flashinfer.mxfp4_dequantize(X, np.ones(512, np.uint8)),
        "a_fp4 must be a uint8 tensor, but got float32",
    ),
    "offsets that fall": (
        lambda: flashinfer.pad_indptr_to_multiple_of_4(np.array([0, 5, 4], np.int32)),
        "m_indptr must not decrease",
    ),
    "offsets beyond the rows": (
        lambda: flashinfer.pad_indptr_to_multiple_of_4(np.array([0, 5], np.int32), rows=4),
        "m_indptr must end at or before the number of rows, 4; got 5",
    ),
}


@pytest.mark.parametrize("what", QUANTIZERS)
def test_quantisers_and_layouts_refuse(what: str) -> None:
    call, message = QUANTIZERS[what]
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "blocks of 8": lambda: flashinfer.fp4_quantize(X, 1.0, 8),
    "e8m0 scales of 16": lambda: flashinfer.fp4_quantize(X, 1.0, 16, True),
    "e4m3 scales of 32": lambda: flashinfer.fp4_quantize(X, 1.0, 32, False),
    "e8m0 scales of 16, back": lambda: flashinfer.e2m1_and_ufp8sf_scale_to_float(
        np.ones((9, 32), np.uint8), np.ones(512, np.uint8), None, 16, 0
    ),
    "another base by token": lambda: flashinfer.nvfp4_quantize(
        X, 1 / 448, per_token_activation=True
    ),
    "rows moved by token": lambda: flashinfer.nvfp4_quantize(
        X, 1 / 2688, per_token_activation=True, expanded_idx_to_permuted_idx=MASK
    ),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_flashinfer_has_no_one_meaning_for_is_not_implemented(what: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        UNSUPPORTED[what]()
    assert isinstance(error.value, NotImplementedError)
    assert "got" in str(error.value) or "not supported" in str(error.value)


def test_rows_must_be_a_number() -> None:
    for rows in ("4", True, 1.5):
        with pytest.raises(TypeError, match="rows must be an int"):
            flashinfer.pad_indptr_to_multiple_of_4(np.array([0, 5], np.int32), rows=rows)


@pytest.mark.parametrize("inverse", [0, 0.0, np.float32(0), np.zeros(1, np.float32)])
def test_the_inverse_of_a_global_scale_is_not_zero(inverse: Any) -> None:
    x = np.ones((2, 64), np.float32)
    with pytest.raises(ValueError, match="must be finite"):
        flashinfer.fp4_quantize(x, inverse, is_global_scale_inversed=True)


# Signatures ---------------------------------------------------------------------------------------

#: FlashInfer's parameters in their order; what is ours alone comes after them, by keyword.
SIGNATURES = {
    "group_gemm_mxfp4_nt_groupwise": "a b a_scale b_scale m_indptr mma_sm tile_m tile_n tile_k "
    "swap_ab out out_dtype",
    "group_gemm_nvfp4_nt_groupwise": "a b a_scale b_scale m_indptr alpha tile_m tile_n tile_k "
    "swap_ab out out_dtype",
    "mm_fp4": "a b a_descale b_descale alpha out_dtype out block_size use_8x4_sf_layout backend "
    "use_nvfp4 enable_pdl",
    "fp4_quantize": "input global_scale sf_vec_size sf_use_ue8m0 is_sf_swizzled_layout "
    "is_sf_8x4_layout is_global_scale_inversed enable_pdl backend",
    "nvfp4_quantize": "a a_global_sf sfLayout do_shuffle sf_vec_size enable_pdl backend",
    "mxfp4_quantize": "a backend enable_pdl sfLayout",
    "mxfp8_quantize": "input is_sf_swizzled_layout alignment enable_pdl backend sf_swizzle_layout",
    "mxfp4_dequantize": "a_fp4 a_sf sfLayout",
    "e2m1_and_ufp8sf_scale_to_float": "e2m1_tensor ufp8_scale_tensor global_scale_tensor "
    "sf_vec_size ufp8_type is_sf_swizzled_layout is_sf_8x4_layout",
    "block_scale_interleave": "unswizzled_sf",
    "scaled_fp4_grouped_quantize": "a mask a_global_sf",
    "silu_and_mul_scaled_nvfp4_experts_quantize": "a mask a_global_sf",
    "pad_indptr_to_multiple_of_4": "m_indptr",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_are_flashinfers(name: str) -> None:
    parameters = inspect.signature(getattr(flashinfer, name)).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[name].split()


def test_all_names_are_there() -> None:
    assert set(SIGNATURES) < set(flashinfer.__all__)
    for name in flashinfer.__all__:
        assert getattr(flashinfer, name).__doc__
