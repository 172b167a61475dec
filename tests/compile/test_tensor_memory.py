"""Products with tensor memory: the machine code has the instructions that the kernel is made of.

That they build without spills, and use no float64, is asked by ``test_gates``.
"""

from __future__ import annotations

import functools
import re
from collections import Counter

import pytest

from nvfp4 import compile as compiler
from nvfp4.kernels import variants
from nvfp4.kernels.matmul_sm100 import ARCHITECTURES, SHARED_LIMIT, shared_bytes, tile_constants
from nvfp4.kernels.matmul_sm100_pair import pair_constants, pair_shared_bytes
from nvfp4.program import Program

PROGRAMS = {
    f"{constants['KIND']}-{name}": program
    for name in (
        "matmul_sm100",
        "grouped_matmul_sm100",
        "matmul_sm100_pair",
        "grouped_matmul_sm100_pair",
    )
    for program in variants(name)
    for constants in [dict(program.constants)]
}
PRODUCT = {
    ("nvf4", "sm_100a"): "UTCOMMA.4X",
    ("nvf4", "sm_103a"): "UTCOMMA.BLOCK16",
    ("mxf4", "sm_100a"): "UTCOMMA",
    ("mxf4", "sm_103a"): "UTCOMMA",
    ("mxf8", "sm_100a"): "UTCQMMA",
    ("mxf8", "sm_103a"): "UTCQMMA",
}


@functools.cache
def operations(program: Program, arch: str) -> Counter[str]:
    """The instructions of the machine code, and how often each stands there."""
    code = compiler.sass(compiler.build(program, arch))
    return Counter(re.findall(r"\b[A-Z][A-Z0-9]+(?:\.[\w]+)*", code))


#: Each kernel and each target once; the others are built by ``make test-slow``.
FAST = (
    ("nvf4-matmul_sm100", "sm_100a"),
    ("mxf8-grouped_matmul_sm100", "sm_103a"),
    ("nvf4-matmul_sm100_pair", "sm_100a"),
    ("mxf8-grouped_matmul_sm100_pair", "sm_103a"),
)
CASES = [
    pytest.param(name, arch, marks=() if (name, arch) in FAST else (pytest.mark.slow,))
    for name in PROGRAMS
    for arch in ARCHITECTURES
]


@pytest.mark.parametrize("name, arch", CASES)
def test_its_instructions_are_in_the_machine_code(name: str, arch: str) -> None:
    program = PROGRAMS[name]
    found = operations(program, arch)
    kind = dict(program.constants)["KIND"]
    paired = "pair" in name
    product = PRODUCT[kind, arch]
    if paired:
        first, *more = product.split(".")
        product = ".".join([first, "2CTA", *more])
    copies = ("UTMALDG.2D.2CTA", "UTCCP.T.S.2CTA.4x32dp128bit", "UTCBAR.2CTA.MULTICAST")
    if not paired:
        copies = ("UTMALDG.2D", "UTCCP.T.S.4x32dp128bit", "UTCBAR", "UBLKCP.S.G")
    for wanted in (
        product,
        *copies,
        "LDTM.x32",
        "SYNCS.PHASECHK.TRANS64.TRYWAIT",
        "ACQBULK",
    ):
        assert any(one == wanted or one.startswith(wanted + ".") for one in found), wanted
    products = {one for one in found if re.match(r"UTC[A-Z]MMA", one)}
    assert products == {product}
    # A loop over lanes, which the assembler writes where it does not know that one thread is alone.
    assert not any(one.startswith("BRA.U.ANY") for one in found)


CHOICES = {1: (tile_constants, shared_bytes), 2: (pair_constants, pair_shared_bytes)}
TILES = [(n, k) for n in (64, 128, 192, 256) for k in (128, 256)]


@pytest.mark.parametrize("kind", ["nvf4", "mxf4", "mxf8"])
@pytest.mark.parametrize("pair", ["none", "halves", "interleaved"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("blocks", [1, 2])
def test_tiles_leave_room_for_two_stages(
    kind: str, pair: str, tile: tuple[int, int], blocks: int
) -> None:
    if pair == "halves" and tile[0] not in (128, 256):
        return
    made, bytes_of = CHOICES[blocks]
    chosen = made(kind, *tile, pair)
    # 128 + 256 rows of 256 bytes are 96 KB: legal, and never chosen.
    most = kind == "mxf8" and tile == (256, 256) and blocks == 1
    assert chosen["STAGES"] >= (1 if most else 2)
    assert bytes_of(kind, *tile, chosen["STAGES"], pair) <= SHARED_LIMIT
    groups = tile[1] // (64 if kind == "nvf4" else 128)
    tiles = 2 if pair == "halves" or tile[0] > 128 else 1
    assert chosen["ACCS"] * tile[0] + 4 * groups * (1 + tiles) <= chosen["COLUMNS"] <= 512
