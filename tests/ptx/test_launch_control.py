"""Cluster launch control: blocks that have not started are taken over, each once, and mistakes are
reported.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4 import compile as compiling
from nvfp4 import launch, sim
from nvfp4._numba import cuda
from nvfp4.arrays import as_array
from nvfp4.errors import UnsupportedError
from nvfp4.program import Kernel
from nvfp4.ptx.arith import i64_of_u32
from nvfp4.ptx.cluster import cluster_arrive, cluster_rank, cluster_wait
from nvfp4.ptx.launch_control import (
    clc_first_block,
    clc_is_canceled,
    clc_try_cancel,
    clc_try_cancel_cluster,
    decode,
    encode,
)
from nvfp4.ptx.mbarrier import (
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from nvfp4.ptx.memory import ld_shared_v4_u32, shared_base, st_shared_u32
from nvfp4.ptx.warp import elect
from nvfp4.sim import Machine

SCHEDULES = ("round_robin", 1, 2, 3, 4, [1, 3, 2, 5, 1, 0, 4])
WIDTH, HEIGHT = 3, 3
#: More steps than there are blocks, so that a machine that never runs out of them fails a test.
LIMIT = 12

#: Which mistake is in, what programs replace; "" none.
BUG = ""


def takes_over(out, who):
    """Add 1 to each of 64 words of a block's row of `out`, for this block and those it is given."""
    bar = shared_base()
    response = bar + 16
    i = cuda.threadIdx.x
    leader = elect(0xFFFFFFFF)
    if i == 0:
        mbarrier_init(bar, 1)
        if BUG != "no mbarrier fence":
            fence_mbarrier_init()
        if BUG == "writes the response":
            st_shared_u32(response, 0)
    cuda.syncthreads()
    x = cuda.blockIdx.x
    y = cuda.blockIdx.y
    me = x + cuda.gridDim.x * y
    for step in range(LIMIT):
        if leader and i < 32:
            mbarrier_arrive_expect_tx(bar, 8 if BUG == "expects 8 bytes" else 16)
            clc_try_cancel(response + 8 if BUG == "response at 8" else response, bar)
        at = x + cuda.gridDim.x * y
        out[64 * at + i] = out[64 * at + i] + 1
        if i == 0:
            who[at] = me
        if BUG == "leaves early":
            break
        if BUG == "no wait":
            cuda.syncthreads()
        else:
            mbarrier_wait_parity(bar, step & 1)
        words = ld_shared_v4_u32(response)
        if BUG == "never looks":
            first = clc_first_block(words)
            x = i64_of_u32(first[0])
            y = i64_of_u32(first[1])
        elif not clc_is_canceled(words):
            if BUG != "asks again":
                break
        else:
            first = clc_first_block(words)
            x = i64_of_u32(first[0])
            y = i64_of_u32(first[1])
        if BUG != "no fence":
            fence_proxy_async_shared()
        if BUG != "no barrier":
            cuda.syncthreads()


MISTAKES = [
    ("no wait", sim.NotAwaited, "what the request for a block issued at"),
    ("expects 8 bytes", sim.Deadlock, "lacks 0 of 1 arrivals and -8 bytes"),
    ("no fence", sim.MissingFence, "overwrites the response that thread"),
    ("writes the response", sim.MissingFence, "the request for a block touches byte 0x410"),
    ("no barrier", sim.DataRace, "the request for a block writes what thread"),
    ("no mbarrier fence", sim.MissingFence, "reports to the mbarrier at 0x400"),
    ("asks again", sim.LaunchControlError, "an earlier one was refused"),
    ("never looks", sim.LaunchControlError, "a response that gives no cluster"),
    ("response at 8", sim.Misaligned, "the response 0x418 is not a multiple of 16"),
    ("leaves early", sim.Finding, "is still in flight when its block"),
]
TAKES_OVER = Kernel(
    "takes_over", takes_over, ("u32*", "u32*"), {"BUG": ("", *(row[0] for row in MISTAKES))}
)


