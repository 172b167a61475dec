"""Block-scaled products of a warp: what the models take from where, and the machine code."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from nvfp4 import compile as compiling
from nvfp4._numba import cuda
from nvfp4.errors import ToolchainError
from nvfp4.golden.casts import decode_e2m1, decode_e4m3, decode_e5m2, decode_e8m0
from nvfp4.program import DeviceWorld, Kernel
from nvfp4.ptx.memory import shared_base, st_shared_v4_u32
from nvfp4.ptx.mma_scaled import KINDS, ldmatrix_x4_e2m1, mma_scaled, mma_scaled_x4
from nvfp4.sim import Machine
from nvfp4.sim.errors import InvalidOperand
from tests.ptx import async_checks as checks

KIND = "nvfp4"
BYTE = 0
A_THREAD = 0
B_THREAD = 0
CASES = [(kind, byte) for kind, bytes_ in KINDS.items() for byte in bytes_]
_ALL_BYTES = (0, 1, 2, 3)
_CONSTANTS: dict[str, tuple[Any, ...]] = {
    "KIND": tuple(KINDS),
    "BYTE": _ALL_BYTES,
    "A_THREAD": _ALL_BYTES,
    "B_THREAD": _ALL_BYTES,
}


def one_product(w, x, out):
    """Eight words a lane: a, b, scales of a and of b; four sums."""
    lane = cuda.threadIdx.x
    i = lane * 8
    j = lane * 4
    d = mma_scaled(
        KIND,
        (w[i], w[i + 1], w[i + 2], w[i + 3]),
        (w[i + 4], w[i + 5]),
        (x[j], x[j + 1], x[j + 2], x[j + 3]),
        w[i + 6],
        w[i + 7],
        BYTE,
        A_THREAD,
        B_THREAD,
    )
    out[j] = d[0]
    out[j + 1] = d[1]
    out[j + 2] = d[2]
    out[j + 3] = d[3]


def four_products(w, x, out):
    """Fourteen words a lane, and sixteen sums."""
    lane = cuda.threadIdx.x
    i = lane * 14
    j = lane * 16
    d = mma_scaled_x4(
        KIND,
        (w[i], w[i + 1], w[i + 2], w[i + 3]),
        (w[i + 4], w[i + 5], w[i + 6], w[i + 7], w[i + 8], w[i + 9], w[i + 10], w[i + 11]),
        (
            *(x[j], x[j + 1], x[j + 2], x[j + 3], x[j + 4], x[j + 5], x[j + 6], x[j + 7]),
            *(x[j + 8], x[j + 9], x[j + 10], x[j + 11], x[j + 12], x[j + 13], x[j + 14], x[j + 15]),
        ),
        w[i + 12],
        w[i + 13],
        BYTE,
        A_THREAD,
    )
    out[j] = d[0]
    out[j + 1] = d[1]
    out[j + 2] = d[2]
    out[j + 3] = d[3]
    out[j + 4] = d[4]
    out[j + 5] = d[5]
    out[j + 6] = d[6]
    out[j + 7] = d[7]
    out[j + 8] = d[8]
    out[j + 9] = d[9]
    out[j + 10] = d[10]
    out[j + 11] = d[11]
    out[j + 12] = d[12]
    out[j + 13] = d[13]
    out[j + 14] = d[14]
    out[j + 15] = d[15]


def load_codes(w, x, out):
    """Each lane stores a row of eight bytes, and what it may not read; then all load."""
    lane = cuda.threadIdx.x
    row = shared_base() + lane * 16
    st_shared_v4_u32(row, w[2 * lane], w[2 * lane + 1], 0xFFFFFFFF, 0xFFFFFFFF)
    cuda.syncthreads()
    m = ldmatrix_x4_e2m1(row)
    i = 64 + 4 * lane
    w[i] = m[0]
    w[i + 1] = m[1]
    w[i + 2] = m[2]
    w[i + 3] = m[3]


_POINTERS = ("u32*", "f32*", "f32*")
ONE = Kernel("one_scaled_product", one_product, _POINTERS, _CONSTANTS, threads=32)
FOUR = Kernel("four_scaled_products", four_products, _POINTERS, _CONSTANTS, threads=32)
CODES = Kernel("load_codes", load_codes, _POINTERS, threads=32)


class Operand:
    """Rows of codes with scales, and where lanes have them."""

    def __init__(self, kind: str, side: int, high: int, seed: int) -> None:
        self.packed = kind in ("nvfp4", "mxfp4")
        self.element = "e2m1" if self.packed else kind.split(".")[side]
        self.blocks = {"nvfp4": 4, "mxfp4": 2}.get(kind, 1)
        self.depth = 64 if self.packed else 32
        rng = np.random.default_rng(seed)
        # Small values of a few exponents, so that all sums are exact.
        if self.element == "e2m1":
            self.codes = rng.integers(0, 16, (high, self.depth), np.uint8)
            values = decode_e2m1(self.codes)
        else:
            bits = {"e4m3": 3, "e5m2": 2}[self.element]
            bias = {"e4m3": 7, "e5m2": 15}[self.element]
            magnitude = rng.integers(bias - 1 << bits, bias + 2 << bits, (high, self.depth))
            sign = rng.integers(0, 2, magnitude.shape) << 7
            self.codes = (magnitude | sign).astype(np.uint8)
            values = {"e4m3": decode_e4m3, "e5m2": decode_e5m2}[self.element](self.codes)
        if kind == "nvfp4":
            self.scales = rng.integers(0x28, 0x48, (high, 4), np.uint8)
            scales = decode_e4m3(self.scales)
        else:
            self.scales = rng.integers(124, 131, (high, self.blocks), np.uint8)
            scales = decode_e8m0(self.scales)
        wide = np.repeat(scales, self.depth // self.blocks, axis=1)
        self.values = values.astype(np.float64) * wide

    def word(self, row: int, first: int) -> int:
        """The register of consecutive elements of a row from column `first` on."""
        if self.packed:
            return sum(int(self.codes[row, first + i]) << 4 * i for i in range(8))
        shift = 2 if self.element == "e2m1" else 0
        return sum(int(self.codes[row, first + i]) << 8 * i + shift for i in range(4))

    def scale_word(self, row: int, byte: int, noise: int) -> int:
        """A word with the row's scales from a byte on, and noise in the others."""
        data = bytearray(noise.to_bytes(4, "little"))
        data[byte : byte + self.blocks] = self.scales[row].tobytes()
        return int.from_bytes(data, "little")


