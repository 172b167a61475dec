"""The comparison of the quantisers' forms, on a pretended card."""

from __future__ import annotations

import pytest

from nvfp4 import plans
from nvfp4.bench import quantize_forms
from nvfp4.bench.shapes import DenseShape, GroupedShape

from .pretended import Card

SWITCHES = sorted({name for switches in quantize_forms.SETTINGS.values() for name in switches})


def test_each_setting_has_a_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [getattr(plans, name) for name in SWITCHES]
    monkeypatch.setattr(quantize_forms, "DENSE_SHAPES", (DenseShape(3, 96),))
    monkeypatch.setattr(quantize_forms, "GROUPED_SHAPES", (GroupedShape(2, 4, 96),))
    monkeypatch.setattr(quantize_forms, "buffers", lambda _: 2)
    monkeypatch.setattr(quantize_forms, "find_device", Card)
    monkeypatch.setattr(quantize_forms, "build_ahead", lambda: None)
    quantize_forms.main([])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 3 + 1 + 1 + 3 + 1
    assert lines[0].split()[-4:] == list(quantize_forms.GROUPED_SETTINGS)
    assert lines[1].count("25.00 1.000") == 4
    assert [getattr(plans, name) for name in SWITCHES] == before


def test_a_setting_ends_with_its_block_whatever_happens() -> None:
    with pytest.raises(RuntimeError), quantize_forms.switched("short"):
        assert plans._SHORT
        raise RuntimeError
    assert not plans._SHORT


def test_wrong_bytes_have_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantize_forms, "DENSE_SHAPES", ())
    monkeypatch.setattr(quantize_forms, "GROUPED_SHAPES", (GroupedShape(2, 4, 96, decode=True),))
    monkeypatch.setattr(quantize_forms, "buffers", lambda _: 2)
    monkeypatch.setattr(quantize_forms, "find_device", Card)
    monkeypatch.setattr(quantize_forms, "build_ahead", lambda: None)
    monkeypatch.setattr(quantize_forms, "grouped_call", lambda *_: (None, "WRONG: codes"))
    quantize_forms.main(["--parts", "grouped"])
    assert capsys.readouterr().out.count("WRONG") == 3 * len(quantize_forms.GROUPED_SETTINGS)
