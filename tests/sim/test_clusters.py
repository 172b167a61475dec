"""Clusters of two blocks: what they exchange arrives, and mistakes are reported."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nvfp4 import compile as compiling
from nvfp4 import sim
from nvfp4.errors import UnsupportedError
from nvfp4.program import Kernel
from nvfp4.ptx.cluster import (
    cluster_arrive,
    cluster_rank,
    cluster_size,
    cluster_wait,
    map_shared,
    mbarrier_arrive_cluster,
    mbarrier_wait_parity_cluster,
    tma_load_2d_multicast,
)
from nvfp4.ptx.mbarrier import (
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from nvfp4.ptx.memory import ld_shared_u32, ptr_address, shared_base, st_shared_u32
from nvfp4.ptx.tensor_map import TensorMap, encode
from nvfp4.ptx.tma import fence_tensormap_acquire
from nvfp4.sim import GlobalPointer, Machine, cuda
from tests.ptx.async_checks import aligned

BUG = False


@dataclass(frozen=True)
class Plant:
    body: Callable[..., Any]
    error: type[sim.Finding]
    words: str


TABLE: list[Plant] = []


def plant(error: type[sim.Finding], words: str) -> Callable[..., Any]:
    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        TABLE.append(Plant(body, error, words))
        return body

    return add


def meet() -> None:
    cluster_arrive()
    cluster_wait()


def begin(count: int = 1) -> tuple[int, int]:
    """mbarriers of `count` and of one arrival, seen by the cluster; where data may be."""
    base = shared_base()
    if cuda.threadIdx.x == 0:
        mbarrier_init(base, count)
        mbarrier_init(base + 8, 1)
        fence_mbarrier_init()
    meet()
    return base, base + 1024


def load_to_both(maps: Any, bar: int, data: int, row: int) -> None:
    """Each block expects a box of 8 rows of 128 bytes; block 0 brings it to both."""
    if cuda.threadIdx.x == 0:
        mbarrier_arrive_expect_tx(bar, 1024)
        if cluster_rank() == 0:
            fence_tensormap_acquire(ptr_address(maps, 0))
            tma_load_2d_multicast(data, ptr_address(maps, 0), 0, row, bar, 3)


@plant(sim.NotAwaited, "tensor load to a cluster")
def reads_what_another_block_brings(x, out, maps):
    bar, data = begin()
    load_to_both(maps, bar, data, 0)
    cuda.syncthreads()
    if not BUG:
        mbarrier_wait_parity(bar, 0)
    i = cuda.threadIdx.x
    out[64 * cluster_rank() + i] = ld_shared_u32(data + 4 * i)
    meet()


@plant(sim.NotAwaited, "the tensor load to a cluster writes what the tensor load")
def overwrites_what_the_other_block_reads(x, out, maps):
    bar, data = begin()
    i = cuda.threadIdx.x
    for step in range(2):
        load_to_both(maps, bar, data, 8 * step)
        mbarrier_wait_parity(bar, step)
        out[128 * step + 64 * cluster_rank() + i] = ld_shared_u32(data + 4 * i)
        if BUG:
            cuda.syncthreads()
        else:
            meet()
    meet()


@plant(sim.MBarrierError, "nothing orders that before")
def arrives_before_the_other_block_is_ready(x, out, maps):
    base = shared_base()
    if cuda.threadIdx.x == 0:
        mbarrier_init(base, 1)
        fence_mbarrier_init()
    if not BUG:
        meet()
    else:
        while not all("mbarriers" in block.state for block in this_cluster()):
            sim.this_thread().yield_now()
    if cuda.threadIdx.x == 0:
        mbarrier_arrive_cluster(map_shared(base, cluster_rank() ^ 1))
    if not BUG:
        mbarrier_wait_parity_cluster(base, 0)
    meet()


def this_cluster() -> list[Any]:
    return sim.this_thread().block.cluster.blocks


@plant(sim.Finding, "has left the kernel")
def leaves_before_the_other_block_is_done(x, out, maps):
    base, _ = begin()
    if BUG and cluster_rank() == 1:
        return
    if cuda.threadIdx.x == 0:
        while BUG and this_cluster()[1].live:
            sim.this_thread().yield_now()
        mbarrier_arrive_cluster(map_shared(base, cluster_rank() ^ 1))
    if not BUG:
        meet()


@plant(sim.OutOfBounds, "rank 2 of a cluster of 2")
def arrives_at_a_block_that_is_none(x, out, maps):
    base, _ = begin()
    if cuda.threadIdx.x == 0:
        mbarrier_arrive_cluster(map_shared(base, 2 if BUG else cluster_rank()))
    meet()


@plant(sim.OutOfBounds, "out of bounds")
def loads_from_the_other_block(x, out, maps):
    _, data = begin()
    st_shared_u32(data + 4 * cuda.threadIdx.x, 1)
    meet()
    ld_shared_u32((data ^ 1 << 24 if BUG else data) + 4 * cuda.threadIdx.x)
    meet()


@plant(sim.DivergentBarrier, "has not arrived")
def waits_without_arriving(x, out, maps):
    if not BUG:
        cluster_arrive()
    cluster_wait()


@plant(sim.DivergentBarrier, "has arrived already")
def arrives_twice(x, out, maps):
    cluster_arrive()
    if not BUG:
        cluster_wait()
    cluster_arrive()
    cluster_wait()


@plant(sim.Deadlock, "the cluster's barrier, reached by 127 of 128 threads")
def one_thread_does_not_come(x, out, maps):
    if not (BUG and cluster_rank() == 1 and cuda.threadIdx.x == 5):
        meet()


@plant(sim.MissingFence, "fence.proxy.async of shared")
def is_overwritten_without_a_fence(x, out, maps):
    bar, data = begin()
    st_shared_u32(data + 4 * cuda.threadIdx.x, 1)
    if not BUG:
        fence_proxy_async_shared()
    meet()
    load_to_both(maps, bar, data, 0)
    mbarrier_wait_parity(bar, 0)
    meet()


def run(body: Callable[..., Any], schedule: Any = "round_robin", arch: str = "sm_90a") -> Any:
    x = aligned(np.arange(1024, dtype=np.uint32))
    out = aligned(np.zeros(1024, np.uint32))
    maps = aligned(
        np.frombuffer(encode(TensorMap(x.ctypes.data, "u32", (32, 32), (128,), (32, 8))), np.uint64)
    )
    machine = Machine(arch, schedule)
    machine.spin_limit = 300
    kinds = ((x, "u32", "x"), (out, "u32", "out"), (maps, "u64", "maps"))
    pointers = [GlobalPointer(*one) for one in kinds]
    machine.run(body, 4, 64, 4096, pointers, cluster=(2, 1, 1))
    return out


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def put(value: bool) -> None:
        monkeypatch.setattr(inspect.getmodule(run), "BUG", value)

    return put


@pytest.mark.parametrize("schedule", ["round_robin", 1, 2, 3])
@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.body.__name__)
def test_a_mistake_is_reported_and_without_it_the_kernel_passes(
    row: Plant, schedule: Any, bug: Callable[[bool], None]
) -> None:
    bug(True)
    with pytest.raises(row.error) as caught:
        run(row.body, schedule)
    assert type(caught.value) is row.error
    assert row.words in str(caught.value)
    bug(False)
    run(row.body, schedule)


def test_a_box_comes_to_both_blocks(bug: Callable[[bool], None]) -> None:
    bug(False)
    got = run(overwrites_what_the_other_block_reads)
    for step in range(2):
        for rank in range(2):
            start = 128 * step + 64 * rank
            assert np.array_equal(got[start : start + 64], np.arange(64) + 256 * step)


def test_ranks_and_sizes() -> None:
    def body(x, out, maps):
        if cuda.threadIdx.x == 0:
            out[cuda.blockIdx.x] = cluster_rank() + 16 * cluster_size()

    assert list(run(body)[:4]) == [32, 33, 32, 33]


def test_clusters_need_hopper() -> None:
    with pytest.raises(UnsupportedError, match="sm_90"):
        run(meets, arch="sm_89")


def meets(x, out, maps):
    meet()


def everything(w, maps):
    cluster_arrive()
    cluster_wait()
    w[0] = cluster_rank() + cluster_size()
    mbarrier_arrive_cluster(map_shared(w[1], w[2]))
    mbarrier_wait_parity_cluster(w[1], w[3])
    tma_load_2d_multicast(w[4], ptr_address(maps, 0), 0, 8, w[5], 3)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_every_instruction_assembles(arch: str) -> None:
    kernel = Kernel("every_cluster", everything, ("u32*", "u64*"), min_cc=(9, 0), threads=128)
    binary, ptx = compiling.inspect(kernel.program(), arch)
    assert compiling.faults(binary, ptx) == ()
    code = compiling.sass(binary)
    for name in ("UCGABAR_ARV", "UCGABAR_WAIT", "UTMALDG.2D.MULTICAST", r"SYNCS.ARRIVE\S*RED"):
        assert re.search(name, code), name
