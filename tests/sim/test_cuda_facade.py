"""What ``cuda`` is in a simulated kernel: scalar functions, shared and local arrays, atomic "
"operations."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4 import sim
from nvfp4.sim import Machine, cuda, facade

WORDS = st.integers(0, 2**32 - 1)


def run(body, grid=1, block=32, *, shared=0, checks=True, schedule="round_robin"):
    Machine("sm_90a", schedule, checks).run(body, grid, block, shared)


@given(WORDS)
def test_bit_functions_on_words(word):
    for value in (word, np.uint32(word), np.uint32(word).view(np.int32)):
        assert cuda.popc(value) == bin(word).count("1")
        assert cuda.clz(value) == 32 - word.bit_length()
        assert cuda.brev(value) == int(f"{word:032b}"[::-1], 2)
        assert cuda.ffs(value) == (f"{word:032b}"[::-1].find("1") + 1)


def test_bit_functions_know_the_width_of_their_operand():
    assert cuda.clz(np.int64(1)) == 63
    assert cuda.clz(np.int32(1)) == 31
    assert cuda.clz(1) == 31
    assert cuda.clz(1 << 40) == 23
    assert cuda.popc(np.int64(-1)) == 64
    assert cuda.popc(np.int32(-1)) == 32
    assert cuda.brev(np.uint64(1)) == 1 << 63
    assert cuda.ffs(np.int32(0)) == 0
    assert cuda.clz(np.int32(0)) == 32


def nearest(value, kind):
    """The value of `kind` that is nearest to an exact number, ties to even: by search."""
    unsigned = {np.float16: np.uint16, np.float32: np.uint32}[kind]
    infinity = int(kind(np.inf).view(unsigned))

    def exact(bits):
        # Where the exponent goes on beyond the largest number stands what rounding makes infinity.
        if bits == infinity:
            return 2 * exact(infinity - 1) - exact(infinity - 2)
        return Fraction(float(unsigned(bits).view(kind)))

    size = min(abs(value), exact(infinity))
    low, high = 0, infinity
    while low < high:
        middle = (low + high + 1) // 2
        if exact(middle) <= size:
            low = middle
        else:
            high = middle - 1
    if low < infinity:
        doubled = 2 * size - exact(low) - exact(low + 1)
        if doubled > 0 or (doubled == 0 and low % 2):
            low += 1
    found = unsigned(low).view(kind)
    return -found if value < 0 else found


@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS, WORDS)
def test_fma_rounds_once(a, b, c):
    for kind, unsigned in ((np.float32, np.uint32), (np.float16, np.uint16)):
        x, y, z = (unsigned(v & (2 ** (8 * kind(0).itemsize) - 1)).view(kind) for v in (a, b, c))
        if not all(np.isfinite(v) for v in (x, y, z)):
            continue
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        got = cuda.fma(x, y, z)
        assert type(got) is kind
        if exact:
            assert got == nearest(exact, kind)
            assert type(cuda.fp16.hfma(x, y, z) if kind is np.float16 else got) is kind
        else:
            assert got == 0


def test_fma_differs_from_a_product_and_a_sum_where_it_must():
    # 1 + 2^-24 + 2^-70: rounding to double first would make a tie of it, and 1 of the tie.
    product = np.float32(24929), np.float32(673 * 2.0**-24)
    assert cuda.fma(*product, np.float32(2.0**-70)) == np.float32(1 + 2**-23)
    assert cuda.fma(*product, np.float32(-(2.0**-70))) == 1
    a = np.float32(1 + 2**-12)
    c = np.float32(-(1 + 2**-11))
    assert a * a + c == 0
    assert cuda.fma(a, a, c) == np.float32(2**-24)
    assert np.isnan(cuda.fma(np.float32(np.inf), np.float32(0), np.float32(1)))
    assert cuda.fma(np.float32(3e38), np.float32(10), np.float32(0)) == np.inf
    assert math.copysign(1, cuda.fma(np.float32(-0.0), np.float32(1), np.float32(-0.0))) == -1
    assert cuda.fma(2.0, 3.0, 4.0) == 10


def test_half_precision_functions_round_to_half_precision():
    fp16 = cuda.fp16
    a, b = np.float16(1), np.float16(2**-11)
    assert fp16.hadd(a, b) == a
    assert fp16.hadd(a, np.float16(3 * 2**-11)) == np.float16(1 + 2**-9)
    assert fp16.hfloor(np.float16(1.5)) == 1
    assert fp16.hceil(np.float16(1.5)) == 2
    assert fp16.hrint(np.float16(2.5)) == 2
    assert fp16.hmax(np.float16(np.nan), a) == a
    assert fp16.hlt(a, np.float16(2))
    assert not fp16.hge(a, np.float16(2))
    assert fp16.hdiv(a, np.float16(0)) == np.inf
    assert fp16.hsqrt(np.float16(2)) == np.float16(math.sqrt(2))
    for name in ("hadd", "hsub", "hmul", "hneg", "habs", "hexp2", "hrcp"):
        arguments = (a, b) if name in ("hadd", "hsub", "hmul") else (a,)
        assert type(getattr(fp16, name)(*arguments)) is np.float16


def test_selp_and_cbrt():
    assert cuda.selp(True, 1, 2) == 1
    assert cuda.selp(False, 1, 2) == 2
    assert cuda.cbrt(np.float64(27)) == 3


@pytest.mark.parametrize("checks", [True, False])
def test_a_shared_array_is_one_for_the_block_and_two_on_a_line_are_two(checks):
    results = []

    def body():
        i = cuda.threadIdx.x
        a, b = cuda.shared.array(32, np.int32), cuda.shared.array(32, np.int32)
        for _ in range(2):
            c = cuda.shared.array((4, 8), np.int32)
        a[i] = i
        b[i] = 2 * i
        c[i // 8, i % 8] = 3 * i
        cuda.syncthreads()
        j = 31 - i
        results.append((int(a[j]), int(b[j]), int(c[j // 8, j % 8]), c.shape))

    run(body, checks=checks)
    assert sorted(results) == [(j, 2 * j, 3 * j, (4, 8)) for j in range(32)]


def test_a_helper_has_one_shared_array_and_an_inlined_one_has_one_for_each_call():
    def helper():
        return cuda.shared.array(1, np.int32)

    same = []

    def body():
        first, second = helper(), helper()
        same.append(first is second)

    run(body, block=1)
    facade.inlined.add(helper.__code__)
    run(body, block=1)
    assert same == [True, False]


@pytest.mark.parametrize("checks", [True, False])
def test_dynamic_shared_memory_is_one_buffer_under_all_names(checks):
    seen = []

    def body():
        words = cuda.shared.array(0, np.uint32)
        halves = cuda.shared.array(shape=0, dtype="uint16")
        words[1] = 0x12345678
        seen.append((len(words), len(halves), int(halves[2]), int(halves[3])))
        block = sim.this_thread().block
        seen.append(block.shared.load(block.shared.base + 4, 4))

    run(body, block=1, shared=18, checks=checks)
    assert seen == [(4, 9, 0x5678, 0x1234), 0x12345678]


def test_slices_and_methods_of_shared_arrays_act_on_the_array():
    seen = []

    def body():
        a = cuda.shared.array((4, 4), np.float32)
        a[:] = 0
        a[1][2] = 5
        a[2, 1:3] = 7
        row = a[2]
        row[0] = 1
        flat = a.reshape(16)
        flat[15] = 9
        a.T[3, 0] = 4
        seen.append(np.array(a).tolist())
        seen.append((a.sum(), len(a), a.ndim, a.dtype, [float(v) for v in row]))
        seen.append((a + 1)[1, 2])
        seen.append(float(a[-1, -1]))

    run(body, block=1)
    assert seen[0] == [[0, 0, 0, 4], [0, 0, 5, 0], [1, 7, 7, 0], [0, 0, 0, 9]]
    assert seen[1] == (33, 4, 2, np.float32, [1, 7, 7, 0])
    assert seen[2:] == [6, 9]


def test_a_slice_beyond_what_is_written_is_an_unwritten_read():
    def body():
        a = cuda.shared.array(8, np.float32)
        a[:5] = 1
        np.sum(a[2:5])
        np.sum(a[2:6])

    with pytest.raises(sim.UnwrittenRead):
        run(body, block=1)


def test_shared_arrays_of_records_work():
    seen = []
    record = np.dtype([("a", np.int32), ("b", np.float32)])

    def body():
        array = cuda.shared.array(4, record)
        array[1].a = 3
        array[1].b = 0.5
        seen.append((int(array[1].a), float(array[1]["b"])))

    run(body, block=1)
    assert seen == [(3, 0.5)]


@pytest.mark.parametrize("checks", [True, False])
def test_local_arrays_are_each_threads_own(checks):
    seen = []

    def body():
        i = cuda.threadIdx.x
        array = cuda.local.array(3, np.int64)
        for k in range(3):
            array[k] = i + k
        cuda.syncthreads()
        seen.append([int(v) for v in array])

    run(body, checks=checks)
    assert sorted(seen) == [[i, i + 1, i + 2] for i in range(32)]


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("schedule", ["round_robin", 4])
def test_atomic_operations_on_arrays_meet_without_loss(checks, schedule):
    olds = []

    def body(out):
        i = cuda.threadIdx.x
        shared = cuda.shared.array(2, np.int32)
        if i == 0:
            shared[0] = 0
            shared[1] = 100
        cuda.syncthreads()
        olds.append(int(cuda.atomic.add(shared, 0, 1)))
        cuda.atomic.min(shared, 1, i)
        cuda.syncthreads()
        if i == 0:
            out.append((int(shared[0]), int(shared[1])))

    out = []
    Machine("sm_90a", schedule, checks).run(body, 2, 64, 0, (out,))
    assert out == [(64, 0)] * 2
    assert sorted(olds) == sorted([*range(64)] * 2)


def test_every_atomic_operation_of_numba_exists():
    def body(array, log):
        atomic = cuda.atomic
        log.append(atomic.sub(array, 0, 3))
        log.append(atomic.exch(array, 0, 12))
        log.append(atomic.and_(array, 0, 10))
        log.append(atomic.or_(array, 0, 5))
        log.append(atomic.xor(array, 0, 1))
        log.append(atomic.max(array, 0, 40))
        log.append(atomic.inc(array, 0, 40))
        log.append(atomic.dec(array, 0, 40))
        log.append(atomic.cas(array, 0, 40, 8))
        log.append(atomic.compare_and_swap(array, 9, 7))
        log.append(atomic.nanmin(array, 0, 2))

    array, log = np.array([10], np.int64), []
    Machine().run(body, 1, 1, 0, (array, log))
    assert [int(v) for v in log] == [10, 7, 12, 8, 13, 12, 40, 0, 40, 8, 8]
    assert array[0] == 2


def test_votes_of_a_block():
    seen = []

    def body():
        i = cuda.threadIdx.x
        seen.append(
            (
                cuda.syncthreads_count(i % 3 == 0),
                cuda.syncthreads_and(i < 95),
                cuda.syncthreads_and(i < 96),
                cuda.syncthreads_or(i == 77),
                cuda.syncthreads_or(i == 96),
            )
        )

    run(body, block=96, schedule=2)
    assert set(seen) == {(32, 0, 1, 1, 0)}
    assert all(type(value) is int for row in seen for value in row)


def test_grid_and_gridsize_have_up_to_three_dimensions():
    seen = set()

    def body():
        seen.add((cuda.grid(1), cuda.grid(2), cuda.grid(3)))
        assert (cuda.gridsize(1), cuda.gridsize(2), cuda.gridsize(3)) == (6, (6, 4), (6, 4, 2))

    Machine().run(body, (2, 2, 1), (3, 2, 2))
    assert seen == {(x, (x, y), (x, y, z)) for x in range(6) for y in range(4) for z in range(2)}

    def wrong():
        cuda.grid(4)

    with pytest.raises(sim.InvalidOperand, match="1, 2 or 3"):
        Machine().run(wrong, 1, 1)


def test_named_barriers_let_producers_run_ahead():
    log = []

    def body():
        thread = sim.this_thread()
        if thread.warp.index == 0:
            thread.barrier(1, 64, kind="arrive")
            log.append("produced")
        else:
            thread.barrier(1, 64)
            log.append("consumed")

    for schedule in ("round_robin", 3):
        log.clear()
        run(body, block=64, schedule=schedule)
        assert sorted(log) == ["consumed"] * 32 + ["produced"] * 32


def test_a_named_barrier_orders_who_arrives_before_who_waits_and_not_the_reverse():
    def body(reverse):
        thread = sim.this_thread()
        block = thread.block
        shared, address = block.shared, block.shared.base + 4 * thread.lane
        arrives = thread.warp.index == 0
        if arrives != reverse:
            shared.store(address, 4, 1)
        thread.barrier(1, 64, kind="arrive" if arrives else "arrive_wait")
        block.state[thread.linear] = "has passed"
        if arrives == reverse:
            # Late enough, but that orders nothing.
            thread.wait_until(lambda: len(block.state) == 64, "the others")
            shared.load(address, 4)

    for schedule in ("round_robin", 1, 2):
        Machine("sm_90a", schedule).run(body, 1, 64, 128, (False,))
        with pytest.raises(sim.DataRace):
            Machine("sm_90a", schedule).run(body, 1, 64, 128, (True,))


def test_a_clock_orders_those_who_release_it_before_those_who_acquire_it():
    def body(acquire):
        thread = sim.this_thread()
        state, shared = thread.block.state, thread.block.shared
        clock = state.setdefault("clock", sim.Clock())
        if thread.linear == 0:
            shared.store(shared.base, 4, 1)
            clock.release(thread)
            state["done"] = True
        if thread.linear == 32:
            thread.wait_until(lambda: "done" in state, "thread 0")
            if acquire:
                clock.acquire(thread)
            shared.load(shared.base, 4)

    Machine().run(body, 1, 64, 4, (True,))
    with pytest.raises(sim.DataRace):
        Machine().run(body, 1, 64, 4, (False,))
