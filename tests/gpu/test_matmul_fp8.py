"""compute="fp8" on the present card: the golden bytes of sums that need few bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import nvfp4

from .test_kernels_prepared_products import BF16, room, there
from .test_public_arrays import MAKERS, Library, libraries


def signs(shape: tuple[int, ...], seed: int, dtype: Any = BF16) -> np.ndarray:
    """-1, 0 and 1, so that sums of tensor cores are exact whatever bits they keep."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-1, 2, shape)
    values[..., 0] = 1
    return values.astype(np.float32).astype(dtype)


def weights(fmt: str, *shape: int) -> nvfp4.QTensor:
    return nvfp4.quantize(signs(shape, 1, np.float32), fmt, scale_layout="linear")


def check(library: Library, a: np.ndarray, b: nvfp4.QTensor, **options: Any) -> None:
    """Rows quantised by the card, then multiplied, twice, over poison."""
    function = nvfp4.grouped_matmul if "row_offsets" in options else nvfp4.matmul
    options |= {"compute": "fp8", "out_dtype": "float32"}
    expected = np.asarray(function(a, nvfp4.prepare_weights(b), **options))
    w = nvfp4.prepare_weights(there(library, b))
    moved = {
        name: library.there(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    codes, scale = nvfp4.quantize_rows(library.there(a))
    golden_codes, golden_scale = nvfp4.quantize_rows(a)
    assert library.back(codes).tobytes() == golden_codes.tobytes()
    assert library.back(scale).tobytes() == golden_scale.tobytes()
    for _ in range(2):
        out = room(library, expected.shape, np.float32)
        function(codes, w, a_scale=scale, out=out, **moved)
        assert library.back(out).tobytes() == expected.tobytes()
    made = function(library.there(a), w, **moved)
    assert library.back(made).tobytes() == expected.tobytes()


def dtype_of(library: Library) -> Any:
    return BF16 if "bfloat16" in library.dtypes else np.float16


@libraries
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 16, 300, 1000])
def test_exact_sums_give_the_golden_bytes(name: str, rows: int, fmt: str) -> None:
    library = MAKERS[name]()
    check(library, signs((rows, 352), 2, dtype_of(library)), weights(fmt, 272, 352))


@libraries
def test_each_expert_takes_its_own_products(name: str) -> None:
    library = MAKERS[name]()
    b = weights("mxfp4", 3, 272, 352)
    codes, scales = b.codes.copy(), b.scales.copy()
    codes[1, 3, :16] = 0
    scales[1, 3, 1:] -= 20
    codes[1, 3, 32:] = 0  # one block alone: its sums stay exact
    b = dataclasses.replace(b, codes=codes, scales=scales)
    indices = np.random.default_rng(3).integers(-1, 90, 400).astype(np.int32)
    check(
        library,
        signs((80, 352), 4, dtype_of(library)),
        b,
        row_offsets=np.array([0, 100, 130, 130, 350], np.int32),
        expert_ids=np.array([1, 0, 2, 2], np.int32),
        row_indices=indices,
    )
