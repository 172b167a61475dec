"""Quantised results of products with prepared weights: every byte, padding of scales included."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import plans_prepared
from nvfp4.api import _place
from nvfp4.formats import FORMATS
from nvfp4.layouts import allocated_tiles, codes_shape, scale_shape

from .checks import POISON
from .products_sm100 import aligned
from .test_matmul_prepared import OFFSETS, SWIGLU, integers, planned, weights, with_scales


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel of few rows makes whatever product."""
    yield from planned("decode", monkeypatch)


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel of many rows."""
    yield from planned("sm90", monkeypatch)


def poisoned(
    fmt: str,
    shape: tuple[int, int],
    layout: str,
    offsets: np.ndarray | None,
    starts: np.ndarray | None,
    tiles: int | None,
) -> nvfp4.QTensor:
    """A result to be written."""
    found = FORMATS[fmt]
    scales = scale_shape(found, shape, layout)
    more: dict[str, Any] = {}
    decode: tuple[int, ...] = ()
    if offsets is not None:
        decode = (offsets.size - 1,)
        more["groups"] = offsets
        if layout == "tcgen":
            scales = (tiles or allocated_tiles(shape[0], *decode), *scales[1:])
            more["tile_starts"] = starts
    return nvfp4.QTensor.from_parts(
        aligned(np.full(codes_shape(found, shape), POISON, np.uint8)),
        aligned(np.full(scales, POISON, np.uint8)),
        fmt,
        shape=shape,
        decode_scale=np.full(decode, np.nan, np.float32),
        scale_layout=layout,
        **more,
    )


def check(
    kernel: str,
    a: Any,
    b: nvfp4.QTensor,
    fmt: str,
    *,
    layout: str = "tcgen",
    starts: np.ndarray | None = None,
    tiles: int | None = None,
    checks: bool = True,
    arch: str = "sm_90a",
    **options: Any,
) -> nvfp4.QTensor:
    """Multiply by `b` as it is, with the golden model, and prepared, on the simulated machine."""
    offsets = options.get("row_offsets")
    function = nvfp4.matmul if offsets is None else nvfp4.grouped_matmul
    epilogue = options.get("epilogue")
    width = b.shape[-2] // (1 + (epilogue is not None and epilogue.pair))
    rows = options["row_indices"].size if "row_indices" in options else a.shape[0]
    expected, out = (poisoned(fmt, (rows, width), layout, offsets, starts, tiles) for _ in range(2))
    function(a, b, out=expected, out_dtype=fmt, **options)
    prepared = nvfp4.prepare_weights(b)
    names = []
    machine: Any
    with nvfp4.simulate(arch, checks=checks) as machine:
        run = machine.run

        def noted(*args: Any, **named: Any) -> Any:
            names.append(named["name"])
            return run(*args, **named)

        machine.run = noted
        assert function(a, prepared, out=out, out_dtype=fmt, **options) is out
    assert len(names) == 1 and names[0].startswith(f"matmul_{kernel}"), names
    for part in ("codes", "scales", "decode_scale"):
        np.testing.assert_array_equal(getattr(out, part), getattr(expected, part), err_msg=part)
    return out


@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_dense_result_of_every_format(decode: str, fmt: str, layout: str) -> None:
    """Of one and a half items of columns, with rows and blocks that do not fill their tiles."""
    q = check(decode, integers((5, 64), 2), weights("mxfp4", 96, 64), fmt, layout=layout)
    assert np.count_nonzero(q.codes) > q.codes.size // 2


def test_scales_of_rows_of_several_tiles(decode: str) -> None:
    check(decode, integers((130, 32), 3), weights("mxfp4", 16, 32), "nvfp4")


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_pairs_whose_blocks_are_wider_than_what_is_multiplied_at_a_time(
    decode: str, fmt: str, halves: bool
) -> None:
    """Blocks of 32 columns take two passes; several items follow each other in a team."""
    b = weights("nvfp4", 192, 64)
    check(decode, integers((3, 64), 4), b, fmt, epilogue=SWIGLU(halves=halves))
    ranges: dict[str, Any] = {"row_offsets": OFFSETS, "epilogue": SWIGLU(halves=halves)}
    check(decode, integers((12, 64), 4), weights("mxfp4", 3, 64, 64), fmt, **ranges)


def test_pairs_whose_items_are_more_than_the_teams(
    decode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of both passes of an item are read before those of the next one are left."""
    cut = plans_prepared.Cut(8, warps=2, team=2, stripes=2, slots=2, resident=1)
    monkeypatch.setattr(plans_prepared, "tile", lambda *facts: cut)
    monkeypatch.setattr(_place, "processors", lambda where: 1)
    b = weights("mxfp4", 192, 192)
    check(decode, integers((9, 192), 4), b, "mxfp8_e4m3", epilogue=SWIGLU(halves=False))


