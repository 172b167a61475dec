"""QTensor: what it takes, what it refuses, and what it does not do."""

from __future__ import annotations

import copy
import dataclasses
import operator
import pickle
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4
from tests.vectorlib import same_values

RNG = np.random.default_rng(3)
X = RNG.standard_normal((5, 64)).astype(np.float32)
FORMATS = ["nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"]
OFFSETS = np.array([0, 2, 2, 5], np.int32)
Q = nvfp4.quantize(X, "nvfp4")
GROUPED = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS)


def says(error: type[Exception], *parts: str) -> Any:
    return pytest.raises(error, match="".join(f"(?=.*{part})" for part in parts))


# --- from_parts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_parts_of_a_tensor_make_it_again(format: str, layout: str) -> None:
    q = nvfp4.quantize(X, format, scale_layout=layout)
    again = nvfp4.QTensor.from_parts(
        q.codes, q.scales, format, decode_scale=q.decode_scale, scale_layout=layout
    )
    assert again.codes is q.codes
    assert again.scales is q.scales
    assert again.decode_scale is q.decode_scale
    assert (again.format, again.shape, again.scale_layout) == (format, (5, 64), layout)
    assert same_values(again.dequantize(), q.dequantize())


def test_the_format_is_stored_by_its_canonical_name() -> None:
    q = nvfp4.quantize(X, "mxfp8")
    assert q.format == "mxfp8_e4m3"
    assert nvfp4.QTensor.from_parts(q.codes, q.scales, "mxfp8").format == "mxfp8_e4m3"
    assert dataclasses.replace(q, format="mxfp8").format == "mxfp8_e4m3"


def test_without_a_decode_scale_it_is_one_in_the_library_of_the_codes() -> None:
    q = nvfp4.QTensor.from_parts(Q.codes, Q.scales, "nvfp4")
    assert type(q.decode_scale) is np.ndarray
    assert (q.decode_scale.dtype, q.decode_scale.shape) == (np.float32, ())
    assert q.decode_scale == 1


@pytest.mark.parametrize("kind", [float, np.float32, np.float64])
def test_a_decode_scale_may_be_a_number(kind: Any) -> None:
    q = nvfp4.QTensor.from_parts(Q.codes, Q.scales, "nvfp4", decode_scale=kind(0.25))
    assert q.decode_scale.shape == ()
    np.testing.assert_array_equal(q.dequantize(), Q.dequantize() * np.float32(0.25))


def test_float8_arrays_are_taken_as_their_bytes() -> None:
    eight = nvfp4.quantize(X, "mxfp8_e5m2")
    taken = nvfp4.QTensor.from_parts(
        eight.codes.view(ml_dtypes.float8_e5m2),
        eight.scales.view(ml_dtypes.float8_e8m0fnu),
        "mxfp8_e5m2",
    )
    assert taken.codes.dtype == taken.scales.dtype == np.uint8
    np.testing.assert_array_equal(taken.codes, eight.codes)
    taken = nvfp4.QTensor.from_parts(Q.codes, Q.scales.view(ml_dtypes.float8_e4m3fn), "nvfp4")
    np.testing.assert_array_equal(taken.scales, Q.scales)


@pytest.mark.parametrize(
    ("format", "part", "dtype"),
    [
        ("nvfp4", "codes", np.int8),
        ("nvfp4", "codes", ml_dtypes.float8_e4m3fn),
        ("mxfp8_e4m3", "codes", ml_dtypes.float8_e5m2),
        ("mxfp8_e5m2", "codes", ml_dtypes.float8_e4m3fn),
        ("nvfp4", "scales", ml_dtypes.float8_e8m0fnu),
        ("mxfp4", "scales", ml_dtypes.float8_e4m3fn),
        ("mxfp4", "scales", np.int8),
    ],
)
def test_bytes_of_another_meaning_are_refused(format: str, part: str, dtype: Any) -> None:
    q = nvfp4.quantize(X, format)
    parts = {"codes": q.codes, "scales": q.scales}
    parts[part] = parts[part].view(dtype)
    with says(TypeError, part, "uint8", np.dtype(dtype).name):
        nvfp4.QTensor.from_parts(**parts, format=format)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int32])
