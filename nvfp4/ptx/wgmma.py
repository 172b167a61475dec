"""Matrix products of a warpgroup (wgmma, sm_90a).

A warpgroup is four warps, the first a multiple of 4; all its 128 threads execute each instruction
here. A product is D = A B + D with A 64 x K, B K x N, K = 16 for 16-bit elements and 32 for bytes,
and N a multiple of 8 up to 256. `acc` holds a thread's N / 2 accumulators, so its length says N:
with warp w, g = lane / 4 and t = lane % 4 of the warpgroup, ``acc[4j]`` and ``acc[4j + 1]`` are row
16w + g, columns 8j + 2t and the next, ``acc[4j + 2]`` and ``acc[4j + 3]`` those of row 16w + g + 8.
A comes from shared memory (``_ss``) or registers (``_rs``: of each warp's 16 rows, as in ``mma``),
B from shared memory, K-major, by a descriptor: see :func:`wgmma_descriptor`.

The order of things::

    acc = wgmma_zeros(N // 2)
    wgmma_fence()                      # after anything else touched `acc` or the registers of A
    acc = wgmma_ss_bf16(acc, a, b, False)       # False: D = A B
    acc = wgmma_ss_bf16(acc, a + 2, b + 2, True)  # 32 bytes on along K
    wgmma_commit_group()
    acc = wgmma_wait(acc, 0)           # `acc` can be used; so can the shared memory

``wgmma_wait`` hands the accumulators through, so that no compiler uses them earlier; other
accumulators in flight are handed through ``wgmma_keep`` behind it. Before it they may only go into
products of the same shape. What threads stored to shared memory needs ``fence_proxy_async_shared``
before the barrier that leads here.

The models compute exact products, sum those of an instruction and D in float64, and round once:
right where partial sums are exact in float32; the card's order and rounding are open. Source: PTX
ISA, ``wgmma``, matrix descriptors, ``setmaxnreg``.
"""

from __future__ import annotations

from typing import Any

from . import lower
from .arith import add_rn, mul_rn
from .bits import bf16_of_f32, f16_of_f32
from .instruction import instruction
from .machine import engines, thread
from .rounding import bits_of, float_of

_HOPPER: Any = {"min_cc": (9, 0), "below": (10, 0)}

#: Bits 63:62 of a descriptor for each width of the swizzle in bytes, 0 for none.
SWIZZLE_CODES = {128: 1, 64: 2, 32: 3, 0: 0}


# Descriptors -------------------------------------------------------------------------------------


def _swizzle_code(swizzle):
    if swizzle not in SWIZZLE_CODES:
        raise ValueError(f"swizzle must be one of 128, 64, 32, 0; got {swizzle!r}")
    code = SWIZZLE_CODES[swizzle] << 62
    return code - (1 << 64) if code >> 63 else code


@instruction("i64(u32, imm, u32, u32)")
def wgmma_descriptor(address, swizzle, leading, stride):
    """The descriptor of a K-major operand in shared memory at `address`, as 64 bits.

    `swizzle` is 128, 64 or 32: rows (of M or N) of so many bytes along K, as a tensor copy with
    that swizzle leaves them, 8 rows to an atom, `stride` bytes from one group of 8 rows to the
    next (8 * swizzle where they follow each other), `leading` unused (16). The tile begins at a
    multiple of 8 * swizzle; adding 2 to the descriptor goes on by 32 bytes along K. Without
    swizzle (0), 8 rows of 16 bytes are contiguous, `leading` bytes apart along K and `stride`
    along M or N. All are multiples of 16 below 2^18.
    """
    fields = ((address, 0), (leading, 16), (stride, 32))
    bits = sum((value & 0x3FFFF) >> 4 << place for value, place in fields)
    return bits | _swizzle_code(swizzle)


@wgmma_descriptor.lowering()
def _wgmma_descriptor(builder, ir, arguments, swizzle):
    word, long = ir.IntType(32), ir.IntType(64)
    made = ir.Constant(long, _swizzle_code(swizzle))
    for value, place in zip(arguments, (0, 16, 32), strict=True):
        field = builder.and_(value, ir.Constant(word, 0x3FFFF))
        field = builder.zext(builder.lshr(field, ir.Constant(word, 4)), long)
        made = builder.or_(made, builder.shl(field, ir.Constant(long, place)))
    return made


# Order -------------------------------------------------------------------------------------------


