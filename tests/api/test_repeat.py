"""Calls like one before: whatever differs, they do what they would do if nothing were remembered.

What a call does is what it launches: plan, addresses and numbers, stream, device; or its error.
Each call is made, repeated, and then made with one thing changed; and the changed call is made
again by itself, with everything forgotten. Both must do the same.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import Epilogue, QTensor
from nvfp4.api import _repeat
from nvfp4.api.dequantize import dequantize as dequantize_tensor

from . import stubs
from .conftest import Card

RNG = np.random.default_rng(23)


class Memory:
    """Device memory in which arrays lie where a test wants them."""

    def __init__(self) -> None:
        self.bytes = np.zeros(1 << 24, np.uint8)
        self.start = -self.bytes.ctypes.data % 256
        self.used = 0

    def put(self, values: Any, skip: int = 0) -> stubs.CupyArray:
        """A copy, `skip` bytes after a multiple of 256."""
        values = np.array(values, order="C")
        array = self.over(values, self.used + skip)
        array.values[...] = values
        self.used += (values.nbytes + skip) // 256 * 256 + 512
        return array

    def over(self, like: np.ndarray, offset: int) -> stubs.CupyArray:
        """An array like one, at an offset, whatever lies there."""
        at = self.start + offset
        assert 0 <= at <= self.bytes.size - like.nbytes
        return stubs.CupyArray(np.ndarray(like.shape, like.dtype, self.bytes, at))

    def offset(self, array: stubs.CupyArray) -> int:
        """Where an array lies."""
        return int(array.data.ptr) - self.bytes.ctypes.data - self.start


class Made(NamedTuple):
    """A call: function and arguments."""

    function: Callable[..., Any]
    arguments: dict[str, Any]

    def __call__(self, **changed: Any) -> Any:
        return self.function(**{**self.arguments, **changed})


def there(memory: Memory, q: QTensor) -> QTensor:
    parts = {
        name: memory.put(getattr(q, name))
        for name in ("codes", "scales", "decode_scale", "groups")
        if getattr(q, name) is not None
    }
    return dataclasses.replace(q, **parts)


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


OFFSETS = np.array([0, 2, 2, 5], np.int32)


def double(value, row, column, expert):  # type: ignore[no-untyped-def]
    return value * np.float32(2)


def add_array(value, row, column, expert, bias):  # type: ignore[no-untyped-def]
    return value + np.float32(bias[column])


def quantize(m: Memory) -> Made:
    out = there(m, nvfp4.quantize(values(5, 64), "nvfp4"))
    return Made(nvfp4.quantize, {"x": m.put(values(5, 64)), "format": "nvfp4", "out": out})


def quantize_scaled(m: Memory) -> Made:
    call = quantize(m)
    return Made(call.function, {**call.arguments, "encode_scale": m.put(np.float32(2))})


def quantize_by_number(m: Memory) -> Made:
    call = quantize(m)
    return Made(call.function, {**call.arguments, "encode_scale": 2.0})


def grouped_quantize(m: Memory) -> Made:
    out = there(m, nvfp4.grouped_quantize(values(5, 64), "nvfp4", row_offsets=OFFSETS))
    return Made(
        nvfp4.grouped_quantize,
        {
            "x": m.put(values(5, 64)),
            "format": "nvfp4",
            "row_offsets": out.groups,
            "expert_ids": m.put(np.array([1, 0, 2])),
            "row_indices": m.put(np.array([4, 3, 2, 1, 0], np.int32)),
            "encode_scale": m.put(np.array([0.5, 1, 2], np.float32)),
            "out": out,
        },
    )


def matmul(m: Memory) -> Made:
    return Made(
        nvfp4.matmul,
        {
            "a": m.put(values(5, 64).astype(np.float16)),
            "b": there(m, nvfp4.quantize(values(32, 64), "mxfp4")),
            "alpha": 0.5,
            "out": m.put(np.zeros((5, 32), np.float32)),
            "out_dtype": "float32",
            "epilogue": Epilogue(add_array, m.put(values(32)), axes=("N",)),
        },
    )


def matmul_of_tensors(m: Memory) -> Made:
    return Made(
        nvfp4.matmul,
        {
            "a": there(m, nvfp4.quantize(values(5, 64), "nvfp4", encode_scale="row_amax")),
            "b": there(m, nvfp4.quantize(values(32, 64), "mxfp8", scale_layout="linear")),
            "alpha": m.put(np.float32(3)),
            "out": there(m, nvfp4.quantize(values(5, 32), "mxfp4")),
            "out_dtype": "mxfp4",
            "epilogue": double,
        },
    )


def grouped_matmul(m: Memory) -> Made:
    a = there(m, nvfp4.grouped_quantize(values(5, 64), "mxfp8", row_offsets=OFFSETS))
    return Made(
        nvfp4.grouped_matmul,
        {
            "a": a,
            "b": there(m, nvfp4.quantize(values(3, 32, 64), "mxfp4")),
            "row_offsets": a.groups,
            "expert_ids": m.put(np.array([1, 0, 2], np.int32)),
            "alpha": m.put(np.array([0.5, 1, 2], np.float32)),
            "out": m.put(np.zeros((5, 32), ml_dtypes.bfloat16)),
        },
    )


def grouped_matmul_of_rows(m: Memory) -> Made:
    return Made(
        nvfp4.grouped_matmul,
        {
            "a": m.put(values(4, 64).astype(np.float16)),
            "b": there(m, nvfp4.quantize(values(3, 32, 64), "mxfp4")),
            "row_offsets": m.put(OFFSETS),
            "row_indices": m.put(np.array([3, 2, 1, 0, 0])),
            "out": m.put(np.zeros((5, 32), np.float16)),
            "out_dtype": "float16",
        },
    )


def dequantize(m: Memory) -> Made:
    q = there(m, nvfp4.grouped_quantize(values(5, 64), "nvfp4", row_offsets=OFFSETS))
    return Made(dequantize_tensor, {"q": q, "out": m.put(np.zeros((5, 64), np.float32))})


def interleave(m: Memory) -> Made:
    scales = m.put(np.arange(10, dtype=np.uint8).reshape(5, 2))
    out = m.put(np.zeros((1, 1, 32, 4, 4), np.uint8))
    return Made(nvfp4.interleave_scales, {"scales": scales, "out": out})


def deinterleave(m: Memory) -> Made:
    scales = m.put(np.zeros((1, 1, 32, 4, 4), np.uint8))
    out = m.put(np.zeros((5, 2), np.uint8))
    return Made(nvfp4.deinterleave_scales, {"scales": scales, "shape": (5, 2), "out": out})


CALLS = [
    quantize, quantize_scaled, quantize_by_number, grouped_quantize, matmul, matmul_of_tensors,
    grouped_matmul, grouped_matmul_of_rows, dequantize, interleave, deinterleave,
]  # fmt: skip
calls = pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)


@pytest.fixture
def memory() -> Memory:
    return Memory()


def outcome(card: Card, call: Callable[..., Any], **changed: Any) -> Any:
    """What a call launches, or its error."""
    before = len(card.outcomes)
    try:
        call(**changed)
    except Exception as error:
        return type(error), str(error)
    (made,) = card.outcomes[before:]
    return made


def known(card: Card, call: Made) -> None:
    """Make a call until it is known."""
    call()
    before = len(card.repeated)
    call()
    assert len(card.repeated) == before + 1


def same_as_alone(card: Card, call: Made, **changed: Any) -> Any:
    """A changed call after the call, and again after itself, does what it does alone."""
    known(card, call)
    after = outcome(card, call, **changed)
    again = outcome(card, call, **changed)
    _repeat.forget()
    alone = outcome(card, call, **changed)
    assert after == alone
    assert again == alone
    _repeat.forget()
    return alone


def leaves(value: Any) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """The arrays in an argument, and what puts another one in the place of each."""
    if isinstance(value, stubs.CupyArray):
        yield value, lambda new: new
    elif isinstance(value, QTensor):
        for name in ("codes", "scales", "decode_scale", "groups"):
            part = getattr(value, name)
            if part is not None:
                yield part, lambda new, name=name: dataclasses.replace(value, **{name: new})
    elif isinstance(value, Epilogue):
        for array in value.arrays:
            yield array, lambda new: value.with_arrays((new,))


# Everything that an array can be ------------------------------------------------------------------

_OTHER_TYPE = {"uint8": np.int8, "int32": np.int64, "int64": np.int32, "float32": np.float16}

CHANGES: dict[str, Callable[[Memory, stubs.CupyArray], Any]] = {
    "at another address": lambda m, a: m.put(a.values),
    "one element further": lambda m, a: m.put(a.values, a.values.itemsize),
    "sixteen bytes further": lambda m, a: m.put(a.values, 16),
    "of another dtype": lambda m, a: m.put(
        a.values.astype(_OTHER_TYPE.get(a.dtype.name, np.float32))
    ),
    "one row less": lambda m, a: m.put(a.values[:-1] if a.values.ndim else a.values[None]),
    "an axis in front": lambda m, a: m.put(a.values[None]),
    "rows apart": lambda m, a: _apart(m, a, 0),
    "columns apart": lambda m, a: _apart(m, a, -1),
    "transposed": lambda m, a: stubs.CupyArray(np.asfortranarray(a.values)),
    "on another device": lambda m, a: stubs.CupyArray(a.values, device=1),
    "on the host": lambda m, a: a.values,
    "a list": lambda m, a: a.values.tolist(),
    "missing": lambda m, a: None,
    "of another library": lambda m, a: stubs.CudaInterfaceOnly(a.values),
}


def _apart(m: Memory, a: stubs.CupyArray, axis: int) -> stubs.CupyArray:
    if not a.values.ndim:
        return m.put(a.values[None])
    wide = m.put(np.repeat(a.values, 2, axis=axis))
    return stubs.CupyArray(wide.values[::2] if axis == 0 else wide.values[..., ::2])


@calls
@pytest.mark.parametrize("change", CHANGES)
def test_a_call_with_another_array_does_what_it_does_alone(
    card: Card, memory: Memory, make: Callable[[Memory], Made], change: str
) -> None:
    call = make(memory)
    made = 0
    for name, argument in call.arguments.items():
        for array, put in leaves(argument):
            try:
                changed = put(CHANGES[change](memory, array))
            except (TypeError, ValueError):  # no such QTensor
                continue
            if name == "out" and changed is None:
                continue  # which allocates
            same_as_alone(card, call, **{name: changed})
            made += 1
    assert made >= (change != "missing")


@calls
def test_a_call_at_other_addresses_goes_straight_to_the_launch(
    card: Card, memory: Memory, make: Callable[[Memory], Made]
) -> None:
    call = make(memory)
    known(card, call)
    for name, argument in call.arguments.items():
        for array, put in leaves(argument):
            if array is getattr(call.arguments.get("out"), "groups", None):
                continue  # which must be the call's row_offsets
            if array is getattr(call.arguments.get("a"), "groups", array) is not None:
                continue
            planned = len(card.planned)
            call(**{name: put(memory.put(array.values))})
            assert len(card.planned) == planned, name


@calls
def test_what_overlaps_is_found_at_any_address(
    card: Card, memory: Memory, make: Callable[[Memory], Made]
) -> None:
    call = make(memory)
    refused = 0
    outputs = [array for array, _ in leaves(call.arguments["out"])]
    for name, argument in call.arguments.items():
        for array, put in leaves(argument):
            for output in outputs:
                ends = output.values.nbytes, -array.values.nbytes
                for shift in (0, 16, -16, *ends, ends[0] - 16, ends[1] + 16):
                    at = memory.offset(output) + shift
                    if at < 0:
                        continue
                    lies_over = put(memory.over(array.values, at))
                    found = same_as_alone(card, call, **{name: lies_over})
                    refused += "overlap" in str(found[1])
    assert refused >= 3


@calls
def test_arrays_with_other_memory_or_shape_since_are_noticed(
    card: Card, memory: Memory, make: Callable[[Memory], Made]
) -> None:
    call = make(memory)
    for argument in call.arguments.values():
        for array, _ in leaves(argument):
            before = array.values
            for new in (memory.put(before), memory.put(before[:-1] if before.ndim else [before])):
                known(card, call)
                array.values = new.values
                after = outcome(card, call)
                _repeat.forget()
                assert after == outcome(card, call)
                array.values = before
                _repeat.forget()


@calls
def test_arrays_that_took_the_place_of_others_are_looked_at(
    card: Card, memory: Memory, make: Callable[[Memory], Made]
) -> None:
    """Freed, and their addresses given out anew with other metadata."""
    call = make(memory)
    for name, argument in call.arguments.items():
        for array, put in leaves(argument):
            other = _OTHER_TYPE.get(array.dtype.name, np.float32)
            for like in (
                np.empty(array.values[:-1].shape if array.values.ndim else (1,), array.dtype),
                np.empty(array.values.shape, other),
                np.empty((1, *array.values.shape), array.dtype),
            ):
                try:
                    changed = put(memory.over(like, memory.offset(array)))
                except (TypeError, ValueError):
                    continue
                same_as_alone(card, call, **{name: changed})


# Everything else ----------------------------------------------------------------------------------


class Stream:
    """A stream of another library."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 48


