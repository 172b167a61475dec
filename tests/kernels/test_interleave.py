"""The kernels that move block scales between the layouts, on the simulated machine."""

from __future__ import annotations

import numpy as np
import pytest

from . import checks
from .simulated import Simulated


def scales(batches: int, rows: int, blocks: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 256, (batches, rows, blocks), np.uint8)


@pytest.mark.parametrize("rows", [0, 1, 31, 32, 33, 127, 128, 129, 257])
@pytest.mark.parametrize("blocks", [0, 1, 3, 4, 5, 7])
def test_there_and_back(run: Simulated, rows: int, blocks: int) -> None:
    checks.interleave(run, scales(1, rows, blocks))


@pytest.mark.parametrize("batches", [0, 2, 3])
def test_each_matrix_of_a_stack_by_itself(run: Simulated, batches: int) -> None:
    checks.interleave(run, scales(batches, 130, 5))


@pytest.mark.parametrize("block", [(1, 1, 1), (31, 1, 1), (3, 11, 1), (1, 33, 1)])
@pytest.mark.parametrize("grid", [(1, 1, 1), (3, 2, 2)])
def test_any_block_and_grid(block: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
    checks.interleave(Simulated(block=block, grid=grid), scales(2, 130, 9))


def test_the_order_of_warps_changes_nothing() -> None:
    for seed in range(3):
        checks.interleave(Simulated(schedule=seed), scales(1, 40, 6))
