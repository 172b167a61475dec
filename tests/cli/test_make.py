"""Targets of the Makefile that need a GPU: what they run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def program(path: Path, text: str) -> Path:
    path.write_text("#!/bin/sh\n" + text, encoding="utf-8")
    path.chmod(0o755)
    return path


def test_gpu_tests_run_alone_and_then_under_compute_sanitizer(tmp_path: Path) -> None:
    """Programs stand in for it and for Python."""
    python = program(tmp_path / "python", 'echo "$TOOL" "$PYTHONPATH" "$@"\n')
    options = '--tool) TOOL=$2;; --report-api-errors) TOOL="$TOOL, answers of the driver $2";;'
    each = f'while [ "${{1#--}}" != "$1" ]; do case $1 in {options} esac; shift 2; done'
    sanitizer = f'{each}; export TOOL; exec "$@"\n'
    program(tmp_path / "compute-sanitizer", sanitizer)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MAKEFLAGS")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run(
        ["make", "--silent", "test-gpu-memory", f"PYTHON={python}", "SANITIZE=tests/gpu/some.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    tests = ". -m pytest tests/gpu/some.py"
    tools = ("", "memcheck, answers of the driver no", "racecheck")
    assert done.stdout.splitlines() == [f"{tool} {tests}" for tool in tools]
