"""Products with tensor memory over all pairs of their extents, operands and tiles; slow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import nvfp4
from tests.kernels.products_sm100 import PAIRS, STEPS, Case, same, simulated

pytestmark = pytest.mark.slow

ROWS = (1, 4, 127, 128, 129, 300)
#: Rows of ranges; the last three are skewed, one of them over more than a warp sees at once.
RANGES = ((4, 130, 0, 300), (0, 0, 290, 1), (1, 1, 1, 130, 1, 1), (*[0] * 31, 3, 0, 129))
COLUMNS = (8, 64, 128, 200)
#: Of the smallest depth, in it; rounded down to a legal one.
DEPTHS = ("smallest", 288, 384, 512, 1536)
TILES = ((64, 128), (64, 256), (128, 128), (128, 256), (192, 256), (256, 256))
#: Of pairs of blocks.
PAIRED = ((64, 128), (64, 256), (128, 128), (128, 256), (192, 128), (192, 256), (256, 256))
#: With columns of the result as the rows of an instruction; not with pairs of columns.
SWAPPED = ((64, 128), (64, 256), (128, 128))
PLAIN: Mapping[str, Any] = {}
DENSE_OPTIONS = (
    PLAIN,
    {"epilogue": nvfp4.epilogues.swiglu(halves=False)},
    {"out_dtype": "bfloat16"},
)
GROUPED_OPTIONS = (
    PLAIN,
    {"flashinfer_tiles": True},
    {"seed_tiles": True, "out_dtype": "float16"},
    {"rows_of_none": 9, "alpha": np.float32(2), "switched_off": True},
    {"epilogue": nvfp4.epilogues.swiglu(halves=False)},
)
MOST = 60


def pairwise(factors: Sequence[Sequence[Any]], seed: int) -> list[tuple[Any, ...]]:
    """Few combinations in which every two values of two factors meet."""
    rng = random.Random(seed)
    places = [range(len(values)) for values in factors]
    open_pairs = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(factors)), 2)
        for a in places[i]
        for b in places[j]
    }

    def covers(choice: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {
            (i, choice[i], j, choice[j]) for i, j in itertools.combinations(range(len(choice)), 2)
        }

    chosen = []
    while open_pairs:
        drawn = [tuple(rng.choice(place) for place in places) for _ in range(300)]
        best = max(drawn, key=lambda choice: len(covers(choice) & open_pairs))
        open_pairs -= covers(best)
        chosen.append(tuple(values[at] for values, at in zip(factors, best, strict=True)))
    return chosen


def case_of(
    pair: str, rows: Any, columns: int, depth: Any, tile: Any, blocks: int, options: Any
) -> Case:
    step = STEPS[pair]
    depth = step if depth == "smallest" else depth // step * step
    extents, swap = tile
    return Case(
        pair, rows, columns, depth, extents, blocks, options, swap and "epilogue" not in options
    )


def cases(rows: Sequence[Any], options: Sequence[Any], seed: int) -> list[Case]:
    tiles = [(tile, False) for tile in TILES] + [(tile, True) for tile in SWAPPED]
    factors = (list(PAIRS), rows, COLUMNS, DEPTHS, tiles, (1, 3), options)
    made = [case_of(*choice) for choice in pairwise(factors, seed)]
    assert len(made) <= MOST
    return made


DENSE = cases(ROWS, DENSE_OPTIONS, 1)
GROUPED = cases(RANGES, GROUPED_OPTIONS, 2)


def paired_cases(rows: Sequence[Any], options: Sequence[Any], seed: int) -> list[Case]:
    """By pairs of blocks: one pair, or two."""
    factors = (list(PAIRS), rows, COLUMNS, DEPTHS, PAIRED, (2, 4), options)
    made = []
    for choice in pairwise(factors, seed):
        case = case_of(*choice[:4], (choice[4], False), *choice[5:])
        # An instruction must not see the padding of scales.
        step = max(STEPS[case.pair], 64)
        made.append(case._replace(depth=-(-case.depth // step) * step, paired=True))
    assert len(made) <= MOST
    return made


BY_PAIRS = paired_cases(ROWS, DENSE_OPTIONS, 3)
GROUPED_BY_PAIRS = paired_cases(RANGES, GROUPED_OPTIONS, 4)
KERNELS = (DENSE, GROUPED, BY_PAIRS, GROUPED_BY_PAIRS)
EVERY = [one for cases in KERNELS for one in cases]


def size(case: Case) -> int:
    rows = case.rows if isinstance(case.rows, int) else sum(case.rows)
    return rows * case.columns * (case.depth + 256)


# Processes can share classes.
class TestEveryPair:
    @pytest.mark.parametrize("case", EVERY, ids=lambda case: case.id)
    def test_it_gives_the_golden_bits(self, case: Case) -> None:
        same(*simulated(case, arch="sm_103a" if case.blocks > 2 else "sm_100a"))


class TestTheSmallest:
    @pytest.mark.parametrize("schedule", range(20))
    @pytest.mark.parametrize(
        "case",
        [one for cases in KERNELS for one in sorted(cases, key=size)[:10]],
        ids=lambda case: case.id,
    )
    def test_under_twenty_schedules(self, case: Case, schedule: int) -> None:
        same(*simulated(case, 1000 + schedule))


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("tile", "columns"), [((128, 256), 384), ((256, 128), 512)])
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_of_halves_of_every_format(
    pair: str, tile: tuple[int, int], columns: int, paired: bool
) -> None:
    options = {"epilogue": nvfp4.epilogues.swiglu()}
    step = max(STEPS[pair], 64 if paired else 32)
    depth = 5 * step if step < 128 else 384
    for rows in (130, (3, 0, 129)):
        same(*simulated(Case(pair, rows, columns, depth, tile, 2, options, paired=paired)))
