"""Small kernels, one an engine, that the simulated machine and the card run alike."""

import numpy as np

from nvfp4._numba import cuda
from nvfp4.program import Kernel, Program
from nvfp4.ptx.arith import add_u32
from nvfp4.ptx.bulk import (
    bulk_commit_group,
    bulk_load,
    bulk_load_hint,
    bulk_store,
    bulk_wait_group,
    bulk_wait_group_read,
    cp_async_16,
    cp_async_arrive,
    cp_async_commit_group,
    cp_async_wait_group,
    policy_evict_first,
)
from nvfp4.ptx.control import bar_sync
from nvfp4.ptx.mbarrier import (
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_test_wait_parity,
    mbarrier_try_wait_parity,
    mbarrier_wait_parity,
)
from nvfp4.ptx.memory import (
    ld_shared_f32,
    ld_shared_u32,
    ptr_address,
    shared_base,
    st_shared_f32,
    st_shared_u32,
)
from nvfp4.ptx.mma import (
    ldmatrix_x1,
    ldmatrix_x1_trans,
    ldmatrix_x2,
    ldmatrix_x2_trans,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16_bf16,
    mma_m16n8k16_f16,
    mma_m16n8k32_e4m3,
    mma_m16n8k32_e5m2,
    stmatrix_x4,
)
from nvfp4.ptx.tma import (
    fence_tensormap_acquire,
    prefetch_tensormap,
    tma_load_1d,
    tma_load_2d,
    tma_load_3d,
    tma_load_4d,
    tma_load_5d,
    tma_store_1d,
    tma_store_2d,
    tma_store_3d,
    tma_store_4d,
    tma_store_5d,
)
from nvfp4.ptx.warp import elect
from nvfp4.ptx.wgmma import (
    st_shared_acc,
    st_shared_acc_rows,
    wgmma_commit_group,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_group_rs_bf16,
    wgmma_group_rs_e4m3,
    wgmma_keep,
    wgmma_rs_bf16,
    wgmma_rs_e4m3,
    wgmma_rs_e5m2,
    wgmma_rs_f16,
    wgmma_ss_bf16,
    wgmma_ss_e4m3,
    wgmma_ss_e5m2,
    wgmma_ss_f16,
    wgmma_wait,
    wgmma_wait_group,
    wgmma_zeros,
)

# What programs replace.
STAGES = 3
HALF = 16
KIND = "bf16"
GROUPS = False
FIRST = 0
SWIZZLE = 128
RANK = 2


# A ring of bulk copies ---------------------------------------------------------------------------


