"""A kernel whose threads each run instructions on operands of their own, on a card or simulated."""

from collections.abc import Callable

import numpy as np

from nvfp4 import launch
from nvfp4._numba import cuda
from nvfp4.arrays import as_array
from nvfp4.program import Kernel
from nvfp4.ptx.arith import i64_of_i32, or_u32, select_u32, u32_of_i64
from nvfp4.ptx.bits import float_as_uint, uint_as_float
from nvfp4.ptx.instruction import Instruction, split_tuple

BLOCK = 128
OPERANDS = 9

#: Words that are edges of integers and of float32, bfloat16 pairs and float16 pairs.
SPECIAL = [0, 1, 2, 3, 31, 32, 33, 63, 0x7F, 0x80, 0xFF, 0x7C00, 0x7FFF, 0x8000, 0xFFFF, 0x10000]
SPECIAL += [0x00400000, 0x007FFFFF, 0x00800000, 0x33800000, 0x3E800000, 0x3E800001, 0x3F000000]
SPECIAL += [0x3F3FFFFF, 0x3F400000, 0x3F800000, 0x3F803F80, 0x3C003C00, 0x40A00000, 0x40A00001]
SPECIAL += [0x43E80000, 0x43E80001, 0x477FFFFF, 0x4B000001, 0x4EFFFFFF, 0x4F800000, 0x7BFF7BFF]
SPECIAL += [0x7C007C00, 0x7C017E00, 0x7E800000, 0x7F7F7F7F, 0x7F7FFFFF, 0x7F800000, 0x7F800001]
SPECIAL += [0x7F807F80, 0x7F81FFC0, 0x7FC00000, 0x7FFFFFFF, 0x80000000, 0xAAAAAAAA]
SPECIAL += [word ^ 0x80008000 for word in SPECIAL] + [word ^ 0x80000000 for word in SPECIAL]


def words(threads: int, seed: int = 1) -> np.ndarray:
    """Operands: special words, small numbers, floats near 1, any words."""
    random = np.random.default_rng(seed)
    count = threads * OPERANDS
    special = random.choice(np.array(SPECIAL, np.uint32), count)
    small = random.integers(0, 64, count, dtype=np.uint32)
    near = random.integers(0x3B000000, 0x43000000, count, dtype=np.uint32)
    near |= random.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
    anything = random.integers(0, 1 << 32, count, dtype=np.uint32)
    return np.choose(random.integers(0, 4, count), [special, small, near, anything])


def _operand(kind: str, number: int, one: Instruction) -> str:
    word = f"w{number}"
    if one.names[number] == "mask" and "warp" in one.model.__module__:
        return "0xFFFFFFFF"
    if one.name in ("div_u32", "rem_u32") and number == 1:
        return f"or_u32({word}, 1)"
    return {
        "bool": f"({word} & 4) == 0",
        "f32": f"uint_as_float({word})",
        "i32": word,
        "i64": f"i64_of_i32({word}) * 3",
        "u32": word,
    }[kind]


def _result(kind: str, value: str) -> list[str]:
    if kind == "i64":
        return [f"u32_of_i64({value})", f"u32_of_i64({value} >> 32)"]
    made = {"bool": f"select_u32({value}, 1, 0)", "f32": f"float_as_uint({value})"}
    return [made.get(kind, value)]


def fits(one: Instruction) -> bool:
    """Whether it takes and gives numbers only."""
    kinds = {split_tuple(kind)[0] for kind in one.parameters}
    return one.result != "void" and not kinds & {"ptr", "imm"}


def kernel(name: str, chosen: list[Instruction]) -> tuple[Kernel, list[tuple[str, int]]]:
    """The kernel, and (instruction's name, words of its result) in the order of the results."""
    lines = ["def body(w, out, count):", f"    i = cuda.blockIdx.x * {BLOCK} + cuda.threadIdx.x"]
    lines += [f"    w{k} = w[i * {OPERANDS} + {k}]" for k in range(OPERANDS)]
    results: list[tuple[str, int]] = []
    slot = 0
    for k, one in enumerate(chosen):
        operands = [_operand(kind, number, one) for number, kind in enumerate(one.parameters)]
        lines.append(f"    value{k} = {one.name}({', '.join(operands)})")
        parts = _result(one.result, f"value{k}")
        for part in parts:
            lines.append(f"    out[{slot} * count + i] = {part}")
            slot += 1
        results.append((one.name, len(parts)))
    scope: dict[str, object] = {one.name: one for one in chosen}
    scope |= {"cuda": cuda, "float_as_uint": float_as_uint, "i64_of_i32": i64_of_i32}
    scope |= {"or_u32": or_u32, "select_u32": select_u32, "u32_of_i64": u32_of_i64}
    scope |= {"uint_as_float": uint_as_float, "__name__": __name__}
    exec("\n".join(lines) + "\n", scope)
    return Kernel(name, scope["body"], ("u32*", "u32*", "i64"), threads=BLOCK), results


def run(made: Kernel, slots: int, operands: np.ndarray, to_device: Callable, machine=None):
    """The results, [slots, threads], as the caller's kind of array."""
    threads = operands.size // OPERANDS
    out = to_device(np.full((slots, threads), 0xDEADBEEF, np.uint32))
    call = launch.Launch(made.program(), threads // BLOCK, BLOCK, 0, ("w", "out", threads))
    arrays = {"w": as_array(to_device(operands), "w"), "out": as_array(out, "out")}
    launch.run([call], arrays, machine=machine)
    return out
