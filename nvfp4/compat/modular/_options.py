"""The seed's options: names of other revisions, tuning numbers, epilogues."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, TypeVar

from ...epilogue import Epilogue

__all__ = ["also_named", "check_fixed", "check_threads", "element_function", "in_words_of"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def also_named(**names: str) -> Callable[[_Function], _Function]:
    """Take arguments by the names of other revisions of the seed too: ``old="present"``."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def renamed(*args: Any, **keywords: Any) -> Any:
            for old in keywords.keys() & names.keys():
                if names[old] in keywords:
                    raise TypeError(
                        f"{function.__name__} got {names[old]} twice: by this name and as {old}"
                    )
                keywords[names[old]] = keywords.pop(old)
            return function(*args, **keywords)

        return renamed  # type: ignore[return-value]

    return decorate


@contextlib.contextmanager
def in_words_of(names: dict[str, str]) -> Iterator[None]:
    """Errors of the public functions name the seed's arguments: ours -> the seed's."""
    try:
        yield
    except (TypeError, ValueError) as error:
        known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        # Names stand at the beginning of messages, or are what an output overlaps.
        named = rf"(?:^|(?<= overlap ))({known})(?!\w)"
        text = re.sub(named, lambda found: names[found[1]], str(error))
        raise type(error)(text) from None


def check_threads(name: str, value: Any) -> None:
    """A number of threads of a block. It changes no result, and nothing here depends on it."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int; got {value!r}")
    if value % 32 or not 32 <= value <= 1024:
        raise ValueError(f"{name} must be a multiple of 32 from 32 to 1024; got {value}")


def check_fixed(name: str, value: Any, only: Any, why: str) -> None:
    """An option of which the seed takes one value."""
    if value is not only:
        raise ValueError(f"{name} must be {only}: {why}; got {value!r}")


def element_function(name: str, function: Any) -> Epilogue | None:
    """An epilogue of what the seed calls an elementwise lambda.

    Parameters
    ----------
    name : str
        Of the argument.
    function
        None; an `Epilogue`; a function ``fn(value, row, column, expert)``; or one of the seed's two
        parameters, ``fn(coords, value)``, coords being (row, column). It returns the value to
        store.
    """
    if function is None or isinstance(function, Epilogue):
        return function
    if not isinstance(function, FunctionType):
        raise TypeError(
            f"{name} must be None, an nvfp4.Epilogue, or a Python function (coords, value) or "
            f"(value, row, column, expert) that returns the value; got {type(function).__name__}"
        )
    if function.__code__.co_argcount != 2:
        return Epilogue(function)
    fn = function

    def at_coordinates(value, row, column, expert):  # type: ignore[no-untyped-def]
        return fn((row, column), value)

    return Epilogue(at_coordinates)
