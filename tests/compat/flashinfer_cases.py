"""FlashInfer's layouts and quantisers, written down a second time, and operands made with them."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from nvfp4 import golden

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
FLOAT8 = {"mxfp8_e4m3": ml_dtypes.float8_e4m3fn, "mxfp8_e5m2": ml_dtypes.float8_e5m2}


# Layouts ------------------------------------------------------------------------------------------


def swizzled(linear: np.ndarray, tile: int = 128) -> np.ndarray:
    """Scales [M, C] in tiles of `tile` rows by 4, byte by byte, padding as 0; flat."""
    rows, columns = linear.shape
    across = -(-columns // 4)
    flat = np.zeros(-(-rows // tile) * tile * across * 4, linear.dtype)
    m, c = np.indices(linear.shape)
    if tile == 128:
        within = (m % 32) * 16 + (m % 128) // 32 * 4 + c % 4
    else:
        within = (m % 8) * 4 + c % 4
    flat[(m // tile * across + c // 4) * tile * 4 + within] = linear
    return flat


def first_row(m_indptr: np.ndarray, i: int) -> int:
    """The row of a_scale from which FlashInfer reads the scales of group i."""
    return int((int(m_indptr[i]) + 127 * i) // 128 * 128)


def scales_by_group(linear: np.ndarray, m_indptr: np.ndarray) -> np.ndarray:
    """Scales of rows [R, C], each group swizzled by itself and where FlashInfer reads it."""
    groups, width = len(m_indptr) - 1, -(-linear.shape[1] // 4) * 4
    made = np.zeros(((len(linear) + 127 * groups) // 128 * 128, width), np.uint8)
    for i in range(groups):
        rows = int(m_indptr[i + 1] - m_indptr[i])
        own = swizzled(linear[m_indptr[i] : m_indptr[i + 1]])
        own = own.reshape(-(-rows // 128) * 128, width)
        start = first_row(m_indptr, i)
        made[start : start + len(own)] = own
    return made


def scales_of_stack(linear: np.ndarray) -> np.ndarray:
    """Scales [G, n, C], each matrix swizzled by itself."""
    groups, n, columns = linear.shape
    made = np.zeros((groups, -(-n // 128) * 128, -(-columns // 4) * 4), np.uint8)
    for i in range(groups):
        made[i] = swizzled(linear[i]).reshape(made.shape[1:])
    return made


# Operands -----------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """Arguments of a grouped product, and the exact values that they stand for."""

    a: np.ndarray
    b: np.ndarray
    a_scale: np.ndarray
    b_scale: np.ndarray
    m_indptr: np.ndarray
    a_values: np.ndarray
    b_values: np.ndarray

    @property
    def arguments(self) -> tuple[np.ndarray, ...]:
        return self[:5]

    def product(self, alpha: np.ndarray | None = None) -> np.ndarray:
        """In float64: row by row with the matrix of its group; 0 for rows of none."""
        out = np.zeros((self.a_values.shape[0], self.b_values.shape[1]))
        for i in range(len(self.m_indptr) - 1):
            rows = slice(self.m_indptr[i], self.m_indptr[i + 1])
            factor = 1.0 if alpha is None else float(alpha[i])
            out[rows] = factor * (self.a_values[rows] @ self.b_values[i].T)
        return out


def packed(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits, two a byte, the even column low."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def e2m1_values(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7].astype(np.float64)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    return codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def exact(
    rng: np.random.Generator,
    m_indptr: Any,
    n: int,
    k: int,
    *,
    a_format: str = "mxfp8_e4m3",
    rows: int | None = None,
) -> Operands:
    """Random operands whose products and sums are all exact in float32, up to k = 2048."""
    m_indptr = np.asarray(m_indptr, np.int32)
    groups = len(m_indptr) - 1
    rows = int(m_indptr[-1]) if rows is None else rows
    b_codes = rng.integers(0, 16, (groups, n, k), np.uint8)
    if a_format == "nvfp4":
        a_codes = rng.integers(0, 16, (rows, k), np.uint8)
        a_elements, a, block = e2m1_values(a_codes), packed(a_codes), 16
        choice = np.array([0.5, 1, 1.5, 2], ml_dtypes.float8_e4m3fn).view(np.uint8)
        a_bytes, b_bytes = (
            rng.choice(choice, shape) for shape in ((rows, k // 16), (groups, n, k // 16))
        )
        a_factors, b_factors = e4m3_values(a_bytes), e4m3_values(b_bytes)
    else:
        a_elements = rng.integers(-4, 5, (rows, k)).astype(np.float64)
        a, block = a_elements.astype(FLOAT8[a_format]), 32
        a_bytes = rng.integers(126, 129, (rows, k // 32), np.uint8)
        b_bytes = rng.integers(126, 129, (groups, n, k // 32), np.uint8)
        a_factors, b_factors = (np.exp2(s.astype(np.float64) - 127) for s in (a_bytes, b_bytes))
    return Operands(
        a,
        packed(b_codes),
        scales_by_group(a_bytes, m_indptr),
        scales_of_stack(b_bytes),
        m_indptr,
        a_elements * np.repeat(a_factors, block, axis=-1),
        e2m1_values(b_codes) * np.repeat(b_factors, block, axis=-1),
    )


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """Exact values rounded once."""
    return golden.cast_float(values.astype(np.float32), dtype)


def same_bits(got: np.ndarray, expected: np.ndarray) -> bool:
    """Equal bit by bit, but for the sign of zero, which products leave open."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    words = [np.where(x == 0, 0, x).astype(x.dtype).view(np.uint16) for x in (got, expected)]
    return bool(np.array_equal(*words))


