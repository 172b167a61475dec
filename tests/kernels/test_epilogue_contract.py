"""What an epilogue is promised holds in every kernel of products: what it is given, and when.

Each kernel runs on the simulated machine of an architecture where the plan takes it. All sums, and
all that the epilogues make of them, are integers that float32 holds: one wrong row, column, expert
or array element shows in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import plans_products, plans_sm90
from nvfp4.kernels import KERNELS, variants

BF16 = ml_dtypes.bfloat16
E = 3
OFFSETS = np.array([0, 3, 3, 6], np.int32)
IDS = np.array([2, 0, 1], np.int32)
#: Rows of the result that have an expert, and which; the others are written as 0.
ROWS = np.array([0, 1, 2, 3, 4, 5])
EXPERTS = np.array([2, 2, 2, 1, 1, 1])
M = 8


class Way(NamedTuple):
    """How to have a kernel run.

    kernel
        Its name begins with this.
    arch
    grouped
    quantized
        Whether A is quantised, or plain bfloat16.
    columns
        N: what the kernel's tiles ask for.
    large
        Whether it is for large products.
    prepared
        Whether B is prepared.
    depth
        K.
    """

    kernel: str
    arch: str
    grouped: bool
    quantized: bool
    columns: int = 16
    large: bool = True
    prepared: bool = False
    depth: int = 64


WAYS = [
    Way("matmul_naive", "sm_90a", False, True, large=False),
    Way("grouped_matmul_naive", "sm_90a", True, False, large=False),
    Way("matmul_sm80", "sm_80", False, True),
    Way("matmul_sm80", "sm_80", False, False),
    Way("grouped_matmul_sm80", "sm_80", True, False),
    Way("grouped_matmul_sm80", "sm_80", True, True),
    Way("matmul_sm100", "sm_100a", False, True, 128),
    Way("grouped_matmul_sm100", "sm_100a", True, True, 128),
    Way("matmul_sm120", "sm_120a", False, True),
    Way("grouped_matmul_sm120", "sm_120a", True, True),
    Way("matmul_decode", "sm_90a", False, False, 32, prepared=True),
    Way("matmul_decode", "sm_90a", True, False, 32, prepared=True),
    Way("matmul_sm90", "sm_90a", False, False, 32, prepared=True, depth=192),
    Way("matmul_sm90", "sm_90a", True, False, 32, prepared=True, depth=192),
]
ways = pytest.mark.parametrize(
    "way",
    WAYS,
    ids=lambda way: (
        f"{way.kernel}-{'codes' if way.quantized else 'plain'}{'-groups' * way.grouped}"
    ),
)


@pytest.fixture(autouse=True)
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fast kernels are for large products; here they take small ones, too."""
    planned = (plans_products.matmul, plans_products.grouped_matmul)
    if not hasattr(request.node, "callspec"):
        yield
        return
    way = request.node.callspec.params["way"]
    if way.large:
        monkeypatch.setattr(plans_products, "_FEW_PRODUCTS", 1)
    if way.kernel == "matmul_sm90":
        monkeypatch.setattr(plans_sm90, "many_rows", lambda **_: 0)
    for plan in planned:
        plan.cache_clear()
    yield
    for plan in planned:
        plan.cache_clear()


def integers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """0 and ±3: blocks that nvfp4 holds exactly."""
    rng = np.random.default_rng(seed)
    return (3 * rng.integers(-1, 2, shape) * (rng.random(shape) < 0.3)).astype(np.float32)


