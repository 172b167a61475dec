"""Each check catches a bug that was put there for it, and says where.

The same kernel without the bug passes.
A row of the table is a kernel whose constant BUG turns the bug on. The line that must be reported
is the one that ends in ``# here``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nvfp4 import sim
from nvfp4.sim import GlobalPointer, Machine, cuda, this_thread

FULL = 0xFFFFFFFF
SCHEDULES = ("round_robin", 1, 2, [1, 3, 2, 5, 1, 0, 4])

#: Is the bug in? Set by the tests, read by the kernels.
BUG = False


@dataclass(frozen=True)
class Plant:
    """A kernel with a bug.

    `thread` is the one that must be named, or None where that depends on the schedule.
    """

    body: Callable[..., Any]
    error: type[sim.Finding]
    words: tuple[str, ...]
    grid: int = 1
    block: int = 64
    shared: int = 0
    thread: tuple[int, int, int] | None = None
    schedules: tuple[Any, ...] = SCHEDULES

    @property
    def id(self) -> str:
        return self.body.__name__


TABLE: list[Plant] = []


def plant(error: type[sim.Finding], *words: str, **options: Any) -> Callable[..., Any]:
    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.append(Plant(body, error, words, **options))
        return body

    return add


def shared() -> Any:
    return this_thread().block.shared


# Bounds and alignment
# ------------------------------------------------------------------------------


@plant(sim.OutOfBounds, "store of 4 bytes at out[1024]", "1024 elements", thread=(63, 0, 0))
def stores_one_element_too_far(x, out):
    i = cuda.threadIdx.x
    out[960 + i + 1 if BUG else i] = 1  # here


@plant(sim.OutOfBounds, "load of 4 bytes at x[-1]", "out of bounds", thread=(0, 0, 0))
def loads_at_a_negative_index(x, out):
    i = cuda.threadIdx.x
    out[i] = x[i - 1 if BUG else i]  # here


@plant(sim.OutOfBounds, "load of 16 bytes at x[1022]", "1024 elements", block=1)
def loads_a_vector_over_the_end(x, out):
    out[0] = x.load(1022 if BUG else 1020, 16) & 1  # here


@plant(sim.Misaligned, "load of 16 bytes at x[2]", "not a multiple of 16", block=1)
def loads_a_vector_that_is_misaligned(x, out):
    out[0] = x.load(2 if BUG else 4, 16) & 1  # here


@plant(sim.OutOfBounds, "store of 4 bytes at 0x500 of shared memory", "256 bytes", shared=256)
def stores_outside_of_shared_memory(x, out):
    i = cuda.threadIdx.x
    shared().store(shared().base + 4 * (i + 1 if BUG else i), 4, i)  # here


@plant(sim.OutOfBounds, "0x0 of shared memory", shared=256, block=1)
def forgets_the_base_of_shared_memory(x, out):
    shared().store(0 if BUG else shared().base, 4, 1)  # here


@plant(sim.Misaligned, "0x402 of shared memory", "not a multiple of 4", shared=256, block=1)
def stores_misaligned_in_shared_memory(x, out):
    shared().store(shared().base + (2 if BUG else 4), 4, 1)  # here


@plant(sim.Misaligned, "load of 8 bytes at 0x404 of shared memory", shared=256, block=1)
def loads_misaligned_from_shared_memory(x, out):
    for word in range(4):
        shared().store(shared().base + 4 * word, 4, word)
    out[0] = shared().load(shared().base + (4 if BUG else 8), 8) & 1  # here


@plant(sim.OutOfBounds, "shared array of test_planted_bugs.py", "[64]", "(64,)")
def indexes_outside_of_a_shared_array(x, out):
    array = cuda.shared.array(64, np.float32)
    i = cuda.threadIdx.x
    array[i + 1 if BUG else i] = np.float32(i)  # here


# Unwritten memory
# ----------------------------------------------------------------------------------


@plant(sim.UnwrittenRead, "unwritten read", "byte 0x43c", shared=256, block=32)
def reads_what_one_lane_did_not_write(x, out):
    i = cuda.threadIdx.x
    if not (BUG and i == 15):
        shared().store(shared().base + 4 * i, 4, i)
    cuda.syncthreads()
    out[i] = shared().load(shared().base + 4 * (i ^ 31), 4)  # here


@plant(sim.UnwrittenRead, "unwritten read", "16 bytes", "byte 0x40e", shared=256, block=1)
def reads_more_bytes_than_were_written(x, out):
    shared().store(shared().base, 8, 1)
    shared().store(shared().base + 8, 4, 1)
    shared().store(shared().base + 12, 2, 1)
    if not BUG:
        shared().store(shared().base + 14, 2, 1)
    out[0] = shared().load(shared().base, 16) & 1  # here


@plant(sim.UnwrittenRead, "unwritten read", "shared array", grid=2, block=32)
def expects_the_shared_memory_of_the_block_before(x, out):
    array = cuda.shared.array(32, np.int32)
    i = cuda.threadIdx.x
    if cuda.blockIdx.x == 0 or not BUG:
        array[i] = i
    out[cuda.grid(1)] = int(array[i])  # here


@plant(sim.UnwrittenRead, "unwritten read", "local array", block=1)
def reads_a_local_array_that_is_not_filled(x, out):
    array = cuda.local.array(4, np.int32)
    for i in range(3 if BUG else 4):
        array[i] = i
    total = 0
    for i in range(4):
        total += int(array[i])  # here
    out[0] = total


# Races
# ---------------------------------------------------------------------------------------------


@plant(
    sim.DataRace, "data race: byte 0x4", "this thread reads what thread (", "wrote at", shared=256
)
def lacks_the_barrier_between_write_and_read(x, out):
    i = cuda.threadIdx.x
    shared().store(shared().base + 4 * i, 4, i)
    if BUG:
        # Late enough in every schedule: it is no matter of luck whether the race is found.
        for _ in range(8):
            this_thread().yield_now()
    else:
        cuda.syncthreads()
    if i >= 32:
        out[i] = shared().load(shared().base + 4 * (i - 32), 4)  # here


@plant(
    sim.DataRace, "data race", "writes what thread", "read at", shared=4, schedules=("round_robin",)
)
def lacks_the_barrier_between_read_and_overwrite(x, out):
    i = cuda.threadIdx.x
    address = shared().base
    if i == 0:
        shared().store(address, 4, 5)
    cuda.syncthreads()
    out[i] = shared().load(address, 4)
    if not BUG:
        cuda.syncthreads()
    if i == 0:
        shared().store(address, 4, 6)  # here


@plant(sim.DataRace, "data race", "writes what thread", "wrote at", shared=4)
def writes_two_values_to_one_place(x, out):
    i = cuda.threadIdx.x
    shared().store(shared().base, 4, i if BUG else 1)  # here


@plant(sim.DataRace, "syncwarp", shared=256, block=32, schedules=("round_robin",))
def lacks_the_syncwarp_between_lanes(x, out):
    i = cuda.threadIdx.x
    shared().store(shared().base + 4 * i, 4, i)
    if BUG:
        # A shuffle makes the lanes meet, and orders no memory.
        cuda.shfl_xor_sync(FULL, i, 1)
    else:
        cuda.syncwarp()
    out[i] = shared().load(shared().base + 4 * (i ^ 1), 4)  # here


@plant(sim.DataRace, "shared array of test_planted_bugs.py", schedules=("round_robin",))
def lacks_a_barrier_in_a_reduction(x, out):
    array = cuda.shared.array(64, np.float32)
    i = cuda.threadIdx.x
    array[i] = x[i]
    cuda.syncthreads()
    half = 32
    while half:
        if i < half:
            array[i] = array[i] + array[i + half]  # here
        if half > 1 and not (BUG and half == 2):
            cuda.syncthreads()
        half //= 2
    if i == 0:
        out[0] = int(array[0])


@plant(sim.DataRace, "4-byte element 0 of out", "of block (", grid=2, block=1)
def two_blocks_write_one_element(x, out):
    out[0 if BUG else cuda.blockIdx.x] = cuda.blockIdx.x + 1  # here


@plant(
    sim.DataRace,
    "element 0 of out",
    "reads what thread",
    "of block",
    grid=2,
    block=1,
    schedules=("round_robin",),
)
def a_block_reads_what_another_writes(x, out):
    if cuda.blockIdx.x == 0:
        out[0] = 5
    elif BUG:
        out[1] = out[0]  # here


@plant(sim.DataRace, "reads what thread", grid=4, block=32, schedules=("round_robin", 3, 4))
def the_last_block_reads_without_a_fence(x, out):
    # Each block leaves a part; the last to finish adds them up.
    last = cuda.shared.array(1, np.int32)
    i = cuda.threadIdx.x
    if i == 0:
        out[1 + cuda.blockIdx.x] = cuda.blockIdx.x
        if not BUG:
            cuda.threadfence()
        last[0] = out.atomic("inc", 0, 100) == 3
    cuda.syncthreads()
    if last[0] and i == 0:
        total = 0
        for block in range(4):
            total += out[1 + block]  # here
        out[9] = total


@plant(sim.DataRace, "reads what thread", grid=2, block=1, schedules=("round_robin",))
def a_flag_is_polled_with_a_plain_load(x, out):
    if cuda.blockIdx.x == 0:
        out[1] = 5
        out.store(0, 4, 1, order="release")
    elif BUG:
        out[2] = out[0]  # here
    else:
        while out.load(0, 4, order="acquire") == 0:
            pass
        out[2] = out[1]


@plant(sim.DataRace, "element 0 of out", grid=3, block=1, schedules=("round_robin",))
def a_block_reads_a_counter_that_others_add_to(x, out):
    if cuda.blockIdx.x < 2:
        out.atomic("add", 0, 1)
    else:
        out[1] = out[0] if BUG else out.load(0, 4, order="relaxed")  # here


@plant(sim.DataRace, "element 0 of out", block=64, schedules=("round_robin",))
def a_counter_is_incremented_without_an_atomic_operation(x, out):
    i = cuda.threadIdx.x
    if BUG:
        value = out[0]  # here
        out[0] = value + 1  # here
    else:
        cuda.atomic.add(out, 0, 1)
    if i == 0:
        out[1] = 1


# Warp operations
# -----------------------------------------------------------------------------------


@plant(sim.WarpMaskError, "lane 5 is not in the mask", block=32, thread=(5, 0, 0))
def calls_a_shuffle_without_being_in_its_mask(x, out):
    i = cuda.threadIdx.x
    mask = FULL ^ (1 << 5) if BUG else FULL
    out[i] = cuda.shfl_up_sync(mask, i, 0)  # here


@plant(sim.WarpMaskError, "lane 31", "never comes", "left the kernel", block=32)
def a_lane_of_the_mask_leaves_before_the_shuffle(x, out):
    i = cuda.threadIdx.x
    if BUG and i == 31:
        return
    out[i] = cuda.shfl_xor_sync(FULL, i, 1)  # here


@plant(
    sim.WarpMaskError, "lane 0 of warp 0", "it waits at test_planted_bugs.py", "barrier 0", block=64
)
def a_lane_of_the_mask_waits_at_a_barrier(x, out):
    i = cuda.threadIdx.x
    if i or not BUG:
        cuda.syncwarp(FULL)  # here
    cuda.syncthreads()


@plant(sim.WarpMaskError, "waits for lane", "which is at test_planted_bugs.py", block=32)
def two_halves_call_different_operations(x, out):
    i = cuda.threadIdx.x
    if i < 16 or not BUG:
        out[i] = cuda.shfl_down_sync(FULL, i, 1)  # here
    else:
        out[i] = cuda.any_sync(FULL, i == 0)  # here


@plant(sim.WarpMaskError, "mask 0x0000ffff", "reads lane 16", block=32)
def reads_a_lane_that_takes_no_part(x, out):
    i = cuda.threadIdx.x
    if i < 16:
        out[i] = cuda.shfl_down_sync(0xFFFF, i, 1 if BUG else 0)  # here


@plant(sim.WarpMaskError, "reads lane 20", block=20)
def reads_a_lane_that_the_block_does_not_have(x, out):
    i = cuda.threadIdx.x
    out[i] = cuda.shfl_sync(FULL, i, 20 if BUG else 19)  # here


# Barriers
# ------------------------------------------------------------------------------------------


@plant(sim.DivergentBarrier, "divergent barrier", "left the kernel", block=32)
def half_a_warp_skips_the_barrier(x, out):
    if cuda.threadIdx.x < 16 or not BUG:
        cuda.syncthreads()  # here


@plant(sim.DivergentBarrier, "divergent barrier", "left the kernel", block=64)
def a_warp_skips_the_barrier(x, out):
    if cuda.threadIdx.x < 32 or not BUG:
        cuda.syncthreads()  # here


@plant(sim.DivergentBarrier, "lane", "at another instruction", block=32)
def two_branches_have_a_barrier_each(x, out):
    if cuda.threadIdx.x % 2 or not BUG:
        cuda.syncthreads()  # here
    else:
        cuda.syncthreads()  # here


@plant(sim.DivergentBarrier, "at another instruction", block=32)
def continues_past_the_condition_of_a_loop(x, out):
    # As numba issue 9770, which hangs on a card: Python, and so Numba, makes two copies of the
    # condition.
    go_on = True
    while cuda.syncthreads_or(go_on):  # here
        go_on = False
        if cuda.threadIdx.x == 0 and BUG:
            continue
        out[cuda.threadIdx.x] = 1


@plant(sim.DivergentBarrier, "arrives at barrier", "of the same warp waits at", block=64)
def lanes_of_a_warp_wait_at_different_barriers(x, out):
    # Both barriers get their 32 threads, so that nothing else would stop this.
    i = cuda.threadIdx.x
    number = i % 2 if BUG else i // 32
    this_thread().barrier(1 + number, 32)  # here


@plant(sim.DivergentBarrier, "arrives for 32 threads", block=96, schedules=("round_robin",))
def threads_disagree_about_the_count(x, out):
    i = cuda.threadIdx.x
    if i < 64:
        this_thread().barrier(1, 64 if i < 32 or not BUG else 32)  # here


@plant(sim.DivergentBarrier, "barrier 3", "reached by 32 of 64", block=64)
def the_other_half_never_comes_to_a_named_barrier(x, out):
    if cuda.threadIdx.x < 32 or not BUG:
        this_thread().barrier(3, 64)  # here


@plant(sim.InvalidOperand, "multiple of 32", "got 40", block=64)
def a_barrier_counts_no_whole_warps(x, out):
    this_thread().barrier(1, 40 if BUG else 64)  # here


@plant(sim.InvalidOperand, "0 to 15", "got 16", block=32)
def a_barrier_that_does_not_exist(x, out):
    this_thread().barrier(16 if BUG else 15, 32)  # here


# Standstill
# ----------------------------------------------------------------------------------------


@plant(
    sim.Deadlock,
    "deadlock",
    "the flag",
    "warp 0 lane 0",
    "warp 1 lanes 0-31",
    "barrier 0",
    block=64,
)
def waits_for_what_nobody_does(x, out):
    i = cuda.threadIdx.x
    if i == 0 and BUG:
        this_thread().wait_until(lambda: False, "the flag")  # here
    cuda.syncthreads()


@plant(sim.Deadlock, "deadlock", "door a", "door b", block=64)
def two_warps_wait_for_one_another(x, out):
    i = cuda.threadIdx.x
    doors = this_thread().block.state
    mine, other = ("a", "b") if i < 32 else ("b", "a")
    if not BUG:
        doors[mine] = True
    this_thread().wait_until(lambda: other in doors, f"door {other}")  # here
    doors[mine] = True


@plant(sim.Livelock, "livelock", "polled", block=2)
def polls_for_what_nobody_does(x, out):
    while out.load(0, 4, order="relaxed") == 0:  # here
        if not BUG:
            out.atomic("exch", 0, 1)


# Other
# ---------------------------------------------------------------------------------------------


@plant(sim.Trap, "trap", block=1)
def traps(x, out):
    if BUG:
        this_thread().trap()  # here


@plant(sim.InvalidOperand, "u32*", "float", block=1)
def stores_a_float_into_integers(x, out):
    out[0] = np.float32(1) if BUG else 1  # here


@plant(sim.InvalidOperand, "compile-time", block=2)
def declares_a_shared_array_by_a_value(x, out):
    cuda.shared.array(4 + (cuda.threadIdx.x if BUG else 0), np.int32)  # here


@plant(sim.InvalidOperand, "49152", block=1)
def declares_too_much_shared_memory(x, out):
    cuda.shared.array(12289 if BUG else 12288, np.float32)  # here


def run(row: Plant, schedule: Any) -> np.ndarray:
    x = np.arange(1024, dtype=np.uint32)
    out = np.zeros(1024, np.uint32)
    machine = Machine("sm_90a", schedule)
    machine.spin_limit = 200
    # The kernel and its arrays' alignment are the same in every run.
    aligned = np.zeros(1024 + 4, np.uint32)
    start = (-aligned.ctypes.data // 4) % 4
    aligned = aligned[start : start + 1024]
    aligned[:] = x
    arguments = GlobalPointer(aligned, "u32", "x"), GlobalPointer(out, "u32", "out")
    machine.run(row.body, row.grid, row.block, row.shared, arguments)
    return out


@pytest.fixture
def bug(monkeypatch):
    def put(value: bool) -> None:
        monkeypatch.setattr(inspect.getmodule(bug_here), "BUG", value)

    return put


def bug_here() -> None:
    """Only names this module."""


def cases() -> list[Any]:
    return [
        pytest.param(row, schedule, id=f"{row.id}-{schedule}")
        for row in TABLE
        for schedule in row.schedules
    ]


@pytest.mark.parametrize(("row", "schedule"), cases())
def test_the_bug_is_reported_with_its_line(row, schedule, bug):
    bug(True)
    with pytest.raises(row.error) as caught:
        run(row, schedule)
    error = caught.value
    text = str(error)
    for word in row.words:
        assert word in text
    assert type(error) is row.error
    assert error.kernel == row.id
    assert error.file == __file__
    lines, first = inspect.getsourcelines(row.body)
    here = [first + offset for offset, line in enumerate(lines) if line.rstrip().endswith("# here")]
    if here:
        assert error.line in here
    assert f"{__file__}:{error.line}" in text
    assert error.block is not None
    assert error.thread is not None
    if row.thread is not None:
        assert error.thread == row.thread


@pytest.mark.parametrize(("row", "schedule"), cases())
def test_the_kernel_without_the_bug_passes(row, schedule, bug):
    bug(False)
    run(row, schedule)


def test_addresses_and_buffers_are_attributes_of_what_has_them(bug):
    bug(True)
    rows = {row.id: row for row in TABLE}
    with pytest.raises(sim.OutOfBounds) as caught:
        run(rows["stores_outside_of_shared_memory"], "round_robin")
    assert (caught.value.address, caught.value.buffer) == (0x500, "shared memory")
    with pytest.raises(sim.OutOfBounds) as caught:
        run(rows["loads_at_a_negative_index"], "round_robin")
    assert caught.value.buffer == "x"
    assert caught.value.address is not None
    assert f"{caught.value.address:#x}" in str(caught.value)


def test_without_checks_bounds_masks_and_deadlocks_are_still_reported(bug):
    bug(True)
    always = (sim.OutOfBounds, sim.Misaligned, sim.WarpMaskError, sim.Deadlock, sim.InvalidOperand)
    for row in TABLE:
        if row.error not in always or "shared array" in str(row.words):
            continue
        machine = Machine("sm_90a", "round_robin", False)
        machine.spin_limit = 200
        x, out = np.zeros(1024, np.uint32), np.zeros(1024, np.uint32)
        arguments = GlobalPointer(x, "u32", "x"), GlobalPointer(out, "u32", "out")
        with pytest.raises(row.error):
            machine.run(row.body, row.grid, row.block, row.shared, arguments)


def test_an_early_return_before_a_barrier_is_allowed_without_the_barrier_check():
    def body(out):
        i = cuda.threadIdx.x
        if i >= 40:
            return
        cuda.syncthreads()
        out[i] = 1

    out = np.zeros(64, np.uint32)
    Machine(checks=["unwritten", "races"]).run(body, 1, 64, 0, (GlobalPointer(out, "u32", "out"),))
    assert out.tolist() == [1] * 40 + [0] * 24
    with pytest.raises(sim.DivergentBarrier):
        Machine().run(body, 1, 64, 0, (GlobalPointer(out, "u32", "out"),))


def test_an_error_of_python_says_where_and_keeps_its_type():
    def helper(value):
        return 1 // value

    def body():
        helper(cuda.threadIdx.x - 3)

    with pytest.raises(ZeroDivisionError) as caught:
        Machine().run(body, 1, 8)
    (note,) = caught.value.__notes__
    assert f"{__file__}:{helper.__code__.co_firstlineno + 1} in helper" in note
    assert "thread (3, 0, 0)" in note


def test_a_helpers_line_is_reported_and_a_models_is_not():
    @sim.model
    def a_model(pointer):
        return pointer[2000]

    def helper(pointer):
        return a_model(pointer)

    def body(pointer):
        helper(pointer)

    with pytest.raises(sim.OutOfBounds) as caught:
        Machine().run(body, 1, 1, 0, (GlobalPointer(np.zeros(4, np.uint8), "u8", "p"),))
    assert caught.value.function == "helper"
    assert caught.value.line == helper.__code__.co_firstlineno + 1


def test_after_an_error_the_machine_runs_the_next_kernel(bug):
    bug(True)
    rows = {row.id: row for row in TABLE}
    machine = Machine()
    out = np.zeros(64, np.uint32)
    pointer = GlobalPointer(out, "u32", "out")
    with pytest.raises(sim.Deadlock):
        machine.run(rows["waits_for_what_nobody_does"].body, 1, 64, 0, (pointer, pointer))

    def body(out):
        cuda.syncthreads()
        out[cuda.threadIdx.x] = 3

    machine.run(body, 1, 64, 0, (pointer,))
    assert out.tolist() == [3] * 64


def test_findings_survive_pickling(bug):
    import pickle

    bug(True)
    with pytest.raises(sim.DivergentBarrier) as caught:
        run({row.id: row for row in TABLE}["half_a_warp_skips_the_barrier"], "round_robin")
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is sim.DivergentBarrier
    assert str(again) == str(caught.value)
    assert again.line == caught.value.line
