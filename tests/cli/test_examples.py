"""What the examples print is true; tests/cli/test_readme.py runs each of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed(name: str) -> list[str]:
    """The lines that an example prints where there is no GPU."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_weight_only_layer_is_as_far_off_as_its_weights() -> None:
    (line,) = printed("weight_only_linear.py")
    found = re.fullmatch(
        r"numpy: 8 tokens, 4\.50 bits a weight, error of the layer (\d\.\d+)", line
    )
    assert found and 0.02 < float(found[1]) < 0.15


def test_the_layer_of_experts_is_as_far_off_as_its_operands() -> None:
    (line,) = printed("mixture_of_experts.py")
    found = re.fullmatch(r"numpy: 64 tokens, 4 experts, error of the layer (\d\.\d+)", line)
    assert found and 0.05 < float(found[1]) < 0.3


def test_the_race_of_an_own_kernel_is_named_with_its_line_and_the_repair_is_right() -> None:
    race, sums = printed("own_kernel.py")
    source = (ROOT / "examples" / "own_kernel.py").read_text(encoding="utf-8").splitlines()
    assert race.startswith("DataRace: ") and "kernel block_sum" in race
    lines = [int(number) for number in re.findall(r"own_kernel\.py:(\d+)", race)]
    assert "shared[i] += shared[i + half]" in source[lines[-1] - 1]
    assert re.fullmatch(r"sums: \[(-?\d+\.0(, )?){4}\]", sums)
