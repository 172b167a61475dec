"""Builders of lowerings that several families share.

They see LLVM only through the builder they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Build = Callable[..., Any]


def op(name: str) -> Build:
    """One LLVM instruction of the operands, such as ``add``."""
    return lambda builder, ir, arguments: getattr(builder, name)(*arguments)


def compare_unsigned(relation: str) -> Build:
    """``icmp`` of unsigned operands; `relation` as in Python."""
    return lambda builder, ir, arguments: builder.icmp_unsigned(relation, *arguments)


def compare_signed(relation: str) -> Build:
    """``icmp`` of signed operands."""
    return lambda builder, ir, arguments: builder.icmp_signed(relation, *arguments)


def compare_float(relation: str, *, nan: bool = False) -> Build:
    """``fcmp``; `nan` is the result where an operand is NaN."""
    name = "fcmp_unordered" if nan else "fcmp_ordered"
    return lambda builder, ir, arguments: getattr(builder, name)(relation, *arguments)


def smaller(*, signed: bool) -> Build:
    """The smaller operand."""
    return _extreme("<", signed)


def larger(*, signed: bool) -> Build:
    """The larger operand."""
    return _extreme(">", signed)


def _extreme(relation: str, signed: bool) -> Build:
    def build(builder: Any, ir: Any, arguments: Any) -> Any:
        compare = builder.icmp_signed if signed else builder.icmp_unsigned
        return builder.select(compare(relation, *arguments), *arguments)

    return build


def shift(name: str) -> Build:
    """A shift by any amount: from 32 on all bits are gone, as in PTX (LLVM leaves it undefined)."""

    def build(builder: Any, ir: Any, arguments: Any) -> Any:
        value, amount = arguments
        word = ir.IntType(32)
        inside = builder.icmp_unsigned("<", amount, ir.Constant(word, 32))
        shifted = getattr(builder, name)(value, builder.and_(amount, ir.Constant(word, 31)))
        return builder.select(inside, shifted, ir.Constant(word, 0))

    return build


def with_constant(name: str, constant: int) -> Build:
    """One LLVM instruction of the operand and a 32-bit constant."""
    return lambda builder, ir, arguments: getattr(builder, name)(
        arguments[0], ir.Constant(ir.IntType(32), constant)
    )


def convert(name: str, bits: int) -> Build:
    """Conversion to an integer type of so many bits: ``zext``, ``sext``, ``trunc``."""
    return lambda builder, ir, arguments: getattr(builder, name)(arguments[0], ir.IntType(bits))


def bitcast(target: str) -> Build:
    """The same 32 bits as ``"f32"`` or ``"u32"``."""
    return lambda builder, ir, arguments: builder.bitcast(
        arguments[0], ir.FloatType() if target == "f32" else ir.IntType(32)
    )


def nothing(builder: Any, ir: Any, arguments: Any) -> None:
    """No code: for an instruction that an architecture can do without."""


# Memory ------------------------------------------------------------------------------------------


def global_address(builder: Any, ir: Any, pointer: Any, index: Any) -> Any:
    """The 64-bit address, in global memory's own space, of element `index` of a typed pointer."""
    element = builder.gep(pointer, [index])
    in_global = builder.addrspacecast(element, ir.PointerType(element.type.pointee, 1))
    return builder.ptrtoint(in_global, ir.IntType(64))


def _call(
    builder: Any, ir: Any, text: str, result: Any, outputs: list[str], operands: list[Any]
) -> Any:
    """Inline PTX that reads or writes memory."""
    classes = [_register_class(ir, operand.type) for operand in operands]
    constraints = ",".join([*("=" + letter for letter in outputs), *classes, "~{memory}"])
    function = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), operands)


def _register_class(ir: Any, kind: Any) -> str:
    if isinstance(kind, ir.FloatType):
        return "f"
    return {16: "h", 32: "r", 64: "l"}[kind.width]


def load(builder: Any, ir: Any, name: str, address: Any, count: int) -> Any:
    """``name {results}, [address];``: a value, or a list where `count` is more than one."""
    kind, letter = (ir.FloatType(), "f") if name.endswith(".f32") else (ir.IntType(32), "r")
    if count == 1:
        return _call(builder, ir, f"{name} $0, [$1];", kind, [letter], [address])
    results = ", ".join(f"${i}" for i in range(count))
    whole = ir.LiteralStructType([kind] * count)
    made = _call(
        builder, ir, f"{name} {{{results}}}, [${count}];", whole, [letter] * count, [address]
    )
    return [builder.extract_value(made, i) for i in range(count)]


def store(builder: Any, ir: Any, name: str, address: Any, values: list[Any]) -> None:
    """``name [address], {values};``."""
    operands = ", ".join(f"${i + 1}" for i in range(len(values)))
    operands = "{" + operands + "}" if len(values) > 1 else operands
    _call(builder, ir, f"{name} [$0], {operands};", ir.VoidType(), [], [address, *values])


def perform(builder: Any, ir: Any, text: str, operands: list[Any]) -> None:
    """Inline PTX without a result that reads or writes memory; ``$0``... are the operands."""
    _call(builder, ir, text, ir.VoidType(), [], operands)


def atomic(builder: Any, ir: Any, name: str, address: Any, values: list[Any], result: bool) -> Any:
    """``atom`` with a result, ``red`` without."""
    first = 1 if result else 0
    operands = ", ".join(f"${first + 1 + i}" for i in range(len(values)))
    if not result:
        return _call(
            builder, ir, f"{name} [$0], {operands};", ir.VoidType(), [], [address, *values]
        )
    kind = values[0].type
    letter = _register_class(ir, kind)
    return _call(builder, ir, f"{name} $0, [$1], {operands};", kind, [letter], [address, *values])


# Instructions of a whole warp --------------------------------------------------------------------


def together(
    builder: Any,
    ir: Any,
    text: str,
    outputs: str,
    operands: list[Any],
    *,
    tied: int = 0,
    memory: bool = False,
) -> list[Any]:
    """Inline PTX that the lanes of a warp execute together: LLVM may not move it under a condition.

    Parameters
    ----------
    text
        ``$0``... are the outputs, then the operands.
    outputs
        Register class of each output: ``"ffff"``.
    operands
        Values.
    tied
        So many of the first operands are in the registers of the first outputs.
    memory
        Whether it reads or writes memory, or has another effect.
    """
    kinds = {"f": ir.FloatType(), "r": ir.IntType(32), "l": ir.IntType(64)}
    classes = ["=" + letter for letter in outputs]
    classes += [str(place) for place in range(tied)]
    classes += [_register_class(ir, operand.type) for operand in operands[tied:]]
    if memory:
        classes.append("~{memory}")
    results = [kinds[letter] for letter in outputs]
    kind = ir.VoidType()
    if results:
        kind = results[0] if len(results) == 1 else ir.LiteralStructType(results)
    function = ir.FunctionType(kind, [operand.type for operand in operands])
    code = ir.InlineAsm(function, text, ",".join(classes), side_effect=memory)
    made = builder.call(code, operands, attrs=("convergent", "nounwind"))
    if len(results) == 1:
        return [made]
    return [builder.extract_value(made, place) for place in range(len(results))]


def registers(first: int, count: int) -> str:
    """``{$first, ...}``: a vector of `count` operands of inline PTX."""
    return "{" + ", ".join(f"${first + place}" for place in range(count)) + "}"


def flag(builder: Any, ir: Any, value: Any) -> Any:
    """A bool as a 32-bit operand of inline PTX."""
    return builder.zext(value, ir.IntType(32))
