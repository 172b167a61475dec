"""Products on the block-scaled tensor cores of sm_120a, simulated, are the golden model's."""

from __future__ import annotations

import itertools
import re
import types
from typing import Any

import numpy as np
import pytest

import nvfp4
from nvfp4 import _parts, golden, launch, plans_sm120
from nvfp4 import compile as compiling
from nvfp4.kernels import matmul_sm120, scaled_tiles, variants
from nvfp4.program import Program
from nvfp4.sim.errors import DataRace, InvalidOperand, Misaligned, OutOfBounds, UnwrittenRead
from tests.kernels.products_sm120 import (
    Case,
    aligned,
    check,
    on_machine,
    operands,
    poisoned_padding,
    same,
)

MIXED = ("linear", "tcgen")
LINEAR = ("linear", "linear")
PAIRS = (
    ("nvfp4", "nvfp4"),
    ("mxfp4", "mxfp4"),
    ("mxfp8_e4m3", "mxfp4"),
    ("mxfp8_e4m3", "mxfp8_e5m2"),
)


# Dense -------------------------------------------------------------------------------------------

DENSE = [
    Case("nvfp4", "nvfp4", 129, 24, 160),
    Case("mxfp4", "mxfp4", 5, 130, 288),
    Case("mxfp8_e4m3", "mxfp4", 40, 24, 160, MIXED),
    Case("mxfp4", "mxfp8_e4m3", 4, 64, 96, options={"out_dtype": "bfloat16"}),
    Case("mxfp4", "mxfp4", 2, 10, 32, options={"out_dtype": "float16"}),
    Case("mxfp8_e5m2", "mxfp8_e4m3", 1, 8, 32, LINEAR),
    Case("nvfp4", "nvfp4", 3, 16, 800, LINEAR),
    Case("mxfp8_e4m3", "mxfp8_e4m3", 2, 8, 352),
    Case("mxfp8_e5m2", "mxfp8_e5m2", 17, 9, 64, options={"out_dtype": "bfloat16"}),
    Case("nvfp4", "nvfp4", 5, 40, 64, options={"epilogue": nvfp4.epilogues.swiglu()}),
    Case(
        "mxfp8_e4m3", "mxfp4", 5, 10, 64, options={"epilogue": nvfp4.epilogues.swiglu(halves=False)}
    ),
]


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.id)
def test_a_dense_product_is_the_golden_one(case: Case) -> None:
    check(case)


