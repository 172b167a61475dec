"""Every instruction compiles for every target, to the PTX that its name promises."""

import importlib.util
import inspect
import re

import pytest

from nvfp4 import _numba, toolchain
from nvfp4 import compile as compiling
from nvfp4.architectures import capability
from nvfp4.errors import ToolchainError
from nvfp4.program import DeviceWorld, Kernel
from nvfp4.ptx import convert, memory
from nvfp4.ptx.arith import mul_rn
from nvfp4.ptx.convert import e2m1x2_of_f32
from nvfp4.ptx.instruction import instruction
from nvfp4.ptx.memory import ld_global_u32
from tests.ptx import every_instruction

TARGETS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")

# Instruction -> PTX that the code for a target must have. An instruction that the compiler sees
# through (LLVM's, such as add) is not here: its form is the compiler's choice.
MNEMONICS = {
    "add_rn": "add.rn.f32",
    "sub_rn": "sub.rn.f32",
    "mul_rn": "mul.rn.f32",
    "fma_rn": "fma.rn.f32",
    "div_rn": "div.rn.f32",
    "rcp_rn": "rcp.rn.f32",
    "sqrt_rn": "sqrt.rn.f32",
    "min_f32": "min.f32",
    "max_f32": "max.f32",
    "min_nan_f32": "min.NaN.f32",
    "max_nan_f32": "max.NaN.f32",
    "mulhi_u32": "mul.hi.u32",
    "min_u32": "min.u32",
    "max_i32": "max.s32",
    "prmt": "prmt.b32",
    "lop3": "lop3.b32",
    "shf_l": "shf.l.wrap.b32",
    "bf16x2_of_f32": "cvt.rn.bf16x2.f32",
    "f16x2_of_f32": "cvt.rn.f16x2.f32",
    "ld_global_v4_u32": "ld.global.nc.L1::no_allocate.L2::256B.v4.u32",
    "st_global_v4_u32": "st.global.L1::evict_first.v4.u32",
    "prefetch_l2": "prefetch.global.L2",
    "ld_acquire_u32": "ld.acquire.gpu.global.u32",
    "st_release_u32": "st.release.gpu.global.u32",
    "atom_add_global_u32": "atom.relaxed.gpu.global.add.u32",
    "red_max_global_u32": "red.relaxed.gpu.global.max.u32",
    "fence_acq_rel_gpu": "fence.acq_rel.gpu",
    "ld_shared_v4_u32": "ld.shared.v4.u32",
    "shfl_xor_f32": "shfl.sync.bfly.b32",
    "ballot": "vote.sync.ballot.b32",
    "match_any_u32": "match.any.sync.b32",
    "redux_max_u32": "redux.sync.max.u32",
    "bar_sync": "bar.sync",
    "bar_arrive": "bar.arrive",
    "fma_bf16x2": "fma.rn.bf16x2",
    "max_nan_bf16x2": "max.NaN.bf16x2",
    "mul_f16x2": "mul.rn.f16x2",
}
FROM_SM89 = {
    "e4m3x2_of_f32": "cvt.rn.satfinite.e4m3x2.f32",
    "e5m2x2_of_f32": "cvt.rn.satfinite.e5m2x2.f32",
    "f16x2_of_e4m3x2": "cvt.rn.f16x2.e4m3x2",
    "f16x2_of_e5m2x2": "cvt.rn.f16x2.e5m2x2",
}
FROM_SM90 = {
    "elect": "elect.sync",
    "griddepcontrol_wait": "griddepcontrol.wait",
    "griddepcontrol_launch_dependents": "griddepcontrol.launch_dependents",
    "mul_bf16x2": "mul.rn.bf16x2",
}
FROM_SM100 = {
    "e2m1x2_of_f32": "cvt.rn.satfinite.e2m1x2.f32",
    "f16x2_of_e2m1x2": "cvt.rn.f16x2.e2m1x2",
    "bf16x2_of_e2m1x2": "cvt.rn.bf16x2.e2m1x2",
    "bf16x2_of_e4m3x2": "cvt.rn.bf16x2.e4m3x2",
    "bf16x2_of_ue8m0x2": "cvt.rn.bf16x2.ue8m0x2",
    "ue8m0x2_rp_of_f32": "cvt.rp.satfinite.ue8m0x2.f32",
    "ue8m0x2_rz_of_f32": "cvt.rz.satfinite.ue8m0x2.f32",
}


