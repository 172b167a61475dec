"""Arrays that begin between the multiples of their element size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nvfp4

from . import stubs


def between(values: np.ndarray) -> np.ndarray:
    """The same values, one byte off."""
    memory = np.zeros(values.nbytes + 1, np.uint8)
    moved = memory[1:].view(values.dtype).reshape(values.shape)
    moved[...] = values
    assert not moved.flags.aligned
    return moved


def test_simulated_kernels_give_the_golden_bytes_of_them() -> None:
    x = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    g = np.array([[1], [2], [3], [4], [5], [6]], np.float32)
    offsets = np.array([0, 2, 6], np.int32)
    wide = between(np.concatenate([x, x], 1))[::-1, :64]
    calls: list[Any] = [
        lambda: nvfp4.quantize(between(x), "nvfp4", encode_scale=between(g)),
        lambda: nvfp4.quantize(wide, "mxfp4", scale_layout="linear"),
        lambda: nvfp4.grouped_quantize(between(x), "mxfp8", row_offsets=between(offsets)),
    ]
    for call in calls:
        golden = call()
        with nvfp4.simulate():
            simulated = call()
        for name in ("codes", "scales", "decode_scale"):
            np.testing.assert_array_equal(getattr(simulated, name), getattr(golden, name))


def test_simulated_kernels_write_to_them() -> None:
    x = np.ones((4, 32), np.float16)
    b = nvfp4.quantize(np.eye(8, 32, dtype=np.float32), "mxfp4")
    out = between(np.full((4, 8), np.nan, np.float32))
    with nvfp4.simulate():
        nvfp4.matmul(x, b, out=out, out_dtype="float32")
    np.testing.assert_array_equal(out, np.ones((4, 8)))


def test_on_a_gpu_they_are_refused_by_name(cupy: stubs.Cupy) -> None:
    x = stubs.CupyArray(between(np.ones((4, 64), np.float32)))
    with pytest.raises(ValueError, match="x must begin at a multiple of 4 bytes"):
        nvfp4.quantize(x, "nvfp4")
