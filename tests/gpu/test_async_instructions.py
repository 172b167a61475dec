"""The small kernels of ``async_kernels`` compute on the card what they do on the simulator."""

import numpy as np
import pytest

from nvfp4.driver import current_device, device_info
from nvfp4.ptx.tensor_map import TensorMap, encode, encode_on_card
from tests.ptx import async_checks as checks
from tests.ptx import async_kernels as kernels
from tests.ptx.test_async_kernels import WGMMA_COLUMNS

cp = pytest.importorskip("cupy")


@pytest.fixture
def place():
    return checks.Place(cp.asarray, lambda array: array.data.ptr, encode_on_card, cp.asnumpy)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_a_ring_of_bulk_copies_moves_every_word_once(place, stages, steps):
    checks.check_bulk_ring(place, stages, steps)


@pytest.mark.parametrize("valid", [512, 333, 256, 3, 1])
def test_cp_async_copies_and_fills_with_zeros(place, valid):
    checks.check_copy_lines(place, valid)


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("x, y", [(4, 2), (-4, -2), (32, 10), (-40, 0), (0, 21)])
def test_a_tensor_copy_swizzles_fills_and_clips(place, swizzle, x, y):
    checks.check_tensor_tile(place, swizzle, x, y)


@pytest.mark.parametrize("rank", [1, 3, 4, 5])
def test_tensor_copies_of_every_rank(place, rank):
    checks.check_ranks(place, rank)


@pytest.mark.parametrize("kind", kernels.KINDS)
def test_a_warps_product_equals_numpys(place, kind):
    checks.check_warp_product(place, kind)


def test_ldmatrix_gives_lanes_rows_and_with_trans_columns(place):
    checks.check_load_matrices(place)


def test_stmatrix_puts_every_row_where_its_lane_says(place):
    checks.check_store_matrices(place)


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("columns", WGMMA_COLUMNS)
def test_a_warpgroups_product_equals_numpys(place, kind, columns):
    checks.check_group_product(place, kind, columns)


@pytest.mark.parametrize("swizzle", [32, 64])
@pytest.mark.parametrize("kind", kernels.KINDS)
def test_a_warpgroups_product_of_narrower_atoms(place, kind, swizzle):
    checks.check_group_product(place, kind, 64, swizzle)


@pytest.mark.parametrize("kind", kernels.KINDS)
@pytest.mark.parametrize("columns", [8, 24, 128, 256])
def test_a_warpgroups_product_with_a_in_registers_equals_numpys(place, kind, columns):
    checks.check_group_product_registers(place, kind, columns)


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_a_group_of_products_equals_numpys(place, kind):
    checks.check_group_product_registers(place, kind, 24, groups=True)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("first", [0, 16])
def test_sums_are_stored_as_rows_of_16_bits(place, kind, first):
    checks.check_rows_of_sums(place, kind, first)


def test_a_pipeline_of_wgmma_groups_waits_for_all_but_the_last(place):
    checks.check_pipeline(place)


def test_the_drivers_maps_have_the_fields_that_ours_have():
    """Where a driver puts what; should one change, only the simulator's maps stay as they are."""
    for tensor in (
        TensorMap(0x1000_0000, "bf16", (7168, 4096), (14336,), (64, 128), 128),
        TensorMap(0x2000_0000, "u8", (640, 33, 5), (640, 640 * 33), (32, 8, 4), 32),
        TensorMap(0x2000_0000, "f32", (640, 33, 5), (2560, 2560 * 33), (16, 8, 4), 64),
    ):
        ours, drivers = (np.frombuffer(make(tensor), np.uint8) for make in (encode, encode_on_card))
        assert np.array_equal(ours[:8], drivers[:8])
        rank = len(tensor.shape)
        assert np.array_equal(ours[12 : 12 + 4 * (rank - 1)], drivers[12 : 12 + 4 * (rank - 1)])
        assert np.array_equal(ours[32 : 32 + 4 * rank], drivers[32 : 32 + 4 * rank])
        assert np.array_equal(ours[55 : 55 + rank], drivers[55 : 55 + rank])


def test_this_is_a_card_that_has_all_of_it():
    assert device_info(current_device()).cc == (9, 0)