def test_a_decode_scale_is_float32(dtype: Any) -> None:
    with says(TypeError, "decode_scale", "float32", np.dtype(dtype).name):
        nvfp4.QTensor.from_parts(Q.codes, Q.scales, "nvfp4", decode_scale=np.ones((), dtype))


def test_linear_scales_are_not_taken_for_tiles_nor_tiles_for_linear_scales() -> None:
    linear = nvfp4.quantize(X, "nvfp4", scale_layout="linear")
    with says(ValueError, "scales", r"\(1, 1, 32, 4, 4\)", r"\(5, 4\)", "'linear'"):
        nvfp4.QTensor.from_parts(linear.codes, linear.scales, "nvfp4")
    with says(ValueError, "scales", r"\(5, 4\)", "'tcgen'"):
        nvfp4.QTensor.from_parts(Q.codes, Q.scales, "nvfp4", scale_layout="linear")


@pytest.mark.parametrize("shape", [(5, 32), (5, 128), (4, 64), (320,), (1, 5, 64)])
def test_codes_have_the_shape_of_the_tensor(shape: tuple[int, ...]) -> None:
    with says(ValueError, "codes", "nvfp4"):
        nvfp4.QTensor.from_parts(Q.codes, Q.scales, "nvfp4", shape=shape)


@pytest.mark.parametrize("shape", [(), (-1, 64), 64, (5, 64.0), "5x64"])
def test_a_shape_is_a_tuple_of_ints(shape: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="shape"):
        nvfp4.QTensor.from_parts(Q.codes, Q.scales, "nvfp4", shape=shape)


def test_columns_are_a_multiple_of_the_block() -> None:
    codes, scales = np.zeros((2, 12), np.uint8), np.zeros((2, 1), np.uint8)
    with says(ValueError, "multiple of 16"):
        nvfp4.QTensor.from_parts(codes, scales, "nvfp4", scale_layout="linear")


@pytest.mark.parametrize("shape", [(5,), (2,), (1, 5), (5, 2), (1, 1, 1), (64,)])
def test_a_decode_scale_has_one_of_the_shapes_of_a_matrix(shape: tuple[int, ...]) -> None:
    with says(ValueError, "decode_scale", r"\(\)", r"\(5, 1\)"):
        nvfp4.QTensor.from_parts(
            Q.codes, Q.scales, "nvfp4", decode_scale=np.ones(shape, np.float32)
        )


@pytest.mark.parametrize("shape", [(), (1,), (5, 1)])
def test_a_matrix_takes_one_decode_scale_or_one_a_row(shape: tuple[int, ...]) -> None:
    decode = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    q = nvfp4.QTensor.from_parts(Q.codes, Q.scales, "nvfp4", decode_scale=decode)
    factor = decode if shape == (5, 1) else decode.reshape(())
    np.testing.assert_array_equal(q.dequantize(), Q.dequantize() * factor)


@pytest.mark.parametrize("shape", [(), (3,), (3, 7, 1)])
def test_stacked_matrices_take_one_a_matrix_too(shape: tuple[int, ...]) -> None:
    x = RNG.standard_normal((3, 7, 64)).astype(np.float32)
    plain = nvfp4.quantize(x, "nvfp4")
    decode = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    q = nvfp4.QTensor.from_parts(plain.codes, plain.scales, "nvfp4", decode_scale=decode)
    factor = decode.reshape(3, 1, 1) if shape == (3,) else decode
    np.testing.assert_array_equal(q.dequantize(), plain.dequantize() * factor)
    for wrong in ((7,), (1,), (7, 1), (3, 1)):
        with says(ValueError, "decode_scale", r"\(3,\)"):
            dataclasses.replace(plain, decode_scale=np.ones(wrong, np.float32))


