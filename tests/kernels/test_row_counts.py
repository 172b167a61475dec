"""Products of stacks of which only the first rows count, in every kernel: the golden bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import arrays, plans_products, plans_sm90
from nvfp4.api import products

from . import products_sm100, products_sm120
from .products_sm100 import aligned

BF16 = ml_dtypes.bfloat16
#: What makes a product: the architecture, and whether the weights are prepared.
KERNELS = {
    "naive": ("sm_90a", False),
    "sm80": ("sm_80", False),
    "sm100": ("sm_100a", False),
    "sm120": ("sm_120a", False),
    "decode": ("sm_89", True),
    "sm90": ("sm_90a", True),
}
#: Capacity and counts. Where A has tiles, two of 128 rows a matrix.
TILED = (130, (129, 0, 3))
SMALL = (5, (5, 0, 3))


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel that makes whatever product."""
    monkeypatch.setattr(plans_sm90, "many_rows", lambda **_: 0)
    monkeypatch.setattr(plans_sm90, "MOST_STAGES", 3)
    with ExitStack() as stack:
        if request.param == "sm100":
            stack.enter_context(products_sm100.planned(None, 1))
        elif request.param != "naive":
            stack.enter_context(products_sm120.planned())
        plans_products.grouped_matmul.cache_clear()
        yield request.param
    plans_products.grouped_matmul.cache_clear()


def integers(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> Any:
    """Small integers whose products have exact sums."""
    return aligned(np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype))


def behind(stack: Any, counts: tuple[int, ...], value: Any) -> Any:
    """A stack whose rows behind the counts are of a value that must not be seen."""
    for matrix, count in zip(stack, counts, strict=True):
        matrix[count:] = value
    return stack


def quantized(x: Any, fmt: str, counts: tuple[int, ...], **options: Any) -> nvfp4.QTensor:
    """The rows that count, quantised, and other codes behind them."""
    q = aligned(nvfp4.quantize(x, fmt, row_counts=np.array(counts), **options))
    behind(q.codes, counts, 0x5A)
    return q


def weights(kernel: str, shape: tuple[int, ...], fmt: str = "nvfp4") -> nvfp4.QTensor:
    b = aligned(nvfp4.quantize(integers(shape, 2), fmt))
    return nvfp4.prepare_weights(b) if KERNELS[kernel][1] else b


def operands(kernel: str) -> tuple[Any, nvfp4.QTensor, tuple[int, ...]]:
    """A, plain where kernels take that, B, and counts."""
    capacity, counts = SMALL if KERNELS[kernel][1] else TILED
    if kernel == "sm90":  # each item of it takes seconds
        counts = counts[1:]
    x = behind(integers((len(counts), capacity, 32), 1, BF16), counts, np.nan)
    a = quantized(x, "nvfp4", counts) if kernel.startswith("sm1") else x
    return a, weights(kernel, (len(counts), 24, 32)), counts


def on_machine(kernel: str, a: Any, b: nvfp4.QTensor, expected: np.ndarray, **options: Any) -> Any:
    """What the kernel writes over poison."""
    out = aligned(np.full(expected.shape, 77, expected.dtype))
    names: list[str] = []
    arch, _ = KERNELS[kernel]
    machine: Any
    with nvfp4.simulate(arch, checks=kernel not in ("sm80", "naive", "sm90")) as machine:
        run = machine.run
        machine.run = lambda *a, **k: (names.append(k["name"]), run(*a, **k))[1]
        assert nvfp4.grouped_matmul(a, b, out=out, **options) is out
    assert len(names) == 1 and f"matmul_{kernel}" in names[0], names
    return out


def check(
    kernel: str, a: Any, b: nvfp4.QTensor, counts: tuple[int, ...], **options: Any
) -> np.ndarray:
    """The kernel's result is the golden one, and rows behind the counts are 0."""
    options = {"row_counts": np.array(counts, np.int32), "out_dtype": "float32", **options}
    expected = np.asarray(nvfp4.grouped_matmul(a, b, **options))
    out = on_machine(kernel, a, b, expected, **options)
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))
    for matrix, count in zip(out, counts, strict=True):
        assert matrix[:count].any(axis=1).all() and not matrix[count:].any()
    return out


def test_rows_behind_the_counts_are_zero(kernel: str) -> None:
    a, b, counts = operands(kernel)
    check(kernel, a, b, counts, alpha=np.array([4, 2, 1], np.float32)[: len(counts)])


