"""The copy that speeds are measured against, on the simulated machine."""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4 import launch, sim
from nvfp4.arrays import as_array
from nvfp4.bench.devices import _copy_launches
from nvfp4.kernels.copy import THREADS, UNROLL

BLOCK = THREADS * UNROLL


@pytest.mark.parametrize("words", [1, 3 * THREADS, BLOCK - 1, BLOCK, BLOCK + THREADS + 3])
def test_every_word_is_copied_and_nothing_else_is_written(words: int) -> None:
    x = np.random.default_rng(words).integers(0, 256, words * 16, dtype=np.uint8)
    y = np.full(words * 16 + 64, 0xAA, np.uint8)
    buffers = {"x": as_array(x, "x"), "y": as_array(y, "y")}
    launch.run(_copy_launches(x.nbytes), buffers, machine=sim.Machine("sm_90a"))
    assert np.array_equal(y[: x.size], x)
    assert (y[x.size :] == 0xAA).all()
