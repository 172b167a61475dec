"""Products of small matrices whose elements lie across the lanes of a warp (mma.sync, ldmatrix).

Source: PTX ISA, ``mma``, ``ldmatrix``, ``stmatrix``; ``nvfp4.ptx.mma`` describes the layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..golden.casts import decode_e4m3, decode_e5m2
from .errors import InvalidOperand, Misaligned

if TYPE_CHECKING:
    from .thread import Thread

_ALL = 0xFFFFFFFF
_LANES = np.arange(32)
_G, _T = _LANES >> 2, _LANES & 3
#: Bytes of an element.
SIZES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}


def element_values(data: np.ndarray, kind: str) -> np.ndarray:
    """Return the values, in float64, of elements given as bytes in the last axis."""
    if kind == "bf16":
        words = data.view(np.uint16).astype(np.uint32) << np.uint32(16)
        return words.view(np.float32).astype(np.float64)
    if kind == "f16":
        return data.view(np.float16).astype(np.float64)
    decode = decode_e4m3 if kind == "e4m3" else decode_e5m2
    return decode(data).astype(np.float64)


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return A B^T + C of float64 operands, rounded once to float32; a NaN is 0x7fffffff."""
    with np.errstate(all="ignore"):
        result = (a @ b.T + c).astype(np.float32)
    result[np.isnan(result)] = np.uint32(0x7FFFFFFF).view(np.float32)
    return result


def fragment_a(words: np.ndarray, kind: str) -> np.ndarray:
    """Return the 16 rows of A that 32 lanes hold in 4 registers each, as float64."""
    each = 4 // SIZES[kind]
    values = element_values(np.ascontiguousarray(words).view(np.uint8), kind).reshape(32, 4, each)
    a = np.empty((16, 8 * each), np.float64)
    for register in range(4):
        rows = _G + 8 * (register & 1)
        for part in range(each):
            a[rows, each * _T + 4 * each * (register >> 1) + part] = values[:, register, part]
    return a


def _fragment_b(words: np.ndarray, kind: str) -> np.ndarray:
    """Return B transposed: 8 rows, one a column of B."""
    each = 4 // SIZES[kind]
    values = element_values(np.ascontiguousarray(words).view(np.uint8), kind).reshape(32, 2, each)
    b = np.empty((8, 8 * each), np.float64)
    for register in range(2):
        for part in range(each):
            b[_G, each * _T + 4 * each * register + part] = values[:, register, part]
    return b


_ROWS = np.stack([_G, _G, _G + 8, _G + 8], axis=1)
_COLUMNS = np.stack([2 * _T, 2 * _T + 1] * 2, axis=1)


def mma_resolver(kind: str) -> Callable[[dict[int, Any]], Mapping[int, Any]]:
    """Return what makes a product of 32 lanes' (a, b, c)."""

    def resolve(payloads: dict[int, Any]) -> Mapping[int, Any]:
        if len(payloads) < 32:
            raise InvalidOperand(f"mma: a product takes 32 lanes; the warp has {len(payloads)}")
        a = fragment_a(np.array([payloads[lane][0] for lane in range(32)], np.uint32), kind)
        b = _fragment_b(np.array([payloads[lane][1] for lane in range(32)], np.uint32), kind)
        c = np.empty((16, 8), np.float64)
        c[_ROWS, _COLUMNS] = np.array([payloads[lane][2] for lane in range(32)], np.float32)
        d = multiply_add(a, b, c)[_ROWS, _COLUMNS]
        return {lane: tuple(d[lane]) for lane in range(32)}

    return resolve


def stmatrix(thread: Thread, address: int, words: tuple[int, ...], trans: bool = False) -> None:
    """Model of ``stmatrix``: a lane stores its piece of a row, or of a column, of each matrix."""
    name = f"stmatrix.x{len(words)}" + (".trans" if trans else "")
    rows = thread.collective(name, _ALL, address, lambda lanes: dict.fromkeys(lanes, lanes))
    if len(rows) < 32:
        raise InvalidOperand(f"{name}: it takes 32 lanes; the warp has {len(rows)}")
    if thread.lane < 8 * len(words) and address % 16:
        raise Misaligned(
            f"{name}: misaligned, the row's address is not a multiple of 16", address=address
        )
    g, t = thread.lane >> 2, thread.lane & 3
    shared = thread.block.shared
    for matrix, word in enumerate(words):
        if trans:
            shared.store(rows[8 * matrix + 2 * t] + 2 * g, 2, word & 0xFFFF)
            shared.store(rows[8 * matrix + 2 * t + 1] + 2 * g, 2, word >> 16 & 0xFFFF)
        else:
            shared.store(rows[8 * matrix + g] + 4 * t, 4, word & 0xFFFFFFFF)


def ldmatrix(thread: Thread, address: int, count: int, trans: bool) -> tuple[int, ...]:
    """Model of ``ldmatrix``: `count` matrices of 8 x 8 16-bit elements."""
    name = f"ldmatrix.x{count}" + (".trans" if trans else "")
    rows = thread.collective(name, _ALL, address, lambda lanes: dict.fromkeys(lanes, lanes))
    if len(rows) < 32:
        raise InvalidOperand(f"{name}: it takes 32 lanes; the warp has {len(rows)}")
    if thread.lane < 8 * count and address % 16:
        raise Misaligned(
            f"{name}: misaligned, the row's address is not a multiple of 16", address=address
        )
    shared = thread.block.shared
    g, t = thread.lane >> 2, thread.lane & 3
    results = []
    for matrix in range(count):
        row = rows[8 * matrix + g]
        if not trans:
            results.append(shared.load(row + 4 * t, 4))
            continue
        low = shared.load(rows[8 * matrix + 2 * t] + 2 * g, 2)
        high = shared.load(rows[8 * matrix + 2 * t + 1] + 2 * g, 2)
        results.append(low | high << 16)
    return tuple(results)
