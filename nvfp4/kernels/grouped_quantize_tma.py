"""Grouped quantisation with scales that leave by bulk stores: the seed's asynchronous kernel.

A block of 128 threads takes K_TILES tiles of 4 blocks (64 columns of nvfp4, 128 of an MX format) of
one tile of 128 scale rows. It finds the tile's range, quantises two rows a thread at a time as
``grouped_stream`` does, and collects the scales in shared memory, which was zeroed while the kernel
ahead was still running. They lie there as in global memory, 512 bytes a tile, and tiles beside each
other follow each other, so that one bulk store of one thread takes them all, padding included.
Input and codes go by ordinary loads and stores: rows may be gathered, and a range may begin
anywhere.

Blocks of tiles that no range owns store zeros, and zero the codes of 128 of the rows that no range
has, as in ``grouped_quantize``. With tile_starts, a range's scales go where these say, and tiles
that no range has are zeroed by the block of that number.

Constraints: ALIGNED; the tcgen layout; rows below 2^31, at least one range and one piece; with
SEARCH "runs" at most 1024 ranges and no tile_starts; a row of x and of the result below 4 GB. Grid:
(ceil(across / K_TILES), tiles), tiles at least ``layouts.allocated_tiles(rows, groups)``, those of
the scales, which without tile_starts are as many. Shared memory: :func:`shared_bytes`.

Compile-time constants beside those of ``grouped_quantize``: K_TILES; SEARCH, how a warp finds the
range of its tile: "runs" of ranges, a lane each (``grouped_pieces``), or in "steps" of 32
(``groups``).
"""

from __future__ import annotations

import numpy as np

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import (
    add_u32,
    and_u32,
    eq_u32,
    i64_of_u32,
    lt_u32,
    min_u32,
    mul_rn,
    mul_u32,
    or_u32,
    rcp_rn,
    select_u32,
    shl_u32,
    shr_u32,
    sub_u32,
    u32_of_i64,
)
from ..ptx.bulk import bulk_commit_group, bulk_store, bulk_wait_group
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.mbarrier import fence_proxy_async_shared
from ..ptx.memory import ptr_address, shared_base, st_shared_u8, st_shared_v4_u32
from ..ptx.warp import elect
from .grouped_pieces import (
    factors_of_row,
    find_tile_quickly,
    load_pair,
    row_from,
    scales_of_pair,
    store_pieces,
    store_scales_of_ranges,
    store_zeros,
)
from .grouped_quantize import INDEX_DTYPES, encode_scale_of
from .groups import expert_of, find_tile, load_index
from .quantize import ELEMENT_CONSTANTS
from .scales import SIXTH

INPUT = "bfloat16"
ELEMENT = "e2m1"
SCALE = "e4m3"
ENCODE = "none"
STARTS = "none"
K_TILES = 4
SEARCH = "runs"

ONE = np.float32(1.0)
WARP = 0xFFFFFFFF
THREADS = 128
TILE = 512  # bytes of the scales of 128 rows of four blocks


def shared_bytes(k_tiles: int, starts: bool) -> int:
    """Dynamic shared memory of a block: its scales, and zeros where tiles may be left over."""
    return TILE * k_tiles * (2 if starts else 1)


def pieces_beside():
    """Pieces of 16 columns that a block takes of a row."""
    return K_TILES * (4 if SCALE == "e4m3" else 8)


def zero_shared(base, thread):
    """Zero the shared memory of the block."""
    size = TILE * K_TILES
    if STARTS != "none":
        size *= 2
    i = thread
    while i < size // 16:
        st_shared_v4_u32(base + 16 * i, 0, 0, 0, 0)
        i += THREADS