def test_every_scale_counts() -> None:
    rng = np.random.default_rng(5)
    for name, low, high in (("nvfp4", 0x30, 0x40), ("mxfp8_e4m3", 124, 131)):
        block = {"nvfp4": 16, "mxfp8_e4m3": 32}[name]
        codes = np.full((5, 64 if name == "nvfp4" else 128), 0x22 if name == "nvfp4" else 0x38)
        scales = rng.integers(low, high, (5, 128 // block), np.uint8)
        operand = nvfp4.QTensor.from_parts(
            aligned(codes.astype(np.uint8)), scales, name, scale_layout="linear"
        )
        same(*on_machine(operand, operand, {"out_dtype": "float32"}))


def test_factors_of_rows_and_alpha_are_applied() -> None:
    x = operands(DENSE[9])[0].dequantize()
    a = aligned(nvfp4.quantize(x, "nvfp4", encode_scale=np.full((5, 1), 4, np.float32)))
    b = aligned(nvfp4.quantize(x, "nvfp4", encode_scale=np.float32(2)))
    alpha = np.array(0.25, np.float32)
    same(*on_machine(a, b, {"alpha": alpha, "out_dtype": "float32"}))


def test_results_may_begin_anywhere() -> None:
    for out_dtype in ("bfloat16", "float32"):
        a, b, options = operands(Case("nvfp4", "nvfp4", 3, 8, 64, options={"out_dtype": out_dtype}))
        off = np.dtype("float32" if out_dtype == "float32" else "float16").itemsize
        same(*on_machine(a, b, options, off=off))


def test_padding_of_scales_is_never_multiplied() -> None:
    for name, depth in (("nvfp4", 32), ("mxfp4", 160), ("mxfp8_e4m3", 32)):
        a, b, options = operands(Case(name, name, 3, 8, depth))
        same(*on_machine(poisoned_padding(a), poisoned_padding(b), options))


def test_scales_may_begin_anywhere() -> None:
    a, b, options = operands(Case("nvfp4", "nvfp4", 3, 8, 128))
    parts = {"shape": a.shape, "decode_scale": a.decode_scale, "scale_layout": "tcgen"}
    odd = nvfp4.QTensor.from_parts(a.codes, aligned(a.scales, off=1), "nvfp4", **parts)
    same(*on_machine(odd, b, options))


def signed_scales(a: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Scales with bit 7 set, as a card may hold them: only the host looks at values."""
    monkeypatch.setattr(_parts, "scale_bytes", lambda *_: None)
    a.scales[...] |= 0x80
    return a


def test_signs_of_nvfp4_scales_are_no_part_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, options = operands(Case("nvfp4", "nvfp4", 3, 8, 64))
    expected = np.asarray(nvfp4.matmul(a, b, **options))
    got, _ = on_machine(signed_scales(a, monkeypatch), b, options)
    same(got, expected)


def test_a_scale_that_is_nan_makes_its_outputs_nan() -> None:
    a, b, options = operands(Case("mxfp4", "mxfp8_e4m3", 4, 8, 64))
    scales = golden.deinterleave_scales(b.scales, (8, 2))
    scales[1, 1] = 0xFF
    b.scales[...] = golden.interleave_scales(scales)
    got, expected = on_machine(a, b, options)
    assert np.isnan(got[:, 1]).all() and np.isnan(got).sum() == 4
    same(got, expected)


# Grouped -----------------------------------------------------------------------------------------

INT32 = np.int32
GROUPED = [
    Case("mxfp8_e4m3", "mxfp4", (4, 130, 0, 6), 24, 96, options={
        "expert_ids": np.array([1, 0, 3, 2], INT32),
        "alpha": np.array([1, 2, 4, 0.5], np.float32),
    }),
    Case("nvfp4", "nvfp4", (3, 0, 9), 24, 64, options={
        "expert_ids": np.array([1, -1, 0], INT32), "experts": 2, "rows_of_none": 5,
    }),
    Case("mxfp8_e4m3", "mxfp4", (3, 0, 6), 40, 160, MIXED, options={
        "row_indices": np.array([3, 0, -1, 2, 9, 1, 1, 0, 2], INT32), "input_rows": 4,
        "epilogue": nvfp4.epilogues.swiglu(),
    }),
    Case("mxfp4", "mxfp4", (20, 1, 0, 37), 8, 64, options={
        "expert_ids": np.array([1, -1, 0, 2], INT32)
    }),
]  # fmt: skip


@pytest.mark.parametrize("case", GROUPED, ids=lambda case: case.id)
def test_a_grouped_product_is_the_golden_one(case: Case) -> None:
    check(case)


def test_ranges_may_have_tiles_of_scales_of_their_own() -> None:
    a, b, options = operands(Case("nvfp4", "nvfp4", (3, 6), 8, 64))
    starts = np.array([2, 0], INT32)
    scales = np.full((3, *a.scales.shape[1:]), 0x7F, np.uint8)
    scales[2], scales[0] = a.scales[0], a.scales[1]
    moved = nvfp4.QTensor.from_parts(
        a.codes, aligned(scales), "nvfp4", shape=a.shape, decode_scale=a.decode_scale,
        groups=a.groups, tile_starts=starts,
    )  # fmt: skip
    expected = np.asarray(nvfp4.grouped_matmul(a, b, **options))
    got, _ = on_machine(moved, b, {**options, "row_offsets": moved.groups})
    same(got, expected)


@pytest.mark.parametrize("schedule", [1, [3, 1, 4, 1, 5, 9, 2, 6]], ids=str)
def test_any_order_of_warps_gives_the_same(schedule: Any) -> None:
    check(Case("nvfp4", "nvfp4", 18, 8, 128), schedule=schedule)


def test_both_architectures_of_the_family_have_the_kernel() -> None:
    check(Case("mxfp4", "mxfp4", 2, 8, 32), arch="sm_121a")


# Every case --------------------------------------------------------------------------------------

ROWS = (1, 4, 127, 128, 129, 300)
COLUMNS = (8, 64, 128, 200)
DEPTHS = (32, 96, 256, 512)
LAYOUTS = (("tcgen", "tcgen"), MIXED, LINEAR)


def pairwise() -> list[Case]:
    """Cases in which any two choices come together at least once."""
    axes: tuple[tuple[Any, ...], ...] = (PAIRS, ROWS, COLUMNS, DEPTHS, LAYOUTS)
    left = {
        (i, x, j, y)
        for i, j in itertools.combinations(range(len(axes)), 2)
        for x in axes[i]
        for y in axes[j]
    }
    everything = list(itertools.product(*axes))
    cases = []
    while left:
        best, covered = None, set()
        for choice in everything:
            new = {
                (i, choice[i], j, choice[j]) for i, j in itertools.combinations(range(len(axes)), 2)
            } & left
            if len(new) > len(covered):
                best, covered = choice, new
        assert best is not None
        left -= covered
        pair, rows, columns, depth, layouts = best
        cases.append(Case(*pair, rows, columns, depth, layouts))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(), ids=lambda case: case.id)
def test_any_two_choices_together_give_the_golden_product(case: Case) -> None:
    check(case)


SLOW_GROUPED = [
    Case(a, b, rows, columns, depth, layouts)
    for (a, b), rows, columns, depth, layouts in zip(
        PAIRS * 2,
        ((4, 130, 0, 300), (1, 257, 0, 0, 2), (0, 0), (128, 128)) * 2,
        (64, 200, 8, 136, 8, 64, 128, 24),
        (96, 320, 32, 160, 512, 64, 128, 544),
        (*LAYOUTS, *LAYOUTS, *LAYOUTS[:2]),
        strict=True,
    )
    if sum(rows)
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_GROUPED, ids=lambda case: case.id)
def test_ranges_of_every_size_give_the_golden_product(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("case", DENSE[3:9] + GROUPED[1:3], ids=lambda case: case.id)
def test_small_products_give_the_same_in_any_order(case: Case, seed: int) -> None:
    check(case, schedule=seed)


# Planted bugs ------------------------------------------------------------------------------------

FEW = Case("nvfp4", "nvfp4", 5, 40, 544)
SHORT = Case("nvfp4", "nvfp4", 5, 40, 96)
MANY = Case("nvfp4", "nvfp4", 70, 40, 64)
BYTES = Case("mxfp8_e4m3", "mxfp4", 5, 40, 160, MIXED)
WRONG = AssertionError
#: A line of ``scaled_tiles``, a wrong one, and what is found where.
BUGS = [
    ("cp_async_wait_group(IN_FLIGHT)", "pass", FEW, DataRace),
    ("            cuda.syncthreads()\n", "", FEW, DataRace),
    ("ahead = step + STAGES - 1", "ahead = step + STAGES", FEW, UnwrittenRead),
    ("IN_FLIGHT = STAGES - 2", "IN_FLIGHT = STAGES - 1", FEW, DataRace),
    ("chunk_at(base, line, chunk)", "chunk_at(base, line, chunk ^ 1)", SHORT, WRONG),
    ("(row_at >= 0) & (at < row_bytes), 16", "row_at >= 0, 16", FEW, OutOfBounds),
    ("select_u32(row_at >= 0, max(min(left, 4), 0), 0)", "max(min(left, 4), 0)", FEW, Misaligned),
    ("max(min(left, 4), 0)", "4", BYTES, OutOfBounds),
    ("a_chunk = lane >> 4", "a_chunk = lane >> 3 & 1", SHORT, WRONG),
    ("acc1, sa, sb, byte, 1)", "acc1, sa, sb, byte, 0)", MANY, WRONG),
    ("((lane >> 1) & 1) * 16", "((lane >> 2) & 1) * 16", MANY, WRONG),
    ("(lane & 3) * 8 + (lane >> 2), stage)", "(lane & 3) * 4 + (lane >> 2), stage)", SHORT, WRONG),
    ("16 * (stage & 1))", "16 * (stage & 2))", BYTES, WRONG),
    ("return shl_u32(m[0], 2)", "return shl_u32(m[0], 1)", BYTES, InvalidOperand),
    ("store_words(target + words_a, bytes_a)", "pass", BYTES, UnwrittenRead),
    ("and_u32(both[0], 0x7F7F7F7F)", "both[0]", FEW, InvalidOperand),
    ("warp_row < count", "warp_row < count - 64", MANY, WRONG),
]


@pytest.mark.parametrize(
    ("line", "wrong", "case", "error"), BUGS, ids=[f"{bug[0].strip()} to {bug[1]}" for bug in BUGS]
)
def test_a_planted_bug_is_found(
    line: str, wrong: str, case: Case, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(scaled_tiles.__file__)
    with open(path, encoding="utf-8") as file:
        text = file.read()
    assert line in text
    module = types.ModuleType(scaled_tiles.__name__)
    module.__dict__["__package__"] = scaled_tiles.__package__
    exec(compile(text.replace(line, wrong), path, "exec"), module.__dict__)
    a, b, options = operands(case)
    if "0x7F7F7F7F" in line:
        a = signed_scales(a, monkeypatch)
    monkeypatch.setattr(matmul_sm120, "sums", module.__dict__["sums"])
    launch._simulated.cache_clear()
    try:
        with pytest.raises(error):
            same(*on_machine(a, b, options))
    finally:
        launch._simulated.cache_clear()


# Plans and machine code --------------------------------------------------------------------------


def test_what_these_kernels_do_not_take_goes_elsewhere() -> None:
    facts = dict(variants("matmul_sm120")[0].constants)
    naive = {name: facts[name] for name in facts if name not in ("KIND", "ROWS", "THREADS")}
    chosen = plans_sm120.dense("sm_120a", naive, 5, 8, 64, ())
    assert chosen is not None and dict(chosen.program.constants)["ROWS"] == 16
    assert chosen.shared_bytes <= 99 << 10
    for arch, changes, depth in (
        ("sm_100a", {}, 64),
        ("sm_120a", {}, 48),  # rows of codes at multiples of 8 bytes
        ("sm_120a", {"ALIGNED": False}, 64),
        ("sm_120a", {"A_ELEMENT": "none"}, 64),
        ("sm_120a", {"A_SCALE": "e8m0"}, 64),  # nvfp4 with mxfp4
    ):
        assert plans_sm120.dense(arch, {**naive, **changes}, 5, 8, depth, ()) is None


NAMES = ("matmul_sm120", "grouped_matmul_sm120")
PROGRAMS = [
    pytest.param(program, id=program.label, marks=() if index == 0 else (pytest.mark.slow,))
    for name in NAMES
    for index, program in enumerate(variants(name, slow=True))
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_machine_code_multiplies_codes_and_scales_as_they_are(program: Program) -> None:
    constants = dict(program.constants)
    binary, ptx = compiling.inspect(program, "sm_120a")
    assert compiling.faults(binary, ptx) == ()
    assert binary.registers <= 184
    code = compiling.sass(binary)
    kind = str(constants["KIND"])
    opcode = {
        "nvfp4": "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
        "mxfp4": "OMMA.SF.16864.F32.E2M1.E2M1.E8",
    }.get(kind, f"QMMA.SF.16832.F32.{kind.upper()}.E8")
    # Two halves of a line, four eights of columns, and all sixteens of rows.
    products = re.findall(r"\b[OQ]MMA[\w.]*", code)
    assert products == [opcode] * (32 if constants["ROWS"] == 128 else 8)
    copies = set(re.findall(r"\bLDGSTS[\w.]*", code))
    assert any("BYPASS.128" in one for one in copies)
    expanded = "." in kind and "e2m1" in kind
    assert ("LDSM.U4x16P64TO8.M816.4" in code) is expanded
    assert any("LDGSTS.E.64" in one for one in copies) is expanded
    # Nothing is converted on the way.
    assert not re.search(r"\bHMMA|\bI2F|\bF2F\b", code)
