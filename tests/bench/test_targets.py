"""Targets and floors: arithmetic that needs no card."""

from __future__ import annotations

import pytest

from nvfp4.bench.shapes import DENSE_PRODUCTS, GROUPED_PRODUCTS
from nvfp4.bench.targets import (
    BANDWIDTH,
    FLOPS,
    Target,
    grouped_floor,
    product_floor,
    quantizer_bytes,
)

BITS = {"mxfp4": 4.25, "nvfp4": 4.5}


def test_a_ratio_is_met_from_its_figure_on_and_faster_means_above_it() -> None:
    assert Target(0.95, "copy").met(ratio=0.95, us=1) is True
    assert Target(0.95, "copy").met(ratio=0.9499, us=1) is False
    assert Target(1.0, "cuBLAS", exclusive=True).met(ratio=1.0, us=1) is False
    assert Target(1.0, "cuBLAS", exclusive=True).met(ratio=1.01, us=1) is True


def test_a_time_is_enough_where_there_is_a_ratio_too() -> None:
    either = Target(0.95, "copy", us=4)
    assert either.met(ratio=0.5, us=4) is True
    assert either.met(ratio=0.96, us=9) is True
    assert either.met(ratio=0.5, us=4.01) is False


def test_nothing_is_said_of_a_ratio_whose_reference_was_not_measured() -> None:
    assert Target(0.95, "copy").met(ratio=None, us=1) is None
    assert Target(0.95, "copy", us=4).met(ratio=None, us=3) is True
    assert Target(0.95, "copy", us=4).met(ratio=None, us=5) is None
    assert Target(us=3).met(ratio=None, us=3.1) is False


def test_targets_read_as_they_are_written_down() -> None:
    assert str(Target(0.95, "copy", us=4)) == "≥ 0.95 copy or ≤ 4 us"
    assert str(Target(us=50_000)) == "≤ 50 ms"
    assert str(Target(1.0, "cuBLAS", exclusive=True)) == "> 1.00 cuBLAS"


def test_bytes_of_a_quantiser_are_input_codes_and_scales() -> None:
    elements = 8192 * 7168
    assert quantizer_bytes(8192, 7168, 16, 2) == elements * (2 + 0.5 + 1 / 16)
    assert quantizer_bytes(8192, 7168, 32, 1) == elements * (2 + 1 + 1 / 32)
    # 45.9 us at 0.95 of a copy's 4.08 TB/s, as the table of targets has it for mxfp8.
    assert quantizer_bytes(8192, 7168, 32, 1) / (0.95 * 4.08e12) == pytest.approx(45.9e-6, rel=1e-3)


@pytest.mark.parametrize("layer", GROUPED_PRODUCTS, ids=lambda layer: layer.name)
def test_floors_are_those_of_the_table_where_every_expert_is_known(layer) -> None:
    """With one token its experts differ, with 8192 all are hit; in between it is by chance."""
    for fmt, _ in layer.targets:
        for tokens in (1, 8192):
            hit = min(layer.experts, tokens * layer.top_k)
            floor = grouped_floor(
                tokens=tokens, top_k=layer.top_k, columns=layer.columns, depth=layer.depth,
                hit=hit, bits=BITS[fmt], gathered=layer.gathered,
            )  # fmt: skip
            assert floor * 1e6 == pytest.approx(layer.figures(fmt)[tokens][0], abs=0.1)


def test_a_target_of_a_layer_is_the_fraction_of_its_floor() -> None:
    down = GROUPED_PRODUCTS[0]
    target = down.target("mxfp4", 512)
    assert target is not None and target.ratio == pytest.approx(136.7 / 161, abs=1e-4)
    assert down.target("nvfp4", 512) is None
    for layer in GROUPED_PRODUCTS:
        for fmt, rows in layer.targets:
            for tokens, floor, aim, peer in rows:
                assert floor < aim < peer, (layer.name, fmt, tokens)


def test_a_floor_is_bytes_or_operations_whichever_takes_longer() -> None:
    small = product_floor(rows=1, columns=8192, depth=8192)
    assert small == pytest.approx((8192 * 8192 * 4.25 / 8 + 2 * 2 * 8192) / BANDWIDTH)
    large = product_floor(rows=8192, columns=8192, depth=8192)
    assert large == pytest.approx(2 * 8192**3 / FLOPS)


def test_the_dense_table_is_complete() -> None:
    rows = [(p.columns, p.depth, p.rows, str(p.target())) for p in DENSE_PRODUCTS]
    assert rows == [
        (8192, 8192, 1, "≥ 0.80 floor"), (8192, 8192, 8, "≥ 0.75 floor"),
        (8192, 8192, 16, "≥ 0.65 floor"), (28672, 4096, 1, "≥ 0.88 floor"),
        (28672, 4096, 8, "≥ 0.85 floor"), (28672, 4096, 16, "≥ 0.78 floor"),
        (8192, 8192, 32, "> 1.00 cuBLAS"), (8192, 8192, 64, "> 1.00 cuBLAS"),
        (33792, 8192, 128, "≥ 1.00 cuBLAS 8192"), (33792, 8192, 256, "≥ 1.00 cuBLAS 8192"),
        (8192, 8192, 4096, "≥ 0.97 cuBLAS"),
    ]  # fmt: skip


def test_rows_that_are_gathered_are_read_once_a_token() -> None:
    facts = {"tokens": 64, "top_k": 8, "columns": 32, "depth": 4096, "hit": 100, "bits": 4.25}
    sorted_rows = grouped_floor(**facts, gathered=False)
    gathered = grouped_floor(**facts, gathered=True)
    assert sorted_rows - gathered == pytest.approx((64 * 8 - 64) * 4096 * 2 / BANDWIDTH)
