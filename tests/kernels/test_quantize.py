"""The dense quantiser's kernels, byte for byte, on the simulated machine."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, NVFP4, SCALE_ROUNDINGS, BlockFormat

from . import checks, vectors
from .simulated import Simulated

DTYPES = (ml_dtypes.bfloat16, np.float16, np.float32)


def values(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """Rows of very different size, with zeros, infinities and NaN among them."""
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(-9, 9, (*shape[:-1], 1)))
    x = rng.standard_normal(shape) * size
    special = rng.random(shape)
    x[special < 0.02] = 0.0
    x[special > 0.999] = np.nan
    x[(special > 0.998) & (special < 0.999)] = -np.inf
    return x.astype(np.float32).astype(dtype)


@pytest.mark.parametrize("case", vectors.sampled("quantize", 30_000, 3))
def test_every_vector_comes_out_byte_for_byte(quick_run: Simulated, case: Any) -> None:
    vectors.quantize(quick_run, case)


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 127, 128, 129])
def test_any_number_of_rows(run: Simulated, rows: int, layout: str) -> None:
    for i, fmt in enumerate(FORMATS.values()):
        checks.quantize(run, values(rows, (rows, 32), DTYPES[i % 3]), fmt, scale_layout=layout)


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("columns", [0, 32, 64, 96, 160, 480, 1088])
def test_any_number_of_blocks(run: Simulated, columns: int, layout: str) -> None:
    for i, fmt in enumerate(FORMATS.values()):
        if columns < 1000 or layout == "linear" or fmt is NVFP4:
            x = values(columns, (3, columns), DTYPES[i % 3])
            checks.quantize(run, x, fmt, scale_layout=layout)


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if f.scale == "e8m0"], ids=lambda f: f.name
)
def test_scale_roundings(run: Simulated, fmt: BlockFormat, rounding: str) -> None:
    # Around powers of two times qmax, where the roundings part.
    size = np.exp2(np.arange(-140.0, 120.0, 9.5))[:, None] * np.linspace(1, 2, 32)
    x = size.astype(np.float32)
    checks.quantize(run, x, fmt, scale_rounding=rounding, scale_layout="linear")


SCALES = [
    np.float32(0.43),
    np.asarray(np.float32(0.43)),
    np.asarray(np.float32(np.finfo(np.float32).max)),
    np.asarray(np.float32(2**-126)),
    np.asarray(np.float32(2**-127)),
    np.asarray(np.float32(0)),
    np.asarray(np.float32(-3)),
    np.asarray(np.float32(np.inf)),
    np.asarray(np.float32(np.nan)),
    "amax",
    "row_amax",
]


@pytest.mark.parametrize("scale", SCALES, ids=lambda s: f"{type(s).__name__} {s}")
def test_encode_scales_of_a_matrix(run: Simulated, scale: Any) -> None:
    x = values(1, (5, 96), ml_dtypes.bfloat16)
    x = np.where(np.isfinite(x), x, ml_dtypes.bfloat16(1))
    checks.quantize(run, x, NVFP4, encode_scale=scale)
    if not isinstance(scale, str):
        checks.quantize(run, x, MXFP4, encode_scale=scale, scale_layout="linear")


@pytest.mark.parametrize("scale", ["amax", "row_amax"])
@pytest.mark.parametrize("worst", [0.0, 1e-42, 3e38, np.inf, -np.inf, np.nan])
def test_the_maximum_of_any_tensor(run: Simulated, scale: str, worst: float) -> None:
    x = np.zeros((3, 160), np.float32) if worst in (0.0, 1e-42) else values(2, (3, 160))
    x = np.where(np.isfinite(x), x, np.float32(1))
    x[1, 77] = worst
    checks.quantize(run, x, NVFP4, encode_scale=scale)


@pytest.mark.parametrize("scale", ["amax", "row_amax"])
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (2, 0, 32), (0, 2, 32)])
def test_the_maximum_of_nothing_makes_the_scale_1(
    run: Simulated, scale: str, shape: tuple[int, ...]
) -> None:
    checks.quantize(run, np.zeros(shape, np.float32), NVFP4, encode_scale=scale)


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("kind", ["none", "number", "batch", "row", "amax", "row_amax"])
def test_stacks_of_matrices(run: Simulated, kind: str, layout: str) -> None:
    rng = np.random.default_rng(3)
    x = values(3, (3, 5, 96), np.float16)
    scales: dict[str, Any] = {
        "none": None,
        "number": np.float32(3),
        "batch": rng.random(3, np.float32) + np.float32(0.1),
        "row": rng.random((3, 5, 1), np.float32) + np.float32(0.1),
    }
    scale = scales.get(kind, kind)
    checks.quantize(run, x, NVFP4, encode_scale=scale, scale_layout=layout)
    if kind in ("batch", "row"):
        checks.quantize(run, x, MXFP4, encode_scale=scale, scale_layout=layout)


def test_mxfp8_has_no_encode_scale(run: Simulated) -> None:
    x = values(4, (3, 64))
    checks.quantize(run, x, MXFP8_E4M3, encode_scale=np.float32(0.3))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_rows_lie_apart_and_at_any_address(run: Simulated, fmt: BlockFormat, dtype: Any) -> None:
    x = values(5, (5, 96), dtype)
    for gap, off in ((16, 0), (3, 0), (0, 1), (5, 3)):
        checks.quantize(run, x, fmt, gap=gap, off=off)


def test_rows_may_be_read_backwards_and_over_again(run: Simulated) -> None:
    """Strides in elements may be negative or 0: the API passes them on as they are."""
    from nvfp4 import simulate

    x = values(6, (4, 64))
    with simulate():
        import nvfp4

        for view in (x[::-1], np.broadcast_to(x[1], (3, 64)), x[::2]):
            got = nvfp4.quantize(view, "nvfp4")
            checks.quantize(run, np.ascontiguousarray(view), NVFP4, expected=parts(got))


def parts(q: Any) -> tuple[Any, Any, Any]:
    return q.codes, q.scales, q.decode_scale


@pytest.mark.parametrize("threads", [1, 31, 32, 33, 63])
def test_a_block_of_any_number_of_threads_alone_does_all_the_work(threads: int) -> None:
    x = values(7, (2, 3, 160), ml_dtypes.bfloat16)
    for block in ((threads, 1, 1), (1, threads, 1)):
        alone = Simulated(block=block)
        for scale in (None, np.float32(0.3), np.array([[[1], [2], [3]]] * 2, np.float32)):
            checks.quantize(alone, x, NVFP4, encode_scale=scale)
    for block in ((2 * threads, 1, 1), (2, threads, 1)):
        checks.quantize(Simulated(block=block), x, MXFP8_E4M3)
        checks.quantize(Simulated(block=block), x, MXFP4, scale_layout="linear")


@pytest.mark.parametrize("block", [(1, 5, 1), (4, 3, 1), (32, 1, 1)])
def test_rows_find_their_maximum_in_blocks_of_any_height(block: tuple[int, int, int]) -> None:
    x = np.nan_to_num(values(8, (5, 160)), posinf=1, neginf=-1)
    checks.quantize(Simulated(block=block, grid=(2, 1, 1)), x, NVFP4, encode_scale="row_amax")


@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 2, 2), (7, 5, 3)])
def test_any_grid_covers_everything_once(grid: tuple[int, int, int]) -> None:
    x = values(9, (3, 130, 96))
    checks.quantize(Simulated(block=(2, 16, 1), grid=grid), x, MXFP4)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_warps_changes_nothing(seed: int) -> None:
    x = np.nan_to_num(
        values(10, (9, 96), ml_dtypes.bfloat16).astype(np.float32), posinf=1, neginf=-1
    )
    run = Simulated(schedule=seed)
    for scale in (None, "amax", "row_amax"):
        checks.quantize(run, x, NVFP4, encode_scale=scale)
    checks.quantize(run, x, MXFP4)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120a"])
def test_every_architecture_gives_the_same_bytes(arch: str) -> None:
    checks.quantize(Simulated(arch), values(11, (3, 64)), NVFP4)
