"""Host arrays of every library and layout: the bytes of a plain NumPy array, in the caller's
library."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import arrays
from tests.vectorlib import same_values

from . import stubs

RNG = np.random.default_rng(11)
FORMATS = ["nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"]
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
OFFSETS = np.array([0, 2, 2, 5], np.int32)


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


X = values(5, 64)


# --- views ----------------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows apart": lambda x: np.repeat(x, 3, axis=0)[::3],
    "rows backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "columns apart": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "columns backwards": lambda x: np.ascontiguousarray(x[:, ::-1])[:, ::-1],
    "transposed": lambda x: np.ascontiguousarray(x.T).T,
    "part of wider rows": lambda x: np.pad(x, ((0, 0), (3, 9)), constant_values=99)[:, 3:-9],
    "unaligned": lambda x: unaligned(x),
    "read-only": lambda x: np.frombuffer(x.tobytes(), x.dtype).reshape(x.shape),
}


def unaligned(x: np.ndarray) -> np.ndarray:
    memory = np.zeros(x.nbytes + 1, np.uint8)
    view = memory[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_a_view_is_read_as_what_it_shows(view: Any, dtype: Any) -> None:
    x = X.astype(dtype)
    seen = view(x)
    np.testing.assert_array_equal(np.asarray(seen, np.float32), np.asarray(x, np.float32))
    for format in FORMATS:
        expected, got = nvfp4.quantize(x, format), nvfp4.quantize(seen, format)
        np.testing.assert_array_equal(got.codes, expected.codes)
        np.testing.assert_array_equal(got.scales, expected.scales)
        expected = nvfp4.grouped_quantize(x, format, row_offsets=OFFSETS)
        got = nvfp4.grouped_quantize(seen, format, row_offsets=OFFSETS)
        np.testing.assert_array_equal(got.codes, expected.codes)
        np.testing.assert_array_equal(got.scales, expected.scales)


def test_a_broadcast_input_is_read_as_what_it_shows() -> None:
    row = values(1, 64)
    seen = np.broadcast_to(row, (5, 64))
    expected = nvfp4.quantize(np.repeat(row, 5, axis=0), "nvfp4")
    np.testing.assert_array_equal(nvfp4.quantize(seen, "nvfp4").codes, expected.codes)


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
def test_parts_of_a_tensor_may_be_views(layout: str) -> None:
    q = nvfp4.quantize(X, "nvfp4", scale_layout=layout)
    seen = nvfp4.QTensor.from_parts(
        VIEWS["part of wider rows"](q.codes),
        np.repeat(q.scales, 2, axis=-1)[..., ::2],
        "nvfp4",
        decode_scale=q.decode_scale,
        scale_layout=layout,
    )
    assert not seen.codes.flags.c_contiguous
    assert same_values(seen.dequantize(), q.dequantize())
    b = nvfp4.quantize(values(7, 64), "nvfp4")
    assert same_values(nvfp4.matmul(seen, b), nvfp4.matmul(q, b))
    if layout == "tcgen":
        linear = nvfp4.deinterleave_scales(seen.scales, (5, 4))
        np.testing.assert_array_equal(linear, nvfp4.deinterleave_scales(q.scales, (5, 4)))
    else:
        tiles = nvfp4.interleave_scales(seen.scales)
        np.testing.assert_array_equal(tiles, nvfp4.interleave_scales(q.scales))


def test_results_may_be_views_and_what_lies_between_stays() -> None:
    memory = np.full((5, 50), 0xAA, np.uint8)
    scales = np.zeros((1, 1, 32, 4, 4), np.uint8)
    out = nvfp4.QTensor.from_parts(memory[:, 7:39], scales, "nvfp4")
    nvfp4.quantize(X, "nvfp4", out=out)
    expected = nvfp4.quantize(X, "nvfp4")
    np.testing.assert_array_equal(memory[:, 7:39], expected.codes)
    assert (memory[:, :7] == 0xAA).all()
    assert (memory[:, 39:] == 0xAA).all()
    wide = np.full((5, 130), 7.0, np.float32)
    expected.dequantize(out=wide[:, 1:129:2])
    assert same_values(np.ascontiguousarray(wide[:, 1:129:2]), expected.dequantize())
    assert (wide[:, 0::2] == 7).all()


# --- empty arrays ---------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (5, 0), (0, 0), (0, 5, 64), (3, 0, 64)])
@pytest.mark.parametrize("scale", [None, "amax", 0.5])
def test_an_empty_array_is_legal(
    shape: tuple[int, ...], format: str, layout: str, scale: Any
) -> None:
    q = nvfp4.quantize(np.zeros(shape, np.float32), format, scale_layout=layout, encode_scale=scale)
    assert q.shape == shape
    assert q.codes.size == q.scales.size == 0
    assert q.dequantize("float16").shape == shape
    assert q.decode_scale.shape == ()
    assert (
        nvfp4.quantize(
            np.zeros(shape, np.float32), format, scale_layout=layout, encode_scale=scale, out=q
        )
        is q
    )


@pytest.mark.parametrize(
    ("rows", "offsets"), [(0, [0]), (0, [0, 0, 0]), (5, [0]), (5, [0, 0]), (5, [0, 0, 3, 3])]
)
def test_ranges_may_be_empty_and_rows_uncovered(rows: int, offsets: list[int]) -> None:
    x = X[:rows]
    groups = np.array(offsets)
    q = nvfp4.grouped_quantize(x, "nvfp4", row_offsets=groups)
    covered = offsets[-1]
    expected = np.zeros((rows, 64), np.float32)
    expected[:covered] = nvfp4.quantize(x[:covered], "nvfp4").dequantize()
    np.testing.assert_array_equal(q.dequantize(), expected)
    assert q.decode_scale.shape == (len(offsets) - 1,)
    assert not q.codes[covered:].any()


def test_products_of_nothing_are_empty_or_zero() -> None:
    b = nvfp4.quantize(values(7, 64), "nvfp4")
    none = nvfp4.quantize(np.zeros((0, 64), np.float32), "nvfp4")
    flat = nvfp4.quantize(np.zeros((5, 0), np.float32), "nvfp4")
    assert nvfp4.matmul(none, b).shape == (0, 7)
    assert nvfp4.matmul(b, none).shape == (7, 0)
    out = np.full((5, 5), np.nan, np.float32)
    assert not nvfp4.matmul(flat, flat, out=out, out_dtype="float32").any()
    experts = nvfp4.quantize(values(3, 7, 64), "nvfp4")
    x = X.astype(np.float16)
    out = np.full((5, 7), np.nan, np.float32)
    nothing = nvfp4.grouped_matmul(
        x, experts, row_offsets=np.array([0]), out=out, out_dtype="float32"
    )
    assert nothing is out
    assert (out == 0).all()


# --- libraries ------------------------------------------------------------------------------------


def torch_array(module: Any, x: np.ndarray) -> Any:
    if x.dtype.name == "bfloat16":
        return module.from_numpy(x.view(np.int16)).view(module.bfloat16)
    return module.from_numpy(x)


def torch_values(x: Any) -> np.ndarray:
    import torch

    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


class Library:
    """How to make a host array of a library, and how to look into one."""

    def __init__(
        self,
        make: Callable[[np.ndarray], Any],
        look: Callable[[Any], np.ndarray],
        kind: type | None = None,
        dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16"),
    ) -> None:
        self.make, self.look, self.kind, self.dtypes = make, look, kind, dtypes


def installed() -> dict[str, Library]:
    """The libraries of this environment; the stubs stand for the others."""
    standard = ("float32",)  # NumPy exports no bfloat16, the Array API knows no float16
    found = {
        "numpy": Library(lambda x: x, lambda x: x, np.ndarray),
        "dlpack": Library(stubs.DLPackOnly, np.asarray, np.ndarray, ("float32", "float16")),
        "old dlpack": Library(stubs.OldDLPackOnly, np.asarray, np.ndarray, ("float32",)),
    }
    if importlib.util.find_spec("torch"):
        import torch

        found["torch"] = Library(lambda x: torch_array(torch, x), torch_values, torch.Tensor)
    if importlib.util.find_spec("array_api_strict"):
        import array_api_strict

        kind = type(array_api_strict.asarray(X))
        look = np.from_dlpack
        found["array_api_strict"] = Library(array_api_strict.asarray, look, kind, standard)
    if importlib.util.find_spec("jax"):
        import jax

        found["jax"] = Library(jax.numpy.asarray, np.asarray, jax.Array)
    return found


LIBRARIES = installed()
CASES = [(name, dtype) for name, library in LIBRARIES.items() for dtype in library.dtypes]


def check_library(library: Library, dtype: str) -> None:
    """Every public function, with everything in this library's arrays, gives NumPy's bytes."""
    x = X.astype(arrays.numpy_dtype(dtype))
    make, look = library.make, library.look
    scale = np.array([0.5, 2.0, 3.0], np.float32)
    ids = np.array([2, -1, 0], np.int32)

    def same(got: Any, expected: Any) -> None:
        if library.kind is not None:
            assert isinstance(got, library.kind)
        np.testing.assert_array_equal(look(got), expected)

    def same_tensor(got: nvfp4.QTensor, expected: nvfp4.QTensor) -> None:
        same(got.codes, expected.codes)
        same(got.scales, expected.scales)
        same(got.decode_scale, expected.decode_scale)

    for layout in ("tcgen", "linear"):
        got = nvfp4.quantize(make(x), "nvfp4", encode_scale="amax", scale_layout=layout)
        expected = nvfp4.quantize(x, "nvfp4", encode_scale="amax", scale_layout=layout)
        same_tensor(got, expected)
        same(got.dequantize(), expected.dequantize())
    row = np.array([[0.5], [1], [2], [4], [8]], np.float32)
    by_row = nvfp4.quantize(make(x), "mxfp4", encode_scale=make(row))
    same_tensor(by_row, nvfp4.quantize(x, "mxfp4", encode_scale=row))
    options = {"row_offsets": OFFSETS, "expert_ids": ids, "encode_scale": scale}
    in_library = {name: make(value) for name, value in options.items()}
    grouped = nvfp4.grouped_quantize(make(x), "nvfp4", **in_library)
    expected_grouped = nvfp4.grouped_quantize(x, "nvfp4", **options)
    same_tensor(grouped, expected_grouped)
    assert grouped.groups is in_library["row_offsets"]
    same(grouped.dequantize(), expected_grouped.dequantize())
    weights = values(3, 7, 64)
    b = nvfp4.quantize(make(weights), "mxfp4")
    b_expected = nvfp4.quantize(weights, "mxfp4")
    same(
        nvfp4.grouped_matmul(
            grouped,
            b,
            row_offsets=in_library["row_offsets"],
            expert_ids=in_library["expert_ids"],
            alpha=in_library["encode_scale"],
            out_dtype="float32",
        ),
        nvfp4.grouped_matmul(
            expected_grouped,
            b_expected,
            row_offsets=OFFSETS,
            expert_ids=ids,
            alpha=scale,
            out_dtype="float32",
        ),
    )
    bias = np.linspace(-1, 1, 7, dtype=np.float32)
    one, one_expected = (
        nvfp4.quantize(make(weights[0]), "nvfp4"),
        nvfp4.quantize(weights[0], "nvfp4"),
    )
    same(
        nvfp4.matmul(by_row, one, epilogue=nvfp4.epilogues.bias(make(bias)), out_dtype="float32"),
        nvfp4.matmul(
            nvfp4.quantize(x, "mxfp4", encode_scale=row),
            one_expected,
            epilogue=nvfp4.epilogues.bias(bias),
            out_dtype="float32",
        ),
    )
    linear = nvfp4.deinterleave_scales(one.scales, (7, 4))
    same(linear, nvfp4.deinterleave_scales(one_expected.scales, (7, 4)))
    same(nvfp4.interleave_scales(linear), one_expected.scales)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_host_arrays_of_every_library_give_the_same_bytes(name: str, dtype: str) -> None:
    check_library(LIBRARIES[name], dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cpu_tensors_give_the_same_bytes_and_tensors(torch: stubs.Torch, dtype: str) -> None:
    check_library(
        Library(lambda x: stubs.Tensor(torch, x), lambda t: t.values, stubs.Tensor), dtype
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_come_back_in_every_dtype_of_the_library(torch: stubs.Torch, dtype: str) -> None:
    q, expected = nvfp4.quantize(stubs.Tensor(torch, X), "mxfp8"), nvfp4.quantize(X, "mxfp8")
    for asked in (dtype, getattr(torch, dtype), arrays.numpy_dtype(dtype)):
        got = q.dequantize(asked)
        assert got.dtype is getattr(torch, dtype)
        assert same_values(got.values, expected.dequantize(dtype))


def test_a_cpu_tensor_is_written_in_place(torch: stubs.Torch) -> None:
    q, expected = nvfp4.quantize(stubs.Tensor(torch, X), "mxfp4"), nvfp4.quantize(X, "mxfp4")
    memory = np.zeros((5, 64), ml_dtypes.bfloat16)
    out = stubs.Tensor(torch, memory)
    assert q.dequantize("bfloat16", out=out) is out
    assert same_values(memory, expected.dequantize("bfloat16"))


def test_a_read_only_dlpack_array_is_not_written_to() -> None:
    memory = np.zeros((5, 64), np.float32)
    memory.flags.writeable = False
    q = nvfp4.quantize(X, "nvfp4")
    with pytest.raises(ValueError, match=r"out.*writable"):
        q.dequantize(out=stubs.DLPackOnly(memory))


# --- PyTorch's peculiarities ----------------------------------------------------------------------


def test_a_tensor_that_requires_grad_is_refused_while_grad_mode_is_on(torch: stubs.Torch) -> None:
    x = stubs.Tensor(torch, X)
    x.requires_grad = True
    with pytest.raises(ValueError, match=r"x.*requires grad.*no_grad.*detach"):
        nvfp4.quantize(x, "nvfp4")
    torch.grad_enabled = False
    got = nvfp4.quantize(x, "nvfp4")
    np.testing.assert_array_equal(got.codes.values, nvfp4.quantize(X, "nvfp4").codes)


def test_every_argument_is_asked_whether_it_requires_grad(torch: stubs.Torch) -> None:
    scale = stubs.Tensor(torch, np.ones((), np.float32))
    scale.requires_grad = True
    with pytest.raises(ValueError, match=r"encode_scale.*requires grad"):
        nvfp4.quantize(stubs.Tensor(torch, X), "nvfp4", encode_scale=scale)


def test_tensors_that_are_not_plain_memory_are_refused(torch: stubs.Torch) -> None:
    x = stubs.Tensor(torch, X)
    x.negated = True
    with pytest.raises(ValueError, match=r"x.*resolve_neg"):
        nvfp4.quantize(x, "nvfp4")
    x.negated, x.layout = False, "torch.sparse_coo"
    with pytest.raises(TypeError, match=r"x.*sparse_coo"):
        nvfp4.quantize(x, "nvfp4")
    with pytest.raises(TypeError, match=r"x must be on a CUDA device or on the CPU.*mps"):
        nvfp4.quantize(stubs.Tensor(torch, X, "mps:0"), "nvfp4")
    with pytest.raises(TypeError, match=r"x.*float64.*float32"):
        nvfp4.quantize(stubs.Tensor(torch, X.astype(np.float64)), "nvfp4")


def test_a_subclass_of_a_tensor_is_a_tensor(torch: stubs.Torch) -> None:
    class Parameter(stubs.Tensor):
        pass

    got = nvfp4.quantize(Parameter(torch, X), "nvfp4")
    assert type(got.codes) is stubs.Tensor
