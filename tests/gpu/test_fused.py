"""Quantisers that make what they quantise, on the card: the golden bytes, and h bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4.formats import FORMATS
from tests.kernels.test_fused import way  # noqa: F401

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
EPS = 1e-5


def data(*shape: int, dtype: str = "bfloat16", seed: int = 0) -> np.ndarray:
    """Rows of very different size, with special values in some places."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape, np.float32)
    if len(shape) > 1:
        x *= rng.choice(np.float32([1e-3, 1.0, 8.0]), size=(*shape[:-1], 1))
        values = np.float32([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-38, -1e-7, 300.0, -90.0])
        where = rng.choice(x.size // 64, size=len(values), replace=False)
        x.reshape(-1)[where * 64 + 5] = values
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(DTYPES[dtype])


def assert_same(cupy: Any, got: Any, expected: Any) -> None:
    """Equal bytes of QTensors; of arrays too, where they are no NaN."""
    if isinstance(expected, tuple):
        assert isinstance(got, tuple) and len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(cupy, one, other)
    elif isinstance(expected, nvfp4.QTensor):
        assert got.shape == expected.shape
        for part in ("codes", "scales", "decode_scale"):
            ours, theirs = cupy.asnumpy(getattr(got, part)), getattr(expected, part)
            assert ours.shape == theirs.shape
            assert ours.tobytes() == theirs.tobytes(), part
    else:
        ours = cupy.asnumpy(got)
        assert ours.dtype == expected.dtype and ours.shape == expected.shape
        kind = {2: np.uint16, 4: np.uint32}[ours.dtype.itemsize]
        wide = ours.astype(np.float32), expected.astype(np.float32)
        both_nan = np.isnan(wide[0]) & np.isnan(wide[1])
        wrong = (ours.view(kind) != expected.view(kind)) & ~both_nan
        assert not wrong.any(), (np.argwhere(wrong)[:3], ours[wrong][:3], expected[wrong][:3])


def check(cupy: Any, call: Callable[..., Any], *arrays: Any) -> None:
    """`call` of arrays gives the same on the card as on the host."""
    expected = call(np, *[None if a is None else a.copy() for a in arrays])
    got = call(cupy, *[None if a is None else cupy.asarray(a) for a in arrays])
    assert_same(cupy, got, expected)


@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("halves", "kind"), [("split", "silu"), ("interleaved", "gpt-oss")])
def test_activations(
    cupy: Any, halves: str, kind: str, dtype: str, format: str, layout: str
) -> None:
    options: Any = {"halves": halves, "kind": kind, "scale_layout": layout, "return_hidden": True}
    check(
        cupy,
        lambda xp, x: nvfp4.swiglu_quantize(x, format, **options),
        data(300, 5760, dtype=dtype),
    )


@pytest.mark.parametrize("kind", ["silu", "gpt-oss"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_gate_of_sixteen_bits(cupy: Any, dtype: str, kind: str) -> None:
    gates = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype]).reshape(1024, 64)
    for up in (1.0, -3.0, 1e-5):
        x = np.concatenate([gates, np.full_like(gates, up)], 1)
        check(
            cupy,
            lambda xp, x: nvfp4.swiglu_quantize(x, "nvfp4", kind=kind, return_hidden=True),
            x,
        )


@pytest.mark.parametrize("kind", ["silu", "gpt-oss"])
def test_many_gates_of_float32(cupy: Any, kind: str) -> None:
    rng = np.random.default_rng(5)
    patterns = rng.integers(0, 1 << 32, (4096, 1024), np.uint32).view(np.float32)
    usual = rng.uniform(-120, 45, (4096, 1024)).astype(np.float32)
    for x in (patterns, usual):
        check(
            cupy,
            lambda xp, x: nvfp4.swiglu_quantize(x, "mxfp8", kind=kind, return_hidden=True)[1],
            x,
        )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("columns", [768, 2880, 4096, 7168, 24576])