def bulk_ring(x, out, steps):
    """out = x + 1, 128 words a step: a producer warp and four that work."""
    full = shared_base()
    empty = full + 64
    data = full + 1024
    result = data + 512 * STAGES
    thread = cuda.threadIdx.x
    # Not thread 0: the assembler knows of one that was elected that it is alone.
    leader = elect(0xFFFFFFFF)
    if thread == 0:
        for stage in range(STAGES):
            mbarrier_init(full + 8 * stage, 1)
            mbarrier_init(empty + 8 * stage, 128)
        fence_mbarrier_init()
    cuda.syncthreads()
    if thread < 32:
        if leader:
            policy = policy_evict_first()
            for step in range(steps):
                stage = step % STAGES
                parity = (step // STAGES) & 1
                mbarrier_wait_parity(empty + 8 * stage, parity ^ 1)
                mbarrier_arrive_expect_tx(full + 8 * stage, 512)
                source = ptr_address(x, 128 * step)
                half = ptr_address(x, 128 * step + 64)
                bulk_load(data + 512 * stage, source, 256, full + 8 * stage)
                bulk_load_hint(data + 512 * stage + 256, half, 256, full + 8 * stage, policy)
    else:
        me = thread - 32
        for step in range(steps):
            stage = step % STAGES
            parity = (step // STAGES) & 1
            mbarrier_wait_parity(full + 8 * stage, parity)
            value = ld_shared_u32(data + 512 * stage + 4 * me)
            mbarrier_arrive(empty + 8 * stage)
            if leader and me < 32:
                bulk_wait_group_read(0)
            bar_sync(1, 128)
            st_shared_u32(result + 4 * me, add_u32(value, 1))
            fence_proxy_async_shared()
            bar_sync(1, 128)
            if leader and me < 32:
                bulk_store(ptr_address(out, 128 * step), result, 512)
                bulk_commit_group()
        if leader and me < 32:
            bulk_wait_group(0)


BULK_RING = Kernel(
    "bulk_ring", bulk_ring, ("u32*", "u32*", "i64"), {"STAGES": (1, 2, 3, 4)}, (9, 0), threads=160
)


# cp.async ----------------------------------------------------------------------------------------


def copy_lines(x, out, valid):
    """out = x up to element `valid`, zeros after; half the lines by groups, half by an mbarrier."""
    bar = shared_base()
    data = bar + 128
    thread = cuda.threadIdx.x
    if thread == 0:
        mbarrier_init(bar, 64)
    cuda.syncthreads()
    left = max(min(16, 4 * (valid - 4 * thread)), 0)
    cp_async_16(data + 16 * thread, ptr_address(x, 4 * thread), left)
    cp_async_commit_group()
    left = max(min(16, 4 * (valid - 256 - 4 * thread)), 0)
    cp_async_16(data + 1024 + 16 * thread, ptr_address(x, 256 + 4 * thread), left)
    cp_async_arrive(bar)
    cp_async_wait_group(0)
    cuda.syncthreads()
    for part in range(4):
        out[64 * part + thread] = ld_shared_u32(data + 256 * part + 4 * thread)
    while not mbarrier_test_wait_parity(bar, 0):
        pass
    for part in range(4):
        out[256 + 64 * part + thread] = ld_shared_u32(data + 1024 + 256 * part + 4 * thread)


COPY_LINES = Kernel("copy_lines", copy_lines, ("u32*", "u32*", "i64"), threads=64)


# Tensor copies -----------------------------------------------------------------------------------


def tensor_tile(maps, out, source, target, x, y, to_x, to_y):
    """Copy a box to `out` as it lies in shared memory, and to a place of `target`.

    The tensors are arguments so that the simulated machine knows their memory.
    """
    bar = shared_base()
    tile = bar + 1024
    thread = cuda.threadIdx.x
    leader = elect(0xFFFFFFFF)
    load_map = ptr_address(maps, 0)
    store_map = ptr_address(maps, 16)
    if leader:
        fence_tensormap_acquire(load_map)
        fence_tensormap_acquire(store_map)
        mbarrier_init(bar, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(bar, 16 * 4 * 32)
        tma_load_2d(tile, load_map, x, y, bar)
    cuda.syncthreads()
    while not mbarrier_try_wait_parity(bar, 0):
        pass
    for row in range(16):
        out[32 * row + thread] = ld_shared_u32(tile + 128 * row + 4 * thread)
    if leader:
        tma_store_2d(store_map, to_x, to_y, tile)
        bulk_commit_group()
        bulk_wait_group(0)


TENSOR_TILE = Kernel(
    "tensor_tile",
    tensor_tile,
    ("u64*", "u32*", "u32*", "u32*", "i32", "i32", "i32", "i32"),
    min_cc=(9, 0),
    threads=32,
)


def tensor_copy(maps, source, target):
    """A box at 2, 2, 3, .. of a tensor to the same place of another, by RANK dimensions."""
    bar = shared_base()
    tile = bar + 1024
    load_map = ptr_address(maps, 0)
    store_map = ptr_address(maps, 16)
    prefetch_tensormap(load_map)
    fence_tensormap_acquire(load_map)
    fence_tensormap_acquire(store_map)
    mbarrier_init(bar, 1)
    fence_mbarrier_init()
    mbarrier_arrive_expect_tx(bar, 2048)
    if RANK == 1:
        tma_load_1d(tile, load_map, 2, bar)
    elif RANK == 3:
        tma_load_3d(tile, load_map, 2, 2, 3, bar)
    elif RANK == 4:
        tma_load_4d(tile, load_map, 2, 2, 3, 4, bar)
    else:
        tma_load_5d(tile, load_map, 2, 2, 3, 4, 5, bar)
    mbarrier_wait_parity(bar, 0)
    if RANK == 1:
        tma_store_1d(store_map, 2, tile)
    elif RANK == 3:
        tma_store_3d(store_map, 2, 2, 3, tile)
    elif RANK == 4:
        tma_store_4d(store_map, 2, 2, 3, 4, tile)
    else:
        tma_store_5d(store_map, 2, 2, 3, 4, 5, tile)
    bulk_commit_group()
    bulk_wait_group(0)


TENSOR_COPY = Kernel(
    "tensor_copy",
    tensor_copy,
    ("u64*", "u64*", "u64*"),
    {"RANK": (1, 3, 4, 5)},
    min_cc=(9, 0),
    threads=1,
)


# Products of a warp ------------------------------------------------------------------------------


def product_bf16(a, b, c):
    return mma_m16n8k16_bf16(a, b, c)


def product_f16(a, b, c):
    return mma_m16n8k16_f16(a, b, c)


def product_e4m3(a, b, c):
    return mma_m16n8k32_e4m3(a, b, c)


def product_e5m2(a, b, c):
    return mma_m16n8k32_e5m2(a, b, c)


#: What a program replaces by one of the above: not every card has the instructions of all.
product = product_bf16


def warp_product(x, w, out, steps):
    """out [16, 8] = x [16, 16 or 32 steps] w [8, ..]^T of one warp; x and w as words."""
    base = shared_base()
    lane = cuda.threadIdx.x
    words = 8 * steps
    for line in range(2 * steps):
        place = ptr_address(x, (lane & 15) * words + 4 * line)
        if lane < 16:
            cp_async_16(base + 512 * line + 16 * lane, place, 16)
    for line in range(2 * steps):
        if lane < 8:
            place = ptr_address(w, lane * words + 4 * line)
            cp_async_16(base + 512 * line + 256 + 16 * lane, place, 16)
    cp_async_commit_group()
    cp_async_wait_group(0)
    cuda.syncthreads()
    c = wgmma_zeros(4)
    for step in range(steps):
        lines = base + 1024 * step
        a = ldmatrix_x4(lines + 16 * (lane & 15) + 512 * (lane >> 4))
        b = ldmatrix_x2(lines + 256 + 16 * (lane & 7) + 512 * ((lane >> 3) & 1))
        c = product(a, b, c)
    at = 8 * (lane >> 2) + 2 * (lane & 3)
    out[at] = c[0]
    out[at + 1] = c[1]
    out[at + 64] = c[2]
    out[at + 65] = c[3]


KINDS = ("bf16", "f16", "e4m3", "e5m2")
PRODUCTS = {
    "bf16": product_bf16,
    "f16": product_f16,
    "e4m3": product_e4m3,
    "e5m2": product_e5m2,
}
WARP_PRODUCT = Kernel("warp_product", warp_product, ("u32*", "u32*", "f32*", "i64"), threads=32)


def warp_program(kind: str) -> Program:
    return Program(WARP_PRODUCT, (), (("product", PRODUCTS[kind]),))


def load_matrices(x, out):
    """Every ldmatrix of four matrices of 64 16-bit elements."""
    base = shared_base()
    lane = cuda.threadIdx.x
    for word in range(4):
        st_shared_u32(base + 128 * word + 4 * lane, x[32 * word + lane])
    cuda.syncthreads()
    row = base + 16 * lane
    out[lane] = ldmatrix_x1(row)
    out[32 + lane] = ldmatrix_x1_trans(row)
    two = ldmatrix_x2(row)
    out[64 + lane] = two[0]
    out[96 + lane] = two[1]
    turned = ldmatrix_x2_trans(row)
    out[128 + lane] = turned[0]
    out[160 + lane] = turned[1]
    four = ldmatrix_x4(row)
    out[192 + lane] = four[0]
    out[224 + lane] = four[1]
    out[256 + lane] = four[2]
    out[288 + lane] = four[3]
    turn = ldmatrix_x4_trans(row)
    out[320 + lane] = turn[0]
    out[352 + lane] = turn[1]
    out[384 + lane] = turn[2]
    out[416 + lane] = turn[3]


LOAD_MATRICES = Kernel("load_matrices", load_matrices, ("u32*", "u32*"), threads=32)


def store_matrices(x, out):
    """Four matrices, each row where a permutation of 32 rows has it."""
    base = shared_base()
    lane = cuda.threadIdx.x
    row = base + 16 * ((lane * 5 + 3) & 31)
    stmatrix_x4(row, x[lane], x[32 + lane], x[64 + lane], x[96 + lane])
    cuda.syncthreads()
    for word in range(4):
        out[32 * word + lane] = ld_shared_u32(base + 128 * word + 4 * lane)


STORE_MATRICES = Kernel("store_matrices", store_matrices, ("u32*", "u32*"), threads=32)


# Products of a warpgroup -------------------------------------------------------------------------


def group_product(maps, out, left, right, steps):
    """out [64, N] = A B^T, tiles of 128 bytes along K by tensor copies; A from shared memory."""
    bar = shared_base()
    a = bar + 1024
    b = a + 8192
    thread = cuda.threadIdx.x
    if thread == 0:
        fence_tensormap_acquire(ptr_address(maps, 0))
        fence_tensormap_acquire(ptr_address(maps, 16))
        mbarrier_init(bar, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    first_a = wgmma_descriptor(a, SWIZZLE, 16, 8 * SWIZZLE)
    first_b = wgmma_descriptor(b, SWIZZLE, 16, 8 * SWIZZLE)
    acc = wgmma_zeros(HALF)
    first = True
    for step in range(steps):
        if thread == 0:
            mbarrier_arrive_expect_tx(bar, (64 + 2 * HALF) * SWIZZLE)
            size = SWIZZLE if KIND == "e4m3" or KIND == "e5m2" else SWIZZLE // 2
            tma_load_2d(a, ptr_address(maps, 0), step * size, 0, bar)
            tma_load_2d(b, ptr_address(maps, 16), step * size, 0, bar)
        mbarrier_wait_parity(bar, step & 1)
        wgmma_fence()
        for part in range(SWIZZLE // 32):
            if KIND == "bf16":
                acc = wgmma_ss_bf16(acc, first_a + 2 * part, first_b + 2 * part, not first)
            elif KIND == "f16":
                acc = wgmma_ss_f16(acc, first_a + 2 * part, first_b + 2 * part, not first)
            elif KIND == "e4m3":
                acc = wgmma_ss_e4m3(acc, first_a + 2 * part, first_b + 2 * part, not first)
            else:
                acc = wgmma_ss_e5m2(acc, first_a + 2 * part, first_b + 2 * part, not first)
            first = False
        wgmma_commit_group()
        acc = wgmma_wait(acc, 0)
        cuda.syncthreads()
    lane = thread & 31
    row = 16 * (thread >> 5) + (lane >> 2)
    st_shared_acc(a + row * 8 * HALF + 8 * (lane & 3), acc, 8 * HALF)
    cuda.syncthreads()
    for at in range(thread, 128 * HALF, 128):
        out[at] = ld_shared_f32(a + 4 * at)


GROUP_PRODUCT = Kernel(
    "group_product",
    group_product,
    ("u64*", "f32*", "u32*", "u32*", "i64"),
    {"KIND": KINDS, "HALF": (), "SWIZZLE": (32, 64, 128)},
    architectures=("sm_90a",),
    threads=128,
    blocks_per_sm=1,
)


def group_product_registers(x, maps, out, right, steps):
    """As :func:`group_product`, with A from registers: x [64, K] as words, K 64 elements a step."""
    bar = shared_base()
    b = bar + 1024
    thread = cuda.threadIdx.x
    if thread == 0:
        fence_tensormap_acquire(ptr_address(maps, 0))
        mbarrier_init(bar, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    lane = thread & 31
    row = 16 * (thread >> 5) + (lane >> 2)
    first_b = wgmma_descriptor(b, 128, 16, 1024)
    acc = wgmma_zeros(HALF)
    words = 32 * steps
    for step in range(steps):
        if thread == 0:
            mbarrier_arrive_expect_tx(bar, 256 * HALF)
            size = 128 if KIND == "e4m3" or KIND == "e5m2" else 64
            tma_load_2d(b, ptr_address(maps, 0), step * size, 0, bar)
        mbarrier_wait_parity(bar, step & 1)
        if GROUPS:
            at = row * words + 32 * step + (lane & 3)
            q0 = (x[at], x[at + 8 * words], x[at + 4], x[at + 8 * words + 4])
            q1 = (x[at + 8], x[at + 8 * words + 8], x[at + 12], x[at + 8 * words + 12])
            q2 = (x[at + 16], x[at + 8 * words + 16], x[at + 20], x[at + 8 * words + 20])
            q3 = (x[at + 24], x[at + 8 * words + 24], x[at + 28], x[at + 8 * words + 28])
            if KIND == "e4m3":
                acc = wgmma_group_rs_e4m3(acc, q0, q1, first_b)
                acc = wgmma_group_rs_e4m3(acc, q2, q3, first_b + 4)
            else:
                acc = wgmma_group_rs_bf16(acc, q0, q1, q2, q3, first_b)
            acc = wgmma_wait(acc, 0)
        for part in range(0 if GROUPS else 4):
            at = row * words + 32 * step + 8 * part + (lane & 3)
            quad = (x[at], x[at + 8 * words], x[at + 4], x[at + 8 * words + 4])
            wgmma_fence()
            if KIND == "bf16":
                acc = wgmma_rs_bf16(acc, quad, first_b + 2 * part, True)
            elif KIND == "f16":
                acc = wgmma_rs_f16(acc, quad, first_b + 2 * part, True)
            elif KIND == "e4m3":
                acc = wgmma_rs_e4m3(acc, quad, first_b + 2 * part, True)
            else:
                acc = wgmma_rs_e5m2(acc, quad, first_b + 2 * part, True)
            wgmma_commit_group()
            wgmma_wait_group(0)
            acc = wgmma_keep(acc)
        cuda.syncthreads()
    st_shared_acc(b + row * 8 * HALF + 8 * (lane & 3), acc, 8 * HALF)
    cuda.syncthreads()
    for at in range(thread, 128 * HALF, 128):
        out[at] = ld_shared_f32(b + 4 * at)


GROUP_PRODUCT_REGISTERS = Kernel(
    "group_product_registers",
    group_product_registers,
    ("u32*", "u64*", "f32*", "u32*", "i64"),
    {"KIND": KINDS, "HALF": (), "GROUPS": (False, True)},
    architectures=("sm_90a",),
    threads=128,
    blocks_per_sm=1,
)


def rows_of_sums(x, factors, out, both):
    """Sums of a tile [64, 24], multiplied, as 16-bit rows of 64: 16 columns from FIRST on."""
    base = shared_base()
    thread = cuda.threadIdx.x
    lane = thread & 31
    row = 16 * (thread >> 5) + (lane >> 2)
    at = 24 * row + 2 * (lane & 3)
    under = at + 24 * 8
    first = (x[at], x[at + 1], x[under], x[under + 1])
    second = (x[at + 8], x[at + 9], x[under + 8], x[under + 9])
    acc = first + second + (x[at + 16], x[at + 17], x[under + 16], x[under + 17])
    if thread < 24 - FIRST:
        st_shared_f32(base + 144 * thread + 128, factors[FIRST + thread])
    cuda.syncthreads()
    place = base + 144 * ((lane & 7) + 8 * (lane >> 4))
    place += 32 * (thread >> 5) + 16 * ((lane >> 3) & 1)
    low, high = np.float32(row + 1), np.float32(row + 9)
    if KIND == "f16":
        st_shared_acc_rows(place, acc, 144, both, low, high, base + 128, 0, "f16", FIRST, 16)
    else:
        st_shared_acc_rows(place, acc, 144, both, low, high, base + 128, 1, "bf16", FIRST, 16)
    cuda.syncthreads()
    i = thread + 0
    while i < min(16, 24 - FIRST) * 32:
        out[i] = ld_shared_u32(base + 144 * (i // 32) + 4 * (i % 32))
        i += 128


ROWS_OF_SUMS = Kernel(
    "rows_of_sums",
    rows_of_sums,
    ("f32*", "f32*", "u32*", "f32"),
    {"KIND": ("bf16", "f16"), "FIRST": (0, 16)},
    architectures=("sm_90a",),
    threads=128,
    blocks_per_sm=1,
)


def pipeline(maps, out, left, right):
    """out [2, 64, 8] = A B0^T and A B0^T + A B1^T: one group always in flight, A from registers."""
    bar = shared_base()
    data = bar + 1024
    thread = cuda.threadIdx.x
    if thread == 0:
        fence_tensormap_acquire(ptr_address(maps, 0))
        mbarrier_init(bar, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(bar, 2048)
        tma_load_2d(data, ptr_address(maps, 0), 0, 0, bar)
        tma_load_2d(data + 1024, ptr_address(maps, 0), 64, 0, bar)
    cuda.syncthreads()
    mbarrier_wait_parity(bar, 0)
    first = wgmma_descriptor(data, 128, 16, 1024)
    second = wgmma_descriptor(data + 1024, 128, 16, 1024)
    lane = thread & 31
    row = 16 * (thread >> 5) + (lane >> 2)
    at = 8 * row + (lane & 3)
    quad = (left[at], left[at + 64], left[at + 4], left[at + 68])
    one = wgmma_zeros(4)
    two = wgmma_zeros(4)
    wgmma_fence()
    one = wgmma_rs_bf16(one, quad, first, True)
    wgmma_commit_group()
    # In this order: the assembler would compute a product that it has already only once.
    two = wgmma_rs_bf16(two, quad, second, True)
    two = wgmma_rs_bf16(two, quad, first, True)
    wgmma_commit_group()
    one = wgmma_wait(one, 1)
    place = 8 * row + 2 * (lane & 3)
    out[place] = one[0]
    out[place + 1] = one[1]
    out[place + 64] = one[2]
    out[place + 65] = one[3]
    two = wgmma_wait(two, 0)
    out[512 + place] = two[0]
    out[512 + place + 1] = two[1]
    out[512 + place + 64] = two[2]
    out[512 + place + 65] = two[3]


PIPELINE = Kernel(
    "pipeline",
    pipeline,
    ("u64*", "f32*", "u32*", "u32*"),
    architectures=("sm_90a",),
    threads=128,
    blocks_per_sm=1,
)
