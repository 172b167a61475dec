from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from nvfp4 import fingerprint
from nvfp4.architectures import ARCHITECTURES
from nvfp4.fingerprint import source_key
from nvfp4.program import Kernel, Program
from nvfp4.ptx.instruction import Instruction

from .programs import MULTIPLY, program

ROOT = Path(__file__).resolve().parents[2]

KERNEL = """
from helpers import step
CONSTANT = 1
def body(x, n):
    for i in range(n):
        x[i] = step(x[i]) + CONSTANT
"""
HELPERS = """
import numpy as np
OFFSET = np.float32(2.0)
def step(value):
    return value + OFFSET
"""


def load(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def key_of(folder: Path, kernel: str = KERNEL, helpers: str = HELPERS, **more: Any) -> str:
    """The digest of a kernel in a file that calls a helper in another file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "helpers.py").write_text(helpers)
    (folder / "kernel.py").write_text(kernel)
    try:
        load(folder, "helpers")
        module = load(folder, "kernel")
        fingerprint._file_digest.cache_clear()
        made = Kernel("k", module.body, ("f32*", "i64"), {"CONSTANT": ()}, **more)
        return source_key(made.program(CONSTANT=1), "sm_90a")
    finally:
        sys.modules.pop("helpers", None)
        sys.modules.pop("kernel", None)


def test_the_same_sources_have_the_same_digest_wherever_they_lie(tmp_path: Path) -> None:
    assert key_of(tmp_path / "one") == key_of(tmp_path / "two")


@pytest.mark.parametrize(
    ("kernel", "helpers"),
    [
        (KERNEL.replace("+ CONSTANT", "- CONSTANT"), HELPERS),
        (KERNEL, HELPERS.replace("value + OFFSET", "value - OFFSET")),
        (KERNEL, HELPERS.replace("2.0", "3.0")),
        (KERNEL + "\n# a comment is bytes too\n", HELPERS),
    ],
    ids=["body", "helper", "value", "comment"],
)
def test_any_edit_of_a_source_file_changes_the_digest(
    kernel: str, helpers: str, tmp_path: Path
) -> None:
    assert key_of(tmp_path / "before") != key_of(tmp_path / "after", kernel, helpers)


def test_launch_bounds_change_the_digest(tmp_path: Path) -> None:
    keys = [
        key_of(tmp_path / "a"),
        key_of(tmp_path / "b", threads=128),
        key_of(tmp_path / "c", threads=256),
        key_of(tmp_path / "d", threads=128, blocks_per_sm=2),
    ]
    assert len(set(keys)) == 4


def test_a_value_that_a_source_takes_from_elsewhere_changes_the_digest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = source_key(program(), "sm_90a")
    monkeypatch.setattr("tests.compile.programs.THREADS", 256)
    assert source_key(program(), "sm_90a") != before


def test_targets_and_constants_change_the_digest() -> None:
    keys = {source_key(program(factor), arch) for factor in (3, 5) for arch in ARCHITECTURES}
    assert len(keys) == 2 * len(ARCHITECTURES)


def test_an_instructions_code_is_part_of_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    from nvfp4.ptx.arith import mul_u32
    from nvfp4.ptx.instruction import Lowering

    before = source_key(program(), "sm_90a")
    with monkeypatch.context() as patch:
        patch.setattr(mul_u32, "lowerings", [Lowering("mul.lo.s32 $0, $1, $2;")])
        changed = source_key(program(), "sm_90a")
    assert changed != before
    assert source_key(program(), "sm_90a") == before
    asm = mul_u32.lowerings[0].asm
    keys = set()
    for where in ({}, {"min_cc": (8, 0)}, {"below": (10, 0)}, {"min_release": (13, 1)}):
        with monkeypatch.context() as patch:
            patch.setattr(mul_u32, "lowerings", [Lowering(asm, **where)])
            keys.add(source_key(program(), "sm_90a"))
    assert len(keys) == 4


def test_the_package_that_compiles_is_part_of_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the package with one file changed has another digest for the same program."""
    digests = []
    monkeypatch.setattr(fingerprint, "_READ_SINCE", 1 << 63)  # as if they had been there before
    for name, edit in {
        "same": "", "compile.py": "#", "_numba.py": "#", "program.py": "#", "ptx/bits.py": "#",
    }.items():  # fmt: skip
        package = tmp_path / name.replace("/", "-")
        (package / "ptx").mkdir(parents=True)
        for file in (ROOT / "nvfp4").glob("*.py"):
            (package / file.name).write_bytes(file.read_bytes())
        for file in (ROOT / "nvfp4" / "ptx").glob("*.py"):
            (package / "ptx" / file.name).write_bytes(file.read_bytes())
        if edit:
            (package / name).write_text((package / name).read_text() + edit)
        monkeypatch.setattr(fingerprint, "_PACKAGE", package)
        fingerprint._package_digest.cache_clear()
        digests.append(fingerprint._package_digest())
    fingerprint._package_digest.cache_clear()
    monkeypatch.undo()
    assert len(set(digests)) == 5
    assert digests[0] == fingerprint._package_digest()
    before = source_key(program(), "sm_90a")
    monkeypatch.setattr(fingerprint, "_package_digest", lambda: digests[1])
    assert source_key(program(), "sm_90a") != before


def test_another_process_finds_the_same_digest() -> None:
    """No address and no order of a set is in it: PYTHONHASHSEED differs from process to process."""
    code = (
        "from nvfp4.fingerprint import source_key\n"
        "from tests.compile.programs import program\n"
        "from tests.compile.test_fingerprint import membership\n"
        "print(source_key(program(adjust=membership), 'sm_90a'))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        for _ in range(3)
    }
    assert found == {source_key(program(adjust=membership), "sm_90a") + "\n"}


def membership(value):
    """Uses a set of strings and integers, whose order depends on the process."""
    return value + (1 if value in {"a", "b", "c", "d", 5, 6, 7} else 0)


# Functions of the user's --------------------------------------------------------------------------


def key(function: Any) -> str:
    return source_key(program(adjust=function), "sm_90a")


def closure(constant: Any) -> Any:
    def function(value):
        return value + constant

    return function


def test_a_process_that_goes_on_with_old_code_keeps_what_it_builds_to_itself(
    tmp_path: Path,
) -> None:
    """An edit, or an upgrade, under a running process: its key is not that of the new sources."""
    shutil.copytree(
        ROOT / "nvfp4", tmp_path / "nvfp4", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = """
        import sys, time
        from nvfp4.fingerprint import source_key
        from nvfp4.kernels.copy import COPY
        if sys.argv[1] == "edit":
            from nvfp4.kernels import copy
            time.sleep(0.02)
            with open(copy.__file__, "a") as file:
                file.write("# edited\\n")
        print(source_key(COPY.program(), "sm_90a"))
    """

    def key(what: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), what],
            cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip

    before, during, after = key("look"), key("edit"), key("look")
    assert len({before, during, after}) == 3
    assert key("look") == after


def test_a_function_defined_anew_has_the_digest_of_its_twin() -> None:
    assert key(closure(1)) == key(closure(1))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (1.0, np.float32(1.0)),
        (np.float32(1.0), np.float64(1.0)),
        (np.float32(1.0), np.float32(1.0000001)),
        ((1, 2), (12,)),
        ("a", b"a"),
        (None, 0),
    ],
    ids=str,
)
def test_values_that_compile_differently_have_different_digests(one: Any, other: Any) -> None:
    assert key(closure(one)) != key(closure(other))


