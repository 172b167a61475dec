"""Tensor copies of four rows picked one by one: what arrives, and mistakes that are reported."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from nvfp4 import compile as compiling
from nvfp4 import launch, sim
from nvfp4._numba import cuda
from nvfp4.arrays import as_array
from nvfp4.errors import UnsupportedError
from nvfp4.program import Kernel
from nvfp4.ptx.cluster import cluster_arrive, cluster_rank, cluster_wait, map_shared
from nvfp4.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from nvfp4.ptx.memory import ld_shared_u32, ptr_address, shared_base, st_shared_u32
from nvfp4.ptx.tensor_map import PADDED, TensorMap, encode, swizzled
from nvfp4.ptx.tma import fence_tensormap_acquire
from nvfp4.ptx.tma_gather import tma_gather4, tma_gather4_cluster
from nvfp4.ptx.warp import elect
from nvfp4.sim import Machine
from tests.ptx.async_checks import aligned

SCHEDULES = ("round_robin", 1, 2, [1, 3, 2, 5, 1, 0, 4])
POISON = 0xAAAAAAAA
ROWS, COLUMNS = 21, 64
#: Two gathers: rows in any order, twice, and outside on either side.
PICKED = (20, 3, 3, 0, -1, 7, 21, 1 << 30)

#: What programs replace: which mistake is in, bytes of a row of the box, and how many the mbarrier
#: is told that a gather brings.
BUG = ""
WIDTH = 128
COUNTED = 512


def gathers(maps, tensor, rows, out, x):
    """Eight rows of WIDTH bytes from column `x` on to `out`, as they lie in shared memory."""
    bar = shared_base()
    tile = bar + 1024
    i = cuda.threadIdx.x
    leader = elect(0xFFFFFFFF)
    where = ptr_address(maps, 0)
    if BUG == "writes before":
        st_shared_u32(tile + 4 * i, 0)
    if leader:
        if BUG != "no map fence":
            fence_tensormap_acquire(where)
        mbarrier_init(bar, 1)
        if BUG != "no mbarrier fence":
            fence_mbarrier_init()
    cuda.syncthreads()
    if leader:
        count = COUNTED + 16 if BUG == "expects too much" else COUNTED
        mbarrier_arrive_expect_tx(bar, count if BUG == "expects one gather" else 2 * count)
        for half in range(2):
            target = tile + 4 * WIDTH * half
            if BUG == "beside":
                target += 64
            start = x + 1 if BUG == "starts between" else x
            a, b, c, d = rows[4 * half], rows[4 * half + 1], rows[4 * half + 2], rows[4 * half + 3]
            tma_gather4(target, where, start, a, b, c, d, bar)
    cuda.syncthreads()
    if BUG != "no wait":
        mbarrier_wait_parity(bar, 0)
    for part in range(WIDTH // 16):
        out[32 * part + i] = ld_shared_u32(tile + 128 * part + 4 * i)
    if BUG == "refills":
        if leader:
            mbarrier_arrive_expect_tx(bar, COUNTED)
            tma_gather4(tile, where, x, 0, 1, 2, 3, bar)
        mbarrier_wait_parity(bar, 1)


MISTAKES = [
    ("no wait", sim.NotAwaited, "this thread reads what the gather issued at"),
    ("expects too much", sim.Deadlock, "lacks 0 of 1 arrivals and 32 bytes"),
    ("no map fence", sim.MissingFence, "the gather uses the tensor map"),
    ("no mbarrier fence", sim.MissingFence, "the gather reports to the mbarrier at 0x400"),
    ("writes before", sim.MissingFence, "the gather touches byte 0x800"),
    ("beside", sim.Misaligned, "gather: misaligned, the shared 0x840 is not a multiple of 512"),
    ("starts between", sim.InvalidOperand, "the box begins 20 bytes from the start of a row"),
    ("refills", sim.DataRace, "the gather writes what thread"),
]
GATHERS = Kernel(
    "gathers",
    gathers,
    ("u64*", "u32*", "i32*", "u32*", "i32"),
    {
        "BUG": ("", "expects one gather", *(row[0] for row in MISTAKES)),
        "WIDTH": (32, 64, 128),
        "COUNTED": (64, 128, 256, 512),
    },
    threads=32,
)


def words() -> np.ndarray:
    return aligned(np.random.default_rng(1).integers(1, 1 << 32, (ROWS, COLUMNS), np.uint32))


def run(
    tensor: np.ndarray,
    maps: bytes,
    schedule: Any = "round_robin",
    *,
    arch: str = "sm_100a",
    x: int = 4,
    checks: Any = True,
    **constants: Any,
) -> np.ndarray:
    """What lies in shared memory, as [8, words of a row]."""
    settings = {"BUG": "", "WIDTH": 128, "COUNTED": 512} | constants
    width = settings["WIDTH"] // 4
    out = np.full((8, width), POISON, np.uint32)
    machine = Machine(arch, schedule, checks)
    machine.spin_limit = 300
    arrays = {
        "maps": aligned(np.frombuffer(maps, np.uint64)),
        "tensor": tensor,
        "rows": np.array(PICKED, np.int32),
        "out": out,
    }
    call = launch.Launch(GATHERS.program(**settings), 1, 32, 1024 + 8 * 4 * width, (*arrays, x))
    buffers = {name: as_array(value, name) for name, value in arrays.items()}
    launch.run([call], buffers, machine=machine)
    return out


def map_of(tensor: np.ndarray, box: tuple[int, ...], swizzle: int) -> TensorMap:
    return TensorMap(tensor.ctypes.data, "u32", (COLUMNS, ROWS), (4 * COLUMNS,), box, swizzle)


def picked(tensor: np.ndarray, x: int, count: int) -> np.ndarray:
    """The rows in order, zeros for what is outside."""
    whole = np.zeros((len(PICKED), count), np.uint32)
    for at, row in enumerate(PICKED):
        for column in range(count):
            if 0 <= row < ROWS and 0 <= x + column < COLUMNS:
                whole[at, column] = tensor[row, x + column]
    return whole


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    "swizzle, width, x", [(0, 128, 4), (0, 64, -4), (32, 32, 60), (64, 64, 56), (128, 128, 44)]
)
def test_rows_arrive_in_order_swizzled_and_filled(
    schedule: Any, swizzle: int, width: int, x: int
) -> None:
    tensor = words()
    maps = encode(map_of(tensor, (width // 4, 1), swizzle))
    got = run(tensor, maps, schedule, x=x, WIDTH=width, COUNTED=4 * width).view(np.uint8).ravel()
    want = picked(tensor, x, width // 4).view(np.uint8).ravel()
    # The tile is at a multiple of 1024, so a place in it swizzles as its address does.
    places = np.array([swizzled(place, swizzle) for place in range(want.size)])
    assert np.array_equal(got[places], want)


def test_spread_codes_count_the_bytes_of_memory() -> None:
    """64 bytes of 128 codes arrive in 128 bytes, half of which is undefined."""
    codes = aligned(np.random.default_rng(2).integers(1, 256, (ROWS, 128), np.uint8))
    tensor = TensorMap(codes.ctypes.data, PADDED, (256, ROWS), (128,), (128, 1), 128)
    got = run(codes.view(np.uint32), encode(tensor), x=128, COUNTED=256, checks=["races"]).view(
        np.uint8
    )
    for at, row in enumerate(PICKED):
        want = codes[row, 64:] if 0 <= row < ROWS else np.zeros(64, np.uint8)
        for chunk in range(8):
            place = swizzled(128 * at + 16 * chunk, 128)
            assert np.array_equal(got.ravel()[place : place + 8], want[8 * chunk : 8 * chunk + 8])


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=str)
@pytest.mark.parametrize("mistake, error, message", MISTAKES)
def test_mistakes_are_reported(mistake: str, error: Any, message: str, schedule: Any) -> None:
    tensor = words()
    with pytest.raises(error) as caught:
        run(tensor, encode(map_of(tensor, (32, 1), 128)), schedule, BUG=mistake)
    assert type(caught.value) is error
    assert message in str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES[:3], ids=str)
def test_too_few_expected_bytes_are_reported(schedule: Any) -> None:
    """The phase ends behind one gather, or never, where both have come before its arrival."""
    tensor = words()
    with pytest.raises((sim.NotAwaited, sim.Deadlock)) as caught:
        run(tensor, encode(map_of(tensor, (32, 1), 128)), schedule, BUG="expects one gather")
    assert re.search("reads what the gather|and -512 bytes", str(caught.value))


@pytest.mark.parametrize("swizzle, multiple", [(0, 128), (32, 128), (64, 256), (128, 512)])
def test_the_place_is_a_multiple_of_four_rows_of_the_swizzle(swizzle: int, multiple: int) -> None:
    tensor = words()
    width = swizzle or 128
    maps = encode(map_of(tensor, (width // 4, 1), swizzle))
    with pytest.raises(sim.Misaligned, match=f"0x840 is not a multiple of {multiple}"):
        run(tensor, maps, BUG="beside", WIDTH=width, COUNTED=4 * width, checks=False)


def test_maps_that_do_not_fit_are_refused() -> None:
    tensor = words()
    good = map_of(tensor, (32, 1), 128)
    line = TensorMap(tensor.ctypes.data, "u32", (COLUMNS,), (), (32,), 128)
    for one, message in (
        (encode(map_of(tensor, (32, 4), 128)), "its box one row; got the box \\(32, 4\\)"),
        (encode(line), "of 2 dimensions"),
        (bytes(128), "no tensor map of the simulated machine"),
        (encode(good)[:8] + b"\xff" + encode(good)[9:], "bits that mean nothing"),
    ):
        with pytest.raises(sim.InvalidDescriptor, match=message):
            run(tensor, one)


def test_only_blackwell_gathers() -> None:
    tensor = words()
    with pytest.raises(UnsupportedError, match="gather needs sm_100"):
        run(tensor, encode(map_of(tensor, (32, 1), 128)), arch="sm_90a")


# Clusters ----------------------------------------------------------------------------------------


def gathers_for_the_other(maps, tensor, out):
    """Each block brings rows to the other one."""
    bar = shared_base()
    tile = bar + 1024
    i = cuda.threadIdx.x
    rank = cluster_rank()
    other = rank ^ 1
    leader = elect(0xFFFFFFFF)
    where = ptr_address(maps, 0)
    if i == 0:
        fence_tensormap_acquire(where)
        mbarrier_init(bar, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(bar, 512)
    cluster_arrive()
    cluster_wait()
    if leader:
        told = bar if BUG == "own mbarrier" else map_shared(bar, other)
        target = map_shared(tile, other)
        tma_gather4_cluster(target, where, 0, 2 + rank, 9, 9, 5 + rank, told)
    if BUG == "no wait":
        cluster_arrive()
        cluster_wait()
    else:
        mbarrier_wait_parity(bar, 0)
    for part in range(4):
        value = ld_shared_u32(tile + 128 * part + 4 * i)
        if rank == 0:
            out[32 * part + i] = value
        else:
            out[128 + 32 * part + i] = value
    cluster_arrive()
    cluster_wait()


FOR_THE_OTHER = Kernel(
    "gathers_for_the_other",
    gathers_for_the_other,
    ("u64*", "u32*", "u32*"),
    {"BUG": ("", "no wait", "own mbarrier")},
    min_cc=(9, 0),
)


def run_cluster(schedule: Any, bug: str = "") -> tuple[np.ndarray, np.ndarray]:
    tensor = words()
    out = np.full((2, 4, 32), POISON, np.uint32)
    maps = aligned(np.frombuffer(encode(map_of(tensor, (32, 1), 0)), np.uint64))
    arrays = {"maps": maps, "tensor": tensor, "out": out}
    program = FOR_THE_OTHER.program(BUG=bug)
    call = launch.Launch(program, 2, 32, 1024 + 512, tuple(arrays), cluster=(2, 1, 1))
    buffers = {name: as_array(value, name) for name, value in arrays.items()}
    launch.run([call], buffers, machine=Machine("sm_100a", schedule))
    return tensor, out


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_rows_come_to_another_block(schedule: Any) -> None:
    tensor, out = run_cluster(schedule)
    assert np.array_equal(out[0], tensor[[3, 9, 9, 6], :32])
    assert np.array_equal(out[1], tensor[[2, 9, 9, 5], :32])


def test_mistakes_in_clusters_are_reported() -> None:
    with pytest.raises(sim.NotAwaited, match="reads what the gather to a cluster issued at"):
        run_cluster("round_robin", "no wait")
    with pytest.raises(sim.InvalidOperand, match="the mbarrier at 0x400 is another block's"):
        run_cluster("round_robin", "own mbarrier")


# Code --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_120a", "sm_121a"])
def test_a_gather_assembles(arch: str) -> None:
    program = GATHERS.program(BUG="", WIDTH=128, COUNTED=512)
    binary, ptx = compiling.inspect(program, arch)
    assert compiling.faults(binary, ptx) == ()
    code = compiling.sass(binary)
    assert "UTMALDG.2D.GATHER4" in code and "BRA.U.ANY" not in code


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_a_gather_to_a_cluster_assembles(arch: str) -> None:
    binary, ptx = compiling.inspect(FOR_THE_OTHER.program(BUG=""), arch)
    assert compiling.faults(binary, ptx) == ()
    assert "UTMALDG.2D.GATHER4" in compiling.sass(binary)


def test_a_gather_to_a_cluster_is_not_of_sm_120() -> None:
    assert tma_gather4_cluster.lowering_for((12, 0)) is None
    assert tma_gather4.lowering_for((12, 0)) is not None
    assert tma_gather4.lowering_for((9, 0)) is None
