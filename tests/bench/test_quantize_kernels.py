"""The comparison of the nvfp4 quantisers, on a pretended card."""

from __future__ import annotations

import pytest

from nvfp4 import plans
from nvfp4.bench import quantize_kernels
from nvfp4.plans_tma import WAYS

from .pretended import Card


def test_each_kernel_is_timed_and_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantize_kernels, "SHAPES", ((3, 96),))
    monkeypatch.setattr(quantize_kernels, "rotations", lambda _: 2)
    monkeypatch.setattr(quantize_kernels, "find_device", Card)
    quantize_kernels.main(["--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    # A heading, a copy, and each kernel with and without an encode scale.
    assert len(lines) == 2 + 2 * (1 + len(WAYS))
    for name in ("stream", *(f"tma {way}" for way in WAYS)):
        assert sum(f" {name} " in line for line in lines) == 2
    assert plans._TMA == ""


def test_the_choice_ends_with_its_block_whatever_happens() -> None:
    with pytest.raises(RuntimeError), quantize_kernels.taking("1"):
        assert plans._TMA == "1"
        raise RuntimeError
    assert plans._TMA == ""
