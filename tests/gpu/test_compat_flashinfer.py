"""``nvfp4.compat.flashinfer`` on the present card: FlashInfer's own test matrix, and exact sums.

The quantisers of the matrix are written here in PyTorch, from FlashInfer's rules; tolerance and
shapes are FlashInfer's. PyTorch says if anything is read back from the card.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from nvfp4.compat import flashinfer
from nvfp4.compat.flashinfer import SfLayout
from tests.compat import flashinfer_cases as cases

torch: Any = importlib.import_module("torch")

DEVICE = "cuda"
ROWS = (4, 128, 256, 512, 4096, 8192)
COLUMNS = (128, 256, 512, 2879, 4096, 8192)
DEPTHS = (128, 256, 512, 2880, 4096, 8192)
GROUPS = (1, 2, 4, 8)
FLOAT8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
FORMATS = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}


@contextmanager
def nothing_is_read_back() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is called a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# FlashInfer's test matrix -------------------------------------------------------------------------


def powers(amax: Any, qmax: float, rule: str) -> Any:
    """Exponents of block scales: "floor" of FlashInfer's test, "rceil" of its quantisers."""
    if rule == "floor":
        _, exponent = torch.frexp(amax)
        exponent = exponent - 1 - int(np.floor(np.log2(qmax)))
    else:
        mantissa, exponent = torch.frexp(amax * np.float32(1 / np.float32(qmax)).item())
        exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    return torch.where(amax == 0, torch.full_like(exponent, -127), exponent.clamp(-127, 127))


class Made(NamedTuple):
    """A quantised tensor: codes, linear scales, and the values they stand for."""

    codes: Any
    scales: Any
    values: Any


def quantized(x: Any, qmax: float, rule: str, encode: Callable[[Any], tuple[Any, Any]]) -> Made:
    blocks = x.unflatten(-1, (-1, 32))
    exponent = powers(blocks.abs().amax(-1), qmax, rule)
    scaled = torch.ldexp(blocks, -exponent[..., None]).clamp_(-qmax, qmax)
    codes, values = encode(scaled)
    values = torch.ldexp(values, exponent[..., None]).flatten(-2)
    return Made(codes.flatten(-2), (exponent + 127).to(torch.uint8), values)


def to_float8(kind: Any) -> Callable[[Any], tuple[Any, Any]]:
    def encode(scaled: Any) -> tuple[Any, Any]:
        codes = scaled.to(kind)
        return codes, codes.float()

    return encode


def to_e2m1(scaled: Any) -> tuple[Any, Any]:
    size = scaled.abs()
    code = torch.zeros(size.shape, dtype=torch.uint8, device=size.device)
    for limit, up in (
        *((0.25, False), (0.75, True), (1.25, False), (1.75, True)),
        *((2.5, False), (3.5, True), (5.0, False)),
    ):  # a tie goes to the even code
        code += (size >= limit) if up else (size > limit)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=size.device)
    values = torch.copysign(table[code.long()], scaled)
    code |= torch.signbit(scaled).to(torch.uint8) << 3
    return code, values


def padded(x: Any, shape: tuple[int, ...]) -> Any:
    out = torch.zeros(shape, device=x.device)
    out[tuple(slice(n) for n in x.shape)] = x
    return out


def placed(scales: Any, indptr: list[int]) -> Any:
    """Linear scales of rows, each group swizzled and where FlashInfer reads it."""
    groups, width = len(indptr) - 1, scales.shape[1]
    made = torch.zeros(
        (scales.shape[0] + 127 * groups) // 128 * 128, width, dtype=torch.uint8, device=DEVICE
    )
    for i in range(groups):
        own = flashinfer.block_scale_interleave(scales[indptr[i] : indptr[i + 1]])
        start = (indptr[i] + 127 * i) // 128 * 128 * width
        made.view(-1)[start : start + own.numel()] = own
    return made


