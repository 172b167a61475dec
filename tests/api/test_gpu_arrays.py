"""GPU arrays, without a GPU: what is checked, what kernels get, on which stream, in whose memory.

The arrays are stubs over host memory. A launch is recorded or, where results matter, run by the
simulated machine on that memory: the same kernels, plans and buffers as on a card.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4.api import _place
from tests.vectorlib import same_values

from . import stubs
from .conftest import Card

RNG = np.random.default_rng(5)
OFFSETS = np.array([0, 2, 2, 5], np.int32)
IDS = np.array([2, -1, 0], np.int64)
INDICES = np.array([4, 0, -1, 2, 2, 9], np.int32)
SCALE = np.array([0.5, 2.0, 3.0], np.float32)


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


X = values(5, 64)


def says(error: type[Exception], *parts: str) -> Any:
    return pytest.raises(error, match="".join(f"(?=.*{part})" for part in parts))


def same_tensor(got: nvfp4.QTensor, expected: nvfp4.QTensor) -> None:
    assert (got.format, got.shape, got.scale_layout) == (
        expected.format,
        expected.shape,
        expected.scale_layout,
    )
    for name in ("codes", "scales", "decode_scale"):
        ours, theirs = getattr(got, name).values, getattr(expected, name)
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


# --- the kernels' bytes, through the whole path ---------------------------------------------------

DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "number": {"encode_scale": 0.43},
    "amax": {"encode_scale": "amax"},
    "row_amax": {"encode_scale": "row_amax"},
    "linear": {"scale_layout": "linear"},
}


@pytest.mark.parametrize("options", DENSE.values(), ids=DENSE.keys())
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_quantize_gives_the_bytes_of_the_golden_model(
    card: Card, cupy: stubs.Cupy, dtype: Any, options: dict[str, Any]
) -> None:
    card.simulate = True
    x = X.astype(dtype)
    expected = nvfp4.quantize(x, "nvfp4", **options)
    got = nvfp4.quantize(cupy.asarray(x), "nvfp4", **options)
    same_tensor(got, expected)
    assert len(card.launched) == 1
    assert card.facts["dtype"] == np.dtype(dtype).name


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil", "even"])
def test_every_format_and_rounding_reaches_its_kernel(
    card: Card, cupy: stubs.Cupy, format: str, rounding: str
) -> None:
    card.simulate = True
    expected = nvfp4.quantize(X, format, scale_rounding=rounding)
    same_tensor(nvfp4.quantize(cupy.asarray(X), format, scale_rounding=rounding), expected)


@pytest.mark.parametrize(
    ("format", "scale"),
    [("mxfp4", "amax"), ("mxfp8", "amax"), ("mxfp8", 0.5), ("mxfp8_e5m2", np.float32(3))],
)
def test_an_encode_scale_that_is_one_by_definition_takes_no_kernel(
    card: Card, cupy: stubs.Cupy, format: str, scale: Any
) -> None:
    card.simulate = True
    got = nvfp4.quantize(cupy.asarray(X), format, encode_scale=scale)
    assert card.facts["encode"] == "none"
    same_tensor(got, nvfp4.quantize(X, format))
    assert got.decode_scale.values == 1


@pytest.mark.parametrize(
    ("shape", "layout"), [((), "tcgen"), ((1,), "linear"), ((5, 1), "tcgen"), ((5, 1), "linear")]
)
def test_encode_scales_are_read_from_the_device(
    card: Card, cupy: stubs.Cupy, shape: tuple[int, ...], layout: str
) -> None:
    card.simulate = True
    scale = np.linspace(0.5, 3, max(1, int(np.prod(shape))), dtype=np.float32).reshape(shape)
    options = {"scale_layout": layout}
    expected = nvfp4.quantize(X, "nvfp4", encode_scale=scale, **options)
    got = nvfp4.quantize(cupy.asarray(X), "nvfp4", encode_scale=cupy.asarray(scale), **options)
    same_tensor(got, expected)


@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize("shape", [(), (3,), (3, 7, 1)])
def test_stacked_matrices_have_encode_scales_of_their_own(
    card: Card, cupy: stubs.Cupy, shape: tuple[int, ...], layout: str
) -> None:
    card.simulate = True
    x = values(3, 7, 64)
    scale = np.linspace(0.5, 3, max(1, int(np.prod(shape))), dtype=np.float32).reshape(shape)
    expected = nvfp4.quantize(x, "nvfp4", encode_scale=scale, scale_layout=layout)
    got = nvfp4.quantize(
        cupy.asarray(x), "nvfp4", encode_scale=cupy.asarray(scale), scale_layout=layout
    )
    same_tensor(got, expected)
    same_values(got.dequantize().values, expected.dequantize())


STRIDED = {
    "rows apart": lambda x: np.repeat(x, 3, axis=-2)[..., ::3, :],
    "rows backwards": lambda x: np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :],
    "one row for all": lambda x: np.broadcast_to(x[..., :1, :], x.shape),
    "wider rows": lambda x: np.pad(x, (*[(0, 0)] * (x.ndim - 1), (8, 9)))[..., 8:-9],
    "axes swapped": lambda x: np.ascontiguousarray(x.swapaxes(0, -2)).swapaxes(0, -2),
}


@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4, 64)])
@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED.keys())
def test_rows_may_lie_anywhere(
    card: Card, cupy: stubs.Cupy, view: Any, shape: tuple[int, ...], layout: str
) -> None:
    card.simulate = True
    seen = view(values(*shape))
    expected = nvfp4.quantize(seen.copy(), "nvfp4", scale_layout=layout)
    same_tensor(nvfp4.quantize(stubs.CupyArray(seen), "nvfp4", scale_layout=layout), expected)


@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize("scale", [None, 0.5, SCALE, "row_amax"], ids=str)
@pytest.mark.parametrize("indices", [None, INDICES], ids=["rows", "picked"])
def test_grouped_quantize_gives_the_bytes_of_the_golden_model(
    card: Card, cupy: stubs.Cupy, indices: Any, scale: Any, layout: str
) -> None:
    card.simulate = True

    def there(value: Any) -> Any:
        return cupy.asarray(value) if isinstance(value, np.ndarray) else value

    options = {
        "row_offsets": OFFSETS,
        "expert_ids": IDS,
        "row_indices": indices,
        "encode_scale": scale,
    }
    expected = nvfp4.grouped_quantize(X, "nvfp4", scale_layout=layout, **options)
    on_device = {name: there(value) for name, value in options.items()}
    got = nvfp4.grouped_quantize(cupy.asarray(X), "nvfp4", scale_layout=layout, **on_device)
    same_tensor(got, expected)
    assert got.groups is on_device["row_offsets"]
    assert same_values(got.dequantize().values, expected.dequantize())


def test_out_of_a_grouped_call_says_where_its_tiles_are(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    starts = np.array([6, 0, 2], np.int32)
    expected = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS)
    offsets = cupy.asarray(OFFSETS)
    out = nvfp4.QTensor.from_parts(
        cupy.asarray(np.full((5, 32), 0xAA, np.uint8)),
        cupy.asarray(np.full((8, 1, 32, 4, 4), 0xAA, np.uint8)),
        "nvfp4",
        decode_scale=cupy.asarray(np.full(3, np.nan, np.float32)),
        groups=offsets,
        tile_starts=cupy.asarray(starts),
    )
    assert nvfp4.grouped_quantize(cupy.asarray(X), "nvfp4", row_offsets=offsets, out=out) is out
    scales = np.zeros((8, 1, 32, 4, 4), np.uint8)
    scales[6], scales[2] = expected.scales[0], expected.scales[1]
    np.testing.assert_array_equal(out.codes.values, expected.codes)
    np.testing.assert_array_equal(out.scales.values, scales)
    assert same_values(out.dequantize().values, expected.dequantize())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["tcgen", "linear"])
def test_dequantize_gives_the_values_of_the_golden_model(
    card: Card, cupy: stubs.Cupy, layout: str, dtype: str
) -> None:
    card.simulate = True
    options: dict[str, Any] = {"scale_layout": layout, "encode_scale": "row_amax"}
    expected = nvfp4.quantize(X, "nvfp4", **options).dequantize(dtype)
    got = nvfp4.quantize(cupy.asarray(X), "nvfp4", **options)
    assert same_values(got.dequantize(dtype).values, expected)


@pytest.mark.parametrize("shift", [0, 8])
def test_dequantize_says_whether_its_arrays_are_aligned(
    card: Card, cupy: stubs.Cupy, shift: int
) -> None:
    q = on_device(cupy, nvfp4.quantize(X, "nvfp4"))
    memory = np.zeros(X.nbytes + 32, np.uint8)
    first = -memory.__array_interface__["data"][0] % 16 + shift
    out = stubs.CupyArray(memory[first : first + X.nbytes].view(np.float32).reshape(X.shape))
    q.dequantize(out=out)
    assert card.facts["aligned"] == (q.codes.data.ptr % 16 == 0 and shift == 0)


def test_scales_are_rearranged(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    linear = RNG.integers(0, 256, (3, 130, 5), np.uint8)
    expected = nvfp4.interleave_scales(linear)
    got = nvfp4.interleave_scales(cupy.asarray(linear))
    np.testing.assert_array_equal(got.values, expected)
    back = nvfp4.deinterleave_scales(got, (130, 5))
    np.testing.assert_array_equal(back.values, linear)


# --- out, streams, memory -------------------------------------------------------------------------


def device_out(cupy: stubs.Cupy, x: np.ndarray, format: str = "nvfp4", **options: Any) -> Any:
    """A QTensor on the device to write to, filled with poison."""
    q = nvfp4.quantize(x, format, **options)
    return nvfp4.QTensor.from_parts(
        cupy.asarray(np.full_like(q.codes, 0xAA)),
        cupy.asarray(np.full_like(q.scales, 0x55)),
        format,
        decode_scale=cupy.asarray(np.full_like(q.decode_scale, np.nan)),
        scale_layout=q.scale_layout,
    )


def test_with_out_nothing_is_allocated_and_out_is_returned(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    out, x = device_out(cupy, X), cupy.asarray(X)
    assert not cupy.allocated
    assert nvfp4.quantize(x, "nvfp4", out=out) is out
    assert not cupy.allocated
    same_tensor(out, nvfp4.quantize(X, "nvfp4"))
    target = cupy.asarray(np.full((5, 64), np.nan, np.float32))
    assert out.dequantize(out=target) is target
    assert not cupy.allocated
    assert same_values(target.values, nvfp4.quantize(X, "nvfp4").dequantize())


def test_results_come_from_the_pool_on_the_arrays_device_and_stream(
    card: Card, cupy: stubs.Cupy
) -> None:
    cupy.streams = {0: 16, 1: 32}
    x = stubs.CupyArray(X, device=1)
    nvfp4.quantize(x, "nvfp4")
    assert [where[2:] for where in cupy.allocated] == [(1, 32)] * 3
    assert card.launched[-1][1] == {"stream": 32, "device": 1}
    cupy.allocated.clear()
    nvfp4.quantize(x, "nvfp4", stream=48)
    assert [where[2:] for where in cupy.allocated] == [(1, 48)] * 3
    assert card.launched[-1][1] == {"stream": 48, "device": 1}
    assert cupy.streams == {0: 16, 1: 32}


class ProtocolStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 64)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (np.int64(7), 7),
        (ProtocolStream(), 64),
        (types.SimpleNamespace(__cuda_stream__=(0, 65)), 65),
        (types.SimpleNamespace(cuda_stream=66), 66),
        (types.SimpleNamespace(ptr=67), 67),
    ],
)
def test_a_stream_is_taken_as_given(card: Card, cupy: stubs.Cupy, stream: Any, handle: int) -> None:
    cupy.streams = {0: 16}
    nvfp4.quantize(cupy.asarray(X), "nvfp4", stream=stream)
    assert card.launched[-1][1] == {"stream": handle, "device": 0}


def test_tensors_use_pytorchs_stream_and_memory(card: Card, torch: stubs.Torch) -> None:
    card.simulate, torch.stream = True, 128
    x = stubs.Tensor(torch, X.astype(ml_dtypes.bfloat16), "cuda:1")
    got = nvfp4.quantize(x, "nvfp4")
    same_tensor(got, nvfp4.quantize(x.values, "nvfp4"))
    assert card.launched[-1][1] == {"stream": 128, "device": 1}
    assert [where[1:] for where in torch.allocated] == [
        ("uint8", "cuda:1", 128),
        ("uint8", "cuda:1", 128),
        ("float32", "cuda:1", 128),
    ]
    torch.allocated.clear()
    nvfp4.quantize(x, "nvfp4", stream=256)
    assert {where[3] for where in torch.allocated} == {256}
    assert torch.stream == 128
    values = got.dequantize("bfloat16")
    assert type(values) is stubs.Tensor
    assert values.dtype is torch.bfloat16
    assert same_values(values.values, nvfp4.quantize(x.values, "nvfp4").dequantize("bfloat16"))


def test_arrays_known_by_the_interface_alone_use_its_stream_and_cupys_memory(
    card: Card, cupy: stubs.Cupy
) -> None:
    card.simulate = True
    for x in (X, X.astype(ml_dtypes.bfloat16), np.repeat(X, 2, axis=0)[::2]):
        got = nvfp4.quantize(stubs.CudaInterfaceOnly(x, device=1, stream=2), "nvfp4")
        same_tensor(got, nvfp4.quantize(x, "nvfp4"))
        assert card.launched[-1][1] == {"stream": 2, "device": 1}
        assert type(got.codes) is stubs.CupyArray
    nvfp4.quantize(stubs.CudaInterfaceOnly(X), "nvfp4")
    assert card.launched[-1][1] == {"stream": 0, "device": 0}


def test_arrays_known_by_dlpack_alone_are_ready_on_the_stream(card: Card, cupy: stubs.Cupy) -> None:
    asked: list[Any] = []

    class DeviceArray(stubs.DLPackOnly):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, stream: Any = "none", **options: Any) -> Any:
            asked.append(stream)
            return self.values.__dlpack__(**options)

    # The capsule says that the memory is the host's, which this stub's is.
    for given, told in ((None, 16), (32, 32), (0, 1)):
        cupy.streams = {0: 16}
        nvfp4.quantize(DeviceArray(X), "nvfp4", stream=given)
        assert asked == [told]
        asked.clear()


# --- repeated calls -------------------------------------------------------------------------------


def test_a_call_like_one_before_goes_straight_to_the_launch(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    out = device_out(cupy, X)
    memory = cupy.asarray(np.stack([X, 2 * X, values(5, 64)]))
    for i in range(3):
        nvfp4.quantize(memory[i], "nvfp4", out=out)
        same_tensor(out, nvfp4.quantize(memory.values[i], "nvfp4"))
    assert (len(card.planned), len(card.launched), len(card.repeated)) == (1, 1, 2)


def test_repeated_calls_take_the_current_stream_and_encode_scale(
    card: Card, cupy: stubs.Cupy
) -> None:
    card.simulate = True
    out, x = device_out(cupy, X), cupy.asarray(X)
    scale = cupy.asarray(np.float32(1))
    for value in (0.5, 2.0, 3.0):
        cupy.streams = {0: int(16 * value)}
        nvfp4.quantize(x, "nvfp4", encode_scale=value, out=out)
        same_tensor(out, nvfp4.quantize(X, "nvfp4", encode_scale=value))
        scale.values[...] = value
        nvfp4.quantize(x, "nvfp4", encode_scale=scale, out=out)
        same_tensor(out, nvfp4.quantize(X, "nvfp4", encode_scale=value))
    nvfp4.quantize(x, "nvfp4", encode_scale=0.5, out=out, stream=7)
    assert [stream for _, stream in card.repeated] == [32, 32, 48, 48, 7]


@pytest.mark.parametrize("kind", [float, int, np.float32, np.float64, np.int64, np.float16])
def test_a_number_of_any_kind_may_be_repeated(card: Card, cupy: stubs.Cupy, kind: Any) -> None:
    card.simulate = True
    out, x = device_out(cupy, X), cupy.asarray(X)
    for value in (2, 3, 4):
        nvfp4.quantize(x, "nvfp4", encode_scale=kind(value), out=out)
        same_tensor(out, nvfp4.quantize(X, "nvfp4", encode_scale=float(value)))
    assert len(card.launched) + len(card.repeated) == 3


def test_a_repeated_call_makes_the_checks_that_depend_on_values(
    card: Card, cupy: stubs.Cupy
) -> None:
    memory = cupy.asarray(np.zeros(4096, np.uint8))

    def at(first: int, array: np.ndarray) -> stubs.CupyArray:
        return stubs.CupyArray(
            memory.values[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
        )

    expected = nvfp4.quantize(X, "nvfp4")
    out = nvfp4.QTensor.from_parts(
        at(2048, expected.codes), at(2560, expected.scales), "nvfp4",
        decode_scale=at(3072, expected.decode_scale),
    )  # fmt: skip
    nvfp4.quantize(at(0, X), "nvfp4", out=out, encode_scale=1.0)
    nvfp4.quantize(at(32, X), "nvfp4", out=out, encode_scale=1.0)
    assert len(card.repeated) == 1
    for first, name in ((2048 - X.nbytes + 16, "codes"), (2800, "scales")):
        with says(ValueError, f"out.{name} must not overlap x"):
            nvfp4.quantize(at(first, X), "nvfp4", out=out, encode_scale=1.0)
    for bad in (0.0, -1.0, float("nan"), float("inf"), 1e39):
        with says(ValueError, "encode_scale", "finite"):
            nvfp4.quantize(at(0, X), "nvfp4", out=out, encode_scale=bad)
    one = at(3072, np.ones((), np.float32))
    with says(ValueError, "out.decode_scale must not overlap encode_scale"):
        nvfp4.quantize(at(0, X), "nvfp4", out=out, encode_scale=one)
    for first in (3504, 3600):
        one = at(first, np.ones((), np.float32))
        nvfp4.quantize(at(0, X), "nvfp4", out=out, encode_scale=one)
    assert len(card.repeated) == 2
    one = at(2048 + 156, np.ones((), np.float32))
    with says(ValueError, "out.codes must not overlap encode_scale"):
        nvfp4.quantize(at(0, X), "nvfp4", out=out, encode_scale=one)
    with says(TypeError, "stream"):
        nvfp4.quantize(at(0, X), "nvfp4", out=out, encode_scale=1.0, stream="0")
    assert len(card.repeated) == 2


def test_a_repeated_call_of_another_kind_goes_the_long_way(card: Card, cupy: stubs.Cupy) -> None:
    out, x = device_out(cupy, X), cupy.asarray(X)
    nvfp4.quantize(x, "nvfp4", out=out)
    with says(ValueError, "format"):
        nvfp4.quantize(x, "mxfp4", out=out)
    with says(ValueError, "scale_layout"):
        nvfp4.quantize(x, "nvfp4", scale_layout="linear", out=out)
    with says(ValueError, "shape"):
        nvfp4.quantize(x[:4], "nvfp4", out=out)
    with says(TypeError, "float64"):
        nvfp4.quantize(cupy.asarray(X.astype(np.float64)), "nvfp4", out=out)
    with says(ValueError, "device"):
        nvfp4.quantize(stubs.CupyArray(X, device=1), "nvfp4", out=out)
    with says(TypeError, "x"):
        nvfp4.quantize([X], "nvfp4", out=out)
    assert not card.repeated
    strided = stubs.CupyArray(np.repeat(X, 2, axis=0)[::2])
    nvfp4.quantize(strided, "nvfp4", out=out)
    assert card.facts["row_stride"] == 128
    unaligned = np.zeros(X.nbytes + 4, np.uint8)[4:].view(np.float32).reshape(X.shape)
    nvfp4.quantize(stubs.CupyArray(unaligned), "nvfp4", out=out)
    assert not card.facts["aligned"]
    assert (len(card.launched), len(card.repeated)) == (3, 0)


def test_a_repeated_call_notices_that_out_got_other_memory(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    out, x = device_out(cupy, X), cupy.asarray(X)
    nvfp4.quantize(x, "nvfp4", out=out)
    out.codes.values = np.full((5, 32), 0xAA, np.uint8)
    nvfp4.quantize(x, "nvfp4", out=out)
    same_tensor(out, nvfp4.quantize(X, "nvfp4"))
    out.codes.values = np.full((4, 32), 0xAA, np.uint8)
    with says(ValueError, "codes", r"\(4, 32\)"):
        nvfp4.quantize(x, "nvfp4", out=out)


def test_repeated_calls_on_tensors_mind_grad_mode(card: Card, torch: stubs.Torch) -> None:
    x = stubs.Tensor(torch, X, "cuda:0")
    out = nvfp4.quantize(x, "nvfp4")
    nvfp4.quantize(x, "nvfp4", out=out)
    nvfp4.quantize(x, "nvfp4", out=out)
    assert len(card.repeated) == 1
    x.requires_grad = True
    with says(ValueError, "requires grad"):
        nvfp4.quantize(x, "nvfp4", out=out)
    x.requires_grad, x.negated = False, True
    with says(ValueError, "resolve_neg"):
        nvfp4.quantize(x, "nvfp4", out=out)


# --- refusals -------------------------------------------------------------------------------------


def test_columns_must_be_contiguous_on_a_device(card: Card, cupy: stubs.Cupy) -> None:
    for seen in (np.repeat(X, 2, axis=1)[:, ::2], np.asfortranarray(X), X[:, ::-1]):
        with says(ValueError, "x must be contiguous along its last axis", "ascontiguousarray"):
            nvfp4.quantize(stubs.CupyArray(seen), "nvfp4")
        with says(ValueError, "x must be contiguous along its last axis"):
            nvfp4.grouped_quantize(
                stubs.CupyArray(seen), "nvfp4", row_offsets=cupy.asarray(OFFSETS)
            )
    assert not card.launched


def test_the_way_out_is_named_in_the_words_of_the_library(card: Card, torch: stubs.Torch) -> None:
    with says(ValueError, "x", r"x.contiguous\(\)"):
        nvfp4.quantize(stubs.Tensor(torch, np.asfortranarray(X), "cuda:0"), "nvfp4")


def test_four_axes_fold_into_two_or_are_refused(card: Card, cupy: stubs.Cupy) -> None:
    card.simulate = True
    x = values(2, 3, 4, 64)
    expected = nvfp4.quantize(x, "nvfp4", scale_layout="linear")
    same_tensor(nvfp4.quantize(cupy.asarray(x), "nvfp4", scale_layout="linear"), expected)
    two = np.repeat(x, 2, axis=2)[:, :, ::2]
    same_tensor(nvfp4.quantize(stubs.CupyArray(two), "nvfp4", scale_layout="linear"), expected)
    wild = np.lib.stride_tricks.as_strided(
        np.zeros(20000, np.float32), (2, 3, 4, 64), (32000, 8000, 1200, 4)
    )
    with says(ValueError, "x", "fold into two"):
        nvfp4.quantize(stubs.CupyArray(wild), "nvfp4", scale_layout="linear")


@pytest.mark.parametrize("part", ["codes", "scales", "decode_scale", "groups"])
def test_parts_of_a_tensor_must_be_contiguous_on_a_device(
    card: Card, cupy: stubs.Cupy, part: str
) -> None:
    q = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS)
    parts = {
        name: cupy.asarray(getattr(q, name))
        for name in ("codes", "scales", "decode_scale", "groups")
    }
    nvfp4.QTensor.from_parts(format="nvfp4", **parts)
    apart = np.repeat(getattr(q, part), 2, axis=-1)[..., ::2]
    parts[part] = stubs.CupyArray(apart)
    with says(ValueError, part, "contiguous"):
        nvfp4.QTensor.from_parts(format="nvfp4", **parts)


def test_arrays_must_be_on_one_device(card: Card, cupy: stubs.Cupy) -> None:
    x, there = cupy.asarray(X), stubs.CupyArray(np.ones((), np.float32), device=1)
    with says(ValueError, "encode_scale", "GPU 0", "GPU 1", "number"):
        nvfp4.quantize(x, "nvfp4", encode_scale=there)
    with says(ValueError, "encode_scale", "GPU 0", "the host"):
        nvfp4.quantize(x, "nvfp4", encode_scale=np.ones((), np.float32))
    with says(ValueError, "encode_scale", "the host", "GPU 0"):
        nvfp4.quantize(X, "nvfp4", encode_scale=cupy.asarray(np.ones((), np.float32)))
    with says(ValueError, "row_offsets", "same device as x", "GPU 0", "the host"):
        nvfp4.grouped_quantize(x, "nvfp4", row_offsets=OFFSETS)
    with says(ValueError, "expert_ids", "same device as x"):
        nvfp4.grouped_quantize(x, "nvfp4", row_offsets=cupy.asarray(OFFSETS), expert_ids=IDS)
    with says(ValueError, "out.codes", "GPU 0", "the host"):
        nvfp4.quantize(x, "nvfp4", out=nvfp4.quantize(X, "nvfp4"))
    q = nvfp4.quantize(X, "nvfp4")
    with says(ValueError, "scales", "same device as codes"):
        nvfp4.QTensor.from_parts(cupy.asarray(q.codes), q.scales, "nvfp4")
    with says(ValueError, "decode_scale", "same device as codes"):
        dataclasses.replace(q, decode_scale=cupy.asarray(q.decode_scale))
    with says(ValueError, "b.codes", "same device as a", "GPU 0", "the host"):
        nvfp4.matmul(cupy.asarray(X.astype(np.float16)), q)
    with says(ValueError, "out", "same device"):
        q.dequantize(out=cupy.asarray(X))
    assert not card.launched


def test_libraries_may_mix_on_one_stream_alone(
    card: Card, cupy: stubs.Cupy, torch: stubs.Torch
) -> None:
    x, scale = stubs.Tensor(torch, X, "cuda:0"), cupy.asarray(np.float32(2))
    torch.stream = 128
    with says(ValueError, "x is of torch", "encode_scale of cupy", "stream="):
        nvfp4.quantize(x, "nvfp4", encode_scale=scale)
    assert not card.launched
    nvfp4.quantize(x, "nvfp4", encode_scale=scale, stream=128)
    cupy.streams = {0: 128}
    nvfp4.quantize(x, "nvfp4", encode_scale=scale)
    assert [where["stream"] for _, where in card.launched] == [128, 128]


def test_a_read_only_device_array_is_not_written_to(card: Card, cupy: stubs.Cupy) -> None:
    q = nvfp4.quantize(X, "nvfp4")
    there = dataclasses.replace(
        q, codes=cupy.asarray(q.codes), scales=cupy.asarray(q.scales),
        decode_scale=cupy.asarray(q.decode_scale),
    )  # fmt: skip
    with says(ValueError, "out", "writable"):
        there.dequantize(out=stubs.CudaInterfaceOnly(X.copy(), readonly=True))


def test_a_masked_device_array_is_refused(card: Card) -> None:
    x = stubs.CudaInterfaceOnly(X)
    x.__cuda_array_interface__["mask"] = x
    with says(TypeError, "x", "mask"):
        nvfp4.quantize(x, "nvfp4")


def test_device_arrays_overlap_by_their_addresses(card: Card, cupy: stubs.Cupy) -> None:
    memory = np.zeros(2048, np.uint8)
    q = nvfp4.quantize(X, "nvfp4")
    codes = stubs.CupyArray(memory[1279:1439].reshape(5, 32))
    out = nvfp4.QTensor.from_parts(codes, cupy.asarray(q.scales), "nvfp4")
    x = stubs.CupyArray(memory[:1280].view(np.float32).reshape(5, 64))
    with says(ValueError, "out.codes must not overlap x"):
        nvfp4.quantize(x, "nvfp4", out=out)
    # The same address on another device is other memory, but such a call is refused anyway.
    assert not card.launched


def test_offsets_are_never_read_back(card: Card, cupy: stubs.Cupy) -> None:
    offsets = cupy.asarray(np.array([9, -1, 70, 3], np.int32))
    got = nvfp4.grouped_quantize(cupy.asarray(X), "nvfp4", row_offsets=offsets)
    assert card.facts["groups"] == 3
    assert got.scales.shape == (4, 1, 32, 4, 4)
    assert "groups=3" in repr(got)
    bad = cupy.asarray(np.array([0.0, -1.0, np.nan], np.float32))
    nvfp4.grouped_quantize(
        cupy.asarray(X), "nvfp4", row_offsets=cupy.asarray(OFFSETS), encode_scale=bad
    )
    assert card.facts["experts"] == 3


def test_scales_of_a_grouped_tensor_have_tiles_for_the_worst_offsets(
    card: Card, cupy: stubs.Cupy
) -> None:
    def of(tiles: int, **more: Any) -> nvfp4.QTensor:
        return nvfp4.QTensor.from_parts(
            cupy.asarray(np.zeros((200, 32), np.uint8)),
            cupy.asarray(np.zeros((tiles, 1, 32, 4, 4), np.uint8)),
            "nvfp4",
            groups=cupy.asarray(np.array([0, 1, 2, 200])),
            **more,
        )

    of(4)
    with says(ValueError, "scales", "at least 4 tiles", "got 3"):
        of(3)
    of(3, tile_starts=cupy.asarray(np.zeros(3, np.int32)))


def test_without_a_driver_device_arrays_get_a_clear_error(cupy: stubs.Cupy) -> None:
    for x in (stubs.CudaInterfaceOnly(X), stubs.CupyArray(X)):
        with says(nvfp4.ToolchainError, "driver|GPU"):
            nvfp4.quantize(x, "nvfp4")


CUDASIM = """
import numpy as np, nvfp4
from nvfp4 import formats, golden, launch
from tests.api import stubs