def test_defaults_and_globals_and_called_functions_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def default(value, more=1):
        return value + more

    before = key(default)
    default.__defaults__ = (2,)
    assert key(default) != before

    before = key(uses_globals)
    monkeypatch.setitem(globals(), "LIMIT", 8)
    changed = key(uses_globals)
    assert changed != before
    monkeypatch.setitem(globals(), "called", membership)
    assert key(uses_globals) not in (before, changed)


LIMIT = 7


def called(value):
    return value * LIMIT


def uses_globals(value):
    return called(value) + LIMIT


#: The name of a constant of the kernel; in a user's function it is the user's.
FACTOR = 7


def uses_the_name_of_a_constant(value):
    return value * FACTOR


def test_names_of_the_kernels_constants_in_a_users_function_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = key(uses_the_name_of_a_constant)
    monkeypatch.setitem(globals(), "FACTOR", 8)
    assert key(uses_the_name_of_a_constant) != before


def test_where_a_users_function_stands_in_its_file_does_not_count() -> None:
    def at(lines: int) -> Any:
        scope: dict[str, Any] = {}
        source = "\n" * lines + "def function(value):\n    return value + 1\n"
        exec(compile(source, f"file{lines}.py", "exec"), scope)
        return scope["function"]

    assert key(at(0)) == key(at(20))


def test_an_edit_elsewhere_in_a_users_file_does_not_count(tmp_path: Path) -> None:
    def epilogue(more: str) -> str:
        (tmp_path / "users.py").write_text(f"{more}\ndef function(value):\n    return value + 1\n")
        fingerprint._file_digest.cache_clear()
        try:
            return key(load(tmp_path, "users").function)
        finally:
            sys.modules.pop("users", None)

    assert epilogue("") == epilogue("import math\nOTHER = 5\n")


def test_an_attribute_is_not_taken_for_a_name_of_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The body reads cuda.threadIdx.x: a module's own `x` has nothing to do with it."""
    before = source_key(program(), "sm_90a")
    monkeypatch.setitem(MULTIPLY.body.__globals__, "x", 5)
    assert source_key(program(), "sm_90a") == before


def test_a_function_without_a_file_is_known_by_its_code() -> None:
    def kernel(expression: str) -> Program:
        scope: dict[str, Any] = {}
        exec(f"def body(x):\n    x[0] = {expression}", scope)
        return Kernel("typed", scope["body"], ("i64*",)).program()

    assert source_key(kernel("1"), "sm_80") == source_key(kernel("1"), "sm_80")
    assert source_key(kernel("1"), "sm_80") != source_key(kernel("2"), "sm_80")


def test_a_recursive_function_has_a_digest() -> None:
    def outer() -> Any:
        def function(value):
            return function(value - 1) if value else value

        return function

    assert key(outer()) == key(outer())


def test_every_instruction_has_a_key() -> None:
    """A lowering that holds its own instruction would never end."""
    families = (path.stem for path in (ROOT / "nvfp4" / "ptx").glob("*.py"))
    found = {
        value
        for family in families
        for value in vars(importlib.import_module(f"nvfp4.ptx.{family}")).values()
        if isinstance(value, Instruction)
    }
    assert len(found) > 150
    for one in found:
        assert fingerprint._Description().instruction(one)
