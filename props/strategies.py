"""What the properties are tried on: formats, encode scales, matrices, ranges, exact operands.

Floats are drawn as bit patterns: most patterns of ordinary distributions never meet a tie, a
subnormal or a NaN, and these are where the definitions of a cast differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from nvfp4 import golden
from nvfp4.formats import FORMATS, SCALE_ROUNDINGS, BlockFormat

FORMAT_LIST = list(FORMATS.values())
MX_FORMATS = [f for f in FORMAT_LIST if f.scale == "e8m0"]
FP4_FORMATS = [f for f in FORMAT_LIST if f.codes_per_byte == 2]
ELEMENTS = ["e2m1", "e4m3", "e5m2"]
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

formats = st.sampled_from(FORMAT_LIST)
mx_formats = st.sampled_from(MX_FORMATS)
elements = st.sampled_from(ELEMENTS)
dtypes = st.sampled_from(list(DTYPES))
mx_roundings = st.sampled_from(SCALE_ROUNDINGS)
layouts = st.sampled_from(["linear", "tcgen"])

_SPECIAL = [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001]
_EDGES = [0x00000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0x00400000, 0x00400001]


def roundings(fmt: BlockFormat) -> st.SearchStrategy[str]:
    return mx_roundings if fmt.scale == "e8m0" else st.just("rceil")


def _finite_patterns() -> st.SearchStrategy[int]:
    sign = st.sampled_from([0, 1 << 31])
    anything = st.integers(0, 0x7F7FFFFF)
    # Few mantissa bits, at most one unit away: elements, ties, and their neighbours.
    coarse = st.builds(
        lambda exponent, mantissa, off: max((exponent << 23) + (mantissa << 18) + off, 0),
        st.integers(100, 150),
        st.integers(0, 31),
        st.sampled_from([0, 0, 1, -1]),
    )
    edges = st.sampled_from([0, *_EDGES])
    return st.builds(lambda p, s: p | s, st.one_of(coarse, coarse, anything, edges), sign)


finite_patterns = _finite_patterns()
patterns = st.one_of(finite_patterns, finite_patterns, finite_patterns, st.sampled_from(_SPECIAL))


def floats32(special: bool = True) -> st.SearchStrategy[np.float32]:
    """One float32, as a NumPy scalar."""
    source = patterns if special else finite_patterns
    return source.map(lambda p: np.uint32(p).view(np.float32))


@st.composite
def matrices(
    draw: st.DrawFn,
    fmt: BlockFormat,
    dtype: str = "float32",
    max_rows: int = 4,
    max_blocks: int = 3,
    special: bool = True,
    min_rows: int = 1,
) -> np.ndarray:
    """A matrix of a few rows and blocks: filled by a seeded generator, then edited by patterns.

    A block is drawn at its own magnitude; the edits are what Hypothesis chooses and shrinks.
    """
    rows = draw(st.integers(min_rows, max_rows))
    blocks = draw(st.integers(1, max_blocks))
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    exponents = draw(st.lists(st.integers(-20, 20), min_size=rows * blocks, max_size=rows * blocks))
    values = rng.standard_normal((rows * blocks, fmt.block)).astype(np.float32)
    x = np.ldexp(values, np.array(exponents, dtype=np.int32).reshape(-1, 1)).reshape(
        rows, blocks * fmt.block
    )
    places = st.tuples(st.integers(0, max(rows - 1, 0)), st.integers(0, x.shape[1] - 1))
    for place, value in draw(st.lists(st.tuples(places, floats32(special)), max_size=12)):
        if rows:
            x[place] = value
    with np.errstate(all="ignore"):
        x = x.astype(DTYPES[dtype])
    if not special:
        with np.errstate(invalid="ignore"):
            x = np.where(np.isfinite(x.astype(np.float32)), x, np.ones_like(x))
    return x


def encode_scales(fmt: BlockFormat) -> st.SearchStrategy[Any]:
    """None, "amax", or a float32; what must count as 1 too."""
    usable = st.one_of(
        st.sampled_from([1.0, 0.43, 128.0, 1 / 3, 2.0**-126, float(np.finfo(np.float32).max)]),
        st.integers(0x00800000, 0x7F7FFFFF).map(lambda p: float(np.uint32(p).view(np.float32))),
        st.floats(0.01, 10000),
    ).map(np.float32)
    unusable = st.sampled_from([0.0, -1.0, np.inf, np.nan, 2.0**-130]).map(np.float32)
    return st.one_of(st.none(), usable, usable, unusable, st.just("amax"))


@dataclass(frozen=True)
class Ranges:
    """Arguments of the grouped operations, for R rows of the result and M rows of input."""

    rows: int
    input_rows: int
    row_offsets: list[int]
    expert_ids: list[int] | None
    row_indices: list[int] | None
    experts: int

    def expert(self, i: int) -> int:
        """Expert of range i, -1 if it is switched off."""
        e = i if self.expert_ids is None else self.expert_ids[i]
        return e if 0 <= e < self.experts else -1

    def members(self) -> list[tuple[int, int, range]]:
        """Range, expert and rows of each range."""
        return [
            (i, self.expert(i), range(*self.row_offsets[i : i + 2]))
            for i in range(len(self.row_offsets) - 1)
        ]

    def arguments(self) -> dict[str, Any]:
        return {
            "row_offsets": self.row_offsets,
            "expert_ids": self.expert_ids,
            "row_indices": self.row_indices,
        }


@st.composite
def ranges(draw: st.DrawFn, max_rows: int = 9, max_groups: int = 5) -> Ranges:
    """Ranges with empty, switched-off and uncovered rows, with or without gathering."""
    sizes = draw(st.lists(st.integers(0, 3), max_size=max_groups))
    offsets = [0, *np.cumsum(sizes, dtype=int).tolist()]
    rows = offsets[-1] + draw(st.integers(0, 2))
    experts = draw(st.integers(1, 4))
    ids = draw(
        st.one_of(
            st.none(),
            st.lists(st.integers(-2, experts), min_size=len(sizes), max_size=len(sizes)),
        )
    )
    indices, input_rows = None, rows
    if draw(st.booleans()):
        input_rows = draw(st.integers(1, max_rows))
        indices = draw(st.lists(st.integers(-1, input_rows), min_size=rows, max_size=rows))
    return Ranges(rows, input_rows, offsets, ids, indices, experts)


@dataclass(frozen=True)
class ExactOperand:
    """A quantised matrix whose values are small integers over a power of two."""

    format: BlockFormat
    codes: np.ndarray
    scales: np.ndarray
    values: np.ndarray  # float64, exact

    def products(self, layout: str = "linear") -> np.ndarray:
        scales = self.scales if layout == "linear" else golden.interleave_scales(self.scales)
        return golden.element_scale_product(
            self.codes, scales, self.format, shape=self.values.shape, scale_layout=layout
        )


@st.composite
def exact_operands(draw: st.DrawFn, rows: int, columns: int, fmt: BlockFormat) -> ExactOperand:
    """Sparse operands: any two have products whose sums, in any order, float32 holds exactly."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    density = draw(st.sampled_from([0.1, 0.5, 1.0]))
    table = {"e2m1": [0, 0.5, 1, 1.5, 2, 3, 4, 6]}.get(fmt.element, [0, 0.5, 1, 1.5, 2, 3, 4, 7])
    small = np.array(table, np.float32)
    if fmt.element == "e5m2":
        small = small[:-1]
    values = rng.choice(small, (rows, columns)) * rng.choice([-1, 1], (rows, columns))
    values = np.where(rng.random((rows, columns)) < density, values, 0).astype(np.float32)
    encode = {"e2m1": golden.encode_e2m1, "e4m3": golden.encode_e4m3, "e5m2": golden.encode_e5m2}
    codes = encode[fmt.element](values)
    if fmt.codes_per_byte == 2:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    powers = rng.integers(-1, 2, (rows, columns // fmt.block))
    one = {"e4m3": 0x38, "e8m0": 127}[fmt.scale]
    step = {"e4m3": 8, "e8m0": 1}[fmt.scale]
    scales = (one + step * powers).astype(np.uint8)
    exact = values.astype(np.float64) * np.repeat(np.ldexp(1.0, powers), fmt.block, axis=1)
    return ExactOperand(fmt, codes, scales, exact)
