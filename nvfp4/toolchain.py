"""The compilers on this machine: versions, whether they fit together, and tools to read code.

Two questions with different prices. *What is installed* (:func:`installed`) is asked on every first
launch of a process and must cost milliseconds: it reads package metadata and imports no compiler.
*What will really run* (:func:`check_compilers`) is asked before something is built: it asks the
loaded libraries themselves, since an nvJitLink loaded earlier by another package wins over the one
beside us.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
from typing import Any

from .errors import ToolchainError

__all__ = ["check_compilers", "installed", "nvjitlink_release", "nvvm_release", "release", "tool"]

# What is in a key -> the distributions that bring it. CUDA 12 wheels carry the release in the name.
_DISTRIBUTIONS: dict[str, tuple[str, ...]] = {
    "numba": ("numba",),
    "numba-cuda": ("numba-cuda",),
    "llvmlite": ("llvmlite",),
    "nvvm": ("nvidia-nvvm", "nvidia-cuda-nvcc-cu12"),
    "nvjitlink": ("nvidia-nvjitlink", "nvidia-nvjitlink-cu12"),
}
_LIBRARIES = {"nvvm": "nvvm", "nvjitlink": "nvJitLink"}
_INSTALL = "pip install 'nvfp4[compile]'"
# In the headers of a distribution's metadata: lines before the first empty one.
_VERSION = re.compile(r"\A(?:.+\n)*?Version:[ \t]*(\S+)", re.IGNORECASE)


@functools.cache
def installed() -> tuple[tuple[str, str | None], ...]:
    """Name and version of every compiler that takes part, None for one that is missing.

    Versions come from package metadata. Where libNVVM or nvJitLink is part of a CUDA toolkit or of
    conda, and so has no metadata of Python's, a digest of its file stands for the version.
    """
    versions: list[tuple[str, str | None]] = []
    for name, distributions in _DISTRIBUTIONS.items():
        found = [version for package in distributions if (version := _metadata(package))]
        if not found and name in _LIBRARIES:
            from ._libraries import library_digest

            digest = library_digest(_LIBRARIES[name], _metadata("cuda-pathfinder"))
            found = [digest] if digest else []
        versions.append((name, "+".join(found) if found else None))
    return tuple(versions)


def _metadata(distribution: str) -> str | None:
    try:
        found = importlib.metadata.distribution(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    # The headers as text: reading them as an e-mail, as importlib does, takes longer than the rest.
    match = _VERSION.search(found.read_text("METADATA") or "")
    return match.group(1) if match else found.version


# --- what will really run -------------------------------------------------------------------------

# The smallest kernel, in the dialect of IR that every libNVVM reads for targets before Blackwell.
_EMPTY_KERNEL = b"""target triple = "nvptx64-nvidia-cuda"
target datalayout = "e-p:64:64:64-i1:8:8-i8:8:8-i16:16:16-i32:32:32-i64:64:64-i128:128:128-f32:32:32-f64:64:64-v16:16:16-v32:32:32-v64:64:64-v128:128:128-n16:32:64"
define void @empty() { ret void }
!nvvm.annotations = !{!0}
!0 = !{void ()* @empty, !"kernel", i32 1}
!nvvmir.version = !{!1}
!1 = !{i32 2, i32 0}
"""  # noqa: E501


@functools.cache
def nvvm_release() -> tuple[int, int] | None:
    """The CUDA release of the libNVVM that compiles here, None if it does not say.

    The library's own version call tells the version of its language. The release stands in the
    first lines of the PTX that it writes, so it is asked to compile an empty kernel (milliseconds).

    Raises
    ------
    ToolchainError
        There is no libNVVM.
    """
    try:
        from cuda.bindings import nvvm

        program: Any = nvvm.create_program()
    except (ImportError, RuntimeError) as error:
        raise ToolchainError(
            f"compiling a kernel needs libNVVM, which was not found; install it with: {_INSTALL}"
        ) from error
    try:
        nvvm.add_module_to_program(program, _EMPTY_KERNEL, len(_EMPTY_KERNEL), "empty")
        nvvm.compile_program(program, 1, ["-arch=compute_90"])
        text = bytearray(nvvm.get_compiled_result_size(program))
        nvvm.get_compiled_result(program, text)
    finally:
        nvvm.destroy_program(program)
    match = re.search(rb"release (\d+)\.(\d+)", text)
    return (int(match.group(1)), int(match.group(2))) if match else None


def nvjitlink_release() -> tuple[int, int]:
    """The CUDA release of the nvJitLink that links here.

    Raises
    ------
    ToolchainError
        There is none.
    """
    try:
        from cuda.bindings import nvjitlink

        major, minor = nvjitlink.version()
    except (ImportError, RuntimeError) as error:
        raise ToolchainError(
            f"compiling a kernel needs nvJitLink, which was not found; install it with: {_INSTALL}"
        ) from error
    return int(major), int(minor)


def release() -> tuple[int, int]:
    """The CUDA release whose instructions can be compiled here: the older compiler's.

    Raises
    ------
    ToolchainError
        There is no libNVVM or no nvJitLink.
    """
    nvvm, nvjitlink = nvvm_release(), nvjitlink_release()
    return nvjitlink if nvvm is None else min(nvvm, nvjitlink)


@functools.cache
def check_compilers() -> None:
    """Refuse an NVVM whose LTO-IR the nvJitLink of this process cannot read.

    nvJitLink reads the LTO-IR of its own release and of earlier ones of the same major, no other.

    Raises
    ------
    ToolchainError
        Names both, and what to install.
    """
    nvvm, nvjitlink = nvvm_release(), nvjitlink_release()
    if nvvm is None or (nvvm[0] == nvjitlink[0] and nvvm <= nvjitlink):
        return
    versions = dict(installed())
    made, reads = "{}.{}".format(*nvvm), "{}.{}".format(*nvjitlink)
    raise ToolchainError(
        f"NVVM {made} (installed: {versions['nvvm']}) and nvJitLink {reads} (installed: "
        f"{versions['nvjitlink']}) do not fit: nvJitLink {reads} cannot read LTO-IR of NVVM "
        f"{made}. Install one release of both: pip install 'nvidia-nvvm=={reads}.*' "
        f"'nvidia-nvjitlink=={reads}.*'"
    )


# --- tools ----------------------------------------------------------------------------------------


def tool(name: str) -> str:
    """Path of ``nvdisasm`` or another tool of the CUDA toolkit.

    Raises
    ------
    ToolchainError
        It is in no package, no toolkit and not on PATH.
    """
    found: str | None = None
    try:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_binary_utility(name)
    except (ImportError, AttributeError, RuntimeError):
        pass
    found = found or shutil.which(name)
    if not found or not os.access(found, os.X_OK):
        raise ToolchainError(
            f"{name} was not found; install it with: pip install nvidia-cuda-{name}"
        )
    return found
