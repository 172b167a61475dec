"""A built kernel: its machine code, and what the code says about itself.

Registers, stack and shared memory are read from the cubin (an ELF file), spills from the report of
the assembler, which is where alone they stand. The assembler reports registers and shared memory
too; a build in which the two differ is refused, since one of them has then been misread.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from .architectures import capability

__all__ = ["Binary", "CubinError", "read_cubin"]

# Attributes of .nv.info sections: a byte of format, a byte of attribute, 16 bits of size or value.
_SIZED = 4
_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11
# Set in a symbol's st_other where the function is a kernel.
_ENTRY = 0x10
_FUNCTION = 2
# From Hopper on the system keeps the first KiB of a block's shared memory. A section of shared
# memory begins below it; the limits that a card states, and the assembler's report, leave it out.
_SYSTEM_SHARED = 1024


class CubinError(ValueError):
    """These bytes are not a cubin with one kernel in it."""


class Binary(NamedTuple):
    """One kernel's machine code for one target.

    Attributes
    ----------
    label
        The program's, for people: ``"quantize[FORMAT=nvfp4]"``.
    arch
        ``"sm_90a"``.
    entry
        The kernel's symbol in `cubin`.
    cubin
        The machine code.
    registers
        Registers a thread.
    shared_bytes
        Static shared memory; our kernels use dynamic, which a launch states.
    stack_bytes
        Local memory a thread: spilled registers, and arrays that are not in registers.
    spill_bytes
        Bytes of spill stores and of spill loads.
    log
        What the assembler and linker said, a line each, without its timings.
    compilers
        Name and version of what built it.
    """

    label: str
    arch: str
    entry: str
    cubin: bytes
    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: tuple[int, int]
    log: tuple[str, ...]
    compilers: tuple[tuple[str, str | None], ...] = ()


class _Section(NamedTuple):
    name: str
    offset: int
    size: int
    link: int


def read_cubin(label: str, arch: str, cubin: bytes, log: str) -> Binary:
    """Describe a cubin that was just linked.

    Parameters
    ----------
    label, arch
        As in :class:`Binary`.
    cubin
        The ELF file; must hold exactly one kernel.
    log
        The linker's log, made with ptxas's ``-v``.

    Raises
    ------
    CubinError
        `cubin` is cut off, is no cubin, holds another number of kernels, or its registers and
        shared memory are not those that `log` reports; `log` has text, but no report.
    """
    try:
        entry, registers, shared, stack = _resources(cubin)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CubinError(f"{label}: not a whole cubin ({error})") from error
    lines = tuple(_log_lines(log))
    text = "\n".join(lines)
    used = re.findall(r"Used (\d+) registers", text)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not text:
        # nvJitLink 13.0 gave no report for kernels that the same machine had linked before.
        # Registers that are spilled lie in the stack frame, which the cubin knows.
        shared -= _SYSTEM_SHARED if shared and capability(arch)[0] >= 9 else 0
        return Binary(label, arch, entry, cubin, registers, shared, stack, (stack, stack), ())
    if len(used) != 1 or len(spills) != 1:
        raise CubinError(f"{label}: the assembler's report is not understood: {text!r}")
    if shared and capability(arch)[0] >= 9:
        shared -= _SYSTEM_SHARED
    reported = int(used[0]), sum(map(int, re.findall(r"(\d+) bytes smem", text)))
    if reported != (registers, shared):
        raise CubinError(
            f"{label}: the cubin says {registers} registers and {shared} bytes of shared memory, "
            "the assembler {} and {}".format(*reported)
        )
    spill_bytes = (int(spills[0][0]), int(spills[0][1]))
    return Binary(label, arch, entry, cubin, registers, shared, stack, spill_bytes, lines)


def _log_lines(log: str) -> Iterator[str]:
    for line in log.replace("\0", "").splitlines():
        line = line.strip()
        if line and "Compile time" not in line and "Container created" not in line:
            yield line


def _resources(cubin: bytes) -> tuple[str, int, int, int]:
    """Entry symbol, registers, static shared memory and stack frame."""
    if cubin[:5] != b"\x7fELF\x02":
        raise CubinError("not an ELF file of 64 bit")
    sections = _sections(cubin)
    by_name = {section.name: section for section in sections}
    symbols = _symbols(cubin, sections, by_name)
    kernels = [
        index
        for index, (_, kind, other) in enumerate(symbols)
        if kind == _FUNCTION and other & _ENTRY
    ]
    if len(kernels) != 1:
        raise CubinError(f"{len(kernels)} kernels in one cubin; must be 1")
    kernel = kernels[0]
    entry = symbols[kernel][0]
    numbers = dict(_kernel_attributes(cubin, by_name[".nv.info"], kernel))
    shared = by_name.get(f".nv.shared.{entry}")
    if _REGISTER_COUNT not in numbers:
        raise CubinError("the cubin does not say its registers")
    return (
        entry,
        numbers[_REGISTER_COUNT],
        shared.size if shared else 0,
        numbers.get(_FRAME_SIZE, 0),
    )


def _sections(cubin: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    raw = [struct.unpack_from("<IIQQQQII", cubin, table + size * i) for i in range(count)]
    strings = raw[names][4]
    return [_Section(_string(cubin, strings + r[0]), r[4], r[5], r[6]) for r in raw]


def _string(cubin: bytes, offset: int) -> str:
    end = cubin.find(b"\0", offset)
    if end < offset:
        raise IndexError(f"string at {offset}")
    return cubin[offset:end].decode()


def _symbols(
    cubin: bytes, sections: list[_Section], by_name: dict[str, _Section]
) -> list[tuple[str, int, int]]:
    """Name, type and st_other of every symbol."""
    if ".symtab" not in by_name or ".nv.info" not in by_name:
        raise CubinError("no symbols: an ELF file, but not a cubin")
    table = by_name[".symtab"]
    strings = sections[table.link].offset
    found = []
    for offset in range(table.offset, table.offset + table.size, 24):
        name, info, other = struct.unpack_from("<IBB", cubin, offset)
        found.append((_string(cubin, strings + name) if name else "", info & 15, other))
    return found


def _kernel_attributes(cubin: bytes, section: _Section, kernel: int) -> Iterator[tuple[int, int]]:
    """Attributes of the form (symbol, number) of one symbol."""
    at, end = section.offset, section.offset + section.size
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != _SIZED:  # then the 16 bits are the value itself
            continue
        if size == 8:
            symbol, number = struct.unpack_from("<II", cubin, at)
            if symbol == kernel:
                yield attribute, number
        at += size
