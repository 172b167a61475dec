"""Modular's functions on GPU arrays: streams, allocations, launches; no data is read back.

The card is pretended: kernels run on the simulated machine, over the memory of stubs of CuPy and
PyTorch, which have no way to read that memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import plans
from nvfp4.compat import modular
from nvfp4.compat.modular import _tensors
from tests.api import stubs
from tests.api.conftest import Card, card, cupy, torch  # noqa: F401
from tests.kernels.simulated import Simulated

from .modular_cases import BF16, E4M3, E8M0, POISON, empty, expected, rows_of, same, tiled


@pytest.fixture(autouse=True)
def not_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card without a driver captures nothing; no scalar is kept from another test."""
    monkeypatch.setattr(_tensors, "_capturing", lambda *_: False)
    monkeypatch.setattr(_tensors, "_ones", {})


@pytest.fixture
def gpu(card: Card) -> Card:  # noqa: F811
    """The pretended card, whose kernels run."""
    card.simulate = True
    return card


def there(array: np.ndarray) -> stubs.CupyArray:
    return stubs.CupyArray(np.array(array))


def poison(*shape: int) -> stubs.CupyArray:
    return stubs.CupyArray(np.full(shape, POISON, np.uint8))


def kernels_of(card: Card) -> list[str]:  # noqa: F811
    return [one.program.kernel.name for launches, *_ in card.outcomes for one in launches]


def test_a_quantiser_writes_the_callers_arrays_in_one_launch(gpu: Card, cupy: Any) -> None:  # noqa: F811
    x = rows_of(1, 5, 64)
    output, scales = poison(5, 32), poison(1, 1, 32, 4, 4)
    q = modular.quantize_dynamic_block_scaled(output, scales, there(x), 0.43, SF_VECTOR_SIZE=16)
    codes, blocks = expected(x, "nvfp4", np.float32(0.43))
    same(output.values, codes)
    same(scales.values, tiled(blocks))
    assert type(q.codes) is stubs.CupyArray
    assert q.decode_scale.values == np.float32(1) / np.float32(0.43)
    assert len(kernels_of(gpu)) == 1
    # The decode scale, and nothing else.
    assert [shape for shape, *_ in cupy.allocated] == [()]


@pytest.mark.parametrize("given", [77, "object"])
def test_ctx_is_the_stream_of_launches_and_of_what_is_allocated(
    gpu: Card,
    cupy: Any,  # noqa: F811
    given: Any,
) -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    ctx = Stream() if given == "object" else given
    x = there(rows_of(2, 5, 64).astype(np.float16))
    output, scales, c = poison(5, 32), poison(1, 1, 32, 4, 4), there(np.zeros((5, 5), np.float32))
    one, size = {"SF_VECTOR_SIZE": 16}, 64
    modular.quantize_dynamic_scaled_fp4fp8(ctx, output, scales, x, size, size)
    modular.block_scaled_matmul(c, output, output, scales, scales, 1.0, ctx, **one)
    linear = poison(5, 2)
    modular.quantize_mx_amd(ctx, output, linear, x)
    modular.matmul_dynamic_block_scaled_amd(c, output, output, linear, linear, ctx)
    ranges = [there(np.array(v, np.int32)) for v in ([0, 5], [0], [0])]
    factors = there(np.ones(1, np.float32))
    tiles = poison(2, 1, 32, 4, 4)
    modular.grouped_quantize_dynamic_scaled_fp4_async(
        output, tiles, x, *ranges, factors, ctx, **one
    )
    modular.block_scales_interleave(poison(1, 1, 32, 4, 4), linear, ctx)
    assert len(gpu.outcomes) == 7
    assert {stream for _, _, stream, _ in gpu.outcomes} == {77}
    assert {stream for *_, stream in cupy.allocated} == {77}


