"""A call like one before, on a card: find what was launched then, and launch it.

With ``out=`` nothing is allocated, and a serving loop makes the same calls over and over. What a
call does depends on its options and on each array's metadata and address, on nothing else; so they
are the key of what is remembered: the launches with their arguments, ready to go. A call with the
same metadata at other addresses, or with other numbers, is found by what its plan depends on
(what addresses are in units of 32 bytes and which are equal), is checked for overlaps, and is then
remembered too. Whatever is not found goes the long way, which has all checks and messages.

Only addresses and metadata are remembered: no array is kept alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from .._card import bits, picker
from .._streams import given_stream
from ..arrays import Array
from ..epilogue import Epilogue, compiled_alike
from ..tensor import QTensor
from ._encode import SMALLEST
from ._out import extent

__all__ = ["Repeated", "forget", "remember", "repeat"]

#: Name of the public function; its options, hashable; its arrays, QTensors, numbers and epilogues.
Repeated = tuple[str, tuple[Any, ...], tuple[Any, ...]]

_FLT_MAX = 3.4028234663852886e38
_MOST_CALLS = 4096
_MOST_PLANS = 2048


# What an argument is, as quickly as its library tells ---------------------------------------------
#
# A `look` is a hashable: address and metadata. Its `split` gives the metadata, and appends the
# addresses in it to one list and the bits of the numbers, as float32, to another. A look that
# cannot be had raises an error.


class _Look(NamedTuple):
    look: Callable[[Any], Any]
    split: Callable[[Any, list[int], list[int]], Any]


class _Library(NamedTuple):
    """How arrays of a library are looked at."""

    look: Callable[[Any], Any]
    #: Of an array's class: the function that tells an array's address.
    address: Callable[[type], Callable[[Any], int]]
    #: Of a device: the handle of the current stream.
    stream: Callable[[int], int]


def _cupy_stream(device: int) -> int:
    pointer: int = sys.modules["cupy"].cuda.get_current_stream(device).ptr
    return pointer


def _look_at_tensor(tensor: Any) -> tuple[Any, ...]:
    """Of PyTorch. Tensors that are contiguous are alike, whatever the strides of axes of one."""
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError("requires grad")
    if tensor.is_neg():
        raise ValueError("is negated")
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.is_contiguous() or tensor.stride(),
        tensor.get_device(),
    )


def _torch_stream(device: int) -> int:
    torch = sys.modules["torch"]
    try:  # without making an object of it
        handle: int = torch._C._cuda_getCurrentRawStream(device)
    except AttributeError:
        handle = torch.cuda.current_stream(device).cuda_stream
    return handle


_CUPY_ADDRESS = attrgetter("data.ptr")
_LIBRARIES = {
    "cupy": _Library(
        attrgetter("data.ptr", "dtype", "shape", "strides", "data.device_id"),
        lambda kind: _CUPY_ADDRESS,
        _cupy_stream,
    ),
    "torch": _Library(
        _look_at_tensor,
        lambda kind: kind.data_ptr,  # type: ignore[attr-defined]
        _torch_stream,
    ),
}


def _split_array(look: Any, pointers: list[int], numbers: list[int]) -> Any:
    pointers.append(look[0])
    return look[1:]


def _look_at_number(value: Any) -> Any:
    """Positive and finite as it is; others, some of which compare strangely, by their bits."""
    return value if SMALLEST <= value <= _FLT_MAX else (bits(value, "f32", "number"),)


def _split_number(look: Any, pointers: list[int], numbers: list[int]) -> Any:
    if type(look) is tuple:
        numbers.append(look[0])
        return "any number"
    numbers.append(bits(look, "f32", "number"))
    return "positive number"


def _look_at_qtensor(q: QTensor) -> Any:
    """What is found by its metadata, and the addresses of its arrays, which may have moved."""
    seen = q._seen
    if seen is not None:
        address, owners, pointers, look = seen
        if [*map(address, owners)] == pointers:
            return look
    return _look_at_parts(q)


class _Same:
    """Stands for everything that is equal to it, and is compared by identity."""


def _look_at_parts(q: QTensor) -> Any:
    parts = q.parts
    given = [array for array in parts[:5] if array is not None]
    (library,) = {array.library for array in given}
    facts = (q.format, q.shape, q.scale_layout, parts.decode)
    specs = tuple([None if array is None else array.spec for array in parts[:5]])
    if len(_metadata) >= _MOST_PLANS:
        _metadata.clear()
    same = _metadata.setdefault((facts, specs), _Same())
    pointers = [array.pointer for array in given]
    look = (same, *pointers)
    address = _LIBRARIES[library].address(type(parts.codes.owner))
    q.__dict__["_seen"] = address, [array.owner for array in given], pointers, look
    return look


_metadata: dict[Any, _Same] = {}


def _split_qtensor(look: Any, pointers: list[int], numbers: list[int]) -> Any:
    pointers += look[1:]
    return look[0]


def _look_at_epilogue(epilogue: Epilogue) -> Any:
    return (
        (compiled_alike(epilogue.fn), epilogue.pair, epilogue.halves, epilogue.axes),
        *[_LOOKS[type(array)](array) for array in epilogue.arrays],
    )


def _split_epilogue(look: Any, pointers: list[int], numbers: list[int]) -> Any:
    return look[0], *[_split_array(array, pointers, numbers) for array in look[1:]]


def _split_nothing(look: Any, pointers: list[int], numbers: list[int]) -> Any:
    return look


_NUMBER = _Look(_look_at_number, _split_number)
_KNOWN: dict[type, _Look] = {
    type(None): _Look(lambda none: None, _split_nothing),
    str: _Look(str, _split_nothing),
    float: _NUMBER,
    int: _NUMBER,
    np.float32: _NUMBER,
    np.float64: _NUMBER,
    QTensor: _Look(_look_at_qtensor, _split_qtensor),
    Epilogue: _Look(_look_at_epilogue, _split_epilogue),
    FunctionType: _Look(compiled_alike, _split_nothing),
}
#: Class of an argument -> its look. Arrays' classes are added as they are met.
_LOOKS: dict[type, Callable[[Any], Any]] = {kind: known.look for kind, known in _KNOWN.items()}


def _learn(kind: type, library: str) -> None:
    if kind not in _KNOWN:
        _KNOWN[kind] = _Look(_LIBRARIES[library].look, _split_array)
        _LOOKS[kind] = _KNOWN[kind].look


# What is remembered -------------------------------------------------------------------------------


#: A call, all of it: what launches it on a stream; what tells the current one of a device; that.
_Call = tuple[Callable[[int], None], Callable[[int], int], int]


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


_calls: dict[Any, _Call] = {}
_plans: dict[Any, _Plan] = {}


def forget() -> None:
    """Forget everything (for tests)."""
    for table in (_calls, _plans, _metadata):
        table.clear()


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
        looks = [_LOOKS[type(value)](value) for value in arguments]
        key = (name, options, *looks)
        found = _calls.get(key) or _moved(key, arguments)
    except _UNLIKE:
        return False
    if found is None:
        return False
    launch, current, device = found
    if stream is None:
        handle = current(device)
    else:
        handle = stream if type(stream) is int and stream >= 0 else given_stream(stream)
    launch(handle)
    return True


def _moved(key: tuple[Any, ...], arguments: tuple[Any, ...]) -> _Call | None:
    """A call that is known but for addresses and numbers; from now on, it is known."""
    kind, pointers, numbers = _kind(key, arguments)
    plan = _plans.get(kind)
    if plan is None:
        return None
    for place, low, high in plan.written:
        start, end = pointers[place] + low, pointers[place] + high
        for other, first, last in plan.arrays:
            if other != place and start < pointers[other] + last and pointers[other] + first < end:
                return None
    return _keep(key, plan, pointers, numbers)


def _kind(
    key: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[tuple[Any, ...], list[int], list[int]]:
    """What the plan of a call depends on; its addresses; its numbers."""
    pointers: list[int] = []
    numbers: list[int] = []
    metadata = [
        _KNOWN[type(value)].split(look, pointers, numbers)
        for value, look in zip(arguments, key[2:], strict=True)
    ]
    kind = (
        *key[:2],
        *metadata,
        tuple([pointer & 31 for pointer in pointers]),  # the most that plans ask for
        tuple(map(pointers.index, pointers)),
        tuple(map(numbers.index, numbers)),  # as bits: 0.0 and -0.0 differ, NaN does not
    )
    return kind, pointers, numbers


def _number_of(word: int) -> float:
    return float(np.uint32(word).view(np.float32))


def _keep(key: Any, plan: _Plan, pointers: list[int], numbers: list[int]) -> _Call:
    values = plan.pick((*pointers, *map(_number_of, numbers), *plan.constants))
    call: _Call = plan.prepared.bind(values), plan.stream, plan.device
    if len(_calls) >= _MOST_CALLS:
        _calls.clear()
    _calls[key] = call
    return call


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
    if len(libraries) != 1 or not libraries <= _LIBRARIES.keys():
        return
    (library,) = libraries
    for array in arrays:
        _learn(type(array.owner), library)
    try:
        key = (name, options, *[_LOOKS[type(value)](value) for value in arguments])
        kind, pointers, numbers = _kind(key, arguments)
        hash(key)
    except _UNLIKE:
        return
    plan = _plan(prepared(), buffers, outputs, arrays, pointers, numbers)
    if plan is None:
        return
    if len(_plans) >= _MOST_PLANS:
        _plans.clear()
    _plans[kind] = plan
    _keep(key, plan, pointers, numbers)


def _plan(
    prepared: Any,
    buffers: Mapping[str, Any],
    outputs: tuple[str, ...],
    arrays: list[Array],
    pointers: list[int],
    numbers: list[int],
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
    of = _LIBRARIES[arrays[0].library]
    return _Plan(
        prepared,
        picker([order[name] for name in prepared.names]),
        tuple(constants),
        tuple((place, *spans[place]) for place in sorted(targets & spans.keys())),
        tuple((place, *span) for place, span in spans.items()),
        of.stream,
        arrays[0].device or 0,
    )
