"""NaN and infinite elements of a source are counted, and the user is told at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner

from nvfp4.checkpoint import jobs, numeric, quantize
from nvfp4.checkpoint.output import JOURNAL
from nvfp4.cli.main import program
from tests.checkpoint.helpers import contents, write_folder


def broken(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    """A matrix, or a stack, with NaN in two blocks and three infinite elements, one beside NaN."""
    x: np.ndarray = np.random.default_rng(3).standard_normal(shape).astype(dtype)
    last = x.reshape(-1, *shape[-2:])[-1]
    last[3, 5] = last[3, 6] = last[9, -1] = np.nan
    last[3, 7] = last[9, 0] = -np.inf
    last[4, 40] = np.inf
    return x


def counts(nan_blocks: int, infinite: int) -> dict[str, int]:
    return {"nan_blocks": nan_blocks, "infinite": infinite}


@pytest.mark.parametrize(
    ("format", "options"),
    [
        ("nvfp4", {}),
        ("nvfp4", {"method": "mse"}),
        ("nvfp4", {"convention": "modelopt"}),
        ("mxfp4", {}),
        ("mxfp4", {"method": "mse"}),
        ("mxfp4", {"scale_rounding": "floor"}),
        ("mxfp8", {"scale_rounding": "even"}),
        ("mxfp8", {"scale_rounding": "ceil"}),
    ],
)
def test_blocks_that_became_nan_and_infinite_elements_are_counted_by_tensor(
    format: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several pieces for each tensor: their counts are added.
    monkeypatch.setattr(numeric.CpuBackend, "chunk", 256)
    arrays = {
        "a.weight": broken(12, 64),
        "half.weight": broken(12, 64, dtype=np.float16),
        "brain.weight": broken(12, 64, dtype=ml_dtypes.bfloat16),
        "stack.weight": broken(3, 12, 64),
        "whole.weight": np.ones((12, 64), np.float32),
        "large.weight": np.full((12, 64), 3.4e38, np.float32),
        "norm.weight": np.full(64, np.nan, np.float32),  # passed through
    }
    source = write_folder(tmp_path / "in", arrays)
    result = quantize(source, tmp_path / "out", format=format, device="cpu", **options)
    (file,) = result.files
    bad = ["a.weight", "brain.weight", "half.weight", "stack.weight"]
    assert file.nonfinite == dict.fromkeys(bad, counts(2, 3))
    assert sorted(note.split(":")[0] for note in result.notes) == bad
    blocks = 12 * 64 // (16 if format == "nvfp4" else 32)
    for note in result.notes:
        total = 3 * blocks if note.startswith("stack") else blocks
        assert f"2 of {total} blocks became NaN" in note
        assert "3 elements are infinite" in note
        assert ("tensor scale" in note) == (format == "nvfp4")


def test_a_tensor_with_only_one_kind_is_told_of_that_kind_alone(tmp_path: Path) -> None:
    nan, infinite = np.ones((2, 16, 32), np.float32)
    nan[0, 0] = np.nan
    infinite[0, 0] = np.inf
    source = write_folder(tmp_path / "in", {"n.weight": nan, "i.weight": infinite})
    first, second = sorted(quantize(source, tmp_path / "out", device="cpu").notes)
    assert "1 element is infinite" in first
    assert "NaN" not in first
    assert "1 of 32 blocks became NaN" in second
    assert "infinite" not in second


def test_transposed_experts_are_counted_by_the_blocks_that_are_written(tmp_path: Path) -> None:
    x = np.ones((2, 64, 32), ml_dtypes.bfloat16)
    x[1, 0, 5] = x[1, 1, 5] = np.nan  # a block of the transposed matrix
    x[0, 2, 5] = np.inf
    source = write_folder(tmp_path / "in", {"mlp.experts.gate_up_proj": x})
    result = quantize(source, tmp_path / "out", format="mxfp4", convention="gpt-oss", device="cpu")
    assert result.files[0].nonfinite == {"mlp.experts.gate_up_proj": counts(1, 1)}


def test_the_command_prints_the_notes_and_json_has_the_counts(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", {"[a].weight": broken(12, 64)})

    def run(*options: str) -> str:
        arguments = ["quantize", str(source), "-o", str(tmp_path / "out"), "--device", "cpu"]
        done = CliRunner(env={"COLUMNS": None}).invoke(program, [*arguments, *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "note: [a].weight: 2 of 48 blocks became NaN" in run()
    value = json.loads(run("--json", "--overwrite"))
    assert value["files"][0]["nonfinite"] == {"[a].weight": counts(2, 3)}
    assert "3 elements are infinite" in value["notes"][0]


def test_of_many_tensors_the_first_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", {f"{i:02}.weight": broken(12, 64) for i in range(11)})
    result = quantize(source, tmp_path / "out", device="cpu")
    assert len(result.files[0].nonfinite) == 11
    assert [note[:10] for note in result.notes[:8]] == [f"{i:02}.weight:" for i in range(8)]
    assert result.notes[8].startswith("3 more tensors hold NaN or infinite elements")
    assert len(result.notes) == 9


def stopped(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Quantise until one file is complete; its journal."""
    real = jobs.run_file
    made: list[jobs.FileJob] = []

    def run_file(job: jobs.FileJob, *rest: object) -> object:
        if made:
            raise KeyboardInterrupt
        made.append(job)
        return real(job, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(jobs, "run_file", run_file)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, out, device="cpu")
    return out.with_name(out.name + ".partial") / JOURNAL


def test_a_run_that_goes_on_tells_of_the_files_that_were_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(
        tmp_path / "in", {"a.weight": broken(12, 64), "b.weight": broken(12, 64)}, shards=2
    )
    whole = quantize(source, tmp_path / "whole", device="cpu")
    assert len(whole.notes) == 2
    stopped(source, tmp_path / "out", monkeypatch)
    result = quantize(source, tmp_path / "out", device="cpu")
    assert len(result.kept) == 1
    assert result.notes == whole.notes
    assert result.files == whole.files


@pytest.mark.parametrize(
    "value", [None, [], {"a.weight": 1}, {"a.weight": {"nan_blocks": "x", "infinite": 1}}, "gone"]
)
def test_a_journal_without_right_counts_costs_the_work_of_its_file(
    value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(
        tmp_path / "in", {"a.weight": broken(12, 64), "b.weight": broken(12, 64)}, shards=2
    )
    whole = quantize(source, tmp_path / "whole", device="cpu")
    journal = stopped(source, tmp_path / "out", monkeypatch)
    text = json.loads(journal.read_text())
    (fields,) = text["files"].values()
    fields["nonfinite"] = value
    if value == "gone":
        del fields["nonfinite"]
    journal.write_text(json.dumps(text))
    result = quantize(source, tmp_path / "out", device="cpu")
    assert result.kept == ()
    assert result.notes == whole.notes
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
