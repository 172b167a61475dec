"""One line of the kernel with tensor memory is changed, and the check that should catch it does.

Each row is text of ``matmul_sm100`` or its parts, what stands there instead, and what the
simulated machine then says: an exception, its words, or, where no check could know, wrong values.
The kernel as it is passes all of it, in every case of the table.
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

import nvfp4
from nvfp4 import sim
from nvfp4.arrays import as_array
from nvfp4.kernels.matmul_sm100 import shared_bytes
from nvfp4.kernels.matmul_sm100_pair import pair_shared_bytes
from nvfp4.launch import Launch, run
from tests.kernels.products_sm100 import Case, operands, planned, same

#: Three tiles of the result by one block, two stages each through a ring of two.
NVFP4 = Case("nvfp4", 11, 190, 192, (64, 128), 1)
MIXED = Case("mxfp8-mxfp4", 3, 190, 256, (64, 128), 1)
WIDE = Case("nvfp4", 3, 190, 64, (192, 128), 1)
#: The columns of the second tile begin at row 64 of a tile of scales.
HALF = Case("mxfp8", 3, 100, 128, (64, 128), 1)
PAIRS = Case("mxfp4", 3, 256, 192, (128, 128), 1, {"epilogue": nvfp4.epilogues.swiglu()})
#: The last instruction of a row takes scales beyond it.
RAGGED = Case("mxfp4", 3, 190, 160, (64, 128), 1)
CASES = {"NVFP4": NVFP4, "MIXED": MIXED, "WIDE": WIDE, "HALF": HALF, "PAIRS": PAIRS}
CASES["RAGGED"] = RAGGED
#: By pairs of blocks, each with rows.
CASES["PAIRED"] = Case("nvfp4", 131, 190, 192, (64, 128), 2, {}, False, True)
#: Ranges of an odd and an even number of tiles, and the end of one within a pair, in two pairs of
#: blocks; one without an expert, with rows of another pair of tiles behind it.
CASES["GROUPED"] = Case(
    *("nvfp4", (130, 3, 2, 260), 8, 64, (64, 128), 2),
    {"expert_ids": np.array([1, 0, -1, 2], np.int32), "experts": 3},
    paired=True,
)
CASES["HALVES"] = Case("mxfp4", (1, 2), 128, 64, (128, 128), 2, PAIRS.options, False, True)
CASES["SWAPPED"] = Case("mxfp8", 70, 130, 64, (64, 128), 1, {}, True)
STAGES = 2
#: The kernel's files, each of which imports from those before it.
MODULES = ("sm100_layout", "sm100_jobs", "sm100_results", "matmul_sm100", "matmul_sm100_pair")


class Plant(NamedTuple):
    """A changed line; error None: wrong values."""

    id: str
    old: str
    new: str
    error: type[sim.Finding] | None
    words: str = ""
    case: str = "NVFP4"


FULL_WAIT = "mbarrier_wait_parity(full, parity)\n    tcgen05_fence_after_thread_sync()"
PROLOGUE = "tcgen05_relinquish()\n    tcgen05_fence_before_thread_sync()"
MADE_WAIT = (
    "line = strip + lane * strip_pitch()\n"
    "    note_row(line, warp * 32 + lane, of_rows, factors, row_indices, shape)\n"
    "    if live:\n        mbarrier_wait_parity(made, parity)\n"
    "        tcgen05_fence_after_thread_sync()"
)
MADE_FENCE = "        tcgen05_fence_after_thread_sync()"
TAKEN = "tcgen05_fence_before_thread_sync()\n    syncwarp(WARP)\n    if elect(WARP):"
LAST = "                    taken(made)\n            syncwarp(WARP)\n            n = first"
LOADED = (
    "acc = tcgen05_wait_ld(tcgen05_ld(accumulators + 32 * chunk, 32))\n"
    "        st_shared_row(line, acc)\n    elif"
)

TABLE = [
    # Barriers
    Plant(
        "init_without_fence",
        "made + 16 + 8 * i, 4)\n        fence_mbarrier_init()\n",
        "made + 16 + 8 * i, 4)\n",
        sim.MissingFence,
        "reports to the mbarrier",
    ),
    Plant(
        "init_counts_threads",
        "mbarrier_init(made + 16 + 8 * i, 4)",
        "mbarrier_init(made + 16 + 8 * i, 128)",
        sim.Deadlock,
        "mbarrier",
    ),
    Plant(
        "no_wait_for_empty",
        "    mbarrier_wait_parity(full + 8 * STAGES, parity ^ 1)\n",
        "",
        sim.MBarrierError,
        "too many arrivals",
    ),
    Plant(
        "empty_parity",
        "full + 8 * STAGES, parity ^ 1)",
        "full + 8 * STAGES, parity)",
        sim.Deadlock,
        "parity 0",
    ),
    Plant(
        "ring_parity_kept", "(parity + turns) % 2", "parity", sim.MBarrierError, "too many arrivals"
    ),
    Plant(
        "scales_not_expected",
        "+ nbytes * (1 + halves() * right_scale_tiles()),",
        "+ nbytes,",
        sim.NotAwaited,
        "",
    ),
    Plant(
        "spread_codes_counted_twice",
        "return rows * row_bytes() // 2",
        "return rows * row_bytes()",
        sim.Deadlock,
        "bytes",
        "MIXED",
    ),
    Plant(
        "no_wait_for_full",
        FULL_WAIT,
        "tcgen05_fence_after_thread_sync()",
        sim.UnwrittenRead,
        "shared memory",
    ),
    Plant(
        "full_without_fence",
        FULL_WAIT,
        "mbarrier_wait_parity(full, parity)",
        sim.MissingFence,
        "fence::after_thread_sync",
    ),
    Plant(
        "no_wait_for_made",
        MADE_WAIT,
        MADE_WAIT.replace("mbarrier_wait_parity(made, parity)", "pass"),
        sim.UnwrittenRead,
        "to load them",
    ),
    Plant(
        "made_without_fence",
        MADE_WAIT,
        MADE_WAIT.replace(MADE_FENCE, ""),
        sim.MissingFence,
        "fence::after_thread_sync",
    ),
    Plant(
        "made_parity",
        MADE_WAIT,
        MADE_WAIT.replace("(made, parity)", "(made, parity ^ 1)"),
        sim.UnwrittenRead,
        "to load them",
    ),
    Plant(
        "accumulator_parity_kept",
        "return acc ^ 1, parity ^ acc",
        "return acc ^ 1, parity",
        sim.NotAwaited,
        "tcgen05.commit and a wait",
    ),
    # Commits
    Plant(
        "stage_never_empty",
        "    commit(full + 8 * STAGES)\n",
        "",
        sim.Deadlock,
        "parity 0",
    ),
    Plant(
        "stage_empty_by_arrival",
        "commit(full + 8 * STAGES)",
        "mbarrier_arrive_expect_tx(full + 8 * STAGES, 0)",
        sim.NotAwaited,
        "tcgen05.commit",
    ),
    Plant(
        "made_by_arrival",
        "if not ragged:\n                    commit(made)",
        "if not ragged:\n                    mbarrier_arrive_expect_tx(made, 0)",
        sim.NotAwaited,
        "tcgen05.commit",
    ),
    Plant(
        "never_made",
        "                if not ragged:\n                    commit(made)\n",
        "",
        sim.Deadlock,
        "mbarrier",
    ),
    # Tensor memory
    Plant(
        "never_released",
        "        tcgen05_dealloc(memory, COLUMNS)\n",
        "",
        sim.TensorMemoryError,
        "never released",
    ),
    Plant(
        "released_in_part",
        "tcgen05_dealloc(memory, COLUMNS)",
        "tcgen05_dealloc(memory, 32)",
        sim.TensorMemoryError,
        "no such allocation",
    ),
    Plant(
        "released_while_read",
        "    tcgen05_fence_before_thread_sync()\n    cuda.syncthreads()\n    if warp == ISSUER:",
        "    if warp == ISSUER:",
        sim.NotAwaited,
        "to give them back",
    ),
    Plant(
        "allocated_too_little",
        "tcgen05_alloc(address_base(base), COLUMNS)",
        "tcgen05_alloc(address_base(base), 64)",
        sim.OutOfBounds,
        "of tensor memory",
    ),
    Plant(
        "allocated_by_a_number_that_is_none",
        "tcgen05_alloc(address_base(base), COLUMNS)",
        "tcgen05_alloc(address_base(base), 160)",
        sim.InvalidOperand,
        "columns are 32",
    ),
    Plant(
        "allocated_after_the_promise",
        "        tcgen05_alloc(address_base(base), COLUMNS)\n        tcgen05_relinquish()",
        "        tcgen05_relinquish()\n        tcgen05_alloc(address_base(base), COLUMNS)",
        sim.TensorMemoryError,
        "relinquish",
    ),
    Plant("address_without_fence", PROLOGUE, "tcgen05_relinquish()", sim.MissingFence, "allocated"),
    Plant(
        "columns_out_of_bounds",
        "memory + acc * TILE_N, k, inside",
        "memory + acc * TILE_N + 384, k, inside",
        sim.OutOfBounds,
        "columns",
        "WIDE",
    ),
    Plant(
        "scales_over_accumulators",
        "return memory + ACCS * TILE_N",
        "return memory + TILE_N",
        sim.TensorMemoryError,
        "hold accumulators",
    ),
    Plant(
        "scales_of_the_next_group",
        "left_scales_column(memory) + 4 * group,\n                    right",
        "left_scales_column(memory) + 4 * group + 4,\n                    right",
        None,
    ),
    Plant(
        "products_before_scales",
        "    copy_scales(base, stage, memory, groups)\n",
        "",
        sim.UnwrittenRead,
        "not in place",
    ),
    Plant("sums_never_begun", "k > 0 or step > 0,", "True,", sim.UnwrittenRead, "added to"),
    Plant("sums_begun_in_each_stage", "k > 0 or step > 0,", "step > 0,", None),
    Plant(
        "other_warps_lanes",
        "mine = memory + (warp << 21)",
        "mine = memory",
        sim.InvalidOperand,
        "lanes 32 to 63",
        "SWAPPED",
    ),
    Plant(
        "loads_not_awaited",
        LOADED,
        LOADED.replace("tcgen05_wait_ld(", "(", 1),
        sim.NotAwaited,
        "wait::ld",
    ),
    Plant(
        "taken_without_fence",
        TAKEN,
        "syncwarp(WARP)\n    if elect(WARP):",
        sim.NotAwaited,
        "fence::before_thread_sync",
    ),
    Plant(
        "taken_before_the_last_load",
        "if chunk == chunks - 1:\n" + LAST,
        "if chunk == 0:\n" + LAST,
        sim.NotAwaited,
        "",
    ),
    Plant(
        "strip_read_early",
        LAST,
        LAST.replace("            syncwarp(WARP)\n", ""),
        sim.DataRace,
        "syncwarp",
    ),
    # Descriptors
    Plant(
        "operand_of_wgmma",
        "SWIZZLE, 16, 8 * SWIZZLE)\n    b_at",
        "SWIZZLE, 16, 8 * SWIZZLE) ^ (1 << 46)\n    b_at",
        sim.InvalidDescriptor,
        "bits 48:46",
    ),
    Plant(
        "operand_of_another_swizzle",
        "SWIZZLE, 16, 8 * SWIZZLE)\n    b_at",
        "32, 16, 8 * SWIZZLE)\n    b_at",
        sim.InvalidDescriptor,
        "a tile begins at",
    ),
    Plant(
        "rows_8_apart_of_another_swizzle",
        "SWIZZLE, 16, 8 * SWIZZLE)\n    b_at",
        "SWIZZLE, 16, 4 * SWIZZLE)\n    b_at",
        None,
    ),
    Plant(
        "tile_not_at_an_atom",
        "a + to_a,",
        "a + to_a + 8,",
        sim.InvalidDescriptor,
        "begins at",
        "MIXED",
    ),
    Plant(
        "scales_with_a_swizzle",
        "tcgen05_descriptor(source, 0, 16, 128)",
        "tcgen05_descriptor(source, 128, 16, 128)",
        sim.InvalidDescriptor,
        "swizzle",
    ),
    Plant(
        "product_of_two_blocks",
        "word | place_in_group(step),",
        "(word ^ 3 << 27) | place_in_group(step),",
        sim.InvalidDescriptor,
        "M is 256",
    ),
    Plant(
        "product_with_unknown_bits",
        "word | place_in_group(step),",
        "word | 1 << 25 | place_in_group(step),",
        sim.InvalidDescriptor,
        "mean nothing",
    ),
    Plant(
        "product_of_another_scale_type",
        'product("mxf4nvf4", 16, "e2m1", "e2m1", "ue4m3", MMA_N)',
        'product("mxf4nvf4", 16, "e2m1", "e2m1", "ue8m0", MMA_N)',
        None,
    ),
    Plant(
        "scales_of_the_first_place",
        "        place = step % 4\n",
        "        place = 0\n",
        None,
        "",
        "MIXED",
    ),
    Plant("scales_of_the_tile_before", "% 128 // 32\n", "% 64 // 32\n", None, "", "HALF"),
    Plant(
        "half_a_tile_of_scales",
        "% 128 // 32\n",
        "% 128 // 64\n",
        sim.InvalidOperand,
        "even",
        "HALF",
    ),
    Plant(
        "up_where_gate_is",
        "accumulators + half * MMA_N,",
        "accumulators,",
        sim.UnwrittenRead,
        "to load them",
        "PAIRS",
    ),
    # Scales behind the end of the rows
    Plant(
        "cleared_without_fence",
        "    fence_proxy_async_shared()\n    syncwarp(WARP)\n",
        "    syncwarp(WARP)\n",
        sim.MissingFence,
        "fence.proxy.async of shared",
        "RAGGED",
    ),
    Plant(
        "cleared_without_wait",
        "    mbarrier_wait_parity(full_base(base) + 8 * stage, parity)\n",
        "",
        sim.MissingFence,
        "wrote by the ordinary proxy",
        "RAGGED",
    ),
    Plant(
        "copied_while_others_clear",
        "fence_proxy_async_shared()\n    syncwarp(WARP)",
        "fence_proxy_async_shared()",
        sim.DataRace,
        "tcgen05.cp reads",
        "RAGGED",
    ),
    Plant(
        "clears_a_scale_that_counts",
        "st_shared_u8(word + depth // 32 % 4, 0)",
        "st_shared_u8(word + depth // 32 % 4 - 1, 0)",
        None,
        "",
        "RAGGED",
    ),
    # Columns for rows
    Plant("same_rows_in_each_part", "first + part, part,", "first, part,", None, "", "SWAPPED"),
    Plant(
        "scales_of_the_first_part",
        "inside = part if SWAP else column",
        "inside = 0 if SWAP else column",
        None,
        "",
        "SWAPPED",
    ),
    Plant(
        "rows_noted_too_early",
        "                elif words[0] == ZEROS:\n                    store_one(out, at, ZERO)\n"
        "        syncwarp(WARP)\n\n\ndef finish(",
        "                elif words[0] == ZEROS:\n                    store_one(out, at, ZERO)\n"
        "\n\ndef finish(",
        sim.DataRace,
        "syncwarp",
        "SWAPPED",
    ),
    # Pairs of blocks
    Plant(
        "commits_to_one_block",
        "tcgen05_commit_pair(mbarrier, 3)",
        "tcgen05_commit_pair(mbarrier, 1)",
        sim.Deadlock,
        "mbarrier",
        "PAIRED",
    ),
    Plant(
        "expects_the_bytes_of_one_block",
        "mbarrier_arrive_expect_tx(mine, 2 * (counted_of_stage() + of_scales))",
        "mbarrier_arrive_expect_tx(mine, counted_of_stage() + of_scales)",
        sim.NotAwaited,
        "tensor load of a pair",
        "PAIRED",
    ),
    Plant(
        "reports_to_its_own_block",
        "full = map_shared(mine, 0)",
        "full = mine",
        sim.Deadlock,
        "bytes",
        "PAIRED",
    ),
    Plant(
        "takes_at_home",
        "mbarrier_arrive_cluster(map_shared(made + 16, 0))",
        "mbarrier_arrive(made + 16)",
        sim.Deadlock,
        "of 8 arrivals",
        "PAIRED",
    ),
    Plant(
        "counts_the_warps_of_one_block",
        "mbarrier_init(made + 16 + 8 * i, 8)",
        "mbarrier_init(made + 16 + 8 * i, 4)",
        sim.WrongParity,
        "",
        "PAIRED",
    ),
    Plant(
        "ends_without_the_other_block",
        "    meet()\n    if warp == ISSUER:",
        "    tcgen05_fence_before_thread_sync()\n    cuda.syncthreads()\n    if warp == ISSUER:",
        sim.DataRace,
        "leaves the kernel",
        "PAIRED",
    ),
    Plant(
        "the_same_half_in_both",
        "half * half_columns + rank * product_rows()",
        "half * half_columns",
        None,
        "",
        "PAIRED",
    ),
    # Ranges by pairs of blocks
    Plant(
        "each_pair_the_first_of_its_range",
        "within = (pair - first_pair) * 2",
        "within = 0",
        None,
        "",
        "GROUPED",
    ),
    Plant(
        "half_pairs_not_counted",
        "pairs + ((before + below) >> 1)",
        "pairs + (before >> 1)",
        sim.OutOfBounds,
        "store of 4 bytes at out",
        "GROUPED",
    ),
    Plant(
        "both_blocks_take_the_first_rows",
        "first = start + ((within + rank) << 7)",
        "first = start + (within << 7)",
        sim.DataRace,
        "of out: this thread writes",
        "GROUPED",
    ),
    Plant(
        "both_blocks_take_the_first_scales",
        "a_tile = even + rank",
        "a_tile = even",
        None,
        "",
        "GROUPED",
    ),
    Plant(
        "a_block_without_rows_does_not_help",
        "live = expert >= 0 and even >= -1 and even < tiles",
        "live = expert >= 0 and count > 0",
        sim.Deadlock,
        "bytes",
        "GROUPED",
    ),
    Plant(
        "each_block_its_own_tile",
        "return cuda.blockIdx.x // blocks_together()",
        "return cuda.blockIdx.x + 0",
        sim.Deadlock,
        "lacks 1 of 1 arrivals",
        "GROUPED",
    ),
    Plant(
        "accumulators_of_a_range_without_an_expert",
        "        if of_rows[0]:\n            acc, parity = next_accumulators(acc, parity)",
        "        acc, parity = next_accumulators(acc, parity)",
        sim.Deadlock,
        "parity 0",
        "GROUPED",
    ),
    Plant(
        "the_first_expert_for_all",
        "b_row = expert * columns + column",
        "b_row = column",
        None,
        "",
        "GROUPED",
    ),
    Plant(
        "the_first_experts_scales_for_all",
        "b_tile = expert * (matrix_scales",
        "b_tile = 0 * (matrix_scales",
        None,
        "",
        "GROUPED",
    ),
    Plant(
        "gate_for_up",
        "y = right_row + half * half_columns + rank",
        "y = right_row + rank",
        None,
        "",
        "HALVES",
    ),
    Plant(
        "up_in_the_other_blocks_rows",
        "b_half = b_at + half * product_rows() * row_bytes()",
        "b_half = b_at + half * MMA_N * row_bytes()",
        sim.NotAwaited,
        "tensor load of a pair",
        "HALVES",
    ),
    Plant(
        "scales_of_up_not_expected",
        "of_scales = SCALE_TILE * scale_groups() * (1 + halves() * right_scale_tiles())",
        "of_scales = SCALE_TILE * scale_groups() * (1 + right_scale_tiles())",
        sim.NotAwaited,
        "tcgen05.cp reads",
        "HALVES",
    ),
    # Copies
    Plant(
        "map_never_acquired",
        "        ready(maps[1])\n        if PAIR",
        "        if PAIR",
        sim.MissingFence,
        "tensormap",
    ),
    Plant(
        "base_not_aligned",
        "(i64_of_u32(shared_base()) + 1023) // 1024 * 1024",
        "i64_of_u32(shared_base()) + 128",
        sim.Misaligned,
        "multiple of 512",
    ),
    Plant(
        "padding_of_the_depth",
        "if step * step_depth() < left:",
        "if left > 0:",
        sim.UnwrittenRead,
        "not in place",
        "WIDE",
    ),
    Plant(
        "scales_beyond_the_depth",
        "groups = min(k_tiles - k * scale_groups(), scale_groups())",
        "groups = scale_groups() + 0 * k_tiles",
        sim.OutOfBounds,
        "out of bounds",
    ),
]


def changed(row: Plant | None) -> types.ModuleType:
    """The kernels' modules with a row's change, or as they are: the last, which has all names."""
    found = 0
    with pytest.MonkeyPatch.context() as patch:
        for name in MODULES:
            original = importlib.import_module(f"nvfp4.kernels.{name}")
            text = inspect.getsource(original)
            if row is not None:
                found += text.count(row.old)
                text = text.replace(row.old, row.new)
            module = types.ModuleType(original.__name__)
            module.__package__ = "nvfp4.kernels"
            exec(compile(text, f"changed_{name}.py", "exec"), module.__dict__)
            # What is imported from it next.
            patch.setitem(sys.modules, original.__name__, module)
    assert row is None or found == 1, f"{found} places have {row.old!r}"
    return module


def kernel_of(case: Case, module: types.ModuleType) -> Any:
    """A module's kernel for a case."""
    grouped = "" if isinstance(case.rows, int) else "grouped_"
    name = f"{grouped}matmul_sm100{'_pair' * case.paired}_kernel"
    return getattr(module, name)()


