"""Weights in the order in which Hopper's kernels read them, and back.

Source: docs/decisions.md, D13: stripes of 16 rows by 64 columns in the order of the registers of
``mma.m16n8k16``; e2m1 codes mixed so that four masks and shifts make bfloat16 of them; scales
rebased so that one bfloat16 multiplication gives element * scale / factor, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .. import layouts
from ..formats import PREPARED, BlockFormat
from ..layouts import PREPARED_COLUMNS, PREPARED_HEADER, PREPARED_ROWS
from .casts import SCALE_TABLES
from .interleave import deinterleave_scales

__all__ = ["prepare_weights", "unprepare_weights"]

_PIECE = 1 << 20  # elements that are worked on at a time
_NAN = 255  # e8m0
_NAN_E4M3 = 0x7F
#: What a rebased e8m0 scale is above c, at the least: a product with it is a normal bfloat16.
_LOWEST = 20
#: Powers of two that e2m1 values may be multiplied by to be e4m3 values: 2^-8 to 2^6.
_FP8_POWERS, _FP8_HIGHEST = 15, 6
#: Scale bytes of blocks without a value: 1.
_DEAD_E8M0, _DEAD_E4M3 = 127, 0x50
_FACTOR_E4M3 = 512.0


def prepare_weights(
    codes: np.ndarray,
    scales: np.ndarray,
    fmt: BlockFormat,
    *,
    shape: Sequence[int],
    scale_layout: str,
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales in the ``"sm90"`` layout.

    Parameters
    ----------
    codes : numpy.ndarray of uint8, [N, K/2] or [N, K], after E if there is one
    scales : numpy.ndarray of uint8
        [..., K/V] linear, or tcgen tiles. The sign of an nvfp4 scale does not count.
    fmt : BlockFormat
    shape : (N, K) or (E, N, K)
    scale_layout : {"linear", "tcgen"}

    Returns
    -------
    codes : numpy.ndarray of uint8, [ceil(N/16), ceil(K/64), 512 or 1024], after E
    scales : numpy.ndarray of uint8, [16 + ceil(N/16) * ceil(K/64) * 1024/V], after E
        For each matrix 16 bytes that begin with float32 `factor`, then the scales. `factor` 0: the
        scales are the original ones, since no common factor lets bfloat16 hold all values. Behind
        it what D25 says of products on FP8 tensor cores.
    """
    shape = tuple(shape)
    rows, columns = shape[-2:]
    blocks = layouts.block_count(fmt, columns)
    if scale_layout == "tcgen":
        scales = deinterleave_scales(scales, (rows, blocks))
    out_codes = np.zeros(layouts.codes_shape(fmt, shape, PREPARED), np.uint8)
    out_scales = np.zeros(layouts.scale_shape(fmt, shape, PREPARED), np.uint8)
    count = shape[0] if len(shape) == 3 else 1
    by_matrix = zip(
        codes.reshape(count, rows, columns // fmt.codes_per_byte),
        scales.reshape(count, rows, blocks),
        out_codes.reshape(count, *out_codes.shape[-3:]),
        out_scales.reshape(count, out_scales.shape[-1]),
        strict=True,
    )
    for matrix in by_matrix:
        _prepare_matrix(*matrix, fmt)
    return out_codes, out_scales


def unprepare_weights(
    codes: np.ndarray, scales: np.ndarray, fmt: BlockFormat, *, shape: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and linear scales of the same values.

    They are the original ones but for blocks without a value: the codes of blocks whose scale is
    NaN are 0, those of nvfp4 blocks whose scale is 0 are zeros of the original signs, and the scale
    of blocks of zeros is any.

    Parameters
    ----------
    codes, scales : numpy.ndarray of uint8
        As :func:`prepare_weights` gives them.
    fmt : BlockFormat
    shape : (N, K) or (E, N, K)

    Returns
    -------
    codes : numpy.ndarray of uint8, [..., N, K/2] or [..., N, K]
    scales : numpy.ndarray of uint8, [..., N, K/V]
    """
    shape = tuple(shape)
    out_codes = np.zeros(layouts.codes_shape(fmt, shape), np.uint8)
    out_scales = np.zeros(layouts.scale_shape(fmt, shape, "linear"), np.uint8)
    count = shape[0] if len(shape) == 3 else 1
    by_matrix = zip(
        codes.reshape(count, *codes.shape[-3:]),
        scales.reshape(count, scales.shape[-1]),
        out_codes.reshape(count, *out_codes.shape[-2:]),
        out_scales.reshape(count, *out_scales.shape[-2:]),
        strict=True,
    )
    for matrix in by_matrix:
        _unprepare_matrix(*matrix, fmt)
    return out_codes, out_scales


# One matrix ---------------------------------------------------------------------------------------


def _prepare_matrix(
    codes: np.ndarray,
    scales: np.ndarray,
    out_codes: np.ndarray,
    out_scales: np.ndarray,
    fmt: BlockFormat,
) -> None:
    factor, rebased, keep, fill = _rebase(codes, scales, fmt)
    out_scales[:4] = np.array([factor], "<f4").view(np.uint8)
    out_scales[4:12] = _fp8_facts(factor, rebased, keep is not None, codes, fmt)
    if not out_codes.size:
        return
    records = out_scales[PREPARED_HEADER:].reshape(*out_codes.shape[:2], -1)
    width = out_codes.shape[1] * PREPARED_COLUMNS
    for stripes, some in _pieces(out_codes):
        kept = codes[some]
        if keep is not None:
            by_block = kept.reshape(*keep[some].shape, -1)
            kept = (by_block & keep[some][..., None]).reshape(kept.shape)
        rows = (stripes.stop - stripes.start) * PREPARED_ROWS
        out_codes[stripes] = _stripes_of(_padded(kept, rows, width // fmt.codes_per_byte, 0), fmt)
        padded = _padded(rebased[some], rows, width // fmt.block, fill)
        records[stripes] = _records_of(padded, fmt)


def _unprepare_matrix(
    codes: np.ndarray,
    scales: np.ndarray,
    out_codes: np.ndarray,
    out_scales: np.ndarray,
    fmt: BlockFormat,
) -> None:
    factor = np.ascontiguousarray(scales[:4]).view("<f4")[0]
    if not codes.size:
        return
    table = _original_bytes(float(factor), fmt)
    records = scales[PREPARED_HEADER:].reshape(*codes.shape[:2], -1)
    for stripes, some in _pieces(codes):
        rows = out_codes[some].shape[0]
        out_codes[some] = _rows_of(codes[stripes], fmt)[:rows, : out_codes.shape[1]]
        found = _blocks_of(records[stripes], fmt)[:rows, : out_scales.shape[1]]
        out_scales[some] = table[found]


def _pieces(stripes: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Slices of stripes, and of the rows in them."""
    down, across = stripes.shape[:2]
    step = max(1, _PIECE // max(1, across * PREPARED_ROWS * PREPARED_COLUMNS))
    for start in range(0, down, step):
        stop = min(start + step, down)
        yield slice(start, stop), slice(start * PREPARED_ROWS, stop * PREPARED_ROWS)


def _padded(values: np.ndarray, rows: int, columns: int, fill: int) -> np.ndarray:
    if values.shape == (rows, columns):
        return values
    padded = np.full((rows, columns), fill, np.uint8)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded


# Scales -------------------------------------------------------------------------------------------


def _rebase(
    codes: np.ndarray, scales: np.ndarray, fmt: BlockFormat
) -> tuple[float, np.ndarray, np.ndarray | None, int]:
    """Factor, scale bytes, which bits of a block's codes remain (None: all), byte of padding."""
    if fmt.scale == "e4m3":
        magnitude = scales & 0x7F
        special = (magnitude == 0) | (magnitude == _NAN_E4M3)
        keep = None
        if special.any():
            keep = np.full(scales.shape, 0xFF, np.uint8)
            keep[magnitude == 0] = 0x88  # signs of zeros
            keep[magnitude == _NAN_E4M3] = 0
        return _FACTOR_E4M3, _FROM_E4M3[magnitude], keep, _DEAD_E4M3
    live = _has_values(codes, scales.shape, fmt)
    sized = scales[live & (scales != _NAN)]
    bias = layouts.PREPARED_BIAS[fmt.element]
    c = max(0, int(sized.max(initial=0)) - (254 - bias))
    if int(sized.min(initial=255)) < c + _LOWEST or _has_special(codes, fmt):
        return 0.0, scales, None, _DEAD_E8M0
    nan = scales == _NAN
    rebased = np.where(live, scales.astype(np.int16) + (bias - c), _DEAD_E8M0)
    rebased = np.where(nan, _NAN, rebased).astype(np.uint8)
    keep = np.where(nan, 0, 0xFF).astype(np.uint8) if nan.any() else None
    return 2.0**c, rebased, keep, _DEAD_E8M0


def _fp8_facts(
    factor: float, rebased: np.ndarray, has_nan: bool, codes: np.ndarray, fmt: BlockFormat
) -> np.ndarray:
    """Bytes 4 to 11 of a header: zeros where not all values are e4m3 values up to a factor."""
    if fmt.scale != "e8m0" or fmt.element != "e2m1" or factor == 0 or has_nan:
        return np.zeros(8, np.uint8)
    c = int(np.frexp(factor)[1]) - 1
    bias = layouts.PREPARED_BIAS[fmt.element]
    sized = rebased[_has_values(codes, rebased.shape, fmt)].astype(np.int64) - bias + c
    top = int(sized.max(initial=_LOWEST))
    if top - int(sized.min(initial=254)) >= _FP8_POWERS:
        return np.zeros(8, np.uint8)
    # A stored scale less `less` puts an element where bfloat16 holds it with e4m3's bits.
    less = top + bias - c - (_FP8_HIGHEST + 133)
    made = np.array([2.0 ** (top - 127 - _FP8_HIGHEST)], "<f4").view("<u4")[0]
    return np.array([made, less * 0x00800080], "<u4").view(np.uint8)


def _has_values(codes: np.ndarray, blocks: tuple[int, ...], fmt: BlockFormat) -> np.ndarray:
    """Which blocks have an element that is not zero, of whichever sign."""
    magnitudes = codes & (0x77 if fmt.codes_per_byte == 2 else 0x7F)
    by_block = magnitudes.reshape(*blocks, fmt.block // fmt.codes_per_byte)
    return np.asarray(by_block.any(axis=-1))


def _has_special(codes: np.ndarray, fmt: BlockFormat) -> bool:
    """Whether a code is an infinity or a NaN."""
    if fmt.element == "e4m3":
        return bool((codes & 0x7F == 0x7F).any())
    return fmt.element == "e5m2" and bool((codes & 0x7C == 0x7C).any())


def _from_e4m3() -> np.ndarray:
    """Bytes with one more exponent bit, of e4m3 magnitudes: (e + 10) << 3 | m for (1 + m/8) 2^e."""
    mantissa, exponent = np.frexp(SCALE_TABLES["e4m3"][:128])
    bytes_ = (exponent - 1 + 10) * 8 + (mantissa * 2 - 1) * 8
    bytes_[0] = _DEAD_E4M3
    bytes_[_NAN_E4M3] = 0xAC
    return bytes_.astype(np.uint8)


with np.errstate(invalid="ignore"):
    _FROM_E4M3 = _from_e4m3()


def _original_bytes(factor: float, fmt: BlockFormat) -> np.ndarray:
    """Scale byte of each stored byte, NaN for those that are never stored."""
    stored = np.arange(256)
    if fmt.scale == "e4m3":
        table = np.full(256, _NAN_E4M3, np.uint8)
        table[_FROM_E4M3[1:]] = stored[1:128]
        return table
    if factor == 0:
        return stored.astype(np.uint8)
    c = np.frexp(factor)[1] - 1
    table = stored - layouts.PREPARED_BIAS[fmt.element] + c
    return np.where((table >= 0) & (stored != _NAN), table, _NAN).astype(np.uint8)


def _records_of(scales: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    """Scales of whole stripes, [16 r, blocks], as [r, s, 32 or 64]."""
    down = scales.shape[0] // PREPARED_ROWS
    beside = 32 // fmt.block  # blocks of a half of a stripe
    # upper row, row, step, half, block -> step, row, block, half, upper row
    split = scales.reshape(down, 2, 8, -1, 2, beside).transpose(0, 3, 2, 5, 4, 1)
    return split.reshape(down, split.shape[1], -1)


def _blocks_of(records: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    """The inverse of `_records_of`."""
    down, across = records.shape[:2]
    split = records.reshape(down, across, 8, 32 // fmt.block, 2, 2)
    return split.transpose(0, 5, 2, 1, 4, 3).reshape(down * PREPARED_ROWS, -1)


# Codes --------------------------------------------------------------------------------------------


def _stripes_of(codes: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    """Codes of whole stripes, [16 r, bytes], as [r, s, 512 or 1024]."""
    down = codes.shape[0] // PREPARED_ROWS
    if fmt.codes_per_byte == 1:
        # upper row, row, step, half, t, pair, odd
        # -> step, upper row, t, row, pair, odd, half (the second first)
        split = codes.reshape(down, 2, 8, -1, 2, 4, 4, 2)[:, :, :, :, ::-1]
        return split.transpose(0, 3, 1, 5, 2, 6, 7, 4).reshape(down, -1, 1024)
    split = _spread(codes.reshape(down, 2, 8, -1, 2, 4, 4))
    first, second = split[:, :, :, :, 0], split[:, :, :, :, 1]
    mixed = _mix(first[:, 0], first[:, 1], second[:, 0], second[:, 1])
    # row, step, t, pair -> step, t, row, pair
    words = np.ascontiguousarray(mixed.transpose(0, 2, 3, 1, 4), "<u4")
    return words.view(np.uint8).reshape(down, -1, 512)


def _rows_of(stripes: np.ndarray, fmt: BlockFormat) -> np.ndarray:
    """The inverse of `_stripes_of`."""
    down, across = stripes.shape[:2]
    if fmt.codes_per_byte == 1:
        split = stripes.reshape(down, across, 2, 4, 8, 4, 2, 2)[..., ::-1]
        return split.transpose(0, 2, 4, 1, 7, 3, 5, 6).reshape(down * PREPARED_ROWS, -1)
    words = np.ascontiguousarray(stripes).view("<u4").reshape(down, across, 4, 8, 4)
    f = [_gather(value) for value in _unmix(words.astype(np.uint32))]
    # step, t, row, pair each -> upper row, row, step, half, t, pair
    both = np.stack([np.stack(f[:2], axis=1), np.stack(f[2:], axis=1)], axis=-1)
    return both.transpose(0, 1, 4, 2, 6, 3, 5).reshape(down * PREPARED_ROWS, -1)


def _spread(pairs: np.ndarray) -> np.ndarray:
    """Bytes of two codes as two bfloat16 times 2^-126."""
    code = pairs.astype(np.uint32)
    apart = code & 15 | (code & 0xF0) << 12
    return np.asarray((apart & 0x80008) << 12 | (apart & 0x70007) << 6)


def _gather(words: np.ndarray) -> np.ndarray:
    """The inverse of `_spread`."""
    apart = words >> 12 & 0x80008 | words >> 6 & 0x70007
    return (apart & 15 | apart >> 12).astype(np.uint8)


_MASK = np.uint32(0x81C081C0)


def _rotated(q: np.ndarray, by: int) -> np.ndarray:
    """Rotated left."""
    return q << np.uint32(by) | q >> np.uint32(32 - by)


def _unmix(q: np.ndarray) -> tuple[np.ndarray, ...]:
    """The four words of two halves each that kernels make of one."""
    return (
        q & _MASK,
        q << 4 & _MASK,
        (q << 6 ^ _rotated(q, 10)) & _MASK,
        (q << 6 ^ q >> 4) & _MASK,
    )


def _mix(f0: np.ndarray, f1: np.ndarray, f2: np.ndarray, f3: np.ndarray) -> np.ndarray:
    """The word of which `_unmix` makes these, its bits found in an order in which each is known."""
    q = f0 | f1 >> 4
    q |= (f3 ^ q >> 4) >> 6 & 0x02020202 | (f3 ^ q << 6) << 4 & 0x10001000
    q |= _rotated(f2 ^ q << 6, 22) & 0x60206020 | (f2 ^ _rotated(q, 10)) >> 6 & 0x00010001
    return q | (f3 ^ q << 6) << 4 & 0x04000400