def run(
    kernel: Kernel, kind: str, byte: int, a_thread: int, b_threads: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The sums [16, columns] that lanes get, and those that NumPy makes."""
    wide = 8 * len(b_threads)
    a, b = Operand(kind, 0, 16, 1), Operand(kind, 1, wide, 2)
    rng = np.random.default_rng(3)
    c = rng.integers(-8, 9, (16, wide)).astype(np.float32)
    # In the bytes and the lanes that are not selected.
    noise = rng.integers(0, 1 << 32, (32, 2), dtype=np.uint64)
    words: list[list[int]] = []
    place = a.depth // 8
    for lane in range(32):
        g, t = lane // 4, lane % 4
        made = [a.word(g + 8 * (i % 2), place * t + (a.depth // 2) * (i // 2)) for i in range(4)]
        for n in range(len(b_threads)):
            made += [b.word(8 * n + g, place * t + (a.depth // 2) * i) for i in range(2)]
        scales = [int(noise[lane, 0]), int(noise[lane, 1])]
        if t // 2 == a_thread:
            scales[0] = a.scale_word(g + 8 * (t % 2), byte, scales[0])
        if t in b_threads:
            n = b_threads.index(t)
            scales[1] = b.scale_word(8 * n + g, byte, scales[1])
        words.append([*made, *scales])
    lanes = np.arange(32)
    rows = (lanes // 4)[:, None] + np.array([0, 0, 8, 8])
    columns = 2 * (lanes % 4)[:, None] + np.array([0, 1, 0, 1])
    sums = np.concatenate([c[rows, columns + 8 * n] for n in range(len(b_threads))], axis=1)
    out = checks.aligned(np.full(sums.shape, np.nan, np.float32))
    buffers = {
        "w": checks.aligned(np.array(words, np.uint32)),
        "x": checks.aligned(sums),
        "out": out,
    }
    program = kernel.program(KIND=kind, BYTE=byte, A_THREAD=a_thread, B_THREAD=b_threads[0])
    checks.simulated(Machine("sm_120a")).run(program, 32, 0, buffers, "w", "x", "out")
    got = np.empty((16, wide), np.float32)
    for n in range(len(b_threads)):
        got[rows, columns + 8 * n] = out[:, 4 * n : 4 * n + 4]
    return got, (a.values @ b.values.T + c).astype(np.float32)


@pytest.mark.parametrize(("kind", "byte"), CASES)
def test_a_product_takes_scales_of_the_selected_bytes_and_threads(kind: str, byte: int) -> None:
    number = CASES.index((kind, byte))
    got, expected = run(ONE, kind, byte, number // 2 % 2, (number * 3 % 4,))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("kind", "byte"), CASES)
def test_four_products_share_the_rows(kind: str, byte: int) -> None:
    got, expected = run(FOUR, kind, byte, byte & 1, (0, 1, 2, 3))
    np.testing.assert_array_equal(got, expected)


def test_codes_are_loaded_a_byte_each() -> None:
    rng = np.random.default_rng(4)
    words = checks.aligned(np.zeros(64 + 128, np.uint32))
    words[:64] = rng.integers(0, 1 << 32, 64, np.uint64)
    data = words[:64].view(np.uint8).reshape(32, 8).copy()
    codes = np.stack([data & 15, data >> 4], axis=-1).reshape(4, 8, 4, 4)  # matrix, row, t, byte
    none = checks.aligned(np.zeros(1, np.float32))
    buffers = {"w": words, "x": none, "out": none}
    checks.simulated(Machine("sm_120a")).run(CODES.program(), 32, 512, buffers, "w", "x", "out")
    got = words[64:].view(np.uint8).reshape(8, 4, 4, 4)  # g, t, matrix, byte
    np.testing.assert_array_equal(got, codes.transpose(1, 2, 0, 3))


@pytest.mark.parametrize(
    ("kind", "word", "scale", "message"),
    [
        ("e2m1.e4m3", 0x3D, 0x7F7F7F7F, r"bits 5\.\.2 of its byte.*0x3d"),
        ("nvfp4", 0x3D, 0x38B83838, r"e4m3 scale has no sign; got 0xb8"),
    ],
)
def test_codes_and_scales_with_stray_bits_are_found(
    kind: str, word: int, scale: int, message: str
) -> None:
    words = np.zeros((32, 8), np.uint32)
    words[5, 1] = word
    words[:, 6:] = scale
    zeros = checks.aligned(np.zeros((32, 4), np.float32))
    buffers = {"w": checks.aligned(words), "x": zeros, "out": checks.aligned(zeros)}
    program = ONE.program(KIND=kind, BYTE=0, A_THREAD=0, B_THREAD=0)
    with pytest.raises(InvalidOperand, match=message):
        checks.simulated(Machine("sm_120a")).run(program, 32, 0, buffers, "w", "x", "out")


def opcode(kind: str) -> str:
    if kind == "nvfp4":
        return "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X"
    if kind == "mxfp4":
        return "OMMA.SF.16864.F32.E2M1.E2M1.E8"
    return f"QMMA.SF.16832.F32.{kind.upper()}.E8"


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "e4m3.e2m1"])
def test_products_are_one_machine_instruction_each(kind: str) -> None:
    byte = KINDS[kind][-1]
    for kernel, count in ((ONE, 1), (FOUR, 4)):
        program = kernel.program(KIND=kind, BYTE=byte, A_THREAD=1, B_THREAD=3)
        binary, ptx = compiling.inspect(program, "sm_120a")
        assert compiling.faults(binary, ptx) == ()
        found = re.findall(r"\b[OQ]MMA[\w.]*", compiling.sass(binary))
        assert found == [opcode(kind)] * count


def test_codes_are_loaded_by_one_machine_instruction() -> None:
    for arch in ("sm_100a", "sm_120a"):
        binary, _ = compiling.inspect(CODES.program(), arch)
        assert "LDSM.U4x16P64TO8.M816.4" in compiling.sass(binary)


def test_only_cards_of_capability_12_have_these_products() -> None:
    for cc in ((9, 0), (10, 0)):
        with pytest.raises(ToolchainError, match="mma_scaled has no lowering"):
            DeviceWorld(cc).instruction(mma_scaled)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"KIND": "mxfp4", "BYTE": 1}, r"byte must be one of \(0, 2\) for mxfp4; got 1"),
        ({"A_THREAD": 2}, r"a_thread must be one of \(0, 1\); got 2"),
    ],
)
def test_a_selector_that_there_is_not_is_refused_in_both_worlds(
    changes: dict[str, Any], message: str
) -> None:
    program = ONE.program(**{"KIND": "nvfp4", "BYTE": 0, "A_THREAD": 0, "B_THREAD": 0, **changes})
    with pytest.raises(Exception, match=message):
        compiling.inspect(program, "sm_120a")
    zeros = checks.aligned(np.zeros((32, 8), np.uint32))
    sums = checks.aligned(np.zeros((32, 4), np.float32))
    buffers = {"w": zeros, "x": sums, "out": checks.aligned(sums)}
    with pytest.raises(Exception, match=message):
        checks.simulated(Machine("sm_120a")).run(program, 32, 0, buffers, "w", "x", "out")
