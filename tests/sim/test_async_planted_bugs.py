"""Each check of asynchronous operations catches a bug that was put there for it, and says where.

As ``test_planted_bugs``: a row is a kernel whose constant BUG turns the bug on, the line to be
reported ends in ``# here``, and the same kernel without the bug passes, under every schedule.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nvfp4 import sim
from nvfp4.errors import UnsupportedError
from nvfp4.ptx.bulk import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    bulk_wait_group,
    bulk_wait_group_read,
    cp_async_16,
    cp_async_arrive,
    cp_async_commit_group,
    cp_async_wait_group,
)
from nvfp4.ptx.mbarrier import (
    fence_mbarrier_init,
    fence_proxy_async_global,
    fence_proxy_async_shared,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_inval,
    mbarrier_test_wait_parity,
    mbarrier_try_wait_parity,
    mbarrier_wait_parity,
)
from nvfp4.ptx.memory import ld_shared_u32, ptr_address, shared_base, st_shared_u32
from nvfp4.ptx.mma import ldmatrix_x4, mma_m16n8k16_bf16
from nvfp4.ptx.tensor_map import TensorMap, encode
from nvfp4.ptx.tma import (
    fence_tensormap_acquire,
    tma_load_1d,
    tma_load_2d,
    tma_store_2d,
)
from nvfp4.ptx.wgmma import (
    setmaxnreg_inc,
    wgmma_commit_group,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_keep,
    wgmma_rs_bf16,
    wgmma_ss_bf16,
    wgmma_wait,
    wgmma_wait_group,
    wgmma_zeros,
)
from nvfp4.sim import GlobalPointer, Machine, cuda
from tests.ptx.async_checks import aligned

SCHEDULES = ("round_robin", 1, 2, [1, 3, 2, 5, 1, 0, 4])

#: Is the bug in? Set by the tests, read by the kernels.
BUG = False


@dataclass(frozen=True)
class Plant:
    """A kernel with a bug.

    `located` is False where no thread's line is to blame, which then depends on the schedule too.
    """

    body: Callable[..., Any]
    error: type[sim.Finding]
    words: tuple[str, ...]
    block: int = 64
    shared: int = 4096
    located: bool = True
    arch: str = "sm_90a"

    @property
    def id(self) -> str:
        return self.body.__name__


TABLE: list[Plant] = []


def plant(error: type[sim.Finding], *words: str, **options: Any) -> Callable[..., Any]:
    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.append(Plant(body, error, words, **options))
        return body

    return add


def begin(count: int = 1) -> tuple[int, int, int]:
    """An mbarrier of `count` arrivals, seen by all; its address, that of data, and the thread."""
    bar = shared_base()
    if cuda.threadIdx.x == 0:
        mbarrier_init(bar, count)
        fence_mbarrier_init()
    cuda.syncthreads()
    return bar, bar + 1024, cuda.threadIdx.x


def load(x: Any, bar: int, data: int, count: int = 256) -> None:
    """Thread 0 copies bytes of x to shared memory."""
    if cuda.threadIdx.x == 0:
        mbarrier_arrive_expect_tx(bar, count)
        bulk_load(data, ptr_address(x, 0), count, bar)


# mbarriers ---------------------------------------------------------------------------------------


@plant(sim.MBarrierError, "there is no mbarrier at 0x408")
def arrives_where_no_barrier_is(x, out, maps):
    bar, _, _i = begin(64)
    mbarrier_arrive(bar + 8 if BUG else bar)  # here


@plant(sim.MBarrierError, "there is no mbarrier", block=1)
def uses_a_barrier_after_its_end(x, out, maps):
    bar, _, _ = begin()
    if BUG:
        mbarrier_inval(bar)
    mbarrier_arrive(bar)  # here


@plant(sim.MBarrierError, "initialised by thread (0, 0, 0)", "nothing orders")
def uses_a_barrier_before_it_sees_it(x, out, maps):
    bar = shared_base()
    if cuda.threadIdx.x == 0:
        mbarrier_init(bar, 63)
        fence_mbarrier_init()
        if BUG:
            out[0] = 1
            return
    if not BUG:
        cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        return
    while not _there(bar):
        sim.this_thread().yield_now()
    mbarrier_arrive(bar)  # here


def _there(bar: int) -> bool:
    """Whether the machine has the barrier: what a thread of a card cannot know."""
    return bar in sim.this_thread().block.state.get("mbarriers", {})


@plant(sim.MBarrierError, "there is one already", block=1)
def makes_a_barrier_twice(x, out, maps):
    bar, _, _ = begin()
    if not BUG:
        mbarrier_inval(bar)
    mbarrier_init(bar, 1)  # here


@plant(sim.InvalidOperand, "the count is 1 to 1048575; got 0", block=1)
def makes_a_barrier_of_no_arrivals(x, out, maps):
    mbarrier_init(shared_base(), 0 if BUG else 1)  # here


@plant(sim.Misaligned, "mbarrier.init at 0x404", "multiple of 8", block=1)
def makes_a_misaligned_barrier(x, out, maps):
    mbarrier_init(shared_base() + (4 if BUG else 8), 1)  # here


@plant(sim.MBarrierError, "too many arrivals", "lacks 0 of 32 arrivals and 16 bytes")
def arrives_too_often(x, out, maps):
    bar, data, i = begin(32)
    if i == 0:
        mbarrier_expect_tx(bar, 16)
    cuda.syncthreads()
    if i < 32 or BUG:
        mbarrier_arrive(bar)  # here
    if i == 0:
        bulk_load(data, ptr_address(x, 0), 16, bar)
        mbarrier_wait_parity(bar, 0)


@plant(sim.MBarrierError, "counts up to 1048575 bytes", block=1)
def expects_too_many_bytes(x, out, maps):
    bar, _, _ = begin()
    mbarrier_expect_tx(bar, 1 << 20 if BUG else 1 << 19)  # here


@plant(sim.MBarrierError, "something has overwritten the mbarrier", block=1)
def stores_over_a_barrier(x, out, maps):
    bar, _, _ = begin()
    st_shared_u32(bar + (4 if BUG else 8), 0)
    mbarrier_arrive(bar)  # here


@plant(
    sim.Deadlock, "the phase of parity 0 of mbarrier 0x400", "lacks 1 of 65 arrivals and 0 bytes"
)
def waits_for_one_arrival_too_many(x, out, maps):
    bar, _, _ = begin(65 if BUG else 64)
    mbarrier_arrive(bar)
    mbarrier_wait_parity(bar, 0)  # here


@plant(sim.Deadlock, "the phase of parity 1 of mbarrier", "in phase 1 (parity 1)")
def waits_for_the_phase_after_the_last(x, out, maps):
    bar, _, _ = begin(64)
    mbarrier_arrive(bar)
    mbarrier_wait_parity(bar, 0)
    if BUG:
        mbarrier_wait_parity(bar, 1)  # here


@plant(sim.Deadlock, "and 16 bytes")
def expects_more_bytes_than_come(x, out, maps):
    bar, data, i = begin()
    if i == 0:
        mbarrier_arrive_expect_tx(bar, 272 if BUG else 256)
        bulk_load(data, ptr_address(x, 0), 256, bar)
    mbarrier_wait_parity(bar, 0)  # here


@plant(sim.WrongParity, "waits for phase 1 (parity 1)", "in phase 3", block=1)
def waits_for_a_phase_that_is_long_over(x, out, maps):
    bar, _, _ = begin()
    mbarrier_arrive(bar)
    mbarrier_wait_parity(bar, 0)
    mbarrier_arrive(bar)
    if BUG:
        mbarrier_arrive(bar)
    mbarrier_wait_parity(bar, 1)  # here


@plant(sim.InvalidOperand, "a parity is 0 or 1; got 2", block=1)
def waits_with_the_number_of_the_phase(x, out, maps):
    bar, _, _ = begin()
    for phase in range(3 if BUG else 2):
        mbarrier_arrive(bar)
        mbarrier_test_wait_parity(bar, phase)  # here


@plant(sim.Livelock, "livelock")
def polls_for_what_never_comes(x, out, maps):
    bar, _, i = begin(64)
    if not (BUG and i == 5):
        mbarrier_arrive(bar)
    while not mbarrier_try_wait_parity(bar, 0):  # here
        pass


@plant(sim.MissingFence, "bulk load reports to the mbarrier", "fence.mbarrier_init", block=1)
def copies_to_a_barrier_without_its_fence(x, out, maps):
    bar = shared_base()
    mbarrier_init(bar, 1)
    if not BUG:
        fence_mbarrier_init()
    mbarrier_arrive_expect_tx(bar, 256)
    bulk_load(bar + 1024, ptr_address(x, 0), 256, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.DataRace, "data race", "this thread reads what thread (0, 0, 0)")
def passes_data_without_waiting_for_the_barrier(x, out, maps):
    bar, data, i = begin(1)
    if i == 0:
        st_shared_u32(data, 7)
        mbarrier_arrive(bar)
    if not BUG:
        mbarrier_wait_parity(bar, 0)
    else:
        while not sim.this_thread().block.state["mbarriers"][bar].phase:
            sim.this_thread().yield_now()
    out[i] = ld_shared_u32(data)  # here


def until_written(address: int, count: int) -> None:
    """Let the other threads run until the bytes are there: luck, not order."""
    thread = sim.this_thread()
    shared = thread.block.shared
    start = address - shared.base
    while not all(shared._written[start : start + count]):
        thread.yield_now()


# Bulk copies -------------------------------------------------------------------------------------


@plant(
    sim.NotAwaited, "this thread reads what the bulk load issued at", "waiting for mbarrier 0x400"
)
def reads_a_copy_before_its_wait(x, out, maps):
    bar, data, i = begin()
    load(x, bar, data)
    cuda.syncthreads()
    if not BUG:
        mbarrier_wait_parity(bar, 0)
    out[i] = ld_shared_u32(data + 4 * i)  # here


@plant(sim.NotAwaited, "reads what the bulk load issued")
def reads_a_copy_that_one_thread_has_waited_for(x, out, maps):
    bar, data, i = begin()
    load(x, bar, data)
    cuda.syncthreads()
    if i == 0:
        mbarrier_wait_parity(bar, 0)
    if not BUG:
        cuda.syncthreads()
    out[i] = ld_shared_u32(data + 4 * i)  # here


@plant(sim.NotAwaited, "reads what the bulk load issued")
def never_flips_the_parity(x, out, maps):
    bar, data, i = begin()
    for step in range(2):
        if i == 0:
            mbarrier_arrive_expect_tx(bar, 256)
            bulk_load(data, ptr_address(x, 64 * step), 256, bar)
        cuda.syncthreads()
        mbarrier_wait_parity(bar, 0 if BUG else step)
        out[64 * step + i] = ld_shared_u32(data + 4 * i)  # here
        cuda.syncthreads()


@plant(sim.NotAwaited, "reads what the bulk load issued")
def expects_fewer_bytes_than_come(x, out, maps):
    bar, data, i = begin(2)
    if i == 0:
        mbarrier_arrive_expect_tx(bar, 128 if BUG else 256)
        bulk_load(data, ptr_address(x, 0), 128, bar)
        mbarrier_wait_some(bar)
        bulk_load(data + 128, ptr_address(x, 32), 128, bar)
    cuda.syncthreads()
    mbarrier_wait_parity(bar, 0)
    out[i] = ld_shared_u32(data + 4 * (i % 32) + 128)  # here


@plant(sim.NotAwaited, "reads what the bulk load issued")
def expects_the_bytes_of_one_copy_of_two(x, out, maps):
    bar, data, i = begin()
    if i == 0:
        mbarrier_arrive_expect_tx(bar, 128 if BUG else 256)
        bulk_load(data, ptr_address(x, 0), 128, bar)
        bulk_load(data + 128, ptr_address(x, 32), 128, bar)
    cuda.syncthreads()
    mbarrier_wait_parity(bar, 0)
    out[i] = ld_shared_u32(data + 4 * i)  # here


def mbarrier_wait_some(bar: int) -> None:
    """The second arrival, so that with the bug the phase ends once the first copy is there."""
    mbarrier_arrive(bar)
    if BUG:
        mbarrier_wait_parity(bar, 0)


@plant(sim.DataRace, "the bulk load writes what thread", "a barrier before it is issued would")
def refills_a_stage_that_is_still_read(x, out, maps):
    bar, data, i = begin()
    for step in range(2):
        if i == 0:
            mbarrier_arrive_expect_tx(bar, 256)
            bulk_load(data, ptr_address(x, 64 * step), 256, bar)  # here
        mbarrier_wait_parity(bar, step)
        out[64 * step + i] = ld_shared_u32(data + 4 * i)
        if not BUG:
            cuda.syncthreads()


@plant(sim.NotAwaited, "the bulk load writes what the bulk load issued at", block=1)
def loads_over_a_load_in_flight(x, out, maps):
    bar, data, _i = begin()
    mbarrier_arrive_expect_tx(bar, 256)
    bulk_load(data, ptr_address(x, 0), 256, bar)
    if not BUG:
        mbarrier_wait_parity(bar, 0)
        mbarrier_arrive_expect_tx(bar, 256)
    else:
        mbarrier_expect_tx(bar, 256)
    bulk_load(data, ptr_address(x, 64), 256, bar)  # here
    mbarrier_wait_parity(bar, 0 if BUG else 1)


@plant(sim.NotAwaited, "this thread writes what the bulk load issued at", block=1)
def stores_over_a_load_in_flight(x, out, maps):
    bar, data, _i = begin()
    load(x, bar, data)
    if not BUG:
        mbarrier_wait_parity(bar, 0)
    st_shared_u32(data, 3)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.Misaligned, "bulk load: misaligned, the shared 0x808", block=1)
def copies_to_a_misaligned_place(x, out, maps):
    bar, data, _ = begin()
    mbarrier_arrive_expect_tx(bar, 256)
    bulk_load(data + (8 if BUG else 16), ptr_address(x, 0), 256, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.Misaligned, "bulk load: misaligned, the address", block=1)
def copies_from_a_misaligned_place(x, out, maps):
    bar, data, _ = begin()
    mbarrier_arrive_expect_tx(bar, 256)
    bulk_load(data, ptr_address(x, 2 if BUG else 4), 256, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.InvalidOperand, "bytes are a multiple of 16", "got 24", block=1)
def copies_an_odd_number_of_bytes(x, out, maps):
    bar, data, _ = begin()
    count = 24 if BUG else 32
    mbarrier_arrive_expect_tx(bar, count)
    bulk_load(data, ptr_address(x, 0), count, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.OutOfBounds, "out of bounds", block=1)
def copies_over_the_end_of_an_array(x, out, maps):
    bar, data, _ = begin()
    mbarrier_arrive_expect_tx(bar, 256)
    bulk_load(data, ptr_address(x, 1024 - (60 if BUG else 64)), 256, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.OutOfBounds, "out of bounds", "4096 bytes", block=1)
def copies_over_the_end_of_shared_memory(x, out, maps):
    bar, _, _ = begin()
    mbarrier_arrive_expect_tx(bar, 256)
    bulk_load(bar + 4096 - (240 if BUG else 256), ptr_address(x, 0), 256, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.MissingFence, "the bulk store touches byte 0x800", "fence.proxy.async of shared memory")
def stores_in_bulk_without_a_proxy_fence(x, out, maps):
    _, data, i = begin()
    st_shared_u32(data + 4 * i, i)
    if not BUG:
        fence_proxy_async_shared()
    cuda.syncthreads()
    if i == 0:
        bulk_store(ptr_address(out, 0), data, 256)  # here
        bulk_commit_group()
        bulk_wait_group(0)


@plant(sim.MissingFence, "the bulk store touches byte 0x880", "thread (32, 0, 0) at")
def one_warp_forgets_the_proxy_fence(x, out, maps):
    _, data, i = begin()
    st_shared_u32(data + 4 * i, i)
    if i < 32 or not BUG:
        fence_proxy_async_shared()
    cuda.syncthreads()
    if i == 0:
        bulk_store(ptr_address(out, 0), data, 256)  # here
        bulk_commit_group()
        bulk_wait_group(0)


@plant(sim.MissingFence, "the bulk store touches")
def fences_before_the_stores(x, out, maps):
    _, data, i = begin()
    if BUG:
        fence_proxy_async_shared()
    st_shared_u32(data + 4 * i, i)
    if not BUG:
        fence_proxy_async_shared()
    cuda.syncthreads()
    if i == 0:
        bulk_store(ptr_address(out, 0), data, 256)  # here
        bulk_commit_group()
        bulk_wait_group(0)


@plant(sim.DataRace, "the bulk store reads what thread", "a barrier before it is issued")
def stores_in_bulk_without_a_barrier(x, out, maps):
    _, data, i = begin()
    st_shared_u32(data + 4 * (63 - i), i)
    fence_proxy_async_shared()
    if not BUG:
        cuda.syncthreads()
    elif i == 63:
        until_written(data, 256)
    if i == 63:
        bulk_store(ptr_address(out, 0), data, 256)  # here
        bulk_commit_group()
        bulk_wait_group(0)


@plant(sim.MissingFence, "the bulk load touches", "wrote by the ordinary proxy")
def loads_over_a_store_without_a_proxy_fence(x, out, maps):
    bar, data, i = begin()
    st_shared_u32(data + 4 * i, 0)
    if not BUG:
        fence_proxy_async_shared()
    cuda.syncthreads()
    if i == 0:
        mbarrier_arrive_expect_tx(bar, 256)
        bulk_load(data, ptr_address(x, 0), 256, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(
    sim.NotAwaited, "writes what the bulk store issued at", "cp.async.bulk.wait_group.read would"
)
def reuses_a_source_that_is_still_read(x, out, maps):
    _, data, i = begin()
    for step in range(2):
        st_shared_u32(data + 4 * i, i + step)  # here
        fence_proxy_async_shared()
        cuda.syncthreads()
        if i == 0:
            bulk_store(ptr_address(out, 64 * step), data, 256)
            bulk_commit_group()
            bulk_wait_group_read(1 if BUG else 0)
        cuda.syncthreads()
    if i == 0:
        bulk_wait_group(0)


@plant(sim.NotAwaited, "writes what the bulk store issued at")
def forgets_to_commit(x, out, maps):
    _, data, i = begin()
    for step in range(2):
        st_shared_u32(data + 4 * i, i + step)  # here
        fence_proxy_async_shared()
        cuda.syncthreads()
        if i == 0:
            bulk_store(ptr_address(out, 64 * step), data, 256)
            if not BUG:
                bulk_commit_group()
            bulk_wait_group(0)
        cuda.syncthreads()


@plant(sim.NotAwaited, "reads what the bulk store issued at", "cp.async.bulk.wait_group would")
def reads_global_memory_after_the_wait_for_sources(x, out, maps):
    _, data, i = begin()
    st_shared_u32(data + 4 * i, i)
    fence_proxy_async_shared()
    cuda.syncthreads()
    if i == 0:
        bulk_store(ptr_address(out, 0), data, 256)
        bulk_commit_group()
        if BUG:
            bulk_wait_group_read(0)
        else:
            bulk_wait_group(0)
        out[100] = out[5]  # here


@plant(sim.NotAwaited, "writes what the bulk store issued at")
def the_wrong_thread_waits_for_a_store(x, out, maps):
    _, data, i = begin()
    st_shared_u32(data + 4 * i, i)
    fence_proxy_async_shared()
    cuda.syncthreads()
    if i == 0:
        bulk_store(ptr_address(out, 0), data, 256)
        bulk_commit_group()
    if i == (32 if BUG else 0):
        bulk_wait_group(0)
    cuda.syncthreads()
    st_shared_u32(data + 4 * i, 0)  # here


@plant(
    sim.MissingFence,
    "the bulk load touches 4-byte element 0 of out",
    "fence.proxy.async of global memory",
)
def loads_what_was_just_stored_in_global_memory(x, out, maps):
    bar, data, i = begin()
    out[i] = i
    if not BUG:
        fence_proxy_async_global()
    cuda.syncthreads()
    if i == 0:
        mbarrier_arrive_expect_tx(bar, 256)
        bulk_load(data, ptr_address(out, 0), 256, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.UnwrittenRead, "unwritten read", "byte 0x8fc", block=1)
def stores_in_bulk_what_was_not_written(x, out, maps):
    _, data, _ = begin()
    for word in range(63 if BUG else 64):
        st_shared_u32(data + 4 * word, word)
    fence_proxy_async_shared()
    bulk_store(ptr_address(out, 0), data, 256)  # here
    bulk_commit_group()
    bulk_wait_group(0)


@plant(sim.Finding, "the bulk load is still in flight when its block", located=False, block=32)
def leaves_with_a_copy_in_flight(x, out, maps):
    bar, data, _i = begin()
    load(x, bar, data)
    if not BUG:
        mbarrier_wait_parity(bar, 0)


# cp.async ----------------------------------------------------------------------------------------


@plant(sim.NotAwaited, "reads what the cp.async issued at", "cp.async.wait_group would")
def reads_a_line_before_its_wait(x, out, maps):
    _, data, i = begin()
    cp_async_16(data + 16 * i, ptr_address(x, 4 * i), 16)
    cp_async_commit_group()
    cp_async_wait_group(1 if BUG else 0)
    out[i] = ld_shared_u32(data + 16 * i)  # here


@plant(sim.NotAwaited, "reads what the cp.async issued at")
def reads_another_threads_line_without_a_barrier(x, out, maps):
    _, data, i = begin()
    cp_async_16(data + 16 * i, ptr_address(x, 4 * i), 16)
    cp_async_commit_group()
    cp_async_wait_group(0)
    if not BUG:
        cuda.syncthreads()
    out[i] = ld_shared_u32(data + 16 * (i ^ 1))  # here


@plant(sim.NotAwaited, "reads what the cp.async issued at")
def arrives_before_its_lines(x, out, maps):
    bar, data, i = begin(64)
    if BUG:
        cp_async_arrive(bar)
    cp_async_16(data + 16 * i, ptr_address(x, 4 * i), 16)
    if not BUG:
        cp_async_arrive(bar)
    mbarrier_wait_parity(bar, 0)
    out[i] = ld_shared_u32(data + 16 * (i ^ 1))  # here


@plant(sim.MissingFence, "the bulk store touches", "the cp.async issued at")
def stores_in_bulk_what_cp_async_brought(x, out, maps):
    _, data, i = begin()
    cp_async_16(data + 16 * i, ptr_address(x, 4 * i), 16)
    cp_async_commit_group()
    cp_async_wait_group(0)
    if not BUG:
        fence_proxy_async_shared()
    cuda.syncthreads()
    if i == 0:
        bulk_store(ptr_address(out, 0), data, 1024)  # here
        bulk_commit_group()
        bulk_wait_group(0)


@plant(sim.InvalidOperand, "copies 0 to 16 bytes; got 20", block=1)
def copies_more_than_a_line(x, out, maps):
    _, data, _ = begin()
    cp_async_16(data, ptr_address(x, 0), 20 if BUG else 12)  # here
    cp_async_commit_group()
    cp_async_wait_group(0)


# Tensor copies -----------------------------------------------------------------------------------


def tile(maps: Any, bar: int, data: int, x: int = 0, y: int = 0) -> None:
    fence_tensormap_acquire(ptr_address(maps, 0))
    mbarrier_arrive_expect_tx(bar, 1024)
    tma_load_2d(data, ptr_address(maps, 0), x, y, bar)


@plant(sim.MissingFence, "the tensor load uses the tensor map at", "proxy.tensormap", block=1)
def uses_a_map_without_its_fence(x, out, maps):
    bar, data, _ = begin()
    if not BUG:
        fence_tensormap_acquire(ptr_address(maps, 0))
    mbarrier_arrive_expect_tx(bar, 1024)
    tma_load_2d(data, ptr_address(maps, 0), 0, 0, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.MissingFence, "the tensor load uses the tensor map at")
def another_warp_has_acquired_the_map(x, out, maps):
    bar, data, i = begin()
    if i == 0:
        fence_tensormap_acquire(ptr_address(maps, 0))
    if not BUG:
        cuda.syncthreads()
    if i == 32:
        mbarrier_arrive_expect_tx(bar, 1024)
        tma_load_2d(data, ptr_address(maps, 0), 0, 0, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.InvalidDescriptor, "no tensor map of the simulated machine", block=1)
def passes_another_address_as_a_map(x, out, maps):
    bar, data, _ = begin()
    place = ptr_address(out if BUG else maps, 0)
    fence_tensormap_acquire(place)
    mbarrier_arrive_expect_tx(bar, 1024)
    tma_load_2d(data, place, 0, 0, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(
    sim.Misaligned, "tensor load: misaligned, the shared 0x900 is not a multiple of 1024", block=1
)
def loads_a_tile_to_a_misaligned_place(x, out, maps):
    bar, data, _ = begin()
    fence_tensormap_acquire(ptr_address(maps, 0))
    mbarrier_arrive_expect_tx(bar, 1024)
    tma_load_2d(data + (256 if BUG else 0), ptr_address(maps, 0), 0, 0, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.InvalidOperand, "1 coordinates for a tensor map of 2 dimensions", block=1)
def loads_with_too_few_coordinates(x, out, maps):
    bar, data, _ = begin()
    fence_tensormap_acquire(ptr_address(maps, 0))
    mbarrier_arrive_expect_tx(bar, 1024)
    if BUG:
        tma_load_1d(data, ptr_address(maps, 0), 0, bar)  # here
    else:
        tma_load_2d(data, ptr_address(maps, 0), 0, 0, bar)
    mbarrier_wait_parity(bar, 0)


@plant(sim.Deadlock, "lacks 0 of 1 arrivals and -512 bytes")
def counts_only_the_part_of_a_box_that_is_inside(x, out, maps):
    bar, data, i = begin()
    if i == 0:
        fence_tensormap_acquire(ptr_address(maps, 0))
        mbarrier_arrive_expect_tx(bar, 512 if BUG else 1024)
        tma_load_2d(data, ptr_address(maps, 0), 0, 28, bar)
    mbarrier_wait_parity(bar, 0)  # here


@plant(sim.NotAwaited, "reads what the tensor load issued at")
def reads_a_tile_before_its_wait(x, out, maps):
    bar, data, i = begin()
    if i == 0:
        tile(maps, bar, data)
    cuda.syncthreads()
    if not BUG:
        mbarrier_wait_parity(bar, 0)
    out[i] = ld_shared_u32(data + 4 * i)  # here


@plant(sim.InvalidOperand, "begins 8 bytes from the start of a row", block=1)
def loads_a_tile_from_the_middle_of_16_bytes(x, out, maps):
    bar, data, _ = begin()
    fence_tensormap_acquire(ptr_address(maps, 0))
    mbarrier_arrive_expect_tx(bar, 1024)
    tma_load_2d(data, ptr_address(maps, 0), 2 if BUG else 4, 0, bar)  # here
    mbarrier_wait_parity(bar, 0)


@plant(sim.InvalidOperand, "coordinates must not be negative", block=1)
def stores_a_tile_before_the_first_row(x, out, maps):
    bar, data, _ = begin()
    tile(maps, bar, data)
    mbarrier_wait_parity(bar, 0)
    tma_store_2d(ptr_address(maps, 0), 0, -1 if BUG else 0, data)  # here
    bulk_commit_group()
    bulk_wait_group(0)


@plant(sim.MissingFence, "the tensor store touches")
def stores_a_tile_without_a_proxy_fence(x, out, maps):
    _, data, i = begin()
    for row in range(4):
        st_shared_u32(data + 256 * row + 4 * i, i)
    if not BUG:
        fence_proxy_async_shared()
    cuda.syncthreads()
    if i == 0:
        fence_tensormap_acquire(ptr_address(maps, 0))
        tma_store_2d(ptr_address(maps, 0), 0, 8, data)  # here
        bulk_commit_group()
        bulk_wait_group(0)


# Products of a warp ------------------------------------------------------------------------------


@plant(sim.Misaligned, "ldmatrix.x4: misaligned", block=32)
def loads_rows_that_are_misaligned(x, out, maps):
    base = shared_base()
    for word in range(5):
        st_shared_u32(base + 128 * word + 4 * cuda.threadIdx.x, 1)
    cuda.syncthreads()
    ldmatrix_x4(base + 16 * cuda.threadIdx.x + (8 if BUG else 0))  # here


@plant(sim.DataRace, "data race", "this thread reads what thread", block=32)
def loads_a_matrix_without_a_barrier(x, out, maps):
    base = shared_base()
    i = cuda.threadIdx.x
    for word in range(4):
        st_shared_u32(base + 128 * word + 4 * i, 1)
    if not BUG:
        cuda.syncthreads()
    ldmatrix_x4(base + 16 * (31 - i))  # here


@plant(sim.WarpMaskError, "mma bf16", "lane 9 of warp 0 never comes", block=32)
def one_lane_leaves_before_the_product(x, out, maps):
    if BUG and cuda.threadIdx.x == 9:
        return
    mma_m16n8k16_bf16((0, 0, 0, 0), (0, 0), wgmma_zeros(4))  # here


# Products of a warpgroup -------------------------------------------------------------------------


def matrices(x: Any) -> tuple[int, int]:
    """64 rows of A and 8 of B, 32 bytes each, by ordinary stores without a swizzle; descriptors."""
    base = shared_base()
    i = cuda.threadIdx.x
    for word in range(5):
        if word < 4 or i < 64:
            st_shared_u32(base + 512 * word + 4 * i, 0)
    fence_proxy_async_shared()
    cuda.syncthreads()
    return wgmma_descriptor(base, 0, 1024, 128), wgmma_descriptor(base + 2048, 0, 128, 128)


@plant(sim.MissingFence, "the accumulators", "wgmma.fence", block=128)
def multiplies_without_wgmma_fence(x, out, maps):
    a, b = matrices(x)
    if not BUG:
        wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)  # here
    wgmma_commit_group()
    wgmma_wait(acc, 0)


@plant(sim.MissingFence, "registers of A", "wgmma.fence", block=128)
def changes_the_registers_of_a_without_wgmma_fence(x, out, maps):
    _, b = matrices(x)
    acc = wgmma_zeros(4)
    wgmma_fence()
    acc = wgmma_rs_bf16(acc, (0, 0, 0, 0), b, False)
    wgmma_commit_group()
    wgmma_wait_group(0)
    acc = wgmma_keep(acc)
    if not BUG:
        wgmma_fence()
    acc = wgmma_rs_bf16(acc, (1, 1, 1, 1), b, True)  # here
    wgmma_commit_group()
    acc = wgmma_wait(acc, 0)


@plant(sim.NotAwaited, "accumulators of a wgmma are used before wgmma.wait_group", block=128)
def reads_accumulators_before_the_wait(x, out, maps):
    a, b = matrices(x)
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)
    wgmma_commit_group()
    if not BUG:
        wgmma_wait_group(0)
    out[cuda.threadIdx.x] = int(acc[0])  # here


@plant(sim.NotAwaited, "their group was never committed", block=128)
def waits_for_products_that_are_in_no_group(x, out, maps):
    a, b = matrices(x)
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)
    if not BUG:
        wgmma_commit_group()
    acc = wgmma_wait(acc, 0)
    out[cuda.threadIdx.x] = int(acc[0])  # here


@plant(sim.NotAwaited, "used before wgmma.wait_group", block=128)
def waits_for_all_but_the_group_that_it_reads(x, out, maps):
    a, b = matrices(x)
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)
    wgmma_commit_group()
    acc = wgmma_wait(acc, 1 if BUG else 0)
    out[cuda.threadIdx.x] = int(acc[0])  # here


@plant(sim.NotAwaited, "have gone into another product", block=128)
def uses_accumulators_in_two_products(x, out, maps):
    a, b = matrices(x)
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)
    more = wgmma_ss_bf16(acc, a, b, True)
    other = wgmma_ss_bf16(acc if BUG else more, a, b, True)  # here
    wgmma_commit_group()
    wgmma_wait(other, 0)


@plant(sim.InvalidDescriptor, "the descriptor of B", "bits set that mean nothing", block=128)
def passes_a_descriptor_of_another_architecture(x, out, maps):
    a, b = matrices(x)
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b | 1 << 46 if BUG else b, False)  # here
    wgmma_commit_group()
    wgmma_wait(acc, 0)


@plant(sim.InvalidDescriptor, "a tile begins at a multiple of 1024", block=128, shared=16384)
def multiplies_a_tile_that_is_not_aligned(x, out, maps):
    base = shared_base()
    for word in range(28):
        st_shared_u32(base + 512 * word + 4 * cuda.threadIdx.x, 0)
    fence_proxy_async_shared()
    cuda.syncthreads()
    a = wgmma_descriptor(base, 128, 16, 1024)
    b = wgmma_descriptor(base + 8192 + (128 if BUG else 1024), 128, 16, 1024)
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)  # here
    wgmma_commit_group()
    wgmma_wait(acc, 0)


@plant(sim.InvalidDescriptor, "the swizzle atom ends", block=128, shared=16384)
def goes_on_along_k_beyond_the_atom(x, out, maps):
    base = shared_base()
    for word in range(28):
        st_shared_u32(base + 512 * word + 4 * cuda.threadIdx.x, 0)
    fence_proxy_async_shared()
    cuda.syncthreads()
    a = wgmma_descriptor(base, 128, 16, 1024) + (7 if BUG else 6)
    b = wgmma_descriptor(base + 8192, 128, 16, 1024)
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)  # here
    wgmma_commit_group()
    wgmma_wait(acc, 0)


@plant(sim.InvalidOperand, "the threads of a warpgroup disagree", block=128)
def one_warp_passes_another_descriptor(x, out, maps):
    a, b = matrices(x)
    wgmma_fence()
    other = BUG and cuda.threadIdx.x >= 96
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, a if other else b, False)  # here
    wgmma_commit_group()
    wgmma_wait(acc, 0)


@plant(sim.Deadlock, "wgmma 0 of its warpgroup, reached by 96 of 128 threads", block=128)
def one_warp_does_not_come(x, out, maps):
    a, b = matrices(x)
    if BUG and cuda.threadIdx.x >= 96:
        return
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)
    wgmma_commit_group()
    wgmma_wait(acc, 0)  # here


@plant(sim.MissingFence, "the wgmma touches", "fence.proxy.async of shared memory", block=128)
def multiplies_what_was_stored_without_a_proxy_fence(x, out, maps):
    a, b = matrices(x)
    i = cuda.threadIdx.x
    if i < 64:
        st_shared_u32(shared_base() + 2048 + 4 * i, 1)
    if not BUG:
        fence_proxy_async_shared()
    cuda.syncthreads()
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)  # here
    wgmma_commit_group()
    wgmma_wait(acc, 0)


@plant(sim.DataRace, "the wgmma reads what thread", block=128)
def multiplies_before_the_other_warps_have_stored(x, out, maps):
    a, b = matrices(x)
    i = cuda.threadIdx.x
    if i < 64:
        st_shared_u32(shared_base() + 2048 + 4 * i, 1)
    fence_proxy_async_shared()
    if not BUG:
        cuda.syncthreads()
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)  # here
    wgmma_commit_group()
    wgmma_wait(acc, 0)


@plant(sim.NotAwaited, "the wgmma reads what the bulk load issued at", block=128)
def multiplies_before_the_copy_has_come(x, out, maps):
    a, _ = matrices(x)
    bar = shared_base() + 3072
    if cuda.threadIdx.x == 0:
        mbarrier_init(bar, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    load(x, bar, shared_base() + 2560)
    if not BUG or cuda.threadIdx.x < 32:
        mbarrier_wait_parity(bar, 0)
    b = wgmma_descriptor(shared_base() + 2560, 0, 128, 128)
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(4), a, b, False)  # here
    wgmma_commit_group()
    wgmma_wait(acc, 0)


@plant(
    sim.NotAwaited, "the bulk load writes what the wgmma issued at", "in all four warps", block=160
)
def one_warp_releases_a_stage_for_all(x, out, maps):
    full = shared_base()
    empty, data, i = full + 8, full + 1024, cuda.threadIdx.x
    if i == 0:
        mbarrier_init(full, 1)
        mbarrier_init(empty, 1 if BUG else 4)
        fence_mbarrier_init()
    cuda.syncthreads()
    if i >= 128:
        if i == 128:
            for step in range(2):
                mbarrier_wait_parity(empty, step ^ 1)
                mbarrier_arrive_expect_tx(full, 256)
                bulk_load(data, ptr_address(x, 0), 256, full)  # here
        return
    b = wgmma_descriptor(data, 0, 128, 128)
    acc = wgmma_zeros(4)
    for step in range(2):
        mbarrier_wait_parity(full, step)
        wgmma_fence()
        acc = wgmma_rs_bf16(acc, (0, 0, 0, 0), b, True)
        wgmma_commit_group()
        acc = wgmma_wait(acc, 0)
        if i == 0 or (i % 32 == 0 and not BUG):
            mbarrier_arrive(empty)


@plant(sim.NotAwaited, "writes what", "wgmma.wait_group", block=160)
def releases_a_stage_before_the_wait(x, out, maps):
    full = shared_base()
    empty, data, i = full + 8, full + 1024, cuda.threadIdx.x
    if i == 0:
        mbarrier_init(full, 1)
        mbarrier_init(empty, 128)
        fence_mbarrier_init()
    cuda.syncthreads()
    if i >= 128:
        if i == 128:
            for step in range(2):
                mbarrier_wait_parity(empty, step ^ 1)
                mbarrier_arrive_expect_tx(full, 256)
                bulk_load(data, ptr_address(x, 0), 256, full)  # here
        return
    b = wgmma_descriptor(data, 0, 128, 128)
    acc = wgmma_zeros(4)
    for step in range(2):
        mbarrier_wait_parity(full, step)
        wgmma_fence()
        acc = wgmma_rs_bf16(acc, (0, 0, 0, 0), b, True)
        wgmma_commit_group()
        if BUG:
            mbarrier_arrive(empty)
        acc = wgmma_wait(acc, 0)
        if not BUG:
            mbarrier_arrive(empty)


@plant(sim.InvalidOperand, "4 to 128 accumulators, a multiple of 4; got 6", block=128)
def multiplies_with_six_accumulators(x, out, maps):
    a, b = matrices(x)
    wgmma_fence()
    acc = wgmma_ss_bf16(wgmma_zeros(6 if BUG else 4), a, b, False)  # here
    wgmma_commit_group()
    wgmma_wait(acc, 0)


@plant(sim.InvalidOperand, "a multiple of 8 from 24 to 256; got 100", block=128)
def asks_for_an_odd_number_of_registers(x, out, maps):
    setmaxnreg_inc(100 if BUG else 104)  # here


# Running them ------------------------------------------------------------------------------------


def run(row: Plant, schedule: Any, checks: Any = True) -> None:
    x = aligned(np.arange(1024, dtype=np.uint32) % 7)
    out = aligned(np.zeros(1024, np.uint32))
    tensor = TensorMap(x.ctypes.data, "u32", (32, 32), (128,), (32, 8), 128)
    maps = aligned(np.frombuffer(encode(tensor), np.uint64))
    machine = Machine(row.arch, schedule, checks)
    machine.spin_limit = 200
    arguments = [GlobalPointer(x, "u32", "x"), GlobalPointer(out, "u32", "out")]
    arguments.append(GlobalPointer(maps, "u64", "maps"))
    bounds = row.block, 1
    machine.run(row.body, 1, row.block, row.shared, arguments, launch_bounds=bounds)


@pytest.fixture
def bug(monkeypatch):
    def put(value: bool) -> None:
        monkeypatch.setattr(inspect.getmodule(run), "BUG", value)

    return put


CASES = [
    pytest.param(row, schedule, id=f"{row.id}-{schedule}")
    for row in TABLE
    for schedule in (SCHEDULES if row.located else SCHEDULES[:1])
]


@pytest.mark.parametrize(("row", "schedule"), CASES)
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
    if not row.located:
        return
    assert error.file == __file__
    lines, first = inspect.getsourcelines(row.body)
    here = [first + offset for offset, line in enumerate(lines) if line.rstrip().endswith("# here")]
    assert error.line in here
    assert f"{__file__}:{error.line}" in text
    assert error.thread is not None


@pytest.mark.parametrize(("row", "schedule"), CASES)
def test_the_kernel_without_the_bug_passes(row, schedule, bug):
    bug(False)
    run(row, schedule)


def test_without_checks_what_always_matters_is_still_reported(bug):
    bug(True)
    always = (sim.MBarrierError, sim.WrongParity, sim.InvalidDescriptor, sim.InvalidOperand)
    always += (sim.Misaligned, sim.OutOfBounds, sim.Deadlock)
    for row in TABLE:
        if row.error in always and "nothing orders" not in row.words:
            with pytest.raises(row.error):
                run(row, "round_robin", checks=False)


def test_wgmma_and_mbarriers_are_refused_where_they_do_not_exist(bug):
    bug(False)
    rows = {row.id: row for row in TABLE}
    for arch, name in (
        ("sm_100a", "multiplies_without_wgmma_fence"),
        ("sm_80", "never_flips_the_parity"),
    ):
        row = rows[name]
        with pytest.raises(UnsupportedError, match="sm_90"):
            run(
                Plant(row.body, row.error, row.words, row.block, row.shared, True, arch),
                "round_robin",
            )
