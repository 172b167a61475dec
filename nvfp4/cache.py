"""Built kernels kept in memory and on disk.

``NVFP4_CACHE_DIR`` is a list of directories, separated as PATH is. The first is read and written,
the others only read: that is where the results of ``nvfp4 compile -o DIR`` go on a server. By
default it is one directory in the platform's user cache.

A file is found by two digests in its name: that of the sources (``nvfp4.fingerprint``) and that of
the compilers' versions. Where compilers are installed both must match, so that neither an edit nor
an upgrade ever meets a stale binary. Where they are not (a server that only runs), nothing else
could be built, and any file made from the very same sources is taken.

Files are written under another name and renamed, so that a reader sees a whole file or none,
whatever other processes do; each carries its length and checksum. One that is cut off or foreign
is reported with a warning, ignored, and replaced. A directory that cannot be written to costs a
warning, once, and kernels stay in memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import struct
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from . import toolchain
from .cubin import Binary
from .fingerprint import source_key
from .program import Program

__all__ = ["Cache", "decode", "default_cache", "encode", "write"]

_MAGIC = b"nvfp4bin"
_VERSION = 1
# Magic, version, length of the description, length of the machine code, SHA-256 of both.
_HEADER = struct.Struct("<8sIIQ32s")
_FIELDS = (
    "label", "arch", "entry", "registers", "shared_bytes", "stack_bytes", "spill_bytes", "log",
    "compilers",
)  # fmt: skip


# --- the file -------------------------------------------------------------------------------------


def encode(binary: Binary, source: str) -> bytes:
    """A cache file's bytes; `source` is the digest of what `binary` was built from."""
    fields = {name: getattr(binary, name) for name in _FIELDS}
    text = json.dumps({"source": source, **fields}, sort_keys=True).encode()
    content = text + binary.cubin
    digest = hashlib.sha256(content).digest()
    return _HEADER.pack(_MAGIC, _VERSION, len(text), len(binary.cubin), digest) + content


def decode(data: bytes, source: str) -> Binary:
    """The binary in a cache file.

    Raises
    ------
    ValueError
        The file is cut off, damaged, no cache file at all, or of other sources than `source`.
    """
    if len(data) < _HEADER.size or data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("no file of this cache")
    _, version, text_bytes, code_bytes, digest = _HEADER.unpack_from(data)
    if version != _VERSION:
        raise ValueError(f"version {version} of the file format; this is version {_VERSION}")
    content = data[_HEADER.size :]
    if len(content) != text_bytes + code_bytes:
        raise ValueError(f"{len(content)} bytes where {text_bytes + code_bytes} are announced")
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("the checksum does not match")
    fields: dict[str, Any] = json.loads(content[:text_bytes])
    if fields.pop("source") != source:
        raise ValueError("made from other sources")
    fields["spill_bytes"] = tuple(fields["spill_bytes"])
    fields["log"] = tuple(fields["log"])
    fields["compilers"] = tuple(map(tuple, fields["compilers"]))
    return Binary(cubin=content[text_bytes:], **fields)


# --- the cache ------------------------------------------------------------------------------------


class Cache:
    """Binaries by program and target.

    Parameters
    ----------
    directories
        The first is read and written, the others only read; none: memory only.
    """

    def __init__(self, directories: Sequence[str | os.PathLike[str]] = ()) -> None:
        self.directories = tuple(Path(directory) for directory in directories)
        self._memory: dict[tuple[str, str], Binary] = {}
        self._unwritable = False

    def find(self, program: Program, arch: str) -> Binary | None:
        """The binary of a program, None if there is none in memory nor on disk."""
        source, compilers = source_key(program, arch), _compilers_key()
        binary = self._memory.get((source, compilers))
        if binary is None:
            binary = self._read(program, arch, source, compilers)
            if binary is not None:
                binary = self._memory.setdefault((source, compilers), binary)
        return binary

    def store(self, program: Program, arch: str, binary: Binary) -> Path | None:
        """Keep a binary; returns its file, None where it is in memory only."""
        source, compilers = source_key(program, arch), _compilers_key()
        self._memory[source, compilers] = binary
        if not self.directories or self._unwritable:
            return None
        path = self.directories[0] / _file_name(program, arch, source, compilers)
        try:
            write(path, encode(binary, source))
        except OSError as error:
            self._unwritable = True
            warnings.warn(
                f"cannot write to the kernel cache {self.directories[0]} "
                f"({error.strerror or error}): kernels stay in memory, and the next process builds "
                "them again; NVFP4_CACHE_DIR names another directory",
                RuntimeWarning,
                stacklevel=3,
            )
            return None
        return path

    def _read(self, program: Program, arch: str, source: str, compilers: str) -> Binary | None:
        name = _file_name(program, arch, source, compilers)
        for directory in self.directories:
            for path in _candidates(directory / name, source, compilers):
                try:
                    return decode(path.read_bytes(), source)
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except (OSError, ValueError, TypeError, KeyError) as error:
                    warnings.warn(
                        f"kernel cache: {path} is ignored and built anew: {error}",
                        RuntimeWarning,
                        stacklevel=4,
                    )
        return None


def _candidates(path: Path, source: str, compilers: str) -> Iterator[Path]:
    yield path
    if not compilers:
        # No compiler here: whatever was made from these sources, by name for a fixed order.
        with contextlib.suppress(OSError):
            yield from sorted(path.parent.glob(f"*-{source[:32]}-*.nvfp4"))


def _file_name(program: Program, arch: str, source: str, compilers: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]", "_", program.kernel.name)
    return f"{arch}/{name}-{source[:32]}-{compilers[:16] or 'any'}.nvfp4"


@functools.cache
def _compilers_key() -> str:
    """Digest of the compilers' versions, empty where one is missing."""
    versions = toolchain.installed()
    if any(version is None for _, version in versions):
        return ""
    return hashlib.sha256(repr(versions).encode()).hexdigest()


def write(path: Path, data: bytes) -> None:
    """Write a whole file or none: under another name, then renamed."""
    import secrets  # not needed by a process that only reads

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    # 0o666 and the user's umask: a cache that root fills in an image is read by another user.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    handle = os.open(partial, flags, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


# --- the default ----------------------------------------------------------------------------------


def default_cache() -> Cache:
    """The cache that ``NVFP4_CACHE_DIR`` names, or the one in the user's cache directory."""
    return _cache_of(os.environ.get("NVFP4_CACHE_DIR", ""))


@functools.cache
def _cache_of(variable: str) -> Cache:
    named = [part for part in variable.split(os.pathsep) if part]
    if named:
        return Cache([Path(part).expanduser() for part in named])
    user = _user_directory()
    return Cache([user] if user is not None else [])


def _user_directory() -> Path | None:
    """The platform's directory for a user's caches; None where there is no home."""
    try:
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA")
            return (Path(base) if base else Path.home() / "AppData" / "Local") / "nvfp4" / "cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "nvfp4"
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "nvfp4"
    except RuntimeError:
        return None
