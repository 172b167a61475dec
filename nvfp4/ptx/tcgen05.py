"""Block-scaled matrix products with accumulators in tensor memory (tcgen05, sm_100a, sm_103a).

Tensor memory is 128 lanes of 512 columns of 32 bits, a processor's. An address has the lane in bits
31:16 and the column in bits 15:0. A product D = A B + D has 128 rows, one a lane, and N columns, a
multiple of 8 up to 256, as float32; A [128, K] and B [N, K] come from shared memory, K-major, by
descriptors (``tcgen05_descriptors``), K being 32 bytes of each row; every 16 or 32 elements along K
have a scale, and scales come from tensor memory: scale k of row r is byte k % 4 of column r / 32 of
lane r % 32, in each of the four quarters of the lanes. :func:`tcgen05_cp_scales` puts one tile of
the tcgen layout, 128 rows of 4 scales, there.

Who does what: a whole warp allocates (:func:`tcgen05_alloc`), gives back, loads and stores, each
warp only the lanes 32 (warp % 4) and on; one thread issues products, copies and commits.

Everything here but allocation, commits and fences is asynchronous. What is ordered: products that
one thread issues on the same accumulators, and its copies of scales before its products. What is
not, needs::

    tcgen05_commit(mbarrier)                 # one arrival once all this thread issued has finished
    mbarrier_wait_parity(mbarrier, parity)   # whoever reads the accumulators, or refills shared
    tcgen05_fence_after_thread_sync()        # memory: in each thread behind the wait
    values = tcgen05_wait_ld(tcgen05_ld(address, 32))
    tcgen05_fence_before_thread_sync()       # before it tells that the accumulators are free
    mbarrier_arrive(empty)

``tcgen05_wait_ld`` hands the values through, so that no compiler uses them earlier. The models
compute exact products, sum those of an instruction and D in float64 and round once; the card's
order and rounding are open. One block: cta_group 1; of two: ``tcgen05_pair``. Source: PTX ISA,
tcgen05.
"""

from __future__ import annotations

from typing import Any

from . import lower
from .instruction import instruction
from .machine import engines, thread
from .rounding import bits_of

BLACKWELL: Any = {"min_cc": (10, 0), "below": (11, 0)}


def aligned_by_warp(target: Any, text: str) -> None:
    """The lowering of an instruction of a whole warp, without a result; immediates by name."""

    def build(builder, ir, arguments, **immediates):
        code = text
        for name, value in immediates.items():
            code = code.replace("{" + name + "}", str(value))
        lower.together(builder, ir, code, "", arguments, memory=True)

    target.lowering(memory=True, **BLACKWELL)(build)


# Allocation --------------------------------------------------------------------------------------


@instruction("void(u32, imm)")
def tcgen05_alloc(address, columns):
    """Allocate 32, 64, 128, 256 or 512 columns; their address is stored at shared `address`.

    All lanes of one warp together. Waits until so many are free. Who reads the address does so
    behind a barrier, with :func:`tcgen05_fence_before_thread_sync` before it and
    :func:`tcgen05_fence_after_thread_sync` behind it.
    """
    engines().tcgen05_alloc(thread(), address, columns)


@instruction("void(u32, imm)")
def tcgen05_dealloc(base, columns):
    """Give back an allocation, whole; every one must be given back before the block ends.

    All lanes of one warp together, when everything that touches the columns has been waited for.
    """
    engines().tcgen05_dealloc(thread(), base, columns)


@instruction("void()")
def tcgen05_relinquish():
    """Promise that this block allocates no more."""
    engines().tcgen05_relinquish(thread())


aligned_by_warp(
    tcgen05_alloc, "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], {columns};"
)
aligned_by_warp(tcgen05_dealloc, "tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, {columns};")
aligned_by_warp(tcgen05_relinquish, "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;")


# Copies and products -----------------------------------------------------------------------------


@instruction(
    "void(u32, i64)",
    asm="tcgen05.cp.cta_group::1.32x128b.warpx4 [$0], $1;",
    memory=True,
    **BLACKWELL,
)
def tcgen05_cp_scales(target, descriptor):
    """Copy a tile of 512 bytes to 4 columns: 16 bytes i to lane i, 32 + i, 64 + i and 96 + i.

    `descriptor`: without swizzle, 8 rows of 16 bytes contiguous (stride 128).
    """
    engines().tcgen05_cp(thread(), target, descriptor)


def product_text(kind: str, size: str, blocks: int = 1) -> str:
    """Inline PTX of a product."""
    return (
        "{ .reg .pred p; setp.ne.b32 p, $6, 0; "
        f"tcgen05.mma.cta_group::{blocks}.kind::{kind}.block_scale.{size} "
        "[$0], $1, $2, $3, [$4], [$5], p; }"
    )


@instruction(
    "void(u32, i64, i64, u32, u32, u32, bool)",
    asm=product_text("mxf4nvf4", "block16"),
    memory=True,
    **BLACKWELL,
)
def tcgen05_mma_nvf4(d, a, b, product, a_scales, b_scales, accumulate):
    """A B + D of e2m1 with a scale (ue4m3 or ue8m0) for 16 elements; K = 64.

    A B where `accumulate` is false. `product` is a word of
    ``tcgen05_descriptors.tcgen05_product``, `a_scales` and `b_scales` are columns of tensor memory.
    """
    engines().tcgen05_mma(
        thread(), "mxf4nvf4", 16, d, a, b, product, a_scales, b_scales, accumulate
    )


