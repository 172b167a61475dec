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
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nvfp4 import QTensor
from nvfp4.api import _looks, _repeat

from . import stubs
from .conftest import Card
from .repeated import (
    Made,
    Memory,
    calls,
    grouped_matmul,
    known,
    leaves,
    matmul,
    outcome,
    same_as_alone,
    values,
)

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
            except (TypeError, ValueError):  # no such QTensor: that is one way to notice
                made += name in ("b", "q")
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
    groups = [getattr(value, "groups", None) for value in call.arguments.values()]
    for argument in call.arguments.values():
        for array, _ in leaves(argument):
            before = array.values
            for new in (memory.put(before), memory.put(before[:-1] if before.ndim else [before])):
                known(card, call)
                array.values = new.values
                after = outcome(card, call)
                if new.values.shape == before.shape and array not in groups:
                    assert new.data.ptr in after[1].values()
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


@calls
def test_views_that_begin_alike_are_told_apart_in_any_order(
    card: Card, memory: Memory, make: Callable[[Memory], Made]
) -> None:
    """More of them than are remembered for one address."""
    call = make(memory)
    for name, argument in call.arguments.items():
        for array, put in leaves(argument):
            values = array.values
            if not values.ndim:
                continue
            wide = stubs.CupyArray(np.ndarray(values.shape, values.dtype, np.zeros(1 << 18)))
            like = [values.shape, (1, *values.shape), (values.size,), (1, 1, *values.shape)]
            views = [wide.values.reshape(shape) for shape in like]
            views += [wide.values[:-1], wide.values[::2], wide.values.T, wide.values.view(np.int8)]
            changed = []
            for view in views:
                try:
                    changed.append({name: put(stubs.CupyArray(view))})
                except (TypeError, ValueError):
                    continue
            alone = []
            for one in changed:
                _repeat.forget()
                alone.append(outcome(card, call, **one))
            _repeat.forget()
            known(card, call)
            for order in (1, -1, 1):
                seen = [outcome(card, call, **one) for one in changed[::order]]
                assert seen[::order] == alone


def test_views_that_begin_alike_are_each_remembered(card: Card, memory: Memory) -> None:
    """Those that differ in strides alone are found by the same, and are kept in a short list."""
    call = matmul(memory)
    rows = memory.put(values(60, 64).astype(np.float16))
    result = memory.put(np.zeros((8, 32), np.float32))
    most = _repeat._MOST_VIEWS
    views = [{"a": rows[: 5 * step : step]} for step in range(2, 2 + most)]
    views += [{"a": rows[:n], "out": result[:n]} for n in range(1, 1 + most)]
    for view in views:
        call(**view)
    planned = len(card.planned)
    kept = dict(_repeat._calls)
    for view in views + views[::-1]:
        call(**view)
    assert len(card.planned) == planned
    assert _repeat._calls == kept
    call(a=rows[: 5 * 9 : 9])
    found = [len(_repeat.views(one)) for one in _repeat._calls.values()]
    assert sorted(found) == [1] * most + [most]


def test_rows_that_lie_further_apart_are_noticed(card: Card, memory: Memory) -> None:
    """At one address and of one shape; only strides differ."""
    call = matmul(memory)
    wide = memory.put(values(20, 64).astype(np.float16))
    two = Made(call.function, {**call.arguments, "a": wide[:10:2]})
    found = same_as_alone(card, two, a=wide[:20:4])
    assert dict(found[0][0][1:])["a_row_stride"] == 256


def test_cupy_without_a_flag_for_contiguous_arrays_is_read_by_strides(
    card: Card, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(stubs.CupyArray, "_c_contiguous")
    monkeypatch.delitem(_looks.LOOKS, stubs.CupyArray, raising=False)
    test_rows_that_lie_further_apart_are_noticed(card, memory)
    call = matmul(memory)
    a = call.arguments["a"].values
    same_as_alone(card, call, a=stubs.CupyArray(np.asfortranarray(a)))


def test_where_there_is_one_device_all_else_of_cupys_arrays_is_looked_at(
    card: Card, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_looks, "_devices", lambda: 1)
    monkeypatch.delitem(_looks.LOOKS, stubs.CupyArray, raising=False)
    call = grouped_matmul(memory)
    known(card, call)
    assert "data.device_id" not in str(_looks.LOOKS[stubs.CupyArray])
    for change in CHANGES.keys() - {"on another device"}:
        for name in ("row_offsets", "expert_ids", "alpha", "out"):
            changed = CHANGES[change](memory, call.arguments[name])
            if name != "out" or changed is not None:
                same_as_alone(card, call, **{name: changed})


def test_a_number_equal_to_an_address_is_a_number(card: Card, memory: Memory) -> None:
    call = matmul(memory)
    scale = memory.put(np.float32(3))
    for array, number in ((scale, scale.data.ptr), (scale, float(scale.data.ptr))):
        same_as_alone(card, Made(call.function, {**call.arguments, "alpha": array}), alpha=number)
        same_as_alone(card, Made(call.function, {**call.arguments, "alpha": number}), alpha=array)


def test_tile_starts_with_other_memory_since_are_noticed(card: Card, memory: Memory) -> None:
    call = grouped_matmul(memory)
    starts = memory.put(np.array([0, 1, 1], np.int32))
    a = dataclasses.replace(call.arguments["a"], tile_starts=starts)
    call = Made(call.function, {**call.arguments, "a": a})
    known(card, call)
    starts.values = memory.put(starts.values).values
    after = outcome(card, call)
    assert after[1]["tile_starts"] == starts.data.ptr
    _repeat.forget()
    assert outcome(card, call) == after


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
    monkeypatch.setattr(_looks, "_MOST", 4)
    call = matmul(memory)
    codes = memory.put(np.zeros((40, 32), np.uint8))
    scales = memory.put(np.zeros((40, 2), np.uint8))
    for i in range(1, 40):
        call(alpha=float(i))
        b = QTensor.from_parts(
            codes[:i], scales[:i], "mxfp4", decode_scale=call.arguments["b"].decode_scale,
            scale_layout="linear",
        )  # fmt: skip
        call(b=b, out=memory.put(np.zeros((5, i), np.float32)), epilogue=None)
        rows = memory.put(np.zeros((i, 64), np.float16))
        call(a=rows, out=memory.put(np.zeros((i, 32), np.float32)))
        assert len(_repeat._calls) <= 8
        assert len(_repeat._plans) <= 4
        assert len(_looks._metadata) <= 4
        assert len(_looks._held) <= 4


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
