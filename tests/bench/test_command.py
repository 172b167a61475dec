"""``nvfp4 bench``: its options, its files, what it says without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from nvfp4.bench import (
    dense_products,
    devices,
    environment,
    host_costs,
    quantizers,
    run,
    warmup,
)
from nvfp4.bench.report import Report
from nvfp4.bench.shapes import DenseShape
from nvfp4.bench.timing import Deadline
from nvfp4.cli.main import program

from .pretended import Card

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """A pretended card with one small shape to measure, and nothing to build."""
    made = Card(1e-4)
    monkeypatch.setattr(devices, "find_device", lambda: made)
    monkeypatch.setattr(environment, "_card", lambda: {"card": "Pretended", "arch": "sm_90a"})
    monkeypatch.setattr(warmup, "build", lambda calls, arch, **more: (0, 0.0))
    measure = quantizers.measure
    shape = DenseShape(40, 128, most_us=4.0)
    monkeypatch.setattr(quantizers, "measure", lambda run: measure(run, [shape], []))
    monkeypatch.setattr(quantizers, "rotations", lambda moved, in_l2=False: 2)
    return made


def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_two() -> None:
    """In a process of its own: nothing else may have made a driver here."""
    done = subprocess.run(
        [sys.executable, "-m", "nvfp4", "bench", "quantize"],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("nvfp4: benchmarks need a GPU")


@pytest.mark.parametrize("suite", sorted(run.SUITES))
def test_every_suite_of_the_package_is_one_of_the_command(suite: str) -> None:
    module = run.suite(suite)
    assert callable(module.measure) and module.calls(run.Options())


def test_a_run_prints_a_table_and_writes_json_and_a_picture(
    card: Card, runner: CliRunner, tmp_path: Path
) -> None:
    files = tmp_path / "out.json", tmp_path / "out.png"
    result = runner.invoke(
        program,
        ["bench", "quantize", "--only", "40 x 128", "--no-peers", "--json", str(files[0]),
         "--plot", str(files[1])],
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "Pretended" in result.stdout and "Targets: 5 met, 0 missed" in result.stdout
    data = json.loads(files[0].read_text())
    assert len(data["rows"]) == 6 and data["targets"]["met"] == 5
    assert data["environment"]["card"] == "Pretended" and data["environment"]["sources"]
    assert files[1].stat().st_size > 5000


def test_kinds_of_rows_and_plans_reach_the_suite(
    card: Card, runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[run.Options] = []
    monkeypatch.setattr(dense_products, "measure", lambda made: seen.append(made.options))
    for more in ([], ["--compute", "fp8"], ["--activations", "mxfp8", "--compute", "fp8"],
                 ["--activations", "bfloat16", "--activations", "nvfp4", "--batch-invariant"],
                 ["--compute", "bfloat16", "--compute", "fp8"]):  # fmt: skip
        result = runner.invoke(program, ["bench", "matmul", *more])
        assert result.exit_code == 0, result.output
    assert [(o.activations, o.batch_invariant) for o in seen] == [
        (("bfloat16",), False), (("fp8",), False), (("mxfp8_e4m3", "fp8"), False),
        (("bfloat16", "nvfp4"), True), (("bfloat16", "fp8"), False),
    ]  # fmt: skip


def test_markdown_is_printed_alone(card: Card, runner: CliRunner) -> None:
    result = runner.invoke(
        program,
        ["bench", "quantize", "--only", "40x128", "--format", "mxfp8", "--no-peers", "--markdown"],
    )
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Pretended") and lines[2].startswith("#### ")
    assert [line.split(" | ")[1] for line in lines if line.startswith("| 40")] == [
        "bfloat16", "mxfp8_e4m3",
    ]  # fmt: skip


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("the card is gone")])
def test_what_was_measured_is_kept_when_something_stops_the_run(
    error: BaseException, card: Card, runner: CliRunner, monkeypatch: Any, tmp_path: Path
) -> None:
    measure = quantizers.measure

    def stop(run: Any) -> None:
        measure(run)
        raise error

    monkeypatch.setattr(quantizers, "measure", stop)
    file = tmp_path / "out.json"
    result = runner.invoke(
        program,
        ["bench", "quantize", "--only", "40 x 128", "--no-peers", "--json", str(file)],
    )
    assert result.exit_code == 1
    data = json.loads(file.read_text())
    assert len(data["rows"]) == 6 and data["stopped"].startswith(type(error).__name__)
    assert "Not complete" in result.stdout


def test_wrong_results_exit_with_one(card: Card, runner: CliRunner, monkeypatch: Any) -> None:
    monkeypatch.setattr(quantizers, "check_quantized", lambda *a, **b: "WRONG: everything")
    result = runner.invoke(program, ["bench", "quantize", "--only", "40 x 128", "--no-peers"])
    assert result.exit_code == 1
    assert "5 wrong" in result.stdout


def test_a_shape_that_there_is_not_is_a_mistake(
    card: Card, runner: CliRunner, tmp_path: Any
) -> None:
    file = tmp_path / "out.json"
    result = runner.invoke(
        program, ["bench", "quantize", "--only", "40 x 129", "--only", "none", "--json", str(file)]
    )
    assert result.exit_code == 2 and not file.exists()
    assert "no shape of quantize has 40 x 129 or none in its label" in result.stderr


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["bench", "sorting"], "is not one of"),
        (["bench", "quantize", "--format", "int4"], "int4"),
        (["bench", "quantize", "--plot", "out.gif"], "must end in"),
        (["bench", "quantize", "--json", "nowhere/out.json"], "no folder"),
        (["bench", "quantize", "--budget", "-1"], "--budget"),
        (["bench", "quantize", "--compute", "fp8"], "are of products"),
        (["bench", "matmul", "--activations", "float32"], "bfloat16 or float16, or a format"),
        (["bench", "matmul", "--compute", "int8"], "int8"),
    ],
)
def test_mistakes_are_found_before_anything_is_measured(
    arguments: list[str], said: str, runner: CliRunner
) -> None:
    result = runner.invoke(program, arguments)
    assert result.exit_code == 2 and said in result.stderr


def test_what_is_missing_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVFP4_CACHE_DIR", str(tmp_path))
    calls = [{"call": "interleave_scales", "shape": [256, 8]}]
    said: list[str] = []
    assert warmup.build(calls, "sm_90a", jobs=2, say=said.append)[0] == 1
    assert said == ["build 1 kernels in 1 processes"]
    assert warmup.missing(calls, "sm_90a") == []
    assert warmup.build(calls, "sm_90a", say=said.append)[0] == 0 and len(said) == 1


def test_a_container_s_share_of_the_cpus_counts(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    whole = warmup.usable_cpus(quota)
    assert whole >= 1
    for text, expected in (("max 100000", whole), ("150000 100000", 1), ("50000 100000", 1)):
        quota.write_text(text)
        assert warmup.usable_cpus(quota) == expected


def test_what_does_not_build_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVFP4_CACHE_DIR", str(tmp_path))

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(warmup.compiler, "build", fail)
    with pytest.raises(RuntimeError, match=r"interleave_scales.*: no such instruction"):
        warmup.build([{"call": "interleave_scales", "shape": [256, 8]}], "sm_90a", jobs=1)


def test_the_first_call_of_a_process_is_a_program() -> None:
    compile(host_costs.FIRST_CALL, "first call", "exec")
    with pytest.raises(RuntimeError):
        host_costs.first_call("no such library", "nvfp4")


def test_first_calls_are_those_of_processes_that_find_bytecode_and_one_kernel_or_none(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that writes bytecode and builds the kernel is not measured."""
    made: list[tuple[str, str, str, bool]] = []

    def process(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        environment, fmt = more["env"], command[-1]
        bytecode, cache = environment["PYTHONPYCACHEPREFIX"], environment["NVFP4_CACHE_DIR"]
        new = all(cache != before[2] for before in made)
        made.append((fmt, bytecode, cache, "PYTHONDONTWRITEBYTECODE" in environment))
        first = 2.0 if new else 0.012 if not fmt else 0.030 + len(made) / 1e3
        if len(made) == 1:
            first = 9.0
        said = {"import": 0.001, "early": [], "first": first, "second": 0.0, "numba": new}
        return subprocess.CompletedProcess(command, 0, json.dumps(said), "")

    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setattr(subprocess, "run", process)
    report = Report("quantize", {})
    host_costs._first_calls(run.Run(card, run.Options(), Deadline(9e9), report))
    assert [fmt for fmt, *_ in made] == ["nvfp4"] * 4 + ["", "nvfp4"]
    assert len({bytecode for _, bytecode, *_ in made}) == 1
    assert not any(forbidden for *_, forbidden in made)
    assert [cache == made[0][2] for _, _, cache, _ in made] == [True] * 5 + [False]
    imported, warm, cold = report.rows
    assert (imported.us, imported.met) == (1e3, True)
    assert (warm.us, warm.low_us, warm.high_us) == pytest.approx((33e3, 32e3, 34e3))
    assert warm.met and "; 12 ms of it import cuda.bindings" in warm.note
    assert (cold.us, cold.met) == (2e6, True)