@instruction(
    "void(u32, i64, i64, u32, u32, u32, bool)",
    asm=product_text("mxf4", "block32"),
    memory=True,
    **BLACKWELL,
)
def tcgen05_mma_mxf4(d, a, b, product, a_scales, b_scales, accumulate):
    """A B + D of e2m1 with a scale (ue8m0) for 32 elements; K = 64."""
    engines().tcgen05_mma(thread(), "mxf4", 32, d, a, b, product, a_scales, b_scales, accumulate)


@instruction(
    "void(u32, i64, i64, u32, u32, u32, bool)",
    asm=product_text("mxf8f6f4", "block32"),
    memory=True,
    **BLACKWELL,
)
def tcgen05_mma_mxf8f6f4(d, a, b, product, a_scales, b_scales, accumulate):
    """A B + D of e4m3, e5m2 or padded e2m1 with a scale (ue8m0) for 32 elements; K = 32.

    e2m1 stands in shared memory as ``tensor_map.PADDED`` leaves it.
    """
    engines().tcgen05_mma(
        thread(), "mxf8f6f4", 32, d, a, b, product, a_scales, b_scales, accumulate
    )


@instruction(
    "void(u32)",
    asm="tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];",
    memory=True,
    **BLACKWELL,
)
def tcgen05_commit(mbarrier):
    """Arrive once when all products and copies that this thread has issued have finished."""
    engines().tcgen05_commit(thread(), mbarrier)


# Loads and stores --------------------------------------------------------------------------------


@instruction("f32xN(u32, imm)")
def tcgen05_ld(address, count):
    """`count` (1, 2, 4... 128) columns of this thread's lane, from `address` on; see wait_ld.

    All lanes of a warp together, with one address: lane 32 (warp % 4), the first column.
    """
    return engines().tcgen05_ld(thread(), address, count)


@instruction("f32xN(f32xN)")
def tcgen05_wait_ld(values):
    """Wait for the loads of this warp; the values, which no use can be moved ahead of."""
    return engines().tcgen05_wait_ld(thread(), values)


@instruction("void(u32, f32xN)")
def tcgen05_st(address, values):
    """Store 1, 2, 4... 128 columns of this thread's lane, addressed as in :func:`tcgen05_ld`."""
    engines().tcgen05_st(thread(), address, values)


@instruction("void()")
def tcgen05_wait_st():
    """Wait for the stores of this warp."""
    engines().tcgen05_wait_st(thread())


def _count(name: str, count: int) -> int:
    if count not in (1, 2, 4, 8, 16, 32, 64, 128):
        raise ValueError(f"{name}: columns must be 1, 2, 4... 128; got {count}")
    return count


@tcgen05_ld.lowering(memory=True, **BLACKWELL)
def _tcgen05_ld(builder, ir, arguments, count):
    _count("tcgen05_ld", count)
    text = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {lower.registers(0, count)}, [${count}];"
    # Registers of inline PTX are 32 bits, whatever is in them.
    return lower.together(builder, ir, text, "f" * count, arguments, memory=True)


@tcgen05_wait_ld.lowering(memory=True, **BLACKWELL)
def _tcgen05_wait_ld(builder, ir, arguments):
    count = len(arguments)
    text = "tcgen05.wait::ld.sync.aligned;"
    return lower.together(builder, ir, text, "f" * count, arguments, tied=count, memory=True)


@tcgen05_st.lowering(memory=True, **BLACKWELL)
def _tcgen05_st(builder, ir, arguments):
    count = _count("tcgen05_st", len(arguments) - 1)
    text = f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [$0], {lower.registers(1, count)};"
    lower.together(builder, ir, text, "", arguments, memory=True)


aligned_by_warp(tcgen05_wait_st, "tcgen05.wait::st.sync.aligned;")


# Shared memory -----------------------------------------------------------------------------------


@instruction("void(u32, f32xN)")
def st_shared_row(address, values):
    """Store a multiple of 4 values one after the other; `address` is a multiple of 16.

    A tuple can be indexed by constants only, so this is how a loop gets at what was loaded.
    """
    shared = thread().block.shared
    for place in range(0, len(values), 4):
        words = (bits_of(values[place + i]) << 32 * i for i in range(4))
        shared.store(address + 4 * place, 16, sum(words))


@st_shared_row.lowering(memory=True)
def _st_shared_row(builder, ir, arguments):
    address, *values = arguments
    if len(values) % 4:
        raise ValueError(f"st_shared_row: values must be a multiple of 4; got {len(values)}")
    for place in range(0, len(values), 4):
        text = f"st.shared.v4.f32 [$0+{4 * place}], {lower.registers(1, 4)};"
        lower.perform(builder, ir, text, [address, *values[place : place + 4]])


# Fences ------------------------------------------------------------------------------------------


@instruction("void()", asm="tcgen05.fence::before_thread_sync;", memory=True, **BLACKWELL)
def tcgen05_fence_before_thread_sync():
    """Order what this thread has done in tensor memory, and waited for, before what it tells next.

    That is before its next arrival or barrier; a commit implies it.
    """
    engines().tcgen05_fence_before(thread())


@instruction("void()", asm="tcgen05.fence::after_thread_sync;", memory=True, **BLACKWELL)
def tcgen05_fence_after_thread_sync():
    """Order what this thread does next by tcgen05 behind what it has waited for."""
    engines().tcgen05_fence_after(thread())
