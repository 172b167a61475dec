"""Which file a compiler's shared library is, without loading it.

libNVVM and nvJitLink of a CUDA toolkit or of conda have no version that Python knows: a digest of
the file stands for it. Which file would be loaded, only a search tells that loads it, and perhaps
starts a process: it takes longer than all the rest of a first call. So what was found is kept in
the first directory of the cache, with everything that a search depends on: variables of the
environment, the directories in which it looks, the loader's own cache, and the file. Where any of
that is not as it was then, the library is searched for anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["library_digest"]

_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")
# Where pathfinder looks below a root, and below each directory of Python's packages.
_BELOW_ROOT = ("", "lib", "lib64", "nvvm/lib64", "nvvm/lib")
_BELOW_PACKAGES = (
    "nvidia", "nvidia/cu13/lib", "nvidia/cuda_nvcc/nvvm/lib64", "nvidia/nvjitlink/lib",
)  # fmt: skip
_SYSTEM = (
    "/etc/ld.so.cache", "/lib", "/lib64", "/usr/lib", "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/local/cuda",
)  # fmt: skip
_SONAMES = {
    "nvvm": ("libnvvm.so.4",),
    "nvJitLink": ("libnvJitLink.so.13", "libnvJitLink.so.12"),
}
_FILE = "libraries.json"
_EDGE = 1 << 20


def library_digest(library: str, pathfinder_version: str | None) -> str | None:
    """Identify a shared library by its size and ends (the build id is in the first page).

    Parameters
    ----------
    library : {"nvvm", "nvJitLink"}
    pathfinder_version
        Of the package that searches; another one may find another file.

    Returns
    -------
    str or None
        ``"file:"`` and digits; None where there is no such library.
    """
    # What another package has loaded wins, whatever lies on the disk; searching is then quick.
    directory = None if sys.platform != "linux" or _loaded(library) else _directory()
    if directory is None:
        return _digest(_search(library)[0])
    stamp = _surroundings(library, pathfinder_version)
    known = _read(directory).get(library)
    if isinstance(known, dict) and known.get("stamp") == stamp:
        path, digest = known.get("path"), known.get("digest")
        if isinstance(path, str) and isinstance(digest, str) and known.get("about") == _about(path):
            return digest
        if path is None and "path" in known:
            return None
    path, lasting = _search(library)
    about, digest = _about(path), _digest(path)
    if lasting and (path is None) == (digest is None):
        found = {"about": about, "digest": digest, "path": path, "stamp": stamp}
        _remember(directory, library, found)
    return digest


def _search(library: str) -> tuple[str | None, bool]:
    """The path of a library, which is then loaded, or None; and whether that would be so again."""
    try:
        from cuda import pathfinder

        return str(pathfinder.load_nvidia_dynamic_lib(library).abs_path), True
    except (ImportError, OSError, RuntimeError, TypeError) as error:
        return None, type(error).__name__ == "DynamicLibNotFoundError"


def _digest(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_EDGE)
            file.seek(max(0, size - _EDGE))
            tail = file.read(_EDGE)
    except OSError:
        return None
    return "file:" + hashlib.sha256(b"%d:" % size + head + tail).hexdigest()[:24]


def _loaded(library: str) -> bool:
    """Whether this process has the library; nothing is loaded for the answer."""
    for name in _SONAMES[library]:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return True
    return False


# --- what a search depends on ---------------------------------------------------------------------


def _about(path: str | None) -> list[int] | None:
    """What changes when a file is replaced or written to, or an entry of a directory is made."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _places() -> Iterator[str]:
    """Where a search may look."""
    yield from _SYSTEM
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")]
    for root in (*roots, sys.prefix, sys.base_prefix):
        if root:
            yield from (os.path.join(root, below) for below in _BELOW_ROOT)
    for packages in sys.path:
        yield from (os.path.join(packages, below) for below in _BELOW_PACKAGES)


def _surroundings(library: str, pathfinder_version: str | None) -> str:
    """Digest of all that a search depends on, but the file that it finds."""
    variables = [os.environ.get(name) for name in _VARIABLES]
    places = {place: _about(place) for place in _places()}
    there = [(place, about) for place, about in places.items() if about is not None]
    everything = library, pathfinder_version, variables, there
    return hashlib.sha256(repr(everything).encode()).hexdigest()


# --- what was found -------------------------------------------------------------------------------


def _directory() -> Path | None:
    from .cache import default_cache

    directories = default_cache().directories
    return directories[0] if directories else None


def _read(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads((directory / _FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _remember(directory: Path, library: str, found: dict[str, Any]) -> None:
    from .cache import write

    everything = {**_read(directory), library: found}
    with contextlib.suppress(OSError):  # the cache says so when it keeps a kernel
        write(directory / _FILE, json.dumps(everything, sort_keys=True).encode())
