"""``nvfp4 plan``: a plan is printed, and mistakes are one line."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

import nvfp4
from nvfp4.cli.main import program


def test_a_plan_is_printed(runner: CliRunner) -> None:
    result = runner.invoke(program, ["plan", "16", "8192", "8192", "-b", "mxfp8", "--card", "H20"])
    assert result.exit_code == 0
    assert result.stdout == f"{nvfp4.plan_matmul(16, 8192, 8192, b='mxfp8', card='H20')}\n"
    options = ["--experts", "4", "--rows", "12", "--out", "nvfp4", "--arch", "sm_80"]
    result = runner.invoke(program, ["plan", "8", "64", "128", *options])
    assert result.exit_code == 0 and "OUTPUT=codes" in result.stdout and "A100" in result.stdout
    options = ["-a", "e4m3", "--compute", "fp8", "--card", "H200"]
    result = runner.invoke(program, ["plan", "512", "4096", "4096", *options])
    assert result.exit_code == 0 and "MATRICES=narrow" in result.stdout
    options = ["--experts", "4", "--row-counts", "--batch-invariant", "--card", "H200"]
    result = runner.invoke(program, ["plan", "512", "4096", "4096", *options])
    assert result.exit_code == 0 and "OFFSETS=counts_int32" in result.stdout


@pytest.mark.parametrize(
    "options, said",
    [
        (["--card", "H300"], "card must be one of"),
        (["--card", "H200", "-b", "int4"], "int4"),
        (["--card", "H200", "--rows", "3"], "say experts="),
    ],
)
def test_mistakes_are_one_line(options: list[str], said: str, runner: CliRunner) -> None:
    result = runner.invoke(program, ["plan", "8", "64", "64", *options])
    assert result.exit_code == 2 and said in result.stderr
    assert len(result.stderr.splitlines()) == 1
