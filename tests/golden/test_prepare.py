"""prepare_weights of the golden model, read back lane by lane by a reader of the layout's text."""

from __future__ import annotations

import numpy as np
import pytest

from nvfp4 import golden, layouts
from nvfp4.formats import FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2, NVFP4, PREPARED, BlockFormat
from nvfp4.golden import prepare as module
from tests import exact, prepared
from tests.vectorlib import same_values

ALL = pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
MX = pytest.mark.parametrize("fmt", [MXFP4, MXFP8_E4M3, MXFP8_E5M2], ids=lambda f: f.name)
ROWS = (1, 17, 40)


def columns_of(fmt: BlockFormat) -> tuple[int, ...]:
    return (16, 80) if fmt is NVFP4 else (32, 96, 160)


def prepare(codes, scales, fmt):
    rows = (*codes.shape[:-1], codes.shape[-1] * fmt.codes_per_byte)
    return golden.prepare_weights(codes, scales, fmt, shape=rows, scale_layout="linear")


def values(codes, scales, fmt, layout="linear", shape=None):
    shape = shape or (*codes.shape[:-1], codes.shape[-1] * fmt.codes_per_byte)
    return golden.element_scale_product(codes, scales, fmt, shape=shape, scale_layout=layout)


def factor(scales: np.ndarray) -> float:
    return float(np.frombuffer(scales[:4].tobytes(), "<f4")[0])


