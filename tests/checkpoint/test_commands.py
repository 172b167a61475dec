"""The four commands: exit codes, tables, JSON, one line for a mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from nvfp4.cli.main import program
from tests.checkpoint.helpers import ROOT, contents, tensors, write_folder


def run(*arguments: object) -> Result:
    # Test runners may set COLUMNS; without it, output that is no terminal is wide.
    return CliRunner(env={"COLUMNS": None}).invoke(program, [str(a) for a in arguments])


def parsed(result: Result) -> Any:
    assert result.exit_code in (0, 1), result.output
    text = result.stdout
    assert "Infinity" not in text
    assert "NaN" not in text
    return json.loads(text)


def quantised(toy: Path, out: Path, *options: object) -> Path:
    result = run("quantize", toy, "-o", out, "--device", "cpu", *options)
    assert result.exit_code == 0, result.output
    return out


def test_quantize_says_what_it_did(toy: Path, tmp_path: Path) -> None:
    result = run("quantize", toy, "-o", tmp_path / "q", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "10 nvfp4" in result.stdout
    assert "model.safetensors" in result.stdout
    assert "--fused-scales shared" in result.stdout


def test_quantize_json_names_files_and_hashes(toy: Path, tmp_path: Path) -> None:
    value = parsed(run("quantize", toy, "-o", tmp_path / "q", "--json", "--format", "mxfp8"))
    (file,) = value["files"]
    assert file["file"] == "model.safetensors"
    assert file["size"] == (tmp_path / "q" / "model.safetensors").stat().st_size
    assert value["tensors"]["mxfp8_e4m3"] == 10
    assert value["source_bytes"] == sum(a.nbytes for a in tensors().values())


def test_a_dry_run_lists_every_tensor_and_writes_nothing(toy: Path, tmp_path: Path) -> None:
    result = run("quantize", toy, "-o", tmp_path / "q", "--dry-run")
    assert result.exit_code == 0
    for name in tensors():
        assert name in result.stdout
    assert "kept: the output head" in result.stdout
    assert "10 of 19 tensors would be quantised" in result.stdout
    value = parsed(run("quantize", toy, "-o", tmp_path / "q", "--dry-run", "--json"))
    chosen = {c["name"] for c in value if c["format"] == "nvfp4"}
    assert len(chosen) == 10
    assert next(c for c in value if c["name"] == "model.norm.weight")["reason"] == "a norm"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["toy"]


def test_every_option_reaches_the_job(toy: Path, tmp_path: Path) -> None:
    activations = tmp_path / "amax.json"
    activations.write_text('{"model.layers.0.self_attn.q_proj": 21}')
    quantised(
        toy, tmp_path / "q", "--convention", "modelopt", "--include", "*_proj.weight", "--exclude",
        "*.1.*", "--override", "*k_proj*=mxfp8", "--method", "mse", "--fused-scales", "shared",
        "--activation-scales", activations,
    )  # fmt: skip
    value = parsed(run("inspect", tmp_path / "q", "--json"))
    assert value["convention"] == "modelopt"
    formats = {w["module"].rpartition(".")[2]: w["format"] for w in value["weights"]}
    assert formats == {
        "q_proj": "nvfp4",
        "k_proj": "mxfp8_e4m3",
        "v_proj": "nvfp4",
        "o_proj": "nvfp4",
    }
    scales = {w["module"].rpartition(".")[2]: w for w in value["weights"]}
    assert scales["q_proj"]["input_scale"] == 1 / 128
    assert scales["q_proj"]["tensor_scale"] == scales["v_proj"]["tensor_scale"]
    assert scales["q_proj"]["tensor_scale"] != scales["o_proj"]["tensor_scale"]


def test_verify_exits_with_1_on_a_limit_a_mismatch_or_a_nan(toy: Path, tmp_path: Path) -> None:
    q = quantised(toy, tmp_path / "q")
    good = run("verify", toy, q, "--min-sqnr", 15)
    assert good.exit_code == 0, good.output
    assert good.stdout.rstrip().endswith("OK")
    assert "9 other tensors are equal" in good.stdout
    noisy = run("verify", toy, q, "--min-sqnr", 30)
    assert noisy.exit_code == 1
    assert "is under 30 dB" in noisy.stdout
    assert "FAILED: 10 of 19" in noisy.stdout
    other = write_folder(tmp_path / "other", {**tensors(), "model.norm.weight": np.ones(64, "f4")})
    mismatch = run("verify", other, q)
    assert mismatch.exit_code == 1
    assert "mismatch: model.norm.weight: was F32 [64], is BF16 [64]" in mismatch.stdout
    arrays = tensors()
    arrays["model.layers.0.self_attn.q_proj.weight"][0, 0] = np.nan
    broken = write_folder(tmp_path / "broken", arrays)
    nan = run("verify", broken, quantised(broken, tmp_path / "qn"))
    assert nan.exit_code == 1
    assert "nan: model.layers.0.self_attn.q_proj.weight: 16 values are NaN" in nan.stdout


def test_verify_takes_files_and_folders_and_draws(toy: Path, tmp_path: Path) -> None:
    q = quantised(toy, tmp_path / "q.safetensors")
    picture = tmp_path / "p.png"
    value = parsed(run("verify", toy, q, "--json", "--picture", picture))
    assert value["passed"]
    assert 15 < value["sqnr"] < 30
    assert sum(value["errors"]["nvfp4"]) == sum(
        int(np.prod(t["shape"])) for t in value["tensors"] if t["format"]
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert run("verify", toy / "model.safetensors", q).exit_code == 0
    wrong = run("verify", toy, q, "--picture", tmp_path / "p.nope")
    assert wrong.exit_code == 2
    assert "--picture" in wrong.stderr


def test_the_text_histogram_shows_its_axis(toy: Path, tmp_path: Path) -> None:
    out = run("verify", toy, quantised(toy, tmp_path / "q")).stdout.splitlines()
    axis = next(line for line in out if line.startswith("-1 "))
    assert axis.rstrip().endswith("1")
    above = out[out.index(axis) - 1]
    assert set(above.rstrip()) <= set(" ▁▂▃▄▅▆▇█")


def test_convert_goes_there_and_back(toy: Path, tmp_path: Path) -> None:
    q = quantised(toy, tmp_path / "q")
    assert run("convert", q, "-o", tmp_path / "m", "--to", "modelopt").exit_code == 0
    value = parsed(run("convert", tmp_path / "m", "-o", tmp_path / "c", "--to",
                       "compressed-tensors", "--json"))  # fmt: skip
    assert value["tensors"] == {"nvfp4": 10, "kept": 9}
    assert run("verify", q, tmp_path / "m").exit_code == 0
    assert contents(tmp_path / "c").keys() == contents(q).keys()


def test_inspect_lists_quantised_and_other_tensors(toy: Path, tmp_path: Path) -> None:
    result = run("inspect", quantised(toy, tmp_path / "q"))
    assert result.exit_code == 0
    assert "model.layers.1.mlp.experts.down" in result.stdout
    assert "nvfp4 (compressed-tensors)" in result.stdout
    assert "10 quantised weights" in result.stdout
    assert "9 other tensors" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantize", "{none}", "-o", "{out}"], "No such file or directory"),
        (["quantize", "{bad}", "-o", "{out}"], "cannot hold a safetensors header"),
        (["quantize", "{toy}"], "Missing option '-o'"),
        (["quantize", "{toy}", "-o", "{out}", "--format", "int4"], "'int4' is not one of"),
        (["quantize", "{toy}", "-o", "{out}", "--convention", "gpt-oss"], "no weights in nvfp4"),
        (["quantize", "{toy}", "-o", "{out}", "--include", "zzz"], "matches no tensor"),
        (["quantize", "{toy}", "-o", "{out}", "--override", "x"], "must be PATTERN=FORMAT"),
        (["quantize", "{toy}", "-o", "{out}", "--override", "x=y"], "format must be one of"),
        (["quantize", "{toy}", "-o", "{out}", "--workers", "0"], "--workers"),
        (["quantize", "{toy}", "-o", "{out}", "--activation-scales", "{bad}"], "not JSON"),
        (["quantize", "{toy}", "-o", "{toy}"], "is the checkpoint that is read"),
        (["quantize", "{toy}", "-o", ""], "must end in the result's own name"),
        (["inspect", "{bad}"], "cannot hold a safetensors header"),
        (["inspect", "{empty}"], "holds no .safetensors file"),
        (["verify", "{toy}", "{none}"], "No such file or directory"),
        (["convert", "{toy}", "-o", "{out}", "--to", "modelopt"], "no quantised weight"),
        (["convert", "{toy}", "-o", "{out}", "--to", "gguf"], "'gguf' is not one of"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, toy: Path, tmp_path: Path
) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"\x00\x01")
    (tmp_path / "empty").mkdir()
    places = {
        "toy": toy, "none": tmp_path / "none.safetensors", "bad": tmp_path / "bad.safetensors",
        "out": tmp_path / "out", "empty": tmp_path / "empty",
    }  # fmt: skip
    result = run(*(a.format(**places) for a in arguments))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", ['{"a": "x"}', '{"a": -1}', '{"a": true}', '{"a": 1e60}', "[1]"])
def test_activation_scales_are_checked(value: str, toy: Path, tmp_path: Path) -> None:
    file = tmp_path / "amax.json"
    file.write_text(value)
    result = run("quantize", toy, "-o", tmp_path / "q", "--activation-scales", file)
    assert result.exit_code == 2
    assert "amax.json" in result.stderr


def test_the_commands_need_no_compiler_and_no_cuda_package(toy: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "for name in ('numba', 'llvmlite', 'cupy', 'cuda'): sys.modules[name] = None\n"
        "from nvfp4.cli.main import program\n"
        "try: program.main(sys.argv[1:])\n"
        "except SystemExit as end: print('exit', end.code)\n"
    )
    for arguments in (
        ["quantize", str(toy), "-o", str(tmp_path / "q")],
        ["verify", str(toy), str(tmp_path / "q")],
        ["inspect", str(tmp_path / "q")],
        ["convert", str(tmp_path / "q"), "-o", str(tmp_path / "m"), "--to", "modelopt"],
    ):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT,
            timeout=60,
        )  # fmt: skip
        assert done.stdout.rstrip().endswith("exit 0"), done.stdout + done.stderr


def test_progress_elsewhere_than_on_a_terminal_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from nvfp4.cli import _files

    clock = iter([0.0, 1.0, 6.0, 7.0, 12.0])
    monkeypatch.setattr(_files.time, "monotonic", lambda: next(clock))
    with _files.progress("quantise", 4_000_000_000) as step:
        for _ in range(4):
            step(1_000_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "quantise: 2 GB of 4 GB, 333 MB/s, 6 s left", "quantise: 4 GB of 4 GB, 333 MB/s, 0 s left",
    ]  # fmt: skip