def shifted(by: float) -> Callable[..., Any]:
    amount = np.float32(by)

    def shift(value, row, column, expert):  # type: ignore[no-untyped-def]
        return value + amount

    return shift


NUMBERS = (
    1, 1.0, 2, 0.1, np.float32(0.1), 0.0, -0.0, -1.0, float("nan"), float("inf"), -float("inf"),
    1e39, 1e-40, 2**200, True, np.float16(2), np.int64(3), np.float64(0.1), 1 + 0j, "1", [1.0],
)  # fmt: skip
OTHERS: dict[str, tuple[Any, ...]] = {
    "format": ("mxfp4", "mxfp8", "no", nvfp4.formats.NVFP4, None, np.float32),
    "scale_rounding": ("rceil", "even", "no", None),
    "scale_layout": ("tcgen", "linear", "no"),
    "encode_scale": (None, "amax", "row_amax", "no", *NUMBERS),
    "alpha": (None, *NUMBERS),
    "out_dtype": ("float32", "float16", "bfloat16", "mxfp4", "nvfp4", np.float32, np.float16,
                  np.dtype("float32"), ml_dtypes.bfloat16, "no", None, 1, ["float32"]),
    "epilogue": (None, double, shifted(1), shifted(2), Epilogue(double), Epilogue(double, axes=()),
                 abs, "no", nvfp4.epilogues.relu2()),
    "expert_ids": (None,),
    "row_indices": (None,),
    "dtype": ("float32", "float16", np.float32, "no"),
    "shape": ((5, 2), [5, 2], (5, 3), (5.0, 2), 5),
    "stream": (0, 7, 8, -1, "no", True, Stream(), None),
    "out": (None, "no", 1),
}  # fmt: skip


