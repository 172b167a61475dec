"""Where a figure comes from: card, driver, versions, commit, command."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

__all__ = ["environment", "package_digest"]

_PACKAGES = (
    "torch", "triton", "cupy-cuda13x", "cupy-cuda12x", "numba-cuda", "cuda-bindings", "numpy",
    "torchao", "humming-kernels", "triton_kernels", "sglang-kernel", "vllm",
)  # fmt: skip
_PACKAGE = Path(__file__).resolve().parents[1]


def environment(library: str = "") -> dict[str, Any]:
    """What must stand beside every figure of this process.

    Parameters
    ----------
    library
        The array library in use, with its version.
    """
    return {
        **_card(),
        "library": library,
        "python": platform.python_version(),
        "versions": versions(),
        "commit": commit(),
        "sources": package_digest(),
        "command": command(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Of the packages that take part, as far as they are installed."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command(argv: list[str]) -> str:
    """The command line without the folder that the program lies in."""
    program = Path(argv[0]).name if argv else ""
    if program == "__main__.py":
        program = f"python -m {Path(argv[0]).parent.name}"
    return " ".join([program, *argv[1:]])


def commit() -> str | None:
    """Of the checkout that this package is in, with ``+`` if something was changed since."""
    head = _output("git", "-C", str(_PACKAGE.parent), "rev-parse", "HEAD")
    if not head:
        return None
    changed = _output("git", "-C", str(_PACKAGE.parent), "status", "--porcelain", "-uno", "nvfp4")
    return head + ("+" if changed else "")


def package_digest() -> str:
    """Of all sources of the package: says what was measured where there is no git."""
    digest = hashlib.sha256()
    for file in sorted(_PACKAGE.rglob("*.py")):
        digest.update(file.relative_to(_PACKAGE).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:12]


def _card() -> dict[str, Any]:
    from ..driver import check, current_device, device_info, driver
    from ..errors import ToolchainError

    try:
        info = device_info(current_device())
    except ToolchainError:
        return {"card": None}
    cuda = driver()
    release = int(check(cuda.cuDriverGetVersion(), "asking the driver's version"))
    asked = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    line = _output(
        "nvidia-smi", f"--id={info.ordinal}", f"--query-gpu={asked}", "--format=csv,noheader"
    )
    values = [part.strip() for part in line.splitlines()[0].split(",")] if line else []
    smi = dict(zip(asked.split(","), values, strict=False))
    return {
        "card": info.name,
        "arch": info.arch,
        "processors": info.processors,
        "driver": smi.pop("driver_version", ""),
        "cuda": f"{release // 1000}.{release % 1000 // 10}",
        "nvidia_smi": smi,
    }


def _output(*arguments: str) -> str:
    """What a program prints; nothing where it is missing or fails."""
    if shutil.which(arguments[0]) is None:
        return ""
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