def block_of_ones(fmt: BlockFormat, scales: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """A row of blocks of the element 1 with these scales."""
    one = {"e2m1": 0x22, "e4m3": 0x38, "e5m2": 0x3C}[fmt.element]
    codes = np.full((1, len(scales) * fmt.block // fmt.codes_per_byte), one, np.uint8)
    return codes, np.array([scales], np.uint8)


@ALL
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_lanes_find_every_element_times_its_scale(fmt, rows, plain):
    for seed, columns in enumerate(columns_of(fmt)):
        codes, scales = prepared.parts(seed + 10 * rows, fmt, (rows, columns), plain=plain)
        made = prepare(codes, scales, fmt)
        assert (factor(made[1]) == 0) == (plain and fmt is not NVFP4)
        got = prepared.read_matrix(*made, fmt)
        assert same_values(got[:rows, :columns], values(codes, scales, fmt))
        got[:rows, :columns] = 0
        assert not got.view(np.uint32).any()


@ALL
@pytest.mark.parametrize("plain", [False, True])
def test_the_values_come_back(fmt, plain):
    for seed, shape in enumerate([(1, 32), (40, 160), (3, 17, 96), (0, 64), (2, 0), (0, 3, 32)]):
        codes, scales = prepared.parts(seed, fmt, shape, plain=plain)
        made = prepare(codes, scales, fmt)
        assert made[0].shape == layouts.codes_shape(fmt, shape, PREPARED)
        assert made[1].shape == layouts.scale_shape(fmt, shape, PREPARED)
        expected = values(codes, scales, fmt)
        assert same_values(values(*made, fmt, PREPARED, shape), expected)
        decode = np.full((*shape[:-1], 1), 1 / 3, np.float32)
        got = golden.dequantize(*made, decode, fmt, shape=shape, scale_layout=PREPARED)
        with np.errstate(over="ignore", invalid="ignore"):
            assert same_values(got, expected * decode)


@ALL
def test_codes_and_scales_of_blocks_with_values_come_back(fmt):
    codes, scales = prepared.parts(5, fmt, (33, 96))
    got_codes, got_scales = golden.unprepare_weights(*prepare(codes, scales, fmt), fmt,
                                                     shape=(33, 96))  # fmt: skip
    expected = values(codes, scales, fmt).reshape(*scales.shape, fmt.block)
    live = (expected != 0).any(axis=-1) & ~np.isnan(expected).any(axis=-1)
    assert live.any() and not live.all()
    assert (got_scales[live] == scales[live]).all()
    by_block = got_codes.reshape(*scales.shape, -1), codes.reshape(*scales.shape, -1)
    assert (by_block[0][live] == by_block[1][live]).all()


@ALL
def test_tcgen_scales_give_the_same_bytes(fmt):
    codes, scales = prepared.parts(1, fmt, (2, 130, 160))
    tiles = golden.interleave_scales(scales)
    tiles[:, -1, ..., -1] = 0x66  # padding is not looked at
    logical = golden.deinterleave_scales(tiles, scales.shape[1:])
    shape = (2, 130, 160)
    got = golden.prepare_weights(codes, tiles, fmt, shape=shape, scale_layout="tcgen")
    for a, b in zip(got, prepare(codes, logical, fmt), strict=True):
        assert a.tobytes() == b.tobytes()


def test_each_matrix_of_a_stack_is_prepared_by_itself():
    kinds = [prepared.parts(i, MXFP4, (17, 96), plain=i == 1) for i in range(3)]
    codes, scales = (np.stack(arrays) for arrays in zip(*kinds, strict=True))
    made = prepare(codes, scales, MXFP4)
    alone = [prepare(*kind, MXFP4) for kind in kinds]
    for i in range(3):
        assert made[0][i].tobytes() == alone[i][0].tobytes()
        assert made[1][i].tobytes() == alone[i][1].tobytes()
    assert [factor(s) == 0 for s in made[1]] == [False, True, False]


def test_what_is_worked_on_in_pieces_has_the_same_bytes(monkeypatch):
    codes, scales = prepared.parts(3, NVFP4, (70, 128))
    whole = prepare(codes, scales, NVFP4)
    monkeypatch.setattr(module, "_PIECE", 4096)
    pieces = prepare(codes, scales, NVFP4)
    assert [a.tobytes() for a in whole] == [a.tobytes() for a in pieces]
    assert same_values(values(*pieces, NVFP4, PREPARED, (70, 128)), values(codes, scales, NVFP4))


# Words --------------------------------------------------------------------------------------------


def test_every_four_registers_have_a_word():
    """The map from word to registers is linear over bits, so 32 independent words show it."""
    bits = [bit for bit in range(32) if prepared.MASK >> bit & 1]
    for i in range(4):
        for bit in bits:
            wanted = [0, 0, 0, 0]
            wanted[i] = 1 << bit
            word = module._mix(*[np.array([w], np.uint32) for w in wanted])
            assert prepared.registers(int(word[0])) == tuple(wanted)
    words = np.random.default_rng(0).integers(0, 1 << 32, 1000, np.uint32)
    for word, back in zip(words, module._mix(*module._unmix(words)), strict=True):
        assert word == back
        assert prepared.registers(int(word)) == tuple(int(f[0]) for f in module._unmix(word[None]))


# Bytes of scales ----------------------------------------------------------------------------------


def test_nvfp4_scales_get_one_more_bit_of_exponent():
    assert len({int(b) for b in module._FROM_E4M3[1:]}) == 127
    for byte in range(1, 0x7F):
        made = int(module._FROM_E4M3[byte])
        value = float(prepared.multiplier(made, NVFP4)) * 2.0**-117
        assert value == exact.scale_value(byte, "e4m3")
    assert module._FROM_E4M3[0] == 0x50 and module._FROM_E4M3[0x7F] == 0xAC
    assert np.isnan(float(prepared.multiplier(0xAC, NVFP4)))
    codes, scales = block_of_ones(NVFP4, [0x38, 0x01])
    assert factor(prepare(codes, scales, NVFP4)[1]) == 512.0


def test_the_sign_of_an_nvfp4_scale_does_not_count():
    codes, scales = prepared.parts(2, NVFP4, (5, 64))
    signed = prepare(codes, scales | 0x80, NVFP4)
    assert [a.tobytes() for a in signed] == [a.tobytes() for a in prepare(codes, scales, NVFP4)]


@MX
def test_the_common_factor_is_the_least_that_bfloat16_can_bear(fmt):
    bias = -prepared.EXPONENT[fmt.element]
    for largest in (100, 254 - bias, 255 - bias, 200, 254):
        made = prepare(*block_of_ones(fmt, [largest - 7, largest]), fmt)[1]
        c = max(0, largest - (254 - bias))
        assert factor(made) == 2.0**c
        assert sorted({int(b) for b in made[16:]} - {127}) == [
            largest - 7 + bias - c,
            largest + bias - c,
        ]


@MX
def test_scales_too_far_apart_stay_as_they_are(fmt):
    bias = -prepared.EXPONENT[fmt.element]
    for largest in (20, 100, 254):
        c = max(0, largest - (254 - bias))
        for smallest, plain in ((c + 20, False), (c + 19, True)):
            if smallest > largest:
                continue
            made = prepare(*block_of_ones(fmt, [smallest, largest, 255]), fmt)[1]
            assert (factor(made) == 0) is plain
            if plain:
                assert {smallest, largest, 255} <= {int(b) for b in made[16:]}


@MX
def test_a_block_of_zeros_does_not_decide(fmt):
    codes, scales = block_of_ones(fmt, [0, 120, 254])
    by_block = codes.reshape(3, -1)
    by_block[0], by_block[2] = 0, 0x80
    made = prepare(codes, scales, fmt)
    assert factor(made[1]) == 1.0
    bias = -prepared.EXPONENT[fmt.element]
    assert {int(b) for b in made[1][16:]} == {127, 120 + bias}
    got = values(*made, fmt, PREPARED, (1, 96))
    assert same_values(got, values(codes, scales, fmt))
    nothing = prepare(codes & 0x80, scales, fmt)
    assert factor(nothing[1]) == 1.0 and (nothing[1][16:] == 127).all()


@ALL
def test_a_block_whose_scale_is_nan_has_zero_codes(fmt):
    nan, stored = (0x7F, 0xAC) if fmt is NVFP4 else (255, 255)
    one = 0x38 if fmt is NVFP4 else 127
    codes, scales = block_of_ones(fmt, [one, nan])
    made = prepare(codes, scales, fmt)
    assert factor(made[1]) != 0 and stored in made[1][16:]
    kept = golden.unprepare_weights(*made, fmt, shape=(1, 2 * fmt.block))[0]
    half = codes.shape[1] // 2
    assert (kept[:, :half] == codes[:, :half]).all() and not kept[:, half:].any()


def test_an_nvfp4_block_whose_scale_is_0_keeps_its_signs_alone():
    codes, scales = block_of_ones(NVFP4, [0, 0x38])
    codes[0, :8] = 0x2A  # -1, 1
    made = prepare(codes, scales, NVFP4)
    assert 0x50 in made[1][16:] and not (made[1][16:] == 0).any()
    kept = golden.unprepare_weights(*made, NVFP4, shape=(1, 32))[0]
    assert (kept[0, :8] == 0x08).all()


@pytest.mark.parametrize(
    ("fmt", "code", "plain"),
    [
        (MXFP8_E4M3, 0x7F, True), (MXFP8_E4M3, 0xFF, True), (MXFP8_E4M3, 0x7E, False),
        (MXFP8_E5M2, 0x7C, True), (MXFP8_E5M2, 0xFC, True), (MXFP8_E5M2, 0x7D, True),
        (MXFP8_E5M2, 0xFF, True), (MXFP8_E5M2, 0x7B, False),
    ],
)  # fmt: skip
def test_infinity_and_nan_among_the_codes_leave_the_scales_as_they_are(fmt, code, plain):
    codes, scales = block_of_ones(fmt, [120, 121])
    codes[0, 37] = code
    made = prepare(codes, scales, fmt)
    assert (factor(made[1]) == 0) is plain
    assert same_values(values(*made, fmt, PREPARED, (1, 64)), values(codes, scales, fmt))
