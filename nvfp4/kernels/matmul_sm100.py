"""Products of two quantised operands on Blackwell's tensor cores (tcgen05), dense and grouped.

A tile of the result is 128 rows of TILE_N columns. Blocks take tiles with the grid as stride, each
warp with one job (``sm100_jobs``, ``sm100_results``): copies in, products, results. Where two sets
of accumulators fit, the products of a tile overlap the results of the one before.

Every element times its scale is exact, and so is each product; sums are float32 in the order and
rounding of the tensor cores. Results are the golden model's bit for bit where sums are exact.

With SWAP the instruction's 128 rows are columns of the result, and its columns rows: tiles of
128 columns and TILE_N = 64 or 128 rows, for products of few rows. PAIR is then "none".

KIND says which instruction: "nvf4" (two nvfp4), "mxf4" (two mxfp4), "mxf8" (mxfp8 and mxfp8 or
mxfp4, whose codes are spread to 16 bytes of shared memory for 16 of them). Scales come as they lie
in the tcgen layout, 512 bytes for 128 rows of 4 scales. With PAIR = "halves" a tile is TILE_N / 2
columns of gate and as many of up, two products of MMA_N = TILE_N / 2 columns each.

The padding of a row's scales can be anything, a NaN too, and instructions of 64 elements see it
where the depth is an odd multiple of 32: warp 5 then zeroes it in the last stage.

Constraints: tcgen scales of both operands; depth a multiple of 32, of 128 with mxfp4 beside mxfp8;
scales multiples of 16 bytes, codes of 16, of 32 where they are spread; "halves": columns a multiple
of TILE_N, which is 128 or 256. No row_indices. THREADS threads, any grid of one dimension, shared
memory: :func:`shared_bytes`.

Compile-time constants: those of ``matmul_naive`` for factors and results; KIND, TILE_N, TILE_K,
MMA_N, SWIZZLE (bytes of a row of an atom: TILE_K's, at most 128), STAGES, ACCS (accumulators),
COLUMNS (of tensor memory), GROUPED.
"""

from __future__ import annotations

import functools

from .._numba import cuda
from ..program import Kernel
from ..ptx.arith import i64_of_u32
from ..ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait
from ..ptx.mbarrier import fence_mbarrier_init, mbarrier_init
from ..ptx.memory import ld_shared_u32
from ..ptx.tcgen05 import (
    tcgen05_alloc,
    tcgen05_dealloc,
    tcgen05_fence_after_thread_sync,
    tcgen05_fence_before_thread_sync,
    tcgen05_relinquish,
)
from .matmul_naive import grouped_matmul_kernel, matmul_kernel
from .sm100_jobs import issue, produce
from .sm100_layout import (
    SCALE_TILE,
    TILE_M,
    address_base,
    aligned_base,
    full_base,
    made_base,
    parts_of_tile,
    tiles_across,
)
from .sm100_results import finish

STAGES = 4
ACCS = 2
COLUMNS = 512
SWAP = False

THREADS = 192
PRODUCER, ISSUER = 4, 5  # warps
#: Shared memory that a block of sm_100 and sm_103 can have.
SHARED_LIMIT = 232448


# Bodies ------------------------------------------------------------------------------------------


def run(maps, scales, to, factors, of_groups, row_indices, shape, columns, depth, row_tiles):
    """A block: set up, the three jobs, give back."""
    griddepcontrol_launch_dependents()
    base = aligned_base()
    thread = cuda.threadIdx.x + 0
    warp = thread // 32
    full = full_base(base)
    made = made_base(base)
    if thread == 0:
        for i in range(STAGES):
            mbarrier_init(full + 8 * i, 1)
            mbarrier_init(full + 8 * (STAGES + i), 1)
        for i in range(ACCS):
            mbarrier_init(made + 8 * i, 1)
            mbarrier_init(made + 16 + 8 * i, 4)
        fence_mbarrier_init()
    if warp == ISSUER:
        tcgen05_alloc(address_base(base), COLUMNS)
        tcgen05_relinquish()
    tcgen05_fence_before_thread_sync()
    cuda.syncthreads()
    tcgen05_fence_after_thread_sync()
    memory = i64_of_u32(ld_shared_u32(address_base(base)))
    griddepcontrol_wait()
    total = row_tiles * tiles_across(columns) * parts_of_tile()
    if SWAP:
        maps = (maps[1], maps[0])
        scales = (scales[1], scales[0])
    if warp == PRODUCER:
        produce(base, maps, scales, of_groups, shape[1], columns, depth, total)
    elif warp == ISSUER:
        issue(base, memory, of_groups, shape[1], columns, depth, total)
    else:
        lane = thread % 32
        finish(base, memory, warp, lane, to, factors, of_groups, row_indices, shape, columns, total)
    tcgen05_fence_before_thread_sync()
    cuda.syncthreads()
    if warp == ISSUER:
        tcgen05_fence_after_thread_sync()
        tcgen05_dealloc(memory, COLUMNS)