def simulate(case: Case, module: types.ModuleType, schedule: Any = "round_robin") -> Any:
    """Run a case by a module's kernel, with a ring of two stages: (result, golden result)."""
    a, b, options = operands(case)
    function = nvfp4.matmul if isinstance(case.rows, int) else nvfp4.grouped_matmul
    expected = np.asarray(function(a, b, **options))
    launches: list[Launch] = []
    with (
        planned(case.tile, case.blocks, case.swap, case.paired),
        nvfp4.simulate("sm_100a") as machine,
    ):
        machine.record = launches.append
        function(a, b, **options)
    (launch,) = launches
    constants = {**dict(launch.program.constants), "STAGES": STAGES}
    program = kernel_of(case, module).program(**constants)
    program = dataclasses.replace(program, functions=launch.program.functions)
    names = ("KIND", "TILE_N", "TILE_K", "STAGES", "PAIR")
    size = (pair_shared_bytes if case.paired else shared_bytes)(*(constants[n] for n in names))
    launch = dataclasses.replace(launch, program=program, shared_bytes=size)
    out = np.full(expected.shape, np.nan, np.float32)
    buffers = {
        "a_codes": a.codes, "a_scales": a.scales, "a_decode": a.decode_scale,
        "b_codes": b.codes, "b_scales": b.scales, "b_decode": b.decode_scale, "out": out,
        **{name: options.get(name) for name in ("row_offsets", "expert_ids", "row_indices")},
        "tile_starts": a.tile_starts,
    }  # fmt: skip
    with nvfp4.simulate("sm_100a", schedule=schedule) as machine:
        machine.spin_limit = 500
        given = {k: None if v is None else as_array(v, k) for k, v in buffers.items()}
        run([launch], given | {"alpha": 1.0}, machine=machine)
    return out, expected


@pytest.mark.parametrize("schedule", ["round_robin", 1])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_as_it_is_passes(name: str, schedule: Any) -> None:
    same(*simulate(CASES[name], changed(None), schedule))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.id)
def test_a_changed_line_is_caught(row: Plant) -> None:
    module, case = changed(row), CASES[row.case]
    if row.error is None:
        got, expected = simulate(case, module)
        assert not np.array_equal(got, expected)
        return
    with pytest.raises(row.error) as caught:
        simulate(case, module)
    assert type(caught.value) is row.error
    assert row.words in str(caught.value)
    assert caught.value.kernel is not None


def test_there_are_rows_enough() -> None:
    assert len({row.id for row in TABLE}) == len(TABLE) >= 25
