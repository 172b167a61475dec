"""Functions that compile alike are known as such as long as all that they reach is as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import Epilogue, epilogue
from nvfp4.api import _repeat
from nvfp4.epilogue import compiled_alike

from .conftest import Card
from .repeated import Made, Memory, add_array, known, matmul, outcome

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


@pytest.mark.parametrize("given", [function, Epilogue(function)], ids=["function", "Epilogue"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_call_with_it_does_what_it_does_alone(
    card: Card, memory: Memory, monkeypatch: pytest.MonkeyPatch, change: str, given: Any
) -> None:
    call = matmul(memory)
    call = Made(call.function, {**call.arguments, "epilogue": given})
    known(card, call)
    with monkeypatch.context() as patch:
        CHANGES[change](patch)
        planned = len(card.planned)
        after = outcome(card, call)
        assert len(card.planned) > planned
        planned = len(card.planned)
        assert outcome(card, call) == after
        assert len(card.planned) == planned
        _repeat.forget()
        epilogue._seen.clear()
        assert outcome(card, call) == after


def add_three(value, row, column, expert, one, two, three):  # type: ignore[no-untyped-def]
    return value + one[column] * two[column] * three[column]


@pytest.mark.parametrize("count", [1, 3])
def test_arrays_of_an_epilogue_that_got_other_memory_or_shape_are_noticed(
    card: Card, memory: Memory, count: int
) -> None:
    arrays = [memory.put(np.ones(32, np.float32)) for _ in range(count)]
    own = Epilogue(add_array if count == 1 else add_three, *arrays)
    call = Made(nvfp4.matmul, {**matmul(memory).arguments, "epilogue": own})
    for i, array in enumerate(arrays):
        known(card, call)
        before, moved = array.values, memory.put(array.values).values
        array.values = moved
        assert outcome(card, call)[1][f"epilogue_{i}"] == array.data.ptr
        known(card, call)
        for values in (moved.reshape(4, 8), moved.view(np.int32), moved):
            array.values = values
            after = outcome(card, call)
            _repeat.forget()
            assert outcome(card, call) == after
        array.values = before
        assert outcome(card, call)[1][f"epilogue_{i}"] == array.data.ptr


def test_an_epilogue_that_was_used_may_be_copied(card: Card, memory: Memory) -> None:
    """What was found of it knows a module, which cannot be copied, and where arrays were."""
    own = Epilogue(add_array, memory.put(np.ones(32, np.float32)))
    call = Made(nvfp4.matmul, {**matmul(memory).arguments, "epilogue": own})
    known(card, call)
    for made in (copy.copy(own), copy.deepcopy(own)):
        assert vars(made).keys() == {"fn", "arrays", "pair", "halves", "axes"}
        used = outcome(card, call, epilogue=made)
        assert used[1]["epilogue_0"] == made.arrays[0].data.ptr


def test_attributes_are_no_variables() -> None:
    """`np.float32` reads `np` alone; names in functions inside count, too."""

    def names(value, row, column, expert):  # type: ignore[no-untyped-def]
        return [np.float32(helper(one)).clip(FACTOR) for one in FACTORS]

    assert epilogue._names(names) == {"np", "helper", "FACTOR", "FACTORS"}  # type: ignore[arg-type]


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


def test_a_function_that_was_dropped_meanwhile_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By another thread, for whose functions there was no room."""

    class Dropping(dict[int, Any]):
        def get(self, key: int, default: Any = None) -> None:
            return None

    monkeypatch.setattr(epilogue, "_seen", Dropping())
    assert epilogue.seen_function(function)[-1] is compiled_alike(function)
