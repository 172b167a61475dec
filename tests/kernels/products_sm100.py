"""Products of the kernels with tensor memory, on the simulated machine: how tests ask for them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

import nvfp4
from nvfp4 import layouts, plans_blackwell, plans_products
from nvfp4.formats import FORMATS

#: Formats of A and B, by what their product is called.
PAIRS = {
    "nvfp4": ("nvfp4", "nvfp4"),
    "mxfp4": ("mxfp4", "mxfp4"),
    "mxfp8-mxfp4": ("mxfp8_e4m3", "mxfp4"),
    "mxfp8": ("mxfp8_e4m3", "mxfp8_e5m2"),
}
#: The smallest depth that a pair has, and of which others are multiples.
STEPS = {"nvfp4": 32, "mxfp4": 32, "mxfp8-mxfp4": 128, "mxfp8": 32}


class Case(NamedTuple):
    """A product; rows: a number, or the rows of each range."""

    pair: str
    rows: int | tuple[int, ...]
    columns: int
    depth: int
    tile: tuple[int, int] | None = None
    blocks: int = 2
    options: Mapping[str, Any] = MappingProxyType({})
    swap: bool = False
    paired: bool = False

    @property
    def id(self) -> str:
        runs = itertools.groupby([self.rows] if isinstance(self.rows, int) else self.rows)
        counts = [(rows, len(list(run))) for rows, run in runs]
        rows = "+".join(f"{n}*{rows}" if n > 2 else "+".join([str(rows)] * n) for rows, n in counts)
        tile = "" if self.tile is None else f"-tile{self.tile[0]}x{self.tile[1]}"
        more = "".join(f"-{name}" for name in self.options) + "-swapped" * self.swap
        more += "-paired" * self.paired
        return f"{self.pair}-{rows}x{self.columns}x{self.depth}{tile}-{self.blocks}{more}"


@contextmanager
def planned(
    tile: tuple[int, int] | None,
    blocks: int,
    swap: bool | None = False,
    pair: bool | None = False,
) -> Iterator[None]:
    """Products of any size by these kernels, with tiles of these extents, by so many blocks.

    `tile`, `swap`, `pair` None: as the plan has them. `pair`: by pairs of blocks.
    """
    saved = plans_products._FEW_PRODUCTS, plans_blackwell.tile_of, plans_blackwell.PROCESSORS
    saved_swap, saved_pair = plans_blackwell.swapped, plans_blackwell.paired
    if pair is not None:
        plans_blackwell.paired = lambda *facts: tile if pair else None
    plans = (plans_products.matmul, plans_products.grouped_matmul)
    plans_products._FEW_PRODUCTS = 1
    if tile is not None:
        plans_blackwell.tile_of = lambda *facts: tile
    if swap is not None:
        plans_blackwell.swapped = lambda *facts: swap
    plans_blackwell.PROCESSORS = dict.fromkeys(saved[2], blocks)
    for plan in plans:
        plan.cache_clear()
    try:
        yield
    finally:
        plans_products._FEW_PRODUCTS, plans_blackwell.tile_of, plans_blackwell.PROCESSORS = saved
        plans_blackwell.swapped, plans_blackwell.paired = saved_swap, saved_pair
        for plan in plans:
            plan.cache_clear()


def aligned(values: Any) -> Any:
    """A copy at a multiple of 128 bytes; all arrays of a QTensor, None is None."""
    if isinstance(values, nvfp4.QTensor):
        names = ("codes", "scales", "decode_scale")
        return dataclasses.replace(values, **{one: aligned(getattr(values, one)) for one in names})
    values = np.asarray(values)
    memory = np.zeros(values.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 128
    made = memory[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
    made[...] = values
    return made


def small_integers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Values whose products have exact sums, in blocks of different scales."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-1, 2, (*shape[:-1], shape[-1] // 16)))
    return (rng.integers(-3, 4, shape) * np.repeat(sizes, 16, axis=-1)).astype(np.float32)


def offsets_of(rows: tuple[int, ...]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)


def operands(case: Case) -> tuple[Any, Any, dict[str, Any]]:
    """A, B, and the options of the call."""
    formats = PAIRS[case.pair]
    options = {"out_dtype": "float32", **case.options}
    if isinstance(case.rows, int):
        a = nvfp4.quantize(small_integers((case.rows, case.depth), 1), formats[0])
        b = nvfp4.quantize(small_integers((case.columns, case.depth), 2), formats[1])
        return aligned(a), aligned(b), options
    offsets = offsets_of(case.rows)
    count = int(offsets[-1]) + options.pop("rows_of_none", 0)
    x = small_integers((count, case.depth), 3)
    experts = options.pop("experts", len(case.rows))
    starts = None
    if options.pop("flashinfer_tiles", False):
        # Each range on the first tile that no rounding up of those before it can have reached.
        starts = ((offsets[:-1] + 127 * np.arange(len(case.rows))) // 128).astype(np.int32)
    if options.pop("seed_tiles", False):
        # The rule that holds without them, said: no tile is left out.
        starts = layouts.tile_starts(offsets).astype(np.int64)
    if options.pop("switched_off", False):
        # Experts from the last to the first, and none for the second longest range.
        options["expert_ids"] = np.arange(experts)[::-1].astype(np.int32)
        options["expert_ids"][np.argsort(case.rows)[-2]] = -1
    out = None if starts is None else room(x.shape, formats[0], offsets, starts)
    a = nvfp4.grouped_quantize(x, formats[0], row_offsets=offsets, out=out)
    b = nvfp4.quantize(small_integers((experts, case.columns, case.depth), 4), formats[1])
    return aligned(a), aligned(b), {"row_offsets": a.groups, **options}


def room(shape: tuple[int, int], fmt: str, offsets: np.ndarray, starts: np.ndarray) -> Any:
    """A result of the grouped quantiser whose ranges have their scales at these tiles."""
    described = FORMATS[fmt]
    last = int((starts + -(-np.diff(offsets) // 128)).max())
    blocks = shape[1] // described.block
    return nvfp4.QTensor(
        codes=aligned(np.zeros(layouts.codes_shape(described, shape), np.uint8)),
        scales=aligned(np.zeros((last + 1, -(-blocks // 4), 32, 4, 4), np.uint8)),
        decode_scale=np.ones(len(starts), np.float32),
        format=fmt,
        shape=shape,
        scale_layout="tcgen",
        groups=offsets,
        tile_starts=starts,
    )


def simulated(
    case: Case, schedule: Any = "round_robin", arch: str = "sm_100a", checks: Any = True
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel gives, over poison, and what the golden model gives."""
    a, b, options = operands(case)
    function = nvfp4.matmul if isinstance(case.rows, int) else nvfp4.grouped_matmul
    expected = np.asarray(function(a, b, **options))
    out = np.full(expected.shape, 77, expected.dtype)
    names = []
    with planned(case.tile, case.blocks, case.swap, case.paired):
        with nvfp4.simulate(arch, schedule=schedule, checks=checks) as machine:
            run = machine.run
            machine.run = lambda *a, **k: (names.append(k["name"]), run(*a, **k))[1]
            function(a, b, out=out, **options)
    assert len(names) == 1 and "matmul_sm100" in names[0], names
    assert ("matmul_sm100_pair" in names[0]) is case.paired
    return out, expected


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal values; a NaN is a NaN."""
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
