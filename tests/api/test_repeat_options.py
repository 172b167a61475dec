"""Calls like one before but for an option, a number, a stream or an epilogue; see test_repeat."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import Epilogue
from nvfp4.api import _repeat

from . import stubs
from .conftest import Card
from .repeated import (
    Made,
    Memory,
    calls,
    double,
    known,
    matmul,
    matmul_of_tensors,
    rmsnorm_quantize,
    same_as_alone,
    values,
)


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
    "row_counts": (None,),
    "eps": (1e-5, 1, True, 0, -0.0, np.float32(1e-5), -1.0, float("nan"), None, "1"),
    "halves": ("interleaved", "no"),
    "kind": ("gpt-oss", "no"),
    "residual_out": (None,),
    "norm_out": (None,),
    "return_hidden": (False, 0, 1, None),
    "batch_invariant": (True, False, 1, None),
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


def test_a_repeated_norm_returns_h_where_it_is_asked_for(card: Card, memory: Memory) -> None:
    call = rmsnorm_quantize(memory)
    out, normed = call.arguments["out"], call.arguments["norm_out"]
    known(card, call)
    planned = len(card.planned)
    for _ in range(2):
        assert call() is out
        made = call(return_hidden=True)
        assert made[0] is out and made[1] is normed
    assert len(card.planned) == planned


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


def pick_first(gate, up, row, column, expert):  # type: ignore[no-untyped-def]
    return gate


def test_how_an_epilogue_calls_its_function_is_part_of_it(card: Card, memory: Memory) -> None:
    call = matmul(memory)
    bias, half = memory.put(values(32)), memory.put(np.zeros((5, 16), np.float32))
    first = Epilogue(pick_first, pair=True)
    known(card, Made(call.function, {**call.arguments, "epilogue": first, "out": half}))
    for other in (
        Epilogue(pick_first, pair=True, halves=False),
        Epilogue(pick_first, bias),
        Epilogue(pick_first, bias, axes=("N",)),
        Epilogue(pick_first, bias, axes=("M",)),
        Epilogue(pick_first, pair=True),
    ):
        out = half if other.pair else call.arguments["out"]
        same_as_alone(card, call, epilogue=other, out=out)
        for before in (first, Epilogue(pick_first, bias)):
            outs = half if before.pair else call.arguments["out"]
            changed = Made(call.function, {**call.arguments, "epilogue": before, "out": outs})
            same_as_alone(card, changed, epilogue=other, out=out)


# Tensors ------------------------------------------------------------------------------------------


def test_tensors_that_differ_in_their_format_alone_differ(card: Card, memory: Memory) -> None:
    call = matmul_of_tensors(memory)
    b = call.arguments["b"]
    assert b.format == "mxfp8_e4m3"
    other = dataclasses.replace(b, format="mxfp8_e5m2")
    found = same_as_alone(card, call, b=other)
    assert ("b_format", "mxfp8_e5m2") in found[0][0]


# Several numbers: what the mechanism promises to functions that have them -------------------------


class Launches:
    """Prepared launches that want two numbers and an address."""

    names = ("x", "first", "second")

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def bind(self, values: Any) -> Callable[[int], None]:
        return lambda stream: self.seen.append(tuple(values))


def test_numbers_that_were_equal_once_are_told_apart(cupy: stubs.Cupy, memory: Memory) -> None:
    from nvfp4.arrays import as_array

    _repeat.forget()
    x, launches = memory.put(np.zeros(4, np.float32)), Launches()

    def made(first: Any, second: Any) -> bool:
        call = "function", (), (x, first, second)
        if _repeat.repeat(call, None):
            return True
        buffers = {
            "x": as_array(x, "x"), "first": np.float32(first), "second": np.float32(second),
        }  # fmt: skip
        _repeat.remember(call, lambda: launches, buffers, ("x",))
        return False

    assert not made(2.0, 2.0)
    assert made(3.0, 3.0)
    assert not made(2.0, 3.0)
    assert made(4.0, 5.0)
    assert made(5.0, 1.0)
    assert made(0.1, np.float32(0.1))  # equal as float32
    tenth = float(np.float32(0.1))
    assert [seen[1:] for seen in launches.seen] == [(3, 3), (4, 5), (5, 1), (tenth, tenth)]
    _repeat.forget()


def test_a_number_that_no_launch_is_given_is_not_repeated(cupy: stubs.Cupy, memory: Memory) -> None:
    from nvfp4.arrays import as_array

    _repeat.forget()
    x, launches = memory.put(np.zeros(4, np.float32)), Launches()
    call = "function", (), (x, 2.0, 3.0)
    buffers = {"x": as_array(x, "x"), "first": np.float32(2), "second": np.float32(7)}
    _repeat.remember(call, lambda: launches, buffers, ("x",))
    assert not _repeat.repeat(call, None)
    _repeat.forget()