@pytest.mark.parametrize("ids", [None, [1, 0, -1]])
def test_ranges_switched_off_ones_and_rows_of_none(decode: str, ids: list[int] | None) -> None:
    options: dict[str, Any] = {"row_offsets": OFFSETS}
    if ids is not None:
        options["expert_ids"] = np.array(ids, np.int32)
    a, b = integers((12, 64), 5), weights("nvfp4", 3, 96, 64)
    q = check(decode, a, b, "nvfp4", **options)
    assert q.codes[:3].any() and not q.codes[9:].any() and bool(q.codes[3:9].any()) == (ids is None)
    check(decode, a, b, "mxfp8_e5m2", layout="linear", **options)


def test_ranges_of_more_rows_than_a_tile_with_tiles_of_their_own(decode: str) -> None:
    offsets = np.array([0, 140, 140, 143], np.int32)
    a, b = integers((145, 32), 6), weights("mxfp4", 3, 32, 32)
    check(decode, a, b, "nvfp4", row_offsets=offsets)
    starts = np.array([3, 9, 1], np.int64)
    check(decode, a, b, "mxfp4", row_offsets=offsets, starts=starts, tiles=6)


def test_a_plain_matrix_and_extreme_rows_are_quantised_from_their_slow_sums(decode: str) -> None:
    b = weights("mxfp4", 2, 32, 64, seed=19, scale_layout="linear")
    b = with_scales(b, {(1, 3, 0): 5, (1, 7, 1): 250})
    check(decode, integers((6, 64), 7), b, "nvfp4", row_offsets=np.array([0, 2, 6], np.int32))
    a = nvfp4.quantize(integers((5, 64), 8), "mxfp8_e4m3", scale_layout="linear")
    check(decode, with_scales(a, {(2, 0): 3, (4, 1): 240}), weights("mxfp4", 32, 64), "mxfp4")
    a = with_scales(a, {(1, 1): 255})
    check(decode, a, weights("nvfp4", 64, 64), "mxfp8_e4m3", epilogue=SWIGLU(halves=True))


def test_many_rows(sm90: str) -> None:
    """Pairs of a range of two pieces of rows, with a tile of its own; the last rows are of none."""
    options: dict[str, Any] = {"epilogue": SWIGLU(halves=True)}
    options |= {"row_offsets": np.array([0, 35], np.int32), "starts": np.array([1], np.int32)}
    b = weights("mxfp4", 1, 64, 32)
    check(sm90, integers((37, 32), 9), b, "mxfp8_e4m3", tiles=3, checks=False, **options)


def test_many_rows_of_a_plain_matrix(sm90: str) -> None:
    b = weights("mxfp4", 32, 32, seed=19, scale_layout="linear")
    b = with_scales(b, {(3, 0): 5, (7, 0): 250})
    check(sm90, integers((6, 32), 7), b, "nvfp4", layout="linear", checks=False)


def test_results_that_do_not_begin_at_a_multiple_of_a_word(decode: str) -> None:
    """Codes and scales may be anywhere."""
    q = poisoned("mxfp8_e4m3", (5, 64), "tcgen", None, None, None)
    moved: dict[str, Any] = {}
    for part in ("codes", "scales"):
        values = getattr(q, part)
        memory = np.full(values.size + 1, POISON, np.uint8)
        moved[part] = memory[1:].reshape(values.shape)
    out = dataclasses.replace(q, **moved)
    a, b = integers((5, 64), 2), weights("mxfp4", 64, 64)
    expected = nvfp4.matmul(a, b, out_dtype="mxfp8_e4m3")
    with nvfp4.simulate("sm_80"):
        nvfp4.matmul(a, nvfp4.prepare_weights(b), out=out, out_dtype="mxfp8_e4m3")
    np.testing.assert_array_equal(out.codes, expected.codes)
    np.testing.assert_array_equal(out.scales, expected.scales)