@instruction("void()", asm="wgmma.fence.sync.aligned;", memory=True, **_HOPPER)
def wgmma_fence():
    """Order other uses of the registers of A and D before the products that follow."""
    engines().wgmma_fence(thread())


@instruction("void()", asm="wgmma.commit_group.sync.aligned;", memory=True, **_HOPPER)
def wgmma_commit_group():
    """Close the group of the products issued since the last."""
    engines().wgmma_commit(thread())


@instruction("void(imm)", asm="wgmma.wait_group.sync.aligned {pending};", memory=True, **_HOPPER)
def wgmma_wait_group(pending):
    """Wait until at most `pending` groups are not complete; then :func:`wgmma_keep`."""
    engines().wgmma_wait(thread(), pending)


@instruction("f32xN(f32xN, imm)")
def wgmma_wait(acc, pending):
    """Wait until at most `pending` groups are not complete; the accumulators."""
    engines().wgmma_wait(thread(), pending)
    return engines().wgmma_values(acc)


@instruction("f32xN(f32xN)")
def wgmma_keep(acc):
    """The accumulators, which no use of the result can be moved ahead of; no code."""
    return engines().wgmma_values(acc)


@instruction("f32xN(imm)")
def wgmma_zeros(count):
    """`count` zeros, for accumulators: half of N."""
    return (float_of(0),) * count


@wgmma_wait.lowering(memory=True, **_HOPPER)
def _wgmma_wait(builder, ir, arguments, pending):
    count = len(arguments)
    text = f"wgmma.wait_group.sync.aligned {pending};"
    return lower.together(builder, ir, text, "f" * count, arguments, tied=count, memory=True)


@wgmma_keep.lowering(memory=True)
def _wgmma_keep(builder, ir, arguments):
    count = len(arguments)
    return lower.together(builder, ir, "", "f" * count, arguments, tied=count, memory=True)


@wgmma_zeros.lowering(memory=True)
def _wgmma_zeros(builder, ir, arguments, count):
    # Constants would be copied to registers where they are used, behind the fence that must follow.
    text = " ".join(f"mov.f32 ${place}, 0f00000000;" for place in range(count))
    return lower.together(builder, ir, text, "f" * count, [], memory=True)


# Products ----------------------------------------------------------------------------------------


def _lower_product(target, kind, from_registers):
    """Operands: accumulators, A (four registers or a descriptor), B's descriptor, accumulate."""
    depth = 32 if kind in ("e4m3", "e5m2") else 16
    # The name alone: what a lowering holds is part of the cache's key, which asks for lowerings.
    name = target.name

    def build(builder, ir, arguments):
        size_a = 4 if from_registers else 1
        count = len(arguments) - size_a - 2
        if count % 4 or not 4 <= count <= 128:
            raise ValueError(
                f"{name}: a product has 4 to 128 accumulators, a multiple of 4; got {count}"
            )
        first = 2 * count
        a = lower.registers(first, 4) if from_registers else f"${first}"
        b, accumulate = f"${first + size_a}", f"${first + size_a + 1}"
        # Negation of A and B (1: none), then transposition of what is in shared memory.
        modifiers = "1, 1" if depth == 32 else ("1, 1, 0" if from_registers else "1, 1, 0, 0")
        text = (
            f"{{ .reg .pred p; setp.ne.b32 p, {accumulate}, 0; "
            f"wgmma.mma_async.sync.aligned.m64n{2 * count}k{depth}.f32.{kind}.{kind} "
            f"{lower.registers(0, count)}, {a}, {b}, p, {modifiers}; }}"
        )
        operands = [*arguments[:-1], lower.flag(builder, ir, arguments[-1])]
        return lower.together(builder, ir, text, "f" * count, operands, tied=count, memory=True)

    target.lowering(memory=True, **_HOPPER)(build)


@instruction("f32xN(f32xN, i64, i64, bool)")
def wgmma_ss_bf16(acc, a, b, accumulate):
    """A B + D of bfloat16, both by descriptors; A B where `accumulate` is false."""
    return engines().wgmma(thread(), "bf16", acc, a, b, accumulate)


@instruction("f32xN(f32xN, u32x4, i64, bool)")
def wgmma_rs_bf16(acc, a, b, accumulate):
    """A B + D of bfloat16, A from registers."""
    return engines().wgmma(thread(), "bf16", acc, a, b, accumulate)


@instruction("f32xN(f32xN, i64, i64, bool)")
def wgmma_ss_f16(acc, a, b, accumulate):
    """A B + D of float16, both by descriptors."""
    return engines().wgmma(thread(), "f16", acc, a, b, accumulate)


