"""What Modular's functions refuse: each message names the argument, what is allowed, what came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4.compat import modular

from .modular_cases import BF16, E4M3, E8M0, POISON, empty, outputs

X = np.ones((5, 64), BF16)
CODES, SCALES = outputs("nvfp4", 5, 64)


def refused(error: type[Exception], message: str, function: Any, *args: Any, **more: Any) -> None:
    """The call fails with this message, and writes nothing to the outputs above."""
    with pytest.raises(error, match=message):
        function(*args, **more)
    for part in (CODES, SCALES):
        assert (part.view(np.uint8) == POISON).all()


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (
            r"output_device must have shape \[M, columns\]; got \(160,\)",
            {"output": CODES.reshape(-1)},
        ),
        (r"output_device must have the 5 rows", {"output": empty((4, 32), np.uint8)}),
        (r"output_device must have 32 columns for 64", {"output": empty((5, 31), np.uint8)}),
        (
            r"scales_device must have shape \(1, 1, 32, 4, 4\)",
            {"scales": empty((1, 2, 32, 4, 4), E4M3)},
        ),
        (r"scales_device must have shape \(5, 4\)", {"scales": empty((5, 5), E4M3)}),
        (r"input_device must have shape \[M, N\]; got \(5, 8, 8\)", {"x": X.reshape(5, 8, 8)}),
        (r"SF_VECTOR_SIZE must be 16 for scales_device of float8_e4m3fn; got 32", {"size": 32}),
        (r"SF_VECTOR_SIZE must be 16 \(nvfp4\) or 32", {"size": 8}),
        (r"SF_VECTOR_SIZE must be given.*uint8", {"scales": SCALES.view(np.uint8)}),
        (r"needs scales of e8m0", {"output": empty((5, 64), E4M3)}),
        (
            r"tensor_sf must be 1 for mxfp4 with scales of two axes",
            {"scales": empty((5, 2), E8M0), "sf": 2},
        ),
    ],
)  # fmt: skip
def test_shapes_and_sizes_of_a_quantiser(message: str, change: dict[str, Any]) -> None:
    refused(
        ValueError,
        message,
        modular.quantize_dynamic_block_scaled,
        change.get("output", CODES),
        change.get("scales", SCALES),
        change.get("x", X),
        change.get("sf", 1.0),
        SF_VECTOR_SIZE=change.get("size"),
    )


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (
            "output_device must be of dtype uint8 or float8_e4m3fn; got int8",
            {"output": CODES.view(np.int8)},
        ),
        (
            "scales_device must be of dtype float8_e4m3fn.*; got int8",
            {"scales": SCALES.view(np.int8)},
        ),
        ("input_device must be of dtype float32.*got int32", {"x": np.ones((5, 64), np.int32)}),
        ("tensor_sf must be a number", {"sf": None}),
        ("tensor_sf must be a number", {"sf": "amax"}),
        ("stream must be None", {"ctx": "cuda"}),
    ],
)  # fmt: skip
def test_dtypes_of_a_quantiser(message: str, change: dict[str, Any]) -> None:
    refused(
        TypeError,
        message,
        modular.quantize_dynamic_block_scaled,
        change.get("output", CODES),
        change.get("scales", SCALES),
        change.get("x", X),
        change.get("sf", 1.0),
        change.get("ctx"),
    )


def test_options_of_the_two_kernels_functions() -> None:
    function, args = modular.quantize_dynamic_scaled_fp4fp8, (None, CODES, SCALES, X)
    refused(
        ValueError, "num_cols must be the number of columns.*64; got 32", function, *args, 32, 64
    )
    refused(ValueError, "num_cols_padded must be.*64; got 128", function, *args, 64, 128)
    refused(ValueError, "num_max_threads.*got 100", function, *args, 64, 64, num_max_threads=100)
    refused(
        TypeError, "num_max_threads must be an int", function, *args, 64, 64, num_max_threads="a"
    )
    function = modular.quantize_dynamic_scaled_fp4_async
    refused(ValueError, "SF_VECTOR_SIZE must be 16", function, *args, SF_VECTOR_SIZE=32)
    wrong = empty(SCALES.shape, E8M0)
    refused(TypeError, "scales_tensor_tile.*got float8_e8m0fnu", function, None, CODES, wrong, X)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        (r"scales_offsets must have 2 elements.*got 3", {"scales_offsets": np.zeros(3, np.uint32)}),
        (r"row_offsets must have E \+ 1 elements", {"row_offsets": np.zeros(0, np.uint32)}),
        (r"expert_ids must have", {"expert_ids": np.zeros(3, np.int32)}),
        (r"row_offsets must not decrease", {"row_offsets": np.array([0, 5, 3], np.uint32)}),
        (
            r"row_offsets must end at or before the number of rows, 5",
            {"row_offsets": np.array([0, 1, 9])},
        ),
        (
            r"expert_ids must be below the number of experts, 2",
            {"expert_ids": np.array([0, 2], np.int32)},
        ),
        (r"sf_tensor must be finite", {"sf_tensor": np.array([0, 1], np.float32)}),
        (r"sf_tensor must have shape \[E\]", {"sf_tensor": np.ones((2, 1), np.float32)}),
        (r"within the 4 tiles", {"scales_offsets": np.array([0, 4], np.uint32)}),
        (r"no tile of scales to two ranges", {"scales_offsets": np.array([1, 1], np.uint32)}),
        (
            r"scales_tensor must have shape \[tiles, 1, 32, 4, 4\]",
            {"scales_tensor": empty((4, 2, 32, 4, 4), E4M3)},
        ),
        (
            r"a row for each of input_tensor.*, 5; got shape \(4, 32\)",
            {"output_tensor": empty((4, 32), np.uint8)},
        ),
        (r"a row for each.*, 3; got shape \(5, 32\)", {"row_indices": np.zeros(3, np.int32)}),
        (r"k_tiles_per_block must be None, 1, 2, 4 or 8; got 3", {"k_tiles_per_block": 3}),
        (r"num_threads must be a multiple of 32", {"num_threads": 8}),
    ],
)  # fmt: skip
def test_ranges_of_the_grouped_quantiser(message: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {
        "output_tensor": CODES,
        "scales_tensor": empty((4, 1, 32, 4, 4), E4M3),
        "input_tensor": X,
        "row_offsets": np.array([0, 3, 5], np.uint32),
        "scales_offsets": np.array([0, 1], np.uint32),
        "expert_ids": np.array([0, 1], np.int32),
        "sf_tensor": np.ones(2, np.float32),
    }
    function = modular.grouped_quantize_dynamic_scaled_fp4_async
    refused(ValueError, message, function, **{**arguments, **change})


def test_scales_that_are_rearranged() -> None:
    source = np.zeros((5, 4), E4M3)
    function = modular.block_scales_interleave
    refused(ValueError, "SF_VECTOR_SIZE must be 16", function, SCALES, source, SF_VECTOR_SIZE=0)
    refused(
        ValueError,
        "output_scales_device must have shape",
        function,
        empty((1, 2, 32, 4, 4), E4M3),
        source,
    )
    refused(
        TypeError,
        "output_scales_device.*input_scales_device is of",
        function,
        empty((1, 1, 32, 4, 4), E8M0),
        source,
    )
    refused(
        ValueError, "SF_VECTOR_SIZE must be 16 for", function, SCALES, source, SF_VECTOR_SIZE=32
    )
    refused(
        ValueError, r"input_scales_device must have shape \[M, S\]", function, SCALES, source[0]
    )
    function = modular.block_scales_interleave_fp4
    refused(
        ValueError,
        "SF_VECTOR_SIZE must be 16 or 32; got 64",
        function,
        None,
        source,
        SCALES,
        SF_VECTOR_SIZE=64,
    )
    refused(ValueError, "num_max_threads", function, None, source, SCALES, num_max_threads=2048)


A, A_SCALES = np.zeros((5, 32), np.uint8), np.zeros((1, 1, 32, 4, 4), E4M3)
C = empty((5, 5), BF16)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, r"c must have shape \(5, 5\)", {"c": empty((5, 6), BF16)}),
        (
            TypeError,
            r"c must be of dtype bfloat16 or float32 or float16; got float64",
            {"c": empty((5, 5), np.float64)},
        ),
        (ValueError, r"transpose_b must be True", {"transpose_b": False}),
        (
            ValueError,
            r"same last axis \(K\)",
            {"b": np.zeros((5, 64), np.uint8), "b_scales": np.zeros((1, 2, 32, 4, 4), E4M3)},
        ),
        (ValueError, r"a_scales must have shape \[tiles", {"a_scales": np.zeros((5, 4), E4M3)}),
        (
            TypeError,
            r"a_scales must be of dtype",
            {"a_scales": np.zeros((1, 1, 32, 4, 4), np.int8)},
        ),
        (TypeError, r"b must be of dtype uint8", {"b": np.zeros((5, 32), np.int32)}),
        (ValueError, r"SF_VECTOR_SIZE must be given", {"a_scales": A_SCALES.view(np.uint8)}),
        (ValueError, r"cannot be mxfp4", {"a_format": "mxfp4"}),
        (TypeError, r"elementwise_lambda_fn must be None", {"elementwise_lambda_fn": 3}),
        (
            TypeError,
            r"must take \(value, row, column, expert\)",
            {"elementwise_lambda_fn": lambda value: value},
        ),
        (
            ValueError,
            r"a and a_scales: .*multiple of 16 for nvfp4",
            {"a": np.zeros((5, 36), np.uint8), "a_scales": np.zeros((1, 2, 32, 4, 4), E4M3)},
        ),
    ],
)
def test_operands_and_options_of_a_product(
    error: Any, message: str, change: dict[str, Any]
) -> None:
    arguments = {
        "c": C,
        "a": A,
        "b": A,
        "a_scales": A_SCALES,
        "b_scales": A_SCALES,
        "tensor_sf": 1.0,
        **change,
    }
    refused(error, message, modular.block_scaled_matmul_with_epilogue, **arguments)
    assert (C.view(np.uint8) == POISON).all()


def test_options_of_the_other_products() -> None:
    arrays = (C, A, A, A_SCALES, A_SCALES)
    function = modular.block_scaled_matmul
    refused(ValueError, "transpose_a must be False", function, *arrays, 1.0, transpose_a=True)
    both = {f"elementwise_{kind}fn": lambda c, v: v for kind in ("lambda_", "compute_lambda_")}
    refused(ValueError, "must not both be given", function, *arrays, 1.0, **both)
    function = modular.naive_block_scaled_matmul
    refused(ValueError, "scaling_kind must be one of", function, *arrays, scaling_kind="KIND_F16")
    for kind in ("KIND_MXF4", "UMMAKind.KIND_MXF8F6F4"):
        refused(
            ValueError,
            "SF_VECTOR_SIZE must be 16 for a_scales",
            function,
            *arrays,
            scaling_kind=kind,
        )
    kind = {"scaling_kind": "UMMAKind.KIND_MXF4NVF4"}
    refused(
        ValueError, "accum_type must be float32", function, *arrays, **kind, accum_type="float16"
    )
    refused(ValueError, "BLOCK_DIM must be", function, *arrays, **kind, BLOCK_DIM=64)
    refused(
        ValueError,
        "SF_VECTOR_SIZE must be 16 for KIND",
        function,
        *arrays,
        **kind,
        SF_VECTOR_SIZE=32,
    )


def test_amds_functions() -> None:
    output, scales = outputs("mxfp4", 5, 64, "linear")
    quantise, flat = modular.quantize_mx_amd, modular.quantize_dynamic_block_scaled_mxfp4
    refused(
        ValueError, r"scales_tile must have shape \(5, 2\)", quantise, None, output, scales[:4], X
    )
    refused(
        ValueError, r"scales_tile must have shape \[M, K/32\]", quantise, None, output, SCALES, X
    )
    refused(
        ValueError,
        r"SF_VECTOR_SIZE must be 16 for scales_tile",
        quantise,
        None,
        output,
        scales.view(E4M3),
        X,
    )
    refused(ValueError, r"output must have 160 elements for 320", flat, output[:4], scales, X)
    refused(ValueError, r"output_scales must have 10 elements", flat, output, scales[:4], X)
    refused(ValueError, r"input must be contiguous", flat, output, scales, np.asfortranarray(X))
    refused(ValueError, r"output must be contiguous", flat, np.asfortranarray(output), scales, X)
    product = modular.matmul_dynamic_block_scaled_amd
    refused(
        ValueError, r"c must have shape \(5, 5\)", product, C[:4], output, output, scales, scales
    )
    refused(
        TypeError,
        r"a must be of dtype uint8",
        product,
        C,
        X.view(np.uint16),
        output,
        scales,
        scales,
    )
    grouped = modular.grouped_matmul_block_scaled_amd
    ranges = (np.array([0, 5], np.uint32), np.array([0], np.int32))
    parts = (C, output, output[None], scales, scales[None], *ranges)
    refused(
        ValueError, "num_active_experts must be from 0 to 1, since row_offsets", grouped, *parts, 2
    )
    refused(TypeError, "num_active_experts must be an int", grouped, *parts, 1.0)
    refused(ValueError, "b must have shape", grouped, C, output, output, scales, scales, *ranges, 1)


def test_outputs_that_overlap_an_input_are_refused() -> None:
    memory = np.zeros(4096, np.uint8)
    x = memory[:640].view(BF16).reshape(5, 64)
    with pytest.raises(ValueError, match=r"output_device must not overlap input_device"):
        modular.quantize_dynamic_block_scaled(memory[:160].reshape(5, 32), SCALES.copy(), x, 1.0)


def test_a_factor_that_is_no_number() -> None:
    arrays = (C, A, A, A_SCALES, A_SCALES)
    message = r"tensor_sf must be a number or a float32 array of shape \(\)"
    refused(ValueError, message, modular.block_scaled_matmul, *arrays, np.ones(5, np.float32))
    message = r"alpha must be a number or a float32 array; got None"
    kind = {"scaling_kind": "KIND_MXF4NVF4"}
    refused(TypeError, message, modular.naive_block_scaled_matmul, *arrays, None, None, **kind)
    message = r"tensor_sf must be finite.*got 0.0"
    zero = np.zeros((), np.float32)
    refused(ValueError, message, modular.quantize_dynamic_block_scaled, CODES, SCALES, X, zero)


def test_an_epilogue_is_one_of_the_packages_own_too() -> None:
    c = empty((5, 5), np.float32)
    more = {"elementwise_lambda_fn": nvfp4.epilogues.bias(np.arange(5, dtype=np.float32))}
    modular.naive_block_scaled_matmul(
        c, A, A, A_SCALES, A_SCALES, scaling_kind="KIND_MXF4NVF4", **more
    )
    np.testing.assert_array_equal(c, np.tile(np.arange(5), (5, 1)))
