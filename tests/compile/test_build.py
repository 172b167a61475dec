from __future__ import annotations

import gc
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nvfp4 import _numba, toolchain
from nvfp4 import compile as compiler
from nvfp4.architectures import ARCHITECTURES
from nvfp4.cache import Cache
from nvfp4.cubin import CubinError, read_cubin
from nvfp4.errors import ToolchainError, UnsupportedError

from .programs import (
    CHAIN,
    EVERY_TYPE,
    IN_DOUBLE,
    MULTIPLY_ADD,
    REVERSE,
    SPILLING,
    UNBOUNDED,
    program,
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_program_builds_for_every_target_without_a_gpu(arch: str) -> None:
    binary, ptx = compiler.inspect(program(), arch)
    assert f".target {arch}" in ptx
    assert compiler.faults(binary, ptx) == ()
    assert binary.arch == arch
    assert binary.label == "multiply[FACTOR=3]"
    assert 4 <= binary.registers <= 32
    assert (binary.shared_bytes, binary.stack_bytes, binary.spill_bytes) == (0, 0, (0, 0))
    assert binary.entry.encode() in binary.cubin
    assert dict(binary.compilers).keys() == {"numba", "numba-cuda", "llvmlite", "nvvm", "nvjitlink"}
    code = compiler.sass(binary)
    assert f".target\t{arch}" in code
    assert re.search(r"\bIMAD|\bIMUL", code)


@pytest.mark.parametrize("ours", [(700, 10, 10), (0, 10, 10), (90, 3, 2)])
def test_a_build_puts_off_full_collections_and_leaves_the_collector_as_it_was(
    ours: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def fail(*_: object, **__: object) -> bytes:
        seen.append(gc.get_threshold())
        raise RuntimeError("no code")

    monkeypatch.setattr(_numba, "compile_to_ltoir", fail)
    before = gc.get_threshold()
    try:
        gc.set_threshold(*ours)
        with pytest.raises(RuntimeError, match="no code"):
            compiler.build(program(), "sm_90a")
        assert gc.get_threshold() == ours
    finally:
        gc.set_threshold(*before)
    assert seen[0][:2] == ours[:2] and seen[0][2] > 1_000_000


def test_a_process_that_only_builds_collects_its_garbage_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or memory grows by that of every build: nothing else happens to start a full collection."""
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    for _ in range(2 * compiler._BUILDS_OF_COLLECTION):
        with compiler._no_full_collections():
            pass
    assert len(collected) == 2


def test_a_threshold_that_is_set_while_a_kernel_is_built_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = _numba.compile_to_ltoir

    def compile_to_ltoir(*given: Any, **more: Any) -> bytes | str:
        gc.set_threshold(5000, 7, 7)
        return real(*given, **more)

    monkeypatch.setattr(_numba, "compile_to_ltoir", compile_to_ltoir)
    before = gc.get_threshold()
    try:
        compiler.build(program(), "sm_90a")
        assert gc.get_threshold() == (5000, 7, 7)
    finally:
        gc.set_threshold(*before)


def test_the_constants_are_in_the_code() -> None:
    texts = [compiler.inspect(program(factor), "sm_80")[1] for factor in (5, 7)]
    factors = [re.findall(r"m(?:ul|ad)\.lo\.s32\s+\S+ \S+ (\d+)[,;]", text) for text in texts]
    assert factors == [["5"], ["7"]]


def test_a_users_function_is_compiled_into_the_kernel() -> None:
    def plus_one_hundred(value):
        return value + 12321

    plain = compiler.inspect(program(), "sm_80")[1]
    with_it = compiler.inspect(program(adjust=plus_one_hundred), "sm_80")[1]
    assert "12321" not in plain
    assert "12321" in with_it


def test_the_launch_bound_of_a_kernel_reaches_the_code() -> None:
    assert ".maxntid 128" in compiler.inspect(program(), "sm_90a")[1]
    assert ".maxntid" not in compiler.inspect(REVERSE.program(), "sm_90a")[1]
    ptx = compiler.inspect(SPILLING.program(), "sm_90a")[1]
    assert ".maxntid 1024" in ptx and ".minnctapersm 2" in ptx


def test_resources_of_the_cubin_are_those_that_cuobjdump_reads(tmp_path: Path) -> None:
    """The numbers taken from the ELF file agree with a reader that is not ours."""
    file = tmp_path / "kernel.cubin"
    for made in (program(), REVERSE.program(), EVERY_TYPE.program(), SPILLING.program()):
        for arch in ("sm_80", "sm_90a", "sm_100a"):
            binary = compiler.inspect(made, arch)[0]
            file.write_bytes(binary.cubin)
            text = subprocess.run(
                [toolchain.tool("cuobjdump"), "-res-usage", str(file)],
                check=True, capture_output=True, text=True,
            ).stdout  # fmt: skip
            (seen,) = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
            registers, stack, shared = map(int, seen)
            if shared and arch != "sm_80":
                shared -= 1024  # the system's, which is not the kernel's
            expected = (binary.registers, binary.stack_bytes, binary.shared_bytes)
            assert (registers, stack, shared) == expected, (made.label, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_a_product_and_a_sum_round_apart(arch: str) -> None:
    binary, ptx = compiler.inspect(MULTIPLY_ADD.program(), arch)
    assert "fma" not in ptx
    code = compiler.sass(binary)
    assert "FMUL" in code and "FADD" in code and "FFMA" not in code


# The gate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_the_gate_stops_spilled_registers(arch: str) -> None:
    binary, ptx = compiler.inspect(SPILLING.program(), arch)
    assert binary.registers == 32
    assert min(binary.spill_bytes) > 0 and binary.stack_bytes > 0
    (fault,) = compiler.faults(binary, ptx)
    assert re.fullmatch(r"spills \d+ bytes of stores, \d+ of loads", fault)


def test_the_gate_stops_arithmetic_in_float64() -> None:
    binary, ptx = compiler.inspect(IN_DOUBLE.program(), "sm_90a")
    (fault,) = compiler.faults(binary, ptx)
    assert fault.startswith("computes in float64: ") and "mul.rn.f64" in fault


def test_the_gate_stops_what_the_assembler_drops_or_serialises() -> None:
    binary, ptx = compiler.inspect(UNBOUNDED.program(), "sm_90a")
    (fault,) = compiler.faults(binary, ptx)
    assert "C7508" in fault and "setmaxnreg" in fault


def test_the_faults_of_a_binary_outlive_the_cache(cache_directory: Path) -> None:
    compiler.build(UNBOUNDED.program(), "sm_90a", cache=Cache([cache_directory]))
    again = compiler.find(UNBOUNDED.program(), "sm_90a", cache=Cache([cache_directory]))
    assert again is not None
    assert "C7508" in compiler.faults(again)[0]


# What is refused ----------------------------------------------------------------------------------


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ValueError, match=r"arch must be one of sm_80, .*; got 'sm_75'"):
        compiler.build(program(), "sm_75")


def test_a_target_that_the_kernel_is_not_made_for_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="chain is made for"):
        compiler.build(CHAIN.program(), "sm_80")


def test_an_error_in_a_body_says_which_program_it_is() -> None:
    def nonsense(value):
        return value.nothing

    with pytest.raises(Exception) as caught:
        compiler.build(program(adjust=nonsense), "sm_80")
    assert any("multiply[FACTOR=3] for sm_80" in note for note in caught.value.__notes__)


def test_a_cubin_that_is_cut_off_is_refused() -> None:
    binary = compiler.inspect(program(), "sm_80")[0]
    log = "\n".join(binary.log)
    assert read_cubin(binary.label, "sm_80", binary.cubin, log).registers == binary.registers
    for length in (0, 4, 63, 200, len(binary.cubin) // 2, len(binary.cubin) - 200):
        with pytest.raises(CubinError):
            read_cubin(binary.label, "sm_80", binary.cubin[:length], log)


def test_static_shared_memory_is_the_kernels_own() -> None:
    """On Hopper and later a cubin counts the KiB of the system too."""
    for arch in ("sm_80", "sm_90a", "sm_100a"):
        assert compiler.inspect(REVERSE.program(), arch)[0].shared_bytes == 0


def test_registers_that_disagree_with_the_report_are_refused() -> None:
    binary = compiler.inspect(program(), "sm_80")[0]
    log = "\n".join(binary.log)
    wrong = log.replace(f"Used {binary.registers} registers", "Used 99 registers")
    with pytest.raises(CubinError, match=rf"{binary.registers} registers .* assembler 99 and 0"):
        read_cubin(binary.label, "sm_80", binary.cubin, wrong)
    with pytest.raises(CubinError, match="not understood"):
        read_cubin(binary.label, "sm_80", binary.cubin, "ptxas info : something else")


def test_without_a_report_the_cubin_alone_counts() -> None:
    """The linker of CUDA 13.0 gave none for kernels that the same machine had linked before."""
    for arch in ("sm_80", "sm_90a"):
        binary = compiler.inspect(REVERSE.program(), arch)[0]
        alone = read_cubin(binary.label, arch, binary.cubin, "")
        assert alone == binary._replace(log=(), compilers=alone.compilers)


def test_a_missing_disassembler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    binary = compiler.inspect(program(), "sm_80")[0]
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ToolchainError, match="pip install nvidia-cuda-nvdisasm"):
        compiler.sass(binary)


def test_code_that_the_disassembler_cannot_read_is_reported() -> None:
    binary = compiler.inspect(program(), "sm_80")[0]
    broken = binary._replace(cubin=binary.cubin[:100])
    with pytest.raises(ToolchainError, match="nvdisasm cannot read"):
        compiler.sass(broken)
    compiler.sass(binary)  # the disassembler itself works