def product(
    way: Way, epilogue: Any, out_dtype: Any = "float32"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A simulated product; the sums, [M, N]; and the expert of each row, -1 for none."""
    a = integers(1, (M, way.depth)).astype(BF16)
    stack = integers(2, (E, way.columns, way.depth))
    more: dict[str, Any] = {"epilogue": epilogue, "out_dtype": out_dtype, "alpha": 2.0}
    if way.grouped:
        owner = np.full(M, -1)
        owner[ROWS] = EXPERTS
        left = nvfp4.grouped_quantize(a, "nvfp4", row_offsets=OFFSETS) if way.quantized else a
        right = nvfp4.quantize(stack, "nvfp4")
        more |= {"row_offsets": OFFSETS, "expert_ids": IDS}
        function: Any = nvfp4.grouped_matmul
    else:
        owner = np.zeros(M, int)
        left = nvfp4.quantize(a, "nvfp4") if way.quantized else a
        right = nvfp4.quantize(stack[0], "nvfp4")
        function = nvfp4.matmul
    if way.prepared:
        right = nvfp4.prepare_weights(right)
    names: list[str] = []
    with nvfp4.simulate(way.arch, checks=False) as machine:
        run = machine.run

        def noted(*args: Any, **keywords: Any) -> None:
            names.append(keywords.get("name") or args[0].__name__)
            run(*args, **keywords)

        machine.run = noted  # type: ignore[method-assign]
        got = np.asarray(function(left, right, **more))
    assert [name for name in names if name.startswith(way.kernel)], (way.kernel, names)
    sums = np.stack(
        [
            2 * a[m].astype(np.float64) @ stack[owner[m]].T
            if owner[m] >= 0
            else np.zeros(way.columns)
            for m in range(M)
        ]
    )
    return got, sums, owner


@ways
def test_it_is_given_the_sum_its_place_its_expert_and_its_arrays(way: Way) -> None:
    columns = way.columns
    matrix = integers(3, (M, columns)) * 8
    vector = (integers(4, (columns,)) + 1).astype(BF16)
    number = np.arange(M, dtype=np.int32)[::-1].copy()
    byte = np.array([3, 1, 2], np.uint8)

    def code(value, row, column, expert, matrix, vector, number, byte):  # type: ignore[no-untyped-def]
        place = number[row] * columns + column
        more = np.float32(byte[expert]) * np.float32(0.25)
        return (
            value
            + matrix[row * columns + column]
            + vector[column] * np.float32(0.5)
            + np.float32(place * 128)
            + more
        )

    arrays = (matrix, vector, number, byte)
    got, sums, owner = product(way, nvfp4.Epilogue(code, *arrays))
    place = number[:, None] * columns + np.arange(columns)
    wanted = sums + matrix + vector.astype(float) * 0.5 + place * 128 + byte[owner][:, None] * 0.25
    wanted[owner < 0] = 0
    np.testing.assert_array_equal(got, wanted)


@ways
@pytest.mark.parametrize("halves", [True, False])
def test_pairs_are_two_columns_and_the_column_is_that_of_the_result(way: Way, halves: bool) -> None:
    half = way.columns // 2

    def code(gate, up, row, column, expert):  # type: ignore[no-untyped-def]
        place = np.float32((row * half + column) * 256) + np.float32(expert) * np.float32(0.25)
        return gate + up * np.float32(0.0078125) + place

    got, sums, owner = product(way, nvfp4.Epilogue(code, pair=True, halves=halves))
    assert got.shape == (M, half)
    gate, up = (sums[:, :half], sums[:, half:]) if halves else (sums[:, 0::2], sums[:, 1::2])
    wanted = gate + up / 128 + (np.arange(M)[:, None] * half + np.arange(half)) * 256
    wanted = wanted + owner[:, None] * 0.25
    wanted[owner < 0] = 0
    np.testing.assert_array_equal(got, wanted)


@ways
def test_it_comes_before_the_cast_and_once(way: Way) -> None:
    def step(value, row, column, expert):  # type: ignore[no-untyped-def]
        return np.float32(1) + (value + np.float32(column % 5)) * np.float32(2.0**-9)

    got, sums, owner = product(way, step, "bfloat16")
    exact = 1 + (sums + np.arange(way.columns) % 5) * 2.0**-9
    wanted = exact.astype(np.float32).astype(BF16)
    wanted[owner < 0] = 0
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("way", [way for way in WAYS if way.grouped], ids=lambda way: way.kernel)
def test_rows_without_an_expert_are_zero_whatever_it_returns(way: Way) -> None:
    def infinite(value, row, column, expert):  # type: ignore[no-untyped-def]
        return value + np.float32(np.inf)

    got, _, owner = product(way, infinite, "float16")
    assert np.isposinf(got[owner >= 0]).all()
    assert (got[owner < 0].view(np.uint16) == 0).all()
    assert (owner < 0).any()


@pytest.mark.parametrize(
    "way",
    [way._replace(columns=48) for way in WAYS if way.prepared],
    ids=lambda way: f"{way.kernel}-48{'-groups' * way.grouped}",
)
def test_halves_that_a_kernel_of_prepared_weights_cannot_pair_are_refused(way: Way) -> None:
    with pytest.raises(nvfp4.UnsupportedError, match=r"multiple of 32.*got 48.*halves=False"):
        product(way, nvfp4.epilogues.swiglu())


# Names that kernels' modules use for constants and functions of their own.
SCALE = np.float32(4)
THREADS = np.float32(0.25)


def epilogue(value):  # type: ignore[no-untyped-def]
    return value * SCALE


def uses_taken_names(value, row, column, expert):  # type: ignore[no-untyped-def]
    return epilogue(value) + THREADS


@ways
def test_names_in_its_code_are_its_own(way: Way) -> None:
    got, sums, owner = product(way, uses_taken_names)
    wanted = sums * 4 + 0.25
    wanted[owner < 0] = 0
    np.testing.assert_array_equal(got, wanted)


def test_no_kernel_with_an_epilogue_is_missing_above() -> None:
    calling = {
        name
        for name, kernel in KERNELS.items()
        for function in variants(kernel)[0].sources()
        if {"epilogue", "pair_epilogue"} & set(function.__code__.co_names)
    }
    missing = {name for name in calling if not any(name.startswith(way.kernel) for way in WAYS)}
    assert calling
    assert not missing, "give each of these kernels a Way, so that the promises are tested there"