@pytest.mark.parametrize("target", TARGETS)
def test_every_instruction_assembles_to_the_instruction_it_names(target):
    binary, ptx = compiling.inspect(every_instruction.kernel().program(), target)
    assert binary.cubin[:4] == b"\x7fELF"
    assert f".target {target}" in ptx
    # No double precision, nothing spilled; nothing flushed to zero but in an approximation that
    # an instruction for normal numbers starts from.
    assert compiling.faults(binary, ptx) == ()
    assert set(re.findall(r"[\w.]*\.ftz[\w.]*", ptx)) <= {"rcp.approx.ftz.f32"}
    cc = capability(target)[:2]
    expected = dict(MNEMONICS)
    for least, more in (((8, 9), FROM_SM89), ((9, 0), FROM_SM90), ((10, 0), FROM_SM100)):
        if cc >= least:
            expected |= more
        else:
            for name, mnemonic in more.items():
                assert mnemonic not in ptx, f"{name} has no hardware on {target}"
    missing = {name for name, mnemonic in expected.items() if mnemonic not in ptx}
    assert not missing


def test_every_hint_reaches_the_code_and_an_unknown_one_stops_the_compiler():
    chosen = [memory.ld_global_u32, memory.st_global_u32]
    _, ptx = compiling.inspect(every_instruction.kernel(chosen).program(), "sm_80")
    for hints, access in ((memory.LOAD_HINTS, "ld"), (memory.STORE_HINTS, "st")):
        for hint in hints:
            assert f"{access}.global{'.' if hint else ''}{hint}.u32" in ptx

    def body(p):
        p[0] = ld_global_u32(p, 0, "evict_last")

    with pytest.raises(Exception, match="hint must be one of"):
        compiling.inspect(Kernel("unknown_hint", body, ("u32*",)).program(), "sm_80")


def test_arguments_of_another_kind_are_refused_by_name():
    def body(p):
        p[0] = mul_rn(p[0], p[1])

    with pytest.raises(Exception, match=r"mul_rn takes \(f32, f32\); got \(uint32, uint32\)"):
        compiling.inspect(Kernel("mixed", body, ("u32*",)).program(), "sm_80")


# Signatures --------------------------------------------------------------------------------------


def test_every_instruction_has_the_same_signature_in_both_worlds():
    world = {cc: DeviceWorld(cc) for cc in ((8, 0), (9, 0), (10, 0))}
    for one in every_instruction.instructions():
        parameters = list(inspect.signature(one).parameters)
        assert parameters == list(one.names) == list(inspect.signature(one.model).parameters)
        assert len(parameters) == len(one.parameters)
        for device in world.values():
            made = device.instruction(one)
            if made is one.software:
                assert list(inspect.signature(made).parameters) == parameters
            else:
                # An intrinsic's typing function has the typing context in front.
                _, *names = inspect.signature(made._defn).parameters
                assert names == parameters


def test_every_instruction_says_what_it_does():
    for one in every_instruction.instructions():
        assert one.__doc__, one.name
        assert one.__module__.startswith("nvfp4.ptx.")


def test_every_instruction_works_on_every_target_by_hardware_or_software():
    for one in every_instruction.instructions():
        assert one.software is not None or one.lowering_for((8, 0)) is not None, one.name


def test_names_are_used_once():
    names = [one.name for one in every_instruction.instructions()]
    assert len(names) == len(set(names)) > 190


# The joint itself --------------------------------------------------------------------------------


def test_an_instruction_without_code_for_a_target_is_a_toolchain_error():
    @instruction("u32(u32)", asm="brev.b32 $0, $1;", min_cc=(12, 0))
    def late(a):
        """Made up."""
        return a

    with pytest.raises(ToolchainError, match=r"late .* 9\.0; it needs \(12, 0\)"):
        DeviceWorld((9, 0)).instruction(late)
    assert late.lowering_for((12, 1)) is late.lowerings[0]


