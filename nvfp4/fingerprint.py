"""What a built kernel depends on, as one digest: the key of the disk cache.

The digest covers the bytes of the source files in which the kernel's body and its helpers stand, of
the instructions' files and of the modules that compile; the values of every name that they use; the
program's constants; and the code, not the file, of functions that a user puts in (epilogues), so
that an edit elsewhere in the user's file rebuilds nothing. No path and no time of a file is in it:
the same sources have the same digest on every machine. The versions of the compilers are no part of
it; the cache keeps them beside it (``nvfp4.cache``).

An edit can so never meet a stale binary, nor can a process that goes on with old code after one
leave such a binary to others; and computing the digest imports no compiler.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import sys
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from . import _READ_SINCE
from . import program as _program
from .program import Program
from .ptx.instruction import Instruction

__all__ = ["source_key"]

_PACKAGE = Path(__file__).resolve().parent
# Everything through which a body goes on its way to a cubin.
_COMPILING = (
    "_numba.py", "architectures.py", "compile.py", "cubin.py", "program.py", "toolchain.py",
)  # fmt: skip


def source_key(program: Program, arch: str) -> str:
    """Digest of everything but the compilers that decides a program's machine code.

    Returns
    -------
    str
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for part in _Description().program(program, arch):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@functools.cache
def _package_digest() -> bytes:
    files = [_PACKAGE / name for name in _COMPILING]
    files += sorted((_PACKAGE / "ptx").glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        content = _file_digest(str(file))
        if content is not None:
            digest.update(file.name.encode() + b"\0" + content)
    return digest.digest()


@functools.cache
def _file_digest(path: str) -> bytes | None:
    """Digest of a source file, read once in a process as the modules themselves are.

    A file that was written since then may not be what was imported: what this process makes of it
    is for no other.
    """
    try:
        digest = hashlib.sha256(Path(path).read_bytes())
        if os.stat(path).st_ctime_ns >= _READ_SINCE:
            digest.update(f"read at {_READ_SINCE} by process {os.getpid()}".encode())
    except OSError:
        return None
    return digest.digest()


#: Types whose values are told apart by what they are called and how they are written.
_PLAIN = (bool, int, str, complex, type(None), type(Ellipsis))


class _Description:
    """All that decides a program's machine code, as bytes.

    An instruction is described once, however many functions use it: a quantiser uses each of its
    sixty instructions three times.
    """

    def __init__(self) -> None:
        self._instructions: dict[int, bytes] = {}

    def program(self, program: Program, arch: str) -> list[bytes]:
        """Everything, in parts."""
        kernel = program.kernel
        parts = [
            _package_digest(),
            self._value((arch, kernel.parameters, program.threads, program.blocks_per_sm)),
            self._value(program.constants),
        ]
        given = dict(program.functions)
        fixed = {name for name, _ in program.constants} | given.keys()
        seen: set[int] = set()
        self._walk(parts, kernel.body, fixed, seen, by_file=True)
        for name in sorted(given):
            parts.append(name.encode())
            # Names in a user's function are the user's, whatever the kernel's constants are called.
            self._walk(parts, given[name], set(), seen, by_file=False)
        return parts

    def _walk(
        self,
        parts: list[bytes],
        function: FunctionType,
        fixed: set[str],
        seen: set[int],
        *,
        by_file: bool,
    ) -> None:
        """Describe a function and, depth first, all that it uses."""
        if id(function) in seen:
            return
        seen.add(id(function))
        parts.append(function.__qualname__.encode())
        content = _file_digest(function.__code__.co_filename) if by_file else None
        # A function without a file (typed into a prompt) is known by its code.
        parts.append(content if content is not None else self._code(function.__code__))
        parts.append(self._value(function.__defaults__))
        parts.append(self._value(tuple(sorted((function.__kwdefaults__ or {}).items()))))
        for name, value in sorted(_program.used_values(function).items()):
            if name in fixed:
                continue
            parts.append(name.encode())
            if isinstance(value, FunctionType):
                self._walk(parts, value, fixed, seen, by_file=by_file)
            else:
                parts.append(self._value(value))

    def _function(self, function: FunctionType, *, by_file: bool) -> bytes:
        """A function by itself, and all that it uses."""
        parts: list[bytes] = []
        self._walk(parts, function, set(), set(), by_file=by_file)
        return b"".join(parts)

    def _code(self, code: CodeType) -> bytes:
        """What a code object does: everything but where it stands in a file."""
        return self._value(
            (
                sys.version_info[:2],  # what bytecode means
                code.co_code,
                code.co_consts,
                code.co_names,
                code.co_varnames,
                code.co_freevars,
                code.co_cellvars,
                code.co_argcount,
                code.co_kwonlyargcount,
                code.co_flags,
                getattr(code, "co_exceptiontable", b""),
            )
        )

    def _value(self, value: Any) -> bytes:
        """A value, different for those that compile differently (1, 1.0, True; 0.0, -0.0)."""
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__}:{value!r};".encode()
        if isinstance(value, tuple):
            return b"(%d:" % len(value) + b"".join(map(self._value, value)) + b")"
        if isinstance(value, Instruction):
            return self.instruction(value)
        if isinstance(value, float):
            return b"float:" + struct.pack("<d", value)
        if isinstance(value, bytes):
            return b"bytes:%d:" % len(value) + value
        if isinstance(value, frozenset):
            return b"{" + b"".join(sorted(map(self._value, value))) + b"}"
        if isinstance(value, CodeType):
            return self._code(value)
        if isinstance(value, FunctionType):
            return b"function:" + self._function(value, by_file=False)
        if isinstance(value, ModuleType):
            return b"module:" + value.__name__.encode()
        if isinstance(value, type):
            return f"type:{value.__module__}.{value.__qualname__};".encode()
        if isinstance(value, (np.generic, np.ndarray)):
            return f"{value.dtype.str}{value.shape}:".encode() + value.tobytes()
        # Nothing that a kernel may use (binding refuses it): an attribute's name that is a global
        # too.
        return b"other:" + type(value).__qualname__.encode()

    def instruction(self, instruction: Instruction) -> bytes:
        """An instruction's signature and code, for every target."""
        found = self._instructions.get(id(instruction))
        if found is not None:
            return found
        # Names, texts and numbers: what they look like tells them apart, and takes one call.
        words: list[Any] = [instruction.name, instruction.result, instruction.parameters]
        parts = []
        software: Any = instruction.software
        if software is not None:
            parts.append(self._function(software, by_file=True))
        for lowering in instruction.lowerings:
            build = lowering.build
            words.append(lowering._replace(build=None))
            if isinstance(build, FunctionType):
                code = build.__code__
                parts.append(_file_digest(code.co_filename) or self._code(code))
                cells = tuple(cell.cell_contents for cell in build.__closure__ or ())
                parts.append(self._value(cells))
        parts.append(repr(words).encode())
        found = self._instructions[id(instruction)] = b"[" + b"".join(parts) + b"]"
        return found
