"""Loads, stores, atomic operations and fences.

Global memory is reached by a kernel's pointer and an index in elements of that pointer's type,
whatever is loaded; the address must be a multiple of the size of the access. Shared memory is
reached by 32-bit addresses, from :func:`shared_base` on. A `hint` is the text of the PTX modifiers,
one of `LOAD_HINTS` or `STORE_HINTS`. Source: PTX ISA, ``ld``, ``st``, ``atom``, ``red``, ``fence``,
``membar``.
"""

from __future__ import annotations

from . import lower
from .instruction import Instruction, instruction
from .machine import thread
from .rounding import MASK, bits_of, float_of

#: Cache behaviour of global loads. ``nc``: the data must not change while the kernel runs.
LOAD_HINTS = (
    "",
    "ca",
    "cg",
    "cs",
    "nc",
    "cs.nc",
    "L1::no_allocate",
    "L1::evict_first",
    "L1::evict_last",
    "nc.L1::no_allocate",
    "nc.L1::evict_first",
    "nc.L1::evict_last",
    "nc.L2::128B",
    "nc.L2::256B",
    "nc.L1::no_allocate.L2::128B",
    "nc.L1::no_allocate.L2::256B",
)
#: Cache behaviour of global stores.
STORE_HINTS = ("", "wb", "cg", "cs", "L1::no_allocate", "L1::evict_first", "L1::evict_last")


def _check_hint(hint, allowed):
    if hint not in allowed:
        raise ValueError(f"hint must be one of {', '.join(map(repr, allowed))}; got {hint!r}")


def _words(value, count):
    return tuple((value >> (32 * i)) & MASK for i in range(count))


def _joined(*words):
    return sum((word & MASK) << (32 * i) for i, word in enumerate(words))


# Lowerings ---------------------------------------------------------------------------------------


def _loads(target: Instruction, kind: str, count: int, qualifier: str = "") -> None:
    """Lower a load of `count` values of PTX type `kind`; with `qualifier` it has no hint."""

    def build(builder, ir, arguments, hint=""):
        _check_hint(hint, LOAD_HINTS)
        pointer, index = arguments
        modifiers = (
            qualifier
            + ".global"
            + ("." + hint if hint else "")
            + (f".v{count}" if count > 1 else "")
        )
        return lower.load(
            builder,
            ir,
            f"ld{modifiers}.{kind}",
            lower.global_address(builder, ir, pointer, index),
            count,
        )

    target.lowering(memory=True)(build)


def _stores(target: Instruction, kind: str, count: int, qualifier: str = "") -> None:
    def build(builder, ir, arguments, hint=""):
        _check_hint(hint, STORE_HINTS)
        pointer, index, *values = arguments
        modifiers = (
            qualifier
            + ".global"
            + ("." + hint if hint else "")
            + (f".v{count}" if count > 1 else "")
        )
        lower.store(
            builder,
            ir,
            f"st{modifiers}.{kind}",
            lower.global_address(builder, ir, pointer, index),
            values,
        )

    target.lowering(memory=True)(build)


def _atomics(target: Instruction, operation: str, *, result: bool = True) -> None:
    """Lower an atomic operation on global memory, relaxed, in the device's scope."""

    def build(builder, ir, arguments):
        pointer, index, *values = arguments
        name = ("atom" if result else "red") + f".relaxed.gpu.global.{operation}"
        address = lower.global_address(builder, ir, pointer, index)
        return lower.atomic(builder, ir, name, address, values, result)

    target.lowering(memory=True)(build)


# Addresses ---------------------------------------------------------------------------------------


@instruction("i64(ptr, i64)")
def ptr_address(pointer, index):
    """The address in global memory of an element, a number of 64 bits."""
    return pointer.address + index * pointer.itemsize


@ptr_address.lowering()
def _ptr_address(builder, ir, arguments):
    return lower.global_address(builder, ir, *arguments)


def _check_alignment(address, nbytes):
    if address % nbytes:
        from ..sim import Misaligned

        raise Misaligned(
            f"access of {nbytes} bytes at an address that is no multiple of it", address=address
        )


@instruction("u32x4(i64, imm)")
def ld_address_v4_u32(address, hint):
    """Sixteen bytes of global memory, by address, as four words."""
    _check_hint(hint, LOAD_HINTS)
    _check_alignment(address, 16)
    return _words(int.from_bytes(thread().machine.memory.read(address, 16), "little"), 4)


@instruction("void(i64, u32, u32, u32, u32, imm)")
def st_address_v4_u32(address, a, b, c, d, hint):
    """Store sixteen bytes to global memory, by address."""
    _check_hint(hint, STORE_HINTS)
    _check_alignment(address, 16)
    thread().machine.memory.write(address, _joined(a, b, c, d).to_bytes(16, "little"))


