"""A bound kernel on the simulated machine gives what the models give by themselves."""

import numpy as np
import pytest

from nvfp4 import compile as compiling
from nvfp4.ptx.rounding import bits_of, float_of
from nvfp4.sim import Machine
from tests.ptx import every_instruction, one_a_thread

FAMILIES = ("arith", "bits", "convert", "packed")


def chosen(family: str) -> list:
    every = every_instruction.instructions()
    return [
        one for one in every if one.model.__module__.endswith(family) and one_a_thread.fits(one)
    ]


def directly(one, words: list[int]) -> list[int]:
    """The words of the result of a call of the model."""
    signed = [word - (1 << 32) if word >> 31 else word for word in words]
    make = {
        "bool": lambda k: words[k] & 4 == 0,
        "f32": lambda k: float_of(words[k]),
        "i32": lambda k: words[k],
        "i64": lambda k: signed[k] * 3,
        "u32": lambda k: words[k],
    }
    operands = [make[kind](k) for k, kind in enumerate(one.parameters)]
    if one.name in ("div_u32", "rem_u32"):
        operands[1] |= 1
    result = one(*operands)
    if one.result == "f32":
        return [bits_of(result)]
    if one.result == "i64":
        return [result & 0xFFFFFFFF, result >> 32 & 0xFFFFFFFF]
    return [int(result) & 0xFFFFFFFF]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_simulated_kernel_gives_what_the_models_give(family):
    made, results = one_a_thread.kernel(f"test_{family}", chosen(family))
    operands = one_a_thread.words(256)
    slots = sum(count for _, count in results)
    got = one_a_thread.run(made, slots, operands, np.asarray, Machine("sm_90a", checks=False))
    rows = operands.reshape(-1, one_a_thread.OPERANDS).tolist()
    want = [[word for one in chosen(family) for word in directly(one, row)] for row in rows]
    assert np.array_equal(got, np.array(want, np.uint32).T)


def test_the_kernel_for_the_card_compiles():
    made, _ = one_a_thread.kernel("test_warp", chosen("warp"))
    binary, ptx = compiling.inspect(made.program(), "sm_90a")
    assert compiling.faults(binary, ptx) == ()
    assert ptx.count("shfl.sync") == 8


def test_every_family_is_covered():
    names = {one.name for family in (*FAMILIES, "warp") for one in chosen(family)}
    left_out = {
        one.name
        for one in every_instruction.instructions()
        if one.model.__module__.rsplit(".", 1)[1] in (*FAMILIES, "warp") and one.name not in names
    }
    # A compile-time table, and one without a result.
    assert left_out == {"lop3", "syncwarp"}
