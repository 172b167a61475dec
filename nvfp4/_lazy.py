"""Modules whose names are imported when they are first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["getter"]


def getter(module: dict[str, Any], homes: Mapping[str, str | None]) -> Callable[[str], Any]:
    """What a module's ``__getattr__`` does.

    Parameters
    ----------
    module
        Its globals, which keep what was found.
    homes
        Name -> the module of the same package that has it; None: the name is the module.
    """
    package, own = module["__package__"], module["__name__"]

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {own!r} has no attribute {name!r}")
        home = homes[name]
        if home is None:
            return import_module(f".{name}", package)
        found = module[name] = getattr(import_module(f".{home}", package), name)
        return found

    return find
