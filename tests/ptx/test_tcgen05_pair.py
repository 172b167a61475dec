"""Products of two blocks: 256 rows of the result, by the instructions of ``tcgen05_pair``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nvfp4 import compile as compiling
from nvfp4 import golden, sim
from nvfp4.program import Kernel
from nvfp4.ptx.cluster import (
    cluster_arrive,
    cluster_rank,
    cluster_wait,
    map_shared,
    mbarrier_arrive_cluster,
)
from nvfp4.ptx.mbarrier import (
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from nvfp4.ptx.memory import ld_shared_u32, ptr_address, shared_base, st_shared_u32
from nvfp4.ptx.tcgen05 import (
    tcgen05_commit,
    tcgen05_fence_after_thread_sync,
    tcgen05_fence_before_thread_sync,
    tcgen05_ld,
    tcgen05_wait_ld,
)
from nvfp4.ptx.tcgen05_descriptors import tcgen05_descriptor, tcgen05_product
from nvfp4.ptx.tcgen05_pair import (
    tcgen05_alloc_pair,
    tcgen05_commit_pair,
    tcgen05_cp_scales_pair,
    tcgen05_dealloc_pair,
    tcgen05_mma_mxf4_pair,
    tcgen05_mma_mxf8f6f4_pair,
    tcgen05_mma_nvf4_pair,
    tcgen05_product_pair,
    tcgen05_relinquish_pair,
    tma_load_2d_pair,
)
from nvfp4.ptx.tensor_map import TensorMap, encode
from nvfp4.ptx.tma import fence_tensormap_acquire
from nvfp4.sim import GlobalPointer, Machine, cuda
from tests.ptx.async_checks import aligned

#: Which mistake is in; "" none.
BUG = ""
COLUMNS, STEPS = 64, 3
A, B, SFA, SFB = 1024, 1024 + 4096, 1024 + 4096 + 1024, 1024 + 4096 + 1024 + 512
STRIDE = 8 * 32


def meet() -> None:
    tcgen05_fence_before_thread_sync()
    cluster_arrive()
    cluster_wait()
    tcgen05_fence_after_thread_sync()


def pair_product(a_map, b_map, a, b, a_scales, b_scales, out):
    """A [256, 96] times B [64, 96]; e4m3, a step of 32 after the other, one stage."""
    base = shared_base()
    thread, rank = cuda.threadIdx.x, cluster_rank()
    full, made, empty = base, base + 8, base + 16
    leader_full = map_shared(full, 0)
    if thread == 0:
        mbarrier_init(full, 2)
        mbarrier_init(made, 1)
        mbarrier_init(empty, 1)
        fence_mbarrier_init()
    if thread < 32:
        tcgen05_alloc_pair(base + 32, 128)
        tcgen05_relinquish_pair()
    # A tile of scales each: this block's rows of A, all rows of B.
    st_shared_u32(base + SFA + 4 * thread, a_scales[128 * rank + thread])
    st_shared_u32(base + SFB + 4 * thread, b_scales[thread])
    fence_proxy_async_shared()
    meet()
    memory = ld_shared_u32(base + 32)
    if thread == 0:
        fence_tensormap_acquire(ptr_address(a_map, 0))
        fence_tensormap_acquire(ptr_address(b_map, 0))
    for step in range(STEPS):
        if thread == 0:
            if step > 0:
                mbarrier_wait_parity(empty, (step - 1) & 1)
            if rank == 0:
                whole = 2 * (4096 + 1024)
                mbarrier_arrive_expect_tx(full, whole // 2 if BUG == "expects its own" else whole)
            tma_load_2d_pair(base + A, ptr_address(a_map, 0), 32 * step, 128 * rank, leader_full)
            tma_load_2d_pair(base + B, ptr_address(b_map, 0), 32 * step, 32 * rank, leader_full)
            if rank == 1:
                mbarrier_arrive_cluster(leader_full)
        if thread == 0 and rank == 0:
            mbarrier_wait_parity(full, step & 1)
            if BUG != "full without fence":
                tcgen05_fence_after_thread_sync()
            if step == 0:
                if BUG != "no scales":
                    tcgen05_cp_scales_pair(memory + 64, tcgen05_descriptor(base + SFA, 0, 16, 128))
                tcgen05_cp_scales_pair(memory + 68, tcgen05_descriptor(base + SFB, 0, 16, 128))
            word = tcgen05_product_pair("mxf8f6f4", 32, "e4m3", "e4m3", "ue8m0", COLUMNS)
            if BUG == "one block's word":
                word = tcgen05_product("mxf8f6f4", 32, "e4m3", "e4m3", "ue8m0", COLUMNS)
            tcgen05_mma_mxf8f6f4_pair(
                memory,
                tcgen05_descriptor(base + A, 32, 16, STRIDE),
                tcgen05_descriptor(base + B, 32, 16, STRIDE),
                word | step << 29 | step << 4,
                memory + 64,
                memory + 68,
                step > 0,
            )
            tcgen05_commit_pair(empty, 3)
    if thread == 0 and rank == 0:
        if BUG == "commits for one block":
            tcgen05_commit(made)
        else:
            tcgen05_commit_pair(made, 1 if BUG == "commits to one block" else 3)
    if BUG != "no wait" or rank == 0:
        mbarrier_wait_parity(made, 0)
        tcgen05_fence_after_thread_sync()
    else:
        while not sim.this_thread().block.state["tensor memory"].defined[0, memory]:
            sim.this_thread().yield_now()
    at = memory + (thread // 32 << 21)
    for part in range(2):
        values = tcgen05_wait_ld(tcgen05_ld(at + 32 * part, 32))
        for i in range(32):
            out[(128 * rank + thread) * COLUMNS + 32 * part + i] = values[i]
    if BUG == "no meeting at the end" and rank == 1:
        cuda.syncthreads()
    else:
        meet()
    if thread < 32:
        tcgen05_dealloc_pair(memory, 128)


def operands() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    a = rng.integers(-4, 5, (256, 96)).astype(np.float32)
    b = rng.integers(-4, 5, (COLUMNS, 96)).astype(np.float32)
    return {
        "a": aligned(golden.encode_e4m3(a)),
        "b": aligned(golden.encode_e4m3(b)),
        "a_scales": aligned(rng.integers(125, 130, (256, 4)).astype(np.uint8)),
        "b_scales": aligned(rng.integers(125, 130, (128, 4)).astype(np.uint8)),
    }


def tiles(scales: np.ndarray) -> np.ndarray:
    return aligned(golden.interleave_scales(scales).reshape(-1).view(np.uint32))


def run(schedule: Any = "round_robin") -> tuple[np.ndarray, np.ndarray]:
    data = operands()
    out = aligned(np.full((256, COLUMNS), np.nan, np.float32))
    maps = [
        TensorMap(data[name].ctypes.data, "u8", (96, rows), (96,), (32, box), 32)
        for name, rows, box in (("a", 256, 128), ("b", COLUMNS, 32))
    ]
    arrays = [aligned(np.frombuffer(encode(one), np.uint64)) for one in maps]
    arrays += [data["a"], data["b"], tiles(data["a_scales"]), tiles(data["b_scales"]), out]
    kinds = ("u64", "u64", "u8", "u8", "u32", "u32", "f32")
    names = inspect.signature(pair_product).parameters
    pointers = [
        GlobalPointer(array.reshape(-1), kind, name)
        for array, kind, name in zip(arrays, kinds, names, strict=True)
    ]
    machine = Machine("sm_100a", schedule)
    machine.spin_limit = 300
    machine.run(pair_product, 2, 128, SFB + 512, pointers, cluster=(2, 1, 1))
    values = {
        name: golden.decode_e4m3(data[name])
        * np.repeat(golden.decode_e8m0(data[f"{name}_scales"][: len(data[name]), :3]), 32, axis=1)
        for name in ("a", "b")
    }
    return out, values["a"] @ values["b"].T


@pytest.fixture
def bug(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def put(value: str) -> None:
        monkeypatch.setattr(inspect.getmodule(run), "BUG", value)

    return put


@pytest.mark.parametrize("schedule", ["round_robin", 1, 2, 3])
def test_a_pair_makes_256_rows(schedule: Any) -> None:
    got, expected = run(schedule)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    "mistake, error, words",
    [
        ("expects its own", (sim.NotAwaited, sim.MBarrierError), ""),
        ("full without fence", sim.MissingFence, "fence::after_thread_sync"),
        ("no scales", sim.UnwrittenRead, "scale factors of A"),
        ("one block's word", sim.InvalidDescriptor, "M is 128; this product has 256 rows"),
        ("commits for one block", sim.TensorMemoryError, "cta_group::1 beside cta_group::2"),
        ("commits to one block", sim.Deadlock, "mbarrier 0x1000408"),
        ("no wait", sim.NotAwaited, "tcgen05.commit"),
        ("no meeting at the end", (sim.Deadlock, sim.Finding), ""),
    ],
)
def test_mistakes_are_reported(
    mistake: str, error: Any, words: str, bug: Callable[[str], None]
) -> None:
    bug(mistake)
    with pytest.raises(error) as caught:
        run()
    assert words in str(caught.value)


def everything(w, i, maps):
    tcgen05_alloc_pair(w[0], 256)
    tcgen05_relinquish_pair()
    memory = ld_shared_u32(w[0])
    if w[1] == 0:
        tma_load_2d_pair(w[6], ptr_address(maps, 0), 0, 8, w[7])
        tcgen05_cp_scales_pair(memory, i[0])
        tcgen05_mma_nvf4_pair(memory, i[1], i[2], w[2], w[3], w[4], w[5] > 5)
        tcgen05_mma_mxf4_pair(memory, i[1], i[2], w[2], w[3], w[4], w[5] > 5)
        tcgen05_mma_mxf8f6f4_pair(memory, i[1], i[2], w[2], w[3], w[4], w[5] > 5)
        tcgen05_commit_pair(w[6], 3)
    w[9] = tcgen05_product_pair("mxf4", 32, "e2m1", "e2m1", "ue8m0", 64)
    tcgen05_dealloc_pair(memory, 256)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_every_instruction_assembles(arch: str) -> None:
    types = ("u32*", "i64*", "u64*")
    kernel = Kernel("every_pair", everything, types, threads=128)
    binary, ptx = compiling.inspect(kernel.program(), arch)
    assert compiling.faults(binary, ptx) == ()
    code = compiling.sass(binary)
    for name in (
        "UTCATOMSWS.2CTA",
        "UTMALDG.2D.2CTA",
        "UTCCP.T.S.2CTA.4x32dp128bit",
        "UTCOMMA.2CTA",
        "UTCQMMA.2CTA",
        "UTCBAR.2CTA.MULTICAST",
    ):
        assert re.search(re.escape(name), code), name
