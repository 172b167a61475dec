"""Modular's functions on GPU arrays of the present card, against the golden model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4.compat import modular
from tests.compat.modular_cases import BF16, DTYPES, E4M3, E8M0, POISON, empty, outputs, rows_of

FLOAT8 = (E4M3, E8M0)
SIZE = {"nvfp4": 16, "mxfp4": 32, "mxfp8_e4m3": 32}
formats = pytest.mark.parametrize("format", SIZE)


class Library(NamedTuple):
    """How arrays come to the card and back. Without `float8`, eight-bit floats go as bytes."""

    there: Callable[[np.ndarray], Any]
    back: Callable[[Any], np.ndarray]
    float8: bool


def _cupy() -> Library:
    import cupy

    def there(x: np.ndarray) -> Any:
        return cupy.asarray(x.view(np.uint8) if x.dtype in FLOAT8 else x)

    return Library(there, cupy.asnumpy, False)


def _torch() -> Library:
    import torch

    kinds = {BF16: (np.int16, torch.bfloat16)}
    kinds |= {E4M3: (np.uint8, torch.float8_e4m3fn), E8M0: (np.uint8, torch.float8_e8m0fnu)}
    kinds = {np.dtype(key): value for key, value in kinds.items()}

    def there(x: np.ndarray) -> Any:
        x = np.array(x, order="C")
        if x.dtype not in kinds:
            return torch.from_numpy(x).cuda()
        as_integers, kind = kinds[x.dtype]
        return torch.from_numpy(x.view(as_integers)).cuda().view(kind)

    def back(x: Any) -> np.ndarray:
        for dtype, (as_integers, kind) in kinds.items():
            if x.dtype == kind:
                width = torch.int16 if as_integers is np.int16 else torch.uint8
                return x.view(width).cpu().numpy().view(dtype)
        return x.cpu().numpy()

    return Library(there, back, True)


MAKERS = {"cupy": _cupy, "torch": _torch}
INSTALLED = [name for name in MAKERS if importlib.util.find_spec(name)]


@pytest.fixture(params=INSTALLED)
def library(request: pytest.FixtureRequest, cupy: Any) -> Library:
    return MAKERS[request.param]()


def same(library: Library, got: Any, wanted: np.ndarray) -> None:
    values = library.back(got)
    assert values.shape == wanted.shape
    assert values.tobytes() == np.ascontiguousarray(wanted).tobytes()


def pair(library: Library, format: str, shape: tuple[int, int], layout: str = "tcgen") -> Any:
    return tuple(library.there(part) for part in outputs(format, *shape, layout))


@formats
@pytest.mark.parametrize("shape", [(1, 64), (130, 352), (300, 2880), (4096, 4096)])
def test_quantize_dynamic_block_scaled(library: Library, format: str, shape: Any) -> None:
    x = rows_of(1, *shape)
    there = library.there(x)
    scale = 0.43
    expected = nvfp4.quantize(x, format, encode_scale=scale)
    output, scales = pair(library, format, shape)
    q = modular.quantize_dynamic_block_scaled(
        output, scales, there, scale, SF_VECTOR_SIZE=SIZE[format]
    )
    same(library, q.codes, expected.codes)
    same(library, q.scales, expected.scales)
    same(library, q.decode_scale, np.asarray(expected.decode_scale))
    output, scales = pair(library, format, shape)
    modular.quantize_dynamic_scaled_fp4fp8(
        None, output, scales, there, shape[1], shape[1], scale, SF_VECTOR_SIZE=SIZE[format]
    )
    again = nvfp4.QTensor.from_parts(output, scales, format)
    same(library, again.codes, expected.codes)
    same(library, again.scales, expected.scales)
    if format == "nvfp4":
        output, scales = pair(library, format, shape)
        modular.quantize_dynamic_scaled_fp4_async(None, output, scales, there, scale)
        same(library, output, expected.codes)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3"])
def test_amds_quantisers(library: Library, format: str) -> None:
    x = rows_of(2, 300, 2880)
    rounding = "even" if format == "mxfp4" else "rceil"
    expected = nvfp4.quantize(x, format, scale_rounding=rounding, scale_layout="linear")
    output, scales = pair(library, format, x.shape, "linear")
    q = modular.quantize_mx_amd(None, output, scales, library.there(x))
    same(library, q.codes, expected.codes)
    same(library, q.scales, expected.scales)
    output, scales = pair(library, format, x.shape, "linear")
    q = modular.quantize_dynamic_block_scaled(
        output, scales, library.there(x), 1.0, SF_VECTOR_SIZE=32
    )
    same(library, q.codes, expected.codes)
    if format == "mxfp4":
        flat = [library.there(empty((n,), np.uint8)) for n in (x.size // 2, x.size // 32)]
        modular.quantize_dynamic_block_scaled_mxfp4(*flat, library.there(x))
        same(library, flat[0], expected.codes.reshape(-1))
        same(library, flat[1], expected.scales.reshape(-1))


@pytest.mark.parametrize(
    ("format", "gathered"),
    [("nvfp4", False), ("nvfp4", True), ("mxfp4", False), ("mxfp8_e4m3", True)],
)
def test_the_grouped_quantiser(library: Library, format: str, gathered: bool) -> None:
    rng = np.random.default_rng(3)
    groups, rows, columns = 40, 900, 704
    offsets = np.sort(rng.integers(0, rows + 1, groups + 1)).astype(np.int32)
    offsets[0] = 0
    ids = rng.integers(-1, 8, groups).astype(np.int32)
    factors = (rng.random(8) + 0.5).astype(np.float32)
    indices = rng.integers(-2, 202, rows).astype(np.int32) if gathered else None
    x = rows_of(4, 200 if gathered else rows, columns)
    expected = nvfp4.grouped_quantize(
        x,
        format,
        row_offsets=offsets,
        expert_ids=ids,
        row_indices=indices,
        encode_scale=factors,
    )
    lengths = np.diff(offsets)
    starts = np.concatenate([[0], np.cumsum(-(-lengths // 128))[:-1]])
    for scales_offsets in (None, (starts - offsets[:-1] // 128).astype(np.int32)):
        output, _ = pair(library, format, (rows, columns))
        scales = library.there(np.full(expected.scales.shape, POISON, np.uint8))
        if library.float8:
            scales = library.there(empty(expected.scales.shape, DTYPES[format][1]))
        q = modular.grouped_quantize_dynamic_scaled_fp4_async(
            output,
            scales,
            library.there(x),
            library.there(offsets),
            None if scales_offsets is None else library.there(scales_offsets),
            library.there(ids),
            library.there(factors),
            row_indices=None if indices is None else library.there(indices),
            SF_VECTOR_SIZE=SIZE[format],
        )
        same(library, q.codes, expected.codes)
        same(library, q.scales, expected.scales)
        same(library, q.decode_scale, expected.decode_scale)


def test_scales_are_rearranged(library: Library) -> None:
    scales = np.random.default_rng(5).integers(0, 127, (1000, 180)).astype(np.uint8)
    expected = nvfp4.interleave_scales(scales)
    for dtype in (np.uint8, E4M3, E8M0):
        out = library.there(empty(expected.shape, dtype))
        modular.block_scales_interleave(out, library.there(scales.view(dtype)))
        same(library, out, expected.view(library.back(out).dtype))


def exact(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """0 and ±3, which every format holds: sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return (3 * rng.integers(-1, 2, shape)).astype(np.float32)


