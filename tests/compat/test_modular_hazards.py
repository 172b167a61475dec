"""What the seed's code gets wrong or leaves open, by the numbers of its list, and is right here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import compile as compiler
from nvfp4 import plans
from nvfp4.compat import modular
from nvfp4.golden import encode_e4m3

from .modular_cases import (
    BF16,
    E4M3,
    E8M0,
    PLACES,
    at,
    empty,
    expected,
    outputs,
    rows_of,
    same,
    tiled,
)

places = pytest.mark.parametrize("place", PLACES)
SIXTH = np.float32(1) / np.float32(6)


def by_dispatcher(x: np.ndarray, format: str, factor: float) -> tuple[np.ndarray, np.ndarray]:
    output, scales = outputs(format, *x.shape)
    modular.quantize_dynamic_block_scaled(output, scales, x, factor)
    return output, scales


def by_fp4fp8(x: np.ndarray, format: str, factor: float) -> tuple[np.ndarray, np.ndarray]:
    output, scales = outputs(format, *x.shape)
    size = 16 if format == "nvfp4" else 32
    columns = x.shape[1]
    modular.quantize_dynamic_scaled_fp4fp8(
        None, output, scales, x, columns, columns, factor, SF_VECTOR_SIZE=size
    )
    return output, scales


def by_async(x: np.ndarray, format: str, factor: float) -> tuple[np.ndarray, np.ndarray]:
    output, scales = outputs(format, *x.shape)
    modular.quantize_dynamic_scaled_fp4_async(None, output, scales, x, factor)
    return output, scales


def by_groups(x: np.ndarray, format: str, factor: float) -> tuple[np.ndarray, np.ndarray]:
    output, scales = outputs(format, *x.shape)
    modular.grouped_quantize_dynamic_scaled_fp4_async(
        output,
        scales,
        x,
        np.array([0, len(x)], np.uint32),
        np.zeros(1, np.uint32),
        np.zeros(1, np.int32),
        np.array([factor], np.float32),
    )
    return output, scales


NVFP4_WAYS: list[Callable[..., Any]] = [by_dispatcher, by_fp4fp8, by_async, by_groups]
WAYS: list[Callable[..., Any]] = [by_dispatcher, by_fp4fp8, by_groups]
nvfp4_ways = pytest.mark.parametrize("way", NVFP4_WAYS)
ways = pytest.mark.parametrize("way", WAYS)


def first_scale(scales: np.ndarray) -> int:
    return int(scales.view(np.uint8).reshape(-1)[0])


def unpacked(codes: np.ndarray) -> np.ndarray:
    """Codes of four bits, one an element."""
    return np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


@places
@nvfp4_ways
def test_1_a_block_whose_scale_underflows_has_codes_of_zero_with_their_signs(
    place: str, way: Any
) -> None:
    x = np.zeros((1, 64), BF16)
    x[0, :4] = [2.0**-10, -(2.0**-10), 6 * 2.0**-11, -0.0]
    with at(place):
        codes, scales = way(x, "nvfp4", 1.0)
    assert not scales.view(np.uint8).any()
    assert unpacked(codes)[0].tolist() == [0, 8, 0, 8, *[0] * 60]
    assert not nvfp4.QTensor.from_parts(codes, scales, "nvfp4").dequantize().any()


@places
@ways
def test_2_tiny_blocks_of_mxfp8_keep_their_values(place: str, way: Any) -> None:
    x = np.zeros((1, 64), BF16)
    x[0, :6] = np.array([1, -2, 384, 0.5, -0.0, 0], np.float64) * 2.0**-127
    with at(place):
        codes, scales = way(x, "mxfp8_e4m3", 1.0)
    assert first_scale(scales) == 0
    values = nvfp4.QTensor.from_parts(codes, scales, "mxfp8").dequantize()
    np.testing.assert_array_equal(values, x.astype(np.float32))
    assert (codes.view(np.uint8)[0, 6:] == 0).all()


@places
@ways
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3"])
def test_3_infinity_saturates_and_makes_no_nan(place: str, way: Any, format: str) -> None:
    x = np.ones((1, 64), BF16)
    x[0, 0] = np.inf
    with at(place):
        codes, scales = way(x, format, 1.0)
    assert first_scale(scales) == 254
    values = nvfp4.QTensor.from_parts(codes, scales, format).dequantize()
    assert not np.isnan(values).any()
    first = codes.view(np.uint8)[0, 0] & (0x0F if format == "mxfp4" else 0xFF)
    assert first == (7 if format == "mxfp4" else 0x7E)


@places
def test_4_all_functions_give_the_same_bytes_whatever_the_order_in_the_seed(place: str) -> None:
    factor = np.float32(3.4285712242126465)
    amax = np.arange(0x3000, 0x4800, dtype=np.uint16).view(BF16).astype(np.float32)
    orders = [
        encode_e4m3(factor * (amax * SIXTH)),
        encode_e4m3((factor * amax) * SIXTH),
        encode_e4m3(amax * (factor * SIXTH)),
    ]
    at_odds = [np.flatnonzero(orders[i] != orders[2]) for i in (0, 1)]
    assert min(map(len, at_odds)) > 3, "this factor does not tell the orders apart"
    picked = np.concatenate([found[:4] for found in at_odds])
    x = np.zeros((len(picked), 64), BF16)
    x[:, 0::16] = amax[picked, None]
    x[:, 1::16] = -amax[picked, None] / 3
    codes, blocks = expected(x, "nvfp4", factor)
    np.testing.assert_array_equal(blocks[:, 0], orders[2][picked])
    for way in NVFP4_WAYS:
        with at(place):
            got, scales = way(x, "nvfp4", float(factor))
        same(got, codes)
        same(scales, tiled(blocks))


@nvfp4_ways
@pytest.mark.parametrize("columns", [136, 184, 8])
def test_5_a_block_that_is_not_whole_is_refused(way: Any, columns: int) -> None:
    x = np.ones((2, columns), BF16)
    output = empty((2, columns // 2), np.uint8)
    scales = empty((1, -(-columns // 64), 32, 4, 4), E4M3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(way.__globals__, "outputs", lambda *_: (output, scales))
        with pytest.raises(ValueError, match=rf"multiple of 16 for nvfp4.*partial.*got {columns}"):
            way(x, "nvfp4", 1.0)
    assert (output == 0xAA).all() and (scales.view(np.uint8) == 0xAA).all()


@places
@nvfp4_ways
@pytest.mark.parametrize("columns", [96, 352, 16, 48])
def test_6_columns_that_are_no_multiple_of_64_are_quantised(
    place: str, way: Any, columns: int
) -> None:
    x = rows_of(1, 3, columns)
    with at(place):
        codes, scales = way(x, "nvfp4", 1.0)
    wanted, blocks = expected(x, "nvfp4", None)
    same(codes, wanted)
    same(scales, tiled(blocks))


@pytest.mark.parametrize("grouped", [False, True])
def test_7_nothing_is_read_before_the_kernels_ahead_have_ended(grouped: bool) -> None:
    facts: dict[str, Any] = {
        **{"format": "nvfp4", "dtype": "bfloat16", "rows": 256, "columns": 256},
        **{"row_stride": 256, "scale_layout": "tcgen", "scale_rounding": "rceil", "aligned": True},
    }
    if grouped:
        launches = plans.grouped_quantize(
            "sm_90a",
            **facts,
            **{"input_rows": 256, "groups": 4, "tiles": 6, "encode": "expert", "experts": 4},
            **{"offsets_dtype": "uint32", "ids_dtype": "int32"},
            **{"indices_dtype": None, "starts_dtype": None},
        )
    else:
        launches = plans.quantize("sm_90a", **facts, encode="array", batches=1, batch_stride=0)
    (launch,) = launches
    assert launch.programmatic
    _, ptx = compiler.inspect(launch.program, "sm_90a")
    wait = ptx.index("griddepcontrol.wait")
    reads = [m.start() for m in re.finditer(r"\b(ld|st|atom|red)\.global|\bld\.(?!param)\w", ptx)]
    assert reads and min(reads) > wait


def test_7_kernels_that_may_not_start_early_do_not_say_so() -> None:
    launches = plans.seed_tile_starts(
        "sm_90a", groups=3, offsets_dtype="uint32", starts_dtype="uint32"
    )
    assert [launch.programmatic for launch in launches] == [False]


@places
def test_8_a_negative_expert_id_switches_a_range_off(place: str) -> None:
    x = rows_of(2, 6, 64)
    output, scales = empty((6, 32), np.uint8), empty((4, 1, 32, 4, 4), E4M3)
    with at(place):
        modular.grouped_quantize_dynamic_scaled_fp4_async(
            output,
            scales,
            x,
            np.array([0, 2, 4, 6], np.uint32),
            np.array([0, 1, 2], np.uint32),
            np.array([1, -1, -7], np.int32),
            # The last one is what an index of -1 would find.
            np.array([1, 1, 64], np.float32),
        )
    codes, blocks = expected(x[:2], "nvfp4")
    same(output[:2], codes)
    assert not output[2:].any()
    same(scales, tiled(blocks, 4))


@places
@pytest.mark.parametrize("given", [True, False])
def test_9_tiles_that_no_range_has_are_zero(place: str, given: bool) -> None:
    x = rows_of(3, 5, 64)
    output, scales = empty((5, 32), np.uint8), empty((7, 1, 32, 4, 4), E4M3)
    with at(place):
        modular.grouped_quantize_dynamic_scaled_fp4_async(
            output,
            scales,
            x,
            np.array([0, 3, 3, 4], np.uint32),
            np.array([0, 1, 1], np.uint32) if given else None,
            np.array([0, 0, 0], np.int32),
            np.ones(1, np.float32),
        )
    codes, blocks = expected(x[:4], "nvfp4")
    same(output[:4], codes)
    assert not output[4:].any()
    same(scales, tiled(blocks, 7, [0, 1, 2, 128]))


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("axis", range(5))
@pytest.mark.parametrize(
    "function",
    ["naive_block_scaled_matmul", "block_scaled_matmul_with_epilogue", "block_scaled_matmul"],
)
def test_10_every_axis_of_the_scales_is_looked_at(function: str, axis: int, side: str) -> None:
    suffix = "_device" if function == "block_scaled_matmul" else ""
    shape = [1, 1, 32, 4, 4]
    shape[axis] += 1
    arguments: dict[str, Any] = {
        "a": np.zeros((5, 32), np.uint8),
        "b": np.zeros((5, 32), np.uint8),
        "a_scales": np.zeros((1, 1, 32, 4, 4), E4M3),
        "b_scales": np.zeros((1, 1, 32, 4, 4), E4M3),
        "c": empty((5, 5), np.float32),
    }
    arguments[f"{side}_scales"] = np.zeros(shape, E4M3)
    more: dict[str, Any] = {"tensor_sf": 1.0}
    if function.startswith("naive"):
        more = {"scaling_kind": "KIND_MXF4NVF4"}
    named = {name + suffix: value for name, value in arguments.items()}
    with pytest.raises(ValueError, match=rf"{side}_scales{suffix}: scales must have shape"):
        getattr(modular, function)(**named, **more)
    assert (arguments["c"].view(np.uint8) == 0xAA).all()


@places
def test_11_mxfp4_is_multiplied(place: str) -> None:
    x = np.random.default_rng(4).integers(-6, 7, (5, 64)).astype(BF16)
    output, scales = outputs("mxfp4", 5, 64)
    c, again = empty((5, 5), np.float32), empty((5, 5), np.float32)
    with at(place):
        q = modular.quantize_dynamic_block_scaled(output, scales, x, 1.0)
        modular.block_scaled_matmul_with_epilogue(
            c, output, output, scales, scales, 1.0, SF_VECTOR_SIZE=32
        )
        modular.block_scaled_matmul(again, output, output, scales, scales, 1.0)
    values = q.dequantize()
    np.testing.assert_array_equal(c, values @ values.T)
    np.testing.assert_array_equal(again, c)


def test_12_no_column_is_dropped() -> None:
    a, scales = np.zeros((2, 24), np.uint8), np.zeros((2, 1), E8M0)
    c = empty((2, 2), np.float32)
    with pytest.raises(ValueError, match=r"multiple of 32.*K = 48"):
        modular.matmul_dynamic_block_scaled_amd(c, a, a, scales, scales)
    with pytest.raises(ValueError, match=r"multiple of 32.*K = 48"):
        modular.grouped_matmul_block_scaled_amd(
            c, a, a[None], scales, scales[None], np.array([0, 2]), np.array([0]), 1
        )
    output, flat = empty((48,), np.uint8), empty((3,), E8M0)
    with pytest.raises(ValueError, match=r"multiple of 32.*\(2, 48\).*reshape"):
        modular.quantize_dynamic_block_scaled_mxfp4(output, flat, np.ones((2, 48), BF16))
    with pytest.raises(ValueError, match=r"multiple of 32.*\(40,\)"):
        modular.quantize_dynamic_block_scaled_mxfp4(output, flat, np.ones(40, BF16))
    with pytest.raises(ValueError, match=r"multiple of 32 for mxfp4.*got 48"):
        modular.quantize_mx_amd(None, a, scales, np.ones((2, 48), BF16))


class Shaped:
    """An array of that shape which has no memory: only what it says of itself is looked at."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.__cuda_array_interface__ = {
            **{"shape": shape, "typestr": self.dtype.str, "data": (1 << 40, False)},
            **{"strides": None, "version": 3},
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def reshape(self, shape: tuple[int, ...]) -> Shaped:
        return Shaped(shape, self.dtype)


