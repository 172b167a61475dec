"""Properties 1 to 3: codes and their rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given

from nvfp4 import golden
from props.strategies import ELEMENTS, elements, floats32
from tests import exact

ENCODE = {"e2m1": golden.encode_e2m1, "e4m3": golden.encode_e4m3, "e5m2": golden.encode_e5m2}
DECODE = {"e2m1": golden.decode_e2m1, "e4m3": golden.decode_e4m3, "e5m2": golden.decode_e5m2}


@pytest.mark.parametrize("element", ELEMENTS)
def test_encoding_a_decoded_code_gives_the_code_for_every_number(element):
    codes = np.arange(2 * exact.SIGN_BIT[element], dtype=np.uint8)
    values = DECODE[element](codes)
    number = np.isfinite(values)
    np.testing.assert_array_equal(ENCODE[element](values)[number], codes[number])
    back = DECODE[element](ENCODE[element](values))[number]
    assert back.tobytes() == values[number].tobytes()  # the sign of zero too


@given(elements, floats32())
def test_a_code_is_the_nearest_one_by_exact_arithmetic(element, value):
    assert int(ENCODE[element](value)) == exact.encode(float(value), element)


@given(elements, floats32(special=False), floats32(special=False))
def test_encoding_is_monotone(element, one, other):
    low, high = sorted([one, other])
    decoded = DECODE[element](ENCODE[element](np.float32([low, high])))
    assert decoded[0] <= decoded[1]


@given(elements, floats32())
def test_encoding_is_odd_but_for_nan(element, value):
    code, negated = ENCODE[element](np.array([value, -value], np.float32)).tolist()
    if math.isnan(value):
        assert code == negated == exact.NAN_CODE[element]
    else:
        assert negated == code ^ exact.SIGN_BIT[element]


@given(elements, floats32(special=False))
def test_a_value_lies_in_the_interval_of_values_that_its_code_stands_for(element, value):
    code = int(ENCODE[element](value)) & (exact.SIGN_BIT[element] - 1)
    table = exact.magnitudes(element)
    magnitude = abs(Fraction(float(value)))
    # The interval is closed on both sides if the code is even, open if it is odd.
    if code > 0:
        lower = (table[code - 1] + table[code]) / 2
        assert magnitude >= lower if code % 2 == 0 else magnitude > lower
    if code < len(table) - 1:
        upper = (table[code] + table[code + 1]) / 2
        assert magnitude <= upper if code % 2 == 0 else magnitude < upper
