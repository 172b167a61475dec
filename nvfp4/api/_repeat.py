"""A call like one before, on a card: find what was launched then, and launch it.

With ``out=`` nothing is allocated, and a serving loop makes the same calls over and over. What a
call does depends on its options and on each array's metadata and address, on nothing else. So a
call is found by its options and by what a look at each argument tells, and what looks leave open is
compared with the call that was remembered; what is remembered are the launches with their
arguments, ready to go. A call
with the same metadata at other addresses, or with other numbers, is found by what its plan depends
on (what addresses are in units of 32 bytes and which are equal), is checked for overlaps, and is
then remembered too. Whatever is not found goes the long way, which has all checks and messages.

Only addresses and metadata are remembered: no array is kept alive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .._card import bits, picker
from .._streams import given_stream
from ..arrays import Array
from ..tensor import QTensor
from . import _looks
from ._looks import LIBRARIES, LOOKS, Watched, describe, learn, watched
from ._out import extent

__all__ = ["Repeated", "forget", "remember", "repeat"]

#: Name of the public function; its options, hashable; its arrays, QTensors, numbers and epilogues.
Repeated = tuple[str, tuple[Any, ...], tuple[Any, ...]]

_MOST_CALLS = 4096
_MOST_PLANS = 2048
#: Calls that differ in metadata alone, such as views of one buffer that begin alike.
_MOST_VIEWS = 4


#: A call, all of it but what it is found by:
#:
#: * what is compared then: what finds, in its arguments, the arrays whose metadata may differ;
#:   which argument is an epilogue with more of them, or None; what tells an array's metadata, and
#:   the list of those of this call; or None, and what tells whether arrays have them. None: there
#:   is nothing to compare;
#: * what launches it on a stream; what tells the current stream of a device; that device;
#: * another call, which is found by the same.
#:
#: A plain tuple, which is taken apart in a third of the time of a named one.
_Call = tuple[Watched, Callable[[int], None], Callable[[int], int], int, Any]


class _Plan(NamedTuple):
    """What calls have in common that differ in addresses and numbers alone."""

    prepared: Any
    #: What the launches want, out of (*addresses, *numbers, *constants).
    pick: Callable[[Any], tuple[Any, ...]]
    constants: tuple[Any, ...]
    #: Arrays: where the address is, bytes from it to the first and after the last byte.
    written: tuple[tuple[int, int, int], ...]
    arrays: tuple[tuple[int, int, int], ...]
    stream: Callable[[int], int]
    device: int
    #: Of the first of these calls: what `watched` gave.
    watched: Watched


#: Function, options and looks -> the newest call.
_calls: dict[Any, _Call] = {}
_plans: dict[Any, _Plan] = {}


def forget() -> None:
    """Forget everything (for tests)."""
    _calls.clear()
    _plans.clear()
    _looks.forget()


_UNLIKE = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


def repeat(call: Repeated, stream: Any) -> bool:
    """Make a call, if one like it has been made before; whether it was made.

    Parameters
    ----------
    call
        Function, options and arguments, as :func:`remember` was given them.
    stream
        The call's ``stream`` argument.
    """
    name, options, arguments = call
    try:
        looks: list[Any] = [name, options]
        for value in arguments:
            looks.append(value if value is None else LOOKS[type(value)](value))  # noqa: PERF401
        key = tuple(looks)
        known = _calls.get(key)
        while known is not None:
            compared, launch, current, device, known = known
            if compared is None:
                break
            pick, at, facts, wanted = compared
            arrays = pick(arguments)
            if at is not None:
                arrays += arguments[at].arrays
            if facts is None:
                if wanted(*arrays):
                    break
            elif [*map(facts, arrays)] == wanted:
                break
        else:
            moved = _moved(key, call)
            if moved is None:
                return False
            _, launch, current, device, _ = moved
    except _UNLIKE:
        return False
    if stream is None:
        handle = current(device)
    else:
        handle = stream if type(stream) is int and stream >= 0 else given_stream(stream)
    launch(handle)
    return True


def _moved(key: Any, call: Repeated) -> _Call | None:
    """A call that is known but for addresses and numbers; from now on, it is known."""
    kind, pointers, numbers = _kind(call)
    plan = _plans.get(kind)
    if plan is None:
        return None
    for place, low, high in plan.written:
        start, end = pointers[place] + low, pointers[place] + high
        for other, first, last in plan.arrays:
            if other != place and start < pointers[other] + last and pointers[other] + first < end:
                return None
    return _keep(key, call, plan, pointers, numbers)


def _kind(call: Repeated) -> tuple[tuple[Any, ...], list[int], list[int]]:
    """What the plan of a call depends on; its addresses; its numbers."""
    name, options, arguments = call
    pointers: list[int] = []
    numbers: list[int] = []
    metadata = [describe(value, pointers, numbers) for value in arguments]
    kind = (
        name,
        options,
        *metadata,
        tuple([pointer & 31 for pointer in pointers]),  # the most that plans ask for
        tuple(map(pointers.index, pointers)),
        tuple(map(numbers.index, numbers)),  # as bits: 0.0 and -0.0 differ, NaN does not
    )
    return kind, pointers, numbers


def _number_of(word: int) -> float:
    return float(np.uint32(word).view(np.float32))


def _keep(key: Any, call: Repeated, plan: _Plan, pointers: list[int], numbers: list[int]) -> _Call:
    values = plan.pick((*pointers, *map(_number_of, numbers), *plan.constants))
    others: Any = None
    for other in reversed(views(_calls.get(key))[: _MOST_VIEWS - 1]):
        others = (*other[:-1], others)
    compared = plan.watched
    if compared is not None:
        pick, at, facts, wanted = compared
        arrays = pick(call[2])
        if at is not None:
            arrays += call[2][at].arrays
        if not (wanted(*arrays) if facts is None else [*map(facts, arrays)] == wanted):
            # The same to plans, but not to the library: strides of axes of one.
            compared = watched(call[2])
    made = (compared, plan.prepared.bind(values), plan.stream, plan.device, others)
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[key] = made
    return made


def views(call: _Call | None) -> list[_Call]:
    """A call and those that differ from it in metadata alone."""
    found = []
    while call is not None:
        found.append(call)
        call = call[-1]
    return found


def remember(
    call: Repeated,
    prepared: Callable[[], Any],
    buffers: Mapping[str, Any],
    outputs: tuple[str, ...],
) -> None:
    """Keep what a call needed that has just run on a card.

    Parameters
    ----------
    call
        Function, options and arguments. What is compiled or planned depends on the *values* of
        options; numbers among the arguments are passed to kernels by value.
    prepared : function
        Makes the launches ready (``nvfp4.launch.prepare``).
    buffers : mapping
        Name of a kernel's buffer -> Array, a number, or None.
    outputs : tuple of str
        The buffers that are written.
    """
    name, options, arguments = call
    arrays = [value for value in buffers.values() if isinstance(value, Array)]
    for value in arguments:
        if isinstance(value, QTensor):
            arrays += [part for part in value.parts[:5] if part is not None]
    libraries = {array.library for array in arrays}
    if len(libraries) != 1 or not libraries <= LIBRARIES.keys():
        return
    (library,) = libraries
    for array in arrays:
        learn(type(array.owner), library)
    try:
        key = (name, options, *[LOOKS[type(value)](value) for value in arguments])
        kind, pointers, numbers = _kind(call)
        metadata = watched(arguments)
        hash(key)
    except _UNLIKE:
        return
    plan = _plan(prepared(), buffers, outputs, arrays, pointers, numbers, metadata)
    if plan is None:
        return
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[kind] = plan
    _keep(key, call, plan, pointers, numbers)


def _plan(
    prepared: Any,
    buffers: Mapping[str, Any],
    outputs: tuple[str, ...],
    arrays: list[Array],
    pointers: list[int],
    numbers: list[int],
    metadata: Watched,
) -> _Plan | None:
    """Where the launches' values come from; None where one comes from elsewhere."""
    places = {pointer: pointers.index(pointer) for pointer in pointers}
    order: dict[str, int] = {}
    constants: list[Any] = []
    for name, value in buffers.items():
        if isinstance(value, Array):
            if value.pointer in places:
                order[name] = places[value.pointer]
        elif value is not None and numbers:
            # Of equal numbers any will do: only calls in which they are equal are alike.
            word = bits(value, "f32", name)
            if word in numbers:
                order[name] = len(pointers) + numbers.index(word)
        else:
            order[name] = len(pointers) + len(numbers) + len(constants)
            constants.append(value or 0)
    if not set(prepared.names) <= order.keys():
        return None
    if any(len(pointers) + i not in order.values() for i in set(map(numbers.index, numbers))):
        return None  # what became of the number is not known
    spans: dict[int, tuple[int, int]] = {}
    for array in arrays:
        low, high = extent(array.spec)
        if low == high:
            continue
        if array.pointer not in places:
            return None
        place = places[array.pointer]
        before = spans.get(place, (low, high))
        spans[place] = min(low, before[0]), max(high, before[1])
    owners = (buffers.get(name) for name in outputs)
    targets = {places[array.pointer] for array in owners if isinstance(array, Array)}
    return _Plan(
        prepared,
        picker([order[name] for name in prepared.names]),
        tuple(constants),
        tuple((place, *spans[place]) for place in sorted(targets & spans.keys())),
        tuple((place, *span) for place, span in spans.items()),
        LIBRARIES[arrays[0].library].stream(),
        arrays[0].device or 0,
        metadata,
    )
