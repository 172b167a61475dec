"""Quantisers that make what they quantise give the golden bytes on the simulated machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from nvfp4 import plans, plans_ahead, plans_fused
from nvfp4.api import _repeat, dense
from nvfp4.formats import FORMATS

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
EPS = 1e-5


def data(*shape: int, dtype: str = "bfloat16", seed: int = 0, special: bool = True) -> np.ndarray:
    """Rows of very different size; with zeros, NaN, infinities and tiny values in some places."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * rng.choice([1e-3, 1.0, 8.0], size=(*shape[:-1], 1))
    flat = x.reshape(-1)
    if special:
        values = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-38, -1e-7, 300.0, -90.0]
        where = rng.choice(flat.size // 32, size=min(len(values), flat.size // 32), replace=False)
        flat[where * 32 + 5] = values[: len(where)]
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(DTYPES[dtype])


def assert_same(got: Any, expected: Any) -> None:
    """Equal bytes of QTensors, equal values of arrays (NaN as NaN)."""
    if isinstance(expected, tuple):
        assert isinstance(got, tuple) and len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, nvfp4.QTensor):
        assert (got.shape, got.format, got.scale_layout) == (
            expected.shape,
            expected.format,
            expected.scale_layout,
        )
        for part in ("codes", "scales", "decode_scale"):
            ours, theirs = np.asarray(getattr(got, part)), np.asarray(getattr(expected, part))
            assert ours.shape == theirs.shape, part
            np.testing.assert_array_equal(ours, theirs, err_msg=part)
    else:
        assert got.dtype == expected.dtype and got.shape == expected.shape
        wide = [np.asarray(a).astype(np.float32) for a in (got, expected)]
        np.testing.assert_array_equal(*wide)
        sign = [np.signbit(a) & ~np.isnan(a) for a in wide]
        np.testing.assert_array_equal(*sign)


def check(call: Callable[[], Any], **machine: Any) -> None:
    """The kernels give what the golden model gives."""
    expected = call()
    with nvfp4.simulate(**machine):
        got = call()
    assert_same(got, expected)


def forget_plans() -> None:
    """Let every plan be made anew, also of calls that are remembered."""
    for plan in (plans_fused.fused_quantize, plans_fused.grouped_fused_quantize, plans.quantize):
        plan.cache_clear()
    dense._dense_call.cache_clear()
    _repeat.forget()


