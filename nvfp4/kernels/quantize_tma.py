"""Dense nvfp4 quantisation by tensor copies: a warp loads tiles, four or eight compute, one stores.

A tile is 128 rows of 64 columns, which is one tile of scales: 16 KB come by one tensor load, 4 KB
of codes and 512 bytes of scales go by two tensor stores. A thread takes a row of the tile, four
blocks, or, with 256 of them, half a row. Tiles arrive in a ring of STAGES; results leave through
two buffers in turn. With one stage a block takes one tile; with more, the blocks that are resident
go through the tiles with the grid as stride. What lies outside of the matrix arrives as zeros,
whose scales are 0, as padding's must be, and is not stored among the codes.

Swizzles keep shared memory free of conflicts: of 128 bytes for the input (eight threads read one
16-byte chunk each of eight rows), of 32 bytes for the codes.

Constraints: the tcgen layout; one matrix, at least one row, of columns that are multiples of 32 and
more than 64; x, its row stride, codes and scales multiples of 16 bytes. THREADS threads: those that
compute, and the warp that loads. With one stage a block for each tile, else any grid of one
dimension. Shared memory: :func:`shared_bytes`.

The arrays are arguments beside their tensor maps so that the simulated machine knows their memory.
"""

from __future__ import annotations

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_u32,
    and_u32,
    eq_u32,
    i64_of_u32,
    lt_u32,
    mul_u32,
    mulhi_u32,
    or_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
    xor_u32,
)
from ..ptx.bulk import bulk_commit_group, bulk_wait_group, bulk_wait_group_read
from ..ptx.control import bar_sync, griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.mbarrier import (
    fence_mbarrier_init,
    fence_proxy_async_shared,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from ..ptx.memory import (
    ld_shared_v4_u32,
    ptr_address,
    shared_base,
    st_shared_u16,
    st_shared_u32,
    st_shared_v4_u32,
)
from ..ptx.tma import (
    fence_tensormap_acquire,
    prefetch_tensormap,
    tma_load_2d,
    tma_store_2d,
    tma_store_4d,
)
from ..ptx.warp import elect, syncwarp
from .elements import encode_e2m1x8
from .quantize import encode_scale_for
from .rings import next_stage
from .scales import block_scale
from .stream import amax_piece, exact_factors, quick_scale, scaled_codes, usual_factor, widen

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
ROUNDING = "rceil"
UNIT = True
ENCODE = "none"
STAGES = 1
THREADS = 160

TILE = 16384  # bytes of 128 rows of 64 columns
CODES = 4096  # bytes of their codes
SCALES = 512
WARP = 0xFFFFFFFF


def shared_bytes(stages: int) -> int:
    """Dynamic shared memory of a block: the ring, the results, the mbarriers."""
    results = 1 if stages == 1 else 2
    return stages * TILE + results * (CODES + SCALES) + 16 * stages


def encode_factors(encode_scale, encode_number, decode_scale, row):
    """C and r of the encode scale of a row."""
    return exact_factors(encode_scale_for(encode_scale, encode_number, decode_scale, 0, row))


def load_half(at):
    """32 elements of a row, 16 bytes after 16; `at` is where its first or its fifth 16 are."""
    return (
        ld_shared_v4_u32(at),
        ld_shared_v4_u32(xor_u32(at, 16)),
        ld_shared_v4_u32(xor_u32(at, 32)),
        ld_shared_v4_u32(xor_u32(at, 48)),
    )


def general_block(a, b, c, r):
    """Scale byte and codes of a block by the general rules."""
    byte, q = block_scale(amax_piece(a, b), c, r)
    return byte, encode_e2m1x8(widen(a), q), encode_e2m1x8(widen(b), q)


def quantize_half(x, c, r):
    """Scale bytes of two blocks, in one word, and their codes, four."""
    byte0, q0, holds0 = quick_scale(amax_piece(x[0], x[1]), c, r)
    byte1, q1, holds1 = quick_scale(amax_piece(x[2], x[3]), c, r)
    if holds0 & holds1 & usual_factor(c):
        w0 = scaled_codes(x[0], q0)
        w1 = scaled_codes(x[1], q0)
        w2 = scaled_codes(x[2], q1)
        w3 = scaled_codes(x[3], q1)
    else:
        byte0, w0, w1 = general_block(x[0], x[1], c, r)
        byte1, w2, w3 = general_block(x[2], x[3], c, r)
    return or_u32(byte0, shl_u32(byte1, 8)), (w0, w1, w2, w3)


def quantize_line(x, y, c, r):
    """Scale bytes of four blocks, in one word, and their codes, eight."""
    byte0, q0, holds0 = quick_scale(amax_piece(x[0], x[1]), c, r)
    byte1, q1, holds1 = quick_scale(amax_piece(x[2], x[3]), c, r)
    byte2, q2, holds2 = quick_scale(amax_piece(y[0], y[1]), c, r)
    byte3, q3, holds3 = quick_scale(amax_piece(y[2], y[3]), c, r)
    # One branch for all: the compiler interleaves only what has no branch between.
    if holds0 & holds1 & holds2 & holds3 & usual_factor(c):
        w0 = scaled_codes(x[0], q0)
        w1 = scaled_codes(x[1], q0)
        w2 = scaled_codes(x[2], q1)
        w3 = scaled_codes(x[3], q1)
        w4 = scaled_codes(y[0], q2)
        w5 = scaled_codes(y[1], q2)
        w6 = scaled_codes(y[2], q3)
        w7 = scaled_codes(y[3], q3)
    else:
        byte0, w0, w1 = general_block(x[0], x[1], c, r)
        byte1, w2, w3 = general_block(x[2], x[3], c, r)
        byte2, w4, w5 = general_block(y[0], y[1], c, r)
        byte3, w6, w7 = general_block(y[2], y[3], c, r)
    low = or_u32(byte0, shl_u32(byte1, 8))
    high = or_u32(byte2, shl_u32(byte3, 8))
    return or_u32(low, shl_u32(high, 16)), (w0, w1, w2, w3), (w4, w5, w6, w7)


def quantize_tma(
    x_map,
    codes_map,
    scales_map,
    x,
    codes,
    scales,
    encode_scale,
    encode_number,
    decode_scale,
    rows,
    across,
    tiles,
    magic,
    shift,
):
    # across: tiles of a row of tiles. floor(n / across) = (n * magic >> 32) >> shift for all n.
    griddepcontrol_launch_dependents()
    base = shared_base()
    results = add_u32(base, STAGES * TILE)
    full = add_u32(results, (1 if STAGES == 1 else 2) * (CODES + SCALES))
    empty = add_u32(full, 8 * STAGES)
    thread = u32_of_i64(cuda.threadIdx.x)
    # One that was elected: the assembler knows that it is alone.
    leader = elect(WARP)
    if eq_u32(thread, 0):
        for i in range(STAGES):
            mbarrier_init(full + 8 * i, 1)
            mbarrier_init(empty + 8 * i, THREADS // 32 - 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    zero = shl_u32(0, 0)
    stage = zero
    parity = zero
    tile = u32_of_i64(cuda.blockIdx.x)
    step = u32_of_i64(cuda.gridDim.x)
    if lt_u32(thread, THREADS - 32):
        worker(
            codes_map,
            scales_map,
            encode_scale,
            encode_number,
            decode_scale,
            rows,
            across,
            tiles,
            magic,
            shift,
            base,
            results,
            full,
            empty,
            thread,
            leader,
            tile,
            step,
        )
    elif leader:
        ready(x_map)
        griddepcontrol_wait()
        while lt_u32(tile, tiles):
            down = shr_u32(mulhi_u32(tile, magic), shift)
            column = shl_u32(sub_u32(tile, mul_u32(down, across)), 6)
            barrier = add_u32(full, shl_u32(stage, 3))
            if STAGES > 1:
                mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), xor_u32(parity, 1))
            mbarrier_arrive_expect_tx(barrier, TILE)
            target = add_u32(base, mul_u32(stage, TILE))
            tma_load_2d(target, ptr_address(x_map, 0), column, shl_u32(down, 7), barrier)
            stage, parity = next_stage(stage, parity)
            tile = add_u32(tile, step)