def run(
    schedule: Any = "round_robin", bug: str = "", arch: str = "sm_100a", checks: Any = True
) -> Any:
    out = np.zeros((HEIGHT, WIDTH, 64), np.uint32)
    who = np.full((HEIGHT, WIDTH), 99, np.uint32)
    machine = Machine(arch, schedule, checks)
    machine.spin_limit = 300
    call = launch.Launch(TAKES_OVER.program(BUG=bug), (WIDTH, HEIGHT), 64, 64, ("out", "who"))
    buffers = {"out": as_array(out, "out"), "who": as_array(who, "who")}
    launch.run([call], buffers, machine=machine)
    return out, who


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_block_is_processed_once(schedule: Any) -> None:
    out, who = run(schedule)
    assert (out == 1).all()
    # Who has taken over a block runs, and has done its own first.
    assert all(who.reshape(-1)[one] == one for one in who.reshape(-1))
    if schedule == "round_robin":
        assert (who == 0).all()  # the plainest schedule refuses nothing while blocks are left


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=40))
def test_every_block_is_processed_once_in_any_interleaving(numbers: list[int]) -> None:
    out, _ = run(numbers)
    assert (out == 1).all()


def test_a_request_may_be_refused_while_blocks_are_left() -> None:
    """The machine then starts them."""
    out, who = run(lambda count: 3 if count == 4 else 0)
    assert (out == 1).all()
    assert np.array_equal(who.reshape(-1), np.arange(WIDTH * HEIGHT))


def test_some_schedules_share_the_blocks_out() -> None:
    shares = {len(np.unique(run(seed, checks=False)[1])) for seed in range(12)}
    assert len(shares) > 2


@pytest.mark.parametrize("mistake, error, words", MISTAKES)
@pytest.mark.parametrize("schedule", ["round_robin", 1, 2])
def test_mistakes_are_reported(mistake: str, error: Any, words: str, schedule: Any) -> None:
    with pytest.raises(error) as caught:
        run(schedule, mistake)
    assert type(caught.value) is error
    assert words in str(caught.value)


@pytest.mark.parametrize("mistake", ["asks again", "never looks"])
def test_rules_of_requests_hold_without_checks(mistake: str) -> None:
    with pytest.raises(sim.LaunchControlError):
        run(bug=mistake, checks=False)


def test_only_blackwell_has_requests() -> None:
    with pytest.raises(UnsupportedError, match="request for a block needs sm_100"):
        run(arch="sm_90a")


# Clusters ----------------------------------------------------------------------------------------


def meet() -> None:
    cluster_arrive()
    cluster_wait()


def cluster_takes_over(out):
    """As `takes_over`, of two blocks: one asks for both."""
    bar = shared_base()
    response = bar + 16
    i = cuda.threadIdx.x
    rank = i64_of_u32(cluster_rank())
    leader = elect(0xFFFFFFFF)
    if i == 0:
        mbarrier_init(bar, 1)
        fence_mbarrier_init()
    meet()
    at = cuda.blockIdx.x
    for step in range(LIMIT):
        if leader and i < 32:
            mbarrier_arrive_expect_tx(bar, 16)
            if rank == 0:
                if BUG == "one block":
                    clc_try_cancel(response, bar)
                else:
                    clc_try_cancel_cluster(response, bar)
        out[64 * at + i] = out[64 * at + i] + 1
        if BUG == "other does not wait":
            meet()
        if BUG != "other does not wait" or rank == 0:
            mbarrier_wait_parity(bar, step & 1)
        words = ld_shared_v4_u32(response)
        if not clc_is_canceled(words):
            break
        at = i64_of_u32(clc_first_block(words)[0]) + rank
        if BUG != "other does not fence" or rank == 0:
            fence_proxy_async_shared()
        if BUG == "meets alone":
            cuda.syncthreads()
        else:
            meet()
    meet()


