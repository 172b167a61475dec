"""The only module that imports numba and llvmlite, and only when something is compiled.

Kernels write ``from .._numba import cuda`` and use ``cuda.threadIdx.x``: `cuda` here is a
placeholder that binding replaces by Numba's module or by the simulated machine's
(``nvfp4.program``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .errors import ToolchainError
from .ptx.instruction import ANY, Instruction, split_tuple


class _CudaPlaceholder:
    """Stands for ``numba.cuda`` in a kernel's module until a program is bound."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"cuda.{name} has no meaning outside a running kernel: kernels run through "
            "nvfp4.launch, or on the simulated machine inside `with nvfp4.simulate():`"
        )

    def __repr__(self) -> str:
        return "<cuda, bound when a program is>"


cuda: Any = _CudaPlaceholder()

#: True in a process that was started with NUMBA_ENABLE_CUDASIM=1.
SIMULATED_PROCESS = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


@functools.cache
def numba_cuda() -> ModuleType:
    """``numba.cuda``, imported now.

    Raises
    ------
    ToolchainError
        numba-cuda is not installed, or this process was started with NUMBA_ENABLE_CUDASIM=1, in
        which Numba cannot compile.
    """
    if SIMULATED_PROCESS:
        raise ToolchainError(
            "NUMBA_ENABLE_CUDASIM is set: Numba compiles nothing in this process; "
            "unset it and start anew"
        )
    try:
        from numba import cuda as module
        from numba.cuda import lowering  # plain numba has a numba.cuda too, without it
    except ImportError as error:
        raise ToolchainError(
            "compiling a kernel needs numba-cuda; install it with: "
            "pip install 'numba-cuda>=0.30.4,<0.31'"
        ) from error
    lowering.Lower._find_singly_assigned_variable = _find_singly_assigned_variable
    return module


def _find_singly_assigned_variable(lower: Any) -> None:
    """What Numba's method of this name does, in time linear in the length of a block.

    Numba searches a block once for each of its variables, which takes three quarters of the time
    that a long straight kernel takes to build.
    """
    from collections import Counter

    from numba.cuda.core import ir
    from numba.cuda.lowering import compute_use_defs, must_use_alloca

    blocks = lower.func_ir.blocks
    found = set()
    if not lower.func_ir.func_id.is_generator:
        use_defs = compute_use_defs(blocks)
        kept_in_memory = must_use_alloca(blocks)
        defining = Counter(name for names in use_defs.defmap.values() for name in names)
        used_elsewhere = {name for names in use_defs.usemap.values() for name in names}
        for label, names in use_defs.defmap.items():
            assignments = lower.blocks[label].find_insts(ir.assign_types)
            assigned = Counter(statement.target.name for statement in assignments)
            found |= {
                name
                for name in names
                if defining[name] == 1
                and assigned[name] == 1
                and name not in used_elsewhere
                and name not in kept_in_memory
            }
    lower._singly_assigned_vars = found
    lower._blk_local_varmap = {}


_PTX_CLASS = {
    "bool": "r",
    "u16": "h",
    "i32": "r",
    "u32": "r",
    "i64": "l",
    "u64": "l",
    "f32": "f",
    "ptr": "l",
}


def _scalar_type(name: str) -> Any:
    from numba.core import types

    return {
        "bool": types.boolean,
        "u16": types.uint16,
        "i32": types.int32,
        "u32": types.uint32,
        "i64": types.int64,
        "u64": types.uint64,
        "f32": types.float32,
        "void": types.void,
    }[name]


def numba_type(name: str) -> Any:
    """Numba's type for a kernel's parameter (``"u8*"``, ``"i64"``) or an instruction's."""
    from numba.core import types

    if name in ("f16*", "bf16*"):
        return _half_pointer(name)
    if name.endswith("*"):
        element = {"u8": types.uint8, "u16": types.uint16, "u32": types.uint32, "u64": types.uint64}
        element |= {"i32": types.int32, "i64": types.int64, "f32": types.float32}
        return types.CPointer(element[name[:-1]])
    scalar, count = split_tuple(name)
    return types.UniTuple(_scalar_type(scalar), count) if count else _scalar_type(scalar)