def ready(tensor_map):
    """See a map as it was written, and bring it ahead: the acquire drops it from its cache."""
    fence_tensormap_acquire(ptr_address(tensor_map, 0))
    prefetch_tensormap(ptr_address(tensor_map, 0))


def read(empty, stage, leader):
    """A warp has the tile of a stage in registers."""
    syncwarp(WARP)
    if leader:
        mbarrier_arrive(add_u32(empty, shl_u32(stage, 3)))


def worker(
    codes_map,
    scales_map,
    encode_scale,
    encode_number,
    decode_scale,
    rows,
    across,
    tiles,
    magic,
    shift,
    base,
    results,
    full,
    empty,
    thread,
    leader,
    tile,
    step,
):
    """What the threads that compute do: tile after tile, and the first warp stores."""
    zero = shl_u32(0, 0)
    stage = zero
    parity = zero
    turn = zero
    stores = lt_u32(thread, 32) & leader
    if stores:
        ready(codes_map)
        ready(scales_map)
    griddepcontrol_wait()
    if ENCODE != "row":
        c, r = encode_factors(encode_scale, encode_number, decode_scale, 0)
        if ENCODE != "amax":
            if eq_u32(thread, 0) & eq_u32(tile, 0):
                decode_scale[0] = r
    # Bits 4 to 6 of an address in a tile xor bits 7 to 9; bit 4 among the codes xor bit 7.
    place = and_u32(thread, 127)
    line = or_u32(shl_u32(place, 7), shl_u32(and_u32(place, 7), 4))
    code_line = or_u32(shl_u32(place, 5), and_u32(shl_u32(place, 2), 16))
    scale_at = or_u32(shl_u32(and_u32(place, 31), 4), shl_u32(shr_u32(place, 5), 2))
    if THREADS == 288:
        half = shr_u32(thread, 7)
        line = xor_u32(line, shl_u32(half, 6))
        code_line = xor_u32(code_line, shl_u32(half, 4))
        scale_at = add_u32(scale_at, shl_u32(half, 1))
    while lt_u32(tile, tiles):
        down = shr_u32(mulhi_u32(tile, magic), shift)
        along = sub_u32(tile, mul_u32(down, across))
        if ENCODE == "row":
            # Loaded ahead of the wait. Rows of padding are zeros, whatever their scale.
            row = add_u32(shl_u32(down, 7), place)
            real = lt_u32(row, rows)
            number = i64_of_u32(row) if real else 0
            c, r = encode_factors(encode_scale, encode_number, decode_scale, number)
            if real & eq_u32(along, 0):
                decode_scale[number] = r
        mbarrier_wait_parity(add_u32(full, shl_u32(stage, 3)), parity)
        target = add_u32(results, mul_u32(turn, CODES + SCALES))
        first = add_u32(target, code_line)
        at = add_u32(add_u32(base, mul_u32(stage, TILE)), line)
        scales_to = add_u32(target, CODES)
        if STAGES == 1:
            # Many blocks on a processor, few registers each: one half after the other.
            low, w = quantize_half(load_half(at), c, r)
            st_shared_v4_u32(first, w[0], w[1], w[2], w[3])
            high, w = quantize_half(load_half(xor_u32(at, 64)), c, r)
            st_shared_v4_u32(xor_u32(first, 16), w[0], w[1], w[2], w[3])
            st_shared_u32(add_u32(scales_to, scale_at), or_u32(low, shl_u32(high, 16)))
        elif THREADS == 288:
            x = load_half(at)
            read(empty, stage, leader)
            bytes2, w = quantize_half(x, c, r)
            st_shared_v4_u32(first, w[0], w[1], w[2], w[3])
            st_shared_u16(add_u32(scales_to, scale_at), bytes2)
        else:
            x = load_half(at)
            y = load_half(xor_u32(at, 64))
            read(empty, stage, leader)
            bytes4, v, w = quantize_line(x, y, c, r)
            st_shared_v4_u32(first, v[0], v[1], v[2], v[3])
            st_shared_v4_u32(xor_u32(first, 16), w[0], w[1], w[2], w[3])
            st_shared_u32(add_u32(scales_to, scale_at), bytes4)
        fence_proxy_async_shared()
        if STAGES > 1:
            # The other buffer's stores, of the tile before, have read it: behind the barrier all
            # may write it.
            if stores:
                bulk_wait_group_read(0)
        bar_sync(1, THREADS - 32)
        if stores:
            x0 = shl_u32(along, 5)
            tma_store_2d(ptr_address(codes_map, 0), x0, shl_u32(down, 7), target)
            tma_store_4d(ptr_address(scales_map, 0), 0, 0, along, down, scales_to)
            bulk_commit_group()
        if STAGES > 1:
            turn = xor_u32(turn, 1)
        stage, parity = next_stage(stage, parity)
        tile = add_u32(tile, step)
    if stores:
        bulk_wait_group(0)


