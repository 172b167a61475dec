"""Products divided as tables of measured divisions may say: the golden bytes of exact sums."""

from __future__ import annotations

import pytest

from nvfp4.bench import tuner
from nvfp4.tuning import Choice

from .test_matmul_prepared import OFFSETS, check, integers, weights

#: Seven steps and a half: teams whose warps have two and one, three and two, and one or none.
DEPTH = 480


@pytest.mark.parametrize(
    "choice",
    [
        Choice("decode", 8, team=6, stripes=2, slots=1, resident=4, warps=6),
        Choice("decode", 8, team=3, stripes=1, slots=2, resident=2, warps=6),
        Choice("decode", 16, team=2, stripes=2, slots=2, resident=4, warps=4),
    ],
    ids=tuner.said,
)
def test_small_blocks_of_warps_have_the_golden_bytes(choice: Choice) -> None:
    assert not choice.wrong()
    with tuner.forced(choice):
        check("decode", integers((5, DEPTH), 6), weights("mxfp4", 40, DEPTH), processors=2)
        b = weights("mxfp4", 3, 48, DEPTH)
        check("decode", integers((9, DEPTH), 3), b, row_offsets=OFFSETS, processors=2)
