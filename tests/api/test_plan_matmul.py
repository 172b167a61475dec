"""plan_matmul: the plan of a call, without arrays and without a GPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import warm
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
    assert named_card("NVIDIA GeForce RTX 4090").processors == 128
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
                 "16 rows x 32 columns, 8 warps share the depth, 2 steps of 64 in flight",
                 "42112 bytes", "CHUNK=16", "floor    8.4 us: 36.2 MB"):  # fmt: skip
        assert part in text, part
    unknown = CardFacts("Other", "sm_90a", 100, 0.0, 0.0)
    plan = nvfp4.plan_matmul(16, 8192, 8192, card="H200")
    assert "not known" in str(type(plan)(plan.title, unknown, plan.launches, 1.0, 1.0))


def test_rows_for_fp8_tensor_cores_are_planned_given_or_made() -> None:
    given = nvfp4.plan_matmul(512, 4096, 4096, a="e4m3", compute="fp8", card="H200")
    names = [(one.program.kernel.name, dict(one.program.constants)["MATRICES"])
             for one in given.launches]  # fmt: skip
    assert names == [("matmul_sm90", "narrow"), ("matmul_sm90", "others")]
    assert "compute fp8" in given.title and "64, " in given.tile
    text = str(given)
    assert "stages, e4m3 products" in text and "matrices that are not e4m3" in text
    made = nvfp4.plan_matmul(512, 4096, 4096, compute="fp8", card="H200")
    assert made.launches[0].program.kernel.name.startswith("quantize_rows")
    assert made.launches[1:] == given.launches
    # More operations a second than in bfloat16, and half of the bytes of A.
    usual = nvfp4.plan_matmul(65536, 4096, 4096, card="H200")
    fast = nvfp4.plan_matmul(65536, 4096, 4096, a="e4m3", compute="fp8", card="H200")
    assert usual.floor_us and fast.floor_us
    assert usual.floor_us / fast.floor_us == pytest.approx(1.9)
    assert usual.moved - fast.moved == 65536 * 4096
    few = nvfp4.plan_matmul(4, 4096, 4096, a="e4m3", compute="fp8", card="H200")
    assert [one.program.kernel.name for one in few.launches] == ["matmul_decode"]


def test_the_plan_with_fp8_is_what_the_call_launches() -> None:
    b = nvfp4.prepare_weights(nvfp4.quantize(np.zeros((256, 128), np.float32), "mxfp4"))
    a = np.zeros((300, 128), np.uint8), np.ones(300, np.float32)
    with warm.recording("sm_90a") as launches:
        nvfp4.matmul(a[0], b, compute="fp8", a_scale=a[1])
    plan = nvfp4.plan_matmul(300, 256, 128, a="e4m3", compute="fp8", card="H200")
    assert plan.launches == tuple(launches)


def test_counted_rows_are_planned() -> None:
    b = nvfp4.prepare_weights(nvfp4.quantize(np.zeros((4, 64, 64), np.float32), "nvfp4"))
    a = np.zeros((4, 24, 64), ml_dtypes.bfloat16)
    with warm.recording("sm_90a") as launches:
        nvfp4.grouped_matmul(a, b, row_counts=np.zeros(4, np.int32))
    plan = nvfp4.plan_matmul(24, 64, 64, b="nvfp4", experts=4, row_counts=True, card="H200")
    assert plan.launches == tuple(launches)
    assert plan.constants["OFFSETS"] == "counts_int32" and "24 counted rows each" in plan.title
    assert plan.operations == 2 * 96 * 64 * 64


def test_sizes_beyond_any_memory_are_planned() -> None:
    """Nothing is allocated: a result of 15 TB, weights of 4 TB."""
    plan = nvfp4.plan_matmul(1 << 14, 1 << 14, 1 << 14, experts=1 << 11, rows=1 << 28,
                             expert_ids=True, card="H200")  # fmt: skip
    assert plan.kernel == "matmul_sm90" and plan.grid == (132, 1, 1)
    assert nvfp4.plan_matmul(1 << 28, 1 << 15, 64, out_dtype="mxfp8", card="H200").launches
    plan = nvfp4.plan_matmul(1 << 31, 256, 64, experts=4, prepared=False, card="H200")
    assert plan.constants["OFFSETS"] == "int64"  # 32 bits with a sign do not reach so far
    with pytest.raises(nvfp4.UnsupportedError, match=r"fewer than 2\^31 rows"):
        nvfp4.plan_matmul(5, 256, 64, experts=4, rows=1 << 31, card="H200")


@pytest.mark.parametrize(
    "options, stages, tile",
    [
        ({"card": "H200"}, 3, "128 rows x 256 columns x 128, 3 stages"),
        ({"arch": "sm_80", "prepared": False}, None, "64 rows x 64 columns"),
        ({"arch": "sm_100a", "a": "mxfp8", "prepared": False}, 7,
         "256 rows x 192 columns x 128, 7 stages"),
        ({"arch": "sm_100a", "a": "nvfp4", "b": "nvfp4", "prepared": False, "experts": 64}, 7,
         "64 rows x 128 columns x 256, 7 stages"),
        ({"arch": "sm_120a", "a": "nvfp4", "b": "nvfp4", "prepared": False}, None,
         "128 rows x 128 columns"),
    ],
)  # fmt: skip
def test_tiles_are_told_in_words(options: dict[str, Any], stages: int | None, tile: str) -> None:
    plan = nvfp4.plan_matmul(4096, 8192, 8192, **options)
    assert plan.tile == tile and f"  tile     {tile}\n" in str(plan)
    assert plan.stages == stages


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"])
def test_quantised_results_with_prepared_weights_are_planned_for_every_card(arch: str) -> None:
    kinds: list[dict[str, Any]] = [{}, {"experts": 4}, {"experts": 4, "row_counts": True}]
    for options in kinds:
        plan = nvfp4.plan_matmul(1, 32, 64, out_dtype="mxfp8", arch=arch, **options)
        assert plan.constants["OUTPUT"] == "codes" and plan.kernel == "matmul_decode"
    plan = nvfp4.plan_matmul(1, 32, 64, out_dtype="mxfp8", arch=arch)
    assert "matmul_decode: 1 blocks of 256 threads" in str(plan)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"card": "H300"}, "card must be one of H200"),
        ({"card": "H200", "arch": "sm_90a"}, "not both"),
        ({"arch": "sm_70"}, "arch must be one of"),
        ({"card": "H200", "b": "nvfp5"}, "must be one of"),
        ({"card": "H200", "groups": 3}, "say experts="),
        ({"card": "H200", "out_dtype": "int8"}, "out_dtype must be"),
        ({"card": "H200", "row_counts": True}, "row_counts needs experts="),
        ({"card": "H200", "row_counts": True, "experts": 2, "rows": 3}, "row_counts needs"),
        ({"card": "H200", "experts": 2.0}, "experts must be an int; got 2.0"),
        ({"card": "H200", "compute": "fp4"}, "compute must be"),
        ({"card": "H200", "a": "e4m3"}, "a must be one of"),
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