def operands(library: Library, format: str, m: int, n: int, k: int, layout: str) -> Any:
    """A and B on the card in the seed's dtypes, and the product of their values."""
    there, values = [], []
    for seed, rows in ((6, m), (7, n)):
        q = nvfp4.quantize(exact(seed, (rows, k)), format, scale_layout=layout)
        codes, scales = DTYPES[format]
        there += [library.there(q.codes.view(codes)), library.there(q.scales.view(scales))]
        values.append(exact(seed, (rows, k)))
    a, a_scales, b, b_scales = there
    return (a, b, a_scales, b_scales), values[0] @ values[1].T


@formats
@pytest.mark.parametrize("shape", [(5, 48, 128), (256, 384, 512)])
def test_products(library: Library, format: str, shape: tuple[int, int, int]) -> None:
    parts, wanted = operands(library, format, *shape, "tcgen")
    size = {"SF_VECTOR_SIZE": SIZE[format]}
    more = {**size, "a_format": format, "b_format": format}
    c = library.there(empty(wanted.shape, BF16))
    for _ in range(2):  # the second time, the call is found
        assert modular.block_scaled_matmul(c, *parts, 0.5, **more) is c
        same(library, c, (wanted / 2).astype(BF16))
        c[...] = 0
    if format != "nvfp4":  # what an epilogue is given does not depend on the operands
        return

    def place(coords, value):  # type: ignore[no-untyped-def]
        row, column = coords
        return value + np.float32(row * 4 + column)

    c = library.there(empty(wanted.shape, np.float32))
    modular.block_scaled_matmul_with_epilogue(c, *parts, 1.0, elementwise_lambda_fn=place, **more)
    rows, columns = np.indices(wanted.shape)
    same(library, c, (wanted + rows * 4 + columns).astype(np.float32))
    residual = exact(8, wanted.shape)
    added = nvfp4.epilogues.residual_add(library.there(residual))
    modular.block_scaled_matmul(c, *parts, 1.0, elementwise_compute_lambda_fn=added, **more)
    same(library, c, (wanted + residual).astype(np.float32))


