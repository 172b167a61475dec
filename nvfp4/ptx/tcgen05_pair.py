"""tcgen05 of two blocks together (cta_group::2): products of 256 rows, and what goes with them.

The two blocks of a cluster of 2 make one product: each has 128 rows of A, their scales and their
accumulators, half of the rows of B, and the scales of all rows of B, at the same places. One thread
of the pair, in practice of block 0, issues products and copies for both; allocation and its end are
by a warp in each. A kernel uses these, or those of ``tcgen05``, and loads, stores, waits and fences
of ``tcgen05`` with either. Source: PTX ISA, tcgen05; ``cp.async.bulk.tensor``.
"""

from __future__ import annotations

from .instruction import instruction
from .machine import engines, thread
from .tcgen05 import BLACKWELL, aligned_by_warp, product_text
from .tcgen05_descriptors import tcgen05_product_pair

__all__ = [
    "tcgen05_alloc_pair",
    "tcgen05_commit_pair",
    "tcgen05_cp_scales_pair",
    "tcgen05_dealloc_pair",
    "tcgen05_mma_mxf4_pair",
    "tcgen05_mma_mxf8f6f4_pair",
    "tcgen05_mma_nvf4_pair",
    "tcgen05_product_pair",
    "tcgen05_relinquish_pair",
    "tma_load_2d_pair",
]


@instruction("void(u32, imm)")
def tcgen05_alloc_pair(address, columns):
    """As ``tcgen05_alloc``, by a warp in each block of the pair."""
    engines().tcgen05_alloc(thread(), address, columns, 2)


@instruction("void(u32, imm)")
def tcgen05_dealloc_pair(base, columns):
    """As ``tcgen05_dealloc``, by a warp in each block, behind a barrier of the cluster."""
    engines().tcgen05_dealloc(thread(), base, columns, 2)


@instruction("void()")
def tcgen05_relinquish_pair():
    """As ``tcgen05_relinquish``."""
    engines().tcgen05_relinquish(thread(), 2)


aligned_by_warp(
    tcgen05_alloc_pair,
    "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [$0], {columns};",
)
aligned_by_warp(
    tcgen05_dealloc_pair, "tcgen05.dealloc.cta_group::2.sync.aligned.b32 $0, {columns};"
)
aligned_by_warp(
    tcgen05_relinquish_pair, "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;"
)


@instruction(
    "void(u32, i64)",
    asm="tcgen05.cp.cta_group::2.32x128b.warpx4 [$0], $1;",
    memory=True,
    **BLACKWELL,
)
def tcgen05_cp_scales_pair(target, descriptor):
    """As ``tcgen05_cp_scales``, in both blocks, each from its own shared memory."""
    engines().tcgen05_cp(thread(), target, descriptor, 2)


@instruction(
    "void(u32, i64, i64, u32, u32, u32, bool)",
    asm=product_text("mxf4nvf4", "block16", 2),
    memory=True,
    **BLACKWELL,
)
def tcgen05_mma_nvf4_pair(d, a, b, product, a_scales, b_scales, accumulate):
    """As ``tcgen05_mma_nvf4``, of 256 rows; `product` is of ``tcgen05_product_pair``."""
    operands = (d, a, b, product, a_scales, b_scales, accumulate)
    engines().tcgen05_mma(thread(), "mxf4nvf4", 16, *operands, 2)


@instruction(
    "void(u32, i64, i64, u32, u32, u32, bool)",
    asm=product_text("mxf4", "block32", 2),
    memory=True,
    **BLACKWELL,
)
def tcgen05_mma_mxf4_pair(d, a, b, product, a_scales, b_scales, accumulate):
    """As ``tcgen05_mma_mxf4``, of 256 rows."""
    operands = (d, a, b, product, a_scales, b_scales, accumulate)
    engines().tcgen05_mma(thread(), "mxf4", 32, *operands, 2)


@instruction(
    "void(u32, i64, i64, u32, u32, u32, bool)",
    asm=product_text("mxf8f6f4", "block32", 2),
    memory=True,
    **BLACKWELL,
)
def tcgen05_mma_mxf8f6f4_pair(d, a, b, product, a_scales, b_scales, accumulate):
    """As ``tcgen05_mma_mxf8f6f4``, of 256 rows."""
    operands = (d, a, b, product, a_scales, b_scales, accumulate)
    engines().tcgen05_mma(thread(), "mxf8f6f4", 32, *operands, 2)


@instruction(
    "void(u32, u16)",
    asm="tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
    " [$0], $1;",
    memory=True,
    **BLACKWELL,
)
def tcgen05_commit_pair(mbarrier, mask):
    """As ``tcgen05_commit``, at the same place in each block of a mask of ranks."""
    engines().tcgen05_commit(thread(), mbarrier, mask)


@instruction(
    "void(u32, i64, i32, i32, u32)",
    asm="cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    ".cta_group::2 [$0], [$1, {$2, $3}], [$4];",
    memory=True,
    **BLACKWELL,
)
def tma_load_2d_pair(target, descriptor, x, y, mbarrier):
    """Load a box to this block; `mbarrier`, which counts it, may be in the other one."""
    engines().tma_load_pair(thread(), target, descriptor, (x, y), mbarrier)
