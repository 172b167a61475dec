"""setmaxnreg: registers are those of the block, and an inc waits until there are enough."""

from __future__ import annotations

from typing import Any

import pytest

from nvfp4 import launch, sim
from nvfp4._numba import cuda as of_the_card
from nvfp4.program import Kernel
from nvfp4.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait_parity,
)
from nvfp4.ptx.memory import shared_base
from nvfp4.ptx.wgmma import setmaxnreg_dec, setmaxnreg_inc
from nvfp4.sim import Machine, cuda
from nvfp4.sim.registers import at_launch

SCHEDULES = ("round_robin", 1, 2, 3, [2, 1, 2, 5, 1, 0, 4])

#: Registers that the producers and each of the two groups of consumers ask for: of 3 x 168.
FITS, EXCEEDS = (56, 224), (64, 224)


def specialised(producers: int, consumers: int, patient: bool = False) -> Any:
    """A kernel of two warpgroups that take and a third that gives, first or when they all wait."""

    def body() -> None:
        bar, i = shared_base(), cuda.threadIdx.x
        if patient:
            if i == 0:
                mbarrier_init(bar, 256)
                fence_mbarrier_init()
            cuda.syncthreads()
        if i >= 256:
            if patient:
                mbarrier_wait_parity(bar, 0)
            setmaxnreg_dec(producers)
        else:
            if patient:
                mbarrier_arrive(bar)
            setmaxnreg_inc(consumers)  # inc

    return body


def run(
    body: Any, block: int = 384, bounds: tuple[int, int] = (384, 1), schedule: Any = "round_robin"
) -> None:
    Machine("sm_90a", schedule).run(body, 1, block, 64, launch_bounds=bounds)


# Waiting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patient", [False, True], ids=["at-once", "late"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_what_fits_the_block_runs_whatever_the_order(schedule, patient):
    run(specialised(*FITS, patient), schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_an_inc_beyond_the_pool_is_a_deadlock_with_its_numbers(schedule):
    with pytest.raises(sim.Deadlock) as caught:
        run(specialised(*EXCEEDS), schedule=schedule)
    text = str(caught.value)
    # 168 - 64 are in the pool, 56 go to the one that comes first, 48 are left for the other.
    waits = [line for line in text.splitlines() if "waits for 56 more registers a thread" in line]
    last = 0 if "for warpgroup 0, which has 168 and wants 224" in text else 1
    assert len(waits) == 4
    for warp, line in enumerate(waits, 4 * last):
        assert f"warp {warp} lanes 0-31: at test_registers.py:{line_of_inc()} " in line
        assert f"for warpgroup {last}, which has 168 and wants 224 (setmaxnreg.inc)" in line
        assert f"the block's pool has 48, warpgroup {1 - last} holds 224" in line
        assert "warpgroup 2 holds 64, and each was launched with 168" in line
        assert "launch bounds: blocks of 384 threads, 1 a multiprocessor" in line
    assert caught.value.line == line_of_inc()


def line_of_inc() -> int:
    with open(__file__) as source:
        return next(at for at, line in enumerate(source, 1) if line.endswith("# inc\n"))


def test_two_blocks_a_multiprocessor_have_half_each():
    run(specialised(48, 96), bounds=(384, 2))
    with pytest.raises(sim.Deadlock, match=r"each was launched with 80 \("):
        run(specialised(56, 96), bounds=(384, 2))


def test_the_bounds_are_those_of_the_program():
    def body() -> None:
        if of_the_card.threadIdx.x >= 256:
            setmaxnreg_dec(56)
        else:
            setmaxnreg_inc(MORE)

    kernel = Kernel("specialised", body, (), {"MORE": (), "BLOCKS_PER_SM": ()}, threads=384)

    def start(more: int, blocks: int) -> None:
        program = kernel.program(MORE=more, BLOCKS_PER_SM=blocks)
        launch.run([launch.Launch(program, 1, 384, 0, ())], {}, machine=Machine("sm_90a"))

    for blocks, more in ((1, 224), (2, 88)):
        start(more, blocks)
        with pytest.raises(sim.Deadlock, match=f"wants {more + 8} "):
            start(more + 8, blocks)


MORE = 0


def test_registers_that_come_back_are_given_again():
    def body() -> None:
        group = cuda.threadIdx.x // 128
        if group == 2:
            setmaxnreg_dec(56)
        for turn in range(2):
            if group == turn:
                setmaxnreg_inc(256)
                cuda.syncthreads()
                setmaxnreg_dec(168)
            else:
                cuda.syncthreads()
            cuda.syncthreads()

    for schedule in SCHEDULES:
        run(body, schedule=schedule)


# At launch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threads", "blocks", "registers"),
    [
        (384, 1, 168), (384, 2, 80), (384, 3, 56), (512, 1, 128), (512, 2, 64), (128, 5, 96),
        (1024, 1, 64), (1024, 2, 32), (128, 1, 256), (256, 1, 256),
        # Warps that do not share out evenly over the quarters of a multiprocessor.
        (288, 1, 168), (288, 2, 96), (192, 2, 168), (416, 1, 128), (96, 7, 80),
    ],
)  # fmt: skip
def test_registers_at_launch_are_those_that_the_assembler_gives(threads, blocks, registers):
    assert at_launch(threads, blocks) == registers


