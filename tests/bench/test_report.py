"""Tables, JSON, Markdown and the picture of a run."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from nvfp4.bench import environment
from nvfp4.bench.plot import draw
from nvfp4.bench.report import Report, Row, brief, markdown, print_report, row, skipped
from nvfp4.bench.targets import Target
from nvfp4.bench.timing import Timing

WHERE = {
    "card": "NVIDIA H200", "driver": "580.1", "versions": {"torch": "2.11"}, "commit": "a" * 40,
    "sources": "123456789abc", "command": "nvfp4 bench quantize",
}  # fmt: skip
COPY = Timing(50e-6, 49e-6, 51e-6, 9, 40)


def report() -> Report:
    target = Target(0.95, "copy")
    moved = 200e6
    speeds = {"copy": moved / 4e12}
    made = Report("quantize", WHERE, seconds={"measuring": 12.0})
    made.rows = [
        row("Group A", "8 x 8", "bfloat16", "copy", COPY, moved=200e6),
        row("Group A", "8 x 8", "nvfp4", "nvfp4", Timing(51e-6, 50e-6, 52e-6, 9, 40), moved=moved,
            references=speeds, target=target, checked="all bytes"),
        row("Group A", "8 x 8", "mxfp4", "nvfp4", Timing(90e-6, 89e-6, 91e-6, 9, 40), moved=moved,
            references=speeds, target=target, checked="WRONG: 3 of 4 codes"),
        skipped("Group B", "9 x 9", "mxfp4", "nvfp4", "the budget of 5 s is spent", target),
        row("Group B", "9 x 9", "mxfp4", "a|peer", COPY, moved=moved, note="half of its codes"),
    ]  # fmt: skip
    return made


def test_a_row_has_rates_ratio_and_verdict() -> None:
    _, good, bad, late, peer = report().rows
    assert good.us == pytest.approx(51) and good.tbps == pytest.approx(200e6 / 51e-6 / 1e12)
    assert good.ratio == pytest.approx(50 / 51) and good.met is True and not good.wrong
    assert bad.met is False and bad.wrong
    assert late.met is None and late.us is None
    assert peer.target == "" and peer.met is None


def test_a_row_is_said_in_a_line() -> None:
    copy, good, bad, _, _ = report().rows
    assert brief(copy) == "  8 x 8, bfloat16, copy: 50.00 us"
    assert brief(good) == "  8 x 8, nvfp4, nvfp4: 51.00 us, 0.98 of copy, ≥ 0.95 copy: yes"
    assert brief(bad) == "  8 x 8, mxfp4, nvfp4: 90.00 us, 0.56 of copy, WRONG: 3 of 4 codes"


def test_the_ratio_is_to_the_target_s_reference_among_several() -> None:
    timing = Timing(2.0, 2.0, 2.0, 9, 1)
    made = row("g", "s", "f", "nvfp4", timing, floor=1.0, references={"cuBLAS": 3.0},
               target=Target(1.0, "cuBLAS", exclusive=True))  # fmt: skip
    assert (made.ratio, made.reference, made.met) == (1.5, "cuBLAS", True)
    made = row("g", "s", "f", "nvfp4", timing, floor=1.0, target=Target(0.4, "floor"))
    assert (made.ratio, made.reference, made.met) == (0.5, "floor", True)
    made = row("g", "s", "f", "nvfp4", timing, floor=1.0, target=Target(1.0, "cuBLAS"))
    assert (made.ratio, made.reference, made.met) == (None, "", None)


def test_json_has_every_figure_and_where_it_comes_from(tmp_path: Path) -> None:
    data = json.loads(json.dumps(report().as_json()))
    assert data["schema"] == 1 and data["suite"] == "quantize" and data["environment"] == WHERE
    assert data["targets"] == {"met": 1, "missed": 1, "not measured": 1, "wrong": 1}
    assert [r["what"] for r in data["rows"]] == ["copy", "nvfp4", "nvfp4", "nvfp4", "a|peer"]
    assert set(data["rows"][0]) == set(Row.__dataclass_fields__)
    assert data["rows"][3]["us"] is None and "budget" in data["rows"][3]["note"]


def test_the_table_says_what_is_met_missed_wrong_and_skipped() -> None:
    out = io.StringIO()
    print_report(report(), Console(file=out, width=200, highlight=False))
    lines = out.getvalue().splitlines()
    assert "NVIDIA H200" in lines[0] and "driver 580.1" in lines[0] and "a" * 12 in lines[0]
    (good,) = [line for line in lines if " nvfp4  " in line and "51.00" in line]
    assert "0.98 copy" in good and "yes" in good and "all bytes" in good
    (bad,) = [line for line in lines if "90.00" in line]
    assert "WRONG" in bad
    (late,) = [line for line in lines if "skipped" in line]
    assert "?" in late and "budget" in late
    assert "1 met, 1 missed, 1 not measured, 1 wrong" in out.getvalue()
    assert "TFLOP/s" not in out.getvalue()  # nobody has a figure there


def test_markdown_has_a_table_a_group_and_no_broken_cells() -> None:
    text = markdown(report())
    lines = text.splitlines()
    assert lines[0].endswith("`nvfp4 bench quantize`")
    assert [line for line in lines if line.startswith("####")] == ["#### Group A", "#### Group B"]
    tables = [line for line in lines if line.startswith("|")]
    header = tables[0].count("|")
    assert all(line.replace("\\|", "").count("|") == header for line in tables[:5])
    assert "| **51.00** |" in text and "a\\|peer" in text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_drawn(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"out{suffix}"
    draw(report(), file)
    assert file.stat().st_size > 5000
    if suffix == ".svg":
        assert "NVIDIA" in file.read_text() or "<svg" in file.read_text()


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row"):
        draw(Report("quantize", WHERE), tmp_path / "out.png")


def test_the_command_has_no_folder_in_it() -> None:
    assert environment.command(["/somewhere/bin/nvfp4", "bench", "quantize"]) == (
        "nvfp4 bench quantize"
    )
    assert environment.command(["/somewhere/nvfp4/__main__.py", "bench"]) == "python -m nvfp4 bench"


def test_the_digest_of_the_sources_changes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_PACKAGE", tmp_path)
    (tmp_path / "a.py").write_text("1")
    first = environment.package_digest()
    (tmp_path / "a.py").write_text("2")
    second = environment.package_digest()
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert len({first, second, environment.package_digest()}) == 3
