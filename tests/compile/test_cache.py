from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nvfp4 import cache as cache_module
from nvfp4 import compile as compiler
from nvfp4 import toolchain
from nvfp4.cache import Cache, decode, default_cache, encode
from nvfp4.cubin import Binary
from nvfp4.program import Program

from .programs import CHAIN, program

ARCH = "sm_90a"
ROOT = Path(__file__).resolve().parents[2]

# Not machine code: these tests are about files.
STAND_IN = Binary(
    "multiply[FACTOR=3]", ARCH, "entry", bytes(range(256)) * 8, 10, 0, 16, (4, 8),
    ("a line", "another"), (("numba", "1"), ("nvvm", None)),
)  # fmt: skip


def only_file(directory: Path) -> Path:
    """The one file of a cache; anything beside it (a temporary one left over) is an error."""
    (file,) = [path for path in directory.rglob("*") if not path.is_dir()]
    return file


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that other compilers are installed: ``installed(nvvm="14.0")``."""
    real = dict(toolchain.installed())

    def pretend(**versions: str | None) -> None:
        changed = tuple((real | {k.replace("_", "-"): v for k, v in versions.items()}).items())
        monkeypatch.setattr(toolchain, "installed", lambda: changed)
        cache_module._compilers_key.cache_clear()

    yield pretend
    cache_module._compilers_key.cache_clear()


def run_python(code: str, *, directory: Path, count: int = 1) -> list[subprocess.Popen[str]]:
    """Start `count` Python processes at once and wait for them; each must succeed."""
    environment = os.environ | {"NVFP4_CACHE_DIR": str(directory), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
            env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(count)
    ]  # fmt: skip
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, out + err
        process.out = out  # type: ignore[attr-defined]
    return processes


# Hits ---------------------------------------------------------------------------------------------


def test_a_binary_comes_back_from_memory_and_from_disk_as_it_was(cache_directory: Path) -> None:
    first = Cache([cache_directory])
    assert first.find(program(), ARCH) is None
    path = first.store(program(), ARCH, STAND_IN)
    assert path == only_file(cache_directory)
    assert first.find(program(), ARCH) is STAND_IN
    assert Cache([cache_directory]).find(program(), ARCH) == STAND_IN


def test_other_constants_functions_and_targets_are_other_entries(cache_directory: Path) -> None:
    cache = Cache([cache_directory])
    cache.store(program(), ARCH, STAND_IN)
    assert cache.find(program(5), ARCH) is None
    assert cache.find(program(), "sm_80") is None
    assert cache.find(program(adjust=lambda value: value + 1), ARCH) is None
    assert cache.find(CHAIN.program(), ARCH) is None
    assert cache.find(program(), ARCH) is STAND_IN


def test_a_hit_on_disk_imports_no_compiler(cache_directory: Path) -> None:
    code = """
        import sys
        from nvfp4 import compile
        from tests.compile.programs import program
        binary = compile.build(program(), "sm_90a")
        heavy = ("numba", "llvmlite", "cuda.core", "cuda.bindings.nvvm", "cuda.bindings.nvjitlink")
        print(binary.registers, [name for name in heavy if name in sys.modules])
    """
    (first,) = run_python(code, directory=cache_directory)
    assert "'numba', 'llvmlite', 'cuda.core'" in first.out
    (second,) = run_python(code, directory=cache_directory)
    assert second.out.split()[1:] == ["[]"]
    assert second.out.split()[0] == first.out.split()[0]


def test_an_upgraded_compiler_builds_anew(
    cache_directory: Path, installed: Callable[..., None]
) -> None:
    Cache([cache_directory]).store(program(), ARCH, STAND_IN)
    for change in (
        {"numba": "9.9"}, {"numba_cuda": "9.9"}, {"llvmlite": "9.9"}, {"nvvm": "99.1"},
        {"nvjitlink": "99.1"},
    ):  # fmt: skip
        installed(**change)
        assert Cache([cache_directory]).find(program(), ARCH) is None, change
    installed()
    assert Cache([cache_directory]).find(program(), ARCH) == STAND_IN


# Prebuilt directories -----------------------------------------------------------------------------


def test_directories_after_the_first_are_only_read(tmp_path: Path) -> None:
    prebuilt, own = tmp_path / "prebuilt", tmp_path / "own"
    Cache([prebuilt]).store(program(), ARCH, STAND_IN)
    cache = Cache([own, prebuilt])
    assert cache.find(program(), ARCH) == STAND_IN
    cache.store(program(5), ARCH, STAND_IN)
    assert only_file(own).name != only_file(prebuilt).name


def test_the_variable_is_a_list_of_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NVFP4_CACHE_DIR", os.pathsep.join(["~/a", "", str(tmp_path / "b")]))
    assert default_cache().directories == (tmp_path / "a", tmp_path / "b")
    assert default_cache() is default_cache()


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"HOME": "/h"}, "/h/.cache/nvfp4"),
        ("linux", {"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/nvfp4"),
        ("darwin", {"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/Library/Caches/nvfp4"),
        ("win32", {"HOME": "/h", "LOCALAPPDATA": "/l"}, "/l/nvfp4/cache"),
    ],
)
def test_by_default_it_is_the_platforms_user_cache(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NVFP4_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    cache_module._cache_of.cache_clear()
    try:
        assert default_cache().directories == (Path(expected),)
    finally:
        cache_module._cache_of.cache_clear()


def test_without_compilers_a_binary_of_the_same_sources_is_taken(
    tmp_path: Path, installed: Callable[..., None]
) -> None:
    Cache([tmp_path / "prebuilt"]).store(program(), ARCH, STAND_IN)
    installed(nvvm=None)
    server = Cache([tmp_path / "own", tmp_path / "prebuilt"])
    assert server.find(program(), ARCH) == STAND_IN
    assert server.find(program(5), ARCH) is None


def test_a_prebuilt_directory_serves_a_process_that_can_import_no_compiler(
    cache_directory: Path,
) -> None:
    compiler.build(program(), ARCH)
    code = """
        import importlib.metadata, sys
        real = importlib.metadata.version
        def version(name):
            if name.startswith(("numba", "llvmlite", "nvidia-nvvm")):
                raise importlib.metadata.PackageNotFoundError(name)
            return real(name)
        importlib.metadata.version = version
        for name in ("numba", "llvmlite", "cuda"):
            sys.modules[name] = None
        from nvfp4 import compile
        from tests.compile.programs import program
        print(compile.build(program(), "sm_90a").label)
    """
    (server,) = run_python(code, directory=cache_directory)
    assert server.out.strip() == "multiply[FACTOR=3]"


# Damage -------------------------------------------------------------------------------------------


def test_a_file_cut_off_anywhere_is_no_binary() -> None:
    data = encode(STAND_IN, "key")
    assert decode(data, "key") == STAND_IN
    for length in [*range(80), *range(80, len(data), 97), len(data) - 1]:
        with pytest.raises(ValueError):
            decode(data[:length], "key")
    with pytest.raises(ValueError, match="announced"):
        decode(data + b"\0", "key")


def test_a_file_with_any_bit_changed_is_no_binary() -> None:
    data = encode(STAND_IN, "key")
    for place in [*range(60), *range(60, len(data), 101)]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(ValueError):
            decode(bytes(damaged), "key")


def test_a_file_of_other_sources_is_not_taken() -> None:
    with pytest.raises(ValueError, match="other sources"):
        decode(encode(STAND_IN, "key"), "another key")


@pytest.mark.parametrize(
    "content",
    [b"", b"nvfp4bin", b"\x7fELF" + bytes(5000), b"{}", None],
    ids=["empty", "cut off", "foreign", "text", "half"],
)
def test_a_damaged_file_is_reported_rebuilt_and_replaced(
    content: bytes | None, cache_directory: Path
) -> None:
    built = compiler.build(program(), ARCH, cache=Cache([cache_directory]))
    file = only_file(cache_directory)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.warns(RuntimeWarning, match=f"{file.name} is ignored and built anew"):
        again = compiler.build(program(), ARCH, cache=Cache([cache_directory]))
    assert again.registers == built.registers
    assert only_file(cache_directory) == file
    assert decode(file.read_bytes(), whole_source(file)) == again
    assert Cache([cache_directory]).find(program(), ARCH) == again


def whole_source(file: Path) -> str:
    """The digest of sources that a file's name begins with, in full."""
    from nvfp4.fingerprint import source_key

    key = source_key(program(), ARCH)
    assert key[:32] in file.name
    return key


