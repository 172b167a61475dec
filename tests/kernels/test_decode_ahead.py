"""Products of few rows that begin before the kernels ahead in the stream have ended.

The simulated machine runs one launch after the other. Here what the launch ahead writes is put
where it belongs when the product waits for it: before, there is something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import launch, plans_products, plans_sm90
from nvfp4.program import SimulatorWorld
from nvfp4.ptx.control import griddepcontrol_launch_dependents, griddepcontrol_wait

from .products_sm100 import aligned

BF16 = ml_dtypes.bfloat16


@pytest.fixture(autouse=True)
def decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernel of few rows makes every product; programs are bound anew."""
    monkeypatch.setattr(plans_sm90, "many_rows", lambda **_: 1 << 60)
    kept = (plans_products.matmul, plans_products.grouped_matmul, launch._simulated)
    for cache in kept:
        cache.cache_clear()
    yield
    for cache in kept:
        cache.cache_clear()


def replace(monkeypatch: pytest.MonkeyPatch, instruction: Any, model: Callable[[], None]) -> None:
    """Let the simulated machine run another model of an instruction."""
    usual = SimulatorWorld.instruction

    def of(world: SimulatorWorld, wanted: Any) -> Callable[..., Any]:
        return model if wanted is instruction else usual(world, wanted)

    monkeypatch.setattr(SimulatorWorld, "instruction", of)


def integers(shape: tuple[int, ...], seed: int, dtype: Any = BF16) -> Any:
    rng = np.random.default_rng(seed)
    values = rng.integers(-3, 4, shape) * (rng.random(shape) < 0.5)
    return aligned(values.astype(np.float32).astype(dtype))


def product_that_waits(
    monkeypatch: pytest.MonkeyPatch,
    written: list[np.ndarray],
    before: list[np.ndarray],
    call: Callable[[], Any],
) -> None:
    """Make a call on a simulated machine, of one launch, which waits in every thread.

    From its beginning until a thread has waited, arrays have what is in `before`.
    """
    after = [array.copy() for array in written]
    waits = 0

    def wait() -> None:
        nonlocal waits
        if not waits:
            for array, value in zip(written, after, strict=True):
                array[...] = value
        waits += 1

    replace(monkeypatch, griddepcontrol_wait, wait)
    machine: Any
    with nvfp4.simulate("sm_90a") as machine:
        run = machine.run

        def started(*args: Any, **named: Any) -> Any:
            for array, value in zip(written, before, strict=True):
                array[...] = value
            return run(*args, **named)

        machine.run = started
        call()
    assert waits and waits % 32 == 0


#: Offsets before the wait: of nothing, of rows elsewhere, not ascending, as they will be.
OLD_OFFSETS = [[0, 0, 0, 0], [0, 5, 8, 9], [7, 3, 900, -4], [0, 3, 3, 9]]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("old", OLD_OFFSETS)
def test_ranges_are_those_that_the_kernel_ahead_has_written(
    monkeypatch: pytest.MonkeyPatch, old: list[int], dtype: Any
) -> None:
    offsets = aligned(np.array([0, 3, 3, 9], dtype))
    indices = aligned(np.random.default_rng(3).permutation(9).astype(np.int32))
    a = integers((9, 128), 2)
    b = nvfp4.quantize(integers((3, 40, 128), 1, np.float32), "mxfp4")
    options: dict[str, Any] = {"out_dtype": "float32"}
    expected = nvfp4.grouped_matmul(a, b, row_offsets=offsets, row_indices=indices, **options)
    prepared = nvfp4.prepare_weights(b)
    out = aligned(np.full((9, 40), np.nan, np.float32))

    def call() -> None:
        nvfp4.grouped_matmul(
            a, prepared, row_offsets=offsets, row_indices=indices, out=out, **options
        )

    written = [offsets, indices, a]
    stale = [np.array(old), np.full(9, -1), np.full(a.shape, np.nan)]
    product_that_waits(monkeypatch, written, stale, call)
    assert out.tobytes() == np.asarray(expected).tobytes()


def test_rows_and_factors_are_those_that_the_kernel_ahead_has_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = integers((5, 192), 2)
    alpha = aligned(np.array(0.5, np.float32))
    b = nvfp4.quantize(integers((40, 192), 1, np.float32), "nvfp4")
    expected = nvfp4.matmul(a, b, alpha=alpha, out_dtype="float32")
    prepared = nvfp4.prepare_weights(b)
    scale = np.asarray(prepared.decode_scale)
    out = aligned(np.full((5, 40), np.nan, np.float32))

    def call() -> None:
        nvfp4.matmul(a, prepared, alpha=alpha, out=out, out_dtype="float32")

    written = [a, alpha, scale]
    stale = [np.full(a.shape, np.nan), np.array(np.nan), np.full(scale.shape, np.nan)]
    product_that_waits(monkeypatch, written, stale, call)
    assert out.tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8_e5m2"])
def test_weights_are_whole_before_a_product_of_them_begins(
    monkeypatch: pytest.MonkeyPatch, fmt: str
) -> None:
    """Products read weights without waiting: what prepares them must not let them start early."""

    def refuse() -> None:
        raise AssertionError("a kernel that prepares weights lets others start")

    b = nvfp4.quantize(integers((2, 24, 96), 1, np.float32), fmt)
    replace(monkeypatch, griddepcontrol_launch_dependents, refuse)
    with nvfp4.simulate("sm_90a"):
        nvfp4.prepare_weights(b)
