"""Writing a safetensors file tensor by tensor, without ever having it under its name half-written.

All types and shapes are known before the first byte, so the header is written first and each
tensor's bytes go to their place as they are made, in pieces of any size. The file is made under a
temporary name, with its whole size reserved (a full disk is an error at the start), and renamed
when every byte has been given.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from .container import HEADER_LIMIT, byte_count, file_order
from .errors import CheckpointError, printable

__all__ = ["TensorWriter", "Written", "digest", "write_text"]

TEMPORARY_SUFFIX = ".partial"


@dataclass(frozen=True)
class Written:
    """A finished file: its bytes, and the SHA-256 of all of them."""

    size: int
    sha256: str


def digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """Header bytes, the range of each tensor in the data, and the size of the data."""
    fields: dict[str, Any] = {}
    if metadata:
        fields["__metadata__"] = dict(sorted(metadata.items()))
    ranges: dict[str, tuple[int, int]] = {}
    end = 0
    for name in file_order(tensors):
        dtype, shape = tensors[name]
        start, end = end, end + byte_count(dtype, shape)
        ranges[name] = start, end
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)  # the data then starts at a multiple of 8
    if len(text) > HEADER_LIMIT:
        raise CheckpointError(f"the header would take {len(text)} bytes, over {HEADER_LIMIT}")
    return len(text).to_bytes(8, "little") + text, ranges, end


class TensorWriter:
    """A safetensors file in the making.

    Parameters
    ----------
    path : str or path
        The final name. It comes into being in `commit`.
    tensors : mapping of str to (dtype, shape)
        Every tensor, with the container's dtype names. Their order does not matter: data lie in the
        order of the safetensors package.
    metadata : mapping of str to str, optional

    Raises
    ------
    CheckpointError
        Unknown dtype.
    OSError
        The file cannot be made, or there is no room for all of it.

    Notes
    -----
    As a context manager it commits on a clean exit and leaves nothing behind after an exception.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        header, self._ranges, data = _header(tensors, metadata or {})
        self._data = len(header)
        self.size = self._data + data
        self._next = {name: start for name, (start, _) in self._ranges.items()}
        token = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.temporary = self.path.with_name(f".{self.path.name}.{token}{TEMPORARY_SUFFIX}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
        self._file: int | None = os.open(self.temporary, flags, 0o666)
        try:
            with _named(self.path):
                _reserve(self._file, self.size)
                _write_all(self._file, header, 0)
        except BaseException:
            self.abort()
            raise

    def append(self, name: str, data: Any) -> None:
        """The next bytes of a tensor: an array or bytes-like; pieces of a tensor go in order.

        Raises
        ------
        ValueError
            More bytes than the tensor has, or the file is finished.
        """
        if self._file is None:
            raise ValueError(f"{self.path} is already finished")
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        here = self._next[name]
        if here + len(view) > self._ranges[name][1]:
            start, stop = self._ranges[name]
            raise ValueError(
                f"'{printable(name)}' has {stop - start} bytes; "
                f"{here + len(view) - start} were given"
            )
        with _named(self.path):
            _write_all(self._file, view, self._data + here)
        self._next[name] = here + len(view)

    def commit(self) -> Written:
        """Check that all bytes were given, make them durable, and give the file its name.

        Raises
        ------
        ValueError
            A tensor is incomplete: then no file comes into being.
        """
        if self._file is None:
            raise ValueError(f"{self.path} is already finished")
        try:
            for name, (start, stop) in self._ranges.items():
                if self._next[name] != stop:
                    raise ValueError(
                        f"'{printable(name)}' has {stop - start} bytes; "
                        f"only {self._next[name] - start} were given"
                    )
            with _named(self.path):
                os.fsync(self._file)
            sha256 = digest(self.temporary)
            os.close(self._file)
            self._file = None
            os.replace(self.temporary, self.path)
            sync_folder(self.path.parent)
        except BaseException:
            self.abort()
            raise
        return Written(self.size, sha256)

    def abort(self) -> None:
        """Remove what has been written; does nothing after `commit`."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        with contextlib.suppress(FileNotFoundError):
            self.temporary.unlink()

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        if kind is None:
            self.commit()
        else:
            self.abort()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the system name the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def _reserve(file: int, size: int) -> None:
    """Take the room for the whole file now, where the system can."""
    try:
        os.posix_fallocate(file, 0, size)
    except AttributeError:  # macOS has no such call
        os.ftruncate(file, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(file, size)


def _write_all(file: int, data: Any, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    with contextlib.suppress(OSError):  # some file systems cannot; the rename itself is done
        file = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    token = f"{os.getpid()}-{secrets.token_hex(4)}"
    temporary = path.with_name(f".{path.name}.{token}{TEMPORARY_SUFFIX}")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
