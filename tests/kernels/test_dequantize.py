"""The dequantiser's kernels, on the simulated machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvfp4 import golden
from nvfp4.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from nvfp4.layouts import allocated_tiles, codes_shape, scale_shape
from tests.vectorlib import cases

from . import checks, vectors
from .simulated import Simulated


def random_parts(
    seed: int, fmt: BlockFormat, shape: tuple[int, ...], layout: str, tiles: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of any bytes, padding included."""
    rng = np.random.default_rng(seed)
    scales = scale_shape(fmt, shape, layout)
    if tiles is not None and layout == "tcgen":
        scales = (tiles, *scales[1:])
    # Bit 7 of an e4m3 scale must be 0.
    highest = 128 if fmt.scale == "e4m3" else 256
    return (
        rng.integers(0, 256, codes_shape(fmt, shape), np.uint8),
        rng.integers(0, highest, scales, np.uint8),
    )


@pytest.mark.parametrize("case", cases("dequantize"), ids=str)
def test_every_vector(run: Simulated, case: Any) -> None:
    vectors.dequantize(run, case)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_any_bytes_in_every_format(
    run: Simulated, fmt: BlockFormat, layout: str, dtype: str
) -> None:
    for aligned in (True, False):
        codes, scales = random_parts(1, fmt, (130, 96), layout)
        scale = np.asarray(np.float32(0.7))
        more = {"shape": (130, 96), "scale_layout": layout, "dtype": dtype, "aligned": aligned}
        checks.dequantize(run, codes, scales, scale, fmt, **more)


@pytest.mark.parametrize("shape", [(0, 32), (1, 32), (3, 0), (33, 480), (3, 5, 64), (0, 3, 32)])
@pytest.mark.parametrize("layout", ["linear", "tcgen"])
def test_shapes_and_decode_scales(run: Simulated, shape: tuple[int, ...], layout: str) -> None:
    rng = np.random.default_rng(2)
    codes, scales = random_parts(2, NVFP4, shape, layout)
    sizes = [(), (*shape[:-1], 1)] + ([(shape[0],)] if len(shape) == 3 else [])
    for size in sizes:
        scale = np.asarray(rng.random(size, np.float32))
        checks.dequantize(run, codes, scales, scale, NVFP4, shape=shape, scale_layout=layout)


def test_every_scale_byte_with_every_code(run: Simulated) -> None:
    for fmt in FORMATS.values():
        legal = 128 if fmt.scale == "e4m3" else 256
        blocks = 256 * fmt.codes_per_byte // (fmt.block * fmt.codes_per_byte) or 1
        row = np.arange(fmt.block * blocks // fmt.codes_per_byte, dtype=np.uint8)
        codes = np.broadcast_to(row, (legal, row.size)).copy()
        scales = np.broadcast_to(np.arange(legal, dtype=np.uint8)[:, None], (legal, blocks)).copy()
        shape = (legal, fmt.block * blocks)
        one = np.asarray(np.float32(1))
        checks.dequantize(run, codes, scales, one, fmt, shape=shape, scale_layout="linear")


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("sizes", [[], [0, 0], [3, 0, 130, 1], [0] * 40 + [2]], ids=str)
def test_grouped_tensors(run: Simulated, sizes: list[int], layout: str) -> None:
    rng = np.random.default_rng(3)
    row_offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    rows = int(row_offsets[-1]) + 5  # some that no range covers
    tiles = allocated_tiles(rows, len(sizes))
    codes, scales = random_parts(3, MXFP4, (rows, 64), layout, tiles)
    for size in ((), (len(sizes),), (rows, 1)):
        scale = np.asarray(rng.random(size, np.float32))
        more = {"shape": (rows, 64), "scale_layout": layout, "row_offsets": row_offsets}
        checks.dequantize(run, codes, scales, scale, MXFP4, dtype="float16", **more)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_tile_starts_are_data(run: Simulated, dtype: Any) -> None:
    row_offsets = np.array([0, 3, 3, 133], dtype)
    starts = np.array([4, 0, 1], dtype)
    codes, scales = random_parts(4, NVFP4, (140, 32), "tcgen", 6)
    scale = np.array([1, 2, 3], np.float32)
    more = {"row_offsets": row_offsets, "tile_starts": starts}
    checks.dequantize(
        run, codes, scales, scale, NVFP4, shape=(140, 32), scale_layout="tcgen", **more
    )


@pytest.mark.parametrize(
    ("bad", "starts"),
    [
        ([0, 5, 2, 9], None),
        ([3, 900, 4, 2], None),
        ([0, 3, 3, 6], [900, -1, 5]),
        ([-5, 2, 4, 5], [1, 0, 2]),
    ],
    ids=str,
)
def test_indices_that_no_host_could_refuse_read_nothing_outside(
    run: Simulated, bad: list[int], starts: list[int] | None
) -> None:
    """Out of bounds is an error of the simulated machine; and every value must have been
    written."""
    codes, scales = random_parts(5, NVFP4, (9, 32), "tcgen", 4)
    facts = {
        "format": "nvfp4",
        "rows": 9,
        "columns": 32,
        "batches": 1,
        "scale_layout": "tcgen",
        "dtype": "float32",
        "decode": "group",
        "groups": 3,
        "tiles": 4,
        "offsets_dtype": "int32",
        "starts_dtype": None if starts is None else "int32",
    }
    buffers = {
        "codes": codes,
        "scales": np.where(scales == 0x7F, np.uint8(0), scales),
        "decode_scale": np.ones(3, np.float32),
        "row_offsets": np.array(bad, np.int32),
        "tile_starts": None if starts is None else np.array(starts, np.int32),
    }
    out = run("dequantize", facts, buffers, {"out": checks.Out((9, 32), np.float32)})["out"]
    poison = np.full(1, 0xA5A5A5A5, np.uint32).view(np.float32)
    assert not (out == poison).any()


def test_what_the_quantiser_wrote_comes_back(run: Simulated) -> None:
    x = np.random.default_rng(6).standard_normal((5, 64)).astype(np.float32)
    made = golden.quantize(x, NVFP4, encode_scale="row_amax")
    checks.dequantize(run, *made, NVFP4, shape=(5, 64), scale_layout="tcgen")
