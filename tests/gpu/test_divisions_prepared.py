"""Every division of products with prepared weights that plans choose among, on the present card.

Exact sums give the golden bytes, whatever the tile, the warps that share the depth, or the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import plans_prepared, plans_products, plans_sm90
from nvfp4.api import _repeat
from nvfp4.formats import FORMATS
from nvfp4.plans_prepared import Cut

from .test_kernels_prepared_products import BF16, check, eleven_bits, integers
from .test_public_arrays import MAKERS

COLUMNS = 272

#: Every tile with mxfp4, some with the others.
TILES = [(tokens, "mxfp4") for tokens in range(16, plans_sm90.MOST_TOKENS + 1, 8)]
TILES += [(t, fmt) for t in (16, 40, 72, 112, 152) for fmt in FORMATS if fmt != "mxfp4"]
CLUSTERS = [(2, 16), (2, 48), (2, 128), (4, 32), (4, 96), (8, 64)]
#: (stripes, warps, team, blocks of a multiprocessor) of the kernel of few rows.
DIVISIONS = (
    *((1, 8, team, 4) for team in (8, 4, 2, 1)),
    *((2, 8, team, 3) for team in (8, 4, 2, 1)),
    *((2, 4, 4, 7), (2, 6, 3, 4)),
)
CHUNKS = [(8, "mxfp4"), (16, "mxfp4"), (8, "nvfp4"), (16, "mxfp8_e4m3")]


def forget() -> None:
    """Let plans be made anew."""
    plans_products.matmul.cache_clear()
    plans_products.grouped_matmul.cache_clear()
    _repeat._calls.clear()
    _repeat._plans.clear()


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Changes of plans, which are forgotten before and behind."""
    forget()
    yield monkeypatch
    forget()


def ranges_of(tokens: int) -> dict[str, Any]:
    """Ranges of a row more than a tile, of none, of one less, and of few."""
    sizes = (tokens + 1, 0, tokens - 1, 3)
    return {"row_offsets": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)}


@pytest.mark.parametrize("tokens, fmt", TILES)
def test_every_tile_of_many_rows(
    cupy: Any, patch: pytest.MonkeyPatch, fmt: str, tokens: int
) -> None:
    """In turns, a depth that fills stages of two steps, and one whose last has less than a step."""
    patch.setattr(plans_sm90, "many_rows", lambda **_: 0)
    patch.setattr(plans_sm90, "tokens_of", lambda *_: tokens)
    depth = 1056 if tokens // 8 % 2 else 384
    b = nvfp4.quantize(integers((4, COLUMNS, depth), 1, np.float32), fmt)
    options = ranges_of(tokens)
    a = integers((int(options["row_offsets"][-1]) + 2, depth), 2)
    check(MAKERS["cupy"](), a, b, BF16, **options)


@pytest.mark.parametrize("tokens", range(16, plans_sm90.MOST_TOKENS_HALF[0] + 1, 8))
def test_every_tile_of_float16_rows(cupy: Any, patch: pytest.MonkeyPatch, tokens: int) -> None:
    patch.setattr(plans_sm90, "many_rows", lambda **_: 0)
    patch.setattr(plans_sm90, "tokens_of", lambda *_: tokens)
    depth, fmt = (1120, "mxfp4") if tokens // 8 % 2 else (384, "nvfp4")
    b = nvfp4.quantize(integers((4, COLUMNS, depth), 7, np.float32), fmt)
    options = ranges_of(tokens)
    a = eleven_bits((int(options["row_offsets"][-1]) + 2, depth), 8)
    check(MAKERS["cupy"](), a, b, BF16, **options)


@pytest.mark.parametrize("tokens", [16, 24, 40, 56, 64])
def test_tiles_of_rows_with_scales_of_their_own(
    cupy: Any, patch: pytest.MonkeyPatch, tokens: int
) -> None:
    patch.setattr(plans_sm90, "many_rows", lambda **_: 0)
    patch.setattr(plans_sm90, "tokens_of", lambda *_: tokens)
    scales = np.exp2(np.arange(2 * tokens + 3) % 11 - 5).astype(np.float32)[:, None]
    a = nvfp4.quantize(integers((2 * tokens + 3, 384), 7), "nvfp4", encode_scale=scales)
    check(MAKERS["cupy"](), a, nvfp4.quantize(integers((COLUMNS, 384), 8), "mxfp4"), BF16)


@pytest.mark.parametrize("split, tokens", CLUSTERS)
def test_clusters_that_share_the_depth(
    cupy: Any, patch: pytest.MonkeyPatch, split: int, tokens: int
) -> None:
    patch.setattr(plans_sm90, "many_rows", lambda **_: 0)
    patch.setattr(plans_sm90, "split_of", lambda *_: (split, tokens))
    b = nvfp4.quantize(integers((COLUMNS, 2144), 3, np.float32), "mxfp4")
    for rows in (tokens - 1, tokens + 9):
        check(MAKERS["cupy"](), integers((rows, 2144), 4), b, BF16)
        check(MAKERS["cupy"](), eleven_bits((rows, 2144), 4), b, BF16)


@pytest.mark.parametrize("chunk, fmt", CHUNKS)
@pytest.mark.parametrize("division", DIVISIONS)
def test_every_division_of_few_rows(
    cupy: Any, patch: pytest.MonkeyPatch, fmt: str, division: tuple[int, int, int, int], chunk: int
) -> None:
    """With as many steps under way as plans take, for a depth that teams share evenly, or not."""
    stripes, warps, team, resident = division
    patch.setattr(plans_sm90, "many_rows", lambda **_: 1 << 60)

    def tile(constants: Any, rows: int, columns: int, depth: int, *_: Any) -> Cut:
        most = plans_prepared._resident(chunk, stripes, constants)
        blocks = resident if chunk == 8 else min(resident, most)
        slots = plans_prepared._slots(constants, chunk, stripes, depth // 64, team, 4, blocks)
        return Cut(chunk, warps, team, stripes, slots, blocks)

    patch.setattr(plans_prepared, "tile", tile)
    depth = 2304 if chunk == 8 else 2080
    b = nvfp4.quantize(integers((4, COLUMNS, depth), 5, np.float32), fmt)
    options = ranges_of(chunk)
    a = integers((int(options["row_offsets"][-1]) + 2, depth), 6)
    check(MAKERS["cupy"](), a, b, BF16, **options)