@instruction("f32xN(f32xN, u32x4, i64, bool)")
def wgmma_rs_f16(acc, a, b, accumulate):
    """A B + D of float16, A from registers."""
    return engines().wgmma(thread(), "f16", acc, a, b, accumulate)


@instruction("f32xN(f32xN, i64, i64, bool)")
def wgmma_ss_e4m3(acc, a, b, accumulate):
    """A B + D of float8 e4m3, both by descriptors."""
    return engines().wgmma(thread(), "e4m3", acc, a, b, accumulate)


@instruction("f32xN(f32xN, u32x4, i64, bool)")
def wgmma_rs_e4m3(acc, a, b, accumulate):
    """A B + D of float8 e4m3, A from registers."""
    return engines().wgmma(thread(), "e4m3", acc, a, b, accumulate)


@instruction("f32xN(f32xN, i64, i64, bool)")
def wgmma_ss_e5m2(acc, a, b, accumulate):
    """A B + D of float8 e5m2, both by descriptors."""
    return engines().wgmma(thread(), "e5m2", acc, a, b, accumulate)


@instruction("f32xN(f32xN, u32x4, i64, bool)")
def wgmma_rs_e5m2(acc, a, b, accumulate):
    """A B + D of float8 e5m2, A from registers."""
    return engines().wgmma(thread(), "e5m2", acc, a, b, accumulate)


_lower_product(wgmma_ss_bf16, "bf16", False)
_lower_product(wgmma_rs_bf16, "bf16", True)
_lower_product(wgmma_ss_f16, "f16", False)
_lower_product(wgmma_rs_f16, "f16", True)
_lower_product(wgmma_ss_e4m3, "e4m3", False)
_lower_product(wgmma_rs_e4m3, "e4m3", True)
_lower_product(wgmma_ss_e5m2, "e5m2", False)
_lower_product(wgmma_rs_e5m2, "e5m2", True)


# Groups -------------------------------------------------------------------------------------------


def _lower_group(target, kind, products):
    """Operands: accumulators, four registers of A for each product, B's descriptor."""
    depth = 32 if kind in ("e4m3", "e5m2") else 16
    modifiers = "1, 1" if depth == 32 else "1, 1, 0"

    def build(builder, ir, arguments):
        count = len(arguments) - 4 * products - 1
        first, b = 2 * count, f"${2 * count + 4 * products}"
        text = f"{{ .reg .b64 b<{products}>; "
        text += "".join(f"add.s64 b{i}, {b}, {2 * i}; " for i in range(products))
        text += "wgmma.fence.sync.aligned; "
        for i in range(products):
            text += (
                f"wgmma.mma_async.sync.aligned.m64n{2 * count}k{depth}.f32.{kind}.{kind} "
                f"{lower.registers(0, count)}, {lower.registers(first + 4 * i, 4)}, "
                f"b{i}, 1, {modifiers}; "
            )
        text += "wgmma.commit_group.sync.aligned; }"
        return lower.together(builder, ir, text, "f" * count, arguments, tied=count, memory=True)

    target.lowering(memory=True, **_HOPPER)(build)


@instruction("f32xN(f32xN, u32x4, u32x4, u32x4, u32x4, i64)")
def wgmma_group_rs_bf16(acc, a0, a1, a2, a3, b):
    """A group of four products, 64 along K, which follow each other: fence, A B + D, commit."""
    return _group(acc, (a0, a1, a2, a3), b, "bf16")


@instruction("f32xN(f32xN, u32x4, u32x4, i64)")
def wgmma_group_rs_e4m3(acc, a0, a1, b):
    """:func:`wgmma_group_rs_bf16` of float8 e4m3: two products."""
    return _group(acc, (a0, a1), b, "e4m3")


def _group(acc, registers, b, kind):
    engines().wgmma_fence(thread())
    for place, a in enumerate(registers):
        acc = engines().wgmma(thread(), kind, acc, a, b + 2 * place, True)
    engines().wgmma_commit(thread())
    return acc


_lower_group(wgmma_group_rs_bf16, "bf16", 4)
_lower_group(wgmma_group_rs_e4m3, "e4m3", 2)


# Accumulators ------------------------------------------------------------------------------------


