"""NumPy arrays inside ``with nvfp4.simulate()``: the kernels' bytes are the golden model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import launch
from tests.vectorlib import same_values

from . import stubs

RNG = np.random.default_rng(13)
X = RNG.standard_normal((5, 96)).astype(np.float32)
OFFSETS, IDS = np.array([0, 2, 2, 5]), np.array([1, 0, -1])
Q = nvfp4.quantize(X, "mxfp4", scale_layout="linear")


@pytest.fixture
def archs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures of the machines that were launched on."""
    seen: list[str] = []
    run = launch.run

    def noted(launches: Any, buffers: Any, **where: Any) -> None:
        seen.append(where["machine"].arch)
        run(launches, buffers, **where)

    monkeypatch.setattr(launch, "run", noted)
    return seen


WEIGHTS = RNG.standard_normal((3, 32, 96)).astype(np.float32)
B = nvfp4.quantize(WEIGHTS[0], "mxfp8", encode_scale="amax")
STACK = nvfp4.quantize(WEIGHTS, "mxfp4", encode_scale=np.array([1, 2, 3], "f"))
SWIGLU = nvfp4.epilogues.swiglu(1.702, 1.0, 7.0, halves=False)

CALLS: dict[str, Callable[[], Any]] = {
    "quantize": lambda: nvfp4.quantize(X, "nvfp4", encode_scale="amax").codes,
    "grouped_quantize": lambda: (
        nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, expert_ids=IDS).scales
    ),
    "dequantize": lambda: Q.dequantize("float16"),
    "interleave_scales": lambda: nvfp4.interleave_scales(Q.scales),
    "deinterleave_scales": lambda: nvfp4.deinterleave_scales(
        np.full((1, 1, 32, 4, 4), 3, np.uint8), (5, 3)
    ),
    "matmul": lambda: nvfp4.matmul(Q, B, alpha=0.3),
    "matmul of a plain array": lambda: nvfp4.matmul(X.astype(np.float16), B, out_dtype="float32"),
    "matmul, quantised": lambda: nvfp4.matmul(Q, B, out_dtype="nvfp4").codes,
    "grouped_matmul": lambda: nvfp4.grouped_matmul(
        nvfp4.grouped_quantize(X, "mxfp8", row_offsets=OFFSETS),
        STACK,
        row_offsets=OFFSETS,
        expert_ids=IDS,
        alpha=np.array([1, 2, 0.3], np.float32),
        out_dtype="float32",
    ),
}
LAUNCHES = {"grouped_matmul": 2}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_the_kernels_of_the_named_architecture_run(archs: list[str], name: str, arch: str) -> None:
    call, launches = CALLS[name], LAUNCHES.get(name, 1)
    expected = call()
    assert not archs
    with nvfp4.simulate(arch):
        got = call()
    assert archs == [arch] * launches
    assert got.tobytes() == expected.tobytes()
    assert got.dtype == expected.dtype
    call()
    assert len(archs) == launches


def test_the_innermost_machine_is_taken(archs: list[str]) -> None:
    call = CALLS["interleave_scales"]
    with nvfp4.simulate("sm_80"):
        call()
        with nvfp4.simulate("sm_100a"):
            call()
        call()
    call()
    assert archs == ["sm_80", "sm_100a", "sm_80"]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_plain_operand_may_be_any_view(archs: list[str], dtype: Any) -> None:
    a = X.astype(dtype)
    expected = nvfp4.matmul(a, B, out_dtype="float32")
    for seen in (np.repeat(a, 2, axis=0)[::2], np.asfortranarray(a), a[:, ::-1][:, ::-1]):
        with nvfp4.simulate():
            got = nvfp4.matmul(seen, B, out_dtype="float32")
        assert got.tobytes() == expected.tobytes()
    assert len(archs) == 3


@pytest.mark.parametrize("made", [SWIGLU, nvfp4.epilogues.relu2()], ids=["swiglu", "relu2"])
def test_epilogues_run_as_they_are(archs: list[str], made: nvfp4.Epilogue) -> None:
    expected = nvfp4.matmul(Q, B, epilogue=made, out_dtype="float32")
    indices = np.array([4, -1, 0, 1, 9], np.int32)
    options = {"row_offsets": OFFSETS, "row_indices": indices, "epilogue": made}
    grouped = nvfp4.grouped_matmul(Q, STACK, **options)
    with nvfp4.simulate():
        assert (
            nvfp4.matmul(Q, B, epilogue=made, out_dtype="float32").tobytes() == expected.tobytes()
        )
        assert nvfp4.grouped_matmul(Q, STACK, **options).tobytes() == grouped.tobytes()
    assert len(archs) == 2


