"""Loads, stores, atomic operations and fences on the simulated machine."""

import numpy as np
import pytest

from nvfp4.errors import SimulationError
from nvfp4.ptx import memory, warp
from nvfp4.ptx.rounding import bits_of, float_of
from nvfp4.sim import DataRace, GlobalPointer, Machine, Misaligned, OutOfBounds, UnwrittenRead


def run(body, *args, threads: int = 1, blocks: int = 1, shared: int = 0) -> None:
    Machine("sm_90a").run(body, blocks, threads, shared, args)


def words(count: int) -> np.ndarray:
    return (np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B1)) ^ np.uint32(0xA5A5A5A5)


def test_loads_of_every_width_count_elements_of_the_pointers_type():
    data = words(16)
    raw = data.tobytes()
    got = {}

    def body(u8, u16, u32, f32):
        got["u8"] = [memory.ld_global_u8(u8, i, "nc") for i in range(5)]
        got["u16"] = [memory.ld_global_u16(u8, 2 * i, "") for i in range(5)]
        got["u16 of u32"] = memory.ld_global_u16(u32, 3, "")
        got["u32"] = [memory.ld_global_u32(u32, i, "nc.L1::no_allocate") for i in range(5)]
        got["f32"] = memory.ld_global_f32(f32, 2, "cs")
        got["v2"] = memory.ld_global_v2_u32(u16, 8, "nc")
        got["v4"] = memory.ld_global_v4_u32(u32, 4, "nc.L1::no_allocate.L2::256B")

    pointers = [GlobalPointer(data, name) for name in ("u8", "u16", "u32", "f32")]
    run(body, *pointers)
    assert got["u8"] == list(raw[:5])
    assert got["u16"] == np.frombuffer(raw, np.uint16)[:5].tolist()
    assert got["u16 of u32"] == int(data[3]) & 0xFFFF
    assert got["u32"] == data[:5].tolist()
    assert bits_of(got["f32"]) == data[2]
    assert got["v2"] == tuple(data[4:6].tolist())
    assert got["v4"] == tuple(data[4:8].tolist())


def test_stores_of_every_width_write_these_bytes_and_no_others():
    data = np.full(64, 0xEE, np.uint8)

    def body(u8, u32, f32):
        memory.st_global_u8(u8, 1, 0x1FF, "")
        memory.st_global_u16(u8, 4, 0x12345, "cs")
        memory.st_global_u32(u32, 2, 0x1_89ABCDEF, "wb")
        memory.st_global_f32(f32, 3, np.float32(-2.0), "cg")
        memory.st_global_v2_u32(u32, 4, 1, 2, "L1::no_allocate")
        memory.st_global_v4_u32(u32, 8, 3, 4, 5, 6, "L1::evict_first")

    run(body, *(GlobalPointer(data, name) for name in ("u8", "u32", "f32")))
    want = np.full(64, 0xEE, np.uint8)
    want[1] = 0xFF
    want[4:6] = [0x45, 0x23]
    want[8:24].view(np.uint32)[:] = [0x89ABCDEF, 0xC0000000, 1, 2]
    want[32:48].view(np.uint32)[:] = [3, 4, 5, 6]
    assert data.tolist() == want.tolist()


def test_addresses_reach_the_same_bytes():
    data = words(16)

    def body(p):
        address = memory.ptr_address(p, 4)
        a, b, c, d = memory.ld_address_v4_u32(address, "nc")
        memory.st_address_v4_u32(address + 16, d, c, b, a, "")

    run(body, GlobalPointer(data, "u32"))
    assert data[8:12].tolist() == words(16)[7:3:-1].tolist()


def test_a_prefetch_reads_nothing_and_may_be_of_what_others_write():
    data = np.zeros(32, np.uint32)

    def body(p):
        memory.prefetch_l2(p, 1 << 40)
        if warp.lane_id() == 0:
            memory.st_global_u32(p, 0, 7, "")
        else:
            memory.prefetch_l2(p, 0)

    run(body, GlobalPointer(data, "u32"), threads=2)
    assert data.tolist() == [7] + 31 * [0]


@pytest.mark.parametrize("nbytes, index", [(8, 1), (16, 2)])
def test_an_address_that_is_no_multiple_of_the_access_is_an_error(nbytes, index):
    load = memory.ld_global_v2_u32 if nbytes == 8 else memory.ld_global_v4_u32
    with pytest.raises(Misaligned):
        run(lambda p: load(p, index, ""), GlobalPointer(np.zeros(16, np.uint32), "u32"))


def test_an_address_of_sixteen_bytes_must_be_a_multiple_of_sixteen():
    with pytest.raises(Misaligned):
        run(
            lambda p: memory.ld_address_v4_u32(memory.ptr_address(p, 1), ""),
            GlobalPointer(np.zeros(16, np.uint32), "u32"),
        )