def test_norms(cupy: Any, columns: int, residual: bool, dtype: str, format: str) -> None:
    def call(xp: Any, x: Any, weight: Any, added: Any) -> Any:
        q, h = nvfp4.rmsnorm_quantize(
            x, weight, EPS, format, residual=added, residual_out=added, return_hidden=True
        )
        return (q, h) if added is None else (q, h, added)

    x, weight = data(130, columns, dtype=dtype), data(columns, dtype=dtype, seed=1)
    check(cupy, call, x, weight, data(130, columns, dtype=dtype, seed=2) if residual else None)


@pytest.mark.parametrize("encode", ["amax", "row_amax", 3.0, "row"])
@pytest.mark.parametrize("front", ["silu", "rms", "plain"])
def test_encode_scales_and_counts(cupy: Any, front: str, encode: Any) -> None:
    counts = np.array([40, 0, 17, 64], np.int32)
    scale = np.linspace(0.3, 900.0, 4 * 64, dtype=np.float32).reshape(4, 64, 1)
    weight = np.ones(1024, np.float32)

    def call(xp: Any, x: Any, counts: Any, scale: Any, weight: Any) -> Any:
        options = {
            "row_counts": counts,
            "encode_scale": scale if isinstance(encode, str) and encode == "row" else encode,
        }
        if front == "silu":
            return nvfp4.swiglu_quantize(x, "nvfp4", return_hidden=True, **options)
        if front == "rms":
            return nvfp4.rmsnorm_quantize(x, weight, EPS, "nvfp4", return_hidden=True, **options)
        return nvfp4.quantize(x, "nvfp4", **options)

    rng = np.random.default_rng(1)
    x = rng.standard_normal((4, 64, 1024), np.float32).astype(ml_dtypes.bfloat16)
    check(cupy, call, x, counts, scale, weight)


def test_counts_on_the_card_are_kept_within_the_capacity(cupy: Any) -> None:
    x = data(3, 40, 256)
    expected = nvfp4.quantize(x, "nvfp4", row_counts=np.array([0, 40, 7]))
    counts = cupy.asarray(np.array([-5, 1 << 30, 7], np.int32))
    assert_same(cupy, nvfp4.quantize(cupy.asarray(x), "nvfp4", row_counts=counts), expected)