@pytest.mark.parametrize("shape", [(), (3,), (5, 1)])
def test_a_grouped_tensor_takes_one_a_range_or_one_a_row(shape: tuple[int, ...]) -> None:
    decode = np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    q = dataclasses.replace(GROUPED, decode_scale=decode)
    factor = decode[[0, 0, 2, 2, 2]][:, None] if shape == (3,) else decode
    np.testing.assert_array_equal(q.dequantize(), GROUPED.dequantize() * factor)
    for wrong in ((5,), (1,), (3, 1), (4,)):
        with says(ValueError, "decode_scale", r"\(3,\)", r"\(5, 1\)"):
            dataclasses.replace(GROUPED, decode_scale=np.ones(wrong, np.float32))


# --- grouped --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "error", "words"),
    [
        (np.array([1, 2, 2, 5]), ValueError, "start at 0"),
        (np.array([0, 3, 2, 5]), ValueError, "decrease"),
        (np.array([0, 2, 2, 6]), ValueError, "rows, 5"),
        (np.array([0.0, 2, 2, 5]), TypeError, "float64"),
        (np.zeros(0, int), ValueError, "at least one"),
        (np.zeros((2, 2), int), ValueError, "one axis"),
        ([0, 2, 2, 5], TypeError, "array"),
    ],
)
def test_groups_are_row_offsets(groups: Any, error: type[Exception], words: str) -> None:
    with says(error, "groups", words):
        nvfp4.QTensor.from_parts(
            GROUPED.codes, GROUPED.scales, "nvfp4", groups=groups, decode_scale=1.0
        )


def test_a_grouped_tensor_has_two_axes() -> None:
    x = RNG.standard_normal((1, 5, 64)).astype(np.float32)
    stack = nvfp4.quantize(x, "nvfp4", scale_layout="linear")
    with says(ValueError, r"\[R, K\]", r"\(1, 5, 64\)"):
        dataclasses.replace(stack, groups=OFFSETS)


def test_a_grouped_tensor_needs_tiles_for_its_ranges() -> None:
    enough = GROUPED.scales[:2]
    q = dataclasses.replace(GROUPED, scales=enough)
    np.testing.assert_array_equal(q.dequantize(), GROUPED.dequantize())
    with says(ValueError, "scales", "2 tiles", "got 1"):
        dataclasses.replace(GROUPED, scales=GROUPED.scales[:1])
    with says(ValueError, "scales", "tiles", r"\(2, 2, 32, 4, 4\)"):
        dataclasses.replace(GROUPED, scales=np.zeros((2, 2, 32, 4, 4), np.uint8))


def test_tile_starts_say_where_the_scales_of_a_range_are() -> None:
    scales = np.full((9, 1, 32, 4, 4), 0x33, np.uint8)
    scales[7], scales[1] = GROUPED.scales[0], GROUPED.scales[1]
    q = nvfp4.QTensor.from_parts(
        GROUPED.codes,
        scales,
        "nvfp4",
        decode_scale=GROUPED.decode_scale,
        groups=OFFSETS,
        tile_starts=np.array([7, 3, 1]),
    )
    np.testing.assert_array_equal(q.dequantize(), GROUPED.dequantize())


@pytest.mark.parametrize(
    ("starts", "error", "words"),
    [
        (np.array([0, 1]), ValueError, r"\(3,\)"),
        (np.array([0.0, 1, 1]), TypeError, "float64"),
        (np.array([0, 1, 4]), ValueError, "range 2"),
        (np.array([-1, 1, 1]), ValueError, "range 0"),
    ],
)
def test_tile_starts_keep_within_the_scales(
    starts: np.ndarray, error: type[Exception], words: str
) -> None:
    with says(error, "tile_starts", words):
        dataclasses.replace(GROUPED, tile_starts=starts)