@calls
@pytest.mark.parametrize("name", OTHERS)
def test_a_call_with_another_option_does_what_it_does_alone(
    card: Card, memory: Memory, make: Callable[[Memory], Made], name: str
) -> None:
    call = make(memory)
    code = call.function.__code__
    if name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        with pytest.raises(TypeError, match=name):
            call(**{name: None})
        return
    before = call.arguments.get("out")
    for other in OTHERS[name]:
        if name == "out" and other is None:
            continue  # allocates
        found = same_as_alone(card, call, **{name: other})
        if isinstance(found[0], tuple) and name in ("alpha", "encode_scale", "stream"):
            assert call(**{name: other}) is before


def test_each_number_arrives_as_it_is(card: Card, memory: Memory) -> None:
    call = matmul(memory)
    known(card, call)
    for number in (0.0, -0.0, 0.0, 1.5, float("nan"), -2.0, 1e39, np.float32(0.1), 0.1, 1, True):
        if number is True:
            with pytest.raises(TypeError, match="alpha"):
                call(alpha=number)
            continue
        call(alpha=number)
        with np.errstate(over="ignore"):
            assert card.outcomes[-1][1]["alpha"] == np.float32(number).tobytes()
    planned = len(card.planned)
    call(alpha=3.25)
    call(alpha=-3.25)
    assert len(card.planned) == planned


