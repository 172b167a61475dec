"""``batch_invariant=True`` on the present card: rows have the bytes that they have alone.

The simulated machine cannot tell whether tensor cores add alike wherever a row stands in a tile;
this can.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import plans_products, plans_sm90

from .test_kernels_prepared_products import there
from .test_public_arrays import MAKERS, Library, libraries

BF16 = ml_dtypes.bfloat16
COLUMNS, DEPTH = 512, 2048
ROWS = 4096
RNG = np.random.default_rng(7)
PICKS = [RNG.permutation(ROWS)[:count] for count in (1, 4, 16, 64, 257)]


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def activations(library: Library, rows: np.ndarray, fmt: str | None) -> Any:
    """Rows as they are, or quantised."""
    if fmt is not None:
        return there(library, nvfp4.quantize(rows, fmt))
    return library.there(rows.astype(BF16 if "bfloat16" in library.dtypes else np.float16))


@libraries
@pytest.mark.parametrize("kernel", ["as planned", "few rows", "many rows"])
@pytest.mark.parametrize(
    ("a", "b"), [(None, "mxfp4"), (None, "nvfp4"), ("nvfp4", "nvfp4"), ("mxfp8", "mxfp4")]
)
def test_rows_have_the_same_bytes_for_every_number_of_rows(
    name: str, a: str | None, b: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel != "as planned":
        tiles = 0 if kernel == "many rows" else 1 << 60
        monkeypatch.setattr(plans_sm90, "INVARIANT_TILES", tiles)
    plans_products.matmul.cache_clear()
    library = MAKERS[name]()
    weights = there(library, nvfp4.quantize(normal(COLUMNS, DEPTH), b))
    if kernel != "as planned":
        weights = nvfp4.prepare_weights(weights)
    x = normal(ROWS, DEPTH)
    options: dict[str, Any] = {"out_dtype": "float32", "batch_invariant": True}

    def product(rows: np.ndarray) -> np.ndarray:
        made = nvfp4.matmul(activations(library, rows, a), weights, **options)
        return np.asarray(library.back(made))

    whole = product(x)
    for picked in PICKS:
        assert product(x[picked]).tobytes() == whole[picked].tobytes()
    plans_products.matmul.cache_clear()


@libraries
def test_rows_of_an_expert_do_not_know_of_other_experts(name: str) -> None:
    library = MAKERS[name]()
    b = nvfp4.prepare_weights(there(library, nvfp4.quantize(normal(64, COLUMNS, DEPTH), "mxfp4")))
    x = normal(ROWS, DEPTH)
    expected = None
    for before in (0, 1, 300, 4000):
        sizes = np.zeros(64, np.int32)
        sizes[3], sizes[40], sizes[63] = before, 20, ROWS - before - 20
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        rows = np.roll(x[20:], before, axis=0)
        rows = np.concatenate([rows[:before], x[:20], rows[before:]])
        made = nvfp4.grouped_matmul(
            activations(library, rows, None), b, row_offsets=library.there(offsets),
            out_dtype="float32", batch_invariant=True,
        )  # fmt: skip
        got = np.asarray(library.back(made))[before : before + 20]
        expected = got if expected is None else expected
        assert got.tobytes() == expected.tobytes()
