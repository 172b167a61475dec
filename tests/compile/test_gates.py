"""Every kernel of the package is built for every target that it is made for, and looked into.

``make test`` builds the first variant of each kernel for the four generations, and the others for
Hopper, or for Blackwell where they run or differ there only; for a second target of a generation,
whose code hardly differs, two kernels that use what does. ``make test-slow`` builds all for all. A
class a target: processes can share them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from nvfp4 import compile as compiler
from nvfp4.architectures import ARCHITECTURES, architectures_of
from nvfp4.kernels import KERNELS, variants
from nvfp4.program import Program
from nvfp4.sim.registers import at_launch

FAST = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
#: Target -> what is built beside the same for sm_80 and sm_100a: conversions of fp8 in hardware,
#: and instructions that only exist for a target by name.
SECOND = {
    "sm_89": ("quantize", "matmul_sm80"),
    "sm_103a": ("matmul_sm100", "quantize_tma"),
}
CONVERSION = "cvt.rn.satfinite.e2m1x2"
IN_MACHINE_CODE = re.compile(r"\bF2FP\.\S*E2M1")


def writes_e2m1(program: Program) -> bool:
    """Whether a program is a quantiser to four bits."""
    name, constants = program.kernel.name, dict(program.constants)
    quantizes = "quantize" in name and "dequantize" not in name
    # Of a fused kernel one pass may only look for the largest magnitude.
    return quantizes and constants.get("ELEMENT") == "e2m1" and constants.get("TASK") != "amax"


def cases(arch: str) -> Iterator[object]:
    """The programs to build for a target; those that only the slow gates build are marked."""
    for name, kernel in KERNELS.items():
        if arch not in architectures_of(kernel):
            continue
        try:
            listed = len(variants(kernel, arch=arch))
        except ValueError:  # test_every_kernel_has_variants_and_a_target says it
            continue
        for index, program in enumerate(variants(name, slow=True, arch=arch)):
            fast = index == 0 and (arch in FAST or name in SECOND.get(arch, ()))
            others = arch == "sm_90a" or (
                arch == "sm_100a"
                and (writes_e2m1(program) or "sm_90a" not in architectures_of(kernel))
            )
            fast |= index < listed and others
            marks = () if fast else (pytest.mark.slow,)
            yield pytest.param(program, id=program.label, marks=marks)


class Gate:
    """What is asked of each program; a subclass names the target."""

    arch = ""

    def test_builds_without_spills_warnings_or_float64(self, program: Program) -> None:
        binary, ptx = compiler.inspect(program, self.arch)
        assert compiler.faults(binary, ptx) == ()
        threads = program.threads or 1
        assert binary.registers * threads <= 65536
        if "setmaxnreg" in ptx:
            # What the simulated machine takes for the registers that a block can share out.
            assert binary.registers == at_launch(program.threads, program.blocks_per_sm)
        if writes_e2m1(program):
            # Blackwell converts to e2m1 in hardware; nothing before it can.
            native = compiler.capability(self.arch)[:2] >= (10, 0)
            assert (CONVERSION in ptx) is native


def _class(arch: str) -> type:
    decorate = pytest.mark.parametrize("program", list(cases(arch)))
    made: type = type(f"Test_{arch}", (Gate,), {"arch": arch, "__module__": __name__})
    return decorate(made)


globals().update({f"Test_{arch}": _class(arch) for arch in ARCHITECTURES})


def test_every_kernel_has_variants_and_a_target() -> None:
    assert len(KERNELS) >= 1
    for name, kernel in KERNELS.items():
        assert kernel.name == name
        assert architectures_of(kernel), name
        assert variants(kernel) == variants(name)
        assert len(set(variants(name, slow=True))) == len(variants(name, slow=True))


def test_targets_of_a_generation_are_told_apart_by_kernels_that_there_are() -> None:
    for arch, names in SECOND.items():
        for name in names:
            assert arch in architectures_of(KERNELS[name]), name


def test_a_variant_may_be_for_some_targets_only() -> None:
    everywhere = variants("grouped_stream")
    here = {arch: variants("grouped_stream", arch=arch) for arch in ("sm_90a", "sm_120a")}
    assert here["sm_90a"][0].blocks_per_sm == 10 and here["sm_120a"][0].blocks_per_sm == 8
    assert set(everywhere) == {program for programs in here.values() for program in programs}


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_machine_code_of_a_quantiser_has_the_conversion_where_there_is_one(arch: str) -> None:
    programs = [p for name in KERNELS for p in variants(name) if writes_e2m1(p)]
    assert programs, "no quantiser to e2m1 among the variants"
    code = compiler.sass(compiler.inspect(programs[0], arch)[0])
    assert bool(IN_MACHINE_CODE.search(code)) is (arch == "sm_100a")