@pytest.fixture(params=["a row a block", "a row ahead"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whether dense calls take ``kernels.fused_ahead``, however small they are, or never."""
    enough = 0 if request.param == "a row ahead" else 1 << 62
    monkeypatch.setattr(plans_ahead, "_ENOUGH", dict.fromkeys(plans_ahead._ENOUGH, enough))
    forget_plans()
    yield request.param
    forget_plans()


#: For tests that change how a block's rows are divided, and for calls that have one way.
A_ROW_A_BLOCK = pytest.mark.parametrize("way", ["a row a block"], indirect=True)


@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_and_norms_of_every_format_dtype_and_layout(
    dtype: str, format: str, layout: str
) -> None:
    options: Any = {"scale_layout": layout, "return_hidden": True}
    x = data(5, 192, dtype=dtype)
    check(lambda: nvfp4.swiglu_quantize(x, format, **options))
    more = {"halves": "interleaved", "kind": "gpt-oss", **options}
    check(lambda: nvfp4.swiglu_quantize(x, format, **more))
    weight = data(192, dtype=dtype, seed=1, special=False)
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, format, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("halves", ["split", "interleaved"])
@pytest.mark.parametrize("kind", ["silu", "gpt-oss"])
def test_every_special_value_meets_every_other_one(kind: str, halves: str, dtype: str) -> None:
    values = [0.0, -0.0, 1.0, -1.0, 7.0, -7.0, 7.5, -8.0, 40.0, 41.0, -62.0, -63.0, -87.5, -104.0]
    values += [-106.0, 3e4, -3e4, np.inf, -np.inf, np.nan, 6e-8, -6e-8, 1e-39, 3e38, -3e38, 88.0]
    with np.errstate(over="ignore", under="ignore"):
        one = np.array([*values, *values[:6]]).astype(DTYPES[dtype])
    gates, ups = (a.reshape(-1, 64) for a in np.meshgrid(one, one, indexing="ij"))
    x = np.concatenate([gates, ups], 1)
    if halves == "interleaved":
        x = np.stack([gates, ups], 2).reshape(len(gates), 128)
    check(
        lambda: nvfp4.swiglu_quantize(x, "nvfp4", kind=kind, halves=halves, return_hidden=True)[1]
    )


@A_ROW_A_BLOCK
@pytest.mark.parametrize("per", [1, 2, 3, 4])
@pytest.mark.parametrize("columns", [2880, 4096 + 64])
def test_a_norm_has_one_value_however_many_threads_share_a_row(
    columns: int, per: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans_fused, "_split", lambda pieces, most, work: (per, per))
    x, weight = data(1, columns), data(columns, seed=1, special=False)
    options: Any = {"scale_layout": "linear", "return_hidden": True}
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, "nvfp4", **options))


@A_ROW_A_BLOCK
@pytest.mark.parametrize("held", [1 << 20, 0])
@pytest.mark.parametrize("encode", [None, "row_amax"])
@pytest.mark.parametrize("residual", [False, True])
def test_a_long_row_waits_in_shared_memory_or_is_read_twice(
    residual: bool, encode: str | None, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of two chunks, and threads that do not divide a chunk."""
    monkeypatch.setattr(plans_fused, "_MOST_HELD", held)
    monkeypatch.setattr(plans_fused, "_split", lambda pieces, most, work: (1, 17))
    columns = 1024 * 16 + 96
    x, weight = data(1, columns), data(columns, seed=1, special=False)
    added = data(1, columns, seed=2, special=False) if residual else None

    def call() -> Any:
        out = np.empty_like(x) if residual else None
        made = nvfp4.rmsnorm_quantize(
            x, weight, EPS, "nvfp4", residual=added, residual_out=out, encode_scale=encode,
            scale_layout="linear", return_hidden=True,
        )  # fmt: skip
        return made if out is None else (*made, out)

    check(call)


@pytest.mark.parametrize("kind", ["swiglu", "rmsnorm", "plain"])
@pytest.mark.parametrize(
    "encode",
    [np.float32(3e38), np.array(7.0, np.float32), "row", "batch", "amax", "row_amax"],
)
def test_encode_scales(encode: Any, kind: str) -> None:
    x = data(2, 3, 128, special=False)
    scale = encode
    if isinstance(encode, str) and encode in ("row", "batch"):
        shape = (2, 3, 1) if encode == "row" else (2,)
        scale = np.linspace(0.3, 900.0, int(np.prod(shape))).astype(np.float32).reshape(shape)
    counts = np.array([2, 3], np.int32)
    options: Any = {"encode_scale": scale, "row_counts": counts}
    if kind == "swiglu":
        check(lambda: nvfp4.swiglu_quantize(x, "nvfp4", **options))
    elif kind == "plain":
        check(lambda: nvfp4.quantize(x, "nvfp4", **options))
    else:
        weight = np.ones(128, np.float32)
        check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, "nvfp4", **options))


@pytest.mark.parametrize("rounding", ["floor", "ceil", "even"])
def test_roundings(rounding: str) -> None:
    x = data(3, 128)
    check(lambda: nvfp4.swiglu_quantize(x, "mxfp4", scale_rounding=rounding))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("layout", ["tcgen", "linear"])
def test_rows_beyond_the_counts_are_zero(layout: str, format: str) -> None:
    dtype = np.int64 if layout == "linear" else np.int32
    counts = np.array([0, 3], dtype)
    x = data(2, 3, 64, special=False)
    for e, count in enumerate(counts):
        x[e, count:] = np.nan
    weight = np.ones(64, x.dtype)
    options: Any = {"row_counts": counts, "scale_layout": layout}
    check(lambda: nvfp4.quantize(x, format, **options))
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, format, return_hidden=True, **options))
    check(
        lambda: nvfp4.swiglu_quantize(
            np.concatenate([x, x], -1), format, return_hidden=True, **options
        )
    )
    clean = np.where(np.isnan(x), 0, x).astype(x.dtype)
    with nvfp4.simulate():
        got = nvfp4.quantize(x, format, **options)
    assert_same(got, nvfp4.quantize(clean, format, scale_layout=layout))


