"""Every asynchronous and matrix instruction assembles to the machine code that its name promises.

And with no warning of the assembler: a wgmma that is serialised computes the same, at half the
speed.
"""

import functools
import re

import numpy as np
import pytest

from nvfp4 import compile as compiling
from nvfp4.errors import ToolchainError
from nvfp4.program import DeviceWorld, Kernel
from nvfp4.ptx import bulk, mbarrier, mma, tma, wgmma
from nvfp4.ptx.instruction import ANY, Instruction, instruction, split_tuple
from tests.ptx import async_kernels as kernels
from tests.ptx.test_async_kernels import WGMMA_COLUMNS

IMMEDIATES = {"pending": 1, "count": 64, "swizzle": 128, "first": 0, "scaled": 1, "kind": "'bf16'"}
# The machine code for each instruction, on sm_90a; ... and on others where another.
SASS = {
    "mbarrier_init": "SYNCS.EXCH.64",
    "mbarrier_inval": "SYNCS.CCTL.IV",
    "mbarrier_arrive": "SYNCS.ARRIVE.TRANS64.A1T0",
    "mbarrier_arrive_expect_tx": "SYNCS.ARRIVE.TRANS64",
    "mbarrier_expect_tx": "SYNCS.ARRIVE.TRANS64.RED.A0TR",
    "mbarrier_test_wait_parity": "SYNCS.PHASECHK.TRANS64",
    "mbarrier_try_wait_parity": "SYNCS.PHASECHK.TRANS64.TRYWAIT",
    "mbarrier_wait_parity": "SYNCS.PHASECHK.TRANS64.TRYWAIT",
    "fence_mbarrier_init": None,
    "fence_proxy_async_shared": "FENCE.VIEW.ASYNC.S",
    "fence_proxy_async_global": "FENCE.VIEW.ASYNC.G",
    "fence_proxy_async": "FENCE.VIEW.ASYNC.S",
    "policy_evict_first": None,
    "policy_evict_last": None,
    "bulk_load": "UBLKCP.S.G",
    "bulk_load_hint": "UBLKCP.S.G",
    "bulk_store": "UBLKCP.G.S",
    "bulk_store_hint": "UBLKCP.G.S",
    "bulk_prefetch": "UBLKPF.L2",
    "bulk_commit_group": "UTMACMDFLUSH",
    "bulk_wait_group": "DEPBAR.LE",
    "bulk_wait_group_read": "DEPBAR.LE",
    "cp_async_4": "LDGSTS.E.ZFILL",
    "cp_async_8": "LDGSTS.E.64.ZFILL",
    "cp_async_16": "LDGSTS.E.BYPASS.128.ZFILL",
    "cp_async_commit_group": "LDGDEPBAR",
    "cp_async_wait_group": "DEPBAR.LE",
    "cp_async_arrive": "ARRIVES.LDGSTSBAR.64.ARVCNT",
    "fence_tensormap_acquire": "UTMACCTL.IV",
    "fence_tensormap_release": "MEMBAR.ALL.GPU",
    "prefetch_tensormap": "UTMACCTL.PF",
    "ldmatrix_x1": "LDSM.16.M88",
    "ldmatrix_x2": "LDSM.16.M88.2",
    "ldmatrix_x4": "LDSM.16.M88.4",
    "ldmatrix_x1_trans": "LDSM.16.MT88",
    "ldmatrix_x2_trans": "LDSM.16.MT88.2",
    "ldmatrix_x4_trans": "LDSM.16.MT88.4",
    "stmatrix_x4": "STSM.16.M88.4",
    "mma_m16n8k16_bf16": "HMMA.16816.F32.BF16",
    "mma_m16n8k16_f16": "HMMA.16816.F32",
    "mma_m16n8k32_e4m3": "HMMA.16816.F32",
    "mma_m16n8k32_e5m2": "HMMA.16816.F32",
    "setmaxnreg_inc": "USETMAXREG",
    "setmaxnreg_dec": "USETMAXREG.DEALLOC.CTAPOOL",
    "wgmma_fence": "WARPGROUP.ARRIVE",
    "wgmma_commit_group": None,
    "wgmma_wait_group": "WARPGROUP.DEPBAR.LE",
    "wgmma_wait": "WARPGROUP.DEPBAR.LE",
    "wgmma_keep": None,
    "wgmma_zeros": None,
    "wgmma_descriptor": None,
    "st_shared_acc": "STS.64",
    "st_shared_acc_columns": "STS",
    "st_shared_acc_rows": "STSM.16.MT88",
    "st_shared_acc_quads": "STS.128",
    "ld_cluster_acc_quads": "LD.E.128",
    "add_acc": "FADD",
    "wgmma_ss_bf16": "HGMMA.64x8x16.F32.BF16",
    "wgmma_rs_bf16": "HGMMA.64x8x16.F32.BF16",
    "wgmma_ss_f16": "HGMMA.64x8x16.F32",
    "wgmma_rs_f16": "HGMMA.64x8x16.F32",
    "wgmma_ss_e4m3": "QGMMA.64x8x32.F32.E4M3.E4M3",
    "wgmma_rs_e4m3": "QGMMA.64x8x32.F32.E4M3.E4M3",
    "wgmma_ss_e5m2": "QGMMA.64x8x32.F32.E5M2.E5M2",
    "wgmma_rs_e5m2": "QGMMA.64x8x32.F32.E5M2.E5M2",
    "wgmma_group_rs_bf16": "HGMMA.64x8x16.F32.BF16",
    "wgmma_group_rs_e4m3": "QGMMA.64x8x32.F32.E4M3.E4M3",
}
for _rank in range(1, 6):
    SASS[f"tma_load_{_rank}d"] = f"UTMALDG.{_rank}D"
    SASS[f"tma_store_{_rank}d"] = f"UTMASTG.{_rank}D"
