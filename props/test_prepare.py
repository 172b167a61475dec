"""Prepared weights: nothing is lost, whatever the bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nvfp4 import golden, layouts
from nvfp4.formats import NVFP4, PREPARED
from props.strategies import formats
from tests.vectorlib import same_values

#: Scale bytes that what becomes of a block depends on.
E8M0 = st.sampled_from([0, 1, 19, 20, 21, 100, 120, 127, 128, 129, 134, 142, 143, 250, 254, 255])
E4M3 = st.sampled_from([0, 1, 2, 3, 7, 8, 0x38, 0x7E, 0x7F])
CODES = st.sampled_from(["any", "any", "zero", "minus zero", "largest", "special"])


@st.composite
def matrices(draw, fmt, rows, blocks):
    """Codes and linear scales [rows, blocks ...]: drawn by block, and any bytes among them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    width = fmt.block // fmt.codes_per_byte
    codes = rng.integers(0, 256, (rows * blocks, width), np.uint8)
    if fmt.codes_per_byte == 1 and draw(st.booleans()):
        codes &= 0xBB
    special = fmt is NVFP4
    any_scale = st.integers(0, 127 if special else 255)
    scale = st.one_of(E4M3 if special else E8M0, any_scale)
    if not special and draw(st.booleans()):
        near = draw(st.integers(20, 230))
        scale = st.one_of(st.integers(near, near + 20), st.sampled_from([near, 0, 254, 255]))
    scales = np.full(rows * blocks, draw(scale), np.uint8)
    places = st.integers(0, rows * blocks - 1)
    for place, value, kind in draw(st.lists(st.tuples(places, scale, CODES), max_size=10)):
        scales[place] = value
        byte = {"e2m1": 0x11, "e4m3": 1, "e5m2": 1}[fmt.element]
        sign = byte << (3 if byte == 0x11 else 7) & 0xFF
        if kind == "zero":
            codes[place] = 0
        elif kind == "minus zero":
            codes[place] = sign
        elif kind == "largest":
            codes[place] = {"e2m1": 0x77, "e4m3": 0x7E, "e5m2": 0x7B}[fmt.element]
        elif kind == "special":
            codes[place, 0] = {"e2m1": 0xF8, "e4m3": 0x7F, "e5m2": 0x7C}[fmt.element]
    return codes.reshape(rows, -1), scales.reshape(rows, blocks)


@given(st.data(), formats, st.integers(1, 34), st.integers(1, 9))
def test_prepared_weights_have_the_same_values(data, fmt, rows, blocks):
    codes, scales = data.draw(matrices(fmt, rows, blocks))
    shape = (rows, blocks * fmt.block)
    layout = data.draw(st.sampled_from(["linear", "tcgen"]))
    given_scales = scales if layout == "linear" else golden.interleave_scales(scales)
    made = golden.prepare_weights(codes, given_scales, fmt, shape=shape, scale_layout=layout)
    got = golden.element_scale_product(*made, fmt, shape=shape, scale_layout=PREPARED)
    expected = golden.element_scale_product(codes, scales, fmt, shape=shape, scale_layout="linear")
    assert same_values(got, expected)
    # What comes back can be prepared again, to the same bytes.
    back = golden.unprepare_weights(*made, fmt, shape=shape)
    again = golden.prepare_weights(*back, fmt, shape=shape, scale_layout="linear")
    assert [a.tobytes() for a in again] == [a.tobytes() for a in made]


@given(st.data(), formats, st.integers(1, 34), st.integers(1, 9))
def test_padding_is_the_same_whatever_the_weights(data, fmt, rows, blocks):
    """Rows and blocks of zeros with the scale of padding change no byte where there was padding."""
    codes, scales = data.draw(matrices(fmt, rows, blocks))
    shape = (rows, blocks * fmt.block)
    made = golden.prepare_weights(codes, scales, fmt, shape=shape, scale_layout="linear")
    down, across = layouts.prepared_grid(shape)
    full = (16 * down, 64 * across)
    wide = np.zeros((full[0], full[1] // fmt.codes_per_byte), np.uint8)
    wide[:rows, : codes.shape[1]] = codes
    fill = 0 if fmt is NVFP4 else 127
    wide_scales = np.full((full[0], full[1] // fmt.block), fill, np.uint8)
    wide_scales[:rows, :blocks] = scales
    padded = golden.prepare_weights(wide, wide_scales, fmt, shape=full, scale_layout="linear")
    assert [a.tobytes() for a in padded] == [a.tobytes() for a in made]