@ld_address_v4_u32.lowering(memory=True)
def _ld_address_v4_u32(builder, ir, arguments, hint):
    _check_hint(hint, LOAD_HINTS)
    name = "ld.global" + ("." + hint if hint else "") + ".v4.u32"
    return lower.load(builder, ir, name, arguments[0], 4)


@st_address_v4_u32.lowering(memory=True)
def _st_address_v4_u32(builder, ir, arguments, hint):
    _check_hint(hint, STORE_HINTS)
    name = "st.global" + ("." + hint if hint else "") + ".v4.u32"
    lower.store(builder, ir, name, arguments[0], arguments[1:])


# Global loads ------------------------------------------------------------------------------------


@instruction("u32(ptr, i64, imm)")
def ld_global_u8(pointer, index, hint):
    """One byte, zeros above it."""
    _check_hint(hint, LOAD_HINTS)
    return pointer.load(index, 1)


@instruction("u32(ptr, i64, imm)")
def ld_global_u16(pointer, index, hint):
    """Two bytes, zeros above them."""
    _check_hint(hint, LOAD_HINTS)
    return pointer.load(index, 2)


@instruction("u32(ptr, i64, imm)")
def ld_global_u32(pointer, index, hint):
    """Four bytes."""
    _check_hint(hint, LOAD_HINTS)
    return pointer.load(index, 4)


@instruction("f32(ptr, i64, imm)")
def ld_global_f32(pointer, index, hint):
    """A float32."""
    _check_hint(hint, LOAD_HINTS)
    return float_of(pointer.load(index, 4))


@instruction("u32x2(ptr, i64, imm)")
def ld_global_v2_u32(pointer, index, hint):
    """Eight bytes as two words."""
    _check_hint(hint, LOAD_HINTS)
    return _words(pointer.load(index, 8), 2)


@instruction("u32x4(ptr, i64, imm)")
def ld_global_v4_u32(pointer, index, hint):
    """Sixteen bytes as four words."""
    _check_hint(hint, LOAD_HINTS)
    return _words(pointer.load(index, 16), 4)


_loads(ld_global_u8, "u8", 1)
_loads(ld_global_u16, "u16", 1)
_loads(ld_global_u32, "u32", 1)
_loads(ld_global_f32, "f32", 1)
_loads(ld_global_v2_u32, "u32", 2)
_loads(ld_global_v4_u32, "u32", 4)


# Global stores -----------------------------------------------------------------------------------


@instruction("void(ptr, i64, u32, imm)")
def st_global_u8(pointer, index, value, hint):
    """Store the low byte."""
    _check_hint(hint, STORE_HINTS)
    pointer.store(index, 1, value & 0xFF)


@instruction("void(ptr, i64, u32, imm)")
def st_global_u16(pointer, index, value, hint):
    """Store the low two bytes."""
    _check_hint(hint, STORE_HINTS)
    pointer.store(index, 2, value & 0xFFFF)


@instruction("void(ptr, i64, u32, imm)")
def st_global_u32(pointer, index, value, hint):
    """Store four bytes."""
    _check_hint(hint, STORE_HINTS)
    pointer.store(index, 4, value & MASK)


@instruction("void(ptr, i64, f32, imm)")
def st_global_f32(pointer, index, value, hint):
    """Store a float32."""
    _check_hint(hint, STORE_HINTS)
    pointer.store(index, 4, bits_of(value))


@instruction("void(ptr, i64, u32, u32, imm)")
def st_global_v2_u32(pointer, index, a, b, hint):
    """Store eight bytes."""
    _check_hint(hint, STORE_HINTS)
    pointer.store(index, 8, _joined(a, b))


@instruction("void(ptr, i64, u32, u32, u32, u32, imm)")
def st_global_v4_u32(pointer, index, a, b, c, d, hint):
    """Store sixteen bytes."""
    _check_hint(hint, STORE_HINTS)
    pointer.store(index, 16, _joined(a, b, c, d))


@instruction("void(ptr, i64, u32, bool)")
def st_global_u8_if(pointer, index, value, condition):
    """Store the low byte where the condition holds: a predicate; `if` could become a branch."""
    if condition:
        pointer.store(index, 1, value & 0xFF)


@instruction("void(ptr, i64, u32, u32, bool)")
def st_global_v2_u32_if(pointer, index, a, b, condition):
    """Store eight bytes where the condition holds: a predicate; `if` could become a branch."""
    if condition:
        pointer.store(index, 8, _joined(a, b))


@instruction("void(ptr, i64, u32, u32, u32, u32, bool)")
def st_global_v4_u32_if(pointer, index, a, b, c, d, condition):
    """Store sixteen bytes where the condition holds: a predicate; `if` could become a branch."""
    if condition:
        pointer.store(index, 16, _joined(a, b, c, d))