@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("front", ["gpt-oss", "rms"])
def test_ranges(cupy: Any, front: str, format: str, layout: str) -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(0, 300, 40)
    lengths[[3, 17]] = 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = int(offsets[-1]) + 9
    indices = rng.integers(-3, 505, rows)
    ids = rng.integers(-1, 32, 40).astype(np.int32)
    scale = rng.uniform(0.5, 90, 32).astype(np.float32)

    def call(xp: Any, x: Any, offsets: Any, indices: Any, ids: Any, scale: Any, w: Any) -> Any:
        options: Any = {
            **{"row_offsets": offsets, "row_indices": indices, "expert_ids": ids},
            **{"encode_scale": scale, "scale_layout": layout, "return_hidden": True},
        }
        if front == "rms":
            return nvfp4.rmsnorm_quantize(x, w, EPS, format, **options)
        return nvfp4.swiglu_quantize(x, format, kind=front, **options)

    weight = np.ones(2048, np.float32)
    check(cupy, call, data(500, 2048), offsets, indices, ids, scale, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_lie_apart_and_off_a_multiple_of_sixteen_bytes(cupy: Any, dtype: str) -> None:
    def call(xp: Any, wide: Any, weight: Any) -> Any:
        x = wide[::2, 3:515]
        return (
            nvfp4.swiglu_quantize(x, "nvfp4", return_hidden=True),
            nvfp4.rmsnorm_quantize(x, weight[1:513], EPS, "mxfp4", return_hidden=True),
            nvfp4.rmsnorm_quantize(x[::-1], weight[1:513], EPS, "mxfp4"),
            nvfp4.swiglu_quantize(x[::-1], "mxfp8", return_hidden=True),
        )

    check(cupy, call, data(90, 600, dtype=dtype), data(600, dtype=dtype, seed=3))


OFFSETS = np.array([0, 130, 130, 190], np.int32)


def calls(x: Any, gate_up: Any, weight: Any, residual: Any, counts: Any, outs: Any) -> Any:
    """A call of each quantiser, without allocation."""
    a, b, c, d, e, f, normed, summed = outs
    nvfp4.swiglu_quantize(gate_up, "nvfp4", out=a)
    nvfp4.rmsnorm_quantize(
        x, weight, EPS, "mxfp8", residual=residual, residual_out=summed, norm_out=normed, out=b
    )
    nvfp4.quantize(x[None], "nvfp4", row_counts=counts, encode_scale="amax", out=c)
    nvfp4.quantize(x, "mxfp4", out=d)
    nvfp4.quantize(residual, "nvfp4", encode_scale="amax", out=e)
    nvfp4.grouped_quantize(x, "nvfp4", row_offsets=f.groups, out=f)
    return outs


def arrays_of(xp: Any, seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    x, gate_up, residual = (
        xp.asarray(rng.standard_normal(shape, np.float32).astype(np.float16))
        for shape in ((200, 1024), (200, 2048), (200, 1024))
    )
    weight = xp.asarray(rng.standard_normal(1024, np.float32))
    counts = xp.asarray(np.array([150], np.int32))
    zero = xp.zeros((200, 1024), np.float16)
    outs = (
        nvfp4.quantize(zero, "nvfp4"),
        nvfp4.quantize(zero, "mxfp8"),
        nvfp4.quantize(zero[None], "nvfp4", encode_scale="amax"),
        nvfp4.quantize(zero, "mxfp4"),
        nvfp4.quantize(zero, "nvfp4", encode_scale="amax"),
        nvfp4.grouped_quantize(zero, "nvfp4", row_offsets=xp.asarray(OFFSETS)),
        xp.zeros_like(zero),
        xp.zeros_like(zero),
    )
    return x, gate_up, weight, residual, counts, outs


def test_a_captured_graph_gives_the_same_bytes_again(cupy: Any) -> None:
    expected = calls(*arrays_of(np, 1))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        arguments = arrays_of(cupy, 1)
        calls(*arguments)  # everything is compiled and loaded
        for out in arguments[-1][:6]:
            out.codes.fill(0xAA)
            out.scales.fill(0xAA)
        pool = cupy.get_default_memory_pool()
        before = pool.used_bytes()
        stream.begin_capture()
        calls(*arguments)
        graph = stream.end_capture()
        assert pool.used_bytes() == before
        for _ in range(2):
            graph.launch(stream)
            stream.synchronize()
            assert_same(cupy, arguments[-1], expected)


def test_two_streams_at_once_do_not_disturb_each_other(cupy: Any) -> None:
    expected = [calls(*arrays_of(np, seed)) for seed in (1, 2)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    arguments = []
    for seed, stream in enumerate(streams, 1):
        with stream:
            arguments.append(arrays_of(cupy, seed))
        stream.synchronize()
    for _ in range(20):
        for stream, some in zip(streams, arguments, strict=True):
            with stream:
                calls(*some)
    for stream, some, right in zip(streams, arguments, expected, strict=True):
        stream.synchronize()
        assert_same(cupy, some[-1], right)


def chain(xp: Any, rows: int, columns: int, steps: int) -> Any:
    """Norms that replace what the quantiser ahead has read, each behind the other."""
    rng = np.random.default_rng(4)
    x, residual = (
        xp.asarray(rng.standard_normal((rows, columns), np.float32).astype(np.float16))
        for _ in range(2)
    )
    weight, normed = xp.asarray(np.ones(columns, np.float32)), xp.zeros_like(x)
    made = nvfp4.quantize(normed, "mxfp8")
    outs = tuple(nvfp4.quantize(normed, "nvfp4") for _ in range(steps))
    for out in outs:
        nvfp4.rmsnorm_quantize(
            x, weight, EPS, "mxfp8",
            residual=residual, residual_out=residual, norm_out=normed, out=made,
        )  # fmt: skip
        nvfp4.quantize(normed, "nvfp4", out=out)
    return *outs, made, normed, residual


@pytest.mark.parametrize("rows", [4, 1000])
def test_a_chain_of_quantisers_reads_what_the_ones_ahead_wrote(cupy: Any, rows: int) -> None:
    """Programmatic launches: the third may start while the first still reads what both read."""
    expected = chain(np, rows, 1024, 12)
    for _ in range(3):
        assert_same(cupy, chain(cupy, rows, 1024, 12), expected)
