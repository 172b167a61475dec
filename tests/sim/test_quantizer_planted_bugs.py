"""One line of a quantiser by tensor or bulk copies is changed, and the right check catches it.

As ``test_tcgen05_planted_bugs``: each row is text of a kernel, what stands there instead, and what
the simulated machine then says: an exception and its words, or, where no check could know, wrong
bytes. The kernels as they are pass all of it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

from nvfp4 import sim
from nvfp4.launch import Launch
from nvfp4.program import Kernel, Program
from tests.kernels import test_grouped_quantize_tma as grouped
from tests.kernels import test_quantize_tma as dense
from tests.kernels.simulated import Simulated

#: The files of each kernel, each of which imports from those before it.
MODULES = {
    "quantize_tma": ("rings", "quantize_tma"),
    "grouped_quantize_tma": ("grouped_pieces", "grouped_quantize_tma"),
}


class Plant(NamedTuple):
    """A changed line; error None: wrong bytes."""

    id: str
    old: str
    new: str
    error: type[sim.Finding] | None
    words: str = ""


LAST_WAIT = "    if stores:\n        bulk_wait_group(0)\n"

DENSE = [
    Plant(
        "init_without_fence", "        fence_mbarrier_init()\n", "", sim.MissingFence, "mbarrier"
    ),
    Plant(
        "empty_counts_the_loader", "THREADS // 32 - 1)", "THREADS // 32)", sim.Deadlock, "mbarrier"
    ),
    Plant(
        "no_wait_for_the_tile",
        "        mbarrier_wait_parity(add_u32(full, shl_u32(stage, 3)), parity)\n",
        "",
        sim.UnwrittenRead,
    ),
    Plant(
        "parity_of_the_tile",
        "mbarrier_wait_parity(add_u32(full, shl_u32(stage, 3)), parity)",
        "mbarrier_wait_parity(add_u32(full, shl_u32(stage, 3)), xor_u32(parity, 1))",
        sim.UnwrittenRead,
    ),
    Plant(
        "no_wait_for_room",
        "mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), xor_u32(parity, 1))",
        "pass",
        sim.MBarrierError,
        "too many arrivals",
    ),
    Plant(
        "parity_of_room",
        "mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), xor_u32(parity, 1))",
        "mbarrier_wait_parity(add_u32(empty, shl_u32(stage, 3)), parity)",
        sim.Deadlock,
    ),
    Plant(
        "parity_kept",
        "        parity = xor_u32(parity, 1)\n",
        "",
        sim.MBarrierError,
        "too many arrivals",
    ),
    Plant(
        "half_the_bytes",
        "_expect_tx(barrier, TILE)",
        "_expect_tx(barrier, TILE // 2)",
        sim.Deadlock,
    ),
    Plant(
        "more_bytes", "_expect_tx(barrier, TILE)", "_expect_tx(barrier, TILE + 16)", sim.Deadlock
    ),
    Plant(
        "tile_given_back_early",
        "    syncwarp(WARP)\n    if leader:\n",
        "    if leader:\n",
        sim.DataRace,
    ),
    Plant("no_proxy_fence", "        fence_proxy_async_shared()\n", "", sim.MissingFence),
    Plant("stored_before_others_are_done", "        bar_sync(1, THREADS - 32)\n", "", sim.DataRace),
    Plant("results_overwritten", "bulk_wait_group_read(0)", "pass", sim.NotAwaited),
    Plant("results_never_committed", "            bulk_commit_group()\n", "", sim.NotAwaited),
    Plant("one_group_less", "bulk_wait_group_read(0)", "bulk_wait_group_read(1)", sim.NotAwaited),
    Plant("left_with_stores_in_flight", LAST_WAIT, "", sim.Finding, "in flight"),
    Plant("map_never_acquired", "        ready(codes_map)\n", "", sim.MissingFence, "tensormap"),
    Plant("codes_without_swizzle", "and_u32(shl_u32(place, 2), 16)", "0", None),
    Plant(
        "scales_of_the_row_beside",
        "shl_u32(and_u32(place, 31), 4)",
        "shl_u32(and_u32(place, 30), 4)",
        sim.DataRace,
    ),
]

GROUPED = [
    Plant("no_proxy_fence", "    fence_proxy_async_shared()\n", "", sim.MissingFence),
    Plant(
        "stored_before_others_are_done",
        "    fence_proxy_async_shared()\n    cuda.syncthreads()\n",
        "    fence_proxy_async_shared()\n",
        sim.DataRace,
    ),
    Plant(
        "scales_before_zeros",
        "    cuda.syncthreads()\n    if expert",
        "    if expert",
        sim.DataRace,
    ),
    Plant("never_zeroed", "    zero_shared(base, i64_of_u32(thread))\n", "", sim.UnwrittenRead),
    Plant("zeros_left_out", "        size *= 2\n", "        size *= 1\n", sim.UnwrittenRead),
    Plant(
        "left_with_stores_in_flight", "        bulk_wait_group(0)\n", "", sim.Finding, "in flight"
    ),
    Plant(
        "waits_for_one_group_less",
        "bulk_wait_group(0)",
        "bulk_wait_group(1)",
        sim.Finding,
        "in flight",
    ),
    Plant("never_committed", "        bulk_commit_group()\n", "", sim.Finding, "in flight"),
    Plant("each_lane_stores", "    if leader:\n", "    if lt_u32(thread, 32):\n", sim.NotAwaited),
    Plant(
        "tiles_beyond_the_row",
        "min_u32(sub_u32(across, k_tile), K_TILES)",
        "K_TILES",
        sim.NotAwaited,
    ),
    Plant(
        "starts_are_not_data",
        "store_scales(scales, base, target,",
        "store_scales(scales, base, tile,",
        sim.NotAwaited,
        "bulk store writes",
    ),
    Plant("tiles_of_none_are_left", "if taken == 0 and", "if taken == 2 and", None),
    Plant("scales_for_zeros", "add_u32(base, TILE * K_TILES), tile,", "base, tile,", None),
    Plant(
        "expert_of_the_range",
        "expert_of(expert_ids, owner, experts)",
        "owner",
        sim.OutOfBounds,
        "encode_scale",
    ),
    Plant(
        "rows_of_the_next_range",
        "min_u32(sub_u32(stop, first_row), 128)",
        "128 + 0 * stop",
        sim.DataRace,
    ),
    Plant(
        "range_searched_from_the_first",
        "sub_u32(u32_of_i64(tile), first_tile), 7)",
        "sub_u32(u32_of_i64(tile), 0), 7)",
        sim.OutOfBounds,
        "codes",
    ),
    Plant("rows_of_none_kept", "        store_zeros(codes,", "        (codes,", None),
]
ROWS = [("quantize_tma", row) for row in DENSE] + [("grouped_quantize_tma", row) for row in GROUPED]


def changed(name: str, row: Plant | None) -> Kernel:
    """A kernel with a row's change, or as it is."""
    found = 0
    with pytest.MonkeyPatch.context() as patch:
        for one in MODULES[name]:
            original = importlib.import_module(f"nvfp4.kernels.{one}")
            text = inspect.getsource(original)
            if row is not None:
                found += text.count(row.old)
                text = text.replace(row.old, row.new)
            module = types.ModuleType(original.__name__)
            module.__package__ = "nvfp4.kernels"
            exec(compile(text, f"changed_{one}.py", "exec"), module.__dict__)
            # What is imported from it next.
            patch.setitem(sys.modules, original.__name__, module)
    assert row is None or found == 1, f"{found} places have {row.old!r}"
    kernel: Kernel = getattr(module, name.upper())
    return kernel


