"""``batch_invariant=True``: a row has the bytes that it has alone, in every kernel.

Sums are rounded here, so another order of them shows. (The simulated machine rounds once an
instruction: what it cannot see, which tile or instruction a card is given, is looked up in plans.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import plans_prepared, plans_products, plans_sm90

from .products_sm100 import aligned

BF16 = ml_dtypes.bfloat16
#: Architecture, whether weights are prepared, depth: as much as makes a choice by rows show.
KERNELS = {
    "sm80": ("sm_86", False, 96),
    "decode": ("sm_86", True, 480),
    "sm90": ("sm_90a", True, 96),
}
COLUMNS = 8
ROWS = 257
RNG = np.random.default_rng(19)
PICKS = [RNG.permutation(ROWS)[:count] for count in (1, 4, 16, 64)]
#: As many as make a division by rows another one.
MANY = RNG.permutation(ROWS)[:256]


def clear() -> None:
    for plan in (plans_products.matmul, plans_products.grouped_matmul):
        plan.cache_clear()


#: Minutes of the simulated machine in the kernel of many rows.
SLOW = pytest.mark.parametrize(
    "kernel", ["sm80", "decode", pytest.param("sm90", marks=pytest.mark.slow)], indirect=True
)


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernel that makes whatever batch-invariant product."""
    tiles = 0 if request.param == "sm90" else 1 << 60
    monkeypatch.setattr(plans_sm90, "INVARIANT_TILES", tiles)
    monkeypatch.setattr(plans_sm90, "INVARIANT_TOKENS", 16)
    monkeypatch.setattr(plans_sm90, "MOST_STAGES", 3)
    clear()
    yield request.param
    clear()


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def weights(kernel: str, *lead: int) -> nvfp4.QTensor:
    _, prepared, depth = KERNELS[kernel]
    b = aligned(nvfp4.quantize(normal(*lead, COLUMNS, depth), "mxfp4"))
    return nvfp4.prepare_weights(b) if prepared else b


def product(kernel: str, a: Any, b: nvfp4.QTensor, **options: Any) -> np.ndarray:
    """On the simulated machine."""
    function = nvfp4.grouped_matmul if options else nvfp4.matmul
    names: list[str] = []
    machine: Any
    with nvfp4.simulate(KERNELS[kernel][0], checks=False) as machine:
        run = machine.run

        def noted(*args: Any, **named: Any) -> Any:
            names.append(named["name"])
            return run(*args, **named)

        machine.run = noted
        machine.processors = 1  # so few that a division by rows would follow them
        got = function(a, b, out_dtype="float32", batch_invariant=True, **options)
    assert len(names) == 1 and f"matmul_{kernel}" in names[0], names
    return np.asarray(got)


@SLOW
def test_rows_have_the_same_bytes_among_any_others(kernel: str) -> None:
    x = normal(ROWS, KERNELS[kernel][2]).astype(BF16)
    b = weights(kernel)
    whole = product(kernel, aligned(x), b)
    for picked in [*PICKS, MANY] if kernel == "decode" else PICKS:
        assert product(kernel, aligned(x[picked]), b).tobytes() == whole[picked].tobytes()
    # The order of the golden model is another one, so that it would have shown.
    golden = np.asarray(nvfp4.matmul(x, b, out_dtype="float32", batch_invariant=True))
    np.testing.assert_allclose(whole, golden, rtol=1e-3, atol=1e-3)
    assert whole.tobytes() != golden.tobytes()


