"""Properties 12 and 13: where bytes lie."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nvfp4 import golden, layouts
from props.strategies import FP4_FORMATS, formats, matrices
from props.strategies import layouts as layout_names

rows_ = st.integers(0, 300)
blocks_ = st.integers(0, 14)


@given(rows_, blocks_, st.sampled_from([0x00, 0x7F, 0xFF]), st.integers(0, 999))
def test_deinterleaving_undoes_interleaving_and_ignores_padding(rows, blocks, poison, seed):
    linear = np.random.default_rng(seed).integers(0, 256, (rows, blocks), dtype=np.uint8)
    tcgen = golden.interleave_scales(linear)
    used = golden.interleave_scales(np.ones_like(linear)) == 1
    assert used.sum() == linear.size
    assert not tcgen[~used].any()
    tcgen[~used] = poison
    np.testing.assert_array_equal(golden.deinterleave_scales(tcgen, (rows, blocks)), linear)


@given(st.integers(0, 10_000), st.integers(0, 200), st.integers(0, 60))
def test_three_formulas_of_the_offset_agree(row, block, more):
    k_tiles = layouts.scale_k_tiles(block + 1 + more)
    offset = layouts.tcgen_offset(row, block, k_tiles)
    bits = (block & 3) | (row & 0x60) >> 3 | (row & 0x1F) << 4
    assert offset == ((row >> 7) * k_tiles + (block >> 2)) << 9 | bits
    axes = (row // 128, block // 4, row % 32, row % 128 // 32, block % 4)
    shape = (row // 128 + 1, k_tiles, 32, 4, 4)
    assert offset == np.ravel_multi_index(axes, shape)


@given(st.integers(1, 400), st.integers(1, 20))
def test_offsets_are_a_bijection_on_the_padded_tiles(rows, blocks):
    k_tiles = layouts.scale_k_tiles(blocks)
    shape = (layouts.scale_tiles(rows) * 128, k_tiles * 4)
    offsets = layouts.tcgen_offset(*np.indices(shape), k_tiles)
    np.testing.assert_array_equal(np.sort(offsets, axis=None), np.arange(offsets.size))


@given(st.sampled_from(FP4_FORMATS), st.integers(0, 95), st.integers(0, 15), st.integers(0, 15))
def test_a_column_is_the_low_nibble_if_even_and_changes_no_other(fmt, column, code, rest):
    columns = 96
    codes = np.full((1, columns // 2), rest * 17, np.uint8)
    shift = 4 * (column % 2)
    codes[0, column // 2] = rest * 17 & ~(15 << shift) | code << shift
    one = np.full((1, columns // fmt.block), 0x38 if fmt.scale == "e4m3" else 127, np.uint8)
    values = golden.element_scale_product(
        codes, one, fmt, shape=(1, columns), scale_layout="linear"
    )
    expected = np.full(columns, golden.decode_e2m1(rest))
    expected[column] = golden.decode_e2m1(code)
    assert values[0].tobytes() == expected.tobytes()


@given(st.data(), formats, layout_names)
def test_both_layouts_hold_the_same_scales_and_dequantise_to_the_same_values(data, fmt, layout):
    x = data.draw(matrices(fmt))
    parts = golden.quantize(x, fmt, scale_layout=layout)
    assert parts[1].shape == layouts.scale_shape(fmt, x.shape, layout)
    linear = golden.quantize(x, fmt, scale_layout="linear")
    np.testing.assert_array_equal(parts[0], linear[0])
    got = golden.dequantize(*parts, fmt, shape=x.shape, scale_layout=layout)
    expected = golden.dequantize(*linear, fmt, shape=x.shape, scale_layout="linear")
    assert got.tobytes() == expected.tobytes()