QUANTIZE_TMA = Kernel(
    "quantize_tma",
    quantize_tma,
    ("u64*", "u64*", "u64*", "u8*", "u8*", "u8*", "f32*", "f32", "f32*")
    + ("u32", "u32", "u32", "u32", "u32"),
    {
        "INPUT": ("bfloat16", "float16"),
        "ELEMENT": ("e2m1",),
        "SCALE": ("e4m3",),
        "ROUNDING": ("rceil",),
        "UNIT": (False, True),
        "ENCODE": ("none", "scalar", "array", "row", "amax"),
        "STAGES": (1, 2, 3, 4),
        "THREADS": (160, 288),
        "BLOCKS_PER_SM": (3, 4, 5, 8),
    },
    min_cc=(9, 0),
)

_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "ROUNDING": "rceil"}
_COMMON = {"INPUT": "bfloat16", **_NVFP4}

_ONE = {"STAGES": 1, "THREADS": 160, "BLOCKS_PER_SM": 8}
_FOUR = {"STAGES": 4, "THREADS": 288, "BLOCKS_PER_SM": 3}

VARIANTS = (
    {**_COMMON, **_ONE, "UNIT": True, "ENCODE": "none"},
    {**_COMMON, **_FOUR, "UNIT": False, "ENCODE": "array"},
)
SLOW_VARIANTS = (
    {**_COMMON, **_FOUR, "UNIT": False, "ENCODE": "row", "THREADS": 160},
    {**_COMMON, **_FOUR, "UNIT": False, "ENCODE": "row", "STAGES": 2, "BLOCKS_PER_SM": 4},
    {**_COMMON, **_FOUR, "UNIT": True, "ENCODE": "none", "STAGES": 2, "BLOCKS_PER_SM": 4},
    {**_COMMON, **_FOUR, "UNIT": False, "ENCODE": "amax", "STAGES": 3},
    {**_COMMON, **_ONE, "UNIT": False, "ENCODE": "array", "STAGES": 2, "BLOCKS_PER_SM": 5},
    {**_COMMON, **_ONE, "UNIT": False, "ENCODE": "scalar", "INPUT": "float16"},
)
