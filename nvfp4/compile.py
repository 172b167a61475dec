"""From a program to machine code: body -> LTO-IR -> cubin, behind a cache.

Numba compiles a body to LTO-IR, nvJitLink links that with link-time optimisation.
Never PTX through nvJitLink: it compiles PTX as relocatable code, which serialises wgmma. No GPU and
no driver takes part, so every target can be built anywhere. A cache hit imports none of this.
"""

from __future__ import annotations

import contextlib
import gc
import inspect as inspect_module
import itertools
import re
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import toolchain
from .architectures import capability, check_supported
from .cache import Cache, default_cache
from .cubin import Binary, read_cubin
from .errors import ToolchainError
from .program import DeviceWorld, Program

__all__ = ["build", "faults", "find", "inspect", "sass"]

# Numba compiles one function at a time, whatever the number of threads that ask.
_building = threading.RLock()

_NEVER = (1 << 31) - 1
_BUILDS_OF_COLLECTION = 8
_builds = itertools.count(1)

_SERIALISED = re.compile(r"\bC75\d\d\b")
_DOUBLE = re.compile(r"\b[a-z][\w.]*\.f64\b[\w.]*")


def find(program: Program, arch: str, *, cache: Cache | None = None) -> Binary | None:
    """A program's machine code if it is in the cache; builds nothing, imports no compiler."""
    check_supported(program.kernel, arch)
    return (default_cache() if cache is None else cache).find(program, arch)


def build(program: Program, arch: str, *, cache: Cache | None = None) -> Binary:
    """A program's machine code, from the cache or built now.

    Parameters
    ----------
    program
        A kernel with its constants.
    arch
        One of ``nvfp4.architectures.ARCHITECTURES``.
    cache
        Where to look and to keep; None: :func:`nvfp4.cache.default_cache`.

    Raises
    ------
    ValueError
        No such target.
    UnsupportedError
        The kernel is not made for it.
    ToolchainError
        A compiler is missing, or NVVM is newer than the nvJitLink beside it.
    """
    cache = default_cache() if cache is None else cache
    binary = find(program, arch, cache=cache)
    if binary is not None:
        return binary
    with _building, _no_full_collections():
        binary = cache.find(program, arch)  # another thread may just have built it
        if binary is None:
            binary, _ = _compile(program, arch, ptx=False)
            cache.store(program, arch, binary)
    return binary


def inspect(program: Program, arch: str) -> tuple[Binary, str]:
    """Build now, past every cache, and return the PTX beside the machine code.

    The PTX is what link-time optimisation makes of the program: the text from which the machine
    code comes. Raises as :func:`build` does.
    """
    check_supported(program.kernel, arch)
    with _building, _no_full_collections():
        return _compile(program, arch, ptx=True)


@contextlib.contextmanager
def _no_full_collections() -> Iterator[None]:
    """Python's collector looks at young objects alone: a sixth of a build would be looks at all.

    Numba makes hundreds of thousands of objects that live until the kernel is built, and are looked
    at again and again while their number grows. What is garbage for another reason waits as long.
    A process that does nothing but build looks at all of them behind some builds: each leaves some
    50 MB of garbage.
    """
    before = gc.get_threshold()
    ours = (*before[:2], _NEVER)
    gc.set_threshold(*ours)
    try:
        yield
    finally:
        if gc.get_threshold() == ours:  # nobody has set another one meanwhile
            gc.set_threshold(*before)
        if next(_builds) % _BUILDS_OF_COLLECTION == 0:
            gc.collect()


