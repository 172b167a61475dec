"""What an argument of a call is, as quickly as its library tells.

A *look* at an argument is hashable. Of CuPy's arrays it is all that calls depend on but for strides
of arrays with gaps. Of PyTorch's it is the address alone; the metadata of all tensors of a call are
then compared at once, by code of the library (:func:`watched`), because in Python the same costs
several times as much. Any of it may have changed in place, so nothing is taken from an array's
identity. What holds arrays, a QTensor or an epilogue, keeps what was found of them the last time,
and where they were: that is looked at again. A look that cannot be had raises an error.

:func:`describe` says what plans depend on: metadata, apart from addresses and numbers.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Callable
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from .._card import bits, picker
from ..driver import count_devices
from ..epilogue import Epilogue, compiled_alike, seen_function
from ..errors import ToolchainError
from ..tensor import QTensor
from ._encode import SMALLEST

__all__ = ["LIBRARIES", "LOOKS", "Library", "Watched", "describe", "forget", "learn", "watched"]

_FLT_MAX = 3.4028234663852886e38
_MOST = 4096

#: What looks leave open of arrays: what tells it, and what it told of each array of a call; or
#: None, and what tells whether arrays are alike. None: looks tell all.
Alike = tuple[Callable[[Any], Any], list[Any]] | tuple[None, Callable[..., bool]] | None

#: What finds the arrays among a call's arguments; which argument is an epilogue that has some; how
#: arrays are compared with those of the call. None: there is nothing to compare.
Watched = (
    tuple[Callable[[Any], tuple[Any, ...]], int | None, Callable[[Any], Any] | None, Any] | None
)


class Library(NamedTuple):
    """How arrays of a library are looked at."""

    #: Of an array's class: the function that tells an array's address.
    address: Callable[[type], Callable[[Any], int]]
    #: Of an array's class: an array's look.
    look: Callable[[type], Callable[[Any], Any]]
    #: Metadata of an array; an error if calls refuse it.
    facts: Callable[[Any], tuple[Any, ...]]
    #: Of arrays: how others of the same looks are compared with them.
    alike: Callable[[tuple[Any, ...]], Alike]
    #: Makes the function that tells the handle of a device's current stream.
    stream: Callable[[], Callable[[int], int]]


# CuPy ---------------------------------------------------------------------------------------------

_CUPY_ADDRESS = attrgetter("data.ptr")
_CUPY_STRIDES = attrgetter("strides")
_CUPY_FACTS = attrgetter("dtype", "shape", "strides", "data.device_id")


def _cupy_look(kind: type) -> Callable[[Any], Any]:
    names = ["data.ptr", "dtype", "shape"]
    # A flag is had in a fifth of the time of a tuple of strides.
    names.append("_c_contiguous" if hasattr(kind, "_c_contiguous") else "strides")
    if _devices() != 1:  # else all arrays are there
        names.append("data.device_id")
    return attrgetter(*names)


def _cupy_alike(arrays: tuple[Any, ...]) -> Alike:
    if all([getattr(array, "_c_contiguous", True) for array in arrays]):
        return None
    return _CUPY_STRIDES, [*map(_CUPY_STRIDES, arrays)]


@functools.cache
def _devices() -> int:
    """How many GPUs this process sees; 0 without a driver."""
    try:
        return count_devices()
    except ToolchainError:
        return 0


def _cupy_stream() -> Callable[[int], int]:
    current = sys.modules["cupy"].cuda.get_current_stream
    return lambda device: current(device).ptr  # type: ignore[no-any-return]


# PyTorch ------------------------------------------------------------------------------------------


def _tensor_facts(tensor: Any) -> tuple[Any, ...]:
    """Tensors that are contiguous are alike, whatever the strides of axes of one."""
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ValueError("requires grad")
    if tensor.is_neg():
        raise ValueError("is negated")
    return (
        tensor.dtype,
        tensor.shape,
        tensor.is_contiguous() or tensor.stride(),
        tensor.get_device(),
    )


@functools.lru_cache(maxsize=1)
def _guards(torch: Any) -> Callable[..., Any] | None:
    """The guards of ``torch.compile``, which compare tensors in C++; None: use them not.

    They are no public interface: they are used where they tell apart what must be.
    """
    try:
        make = functools.partial(
            torch._C._dynamo.guards.TensorGuards, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        with torch.inference_mode(False):
            numbers = torch.zeros((2, 2), dtype=torch.complex64, device="cpu")
            one, two = numbers.real, numbers.real
            check = make(one, two).check
            others = (
                one[:1],
                one.t(),
                one.contiguous(),
                one.view(torch.int32),
                one.unsqueeze(0),
                one.to("meta"),
                one.detach().requires_grad_(True),
                numbers.conj().imag,
                torch.nn.Parameter(one, requires_grad=False),
            )
            told = [check(two, one), *[check(one, other) for other in others]]
    except Exception:  # of whatever kind: another version's
        return None
    return make if told == [True] + [False] * len(others) else None


def _tensors_alike(tensors: tuple[Any, ...]) -> Alike:
    make = _guards(sys.modules["torch"])
    # Guards that were made of a tensor that requires grad do not look at the grad mode, and those
    # of one that is there twice are never satisfied.
    if (
        make is not None
        and not any([tensor.requires_grad for tensor in tensors])
        and len({*map(id, tensors)}) == len(tensors)
    ):
        return None, make(*tensors).check
    return _tensor_facts, [*map(_tensor_facts, tensors)]


def _torch_stream() -> Callable[[int], int]:
    torch = sys.modules["torch"]
    try:  # without making an object of it
        handle: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    except AttributeError:
        return lambda device: torch.cuda.current_stream(device).cuda_stream  # type: ignore[no-any-return]
    return handle


LIBRARIES = {
    "cupy": Library(
        lambda kind: _CUPY_ADDRESS,
        _cupy_look,
        _CUPY_FACTS,
        _cupy_alike,
        _cupy_stream,
    ),
    "torch": Library(
        lambda kind: kind.data_ptr,  # type: ignore[attr-defined]
        lambda kind: kind.data_ptr,  # type: ignore[attr-defined]
        _tensor_facts,
        _tensors_alike,
        _torch_stream,
    ),
}


# QTensors -----------------------------------------------------------------------------------------


class _Same:
    """Stands for everything that is equal to it, and is compared by identity."""


class _Held(_Same):
    """Stands for QTensors of the same metadata over the same memory."""

    __slots__ = ("metadata", "pointers")

    def __init__(self, metadata: _Same, pointers: list[int]) -> None:
        self.metadata, self.pointers = metadata, pointers


_metadata: dict[Any, _Same] = {}
#: Also of epilogues that compile alike, over the same memory.
_held: dict[Any, _Same] = {}


def _look_at_qtensor(q: QTensor) -> _Held:
    """What is found by its metadata, and the addresses of its arrays, which may have moved."""
    seen = q._seen
    if seen is not None:
        # One by one: as a list they cost half as much again.
        address, a, b, c, d, e, at_a, at_b, at_c, at_d, at_e, look = seen
        if address is None:  # CuPy, whose arrays say by an object where they are
            if (
                a.data is at_a
                and b.data is at_b
                and c.data is at_c
                and (d is None or d.data is at_d)
                and (e is None or e.data is at_e)
            ):
                return look  # type: ignore[no-any-return]
        elif (
            address(a) == at_a
            and address(b) == at_b
            and address(c) == at_c
            and (d is None or address(d) == at_d)
            and (e is None or address(e) == at_e)
        ):
            return look  # type: ignore[no-any-return]
    parts = q.parts
    *arrays, decode = parts
    (library,) = {array.library for array in arrays if array is not None}
    specs = tuple([None if array is None else array.spec for array in arrays])
    same = _one_of(_metadata, (q.format, q.shape, q.scale_layout, decode, specs), _Same())
    pointers = [array.pointer for array in arrays if array is not None]
    found: _Held = _one_of(_held, (same, *pointers), _Held(same, pointers))
    address, owners = None, [None if array is None else array.owner for array in arrays]
    if library == "cupy":
        places = [None if owner is None else owner.data for owner in owners]
    else:
        address = LIBRARIES[library].address(type(parts.codes.owner))
        places = [None if array is None else array.pointer for array in arrays]
    q.__dict__["_seen"] = address, *owners, *places, found
    return found


def _one_of(table: dict[Any, Any], key: Any, new: Any) -> Any:
    if len(table) >= _MOST:
        table.clear()
    return table.setdefault(key, new)


def _describe_qtensor(q: QTensor, pointers: list[int], numbers: list[int]) -> Any:
    look = _look_at_qtensor(q)
    pointers += look.pointers
    return look.metadata


# Numbers and epilogues ----------------------------------------------------------------------------


def _describe_number(value: Any, pointers: list[int], numbers: list[int]) -> Any:
    """Positive and finite as float32 or not, which is all that plans may ask."""
    numbers.append(bits(value, "f32", "number"))
    return "positive number" if SMALLEST <= value <= _FLT_MAX else "any number"


def _look_at_epilogue(epilogue: Epilogue) -> _Same:
    """What is found by what it compiles to, as of now, and by the looks at its arrays."""
    seen = epilogue._seen
    if seen is not None:
        fn, code, defaults, reached, look, first, at_first, others, at_others, found = seen
        # What `compiled_alike` would look at, which had to find the function first.
        if (
            fn.__code__ is code
            and fn.__defaults__ is defaults
            and (first is None or look(first) == at_first)
            and (others is None or [*map(look, others)] == at_others)
        ):
            try:
                for ask, at, value in reached:
                    if ask(at) is not value:
                        break
                else:
                    return found  # type: ignore[no-any-return]
            except (KeyError, ValueError):  # a variable is gone
                pass
    # An epilogue that is made for one call comes here alone.
    fn, arrays = epilogue.fn, epilogue.arrays
    _, code, defaults, reached, compiled = seen_function(fn)
    look = first = at_first = others = at_others = None
    key: tuple[Any, ...] = compiled, epilogue.pair, epilogue.halves, epilogue.axes
    if arrays:
        first = arrays[0]
        look = LOOKS[type(first)]
        at_first = look(first)
        key = *key, at_first
        if len(arrays) > 1:
            others = arrays[1:]
            at_others = [*map(look, others)]  # an error: of another library
            key = *key, *at_others
    found = _held.get(key) or _one_of(_held, key, _Same())
    epilogue.__dict__["_seen"] = (
        fn, code, defaults, reached, look, first, at_first, others, at_others, found,
    )  # fmt: skip
    return found  # type: ignore[no-any-return]


def _describe_epilogue(epilogue: Epilogue, pointers: list[int], numbers: list[int]) -> Any:
    arrays = [_describe_array(array, pointers, numbers) for array in epilogue.arrays]
    fn = compiled_alike(epilogue.fn)
    return (fn, epilogue.pair, epilogue.halves, epilogue.axes, *arrays)


# All of them --------------------------------------------------------------------------------------

#: Class of an argument -> its look. Looks at values of different kinds are never equal: an array's
#: is an int or begins with one, a number's bytes or begins with a word. Functions in C are a third
#: of the price of others.
LOOKS: dict[type, Callable[[Any], Any]] = {
    type(None): {}.get,  # None
    str: str,
    float: struct.Struct("<d").pack,
    np.float32: struct.Struct("<d").pack,
    np.float64: struct.Struct("<d").pack,
    int: lambda value: ("int", value),
    QTensor: _look_at_qtensor,
    Epilogue: _look_at_epilogue,
    FunctionType: compiled_alike,
}
_DESCRIBE: dict[type, Callable[[Any, list[int], list[int]], Any]] = {
    type(None): lambda value, pointers, numbers: None,
    str: lambda value, pointers, numbers: value,
    float: _describe_number,
    np.float32: _describe_number,
    np.float64: _describe_number,
    int: _describe_number,
    QTensor: _describe_qtensor,
    Epilogue: _describe_epilogue,
    FunctionType: lambda value, pointers, numbers: compiled_alike(value),
}
_ARRAYS: dict[type, Library] = {}
_ADDRESSES: dict[type, Callable[[Any], int]] = {}


def learn(kind: type, library: str) -> None:
    """From now on, look at arrays of this class."""
    if kind not in LOOKS:
        _ARRAYS[kind] = LIBRARIES[library]
        _DESCRIBE[kind] = _describe_array
        _ADDRESSES[kind] = LIBRARIES[library].address(kind)
        LOOKS[kind] = LIBRARIES[library].look(kind)


def forget() -> None:
    """Forget what QTensors have in common (for tests)."""
    _metadata.clear()
    _held.clear()


def _describe_array(array: Any, pointers: list[int], numbers: list[int]) -> Any:
    kind = type(array)
    pointers.append(_ADDRESSES[kind](array))
    return _ARRAYS[kind].facts(array)


def describe(value: Any, pointers: list[int], numbers: list[int]) -> Any:
    """What plans depend on of an argument.

    Addresses are appended to `pointers`, the bits of numbers, as float32, to `numbers`.
    """
    return _DESCRIBE[type(value)](value, pointers, numbers)


def watched(arguments: tuple[Any, ...]) -> Watched:
    """What finds the arrays of a call's arguments, and how others are compared with them.

    Not the arrays of QTensors, which were checked when the tensor was made: in other memory they
    are noticed by their addresses.

    Raises
    ------
    ValueError
        Arrays of several libraries, or one that calls refuse.
    """
    pick = picker([i for i, value in enumerate(arguments) if type(value) in _ARRAYS])
    epilogues = [i for i, value in enumerate(arguments) if type(value) is Epilogue and value.arrays]
    at = None
    arrays = pick(arguments)
    if epilogues:
        (at,) = epilogues
        arrays += arguments[at].arrays
    if not arrays:
        return None
    (library,) = {_ARRAYS[type(array)] for array in arrays}
    alike = library.alike(arrays)
    return None if alike is None else (pick, at, *alike)
