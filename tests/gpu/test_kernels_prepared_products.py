"""Products with prepared weights on the present card, through the public functions.

Exact sums give the golden bytes, whatever the kernel and the order of its sums.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4.formats import FORMATS

from .test_public_arrays import MAKERS, Library, libraries

BF16 = ml_dtypes.bfloat16
COLUMNS, DEPTH = 272, 2880


def integers(shape: tuple[int, ...], seed: int, dtype: Any = BF16) -> np.ndarray:
    """Small integers, half of them 0, whose products have exact sums."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, shape) * (rng.random(shape) < 0.5)
    return values.astype(np.float32).astype(dtype)


def there(library: Library, values: Any) -> Any:
    """On the card; all arrays of a QTensor."""
    if not isinstance(values, nvfp4.QTensor):
        return library.there(values)
    return nvfp4.QTensor.from_parts(
        library.there(values.codes),
        library.there(values.scales),
        values.format,
        shape=values.shape,
        decode_scale=library.there(values.decode_scale),
        scale_layout=values.scale_layout,
    )


def room(library: Library, shape: tuple[int, ...], dtype: Any) -> Any:
    """Poison on the card."""
    return library.there(np.full(shape, 77, dtype))


def check(
    library: Library, a: Any, b: nvfp4.QTensor, dtype: Any = np.float32, **options: Any
) -> None:
    """Multiply by weights that the card has prepared, twice, over poison."""
    function = nvfp4.grouped_matmul if "row_offsets" in options else nvfp4.matmul
    options["out_dtype"] = np.dtype(dtype).name
    expected = np.asarray(function(a, b, **options))
    prepared = nvfp4.prepare_weights(there(library, b))
    moved = {
        name: library.there(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    given = there(library, a)
    for _ in range(2):
        out = room(library, expected.shape, expected.dtype)
        function(given, prepared, out=out, **moved)
        got = library.back(out)
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
        assert got.tobytes() == expected.tobytes()


@libraries
@pytest.mark.parametrize("rows", [1, 8, 16, 40, 128, 300])
@pytest.mark.parametrize("fmt", FORMATS)
def test_exact_sums_give_the_golden_bytes(name: str, fmt: str, rows: int) -> None:
    library = MAKERS[name]()
    dtype = BF16 if "bfloat16" in library.dtypes else np.float16
    b = nvfp4.quantize(integers((COLUMNS, DEPTH), 1, np.float32), fmt)
    check(library, integers((rows, DEPTH), 2, dtype), b)


@pytest.mark.parametrize("depth", [32, 224, 1504])
@pytest.mark.parametrize("rows", [3, 70])
def test_ragged_extents(cupy: Any, rows: int, depth: int) -> None:
    library = MAKERS["cupy"]()
    b = nvfp4.quantize(integers((200, depth), 3, np.float32), "mxfp4")
    check(library, integers((rows, depth), 4), b)
    check(library, integers((rows, depth), 5, np.float16), b, np.float16)
    check(library, integers((rows, depth), 6), b, BF16)


@pytest.mark.parametrize("a", FORMATS)
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantised_rows(cupy: Any, fmt: str, rows: int, a: str) -> None:
    b = nvfp4.quantize(integers((COLUMNS, 1504), 7, np.float32), fmt)
    check(MAKERS["cupy"](), nvfp4.quantize(integers((rows, 1504), 8, np.float32), a), b)


@pytest.mark.parametrize("rows", [30, 400])
@pytest.mark.parametrize("fmt", FORMATS)
def test_grouped_products_with_gathered_rows(cupy: Any, fmt: str, rows: int) -> None:
    """Ranges without rows, without an expert, rows of no range, and rows that are not there."""
    rng = np.random.default_rng(9)
    sizes = np.array([rows // 2, 0, 1, rows // 4, rows // 8])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    indices = rng.integers(0, 20, rows).astype(np.int32)
    indices[[0, 5, rows // 2]] = [-1, 20, np.iinfo(np.int32).max]
    b = nvfp4.quantize(integers((4, COLUMNS, 704), 10, np.float32), fmt)
    options: dict[str, Any] = {
        "row_offsets": offsets,
        "expert_ids": np.array([1, 0, 3, -1, 2], np.int32),
        "row_indices": indices,
        "alpha": np.array([1, 2, 4, 0.5], np.float32),
    }
    check(MAKERS["cupy"](), integers((20, 704), 11), b, **options)


def eleven_bits(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Values of float16 of which bfloat16 holds none, half of them 0; exact sums.

    Products with `integers` in nvfp4 are multiples of 2^-15, so float32 holds sums up to 512: eight
    deviations of those at a depth of 736. (With one more binade some of 190 000 were above it.)
    """
    rng = np.random.default_rng(seed)
    odd = 2 * rng.integers(512, 1024, shape) + 1
    values = odd * np.exp2(rng.integers(-10, -8, shape)) * rng.choice([-1, 1], shape)
    return (values * (rng.random(shape) < 0.5)).astype(np.float16)


@pytest.mark.parametrize("rows", [5, 100, 700])
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_of_float16_keep_all_their_bits(cupy: Any, fmt: str, rows: int) -> None:
    """Few rows and many; infinities, NaN and subnormal elements; dense, and gathered for ranges."""
    library = MAKERS["cupy"]()
    a = eleven_bits((rows, 736), 23)
    b = nvfp4.quantize(integers((COLUMNS, 736), 24, np.float32), fmt)
    check(library, a, b)
    check(library, a, b, np.float16, epilogue=lambda v, r, c, e: v * np.float32(0.5))
    a[3] = (np.arange(736) * 2 - 735) * 2.0**-24
    check(library, a, b)
    indices = np.random.default_rng(25).permutation(rows).astype(np.int32)
    indices[[0, rows // 2]] = -1, rows
    offsets = np.array([0, rows // 2, rows // 2, rows], np.int32)
    stack = nvfp4.quantize(integers((3, COLUMNS, 736), 26, np.float32), fmt)
    ids = np.array([2, 0, 1], np.int32)
    check(library, a, stack, row_offsets=offsets, row_indices=indices, expert_ids=ids)
    ones = nvfp4.quantize(np.ones((COLUMNS, 736), np.float32), fmt)
    a[[1, 2], 7] = np.inf, -np.inf
    check(library, a, ones)
    a[4, 9] = np.nan
    out = room(library, (rows, COLUMNS), np.float32)
    nvfp4.matmul(
        library.there(a), nvfp4.prepare_weights(there(library, ones)), out=out, out_dtype="float32"
    )
    got = library.back(out)
    assert np.isnan(got[4]).all() and np.isposinf(got[1]).all() and np.isneginf(got[2]).all()
    assert np.isfinite(np.delete(got, [1, 2, 4], 0)).all()


@pytest.mark.parametrize("rows", [4, 100])
def test_a_plain_matrix_among_others(cupy: Any, rows: int) -> None:
    b = nvfp4.quantize(integers((2, 64, 256), 12, np.float32), "mxfp4", scale_layout="linear")
    scales = b.scales.copy()
    scales[1, 3, 0], scales[1, 7, 1] = 5, 250
    b = nvfp4.QTensor.from_parts(
        b.codes, scales, "mxfp4", shape=b.shape, decode_scale=b.decode_scale, scale_layout="linear"
    )
    offsets = np.array([0, rows // 2, rows], np.int32)
    check(MAKERS["cupy"](), integers((rows, 256), 13), b, row_offsets=offsets)


@pytest.mark.parametrize("rows", [4, 100])
def test_sums_that_are_rounded_have_the_same_bytes_twice(cupy: Any, rows: int) -> None:
    rng = np.random.default_rng(14)
    a = rng.standard_normal((rows, DEPTH)).astype(BF16)
    b = nvfp4.quantize(rng.standard_normal((COLUMNS, DEPTH)).astype(np.float32), "mxfp4")
    library = MAKERS["cupy"]()
    prepared = nvfp4.prepare_weights(there(library, b))
    given = library.there(a)
    made = []
    for _ in range(5):
        out = room(library, (rows, COLUMNS), np.float32)
        nvfp4.matmul(given, prepared, out=out, out_dtype="float32")
        made.append(library.back(out).tobytes())
    assert len(set(made)) == 1
    expected = nvfp4.matmul(a, b, out_dtype="float32")
    np.testing.assert_allclose(library.back(out), expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 100])
def test_products_are_captured_into_a_graph(cupy: Any, rows: int) -> None:
    """And follow the rows, and the weights that are prepared into the same memory."""
    library = MAKERS["cupy"]()
    first, second = (
        nvfp4.quantize(integers((COLUMNS, DEPTH), seed, np.float32), "mxfp4") for seed in (15, 16)
    )
    a = library.there(integers((rows, DEPTH), 17))
    prepared = nvfp4.prepare_weights(there(library, first))
    later = there(library, second)
    out = room(library, (rows, COLUMNS), np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        nvfp4.matmul(a, prepared, out=out, out_dtype="float32")
        stream.begin_capture()
        nvfp4.matmul(a, prepared, out=out, out_dtype="float32")
        graph = stream.end_capture()
    stream.synchronize()
    values = integers((rows, DEPTH), 18)
    a[...] = library.there(values)
    nvfp4.prepare_weights(later, out=prepared)
    out[...] = np.nan
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    expected = np.asarray(nvfp4.matmul(values, second, out_dtype="float32"))
    assert library.back(out).tobytes() == expected.tobytes()


def codes_room(library: Library, like: nvfp4.QTensor, **options: Any) -> nvfp4.QTensor:
    """Poison for a quantised result of such parts."""
    parts = (like.codes, like.scales, like.decode_scale)
    codes, scales, decode = (room(library, p.shape, p.dtype) for p in map(np.asarray, parts))
    return nvfp4.QTensor.from_parts(
        codes,
        scales,
        like.format,
        shape=like.shape,
        decode_scale=decode,
        scale_layout=like.scale_layout,
        **options,
    )


@pytest.mark.parametrize("halves", [None, True, False])
@pytest.mark.parametrize("rows", [5, 300])
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantised_results_have_every_golden_byte(
    cupy: Any, fmt: str, rows: int, halves: bool | None
) -> None:
    """Codes, scales and their padding; pairs are added, so that sums stay exact."""
    library = MAKERS["cupy"]()
    pairs = nvfp4.Epilogue(lambda g, u, r, c, e: g + u, pair=True, halves=bool(halves))
    epilogue = None if halves is None else pairs
    b = nvfp4.quantize(integers((3, 320, 704), 21, np.float32), "mxfp4")
    a = integers((rows, 704), 22)
    offsets = np.array([0, rows // 2, rows // 2, rows - 1], np.int32)
    options: dict[str, Any] = {"out_dtype": fmt, "epilogue": epilogue}
    expected = nvfp4.grouped_matmul(a, b, row_offsets=offsets, **options)
    given, prepared = there(library, a), nvfp4.prepare_weights(there(library, b))
    on_card = library.there(offsets)
    for _ in range(2):
        out = codes_room(library, expected, groups=on_card)
        assert nvfp4.grouped_matmul(given, prepared, row_offsets=on_card, out=out, **options) is out
        for part in ("codes", "scales", "decode_scale"):
            got = library.back(getattr(out, part))
            np.testing.assert_array_equal(got, np.asarray(getattr(expected, part)), err_msg=part)
    one = nvfp4.quantize(integers((320, 704), 21, np.float32), "nvfp4")
    dense = nvfp4.matmul(a, one, **options)
    out = codes_room(library, dense)
    nvfp4.matmul(given, nvfp4.prepare_weights(there(library, one)), out=out, **options)
    for part in ("codes", "scales", "decode_scale"):
        got = library.back(getattr(out, part))
        np.testing.assert_array_equal(got, np.asarray(getattr(dense, part)), err_msg=part)
