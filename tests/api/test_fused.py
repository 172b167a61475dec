"""swiglu_quantize, rmsnorm_quantize and row_counts: what they promise, and what they refuse."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4.golden import hidden

RNG = np.random.default_rng(11)


def values(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32).astype(dtype)


X = values(5, 64)
GATE_UP = values(5, 128)
WEIGHT = values(64)
STACK = values(3, 5, 64)
OFFSETS = np.array([0, 2, 2, 4], np.int32)
COUNTS = np.array([5, 0, 2], np.int32)


def says(error: type[Exception], *parts: str) -> Any:
    """A context in which exactly this error is raised, with all of these words in its message."""
    return pytest.raises(error, match="".join(f"(?=.*{part})" for part in parts))


def swiglu(x: Any = GATE_UP, format: Any = "nvfp4", **options: Any) -> Any:
    return nvfp4.swiglu_quantize(x, format, **options)


def rmsnorm(
    x: Any = X, format: Any = "nvfp4", *, weight: Any = WEIGHT, eps: Any = 1e-5, **options: Any
) -> Any:
    return nvfp4.rmsnorm_quantize(x, weight, eps, format, **options)


CALLS = {"swiglu": swiglu, "rmsnorm": rmsnorm}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


def same(a: nvfp4.QTensor, b: nvfp4.QTensor) -> None:
    assert (a.format, a.shape, a.scale_layout) == (b.format, b.shape, b.scale_layout)
    for part in ("codes", "scales", "decode_scale"):
        np.testing.assert_array_equal(getattr(a, part), getattr(b, part), err_msg=part)


# --- promises -------------------------------------------------------------------------------------


@calls
@pytest.mark.parametrize("encode", [None, 3.0, "amax", "row_amax", np.array([[2.0]] * 5, "f4")])
@pytest.mark.parametrize("layout", ["tcgen", "linear"])
def test_it_is_the_quantised_hidden_value(call: Any, layout: str, encode: Any) -> None:
    options = {"encode_scale": encode, "scale_layout": layout}
    q, h = call(return_hidden=True, **options)
    assert type(h) is np.ndarray and h.dtype == np.float32 and h.shape == q.shape == (5, 64)
    same(q, nvfp4.quantize(h, "nvfp4", **options))
    same(call(**options), q)


@calls
def test_ranges_are_those_of_grouped_quantize(call: Any) -> None:
    _, h = call(return_hidden=True)
    options: Any = {
        "row_offsets": OFFSETS,
        "row_indices": np.array([4, 9, 0, 1, 2, 3]),
        "expert_ids": np.array([1, 0, -1]),
        "encode_scale": np.array([2.0, 5.0], np.float32),
    }
    q, routed = call(return_hidden=True, **options)
    expected = nvfp4.grouped_quantize(h, "nvfp4", **options)
    same(q, expected)
    assert q.groups is OFFSETS
    np.testing.assert_array_equal(routed, np.stack([h[4], *[0 * h[0]] * 5]))


def test_rows_beyond_their_count_count_as_zero() -> None:
    zeroed = STACK.copy()
    zeroed[1] = 0
    zeroed[2, 2:] = 0
    for encode in (None, "amax", "row_amax", np.array([1.0, 2.0, 3.0], np.float32)):
        q = nvfp4.quantize(STACK, "nvfp4", row_counts=COUNTS, encode_scale=encode)
        same(q, nvfp4.quantize(zeroed, "nvfp4", encode_scale=encode))
        assert not q.codes[1].any() and not q.scales[1].any()
    q, h = rmsnorm(STACK, row_counts=COUNTS, return_hidden=True)
    assert not h[1].any() and not h[2, 2:].any() and h[2, :2].all()
    same(q, nvfp4.quantize(h, "nvfp4"))
    for format in ("mxfp4", "mxfp8"):
        out = nvfp4.quantize(values(3, 5, 64), format)
        assert nvfp4.quantize(STACK, format, row_counts=COUNTS, out=out) is out
        same(out, nvfp4.quantize(zeroed, format))


def test_hidden_values_are_those_of_the_definition() -> None:
    gate_up = values(4, 96, dtype=ml_dtypes.bfloat16)
    for halves in ("split", "interleaved"):
        for kind in ("silu", "gpt-oss"):
            _, h = swiglu(gate_up, halves=halves, kind=kind, return_hidden=True)
            np.testing.assert_array_equal(h, hidden.swiglu(gate_up, halves=halves, kind=kind))
    x, residual = values(2, 2, 3, 64, dtype=np.float16)
    expected, total = hidden.rmsnorm(x, WEIGHT, 0.5, residual=residual)
    summed, normed = np.empty_like(x), np.empty_like(x)
    made = rmsnorm(
        x, eps=0.5, residual=residual, residual_out=summed, norm_out=normed, return_hidden=True
    )
    assert made[1] is normed
    np.testing.assert_array_equal(normed, expected)
    np.testing.assert_array_equal(summed, total)


def test_a_residual_may_be_replaced_in_place() -> None:
    residual = values(5, 64)
    expected = X + residual
    rmsnorm(residual=residual, residual_out=residual)
    np.testing.assert_array_equal(residual, expected)
    again = values(5, 64)
    expected = X + again
    rmsnorm(residual=again, residual_out=again, row_offsets=np.array([0, 2, 3]))
    np.testing.assert_array_equal(again, np.where(np.arange(5)[:, None] < 3, expected, 0))


@calls
def test_out_is_written_and_returned(call: Any) -> None:
    out = nvfp4.quantize(values(5, 64), "mxfp4")
    for array in (out.codes, out.scales, out.decode_scale):
        array[...] = 0xAA
    assert call(format="mxfp4", out=out) is out
    same(out, call(format="mxfp4"))
    grouped = nvfp4.grouped_quantize(values(5, 64), "nvfp4", row_offsets=OFFSETS)
    grouped.scales[...] = 0xAA
    assert call(row_offsets=OFFSETS, out=grouped, return_hidden=True)[0] is grouped
    same(grouped, call(row_offsets=OFFSETS))


@calls
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"])
def test_views_and_leading_axes(call: Any, format: str) -> None:
    wide = values(2, 3, 300)
    columns = 128 if call is swiglu else 64
    x = wide[:, :, 1 : 1 + columns]
    q = call(x, format, scale_layout="linear")
    assert q.shape == (2, 3, 64)
    same(q, call(x.copy(), format, scale_layout="linear"))
    flat = call(x.copy().reshape(6, columns), format, scale_layout="linear")
    np.testing.assert_array_equal(q.codes.reshape(flat.codes.shape), flat.codes)


# --- refusals -------------------------------------------------------------------------------------


@calls
def test_what_all_quantisers_refuse(call: Any) -> None:
    with says(ValueError, "format", "nvfp4", "mxfp8_e5m2"):
        call(format="fp4")
    with says(TypeError, "format"):
        call(format=np.uint8)
    with says(ValueError, "scale_layout", "tcgen", "linear"):
        call(scale_layout="tc")
    with says(TypeError, "scale_layout"):
        call(scale_layout=None)
    with says(ValueError, "scale_rounding", "rceil"):
        call(scale_rounding="floor")
    with says(ValueError, "encode_scale", "finite"):
        call(encode_scale=0.0)
    with says(ValueError, "encode_scale", "shapes", r"\(5, 1\)"):
        call(encode_scale=np.ones(7, np.float32))
    with says(ValueError, "row_amax", "nvfp4", "mxfp8"):
        call(format="mxfp8", encode_scale="row_amax")
    with says(TypeError, "stream", "__cuda_stream__"):
        call(stream="0")
    with says(TypeError, "return_hidden", "True or False"):
        call(return_hidden=1)
    with says(TypeError, "out must be a QTensor", "from_parts"):
        call(out=X)
    with says(ValueError, "out", "format nvfp4", "mxfp4"):
        call(out=nvfp4.quantize(X, "mxfp4"))
    with says(ValueError, "out", "shape", r"\(4, 64\)"):
        call(out=nvfp4.quantize(X[:4], "nvfp4"))
    with says(ValueError, "out", "groups must be None"):
        call(
            scale_layout="linear",
            out=nvfp4.QTensor.from_parts(
                np.zeros((5, 32), np.uint8), np.zeros((5, 4), np.uint8), "nvfp4",
                scale_layout="linear", groups=OFFSETS,
            ),
        )  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_dtypes_and_kinds_of_the_input(name: str) -> None:
    call, argument = CALLS[name], {"swiglu": "gate_up", "rmsnorm": "x"}[name]
    x = GATE_UP if name == "swiglu" else X
    with says(TypeError, argument, "float64", "float32"):
        call(x.astype(np.float64))
    with says(TypeError, argument, "float32", "int32"):
        call(x.astype(np.int32))
    with says(TypeError, f"{argument} must be an array", "list"):
        call([[1.0]])
    with says(TypeError, f"{argument} must be an array", "QTensor"):
        call(nvfp4.quantize(X, "nvfp4"))
    with says(ValueError, r"\(\)"):
        call(np.ones((), np.float32))


@pytest.mark.parametrize(
    ("format", "multiple", "columns"),
    [("nvfp4", 16, 48), ("nvfp4", 16, 33), ("mxfp4", 32, 32), ("mxfp8", 32, 96), ("mxfp8", 32, 1)],
)
def test_gates_and_ups_have_whole_blocks(format: str, multiple: int, columns: int) -> None:
    with says(ValueError, "gate_up", "2K", f"multiple of {multiple}", str(columns)):
        swiglu(values(2, columns), format)
    with says(ValueError, "K", f"multiple of {multiple}"):
        rmsnorm(values(2, 40), format, weight=values(40))


@pytest.mark.parametrize("name", ["halves", "kind"])
def test_halves_and_kinds_are_words(name: str) -> None:
    allowed = {"halves": ("split", "interleaved"), "kind": ("silu", "gpt-oss")}[name]
    with says(ValueError, name, *allowed, "gelu"):
        swiglu(**{name: "gelu"})
    with says(TypeError, name, *allowed):
        swiglu(**{name: None})


@pytest.mark.parametrize("eps", [-1e-9, np.nan, np.inf, 1e39])
def test_eps_is_finite_and_not_negative(eps: Any) -> None:
    with says(ValueError, "eps", "finite", "at least 0"):
        rmsnorm(eps=eps)


@pytest.mark.parametrize("eps", [None, "1e-5", True, [1e-5], 1j])
def test_eps_is_a_number(eps: Any) -> None:
    with says(TypeError, "eps must be a number"):
        rmsnorm(eps=eps)


def test_a_weight_is_one_by_column_and_of_a_type_that_is_read() -> None:
    with says(ValueError, "weight", r"\(64,\)", r"\(5, 64\)"):
        rmsnorm(weight=X)
    with says(ValueError, "weight", r"\(64,\)", r"\(32,\)"):
        rmsnorm(weight=WEIGHT[:32])
    with says(TypeError, "weight", "float32", "float16"):
        rmsnorm(weight=WEIGHT.astype(np.float16))
    with says(TypeError, "weight", "float16 or float32", "bfloat16"):
        rmsnorm(X.astype(np.float16), weight=WEIGHT.astype(ml_dtypes.bfloat16))
    with says(TypeError, "weight must be an array"):
        rmsnorm(weight=1.0)
    half = X.astype(np.float16)
    same(
        rmsnorm(half, weight=np.ones(64, np.float16)), rmsnorm(half, weight=np.ones(64, np.float32))
    )


@pytest.mark.parametrize("name", ["residual", "residual_out", "norm_out"])
def test_arrays_beside_x_are_of_its_type_and_shape(name: str) -> None:
    def call(array: Any) -> Any:
        more = {"residual": values(5, 64)} if name == "residual_out" else {}
        return rmsnorm(**more, **{name: array})

    with says(TypeError, name, "float32", "float16"):
        call(np.zeros((5, 64), np.float16))
    with says(ValueError, name, "shape", r"\(5, 64\)", r"\(4, 64\)"):
        call(np.zeros((4, 64), np.float32))
    with says(TypeError, f"{name} must be an array"):
        call([1.0])
    if name != "residual":
        array = np.zeros((5, 64), np.float32)
        array.flags.writeable = False
        with says(ValueError, name, "writable"):
            call(array)


def test_a_sum_without_a_residual_is_refused() -> None:
    with says(ValueError, "residual_out", "residual", "missing"):
        rmsnorm(residual_out=values(5, 64))


def test_results_of_ranges_have_the_rows_of_the_ranges() -> None:
    indices = np.array([0, 1, 2, 3])
    ranges: Any = {"row_offsets": OFFSETS, "row_indices": indices}
    with says(ValueError, "norm_out", r"\(4, 64\)", r"\(5, 64\)"):
        rmsnorm(norm_out=values(5, 64), **ranges)
    residual = values(5, 64)
    with says(ValueError, "residual", r"\(5, 64\)"):
        rmsnorm(residual=values(4, 64), **ranges)
    square = values(4, 64)
    with says(ValueError, "residual_out", "row_indices"):
        rmsnorm(square, residual=residual[:4], residual_out=residual[:4], **ranges)


def test_what_is_written_shares_no_memory() -> None:
    x, residual = values(5, 64), values(5, 64)
    with says(ValueError, "norm_out must not overlap x"):
        rmsnorm(x, norm_out=x)
    with says(ValueError, "residual_out must not overlap x"):
        rmsnorm(x, residual=residual, residual_out=x)
    both = values(6, 64)
    with says(ValueError, "residual_out must not overlap residual"):
        rmsnorm(residual=both[:5], residual_out=both[1:])
    with says(ValueError, "norm_out must not overlap residual_out"):
        rmsnorm(residual=residual, residual_out=residual, norm_out=residual)
    memory = np.zeros(4096, np.uint8)
    gate_up = memory[:2560].view(np.float32).reshape(5, 128)
    out = nvfp4.QTensor.from_parts(
        memory[2500:2660].reshape(5, 32), np.zeros((5, 4), np.uint8), "nvfp4", scale_layout="linear"
    )
    with says(ValueError, "out.codes must not overlap gate_up"):
        swiglu(gate_up, out=out, scale_layout="linear")


@calls
def test_ranges_are_checked(call: Any) -> None:
    for name in ("expert_ids", "row_indices"):
        with says(ValueError, name, "row_offsets", "missing"):
            call(**{name: np.zeros(3, np.int32)})
    with says(ValueError, "row_offsets", "start at 0"):
        call(row_offsets=np.array([1, 5]))
    with says(ValueError, "row_offsets", "not decrease"):
        call(row_offsets=np.array([0, 3, 2]))
    with says(ValueError, "row_offsets", "number of rows, 5"):
        call(row_offsets=np.array([0, 6]))
    with says(TypeError, "row_offsets", "int32", "float64"):
        call(row_offsets=np.array([0.0, 5.0]))
    with says(ValueError, "encode_scale", "amax", "row_amax"):
        call(row_offsets=OFFSETS, encode_scale="amax")
    with says(ValueError, "row_counts", "row_offsets"):
        call(row_offsets=OFFSETS, row_counts=COUNTS)
    with says(ValueError, "two axes", "row_offsets"):
        call(values(3, 5, 128 if call is swiglu else 64), row_offsets=OFFSETS)
    grouped = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS)
    with says(ValueError, "out.groups must be row_offsets itself"):
        call(row_offsets=np.array([0, 1, 2, 4]), out=grouped)


COUNTED = {
    "quantize": lambda **more: nvfp4.quantize(STACK, "nvfp4", **more),
    "swiglu": lambda **more: swiglu(values(3, 5, 128), **more),
    "rmsnorm": lambda **more: rmsnorm(STACK, **more),
}


@pytest.mark.parametrize("call", COUNTED.values(), ids=COUNTED.keys())
def test_counts_are_integers_from_zero_to_the_capacity(call: Any) -> None:
    for dtype in (np.int64, np.uint32):
        assert call(row_counts=COUNTS.astype(dtype)).shape == (3, 5, 64)
    with says(ValueError, "row_counts", "capacity, 5", "got 6 at index 1"):
        call(row_counts=np.array([0, 6, 1]))
    with says(ValueError, "row_counts", "from 0", "got -1 at index 2"):
        call(row_counts=np.array([0, 5, -1]))
    with says(TypeError, "row_counts", "int32", "int64", "float32"):
        call(row_counts=COUNTS.astype(np.float32))
    with says(ValueError, "row_counts", r"\(3,\)", r"\(2,\)"):
        call(row_counts=COUNTS[:2])
    with says(TypeError, "row_counts must be an array"):
        call(row_counts=[5, 0, 2])
    with says(ValueError, "out", "scale_layout"):
        linear = nvfp4.quantize(STACK, "nvfp4", scale_layout="linear")
        call(row_counts=COUNTS, out=linear)


@pytest.mark.parametrize(
    "call",
    [
        lambda **more: nvfp4.quantize(X, "nvfp4", **more),
        lambda **more: swiglu(**more),
        lambda **more: rmsnorm(**more),
    ],
    ids=COUNTED.keys(),
)
def test_counts_belong_to_stacks(call: Any) -> None:
    with says(ValueError, "three axes", "capacity", "row_counts"):
        call(row_counts=COUNTS)