def test_a_load_past_the_end_is_an_error():
    with pytest.raises(OutOfBounds):
        run(lambda p: memory.ld_global_v4_u32(p, 16, ""), GlobalPointer(words(16), "u32"))


@pytest.mark.parametrize("hint", ["evict_last", "nc.cs", None, 3])
def test_an_unknown_hint_is_an_error_that_lists_the_known_ones(hint):
    with pytest.raises(ValueError, match="L1::no_allocate"):
        run(lambda p: memory.ld_global_u32(p, 0, hint), GlobalPointer(words(1), "u32"))
    with pytest.raises(ValueError, match="L1::no_allocate"):
        run(lambda p: memory.st_global_u32(p, 0, 1, hint), GlobalPointer(words(1), "u32"))


def test_hints_for_loads_do_not_pass_for_stores():
    with pytest.raises(ValueError, match="hint"):
        run(lambda p: memory.st_global_u32(p, 0, 1, "nc"), GlobalPointer(words(1), "u32"))


# Atomic operations -------------------------------------------------------------------------------

ATOMICS = {
    "atom_add_global_u32": lambda old, value: old + value,
    "atom_max_global_u32": max,
    "atom_min_global_u32": min,
    "atom_exch_global_u32": lambda old, value: value,
}


@pytest.mark.parametrize("name", ATOMICS)
def test_an_atomic_operation_returns_what_was_there(name):
    data = np.array([7, 0xFFFFFFF0], np.uint32)
    old = []

    def body(p):
        old.append(getattr(memory, name)(p, 1, 0x40))

    run(body, GlobalPointer(data, "u32"))
    assert old == [0xFFFFFFF0]
    assert data.tolist() == [7, ATOMICS[name](0xFFFFFFF0, 0x40) & 0xFFFFFFFF]


def test_compare_and_swap_stores_only_where_it_compares_equal():
    data = np.array([5], np.uint32)
    old = []

    def body(p):
        old.append(memory.atom_cas_global_u32(p, 0, 4, 9))
        old.append(memory.atom_cas_global_u32(p, 0, 5, 9))
        old.append(memory.atom_cas_global_u32(p, 0, 5, 1))

    run(body, GlobalPointer(data, "u32"))
    assert old == [5, 5, 9] and data.tolist() == [9]


def test_many_threads_add_and_none_is_lost():
    data = np.zeros(4, np.uint32)
    floats = np.zeros(1, np.float32)

    def body(p, f):
        memory.red_add_global_u32(p, 0, 3)
        memory.red_max_global_u32(p, 1, warp.lane_id() * 2)
        memory.atom_add_global_u32(p, 2, 0xFFFFFFFF)
        memory.red_add_global_f32(f, 0, np.float32(0.5))

    run(body, GlobalPointer(data, "u32"), GlobalPointer(floats, "f32"), threads=64, blocks=3)
    assert data.tolist() == [3 * 192, 62, (1 << 32) - 192, 0]
    assert floats.tolist() == [96.0]


@pytest.mark.parametrize(
    "start, value, end",
    [
        (0x00000001, 0x00000001, 0x00000000),  # subnormal operands are zeros
        (0x80000001, 0x80000001, 0x80000000),
        (0x3F800000, 0x007FFFFF, 0x3F800000),
        (0x00800001, 0x80800000, 0x00000000),  # so is a subnormal sum
        (0x80800001, 0x00800000, 0x80000000),
        (0x3F800000, 0x33800001, 0x3F800001),  # rounded to nearest
        (0x7F7FFFFF, 0x7F7FFFFF, 0x7F800000),
        (0x7F800000, 0xFF800000, 0x7FFFFFFF),
    ],
)
def test_an_atomic_sum_in_global_memory_flushes_subnormals(start, value, end):
    data = np.array([start], np.uint32)
    old = []

    def body(p):
        old.append(bits_of(memory.atom_add_global_f32(p, 0, float_of(value))))

    run(body, GlobalPointer(data, "f32"))
    assert old == [start]
    assert hex(data[0]) == hex(end)


def test_a_release_and_an_acquire_order_what_is_around_them():
    data, flag = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    seen = []

    def body(d, f, ordered):
        if warp.lane_id() == 0:
            d[0] = 42
            (memory.st_release_u32 if ordered else memory.st_global_u32)(
                f, 0, 1, *(() if ordered else ("",))
            )
        else:
            load = memory.ld_acquire_u32 if ordered else memory.ld_relaxed_u32
            while load(f, 0) == 0:
                pass
            seen.append(d[0])

    run(body, GlobalPointer(data, "u32"), GlobalPointer(flag, "u32"), True, threads=2)
    assert seen == [42]
    flag[0] = 0
    with pytest.raises(DataRace):
        run(body, GlobalPointer(data, "u32"), GlobalPointer(flag, "u32"), False, threads=2)