def _predicated(target: Instruction, kind: str, count: int) -> None:
    values = ", ".join(f"${i + 2}" for i in range(count))
    operands = "{" + values + "}" if count > 1 else values
    vector = f".v{count}" if count > 1 else ""
    text = (
        f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; @p st.global{vector}.{kind} [$0], {operands}; }}"
    )

    def build(builder, ir, arguments):
        pointer, index, *stored, condition = arguments
        address = lower.global_address(builder, ir, pointer, index)
        flag = builder.zext(condition, ir.IntType(32))
        lower.perform(builder, ir, text, [address, flag, *stored])

    target.lowering(memory=True)(build)


_predicated(st_global_u8_if, "u8", 1)
_predicated(st_global_v2_u32_if, "u32", 2)
_predicated(st_global_v4_u32_if, "u32", 4)
_stores(st_global_u8, "u8", 1)
_stores(st_global_u16, "u16", 1)
_stores(st_global_u32, "u32", 1)
_stores(st_global_f32, "f32", 1)
_stores(st_global_v2_u32, "u32", 2)
_stores(st_global_v4_u32, "u32", 4)


@instruction("void(ptr, i64)")
def prefetch_l2(pointer, index):
    """Bring the 128 bytes around an element to the second level cache, where all see all writes.

    A hint: nothing is read, and the address may be any.
    """


@prefetch_l2.lowering(memory=True)
def _prefetch_l2(builder, ir, arguments):
    address = lower.global_address(builder, ir, *arguments)
    lower.perform(builder, ir, "prefetch.global.L2 [$0];", [address])


# Synchronisation through global memory -----------------------------------------------------------


@instruction("u32(ptr, i64)")
def ld_acquire_u32(pointer, index):
    """Load a word; what the thread that released it had written before is seen after."""
    return pointer.load(index, 4, order="acquire")


@instruction("void(ptr, i64, u32)")
def st_release_u32(pointer, index, value):
    """Store a word; who acquires it sees all that this thread had written before."""
    pointer.store(index, 4, value & MASK, order="release")


@instruction("u32(ptr, i64)")
def ld_relaxed_u32(pointer, index):
    """Load a word that other blocks may be writing atomically; orders nothing."""
    return pointer.load(index, 4, order="relaxed")


_loads(ld_acquire_u32, "u32", 1, ".acquire.gpu")
_loads(ld_relaxed_u32, "u32", 1, ".relaxed.gpu")
_stores(st_release_u32, "u32", 1, ".release.gpu")


@instruction("u32(ptr, i64, u32)")
def atom_add_global_u32(pointer, index, value):
    """Add to a word; the word that was there."""
    return pointer.atomic("add", index, value & MASK) & MASK


@instruction("f32(ptr, i64, f32)")
def atom_add_global_f32(pointer, index, value):
    """Add to a float32; what was there. In global memory subnormal operands and sums count as 0."""
    return pointer.atomic("add", index, value)


@instruction("u32(ptr, i64, u32)")
def atom_max_global_u32(pointer, index, value):
    """Replace a word by the larger; the word that was there."""
    return pointer.atomic("max", index, value & MASK) & MASK


@instruction("u32(ptr, i64, u32)")
def atom_min_global_u32(pointer, index, value):
    """Replace a word by the smaller; the word that was there."""
    return pointer.atomic("min", index, value & MASK) & MASK


@instruction("u32(ptr, i64, u32)")
def atom_exch_global_u32(pointer, index, value):
    """Replace a word; the word that was there."""
    return pointer.atomic("exch", index, value & MASK) & MASK


@instruction("u32(ptr, i64, u32, u32)")
def atom_cas_global_u32(pointer, index, compare, value):
    """Replace a word where it equals `compare`; the word that was there."""
    return pointer.atomic("cas", index, value & MASK, compare & MASK) & MASK


@instruction("void(ptr, i64, u32)")
def red_add_global_u32(pointer, index, value):
    """Add to a word."""
    pointer.atomic("add", index, value & MASK)


@instruction("void(ptr, i64, f32)")
def red_add_global_f32(pointer, index, value):
    """Add to a float32; subnormals as in :func:`atom_add_global_f32`."""
    atom_add_global_f32.model(pointer, index, value)


@instruction("void(ptr, i64, u32)")
def red_max_global_u32(pointer, index, value):
    """Replace a word by the larger."""
    pointer.atomic("max", index, value & MASK)


_atomics(atom_add_global_u32, "add.u32")
_atomics(atom_add_global_f32, "add.f32")
_atomics(atom_max_global_u32, "max.u32")
_atomics(atom_min_global_u32, "min.u32")
_atomics(atom_exch_global_u32, "exch.b32")
_atomics(atom_cas_global_u32, "cas.b32")
_atomics(red_add_global_u32, "add.u32", result=False)
_atomics(red_add_global_f32, "add.f32", result=False)
_atomics(red_max_global_u32, "max.u32", result=False)


