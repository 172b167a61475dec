"""The tool that tells the host time of public calls runs; its numbers are for quiet machines."""

from __future__ import annotations

import subprocess
import sys

from .. import host_cost


def test_without_a_card_the_python_of_every_call_is_timed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.host_cost", "--pretend"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == 15
    for line in lines:
        assert float(line.split()[-2]) < 10 * host_cost.LIMIT_US, line