def test_the_naive_product_is_the_golden_models_bit_for_bit(library: Library) -> None:
    rng = np.random.default_rng(9)
    a, b = (nvfp4.quantize(rng.standard_normal((256, 512)).astype("f"), "nvfp4") for _ in range(2))
    parts = [library.there(part) for part in (a.codes, b.codes, a.scales, b.scales)]
    c = library.there(empty((256, 256), np.float32))
    modular.naive_block_scaled_matmul(c, *parts, None, 0.3, scaling_kind="KIND_MXF4NVF4")
    same(library, c, nvfp4.matmul(a, b, alpha=0.3, out_dtype="float32"))


def test_amds_products(library: Library) -> None:
    parts, wanted = operands(library, "mxfp4", 300, 160, 512, "linear")
    c = library.there(empty(wanted.shape, BF16))
    modular.matmul_dynamic_block_scaled_amd(c, *parts)
    same(library, c, wanted.astype(BF16))
    stack = nvfp4.quantize(exact(10, (4, 160, 512)), "mxfp4", scale_layout="linear")
    offsets = np.array([0, 100, 100, 130, 250, 999], np.int32)
    ids = np.array([3, 0, -1, 1, 77], np.int32)
    modular.grouped_matmul_block_scaled_amd(
        c,
        parts[0],
        library.there(stack.codes),
        parts[2],
        library.there(stack.scales.view(E8M0)),
        library.there(offsets),
        library.there(ids),
        4,
    )
    a, b = exact(6, (300, 512)), exact(10, (4, 160, 512))
    wanted = np.zeros((300, 160), np.float32)
    wanted[:100], wanted[130:250] = a[:100] @ b[3].T, a[130:250] @ b[1].T
    same(library, c, wanted.astype(BF16))


def test_calls_are_on_the_stream_that_ctx_names_and_can_be_captured(cupy: Any) -> None:
    library = MAKERS["cupy"]()
    x = library.there(rows_of(11, 300, 512).astype(ml_dtypes.bfloat16))
    output, scales = pair(library, "nvfp4", (300, 512))
    c = library.there(empty((300, 300), np.float32))
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()

    def calls() -> None:
        modular.quantize_dynamic_block_scaled(output, scales, x, 0.5, stream, SF_VECTOR_SIZE=16)
        modular.block_scaled_matmul(
            c, output, output, scales, scales, 1.0, stream, SF_VECTOR_SIZE=16
        )

    calls()
    stream.synchronize()
    wanted = cupy.asnumpy(c)
    with stream:
        calls()
        stream.begin_capture()
        calls()
        graph = stream.end_capture()
    for array in (output, scales, c):
        array.view(np.uint8)[...] = POISON
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    assert cupy.asnumpy(c).tobytes() == wanted.tobytes()


# The shapes of the seed's own tests ---------------------------------------------------------------

#: Columns, rows of each expert, factor of each.
GROUPED = [
    (704, (256, 128, 256), (1, 1, 1)),
    (704, (100, 200, 50), (1, 1, 1)),
    (704, (13, 999), (1, 1)),
    (2944, (256, 128, 256), (0.43, 1, 0.5)),
    (352, (100, 60), (1, 0.5)),
]


