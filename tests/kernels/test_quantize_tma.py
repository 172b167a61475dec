"""The quantiser by tensor copies gives the golden bytes, in any order of things."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nvfp4
from nvfp4 import golden, layouts, plans, warm
from nvfp4.bench.quantize_kernels import taking
from nvfp4.formats import NVFP4
from nvfp4.kernels.quantize_tma import QUANTIZE_TMA
from nvfp4.launch import Launch
from nvfp4.plans_tma import WAYS

from . import checks
from .checks import Out, assert_bytes
from .simulated import Simulated

BFLOAT16 = ml_dtypes.bfloat16
SCHEDULES = ("round_robin", 1, 2)


class FewBlocks(Simulated):
    """Few blocks, so that each goes round its ring of tiles."""

    blocks = 1

    def changed(self, one: Launch) -> Launch:
        """A launch with at most so many blocks, where the kernel allows it."""
        constants = dict(one.program.constants)
        if one.program.kernel is not QUANTIZE_TMA or constants["STAGES"] == 1:
            return one
        return dataclasses.replace(one, grid=(min(self.blocks, one.grid[0]), 1, 1))


def facts_of(x: np.ndarray, stride: int, encode: str) -> dict[str, Any]:
    rows, columns = x.shape
    return {
        "format": "nvfp4",
        "dtype": x.dtype.name,
        "rows": rows,
        "columns": columns,
        "batches": 1,
        "row_stride": stride,
        "batch_stride": 0,
        "scale_layout": "tcgen",
        "scale_rounding": "rceil",
        "encode": encode,
        "aligned": True,
    }


def names(facts: Mapping[str, Any], arch: str = "sm_90a") -> list[str]:
    return [one.program.kernel.name for one in plans.quantize(arch, **facts)]


def compare(
    run: Any,
    x: np.ndarray,
    way: str,
    encode_scale: Any = None,
    gap: int = 0,
    expected: Any = None,
) -> None:
    """Every byte of the results, of rows that lie `gap` elements apart with NaN between."""
    if expected is None:
        expected = golden.quantize(x, NVFP4, encode_scale=encode_scale)
    kind = checks.kind_of(encode_scale, 1, NVFP4)
    outputs = {
        "codes": Out(layouts.codes_shape(NVFP4, x.shape), np.uint8),
        "scales": Out(layouts.scale_shape(NVFP4, x.shape, "tcgen"), np.uint8),
        "decode_scale": Out(expected[2].shape, np.float32),
    }
    given = None if kind in ("none", "amax") else encode_scale
    with taking(way):
        facts = facts_of(x, x.shape[1] + gap, kind)
        assert "quantize_tma" in names(facts, getattr(run, "arch", "sm_90a"))
        memory = checks.spread(x, gap, 0)
        got = run("quantize", facts, {"x": memory, "encode_scale": given}, outputs)
    for name, right in zip(("codes", "scales", "decode_scale"), expected, strict=True):
        assert_bytes(name, got[name], right)


def values(seed: int, shape: tuple[int, int], dtype: Any = BFLOAT16) -> np.ndarray:
    """Rows of very different size; zeros, infinities, NaN and tiny blocks among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, (shape[0], 1)))
    special = rng.random(shape)
    x[special < 0.02] = -0.0
    x[special > 0.9995] = np.nan
    x[(special > 0.999) & (special < 0.9995)] = -np.inf
    x[:, 16:32] *= 1e-7
    x[::3, :16] = 0.0
    return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows, columns", [(1, 96), (128, 128), (130, 160)])
def test_tails_of_rows_and_columns(run: Any, rows: int, columns: int, way: str) -> None:
    compare(run, values(rows, (rows, columns)), way)


@pytest.mark.parametrize("encode", [0.43, 1e-20, 3e38, "array", "row", "amax"])
@pytest.mark.parametrize("way", ["1", "3", "2w"])
def test_encode_scales(run: Any, way: str, encode: Any) -> None:
    x = np.abs(values(7, (5, 96)))
    x[~np.isfinite(x)] = 1.0
    if encode == "array":
        encode = np.array(2.5, np.float32)
    elif encode == "row":
        encode = np.array([[0.43], [128.0], [1 / 3], [1e30], [1.0]], np.float32)
    compare(run, x, way, encode)


@pytest.mark.parametrize("way", ["1", "2", "4w"])
def test_float16_and_rows_that_lie_apart(run: Any, way: str) -> None:
    compare(run, values(3, (33, 96), np.float16), way, gap=8)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("way", ["2", "4", "3w"])
def test_rings_go_round_in_any_order(way: str, schedule: Any) -> None:
    stages = WAYS[way][0]
    compare(FewBlocks(schedule=schedule), values(stages, (3, 64 * (2 * stages + 1))), way)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_in_any_order(schedule: Any) -> None:
    compare(Simulated(schedule=schedule), values(1, (2, 96)), "1")


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=40))
def test_a_ring_of_two_in_any_interleaving(numbers: list[int]) -> None:
    compare(FewBlocks(schedule=numbers), values(4, (2, 288)), "2")


def test_the_public_function_takes_it() -> None:
    x = values(5, (9, 96))
    expected = nvfp4.quantize(x, "nvfp4", encode_scale=0.5)
    out = nvfp4.quantize(np.zeros_like(x), "nvfp4", encode_scale=0.5)
    for array in (out.codes, out.scales):
        array[...] = checks.POISON
    ran = []
    with taking("1"), nvfp4.simulate("sm_90a") as machine, pytest.MonkeyPatch.context() as patch:
        run = machine.run
        patch.setattr(machine, "run", lambda *a, **k: (ran.append(k["name"]), run(*a, **k)))
        nvfp4.quantize(x, "nvfp4", encode_scale=0.5, out=out)
    assert [name.partition("[")[0] for name in ran] == ["quantize_tma"]
    for name in ("codes", "scales", "decode_scale"):
        assert_bytes(name, np.asarray(getattr(out, name)), np.asarray(getattr(expected, name)))


def test_what_a_server_builds_ahead_has_what_writes_the_maps() -> None:
    call = {"call": "quantize", "format": "nvfp4", "shape": [9, 96]}
    with taking("1"):
        made = warm.programs([call], "sm_90a")
    assert [one.kernel.name for one in made] == ["quantize_tma", "write_tensor_map"]


def test_what_it_cannot_do_goes_to_another_kernel() -> None:
    facts = facts_of(values(0, (4, 96)), 96, "none")
    assert names(facts) == ["quantize_stream"], "the default"
    with taking("1"):
        for arch in ("sm_90a", "sm_100a", "sm_103a", "sm_120a"):
            assert names(facts, arch) == ["quantize_tma"]
        assert names(facts, "sm_80") == ["quantize_stream"]
        for other in (
            {"columns": 112, "row_stride": 112},
            {"columns": 64, "row_stride": 64},
            {"row_stride": 0},
            {"batches": 2, "batch_stride": 4 * 96},
            {"scale_layout": "linear"},
            {"dtype": "float32"},
            {"format": "mxfp4"},
        ):
            assert names({**facts, **other}) == ["quantize_stream"], other
        assert names({**facts, "aligned": False}) == ["quantize"]
