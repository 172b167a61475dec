"""The seed's eight kernels by their names: what they stand for, on the simulated machine, built."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import nvfp4
from nvfp4 import compile as compiler
from nvfp4 import kernels, launch, plans
from nvfp4.arrays import as_array
from nvfp4.bench.quantize_kernels import taking
from nvfp4.cli.main import program as command
from nvfp4.compat import modular
from nvfp4.compat.modular._options import element_function
from nvfp4.formats import NVFP4
from nvfp4.plans_tma import quantize_tma

from .modular_cases import BF16, empty, expected, rows_of, same, tiled

ARCH = "sm_90a"
KERNELS = (
    "grouped_quantize_dynamic_scaled_fp4_async_kernel",
    "quantize_dynamic_scaled_async_fp4_kernel",
    "quantize_dynamic_scaled_fp4fp8_kernel",
    "block_scales_interleave_fp4_kernel",
    "naive_block_scaled_matmul_kernel",
    "quantize_dynamic_block_scaled_mxfp4_kernel",
    "matmul_dynamic_block_scaled_amd_kernel",
    "grouped_matmul_block_scaled_amd_kernel",
)
FACTOR = np.float32(0.43)


def run(one: launch.Launch, buffers: dict[str, Any]) -> None:
    """A launch on the simulated machine, the arrays' bytes in place."""
    bound = {
        name: as_array(value, name) if isinstance(value, np.ndarray) else value
        for name, value in buffers.items()
    }
    with nvfp4.simulate(ARCH) as machine:
        launch.run((one,), bound, machine=machine)


def aligned(array: np.ndarray) -> np.ndarray:
    """A copy at a multiple of 16 bytes, which these kernels rely on."""
    memory = np.empty(array.nbytes + 16, np.uint8)
    start = -memory.ctypes.data % 16
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def dense_facts(rows: int, columns: int, **more: Any) -> dict[str, Any]:
    return {
        **{"format": "nvfp4", "dtype": "bfloat16", "rows": rows, "columns": columns, "batches": 1},
        **{"row_stride": columns, "batch_stride": 0, "scale_layout": "tcgen", "aligned": True},
        **{"scale_rounding": "rceil", "encode": "scalar", **more},
    }


def quantise(plan: Callable[[int, int], launch.Launch]) -> launch.Launch:
    """Run a dense nvfp4 quantiser with a factor, and compare every byte."""
    x = rows_of(1, 130, 128)
    one = plan(130, 128)
    buffers = {
        "x": aligned(x),
        "codes": aligned(empty((130, 64), np.uint8)),
        "scales": aligned(empty((2, 2, 32, 4, 4), np.uint8)),
        "decode_scale": empty((), np.float32),
        "encode_scale": FACTOR,
    }
    run(one, buffers)
    codes, blocks = expected(x, "nvfp4", FACTOR)
    same(buffers["codes"], codes)
    same(buffers["scales"], tiled(blocks))
    assert buffers["decode_scale"] == np.float32(1) / FACTOR
    return one


def fp4fp8() -> launch.Launch:
    return quantise(lambda m, n: plans.quantize(ARCH, **dense_facts(m, n))[0])


def by_tensor_copies() -> launch.Launch:
    def plan(m: int, n: int) -> launch.Launch:
        program = modular.quantize_dynamic_scaled_async_fp4_kernel
        constants = {"LAYOUT": "tcgen", **dict(program.constants)}
        buffers = ("x", "codes", "scales", "decode_scale", "encode_scale", "decode_scale")
        one = quantize_tma(ARCH, NVFP4, constants, buffers, "scalar", "1", m, n, 1, n, 0)
        assert one is not None
        return one

    return quantise(plan)