# The wrong way ------------------------------------------------------------------------------------


def report(body: Any, **options: Any) -> str:
    with pytest.raises(sim.RegisterPoolError) as caught:
        run(body, **options)
    return str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_dec_to_more_and_an_inc_to_less_are_undefined(schedule):
    text = report(specialised(176, 224), schedule=schedule)
    assert "setmaxnreg.dec to 176 in a warpgroup that has 168 registers a thread" in text

    def falls() -> None:
        setmaxnreg_dec(120)
        cuda.syncthreads()
        setmaxnreg_inc(104)

    text = report(falls, schedule=schedule)
    assert "setmaxnreg.inc to 104 in a warpgroup that has 120 registers a thread" in text


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_first_inc_to_less_than_the_bounds_allow_is_wrong_where_another_asks_for_more(schedule):
    # Where none does, the assembler launches with no more than that.
    def body(low: int, high: int) -> None:
        setmaxnreg_inc(low) if cuda.threadIdx.x < 128 else setmaxnreg_inc(high)

    run(lambda: body(160, 160), schedule=schedule)
    text = report(lambda: body(152, 160), schedule=schedule)
    assert "setmaxnreg.inc to 152 in a warpgroup that has 160 registers a thread" in text


@pytest.mark.parametrize("bounds", [(0, 0), (0, 1), (384, 0)])
def test_without_launch_bounds_the_instruction_is_reported(bounds):
    assert "does not state its launch bounds" in report(specialised(*FITS), bounds=bounds)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_all_warps_of_a_warpgroup_execute_the_same_one_after_the_other(schedule):
    def differ() -> None:
        setmaxnreg_dec(64 if cuda.threadIdx.x < 96 else 56)

    assert "all four execute the same" in report(differ, schedule=schedule)

    def one_stays_away() -> None:
        if cuda.threadIdx.x >= 32:
            setmaxnreg_dec(56)

    text = report(one_stays_away, schedule=schedule)
    assert "3 of the 4 warps of warpgroup 0 have executed it" in text

    def hurried() -> None:
        if cuda.threadIdx.x < 32:
            setmaxnreg_dec(64)
            setmaxnreg_dec(56)
        cuda.syncthreads()

    assert "they must meet between two" in report(hurried, schedule=schedule)


def test_lanes_that_do_not_come_and_warps_that_make_no_warpgroup_are_reported():
    def some_lanes() -> None:
        if cuda.threadIdx.x % 32:
            setmaxnreg_dec(56)

    with pytest.raises(sim.WarpMaskError, match=r"setmaxnreg\.dec to 56"):
        run(some_lanes)
    with pytest.raises(sim.InvalidOperand, match="the block ends before"):
        run(lambda: setmaxnreg_dec(56), block=320)