def test_arrays_of_epilogues_are_read_flat(archs: list[str]) -> None:
    residual = np.asfortranarray(RNG.standard_normal((5, 32)).astype(np.float32))
    epilogue = nvfp4.epilogues.residual_add(residual)
    expected = nvfp4.matmul(Q, B, epilogue=epilogue, out_dtype="float32")
    with nvfp4.simulate():
        got = nvfp4.matmul(Q, B, epilogue=epilogue, out_dtype="float32")
    assert got.tobytes() == expected.tobytes()
    halves = nvfp4.epilogues.bias(np.arange(32).astype(np.float16))
    expected = nvfp4.matmul(Q, B, epilogue=halves, out_dtype="float32")
    with nvfp4.simulate():
        got = nvfp4.matmul(Q, B, epilogue=halves, out_dtype="float32")
    assert got.tobytes() == expected.tobytes()


def test_views_are_read_and_written_as_what_they_show(archs: list[str]) -> None:
    seen = np.asfortranarray(np.repeat(X, 2, axis=0)[::2])
    memory = np.full((5, 60), 0xAA, np.uint8)
    scales = np.full((1, 2, 32, 4, 4), 0xAA, np.uint8)
    expected = nvfp4.quantize(X, "nvfp4")
    with nvfp4.simulate():
        out = nvfp4.QTensor.from_parts(
            memory[:, 6:54], scales, "nvfp4", decode_scale=np.zeros((), np.float32)
        )
        assert nvfp4.quantize(seen, "nvfp4", out=out) is out
        np.testing.assert_array_equal(memory[:, 6:54], expected.codes)
        assert (memory[:, :6] == 0xAA).all()
        assert (memory[:, 54:] == 0xAA).all()
        np.testing.assert_array_equal(scales, expected.scales)
        assert out.decode_scale == 1
        target = np.full((96, 5), np.nan, np.float32).T
        assert out.dequantize(out=target) is target
    assert len(archs) == 2
    assert same_values(np.ascontiguousarray(target), expected.dequantize())


def test_tensors_come_back_as_tensors(archs: list[str], torch: stubs.Torch) -> None:
    expected = nvfp4.quantize(X, "mxfp8")
    with nvfp4.simulate():
        got = nvfp4.quantize(stubs.Tensor(torch, X), "mxfp8")
    assert type(got.codes) is stubs.Tensor
    assert archs == ["sm_90a"]
    np.testing.assert_array_equal(got.codes.values, expected.codes)


def test_empty_arrays_are_legal(archs: list[str]) -> None:
    with nvfp4.simulate():
        for shape in ((0, 64), (5, 0)):
            q = nvfp4.quantize(np.zeros(shape, np.float32), "nvfp4")
            assert q.decode_scale == 1
            assert q.dequantize().shape == shape
        q = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=np.array([0]))
        assert not q.codes.any()
        assert not q.scales.any()
        assert q.decode_scale.shape == (0,)
    assert archs


def test_the_checks_of_arguments_are_the_same(archs: list[str]) -> None:
    with nvfp4.simulate():
        with pytest.raises(ValueError, match=r"multiple of 16"):
            nvfp4.quantize(X[:, :40], "nvfp4")
        with pytest.raises(ValueError, match=r"start at 0"):
            nvfp4.grouped_quantize(X, "nvfp4", row_offsets=np.array([1, 5]))
        with pytest.raises(ValueError, match=r"out.codes must not overlap x"):
            memory = np.zeros(4096, np.uint8)
            x = memory[:1920].view(np.float32).reshape(5, 96)
            codes = memory[:240].reshape(5, 48)
            scales = np.zeros((1, 2, 32, 4, 4), np.uint8)
            nvfp4.quantize(x, "nvfp4", out=nvfp4.QTensor.from_parts(codes, scales, "nvfp4"))
    assert not archs
