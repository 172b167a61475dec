"""The present card computes what the models say: every instruction, and conversions in bulk."""

import numpy as np
import pytest

from nvfp4 import golden, launch
from nvfp4._numba import cuda
from nvfp4.arrays import as_array
from nvfp4.driver import current_device
from nvfp4.program import Kernel
from nvfp4.ptx.convert import e2m1x2_of_f32, e2m1x8_of_f32, e4m3x2_of_f32, e5m2x2_of_f32
from nvfp4.sim import Machine
from tests.ptx import every_instruction, one_a_thread

cp = pytest.importorskip("cupy")

# PTX leaves a NaN's payload open here; the models give the canonical one.
ANY_NAN = {"abs_f32", "neg_f32"}
# Lanes of the simulated machine run one at a time.
NOT_COMPARED = {"activemask"}


def same(name: str, card: np.ndarray, model: np.ndarray) -> np.ndarray:
    equal = card == model
    if name in ANY_NAN:
        infinity = np.uint32(0x7F800000)
        magnitudes = card & np.uint32(0x7FFFFFFF), model & np.uint32(0x7FFFFFFF)
        equal |= (magnitudes[0] > infinity) & (magnitudes[1] > infinity)
    if name.startswith("amax_"):
        # The sign of a NaN is open.
        for shift in (0, 16):
            nan = model >> np.uint32(shift) & np.uint32(0xFFFF) == 0x7FFF
            flip = np.where(nan, np.uint32(0x8000 << shift), np.uint32(0))
            card = card & ~flip
        equal |= card == model
    return equal


@pytest.mark.parametrize("family", ["arith", "bits", "convert", "packed", "warp"])
def test_the_card_gives_what_the_models_give(family):
    chosen = [
        one
        for one in every_instruction.instructions()
        if one.model.__module__.endswith(f".{family}")
        and one_a_thread.fits(one)
        and one.name not in NOT_COMPARED
    ]
    made, results = one_a_thread.kernel(f"test_{family}", chosen)
    operands = one_a_thread.words(4096, seed=3)
    slots = sum(count for _, count in results)
    card = one_a_thread.run(made, slots, operands, cp.asarray).get()
    machine = Machine(launch.architecture(current_device()), checks=False)
    model = one_a_thread.run(made, slots, operands, np.asarray, machine)
    names = [name for name, count in results for _ in range(count)]
    wrong = {}
    for name, on_card, by_model in zip(names, card, model, strict=True):
        bad = np.flatnonzero(~same(name, on_card, by_model))
        if bad.size:
            at = bad[0]
            row = operands[at * one_a_thread.OPERANDS :][: one_a_thread.OPERANDS]
            wrong[name] = (
                f"{bad.size} of {on_card.size}; operands {[hex(word) for word in row]}: "
                f"card {on_card[at]:#x}, model {by_model[at]:#x}"
            )
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def convert(x, out_e2m1, out_e2m1x8, out_e4m3, out_e5m2, count):
    i = cuda.blockIdx.x * 128 + cuda.threadIdx.x
    a = x[2 * i + 1]
    b = x[2 * i]
    out_e2m1[i] = e2m1x2_of_f32(a, b)
    out_e4m3[i] = e4m3x2_of_f32(a, b)
    out_e5m2[i] = e5m2x2_of_f32(a, b)
    k = 8 * (i % (count // 8))
    out_e2m1x8[i] = e2m1x8_of_f32(
        x[k], x[k + 1], x[k + 2], x[k + 3], x[k + 4], x[k + 5], x[k + 6], x[k + 7]
    )


def test_sixteen_million_patterns_convert_on_the_card_as_the_golden_model_says():
    count = 1 << 24
    index = np.arange(count, dtype=np.uint64)
    patterns = (index * 256 + index * 0x9E3779B1 % 256).astype(np.uint32)
    edges = np.array(one_a_thread.SPECIAL, np.uint32)
    patterns[: edges.size] = edges
    values = patterns.view(np.float32)
    names = ("out_e2m1", "out_e2m1x8", "out_e4m3", "out_e5m2")
    kinds = ("f32*", *["u32*"] * 4, "i64")
    made = Kernel("test_convert_bulk", convert, kinds, threads=128)
    call = launch.Launch(made.program(), count // 256, 128, 0, ("x", *names, count))
    outs = {name: cp.full(count // 2, 0xDEADBEEF, cp.uint32) for name in names}
    arrays = {name: as_array(out, name) for name, out in outs.items()}
    launch.run([call], {"x": as_array(cp.asarray(values), "x"), **arrays})
    for name, encode, bits in (
        ("out_e2m1", golden.encode_e2m1, 4),
        ("out_e4m3", golden.encode_e4m3, 8),
        ("out_e5m2", golden.encode_e5m2, 8),
    ):
        codes = encode(values).astype(np.uint32)
        want = codes[1::2] << np.uint32(bits) | codes[::2]
        assert np.array_equal(outs[name].get(), want), name
    codes = golden.encode_e2m1(values).reshape(-1, 8).astype(np.uint64)
    words = (codes << (4 * np.arange(8, dtype=np.uint64))).sum(axis=1).astype(np.uint32)
    got = outs["out_e2m1x8"].get()
    assert np.array_equal(got, np.resize(words, got.size))