def test_counts_that_no_host_looked_at_are_kept_within_the_capacity() -> None:
    """Launched by hand: on a card nobody reads them before the kernel."""
    from nvfp4 import launch
    from nvfp4.arrays import as_array

    x = data(3, 2, 64, special=False)
    counts = np.array([-5, 1 << 30, 1], np.int32)
    expected = nvfp4.quantize(x, "nvfp4", row_counts=np.array([0, 2, 1]))
    out = nvfp4.quantize(x, "nvfp4")
    names = ("weight", "residual", "residual_out", "hidden", "row_offsets", "expert_ids")
    buffers: dict[str, Any] = dict.fromkeys((*names, "row_indices", "tile_starts", "encode_scale"))
    arrays = {"x": x, "row_counts": counts, "codes": out.codes, "scales": out.scales}
    arrays["decode_scale"] = out.decode_scale
    buffers |= {name: as_array(array, name) for name, array in arrays.items()}
    launches = plans.fused_quantize(
        "sm_90a", front="plain", format="nvfp4", dtype="bfloat16", rows=2, columns=64, batches=3,
        row_stride=64, batch_stride=128, scale_layout="tcgen", scale_rounding="rceil",
        encode="none", counts_dtype="int32",
    )  # fmt: skip
    with nvfp4.simulate() as machine:
        launch.run(launches, buffers, machine=machine)
    assert_same(out, expected)


OFFSETS = np.array([0, 3, 3, 33, 40], np.int64)
INDICES = np.random.default_rng(3).integers(-2, 12, 42)
IDS = np.array([2, 0, -1, 1])


@A_ROW_A_BLOCK
@pytest.mark.parametrize("layout", ["tcgen", "linear"])
@pytest.mark.parametrize(
    "encode", [None, np.array([0.5, 2.0, 3.0], np.float32), "row_amax", "row"], ids=str
)
@pytest.mark.parametrize("front", ["swiglu", "rmsnorm"])
def test_ranges(front: str, encode: Any, layout: str) -> None:
    x = data(10, 128)
    if isinstance(encode, str) and encode == "row":
        encode = np.linspace(0.1, 9.0, 42).astype(np.float32)[:, None]
    options: Any = {
        **{"row_offsets": OFFSETS, "row_indices": INDICES, "expert_ids": IDS},
        **{"encode_scale": encode, "scale_layout": layout, "return_hidden": True},
    }
    if front == "swiglu":
        check(lambda: nvfp4.swiglu_quantize(x, "nvfp4", kind="gpt-oss", **options))
        return
    weight, added = np.ones(128, np.float32), data(10, 128, seed=9)

    def call() -> Any:
        out = np.full((42, 128), 7, x.dtype)
        made = nvfp4.rmsnorm_quantize(
            x, weight, EPS, "nvfp4", residual=added, residual_out=out, **options
        )
        return *made, out

    check(call)


@A_ROW_A_BLOCK
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_ranges_may_say_where_their_tiles_begin(format: str) -> None:
    x = data(12, 256)
    offsets = np.array([0, 4, 4, 9], np.int32)
    starts = np.array([3, 0, 1], np.uint32)

    def call() -> Any:
        codes = np.full((12, 64 if format != "mxfp8" else 128), 0xAA, np.uint8)
        k_tiles = 2 if format == "nvfp4" else 1
        scales = np.full((5, k_tiles, 32, 4, 4), 0xAA, np.uint8)
        decode = np.full(3, np.nan, np.float32)
        out = nvfp4.QTensor.from_parts(
            codes, scales, format, decode_scale=decode, groups=offsets, tile_starts=starts
        )
        return nvfp4.swiglu_quantize(x, format, row_offsets=offsets, out=out)

    check(call)


def test_no_rows_no_ranges_and_no_columns() -> None:
    weight = np.ones(64, np.float32)
    empty = np.zeros((0, 64), np.float32)
    check(lambda: nvfp4.rmsnorm_quantize(empty, weight, EPS, "nvfp4", return_hidden=True))
    offsets = np.array([0], np.int32)
    x = data(3, 64, dtype="float32")
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, "nvfp4", row_offsets=offsets))
    none = np.zeros(5, np.int64)
    check(lambda: nvfp4.swiglu_quantize(empty, "nvfp4", row_offsets=none))
    check(lambda: nvfp4.quantize(empty[None], "nvfp4", row_counts=np.zeros(1, np.int32)))
    check(lambda: nvfp4.quantize(np.zeros((0, 4, 64), np.float32), "nvfp4", row_counts=none[:0]))
    check(lambda: nvfp4.swiglu_quantize(np.zeros((3, 0), np.float16), "mxfp8", return_hidden=True))
    bare = np.zeros((3, 0), np.float16)
    for make in (
        lambda more: nvfp4.rmsnorm_quantize(bare, weight[:0], EPS, "nvfp4", **more),
        lambda more: nvfp4.quantize(bare[None], "nvfp4", row_counts=none[:1] + 3, **more),
    ):
        check(functools.partial(make, {"encode_scale": "row_amax"}))
        check(functools.partial(make, {"scale_layout": "linear"}))
    check(lambda: nvfp4.rmsnorm_quantize(bare, weight[:0], 0, "mxfp8", row_offsets=offsets))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_rows_may_lie_apart_and_anywhere(format: str, dtype: str) -> None:
    wide = data(6, 200, dtype=dtype, special=False)
    x = wide[::2, 3:131]
    weight = data(300, dtype=dtype, seed=4, special=False)[1:129]
    options: Any = {"return_hidden": True}
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, format, **options))
    check(lambda: nvfp4.swiglu_quantize(x, format, kind="gpt-oss", **options))
    every_other = wide[:, ::2][:, :64]
    check(lambda: nvfp4.swiglu_quantize(every_other, format, **options))


