from __future__ import annotations

import numpy as np
import pytest

from nvfp4 import golden, layouts
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, NVFP4

SHAPES = [(1, 1), (1, 4), (31, 3), (32, 4), (33, 5), (127, 6), (128, 8), (129, 7), (300, 13)]


def offset_by_bits(row: int, block: int, k_tiles: int) -> int:
    """The same offset from the bits of row and block: bits 0-1 b, 2-3 row 5-6, 4-8 row 0-4."""
    low = (block & 3) | (row & 0x60) >> 3 | (row & 0x1F) << 4
    return ((row >> 7) * k_tiles + (block >> 2)) << 9 | low


@pytest.mark.parametrize(
    ("row", "block", "offset"), [(37, 6, 598), (127, 11, 1535), (128, 0, 1536), (200, 5, 2185)]
)
def test_the_offsets_of_the_definition_are_met(row, block, offset):
    assert layouts.tcgen_offset(row, block, 3) == offset


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_the_offset_is_a_bijection_on_the_padded_tiles_and_three_formulas_agree(rows, blocks):
    k_tiles = layouts.scale_k_tiles(blocks)
    all_rows, all_blocks = layouts.scale_tiles(rows) * 128, k_tiles * 4
    r, b = np.meshgrid(np.arange(all_rows), np.arange(all_blocks), indexing="ij")
    offsets = layouts.tcgen_offset(r, b, k_tiles)
    assert sorted(offsets.ravel()) == list(range(all_rows * all_blocks))
    by_bits = [[offset_by_bits(i, j, k_tiles) for j in range(all_blocks)] for i in range(all_rows)]
    np.testing.assert_array_equal(offsets, by_bits)
    # The five axes of the tile buffer, as a reader of the layout indexes them.
    shape = (all_rows // 128, k_tiles, 32, 4, 4)
    axes = (r // 128, b // 4, r % 32, r % 128 // 32, b % 4)
    np.testing.assert_array_equal(offsets, np.ravel_multi_index(axes, shape))


@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_interleaving_puts_each_byte_at_its_offset_and_zero_everywhere_else(rows, blocks):
    linear = np.random.default_rng(rows).integers(1, 256, (rows, blocks), dtype=np.uint8)
    got = golden.interleave_scales(linear)
    expected = np.zeros(got.size, np.uint8)
    k_tiles = layouts.scale_k_tiles(blocks)
    for r in range(rows):
        for b in range(blocks):
            expected[layouts.tcgen_offset(r, b, k_tiles)] = linear[r, b]
    assert got.shape == (layouts.scale_tiles(rows), k_tiles, 32, 4, 4)
    np.testing.assert_array_equal(got.ravel(), expected)


@pytest.mark.parametrize(("rows", "blocks"), [*SHAPES, (0, 3), (5, 0)])
def test_deinterleaving_is_the_inverse_whatever_the_padding_holds(rows, blocks):
    linear = np.random.default_rng(rows).integers(0, 256, (rows, blocks), dtype=np.uint8)
    tcgen = golden.interleave_scales(linear)
    used = golden.interleave_scales(np.ones_like(linear)) == 1
    for poison in (0x00, 0x7F, 0xFF):
        poisoned = np.where(used, tcgen, np.uint8(poison))
        back = golden.deinterleave_scales(poisoned, (rows, blocks))
        np.testing.assert_array_equal(back, linear, strict=True)


def test_a_leading_axis_lays_out_each_matrix_by_itself():
    linear = np.random.default_rng(0).integers(0, 256, (3, 130, 5), dtype=np.uint8)
    stacked = golden.interleave_scales(linear)
    np.testing.assert_array_equal(
        stacked, np.stack([golden.interleave_scales(one) for one in linear]), strict=True
    )
    np.testing.assert_array_equal(golden.deinterleave_scales(stacked, (130, 5)), linear)


def test_shapes_of_codes_and_scales_follow_from_the_logical_shape():
    assert layouts.codes_shape(NVFP4, (2, 3, 64)) == (2, 3, 32)
    assert layouts.codes_shape(MXFP8_E4M3, (7, 64)) == (7, 64)
    assert layouts.scale_shape(NVFP4, (2, 3, 80), "linear") == (2, 3, 5)
    assert layouts.scale_shape(NVFP4, (129, 80), "tcgen") == (2, 2, 32, 4, 4)
    assert layouts.scale_shape(MXFP4, (5, 0, 2880), "tcgen") == (5, 0, 23, 32, 4, 4)
    assert layouts.scale_shape(MXFP4, (32,), "linear") == (1,)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_a_partial_block_is_refused_with_the_multiple_in_the_message(fmt):
    for columns in (1, fmt.block - 1, fmt.block + 1, 5 * fmt.block // 2):
        for call in (
            lambda k=columns: layouts.codes_shape(fmt, (4, k)),
            lambda k=columns: layouts.scale_shape(fmt, (4, k), "linear"),
            lambda k=columns: layouts.block_count(fmt, k),
        ):
            with pytest.raises(ValueError, match=f"multiple of {fmt.block}.*got K = {columns}"):
                call()


def test_wrong_layouts_and_axes_are_refused_by_name():
    with pytest.raises(ValueError, match="'linear', 'tcgen', 'sm90'; got 'swizzled'"):
        layouts.scale_shape(NVFP4, (4, 16), "swizzled")
    for shape in ((16,), (2, 3, 4, 16)):
        with pytest.raises(ValueError, match=r"\[M, K\] or \[E, M, K\]"):
            layouts.scale_shape(NVFP4, shape, "tcgen")
    with pytest.raises(ValueError, match="at least one axis"):
        layouts.codes_shape(NVFP4, ())


def test_tiles_of_ranges_start_afresh():
    assert layouts.tile_starts([0, 200, 200, 256, 448]).tolist() == [0, 2, 2, 3]
    assert layouts.tile_starts([0]).tolist() == []
    assert layouts.tile_starts([0, 0, 0]).tolist() == [0, 0]
    assert layouts.tile_starts(np.array([0, 1, 129], np.int32)).dtype == np.int32


def test_the_allocation_suffices_for_any_split_of_the_rows():
    rng = np.random.default_rng(0)
    for _ in range(300):
        groups, rows = int(rng.integers(0, 9)), int(rng.integers(0, 700))
        cuts = np.sort(rng.integers(0, rows + 1, max(groups - 1, 0)))
        offsets = [0] if groups == 0 else [0, *cuts, rows]
        used = sum(layouts.scale_tiles(n) for n in np.diff(offsets))
        assert used <= layouts.allocated_tiles(rows, groups)
    assert layouts.allocated_tiles(0, 7) == 0
    assert layouts.allocated_tiles(3, 60) == 4
