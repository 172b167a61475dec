"""The frame of the command line: subcommands by name, one line and exit code 2 for a mistake."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import nvfp4
from nvfp4.cli.main import COMMANDS, program
from nvfp4.errors import ToolchainError, UnsupportedError

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -m nvfp4``, or the Python `code`, in a process of its own."""
    start = ["-m", "nvfp4"] if code is None else ["-c", code]
    return subprocess.run(
        [sys.executable, *start, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )


def test_help_names_every_command(runner: CliRunner) -> None:
    for arguments in ([], ["--help"], ["-h"]):
        result = runner.invoke(program, arguments)
        assert result.exit_code == 0
        assert "demo" in result.stdout
        for name, (_, text) in COMMANDS.items():
            assert name in result.stdout
            assert " ".join(text.split()) in " ".join(result.stdout.split())


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_each_command_can_be_imported_and_has_help(name: str, runner: CliRunner) -> None:
    command = program.get_command(click.Context(program), name)
    assert isinstance(command, click.Command)
    result = runner.invoke(program, [name, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: nvfp4 {name} ")


def test_help_imports_no_command_and_no_heavy_package() -> None:
    code = (
        "import sys\n"
        "from nvfp4.cli.main import program\n"
        "try:\n    program.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'numba', 'cupy', 'cuda', 'matplotlib', 'rich', 'nvfp4.cli.demo'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))"
    )
    result = run(code=code)
    assert result.stdout.splitlines()[-1] == "loaded: []", result.stderr


def test_version_is_that_of_the_installed_package(runner: CliRunner) -> None:
    result = runner.invoke(program, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"nvfp4 {nvfp4.__version__}\n")
    assert nvfp4.__version__ == importlib.metadata.version("nvfp4")


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["dmo"], "No such command"),
        (["--frobnicate"], "No such option"),
        (["demo", "--frobnicate"], "No such option"),
        (["demo", "surplus"], "unexpected extra argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], says: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("nvfp4")
    assert says in result.stderr


@pytest.mark.parametrize("kind", [ToolchainError, UnsupportedError])
def test_what_the_package_cannot_do_here_is_one_line_and_exit_code_2(
    kind: type[Exception], runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def command() -> None:
        raise kind("needs\n  a driver")

    monkeypatch.setattr(program, "get_command", lambda ctx, name: command)
    result = runner.invoke(program, ["demo"])
    assert (result.exit_code, result.stderr) == (2, "nvfp4: needs a driver\n")


def test_an_error_of_ours_is_not_hidden(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def command() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(program, "get_command", lambda ctx, name: command)
    assert isinstance(runner.invoke(program, ["demo"]).exception, ValueError)


def test_an_interrupt_ends_with_130_and_no_traceback(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def command() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "get_command", lambda ctx, name: command)
    result = runner.invoke(program, ["demo"])
    assert result.exit_code == 130
    assert result.stderr.strip() == "nvfp4: interrupted"


def test_the_console_script_is_installed() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="nvfp4")
    assert script.value == "nvfp4.cli.main:main"
    result = subprocess.run(
        [Path(sys.executable).parent / "nvfp4", "--version"], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (0, f"nvfp4 {nvfp4.__version__}\n")
