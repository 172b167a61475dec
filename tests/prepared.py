"""Prepared weights read lane by lane, as the kernels of Hopper do, from the text of decision D13.

Nothing here is shared with the package but the format descriptors.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4.formats import BlockFormat
from nvfp4.layouts import codes_shape, scale_shape

MASK = 0x81C081C0
WORD = 0xFFFFFFFF
#: A code as a bfloat16 is its value times 2 to the power of this.
EXPONENT = {"e2m1": -126, "e4m3": -120, "e5m2": -112}


def rotated_left(q: int, by: int) -> int:
    return (q << by | q >> (32 - by)) & WORD


def registers(q: int) -> tuple[int, int, int, int]:
    """The four registers of a word of e2m1 codes."""
    return (
        q & MASK,
        q << 4 & MASK,
        (q << 6 ^ rotated_left(q, 10)) & MASK,
        (q << 6 ^ q >> 4) & MASK,
    )


def bfloat16(bits: int) -> Any:
    return np.array([bits], np.uint16).view(ml_dtypes.bfloat16)[0]


def registers_of_word(codes: bytes, lane: int, w: int, fmt: BlockFormat) -> list[list[int]]:
    """Registers of word w: the bfloat16 bits of the even and of the odd column."""
    g, t = divmod(lane, 4)
    at = 16 * (8 * t + g) + 4 * w
    if fmt.element == "e2m1":
        q = int.from_bytes(codes[at:][:4], "little")
        return [[f & 0xFFFF, f >> 16] for f in registers(q)]
    found = []
    for half in (0, 1):
        for upper in (0, 1):
            word = codes[512 * upper + at :][:4]
            shift = 4 if fmt.element == "e4m3" else 3
            both = []
            for odd in (0, 1):
                code = word[2 * odd + (1 - half)]
                both.append((code & 0x80) << 8 | (code & 0x7F) << (8 - shift))
            found.append(both)
    return found


def scale_byte(record: bytes, g: int, t: int, upper: int, half: int, fmt: BlockFormat) -> int:
    word = g if fmt.block == 32 else 2 * g + t // 2
    return record[4 * word + 2 * half + upper]


def multiplier(byte: int, fmt: BlockFormat) -> Any:
    return bfloat16(byte << 7 if fmt.scale == "e8m0" else (byte << 4) + 0x7500)


def value_of_code(bits: int, fmt: BlockFormat) -> float:
    """Of a code as `registers_of_word` gives it, infinity and NaN included."""
    value = float(bfloat16(bits)) * 2.0 ** -EXPONENT[fmt.element]
    if fmt.element == "e4m3" and bits & 0x7F0 == 0x7F0:
        return math.nan
    if fmt.element == "e5m2" and bits & 0xF80 == 0xF80:
        return math.nan if bits & 0x60 else math.copysign(math.inf, value)
    return value


def element_times_scale(bits: int, byte: int, factor: float, fmt: BlockFormat) -> float:
    """One element as a kernel has it, times the factor."""
    element = bfloat16(bits)
    if factor == 0:
        scale = math.nan if byte == 255 else math.ldexp(1.0, byte - 127)
        return value_of_code(bits, fmt) * scale
    with np.errstate(invalid="ignore"):
        product = element * multiplier(byte, fmt)
    exact = float(element) * float(multiplier(byte, fmt))
    assert float(product) == exact or math.isnan(exact)
    return float(product) * factor


def read_matrix(codes: np.ndarray, scales: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    """Element * scale of [R, S, ...] codes and their scales: [16 R, 64 S] with the padding."""
    down, across = codes.shape[:2]
    factor = float(np.frombuffer(scales[:4].tobytes(), "<f4")[0])
    assert not scales[(12 if fmt.name == "mxfp4" else 4) : 16].any()
    assert factor == 0 or (math.frexp(factor)[0] == 0.5 and factor >= 1)
    size = 1024 // fmt.block
    assert scales.size == 16 + down * across * size
    out = np.full((16 * down, 64 * across), np.nan, np.float64)
    for r in range(down):
        for s in range(across):
            stripe = codes[r, s].tobytes()
            at = 16 + (r * across + s) * size
            record = scales[at : at + size].tobytes()
            for lane in range(32):
                g, t = divmod(lane, 4)
                for w in range(4):
                    for i, both in enumerate(registers_of_word(stripe, lane, w, fmt)):
                        upper, half = i % 2, i // 2
                        byte = scale_byte(record, g, t, upper, half, fmt)
                        for odd in (0, 1):
                            value = element_times_scale(both[odd], byte, factor, fmt)
                            column = 64 * s + 32 * half + 8 * t + 2 * w + odd
                            out[16 * r + g + 8 * upper, column] = value
    with np.errstate(over="ignore"):
        return out.astype(np.float32)


def parts(
    seed: int, fmt: BlockFormat, shape: tuple[int, ...], *, plain: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Random codes and linear scales of a matrix or a stack, with special blocks among them.

    Blocks of zeros of both signs, of any scale; NaN scales; zero scales (nvfp4). With `plain`,
    scales of all sizes and codes of infinity and NaN.
    """
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, codes_shape(fmt, shape), np.uint8)
    size = scale_shape(fmt, shape, "linear")
    kind = rng.random(size)
    if fmt.scale == "e4m3":
        scales = rng.integers(0, 0x80, size, np.uint8)
        scales[kind < 0.1] = 0
        scales[kind > 0.9] = 0x7F
    else:
        # Live ones within 100 binades; where c is not 0, too.
        top = int(rng.integers(120, 255))
        scales = rng.integers(max(20, top - 100), top + 1, size).astype(np.uint8)
        scales[kind < 0.2] = rng.integers(0, 255, int((kind < 0.2).sum()))
        scales[kind > 0.9] = 255
        if fmt.codes_per_byte == 1 and not plain:
            codes &= 0xBB  # no infinity, no NaN
        by_block = codes.reshape(*size, fmt.block // fmt.codes_per_byte)
        by_block[kind < 0.2] &= 0x88 if fmt.codes_per_byte == 2 else 0x80
        if plain:
            scales = rng.integers(0, 256, size, np.uint8)
            by_block[kind < 0.1] = 0
            scales[..., :1, :1], by_block[..., :1, :1, :] = 5, 0x33  # below what can be rebased
    return codes, scales
