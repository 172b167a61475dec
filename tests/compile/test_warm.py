from __future__ import annotations

import inspect
import json
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import launch, warm
from nvfp4.sim import current_machine


def labels(*calls: dict[str, Any], arch: str = "sm_90a") -> list[str]:
    return [made.label for call in calls for made in warm.programs(warm.expand(call), arch)]


def test_lists_stand_for_each_of_their_items() -> None:
    calls = warm.expand(
        {"call": "quantize", "format": ["nvfp4", "mxfp4"], "shape": [8, 64], "dtype": ["float32"]}
    )
    assert [(c["format"], c["shape"], c["dtype"]) for c in calls] == [
        ("nvfp4", [8, 64], "float32"), ("mxfp4", [8, 64], "float32"),
    ]  # fmt: skip


def test_every_call_is_a_public_function_or_method() -> None:
    for name in warm.CALLS:
        assert hasattr(nvfp4, name) or hasattr(nvfp4.QTensor, name)


def test_weights_are_prepared_as_on_a_card() -> None:
    repack = {"call": "prepare_weights", "format": "mxfp4", "shape": [3, 256, 64]}
    made = labels(repack)
    assert [label.partition("[")[0] for label in made] == [
        "prepare_clear", "prepare_search", "prepare", "prepare_finish",
    ]  # fmt: skip
    product = {"call": "matmul", "a": "bfloat16", "b": "mxfp4", "m": 1, "n": 256, "k": 64}
    both = labels(product | {"prepared": True})
    assert both[:-1] == made and both[-1] not in labels(product)


@pytest.mark.parametrize("encode", [None, 2.0, "array", "amax", "row_amax"], ids=str)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_what_is_built_is_what_the_call_launches(
    format: str, encode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The programs found without running are those that the same call runs."""
    if encode == "row_amax" and format != "nvfp4":
        encode = None
    launched: list[str] = []
    real = launch._simulate

    def note(launches: Any, buffers: Any, machine: Any) -> None:
        launched.extend(item.program.label for item in launches)
        real(launches, buffers, machine)

    monkeypatch.setattr(launch, "_simulate", note)
    x = np.ones((4, 64), np.float32)
    scale = np.ones((), np.float32) if encode == "array" else encode
    with nvfp4.simulate(arch="sm_90a", checks=False):
        nvfp4.quantize(x, format, encode_scale=scale)
    assert launched
    call = {"call": "quantize", "format": format, "shape": [4, 64], "dtype": "float32"}
    assert labels(call | {"encode_scale": encode}) == list(dict.fromkeys(launched))


def test_each_program_is_named_once() -> None:
    calls = warm.expand({"call": "quantize", "format": "mxfp4", "shape": [8, 64]}) * 3
    assert len(warm.programs(calls, "sm_90a")) == 1


def test_grouped_calls_and_dequantisation_are_found() -> None:
    found = labels(
        {"call": "grouped_quantize", "format": "mxfp4", "shape": [64, 64], "groups": 4,
         "row_indices": 128, "expert_ids": True, "index_dtype": "int64"},
        {"call": "dequantize", "format": "nvfp4", "shape": [64, 64]},
        {"call": "dequantize", "format": "nvfp4", "shape": [64, 64], "groups": 4},
        {"call": "deinterleave_scales", "shape": [64, 4]},
    )  # fmt: skip
    # Which kernel it is may change; what the call says of its arrays must be in it.
    quantised, dense, grouped, scales = found
    assert "INDICES=int64" in quantised and "IDS=int64" in quantised
    assert "SCALE=e8m0" in quantised and "SCALE=e4m3" in dense and "SCALE=e4m3" in grouped
    assert "OFFSETS=" in grouped and "OFFSETS=" not in dense
    assert scales == "deinterleave_scales"


def test_fused_quantisers_are_found() -> None:
    dense, grouped, counted = labels(
        {"call": "rmsnorm_quantize", "format": "nvfp4", "shape": [64, 2880], "residual": True},
        {"call": "swiglu_quantize", "format": "mxfp8", "shape": [64, 5760], "kind": "gpt-oss",
         "groups": 4, "row_indices": 100, "expert_ids": True},
        {"call": "swiglu_quantize", "format": "nvfp4", "shape": [2, 8, 128], "row_counts": True},
    )  # fmt: skip
    assert "FRONT=rms" in dense and "RESIDUAL=out" in dense and "RANGES=False" in dense
    assert "FRONT=gpt-oss" in grouped and "INDICES=int32" in grouped and "IDS=int32" in grouped
    assert "COUNTS=int32" in counted and "FRONT=silu" in counted


def test_huge_shapes_touch_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    labels({"call": "quantize", "format": "nvfp4", "shape": [1 << 19, 7168]})  # 7.5 GB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_the_callers_machine_is_as_before_even_after_an_error() -> None:
    with nvfp4.simulate(arch="sm_90a") as machine:
        with pytest.raises(ValueError) as caught:
            labels({"call": "quantize", "format": "nvfp4", "shape": [1, 17]})
        assert current_machine() is machine
    assert "in the call" in caught.value.__notes__[0]
    assert current_machine() is None


def test_arrays_are_aligned_as_on_a_gpu() -> None:
    for shape in ((1,), (3, 5), (1000, 17)):
        assert warm._array(shape, "bfloat16").ctypes.data % 256 == 0
    assert warm._array((0, 4), "uint8").shape == (0, 4)


def test_the_options_of_a_call_have_the_public_defaults() -> None:
    public = inspect.signature(nvfp4.quantize).parameters
    mine = inspect.signature(warm.CALLS["quantize"]).parameters
    for name in ("encode_scale", "scale_rounding", "scale_layout"):
        assert mine[name].default == public[name].default


def test_the_shapes_in_the_documentation_can_be_read_and_its_table_is_right() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "compile.md").read_text("utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", text, re.S)
    calls = [call for entry in json.loads(example) for call in warm.expand(entry)]
    assert {call["call"] for call in calls} <= set(warm.CALLS) and len(calls) == 9
    rows = re.findall(r"^\| (`\w+`.*?) \| (.*?) \| (.*?) \|$", text, re.M)
    named: set[str] = set()
    for names, needed, more in rows:
        for name in re.findall(r"`(\w+)`", names):
            if name not in warm.CALLS:
                continue
            named.add(name)
            options = inspect.signature(warm.CALLS[name]).parameters
            for option in re.findall(r"(?<![\"\w])`(\w+)`", needed):
                if option not in ("a", "true"):
                    assert options[option].default is inspect.Parameter.empty, (name, option)
            assert set(re.findall(r"`(\w+)`", more)) - {"true"} <= set(options), name
    assert named == set(warm.CALLS)


def test_a_card_with_fewer_multiprocessors_needs_another_program() -> None:
    call = {"call": "matmul", "a": "bfloat16", "b": "mxfp4", "m": 1, "n": 8192, "k": 4096,
            "prepared": True}  # fmt: skip
    made = [warm.programs([call], "sm_90a", card)[-1] for card in (None, ("NVIDIA H20", 78))]
    assert [dict(one.constants)["TEAM"] for one in made] == [8, 4]
