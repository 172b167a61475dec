"""The public functions on GPU arrays of every installed library: bytes, types, memory, streams,
time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import nvfp4

from .. import host_cost

RNG = np.random.default_rng(17)
X = RNG.standard_normal((300, 2880)).astype(np.float32)
OFFSETS = np.array([0, 7, 7, 200, 290], np.int32)
IDS = np.array([2, 0, -1, 1], np.int32)
SCALE = np.array([0.5, 2.0, 3.0], np.float32)
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


class Library(NamedTuple):
    """How to bring an array to the GPU and back."""

    there: Callable[[np.ndarray], Any]
    back: Callable[[Any], np.ndarray]
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")


def _cupy() -> Library:
    import cupy

    return Library(cupy.asarray, cupy.asnumpy)


def _torch() -> Library:
    import torch

    def there(x: np.ndarray) -> Any:
        x = np.array(x, order="C")
        if x.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(x.view(np.int16)).cuda().view(torch.bfloat16)
        return torch.from_numpy(x).cuda()

    def back(x: Any) -> np.ndarray:
        if x.dtype == torch.bfloat16:
            return x.view(torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return x.cpu().numpy()

    return Library(there, back)


def _numba() -> Library:
    from numba import cuda

    return Library(cuda.to_device, lambda x: x.copy_to_host(), ("float32", "float16"))


MAKERS = {"cupy": _cupy, "torch": _torch, "numba": _numba}
INSTALLED = [name for name in MAKERS if importlib.util.find_spec(name)]
libraries = pytest.mark.parametrize("name", INSTALLED)


def same(library: Library, got: nvfp4.QTensor, expected: nvfp4.QTensor) -> None:
    assert (got.format, got.shape, got.scale_layout) == (
        expected.format,
        expected.shape,
        expected.scale_layout,
    )
    for part in ("codes", "scales", "decode_scale"):
        ours, theirs = library.back(getattr(got, part)), getattr(expected, part)
        assert ours.shape == theirs.shape
        assert ours.tobytes() == theirs.tobytes()


@libraries
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_quantize_gives_the_golden_bytes_in_the_callers_library(
    name: str, dtype: str, format: str
) -> None:
    library = MAKERS[name]()
    if dtype not in library.dtypes:
        dtype = library.dtypes[0]
    x = X.astype(DTYPES[dtype])
    there = library.there(x)
    for options in ({}, {"encode_scale": "amax"}, {"scale_layout": "linear"}):
        expected = nvfp4.quantize(x, format, **options)
        got = nvfp4.quantize(there, format, **options)
        assert type(got.codes) is type(there)
        same(library, got, expected)
        values = got.dequantize("float32")
        assert library.back(values).tobytes() == expected.dequantize("float32").tobytes()


@libraries
def test_grouped_quantize_gives_the_golden_bytes(name: str) -> None:
    library = MAKERS[name]()
    options = {"row_offsets": OFFSETS, "expert_ids": IDS, "encode_scale": SCALE}
    expected = nvfp4.grouped_quantize(X, "nvfp4", **options)
    on_device = {key: library.there(value) for key, value in options.items()}
    got = nvfp4.grouped_quantize(library.there(X), "nvfp4", **on_device)
    same(library, got, expected)
    assert library.back(got.dequantize()).tobytes() == expected.dequantize().tobytes()


@libraries
def test_repeated_calls_into_the_same_tensor_are_right(name: str) -> None:
    library = MAKERS[name]()
    inputs = [X, (2 * X[::-1]).copy(), np.zeros_like(X)]
    there = [library.there(x) for x in inputs]
    scale = library.there(np.array(1, np.float32))
    out = nvfp4.quantize(there[0], "nvfp4", encode_scale=scale)
    for x, array in zip(inputs * 2, there * 2, strict=True):
        assert nvfp4.quantize(array, "nvfp4", encode_scale=scale, out=out) is out
        same(library, out, nvfp4.quantize(x, "nvfp4", encode_scale=1.0))
        assert nvfp4.quantize(array, "nvfp4", encode_scale=0.5, out=out) is out
        same(library, out, nvfp4.quantize(x, "nvfp4", encode_scale=0.5))


def test_with_out_nothing_is_allocated(cupy: Any) -> None:
    x = cupy.asarray(X)
    out = nvfp4.quantize(x, "nvfp4", encode_scale="amax")
    target = cupy.empty(X.shape, np.float32)
    out.dequantize(out=target)
    before = cupy.get_default_memory_pool().used_bytes(), cupy.cuda.runtime.memGetInfo()[0]
    for _ in range(3):
        nvfp4.quantize(x, "nvfp4", encode_scale="amax", out=out)
        out.dequantize(out=target)
    cupy.cuda.runtime.deviceSynchronize()
    after = cupy.get_default_memory_pool().used_bytes(), cupy.cuda.runtime.memGetInfo()[0]
    assert after == before


def test_calls_are_captured_into_a_graph(cupy: Any) -> None:
    x = cupy.asarray(X)
    out = nvfp4.quantize(x, "nvfp4", encode_scale="amax")
    target = cupy.empty(X.shape, np.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        nvfp4.quantize(x, "nvfp4", encode_scale="amax", out=out)
        out.dequantize(out=target)
        stream.begin_capture()
        nvfp4.quantize(x, "nvfp4", encode_scale="amax", out=out)
        out.dequantize(out=target)
        graph = stream.end_capture()
    x[...] = cupy.asarray(3 * X[::-1])
    target[...] = np.nan
    cupy.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    expected = nvfp4.quantize((3 * X[::-1]).copy(), "nvfp4", encode_scale="amax")
    same(_cupy(), out, expected)
    assert cupy.asnumpy(target).tobytes() == expected.dequantize().tobytes()


@libraries
def test_strided_rows_are_read_as_what_they_show(name: str) -> None:
    library = MAKERS[name]()
    wide = np.zeros((300, 3000), np.float32)
    wide[:, 8:2888] = X
    got = nvfp4.quantize(library.there(wide)[::3, 8:2888], "mxfp4")
    same(library, got, nvfp4.quantize(X[::3].copy(), "mxfp4"))
    with pytest.raises(ValueError, match="contiguous along its last axis"):
        nvfp4.quantize(library.there(wide)[:, 0:2880:2], "mxfp4")


timed = pytest.mark.parametrize("name", [name for name in INSTALLED if name in host_cost.LIBRARIES])


@timed
def test_calls_like_one_before_cost_the_host_ten_microseconds(name: str, cupy: Any) -> None:
    library = host_cost.LIBRARIES[name]()
    times = host_cost.microseconds(host_cost.public_calls(library), library.wait)
    for label, us in times.items():
        print(f"{name} {label}: {us:.1f} us")
    assert {label: us for label, us in times.items() if us > host_cost.LIMIT_US} == {}


def test_where_an_array_of_cupys_is_never_changes(cupy: Any) -> None:
    """So that parts of QTensors are looked at by the object that says it."""
    x = cupy.zeros((4, 6), cupy.float32)
    memory = x.data
    x.shape = (6, 4)
    assert x.data is memory
    for name in ("data", "dtype", "strides"):
        with pytest.raises(AttributeError):
            setattr(x, name, getattr(x, name))
    with pytest.raises(AttributeError):
        memory.ptr = 0


def test_calls_like_one_before_allocate_nothing(cupy: Any) -> None:
    library = host_cost.LIBRARIES["cupy"]()
    for label, call in host_cost.public_calls(library).items():
        call()
        call()
        library.wait()
        before = cupy.get_default_memory_pool().used_bytes(), cupy.cuda.runtime.memGetInfo()[0]
        for _ in range(5):
            call()
        library.wait()
        after = cupy.get_default_memory_pool().used_bytes(), cupy.cuda.runtime.memGetInfo()[0]
        assert after == before, label


def test_every_call_with_out_is_captured_into_a_graph(cupy: Any) -> None:
    library = host_cost.LIBRARIES["cupy"]()
    for label, call in host_cost.public_calls(library).items():
        stream = cupy.cuda.Stream(non_blocking=True)
        library.wait()
        with stream:
            call()
            stream.begin_capture()
            for _ in range(3):  # the first may still go the long way
                out = call()
            graph = stream.end_capture()
            # Some calls rotate their inputs, 16 of them: the last call's once more.
            for _ in range(16):
                call()
            stream.synchronize()
        parts = (out.codes, out.scales) if isinstance(out, nvfp4.QTensor) else (out,)
        expected = [cupy.asnumpy(part.view(np.uint8)).tobytes() for part in parts]
        for part in parts:
            part.view(np.uint8)[...] = 0x55
        library.wait()
        graph.launch(stream)
        stream.synchronize()
        got = [cupy.asnumpy(part.view(np.uint8)).tobytes() for part in parts]
        assert got == expected, label


@timed
def test_repeated_calls_of_every_kind_follow_their_inputs(name: str, cupy: Any) -> None:
    """Alternating inputs and addresses, against the golden model."""
    library = MAKERS[name]()
    b = nvfp4.quantize(X[:64, :256].copy(), "mxfp4")
    there = host_cost.tensor(host_cost.Library(library.there, lambda: None), b)
    offsets = np.array([0, 7, 7, 30, 48], np.int32)
    inputs = [np.array(X[i * 48 : i * 48 + 48, :256], np.float16) for i in range(4)]
    moved = [library.there(x) for x in inputs]
    grouped = nvfp4.grouped_quantize(moved[0], "nvfp4", row_offsets=library.there(offsets))
    product = nvfp4.matmul(moved[0], there, out_dtype="float32")
    for _ in range(3):
        for x, array in zip(inputs, moved, strict=True):
            nvfp4.grouped_quantize(array, "nvfp4", row_offsets=grouped.groups, out=grouped)
            expected = nvfp4.grouped_quantize(x, "nvfp4", row_offsets=offsets)
            same(library, grouped, expected)
            for alpha in (1.0, -2.0):
                nvfp4.matmul(array, there, alpha=alpha, out=product, out_dtype="float32")
                wanted = nvfp4.matmul(x, b, alpha=alpha, out_dtype="float32")
                np.testing.assert_allclose(library.back(product), wanted, rtol=1e-4, atol=1e-3)
