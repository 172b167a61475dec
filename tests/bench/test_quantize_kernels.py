"""The comparison of the nvfp4 quantisers, on a pretended card."""

from __future__ import annotations

import pathlib
import pickle

import pytest

from nvfp4 import plans
from nvfp4.bench import quantize_kernels
from nvfp4.bench.shapes import GroupedShape
from nvfp4.plans_tma import GROUPED_WAYS, WAYS
from nvfp4.program import Program

from .pretended import Card


def test_each_kernel_is_timed_and_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantize_kernels, "SHAPES", ((3, 96),))
    monkeypatch.setattr(quantize_kernels, "GROUPED_SHAPES", (GroupedShape(2, 4, 96),))
    monkeypatch.setattr(quantize_kernels, "buffers", lambda _: 2)
    monkeypatch.setattr(quantize_kernels, "rotations", lambda _: 2)
    monkeypatch.setattr(quantize_kernels, "find_device", Card)
    monkeypatch.setattr(quantize_kernels, "build_ahead", lambda _: None)
    quantize_kernels.main(["--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    # A heading, a copy, and each kernel with and without an encode scale; the grouped ones with.
    assert len(lines) == 2 + 2 * (1 + len(WAYS)) + 1 + 1 + len(GROUPED_WAYS)
    for name in ("grouped-plain", *(f"grouped-tma-{way}" for way in GROUPED_WAYS)):
        assert sum(f" {name} " in line for line in lines) == 1
    for name in ("stream", *(f"tma-{way}" for way in WAYS)):
        assert sum(f" {name} " in line for line in lines) == 2
    assert plans._TMA == ""


def test_everything_is_built_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("NVFP4_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(quantize_kernels, "current_device", lambda: 0)
    monkeypatch.setattr(quantize_kernels.launch, "architecture", lambda _: "sm_90a")
    monkeypatch.setattr(quantize_kernels, "SHAPES", ((256, 128),))
    monkeypatch.setattr(quantize_kernels, "GROUPED_SHAPES", (GroupedShape(2, 4, 96),))
    wanted = []
    monkeypatch.setattr(quantize_kernels, "_build", wanted.append)

    class Pool:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def map(self, _: object, programs: list[Program], arches: list[str]) -> list[None]:
            wanted.extend(programs)
            return [None] * len(arches)

    monkeypatch.setattr(quantize_kernels, "ProcessPoolExecutor", Pool)
    quantize_kernels.build_ahead(["stream", "tma-1", "tma-2w", "grouped-plain", "grouped-tma-k4"])
    names = sorted(one.kernel.name for one in wanted)
    assert names[:2] == ["grouped_quantize_tma", "grouped_rows"]
    assert names[2:] == 2 * ["quantize_stream"] + 4 * ["quantize_tma"] + ["write_tensor_map"]
    assert pickle.loads(pickle.dumps(wanted)) == wanted


def test_the_choice_ends_with_its_block_whatever_happens() -> None:
    with pytest.raises(RuntimeError), quantize_kernels.taking("1"):
        assert plans._TMA == "1"
        raise RuntimeError
    assert plans._TMA == ""
