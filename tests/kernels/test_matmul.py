"""The naive product's kernel, bit for bit with the golden model, on the simulated machine."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4 import UnsupportedError, epilogues, plans
from nvfp4.epilogue import Epilogue
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, BlockFormat

from . import checks, vectors
from .checks import Quantized, quantized
from .simulated import Simulated

PLAIN = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def plain(seed: int, rows: int, depth: int, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
    x = rng(seed).standard_normal((rows, depth)) * np.exp2(rng(seed).integers(-5, 5, (rows, 1)))
    return x.astype(dtype)


@pytest.mark.parametrize("case", vectors.sampled("matmul", 10_000, 4))
def test_every_vector(quick_run: Simulated, case: Any) -> None:
    vectors.matmul(quick_run, case)


@pytest.mark.parametrize("b", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("a", [*FORMATS.values(), *PLAIN], ids=lambda f: getattr(f, "name", f))
def test_every_pair_of_operands(run: Simulated, a: Any, b: BlockFormat) -> None:
    """Random values: the order of the sum and every rounding are the golden model's."""
    for layout in ("linear", "tcgen"):
        left = (
            plain(1, 5, 64, PLAIN[a])
            if isinstance(a, str)
            else quantized(rng(1), a, (5, 64), scale_layout=layout)
        )
        right = quantized(rng(2), b, (6, 64), scale_layout=layout)
        checks.matmul(run, left, right, off=0 if layout == "tcgen" else 1)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_padding_of_scales_is_not_looked_at(run: Simulated, byte: int) -> None:
    for fmt in FORMATS.values():
        a = quantized(rng(3), fmt, (5, 96)).poison_padding(byte)
        b = quantized(rng(4), fmt, (3, 96)).poison_padding(byte)
        checks.matmul(run, a, b)


@pytest.mark.parametrize("depth", [0, 32, 96, 160, 480])
@pytest.mark.parametrize("rows, columns", [(0, 3), (3, 0), (1, 1), (33, 2), (2, 35), (129, 1)])
def test_shapes(run: Simulated, rows: int, columns: int, depth: int) -> None:
    a = quantized(rng(5), NVFP4, (rows, depth))
    checks.matmul(run, a, quantized(rng(6), MXFP4, (columns, depth)), out_dtype="bfloat16")


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
def test_results_are_rounded_once_to_their_type(run: Simulated, out_dtype: str) -> None:
    b = quantized(rng(7), NVFP4, (5, 64))
    for alpha in (np.float32(0.37), np.float32(1e38), np.float32(-1e-39)):
        checks.matmul(run, plain(8, 3, 64), b, alpha=alpha, out_dtype=out_dtype)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("device_alpha", [False, True])
def test_factors_are_multiplied_in_order(run: Simulated, by_row: bool, device_alpha: bool) -> None:
    """RN(RN(alpha * dA) * dB), after the sum."""
    shape_a, shape_b = ((4, 1), (5, 1)) if by_row else ((), ())
    scale_a = np.asarray(rng(9).random(shape_a, np.float32) + np.float32(0.1))
    scale_b = np.asarray(rng(10).random(shape_b, np.float32) + np.float32(0.1))
    alpha: Any = np.float32(0.7)
    checks.matmul(
        run,
        quantized(rng(11), NVFP4, (4, 64), encode_scale=scale_a),
        quantized(rng(12), NVFP4, (5, 64), encode_scale=scale_b),
        alpha=np.asarray(alpha) if device_alpha else alpha,
    )


def test_a_scale_that_is_nan_reaches_every_output_of_its_row(run: Simulated) -> None:
    for fmt, nan in ((NVFP4, 0x7F), (MXFP8_E5M2, 0xFF)):
        b = quantized(rng(13), fmt, (4, 64), scale_layout="linear")
        scales = b.scales.copy()
        scales[1, -1] = nan
        b = Quantized(fmt, b.codes, scales, b.decode_scale, "linear")
        checks.matmul(run, plain(14, 3, 64), b)


def test_rows_of_a_may_lie_apart(run: Simulated) -> None:
    checks.matmul(run, plain(15, 5, 64), quantized(rng(16), MXFP4, (3, 64)), gap=5)
    checks.matmul(run, plain(15, 5, 64), quantized(rng(16), MXFP4, (3, 64)), gap=8)


# Epilogues ----------------------------------------------------------------------------------------


def mixed(value, row, column, expert, f32, i32, i64, u8):  # type: ignore[no-untyped-def]
    if i32[column] > 1:
        value = value * f32[row]
    return value + np.float32(i64[row]) - np.float32(u8[column]) + np.float32(expert)