# FlashInfer's test quantisers ---------------------------------------------------------------------


def quantize_by_rule(x: np.ndarray, qmax: float, rule: str) -> tuple[np.ndarray, np.ndarray]:
    """Elements as float64 before their rounding, saturated, and scale bytes, of blocks of 32.

    "floor": the rule of FlashInfer's test, floor(log2 amax) - floor(log2 qmax); "rceil": the one of
    its quantisers, ceil(log2(amax / qmax)). Amounts near powers of two are left out by the callers.
    """
    blocks = x.astype(np.float64).reshape(*x.shape[:-1], -1, 32)
    amax = np.abs(blocks).max(axis=-1)
    with np.errstate(divide="ignore"):
        if rule == "floor":
            exponent = np.floor(np.log2(amax)) - np.floor(np.log2(qmax))
        else:
            exponent = np.ceil(np.log2(amax / qmax))
    exponent = np.where(amax == 0, -127, np.clip(exponent, -127, 127))
    scaled = np.clip(blocks / np.exp2(exponent)[..., None], -qmax, qmax)
    return scaled.reshape(x.shape), (exponent + 127).astype(np.uint8)


def to_e2m1(scaled: np.ndarray) -> np.ndarray:
    """Codes by the nearest of 16 values, ties to the even code."""
    distance = np.abs(np.abs(scaled)[..., None] - E2M1.astype(np.float64))
    even_first = distance + (np.arange(8) % 2) * 1e-12
    return (np.argmin(even_first, axis=-1) | np.where(np.signbit(scaled), 8, 0)).astype(np.uint8)


def quantized(
    rng: np.random.Generator, m_indptr: Any, n: int, k: int, a_format: str, rule: str
) -> Operands:
    """FlashInfer's test: normal values, n padded with zero rows to 8s, k with zeros to 128s."""
    m_indptr = np.asarray(m_indptr, np.int32)
    groups, rows = len(m_indptr) - 1, int(m_indptr[-1])
    full_n, full_k = -(-n // 8) * 8, -(-k // 128) * 128
    a = np.zeros((rows, full_k), np.float32)
    a[:, :k] = rng.standard_normal((rows, k), np.float32)
    b = np.zeros((groups, full_n, full_k), np.float32)
    b[:, :n, :k] = rng.standard_normal((groups, n, k), np.float32) / np.float32(np.sqrt(k))
    kind = FLOAT8[a_format]
    scaled, a_bytes = quantize_by_rule(a, float(ml_dtypes.finfo(kind).max), rule)
    a_codes = scaled.astype(np.float32).astype(kind)
    scaled, b_bytes = quantize_by_rule(b, 6.0, rule)
    b_codes = to_e2m1(scaled)
    a_factors, b_factors = (np.exp2(s.astype(np.float64) - 127) for s in (a_bytes, b_bytes))
    return Operands(
        a_codes,
        packed(b_codes),
        scales_by_group(a_bytes, m_indptr),
        scales_of_stack(b_bytes),
        m_indptr,
        a_codes.astype(np.float64) * np.repeat(a_factors, 32, axis=-1),
        e2m1_values(b_codes) * np.repeat(b_factors, 32, axis=-1),
    )