def test_tile_starts_are_made_on_the_card(gpu: Card) -> None:
    x = rows_of(3, 160, 64)
    offsets = np.array([0, 130, 130, 150], np.uint32)
    output, scales = poison(160, 32), poison(6, 1, 32, 4, 4)
    modular.grouped_quantize_dynamic_scaled_fp4_async(
        output,
        scales,
        there(x),
        there(offsets),
        there(np.array([3, 0, 1], np.uint32)),
        there(np.array([0, 1, 1], np.int32)),
        there(np.array([0.5, 2], np.float32)),
        SF_VECTOR_SIZE=16,
    )
    assert kernels_of(gpu) == ["seed_tile_starts", "grouped_quantize"]
    codes, blocks = expected(x[:150], "nvfp4", np.repeat(np.array([0.5, 2], "f"), [130, 20]))
    same(output.values[:150], codes)
    assert not output.values[150:].any()
    # 0 + 3 for the first range, 130 // 128 + 1 for the last.
    first = [384 + r for r in range(130)] + [256 + r for r in range(20)]
    same(scales.values, tiled(blocks, 6, first))


def test_without_scales_offsets_there_is_one_launch(gpu: Card) -> None:
    x = rows_of(4, 5, 64)
    output, scales = poison(5, 32), poison(3, 1, 32, 4, 4)
    modular.grouped_quantize_dynamic_scaled_fp4_async(
        output,
        scales,
        there(x),
        there(np.array([0, 2, 5], np.uint32)),
        None,
        there(np.array([1, 0], np.int32)),
        there(np.ones(2, np.float32)),
        SF_VECTOR_SIZE=16,
    )
    assert kernels_of(gpu) == ["grouped_rows"]
    codes, blocks = expected(x, "nvfp4")
    same(output.values, codes)
    same(scales.values, tiled(blocks, 3, [0, 1, 128, 129, 130]))


def test_a_factor_on_the_card_that_cannot_be_used_counts_as_one(gpu: Card) -> None:
    x = rows_of(5, 2, 64)
    output, scales = poison(2, 32), poison(2, 1, 32, 4, 4)
    modular.grouped_quantize_dynamic_scaled_fp4_async(
        output,
        scales,
        there(x),
        there(np.array([0, 1, 2], np.uint32)),
        None,
        there(np.array([0, 1], np.int32)),
        there(np.array([0, np.nan], np.float32)),
        SF_VECTOR_SIZE=16,
    )
    codes, _ = expected(x, "nvfp4")
    same(output.values, codes)


def test_products_allocate_one_scalar_a_stream(gpu: Card, cupy: Any) -> None:  # noqa: F811
    q = nvfp4.quantize(np.ones((4, 64), np.float32), "mxfp4", scale_layout="linear")
    codes, scales = there(q.codes), there(q.scales)
    c = there(np.zeros((4, 4), np.float32))
    for stream in (None, None, 5, 5, None):
        modular.matmul_dynamic_block_scaled_amd(c, codes, codes, scales, scales, stream)
        assert (c.values == 64).all()
        c.values[...] = np.nan
    assert [stream for *_, stream in cupy.allocated] == [0, 5]


@pytest.mark.parametrize("ctx", [None, 9])
def test_a_product_like_one_before_is_found_and_follows_its_arguments(
    gpu: Card,
    cupy: Any,  # noqa: F811
    ctx: Any,
) -> None:
    def operand(value: float, rows: int) -> Any:
        q = nvfp4.quantize(np.full((rows, 64), value, np.float32), "nvfp4")
        return there(q.codes), there(q.scales)

    def double(coords, value):  # type: ignore[no-untyped-def]
        return value + value

    size = {"SF_VECTOR_SIZE": 16}
    (a, a_scales), (b, b_scales), (other, other_scales) = (operand(v, 3) for v in (6, 1.5, 3))
    c, d = (there(np.zeros((3, 3), np.float32)) for _ in range(2))
    for turn in range(3):
        for out, right, right_scales, alpha, value in (
            (c, b, b_scales, 1.0, 576),
            (d, b, b_scales, 1.0, 576),
            (c, other, other_scales, 1.0, 1152),
            (c, b, b_scales, 0.5, 288),
        ):
            out.values[...] = np.nan
            modular.block_scaled_matmul(out, a, right, a_scales, right_scales, alpha, ctx, **size)
            assert (out.values == value).all(), turn
        more = {"elementwise_compute_lambda_fn": double}
        modular.block_scaled_matmul(c, a, b, a_scales, b_scales, 1.0, ctx, **size, **more)
        assert (c.values == 1152).all()
        modular.naive_block_scaled_matmul(
            c, a, b, a_scales, b_scales, ctx, scaling_kind="KIND_MXF4NVF4"
        )
        assert (c.values == 576).all()
    assert {stream for *_, stream, _ in gpu.outcomes} == {ctx or 0}
    # All calls but the first of each kind.
    assert len(gpu.repeated) >= 12
    with pytest.raises(ValueError, match="c_device must have shape"):
        modular.block_scaled_matmul(c[:2], a, b, a_scales, b_scales, 1.0, ctx, **size)
    with pytest.raises(ValueError, match="transpose_b must be True"):
        modular.block_scaled_matmul(
            c, a, b, a_scales, b_scales, 1.0, ctx, transpose_b=False, **size
        )