def matmul_sm100(
    a_map,
    b_map,
    a,
    a_scales,
    a_decode,
    b,
    b_scales,
    b_decode,
    alpha,
    alpha_number,
    out,
    out_scales,
    out_decode,
    e0,
    e1,
    e2,
    e3,
    rows,
    columns,
    depth,
    a_stride,
):
    run(
        (a_map, b_map),
        (a_scales, b_scales),
        (out, b_decode, e0, e1, e2, e3),
        (alpha, alpha_number, a_decode),
        (out, out, out, 0, 0, 0),
        out,
        (rows, rows),
        columns,
        depth,
        (rows + TILE_M - 1) // TILE_M,
    )


def grouped_matmul_sm100(
    a_map,
    b_map,
    a,
    a_scales,
    a_decode,
    b,
    b_scales,
    b_decode,
    row_offsets,
    expert_ids,
    row_indices,
    tile_starts,
    alpha,
    alpha_number,
    out,
    out_scales,
    out_decode,
    out_tile_starts,
    e0,
    e1,
    e2,
    e3,
    input_rows,
    rows,
    columns,
    depth,
    a_stride,
    groups,
    experts,
    tiles,
    row_tiles,
):
    run(
        (a_map, b_map),
        (a_scales, b_scales),
        (out, b_decode, e0, e1, e2, e3),
        (alpha, alpha_number, a_decode),
        (row_offsets, expert_ids, tile_starts, groups, experts, tiles),
        row_indices,
        (input_rows, rows),
        columns,
        depth,
        row_tiles,
    )


# Kernels -----------------------------------------------------------------------------------------

ARCHITECTURES = ("sm_100a", "sm_103a")
#: Constants of ``matmul_naive`` that are the same here.
_KEPT = ("B_ELEMENT", "B_SCALE", "ALPHA", "DECODE_A", "DECODE_B", "PAIR")
_KEPT_OF_GROUPED = ("OFFSETS", "IDS", "A_STARTS")
_OWN = {
    "A_ELEMENT": ("e2m1", "e4m3", "e5m2"),
    "OUTPUT": ("bfloat16", "float16", "float32"),
    "KIND": ("nvf4", "mxf4", "mxf8"),
    "TILE_N": (64, 128, 192, 256),
    "TILE_K": (128, 256),
    "MMA_N": (64, 128, 192, 256),
    "SWIZZLE": (64, 128),
    "STAGES": tuple(range(1, 13)),
    "ACCS": (1, 2),
    "COLUMNS": (128, 256, 512),
    "SWAP": (False, True),
}


def _kernel(name: str, body, like: Kernel, kept: tuple[str, ...], grouped: bool) -> Kernel:
    constants = {key: like.constants[key] for key in kept} | _OWN
    constants["GROUPED"] = (grouped,)
    if grouped:
        constants |= {"INDICES": ("none",), "STARTS": ("none",)}
    return Kernel(
        name,
        body,
        ("u64*", "u64*", *like.parameters),
        constants,
        architectures=ARCHITECTURES,
        threads=THREADS,
        blocks_per_sm=1,
    )