def note_scales(base, piece, local0, local1, byte0, byte1):
    """Put the scale bytes of a piece of two rows in their places."""
    at0 = add_u32(shl_u32(and_u32(local0, 31), 4), shl_u32(shr_u32(local0, 5), 2))
    at1 = add_u32(shl_u32(and_u32(local1, 31), 4), shl_u32(shr_u32(local1, 5), 2))
    if SCALE == "e4m3":
        block = add_u32(base, or_u32(shl_u32(shr_u32(piece, 2), 9), and_u32(piece, 3)))
        st_shared_u8(add_u32(block, at0), byte0)
        st_shared_u8(add_u32(block, at1), byte1)
    else:
        # Two lanes have a block: one notes it in one row, one in the other.
        block = shr_u32(piece, 1)
        block = add_u32(base, or_u32(shl_u32(shr_u32(block, 2), 9), and_u32(block, 3)))
        first = eq_u32(and_u32(piece, 1), 0)
        at = select_u32(first, at0, at1)
        st_shared_u8(add_u32(block, at), select_u32(first, byte0, byte1))


def store_scales(scales, base, tile, k_tile, across):
    """Store the tiles that lie at `base` to row `tile` of tiles, from `k_tile` on."""
    count = min_u32(sub_u32(across, k_tile), K_TILES)
    at = (tile * i64_of_u32(across) + i64_of_u32(k_tile)) * TILE
    bulk_store(ptr_address(scales, at), base, mul_u32(count, TILE))


def quantize_rows(
    x,
    codes,
    row_indices,
    encode_scale,
    decode_scale,
    base,
    first_row,
    count,
    line,
    beside,
    piece,
    real,
    c,
    r,
    all_input,
    x_row,
    codes_row,
):
    """Quantise a piece of the rows of a range in this tile, two at a time."""
    lines = THREADS // pieces_beside()
    x_piece = i64_of_u32(piece) * (64 if INPUT == "float32" else 32)
    codes_piece = i64_of_u32(piece) * (8 if ELEMENT == "e2m1" else 16)
    c0 = c
    r0 = r
    c1 = c
    r1 = r
    local0 = line
    # The same for all threads: lanes of a warp may have different rows.
    done = sub_u32(count, count)
    while lt_u32(done, count):
        local1 = add_u32(local0, lines)
        row0 = add_u32(first_row, local0)
        row1 = add_u32(first_row, local1)
        mine0 = lt_u32(local0, count)
        mine1 = lt_u32(local1, count)
        a0, b0, a1, b1, live0, live1 = load_pair(
            x, row_indices, row0, row1, mine0, mine1, first_row, real, all_input, x_row, x_piece
        )
        if ENCODE == "row":
            c0, r0 = factors_of_row(encode_scale, row0 if mine0 else first_row)
            c1, r1 = factors_of_row(encode_scale, row1 if mine1 else first_row)
            if eq_u32(piece, 0):
                if mine0:
                    decode_scale[i64_of_u32(row0)] = r0
                if mine1:
                    decode_scale[i64_of_u32(row1)] = r1
        byte0, byte1, q0, q1, held = scales_of_pair(a0, b0, a1, b1, live0, live1, c0, r0, c1, r1)
        # Rows and columns beyond the range have amax 0, and so the byte of padding.
        note_scales(base, beside, local0, local1, byte0, byte1)
        codes0 = i64_of_u32(row0) * i64_of_u32(codes_row) + codes_piece
        codes1 = i64_of_u32(row1) * i64_of_u32(codes_row) + codes_piece
        store_pieces(
            codes,
            codes0,
            codes1,
            a0,
            b0,
            a1,
            b1,
            q0,
            q1,
            held,
            live0,
            live1,
            real & mine0,
            real & mine1,
        )
        local0 = add_u32(local0, 2 * lines)
        done = add_u32(done, 2 * lines)


