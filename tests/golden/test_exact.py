"""The rational definition that other tests lean on agrees with the vectors itself."""

from __future__ import annotations

import numpy as np
import pytest

from tests import exact
from tests.vectorlib import QuantizeCase, cases

SMALL = [
    c
    for c in cases("quantize")
    if 0 < c.x.size <= 8192 and c.x.ndim == 2 and c.scale_layout == "linear"
]


def test_enough_small_cases_are_left():
    assert len(SMALL) > 60


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_rational_definition_gives_the_expected_bytes(case: QuantizeCase):
    g = case.encode_scale
    if isinstance(g, str):
        g = case.encode_scale_of_amax
    # Rows enough to see each kind of input, few enough for fractions.
    some = np.linspace(0, len(case.x) - 1, min(len(case.x), 40)).astype(int)
    x = case.x[some].astype(np.float32)
    codes, scales = exact.quantize(x, case.format, g, case.scale_rounding)
    np.testing.assert_array_equal(scales, case.scales[some])
    np.testing.assert_array_equal(codes, case.codes[some])