CLUSTER_MISTAKES = [
    ("one block", sim.Deadlock, "and 16 bytes"),
    ("other does not wait", sim.NotAwaited, "what the request for a block issued at"),
    ("other does not fence", sim.MissingFence, "overwrites the response that thread"),
    ("meets alone", sim.NotAwaited, "writes what the request for a block issued at"),
]
CLUSTER_TAKES_OVER = Kernel(
    "cluster_takes_over",
    cluster_takes_over,
    ("u32*",),
    {"BUG": ("", *(row[0] for row in CLUSTER_MISTAKES))},
)


def run_cluster(schedule: Any, bug: str = "") -> np.ndarray:
    out = np.zeros((8, 64), np.uint32)
    machine = Machine("sm_100a", schedule)
    machine.spin_limit = 300
    program = CLUSTER_TAKES_OVER.program(BUG=bug)
    call = launch.Launch(program, 8, 64, 64, ("out",), cluster=(2, 1, 1))
    launch.run([call], {"out": as_array(out, "out")}, machine=machine)
    return out


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_a_cluster_takes_over_whole_clusters(schedule: Any) -> None:
    assert (run_cluster(schedule) == 1).all()


@pytest.mark.parametrize("mistake, error, words", CLUSTER_MISTAKES)
def test_mistakes_of_clusters_are_reported(mistake: str, error: Any, words: str) -> None:
    with pytest.raises(error) as caught:
        run_cluster("round_robin", mistake)
    assert type(caught.value) is error
    assert words in str(caught.value)


# Words and code ----------------------------------------------------------------------------------


def words_of(block: tuple[int, int, int] | None) -> tuple[int, ...]:
    return tuple(np.frombuffer(encode(block), "<u4").tolist())


def test_a_response_has_the_bits_that_assembled_code_reads() -> None:
    x, yz, given, _ = words_of((0x12345678, 0x9ABC, 0xDEF0))
    assert (x, yz, given) == (0x12345678, 0xDEF09ABC, 1)
    assert decode(words_of((0x12345678, 0x9ABC, 0xDEF0))) == (0x12345678, 0x9ABC, 0xDEF0)
    assert decode(words_of(None)) is None and words_of(None)[2] == 0


def test_words_that_are_no_response_are_refused() -> None:
    good = words_of((1, 2, 3))
    for words in ((0, 0, 0, 0), (*good[:3], 5), (*good[:2], 2, good[3])):
        with pytest.raises(sim.InvalidDescriptor, match="no response of a request"):
            clc_is_canceled(words)


def everything(w):
    clc_try_cancel(w[8], w[9])
    clc_try_cancel_cluster(w[10], w[11])
    words = (w[0], w[1], w[2], w[3])
    block = clc_first_block(words)
    w[4] = block[0]
    w[5] = block[1]
    w[6] = block[2]
    w[7] = 7 if clc_is_canceled(words) else 9


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a", "sm_120a", "sm_121a"])
def test_every_instruction_assembles(arch: str) -> None:
    """And a query's bits are those of the model."""
    binary, ptx = compiling.inspect(Kernel("every_clc", everything, ("u32*",)).program(), arch)
    assert compiling.faults(binary, ptx) == ()
    code = compiling.sass(binary)
    assert re.search(r"UGETNEXTWORKID\.SELFCAST", code)
    assert re.search(r"UGETNEXTWORKID\.BROADCAST", code)
    assert re.search(r"LOP3\.LUT (P\d, RZ|R\d+), R\d+, 0x1, RZ, 0xc0", code)  # bit 64
    # y and z are halves of the second word.
    assert re.search(r"0xffff\b", code) and re.search(r"SHF\.R\.U32\.HI R\d+, RZ, 0x10", code)


def test_a_request_by_one_thread_is_not_looped_over_the_lanes() -> None:
    binary, ptx = compiling.inspect(TAKES_OVER.program(BUG=""), "sm_100a")
    assert compiling.faults(binary, ptx) == ()
    code = compiling.sass(binary)
    assert re.search(r"UGETNEXTWORKID\.SELFCAST", code) and "BRA.U.ANY" not in code
    assert re.search(r"LDS\.128", code)