def test_a_damaged_prebuilt_file_does_not_hide_a_whole_one(tmp_path: Path) -> None:
    for name in ("first", "second", "third"):
        Cache([tmp_path / name]).store(program(), ARCH, STAND_IN)
    only_file(tmp_path / "second").write_bytes(b"torn")
    only_file(tmp_path / "first").unlink()
    cache = Cache([tmp_path / name for name in ("first", "second", "third")])
    with pytest.warns(RuntimeWarning, match="no file of this cache"):
        assert cache.find(program(), ARCH) == STAND_IN


def test_a_directory_in_the_place_of_a_file_is_reported(cache_directory: Path) -> None:
    cache = Cache([cache_directory])
    path = cache.store(program(), ARCH, STAND_IN)
    assert path is not None
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert Cache([cache_directory]).find(program(), ARCH) is None


# Directories that cannot be written to ------------------------------------------------------------


def test_a_directory_that_cannot_be_made_falls_back_to_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = Cache([tmp_path / "file" / "cache"])
    with pytest.warns(RuntimeWarning, match=r"cannot write to .*file/cache.*NVFP4_CACHE_DIR"):
        built = compiler.build(program(), ARCH, cache=cache)
    assert compiler.build(program(), ARCH, cache=cache) is built
    # Said once, not for every kernel: warnings are errors here.
    compiler.build(program(5), ARCH, cache=cache)
    assert compiler.find(program(5), ARCH, cache=cache) is not None


