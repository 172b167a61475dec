"""Who runs when: the same schedule gives the same run, and another one another order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nvfp4
from nvfp4 import sim
from nvfp4.sim import GlobalPointer, Machine, cuda


def order_of(schedule, *, grid=1, block=128, checks=False):
    """The order in which the warps of a kernel with two barriers pass three places."""
    seen = []

    def body():
        thread = sim.this_thread()
        for place in range(3):
            if thread.lane == 0:
                seen.append((thread.block.block_index.x, thread.warp.index, place))
            cuda.syncthreads()

    Machine("sm_90a", schedule, checks).run(body, grid, block)
    return seen


def test_round_robin_runs_warps_and_blocks_in_order():
    expected = [(block, warp, place) for block in (0, 1) for place in range(3) for warp in range(4)]
    # The last to come goes straight on, so the places after a barrier begin with the last warp.
    order = order_of("round_robin", grid=2)
    assert sorted(order) == sorted(expected)
    assert order[:4] == [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0)]
    assert [block for block, _, _ in order] == [0] * 12 + [1] * 12


@pytest.mark.parametrize("schedule", ["round_robin", 0, 7, [3, 1, 4, 1, 5, 9, 2, 6]], ids=str)
def test_one_schedule_gives_one_order(schedule):
    assert order_of(schedule, grid=3) == order_of(schedule, grid=3)


def test_seeds_differ_from_one_another_and_from_round_robin():
    orders = {tuple(order_of(seed, grid=3)) for seed in (0, 1, 2, "round_robin")}
    assert len(orders) == 4


def test_checks_do_not_change_the_order():
    assert order_of(5, grid=3, checks=True) == order_of(5, grid=3)


def test_a_given_schedule_chooses_the_warp():
    assert [warp for _, warp, place in order_of([2, 0, 1]) if place == 0] == [2, 0, 3, 1]


def test_a_given_schedule_of_nothing_is_round_robin_within_a_block():
    assert order_of([]) == order_of("round_robin")
    assert order_of([0, 0, 0, 0]) == order_of("round_robin")


def test_an_odd_multiple_reverses_the_lanes_of_a_turn():
    seen = []

    def body():
        seen.append(sim.this_thread().linear)

    Machine("sm_90a", [2, 0]).run(body, 1, 64)
    assert seen == [*range(31, -1, -1), *range(32, 64)]


def test_a_function_chooses():
    counts = []

    def last(count):
        counts.append(count)
        return count - 1

    assert [warp for _, warp, place in order_of(last) if place == 0] == [3, 2, 1, 0]
    assert counts[:3] == [4, 3, 2]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 63), max_size=12))
def test_every_schedule_gives_the_sums_that_round_robin_gives(schedule):
    def body(x, out):
        shared = cuda.shared.array(64, np.float32)
        i = cuda.threadIdx.x
        shared[i] = x[cuda.grid(1)]
        cuda.syncthreads()
        half = 32
        while half:
            if i < half:
                shared[i] = shared[i] + shared[i + half]
            cuda.syncthreads()
            half //= 2
        if i == 0:
            out[cuda.blockIdx.x] = shared[0]

    x = np.arange(128, dtype=np.float32)
    out = np.full(2, np.nan, np.float32)
    with nvfp4.simulate(schedule=schedule) as machine:
        arguments = GlobalPointer(x, "f32", "x"), GlobalPointer(out, "f32", "out")
        machine.run(body, 2, 64, 0, arguments)
    assert out.tolist() == [2016.0, 6112.0]


def test_hypothesis_finds_and_shrinks_the_interleaving_that_fails():
    import hypothesis

    def body(out):
        # Wrong: warp 1 must not run before warp 0, and nothing says so.
        thread = sim.this_thread()
        if thread.linear == 0:
            out[0] = 1
        if thread.linear == 32:
            out[1] = out[0]

    def fails(schedule):
        out = np.zeros(2, np.uint32)
        Machine("sm_90a", schedule, False).run(body, 1, 96, 0, (GlobalPointer(out, "u32", "out"),))
        return out[1] != 1

    schedules = st.lists(st.integers(0, 63), max_size=8)
    quiet = hypothesis.settings(database=None, derandomize=True, max_examples=200)
    assert hypothesis.find(schedules, fails, settings=quiet) == [1]
    assert not fails([])


def test_wait_until_goes_on_when_its_condition_holds():
    log = []

    def body():
        thread = sim.this_thread()
        if thread.linear == 0:
            thread.wait_until(lambda: len(log) == 31, "the log")
        log.append(thread.linear)

    Machine().run(body, 1, 32)
    assert log == [*range(1, 32), 0]


def test_yield_now_lets_the_others_run():
    log = []

    def body():
        thread = sim.this_thread()
        log.append((thread.linear, "a"))
        thread.yield_now()
        log.append((thread.linear, "b"))

    Machine().run(body, 1, 2)
    assert log == [(0, "a"), (1, "a"), (0, "b"), (1, "b")]


def test_a_loop_that_polls_with_atomics_does_not_starve_the_others():
    def body(flag, out):
        if cuda.threadIdx.x == 0:
            while flag.atomic("add", 0, 0) == 0:
                pass
            out[0] = 1
        if cuda.threadIdx.x == 40:
            flag.atomic("exch", 0, 1)

    flag, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    Machine().run(body, 1, 64, 0, (GlobalPointer(flag, "u32"), GlobalPointer(out, "u32")))
    assert out[0] == 1


def test_a_block_is_brought_in_when_all_others_wait_for_it():
    def body(flag, out):
        if cuda.blockIdx.x == 0:
            while flag.load(0, 4, order="acquire") < 3:
                sim.this_thread().yield_now()
            out[0] = 7
        else:
            flag.atomic("add", 0, 1)

    flag, out = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    for schedule in ("round_robin", 0, [1, 1]):
        flag[:] = out[:] = 0
        machine = Machine("sm_90a", schedule)
        machine.spin_limit = 100
        machine.run(body, 4, 1, 0, (GlobalPointer(flag, "u32"), GlobalPointer(out, "u32")))
        assert out[0] == 7

    def waiting(flag, out):
        if cuda.blockIdx.x == 0:
            sim.this_thread().wait_until(lambda: flag.array[0] == 3, "three blocks")
            out[0] = 7
        else:
            flag.atomic("add", 0, 1)

    flag[:] = out[:] = 0
    Machine().run(waiting, 4, 1, 0, (GlobalPointer(flag, "u32"), GlobalPointer(out, "u32")))
    assert out[0] == 7


def test_asynchronous_operations_complete_at_the_latest_moment_in_round_robin():
    log = []

    def body():
        thread = sim.this_thread()
        done = []
        if thread.linear == 0:
            thread.machine.issue("copy", lambda: (log.append("copied"), done.append(1)))
            log.append("issued")
            thread.wait_until(lambda: bool(done), "the copy")
            log.append("waited")
        else:
            log.append(thread.linear)

    Machine().run(body, 1, 34)
    assert log == ["issued", *range(1, 34), "copied", "waited"]


def test_a_thread_whose_condition_holds_goes_first_and_an_operation_after_it():
    log = []

    def body():
        thread = sim.this_thread()
        state = thread.block.state
        if thread.linear == 0:
            thread.wait_until(lambda: "set" in state, "thread 32")
            log.append("woken")
        else:
            thread.machine.issue("copy", lambda: log.append("copied"))
            state["set"] = True
            cuda.syncthreads()

    Machine(checks=False).run(body, 1, (2, 1, 1))
    assert log == ["woken", "copied"]


def test_a_loop_that_polls_does_not_keep_operations_from_completing():
    def body():
        thread = sim.this_thread()
        done = thread.block.state
        if thread.linear == 0:
            thread.machine.issue("copy", lambda: done.setdefault("copied", True))
        while "copied" not in done:
            thread.yield_now()

    for schedule in ("round_robin", 0, [0, 0, 0]):
        machine = Machine("sm_90a", schedule)
        machine.spin_limit = 100
        machine.run(body, 1, 64)


def test_a_schedule_may_complete_an_operation_early_and_engines_keep_their_order():
    def order(schedule):
        log = []

        def body():
            thread = sim.this_thread()
            if thread.linear == 0:
                for number in range(2):
                    thread.machine.issue("copy", lambda n=number: log.append(f"a{n}"), engine="a")
                thread.machine.issue("other", lambda: log.append("b"), engine="b")
            cuda.syncthreads()
            if thread.linear == 0:
                log.append("end")

        Machine("sm_90a", schedule).run(body, 1, 64)
        return log

    assert order("round_robin") == ["end", "a0", "a1", "b"]
    # After warp 0's turn: warp 1, the first of engine a, the first of engine b.
    assert order([0, 1, 2]) == ["a0", "b", "end", "a1"]
    for seed in range(20):
        log = order(seed)
        assert sorted(log) == ["a0", "a1", "b", "end"]
        assert log.index("a0") < log.index("a1")


def test_grid_sync_waits_for_blocks_that_are_not_resident_yet():
    def body(x, out):
        i = cuda.grid(1)
        x[i] = i
        cuda.cg.this_grid().sync()
        out[i] = x[cuda.gridsize(1) - 1 - i]

    x, out = np.zeros(96, np.uint32), np.zeros(96, np.uint32)
    for schedule in ("round_robin", 1):
        out[:] = 0
        arguments = GlobalPointer(x, "u32", "x"), GlobalPointer(out, "u32", "out")
        Machine("sm_90a", schedule).run(body, 3, 32, 0, arguments)
        assert out.tolist() == list(range(95, -1, -1))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"arch": "sm_12"}, ValueError),
        ({"arch": "hopper"}, ValueError),
        ({"arch": 90}, ValueError),
        ({"schedule": "random"}, ValueError),
        ({"schedule": [1, -1]}, ValueError),
        ({"schedule": [1, "x"]}, TypeError),
        ({"schedule": None}, TypeError),
        ({"schedule": 1.5}, TypeError),
        ({"checks": "everything"}, ValueError),
        ({"checks": ["races", "luck"]}, ValueError),
    ],
    ids=str,
)
def test_simulate_refuses_what_it_does_not_know(options, error):
    with pytest.raises(error, match=next(iter(options))), nvfp4.simulate(**options):
        pass


@pytest.mark.parametrize(
    ("launch", "error", "words"),
    [
        (dict(grid=0, block=32), ValueError, "grid"),
        (dict(grid=(1, 1, 1, 1), block=32), ValueError, "grid"),
        (dict(grid=1, block=1025), ValueError, "1024"),
        (dict(grid=1, block=(1, 1, 65)), ValueError, "64 in z"),
        (dict(grid=1, block=32, shared_bytes=232449), ValueError, "232448"),
        (dict(grid=1, block=32, cluster=(2, 1, 1)), ValueError, "cluster"),
        (dict(grid=2, block=32, cluster=(1, 2, 1)), nvfp4.UnsupportedError, "cluster"),
    ],
    ids=str,
)
def test_run_refuses_launches_that_no_card_takes(launch, error, words):
    with pytest.raises(error, match=words):
        Machine().run(lambda: None, **launch)


def test_the_machine_is_that_of_the_innermost_simulate_and_of_the_running_thread():
    assert sim.current_machine() is None
    found = []
    with nvfp4.simulate("sm_90a") as outer:
        with nvfp4.simulate("sm_100a") as inner:
            assert sim.current_machine() is inner
            outer.run(lambda: found.append(sim.current_machine()), 1, 1)
            assert inner.cc == (10, 0)
        assert sim.current_machine() is outer
    assert found == [outer]
    assert sim.current_machine() is None


def test_a_kernel_cannot_launch_a_kernel():
    machine = Machine()
    with pytest.raises(RuntimeError, match="cannot launch"):
        machine.run(lambda: machine.run(lambda: None, 1, 1), 1, 1)
    machine.run(lambda: None, 1, 1)


def test_outside_of_a_kernel_there_is_no_thread():
    with pytest.raises(RuntimeError, match="no simulated kernel"):
        sim.this_thread()
    with pytest.raises(RuntimeError, match="no simulated kernel"):
        _ = cuda.threadIdx


def test_indices_and_extents_are_those_of_the_launch():
    seen = []

    def body():
        thread = sim.this_thread()
        at = cuda.threadIdx, cuda.blockIdx, cuda.blockDim, cuda.gridDim
        seen.append((*map(tuple, at), thread.linear, thread.lane, thread.warp.index))

    Machine().run(body, (2, 1, 2), (5, 2, 4))
    assert len(seen) == 160
    for place, (thread, block, block_dim, grid_dim, linear, lane, warp) in enumerate(sorted(seen)):
        del place
        assert block_dim == (5, 2, 4)
        assert grid_dim == (2, 1, 2)
        assert linear == thread[0] + 5 * (thread[1] + 2 * thread[2])
        assert (warp, lane) == divmod(linear, 32)
        assert block in {(x, 0, z) for x in range(2) for z in range(2)}
    assert len(set(seen)) == 160


def test_numpys_warnings_about_arithmetic_are_silent_in_kernels_and_unchanged_outside():
    out = []

    def body():
        out.append(np.float32(3e38) * np.float32(10))
        out.append(np.uint8(255) + np.uint8(1))

    with np.errstate(all="raise"):
        Machine().run(body, 1, 1)
        assert np.geterr()["over"] == "raise"
    assert out == [np.inf, 0]