for _rank in (2, 3):
    SASS[f"tma_load_{_rank}d_hint"] = f"UTMALDG.{_rank}D"


def instructions() -> dict[str, Instruction]:
    return {
        name: value
        for module in (mbarrier, bulk, tma, mma, wgmma)
        for name, value in vars(module).items()
        if isinstance(value, Instruction) and value.model.__module__ == module.__name__
    }


def kernel(chosen: list[Instruction]) -> Kernel:
    """A kernel that executes each instruction once, on operands that it reads from memory."""
    lines = ["def body(w, i, x, out):"]
    for slot, one in enumerate(chosen):
        texts = []
        for number, (kind, name) in enumerate(zip(one.parameters, one.names, strict=True)):
            scalar, count = split_tuple(kind)
            count = 4 if count == ANY else count
            array = {"u32": "w", "i32": "w", "bool": "w", "i64": "i", "f32": "x"}.get(scalar)
            if kind == "imm":
                value = 4 if one.name == "wgmma_zeros" else IMMEDIATES[name]
                texts.append(str(value))
                continue
            parts = [f"{array}[{8 * number + part}]" for part in range(max(count, 1))]
            if kind == "bool":
                parts = [f"{parts[0]} > 5"]
            texts.append(f"({', '.join(parts)})" if count else parts[0])
        call = f"{one.name}({', '.join(texts)})"
        scalar, count = split_tuple(one.result)
        if count == ANY and ("_ss_" in one.name or "_rs_" in one.name):
            # A product's accumulators are there behind a wait.
            lines += ["    wgmma_fence()", f"    flying{slot} = {call}", "    wgmma_commit_group()"]
            call = f"wgmma_wait(flying{slot}, 0)"
        lines.append(f"    value{slot} = {call}" if scalar != "void" else f"    {call}")
        count = 4 if count == ANY else count
        for part in range(count or (scalar != "void")):
            value = f"value{slot}[{part}]" if count else f"value{slot}"
            target = {"f32": "x", "i64": "i"}.get(scalar, "out")
            lines.append(f"    {target}[{1000 + 8 * slot + part}] = {value}")
    scope = dict(instructions())
    scope["__name__"] = __name__
    exec("\n".join(lines) + "\n", scope)
    types = ("u32*", "i64*", "f32*", "u32*")
    return Kernel("every_async", scope["body"], types, threads=128, blocks_per_sm=1)


@functools.cache
def built(program, arch):
    binary, ptx = compiling.inspect(program, arch)
    return binary, ptx, compiling.sass(binary)


def operations(sass: str) -> set[str]:
    return set(re.findall(r"\b[A-Z][A-Z0-9]+(?:\.[\w]+)*\b", sass))


def fits(one: Instruction, cc: tuple[int, int]) -> bool:
    return one.lowering_for(cc) is not None


def test_the_table_has_every_instruction():
    assert set(SASS) == set(instructions())


@pytest.mark.parametrize(
    "arch, cc",
    [("sm_80", (8, 0)), ("sm_89", (8, 9)), ("sm_90a", (9, 0)), ("sm_100a", (10, 0))]
    + [("sm_103a", (10, 3)), ("sm_120a", (12, 0))],
)
def test_every_instruction_assembles(arch, cc):
    chosen = [one for one in instructions().values() if fits(one, cc)]
    assert len(chosen) > (60 if cc == (9, 0) else 40 if cc > (9, 0) else 14)
    binary, ptx, sass = built(kernel(chosen).program(), arch)
    assert compiling.faults(binary, ptx) == ()
    if cc != (9, 0):
        return
    found = operations(sass)
    for name, operation in SASS.items():
        if operation is not None:
            assert any(have.startswith(operation) for have in found), name