@functools.cache
def _half_pointer_class() -> Any:
    """The type of pointers to 16-bit floats, whose elements are read as float32, exactly.

    Numba's own bfloat16 needs a library linked in.
    """
    import operator

    from llvmlite import ir
    from numba.core import types
    from numba.cuda.cudaimpl import lower  # type: ignore[attr-defined]
    from numba.cuda.descriptor import cuda_target

    class HalfPointer(types.CPointer):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            super().__init__(types.float32)
            self.name = name

        @property
        def key(self) -> str:
            return str(self.name)

    @lower(operator.getitem, HalfPointer, types.Integer)  # type: ignore[untyped-decorator]
    def read(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, index = ir.IntType(16), arguments[1]
        element = builder.gep(builder.bitcast(arguments[0], word.as_pointer()), [index])
        value = builder.load(element)
        if signature.args[0].name == "f16*":
            return builder.fpext(builder.bitcast(value, ir.HalfType()), ir.FloatType())
        wide = builder.shl(builder.zext(value, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(wide, ir.FloatType())

    manager = cuda_target.target_context.data_model_manager
    manager.register(HalfPointer, type(manager[types.CPointer(types.float32)]))
    return HalfPointer


@functools.cache
def _half_pointer(name: str) -> Any:
    """``"f16*"`` or ``"bf16*"`` as Numba's type."""
    return _half_pointer_class()(name)


def intrinsic_of(
    instruction: Instruction, cc: tuple[int, int], release: tuple[int, int] | None = None
) -> Any:
    """The instruction as a Numba intrinsic for compute capability `cc`.

    `release` is the CUDA release of the compilers, None: new enough.

    Raises
    ------
    ToolchainError
        The instruction has no lowering for this architecture, or these compilers do not know it.
    """
    lowering = instruction.lowering_for(cc, release)
    if lowering is None:
        newer = instruction.lowering_for(cc)
        if newer is not None and release is not None:
            raise ToolchainError(
                "instruction {} needs NVVM and nvJitLink of CUDA {}.{} or newer; got {}.{}".format(
                    instruction.name, *newer.min_release, *release
                )
            )
        needed = min(low.min_cc for low in instruction.lowerings) if instruction.lowerings else None
        raise ToolchainError(
            f"instruction {instruction.name} has no lowering for compute capability "
            f"{cc[0]}.{cc[1]}; it needs {needed}"
        )
    return _make_intrinsic(instruction, lowering)


@functools.cache
def _make_intrinsic(instruction: Instruction, lowering: Any) -> Any:
    numba_cuda()
    from llvmlite import ir
    from numba.core import cgutils, types
    from numba.core.errors import TypingError
    from numba.cuda.extending import _intrinsic  # type: ignore[attr-defined]

    result, result_count = split_tuple(instruction.result)
    llvm = {
        "bool": ir.IntType(1),
        "u16": ir.IntType(16),
        "i32": ir.IntType(32),
        "u32": ir.IntType(32),
        "i64": ir.IntType(64),
        "u64": ir.IntType(64),
        "f32": ir.FloatType(),
        "void": ir.VoidType(),
    }

    def accepts(kind: str, given: Any) -> Any:
        """The type the argument is cast to, or None where it does not fit."""
        if kind == "ptr":
            return given if isinstance(given, types.CPointer) else None
        if kind == "imm":
            return given if isinstance(given, types.Literal) else None
        scalar, number = split_tuple(kind)
        if number:
            fits = isinstance(given, types.BaseTuple) and number in (ANY, len(given))
            return types.UniTuple(_scalar_type(scalar), len(given)) if fits else None
        wanted = _scalar_type(scalar)
        if kind == "f32":
            return wanted if given in (types.float32,) else None
        if kind == "bool":
            return wanted if isinstance(types.unliteral(given), types.Boolean) else None
        fits = isinstance(types.unliteral(given), (types.Integer, types.Boolean))
        return wanted if fits else None

    def typing(typingctx: Any, *given: Any) -> Any:
        if len(given) == 1 and isinstance(given[0], (tuple, list)):
            given = tuple(given[0])
        wanted = tuple(
            accepts(kind, argument)
            for kind, argument in zip(instruction.parameters, given, strict=False)
        )
        lengths = {
            len(kind)
            for kind, text in zip(wanted, instruction.parameters, strict=False)
            if kind is not None and split_tuple(text)[1] == ANY
        }
        fit = len(given) == len(instruction.parameters) and None not in wanted
        if not fit or len(lengths) > 1:
            raise TypingError(
                f"{instruction.name} takes ({', '.join(instruction.parameters)}); "
                f"got ({', '.join(map(str, given))})"
            )
        immediates = {
            name: argument.literal_value
            for name, kind, argument in zip(
                instruction.names, instruction.parameters, given, strict=True
            )
            if kind == "imm"
        }
        count = result_count
        if count == ANY:
            count = lengths.pop() if lengths else immediates["count"]
        returned_type = types.UniTuple(_scalar_type(result), count) if count else None
        signature = (returned_type or numba_type(result))(*wanted)

        def codegen(context: Any, builder: Any, _sig: Any, arguments: Any) -> Any:
            operands, classes = [], []
            for kind, given_type, value in zip(
                instruction.parameters, wanted, arguments, strict=True
            ):
                scalar, number = split_tuple(kind)
                number = len(given_type) if number == ANY else number
                if kind == "imm":
                    continue
                parts = (
                    [builder.extract_value(value, i) for i in range(number)] if number else [value]
                )
                for part in parts:
                    if scalar == "bool" and lowering.asm is not None:
                        part = builder.zext(part, ir.IntType(32))
                    elif scalar == "ptr" and lowering.asm is not None:
                        part = builder.ptrtoint(part, ir.IntType(64))
                    operands.append(part)
                    classes.append(_PTX_CLASS[scalar])
            if lowering.build is not None:
                values = lowering.build(builder, ir, operands, **immediates)
                if result == "void":
                    return context.get_dummy_value()
                if count:
                    return cgutils.pack_array(builder, values)
                return values
            text = lowering.asm
            for name, value in immediates.items():
                text = text.replace("{" + name + "}", str(value))
            number_out = 0 if result == "void" else max(count, 1)
            outputs = [ir.IntType(32) if result == "bool" else llvm[result]] * number_out
            returned = ir.VoidType() if number_out == 0 else outputs[0]
            if number_out > 1:
                returned = ir.LiteralStructType(outputs)
            constraints = lowering.constraints
            if constraints is None:
                constraints = ",".join(["=" + _PTX_CLASS.get(result, "")] * number_out + classes)
            if lowering.memory:
                constraints = ",".join(filter(None, (constraints, "~{memory}")))
            function = ir.FunctionType(returned, [operand.type for operand in operands])
            code = ir.InlineAsm(function, text, constraints, side_effect=lowering.memory)
            value = builder.call(code, operands)
            if number_out == 0:
                return context.get_dummy_value()
            if number_out > 1 or count == 1:
                parts = (
                    [builder.extract_value(value, i) for i in range(number_out)]
                    if number_out > 1
                    else [value]
                )
                return cgutils.pack_array(builder, parts)
            if result == "bool":
                value = builder.icmp_unsigned("!=", value, ir.Constant(ir.IntType(32), 0))
            return value

        return signature, codegen

    # Numba reads the number and names of an intrinsic's parameters from its typing function's
    # signature.
    names = ", ".join(instruction.names)
    scope: dict[str, Any] = {"typing": typing}
    exec(
        f"def {instruction.name}(typingctx, {names}):\n    return typing(typingctx, {names})", scope
    )
    # Immediates must reach typing() as literals: prefer_literal asks Numba for them first. The
    # public decorator of
    # numba-cuda 0.30 is already bound to the target and takes no options.
    literal = "imm" in instruction.parameters
    return _intrinsic(target="cuda", prefer_literal=literal)(scope[instruction.name])


def device_function(function: Callable[..., Any], cc: tuple[int, int]) -> Any:
    """A bound helper function as a Numba device function for compute capability `cc`.

    Each is typed once for each combination of argument types and inlined by LLVM: inlining in Numba
    types every call anew, which takes five times as long to build a quantiser and gives the same
    machine code. The exception: a helper with a parameter annotated ``str``, a choice made at
    compile time, is inlined by Numba, which then drops the branches not taken before it types the
    rest.
    """
    module = numba_cuda()
    if any(kind in ("str", str) for kind in function.__annotations__.values()):
        return module.jit(device=True, inline="always")(function)
    made = module.jit(device=True, forceinline=True)(function)
    # Numba would ask the driver for the current device, for its compute capability alone.
    made.compile_device = functools.partial(_compile_device_function, made, cc)
    return made


def _compile_device_function(
    made: Any, cc: tuple[int, int], args: Any, return_type: Any = None
) -> Any:
    """What ``CUDADispatcher.compile_device`` does, for a compute capability that is given."""
    from numba.cuda.compiler import compile_cuda

    if args not in made.overloads:
        with made._compiling_counter:
            result = compile_cuda(
                made.py_func,
                return_type,
                args,
                forceinline=True,
                inline="never",
                nvvm_options={"opt": 3, "fastmath": False},
                cc=cc,
            )
            made.overloads[args] = result
            result.target_context.insert_user_function(
                result.entry_point, result.fndesc, [result.library]
            )
    return made.overloads[args]


def compile_to_ltoir(
    function: Callable[..., Any],
    parameters: tuple[str, ...],
    cc: tuple[int, int, str],
    *,
    launch_bounds: tuple[int, ...] | None = None,
    output: str = "ltoir",
) -> bytes | str:
    """Compile a bound kernel body; `output` is ``"ltoir"`` or ``"ptx"``."""
    module = numba_cuda()
    from numba.core import types

    signature = types.void(*(numba_type(name) for name in parameters))
    options: dict[str, Any] = {} if launch_bounds is None else {"launch_bounds": launch_bounds}
    code, _ = module.compile(
        function, signature, cc=cc, device=False, abi="numba", output=output, **options
    )
    return code


def simulator_modules() -> tuple[ModuleType, ModuleType, ModuleType, Callable[[Any], Any]]:
    """``numba.cuda``, its simulator's kernels, its ``libdevice``, and types to dtypes.

    Raises
    ------
    ToolchainError
        This process was not started with NUMBA_ENABLE_CUDASIM=1, or numba-cuda is not installed.
    """
    if not SIMULATED_PROCESS:
        raise ToolchainError(
            "Numba's simulator is off: start the process with NUMBA_ENABLE_CUDASIM=1"
        )
    try:
        from numba import cuda as module
        from numba.cuda import libdevice
        from numba.cuda.np.numpy_support import as_dtype
        from numba.cuda.simulator import kernel
    except ImportError as error:
        raise ToolchainError(
            "running @cuda.jit kernels needs numba-cuda; install it with: "
            "pip install 'numba-cuda>=0.30.4,<0.31'"
        ) from error
    return module, kernel, libdevice, as_dtype
