"""The kernels of prepare_weights and the values of what they make, on the simulated machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nvfp4 import golden
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, PREPARED, BlockFormat
from nvfp4.layouts import codes_shape, scale_shape
from tests import prepared

from . import checks
from .simulated import Simulated

ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)


def prepare(
    run: Any,
    fmt: BlockFormat,
    shape: tuple[int, ...],
    codes: np.ndarray,
    scales: np.ndarray,
    *,
    layout: str = "linear",
    decode: Any = None,
    aligned: bool = True,
) -> None:
    """Weights [N, K] or [E, N, K] with linear scales, given to the kernel in a layout."""
    decode = np.ones((), np.float32) if decode is None else np.asarray(decode, np.float32)
    if layout == "tcgen":
        scales = golden.interleave_scales(scales)
        scales[..., -1, :, 3, :] |= 0x81  # mostly padding: not read, or read by both alike
    expected = golden.prepare_weights(codes, scales, fmt, shape=shape, scale_layout=layout)
    facts = {
        "format": fmt.name,
        "rows": shape[-2],
        "columns": shape[-1],
        "batches": shape[0] if len(shape) == 3 else 1,
        "scale_layout": layout,
        "decodes": decode.size,
        "aligned": aligned,
    }
    buffers = {
        "codes": checks.spread(codes.reshape(1, -1), 0, 0 if aligned else 1),
        "scales": scales,
        "decode_scale": decode,
    }
    outputs = {
        "out_codes": checks.Out(codes_shape(fmt, shape, PREPARED), np.uint8),
        "out_scales": checks.Out(scale_shape(fmt, shape, PREPARED), np.uint8),
        "out_decode_scale": checks.Out(decode.shape, np.float32),
    }
    got = run("prepare_weights", facts, buffers, outputs)
    checks.assert_bytes("scales", got["out_scales"], expected[1])
    checks.assert_bytes("codes", got["out_codes"], expected[0])
    checks.assert_bytes("decode_scale", got["out_decode_scale"], decode)


@ALL
@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("rows", [1, 17, 40])
def test_any_number_of_rows_and_blocks(run: Simulated, rows: int, layout: str, fmt: Any) -> None:
    for seed, columns in enumerate((16, 80) if fmt is NVFP4 else (32, 96, 160)):
        parts = prepared.parts(seed, fmt, (rows, columns), plain=seed == 1)
        aligned = (rows + seed + (layout == "linear")) % 2 == 0
        prepare(run, fmt, (rows, columns), *parts, layout=layout, aligned=aligned)


@pytest.mark.parametrize("fmt", [NVFP4, MXFP8_E5M2], ids=lambda f: f.name)
def test_more_than_a_block_of_warps(run: Simulated, fmt: Any) -> None:
    shape = (130, 352)
    prepare(run, fmt, shape, *prepared.parts(7, fmt, shape), layout="tcgen")


@ALL
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 3, 32), (2, 0, 32)])
def test_nothing_has_headers(run: Simulated, shape: tuple[int, ...], fmt: Any) -> None:
    prepare(run, fmt, shape, *prepared.parts(0, fmt, shape))


@ALL
@pytest.mark.parametrize("layout", ["linear", "tcgen"])
def test_a_plain_matrix_among_others(run: Simulated, layout: str, fmt: Any) -> None:
    kinds = [prepared.parts(i, fmt, (20, 96), plain=i == 1) for i in range(3)]
    codes, scales = (np.stack(arrays) for arrays in zip(*kinds, strict=True))
    prepare(run, fmt, (3, 20, 96), codes, scales, layout=layout, decode=[1.0, 2.0, 3.0])


@pytest.mark.parametrize("size", [(), (3,), (3, 5, 1)], ids=str)
def test_decode_scales_are_copied(run: Simulated, size: tuple[int, ...]) -> None:
    scale = np.random.default_rng(1).random(size, np.float32)
    shape = (3, 5, 64)
    for fmt in (NVFP4, MXFP4):
        prepare(run, fmt, shape, *prepared.parts(1, fmt, shape), decode=scale)


def ones(fmt: BlockFormat, scales: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """A row of blocks of the element 1 with these scales."""
    one = {"e2m1": 0x22, "e4m3": 0x38, "e5m2": 0x3C}[fmt.element]
    codes = np.full((1, len(scales) * fmt.block // fmt.codes_per_byte), one, np.uint8)
    return codes, np.array([scales], np.uint8)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E4M3, MXFP8_E5M2], ids=lambda f: f.name)
def test_scales_around_what_can_be_rebased(run: Simulated, fmt: Any) -> None:
    highest = 254 + prepared.EXPONENT[fmt.element]
    for scales in (
        [highest, highest], [highest + 1, 100], [254, 254 - highest + 20],
        [254, 254 - highest + 19], [20, 20], [19, 20], [0, 0], [255, 255], [255, 130], [0, 254],
    ):  # fmt: skip
        prepare(run, fmt, (1, 64), *ones(fmt, scales))
        codes, bytes_ = ones(fmt, scales)
        codes[:, : codes.shape[1] // 2] &= 0x88 if fmt is MXFP4 else 0x80  # the first has no value
        prepare(run, fmt, (1, 64), codes, bytes_)


def test_scales_around_what_e4m3_can_hold(run: Simulated) -> None:
    for top in (20, 34, 127, 128, 129, 254):
        for scales in ([top, top - 14], [top, top - 15], [top, 255], [top, top]):
            if min(scales) >= 0:
                prepare(run, MXFP4, (1, 64), *ones(MXFP4, scales))
    codes, scales = ones(MXFP4, [110, 200])
    prepare(run, MXFP4, (1, 64), codes & 0x88, scales)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E4M3, MXFP8_E5M2], ids=lambda f: f.name)
def test_one_code_makes_a_block_count_wherever_it_is(run: Simulated, fmt: Any) -> None:
    """Row r has a code in its column r of both blocks, and none in others: as many scales."""
    rows = np.arange(32)
    codes = np.zeros((32, 64 // fmt.codes_per_byte), np.uint8)
    for block in (0, 32):
        column = block + rows
        if fmt is MXFP4:
            codes[rows, column // 2] = np.where(column % 2, 0x10, 0x01)
        else:
            codes[rows, column] = 1
    scales = np.stack([100 + rows, 140 - rows], axis=1).astype(np.uint8)
    prepare(run, fmt, (32, 64), codes, scales)


def test_every_nvfp4_scale_byte(run: Simulated) -> None:
    codes = np.random.default_rng(2).integers(0, 256, (16, 128), np.uint8)
    scales = np.arange(256, dtype=np.uint8).reshape(16, 16)
    prepare(run, NVFP4, (16, 256), codes, scales)


@pytest.mark.parametrize("fmt", [MXFP8_E4M3, MXFP8_E5M2], ids=lambda f: f.name)
def test_every_eight_bit_code_alone_among_ones(quick_run: Simulated, fmt: Any) -> None:
    """A stack of 256 matrices, each with another code: some leave the scales as they are."""
    codes, scales = ones(fmt, [120])
    codes = np.repeat(codes[None], 256, axis=0)
    codes[np.arange(256), 0, np.arange(256) % 32] = np.arange(256)
    prepare(quick_run, fmt, (256, 1, 32), codes, np.repeat(scales[None], 256, axis=0))


@pytest.mark.parametrize("block", [(32, 1, 1), (32, 3, 1)], ids=str)
def test_one_block_of_threads_does_it_all(block: tuple[int, int, int]) -> None:
    run = Simulated(block=block)
    for fmt in FORMATS.values():
        parts = prepared.parts(3, fmt, (2, 40, 160))
        prepare(run, fmt, (2, 40, 160), *parts, decode=np.ones((2, 40, 1)))


@pytest.mark.parametrize("seed", [1, 2])
def test_in_any_order_of_warps(seed: int) -> None:
    run = Simulated(schedule=seed)
    for fmt in (NVFP4, MXFP8_E4M3):
        prepare(run, fmt, (2, 33, 320), *prepared.parts(seed, fmt, (2, 33, 320)))


# --- values ---------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_of_prepared_weights(run: Simulated, dtype: str, plain: bool, fmt: Any) -> None:
    rng = np.random.default_rng(5)
    for shape in ((1, 32), (3, 17, 160), (0, 32), (2, 0)):
        parts = prepared.parts(5, fmt, shape, plain=plain)
        made = golden.prepare_weights(*parts, fmt, shape=shape, scale_layout="linear")
        sizes = [(), (*shape[:-1], 1)] + ([(shape[0],)] if len(shape) == 3 else [])
        for i, size in enumerate(sizes):
            scale = np.asarray(rng.random(size, np.float32))
            expected = golden.dequantize(
                *parts, scale, fmt, shape=shape, scale_layout="linear", dtype=dtype
            )
            checks.dequantize(
                run, *made, scale, fmt, shape=shape, scale_layout=PREPARED, dtype=dtype,
                expected=expected, aligned=i != 1,
            )  # fmt: skip


def test_every_scale_byte_of_prepared_weights_with_every_code(quick_run: Simulated) -> None:
    for fmt in FORMATS.values():
        legal = 128 if fmt.scale == "e4m3" else 256
        row = np.arange(256, dtype=np.uint8)
        codes = np.broadcast_to(row, (legal, row.size)).copy()
        shape = (legal, 256 * fmt.codes_per_byte)
        scales = np.empty(scale_shape(fmt, shape, "linear"), np.uint8)
        scales[...] = np.arange(legal, dtype=np.uint8)[:, None]
        made = golden.prepare_weights(codes, scales, fmt, shape=shape, scale_layout="linear")
        one = np.asarray(np.float32(1))
        expected = golden.dequantize(codes, scales, one, fmt, shape=shape, scale_layout="linear")
        checks.dequantize(
            quick_run, *made, one, fmt, shape=shape, scale_layout=PREPARED, expected=expected
        )
