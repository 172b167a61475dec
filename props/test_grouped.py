"""Property 18 and its companion for quantisation: a group is a loop over its ranges."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nvfp4 import golden
from nvfp4.layouts import allocated_tiles, scale_tiles, tile_starts
from props.strategies import (
    Ranges,
    dtypes,
    exact_operands,
    floats32,
    formats,
    layouts,
    matrices,
    ranges,
    roundings,
)


def routed(x, r: Ranges) -> np.ndarray:
    """The rows that the ranges read, zero where there is none."""
    if r.row_indices is None:
        return x[: r.rows]
    out = np.zeros((r.rows, x.shape[1]), x.dtype)
    for row, source in enumerate(r.row_indices):
        if 0 <= source < len(x):
            out[row] = x[source]
    return out


@given(st.data(), formats, dtypes, ranges(), layouts)
def test_grouped_quantisation_is_that_of_each_range_alone(data, fmt, dtype, r, layout):
    rows = r.input_rows
    x = data.draw(matrices(fmt, dtype, max_rows=rows, min_rows=rows))
    kind = data.draw(st.sampled_from(["none", "by expert", "one", "row_amax"]))
    g = {
        "none": None,
        "one": np.float32(3.5),
        "by expert": np.float32(np.linspace(0.3, 700, r.experts)),
        "row_amax": "row_amax" if fmt.scale == "e4m3" else None,
    }[kind]
    # Without encode scales by expert every id from 0 on is an expert.
    own = Ranges(
        r.rows,
        rows,
        r.row_offsets,
        r.expert_ids,
        r.row_indices,
        r.experts if kind == "by expert" else 1 << 30,
    )
    rounding = data.draw(roundings(fmt)) if g is None else "rceil"
    codes, scales, decode = golden.grouped_quantize(
        x, fmt, encode_scale=g, scale_layout=layout, scale_rounding=rounding, **own.arguments()
    )
    groups = len(r.row_offsets) - 1
    source = routed(x, r)
    expected_codes, expected_scales = np.zeros_like(codes), np.zeros_like(scales)
    starts = tile_starts(r.row_offsets)
    if layout == "tcgen":
        assert scales.shape[0] == allocated_tiles(r.rows, groups)
    for i, expert, members in own.members():
        if expert < 0:
            assert kind == "row_amax" or decode[i] == 1
            continue
        mine = slice(members.start, members.stop)
        scale = g[expert] if kind == "by expert" else g
        alone = golden.quantize(
            source[mine], fmt, encode_scale=scale, scale_layout=layout, scale_rounding=rounding
        )
        expected_codes[mine] = alone[0]
        place = mine
        if layout == "tcgen":
            place = slice(starts[i], starts[i] + scale_tiles(len(members)))
        expected_scales[place] = alone[1]
        if isinstance(g, str):
            np.testing.assert_array_equal(decode[mine], alone[2])
        else:
            assert decode[i] == alone[2]
    np.testing.assert_array_equal(codes, expected_codes)
    np.testing.assert_array_equal(scales, expected_scales)


@given(st.data(), formats, ranges(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_a_grouped_product_is_a_loop_of_products(data, fmt, r, out_dtype):
    columns, k = data.draw(st.integers(1, 5)), 2 * fmt.block
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    a = rng.standard_normal((r.input_rows, k), np.float32)
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(0, max(r.input_rows - 1, 0)), floats32()), max_size=3)
    ):
        a[place : place + 1, 1] = value
    b = np.stack([data.draw(exact_operands(columns, k, fmt)).products() for _ in range(r.experts)])
    alpha = np.float32(np.linspace(0.1, 7, r.experts))
    d_a = np.float32(np.linspace(1, 3, r.input_rows))[:, None]
    d_b = np.float32(np.linspace(2, 5, r.experts))
    out = golden.grouped_matmul(
        a, b, alpha=alpha, decode_a=d_a, decode_b=d_b, out_dtype=out_dtype, **r.arguments()
    )
    expected = golden.cast_float(np.zeros((r.rows, columns), np.float32), out_dtype)
    for _, expert, members in r.members():
        for row in members if expert >= 0 else ():
            source = row if r.row_indices is None else r.row_indices[row]
            if 0 <= source < r.input_rows:
                one = golden.matmul(
                    a[source : source + 1],
                    b[expert],
                    alpha=alpha[expert],
                    decode_a=d_a[source, 0],
                    decode_b=d_b[expert],
                    out_dtype=out_dtype,
                )
                expected[row] = one[0]
    assert out.dtype == expected.dtype
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(out), nan)
    unsigned = np.dtype(f"u{out.dtype.itemsize}")
    np.testing.assert_array_equal(out.view(unsigned)[~nan], expected.view(unsigned)[~nan])