@pytest.mark.parametrize(("columns", "lengths", "factors"), GROUPED)
def test_grouped_bytes_are_those_of_each_expert_alone(
    cupy: Any, columns: int, lengths: tuple[int, ...], factors: tuple[float, ...]
) -> None:
    rng = np.random.default_rng(12)
    x = rng.uniform(-1, 1, (sum(lengths), columns)).astype(BF16)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32)
    tiles = -(-len(x) // 128) + len(lengths)
    # A row behind the payload, which must stay as it is.
    memory = cupy.full((len(x) + 1, columns // 2), 0xEE, np.uint8)
    scales = cupy.full((tiles, -(-columns // 64), 32, 4, 4), POISON, np.uint8)
    starts = np.concatenate([[0], np.cumsum(-(-np.array(lengths) // 128))[:-1]])
    modular.grouped_quantize_dynamic_scaled_fp4_async(
        memory[:-1],
        scales,
        cupy.asarray(x),
        cupy.asarray(offsets),
        cupy.asarray((starts - offsets[:-1] // 128).astype(np.uint32)),
        cupy.asarray(np.arange(len(lengths), dtype=np.int32)),
        cupy.asarray(np.array(factors, np.float32)),
        SF_VECTOR_SIZE=16,
    )
    got, got_scales = cupy.asnumpy(memory), cupy.asnumpy(scales)
    assert (got[-1] == 0xEE).all()
    for i, factor in enumerate(factors):
        rows = slice(int(offsets[i]), int(offsets[i + 1]))
        output = cupy.asarray(empty((lengths[i], columns // 2), np.uint8))
        own = cupy.full((-(-lengths[i] // 128), *scales.shape[1:]), POISON, np.uint8)
        modular.quantize_dynamic_scaled_fp4fp8(
            None, output, own, cupy.asarray(x[rows]), columns, columns, factor
        )
        assert (got[rows] == cupy.asnumpy(output)).all()
        first = int(starts[i])
        assert (got_scales[first : first + len(own)] == cupy.asnumpy(own)).all()
    used = int(starts[-1]) + -(-lengths[-1] // 128)
    assert not got_scales[used:].any()


@pytest.mark.parametrize(
    ("rows", "columns", "factor"),
    [(256, 704, 1), (999, 576, 1), (129, 2944, 1), (3456, 2944, 0.43), (13, 2176, 0.5)],
)
def test_both_quantisers_of_nvfp4_give_the_same_bytes(
    cupy: Any, rows: int, columns: int, factor: float
) -> None:
    x = cupy.asarray(rows_of(13, rows, columns))
    results = []
    for function, more in (
        (modular.quantize_dynamic_scaled_fp4_async, ()),
        (modular.quantize_dynamic_scaled_fp4fp8, (columns, columns)),
    ):
        output, scales = pair(MAKERS["cupy"](), "nvfp4", (rows, columns))
        function(None, output, scales, x, *more, tensor_sf=factor)
        results.append(cupy.asnumpy(output).tobytes() + cupy.asnumpy(scales).tobytes())
    assert results[0] == results[1]
    expected = nvfp4.quantize(cupy.asnumpy(x), "nvfp4", encode_scale=factor)
    assert results[0] == expected.codes.tobytes() + expected.scales.tobytes()


@pytest.mark.parametrize("shape", [(128, 4), (129, 4), (129, 5), (1024, 1024), (16384, 3328)])
def test_scales_of_the_seeds_shapes_are_rearranged(cupy: Any, shape: tuple[int, int]) -> None:
    scales = np.random.default_rng(14).integers(0, 127, shape).astype(np.uint8)
    expected = nvfp4.interleave_scales(scales)
    out = cupy.full(expected.shape, POISON, np.uint8)
    modular.block_scales_interleave_fp4(None, cupy.asarray(scales), out)
    assert (cupy.asnumpy(out) == expected).all()


@pytest.mark.parametrize("columns", [136, 184, 8200, 16392])
def test_columns_that_end_inside_a_block_are_refused(cupy: Any, columns: int) -> None:
    x = cupy.zeros((258, columns), np.float16)
    output = cupy.full((258, columns // 2), POISON, np.uint8)
    scales = cupy.full((3, -(-columns // 64), 32, 4, 4), POISON, np.uint8)
    with pytest.raises(ValueError, match=f"multiple of 16 for nvfp4.*got {columns}"):
        modular.quantize_dynamic_block_scaled(output, scales, x, 1.0, SF_VECTOR_SIZE=16)
    assert (output == POISON).all()