def _compile(program: Program, arch: str, *, ptx: bool) -> tuple[Binary, str]:
    toolchain.check_compilers()
    from . import _numba

    kernel = program.kernel
    cc = capability(arch)
    bounds: tuple[int, ...] | None = None
    if program.threads:
        resident = (program.blocks_per_sm,) if program.blocks_per_sm else ()
        bounds = (program.threads, *resident)
    try:
        body = program.bind(DeviceWorld(cc[:2]))
        code: Any = _numba.compile_to_ltoir(body, kernel.parameters, cc, launch_bounds=bounds)
        cubin, log = _link(code, arch, "cubin")
        text = _link(code, arch, "ptx")[0].rstrip(b"\0").decode() if ptx else ""
    except Exception as error:
        if type(error).__name__ == "DynamicLibNotFoundError":  # of cuda.pathfinder, by Numba
            raise ToolchainError(
                f"compiling a kernel needs a CUDA library: {str(error).splitlines()[0]}; install "
                "with: pip install 'nvfp4[compile]'"
            ) from error
        error.add_note(f"while compiling {program.label} for {arch}")
        for _, function in program.functions:
            user = inspect_module.getclosurevars(function).nonlocals.get("fn", function)
            error.add_note(
                f"with the epilogue {user.__qualname__} compiled into it: an epilogue may use what "
                "Numba compiles for CUDA, and must return a number"
            )
        raise
    binary = read_cubin(program.label, arch, cubin, log)
    return binary._replace(compilers=toolchain.installed()), text


def _link(ltoir: bytes, arch: str, target: str) -> tuple[bytes, str]:
    """Link LTO-IR to ``"cubin"`` or ``"ptx"``; returns it and the log.

    A product and a sum are never contracted to one rounding (``-fma=0``): what a body, or a user's
    epilogue, writes as two operations rounds twice, as in the golden model and the simulator. An
    fma is asked for by its instruction. ``cuda.core.Linker`` cannot pass that option.
    """
    try:
        from cuda.bindings import nvjitlink
    except ImportError as error:
        raise ToolchainError(
            "compiling a kernel needs cuda-bindings: pip install cuda-bindings"
        ) from error
    options = [f"-arch={arch}", "-lto", "-fma=0", "-ptx" if target == "ptx" else "-Xptxas=-v"]
    handle = nvjitlink.create(len(options), options)
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), "kernel")
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            error.add_note(_log(nvjitlink, handle))
            raise
        size = getattr(nvjitlink, f"get_linked_{target}_size")(handle)
        linked = bytearray(size)
        getattr(nvjitlink, f"get_linked_{target}")(handle, linked)
        return bytes(linked), _log(nvjitlink, handle)
    finally:
        nvjitlink.destroy(handle)


def _log(nvjitlink: Any, handle: int) -> str:
    """What the linker has to say: its information, then its errors."""
    texts = []
    for kind in ("info", "error"):
        text = bytearray(getattr(nvjitlink, f"get_{kind}_log_size")(handle))
        if text:
            getattr(nvjitlink, f"get_{kind}_log")(handle, text)
        texts.append(text.rstrip(b"\0").decode(errors="replace"))
    return "\n".join(texts)


def sass(binary: Binary) -> str:
    """The machine code as text, by nvdisasm.

    Raises
    ------
    ToolchainError
        nvdisasm is not there, or does not know the target.
    """
    with tempfile.TemporaryDirectory(prefix="nvfp4-") as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(binary.cubin)
        done = subprocess.run(
            [toolchain.tool("nvdisasm"), "-c", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise ToolchainError(f"nvdisasm cannot read code for {binary.arch}: {done.stderr.strip()}")
    return done.stdout


def faults(binary: Binary, ptx: str = "") -> tuple[str, ...]:
    """What is wrong with a kernel's code, a sentence each; empty: the gate lets it through.

    Registers spilled or arrays in local memory; warnings C75xx of the assembler (wgmma serialised,
    setmaxnreg dropped); and, where its `ptx` is given, arithmetic in double precision, which no
    kernel here wants: one literal without ``np.float32`` brings it in.
    """
    found = []
    if any(binary.spill_bytes):
        found.append("spills {} bytes of stores, {} of loads".format(*binary.spill_bytes))
    elif binary.stack_bytes:
        found.append(f"keeps {binary.stack_bytes} bytes a thread in local memory")
    found += [line for line in binary.log if _SERIALISED.search(line)]
    doubles = sorted(set(_DOUBLE.findall(ptx)))
    if doubles:
        found.append(f"computes in float64: {', '.join(doubles)}")
    return tuple(found)
