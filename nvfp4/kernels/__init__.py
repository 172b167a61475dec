"""Kernel bodies, a file a kernel; and the register of them all.

``KERNELS`` has every kernel by its name. It is made when it is first asked for, by importing the
modules of this package and looking for :class:`~nvfp4.program.Kernel` objects in them: a new
file needs no entry anywhere. Importing one module of the package, as ``nvfp4.plans`` does, imports
no other.

A module says in ``VARIANTS`` which constants of its kernels the compile gates build: the name of a
kernel -> a sequence of constants, each a mapping as ``Kernel.program`` takes it; or one sequence,
of which each kernel takes those mappings that have the names of its constants. The first is what
``nvfp4 compile KERNEL`` shows. One that is not for all of a kernel's targets has theirs beside its
constants, ``"ARCHITECTURES": ("sm_90a",)``. What only ``make test-slow`` builds stands in
``SLOW_VARIANTS``, of the same form. A kernel without constants needs no entry.

``seeds`` has names that kernels have elsewhere; :func:`program` knows them too.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..program import Kernel, Program

__all__ = ["KERNELS", "kernel", "program", "variants"]

KERNELS: Mapping[str, Kernel]
_TARGETS = "ARCHITECTURES"


def __getattr__(name: str) -> Any:
    if name == "KERNELS":
        return _register()[0]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _register() -> tuple[Mapping[str, Kernel], Mapping[str, Any]]:
    """Every kernel by name, and its module."""
    kernels: dict[str, Kernel] = {}
    modules: dict[str, Any] = {}
    for found in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{found.name}")
        for value in vars(module).values():
            if not isinstance(value, Kernel):
                continue
            if kernels.setdefault(value.name, value) is not value:
                raise ValueError(f"two kernels have the name {value.name!r}")
            # A module may import another's kernel: the one that knows its variants is its own.
            if value.name not in modules or _listed(module, "VARIANTS", value):
                modules[value.name] = module
    return MappingProxyType(dict(sorted(kernels.items()))), modules


def _listed(module: Any, attribute: str, of: Kernel) -> tuple[Mapping[str, Any], ...]:
    """The constants that a module lists for a kernel."""
    listed = getattr(module, attribute, ())
    if isinstance(listed, Mapping):
        return tuple(listed.get(of.name, ()))
    names = of.constants.keys() | {_TARGETS}
    return tuple(entry for entry in listed if entry.keys() | {_TARGETS} == names)


def kernel(name: str) -> Kernel:
    """The kernel of that name.

    Raises
    ------
    ValueError
        There is none; the message has those that there are.
    """
    kernels = _register()[0]
    if name not in kernels:
        raise ValueError(f"kernel must be one of {', '.join(kernels)}; got {name!r}")
    return kernels[name]


def program(name: str) -> Program:
    """What a name stands for: a kernel's first variant, or a kernel of ``seeds``.

    Raises
    ------
    ValueError
        There is no such name.
    """
    if name not in _register()[0]:
        from .seeds import SEEDS

        if name in SEEDS:
            return SEEDS[name]
    return variants(kernel(name))[0]


def variants(
    of: Kernel | str, *, slow: bool = False, arch: str | None = None
) -> tuple[Program, ...]:
    """The programs of a kernel that the compile gates build, without repetition.

    Parameters
    ----------
    of
        A kernel of ``KERNELS``, or its name.
    slow
        Also those that only the slow gates build.
    arch
        Only those for this target.

    Raises
    ------
    ValueError
        No such kernel; or it has constants, and its module says nothing of variants.
    """
    found = kernel(of) if isinstance(of, str) else of
    module = _register()[1][found.name]
    listed = _listed(module, "VARIANTS", found)
    if not listed and found.constants:
        raise ValueError(f"{module.__name__}.VARIANTS has no entry for the kernel {found.name!r}")
    if slow:
        listed += _listed(module, "SLOW_VARIANTS", found)
    programs = []
    for entry in listed or ({},):
        constants = dict(entry)
        targets = constants.pop(_TARGETS, None)
        if arch is None or targets is None or arch in targets:
            programs.append(found.program(**constants))
    return tuple(dict.fromkeys(programs))