def gated(gate, up, row, column, expert):  # type: ignore[no-untyped-def]
    return gate * up + np.float32(column)


ARRAYS = (
    rng(17).random(3, np.float32),
    np.arange(6, dtype=np.int32),
    np.array([-(2**40), 5, 2**33]),
    np.arange(250, 256, dtype=np.uint8),
)

HALVES = rng(17).standard_normal(6) * 1e-6

EPILOGUES = {
    "bias": epilogues.bias(rng(18).random(6, np.float32)),
    "row scale": epilogues.row_scale(rng(19).random(3, np.float32)),
    "residual": epilogues.residual_add(rng(20).random((3, 6), np.float32)),
    "relu2": epilogues.relu2(),
    "halves": Epilogue(gated, pair=True),
    "neighbours": Epilogue(gated, pair=True, halves=False),
    "four arrays": Epilogue(mixed, *ARRAYS),
    "float16": epilogues.bias(HALVES.astype(np.float16)),
    "bfloat16": epilogues.bias(HALVES.astype(ml_dtypes.bfloat16)),
}


@pytest.mark.parametrize("epilogue", EPILOGUES.values(), ids=EPILOGUES)
def test_epilogues(run: Simulated, epilogue: Epilogue) -> None:
    b = quantized(rng(21), MXFP4, (6, 64))
    checks.matmul(run, plain(22, 3, 64), b, epilogue=epilogue, out_dtype="bfloat16")


@pytest.mark.parametrize("limit", [None, 7.0])
def test_gated_epilogues(run: Simulated, limit: float | None) -> None:
    """A card's exponential is another one, so these are compared on the simulated machine only."""
    b = quantized(rng(21), MXFP4, (6, 64))
    for halves in (True, False):
        epilogue = epilogues.swiglu(1.702, 1.0, limit, halves=halves)
        checks.matmul(run, plain(22, 3, 64), b, epilogue=epilogue)


def test_equal_epilogues_are_one_program() -> None:
    def planned(factor: float) -> Any:
        by = np.float32(factor)
        code = Epilogue(lambda value, row, column, expert: value * by).code(())
        facts = {"rows": 3, "columns": 4, "depth": 32, "alpha": "value", "out_dtype": "float32"}
        a = {"a_format": None, "a_dtype": "bfloat16", "a_layout": None, "decode_a": "none"}
        b = {"b_format": "nvfp4", "b_layout": "linear", "decode_b": "scalar"}
        return plans.matmul("sm_90a", **facts, **a, **b, epilogue=code)[0].program

    assert planned(2) == planned(2)
    assert planned(2) != planned(3)


def test_epilogues_that_kernels_cannot_take_are_refused(run: Simulated) -> None:
    def many(value, row, column, expert, a, b, c, d, e):  # type: ignore[no-untyped-def]
        return value

    b, five = quantized(rng(23), MXFP4, (6, 64)), [np.zeros(1, np.float32)] * 5
    with pytest.raises(UnsupportedError, match="at most 4 arrays"):
        checks.matmul(run, plain(24, 3, 64), b, epilogue=Epilogue(many, *five))


# Quantised results --------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_results_are_quantised_in_the_kernel(run: Simulated, fmt: BlockFormat, layout: str) -> None:
    for rows, columns in ((3, fmt.block), (2, 3 * fmt.block), (0, fmt.block), (2, 0)):
        b = quantized(rng(25), MXFP8_E4M3, (columns, 32))
        checks.matmul(run, plain(26, rows, 32), b, out_dtype=fmt.name, out_layout=layout)


def test_pairs_are_quantised_too(run: Simulated) -> None:
    for fmt in (NVFP4, MXFP8_E4M3):
        b = quantized(rng(27), NVFP4, (2 * 32, 32))
        epilogue = Epilogue(gated, pair=True, halves=fmt is NVFP4)
        checks.matmul(run, plain(28, 3, 32), b, out_dtype=fmt.name, epilogue=epilogue)


# Schedules and blocks -----------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(1, 1, 1), (31, 1, 1), (3, 11, 1), (1, 33, 1)])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 3, 1)])
def test_any_block_and_grid(block: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
    b = quantized(rng(29), NVFP4, (7, 32))
    checks.matmul(Simulated(block=block, grid=grid), plain(30, 9, 32), b)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_warps_changes_nothing(seed: int) -> None:
    run = Simulated(schedule=seed)
    b = quantized(rng(31), NVFP4, (32, 32))
    checks.matmul(run, plain(32, 9, 32), b)
    checks.matmul(run, plain(32, 3, 32), b, out_dtype="nvfp4")
