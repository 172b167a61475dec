"""The golden model against the committed vectors, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4 import golden
from nvfp4.layouts import allocated_tiles, codes_shape, scale_shape, tile_starts
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
    files,
    same_values,
)

EXPECTED_COUNTS = {
    "quantize": 227,
    "error": 8,
    "dequantize": 32,
    "grouped_quantize": 44,
    "matmul": 378,
    "grouped_matmul": 94,
}


def test_every_file_and_case_of_the_vectors_is_loaded():
    assert len(files()) == 20
    assert {op: len(cases(op)) for op in EXPECTED_COUNTS} == EXPECTED_COUNTS


@pytest.mark.parametrize("case", cases("quantize"), ids=str)
def test_quantize_gives_the_expected_bytes(case: QuantizeCase):
    codes, scales, decode_scale = golden.quantize(
        case.x,
        case.format,
        encode_scale=case.encode_scale,
        scale_rounding=case.scale_rounding,
        scale_layout=case.scale_layout,
    )
    assert codes.dtype == scales.dtype == np.uint8
    assert codes.shape == codes_shape(case.format, case.x.shape) == case.codes.shape
    assert scales.shape == case.scales.shape
    assert scales.shape == scale_shape(case.format, case.x.shape, case.scale_layout)
    np.testing.assert_array_equal(scales, case.scales)
    np.testing.assert_array_equal(codes, case.codes)
    assert decode_scale.shape == ()
    assert decode_scale.tobytes() == case.decode_scale.tobytes()


@pytest.mark.parametrize(
    "case", [c for c in cases("quantize") if c.encode_scale_of_amax is not None], ids=str
)
def test_amax_stands_for_the_expected_encode_scale(case: QuantizeCase):
    got = golden.amax_encode_scale(case.x, case.format)
    assert got.tobytes() == case.encode_scale_of_amax.tobytes()


@pytest.mark.parametrize("case", cases("error"), ids=str)
def test_a_partial_block_is_an_error_that_names_the_multiple(case: ErrorCase):
    for layout in ("linear", "tcgen"):
        with pytest.raises(case.error, match=case.message_contains):
            golden.quantize(case.x, case.format, scale_layout=layout)


@pytest.mark.parametrize("case", cases("dequantize"), ids=str)
def test_dequantize_gives_the_expected_values(case: DequantizeCase):
    got = golden.dequantize(
        case.codes,
        case.scales,
        case.decode_scale,
        case.format,
        shape=case.shape,
        scale_layout="linear",
    )
    assert same_values(got, case.values)


@pytest.mark.parametrize("case", cases("dequantize"), ids=str)
def test_dequantize_reads_the_tcgen_layout_whatever_its_padding_holds(case: DequantizeCase):
    ones = np.ones_like(case.scales)
    used = golden.interleave_scales(ones)
    for poison in (0x7F, 0xFF):
        tcgen = np.where(used, golden.interleave_scales(case.scales), poison).astype(np.uint8)
        got = golden.dequantize(
            case.codes,
            tcgen,
            case.decode_scale,
            case.format,
            shape=case.shape,
            scale_layout="tcgen",
        )
        assert same_values(got, case.values)


@pytest.mark.parametrize("case", cases("grouped_quantize"), ids=str)
def test_grouped_quantize_gives_the_expected_bytes(case: GroupedQuantizeCase):
    arguments = {
        "row_offsets": case.row_offsets,
        "expert_ids": case.expert_ids,
        "row_indices": case.row_indices,
        "encode_scale": case.encode_scale,
    }
    codes, scales, decode_scale = golden.grouped_quantize(case.x, case.format, **arguments)
    np.testing.assert_array_equal(codes, case.codes, strict=True)
    np.testing.assert_array_equal(scales, case.scales, strict=True)
    np.testing.assert_array_equal(tile_starts(case.row_offsets), case.tile_start)
    groups = len(case.row_offsets) - 1
    assert scales.shape[0] == allocated_tiles(codes.shape[0], groups)
    ids = np.arange(groups) if case.expert_ids is None else case.expert_ids
    by_rule = [
        np.float32(1)
        if i < 0 or case.encode_scale is None or case.format.codes_per_byte == 1
        else np.float32(1) / case.encode_scale[i]
        for i in ids
    ]
    np.testing.assert_array_equal(decode_scale, np.array(by_rule, np.float32), strict=True)


def products(operand: PlainOperand | QuantizedOperand, row_offsets=None) -> np.ndarray:
    if isinstance(operand, PlainOperand):
        return operand.x
    return golden.element_scale_product(
        operand.codes,
        operand.scales,
        operand.format,
        shape=operand.shape,
        scale_layout="tcgen" if operand.grouped else "linear",
        row_offsets=row_offsets if operand.grouped else None,
    )


@pytest.mark.parametrize("case", cases("matmul"), ids=str)
def test_matmul_gives_the_expected_bytes(case: MatmulCase):
    got = golden.matmul(
        products(case.a),
        products(case.b),
        alpha=case.alpha,
        decode_a=None if isinstance(case.a, PlainOperand) else case.a.decode_scale,
        decode_b=case.b.decode_scale,
        out_dtype=case.out_dtype,
    )
    assert same_values(got, case.out, zero_sign_free=True)


def decode_of_ranges(case: GroupedMatmulCase) -> np.ndarray | None:
    if isinstance(case.a, PlainOperand) or case.a.encode_scale is None:
        return None
    groups = len(case.row_offsets) - 1
    ids = np.arange(groups) if case.expert_ids is None else case.expert_ids
    by_range = [np.float32(1) / case.a.encode_scale[i] if i >= 0 else 1 for i in ids]
    return np.array(by_range, np.float32)


@pytest.mark.parametrize("case", cases("grouped_matmul"), ids=str)
def test_grouped_matmul_gives_the_expected_bytes(case: GroupedMatmulCase):
    got = golden.grouped_matmul(
        products(case.a, case.row_offsets),
        products(case.b),
        row_offsets=case.row_offsets,
        expert_ids=case.expert_ids,
        alpha=case.alpha,
        decode_a=decode_of_ranges(case),
        decode_b=case.b.decode_scale,
        out_dtype=case.out_dtype,
    )
    assert same_values(got, case.out, zero_sign_free=True)
