"""Warp operations give what the card gives, for every mask whose lanes come."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4 import sim
from nvfp4.sim import Machine, cuda, this_thread

FULL = 0xFFFFFFFF


def on_lanes(function, *, block=32, schedule="round_robin"):
    """function(lane) on each lane of a block; lane -> result."""
    results = {}

    def body():
        lane = this_thread().linear
        results[lane] = function(lane)

    Machine("sm_90a", schedule).run(body, 1, block)
    return [results[lane] for lane in sorted(results)]


def test_shuffles_move_values_between_lanes():
    lanes = range(32)
    value = [100 + lane for lane in lanes]
    assert on_lanes(lambda i: cuda.shfl_sync(FULL, value[i], 5)) == [105] * 32
    assert on_lanes(lambda i: cuda.shfl_sync(FULL, value[i], i * 3)) == [
        value[i * 3 % 32] for i in lanes
    ]
    assert on_lanes(lambda i: cuda.shfl_up_sync(FULL, value[i], 4)) == [
        value[i - 4] if i >= 4 else value[i] for i in lanes
    ]
    assert on_lanes(lambda i: cuda.shfl_down_sync(FULL, value[i], 4)) == [
        value[i + 4] if i + 4 < 32 else value[i] for i in lanes
    ]
    for mask in (1, 2, 4, 8, 16, 31):
        assert on_lanes(lambda i, m=mask: cuda.shfl_xor_sync(FULL, value[i], m)) == [
            value[i ^ mask] for i in lanes
        ]


def test_values_keep_their_type_and_bits():
    sent = np.uint32(0x7FC12345).view(np.float32)
    received = on_lanes(lambda i: cuda.shfl_sync(FULL, sent if i == 3 else np.float32(i), 3))
    assert {type(value) for value in received} == {np.float32}
    assert {int(value.view(np.uint32)) for value in received} == {0x7FC12345}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, FULL), st.integers(0, FULL), st.integers(0, 20))
def test_votes_count_the_lanes_of_the_mask_only(mask, true, seed):
    def votes(i):
        if not mask >> i & 1:
            return None
        condition = true >> i & 1
        return (
            cuda.ballot_sync(mask, condition),
            cuda.any_sync(mask, condition),
            cuda.all_sync(mask, condition),
            cuda.eq_sync(mask, condition),
        )

    both = mask & true
    expected = both, both != 0, both == mask, both in (0, mask)
    for i, result in enumerate(on_lanes(votes, schedule=seed)):
        assert result == (expected if mask >> i & 1 else None)


def test_match_finds_the_lanes_with_the_same_value():
    def same(i):
        return sum(1 << lane for lane in range(32) if lane % 5 == i % 5)

    assert on_lanes(lambda i: cuda.match_any_sync(FULL, i % 5)) == [same(i) for i in range(32)]
    assert on_lanes(lambda i: cuda.match_all_sync(FULL, 7)) == [(FULL, True)] * 32
    assert on_lanes(lambda i: cuda.match_all_sync(FULL, i // 31)) == [(0, False)] * 32
    # Floats are compared by their bits.
    zeros = np.float32(0.0), np.float32(-0.0)
    assert on_lanes(lambda i: cuda.match_any_sync(FULL, zeros[i % 2]))[:2] == [
        0x55555555,
        0xAAAAAAAA,
    ]


def test_each_warp_is_on_its_own():
    assert (
        on_lanes(lambda i: cuda.shfl_sync(FULL, i, 0), block=96) == [0] * 32 + [32] * 32 + [64] * 32
    )


def test_lanes_beyond_the_end_of_a_block_are_left_out():
    assert on_lanes(lambda i: cuda.ballot_sync(FULL, 1), block=40)[32:] == [0xFF] * 8
    assert on_lanes(lambda i: cuda.shfl_xor_sync(FULL, i, 1), block=2) == [1, 0]


def test_two_masks_of_a_warp_do_not_disturb_one_another():
    def halves(i):
        mask = 0xFFFF if i < 16 else 0xFFFF0000
        first = cuda.shfl_xor_sync(mask, i, 1)
        return cuda.ballot_sync(FULL, first % 2)

    for schedule in ("round_robin", 1, 2, [5, 1, 3]):
        assert on_lanes(halves, schedule=schedule) == [0x55555555] * 32


def test_a_result_is_made_once_for_all_lanes():
    calls = []

    def resolve(payloads):
        calls.append(dict(payloads))
        return dict.fromkeys(payloads, len(calls))

    assert (
        on_lanes(lambda i: this_thread().collective("op", FULL, i, resolve), schedule=3) == [1] * 32
    )
    assert calls == [{lane: lane for lane in range(32)}]
    assert list(calls[0]) == list(range(32))


def test_activemask_names_the_lanes_that_are_there_together():
    def masks(i):
        everybody = cuda.activemask()
        if i % 3 == 0:
            return everybody, cuda.activemask()
        cuda.syncwarp(sum(1 << lane for lane in range(32) if lane % 3))
        return everybody, None

    third = sum(1 << lane for lane in range(0, 32, 3))
    for schedule in ("round_robin", 1):
        result = on_lanes(masks, schedule=schedule)
        assert result == [(FULL, third if i % 3 == 0 else None) for i in range(32)]


def test_activemask_waits_for_lanes_that_are_only_late():
    def masks(i):
        if i % 2:
            this_thread().yield_now()
        return cuda.activemask()

    assert on_lanes(masks) == [FULL] * 32


def test_lanemask_lt_is_the_lanes_below():
    assert on_lanes(lambda i: cuda.lanemask_lt()) == [(1 << i) - 1 for i in range(32)]


def test_syncwarp_orders_memory_for_its_lanes_only():
    def body(mask):
        shared = this_thread().block.shared
        i = this_thread().lane
        shared.store(shared.base + 4 * i, 4, i)
        cuda.syncwarp(mask if i < 16 else FULL ^ mask)
        return shared.load(shared.base + 4 * (i ^ 1), 4)

    results = []
    Machine().run(lambda: results.append(body(0xFFFF)), 1, 32, 128)
    assert sorted(results) == list(range(32))

    def across(mask):
        shared = this_thread().block.shared
        i = this_thread().lane
        shared.store(shared.base + 4 * i, 4, i)
        cuda.syncwarp(mask if i < 16 else FULL ^ mask)
        return shared.load(shared.base + 4 * (i ^ 16), 4)

    with pytest.raises((sim.DataRace, sim.UnwrittenRead)):
        Machine().run(lambda: across(0xFFFF), 1, 32, 128)


@pytest.mark.parametrize("name", ["shfl_sync", "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync"])
def test_a_reduction_by_shuffles_gives_the_sum(name):
    def total(i):
        value = i
        for delta in (16, 8, 4, 2, 1):
            if name == "shfl_xor_sync":
                value += cuda.shfl_xor_sync(FULL, value, delta)
            elif name == "shfl_sync":
                value += cuda.shfl_sync(FULL, value, i + delta)
            elif name == "shfl_down_sync":
                value += cuda.shfl_down_sync(FULL, value, delta)
            else:
                value += cuda.shfl_up_sync(FULL, value, delta)
        return value

    place = 31 if name == "shfl_up_sync" else 0
    assert on_lanes(total, schedule=11)[place] == 496
