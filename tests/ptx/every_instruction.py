"""One kernel that uses every instruction, made from the instructions themselves."""

import importlib
from types import ModuleType

from nvfp4.program import Kernel
from nvfp4.ptx import memory
from nvfp4.ptx.instruction import Instruction, split_tuple

FAMILIES = ("arith", "bits", "memory", "warp", "control", "convert", "packed", "scaled")

# Values for compile-time parameters, by instruction or by parameter.
IMMEDIATES = {("lop3", "table"): (0xE8,)}
OPERANDS = {
    "bool": "(i32[{}] > 5)",
    "f32": "x[{}]",
    "i32": "i32[{}]",
    "i64": "i64[{}]",
    "ptr": "w",
    "u32": "w[{}]",
}
HINTS = {True: memory.LOAD_HINTS, False: memory.STORE_HINTS}


def modules() -> list[ModuleType]:
    return [importlib.import_module(f"nvfp4.ptx.{name}") for name in FAMILIES]


def instructions() -> list[Instruction]:
    """Every instruction, each once, in the order of definition."""
    return [
        value
        for module in modules()
        for value in vars(module).values()
        if isinstance(value, Instruction) and value.model.__module__ == module.__name__
    ]


def _immediate_values(instruction: Instruction, parameter: str) -> tuple:
    if parameter == "hint":
        return HINTS[instruction.name.startswith("ld_")]
    return IMMEDIATES[instruction.name, parameter]


def _calls(instruction: Instruction) -> list[str]:
    """Texts of calls, one for each value of a compile-time parameter."""
    texts = [[]]
    number = 0
    for kind, name in zip(instruction.parameters, instruction.names, strict=True):
        if kind == "imm":
            values = [repr(value) for value in _immediate_values(instruction, name)]
        else:
            values = [OPERANDS[kind].format(number)]
            number += 1
        texts = [[*text, value] for text in texts for value in values]
    return [f"{instruction.name}({', '.join(text)})" for text in texts]


def source(chosen: list[Instruction]) -> str:
    """The text of the kernel's body."""
    lines = ["def body(w, x, i32, i64, out_w, out_x, out_i):"]
    slot = 0
    for instruction in chosen:
        scalar, count = split_tuple(instruction.result)
        for call in _calls(instruction):
            # A name for each value: Numba joins the types of a name's values.
            name = f"value{slot}"
            lines.append(f"    {name} = {call}" if scalar != "void" else f"    {call}")
            for part in range(count or (scalar != "void")):
                value = f"{name}[{part}]" if count else name
                if scalar == "bool":
                    value = f"select_u32({value}, 1, 0)"
                target = {"f32": "out_x", "i64": "out_i", "i32": "out_i"}.get(scalar, "out_w")
                lines.append(f"    {target}[{slot}] = {value}")
                slot += 1
    return "\n".join(lines) + "\n"


def kernel(chosen: list[Instruction] | None = None) -> Kernel:
    chosen = instructions() if chosen is None else chosen
    scope = {instruction.name: instruction for instruction in chosen}
    scope["select_u32"] = next(i for i in instructions() if i.name == "select_u32")
    scope["__name__"] = __name__
    exec(source(chosen), scope)
    types = ("u32*", "f32*", "i32*", "i64*", "u32*", "f32*", "i64*")
    return Kernel("every_instruction", scope["body"], types)
