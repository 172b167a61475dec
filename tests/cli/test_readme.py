"""The README's code and the examples run, and its commands exist."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

import nvfp4

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# tests/checkpoint/test_example.py runs the one that is left out, and checks what it prints.
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*.py") if path.name != "sentence_embeddings.py"
)


def block(marker: str) -> str:
    """The one code block of the README that contains `marker`."""
    (found,) = [text for text in BLOCKS if marker in text]
    return found


def run(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_readme_has_an_example_for_each_way_to_use_the_package() -> None:
    assert len(BLOCKS) == 5
    for text in BLOCKS:
        ast.parse(text)
        assert len(text.strip().splitlines()) <= 11


def test_the_numpy_example_runs() -> None:
    shown = run(block("import numpy as np\nimport nvfp4\n\nrng"))
    repr_, product_error, error = shown.rsplit(" ", 2)
    assert repr_.startswith("QTensor")
    assert 0 < float(error) < 1 < float(product_error) < 60


def test_the_example_of_fused_quantisers_runs() -> None:
    code = block("rmsnorm_quantize") + "\nprint(q.shape, q.codes[1].any(), h.dtype)"
    assert run(code) == "(2, 4, 256) False float32\n"


def test_the_cupy_example_runs_with_numpy_in_its_place() -> None:
    code = block("import cupy").replace("import cupy as", "import numpy as")
    assert run(code + "print(y.shape)").strip() == "(100, 256)"


def test_the_pytorch_example_uses_functions_and_arguments_that_exist() -> None:
    import inspect

    calls = [
        node
        for node in ast.walk(ast.parse(block("import torch")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("nvfp4.")
    ]
    assert len(calls) == 4
    for call in calls:
        function = getattr(nvfp4, ast.unparse(call.func).removeprefix("nvfp4."))
        names = {keyword.arg: None for keyword in call.keywords if keyword.arg}
        inspect.signature(function).bind(*call.args, **names)


def test_the_simulator_example_runs_and_finds_equal_bytes() -> None:
    assert run(block("nvfp4.simulate")).strip() == "equal: True"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_without_a_gpu(path: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "False" not in result.stdout
    assert len(result.stdout.splitlines()) >= 1


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


def test_extras_and_make_targets_that_the_readme_names_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    named = set(re.findall(r"pip install '\.\[(\w+)\]'", README))
    assert named >= {"cuda13", "compile"}
    assert named <= extras
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    told = set(re.findall(r"\bmake ([a-z-]+)", README)) - {"and"}
    assert told >= {"demo", "test"}
    assert told <= targets


def test_the_table_of_formats_says_what_the_descriptors_say() -> None:
    rows = {
        cells[0].split("`")[1]: cells
        for line in README.splitlines()
        if line.startswith("| `")
        and len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 6
    }
    from nvfp4.formats import FORMATS

    assert list(rows) == list(FORMATS)
    for name, (_, element, block_, scale, bits, largest) in rows.items():
        fmt = FORMATS[name]
        assert element.split(",")[0].lower() == fmt.element
        assert int(block_) == fmt.block
        assert scale[:4].lower() == fmt.scale
        assert float(bits) == 8 / fmt.codes_per_byte + 8 / fmt.block
        assert largest == f"{fmt.qmax:g} x scale"


def test_the_minimum_python_and_the_numpy_ceiling_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == ">=3.11"
    assert "numpy>=2.0,<2.5" in project["dependencies"]
    assert tuple(map(int, np.__version__.split(".")[:2])) < (2, 5)
    for requirement in project["dependencies"]:
        if requirement.startswith(("numba-cuda", "cuda-")):
            assert requirement.endswith("; sys_platform != 'darwin'")