def test_tile_starts_belong_to_grouped_tiles() -> None:
    with says(ValueError, "tile_starts", "groups"):
        dataclasses.replace(Q, tile_starts=np.array([0]))
    linear = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, scale_layout="linear")
    with says(ValueError, "tile_starts", "tcgen"):
        dataclasses.replace(linear, tile_starts=np.array([0, 1, 1]))


# --- scale bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["linear", "tcgen"])
@pytest.mark.parametrize("byte", [0x80, 0xFF])
def test_a_signed_nvfp4_scale_is_refused_where_it_is_read(byte: int, layout: str) -> None:
    q = nvfp4.quantize(X, "nvfp4", scale_layout=layout)
    scales = q.scales.copy()
    scales[(0,) * scales.ndim] = byte
    bad = dataclasses.replace(q, scales=scales)
    with says(ValueError, "scales", "bit 7", f"{byte:#04x}", "e8m0"):
        bad.dequantize()
    with says(ValueError, "a.scales", "bit 7", f"{byte:#04x}"):
        nvfp4.matmul(bad, Q)
    with says(ValueError, "b.scales", "bit 7", f"{byte:#04x}"):
        nvfp4.matmul(Q, bad)
    # What is there before it is written is nobody's business.
    assert nvfp4.quantize(X, "nvfp4", scale_layout=layout, out=bad) is bad
    np.testing.assert_array_equal(bad.dequantize(), q.dequantize())


def test_a_signed_scale_of_a_range_is_refused() -> None:
    scales = GROUPED.scales.copy()
    scales[1, 0, 2, 0, 3] = 0x81  # row 2 of the last range, block 3
    with says(ValueError, "scales", "bit 7", "0x81"):
        dataclasses.replace(GROUPED, scales=scales).dequantize()
    scales = GROUPED.scales.copy()
    scales[1, 0, 3, 0, 3] = 0x81  # there is no such row
    assert dataclasses.replace(GROUPED, scales=scales).dequantize().any()


def test_the_scale_bytes_of_mx_formats_may_be_any() -> None:
    q = nvfp4.quantize(X, "mxfp4", scale_layout="linear")
    scales = np.arange(0, 250, 25, dtype=np.uint8).reshape(q.scales.shape)
    assert np.isfinite(dataclasses.replace(q, scales=scales).dequantize()).all()


@pytest.mark.parametrize("poison", [0x7F, 0xFF])
def test_padding_of_scales_may_hold_anything(poison: int) -> None:
    x = RNG.standard_normal((5, 48)).astype(np.float32)
    dense, offsets = nvfp4.quantize(x, "nvfp4"), np.array([0, 1, 4])
    grouped = nvfp4.grouped_quantize(x, "nvfp4", row_offsets=offsets)
    stacked = nvfp4.quantize(np.stack([x, -2 * x]), "nvfp4")
    for q in (dense, grouped, stacked):
        used = nvfp4.quantize(np.ones_like(x), "nvfp4").scales != 0
        if q is grouped:
            of_ranges = nvfp4.grouped_quantize(np.ones_like(x), "nvfp4", row_offsets=offsets)
            used = of_ranges.scales != 0
        scales = np.where(used, q.scales, np.uint8(poison))
        assert (scales == poison).any()
        poisoned = dataclasses.replace(q, scales=scales)
        assert same_values(poisoned.dequantize(), q.dequantize())
        assert np.isfinite(poisoned.dequantize()).all()


# --- what it is not -------------------------------------------------------------------------------

BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv]
BINARY += [operator.mod, operator.pow, operator.and_, operator.or_, operator.xor, divmod]


