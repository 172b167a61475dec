"""Products through the public functions: what the vectors do not cover."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import nvfp4
from tests.vectorlib import same_values

RNG = np.random.default_rng(19)
X = RNG.standard_normal((5, 64)).astype(np.float32)
OFFSETS, IDS = np.array([0, 2, 2, 4], np.int32), np.array([2, -1, 0], np.int64)
WEIGHTS = RNG.standard_normal((3, 32, 64)).astype(np.float32)
STACK = nvfp4.quantize(WEIGHTS, "mxfp4", encode_scale=np.array([1, 2, 3], np.float32))
LINEAR = nvfp4.quantize(X, "nvfp4", scale_layout="linear", encode_scale=0.3)
RANGES: dict[str, Any] = {"row_offsets": OFFSETS, "expert_ids": IDS}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("layout", ["tcgen", "linear"])
def test_a_quantised_product_is_the_product_quantised(format: str, layout: str) -> None:
    b = nvfp4.quantize(WEIGHTS[0], "mxfp8")
    expected = nvfp4.quantize(
        nvfp4.matmul(LINEAR, b, out_dtype="float32"), format, scale_layout=layout
    )
    out = None
    if layout == "linear":
        out = dataclasses.replace(
            expected,
            codes=np.full_like(expected.codes, 0xAA),
            scales=np.full_like(expected.scales, 9),
        )
    got = nvfp4.matmul(LINEAR, b, out_dtype=format, out=out)
    assert (got.format, got.shape, got.scale_layout) == (format, (5, 32), layout)
    np.testing.assert_array_equal(got.codes, expected.codes)
    np.testing.assert_array_equal(got.scales, expected.scales)
    assert got.decode_scale == 1
    assert got.groups is None


def test_a_quantised_grouped_product_is_a_grouped_tensor() -> None:
    values = nvfp4.grouped_matmul(LINEAR, STACK, **RANGES, out_dtype="float32")
    expected = nvfp4.grouped_quantize(values, "nvfp4", **RANGES)
    got = nvfp4.grouped_matmul(LINEAR, STACK, **RANGES, out_dtype="nvfp4")
    assert got.groups is OFFSETS
    np.testing.assert_array_equal(got.codes, expected.codes)
    np.testing.assert_array_equal(got.scales, expected.scales)
    np.testing.assert_array_equal(got.decode_scale, np.ones(3, np.float32))
    assert same_values(got.dequantize(), expected.dequantize())

    out = dataclasses.replace(
        got,
        codes=np.full_like(got.codes, 0xAA),
        scales=np.full((7, *got.scales.shape[1:]), 0xAA, np.uint8),
        decode_scale=np.full(3, np.nan, np.float32),
        tile_starts=np.array([5, 0, 2]),
    )
    assert nvfp4.grouped_matmul(LINEAR, STACK, **RANGES, out_dtype="nvfp4", out=out) is out
    assert same_values(out.dequantize(), expected.dequantize())
    np.testing.assert_array_equal(out.scales[[5, 2]], expected.scales[[0, 1]])
    assert not out.scales[[0, 1, 3, 4, 6]].any()
    np.testing.assert_array_equal(out.decode_scale, np.ones(3, np.float32))


def test_out_of_a_quantised_grouped_product_has_the_ranges_of_the_call() -> None:
    out = nvfp4.grouped_matmul(LINEAR, STACK, **RANGES, out_dtype="nvfp4")
    other = dataclasses.replace(out, groups=np.array([0, 1, 2, 4], np.int32))
    with pytest.raises(ValueError, match=r"out\.groups must be row_offsets itself"):
        nvfp4.grouped_matmul(LINEAR, STACK, **RANGES, out_dtype="nvfp4", out=other)
    crossed = dataclasses.replace(out, tile_starts=np.array([1, 0, 1]))
    with pytest.raises(ValueError, match="tile_starts must give no tile"):
        nvfp4.grouped_matmul(LINEAR, STACK, **RANGES, out_dtype="nvfp4", out=crossed)


@pytest.mark.parametrize("shape", [(), (1,), (5, 1)])
def test_the_decode_scale_of_a_dense_operand_serves_all_ranges(shape: tuple[int, ...]) -> None:
    decode = np.linspace(1, 2, max(1, int(np.prod(shape))), dtype=np.float32).reshape(shape)
    a = dataclasses.replace(LINEAR, decode_scale=decode)
    plain = dataclasses.replace(LINEAR, decode_scale=np.ones((), np.float32))
    got = nvfp4.grouped_matmul(a, STACK, **RANGES, out_dtype="float32")
    for rows, expert in ((slice(0, 2), 2), (slice(2, 4), 0)):
        part = dataclasses.replace(
            plain,
            codes=plain.codes[rows],
            scales=plain.scales[rows],
            decode_scale=decode[rows] if shape == (5, 1) else decode,
            shape=(2, 64),
        )
        matrix = nvfp4.QTensor.from_parts(
            STACK.codes[expert],
            STACK.scales[expert],
            "mxfp4",
            decode_scale=STACK.decode_scale[expert : expert + 1],
        )
        expected = nvfp4.matmul(part, matrix, out_dtype="float32")
        assert got[rows].tobytes() == expected.tobytes()
    assert not got[4].any()


def test_rows_are_picked_with_their_decode_scales() -> None:
    a = nvfp4.quantize(X, "nvfp4", scale_layout="linear", encode_scale="row_amax")
    indices = np.array([4, -1, 0, 0, 9, 2], np.int32)
    options = {"row_offsets": np.array([0, 3, 3, 6]), "expert_ids": IDS, "out_dtype": "float32"}
    got = nvfp4.grouped_matmul(a, STACK, row_indices=indices, **options)
    picked = np.where((indices >= 0) & (indices < 5), indices, 0)
    whole = dataclasses.replace(
        a,
        codes=a.codes[picked],
        scales=a.scales[picked],
        decode_scale=a.decode_scale[picked],
        shape=(6, 64),
    )
    expected = nvfp4.grouped_matmul(whole, STACK, **options)
    expected[[1, 4]] = 0
    assert got.tobytes() == expected.tobytes()


def test_alpha_may_be_one_for_all_or_one_by_expert() -> None:
    alpha = np.array([2.0, 5.0, 0.5], np.float32)
    plain = nvfp4.grouped_matmul(LINEAR, STACK, **RANGES, out_dtype="float32")
    by_expert = nvfp4.grouped_matmul(LINEAR, STACK, **RANGES, alpha=alpha, out_dtype="float32")
    factor = np.array([0.5, 0.5, 2, 2, 1], np.float32)[:, None]
    assert same_values(by_expert, plain * factor, zero_sign_free=True)
    for two in (2, 2.0, np.float32(2), np.array(2, np.float32)):
        got = nvfp4.grouped_matmul(LINEAR, STACK, **RANGES, alpha=two, out_dtype="float32")
        assert same_values(got, plain * np.float32(2), zero_sign_free=True)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", np.float16])
def test_the_result_has_the_dtype_asked_for(dtype: Any) -> None:
    b = nvfp4.quantize(WEIGHTS[0], "nvfp4")
    got = nvfp4.matmul(LINEAR, b, out_dtype=dtype)
    assert got.dtype.name == (dtype if isinstance(dtype, str) else np.dtype(dtype).name)
    assert nvfp4.matmul(LINEAR, b).dtype.name == "bfloat16"
