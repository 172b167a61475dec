from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4 import golden
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E5M2, NVFP4
from tests import exact
from tests.vectorlib import same_values

ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def random_parts(fmt, rows=40, columns=96, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, columns // fmt.codes_per_byte), dtype=np.uint8)
    if fmt is NVFP4:
        scales = rng.integers(0, 0x7F, (rows, columns // 16), dtype=np.uint8)
    else:
        scales = rng.integers(90, 160, (rows, columns // 32), dtype=np.uint8)
    return codes, scales, (rows, columns)


def by_hand(codes, scales, decode, fmt, shape) -> np.ndarray:
    """Column by column with Python numbers; decode is a float by row."""
    out = np.empty(shape, np.float32)
    decoded = {"e2m1": golden.decode_e2m1, "e4m3": golden.decode_e4m3, "e5m2": golden.decode_e5m2}
    for r, c in np.ndindex(*shape):
        code = codes[r, c // fmt.codes_per_byte]
        if fmt.codes_per_byte == 2:
            code = code & 15 if c % 2 == 0 else code >> 4
        element = float(decoded[fmt.element](code))
        product = element * exact.scale_value(int(scales[r, c // fmt.block]), fmt.scale)
        out[r, c] = exact.mul(product, float(decode[r]))
    return out


@ALL
def test_values_are_element_times_scale_times_decode_scale(fmt):
    codes, scales, shape = random_parts(fmt, rows=8)
    scalar = np.float32(1 / 3)
    got = golden.dequantize(codes, scales, scalar, fmt, shape=shape, scale_layout="linear")
    assert same_values(got, by_hand(codes, scales, [scalar] * 8, fmt, shape))
    rows = np.float32(np.linspace(0.1, 77, 8))[:, None]
    got = golden.dequantize(codes, scales, rows, fmt, shape=shape, scale_layout="linear")
    assert same_values(got, by_hand(codes, scales, rows[:, 0], fmt, shape))


@ALL
def test_a_stack_takes_a_decode_scale_for_each_matrix_or_row(fmt):
    codes, scales, _ = random_parts(fmt, rows=6)
    codes, scales, shape = codes.reshape(2, 3, -1), scales.reshape(2, 3, -1), (2, 3, 96)
    by_matrix = np.float32([0.3, 0.7])
    expected = [
        golden.dequantize(c, s, d, fmt, shape=shape[1:], scale_layout="linear")
        for c, s, d in zip(codes, scales, by_matrix, strict=True)
    ]
    for layout, stored in (("linear", scales), ("tcgen", golden.interleave_scales(scales))):
        for decode in (by_matrix, np.repeat(by_matrix, 3).reshape(2, 3, 1)):
            got = golden.dequantize(codes, stored, decode, fmt, shape=shape, scale_layout=layout)
            assert same_values(got, np.stack(expected))


@ALL
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_results_are_the_float32_values_rounded_once(fmt, dtype):
    codes, scales, shape = random_parts(fmt)
    wide = golden.dequantize(
        codes, scales, np.float32(0.37), fmt, shape=shape, scale_layout="linear"
    )
    narrow = golden.dequantize(
        codes, scales, np.float32(0.37), fmt, shape=shape, scale_layout="linear", dtype=dtype
    )
    assert narrow.dtype.name == dtype
    with np.errstate(over="ignore"):
        scalar = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
        assert same_values(narrow, wide.astype(scalar))


@ALL
def test_the_product_without_decode_scale_is_exact(fmt):
    codes, scales, shape = random_parts(fmt, rows=4)
    got = golden.element_scale_product(codes, scales, fmt, shape=shape, scale_layout="linear")
    assert same_values(got, by_hand(codes, scales, [1.0] * 4, fmt, shape))


def test_large_mx_values_become_infinite_and_byte_255_nan():
    codes = np.full((1, 32), 0x7B, np.uint8)
    for byte, check in ((254, np.isposinf), (255, np.isnan)):
        scales = np.full((1, 1), byte, np.uint8)
        got = golden.dequantize(
            codes, scales, np.float32(1), MXFP8_E5M2, shape=(1, 32), scale_layout="linear"
        )
        assert check(got).all()


@ALL
@pytest.mark.parametrize("shape", [(0, 96), (3, 0), (0, 0)])
@pytest.mark.parametrize("layout", ["linear", "tcgen"])
def test_empty_arrays_give_empty_values(fmt, shape, layout):
    parts = golden.quantize(np.zeros(shape, np.float32), fmt, scale_layout=layout)
    got = golden.dequantize(*parts, fmt, shape=shape, scale_layout=layout)
    assert got.shape == shape
    assert got.dtype == np.float32


def test_nibbles_are_read_low_first():
    """Sglang issue 23625: swapped nibbles."""
    codes = np.zeros((1, 16), np.uint8)
    codes[0, 0] = 0x72
    got = golden.dequantize(
        codes,
        np.full((1, 1), 127, np.uint8),
        np.float32(1),
        MXFP4,
        shape=(1, 32),
        scale_layout="linear",
    )
    assert got[0, :3].tolist() == [1, 6, 0]
