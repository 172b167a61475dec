"""Products of block-scaled matrices across the lanes of a warp (mma.sync with ``block_scale``).

Source: PTX ISA, ``mma``, ``ldmatrix``; the layouts are described in ``nvfp4.ptx.mma_scaled``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..golden.casts import decode_e2m1, decode_e4m3, decode_e5m2, decode_e8m0
from .errors import InvalidOperand, Misaligned
from .matrices import multiply_add

if TYPE_CHECKING:
    from .thread import Thread

_ALL = 0xFFFFFFFF
_LANES = np.arange(32)
_G, _T = _LANES >> 2, _LANES & 3
_ROWS = np.stack([_G, _G, _G + 8, _G + 8], axis=1)
_COLUMNS = np.stack([2 * _T, 2 * _T + 1] * 2, axis=1)
_DECODE = {"e4m3": decode_e4m3, "e5m2": decode_e5m2}
#: Blocks of a product's depth that have scales of their own.
_BLOCKS = {"nvfp4": 4, "mxfp4": 2}


def _values(words: np.ndarray, element: str) -> np.ndarray:
    """Values of the elements of each register, the first in the lowest bits: [.., elements]."""
    data = np.ascontiguousarray(words)[..., None].view(np.uint8)
    if element == "packed":
        codes = np.stack([data & 15, data >> 4], axis=-1)
        return decode_e2m1(codes.reshape(*words.shape, 8)).astype(np.float64)
    if element == "e2m1":
        stray = data & 0xC3
        if stray.any():
            raise InvalidOperand(
                "mma: an e2m1 code lies in bits 5..2 of its byte, and the others are zero; got "
                f"{int(data[stray != 0][0]):#04x}"
            )
        return decode_e2m1(data >> 2).astype(np.float64)
    return _DECODE[element](data).astype(np.float64)


def _rows_of(words: np.ndarray, element: str, high: int) -> np.ndarray:
    """Matrix [high, k] of the registers [32, registers] of 8 or 16 rows."""
    values = _values(words, element)
    each = values.shape[-1]
    matrix = np.empty((high, 8 * each), np.float64)
    for register in range(words.shape[1]):
        rows = _G if high == 8 else _G + 8 * (register & 1)
        half = register if high == 8 else register >> 1
        for part in range(each):
            matrix[rows, each * _T + 4 * each * half + part] = values[:, register, part]
    return matrix


def _scales(words: np.ndarray, kind: str, byte: int) -> np.ndarray:
    """Scales [words, blocks] of words, from a byte on."""
    data = np.ascontiguousarray(words)[:, None].view(np.uint8)
    data = data[:, byte : byte + _BLOCKS.get(kind, 1)]
    if kind != "nvfp4":
        return decode_e8m0(data).astype(np.float64)
    if (data & 0x80).any():
        raise InvalidOperand(
            f"mma: an e4m3 scale has no sign; got {int(data[data > 0x7F][0]):#04x}"
        )
    return decode_e4m3(data).astype(np.float64)


def _scaled(matrix: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Every element times the scale of its block."""
    with np.errstate(invalid="ignore"):
        return matrix * np.repeat(scales, matrix.shape[1] // scales.shape[1], axis=1)


def scaled_mma_resolver(
    kind: str, byte: int, a_thread: int, b_threads: tuple[int, ...]
) -> Callable[[dict[int, Any]], Mapping[int, Any]]:
    """Return what makes the products of 32 lanes' (a, b, c, scales of A, scales of B).

    There is one product for each of `b_threads`, of the same rows.
    """
    a_element, _, b_element = kind.partition(".")
    if kind in _BLOCKS:
        a_element = b_element = "packed"

    def resolve(payloads: dict[int, Any]) -> Mapping[int, Any]:
        if len(payloads) < 32:
            raise InvalidOperand(f"mma: a product takes 32 lanes; the warp has {len(payloads)}")
        a_words, b_words, sums, a_scales, b_scales = (
            np.array([payloads[lane][i] for lane in range(32)], np.float32 if i == 2 else np.uint32)
            for i in range(5)
        )
        lane_of_row = 4 * (np.arange(16) & 7) + 2 * a_thread + (np.arange(16) >> 3)
        a = _scaled(_rows_of(a_words, a_element, 16), _scales(a_scales[lane_of_row], kind, byte))
        d = np.empty((32, 4 * len(b_threads)), np.float32)
        for place, b_thread in enumerate(b_threads):
            words = b_scales[4 * np.arange(8) + b_thread]
            columns = _rows_of(b_words[:, 2 * place : 2 * place + 2], b_element, 8)
            b = _scaled(columns, _scales(words, kind, byte))
            c = np.empty((16, 8), np.float64)
            c[_ROWS, _COLUMNS] = sums[:, 4 * place : 4 * place + 4]
            d[:, 4 * place : 4 * place + 4] = multiply_add(a, b, c)[_ROWS, _COLUMNS]
        return {lane: tuple(d[lane]) for lane in range(32)}

    return resolve


def ldmatrix_e2m1(thread: Thread, address: int, count: int) -> tuple[int, ...]:
    """Model of ``ldmatrix`` of `count` matrices of 8 rows of 16 packed codes, a byte each."""
    name = f"ldmatrix.m8n16.x{count}.b4x16_p64"
    rows = thread.collective(name, _ALL, address, lambda lanes: dict.fromkeys(lanes, lanes))
    if len(rows) < 32:
        raise InvalidOperand(f"{name}: it takes 32 lanes; the warp has {len(rows)}")
    if thread.lane < 8 * count and address % 16:
        raise Misaligned(
            f"{name}: misaligned, the row's address is not a multiple of 16", address=address
        )
    g, t = thread.lane >> 2, thread.lane & 3
    words = [thread.block.shared.load(rows[8 * i + g] + 2 * t, 2) for i in range(count)]
    return tuple(
        (word & 0xF) | (word & 0xF0) << 4 | (word & 0xF00) << 8 | (word & 0xF000) << 12
        for word in words
    )