WILD = {
    "int64": ([1 << 40, -1], (5, 0)),
    "uint32": ([3_000_000_000, 2], (5, 2)),
    "int32": ([-(1 << 31), 6], (0, 5)),
}


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("naive", "uint32"), ("sm80", "int64"), ("decode", "uint32"), ("decode", "int64"),
     ("sm100", "int32"), ("sm120", "int32")],
    indirect=["kernel"],
)  # fmt: skip
def test_counts_that_no_host_could_refuse_stay_inside(
    kernel: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below 0 they count as 0, beyond the capacity as the capacity."""
    counts, like = WILD[dtype]
    x = integers((2, 5, 32), 1, BF16)
    a = aligned(nvfp4.quantize(x, "nvfp4")) if kernel.startswith("sm1") else x
    b = weights(kernel, (2, 8, 32))
    expected = np.asarray(nvfp4.grouped_matmul(a, b, row_counts=np.array(like)))
    monkeypatch.setattr(
        products, "read_counts", lambda counts, *_: arrays.as_array(counts, "row_counts")
    )
    out = on_machine(kernel, a, b, expected, row_counts=np.array(counts, dtype))
    np.testing.assert_array_equal(out.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("kernel", ["naive", "decode"], indirect=True)
def test_quantised_matrices_have_scales_of_their_own(kernel: str) -> None:
    """By matrix, and by row; in tiles, and in rows."""
    capacity, counts = 130, (2, 0, 3)
    b = weights(kernel, (3, 8, 32))
    x = integers((3, capacity, 32), 3)
    by_matrix = np.array([1, 2, 0.5], np.float32)
    check(kernel, quantized(x, "nvfp4", counts, encode_scale=by_matrix), b, counts)
    x = integers((3, 5, 32), 3)
    linear = {"scale_layout": "linear", "encode_scale": np.full((3, 5, 1), 2, np.float32)}
    check(kernel, quantized(x, "nvfp4", SMALL[1], **linear), b, SMALL[1])


@pytest.mark.parametrize("kernel", ["naive", "sm80", "decode"], indirect=True)
def test_epilogues_see_rows_of_all_matrices(kernel: str) -> None:
    capacity, counts = SMALL
    a = integers((3, capacity, 32), 1, BF16)
    b = weights(kernel, (3, 8, 32))
    residual = np.arange(1, 3 * capacity * 8 + 1, dtype=np.float32).reshape(-1, 8)
    out = check(kernel, a, b, counts, epilogue=nvfp4.epilogues.residual_add(residual))
    plain = np.asarray(nvfp4.grouped_matmul(a, b, row_counts=np.array(counts), out_dtype="float32"))
    assert np.array_equal(out[2, 1] - plain[2, 1], residual[2 * capacity + 1])


@pytest.mark.parametrize("kernel", ["naive", "decode"], indirect=True)
@pytest.mark.parametrize("layout", ["linear", "tcgen"])
def test_a_quantised_result_is_a_stack(kernel: str, layout: str) -> None:
    capacity, counts = TILED if layout == "tcgen" else SMALL
    counts = counts[1:]
    a = behind(integers((2, capacity, 32), 1, BF16), counts, np.nan)
    b = weights(kernel, (2, 16, 32))
    row_counts = np.array(counts)
    values = nvfp4.grouped_matmul(a, b, row_counts=row_counts, out_dtype="float32")
    expected = nvfp4.quantize(values, "nvfp4", scale_layout=layout)
    ones = np.ones(2, np.float32)
    for simulated in (False, True):
        parts = {name: np.full_like(getattr(expected, name), 77) for name in ("codes", "scales")}
        out = dataclasses.replace(expected, decode_scale=ones * 77, **parts)
        with nvfp4.simulate("sm_90a", checks=False) if simulated else ExitStack():
            got = nvfp4.grouped_matmul(a, b, row_counts=row_counts, out_dtype="nvfp4", out=out)
        assert got is out
        np.testing.assert_array_equal(out.codes, expected.codes)
        np.testing.assert_array_equal(out.scales, expected.scales)
        np.testing.assert_array_equal(out.decode_scale, ones)


@pytest.mark.parametrize("kernel", ["decode"], indirect=True)
def test_more_matrices_than_a_block_has_threads(kernel: str) -> None:
    counts = np.zeros(260, np.int64)
    counts[[0, 31, 32, 255, 256, 259]] = 1
    a = integers((260, 2, 32), 6, BF16)
    b = nvfp4.prepare_weights(nvfp4.quantize(integers((260, 2, 32), 7), "mxfp4"))
    options = {"row_counts": counts, "out_dtype": "float32"}
    expected = np.asarray(nvfp4.grouped_matmul(a, b, **options))
    np.testing.assert_array_equal(on_machine(kernel, a, b, expected, **options), expected)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_stacks_without_rows(kernel: str, shape: tuple[int, int]) -> None:
    b = weights(kernel, (shape[0], 16, 32))
    a: Any = np.ones((*shape, 32), BF16)
    with nvfp4.simulate(KERNELS[kernel][0]):
        got = nvfp4.grouped_matmul(a, b, row_counts=np.zeros(shape[0], np.int32))
    assert got.shape == (*shape, 16)


@pytest.mark.parametrize("kernel", ["sm80"], indirect=True)
def test_views_of_larger_stacks_have_the_same_result(kernel: str) -> None:
    """Matrices at a distance of their own are copied, on the host alone."""
    capacity, counts = SMALL
    a, b = integers((3, capacity, 32), 1, BF16), weights(kernel, (3, 8, 32))
    larger = aligned(np.full((3, capacity + 1, 40), np.nan, BF16))
    larger[:, :capacity, :32] = a
    expected = check(kernel, a, b, counts)
    assert check(kernel, larger[:, :capacity, :32], b, counts).tobytes() == expected.tobytes()