@pytest.mark.parametrize("operation", BINARY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("other", [2, X, Q, np.float32(2)], ids=["int", "array", "q", "scalar"])
def test_there_is_no_arithmetic(operation: Any, other: Any) -> None:
    for operands in ((Q, other), (other, Q)):
        with says(TypeError, "QTensor", "dequantize"):
            operation(*operands)


@pytest.mark.parametrize("other", [X.T, Q], ids=["array", "q"])
def test_the_operator_of_products_names_the_functions(other: Any) -> None:
    for operands in ((Q, other), (other, Q)):
        with says(TypeError, "QTensor", "nvfp4.matmul", "grouped_matmul"):
            operator.matmul(*operands)


@pytest.mark.parametrize("operation", [operator.neg, operator.pos, abs, operator.invert])
def test_there_are_no_unary_operators(operation: Any) -> None:
    with says(TypeError, "QTensor", "dequantize"):
        operation(Q)


@pytest.mark.parametrize("protocol", ["__array__", "__dlpack__", "__cuda_array_interface__"])
def test_it_is_no_array(protocol: str) -> None:
    assert not hasattr(Q, protocol)


@pytest.mark.parametrize("use", [len, iter, float, lambda q: q[0]])
def test_it_is_no_container(use: Any) -> None:
    with pytest.raises(TypeError):
        use(Q)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Q.codes = Q.codes  # type: ignore[misc]


def test_equality_and_hash_are_those_of_the_object() -> None:
    same = nvfp4.quantize(X, "nvfp4")
    assert Q == Q
    assert Q != same
    assert hash(Q) == hash(Q)
    assert len({Q, same}) == 2


def test_its_fields_are_those_of_the_design() -> None:
    names = [field.name for field in dataclasses.fields(nvfp4.QTensor)]
    assert names == [
        "codes", "scales", "decode_scale", "format", "shape", "scale_layout", "groups",
        "tile_starts",
    ]  # fmt: skip


@pytest.mark.parametrize("q", [Q, GROUPED], ids=["dense", "grouped"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
def test_copies_and_pickles_are_the_same_tensor(q: nvfp4.QTensor, how: Any) -> None:
    repr(q)
    again = how(q)
    assert again is not q
    assert repr(again) == repr(q)
    assert same_values(again.dequantize(), q.dequantize())
    if how is not copy.copy:
        before = q.codes.copy()
        again.codes[...] = 0
        np.testing.assert_array_equal(q.codes, before)
        assert not again.dequantize().any()


def test_a_pickle_holds_no_address() -> None:
    q = nvfp4.quantize(X, "nvfp4")
    assert q.parts.codes.pointer
    assert set(q.__getstate__()) == {field.name for field in dataclasses.fields(q)}
    again = pickle.loads(pickle.dumps(q))
    assert again.parts.codes.pointer == again.codes.__array_interface__["data"][0]


def test_its_repr_is_metadata_alone() -> None:
    text = repr(GROUPED)
    assert text == (
        "QTensor(nvfp4, shape=(5, 64), scale_layout='tcgen', decode_scale=[3], groups=3, "
        "numpy on host)"
    )
    codes = Q.codes.copy()
    before = repr(dataclasses.replace(Q, codes=codes))
    codes[...] = 0xFF
    assert repr(dataclasses.replace(Q, codes=codes)) == before


def test_its_shape_is_a_tuple_of_plain_ints() -> None:
    q = nvfp4.QTensor.from_parts(Q.codes, Q.scales, "nvfp4", shape=[np.int64(5), 64])  # type: ignore[arg-type]
    assert q.shape == (5, 64)
    assert [type(n) for n in q.shape] == [int, int]


def test_a_constructor_call_is_checked_too() -> None:
    with says(ValueError, "codes"):
        nvfp4.QTensor(Q.codes[:4], Q.scales, Q.decode_scale, "nvfp4", (5, 64), "tcgen")


def test_an_array_that_changed_its_shape_is_noticed() -> None:
    codes = Q.codes.copy()
    q = nvfp4.QTensor.from_parts(codes, Q.scales, "nvfp4")
    codes.resize((4, 32), refcheck=False)
    with says(ValueError, "codes", r"\(4, 32\)"):
        q.dequantize()
