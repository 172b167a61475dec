"""Compilers of a toolkit are known by their files: found once, and again only where it matters."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cuda
import pytest

from nvfp4 import _libraries, toolchain


class DynamicLibNotFoundError(RuntimeError):
    """As pathfinder's."""


class Search:
    """Stands for ``cuda.pathfinder``: finds what a test says, and counts."""

    def __init__(self, path: Path) -> None:
        self.path: Path | None = path
        self.error: type[Exception] = DynamicLibNotFoundError
        self.count = 0

    def load_nvidia_dynamic_lib(self, library: str) -> Any:
        self.count += 1
        if self.path is None:
            raise self.error(library)
        return SimpleNamespace(abs_path=str(self.path))


@pytest.fixture
def search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Search]:
    """A toolkit with a compiler in it, in ``CUDA_HOME``."""
    root = tmp_path / "toolkit"
    (root / "nvvm" / "lib64").mkdir(parents=True)
    file = root / "nvvm" / "lib64" / "libnvvm.so.4"
    file.write_bytes(b"one" * 1000)
    made = Search(file)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", made)
    monkeypatch.setattr(cuda, "pathfinder", made, raising=False)
    monkeypatch.setattr(_libraries, "_loaded", lambda library: False)
    monkeypatch.setenv("CUDA_HOME", str(root))
    yield made


def digest(version: str | None = "1.9") -> str | None:
    return _libraries.library_digest("nvvm", version)


def test_a_library_is_searched_for_once_for_all_processes(search: Search) -> None:
    first = digest()
    assert first is not None and first.startswith("file:")
    assert [digest() for _ in range(3)] == [first] * 3
    assert search.count == 1
    search.path = None
    assert digest() == first and search.count == 1, "nothing has changed"


def test_no_library_is_remembered_too(search: Search) -> None:
    search.path = None
    assert [digest(), digest()] == [None, None]
    assert search.count == 1


def test_a_search_that_failed_for_another_reason_is_made_again(search: Search) -> None:
    path, search.path, search.error = search.path, None, OSError
    assert digest() is None
    search.path = path
    assert digest() is not None and search.count == 2


def _rewritten(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    assert search.path is not None
    before = os.stat(search.path)
    search.path.write_bytes(b"two" * 1000)
    os.utime(search.path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a copy may be made


def _replaced(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    assert search.path is not None
    other = search.path.with_name("other")
    other.write_bytes(b"two" * 1000)
    os.replace(other, search.path)


def _earlier(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another toolkit that a variable names."""
    assert search.path is not None
    home = search.path.parents[3] / "newer"
    (home / "nvvm" / "lib64").mkdir(parents=True)
    search.path = home / "nvvm" / "lib64" / "libnvvm.so.4"
    search.path.write_bytes(b"two" * 1000)
    monkeypatch.setenv("CUDA_PATH", str(home))


def _beside(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file in a directory where it is looked for."""
    assert search.path is not None
    search.path = search.path.with_name("libnvvm.so.5")
    search.path.write_bytes(b"two" * 1000)


def _linked(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is another one now, under the same name."""
    assert search.path is not None
    root = search.path.parents[2]
    root.rename(root.with_name("older"))
    (root / "nvvm" / "lib64").mkdir(parents=True)
    search.path.write_bytes(b"two" * 1000)


@pytest.mark.parametrize("change", [_rewritten, _replaced, _earlier, _beside, _linked])
def test_whatever_may_change_what_is_found_starts_a_search(
    change: Any, search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest()
    change(search, monkeypatch)
    after = digest()
    assert search.count == 2
    assert after is not None and after != before


def test_another_version_of_what_searches_and_another_environment_start_a_search(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert digest("1.9") == digest("1.10")
    assert search.count == 2
    monkeypatch.setenv("LD_PRELOAD", "libother.so")
    assert digest("1.10") == digest("1.10")
    assert search.count == 3


def test_a_library_that_another_package_loaded_is_asked_for_itself(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digest()
    monkeypatch.setattr(_libraries, "_loaded", lambda library: True)
    search.path = tmp_path / "theirs.so"
    search.path.write_bytes(b"theirs")
    theirs = digest()
    assert theirs not in (None, before)
    monkeypatch.setattr(_libraries, "_loaded", lambda library: False)
    assert digest() == before, "what one process had loaded says nothing about another"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"nvvm": 5}', '{"nvvm": {"path": 5}}', "\xff"], ids=range(5)
)
def test_a_damaged_note_is_replaced(text: str, search: Search, cache_directory: Path) -> None:
    before = digest()
    (cache_directory / "libraries.json").write_text(text)
    assert digest() == before and search.count == 2
    assert digest() == before and search.count == 2
    assert set(json.loads((cache_directory / "libraries.json").read_text())) == {"nvvm"}


def test_a_cache_that_cannot_be_written_to_costs_a_search_each_time(
    search: Search, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NVFP4_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert digest() == digest()
    assert search.count == 2


def test_only_a_library_without_package_metadata_is_looked_for(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolchain.installed.cache_clear()
    try:
        toolchain.installed()
        assert search.count == 0
        real = importlib.metadata.distribution

        def distribution(name: str) -> importlib.metadata.Distribution:
            if name in ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"):
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)

        monkeypatch.setattr(importlib.metadata, "distribution", distribution)
        for _ in range(2):
            toolchain.installed.cache_clear()
            found = dict(toolchain.installed())["nvvm"]
            assert found == digest(importlib.metadata.version("cuda-pathfinder"))
        assert search.count == 1
    finally:
        toolchain.installed.cache_clear()


def test_asking_whether_a_library_is_loaded_loads_none() -> None:
    code = (
        "from nvfp4 import _libraries as l\n"
        "print(l._loaded('nvvm'), l._loaded('nvJitLink'))\n"
        "from cuda import pathfinder\n"
        "pathfinder.load_nvidia_dynamic_lib('nvvm')\n"
        "print(l._loaded('nvvm'), l._loaded('nvJitLink'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True", "False"]
