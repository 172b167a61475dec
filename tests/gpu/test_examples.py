"""The examples that use a GPU where there is one, on the present card."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("weight_only_linear.py", 0.02, 0.15), ("mixture_of_experts.py", 0.05, 0.3)],
)
def test_an_example_runs_on_the_card_and_is_as_far_off_as_on_the_host(
    name: str, low: float, high: float
) -> None:
    errors = []
    for library, more in (("cupy", {}), ("numpy", {"CUDA_VISIBLE_DEVICES": ""})):
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / name)],
            capture_output=True,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
                **more,
            },
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"{library}: "), done.stdout
        errors.append(float(re.findall(r"error of the layer (\d\.\d+)", done.stdout)[0]))
    assert low < errors[0] < high
    assert abs(errors[0] - errors[1]) <= 0.001