x = np.linspace(-3, 5, 320, dtype=np.float32).reshape(5, 64)
archs, run = [], launch.run

def noted(launches, buffers, **where):
    archs.append(where["machine"].arch)
    run(launches, buffers, **where)

launch.run = noted
q = nvfp4.quantize(x, "nvfp4")
assert archs == ["sm_90a"], archs
codes, scales, decode = golden.quantize(x, formats.NVFP4)
assert (q.codes == codes).all() and (q.scales == scales).all() and q.decode_scale == decode
try:
    nvfp4.quantize(stubs.CudaInterfaceOnly(x), "nvfp4")
except nvfp4.ToolchainError as error:
    assert "NUMBA_ENABLE_CUDASIM" in str(error)
else:
    raise SystemExit("a GPU array was taken")
"""


def test_in_a_cudasim_process_numpy_arrays_run_kernels_and_gpu_arrays_raise() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CUDASIM],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


# --- products: what plans and kernels are told ----------------------------------------------------


def on_device(cupy: stubs.Cupy, q: nvfp4.QTensor) -> nvfp4.QTensor:
    return nvfp4.QTensor.from_parts(
        cupy.asarray(q.codes),
        cupy.asarray(q.scales),
        q.format,
        shape=q.shape,
        decode_scale=cupy.asarray(q.decode_scale),
        scale_layout=q.scale_layout,
        groups=None if q.groups is None else cupy.asarray(q.groups),
    )


def addresses_are_aligned(*arrays: stubs.CupyArray) -> bool:
    return all(array.data.ptr % 16 == 0 for array in arrays)


def alignment_for_maps(a: nvfp4.QTensor, b: nvfp4.QTensor) -> int:
    """What codes are multiples of, 32 or 16; 0 where something is a multiple of neither."""
    if not addresses_are_aligned(a.codes, b.codes, a.scales, b.scales):
        return 0
    return 16 if (a.codes.data.ptr | b.codes.data.ptr) % 32 else 32


def test_a_product_of_two_tensors_is_planned_and_bound(card: Card, cupy: stubs.Cupy) -> None:
    a = on_device(cupy, nvfp4.quantize(X, "nvfp4", encode_scale="row_amax"))
    b = on_device(cupy, nvfp4.quantize(values(7, 64), "mxfp4", scale_layout="linear"))
    alpha = cupy.asarray(np.float32(0.5))
    out = nvfp4.matmul(a, b, alpha=alpha, stream=5)
    assert card.planned[-1][0] == "matmul"
    assert card.facts == {
        "arch": "sm_90a", "rows": 5, "columns": 7, "depth": 64,
        "a_format": "nvfp4", "a_dtype": None, "a_layout": "tcgen", "decode_a": "row",
        "b_format": "mxfp4", "b_dtype": None, "b_layout": "linear", "decode_b": "scalar",
        "out_dtype": "bfloat16", "epilogue": None, "alpha": "array",
        "aligned": addresses_are_aligned(a.codes, b.codes),
        "map_alignment": alignment_for_maps(a, b), "processors": 132, "card": ("a card", 132),
        "batch_invariant": False,
    }  # fmt: skip
    bound = {name: getattr(value, "owner", value) for name, value in card.buffers.items()}
    assert bound == {
        "out": out, "alpha": alpha, "a": None, "b": None,
        "a_codes": a.codes, "a_scales": a.scales, "a_decode": a.decode_scale,
        "b_codes": b.codes, "b_scales": b.scales, "b_decode": b.decode_scale,
    }  # fmt: skip
    assert (out.shape, out.dtype.name) == ((5, 7), "bfloat16")
    assert card.launched[-1][1] == {"stream": 5, "device": 0}


def test_a_plain_operand_is_bound_with_its_row_stride(card: Card, cupy: stubs.Cupy) -> None:
    b = on_device(cupy, nvfp4.quantize(values(7, 64), "nvfp4"))
    a = stubs.CupyArray(np.zeros((5, 100), ml_dtypes.bfloat16)[:, :64])
    bias = cupy.asarray(np.zeros(7, np.float16))
    epilogue = nvfp4.epilogues.bias(bias)
    out = cupy.asarray(np.zeros((5, 7), np.float32))
    assert nvfp4.matmul(a, b, out=out, out_dtype="float32", alpha=2, epilogue=epilogue) is out
    facts = card.facts
    assert (facts["a_format"], facts["a_dtype"], facts["a_row_stride"]) == (None, "bfloat16", 100)
    assert (facts["decode_a"], facts["alpha"]) == ("none", "value")
    assert not facts["aligned"]  # rows are 200 bytes apart
    assert facts["epilogue"] == epilogue.code(("float16",))
    assert card.buffers["a"].owner is a
    assert card.buffers["alpha"] == np.float32(2)
    assert card.buffers["epilogue_0"].owner is bias
    with says(ValueError, "a must be contiguous along its last axis"):
        nvfp4.matmul(stubs.CupyArray(np.zeros((64, 5), np.float16).T), b)
    with says(ValueError, "epilogue array 0", "same device as a"):
        nvfp4.matmul(a, b, epilogue=nvfp4.epilogues.bias(np.zeros(7, np.float32)))
    with says(ValueError, "out must not overlap epilogue array 0"):
        memory = cupy.asarray(np.zeros((5, 7), np.float32))
        more = nvfp4.epilogues.bias(memory[2])
        nvfp4.matmul(a, b, out=memory, out_dtype="float32", epilogue=more)


def test_a_grouped_product_is_planned_and_bound(card: Card, cupy: stubs.Cupy) -> None:
    a = on_device(cupy, nvfp4.grouped_quantize(X, "mxfp8", row_offsets=OFFSETS))
    b = on_device(cupy, nvfp4.quantize(values(3, 7, 64), "nvfp4", encode_scale=SCALE))
    ids, alpha = cupy.asarray(IDS), cupy.asarray(SCALE)
    out = nvfp4.grouped_matmul(
        a, b, row_offsets=a.groups, expert_ids=ids, alpha=alpha, out_dtype="float16"
    )
    assert card.planned[-1][0] == "grouped_matmul"
    assert card.facts == {
        "arch": "sm_90a", "input_rows": 5, "rows": 5, "columns": 7, "depth": 64, "experts": 3,
        "groups": 3,
        "offsets_dtype": "int32", "ids_dtype": "int64", "indices_dtype": None,
        "starts_dtype": None, "a_format": "mxfp8_e4m3", "a_dtype": None,
        "a_layout": "tcgen_grouped", "a_tiles": 4, "decode_a": "group",
        "b_format": "nvfp4", "b_dtype": None,
        "b_layout": "tcgen", "decode_b": "batch", "out_dtype": "float16", "epilogue": None,
        "alpha": "expert", "aligned": addresses_are_aligned(a.codes, b.codes),
        "map_alignment": alignment_for_maps(a, b), "processors": 132,
        "card": ("a card", 132), "tile": None, "batch_invariant": False,
    }  # fmt: skip
    bound = {name: getattr(value, "owner", value) for name, value in card.buffers.items()}
    assert bound == {
        "out": out, "alpha": alpha, "a": None, "b": None,
        "row_offsets": a.groups, "expert_ids": ids, "row_indices": None, "tile_starts": None,
        "a_codes": a.codes, "a_scales": a.scales, "a_decode": a.decode_scale,
        "b_codes": b.codes, "b_scales": b.scales, "b_decode": b.decode_scale,
    }  # fmt: skip


def test_a_grouped_product_of_picked_rows_has_a_row_for_each_index(
    card: Card, cupy: stubs.Cupy
) -> None:
    b = on_device(cupy, nvfp4.quantize(values(3, 7, 64), "nvfp4"))
    indices = cupy.asarray(INDICES)
    for a in (
        cupy.asarray(X.astype(np.float16)),
        on_device(cupy, nvfp4.quantize(X, "nvfp4", scale_layout="linear")),
    ):
        out = nvfp4.grouped_matmul(a, b, row_offsets=cupy.asarray(OFFSETS), row_indices=indices)
        assert out.shape == (6, 7)
        assert (card.facts["input_rows"], card.facts["rows"]) == (5, 6)
        assert card.buffers["row_indices"].owner is indices


def test_a_quantised_product_is_a_tensor(card: Card, cupy: stubs.Cupy) -> None:
    a = on_device(cupy, nvfp4.quantize(X, "nvfp4"))
    b = on_device(cupy, nvfp4.quantize(values(32, 64), "nvfp4"))
    out = nvfp4.matmul(a, b, out_dtype="mxfp8")
    assert (out.format, out.shape, out.scale_layout) == ("mxfp8_e4m3", (5, 32), "tcgen")
    facts = ("out_dtype", "out_layout", "out_tiles", "out_starts_dtype")
    assert [card.facts[name] for name in facts] == ["mxfp8_e4m3", "tcgen", None, None]
    names = ("out_codes", "out_scales", "out_decode", "out_tile_starts")
    owners = [getattr(card.buffers[name], "owner", None) for name in names]
    assert owners == [out.codes, out.scales, out.decode_scale, None]
    again = nvfp4.matmul(a, b, out_dtype="mxfp8", out=out)
    assert again is out
    stack = on_device(cupy, nvfp4.quantize(values(3, 32, 64), "nvfp4"))
    offsets = cupy.asarray(OFFSETS)
    rows = cupy.asarray(X.astype(np.float16))
    grouped = nvfp4.grouped_matmul(rows, stack, row_offsets=offsets, out_dtype="nvfp4")
    assert grouped.groups is offsets
    assert grouped.scales.shape == (4, 1, 32, 4, 4)
    assert grouped.decode_scale.shape == (3,)
    assert card.facts["out_tiles"] == 4


def test_without_a_kernel_there_is_a_clear_error(
    card: Card, cupy: stubs.Cupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_place, "_planner", lambda: types.SimpleNamespace())
    with says(nvfp4.UnsupportedError, "kernel for quantize", "sm_90a", "golden"):
        nvfp4.quantize(cupy.asarray(X), "nvfp4")