def _fence():
    from ..sim import fence

    fence(thread())


@instruction("void()", asm="fence.acq_rel.cta;", memory=True)
def fence_acq_rel_cta():
    """Order this thread's accesses before and after it, as the block's threads see them."""
    _fence()


@instruction("void()", asm="fence.acq_rel.gpu;", memory=True)
def fence_acq_rel_gpu():
    """Order this thread's accesses before and after it, as the device's threads see them."""
    _fence()


@instruction("void()", asm="membar.gl;", memory=True)
def membar_gl():
    """CUDA's ``__threadfence``: a sequentially consistent fence in the device's scope."""
    _fence()


# Shared memory -----------------------------------------------------------------------------------


@instruction("u32()")
def shared_base():
    """The address of the first byte of the launch's shared memory, a multiple of 1024."""
    return thread().block.shared.base


@shared_base.lowering()
def _shared_base(builder, ir, arguments):
    name = "nvfp4_shared"
    module = builder.module
    if name in module.globals:
        memory = module.globals[name]
    else:
        memory = ir.GlobalVariable(module, ir.ArrayType(ir.IntType(8), 0), name, addrspace=3)
        memory.linkage = "external"
        memory.align = 1024
    return builder.ptrtoint(memory, ir.IntType(32))


@instruction("u32(u32)", asm="ld.shared.u8 $0, [$1];", memory=True)
def ld_shared_u8(address):
    """One byte, zeros above it."""
    return thread().block.shared.load(address, 1)


@instruction("u32(u32)", asm="ld.shared.u16 $0, [$1];", memory=True)
def ld_shared_u16(address):
    """Two bytes, zeros above them."""
    return thread().block.shared.load(address, 2)


@instruction("u32(u32)", asm="ld.shared.u32 $0, [$1];", memory=True)
def ld_shared_u32(address):
    """Four bytes."""
    return thread().block.shared.load(address, 4)


@instruction("f32(u32)", asm="ld.shared.f32 $0, [$1];", memory=True)
def ld_shared_f32(address):
    """A float32."""
    return float_of(thread().block.shared.load(address, 4))


@instruction("u32x2(u32)", asm="ld.shared.v2.u32 {$0, $1}, [$2];", memory=True)
def ld_shared_v2_u32(address):
    """Eight bytes as two words."""
    return _words(thread().block.shared.load(address, 8), 2)


@instruction("u32x4(u32)", asm="ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];", memory=True)
def ld_shared_v4_u32(address):
    """Sixteen bytes as four words."""
    return _words(thread().block.shared.load(address, 16), 4)


@instruction("void(u32, u32)", asm="st.shared.u8 [$0], $1;", memory=True)
def st_shared_u8(address, value):
    """Store the low byte."""
    thread().block.shared.store(address, 1, value & 0xFF)


@instruction("void(u32, u32)", asm="st.shared.u16 [$0], $1;", memory=True)
def st_shared_u16(address, value):
    """Store the low two bytes."""
    thread().block.shared.store(address, 2, value & 0xFFFF)


@instruction("void(u32, u32)", asm="st.shared.u32 [$0], $1;", memory=True)
def st_shared_u32(address, value):
    """Store four bytes."""
    thread().block.shared.store(address, 4, value & MASK)


@instruction("void(u32, f32)", asm="st.shared.f32 [$0], $1;", memory=True)
def st_shared_f32(address, value):
    """Store a float32."""
    thread().block.shared.store(address, 4, bits_of(value))


@instruction("void(u32, u32, u32)", asm="st.shared.v2.u32 [$0], {$1, $2};", memory=True)
def st_shared_v2_u32(address, a, b):
    """Store eight bytes."""
    thread().block.shared.store(address, 8, _joined(a, b))


@instruction(
    "void(u32, u32, u32, u32, u32)", asm="st.shared.v4.u32 [$0], {$1, $2, $3, $4};", memory=True
)
def st_shared_v4_u32(address, a, b, c, d):
    """Store sixteen bytes."""
    thread().block.shared.store(address, 16, _joined(a, b, c, d))


@instruction("u32(u32, u32)", asm="atom.relaxed.cta.shared.add.u32 $0, [$1], $2;", memory=True)
def atom_add_shared_u32(address, value):
    """Add to a word; the word that was there."""
    return thread().block.shared.atomic("add", address, value & MASK, "u32")


@instruction("u32(u32, u32)", asm="atom.relaxed.cta.shared.max.u32 $0, [$1], $2;", memory=True)
def atom_max_shared_u32(address, value):
    """Replace a word by the larger; the word that was there."""
    return thread().block.shared.atomic("max", address, value & MASK, "u32")
