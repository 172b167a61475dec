"""Each grouped quantiser at memory speed on the present card, whatever the limits between them."""

from __future__ import annotations

from typing import Any

import pytest

from nvfp4 import plans
from tests.kernels.test_grouped_stream import WAYS

from .test_grouped_quantize_tma import calls_behind_each_other


@pytest.mark.parametrize("way", WAYS)
def test_calls_behind_each_other_give_the_golden_bytes(
    cupy: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WAYS[way].items():
        monkeypatch.setattr(plans, name, value)
    if way == "a piece a thread":
        monkeypatch.setattr(plans, "FEW_PIECES", 1 << 30)
    calls_behind_each_other(cupy, "", 5)