def test_what_is_allocated_in_a_capture_is_not_kept(
    gpu: Card,
    cupy: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_tensors, "_capturing", lambda *_: True)
    q = nvfp4.quantize(np.ones((4, 64), np.float32), "mxfp4", scale_layout="linear")
    codes, scales = there(q.codes), there(q.scales)
    c = there(np.zeros((4, 4), np.float32))
    for _ in range(2):
        modular.matmul_dynamic_block_scaled_amd(c, codes, codes, scales, scales)
    assert len(cupy.allocated) == 2
    assert not _tensors._ones


def test_tensors_of_float8_are_written_and_read(gpu: Card, torch: stubs.Torch) -> None:  # noqa: F811
    x = rows_of(6, 5, 64)
    pool = [empty((5, 32), np.uint8), empty((1, 1, 32, 4, 4), E4M3), empty((5, 5), BF16)]
    output, scales, c = (stubs.Tensor(torch, array, "cuda:0") for array in pool)
    modular.quantize_dynamic_block_scaled(output, scales, stubs.Tensor(torch, x, "cuda:0"), 1.0)
    codes, blocks = expected(x, "nvfp4")
    same(pool[0], codes)
    same(pool[1], tiled(blocks))
    modular.naive_block_scaled_matmul(
        c, output, output, scales, scales, scaling_kind="KIND_MXF4NVF4"
    )
    q = nvfp4.QTensor.from_parts(pool[0], pool[1], "nvfp4")
    np.testing.assert_array_equal(pool[2], nvfp4.matmul(q, q))
    flat = empty((3,), E8M0)
    tensor = stubs.Tensor(torch, flat, "cuda:0")
    with pytest.raises(TypeError, match="output must be of dtype uint8"):
        modular.quantize_dynamic_block_scaled_mxfp4(tensor, tensor, stubs.Tensor(torch, x, "cuda"))


def test_the_reference_product_is_taken_at_any_size(card: Card) -> None:  # noqa: F811
    n = 512
    codes, scales = poison(n, n // 2), poison(4, 8, 32, 4, 4)
    c = there(np.zeros((n, n), np.float32))
    more = {"SF_VECTOR_SIZE": 16}
    for reference in (True, False):
        if reference:
            modular.naive_block_scaled_matmul(
                c, codes, codes, scales, scales, scaling_kind="KIND_MXF4NVF4", **more
            )
        else:
            modular.block_scaled_matmul(c, codes, codes, scales, scales, 1.0, **more)
        (one,) = plans.matmul(**{**card.facts, "aligned": True})
        assert (one.program.kernel.name == "matmul_naive") is reference


@pytest.mark.parametrize("offsets_dtype", [np.uint32, np.int32, np.int64])
@pytest.mark.parametrize("starts_dtype", [np.uint32, np.int32, np.int64])
def test_the_kernel_of_tile_starts(offsets_dtype: Any, starts_dtype: Any) -> None:
    from tests.kernels.checks import Out

    rng = np.random.default_rng(7)
    offsets = np.sort(rng.integers(0, 1 << 30, 301)).astype(offsets_dtype)
    more = rng.integers(0, 1000, 300).astype(starts_dtype)
    facts = {
        "groups": 300,
        "offsets_dtype": offsets.dtype.name,
        "starts_dtype": more.dtype.name,
    }
    got = Simulated()(
        "seed_tile_starts",
        facts,
        {"row_offsets": offsets, "scales_offsets": more},
        {"tile_starts": Out((300,), np.int64)},
    )
    wanted = offsets[:-1].astype(np.int64) // 128 + more.astype(np.int64)
    np.testing.assert_array_equal(got["tile_starts"], wanted)
