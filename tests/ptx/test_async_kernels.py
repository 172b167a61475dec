"""The small kernels of ``async_kernels`` compute on the simulated machine what NumPy does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4 import sim
from nvfp4.ptx.tensor_map import TensorMap, decode, encode, swizzled
from nvfp4.ptx.wgmma import wgmma_descriptor
from nvfp4.sim import Machine
from tests.ptx import async_checks as checks
from tests.ptx import async_kernels as kernels

SCHEDULES = ("round_robin", 1, 2, 3, [1, 3, 2, 5, 1, 0, 4])
WGMMA_COLUMNS = (8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)

schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=str)


def place(schedule="round_robin", checked=True):
    return checks.simulated(Machine("sm_90a", schedule, checked))


@schedules
@pytest.mark.parametrize("stages", [1, 3, 4])
def test_a_ring_of_bulk_copies_moves_every_word_once(schedule, stages):
    checks.check_bulk_ring(place(schedule), stages)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=60))
def test_a_ring_of_bulk_copies_works_in_any_interleaving(numbers):
    checks.check_bulk_ring(place(numbers), 2, 3)


@schedules
@pytest.mark.parametrize("valid", [512, 333, 256, 3, 1])
def test_cp_async_copies_and_fills_with_zeros(schedule, valid):
    checks.check_copy_lines(place(schedule), valid)


@schedules
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("x, y", [(4, 2), (-4, -2), (32, 10), (-40, 0), (0, 21)])
def test_a_tensor_copy_swizzles_fills_and_clips(schedule, swizzle, x, y):
    checks.check_tensor_tile(place(schedule), swizzle, x, y)


@pytest.mark.parametrize("rank", [1, 3, 4, 5])
def test_tensor_copies_of_every_rank(rank):
    checks.check_ranks(place(), rank)


@schedules
@pytest.mark.parametrize("kind", kernels.KINDS)
def test_a_warps_product_equals_numpys(schedule, kind):
    checks.check_warp_product(place(schedule), kind)


def test_ldmatrix_gives_lanes_rows_and_with_trans_columns():
    checks.check_load_matrices(place())


@schedules
def test_stmatrix_puts_every_row_where_its_lane_says(schedule):
    checks.check_store_matrices(place(schedule))


@schedules
@pytest.mark.parametrize("kind", kernels.KINDS)
def test_a_warpgroups_product_equals_numpys(schedule, kind):
    checks.check_group_product(place(schedule), kind, 24)


@pytest.mark.parametrize("columns", WGMMA_COLUMNS)
def test_a_warpgroups_product_of_every_width(columns):
    checks.check_group_product(place(checked=False), "bf16", columns)


@pytest.mark.parametrize("swizzle", [32, 64])
def test_a_warpgroups_product_of_narrower_atoms(swizzle):
    checks.check_group_product(place(), "f16", 16, swizzle)


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=str)
@pytest.mark.parametrize("kind", kernels.KINDS)
def test_a_warpgroups_product_with_a_in_registers_equals_numpys(schedule, kind):
    checks.check_group_product_registers(place(schedule), kind, 16)


@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
def test_a_group_of_products_equals_numpys(kind):
    checks.check_group_product_registers(place(), kind, 24, groups=True)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("first", [0, 16])
def test_sums_are_stored_as_rows_of_16_bits(kind, first):
    checks.check_rows_of_sums(place(), kind, first)


def test_a_pipeline_of_wgmma_groups_waits_for_all_but_the_last():
    checks.check_pipeline(place(1))
    checks.check_pipeline(place())


def test_a_timeline_shows_copies_and_products():
    machine = Machine("sm_90a", trace=True)
    checks.check_group_product(checks.simulated(machine), "bf16", 8)
    names = {event[2] for event in machine.trace.events}
    assert {"tensor load", "wgmma m64n8k16 bf16"} <= names


# Tensor maps and descriptors ---------------------------------------------------------------------


def test_a_map_says_what_was_encoded():
    for tensor in (
        TensorMap(0x7F00_1234_5670, "bf16", (7168, 65536), (14336,), (64, 128), 128),
        TensorMap(
            16, "u8", (1 << 32, 3, 2, 5, 7), (1 << 32, 1 << 36, (1 << 40) - 16, 0), (256,) * 5
        ),
        TensorMap(0, "f32", (9,), (), (4,), 0),
    ):
        data = encode(tensor)
        assert len(data) == 128
        assert decode(data) == tensor


def test_the_address_and_the_first_word_are_where_the_hardware_has_them():
    data = encode(TensorMap(0x1000, "bf16", (100, 50), (208,), (64, 8), 128))
    assert int.from_bytes(data[:8], "little") == 0x1000
    assert int.from_bytes(data[8:12], "little") == 1 << 4 | 10 << 7 | 3 << 13
    assert int.from_bytes(data[12:16], "little") == 208 >> 4
    assert np.frombuffer(data[32:40], np.uint32).tolist() == [99, 49]
    assert list(data[55:57]) == [63, 7]


def test_bytes_that_are_no_map_are_refused():
    good = encode(TensorMap(0, "f32", (9,), (), (4,), 0))
    for data in (bytes(128), good[:127], good[:127] + b"x", good[:8] + b"\xff" + good[9:]):
        with pytest.raises(sim.InvalidDescriptor):
            decode(data)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"element": "f8"}, "`element` must be one of u8, u16"),
        ({"swizzle": 96}, "`swizzle` must be one of 128, 64, 32, 0; got 96"),
        ({"address": 8}, "`address` must be a multiple of 16; got 0x8"),
        ({"shape": (0, 8)}, "`shape` must be of extents from 1 to 2"),
        ({"strides": (24,)}, "`strides` must be multiples of 16"),
        ({"strides": ()}, "a stride for each but the innermost"),
        ({"box": (64, 257)}, "`box` must be of extents from 1 to 256"),
        ({"box": (32, 8)}, "the innermost extent of `box` must be 128 bytes; got 64"),
        ({"box": (4, 8), "swizzle": 0}, "must be a multiple of 16 bytes; got 8"),
    ],
)
def test_a_maps_rules_are_errors_that_say_them(change, message):
    arguments = {
        "address": 0,
        "element": "bf16",
        "shape": (256, 8),
        "strides": (512,),
        "box": (64, 8),
        "swizzle": 128,
    }
    TensorMap(**arguments)
    with pytest.raises(ValueError, match=message.replace("(", "\\(")):
        TensorMap(**arguments | change)


def test_a_swizzle_moves_16_byte_chunks_within_a_row():
    for width in (32, 64, 128):
        atom = np.array([swizzled(at, width) for at in range(8 * width)])
        assert sorted(atom) == list(range(8 * width))
        assert (atom // width == np.arange(8 * width) // width).all()
        assert (atom % 16 == np.arange(8 * width) % 16).all()
    # 128 bytes: chunk c of row r goes to chunk c ^ r.
    for row in range(8):
        for chunk in range(8):
            assert swizzled(0x400 + 128 * row + 16 * chunk, 128) == (
                0x400 + 128 * row + 16 * (chunk ^ row)
            )


def test_descriptors_have_the_documented_bits():
    assert wgmma_descriptor(0x1000, 128, 16, 1024) == 0x4000004000010100
    assert wgmma_descriptor(0x1000, 64, 0, 512) & (1 << 64) - 1 == 0x8000002000000100
    assert wgmma_descriptor(0x400, 32, 16, 256) & (1 << 64) - 1 == 0xC000001000010040
    assert wgmma_descriptor(0x400, 0, 128, 256) == 0x0000001000080040
    with pytest.raises(ValueError, match="swizzle must be one of 128, 64, 32, 0; got 16"):
        wgmma_descriptor(0, 16, 0, 0)