@instruction("void(u32, f32xN, u32)")
def st_shared_acc(address, acc, pitch):
    """Store the accumulators to shared memory as float32, rows of the tile `pitch` bytes apart.

    `address` is where this thread's first goes: row 16w + g, column 2t of the tile. A tuple can be
    indexed by constants only, so this is how a loop gets at accumulators.
    """
    shared = thread().block.shared
    for place in range(0, len(acc), 2):
        pair = bits_of(acc[place]) | bits_of(acc[place + 1]) << 32
        shared.store(address + 32 * (place // 4) + 8 * pitch * (place // 2 % 2), 8, pair)


@st_shared_acc.lowering(memory=True)
def _st_shared_acc(builder, ir, arguments):
    address, *acc, pitch = arguments
    below = builder.add(address, builder.shl(pitch, ir.Constant(ir.IntType(32), 3)))
    for place in range(0, len(acc), 2):
        row = below if place // 2 % 2 else address
        text = f"st.shared.v2.f32 [$0+{32 * (place // 4)}], {{$1, $2}};"
        lower.perform(builder, ir, text, [row, acc[place], acc[place + 1]])


@instruction("void(u32, f32xN, u32, imm, imm)")
def st_shared_acc_columns(address, acc, pitch, first, count):
    """Store columns `first` to `first` + `count` - 1 of the tile to shared memory, as float32.

    Multiples of 8, as far as the tile has them; columns lie `pitch` bytes apart, the rows of each
    side by side. `address` is where this thread's first of those goes: column 2t after the first,
    row 16w + g.
    """
    shared = thread().block.shared
    for place in range(first // 2, min((first + count) // 2, len(acc))):
        column = place // 4 * 8 - first + place % 2
        at = address + column * pitch + 32 * (place // 2 % 2)
        shared.store(at, 4, bits_of(acc[place]))


@st_shared_acc_columns.lowering(memory=True)
def _st_shared_acc_columns(builder, ir, arguments, first, count):
    address, *acc, pitch = arguments
    for group in range(first // 8, min((first + count) // 8, len(acc) // 4)):
        for odd in range(2):
            factor = ir.Constant(ir.IntType(32), group * 8 - first + odd)
            column = builder.add(address, builder.mul(pitch, factor))
            for below in range(2):
                text = f"st.shared.f32 [$0+{32 * below}], $1;"
                value = acc[4 * group + 2 * below + odd]
                lower.perform(builder, ir, text, [column, value])


@instruction("void(u32, f32xN, u32)")
def st_shared_acc_quads(address, acc, pitch):
    """Store the accumulators to shared memory as they are, four at a time, `pitch` bytes apart.

    What :func:`ld_cluster_acc_quads` of the same thread of another block reads; `address` and
    `pitch` are multiples of 16.
    """
    shared = thread().block.shared
    for place in range(0, len(acc), 4):
        bits = sum(bits_of(acc[place + i]) << 32 * i for i in range(4))
        shared.store(address + pitch * (place // 4), 16, bits)


@st_shared_acc_quads.lowering(memory=True)
def _st_shared_acc_quads(builder, ir, arguments):
    address, *acc, pitch = arguments
    for place in range(0, len(acc), 4):
        lower.store(builder, ir, "st.shared.v4.f32", address, acc[place : place + 4])
        address = builder.add(address, pitch)


@instruction("f32xN(u32, u32, imm)")
def ld_cluster_acc_quads(address, pitch, count):
    """`count` accumulators from shared memory of a block of the cluster, as they were stored."""
    found = []
    for place in range(0, count, 4):
        bits = engines().cluster_load(thread(), address + pitch * (place // 4), 16)
        found += [float_of(bits >> 32 * i & 0xFFFFFFFF) for i in range(4)]
    return tuple(found)


@ld_cluster_acc_quads.lowering(memory=True, min_cc=(9, 0))
def _ld_cluster_acc_quads(builder, ir, arguments, count):
    address, pitch = arguments
    found = []
    for _ in range(0, count, 4):
        found += lower.load(builder, ir, "ld.shared::cluster.v4.f32", address, 4)
        address = builder.add(address, pitch)
    return found


@instruction("f32xN(f32xN, f32xN)")
def add_acc(left, right):
    """Sums of accumulators, each rounded."""
    return tuple(add_rn(a, b) for a, b in zip(left, right, strict=True))


@add_acc.lowering()
def _add_acc(builder, ir, arguments):
    half = len(arguments) // 2
    return [builder.fadd(a, b) for a, b in zip(arguments[:half], arguments[half:], strict=True)]


@instruction("void(u32, f32xN, u32, f32, f32, f32, u32, imm, imm, imm, imm)")
def st_shared_acc_rows(address, acc, pitch, both, low, high, factors, scaled, kind, first, count):
    """Store columns `first` to `first` + `count` - 1 of the tile to shared memory, as 16-bit rows.

    What is a column of the tile lies side by side; `kind` is "bf16" or "f16". Each accumulator is
    multiplied by `both`, then by `low` (row 16w + g of the tile) or `high` (row 16w + g + 8),
    rounded each time, and rounded to `kind`. With `scaled` 1, `low` and `high` are first multiplied
    by a float32 of its column, at `factors` + `pitch` * (column - `first`) in shared memory.
    Multiples of 8 columns, as far as the tile has them; they lie `pitch` bytes apart, a multiple of
    16. `address` is where the eight elements go that lane l tells of: column l % 8 + 8 (l / 16)
    after the first, rows 16w + 8 (l / 8 % 2) and on; a multiple of 16.
    """
    t = thread().lane & 3
    shared = thread().block.shared
    each = {"bf16": bf16_of_f32, "f16": f16_of_f32}[kind]
    groups = range(first // 8, min((first + count) // 8, len(acc) // 4))
    words = []
    for group in groups:
        for half, other in enumerate((low, high)):
            word = 0
            for odd in range(2):
                factor = other
                if scaled:
                    at = factors + pitch * (8 * group - first + 2 * t + odd)
                    factor = mul_rn(float_of(shared.load(at, 4)), other)
                value = mul_rn(acc[4 * group + 2 * half + odd], both)
                word |= each(mul_rn(value, factor)) << 16 * odd
            words.append(word)
    for place in range(0, len(words), 4):
        at = address + pitch * 4 * place
        engines().stmatrix(thread(), at, tuple(words[place : place + 4]), True)


@st_shared_acc_rows.lowering(memory=True, min_cc=(9, 0))
def _st_shared_acc_rows(builder, ir, arguments, scaled, kind, first, count):
    address, *acc, pitch, both, low, high, factors = arguments
    word, real = ir.IntType(32), ir.FloatType()
    t = builder.call(
        ir.InlineAsm(ir.FunctionType(word, []), "mov.u32 $0, %laneid;", "=r", side_effect=False), []
    )
    t = builder.and_(t, ir.Constant(word, 3))
    mine = builder.add(factors, builder.mul(pitch, builder.shl(t, ir.Constant(word, 1))))
    convert = ir.FunctionType(word, [real, real])
    words = []
    for group in range(first // 8, min((first + count) // 8, len(acc) // 4)):
        of_column = []
        for odd in range(2 if scaled else 0):
            place = ir.Constant(word, 8 * group - first + odd)
            at = builder.add(mine, builder.mul(pitch, place))
            of_column.append(lower.load(builder, ir, "ld.shared.f32", at, 1))
        for half, other in enumerate((low, high)):
            pair = []
            for odd in range(2):
                factor = builder.fmul(of_column[odd], other) if scaled else other
                value = builder.fmul(acc[4 * group + 2 * half + odd], both)
                pair.append(builder.fmul(value, factor))
            text = f"cvt.rn.{kind}x2.f32 $0, $2, $1;"
            asm = ir.InlineAsm(convert, text, "=r,f,f", side_effect=False)
            words.append(builder.call(asm, pair))
    for place in range(0, len(words), 4):
        some = words[place : place + 4]
        at = builder.add(address, builder.mul(pitch, ir.Constant(word, 4 * place)))
        lower.store(
            builder, ir, f"stmatrix.sync.aligned.m8n8.x{len(some)}.trans.shared.b16", at, some
        )


# Registers ---------------------------------------------------------------------------------------


@instruction(
    "void(imm)", asm="setmaxnreg.inc.sync.aligned.u32 {count};", memory=True, min_cc=(9, 0)
)
def setmaxnreg_inc(count):
    """Wait until this warp has `count` registers a thread, a multiple of 8 from 24 to 256.

    By all warps of a warpgroup, in kernels with a launch bound (threads and blocks); sm_90a,
    sm_100a and their like.
    """
    engines().setmaxnreg(thread(), "inc", count)


@instruction(
    "void(imm)", asm="setmaxnreg.dec.sync.aligned.u32 {count};", memory=True, min_cc=(9, 0)
)
def setmaxnreg_dec(count):
    """Give back registers, down to `count` a thread; see :func:`setmaxnreg_inc`."""
    engines().setmaxnreg(thread(), "dec", count)