def test_12_a_flat_buffer_may_have_more_than_2_to_the_31_elements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from nvfp4.compat.modular import amd

    count = (1 << 31) + 32
    seen: list[Any] = []

    def target(names: Any, codes: Any, scales: Any, fmt: Any, **more: Any) -> Any:
        seen.append((codes.shape, scales.shape, more["rows"], more["columns"]))

    monkeypatch.setattr(amd, "target", target)
    monkeypatch.setattr(amd.api, "quantize", lambda x, *_, **__: seen.append(x.shape))
    amd.quantize_dynamic_block_scaled_mxfp4(
        Shaped((count // 2,), np.uint8),
        Shaped((count // 32,), np.uint8),
        Shaped((count,), np.float16),
    )
    (codes, scales, rows, columns), shape = seen
    assert rows * columns == count and shape == (rows, columns)
    assert codes == (rows, columns // 2) and scales == (rows, columns // 32)
    (launch,) = plans.quantize(
        "sm_90a",
        **{"format": "mxfp4", "dtype": "float16", "rows": rows, "columns": columns, "batches": 1},
        **{"row_stride": columns, "batch_stride": 0, "scale_layout": "linear"},
        **{"scale_rounding": "even", "encode": "none", "aligned": True},
    )
    kinds = dict(zip(launch.args, launch.program.kernel.parameters, strict=False))
    assert kinds[rows] in ("u32", "i64")
    threads = int(np.prod(launch.grid)) * int(np.prod(launch.block))
    constants = dict(launch.program.constants)
    assert threads * 16 * constants.get("ROWS", 1 << 20) >= count


@pytest.mark.parametrize("factor", [0, 0.0, -1.0, np.nan, np.inf, 2.0**-127])
def test_13_a_factor_that_would_make_nan_is_refused(factor: float) -> None:
    x = np.ones((2, 64), BF16)
    for way in NVFP4_WAYS:
        with pytest.raises(ValueError, match=r"finite and at least 2\^-126"):
            way(x, "nvfp4", factor)
    with pytest.raises(ValueError, match="finite and at least"):
        output, scales = outputs("nvfp4", 2, 64)
        modular.quantize_dynamic_block_scaled(output, scales, x, np.array(factor, np.float32))


@places
def test_14_there_may_be_more_than_1024_experts(place: str) -> None:
    groups, rows = 1500, 8
    x = rows_of(5, rows, 64)
    rng = np.random.default_rng(6)
    offsets = np.sort(rng.integers(0, rows + 1, groups + 1)).astype(np.uint32)
    offsets[0] = 0
    ids = rng.permutation(groups).astype(np.int32)
    factors = (2.0 ** rng.integers(-2, 3, groups)).astype(np.float32)
    lengths = np.diff(offsets.astype(np.int64))
    starts = np.concatenate([[0], np.cumsum(-(-lengths // 128))[:-1]])
    output, scales = empty((rows, 32), np.uint8), empty((rows + 1, 1, 32, 4, 4), E4M3)
    with at(place):
        modular.grouped_quantize_dynamic_scaled_fp4_async(
            output,
            scales,
            x,
            offsets,
            (starts - offsets[:-1] // 128).astype(np.uint32),
            ids,
            factors,
        )
    covered = int(offsets[-1])
    owner = np.repeat(np.arange(groups), lengths)
    codes, blocks = expected(x[:covered], "nvfp4", factors[ids[owner]])
    places_ = 128 * starts[owner] + np.arange(covered) - offsets[owner]
    same(output[:covered], codes)
    assert not output[covered:].any()
    same(scales, tiled(blocks, rows + 1, places_))


# Beyond the fourteen -----------------------------------------------------------------------------

#: Maximum of a block -> scale byte of nvfp4; factor 1. From the seed's definition, by hand.
NVFP4_BYTES = {
    6: 0x38, 1: 0x23, 2688: 0x7E, 3000: 0x7E, 6 * 2.0**-10: 0x00, 0.0059: 0x01, 0: 0,
}  # fmt: skip
#: Maximum -> bytes of mxfp4 on NVIDIA's cards, of mxfp4 on AMD's, of mxfp8.
MX_BYTES = {
    1: (125, 125, 119), 1.6: (126, 125, 119), 1.75: (126, 126, 119), 3: (126, 126, 120),
    6: (127, 127, 121), 6.5: (128, 127, 121), 7: (128, 128, 121), 13: (129, 128, 122),
    24: (129, 129, 123), 448: (134, 134, 127), 0: (0, 0, 0),
}  # fmt: skip


def block_of(amax: float) -> np.ndarray:
    x = np.zeros((1, 64), BF16)
    x[0, 3] = x[0, 40] = -amax
    return x


@pytest.mark.parametrize("amax", NVFP4_BYTES)
@nvfp4_ways
def test_scale_bytes_of_nvfp4(way: Any, amax: float) -> None:
    _, scales = way(block_of(amax), "nvfp4", 1.0)
    assert first_scale(scales) == NVFP4_BYTES[amax]


@pytest.mark.parametrize("amax", MX_BYTES)
def test_16_scale_bytes_of_the_two_roundings_of_mxfp4_and_of_mxfp8(amax: float) -> None:
    x = block_of(amax)
    nvidia, amd, mxfp8 = MX_BYTES[amax]
    for way in WAYS:
        assert first_scale(way(x, "mxfp4", 1.0)[1]) == nvidia
        assert first_scale(way(x, "mxfp8_e4m3", 1.0)[1]) == mxfp8
    for format, wanted in (("mxfp4", amd), ("mxfp8_e4m3", mxfp8)):
        output, scales = outputs(format, 1, 64, "linear")
        modular.quantize_mx_amd(None, output, scales, x)
        assert scales.view(np.uint8).tolist() == [[wanted, wanted]]


def test_15_a_block_beyond_the_range_of_nvfp4_saturates() -> None:
    codes, scales = by_dispatcher(block_of(5000), "nvfp4", 1.0)
    assert first_scale(scales) == 0x7E
    assert unpacked(codes)[0, 3] == 15  # -6


@ways
def test_17_padding_of_e8m0_scales_is_byte_zero(way: Any) -> None:
    _, scales = way(np.ones((1, 32), BF16), "mxfp4", 1.0)
    flat = scales.view(np.uint8).reshape(-1)
    assert flat[0] != 0 and not flat[1:].any()


# Where AMD's chip gives something else -----------------------------------------------------------


@places
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3"])
def test_amd_infinite_and_nan_blocks_are_those_of_the_definition(place: str, format: str) -> None:
    x = np.ones((3, 32), BF16)
    x[0, 5], x[1, 5] = -np.inf, np.nan
    output, scales = outputs(format, 3, 32, "linear")
    with at(place):
        q = modular.quantize_mx_amd(None, output, scales, x)
    assert scales.view(np.uint8)[:2, 0].tolist() == [254, 255]
    values = q.dequantize()
    assert values[0, 5] < -(2.0**126) and not np.isnan(values[0]).any()
    assert np.isnan(values[1]).all()
    assert (values[2] == 1).all()


@places
def test_amd_tiny_blocks_are_not_dead(place: str) -> None:
    x = np.zeros((1, 32), BF16)
    x[0, :2] = [2.0**-120, -(2.0**-126)]
    output, scales = outputs("mxfp8_e4m3", 1, 32, "linear")
    with at(place):
        q = modular.quantize_mx_amd(None, output, scales, x)
    assert scales.view(np.uint8).tolist() == [[0]]
    np.testing.assert_array_equal(q.dequantize(), x.astype(np.float32))