def test_the_lowering_of_the_newest_fitting_architecture_is_taken():
    @instruction("u32(u32)", asm="old", min_cc=(8, 0))
    def two(a):
        """Made up."""
        return a

    two.lowering(asm="new", min_cc=(9, 0))
    assert two.lowering_for((7, 5)) is None
    assert two.lowering_for((8, 9)).asm == "old"
    assert two.lowering_for((12, 0)).asm == "new"


@pytest.mark.parametrize(
    "signature, message",
    [
        ("u32(u33)", "unknown instruction type 'u33'"),
        ("u32 u32", "looks like"),
        ("u32(u32, u32)", "2 parameters, the model 1"),
    ],
)
def test_a_wrong_signature_is_refused_when_it_is_written(signature, message):
    with pytest.raises(ValueError, match=message):
        instruction(signature)(lambda a: a)


def test_software_is_bound_where_there_is_no_hardware():
    world = DeviceWorld((9, 0))
    assert world.instruction(convert.e2m1x8_of_f32) is convert.e2m1x8_of_f32.software
    assert world.instruction(convert.e4m3x2_of_f32) is not convert.e4m3x2_of_f32.software
    assert DeviceWorld((10, 0)).instruction(convert.e2m1x8_of_f32) is not (
        convert.e2m1x8_of_f32.software
    )

    def body(p):
        p[0] = e2m1x2_of_f32(p[1], p[2])

    sources = list(Kernel("sources", body, ("f32*",)).program().sources())
    # What the card runs, software included, is what a cache must look at.
    assert e2m1x2_of_f32.software in sources


def test_software_is_bound_where_the_compilers_are_too_old_for_the_instruction(monkeypatch):
    one = convert.bf16x2_of_e4m3x2
    assert DeviceWorld((10, 0), (13, 0)).instruction(one) is one.software
    assert DeviceWorld((10, 0), (13, 1)).instruction(one) is not one.software
    program = every_instruction.kernel([one]).program()
    _, ptx = compiling.inspect(program, "sm_100a")
    assert "cvt.rn.bf16x2.e4m3x2" in ptx
    # The older of the two compilers decides.
    monkeypatch.setattr(toolchain, "nvvm_release", lambda: (13, 0))
    _, ptx = compiling.inspect(program, "sm_100a")
    assert "cvt.rn.bf16x2.e4m3x2" not in ptx
    assert "cvt.rn.f16x2.e4m3x2" in ptx


def test_an_instruction_that_the_compilers_are_too_old_for_is_a_toolchain_error():
    @instruction("u32(u32)", asm="brev.b32 $0, $1;", min_release=(13, 1))
    def new(a):
        """Made up."""
        return a

    with pytest.raises(ToolchainError, match=r"new needs .* CUDA 13\.1 or newer; got 13\.0"):
        DeviceWorld((9, 0), (13, 0)).instruction(new)


def test_e2m1_in_software_takes_nine_instructions_a_value():
    # Twice the value; three sums, three minima; the code and the sign into place.
    _, ptx = compiling.inspect(
        every_instruction.kernel([convert.e2m1x8_of_f32]).program(), "sm_90a"
    )
    code = re.findall(r"^\s+(?:@%p\d+ )?([a-z]\S*)\s.*;$", ptx, re.MULTILINE)
    counted = [op for op in code if op.split(".")[0] in ("mul", "add", "fma", "min", "shf", "mad")]
    assert len([op for op in counted if op.endswith((".f32", ".b32", ".u32"))]) <= 8 * 9


def test_numbas_own_search_for_single_assignments_finds_the_same_variables(monkeypatch):
    _numba.numba_cuda()
    lowering = importlib.import_module("numba.cuda.lowering")
    spec = importlib.util.find_spec("numba.cuda.lowering")
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    ours = lowering.Lower._find_singly_assigned_variable
    numbas = fresh.Lower._find_singly_assigned_variable
    assert ours is _numba._find_singly_assigned_variable
    assert ours is not numbas
    found = []

    def both(lower):
        numbas(lower)
        slow = lower._singly_assigned_vars
        ours(lower)
        assert lower._singly_assigned_vars == slow
        found.append(len(slow))

    monkeypatch.setattr(lowering.Lower, "_find_singly_assigned_variable", both)
    chosen = [one for one in every_instruction.instructions() if "arith" in one.model.__module__]
    compiling.inspect(every_instruction.kernel(chosen).program(), "sm_90a")
    assert sum(found) > 200