@pytest.mark.parametrize("rule", ["floor", "rceil"])
@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("n", COLUMNS)
def test_flashinfers_matrix(n: int, k: int, rule: str) -> None:
    full_n, full_k = -(-n // 8) * 8, -(-k // 128) * 128
    torch.manual_seed(n * k)
    for groups in GROUPS:
        b = padded(torch.randn(groups, n, k, device=DEVICE) / k**0.5, (groups, full_n, full_k))
        right = quantized(b, 6.0, rule, to_e2m1)
        codes = right.codes[..., 0::2] | right.codes[..., 1::2] << 4
        b_scale = flashinfer.block_scale_interleave(right.scales)
        b_scale = b_scale.view(groups, -(-full_n // 128) * 128, full_k // 32)
        weights = right.values.transpose(1, 2)
        for m in ROWS:
            rows = groups * m
            a = padded(torch.randn(rows, k, device=DEVICE), (rows, full_k))
            offsets = list(range(0, rows + 1, m))
            indptr = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
            for kind, qmax in FLOAT8.items():
                left = quantized(a, qmax, rule, to_float8(kind))
                a_scale = placed(left.scales, offsets)
                expected = torch.bmm(left.values.view(groups, m, full_k), weights).view(rows, -1)
                for dtype in (torch.bfloat16, torch.float16):
                    with nothing_is_read_back():
                        out = flashinfer.group_gemm_mxfp4_nt_groupwise(
                            left.codes, codes, a_scale, b_scale, indptr, out_dtype=dtype
                        )
                    torch.testing.assert_close(
                        out[:, :n], expected[:, :n].to(dtype), atol=1e-2, rtol=1e-2
                    )


# Exact sums ---------------------------------------------------------------------------------------


class Library(NamedTuple):
    """How to bring an array to the card and back."""

    there: Callable[[np.ndarray], Any]
    back: Callable[[Any], np.ndarray]
    float8: bool


def _cupy() -> Library:
    import cupy

    def there(x: np.ndarray) -> Any:
        return cupy.asarray(x.view(np.uint8) if x.dtype.name.startswith("float8") else x)

    return Library(there, cupy.asnumpy, False)


def _torch() -> Library:
    def there(x: np.ndarray) -> Any:
        name = x.dtype.name
        words = np.ascontiguousarray(x)
        if name.startswith("float8"):
            return torch.from_numpy(words.view(np.uint8)).to(DEVICE).view(getattr(torch, name))
        if name == "bfloat16":
            return torch.from_numpy(words.view(np.int16)).to(DEVICE).view(torch.bfloat16)
        return torch.from_numpy(words).to(DEVICE)

    def back(x: Any) -> np.ndarray:
        name = str(x.dtype).removeprefix("torch.")
        if name.startswith("float8"):
            return x.view(torch.uint8).cpu().numpy().view(getattr(ml_dtypes, name))
        if name == "bfloat16":
            return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return x.cpu().numpy()

    return Library(there, back, True)


def poison(array: Any) -> None:
    """NaN everywhere, of either dtype of 16 bits."""
    array.view(torch.uint8 if isinstance(array, torch.Tensor) else np.uint8)[...] = 0xFF


MAKERS = {"cupy": _cupy, "torch": _torch}
libraries = pytest.mark.parametrize("library", MAKERS)

INDPTRS = (
    [0, 4, 134, 134, 434],
    [0, 0, 0, 300],
    [0, 257, 257, 257],
    [0, 1, 2, 3, 4],
    [0, 1000, 1001, 1001, 3500],
)


@libraries
@pytest.mark.parametrize("indptr", INDPTRS, ids=str)
@pytest.mark.parametrize("a_format", ["mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_exact_sums_of_skewed_and_empty_groups(
    library: str, indptr: list[int], a_format: str, out_dtype: str
) -> None:
    there, back, float8 = MAKERS[library]()
    n, k = (2880, 2048) if indptr[-1] > 1000 else (136, 256)
    given = cases.exact(
        np.random.default_rng(1), indptr, n, k, a_format=a_format, rows=indptr[-1] + 5
    )
    arguments = [there(x) for x in given.arguments]
    alpha = np.exp2(np.arange(len(indptr) - 1) % 3 - 1).astype(np.float32)
    if a_format == "nvfp4":
        out = flashinfer.group_gemm_nvfp4_nt_groupwise(
            *arguments, alpha=there(alpha), out_dtype=out_dtype
        )
        expected = given.product(alpha)
    else:
        options = {} if float8 else {"a_format": a_format}
        out = flashinfer.group_gemm_mxfp8_mxfp4_nt_groupwise(
            *arguments, out_dtype=out_dtype, **options
        )
        expected = given.product()
    assert type(out) is type(arguments[0])
    with np.errstate(over="ignore"):
        assert cases.same_bits(back(out), cases.cast(expected, out_dtype))


@libraries
def test_a_result_given_is_written_whatever_lay_there(library: str) -> None:
    there, back, float8 = MAKERS[library]()
    given = cases.exact(np.random.default_rng(2), [0, 4, 134, 134, 434], 128, 256, rows=440)
    arguments = [there(x) for x in given.arguments]
    options = {} if float8 else {"a_format": "e4m3"}
    out = there(np.full((440, 128), np.nan, ml_dtypes.bfloat16))
    expected = cases.cast(given.product(), "bfloat16")
    for _ in range(3):
        poison(out)
        made = flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, out=out, **options)
        assert made is out and cases.same_bits(back(out), expected)


@libraries
@pytest.mark.parametrize(
    ("rows", "n", "k", "groups"),
    [(0, 16, 128, 2), (6, 0, 128, 2), (6, 16, 0, 2), (6, 16, 128, 0)],
)
def test_an_extent_of_zero(library: str, rows: int, n: int, k: int, groups: int) -> None:
    there, back, float8 = MAKERS[library]()
    indptr = np.linspace(0, rows if groups else 0, groups + 1).astype(np.int32)
    given = cases.exact(np.random.default_rng(3), indptr, n, k, rows=rows)
    options = {} if float8 else {"a_format": "e4m3"}
    out = flashinfer.group_gemm_mxfp4_nt_groupwise(*map(there, given.arguments), **options)
    assert cases.same_bits(back(out), cases.cast(given.product(), "bfloat16"))


def test_a_captured_call_follows_its_offsets() -> None:
    there, back, _ = _torch()
    indptrs = ([0, 4, 134, 134, 434], [0, 200, 200, 300, 434], [0, 0, 0, 0, 0])
    made = [cases.exact(np.random.default_rng(4), i, 128, 256, rows=434) for i in indptrs]
    arguments = [there(x) for x in made[0].arguments]
    out = there(np.full((434, 128), np.nan, ml_dtypes.bfloat16))
    flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flashinfer.group_gemm_mxfp4_nt_groupwise(*arguments, out=out)
    for given in (*made, *made):
        for array, values in zip(arguments, given.arguments, strict=True):
            array.view(torch.uint8).copy_(there(values).view(torch.uint8))
        poison(out)
        graph.replay()
        assert cases.same_bits(back(out), cases.cast(given.product(), "bfloat16"))


# mm_fp4, quantisers, layouts ----------------------------------------------------------------------


@pytest.mark.parametrize("m", [1, 48, 128, 256, 512])
@pytest.mark.parametrize("n", [128, 256, 512])
@pytest.mark.parametrize("k", [128, 256, 512])
@pytest.mark.parametrize("layout", [SfLayout.layout_128x4, SfLayout.layout_8x4])
def test_mm_fp4_as_flashinfer_tests_it(m: int, n: int, k: int, layout: SfLayout) -> None:
    torch.manual_seed(m * n * k)
    x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
    g_x, g_w = (448 * 6 / v.float().abs().max() for v in (x, w))
    with nothing_is_read_back():
        a, a_scale = flashinfer.nvfp4_quantize(x, g_x, sfLayout=layout)
        b, b_scale = flashinfer.nvfp4_quantize(w, g_w)
        for dtype in (torch.bfloat16, torch.float16):
            out = torch.empty(m, n, device=DEVICE, dtype=dtype)
            flashinfer.mm_fp4(
                *(a, b.T, a_scale, b_scale.T, 1 / (g_x * g_w), dtype, out),
                use_8x4_sf_layout=layout is SfLayout.layout_8x4,
            )
    expected = (x.float() @ w.float().T).reshape(-1)
    assert torch.nn.functional.cosine_similarity(out.float().reshape(-1), expected, dim=0) > 0.97


@libraries
@pytest.mark.parametrize("layout", SfLayout, ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_quantisers_give_the_golden_bytes(library: str, layout: SfLayout, dtype: str) -> None:
    there, back, _ = MAKERS[library]()
    kind = getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    x = np.random.default_rng(5).standard_normal((300, 2880)).astype(kind)
    g = np.array([2688 / 5], np.float32)
    calls: list[Callable[[Any, Any], tuple[Any, ...]]] = [
        lambda v, s: flashinfer.nvfp4_quantize(v, s, layout),
        lambda v, s: flashinfer.nvfp4_quantize(v, 1 / 2688, layout, per_token_activation=True),
        lambda v, s: flashinfer.mxfp4_quantize(v, sfLayout=layout),
        lambda v, s: flashinfer.mxfp8_quantize(v, alignment=128, sf_swizzle_layout=layout),
        lambda v, s: flashinfer.fp4_quantize(v, s, is_sf_swizzled_layout=False),
    ]
    for call in calls:
        got, expected = call(there(x), there(g)), call(x, g)
        for ours, golden in zip(got, expected, strict=True):
            assert tuple(ours.shape) == golden.shape
            assert back(ours).tobytes() == golden.tobytes()
    codes, scales = flashinfer.nvfp4_quantize(there(x), there(g), layout)
    values = flashinfer.e2m1_and_ufp8sf_scale_to_float(
        codes,
        scales.reshape(-1),
        there(1 / g),
        is_sf_swizzled_layout=layout is not SfLayout.layout_linear,
        is_sf_8x4_layout=layout is SfLayout.layout_8x4,
    )
    assert np.abs(back(values) - x.astype(np.float32)).max() < 1


@libraries
def test_stacks_of_experts_give_the_golden_bytes(library: str) -> None:
    there, back, _ = MAKERS[library]()
    x = np.random.default_rng(6).standard_normal((4, 130, 1024)).astype(ml_dtypes.bfloat16)
    mask, g = np.array([5, 0, 130, 64], np.int32), np.array([1, 2, 300, 40], np.float32)
    for function in (
        flashinfer.scaled_fp4_grouped_quantize,
        flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize,
    ):
        got, expected = function(there(x), there(mask), there(g)), function(x, mask, g)
        for ours, golden in zip(got, expected, strict=True):
            assert tuple(ours.shape) == golden.shape
            assert np.array_equal(back(ours).view(np.uint8), golden.view(np.uint8))


@libraries
def test_layouts_and_offsets(library: str) -> None:
    there, back, _ = MAKERS[library]()
    words = np.random.default_rng(7).integers(0, 250, (3, 300, 90))
    for scales in (words.astype(np.uint8), words.astype(np.float32).astype(ml_dtypes.bfloat16)):
        got = back(flashinfer.block_scale_interleave(there(scales)))
        assert got.tobytes() == b"".join(cases.swizzled(one).tobytes() for one in scales)
    lengths = np.random.default_rng(8).integers(0, 50, 300)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = int(indptr[-1]) + 7
    for options in ({}, {"rows": rows}):
        got = flashinfer.pad_indptr_to_multiple_of_4(there(indptr), **options)
        expected = flashinfer.pad_indptr_to_multiple_of_4(indptr, **options)
        for ours, golden in zip(got, expected, strict=True):
            assert np.array_equal(back(ours), golden)
