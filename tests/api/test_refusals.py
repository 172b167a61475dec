"""What the public functions refuse, and what they say: the argument, what is allowed, what it
got."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nvfp4

RNG = np.random.default_rng(7)


def values(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


X = values(5, 64)
OFFSETS = np.array([0, 2, 2, 5], np.int32)
B = nvfp4.quantize(values(7, 64), "nvfp4")
EXPERTS = nvfp4.quantize(values(3, 7, 64), "nvfp4")


def says(error: type[Exception], *parts: str) -> Any:
    """A context in which exactly this error is raised, with all of these words in its message."""
    return pytest.raises(error, match="".join(f"(?=.*{part})" for part in parts))


@pytest.mark.parametrize("option", ["scale_rounding", "scale_layout"])
def test_an_option_that_is_a_list_is_refused_by_its_name(option: str) -> None:
    with says(TypeError, option, "must be one of"):
        nvfp4.quantize(X, "mxfp4", **{option: ["rceil"]})


@pytest.mark.parametrize("number", [1e39, -(10**400)])
def test_a_decode_scale_beyond_float32_is_refused(number: float) -> None:
    with says(ValueError, "decode_scale must fit a float32"):
        nvfp4.QTensor.from_parts(B.codes, B.scales, "nvfp4", decode_scale=number)


@pytest.mark.parametrize("flag", ["pair", "halves"])
def test_a_flag_of_an_epilogue_is_a_bool(flag: str) -> None:
    with says(TypeError, f"{flag} must be True or False", "'interleaved'"):
        nvfp4.Epilogue(lambda value, row, column, expert: value, **{flag: "interleaved"})


# --- shapes and formats ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "multiple"), [("nvfp4", 16), ("mxfp4", 32), ("mxfp8", 32), ("mxfp8_e5m2", 32)]
)
@pytest.mark.parametrize("columns", [8, 40, 33, 1])
def test_a_partial_block_is_refused_and_the_multiple_named(
    format: str, multiple: int, columns: int
) -> None:
    with says(ValueError, "K", f"multiple of {multiple}", f"{columns}"):
        nvfp4.quantize(values(2, columns), format)
    with says(ValueError, "K", f"multiple of {multiple}", f"{columns}"):
        nvfp4.grouped_quantize(values(5, columns), format, row_offsets=OFFSETS)


def test_a_scalar_has_no_last_axis() -> None:
    with says(ValueError, r"shape \(\)"):
        nvfp4.quantize(np.ones((), np.float32), "nvfp4", scale_layout="linear")


@pytest.mark.parametrize("shape", [(64,), (2, 2, 2, 64)])
def test_the_tcgen_layout_takes_two_or_three_axes(shape: tuple[int, ...]) -> None:
    with says(ValueError, "tcgen", "linear"):
        nvfp4.quantize(values(*shape), "nvfp4")
    assert nvfp4.quantize(values(*shape), "nvfp4", scale_layout="linear").shape == shape


@pytest.mark.parametrize("format", ["fp4", "NVFP4", "mxfp6", ""])
def test_an_unknown_format_is_refused_and_the_known_ones_named(format: str) -> None:
    with says(ValueError, "format", "nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"):
        nvfp4.quantize(X, format)


@pytest.mark.parametrize("format", [ml_dtypes.float8_e4m3fn, np.uint8, None, 4])
def test_a_dtype_is_no_format(format: Any) -> None:
    with says(TypeError, "format"):
        nvfp4.quantize(X, format)


@pytest.mark.parametrize("rounding", ["nearest", "RCEIL", ""])
def test_an_unknown_rounding_is_refused(rounding: str) -> None:
    with says(ValueError, "scale_rounding", "rceil", "floor", "ceil", "even"):
        nvfp4.quantize(X, "mxfp4", scale_rounding=rounding)


def test_a_rounding_must_be_a_string() -> None:
    with says(TypeError, "scale_rounding"):
        nvfp4.quantize(X, "mxfp4", scale_rounding=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("call", [nvfp4.quantize, nvfp4.grouped_quantize])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "even"])
def test_roundings_belong_to_mx_formats_without_encode_scale(call: Any, rounding: str) -> None:
    more = {} if call is nvfp4.quantize else {"row_offsets": OFFSETS}
    with says(ValueError, "scale_rounding", "rceil", "nvfp4"):
        call(X, "nvfp4", scale_rounding=rounding, **more)
    with says(ValueError, "scale_rounding", "rceil", "encode_scale"):
        call(X, "mxfp4", scale_rounding=rounding, encode_scale=0.5, **more)


@pytest.mark.parametrize("layout", ["swizzled", "tcgen5", ""])
def test_an_unknown_layout_is_refused(layout: str) -> None:
    with says(ValueError, "scale_layout", "tcgen", "linear"):
        nvfp4.quantize(X, "nvfp4", scale_layout=layout)
    with says(ValueError, "scale_layout", "tcgen", "linear"):
        nvfp4.grouped_quantize(X, "nvfp4", scale_layout=layout, row_offsets=OFFSETS)


# --- kinds and dtypes of arrays -------------------------------------------------------------------


def test_float64_is_refused_with_the_way_out() -> None:
    for call in (
        lambda: nvfp4.quantize(X.astype(np.float64), "nvfp4"),
        lambda: nvfp4.grouped_quantize(X.astype(np.float64), "nvfp4", row_offsets=OFFSETS),
    ):
        with says(TypeError, "x", "float64", "float32", "bfloat16"):
            call()


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint8", "bool", "complex64", "float8_e4m3fn"])
def test_other_dtypes_are_refused(dtype: str) -> None:
    kind = getattr(ml_dtypes, dtype) if dtype.startswith("float8") else dtype
    with says(TypeError, "x", "float32", "float16", "bfloat16", dtype):
        nvfp4.quantize(np.zeros((2, 64), kind), "nvfp4")


@pytest.mark.parametrize("x", [[[0.0] * 64], ((0.0,) * 64,), 1.0, None, "x", object()])
def test_what_is_no_array_is_refused(x: Any) -> None:
    with says(TypeError, "x must be an array", type(x).__name__):
        nvfp4.quantize(x, "nvfp4")


def test_a_qtensor_is_not_quantised_again() -> None:
    with says(TypeError, "x must be an array", "QTensor", "dequantize"):
        nvfp4.quantize(B, "nvfp4")


def test_a_masked_array_is_refused_because_its_mask_would_be_lost() -> None:
    with says(TypeError, "x", "mask"):
        nvfp4.quantize(np.ma.masked_greater(X, 0), "nvfp4")


def test_another_byte_order_is_refused() -> None:
    with says(TypeError, "x", "byte order"):
        nvfp4.quantize(X.astype(">f4"), "nvfp4")


# --- encode scales --------------------------------------------------------------------------------

BAD_SCALES = [0.0, -1.0, np.nan, np.inf, -np.inf, 2.0**-127, 1e-45, 1e39, -0.0, 10**400]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("scale", BAD_SCALES, ids=lambda scale: str(scale)[:8])
def test_an_encode_scale_must_be_finite_and_normal(scale: Any, format: str) -> None:
    with says(ValueError, "encode_scale", "finite", r"2\^-126"):
        nvfp4.quantize(X, format, encode_scale=scale)
    with says(ValueError, "encode_scale", "finite", r"2\^-126"):
        nvfp4.grouped_quantize(X, format, row_offsets=OFFSETS, encode_scale=scale)


@pytest.mark.parametrize("scale", BAD_SCALES[:7])
def test_every_element_of_an_encode_scale_is_looked_at(scale: float) -> None:
    array = np.ones((5, 1), np.float32)
    array[3] = scale
    with says(ValueError, "encode_scale", "finite", r"index \(3, 0\)"):
        nvfp4.quantize(X, "nvfp4", encode_scale=array)
    with says(ValueError, "encode_scale", "finite", r"index \(3,\)"):
        nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, encode_scale=array[:, 0])


def test_the_smallest_and_largest_encode_scales_are_legal() -> None:
    for scale in (2.0**-126, float(np.finfo(np.float32).max)):
        q = nvfp4.quantize(X, "nvfp4", encode_scale=scale)
        assert q.decode_scale == np.float32(1) / np.float32(scale)


@pytest.mark.parametrize("shape", [(5,), (64,), (1, 1), (5, 2), (1, 5), (5, 1, 1), (0,), (2,)])
def test_an_encode_scale_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with says(ValueError, "encode_scale", "shapes", r"\(5, 1\)"):
        nvfp4.quantize(X, "nvfp4", encode_scale=np.ones(shape, np.float32))


@pytest.mark.parametrize("shape", [(2,), (4,), (1,), (3, 1), (3, 7), (1, 1, 1)])
def test_an_encode_scale_of_stacked_matrices_is_one_or_one_a_matrix_or_one_a_row(
    shape: tuple[int, ...],
) -> None:
    x = values(3, 7, 64)
    with says(ValueError, "encode_scale", r"\(3,\)", r"\(3, 7, 1\)"):
        nvfp4.quantize(x, "nvfp4", encode_scale=np.ones(shape, np.float32))
    for legal in ((), (3,), (3, 7, 1)):
        q = nvfp4.quantize(x, "nvfp4", encode_scale=np.ones(legal, np.float32))
        assert q.decode_scale.shape == legal


@pytest.mark.parametrize("value", [True, np.True_, [1.0], (1.0,), 1j, object()])
def test_an_encode_scale_that_is_nothing_of_the_kind_is_told_all_that_it_may_be(
    value: Any,
) -> None:
    allowed = ("encode_scale must be a number", "a float32 array", "None", "'amax'", "'row_amax'")
    with says(TypeError, *allowed, f"got {type(value).__name__}$"):
        nvfp4.quantize(X, "nvfp4", encode_scale=value)
    with says(TypeError, *allowed, f"got {type(value).__name__}$"):
        nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, encode_scale=value)


@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16, np.int32])
def test_an_encode_scale_of_another_dtype_is_refused(dtype: Any) -> None:
    with says(TypeError, "encode_scale", "float32"):
        nvfp4.quantize(X, "nvfp4", encode_scale=np.ones((), dtype))
    with says(TypeError, "encode_scale", "float32"):
        nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, encode_scale=np.ones(3, dtype))


@pytest.mark.parametrize("scale", [True, np.True_, [1.0], (1.0,), 1j, np.complex64(1)])
def test_an_encode_scale_of_another_kind_is_refused(scale: Any) -> None:
    with says(TypeError, "encode_scale"):
        nvfp4.quantize(X, "nvfp4", encode_scale=scale)


def test_an_unknown_word_for_an_encode_scale_is_refused() -> None:
    with says(ValueError, "encode_scale", "amax", "row_amax", "max"):
        nvfp4.quantize(X, "nvfp4", encode_scale="max")


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "mxfp8_e5m2"])
def test_row_amax_is_for_nvfp4(format: str) -> None:
    with says(ValueError, "row_amax", "nvfp4", format):
        nvfp4.quantize(X, format, encode_scale="row_amax")
    with says(ValueError, "row_amax", "nvfp4", format):
        nvfp4.grouped_quantize(X, format, encode_scale="row_amax", row_offsets=OFFSETS)


def test_amax_over_all_experts_is_refused() -> None:
    with says(ValueError, "encode_scale", "amax", "row_amax"):
        nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, encode_scale="amax")


# --- ranges ---------------------------------------------------------------------------------------

GROUPED_CALLS = {
    "grouped_quantize": lambda **more: nvfp4.grouped_quantize(X, "nvfp4", **more),
    "grouped_matmul": lambda **more: nvfp4.grouped_matmul(X.astype(np.float16), EXPERTS, **more),
}
grouped = pytest.mark.parametrize("call", GROUPED_CALLS.values(), ids=GROUPED_CALLS.keys())


@grouped
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_offsets_are_of_three_dtypes(call: Any, dtype: Any) -> None:
    reference = call(row_offsets=OFFSETS)
    got = call(row_offsets=OFFSETS.astype(dtype))
    np.testing.assert_array_equal(
        getattr(got, "codes", got), getattr(reference, "codes", reference)
    )


@grouped
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.uint8, np.uint64, np.bool_])
def test_offsets_of_another_dtype_are_refused(call: Any, dtype: Any) -> None:
    with says(TypeError, "row_offsets", "int32", "int64", "uint32", np.dtype(dtype).name):
        call(row_offsets=OFFSETS.astype(dtype))


@grouped
@pytest.mark.parametrize("offsets", [[0, 5], None])
def test_offsets_are_an_array(call: Any, offsets: Any) -> None:
    with says(TypeError, "row_offsets must be an array"):
        call(row_offsets=offsets)


@grouped
def test_offsets_start_at_zero(call: Any) -> None:
    with says(ValueError, "row_offsets", "start at 0", "got 1"):
        call(row_offsets=np.array([1, 2, 5]))


@grouped
def test_offsets_do_not_decrease(call: Any) -> None:
    with says(ValueError, "row_offsets", "decrease", "4 then 3", "index 2"):
        call(row_offsets=np.array([0, 4, 3, 5]))


@grouped
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_offsets_end_within_the_rows(call: Any, dtype: Any) -> None:
    with says(ValueError, "row_offsets", "rows, 5", "got 6"):
        call(row_offsets=np.array([0, 2, 6], dtype))
    with says(ValueError, "row_offsets", "rows, 4", "got 5"):
        call(row_offsets=np.array([0, 2, 5], dtype), row_indices=np.array([0, 1, 2, 3]))


@grouped
@pytest.mark.parametrize("shape", [(0,), (2, 2), ()])
def test_offsets_have_one_axis_and_an_entry_more_than_ranges(
    call: Any, shape: tuple[int, ...]
) -> None:
    with says(ValueError, "row_offsets", "shape|entry"):
        call(row_offsets=np.zeros(shape, np.int32))


@grouped
def test_ids_are_one_a_range(call: Any) -> None:
    with says(ValueError, "expert_ids", r"\(3,\)", r"\(2,\)"):
        call(row_offsets=OFFSETS, expert_ids=np.array([0, 1]))


@grouped
@pytest.mark.parametrize("dtype", [np.float32, np.uint32, np.uint8])
def test_ids_and_indices_are_signed_integers(call: Any, dtype: Any) -> None:
    with says(TypeError, "expert_ids", "int32", "int64"):
        call(row_offsets=OFFSETS, expert_ids=np.zeros(3, dtype))
    with says(TypeError, "row_indices", "int32", "int64"):
        call(row_offsets=OFFSETS, row_indices=np.zeros(5, dtype))


def test_ids_are_below_the_number_of_experts() -> None:
    scale = np.ones(3, np.float32)
    with says(ValueError, "expert_ids", "experts, 3", "got 3", "index 1"):
        nvfp4.grouped_quantize(
            X, "nvfp4", row_offsets=OFFSETS, expert_ids=np.array([0, 3, -1]), encode_scale=scale
        )
    with says(ValueError, "expert_ids", "experts, 3", "got 9", "index 2"):
        nvfp4.grouped_matmul(
            X.astype(np.float16), EXPERTS, row_offsets=OFFSETS, expert_ids=np.array([-1, 2, 9])
        )
    # Without anything that is by expert, there is no number of them.
    nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, expert_ids=np.array([0, 1000, -1]))


def test_without_ids_there_are_no_more_ranges_than_experts() -> None:
    offsets = np.array([0, 1, 2, 3, 5])
    with says(ValueError, "expert_ids", "4 ranges", "3 experts"):
        nvfp4.grouped_quantize(X, "nvfp4", row_offsets=offsets, encode_scale=np.ones(3, np.float32))
    with says(ValueError, "expert_ids", "4 ranges", "3 experts"):
        nvfp4.grouped_matmul(X.astype(np.float16), EXPERTS, row_offsets=offsets)


@grouped
def test_indices_have_one_axis(call: Any) -> None:
    with says(ValueError, "row_indices", "one axis"):
        call(row_offsets=OFFSETS, row_indices=np.zeros((5, 1), np.int32))


def test_grouped_quantize_takes_a_matrix() -> None:
    for shape in ((64,), (2, 3, 64)):
        with says(ValueError, "x", r"\[M, K\]"):
            nvfp4.grouped_quantize(values(*shape), "nvfp4", row_offsets=np.array([0]))


# --- out ------------------------------------------------------------------------------------------


def out_of(x: np.ndarray, format: str = "nvfp4", **options: Any) -> nvfp4.QTensor:
    return nvfp4.quantize(x, format, **options)


@pytest.mark.parametrize("out", [X, (X, X), "out", 0])
def test_out_of_a_quantiser_is_a_qtensor(out: Any) -> None:
    with says(TypeError, "out must be a QTensor", "from_parts"):
        nvfp4.quantize(X, "nvfp4", out=out)
    with says(TypeError, "out must be a QTensor", "from_parts"):
        nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, out=out)


def test_out_has_the_format_shape_and_layout_of_the_call() -> None:
    with says(ValueError, "out", "format nvfp4", "mxfp4"):
        nvfp4.quantize(X, "nvfp4", out=out_of(X, "mxfp4"))
    with says(ValueError, "out", "shape", r"\(5, 64\)", r"\(4, 64\)"):
        nvfp4.quantize(X, "nvfp4", out=out_of(X[:4]))
    with says(ValueError, "out", "scale_layout", "tcgen", "linear"):
        nvfp4.quantize(X, "nvfp4", out=out_of(X, scale_layout="linear"))


def test_out_has_a_decode_scale_of_the_shape_of_the_encode_scale() -> None:
    with says(ValueError, "out.decode_scale", r"\(5, 1\)", r"\(\)"):
        nvfp4.quantize(X, "nvfp4", encode_scale="row_amax", out=out_of(X))
    with says(ValueError, "out.decode_scale", r"\(\)", r"\(5, 1\)"):
        nvfp4.quantize(X, "nvfp4", out=out_of(X, encode_scale="row_amax"))


def test_out_must_be_writable() -> None:
    out = out_of(X)
    out.codes.flags.writeable = False
    with says(ValueError, "out.codes", "writable"):
        nvfp4.quantize(X, "nvfp4", out=out)


def test_out_must_not_share_memory_with_the_input() -> None:
    memory = np.zeros(4096, np.uint8)
    x = memory[:1280].view(np.float32).reshape(5, 64)
    x[...] = X
    scales = np.zeros((1, 1, 32, 4, 4), np.uint8)
    out = nvfp4.QTensor.from_parts(memory[1279:1439].reshape(5, 32), scales, "nvfp4")
    before = memory.copy()
    with says(ValueError, "out.codes must not overlap x"):
        nvfp4.quantize(x, "nvfp4", out=out)
    np.testing.assert_array_equal(memory, before)
    beside = nvfp4.QTensor.from_parts(memory[1280:1440].reshape(5, 32), scales, "nvfp4")
    np.testing.assert_array_equal(nvfp4.quantize(x, "nvfp4", out=beside).codes, out_of(X).codes)


def test_out_must_not_share_memory_with_the_encode_scale() -> None:
    out = out_of(X)
    with says(ValueError, "out.decode_scale must not overlap encode_scale"):
        nvfp4.quantize(X, "nvfp4", encode_scale=out.decode_scale, out=out)


def test_the_parts_of_out_must_not_share_memory() -> None:
    memory = np.zeros(1024, np.uint8)
    codes, scales = memory[:160].reshape(5, 32), memory[159:671].reshape(1, 1, 32, 4, 4)
    with says(ValueError, "out.scales must not overlap out.codes"):
        nvfp4.quantize(X, "nvfp4", out=nvfp4.QTensor.from_parts(codes, scales, "nvfp4"))


def test_parts_that_lie_between_each_other_do_not_overlap() -> None:
    memory = np.zeros((5, 36), np.uint8)
    out = nvfp4.QTensor.from_parts(memory[:, :32], memory[:, 32:], "nvfp4", scale_layout="linear")
    assert nvfp4.quantize(X, "nvfp4", scale_layout="linear", out=out) is out
    reference = out_of(X, scale_layout="linear")
    np.testing.assert_array_equal(memory[:, :32], reference.codes)
    np.testing.assert_array_equal(memory[:, 32:], reference.scales)


def test_out_must_not_overlap_itself() -> None:
    row = np.zeros((1, 32), np.uint8)
    codes = np.lib.stride_tricks.as_strided(row, (5, 32), (0, 1))
    out = nvfp4.QTensor.from_parts(codes, np.zeros((1, 1, 32, 4, 4), np.uint8), "nvfp4")
    with says(ValueError, "out.codes must not overlap itself"):
        nvfp4.quantize(X, "nvfp4", out=out)


def test_out_of_a_grouped_call_has_its_offsets_as_groups() -> None:
    made = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS)
    other = np.array([0, 1, 2, 5], np.int32)
    with says(ValueError, "out.groups must be row_offsets itself", "replace"):
        nvfp4.grouped_quantize(X, "nvfp4", row_offsets=other, out=made)
    again = dataclasses.replace(made, groups=other)
    assert nvfp4.grouped_quantize(X, "nvfp4", row_offsets=other, out=again) is again
    equal = OFFSETS.astype(np.int64)
    assert nvfp4.grouped_quantize(X, "nvfp4", row_offsets=equal, out=made) is made
    with says(ValueError, "out.groups must be row_offsets", "None"):
        nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, out=nvfp4.quantize(X, "nvfp4"))
    wide = nvfp4.quantize(values(3, 64, 64), "nvfp4")
    with says(ValueError, "out.groups must be row_offsets", "None"):
        nvfp4.grouped_matmul(
            X.astype(np.float16), wide, row_offsets=OFFSETS, out_dtype="nvfp4",
            out=nvfp4.quantize(X, "nvfp4"),
        )  # fmt: skip
    dense = nvfp4.quantize(X, "nvfp4", encode_scale="row_amax", scale_layout="linear")
    with says(ValueError, "out.groups must be row_offsets", "None"):
        nvfp4.grouped_quantize(
            X,
            "nvfp4",
            row_offsets=OFFSETS,
            encode_scale="row_amax",
            scale_layout="linear",
            out=dense,
        )


def test_out_of_a_call_without_ranges_has_none() -> None:
    codes, scales = np.zeros((5, 32), np.uint8), np.zeros((5, 4), np.uint8)
    out = nvfp4.QTensor.from_parts(codes, scales, "nvfp4", scale_layout="linear", groups=OFFSETS)
    with says(ValueError, "out", "grouped", "groups must be None"):
        nvfp4.quantize(X, "nvfp4", scale_layout="linear", out=out)
    wide = nvfp4.quantize(values(64, 64), "nvfp4")
    with says(ValueError, "out", "grouped", "groups must be None"):
        nvfp4.matmul(nvfp4.quantize(X, "nvfp4"), wide, out_dtype="nvfp4", out=out)


def test_tiles_that_are_written_belong_to_one_range() -> None:
    made = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS)
    for starts, word in (([0, 1, 0], "two ranges"), ([3, 0, 4], "within the 4 tiles")):
        first = np.array(starts, np.int32)
        with says(ValueError, "tile_starts", word):
            out = dataclasses.replace(made, tile_starts=first)
            nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, out=out)
    out = dataclasses.replace(made, tile_starts=np.array([2, 1, 1], np.int32))
    nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, out=out)
    np.testing.assert_array_equal(
        out.dequantize(), nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS).dequantize()
    )


@pytest.mark.parametrize("bad", ["dtype", "shape", "readonly", "broadcast", "kind"])
@pytest.mark.parametrize(
    "what", ["dequantize", "matmul", "grouped_matmul", "interleave", "deinterleave"]
)
def test_an_array_to_write_is_of_the_right_kind(what: str, bad: str) -> None:
    linear = nvfp4.quantize(values(7, 64), "nvfp4", scale_layout="linear").scales
    shape, dtype, call = {
        "dequantize": ((7, 64), np.float32, lambda out: B.dequantize(out=out)),
        "matmul": ((7, 7), ml_dtypes.bfloat16, lambda out: nvfp4.matmul(B, B, out=out)),
        "grouped_matmul": (
            (5, 7),
            np.float16,
            lambda out: nvfp4.grouped_matmul(
                X.astype(np.float16), EXPERTS, row_offsets=OFFSETS, out=out, out_dtype="float16"
            ),
        ),
        "interleave": (
            (1, 1, 32, 4, 4), np.uint8, lambda out: nvfp4.interleave_scales(linear, out=out)
        ),
        "deinterleave": (
            (7, 4), np.uint8, lambda out: nvfp4.deinterleave_scales(B.scales, (7, 4), out=out)
        ),
    }[what]  # fmt: skip
    good = np.zeros(shape, dtype)
    assert call(good) is good
    if bad == "dtype":
        with says(TypeError, "out", np.dtype(dtype).name, "float64"):
            call(np.zeros(shape, np.float64))
    elif bad == "shape":
        with says(ValueError, "out", "shape"):
            call(np.zeros((shape[0] + 1, *shape[1:]), dtype))
    elif bad == "readonly":
        good.flags.writeable = False
        with says(ValueError, "out", "writable"):
            call(good)
    elif bad == "broadcast":
        with says(ValueError, "out", "overlap itself"):
            call(np.lib.stride_tricks.as_strided(good, shape, (0,) * len(shape)))
    else:
        with says(TypeError, "out must be"):
            call([0.0])


def test_an_array_to_write_must_not_overlap_what_is_read() -> None:
    memory = np.zeros(7 * 64 * 4, np.uint8)
    b = nvfp4.QTensor.from_parts(memory[: 7 * 32].reshape(7, 32), B.scales, "nvfp4")
    values = memory.view(np.float32).reshape(7, 64)
    with says(ValueError, "out must not overlap codes"):
        b.dequantize(out=values)
    product = memory[:98].view(np.float16).reshape(7, 7)
    for left, right, name in ((b, B, "a.codes"), (B, b, "b.codes")):
        with says(ValueError, f"out must not overlap {name}"):
            nvfp4.matmul(left, right, out=product, out_dtype="float16")
    a = memory[: 7 * 128].view(np.float16).reshape(7, 64)
    with says(ValueError, "out must not overlap a"):
        nvfp4.matmul(a, B, out=product, out_dtype="float16")
    alpha = memory[:4].view(np.float32).reshape(())
    with says(ValueError, "out must not overlap alpha"):
        nvfp4.matmul(B, B, alpha=alpha, out=product, out_dtype="float16")


# --- products -------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", ["a", "b"])
def test_a_tuple_is_no_qtensor(position: str) -> None:
    pair = (B.codes, B.scales)
    a, b = (pair, B) if position == "a" else (B, pair)
    with says(TypeError, f"{position} must be a QTensor", "tuple", "from_parts"):
        nvfp4.matmul(a, b)  # type: ignore[arg-type]


def test_b_must_be_quantised() -> None:
    with says(TypeError, "b must be a QTensor", "ndarray"):
        nvfp4.matmul(B, X.astype(np.float16))  # type: ignore[arg-type]
    with says(TypeError, "b must be a QTensor"):
        nvfp4.matmul(X.astype(np.float16), X.astype(np.float16))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8])
def test_a_plain_operand_is_of_sixteen_bits(dtype: Any) -> None:
    with says(TypeError, "a", "bfloat16", "float16", np.dtype(dtype).name):
        nvfp4.matmul(X.astype(dtype), B)


def test_operands_have_the_same_depth() -> None:
    with says(ValueError, r"last axis \(K\)", r"\(5, 48\)", r"\(7, 64\)"):
        nvfp4.matmul(nvfp4.quantize(values(5, 48), "nvfp4"), B)
    with says(ValueError, r"last axis \(K\)", r"\(5, 48\)"):
        nvfp4.matmul(values(5, 48).astype(np.float16), B)


def test_operands_have_their_axes() -> None:
    with says(ValueError, r"b must have shape \[N, K\]"):
        nvfp4.matmul(B, EXPERTS)
    with says(ValueError, r"b must have shape \[E, N, K\]"):
        nvfp4.grouped_matmul(X.astype(np.float16), B, row_offsets=OFFSETS)
    with says(ValueError, r"a must have shape \[M, K\]"):
        nvfp4.matmul(values(64).astype(np.float16), B)


def test_a_grouped_operand_belongs_to_grouped_matmul() -> None:
    a = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS)
    with says(ValueError, "a", "grouped_matmul"):
        nvfp4.matmul(a, B)


def test_a_grouped_operand_has_the_offsets_of_the_call() -> None:
    a = nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS)
    with says(ValueError, "row_offsets must be the groups of a"):
        nvfp4.grouped_matmul(a, EXPERTS, row_offsets=np.array([0, 1, 2, 5]))
    with says(ValueError, "row_offsets must be the groups of a", "3 ranges"):
        nvfp4.grouped_matmul(a, EXPERTS, row_offsets=np.array([0, 5]))


def test_a_dense_operand_of_a_grouped_product_has_linear_scales() -> None:
    with says(ValueError, "a must be a grouped QTensor", "linear"):
        nvfp4.grouped_matmul(nvfp4.quantize(X, "nvfp4"), EXPERTS, row_offsets=OFFSETS)


def test_rows_are_picked_from_linear_scales_alone() -> None:
    indices = np.array([0, 0, 4, 2, 1])
    for a, word in (
        (nvfp4.quantize(X, "nvfp4"), "linear"),
        (
            nvfp4.grouped_quantize(X, "nvfp4", row_offsets=OFFSETS, scale_layout="linear"),
            "grouped",
        ),
    ):
        with says(ValueError, "a must", word, "row_indices"):
            nvfp4.grouped_matmul(a, EXPERTS, row_offsets=OFFSETS, row_indices=indices)


STACKED = values(3, 5, 64).astype(np.float16)
COUNTS = np.array([2, 0, 5], np.int32)


def test_either_offsets_or_counts_are_given() -> None:
    with says(TypeError, "row_offsets must be an array", "row_counts"):
        nvfp4.grouped_matmul(X.astype(np.float16), EXPERTS)
    for name in ("row_offsets", "expert_ids", "row_indices"):
        with says(ValueError, f"{name} must not be given", "row_counts"):
            nvfp4.grouped_matmul(STACKED, EXPERTS, row_counts=COUNTS, **{name: OFFSETS})


def test_counts_belong_to_a_stack_of_a_matrix_an_expert() -> None:
    with says(ValueError, r"a must have shape \[E, capacity, K\]"):
        nvfp4.grouped_matmul(X.astype(np.float16), EXPERTS, row_counts=COUNTS)
    with says(ValueError, r"a and b must have the same first axis \(E\)", "2 matrices"):
        nvfp4.grouped_matmul(STACKED[:2], EXPERTS, row_counts=COUNTS[:2])
    with says(ValueError, r"row_counts must have shape \(3,\)"):
        nvfp4.grouped_matmul(STACKED, EXPERTS, row_counts=COUNTS[:2])
    with says(TypeError, "row_counts", "int32", "int64", "uint32", "int8"):
        nvfp4.grouped_matmul(STACKED, EXPERTS, row_counts=COUNTS.astype(np.int8))
    for bad in (-1, 6):
        with says(ValueError, "row_counts must be from 0 to the capacity, 5", f"{bad} at index 1"):
            nvfp4.grouped_matmul(STACKED, EXPERTS, row_counts=np.array([0, bad, 0]))


def test_out_of_counted_rows_is_a_stack() -> None:
    with says(ValueError, r"out must have shape \(3, 5, \d+\)"):
        out = np.zeros((15, EXPERTS.shape[1]), np.float32)
        more = {"out": out, "out_dtype": "float32"}
        nvfp4.grouped_matmul(STACKED, EXPERTS, row_counts=COUNTS, **more)


@pytest.mark.parametrize("alpha", [None, "1", True, [1.0]])
def test_alpha_is_a_number_or_an_array(alpha: Any) -> None:
    with says(TypeError, "alpha"):
        nvfp4.matmul(B, B, alpha=alpha)


def test_alpha_is_of_the_right_shape_and_dtype() -> None:
    with says(TypeError, "alpha", "float32", "float64"):
        nvfp4.matmul(B, B, alpha=np.ones(()))
    with says(ValueError, "alpha", r"\(7,\)"):
        nvfp4.matmul(B, B, alpha=np.ones(7, np.float32))
    with says(ValueError, "alpha", r"\(3,\)", r"\(2,\)"):
        nvfp4.grouped_matmul(
            X.astype(np.float16), EXPERTS, row_offsets=OFFSETS, alpha=np.ones(2, np.float32)
        )


def test_out_dtype_is_a_float_or_a_format() -> None:
    with says(TypeError, "out_dtype", "bfloat16", "float64"):
        nvfp4.matmul(B, B, out_dtype="float64")
    with says(TypeError, "out_dtype", "int8"):
        nvfp4.matmul(B, B, out_dtype=np.int8)
    with says(TypeError, "out_dtype", "NoneType"):
        nvfp4.matmul(B, B, out_dtype=None)
    with says(ValueError, "out_dtype", "nvfp5"):
        nvfp4.matmul(B, B, out_dtype="nvfp5")
    quantised = nvfp4.quantize(values(5, 32), "mxfp4")
    with says(TypeError, "out must be an array of bfloat16", "got a QTensor", "out_dtype='mxfp4'"):
        nvfp4.matmul(B, B, out=quantised)


def test_a_quantised_result_has_whole_blocks() -> None:
    with says(ValueError, r"columns of the result \(N", "multiple of 16", "'nvfp4'", "got 7$"):
        nvfp4.matmul(B, B, out_dtype="nvfp4")
    pairs = nvfp4.Epilogue(lambda even, odd, row, column, expert: even, pair=True)
    wide = nvfp4.quantize(values(24, 64), "nvfp4")
    with says(ValueError, "N/2 of an epilogue of pairs", "multiple of 16", "got 12$"):
        nvfp4.matmul(B, wide, out_dtype="nvfp4", epilogue=pairs)


@pytest.mark.parametrize("dtype", ["float64", "int8", np.float64])
def test_values_are_of_three_dtypes(dtype: Any) -> None:
    with says(TypeError, "dtype", "float32", "float16", "bfloat16"):
        B.dequantize(dtype)


def test_a_dtype_that_does_not_exist_is_refused() -> None:
    with says(ValueError, "dtype", "float33"):
        B.dequantize("float33")
    with says(TypeError, "dtype"):
        B.dequantize(7.5)


# --- scales ---------------------------------------------------------------------------------------


def test_scales_to_rearrange_have_their_axes() -> None:
    with says(ValueError, "scales", r"\[M, blocks\]"):
        nvfp4.interleave_scales(np.zeros(4, np.uint8))
    with says(ValueError, "scales", r"\(1, 1, 32, 4, 4\)", r"\(2, 1, 32, 4, 4\)"):
        nvfp4.deinterleave_scales(np.zeros((2, 1, 32, 4, 4), np.uint8), (128, 4))
    with says(ValueError, "scales"):
        nvfp4.deinterleave_scales(np.zeros((128, 4), np.uint8), (128, 4))


@pytest.mark.parametrize("shape", [(128,), 128, (128, 4, 1), (1.5, 4), None])
def test_the_shape_of_scales_is_two_ints(shape: Any) -> None:
    with says(TypeError, "shape", "two ints"):
        nvfp4.deinterleave_scales(np.zeros((1, 1, 32, 4, 4), np.uint8), shape)


@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.uint16])
def test_scales_are_bytes(dtype: Any) -> None:
    with says(TypeError, "scales", "uint8", np.dtype(dtype).name):
        nvfp4.interleave_scales(np.zeros((4, 4), dtype))
    with says(TypeError, "scales", "uint8"):
        nvfp4.deinterleave_scales(np.zeros((1, 1, 32, 4, 4), dtype), (4, 4))


# --- streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", ["0", 1.5, object(), [0], True])
def test_a_stream_is_an_int_or_has_the_protocol(stream: Any) -> None:
    with says(TypeError, "stream", "__cuda_stream__"):
        nvfp4.quantize(X, "nvfp4", stream=stream)


def test_a_stream_handle_is_not_negative() -> None:
    with says(ValueError, "stream", "-1"):
        nvfp4.quantize(X, "nvfp4", stream=-1)