def test_the_stream_is_that_of_each_call(card: Card, cupy: stubs.Cupy, memory: Memory) -> None:
    call = matmul(memory)
    known(card, call)
    for current, given, expected in ((0, None, 0), (16, None, 16), (16, 7, 7), (16, Stream(), 48)):
        cupy.streams = {0: current}
        call(stream=given)
        assert card.repeated[-1][1] == expected
    assert len(card.launched) == 1


# Epilogues ----------------------------------------------------------------------------------------

FACTOR = np.float32(2)


def by_helper(value):  # type: ignore[no-untyped-def]
    return value * FACTOR


def by_global(value, row, column, expert):  # type: ignore[no-untyped-def]
    return by_helper(value)


def test_an_epilogue_whose_globals_changed_is_compiled_anew(
    card: Card, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = matmul(memory)
    call = Made(call.function, {**call.arguments, "epilogue": by_global})
    known(card, call)
    monkeypatch.setitem(globals(), "FACTOR", np.float32(3))
    planned = len(card.planned)
    call()
    assert len(card.planned) == planned + 1
    call()
    assert len(card.planned) == planned + 1
    monkeypatch.setitem(globals(), "by_helper", lambda value: -value)
    call()
    assert len(card.planned) == planned + 2


def test_an_epilogue_whose_closure_or_code_changed_is_compiled_anew(
    card: Card, memory: Memory
) -> None:
    factor = np.float32(2)

    def scaled(value, row, column, expert):  # type: ignore[no-untyped-def]
        return value * factor

    call = matmul(memory)
    call = Made(call.function, {**call.arguments, "epilogue": scaled})
    known(card, call)
    planned = len(card.planned)
    factor = np.float32(3)
    call()
    assert len(card.planned) == planned + 1
    known(card, call)
    planned = len(card.planned)
    scaled.__code__ = (lambda: factor and (lambda value, row, column, expert: factor))().__code__
    call()
    assert len(card.planned) == planned + 1


def test_an_epilogue_that_is_made_anew_for_each_call_is_known(card: Card, memory: Memory) -> None:
    call = matmul(memory)
    bias = memory.put(values(1, 32))
    known(card, Made(call.function, {**call.arguments, "epilogue": nvfp4.epilogues.bias(bias)}))
    planned = len(card.planned)
    for _ in range(3):
        call(epilogue=nvfp4.epilogues.bias(memory.put(values(1, 32))))
    assert len(card.planned) == planned
    call(epilogue=shifted(3))
    planned = len(card.planned)
    call(epilogue=shifted(3))
    assert len(card.planned) == planned
    call(epilogue=shifted(4))
    assert len(card.planned) == planned + 1


def test_functions_that_are_gone_are_forgotten(card: Card, memory: Memory) -> None:
    from nvfp4 import epilogue

    call = matmul(memory)
    call(epilogue=shifted(5))
    before = len(epilogue._seen)
    for _ in range(20):
        call(epilogue=shifted(5))
    gc.collect()
    assert len(epilogue._seen) <= before


# Memory -------------------------------------------------------------------------------------------


@calls
def test_nothing_is_kept_alive(card: Card, memory: Memory, make: Callable[[Memory], Made]) -> None:
    call = make(memory)
    known(card, call)
    card.launched.clear()
    arrays = [array for argument in call.arguments.values() for array, _ in leaves(argument)]
    gone = [weakref.ref(array) for array in arrays]
    tensors = [value for value in call.arguments.values() if isinstance(value, QTensor)]
    gone += [weakref.ref(value) for value in tensors]
    del call, arrays, tensors
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_the_number_of_remembered_calls_is_bounded(
    card: Card, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_repeat, "_MOST_CALLS", 8)
    monkeypatch.setattr(_repeat, "_MOST_PLANS", 4)
    call = matmul(memory)
    for i in range(1, 40):
        call(alpha=float(i))
        rows = memory.put(np.zeros((i, 64), np.float16))
        call(a=rows, out=memory.put(np.zeros((i, 32), np.float32)))
        assert len(_repeat._calls) <= 8
        assert len(_repeat._plans) <= 4
        assert len(_repeat._metadata) <= 4


# Tensors of PyTorch -------------------------------------------------------------------------------


def test_what_only_tensors_of_pytorch_can_be_is_noticed(card: Card, torch: stubs.Torch) -> None:
    def there(x: np.ndarray) -> stubs.Tensor:
        return stubs.Tensor(torch, x, "cuda:0")

    b = nvfp4.quantize(there(values(32, 64)), "mxfp4")
    a = there(values(5, 64).astype(np.float16))
    out = there(np.zeros((5, 32), np.float32))
    call = Made(nvfp4.matmul, {"a": a, "b": b, "out": out, "out_dtype": "float32"})
    for tensor in (a, out):
        known(card, call)
        tensor.requires_grad = True
        with pytest.raises(ValueError, match="requires grad"):
            call()
        torch.grad_enabled = False
        call()
        torch.grad_enabled, tensor.requires_grad, tensor.negated = True, False, True
        with pytest.raises(ValueError, match="resolve_neg"):
            call()
        tensor.negated = False


# Threads ------------------------------------------------------------------------------------------


def test_threads_may_make_the_same_calls(card: Card, memory: Memory) -> None:
    call = matmul(memory)
    rows = [memory.put(values(5, 64).astype(np.float16)) for _ in range(4)]
    outs = [memory.put(np.zeros((5, 32), np.float32)) for _ in range(4)]
    call()
    failed: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for n in range(200):
                if n % 50 == 0:
                    _repeat.forget()
                call(a=rows[i], out=outs[i], stream=i)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(card.outcomes) == 801
    for _, buffers, stream, _ in card.outcomes[1:]:
        assert buffers["a"] == rows[stream].data.ptr
        assert buffers["out"] == outs[stream].data.ptr
