"""Pairs of tiles: each row is some block's, with its expert and scales; both blocks agree."""

from __future__ import annotations

import numpy as np
import pytest

import nvfp4
from nvfp4._numba import cuda
from nvfp4.arrays import as_array
from nvfp4.kernels.sm100_layout import grouped_pair
from nvfp4.launch import Launch, run
from nvfp4.program import Kernel

FACTS = 8


def pairs_of_tiles(
    row_offsets, expert_ids, tile_starts, out, groups, experts, rows, tiles
):  # fmt: skip
    """What each block of a pair finds out."""
    live, expert, first, count, a_tile, owner, head, tail = grouped_pair(
        cuda.blockIdx.x // 2, row_offsets, expert_ids, tile_starts, groups, experts, rows, tiles
    )
    if cuda.threadIdx.x == 0:
        at = cuda.blockIdx.x * FACTS
        out[at] = 1 if live else 0
        out[at + 1] = expert
        out[at + 2] = first
        out[at + 3] = count
        out[at + 4] = a_tile
        out[at + 5] = owner
        out[at + 6] = head
        out[at + 7] = tail


KERNEL = Kernel(
    "pairs_of_tiles",
    pairs_of_tiles,
    ("u8*", "u8*", "u8*", "i64*", "i64", "i64", "i64", "i64"),
    {
        "OFFSETS": ("int32",),
        "IDS": ("none", "int32"),
        "A_STARTS": ("none", "int32"),
        "PAIR_OF_BLOCKS": (True,),
    },
    architectures=("sm_100a",),
)


def facts_of(offsets: np.ndarray, rows: int, tiles: int, **more: np.ndarray) -> np.ndarray:
    """[pairs, 2, FACTS]"""
    groups = len(offsets) - 1
    pairs = -(-rows // 256) + min(groups, rows)
    program = KERNEL.program(
        OFFSETS="int32",
        IDS="int32" if "expert_ids" in more else "none",
        A_STARTS="int32" if "tile_starts" in more else "none",
        PAIR_OF_BLOCKS=True,
    )
    args = ("row_offsets", "expert_ids", "tile_starts", "out", groups, 3, rows, tiles)
    launch = Launch(program, (2 * pairs, 1, 1), (32, 1, 1), 0, args, cluster=(2, 1, 1))
    out = np.full((pairs, 2, FACTS), -77, np.int64)
    buffers = {"row_offsets": offsets, "out": out, "expert_ids": None, "tile_starts": None, **more}
    with nvfp4.simulate("sm_100a") as machine:
        given = {k: None if v is None else as_array(v, k) for k, v in buffers.items()}
        run([launch], given, machine=machine)
    return out


SKEWED = [1, 127, 128, 129, 255, 256, 257, 0, 0, 384, 385, 3]
OFFSETS = {
    "skewed": np.cumsum([0, *SKEWED]),
    # More than a warp walks over at once, with pairs left over on both sides.
    "many": np.cumsum([0, *[1, 0, 130] * 11, *SKEWED[:5]]),
    "rows of none": np.cumsum([5, 2, 300]),
    "decreasing": np.array([0, 200, 100, 600, -5, 700]),
    "beyond the rows": np.array([0, 100, 10**6, 10**6]),
    "no ranges": np.array([0]),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_every_row_is_in_one_block(name: str) -> None:
    offsets = OFFSETS[name].astype(np.int32)
    rows = 750 if offsets.max() > 1e5 or offsets.min() < 0 else int(offsets.max()) + 300
    limits = np.maximum.accumulate(np.clip(offsets, 0, rows))
    tiles = 1000
    facts = facts_of(offsets, rows, tiles)
    assert (facts[:, 0, :2] == facts[:, 1, :2]).all()
    starts = np.cumsum([0, *-(-np.diff(limits) // 128)])
    ends = (limits[0], limits[-1]) if len(limits) > 1 else (rows, rows)
    seen = np.full(rows, -1)
    for live, expert, first, count, a_tile, owner, head, tail in facts.reshape(-1, FACTS):
        local = np.arange(max(count, 0)) + first
        if owner < 0:
            assert not live and (head, tail) == ends
            local = np.where(local < head, local, local - head + tail)
            local = local[local < rows]
        else:
            # Three experts.
            assert live == (owner < 3) and expert == (owner if owner < 3 else -1)
            if count > 0:
                assert a_tile == starts[owner] + (first - limits[owner]) // 128
            assert (limits[owner] <= local).all() and (local < limits[owner + 1]).all()
        assert (seen[local] == -1).all()
        seen[local] = owner
    for owner in range(len(limits) - 1):
        assert (seen[limits[owner] : limits[owner + 1]] == owner).all()
    assert (seen[: limits[0]] == -1).all() and (seen[limits[-1] :] == -1).all()


def test_a_tile_without_scales_is_of_one_block_and_both_multiply() -> None:
    offsets = np.array([0, 300, 600, 1200, 1400], np.int32)
    starts = np.array([5, -1, 4, -3], np.int32)
    ids = np.array([0, 1, 2, 0], np.int32)
    facts = facts_of(offsets, 1400, 6, expert_ids=ids, tile_starts=starts)
    found = [
        (owner, bool(live), expert, a_tile)
        for live, expert, _, count, a_tile, owner, _, _ in facts.reshape(-1, FACTS)
        if owner >= 0
    ]
    live = [(0, True, 0, 5), (0, True, 0, -1), (0, False, 0, -1), (0, False, 0, -1)]
    live += [(1, True, 1, -1), (1, True, 1, 0), (1, True, 1, 1), (1, True, 1, 2)]
    live += [(2, True, 2, 4), (2, True, 2, 5)] + 4 * [(2, False, 2, -1)]
    live += [(3, False, 0, -1), (3, False, 0, -1)]
    assert [(owner, on, expert, max(tile, -1)) for owner, on, expert, tile in found] == live
