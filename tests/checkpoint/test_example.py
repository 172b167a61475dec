"""The README's table of the real model is what its command prints."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.checkpoint.helpers import ROOT


def rows(text: str) -> list[list[str]]:
    lines = (line for line in text.splitlines() if line.startswith("| "))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_readmes_table_is_what_the_example_prints() -> None:
    done = subprocess.run(
        [sys.executable, "examples/sentence_embeddings.py"],
        capture_output=True, text=True, cwd=ROOT, timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    printed = rows(done.stdout)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [row for row in rows(readme) if len(row) == len(printed[0])]
    assert len(printed) == 7
    for row in printed:
        # Sizes and SQNR are exact; the last digit of a cosine depends on the order of sums.
        (same,) = [other for other in shown if other[:6] == row[:6]]
        if row[0] not in ("format", "float32"):
            for a, b in zip(row[6:], same[6:], strict=True):
                assert abs(float(a) - float(b)) <= 3e-4
    cosine = {tuple(row[:2]): float(row[6]) for row in printed[2:]}
    assert cosine["mxfp8", "amax"] > cosine["nvfp4", "mse"] > cosine["mxfp4", "mse"]
