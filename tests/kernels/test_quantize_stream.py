"""The quantiser at memory speed gives the golden bytes on the simulated machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import plans, plans_stream, tiling
from nvfp4.api import dense
from nvfp4.arrays import as_array
from nvfp4.formats import FORMATS
from nvfp4.launch import run

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def data(rows: int, columns: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Rows of very different size, with zeros, negative zeros, NaN, infinities and tiny blocks."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * rng.choice([1e-3, 1.0, 50.0], size=(rows, 1))
    with np.errstate(over="ignore"):
        x = x.astype(DTYPES[dtype])
    flat = x.reshape(-1)
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-38, -1e-7, 6.0, 448.0]
    where = rng.choice(flat.size // 32, size=min(len(special), flat.size // 32), replace=False)
    for place, value in zip(where, special, strict=False):
        with np.errstate(over="ignore", under="ignore"):
            flat[place * 32 + 5] = np.float64(value).astype(flat.dtype)
    flat[-16:] = 0
    return x


def run_quantizer(
    x: np.ndarray, format: str, g: np.ndarray, out: nvfp4.QTensor, machine: Any
) -> None:
    """Run what the plan says of bfloat16 rows, unchecked, with an encode scale in memory."""
    rows, columns = x.shape
    launches = plans.quantize(
        "sm_90a",
        format=format,
        dtype="bfloat16",
        rows=rows,
        columns=columns,
        batches=1,
        row_stride=columns,
        batch_stride=rows * columns,
        scale_layout="tcgen",
        scale_rounding="rceil",
        encode="array",
        aligned=True,
    )
    buffers = {
        "x": x.view(np.uint16),
        "codes": out.codes,
        "scales": out.scales,
        "encode_scale": g.reshape(1),
        "decode_scale": out.decode_scale,
    }
    run(launches, {name: as_array(value, name) for name, value in buffers.items()}, machine=machine)


def used_kernels(**facts: object) -> list[str]:
    return [launch.program.kernel.name for launch in plans.quantize("sm_90a", **facts)]


def same(a: nvfp4.QTensor, b: nvfp4.QTensor) -> None:
    np.testing.assert_array_equal(np.asarray(a.codes), np.asarray(b.codes))
    np.testing.assert_array_equal(np.asarray(a.scales), np.asarray(b.scales))
    np.testing.assert_array_equal(np.asarray(a.decode_scale), np.asarray(b.decode_scale))


@pytest.fixture(autouse=True)
def _plans_of_its_own() -> Iterator[None]:
    """No plan comes from another test, whose limits may have been others."""
    forget()
    yield
    forget()


def forget() -> None:
    """Let calls plan anew."""
    plans.quantize.cache_clear()
    dense._dense_call.cache_clear()


@pytest.mark.parametrize("rows_a_thread", [1, 2])
@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_the_golden_ones(
    format: str, dtype: str, layout: str, rows_a_thread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans_stream, "FEW_PIECES", 1 << 30 if rows_a_thread == 1 else 0)
    x = data(5, 96, dtype)
    expected = nvfp4.quantize(x, format, scale_layout=layout)
    with nvfp4.simulate():
        same(nvfp4.quantize(x, format, scale_layout=layout), expected)


@pytest.mark.parametrize("rounding", ["floor", "ceil", "even"])
def test_every_rounding_keeps_its_bytes(rounding: str) -> None:
    x = data(3, 64, "bfloat16", seed=1)
    expected = nvfp4.quantize(x, "mxfp4", scale_rounding=rounding)
    with nvfp4.simulate():
        same(nvfp4.quantize(x, "mxfp4", scale_rounding=rounding), expected)


@pytest.mark.parametrize("encode", [0.43, 1e-20, 3e38, "row", "amax"])
def test_encode_scales_keep_their_bytes(encode: float | str) -> None:
    x = np.abs(data(4, 64, "float32", seed=2))
    x[~np.isfinite(x)] = 1.0
    scale = np.array([[0.43], [128.0], [1 / 3], [1e30]], np.float32) if encode == "row" else encode
    expected = nvfp4.quantize(x, "nvfp4", encode_scale=scale)
    with nvfp4.simulate():
        same(nvfp4.quantize(x, "nvfp4", encode_scale=scale), expected)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("g", [0.0, np.nan, np.inf, 1e-39, 2.0**-60, 2.0**59.9, 1e19, 0.37])
def test_encode_scales_in_memory_that_no_host_has_checked_count_as_one(
    format: str, g: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans_stream, "FEW_PIECES", 0)
    x = data(66, 64, "bfloat16", seed=5)
    usable = np.isfinite(g) and g >= 2.0**-126
    expected = nvfp4.quantize(x, format, encode_scale=np.float32(g if usable else 1.0))
    out = nvfp4.quantize(np.ones_like(x), format)
    for part in (out.codes, out.scales):
        part[...] = 0xAA
    with nvfp4.simulate() as machine:
        run_quantizer(x, format, np.array(g, np.float32), out, machine)
    same(out, expected)


def test_a_stack_of_matrices_with_a_scale_each() -> None:
    x = data(6, 64, "bfloat16", seed=3).reshape(2, 3, 64)
    scale = np.array([0.5, 3.0], np.float32)
    expected = nvfp4.quantize(x, "nvfp4", encode_scale=scale)
    with nvfp4.simulate():
        same(nvfp4.quantize(x, "nvfp4", encode_scale=scale), expected)


def test_padding_of_a_poisoned_result_is_zeroed() -> None:
    x = data(130, 32, "bfloat16", seed=4)
    expected = nvfp4.quantize(x, "mxfp8")
    out = nvfp4.quantize(np.zeros_like(x), "mxfp8")
    out.codes[...] = 0xAA
    out.scales[...] = 0xAA
    with nvfp4.simulate():
        same(nvfp4.quantize(x, "mxfp8", out=out), expected)


def test_aligned_arrays_take_this_kernel_and_others_the_plain_one() -> None:
    facts = {
        "format": "nvfp4",
        "dtype": "bfloat16",
        "rows": 7,
        "columns": 64,
        "batches": 1,
        "row_stride": 64,
        "batch_stride": 448,
        "scale_layout": "tcgen",
        "scale_rounding": "rceil",
        "encode": "none",
    }
    assert used_kernels(**facts, aligned=True) == ["quantize_stream"]
    assert used_kernels(**facts, aligned=False) == ["quantize"]
    assert used_kernels(**{**facts, "encode": "row_amax"}, aligned=True) == ["fused_ahead_quantize"]


@pytest.mark.parametrize("divisor", [2, 3, 7, 180, 448, 1000003, 2**30 + 1])
def test_the_multiplier_divides_every_number_below_2_31(divisor: int) -> None:
    magic, shift = tiling.magic(divisor)
    rng = np.random.default_rng(divisor)
    edges = np.arange(0, 2**31 // divisor, max(1, 2**31 // divisor // 500)) * divisor
    numbers = np.concatenate([edges, edges + divisor - 1, rng.integers(0, 2**31, 5000)])
    for n in map(int, numbers):
        if n < 2**31:
            assert (n * magic >> 32) >> shift == n // divisor
