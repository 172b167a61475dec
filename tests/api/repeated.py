"""Calls of every public function with ``out=``, and what tells whether two do the same."""

from __future__ import annotations

import dataclasses
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


def quantize_counted(m: Memory) -> Made:
    out = there(m, nvfp4.quantize(values(3, 5, 64), "nvfp4", encode_scale="amax"))
    return Made(
        nvfp4.quantize,
        {
            "x": m.put(values(3, 5, 64).astype(np.float16)),
            "format": "nvfp4",
            "encode_scale": "amax",
            "row_counts": m.put(np.array([2, 0, 5])),
            "out": out,
        },
    )


def swiglu_quantize(m: Memory) -> Made:
    out = there(m, nvfp4.grouped_quantize(values(5, 64), "nvfp4", row_offsets=OFFSETS))
    return Made(
        nvfp4.swiglu_quantize,
        {
            "gate_up": m.put(values(4, 128).astype(np.float16)),
            "format": "nvfp4",
            "row_offsets": out.groups,
            "expert_ids": m.put(np.array([1, 0, 2])),
            "row_indices": m.put(np.array([3, 2, 1, 0, 0], np.int32)),
            "encode_scale": m.put(np.array([0.5, 1, 2], np.float32)),
            "out": out,
        },
    )


def rmsnorm_quantize(m: Memory) -> Made:
    x, summed, normed = (m.put(values(5, 64).astype(np.float16)) for _ in range(3))
    return Made(
        nvfp4.rmsnorm_quantize,
        {
            "x": x,
            "weight": m.put(values(64)),
            "eps": 1e-5,
            "format": "mxfp8",
            "residual": summed,
            "residual_out": summed,
            "norm_out": normed,
            "out": there(m, nvfp4.quantize(values(5, 64), "mxfp8")),
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


def grouped_matmul_of_counts(m: Memory) -> Made:
    counts = m.put(np.array([2, 0, 5]))
    return Made(
        nvfp4.grouped_matmul,
        {
            "a": there(m, nvfp4.quantize(values(3, 5, 64), "nvfp4")),
            "b": there(m, nvfp4.quantize(values(3, 32, 64), "mxfp4")),
            "row_counts": counts,
            "out": m.put(np.zeros((3, 5, 32), np.float32)),
            "out_dtype": "float32",
        },
    )


def dequantize(m: Memory) -> Made:
    q = there(m, nvfp4.grouped_quantize(values(5, 64), "nvfp4", row_offsets=OFFSETS))
    return Made(dequantize_tensor, {"q": q, "out": m.put(np.zeros((5, 64), np.float32))})


def interleave(m: Memory) -> Made:
    scales = m.put(np.arange(10, dtype=np.uint8).reshape(5, 2))
    out = m.put(np.zeros((1, 1, 32, 4, 4), np.uint8))
    return Made(nvfp4.interleave_scales, {"scales": scales, "out": out})


def dequantize_prepared(m: Memory) -> Made:
    q = there(m, nvfp4.prepare_weights(nvfp4.quantize(values(3, 17, 64), "mxfp4")))
    return Made(dequantize_tensor, {"q": q, "out": m.put(np.zeros((3, 17, 64), np.float32))})


def prepare(m: Memory) -> Made:
    b = nvfp4.quantize(values(3, 17, 64), "mxfp4")
    out = there(m, nvfp4.prepare_weights(b))
    return Made(nvfp4.prepare_weights, {"b": there(m, b), "out": out})


def deinterleave(m: Memory) -> Made:
    scales = m.put(np.zeros((1, 1, 32, 4, 4), np.uint8))
    out = m.put(np.zeros((5, 2), np.uint8))
    return Made(nvfp4.deinterleave_scales, {"scales": scales, "shape": (5, 2), "out": out})


CALLS = [
    quantize, quantize_scaled, quantize_by_number, grouped_quantize, quantize_counted,
    swiglu_quantize, rmsnorm_quantize, matmul, matmul_of_tensors, grouped_matmul,
    grouped_matmul_of_rows, grouped_matmul_of_counts, dequantize, dequantize_prepared, prepare,
    interleave, deinterleave,
]  # fmt: skip
calls = pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)


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
