"""The rules of this project that no linter knows. Run by ``make lint``.

``tests/test_lint_rules.py`` proves that each is caught.

* ``numba``: only ``nvfp4/_numba.py`` imports numba or llvmlite, so that everything else works
  where they are absent.
* ``assert``: no ``assert`` statement in ``nvfp4/`` outside ``nvfp4/kernels/``: a user's mistake
  gets a message.
* ``float``: float literals in ``nvfp4/kernels/`` are arguments of ``np.float32``, else they are
  float64 on the card.
* ``seed``: no ``default_rng()`` without a seed: a failing test must fail again.
* ``path``: no absolute path of somebody's machine in any file.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

FOLDERS = ("nvfp4", "tests", "props", "examples", "docs", ".ci")
SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".yml", ".yaml", ".sh", ".cfg", ""}

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|tmp|root|home|farm|opt/pypi[\w-]*)/[\w.]")


class Finding(NamedTuple):
    """One violation: where, which rule, and what to do instead."""

    path: str
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def check(path: str, text: str) -> list[Finding]:
    """All findings in one file; `path` is relative to the repository root, with forward slashes."""
    found = [
        Finding(path, number, "path", f"names a path of one machine: {match.group()!r}...")
        for number, line in enumerate(text.splitlines(), 1)
        for match in MACHINE_PATH.finditer(line)
    ]
    if path.endswith(".py"):
        found += _check_python(path, ast.parse(text, path))
    return sorted(found, key=lambda f: (f.line, f.rule))


def _check_python(path: str, tree: ast.Module) -> Iterator[Finding]:
    parts = PurePosixPath(path).parts
    package = parts[0] == "nvfp4"
    kernels = parts[:2] == ("nvfp4", "kernels")
    in_float32 = _arguments_of_float32(tree)
    for node in ast.walk(tree):
        if package and path != "nvfp4/_numba.py":
            for name in _imported(node):
                if name.split(".")[0] in ("numba", "llvmlite"):
                    yield _at(path, node, "numba", f"imports {name}; use nvfp4/_numba.py")
        if package and not kernels and isinstance(node, ast.Assert):
            yield _at(path, node, "assert", "raise TypeError or ValueError with a message")
        if kernels and isinstance(node, ast.Constant) and isinstance(node.value, float):
            if id(node) not in in_float32:
                yield _at(path, node, "float", f"write np.float32({node.value!r})")
        if isinstance(node, ast.Call) and _name(node.func) == "default_rng" and _unseeded(node):
            yield _at(path, node, "seed", "give default_rng a seed")


def _at(path: str, node: ast.AST, rule: str, message: str) -> Finding:
    return Finding(path, getattr(node, "lineno", 0), rule, message)


def _name(node: ast.expr) -> str:
    """The last name of ``a.b.c``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _imported(node: ast.AST) -> list[str]:
    """The modules that a statement, or a call of ``import_module``, imports by name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module and not node.level else []
    if isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            return [first.value]
    return []


def _arguments_of_float32(tree: ast.Module) -> set[int]:
    """Identities of the literals in ``np.float32(-1.5)`` and ``np.float32(2.0**-126)``.

    An expression of literals alone is folded before it is rounded; one with a variable in it is
    computed as float64 on the card.
    """
    allowed: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "float32":
            for argument in node.args:
                parts = list(ast.walk(argument))
                if all(isinstance(part, _CONSTANT_PARTS) for part in parts):
                    allowed.update(map(id, parts))
    return allowed


_CONSTANT_PARTS = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop)


def _unseeded(call: ast.Call) -> bool:
    values = call.args + [keyword.value for keyword in call.keywords]
    return not values or (isinstance(values[0], ast.Constant) and values[0].value is None)


def files(root: Path) -> Iterator[Path]:
    """The text files that the rules are about: the folders above and the files beside them."""
    for folder in FOLDERS:
        yield from sorted((root / folder).rglob("*"))
    yield from sorted(root.glob("*"))


def check_tree(root: Path) -> tuple[list[Finding], int]:
    """All findings below `root`, and how many files were read."""
    found: list[Finding] = []
    count = 0
    for file in files(root):
        if not file.is_file() or "__pycache__" in file.parts or file.suffix not in SUFFIXES:
            continue
        found += check(file.relative_to(root).as_posix(), file.read_text(encoding="utf-8"))
        count += 1
    return found, count


def main() -> int:
    """Print the findings of the tree around this file; 1 if there are any."""
    found, count = check_tree(Path(__file__).resolve().parent.parent)
    for finding in found:
        print(finding)
    print(f"{len(found)} findings in {count} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