@functools.cache
def matmul_sm100_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The dense kernel for an epilogue with arrays of these dtypes."""
    return _kernel("matmul_sm100", matmul_sm100, matmul_kernel(arrays), _KEPT, False)


@functools.cache
def grouped_matmul_sm100_kernel(arrays: tuple[str, ...] = ()) -> Kernel:
    """The grouped kernel for an epilogue with arrays of these dtypes."""
    like = grouped_matmul_kernel(arrays)
    kept = (*_KEPT, *_KEPT_OF_GROUPED)
    return _kernel("grouped_matmul_sm100", grouped_matmul_sm100, like, kept, True)


MATMUL_SM100 = matmul_sm100_kernel()
GROUPED_MATMUL_SM100 = grouped_matmul_sm100_kernel()


def shared_bytes(kind: str, tile_n: int, tile_k: int, stages: int, pair: str) -> int:
    """Dynamic shared memory of a block, the room to align it to 1024 bytes included."""
    row = tile_k if kind == "mxf8" else tile_k // 2
    groups = tile_k // (64 if kind == "nvf4" else 128)
    b_tiles = 2 if pair == "halves" else (tile_n + 127) // 128
    stage = (TILE_M + tile_n) * row + SCALE_TILE * groups * (1 + b_tiles)
    strip = 4 * 32 * 4 * (36 if pair == "none" else 68)
    return 1024 + stages * stage + strip + 16 * stages + 32 + 16


def tile_constants(
    kind: str,
    tile_n: int,
    tile_k: int,
    pair: str,
    stages: int | None = None,
    swap: bool = False,
) -> dict:
    """The constants that follow from a tile's extents; as many stages as fit, if not said."""
    row = tile_k if kind == "mxf8" else tile_k // 2
    accumulators = 1 if tile_n > 192 else 2
    groups = tile_k // (64 if kind == "nvf4" else 128)
    b_tiles = 2 if pair == "halves" else (tile_n + 127) // 128
    needed = accumulators * tile_n + 4 * groups * (1 + b_tiles)
    if stages is None:
        stages = 12
        while shared_bytes(kind, tile_n, tile_k, stages, pair) > SHARED_LIMIT:
            stages -= 1
    return {
        "KIND": kind,
        "TILE_N": tile_n,
        "TILE_K": tile_k,
        "MMA_N": tile_n // 2 if pair == "halves" else tile_n,
        "SWIZZLE": min(row, 128),
        "STAGES": stages,
        "ACCS": accumulators,
        "COLUMNS": next(columns for columns in (128, 256, 512) if columns >= needed),
        "SWAP": swap,
    }


_NVFP4 = {"A_ELEMENT": "e2m1", "B_ELEMENT": "e2m1", "B_SCALE": "e4m3"}
_MXFP4 = {"A_ELEMENT": "e2m1", "B_ELEMENT": "e2m1", "B_SCALE": "e8m0"}
_MIXED = {"A_ELEMENT": "e4m3", "B_ELEMENT": "e2m1", "B_SCALE": "e8m0"}
_MXFP8 = {"A_ELEMENT": "e4m3", "B_ELEMENT": "e4m3", "B_SCALE": "e8m0"}
_DENSE = {"ALPHA": "value", "DECODE_A": "scalar", "DECODE_B": "scalar", "OUTPUT": "bfloat16"}
_GROUPED = {**_DENSE, "ALPHA": "expert", "DECODE_A": "group", "DECODE_B": "batch"}
_INDEX = {"OFFSETS": "int32", "IDS": "int32", "A_STARTS": "none", "INDICES": "none"}
_INDEX |= {"STARTS": "none"}


def _variant(kind, tile_n, tile_k, operands, grouped, pair="none", swap=False):
    made = {**(_GROUPED | _INDEX if grouped else _DENSE), **operands, "PAIR": pair}
    return {**made, **tile_constants(kind, tile_n, tile_k, pair, swap=swap), "GROUPED": grouped}


VARIANTS = {
    "matmul_sm100": (
        _variant("nvf4", 128, 256, _NVFP4, False),
        _variant("mxf8", 256, 128, _MXFP8, False),
    ),
    "grouped_matmul_sm100": (
        _variant("mxf8", 64, 128, _MIXED, True, swap=True),
        _variant("mxf4", 128, 256, _MXFP4, True, "halves"),
    ),
}
SLOW_VARIANTS = {
    "matmul_sm100": (
        _variant("nvf4", 64, 256, _NVFP4, False),
        _variant("nvf4", 192, 128, _NVFP4, False),
        _variant("nvf4", 256, 256, _NVFP4, False, "interleaved"),
        _variant("mxf4", 128, 256, _MXFP4, False),
        _variant("nvf4", 64, 256, _NVFP4, False, swap=True),
    ),
    "grouped_matmul_sm100": (
        _variant("nvf4", 128, 256, _NVFP4, True, "halves"),
        _variant("mxf8", 128, 128, _MXFP8, True, "interleaved"),
        _variant("mxf8", 128, 128, _MIXED, True),
        _variant("mxf8", 64, 256, _MIXED, True),
    ),
}
