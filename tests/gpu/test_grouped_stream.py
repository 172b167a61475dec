"""Each grouped quantiser at memory speed on the present card, whatever the limits between them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import plans
from nvfp4.bench.quantize_kernels import taking
from tests.kernels.test_grouped_stream import WAYS

from .test_grouped_quantize_tma import large, same


@pytest.mark.parametrize("way", WAYS)
def test_calls_behind_each_other_give_the_golden_bytes(
    cupy: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(plans, name, value)
    if way == "a piece a thread":
        monkeypatch.setattr(plans, "_FEW_PIECES", 1 << 30)
    x, options, expected = large()
    source = cupy.asarray(x.view(np.uint16))
    kept, zeros = source.copy(), cupy.zeros_like(source)
    on_card = {name: cupy.asarray(value) for name, value in options.items()}
    bits = source.view(x.dtype)
    with taking(""):
        q = nvfp4.grouped_quantize(bits, "nvfp4", **on_card)
        same(cupy, q, expected)
        for _ in range(5):
            source[...] = zeros
            nvfp4.grouped_quantize(bits, "nvfp4", out=q, **on_card)
            source[...] = kept
            nvfp4.grouped_quantize(bits, "nvfp4", out=q, **on_card)
            same(cupy, q, expected)
