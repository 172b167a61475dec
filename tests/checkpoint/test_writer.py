"""The safetensors writer: the library's bytes, and nothing under the name before all are there."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from nvfp4.checkpoint import CheckpointError, TensorFile, TensorWriter
from nvfp4.checkpoint import writer as writer_module
from nvfp4.checkpoint.writer import digest
from tests.checkpoint.helpers import ROOT

ARRAYS = {
    "b": np.arange(6, dtype="float32").reshape(2, 3),
    "a": np.arange(5, dtype="uint8"),
    "c": np.arange(4, dtype="int64"),
    "é": np.ones((2, 2), ml_dtypes.bfloat16),
    "scalar": np.array(2.5, "float32"),
    "none": np.zeros((0, 3), "float16"),
}
TYPES = {"float32": "F32", "uint8": "U8", "int64": "I64", "bfloat16": "BF16", "float16": "F16"}
DECLARED = {n: (TYPES[a.dtype.name], a.shape) for n, a in ARRAYS.items()}


def write(path: Path, metadata: dict[str, str] | None = None) -> None:
    with TensorWriter(path, DECLARED, metadata) as writer:
        for name, array in ARRAYS.items():
            writer.append(name, array)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_has_the_bytes_that_the_library_gives(
    metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    write(tmp_path / "a.safetensors", metadata)
    assert (tmp_path / "a.safetensors").read_bytes() == save(ARRAYS, metadata)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_pieces_of_several_tensors_may_come_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    rng = np.random.default_rng(1)
    x, y = rng.bytes(1000), rng.bytes(300)
    with TensorWriter(path, {"x": ("U8", (1000,)), "y": ("U8", (300,))}) as writer:
        for i in range(10):
            writer.append("y", y[i * 30 : i * 30 + 30])
            writer.append("x", x[i * 100 : i * 100 + 100])
        written = writer.commit()
    assert written.size == path.stat().st_size
    assert written.sha256 == digest(path)
    with TensorFile(path) as file:
        assert file.raw("x").tobytes() == x
        assert file.raw("y").tobytes() == y


def test_too_many_or_too_few_bytes_leave_no_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with pytest.raises(ValueError, match="'x' has 4 bytes; 5 were given"):
        with TensorWriter(path, {"x": ("U8", (4,))}) as writer:
            writer.append("x", b"12345")
    with pytest.raises(ValueError, match="only 3 were given"):
        with TensorWriter(path, {"x": ("U8", (4,))}) as writer:
            writer.append("x", b"123")
    assert list(tmp_path.iterdir()) == []


def test_an_exception_leaves_what_was_there_before(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        with TensorWriter(path, {"x": ("U8", (4,))}) as writer:
            writer.append("x", b"1234")
            raise KeyboardInterrupt
    assert path.read_bytes() == b"before"
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_an_unknown_type_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown dtype 'F3'"):
        TensorWriter(tmp_path / "a.safetensors", {"x": ("F3", (4,))})
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_an_error_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer_module.os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left.*a\.safetensors"):
        TensorWriter(tmp_path / "a.safetensors", {"x": ("U8", (4,))})
    assert list(tmp_path.iterdir()) == []


def test_a_system_without_reservations_still_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(file: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(writer_module.os, "posix_fallocate", unsupported)
    write(tmp_path / "a.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == save(ARRAYS)


def test_a_limit_on_file_sizes_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        "from nvfp4.checkpoint import TensorWriter\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    with TensorWriter(sys.argv[1], {'x': ('U8', (100_000,))}) as w:\n"
        "        w.append('x', bytes(100_000))\n"
        "except OSError as error: print('errno', error.errno)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.safetensors")],
        capture_output=True, text=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert done.stdout == f"errno {errno.EFBIG}\n", done.stderr
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def test_a_killed_process_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from nvfp4.checkpoint import TensorWriter\n"
        "w = TensorWriter(sys.argv[1], {'x': ('U8', (100_000,))})\n"
        "w.append('x', bytes(99_999))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "a.safetensors"
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not path.exists()
    assert all(p.name.endswith(".partial") for p in tmp_path.iterdir())


def test_the_temporary_file_never_follows_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = tmp_path / "a.safetensors"
    path.symlink_to(victim)
    save_file({"x": np.zeros(4, "uint8")}, tmp_path / "other.safetensors")
    with TensorWriter(path, {"x": ("U8", (4,))}) as writer:
        writer.append("x", b"1234")
    assert victim.read_bytes() == b"precious"
    assert not path.is_symlink()