@A_ROW_A_BLOCK
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_residual_may_be_replaced_by_the_sum(in_place: bool, dtype: str) -> None:
    x = data(3, 160, dtype=dtype, seed=5)
    weight = data(160, dtype=dtype, seed=6, special=False)

    def call() -> Any:
        residual = data(3, 160, dtype=dtype, seed=7)
        out = residual if in_place else np.full_like(residual, 3)
        normed = np.full_like(residual, 3)
        q = nvfp4.rmsnorm_quantize(
            x, weight, EPS, "nvfp4", residual=residual, residual_out=out, norm_out=normed
        )
        return q, out, normed

    check(call)


@A_ROW_A_BLOCK
@pytest.mark.parametrize("encode", ["amax", "row_amax"])
def test_a_residual_is_added_once_though_the_maximum_is_found_first(encode: str) -> None:
    x, weight = data(4, 96, special=False), np.ones(96, np.float32)

    def call() -> Any:
        residual = data(4, 96, seed=7, special=False)
        q = nvfp4.rmsnorm_quantize(
            x, weight, EPS, "nvfp4", residual=residual, residual_out=residual, encode_scale=encode
        )
        return q, residual

    check(call)


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_warps_gives_the_same(seed: int) -> None:
    x, weight = data(130, 640), np.ones(640, np.float32)
    options: Any = {"encode_scale": "row_amax", "return_hidden": True}
    check(lambda: nvfp4.rmsnorm_quantize(x[:9], weight, EPS, "nvfp4", **options), schedule=seed)
    check(lambda: nvfp4.swiglu_quantize(x, "mxfp4"), schedule=seed)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_other_architectures_have_the_same_bytes(arch: str) -> None:
    x, weight = data(3, 128), np.ones(128, np.float32)
    check(lambda: nvfp4.swiglu_quantize(x, "nvfp4"), arch=arch)
    check(lambda: nvfp4.rmsnorm_quantize(x, weight, EPS, "mxfp8", return_hidden=True), arch=arch)


def test_rows_of_the_input_may_go_backwards() -> None:
    x, weight = data(2, 3, 128)[:, ::-1], np.ones(128, np.float32)
    counts, offsets = np.array([3, 2], np.int32), np.array([0, 2, 3], np.int32)
    options: Any = {"scale_layout": "linear"}
    check(lambda: nvfp4.quantize(x, "nvfp4", row_counts=counts, **options))
    check(lambda: nvfp4.swiglu_quantize(x, "mxfp8", row_counts=counts, **options))
    check(lambda: nvfp4.rmsnorm_quantize(x[0], weight, EPS, "nvfp4", **options))
    check(lambda: nvfp4.swiglu_quantize(x[0], "mxfp4", row_offsets=offsets, **options))


@A_ROW_A_BLOCK
def test_rows_and_strides_of_four_gigabytes_have_wide_arithmetic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts: Any = {
        "front": "silu", "format": "nvfp4", "dtype": "bfloat16", "columns": 64, "batches": 1,
        "batch_stride": 0, "scale_layout": "tcgen", "scale_rounding": "rceil", "encode": "none",
        "counts_dtype": None,
    }  # fmt: skip

    def wide(**more: int) -> bool:
        (launch,) = plans.fused_quantize("sm_90a", **facts, **more)
        return bool(dict(launch.program.constants)["WIDE"])

    assert not wide(rows=1 << 20, row_stride=128)
    assert wide(rows=1 << 31, row_stride=128)
    assert wide(rows=7, row_stride=1 << 31)
    assert wide(rows=7, row_stride=-128)
    monkeypatch.setattr(plans_fused, "_wide", lambda *numbers: True)
    plans_fused.fused_quantize.cache_clear()
    check(lambda: nvfp4.swiglu_quantize(data(5, 128), "nvfp4", return_hidden=True))
