from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvfp4 import _numba, toolchain
from nvfp4 import compile as compiler
from nvfp4.errors import ToolchainError

from .programs import program

REMEMBERED = (toolchain.installed, toolchain.nvvm_release, toolchain.check_compilers)


@pytest.fixture(autouse=True)
def ask_anew() -> Iterator[None]:
    """What was found out about the compilers is forgotten before and after each test."""

    for function in REMEMBERED:
        function.cache_clear()
    yield
    for function in REMEMBERED:
        function.cache_clear()


def test_the_versions_of_all_compilers_are_known() -> None:
    versions = dict(toolchain.installed())
    assert list(versions) == ["numba", "numba-cuda", "llvmlite", "nvvm", "nvjitlink"]
    assert all(versions.values())
    assert versions["numba-cuda"] == importlib.metadata.version("numba-cuda")


def test_a_version_is_the_one_that_python_reads_from_the_packages_headers() -> None:
    names = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in names}
    assert {name: toolchain._metadata(name) for name in names} == versions


@pytest.mark.parametrize(
    ("headers", "version"),
    [
        ("Metadata-Version: 2.1\nName: a\nVersion: 1.2.3\nSummary: b\n\nVersion: 9\n", "1.2.3"),
        ("Name: a\nversion:4\n", "4"),
    ],
)
def test_a_version_in_the_description_of_a_package_is_not_its_version(
    headers: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found(importlib.metadata.Distribution):
        def read_text(self, filename: str) -> str:
            return headers

        def locate_file(self, path: object) -> Path:
            raise NotImplementedError

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Found())
    assert toolchain._metadata("a") == version


def test_releases_are_asked_of_the_libraries_and_agree_with_the_packages() -> None:
    versions = dict(toolchain.installed())
    for release, name in (
        (toolchain.nvvm_release(), "nvvm"), (toolchain.nvjitlink_release(), "nvjitlink"),
    ):  # fmt: skip
        assert release is not None
        assert str(versions[name]).startswith("{}.{}.".format(*release))
    toolchain.check_compilers()


@pytest.mark.parametrize(
    ("nvvm", "nvjitlink", "fits"),
    [
        ((13, 0), (13, 0), True),
        ((13, 0), (13, 5), True),
        ((13, 5), (13, 0), False),
        ((13, 1), (13, 0), False),
        ((12, 9), (13, 0), False),
        ((14, 0), (13, 9), False),
    ],
)
def test_nvjitlink_must_not_be_older_than_nvvm_nor_of_another_major(
    nvvm: tuple[int, int],
    nvjitlink: tuple[int, int],
    fits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(toolchain, "nvvm_release", lambda: nvvm)
    monkeypatch.setattr(toolchain, "nvjitlink_release", lambda: nvjitlink)
    if fits:
        toolchain.check_compilers()
        return
    with pytest.raises(ToolchainError) as caught:
        toolchain.check_compilers()
    text = str(caught.value)
    assert "NVVM {}.{}".format(*nvvm) in text
    assert "nvJitLink {}.{}".format(*nvjitlink) in text
    assert "pip install 'nvidia-nvvm=={}.{}.*'".format(*nvjitlink) in text


def test_a_pair_that_does_not_fit_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "nvvm_release", lambda: (13, 5))
    monkeypatch.setattr(toolchain, "nvjitlink_release", lambda: (13, 0))
    with pytest.raises(ToolchainError, match=r"nvJitLink 13\.0 cannot read LTO-IR of NVVM 13\.5"):
        compiler.build(program(), "sm_90a")


@pytest.mark.parametrize("module", ["cuda.bindings", "cuda.bindings.nvvm"])
def test_a_missing_nvvm_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr("cuda.bindings.nvvm", raising=False)
    with pytest.raises(ToolchainError, match=r"libNVVM.*pip install 'nvfp4\[compile\]'"):
        compiler.build(program(), "sm_90a")


def test_a_missing_nvjitlink_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvjitlink", None)
    monkeypatch.delattr("cuda.bindings.nvjitlink", raising=False)
    with pytest.raises(ToolchainError, match=r"nvJitLink.*pip install 'nvfp4\[compile\]'"):
        compiler.build(program(), "sm_90a")


def test_a_compiler_without_package_metadata_is_known_by_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.metadata.distribution

    def distribution(name: str) -> importlib.metadata.Distribution:
        if name.startswith("nvidia-"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    versions = dict(toolchain.installed())
    assert str(versions["nvvm"]).startswith("file:")
    assert str(versions["nvjitlink"]).startswith("file:")
    assert versions["nvvm"] != versions["nvjitlink"]


def test_a_compiler_that_is_nowhere_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.delattr("cuda.pathfinder", raising=False)
    assert set(dict(toolchain.installed()).values()) == {None}


def test_a_missing_numba_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _numba.numba_cuda.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    try:
        with pytest.raises(ToolchainError, match=r"pip install 'numba-cuda>=0\.30\.4,<0\.31'"):
            compiler.build(program(), "sm_90a")
    finally:
        _numba.numba_cuda.cache_clear()


def test_a_cuda_library_that_numba_does_not_find_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.pathfinder import DynamicLibNotFoundError

    def fail(*_: object, **__: object) -> None:
        raise DynamicLibNotFoundError("Failure finding libnvrtc.so.13\n  listdir(...)")

    monkeypatch.setattr(_numba, "compile_to_ltoir", fail)
    message = r"needs a CUDA library: Failure finding libnvrtc.*pip install 'nvfp4\[compile\]'"
    with pytest.raises(ToolchainError, match=message):
        compiler.build(program(), "sm_90a")
