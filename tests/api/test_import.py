"""``import nvfp4``: light, lazy, and with the names of the design."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

import nvfp4

PUBLIC = {
    "BlockFormat", "Epilogue", "QTensor", "SimulationError", "ToolchainError", "UnsupportedError",
    "deinterleave_scales", "epilogues", "grouped_matmul", "grouped_quantize", "interleave_scales",
    "matmul", "plan_matmul", "prepare_weights", "quantize", "quantize_rows", "rmsnorm_quantize",
    "simulate", "swiglu_quantize",
}  # fmt: skip

SIGNATURES = {
    "quantize": "(x, format, *, encode_scale=None, scale_rounding='rceil', scale_layout='tcgen', "
    "row_counts=None, out=None, stream=None)",
    "swiglu_quantize": "(gate_up, format, *, halves='split', kind='silu', row_offsets=None, "
    "expert_ids=None, row_indices=None, row_counts=None, encode_scale=None, "
    "scale_rounding='rceil', scale_layout='tcgen', return_hidden=False, out=None, stream=None)",
    "rmsnorm_quantize": "(x, weight, eps, format, *, residual=None, residual_out=None, "
    "norm_out=None, row_offsets=None, expert_ids=None, row_indices=None, row_counts=None, "
    "encode_scale=None, scale_rounding='rceil', scale_layout='tcgen', return_hidden=False, "
    "out=None, stream=None)",
    "grouped_quantize": "(x, format, *, row_offsets, expert_ids=None, row_indices=None, "
    "encode_scale=None, scale_rounding='rceil', scale_layout='tcgen', out=None, stream=None)",
    "matmul": "(a, b, *, alpha=1.0, out=None, out_dtype='bfloat16', epilogue=None, compute=None, "
    "a_scale=None, batch_invariant=False, stream=None)",
    "grouped_matmul": "(a, b, *, row_offsets=None, expert_ids=None, row_indices=None, "
    "row_counts=None, alpha=None, out=None, out_dtype='bfloat16', epilogue=None, compute=None, "
    "a_scale=None, batch_invariant=False, stream=None)",
    "quantize_rows": "(x, *, out=None, stream=None)",
    "prepare_weights": "(b, *, out=None, stream=None)",
    "interleave_scales": "(scales, *, out=None, stream=None)",
    "deinterleave_scales": "(scales, shape, *, out=None, stream=None)",
}


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def bare(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_the_design(name: str) -> None:
    assert bare(getattr(nvfp4, name)) == SIGNATURES[name]


def test_the_methods_of_a_tensor_are_those_of_the_design() -> None:
    assert bare(nvfp4.QTensor.dequantize) == "(self, dtype='float32', *, out=None, stream=None)"
    assert bare(nvfp4.QTensor.from_parts).startswith("(codes, scales, format, *, shape=None, ")


def test_the_public_names_are_listed_and_there() -> None:
    assert set(nvfp4.__all__) == PUBLIC
    assert set(dir(nvfp4)) >= PUBLIC
    for name in PUBLIC:
        assert getattr(nvfp4, name) is not None
    assert nvfp4.epilogues.__name__ == "nvfp4.epilogues"
    with pytest.raises(AttributeError, match="prepare_wieghts"):
        nvfp4.prepare_wieghts  # noqa: B018


@pytest.mark.parametrize("name", sorted(PUBLIC - {"epilogues"}))
def test_every_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(nvfp4, name))


FORBIDDEN = ("numba", "llvmlite", "cupy", "cuda", "torch", "jax")


def test_importing_takes_neither_a_compiler_nor_a_driver_nor_a_library_of_arrays() -> None:
    loaded = run(
        "import sys; before = set(sys.modules); import nvfp4\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    ).split()
    assert "nvfp4" in loaded
    assert not set(loaded) & {*FORBIDDEN, "numpy", "ml_dtypes", "greenlet"}


def test_work_on_numpy_arrays_takes_none_of_them_either() -> None:
    loaded = run(
        "import sys, numpy as np, nvfp4\n"
        "q = nvfp4.quantize(np.ones((3, 64), np.float16), 'nvfp4')\n"
        "nvfp4.matmul(q, q)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    ).split()
    assert not set(loaded) & set(FORBIDDEN)


def test_importing_is_fast() -> None:
    program = "import time; t = time.perf_counter(); import nvfp4; print(time.perf_counter() - t)"
    run(program)  # the bytecode is written the first time
    assert min(float(run(program)) for _ in range(3)) < 0.3