def flat_mxfp4() -> launch.Launch:
    x = rows_of(2, 9, 64)
    facts = {"format": "mxfp4", "scale_layout": "linear", "scale_rounding": "even"}
    (one,) = plans.quantize(ARCH, **dense_facts(9, 64, **facts, encode="none"))
    buffers = {
        "x": aligned(x),
        "codes": aligned(empty((9, 32), np.uint8)),
        "scales": aligned(empty((9, 2), np.uint8)),
        "decode_scale": empty((), np.float32),
    }
    run(one, buffers)
    codes, blocks = expected(x, "mxfp4", None, "even")
    same(buffers["codes"], codes)
    same(buffers["scales"], blocks)
    return one


def grouped() -> launch.Launch:
    x = rows_of(3, 10, 64)
    with taking("k4"):
        (one,) = plans.grouped_quantize(
            ARCH,
            **{"format": "nvfp4", "dtype": "bfloat16", "input_rows": 10, "rows": 10, "columns": 64},
            **{"row_stride": 64, "groups": 3, "tiles": 4, "scale_layout": "tcgen", "aligned": True},
            **{"scale_rounding": "rceil", "encode": "expert", "experts": 2},
            **{"offsets_dtype": "uint32", "ids_dtype": "int32", "indices_dtype": None},
            starts_dtype="int64",
        )
    buffers = {
        "x": aligned(x),
        "codes": aligned(empty((10, 32), np.uint8)),
        "scales": aligned(empty((4, 1, 32, 4, 4), np.uint8)),
        "row_offsets": np.array([0, 4, 4, 9], np.uint32),
        "expert_ids": np.array([1, 0, 0], np.int32),
        "tile_starts": np.array([2, 3, 0], np.int64),
        "encode_scale": np.array([1, FACTOR], np.float32),
        "decode_scale": empty((3,), np.float32),
        "row_indices": None,
    }
    run(one, buffers)
    codes, blocks = expected(x[:9], "nvfp4", np.repeat([FACTOR, np.float32(1)], [4, 5]))
    same(buffers["codes"][:9], codes)
    assert not buffers["codes"][9].any()
    same(buffers["scales"], tiled(blocks, 4, [256 + r for r in range(4)] + list(range(5))))
    return one


def interleave() -> launch.Launch:
    scales = np.random.default_rng(4).integers(0, 255, (130, 5)).astype(np.uint8)
    (one,) = plans.interleave_scales(ARCH, rows=130, blocks=5, batches=1)
    out = empty((2, 2, 32, 4, 4), np.uint8)
    run(one, {"scales": scales, "out": out})
    same(out, tiled(scales))
    return one


def product(format: str, layout: str, grouped: bool, **more: Any) -> launch.Launch:
    rng = np.random.default_rng(5)
    a = nvfp4.quantize(rng.integers(-6, 7, (5, 64)).astype(BF16), format, scale_layout=layout)
    shape = (2, 9, 64) if grouped else (9, 64)
    b = nvfp4.quantize(rng.integers(-6, 7, shape).astype(BF16), format, scale_layout=layout)
    facts = {
        **{"rows": 5, "columns": 9, "depth": 64, "a_format": format, "a_dtype": None},
        **{"a_layout": layout, "decode_a": "scalar", "b_format": format, "b_layout": layout},
        **{"decode_b": "scalar", "alpha": "value", "out_dtype": "bfloat16", "aligned": True},
    }
    buffers: dict[str, Any] = {"alpha": np.float32(0.5), "out": empty((5, 9), BF16)}
    for letter, q in (("a", a), ("b", b)):
        buffers |= {
            f"{letter}_codes": aligned(q.codes),
            f"{letter}_scales": q.scales,
            f"{letter}_decode": q.decode_scale,
        }
    left, right = a.dequantize(), b.dequantize()
    wanted = np.zeros((5, 9), np.float32)
    if grouped:
        offsets, ids = np.array([0, 2, 3, 4], np.uint32), np.array([1, -1, 0], np.int32)
        buffers |= {"row_offsets": offsets, "expert_ids": ids}
        buffers |= dict.fromkeys(("row_indices", "tile_starts"))
        facts |= {"input_rows": 5, "experts": 2, "groups": 3, "starts_dtype": None}
        facts |= {"offsets_dtype": "uint32", "ids_dtype": "int32", "indices_dtype": None}
        (one,) = plans.grouped_matmul(ARCH, **facts)
        wanted[:2], wanted[3] = left[:2] @ right[1].T, left[3] @ right[0].T
    else:
        (one,) = plans.matmul(ARCH, **facts, **more)
        wanted = left @ right.T
    run(one, buffers)
    np.testing.assert_array_equal(buffers["out"], (np.float32(0.5) * wanted).astype(BF16))
    return one


