"""Warp operations and barriers on the simulated machine."""

import numpy as np
import pytest

from nvfp4.ptx import control, memory, warp
from nvfp4.sim import DivergentBarrier, Finding, GlobalPointer, Machine, WarpMaskError, this_thread

FULL = 0xFFFFFFFF


def lanes(function, threads: int = 32, schedule="round_robin") -> dict[int, object]:
    """The value that each thread computes, by number."""
    got = {}

    def body():
        thread = this_thread()
        got[thread.linear] = function(thread.linear)

    Machine("sm_90a", schedule).run(body, 1, threads)
    return got


def test_a_lane_knows_its_number():
    assert lanes(lambda i: warp.lane_id(), 70) == {i: i % 32 for i in range(70)}


@pytest.mark.parametrize("schedule", ["round_robin", 1, 2])
@pytest.mark.parametrize("kind", ["u32", "f32"])
def test_shuffles_read_the_lane_they_name(kind, schedule):
    make = (lambda i: 1000 + i) if kind == "u32" else (lambda i: np.float32(0.5 + i))

    def shuffled(name, operand):
        instruction = getattr(warp, f"shfl_{name}_{kind}")
        return lanes(lambda i: instruction(FULL, make(i), operand(i)), schedule=schedule)

    each = range(32)
    assert shuffled("idx", lambda i: 5) == {i: make(5) for i in each}
    assert shuffled("idx", lambda i: 31 - i) == {i: make(31 - i) for i in each}
    assert shuffled("idx", lambda i: 33) == {i: make(1) for i in each}
    assert shuffled("xor", lambda i: 3) == {i: make(i ^ 3) for i in each}
    assert shuffled("up", lambda i: 2) == {i: make(i - 2 if i >= 2 else i) for i in each}
    assert shuffled("down", lambda i: 4) == {i: make(i + 4 if i < 28 else i) for i in each}
    assert type(shuffled("xor", lambda i: 1)[0]) is (int if kind == "u32" else np.float32)


def test_shuffles_work_inside_of_a_mask_and_by_warp():
    def halves(i):
        mask = 0xFFFF if i % 32 < 16 else 0xFFFF0000
        return warp.shfl_xor_u32(mask, i, 8)

    assert lanes(halves, 64) == {i: i ^ 8 for i in range(64)}


def test_reading_a_lane_outside_of_the_mask_is_an_error():
    with pytest.raises(WarpMaskError, match="lane 0 reads lane 16"):
        lanes(lambda i: warp.shfl_xor_u32(0xFFFF, i, 16) if i < 16 else 0)


def test_a_lane_that_never_comes_is_an_error():
    with pytest.raises(Finding):
        lanes(lambda i: warp.shfl_xor_u32(FULL, i, 1) if i else 0)


def test_votes_and_ballots_count_the_lanes_of_the_mask():
    assert set(lanes(lambda i: warp.vote_any(FULL, i == 7)).values()) == {True}
    assert set(lanes(lambda i: warp.vote_any(FULL, i == 32)).values()) == {False}
    assert set(lanes(lambda i: warp.vote_all(FULL, i < 32)).values()) == {True}
    assert set(lanes(lambda i: warp.vote_all(FULL, i != 31)).values()) == {False}
    assert set(lanes(lambda i: warp.ballot(FULL, i % 3 == 0)).values()) == {
        sum(1 << i for i in range(0, 32, 3))
    }
    even = lanes(lambda i: warp.ballot(0x55555555, i > 9) if i % 2 == 0 else None)
    assert even[0] == 0x55555555 & ~0x3FF and even[1] is None


def test_match_names_the_lanes_with_the_same_value():
    got = lanes(lambda i: warp.match_any_u32(FULL, i % 5))
    assert got == {i: sum(1 << j for j in range(32) if j % 5 == i % 5) for i in range(32)}


def test_one_lane_is_elected_and_it_is_the_lowest():
    assert lanes(lambda i: warp.elect(FULL)) == {i: i == 0 for i in range(32)}
    some = lanes(lambda i: warp.elect(0xF0) if 4 <= i < 8 else None)
    assert [some[i] for i in range(3, 9)] == [None, True, False, False, False, None]


REDUCTIONS = {
    "redux_add_u32": (lambda i: 0xF0000000 + i, lambda values: sum(values) & FULL),
    "redux_min_u32": (lambda i: (i - 3) & FULL, min),
    "redux_max_u32": (lambda i: (i - 3) & FULL, max),
    "redux_add_i32": (lambda i: i - 20, sum),
    "redux_min_i32": (lambda i: i - 20, min),
    "redux_max_i32": (lambda i: i - 20, max),
    "redux_and": (lambda i: FULL ^ (1 << i % 8), lambda values: 0xFFFFFF00),
    "redux_or": (lambda i: 1 << i % 8, lambda values: 0xFF),
    "redux_xor": (lambda i: 1 << i % 31, lambda values: FULL >> 1 & ~1),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_go_over_the_lanes_of_the_mask(name):
    make, reduce = REDUCTIONS[name]
    instruction = getattr(warp, name)
    assert set(lanes(lambda i: instruction(FULL, make(i))).values()) == {
        reduce([make(i) for i in range(32)])
    }
    if name.startswith("redux_add"):
        upper = lanes(lambda i: instruction(0xFFFF0000, make(i)) if i >= 16 else None)
        assert upper[31] == reduce([make(i) for i in range(16, 32)])


def test_an_active_mask_has_the_lane_itself():
    assert all(mask >> i & 1 for i, mask in lanes(lambda i: warp.activemask()).items())


# Barriers ----------------------------------------------------------------------------------------


def test_a_barrier_orders_memory_between_warps():
    out = np.zeros(96, np.uint32)

    def body(p):
        i, base = this_thread().linear, memory.shared_base()
        memory.st_shared_u32(base + 4 * i, i * i)
        control.bar_sync(1, 96)
        p[i] = memory.ld_shared_u32(base + 4 * ((i + 40) % 96))

    Machine("sm_90a").run(body, 1, 96, 384, (GlobalPointer(out, "u32"),))
    assert out.tolist() == [((i + 40) % 96) ** 2 for i in range(96)]


def test_a_warp_can_arrive_without_waiting():
    order = []

    def body():
        thread = this_thread()
        if thread.linear < 32:
            # If this waited, the other warp would never leave its first barrier.
            control.bar_arrive(2, 64)
            control.bar_sync(1, 64)
        else:
            control.bar_sync(1, 64)
            control.bar_sync(2, 64)
            if thread.linear == 32:
                order.append("past")

    Machine("sm_90a").run(body, 1, 64)
    assert order == ["past"]


def test_a_barrier_that_too_few_reach_is_an_error():
    with pytest.raises(DivergentBarrier):
        lanes(lambda i: control.bar_sync(1, 64) if i < 32 else None, 64)


def test_launch_control_and_sleeping_change_nothing_and_trap_stops():
    def quiet(i):
        control.griddepcontrol_wait()
        control.griddepcontrol_launch_dependents()
        control.nanosleep(100)
        return i

    assert lanes(quiet) == {i: i for i in range(32)}
    with pytest.raises(Finding, match="trap"):
        lanes(lambda i: control.trap() if i == 5 else None)