@pytest.mark.parametrize("name", ["ld_relaxed_u32", "ld_acquire_u32", "ld_global_u32"])
def test_a_flag_may_be_polled_while_it_is_written_but_not_by_a_plain_load(name):
    flag = np.zeros(1, np.uint32)

    def body(f):
        if warp.lane_id() == 0:
            memory.st_release_u32(f, 0, 1)
        else:
            load = getattr(memory, name)
            while load(f, 0, *(("",) if name == "ld_global_u32" else ())) == 0:
                pass

    if name == "ld_global_u32":
        with pytest.raises(DataRace):
            run(body, GlobalPointer(flag, "u32"), threads=2)
    else:
        run(body, GlobalPointer(flag, "u32"), threads=2)


@pytest.mark.parametrize("name", ["fence_acq_rel_gpu", "membar_gl", None])
def test_a_fence_publishes_writes_to_those_who_see_a_later_atomic(name):
    data, flag = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    seen = []

    def body(d, f):
        if warp.lane_id() == 0:
            d[0] = 42
            if name is not None:
                getattr(memory, name)()
            memory.red_add_global_u32(f, 0, 1)
        else:
            while memory.atom_add_global_u32(f, 0, 0) == 0:
                pass
            memory.fence_acq_rel_gpu()
            seen.append(d[0])

    pointers = GlobalPointer(data, "u32"), GlobalPointer(flag, "u32")
    if name is None:
        with pytest.raises(DataRace):
            run(body, *pointers, threads=2)
    else:
        run(body, *pointers, threads=2)
        assert seen == [42]


# Shared memory -----------------------------------------------------------------------------------


def test_shared_memory_has_addresses_and_every_width():
    got = {}

    def body():
        base = memory.shared_base()
        memory.st_shared_v4_u32(base, 1, 2, 3, 0x1_FFFFFFFF)
        memory.st_shared_v2_u32(base + 16, 0x80818283, 5)
        memory.st_shared_u32(base + 24, 6)
        memory.st_shared_f32(base + 28, np.float32(1.5))
        memory.st_shared_u16(base + 32, 0x12345)
        memory.st_shared_u8(base + 34, 0x1AB)
        got["base"] = base % 1024
        got["v4"] = memory.ld_shared_v4_u32(base)
        got["v2"] = memory.ld_shared_v2_u32(base + 16)
        got["u32"] = memory.ld_shared_u32(base + 24)
        got["f32"] = memory.ld_shared_f32(base + 28)
        got["u16"] = memory.ld_shared_u16(base + 32)
        got["u8"] = memory.ld_shared_u8(base + 34)
        got["byte"] = memory.ld_shared_u8(base + 17)

    run(body, shared=64)
    assert got == {
        "base": 0,
        "v4": (1, 2, 3, 0xFFFFFFFF),
        "v2": (0x80818283, 5),
        "u32": 6,
        "f32": np.float32(1.5),
        "u16": 0x2345,
        "u8": 0xAB,
        "byte": 0x82,
    }
    assert type(got["f32"]) is np.float32


def test_shared_memory_is_checked():
    with pytest.raises(UnwrittenRead):
        run(lambda: memory.ld_shared_u32(memory.shared_base()), shared=64)
    with pytest.raises(OutOfBounds):
        run(lambda: memory.st_shared_u32(memory.shared_base() + 64, 1), shared=64)
    with pytest.raises(Misaligned):
        run(lambda: memory.st_shared_v4_u32(memory.shared_base() + 8, 1, 2, 3, 4), shared=64)


def test_threads_of_a_block_add_in_shared_memory():
    out = np.zeros(2, np.uint32)

    def body(p):
        base = memory.shared_base()
        if warp.lane_id() == 0:
            memory.st_shared_v2_u32(base, 0, 0)
        warp.syncwarp(0xFFFFFFFF)
        memory.atom_add_shared_u32(base, 2)
        memory.atom_max_shared_u32(base + 4, warp.lane_id())
        warp.syncwarp(0xFFFFFFFF)
        if warp.lane_id() == 0:
            p[0] = memory.ld_shared_u32(base)
            p[1] = memory.ld_shared_u32(base + 4)

    run(body, GlobalPointer(out, "u32"), threads=32, shared=64)
    assert out.tolist() == [64, 31]


def test_errors_of_the_simulation_have_one_base():
    assert issubclass(Misaligned, SimulationError)