@SLOW
def test_rows_of_an_expert_do_not_know_of_other_experts(kernel: str) -> None:
    x = normal(40, KERNELS[kernel][2]).astype(BF16)
    b = weights(kernel, 3)
    mine = np.arange(30, 33)
    expected = None
    for before, behind in ((0, 0), (1, 7), (20, 0)):
        rows = np.concatenate([np.arange(before), mine, 33 + np.arange(behind)])
        offsets = np.cumsum([0, before, 3, behind]).astype(np.int32)
        got = product(kernel, aligned(x[rows]), b, row_offsets=offsets)[before : before + 3]
        expected = got if expected is None else expected
        assert got.tobytes() == expected.tobytes()
    stack = np.zeros((3, 5, x.shape[1]), BF16)
    stack[1, :3] = x[mine]
    got = product(kernel, aligned(stack), b, row_counts=np.array([5, 3, 0]))
    assert got[1, :3].tobytes() == expected.tobytes()


@SLOW
def test_rows_with_extreme_scales_change_no_other_row(kernel: str) -> None:
    """Only these are multiplied element by element."""
    depth = KERNELS[kernel][2]
    sizes = np.exp2(np.random.default_rng(3).integers(-12, 12, (6, depth // 32)))
    x = normal(6, depth) * np.repeat(sizes, 32, axis=1).astype(np.float32)
    a = nvfp4.quantize(x, "mxfp8_e4m3", scale_layout="linear")
    b = weights(kernel)
    usual = product(kernel, aligned(a), b)
    golden = np.asarray(nvfp4.matmul(a, b, out_dtype="float32"))
    others = [0, 2, 3, 5]
    assert usual[others].tobytes() != golden[others].tobytes()
    a.scales[(1, 4), (0, 2)] = 3, 240
    got = product(kernel, aligned(a), b)
    assert got[others].tobytes() == usual[others].tobytes()
    golden = np.asarray(nvfp4.matmul(a, b, out_dtype="float32"))
    assert got[[1, 4]].tobytes() == golden[[1, 4]].tobytes()


# Plans -------------------------------------------------------------------------------------------

ALL_ROWS = (1, 4, 16, 64, 257, 4096, 100_000)
#: Constants that say how rows are spread over items, and nothing of a row's sums.
OF_ITEMS = ("CHUNK", "STRIPES", "SLOTS", "EVEN", "BLOCKS_PER_SM")
QUANTIZED = {"a_format": "nvfp4", "a_dtype": None, "a_layout": "tcgen", "decode_a": "scalar"}
PLAIN = {"a_format": None, "a_dtype": "bfloat16", "a_layout": None, "decode_a": "none"}
PREPARED = {**PLAIN, "b_format": "mxfp4", "b_layout": "sm90"}
FP8 = {**PREPARED, "a_format": "e4m3", "a_dtype": None, "decode_a": "row", "compute": "fp8"}


def planned(arch: str, rows: int, **facts: Any) -> set[Any]:
    """Kernel and constants, of a dense product and of grouped ones."""
    shape = {
        **{"rows": rows, "columns": 1024, "depth": 4096, "b_format": "nvfp4", "b_layout": "tcgen"},
        **{"decode_b": "scalar", "alpha": "value", "out_dtype": "bfloat16", "aligned": True},
        **{"map_alignment": 32, "batch_invariant": True, **facts},
    }
    made = [("dense", plans_products.matmul(arch, **shape))]
    if shape["a_layout"] == "tcgen":
        shape["a_layout"] = "tcgen_grouped"
    ranges = {"input_rows": rows, "experts": 64, "offsets_dtype": "int32", "ids_dtype": "int32"}
    for groups in (1, 8, 64):
        more = {**ranges, "groups": groups, "indices_dtype": None, "starts_dtype": None}
        made.append(("grouped", plans_products.grouped_matmul(arch, **shape, **more)))
    return {
        (kind, one.program.kernel.name)
        + tuple(item for item in one.program.constants if not decides_not(one, item[0]))
        for kind, launches in made
        for one in launches
    }


def decides_not(launch: Any, name: str) -> bool:
    return launch.program.kernel.name == "matmul_decode" and name in OF_ITEMS


CASES = {
    "portable": ("sm_90a", PLAIN, {"grouped_matmul_sm80", "matmul_sm80"}),
    "portable, few products": (
        "sm_80",
        {**PLAIN, "columns": 16, "depth": 32},
        {"grouped_matmul_sm80", "matmul_sm80"},
    ),
    "quantised result": (
        "sm_90a",
        {**PLAIN, "out_dtype": "nvfp4", "out_layout": "tcgen", "aligned": False},
        {"grouped_matmul_naive", "matmul_naive"},
    ),
    "few columns": ("sm_90a", PREPARED, {"matmul_decode", "matmul_sm90"}),
    "many columns": ("sm_90a", {**PREPARED, "columns": 1 << 16}, {"matmul_sm90"}),
    "fp8, few columns": ("sm_90a", FP8, {"matmul_decode", "matmul_sm90"}),
    "fp8": ("sm_90a", {**FP8, "columns": 1 << 16}, {"matmul_sm90"}),
    "float16": ("sm_90a", {**PREPARED, "a_dtype": "float16"}, {"matmul_decode", "matmul_sm90"}),
    "before Hopper": ("sm_89", {**PREPARED, "columns": 1 << 16}, {"matmul_decode"}),
    "tensor memory": ("sm_100a", QUANTIZED, {"matmul_sm100", "grouped_matmul_sm100"}),
    "scaled": ("sm_120a", QUANTIZED, {"matmul_sm120", "grouped_matmul_sm120"}),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_do_not_depend_on_rows(name: str) -> None:
    arch, facts, kernels = CASES[name]
    first = planned(arch, ALL_ROWS[0], **facts)
    each = {kind: [one for one in first if one[0] == kind] for kind in ("dense", "grouped")}
    narrow = 2 if "fp8" in facts.values() else 1  # kernels of a product
    assert all(len(made) in (1, narrow) for made in each.values())
    assert {kernel for _, kernel, *_ in first} == kernels
    for rows in ALL_ROWS[1:]:
        assert planned(arch, rows, **facts) == first


def test_without_it_plans_depend_on_rows() -> None:
    for arch, facts, _ in CASES.values():
        usual = {**facts, "batch_invariant": False}
        made = [planned(arch, rows, **usual) for rows in ALL_ROWS]
        if facts.get("out_dtype") is None:
            assert any(one != made[0] for one in made) or arch == "sm_89"


def test_teams_are_those_of_columns_and_depth() -> None:
    teams = [plans_prepared.invariant_team(*shape) for shape in
             ((8192, 8192), (16384, 8192), (1024, 1024), (1024, 512), (1024, 448))]  # fmt: skip
    assert teams == [8, 4, 4, 2, 1]


# Refusals ----------------------------------------------------------------------------------------


def moved(array: Any, off: int) -> Any:
    memory = aligned(np.zeros(array.nbytes + off, np.uint8))
    made = memory[off:].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


@pytest.mark.parametrize("prepared", [False, True])
def test_operands_that_begin_elsewhere_are_refused_by_name(prepared: bool) -> None:
    b = aligned(nvfp4.quantize(normal(8, 32), "mxfp4"))
    b = nvfp4.prepare_weights(b) if prepared else b
    a = moved(normal(3, 32).astype(BF16), 2)
    with nvfp4.simulate(), pytest.raises(ValueError, match="a, its rows, and b must begin"):
        nvfp4.matmul(a, b, batch_invariant=True)
    nvfp4.matmul(a, b, batch_invariant=True)  # the golden model has no kernels


def test_on_tensor_memory_scales_must_be_aligned_too() -> None:
    facts = {**QUANTIZED, "map_alignment": 0}
    with pytest.raises(ValueError, match="scales at multiples of 16"):
        planned("sm_100a", 16, **facts)


@pytest.mark.parametrize("function", [nvfp4.matmul, nvfp4.grouped_matmul])
@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_it_is_true_or_false(function: Callable[..., Any], value: Any) -> None:
    with pytest.raises(TypeError, match="batch_invariant must be True or False"):
        function(normal(3, 32).astype(BF16), weights("sm80"), batch_invariant=value)
