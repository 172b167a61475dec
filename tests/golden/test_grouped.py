from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from nvfp4 import golden
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, NVFP4
from nvfp4.layouts import allocated_tiles, scale_tiles, tile_starts

ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
SPLITS = [
    [0],
    [0, 0],
    [0, 7],
    [0, 200, 200, 256, 448],
    [0, 0, 0, 129],
    [0, 128, 256],
    [0, 1, 2, 3, 3, 40],
    [0, *np.cumsum([3] * 40)],
    [0, *np.cumsum([0, 5] * 30)],
]


def normal(shape, seed=0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def tiles_of(scales, start, rows):
    return scales[start : start + scale_tiles(rows)]


@ALL
@pytest.mark.parametrize("offsets", SPLITS, ids=str)
def test_each_range_has_the_bytes_of_quantising_it_alone(fmt, offsets):
    rows, groups = offsets[-1], len(offsets) - 1
    x = normal((rows + 3, 96))
    g = np.float32(np.linspace(0.3, 50, max(groups, 1)))
    codes, scales, decode = golden.grouped_quantize(x, fmt, row_offsets=offsets, encode_scale=g)
    assert scales.shape[0] == allocated_tiles(rows + 3, groups)
    left = scales.copy()
    for i, start in enumerate(tile_starts(offsets)):
        own = slice(offsets[i], offsets[i + 1])
        alone = golden.quantize(x[own], fmt, encode_scale=g[i])
        np.testing.assert_array_equal(codes[own], alone[0])
        np.testing.assert_array_equal(tiles_of(scales, start, own.stop - own.start), alone[1])
        tiles_of(left, start, own.stop - own.start)[...] = 0
        assert decode[i] == alone[2]
    assert not left.any()
    assert not codes[rows:].any()
    assert decode.shape == (groups,)


@ALL
def test_linear_scales_stay_with_their_rows(fmt):
    x = normal((50, 96))
    offsets, ids = [0, 10, 30, 45], [2, -1, 0]
    g = np.float32([0.5, 1, 4])
    arguments = {"row_offsets": offsets, "expert_ids": ids, "encode_scale": g}
    codes, scales, decode = golden.grouped_quantize(x, fmt, scale_layout="linear", **arguments)
    expected = np.zeros((50, 96 // fmt.block), np.uint8)
    for i, own in ((2, slice(0, 10)), (0, slice(30, 45))):
        alone = golden.quantize(x[own], fmt, encode_scale=g[i], scale_layout="linear")
        expected[own] = alone[1]
        np.testing.assert_array_equal(codes[own], alone[0])
    np.testing.assert_array_equal(scales, expected, strict=True)
    assert not codes[10:30].any()
    assert not codes[45:].any()
    assert decode[1] == 1


def test_ids_that_are_no_expert_switch_their_range_off():
    x = normal((12, 32))
    g = np.float32([2, 4])
    for off in (-1, -7, 2, 1000):
        codes, scales, decode = golden.grouped_quantize(
            x, NVFP4, row_offsets=[0, 4, 8, 12], expert_ids=[1, off, 0], encode_scale=g
        )
        assert not codes[4:8].any()
        assert not scales[1].any()
        assert decode.tolist() == [0.25, 1, 0.5]
        assert codes[:4].any()
        assert scales[2].any()
    # Without encode scales by expert every id from 0 on is one.
    codes, _, decode = golden.grouped_quantize(
        x, NVFP4, row_offsets=[0, 4, 8, 12], expert_ids=[1, 1000, 0], encode_scale=np.float32(8)
    )
    assert codes[4:8].any()
    assert decode.tolist() == [0.125] * 3


def test_there_may_be_no_experts_where_every_range_is_switched_off():
    codes, scales, decode = golden.grouped_quantize(
        normal((4, 32)), NVFP4, row_offsets=[0, 1, 4], expert_ids=[-1, -1], encode_scale=np.ones(0)
    )
    assert not codes.any() and not scales.any()
    assert decode.tolist() == [1, 1]


def test_a_dead_expert_whose_scale_is_0_harms_nobody():
    x = normal((8, 32))
    g = np.float32([0, 3])
    codes, scales, decode = golden.grouped_quantize(x, NVFP4, row_offsets=[0, 4, 8], encode_scale=g)
    plain = golden.quantize(x[:4], NVFP4)
    np.testing.assert_array_equal(codes[:4], plain[0])
    np.testing.assert_array_equal(scales[:1], plain[1])
    assert decode[0] == 1


@ALL
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_rows_are_gathered_and_an_index_out_of_range_gives_a_zero_row(fmt, dtype):
    x = normal((6, 64), dtype=dtype)
    indices = np.array([5, 0, -1, 6, 2, 2, 1 << 30], np.int32)
    offsets = [0, 3, 6]
    codes, scales, _ = golden.grouped_quantize(x, fmt, row_offsets=offsets, row_indices=indices)
    routed = np.zeros((7, 64), dtype)
    routed[[0, 1, 4, 5]] = x[[5, 0, 2, 2]]
    expected = golden.grouped_quantize(routed, fmt, row_offsets=offsets)
    np.testing.assert_array_equal(codes, expected[0], strict=True)
    np.testing.assert_array_equal(scales, expected[1], strict=True)
    assert not codes[[2, 3, 6]].any()


def test_row_amax_gives_each_routed_row_the_scale_of_its_own():
    x = normal((5, 32)) * np.float32([[1], [10], [0.1], [0], [3]])
    indices = [4, 1, 9, 1, 3, 0]
    arguments = {"row_offsets": [0, 2, 5], "expert_ids": [0, 1], "row_indices": indices}
    codes, scales, decode = golden.grouped_quantize(
        x, NVFP4, encode_scale="row_amax", scale_layout="linear", **arguments
    )
    alone = golden.quantize(x, NVFP4, encode_scale="row_amax", scale_layout="linear")
    for r, source in enumerate([4, 1, None, 1, 3, None]):
        if source is None:
            assert not codes[r].any()
            assert not scales[r].any()
            assert decode[r] == 1
        else:
            np.testing.assert_array_equal(codes[r], alone[0][source])
            np.testing.assert_array_equal(scales[r], alone[1][source])
            assert decode[r] == alone[2][source]
    assert decode.shape == (6, 1)


def test_encode_scales_by_row_belong_to_the_routed_rows():
    x = normal((4, 32))
    g = np.float32([[2], [3], [5], [7]])
    for fmt in (NVFP4, MXFP4):
        codes, scales, decode = golden.grouped_quantize(
            x, fmt, row_offsets=[0, 1, 3], expert_ids=[0, -1], encode_scale=g
        )
        one = golden.quantize(x[:1], fmt, encode_scale=np.float32(2))
        np.testing.assert_array_equal(codes[:1], one[0])
        np.testing.assert_array_equal(scales[:1], one[1])
        assert not codes[1:].any()
        np.testing.assert_array_equal(decode, np.float32([[0.5], [1], [1], [1]]))
    mx8 = golden.grouped_quantize(x, MXFP8_E4M3, row_offsets=[0, 4], encode_scale=g)
    np.testing.assert_array_equal(mx8[2], np.ones((4, 1), np.float32))


def test_the_start_of_each_range_can_be_given():
    x = normal((300, 64))
    offsets = np.array([0, 100, 100, 300])
    # FlashInfer's rule for the first scale row of a range.
    starts = (offsets[:-1] + 127 * np.arange(3)) // 128
    codes, scales, _ = golden.grouped_quantize(x, NVFP4, row_offsets=offsets, tile_starts=starts)
    usual = golden.grouped_quantize(x, NVFP4, row_offsets=offsets)
    np.testing.assert_array_equal(codes, usual[0])
    np.testing.assert_array_equal(tiles_of(scales, starts[2], 200), tiles_of(usual[1], 1, 200))
    values = golden.dequantize(
        codes,
        scales,
        np.ones(3, np.float32),
        NVFP4,
        shape=x.shape,
        scale_layout="tcgen",
        row_offsets=offsets,
        tile_starts=starts,
    )
    plain = golden.quantize(x, NVFP4)
    expected = golden.dequantize(*plain, NVFP4, shape=x.shape, scale_layout="tcgen")
    np.testing.assert_array_equal(values, expected)


def test_a_buffer_of_a_given_size_is_filled_with_zeros_beyond_the_ranges():
    x = normal((3, 64))
    _, scales, _ = golden.grouped_quantize(x, NVFP4, row_offsets=[0, 3], tiles=5)
    assert scales.shape[0] == 5
    assert not scales[1:].any()
    far = golden.grouped_quantize(x, NVFP4, row_offsets=[0, 3], tile_starts=[9])[1]
    assert far.shape[0] == 10
    np.testing.assert_array_equal(far[9], scales[0])
    assert not far[:9].any()


@ALL
@pytest.mark.parametrize("layout", ["tcgen", "linear"])
def test_a_grouped_result_dequantises_to_what_its_ranges_do_and_zero_elsewhere(fmt, layout):
    x = normal((60, 64))
    offsets, ids = [0, 20, 20, 45], [1, 0, 2]
    g = np.float32([3, 5, 7])
    parts = golden.grouped_quantize(
        x, fmt, row_offsets=offsets, expert_ids=ids, encode_scale=g, scale_layout=layout
    )
    got = golden.dequantize(*parts, fmt, shape=x.shape, scale_layout=layout, row_offsets=offsets)
    expected = np.zeros_like(x)
    for own, e in ((slice(0, 20), 1), (slice(20, 45), 2)):
        alone = golden.quantize(x[own], fmt, encode_scale=g[e])
        expected[own] = golden.dequantize(*alone, fmt, shape=x[own].shape, scale_layout="tcgen")
    np.testing.assert_array_equal(got, expected)
    # What lies in rows without a range is not looked at, NaN scales included.
    codes, scales = parts[0].copy(), parts[1].copy()
    codes[45:] = 0x77
    if layout == "linear":
        scales[45:] = 0xFF
    again = golden.dequantize(
        codes, scales, parts[2], fmt, shape=x.shape, scale_layout=layout, row_offsets=offsets
    )
    np.testing.assert_array_equal(again, expected)
    assert not np.signbit(again[45:]).any()