class Changed(Simulated):
    """Few blocks that run a changed kernel."""

    def __init__(self, kernel: Kernel, schedule: Any) -> None:
        super().__init__(schedule=schedule)
        self.kernel = kernel

    def changed(self, one: Launch) -> Launch:
        program = Program(self.kernel, one.program.constants)
        grid = (1, 1, 1) if self.kernel.name == "quantize_tma" else one.grid
        return dataclasses.replace(one, program=program, grid=grid)


def simulate(name: str, row: Plant | None, schedule: Any = "round_robin") -> None:
    """Run and compare every byte."""
    run = Changed(changed(name, row), schedule)
    if name == "quantize_tma":
        # Five tiles by one block, through a ring of two and two buffers of results.
        dense.compare(run, dense.values(2, (130, 160)), "2")
        return
    # Ranges of one tile and two, one that is off, rows of none; two blocks a row of tiles, of which
    # the second has padding; tiles in any order, some left over.
    grouped.compare(
        run,
        "k2",
        grouped.values(1, 136, 176),
        row_offsets=grouped.offsets([3, 130, 0, 2]),
        expert_ids=np.array([2, 0, 1, -1], np.int32),
        encode_scale=grouped.SCALES[:3],
        tile_starts=np.array([3, 0, 2, 5], np.int64),
        tiles=7,
    )


@pytest.mark.parametrize("schedule", ["round_robin", 1])
@pytest.mark.parametrize("name", MODULES)
def test_the_kernel_as_it_is_passes(name: str, schedule: Any) -> None:
    simulate(name, None, schedule)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda one: getattr(one, "id", one))
def test_a_changed_line_is_caught(name: str, row: Plant) -> None:
    with pytest.raises(row.error or AssertionError) as caught:
        simulate(name, row)
    if row.error is None:
        assert "wrong, the first at" in str(caught.value)
        return
    assert type(caught.value) is row.error
    assert row.words in str(caught.value)
    assert caught.value.kernel is not None
