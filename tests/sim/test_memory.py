"""Pointers and shared memory: what is loaded is what was stored, byte by byte."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4 import sim
from nvfp4.sim import GlobalPointer, Machine, SharedMemory, cuda, this_thread

INTEGERS = ["u8", "u16", "u32", "u64", "i32", "i64"]


def aligned(nbytes, to=32):
    """Bytes whose address is a multiple of `to`."""
    memory = np.zeros(nbytes + to, np.uint8)
    start = -memory.ctypes.data % to
    return memory[start : start + nbytes]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_python_ints_of_the_types_width(dtype):
    memory = aligned(64)
    pointer = GlobalPointer(memory, dtype, "p")
    bits, signed = int(dtype[1:]), dtype[0] == "i"
    assert len(pointer) == 64 * 8 // bits
    for value in (0, 1, -1, 127, 128, 255, 256, 2**31, -(2**31), 2**63, -(2**63), 2**64 - 1):
        pointer[3] = value
        expected = value % (1 << bits)
        assert pointer.load(3, bits // 8) == expected
        if signed and expected >> (bits - 1):
            expected -= 1 << bits
        assert pointer[3] == expected
        assert type(pointer[3]) is int
    assert memory[: 3 * bits // 8].tobytes() == bytes(3 * bits // 8)


def test_floats_are_float32_and_keep_every_bit():
    memory = aligned(64)
    pointer = GlobalPointer(memory, "f32", "p")
    for bits in (0, 0x80000000, 1, 0x7F800000, 0x7FC00001, 0xFFC12345, 0x3F800000, 0x007FFFFF):
        value = np.uint32(bits).view(np.float32)
        pointer[5] = value
        assert pointer.load(5, 4) == bits
        assert type(pointer[5]) is np.float32
        assert int(pointer[5].view(np.uint32)) == bits
    pointer[0] = 0.1
    assert pointer[0] == np.float32(0.1)


@pytest.mark.parametrize("nbytes", [1, 2, 4, 8, 16, 32])
def test_vectors_are_little_endian(nbytes):
    memory = aligned(64)
    memory[:] = np.arange(64)
    pointer = GlobalPointer(memory, "u8", "p")
    assert pointer.load(32, nbytes) == int.from_bytes(bytes(range(32, 32 + nbytes)), "little")
    pointer.store(0, nbytes, (1 << 300) - 2)
    assert memory[:nbytes].tobytes() == b"\xfe" + b"\xff" * (nbytes - 1)
    assert memory[nbytes:].tolist() == list(range(nbytes, 64))


def test_the_address_is_the_arrays_own_and_alignment_is_that_of_the_address():
    memory = aligned(64)
    pointer = GlobalPointer(memory[4:], "u8", "p")
    assert pointer.address == memory.ctypes.data + 4
    assert pointer.load(12, 16) == 0
    with pytest.raises(sim.Misaligned):
        pointer.load(0, 16)
    odd = GlobalPointer(memory[1:], "u32", "odd")
    with pytest.raises(sim.Misaligned, match=r"odd\[0\]"):
        odd[0]
    with pytest.raises(sim.Misaligned):
        odd[0] = 1


@pytest.mark.parametrize("index", [-1, 16, 1 << 40, -(1 << 40)])
def test_indices_outside_of_the_array_are_errors_both_ways(index):
    pointer = GlobalPointer(aligned(64), "u32", "p")
    with pytest.raises(sim.OutOfBounds, match="16 elements of u32"):
        pointer[index]
    with pytest.raises(IndexError):
        pointer[index] = 1
    with pytest.raises(sim.OutOfBounds):
        pointer.atomic("add", index, 1)


def test_an_empty_array_has_nothing():
    pointer = GlobalPointer(np.empty((0, 5), np.float32), "f32", "p")
    assert len(pointer) == 0
    with pytest.raises(sim.OutOfBounds):
        pointer[0]


def test_a_trailing_part_of_an_element_is_out_of_bounds():
    pointer = GlobalPointer(aligned(7), "u32", "p")
    assert len(pointer) == 1
    with pytest.raises(sim.OutOfBounds):
        pointer[1]


def test_any_dtype_is_seen_through_any_pointer():
    values = np.array([1.0, -2.0, 0.5], ml_dtypes.bfloat16)
    pointer = GlobalPointer(values, "u16", "p")
    assert [pointer[i] for i in range(3)] == [0x3F80, 0xC000, 0x3F00]


def test_rows_of_a_strided_array_are_reached_and_the_gaps_are_not():
    base = np.zeros((4, 8), np.uint16)
    base[:] = np.arange(32).reshape(4, 8)
    rows = base[:, :5]
    pointer = GlobalPointer(rows, "u16", "rows")
    assert [pointer[8 * row + column] for row in range(4) for column in range(5)] == [
        8 * row + column for row in range(4) for column in range(5)
    ]
    pointer[8] = 99
    assert base[1, 0] == 99
    for index in (5, 7, 13, 29, -1):
        with pytest.raises(sim.OutOfBounds, match="rows"):
            pointer[index]
        with pytest.raises(sim.OutOfBounds):
            pointer[index] = 1
    with pytest.raises(sim.OutOfBounds, match="between the elements"):
        pointer.load(4, 4)
    assert pointer.load(2, 4) == 2 | 3 << 16


def test_a_negative_stride_is_reached_with_negative_indices():
    base = np.arange(12, dtype=np.uint32).reshape(3, 4)
    pointer = GlobalPointer(base[::-1], "u32", "p")
    assert [pointer[i] for i in range(4)] == [8, 9, 10, 11]
    assert [pointer[-4 + i] for i in range(4)] == [4, 5, 6, 7]
    assert pointer[-8] == 0
    pointer[-8] = 77
    assert base[0, 0] == 77
    for index in (4, -9):
        with pytest.raises(sim.OutOfBounds):
            pointer[index]


def test_a_broadcast_array_is_one_element():
    pointer = GlobalPointer(np.broadcast_to(np.float32(2), (5,)), "f32", "p")
    assert pointer[0] == 2
    with pytest.raises(sim.OutOfBounds):
        pointer[1]


def test_a_read_only_array_can_be_read_only():
    array = np.arange(4, dtype=np.uint32)
    array.flags.writeable = False
    pointer = GlobalPointer(array, "u32", "p")
    assert pointer[2] == 2
    for write in (
        lambda: pointer.__setitem__(0, 1),
        lambda: pointer.store(0, 4, 1),
        lambda: pointer.atomic("add", 0, 1),
    ):
        with pytest.raises(sim.ReadOnlyWrite, match="read-only"):
            write()
    assert array.tolist() == [0, 1, 2, 3]


def test_a_pointer_refuses_other_things():
    with pytest.raises(TypeError, match="NumPy array"):
        GlobalPointer([1, 2], "u8", "p")
    with pytest.raises(ValueError, match="f64"):
        GlobalPointer(np.zeros(2), "f64", "p")


ATOMICS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "exch": lambda a, b: b,
    "min": min,
    "max": max,
    "inc": lambda a, b: 0 if a >= b else a + 1,
    "dec": lambda a, b: b if a == 0 or a > b else a - 1,
}


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(ATOMICS)), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_atomics_on_u32_do_what_ptx_says_in_global_and_shared_memory(name, old, value):
    expected = ATOMICS[name](old, value) % 2**32
    pointer = GlobalPointer(np.array([7, old], np.uint32), "u32", "p")
    assert pointer.atomic(name, 1, value) == old
    assert [pointer[0], pointer[1]] == [7, expected]
    shared = SharedMemory(8)
    shared.store(shared.base + 4, 4, old)
    assert shared.atomic(name, shared.base + 4, value, "u32") == old
    assert shared.load(shared.base + 4, 4) == expected


def test_atomics_know_signs_and_floats():
    pointer = GlobalPointer(np.array([-5], np.int32), "i32", "p")
    assert pointer.atomic("max", 0, -7) == -5
    assert pointer[0] == -5
    assert pointer.atomic("min", 0, 2**32 - 9) == -5
    assert pointer[0] == -9
    assert pointer.atomic("add", 0, -(2**31)) == -9
    assert pointer[0] == 2**31 - 9
    floats = GlobalPointer(np.array([0.1, np.nan], np.float32), "f32", "p")
    assert floats.atomic("add", 0, np.float32(0.2)) == np.float32(0.1)
    assert floats[0] == np.float32(np.float32(0.1) + np.float32(0.2))
    floats.atomic("max", 1, np.float32(3))
    assert floats[1] == 3
    with pytest.raises(sim.InvalidOperand, match="xor"):
        floats.atomic("xor", 0, np.float32(1))
    with pytest.raises(sim.InvalidOperand, match="'mul'"):
        floats.atomic("mul", 0, np.float32(1))


def test_cas_stores_only_where_it_finds_what_it_expects():
    pointer = GlobalPointer(np.array([5], np.uint64), "u64", "p")
    assert pointer.atomic("cas", 0, 9, 4) == 5
    assert pointer[0] == 5
    assert pointer.atomic("cas", 0, 9, 5) == 5
    assert pointer[0] == 9


def test_shared_memory_starts_where_no_forgotten_base_hides_and_is_poisoned():
    shared = SharedMemory(64)
    assert shared.base % 1024 == 0
    assert shared.base > 0
    assert shared.load(shared.base, 8) == 0xAAAAAAAAAAAAAAAA
    for nbytes in (1, 2, 4, 8, 16):
        value = int.from_bytes(bytes(range(1, nbytes + 1)), "little")
        shared.store(shared.base + 16, nbytes, value)
        assert shared.load(shared.base + 16, nbytes) == value
        assert shared.load(shared.base + 16, 1) == 1
    for address, nbytes in ((shared.base - 1, 1), (shared.base + 64, 1), (shared.base + 60, 8)):
        with pytest.raises((sim.OutOfBounds, sim.Misaligned)):
            shared.load(address, nbytes)
        with pytest.raises((sim.OutOfBounds, sim.Misaligned)):
            shared.store(address, nbytes, 0)


def test_each_block_has_fresh_shared_memory():
    found = []

    def body():
        shared = this_thread().block.shared
        found.append(shared.load(shared.base, 4))
        shared.store(shared.base, 4, 1)

    Machine(checks=False).run(body, 3, 1, 4)
    assert found == [0xAAAAAAAA] * 3


@pytest.mark.parametrize("checks", [True, False])
def test_bytes_of_one_word_belong_to_different_threads(checks):
    def body(out):
        i = cuda.threadIdx.x
        shared = this_thread().block.shared
        shared.store(shared.base + i, 1, i)
        out[cuda.grid(1)] = i + 1
        cuda.syncthreads()
        if i % 16 == 0:
            out.store(cuda.grid(1), 16, shared.load(shared.base + i, 16))

    out = aligned(128)
    Machine(checks=checks).run(body, 2, 64, 64, (GlobalPointer(out, "u8", "out"),))
    assert out.tolist() == [*range(64)] * 2


def test_two_pointers_to_one_array_share_what_is_known_of_it():
    def body(words, bytes_):
        if cuda.blockIdx.x == 0:
            words[1] = 5
        else:
            bytes_[7] = 1

    array = aligned(16)
    machine = Machine()
    with pytest.raises(sim.DataRace, match="byte 7"):
        machine.run(
            body, 2, 1, 0, (GlobalPointer(array, "u32", "a"), GlobalPointer(array, "u8", "b"))
        )


def test_memory_by_address_finds_the_buffer():
    array = np.arange(16, dtype=np.uint8)
    seen = []

    def body(p):
        memory = this_thread().machine.memory
        seen.append(memory.read(p.address + 3, 4))
        memory.write(p.address + 8, b"ab")

    Machine().run(body, 1, 1, 0, (GlobalPointer(array, "u8", "p"),))
    assert seen == [bytes([3, 4, 5, 6])]
    assert array[7:11].tolist() == [7, 97, 98, 10]

    def wrong(p):
        this_thread().machine.memory.read(p.address + 14, 4)

    with pytest.raises(sim.OutOfBounds, match="every buffer"):
        Machine().run(wrong, 1, 1, 0, (GlobalPointer(array, "u8", "p"),))


def test_a_launch_leaves_nothing_behind_on_its_pointers():
    def body(out):
        out[0] = cuda.blockIdx.x == 0

    pointer = GlobalPointer(np.zeros(1, np.uint32), "u32", "out")
    machine = Machine()
    machine.run(body, 1, 1, 0, (pointer,))
    # What one launch wrote is ordered before the next.
    machine.run(body, 1, 1, 0, (pointer,))
    assert pointer.region is None
    assert pointer[0] == 1