RUNS: dict[str, Callable[[], launch.Launch]] = dict(
    zip(
        KERNELS,
        (
            grouped,
            by_tensor_copies,
            fp4fp8,
            interleave,
            lambda: product("nvfp4", "tcgen", False, reference=True),
            flat_mxfp4,
            lambda: product("mxfp4", "linear", False, reference=True),
            lambda: product("mxfp4", "linear", True),
        ),
        strict=True,
    )
)


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_runs_on_the_simulated_machine_and_is_what_the_plan_takes(name: str) -> None:
    assert RUNS[name]().program == getattr(modular, name)


#: Products take many seconds to build, and the gates build the kernels that they stand for.
built = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=(pytest.mark.slow,) if "matmul" in name else ()) for name in KERNELS],
)


@built
def test_nvfp4_compile_takes_the_name(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVFP4_CACHE_DIR", str(tmp_path))
    result = CliRunner().invoke(command, ["compile", name, "--arch", ARCH, "--json"])
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["kernel"] == getattr(modular, name).label
    assert row["faults"] == []


def test_a_name_stands_for_a_program_and_its_constants_can_be_changed() -> None:
    name = "quantize_dynamic_scaled_fp4fp8_kernel"
    shown = CliRunner().invoke(command, ["compile", name, "--arch", ARCH, "--set", "ELEMENT=e9m9"])
    assert shown.exit_code == 2
    assert "ELEMENT must be one of e2m1, e4m3, e5m2" in shown.stderr
    assert set(KERNELS) <= set(dir(modular))
    with pytest.raises(AttributeError, match="no attribute 'other_kernel'"):
        modular.other_kernel  # noqa: B018


def test_the_names_are_listed_and_are_no_second_kernels() -> None:
    listed = CliRunner().invoke(command, ["compile", "--list"]).stdout
    for name in KERNELS:
        assert f"\n{name} " in listed
        assert name not in kernels.KERNELS
        assert kernels.program(name) is getattr(modular, name)
    assert kernels.program("interleave_scales").kernel.name == "interleave_scales"
    with pytest.raises(ValueError, match="kernel must be one of"):
        kernels.program("quantize_dynamic_scaled_kernel")


SCALE = np.float32(0.5)


def scaled(coords, value):  # type: ignore[no-untyped-def]
    row, column = coords
    if value < np.float32(0):
        return value * SCALE + np.float32(row)
    return value + np.float32(column)


def test_an_epilogue_of_the_seeds_two_parameters_is_compiled_into_the_kernel() -> None:
    epilogue = element_function("elementwise_lambda_fn", scaled)
    assert epilogue is not None
    (one,) = plans.matmul(
        ARCH,
        **{"rows": 64, "columns": 64, "depth": 64, "a_format": "nvfp4", "a_dtype": None},
        **{"a_layout": "tcgen", "decode_a": "scalar", "b_format": "nvfp4", "b_layout": "tcgen"},
        **{"decode_b": "scalar", "alpha": "value", "out_dtype": "bfloat16", "aligned": True},
        epilogue=epilogue.code(()),
        reference=True,
    )
    binary, ptx = compiler.inspect(one.program, ARCH)
    assert compiler.faults(binary, ptx) == ()
    # Made anew, it is the same program, which is built once.
    again = element_function("elementwise_lambda_fn", scaled)
    assert again is not None and again.code(()) == epilogue.code(())