def test_products_of_bytes_are_native_where_the_card_has_them():
    chosen = [mma.mma_m16n8k32_e4m3, mma.mma_m16n8k32_e5m2]
    for arch in ("sm_89", "sm_120a"):
        found = operations(built(kernel(chosen).program(), arch)[2])
        assert {"QMMA.16832.F32.E4M3.E4M3", "QMMA.16832.F32.E5M2.E5M2"} <= found


@pytest.mark.parametrize("columns", WGMMA_COLUMNS)
def test_products_of_every_width_are_neither_serialised_nor_spilled(columns):
    program = kernels.GROUP_PRODUCT.program(KIND="bf16", HALF=columns // 2, SWIZZLE=128)
    binary, ptx, sass = built(program, "sm_90a")
    assert compiling.faults(binary, ptx) == ()
    assert f"HGMMA.64x{columns}x16.F32.BF16" in operations(sass)
    # What a wgmma must not have: a wait for each.
    products = len(re.findall(r"\bHGMMA\.", sass))
    assert len(re.findall(r"WARPGROUP\.DEPBAR", sass)) < max(products, 2)
    assert binary.registers <= 40 + columns // 2


def test_a_pipeline_keeps_one_group_in_flight():
    binary, ptx, sass = built(kernels.PIPELINE.program(), "sm_90a")
    assert compiling.faults(binary, ptx) == ()
    waits = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\d)", sass)
    assert waits == ["0x1", "0x0"]


def test_products_from_registers_take_their_registers():
    program = kernels.GROUP_PRODUCT_REGISTERS.program(KIND="bf16", HALF=128, GROUPS=False)
    binary, ptx, sass = built(program, "sm_90a")
    assert compiling.faults(binary, ptx) == ()
    assert re.search(r"HGMMA\.64x256x16\.F32\.BF16 R\d+, R\d+, gdesc", sass)


def test_copies_by_one_thread_are_not_looped_over_the_lanes():
    for program, copy in (
        (kernels.BULK_RING.program(STAGES=3), "UBLKCP.S.G"),
        (kernels.TENSOR_TILE.program(), "UTMALDG.2D"),
    ):
        _, _, sass = built(program, "sm_90a")
        assert copy in operations(sass)
        assert "BRA.U.ANY" not in sass


def test_wgmma_is_refused_on_other_architectures():
    for cc in ((8, 9), (10, 0), (12, 0)):
        with pytest.raises(ToolchainError, match="wgmma_ss_bf16 has no lowering"):
            DeviceWorld(cc).instruction(wgmma.wgmma_ss_bf16)


def test_a_count_that_wgmma_has_not_stops_the_compiler():
    def body(out):
        acc = zeros(6)
        acc = product(acc, 0, 0, True)
        out[0] = acc[0]

    zeros, product = wgmma.wgmma_zeros, wgmma.wgmma_ss_bf16
    with pytest.raises(Exception, match="4 to 128 accumulators, a multiple of 4; got 6"):
        compiling.inspect(Kernel("six", body, ("f32*",), threads=128).program(), "sm_90a")


def test_tuples_of_any_length_must_be_equally_long():
    @instruction("f32xN(f32xN, f32xN)")
    def sums(a, b):
        """Made up."""
        return tuple(np.float32(x + y) for x, y in zip(a, b, strict=True))

    @sums.lowering()
    def _sums(builder, ir, arguments):
        half = len(arguments) // 2
        return [builder.fadd(arguments[k], arguments[half + k]) for k in range(half)]

    def body(x):
        made = sums((x[0], x[1], x[2]), (x[3], x[4], x[5]))
        x[0] = made[2]

    def uneven(x):
        made = sums((x[0], x[1], x[2]), (x[3], x[4]))
        x[0] = made[1]

    compiling.inspect(Kernel("even", body, ("f32*",)).program(), "sm_80")
    with pytest.raises(Exception, match=r"sums takes \(f32xN, f32xN\)"):
        compiling.inspect(Kernel("uneven", uneven, ("f32*",)).program(), "sm_80")


def test_an_instruction_can_end_with_an_architecture():
    fence = wgmma.wgmma_fence
    assert fence.lowering_for((9, 0)) is not None
    assert fence.lowering_for((8, 9)) is None
    assert fence.lowering_for((10, 0)) is None
