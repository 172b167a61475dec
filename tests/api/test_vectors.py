"""The public functions against the committed vectors, byte for byte, for NumPy and other
libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4.layouts import scale_shape
from tests.vectorlib import (
    DequantizeCase,
    ErrorCase,
    GroupedMatmulCase,
    GroupedQuantizeCase,
    MatmulCase,
    PlainOperand,
    QuantizeCase,
    QuantizedOperand,
    cases,
    same_values,
)


def poisoned(fmt: Any, shape: tuple[int, ...], scales: np.ndarray, **more: Any) -> nvfp4.QTensor:
    """A QTensor to write to, all of whose bytes are wrong."""
    codes = np.full((*shape[:-1], shape[-1] // fmt.codes_per_byte), 0x7A, np.uint8)
    decode = np.full(more.pop("decode", ()), np.nan, np.float32)
    wrong = np.full(scales.shape, 0x7A, np.uint8)
    return nvfp4.QTensor.from_parts(codes, wrong, fmt, shape=shape, decode_scale=decode, **more)


def decode_bits(q: nvfp4.QTensor) -> np.ndarray:
    return np.asarray(q.decode_scale).view(np.uint32)


@pytest.mark.parametrize("case", cases("quantize"), ids=str)
def test_quantize_gives_the_bytes_of_the_vectors(case: QuantizeCase) -> None:
    options = {
        "encode_scale": case.encode_scale,
        "scale_rounding": case.scale_rounding,
        "scale_layout": case.scale_layout,
    }
    q = nvfp4.quantize(case.x, case.format.name, **options)
    out = poisoned(case.format, case.x.shape, case.scales, scale_layout=case.scale_layout)
    assert nvfp4.quantize(case.x, case.format, out=out, **options) is out
    for got in (q, out):
        assert got.format == case.format.name
        assert got.shape == case.x.shape
        assert got.codes.dtype == got.scales.dtype == np.uint8
        assert got.codes.shape == case.codes.shape
        assert got.scales.shape == case.scales.shape
        np.testing.assert_array_equal(got.codes, case.codes)
        np.testing.assert_array_equal(got.scales, case.scales)
        assert decode_bits(got) == case.decode_scale.view(np.uint32)


@pytest.mark.parametrize("case", cases("error"), ids=str)
def test_quantize_refuses_what_the_vectors_say(case: ErrorCase) -> None:
    with pytest.raises(case.error, match=case.message_contains):
        nvfp4.quantize(case.x, case.format)


@pytest.mark.parametrize("case", cases("dequantize"), ids=str)
def test_dequantize_gives_the_values_of_the_vectors(case: DequantizeCase) -> None:
    q = tensor_of(case.format, case.codes, case.scales, case.decode_scale, case.shape)
    assert same_values(q.dequantize(), case.values)
    out = np.full(case.shape, 7.0, np.float32)
    assert q.dequantize(out=out) is out
    assert same_values(out, case.values)


def tensor_of(
    fmt: Any, codes: np.ndarray, scales: np.ndarray, decode: Any, shape: tuple[int, ...]
) -> nvfp4.QTensor:
    return nvfp4.QTensor.from_parts(
        codes, scales, fmt, shape=shape, decode_scale=np.array(decode), scale_layout="linear"
    )


@pytest.mark.parametrize("case", cases("grouped_quantize"), ids=str)
def test_grouped_quantize_gives_the_bytes_of_the_vectors(case: GroupedQuantizeCase) -> None:
    options = {
        "row_offsets": case.row_offsets,
        "expert_ids": case.expert_ids,
        "row_indices": case.row_indices,
        "encode_scale": case.encode_scale,
    }
    q = nvfp4.grouped_quantize(case.x, case.format, **options)
    groups = len(case.row_offsets) - 1
    out = poisoned(case.format, q.shape, case.scales, decode=(groups,), groups=case.row_offsets)
    assert nvfp4.grouped_quantize(case.x, case.format, out=out, **options) is out
    for got in (q, out):
        assert got.groups is case.row_offsets
        assert got.codes.shape == case.codes.shape
        assert got.scales.shape == case.scales.shape
        np.testing.assert_array_equal(got.codes, case.codes)
        np.testing.assert_array_equal(got.scales, case.scales)
        assert got.decode_scale.shape == (groups,)
        np.testing.assert_array_equal(got.decode_scale, decode_of(case))
    values = q.dequantize()
    again = out.dequantize()
    assert same_values(values, again)


def decode_of(case: GroupedQuantizeCase) -> np.ndarray:
    groups = len(case.row_offsets) - 1
    decode = np.ones(groups, np.float32)
    if case.encode_scale is not None:
        ids = np.arange(groups) if case.expert_ids is None else case.expert_ids
        on = ids >= 0
        decode[on] = np.float32(1) / case.encode_scale[ids[on]]
    return decode


def operand(given: PlainOperand | QuantizedOperand, row_offsets: Any, ids: Any) -> Any:
    if isinstance(given, PlainOperand):
        return given.x
    if not given.grouped:
        return tensor_of(given.format, given.codes, given.scales, given.decode_scale, given.shape)
    decode = np.ones(len(row_offsets) - 1, np.float32)
    if given.encode_scale is not None:
        experts = np.arange(len(decode)) if ids is None else ids
        on = experts >= 0
        decode[on] = np.float32(1) / given.encode_scale[experts[on]]
    return nvfp4.QTensor.from_parts(
        given.codes,
        given.scales,
        given.format,
        shape=given.shape,
        decode_scale=decode,
        groups=row_offsets,
    )


PRODUCTS = [*cases("matmul"), *cases("grouped_matmul")]


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_give_the_values_of_the_vectors(case: MatmulCase | GroupedMatmulCase) -> None:
    offsets = getattr(case, "row_offsets", None)
    ids = getattr(case, "expert_ids", None)
    a, b = operand(case.a, offsets, ids), operand(case.b, offsets, ids)
    options: dict[str, Any] = {"alpha": case.alpha, "out_dtype": case.out_dtype}
    call: Any = nvfp4.matmul
    if isinstance(case, GroupedMatmulCase):
        call = nvfp4.grouped_matmul
        options |= {"row_offsets": offsets, "expert_ids": ids}
    assert same_values(call(a, b, **options), case.out, zero_sign_free=True)
    out = np.full(case.out.shape, np.nan, case.out.dtype)
    assert call(a, b, out=out, **options) is out
    assert same_values(out, case.out, zero_sign_free=True)


@pytest.mark.parametrize("case", cases("quantize"), ids=str)
def test_interleave_and_deinterleave_are_inverse(case: QuantizeCase) -> None:
    if case.scale_layout == "tcgen":
        rows, blocks = case.x.shape[-2], case.x.shape[-1] // case.format.block
        linear = nvfp4.deinterleave_scales(case.scales, (rows, blocks))
        assert linear.shape == scale_shape(case.format, case.x.shape, "linear")
        np.testing.assert_array_equal(nvfp4.interleave_scales(linear), case.scales)
    elif case.scales.ndim in (2, 3):
        tiled = nvfp4.interleave_scales(case.scales)
        assert tiled.shape == scale_shape(case.format, case.x.shape, "tcgen")
        linear = nvfp4.deinterleave_scales(tiled, case.scales.shape[-2:])
        np.testing.assert_array_equal(linear, case.scales)