def test_a_read_only_directory_falls_back_to_memory(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Permission bits do not stop root, so the refusal is the operating system's, made here."""
    Cache([cache_directory]).store(program(5), ARCH, STAND_IN)
    real = os.open

    def refuse(path, flags, *more, **options):
        if flags & os.O_CREAT:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    cache = Cache([cache_directory])
    with pytest.warns(RuntimeWarning, match="Permission denied"):
        assert cache.store(program(), ARCH, STAND_IN) is None
    assert cache.find(program(), ARCH) is STAND_IN
    assert cache.find(program(5), ARCH) == STAND_IN


def test_a_full_disk_leaves_no_half_file(
    cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert Cache([cache_directory]).store(program(), ARCH, STAND_IN) is None
    assert [path for path in cache_directory.rglob("*") if path.is_file()] == []


def test_a_cache_filled_by_one_user_can_be_read_by_others(cache_directory: Path) -> None:
    before = os.umask(0o022)
    try:
        path = Cache([cache_directory]).store(program(), ARCH, STAND_IN)
    finally:
        os.umask(before)
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o644


# Several at once ----------------------------------------------------------------------------------


def test_two_processes_of_four_threads_build_the_same_programs(cache_directory: Path) -> None:
    code = """
        import threading
        from nvfp4 import compile
        from tests.compile.programs import program
        start = threading.Barrier(4)
        done = []
        def work(first):
            start.wait()
            for factor in (first, 3, 5):
                done.append((factor, compile.build(program(factor), "sm_90a")))
        threads = [threading.Thread(target=work, args=(f,)) for f in (3, 5, 7, 3)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert len(done) == 12
        # Within a process each was built once, whoever asked.
        assert len({(factor, id(binary)) for factor, binary in done}) == 3
        print("whole")
    """
    processes = run_python(code, directory=cache_directory, count=2)
    assert [process.out.strip() for process in processes] == ["whole", "whole"]
    files = [path for path in cache_directory.rglob("*") if path.is_file()]
    assert len(files) == 3 and all(path.suffix == ".nvfp4" for path in files)
    fresh = Cache([cache_directory])
    for factor in (3, 5, 7):
        assert fresh.find(program(factor), ARCH) is not None


def test_a_reader_sees_a_whole_file_or_none_while_another_writes(cache_directory: Path) -> None:
    source = whole_source(Cache([cache_directory]).store(program(), ARCH, STAND_IN))
    file = only_file(cache_directory)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            Cache([cache_directory]).store(program(), ARCH, STAND_IN)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(2000):
            assert decode(file.read_bytes(), source) == STAND_IN
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_threads_that_ask_for_different_programs_each_get_their_own(
    cache_directory: Path,
) -> None:
    results: dict[int, str] = {}

    def work(factor: int) -> None:
        made: Program = program(factor)
        results[factor] = compiler.build(made, ARCH).label

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (2, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {factor: f"multiply[FACTOR={factor}]" for factor in (2, 3, 5, 7)}
