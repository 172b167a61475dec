"""Functions that compile alike are known as such as long as all that they reach is as it was."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

from nvfp4 import epilogue
from nvfp4.api import _repeat
from nvfp4.epilogue import compiled_alike

from .conftest import Card
from .repeated import Made, Memory, known, matmul, outcome

FACTOR: Any = 1
FACTORS = (np.float32(2), (np.float32(3),))


def helper(value, factor=1):  # type: ignore[no-untyped-def]
    return value * factor


def deep(value):  # type: ignore[no-untyped-def]
    return helper(value) + FACTORS[0]


def function(value, row, column, expert=0):  # type: ignore[no-untyped-def]
    return abs(deep(value)) * FACTOR


def _closing(by: Any) -> tuple[FunctionType, Callable[[Any], None]]:
    """A function that closes over a variable, and what sets that."""

    def own(value, row, column, expert):  # type: ignore[no-untyped-def]
        return value * by

    def give(value: Any) -> None:
        nonlocal by
        by = value

    return own, give  # type: ignore[return-value]


def _other(value, factor=1):  # type: ignore[no-untyped-def]
    return value - factor


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an equal constant of another type": lambda m: m.setitem(globals(), "FACTOR", True),
    "another constant": lambda m: m.setitem(globals(), "FACTOR", 2),
    "a constant that is gone": lambda m: m.delitem(globals(), "FACTOR"),
    "a tuple": lambda m: m.setitem(globals(), "FACTORS", (np.float32(2),)),
    "a variable before a builtin": lambda m: m.setitem(globals(), "abs", np.abs),
    "another helper": lambda m: m.setitem(globals(), "deep", helper),
    "another helper of a helper": lambda m: m.setitem(globals(), "helper", _other),
    "a helper's code": lambda m: m.setattr(helper, "__code__", _other.__code__),
    "a helper's defaults": lambda m: m.setattr(helper, "__defaults__", (2,)),
    "its code": lambda m: m.setattr(function, "__code__", _four.__code__),
    "its defaults": lambda m: m.setattr(function, "__defaults__", (1,)),
}


def _four(value, row, column, expert=0):  # type: ignore[no-untyped-def]
    return value


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_noticed_and_so_is_that_it_changed_back(
    monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    before = compiled_alike(function)
    assert compiled_alike(function) is before
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        after = compiled_alike(function)
        assert after is not before
        assert compiled_alike(function) is after
    assert compiled_alike(function) is before


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_with_it_does_what_it_does_alone(
    card: Card, memory: Memory, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    call = matmul(memory)
    call = Made(call.function, {**call.arguments, "epilogue": function})
    known(card, call)
    planned = len(card.planned)
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        after = outcome(card, call)
        assert len(card.planned) > planned
        _repeat.forget()
        epilogue._seen.clear()
        assert outcome(card, call) == after


@pytest.mark.parametrize("value", [np.float32(3), True, None, 1.0])
def test_a_variable_of_a_closure_is_looked_at(value: Any) -> None:
    own, give = _closing(1)
    before = compiled_alike(own)
    give(value)
    after = compiled_alike(own)
    assert after is not before
    assert after is compiled_alike(_closing(value)[0])
    give(1)
    assert compiled_alike(own) is before


def test_a_variable_that_is_gone_is_an_error_as_it_is_in_the_function() -> None:
    own, _ = _closing(1)
    compiled_alike(own)
    del own.__closure__[0].cell_contents  # type: ignore[index]
    with pytest.raises(ValueError, match="empty"):
        compiled_alike(own)


def test_a_function_at_the_place_of_another_is_looked_at_anew() -> None:
    one, _ = _closing(1)
    two, _ = _closing(2)
    first = compiled_alike(one)
    epilogue._seen[id(two)] = epilogue._seen[id(one)]
    assert compiled_alike(two) is not first
