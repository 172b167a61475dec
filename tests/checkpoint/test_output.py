"""Results appear whole or not at all, whatever happens; an interrupted run goes on where it was."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nvfp4.checkpoint import CheckpointError, open_checkpoint, quantize
from nvfp4.checkpoint import jobs as jobs_module
from nvfp4.checkpoint.output import JOURNAL, Output
from nvfp4.checkpoint.writer import TensorWriter
from tests.checkpoint.helpers import ROOT, command, contents, tensors, write_folder


def interrupted(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Quantise until ``after`` files are complete, then raise in the middle of the next one."""
    real = jobs_module.run_file
    count = 0

    def run_file(job: object, *args: object) -> object:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt
        return real(job, *args)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(jobs_module, "run_file", run_file)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, out, device="cpu")


def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quantize(sharded, tmp_path / "whole", device="cpu")
    assert whole.kept == ()
    interrupted(sharded, tmp_path / "out", monkeypatch, after=2)
    assert not (tmp_path / "out").exists()
    result = quantize(sharded, tmp_path / "out", device="cpu")
    assert len(result.kept) == 2
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_a_finished_file_that_has_changed_is_made_again(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(sharded, tmp_path / "whole", device="cpu")
    interrupted(sharded, tmp_path / "out", monkeypatch, after=2)
    first, second = sorted((tmp_path / "out.partial").glob("*.safetensors"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    result = quantize(sharded, tmp_path / "out", device="cpu")
    assert result.kept == (second.name,)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_broken_journal_costs_the_work_and_nothing_else(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(sharded, tmp_path / "whole", device="cpu")
    for text in ('{"plan": 1}', '{"plan": "x", "files": [1]}'):
        interrupted(sharded, tmp_path / "out", monkeypatch, after=1)
        journal = tmp_path / "out.partial" / JOURNAL
        journal.write_text(text)
        with pytest.raises(CheckpointError, match="unfinished result of other options"):
            quantize(sharded, tmp_path / "out", device="cpu")
        quantize(sharded, tmp_path / "out", device="cpu", overwrite=True)
        assert contents(tmp_path / "out") == contents(tmp_path / "whole")
        shutil.rmtree(tmp_path / "out")


def test_an_unfinished_result_of_other_options_is_not_mixed_in(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(sharded, tmp_path / "out", monkeypatch, after=1)
    with pytest.raises(CheckpointError, match="unfinished result of other options"):
        quantize(sharded, tmp_path / "out", format="mxfp4", device="cpu")
    result = quantize(sharded, tmp_path / "out", format="mxfp4", device="cpu", overwrite=True)
    assert result.kept == ()
    quantize(sharded, tmp_path / "whole", format="mxfp4", device="cpu")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_source_that_has_changed_since_is_noticed(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(sharded, tmp_path / "out", monkeypatch, after=1)
    os.utime(next(sharded.glob("*.safetensors")), (1, 1))
    with pytest.raises(CheckpointError, match="a checkpoint that has changed"):
        quantize(sharded, tmp_path / "out", device="cpu")


def test_a_killed_process_can_be_run_again_with_the_same_result(tmp_path: Path) -> None:
    # Large enough that the kill comes in the middle, and it is made sure that it does.
    arrays = {f"layers.{i}.weight": np.full((512, 1024), i + 1, "float32") for i in range(8)}
    source = write_folder(tmp_path / "in", arrays, shards=8)
    quantize(source, tmp_path / "whole", device="cpu")
    slow = (
        "import sys, time\n"
        "from nvfp4.checkpoint import numeric\n"
        "numeric.CpuBackend.chunk = 1 << 16\n"
        "real = numeric.CpuBackend.quantize\n"
        "def quantize(self, *a):\n    time.sleep(0.02)\n    return real(self, *a)\n"
        "numeric.CpuBackend.quantize = quantize\n"
        "from nvfp4.cli.main import program\n"
        "program.main(sys.argv[1:])\n"
    )
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", slow, "quantize", str(source), "-o", str(out), "--device", "cpu"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    partial = tmp_path / "out.partial"
    deadline = time.monotonic() + 60
    while len(list(partial.glob("*.safetensors"))) < 3:
        assert time.monotonic() < deadline
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    done = command("quantize", source, "-o", out, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["kept_files"]) >= 2
    assert contents(out) == contents(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out", "whole"]


def test_a_result_that_is_there_is_replaced_only_on_demand(toy: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize(toy, out, device="cpu")
    before = contents(out)
    with pytest.raises(CheckpointError, match="is there already"):
        quantize(toy, out, format="mxfp8", device="cpu")
    assert contents(out) == before
    quantize(toy, out, format="mxfp8", device="cpu", overwrite=True)
    assert contents(out) != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "toy"]


def test_an_empty_folder_may_become_the_result(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    quantize(toy, tmp_path / "out", device="cpu")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_failed_overwrite_leaves_the_old_result(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.safetensors"
    quantize(toy, out, device="cpu")
    before = out.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(TensorWriter, "commit", lambda self: (_ for _ in ()).throw(OSError("no")))
        with pytest.raises(OSError, match="no"):
            quantize(toy, out, format="mxfp4", device="cpu", overwrite=True)
    assert out.read_bytes() == before


def test_a_link_in_place_of_the_result_is_refused(toy: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "out").symlink_to(target)
    (tmp_path / "dangling.safetensors").symlink_to(tmp_path / "nowhere.safetensors")
    (tmp_path / "x.partial").symlink_to(target)
    for name in ("out", "dangling.safetensors", "x"):
        with pytest.raises(CheckpointError, match="is a symbolic link"):
            quantize(toy, tmp_path / name, device="cpu", overwrite=True)
    assert list(target.iterdir()) == []
    assert not (tmp_path / "nowhere.safetensors").exists()


def test_a_link_to_the_source_cannot_overwrite_it(toy: Path, tmp_path: Path) -> None:
    before = contents(toy)
    (tmp_path / "alias").symlink_to(tmp_path)
    for out in (
        toy, toy / "out", tmp_path / "alias" / "toy", toy / "model.safetensors", tmp_path,
        toy / ".." / "toy",
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match="is the checkpoint that is read, or inside"):
            quantize(toy, out, device="cpu", overwrite=True)
    with pytest.raises(CheckpointError, match="is the checkpoint that is read"):
        quantize(toy / "model.safetensors", toy / "model.safetensors", overwrite=True)
    assert contents(toy) == before


def test_a_foreign_folder_under_the_working_name_is_not_touched(toy: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"holds something else \(thesis.txt\)"):
        quantize(toy, tmp_path / "out", device="cpu", overwrite=True)
    assert contents(tmp_path / "out.partial") == {"thesis.txt": b"years of work"}


def test_what_another_run_is_about_to_rename_is_no_foreign_folder(
    toy: Path, tmp_path: Path
) -> None:
    first = Output(tmp_path / "out", toy)
    first.begin("plan")
    first.add_text("config.json", "{}")
    (tmp_path / "out.partial" / JOURNAL).unlink()  # the first thing that the end of a run does
    with pytest.raises(CheckpointError, match="another run is writing"):
        quantize(toy, tmp_path / "out", device="cpu")
    first.release()


def test_overwrite_removes_checkpoints_only(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        quantize(toy, home, device="cpu", overwrite=True)
    (home / "a.safetensors").write_bytes(b"")
    (home / "deep").mkdir()
    monkeypatch.chdir(home / "deep")
    with pytest.raises(CheckpointError, match="holds the present working folder"):
        quantize(toy, home, device="cpu", overwrite=True)
    assert (home / "thesis.txt").read_text() == "years of work"


def test_two_runs_at_the_same_result_exclude_one_another(toy: Path, tmp_path: Path) -> None:
    first = Output(tmp_path / "out", toy)
    first.begin("plan")
    with pytest.raises(CheckpointError, match="another run is writing"):
        quantize(toy, tmp_path / "out", device="cpu")
    first.release()
    with pytest.raises(CheckpointError, match="other options"):
        quantize(toy, tmp_path / "out", device="cpu")


def test_a_missing_folder_is_an_error(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        quantize(toy, tmp_path / "no" / "out", device="cpu")


def test_a_full_disk_leaves_the_originals_and_no_result(sharded: Path, tmp_path: Path) -> None:
    before = contents(sharded)
    code = (
        "import resource, sys\n"
        "from nvfp4.cli.main import program\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))\n"
        "program.main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "quantize", str(sharded), "-o", str(tmp_path / "out")],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("nvfp4")
    assert os.strerror(errno.EFBIG) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    assert contents(sharded) == before
    quantize(sharded, tmp_path / "out", device="cpu")  # with room again, the same command ends


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_what_the_system_refuses_is_one_line_and_leaves_nothing(
    error: int, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from nvfp4.cli.main import program

    real = os.open

    def refuse(path: object, flags: int, *args: int, **more: int) -> int:
        if flags & os.O_CREAT and str(path).endswith(".partial"):
            raise OSError(error, os.strerror(error), str(path))
        return real(path, flags, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    out = tmp_path / "out"
    result = CliRunner().invoke(program, ["quantize", str(toy), "-o", str(out), "--device", "cpu"])
    assert result.exit_code == 2
    assert os.strerror(error) in result.output
    assert "Traceback" not in result.output
    assert not out.exists()


def test_no_permission_for_the_folder_is_one_line(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, *args: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match="Permission denied"):
        quantize(toy, tmp_path / "out", device="cpu")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["toy"]


# --- folders that lie --------------------------------------------------------------------------


def index_of(folder: Path) -> dict[str, dict[str, str]]:
    return json.loads((folder / "model.safetensors.index.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors", "/etc/passwd", "sub/model.safetensors", "a\\b.safetensors", "",
        "..", "config.json", ".hidden.safetensors", "a\n.safetensors",
    ],
)  # fmt: skip
def test_an_index_cannot_name_files_elsewhere(name: str, sharded: Path) -> None:
    index = index_of(sharded)
    index["weight_map"]["lm_head.weight"] = name
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"is not the name of a \.safetensors file"):
        open_checkpoint(sharded)


def test_an_index_that_disagrees_with_the_files_is_an_error(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    good = path.read_text()
    for change in ("drop", "add", "move"):
        index = json.loads(good)
        table = index["weight_map"]
        if change == "drop":
            del table["lm_head.weight"]
        elif change == "add":
            table["new"] = table["lm_head.weight"]
        else:
            table["lm_head.weight"] = next(
                v for v in table.values() if v != table["lm_head.weight"]
            )
        path.write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match="disagree about 1 tensors"):
            open_checkpoint(sharded)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', "\0"])
def test_a_broken_index_is_an_error(text: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        open_checkpoint(sharded)


def test_a_missing_shard_is_an_error_that_names_it(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(FileNotFoundError, match=victim.name):
        open_checkpoint(sharded)


def test_a_tensor_in_two_files_is_an_error(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    first = sorted(sharded.glob("*.safetensors"))[0]
    shutil.copy(first, sharded / "z.safetensors")
    with pytest.raises(CheckpointError, match=r"and in .*-of-00003"):
        open_checkpoint(sharded)


def test_shards_that_are_links_are_read(sharded: Path, tmp_path: Path) -> None:
    # As in the cache of a model hub.
    links = tmp_path / "links"
    links.mkdir()
    for path in sharded.iterdir():
        if path.is_file():
            (links / path.name).symlink_to(path)
    quantize(links, tmp_path / "a", device="cpu")
    assert (tmp_path / "a" / "tokenizer.json").is_file()
    assert not (tmp_path / "a" / "tokenizer.json").is_symlink()


def test_names_of_tensors_are_data_not_paths(tmp_path: Path) -> None:
    names = [
        "../../etc/x.weight",
        "/abs.weight",
        "a\x1b]0;evil\x07.weight",
        "[red].weight",
        " .weight",
    ]
    arrays = {name: np.ones((16, 32), "float32") for name in names}
    source = write_folder(tmp_path / "in", arrays)
    before = contents(tmp_path)
    done = command("quantize", source, "-o", tmp_path / "out", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    for verb in (["quantize", source, "-o", tmp_path / "o2", "--dry-run"],
                 ["inspect", tmp_path / "out"], ["verify", source, tmp_path / "out"]):  # fmt: skip
        done = command(*verb)
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout
        assert "\x07" not in done.stdout
        assert "[red]" in done.stdout
    new = {k: v for k, v in contents(tmp_path).items() if not k.startswith("out/")}
    assert new == before


def test_weights_with_nan_are_quantised_to_nan_and_fail_verification(tmp_path: Path) -> None:
    from nvfp4.checkpoint import inspect, verify

    array = np.ones((16, 32), "float32")
    array[3, 5] = np.nan
    array[4, 5] = np.inf
    source = write_folder(
        tmp_path / "in", {"a.weight": array, "b.weight": np.ones((16, 32), "float32")}
    )
    for format in ("nvfp4", "mxfp4", "mxfp8"):
        quantize(source, tmp_path / format, format=format, device="cpu")
        result = verify(source, tmp_path / format)
        a, b = sorted(result.tensors, key=lambda t: t.name)
        assert a.status == "nan"
        assert b.status == "ok"
        assert not result.passed
        report = next(w for w in inspect(tmp_path / format).weights if w.module == "a")
        assert report.nan_blocks == 1


@pytest.mark.parametrize("largest", [3.4e38, np.inf])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_weights_that_become_infinite_or_were_fail_verification(
    format: str, largest: float, tmp_path: Path
) -> None:
    from nvfp4.checkpoint import verify

    array = np.ones((16, 32), "float32")
    array[4, 5] = largest
    source = write_folder(tmp_path / "in", {"a.weight": array})
    quantize(source, tmp_path / "out", format=format, device="cpu")
    result = verify(source, tmp_path / "out")
    fits = format == "nvfp4" and largest < np.inf  # whose tensor scale takes it
    assert result.passed == fits
    if not fits and largest < np.inf:
        (a,) = result.tensors
        assert (a.status, a.sqnr, result.sqnr) == ("noise", -np.inf, -np.inf)
        assert "infinite" in a.message


def test_the_toy_is_what_it_says() -> None:
    assert tensors()["lm_head.weight"].dtype.name == "bfloat16"
