"""Plans of dense rows that are fetched a row ahead: ``kernels.fused_ahead``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .architectures import capability
from .formats import BlockFormat
from .kernels.fused_ahead import FUSED_AHEAD, STATE
from .launch import Launch
from .layouts import TILE_ROWS
from .tiling import MAX_YZ, PIECE, ceil_div, encode_arguments, padded_pieces

__all__ = ["PLAIN", "ahead"]

#: Constants of rows that are quantised as they are.
PLAIN = {"FRONT": "plain", "HALVES": "split", "WEIGHT": "none", "HIDDEN": False}

#: Registers of a multiprocessor.
_REGISTERS = 65536
#: Most pieces of a row.
_PIECES = 1024
#: Rows of a unit.
_UNIT = 4
#: Shared memory of a block and of a multiprocessor, where a kernel that fits runs from 9.0 on.
_BLOCK_SHARED, _SHARED = 227 * 1024, 228 * 1024
#: Threads that there must be, of blocks with rows to the full, by what becomes of the input: for
#: fewer, ``fused``, with a row a block, is faster. Measured on an H200.
_ENOUGH = {"plain": 0, "rms": 90_000, "silu": 200_000, "gpt-oss": 200_000}


def ahead(
    arch: str,
    fmt: BlockFormat,
    constants: Mapping[str, Any],
    encode: str,
    rows: int,
    columns: int,
    batches: int,
    row_stride: int,
    batch_stride: int,
    counts: str | None = None,
    eps: float = 0.0,
) -> Launch | None:
    """Quantise a stack of matrices, where the kernel takes it and is faster than the others.

    Parameters
    ----------
    arch, fmt
    constants
        Of the kernel, but for the launch's own.
    encode
        As in ``plans.quantize``.
    rows, columns, batches
        Of the result.
    row_stride, batch_stride
        Of ``x``, in elements.
    counts
        Dtype of ``row_counts``, if only some rows count.
    eps
    """
    tcgen = constants["LAYOUT"] == "tcgen"
    itemsize = 4 if constants["INPUT"] == "float32" else 2
    all_pieces = padded_pieces(fmt, columns, constants["LAYOUT"])
    blocks = all_pieces * PIECE // fmt.block
    gates = constants["FRONT"] in ("silu", "gpt-oss")
    row_bytes = columns * itemsize * (2 if gates else 1)
    shared = 128 * ceil_div(STATE + 4 * blocks, 128) + row_bytes
    if not (
        arch in (FUSED_AHEAD.architectures or ())
        and constants["ALIGNED"]
        and encode != "amax"
        and 0 < all_pieces <= _PIECES
        and 0 < rows * batches < 1 << 31
        and batches <= MAX_YZ
        and 0 <= row_stride * itemsize < 1 << 32
        and shared <= _BLOCK_SHARED
    ):
        return None
    threads = 32 * ceil_div(all_pieces, 64)
    most = _REGISTERS // (threads * _registers(arch, constants))
    resident = max(1, min(32, most, _SHARED // (shared + 1024)))
    tiles = ceil_div(rows, TILE_ROWS)
    units = tiles * (TILE_ROWS // _UNIT) if tcgen else ceil_div(rows, _UNIT)
    if ceil_div(rows, _UNIT) * batches * threads < _ENOUGH[constants["FRONT"]]:
        return None
    program = FUSED_AHEAD.program(
        **{**constants, "UNIT": encode == "none"},
        ENCODE=encode,
        COUNTS=counts or "none",
        THREADS=threads,
        BLOCKS_PER_SM=resident,
    )
    args = (
        "x",
        # What a call does not have is not read, but must point somewhere.
        "weight" if constants["FRONT"] == "rms" else "x",
        "hidden" if constants["HIDDEN"] else "codes",
        *("codes", "scales", "codes" if counts is None else "row_counts"),
        *encode_arguments(encode),
        *("decode_scale", eps, rows, columns // PIECE, all_pieces),
        *(row_stride * itemsize, batch_stride * itemsize, columns // fmt.codes_per_byte, blocks),
    )
    grid = (units, 1, batches)
    return Launch(program, grid, (threads, 1, 1), shared, args, programmatic=True)


def _registers(arch: str, constants: Mapping[str, Any]) -> int:
    """Registers of a thread with which nothing spills."""
    norm, dtype = constants["FRONT"] == "rms", constants["INPUT"]
    if dtype == "float32":
        return 112 if norm else 104
    if capability(arch)[0] > 9:
        return 104 if norm else 80
    if not norm:
        return 64
    return 80 if dtype == "float16" else 72 if constants["WEIGHT"] == "float32" else 64
