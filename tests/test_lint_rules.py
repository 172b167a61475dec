"""Each rule of lint_rules.py catches a planted violation and lets the allowed form pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lint_rules

ROOT = Path(__file__).resolve().parent.parent

# Written in two parts, so that this file itself does not name such a path.
A_PATH = "/" + "work/somebody/file"

PLANTED = [
    ("numba", "nvfp4/api.py", "import numba"),
    ("numba", "nvfp4/sim/engine.py", "def f():\n    from numba.cuda import jit"),
    ("numba", "nvfp4/ptx/cvt.py", "from llvmlite import ir"),
    ("numba", "nvfp4/launch.py", "import importlib\nimportlib.import_module('numba.cuda')"),
    ("assert", "nvfp4/api.py", "def f(x):\n    assert x"),
    ("assert", "nvfp4/ptx/cvt.py", "assert True"),
    ("float", "nvfp4/kernels/quantize.py", "def f(x):\n    return x * 0.5"),
    ("float", "nvfp4/kernels/quantize.py", "def f(x, np):\n    return np.float32(x * 0.5)"),
    ("float", "nvfp4/kernels/quantize.py", "LIMIT = 1e30"),
    ("float", "nvfp4/kernels/quantize.py", "def f(k, np):\n    return np.float32(2.0**k)"),
    ("seed", "tests/api/test_a.py", "import numpy as np\nr = np.random.default_rng()"),
    ("seed", "nvfp4/bench/a.py", "from numpy.random import default_rng\nr = default_rng(None)"),
    ("seed", "props/a.py", "import numpy as np\nr = np.random.default_rng(seed=None)"),
    ("path", "nvfp4/api.py", f"CACHE = '{A_PATH}'"),
    ("path", "README.md", f"see {A_PATH}"),
    ("path", "Makefile", f"\tcp x {'/' + 'tmp/y'}"),
]

ALLOWED = [
    ("nvfp4/_numba.py", "import numba\nfrom llvmlite import ir"),
    ("nvfp4/api.py", "from ._numba import cuda\nfrom nvfp4 import numba_free"),
    ("nvfp4/kernels/quantize.py", "assert True"),
    ("tests/api/test_a.py", "import numba\nassert 0.5 + 0.5 == 1"),
    ("nvfp4/kernels/quantize.py", "import numpy as np\nA = np.float32(0.5)\nB = np.float32(-1e30)"),
    ("nvfp4/kernels/quantize.py", "import numpy as np\nA = np.float32(2.0**-126)"),
    ("nvfp4/golden/e2m1.py", "HALF = 0.5"),
    ("tests/api/test_a.py", "import numpy as np\nr = np.random.default_rng(0)"),
    ("README.md", "/usr/bin/env, docs/work/a, https://example.org/home/a, tmp/x"),
]


@pytest.mark.parametrize("rule, path, text", PLANTED, ids=lambda value: str(value)[:40])
def test_a_planted_violation_is_found_on_its_line(rule: str, path: str, text: str) -> None:
    found = lint_rules.check(path, text)
    assert [finding.rule for finding in found] == [rule]
    assert found[0].line == len(text.splitlines())
    assert str(found[0]).startswith(f"{path}:{found[0].line}: {rule}: ")


@pytest.mark.parametrize("path, text", ALLOWED, ids=lambda value: str(value)[:40])
def test_the_allowed_form_passes(path: str, text: str) -> None:
    assert lint_rules.check(path, text) == []


def test_a_tree_with_a_violation_is_reported_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "nvfp4" / "kernels").mkdir(parents=True)
    (tmp_path / "nvfp4" / "kernels" / "a.py").write_text("X = 0.25\n")
    (tmp_path / "nvfp4" / "b.py").write_text("X = 1\n")
    found, count = lint_rules.check_tree(tmp_path)
    assert [(finding.path, finding.line, finding.rule) for finding in found] == [
        ("nvfp4/kernels/a.py", 1, "float")
    ]
    assert count == 2


def test_this_tree_keeps_the_rules() -> None:
    found, count = lint_rules.check_tree(ROOT)
    assert found == [], "\n" + "\n".join(map(str, found))
    assert count > 20