def zero_rows(
    codes, decode_scale, first_row, count, unowned, head, tail, rows, line, piece, real, codes_row
):
    """Zero a piece of the rows of a range that is switched off, or of 128 rows of none."""
    lines = THREADS // pieces_beside()
    codes_piece = i64_of_u32(piece) * (8 if ELEMENT == "e2m1" else 16)
    local = line
    while lt_u32(local, count):
        row = row_from(first_row, local, unowned, head, tail)
        mine = lt_u32(row, rows)
        store_zeros(codes, i64_of_u32(row) * i64_of_u32(codes_row) + codes_piece, real & mine)
        if ENCODE == "row":
            if mine and eq_u32(piece, 0):
                decode_scale[i64_of_u32(row)] = ONE
        local = add_u32(local, lines)


def grouped_quantize_tma(
    x,
    codes,
    scales,
    row_offsets,
    expert_ids,
    row_indices,
    tile_starts,
    encode_scale,
    encode_number,
    decode_scale,
    input_rows,
    rows,
    groups,
    experts,
    pieces,
    x_row,
    codes_row,
    across,
    tiles,
):
    # x_row, codes_row: bytes of a row. across: tiles of 512 bytes of a row of tiles.
    griddepcontrol_launch_dependents()
    thread = u32_of_i64(cuda.threadIdx.x)
    base = shared_base()
    # One that was elected: the assembler knows that it is alone.
    leader = elect(WARP) & lt_u32(thread, 32)
    zero_shared(base, i64_of_u32(thread))
    tile = i64_of_u32(u32_of_i64(cuda.blockIdx.y))
    k_tile = mul_u32(u32_of_i64(cuda.blockIdx.x), K_TILES)
    beside = and_u32(thread, pieces_beside() - 1)
    line = u32_of_i64(cuda.threadIdx.x // pieces_beside())
    piece = add_u32(mul_u32(u32_of_i64(cuda.blockIdx.x), pieces_beside()), beside)
    real = lt_u32(piece, pieces)
    griddepcontrol_wait()
    taken = 0
    if SEARCH == "runs":
        owner, first_tile, start, stop, used, head, tail = find_tile_quickly(
            row_offsets, groups, rows, tile, and_u32(thread, 31)
        )
    else:
        found = find_tile(row_offsets, tile_starts, groups, rows, tile)
        owner = found[0]
        first_tile = u32_of_i64(found[1])
        start = u32_of_i64(found[2])
        stop = u32_of_i64(found[3])
        used = u32_of_i64(found[4])
        head = u32_of_i64(found[5])
        tail = u32_of_i64(found[6])
        taken = found[7]
    if ENCODE != "row":
        if cuda.blockIdx.x == 0:
            store_scales_of_ranges(
                decode_scale,
                encode_scale,
                encode_number,
                expert_ids,
                groups,
                experts,
                tile,
                i64_of_u32(u32_of_i64(cuda.gridDim.y)),
            )
    expert = -1
    target = tile
    if owner >= 0:
        expert = expert_of(expert_ids, owner, experts)
        first_row = add_u32(start, shl_u32(sub_u32(u32_of_i64(tile), first_tile), 7))
        count = min_u32(sub_u32(stop, first_row), 128)
        if STARTS != "none":
            target = load_index(tile_starts, owner, STARTS) + tile - i64_of_u32(first_tile)
    else:
        first_row = shl_u32(sub_u32(u32_of_i64(tile), used), 7)
        count = shl_u32(1, 7)
        if STARTS != "none":
            target = -1
    # The zeros of all threads are there, before any puts a scale upon them.
    cuda.syncthreads()
    if expert < 0:
        zero_rows(
            codes,
            decode_scale,
            first_row,
            count,
            owner < 0,
            head,
            tail,
            u32_of_i64(rows),
            line,
            piece,
            real,
            codes_row,
        )
    else:
        g = encode_scale_of(encode_scale, encode_number, expert)
        quantize_rows(
            x,
            codes,
            row_indices,
            encode_scale,
            decode_scale,
            base,
            first_row,
            count,
            line,
            beside,
            piece,
            real,
            mul_rn(g, SIXTH),
            rcp_rn(g),
            u32_of_i64(input_rows),
            x_row,
            codes_row,
        )
    fence_proxy_async_shared()
    cuda.syncthreads()
    if leader:
        if target >= 0 and target < i64_of_u32(tiles):
            store_scales(scales, base, target, k_tile, across)
        if STARTS != "none":
            if taken == 0 and tile < i64_of_u32(tiles):
                store_scales(scales, add_u32(base, TILE * K_TILES), tile, k_tile, across)
        bulk_commit_group()
        # Until all is written: a block's shared memory ends with it, and kernels that wait for
        # this one read the scales.
        bulk_wait_group(0)


GROUPED_QUANTIZE_TMA = Kernel(
    "grouped_quantize_tma",
    grouped_quantize_tma,
    (
        *("u8*", "u8*", "u8*", "u8*", "u8*", "u8*", "u8*", "f32*", "f32", "f32*"),
        *("i64", "i64", "i64", "i64", "u32", "u32", "u32", "u32", "u32"),
    ),
    {
        **{name: ELEMENT_CONSTANTS[name] for name in ("INPUT", "ELEMENT", "SCALE")},
        **{name: ELEMENT_CONSTANTS[name] for name in ("ROUNDING", "UNIT")},
        "ENCODE": ("none", "scalar", "array", "expert", "row"),
        "OFFSETS": INDEX_DTYPES,
        "IDS": ("none", "int32", "int64"),
        "INDICES": ("none", "int32", "int64"),
        "STARTS": ("none", *INDEX_DTYPES),
        "SEARCH": ("runs", "steps"),
        "K_TILES": (1, 2, 4, 8),
        "BLOCKS_PER_SM": (8, 10),
    },
    min_cc=(9, 0),
    threads=THREADS,
)

_COMMON = {"INPUT": "bfloat16", "ROUNDING": "rceil", "OFFSETS": "int32", "IDS": "int32"}
_NVFP4 = {"ELEMENT": "e2m1", "SCALE": "e4m3", "UNIT": False, "ENCODE": "expert"}
_MXFP8 = {"ELEMENT": "e4m3", "SCALE": "e8m0", "UNIT": True, "ENCODE": "none"}
_RUNS = {"STARTS": "none", "SEARCH": "runs"}
_STARTS = {"STARTS": "int64", "SEARCH": "steps"}

# As in ``grouped_stream``.
_TEN = {"BLOCKS_PER_SM": 10, "ARCHITECTURES": ("sm_90a", "sm_100a", "sm_103a")}
_EIGHT = {"BLOCKS_PER_SM": 8, "ARCHITECTURES": ("sm_120a", "sm_121a")}

VARIANTS = (
    {**_COMMON, **_NVFP4, **_RUNS, "INDICES": "none", "K_TILES": 4, **_TEN},
    {**_COMMON, **_NVFP4, **_RUNS, "INDICES": "none", "K_TILES": 4, **_EIGHT},
    {**_COMMON, **_NVFP4, **_STARTS, "INDICES": "int32", "K_TILES": 1, "BLOCKS_PER_SM": 8},
)
SLOW_VARIANTS = (
    {**_COMMON, **_MXFP8, **_RUNS, "INDICES": "int32", "K_TILES": 2, "BLOCKS_PER_SM": 8},
    {**_COMMON, **_NVFP4, **_RUNS, "INDICES": "none", "K_TILES": 8, "BLOCKS_PER_SM": 8},
    {
        **{**_COMMON, **_NVFP4, **_RUNS, "INDICES": "none", "K_TILES": 4, "BLOCKS_PER_SM": 8},
        **{"INPUT": "float32", "ENCODE": "row", "OFFSETS": "int64", "IDS": "none"},
    },
    {
        **{**_COMMON, **_MXFP8, **_STARTS, "INDICES": "none", "K_TILES": 4, "BLOCKS_PER_SM": 8},
        **{"ELEMENT": "e2m1", "INPUT": "float16", "ROUNDING": "even"},
    },
)
