"""plan_matmul: the plan of a call, without arrays and without a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4.bench.targets import product_floor
from nvfp4.cards import CARDS, CardFacts, named_card


@pytest.mark.parametrize("rows", [3, 150])
def test_the_plan_is_what_the_call_launches(rows: int) -> None:
    a = np.zeros((rows, 64), ml_dtypes.bfloat16)
    b = nvfp4.prepare_weights(nvfp4.quantize(np.zeros((32, 64), np.float32), "mxfp4"))
    ran = []
    machine: Any
    with nvfp4.simulate("sm_90a", checks=False) as machine:
        run = machine.run

        def noted(*args: Any, **named: Any) -> Any:
            ran.append((named["name"], tuple(args[1])))
            return run(*args, **named)

        machine.run = noted
        nvfp4.matmul(a, b)
    plan = nvfp4.plan_matmul(rows, 32, 64, card="H200")
    assert ran[0][0].startswith(plan.kernel)


def test_grid_and_floor_follow_the_card() -> None:
    plans = {
        name: nvfp4.plan_matmul(8192, 8192, 8192, b="nvfp4", card=name) for name in ("H200", "H20")
    }
    assert {p.kernel for p in plans.values()} == {"matmul_sm90"}
    assert plans["H200"].grid == (132, 1, 1) and plans["H20"].grid == (78, 1, 1)
    few = nvfp4.plan_matmul(1, 8192, 8192, card="NVIDIA H200 NVL")
    floor = product_floor(rows=1, columns=8192, depth=8192, bits=4.25)
    assert few.kernel == "matmul_decode" and few.floor_us == pytest.approx(floor * 1e6, rel=1e-3)
    assert few.card == named_card("H200")
    # Few blocks fit where there is little shared memory.
    wide: dict[str, Any] = {"experts": 1024, "a": "mxfp8", "b": "mxfp4"}
    grids = [nvfp4.plan_matmul(8192, 4096, 4096, arch=f"sm_{n}", **wide).grid[0] for n in (80, 86)]
    assert grids == [2 * CARDS["A100"].processors, CARDS["A40"].processors]


def test_grouped_products_pairs_and_quantised_results_are_planned() -> None:
    plan = nvfp4.plan_matmul(
        *(32, 5760, 2880),
        experts=128,
        rows=128,
        epilogue=nvfp4.epilogues.swiglu(halves=True),
        out_dtype="mxfp8",
        card="H100",
    )
    assert plan.kernel == "matmul_decode" and plan.constants["PASSES"] == 2
    assert plan.constants["INDICES"] == "int32" and plan.constants["OUTPUT"] == "codes"
    hit = 128 * (1 - (1 - 1 / 128) ** 128)
    weights = hit * 5760 * 2880 * 4.25 / 8
    assert plan.moved == pytest.approx(weights + 32 * 2880 * 2 + 128 * 2880 * 8.25 / 8)


def test_a_plan_is_printed_whole() -> None:
    text = str(nvfp4.plan_matmul(16, 8192, 8192, card="H200"))
    for part in ("matmul 16 x 8192 x 8192", "H200: sm_90a, 132", "matmul_decode: 256 blocks of 256",
                 "40960 bytes", "CHUNK=16", "floor    8.4 us: 36.2 MB"):  # fmt: skip
        assert part in text, part
    unknown = CardFacts("Other", "sm_90a", 100, 0.0, 0.0)
    plan = nvfp4.plan_matmul(16, 8192, 8192, card="H200")
    assert "not known" in str(type(plan)(plan.title, unknown, plan.launches, 1.0, 1.0))


@pytest.mark.parametrize(
    "options, match",
    [
        ({"card": "H300"}, "card must be one of H200"),
        ({"card": "H200", "arch": "sm_90a"}, "not both"),
        ({"arch": "sm_70"}, "arch must be one of"),
        ({"card": "H200", "b": "nvfp5"}, "must be one of"),
        ({"card": "H200", "groups": 3}, "say experts="),
        ({"card": "H200", "out_dtype": "int8"}, "out_dtype must be"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        nvfp4.plan_matmul(16, 64, 64, **options)


@pytest.mark.parametrize(
    "sizes, match",
    [
        ((-1, 64, 64), "m must not be negative; got -1"),
        ((16, 64, -64), "k must not be negative; got -64"),
        ((16, 6.4, 64), "n must be an int; got 6.4"),
        ((16, True, 64), "n must be an int; got True"),
    ],
)
def test_a_size_is_an_int_that_is_not_negative(sizes: tuple[Any, Any, Any], match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match):
        nvfp4.plan_matmul(*sizes, card="H200")
