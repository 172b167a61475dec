"""What inspect and verify say, and what the search of scales gains."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from nvfp4.checkpoint import inspect, numeric, open_checkpoint, quantize, verify
from nvfp4.checkpoint.search import quantize_mse, search_encode_scale
from nvfp4.formats import FORMATS, MXFP4, NVFP4, BlockFormat
from nvfp4.golden import amax_encode_scale, dequantize
from nvfp4.golden import quantize as golden
from tests.checkpoint.helpers import tensors, write_folder

F8 = ml_dtypes.float8_e4m3fn


def sqnr(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x.astype("float64"), y.astype("float64")
    return float(10 * np.log10(np.sum(x * x) / np.sum((x - y) ** 2)))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_sqnr_and_largest_error_are_those_of_the_dequantised_values(
    format: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(toy, tmp_path / "q", format=format, device="cpu")
    monkeypatch.setattr("nvfp4.checkpoint.compare.CHUNK", 1000)
    result = verify(toy, tmp_path / "q")
    assert result.passed
    arrays = tensors()
    by_name = {t.name: t for t in result.tensors}
    assert set(by_name) == set(arrays)
    signal = noise = 0.0
    with open_checkpoint(tmp_path / "q") as model:
        assert len(model.found.weights) == 10
        for module in model.found.weights:
            x = arrays[f"{module}.weight"].astype("float32")
            y = model.qtensor(module).dequantize()
            t = by_name[f"{module}.weight"]
            assert t.sqnr == pytest.approx(sqnr(x, y), abs=1e-9)
            assert t.max_error == np.abs(x - y).max()
            assert t.amax == np.abs(x).max()
            signal += float(np.sum(x.astype("float64") ** 2))
            noise += float(np.sum((x.astype("float64") - y) ** 2))
    assert result.sqnr == pytest.approx(10 * np.log10(signal / noise), abs=1e-9)
    name = "mxfp8_e4m3" if format == "mxfp8" else format
    assert result.errors[name].sum() == sum(a.size for n, a in arrays.items() if by_name[n].format)


def test_a_weight_under_the_limit_is_named(toy: Path, tmp_path: Path) -> None:
    quantize(toy, tmp_path / "q", format="mxfp4", device="cpu")
    assert verify(toy, tmp_path / "q", min_sqnr=10).passed
    result = verify(toy, tmp_path / "q", min_sqnr=40)
    assert not result.passed
    statuses = {t.name: t.status for t in result.tensors}
    assert statuses["model.layers.0.self_attn.q_proj.weight"] == "noise"
    assert statuses["lm_head.weight"] == "ok"


def changed(folder: Path, toy: Path, **changes: np.ndarray | None) -> Path:
    """The quantised toy with some tensors replaced or left out."""
    quantize(toy, folder.with_name("good"), device="cpu")
    with open_checkpoint(folder.with_name("good")) as model:
        arrays = {name: np.array(model.array(name)) for name in model.entries}
    for name, array in changes.items():
        if array is None:
            del arrays[name]
        else:
            arrays[name] = array
    return write_folder(folder, arrays)


Q = "model.layers.0.self_attn.q_proj"
DAMAGES: dict[str, tuple[dict[str, np.ndarray | None], str, str]] = {
    "another byte in a norm": (
        {"model.norm.weight": np.zeros(64, ml_dtypes.bfloat16)}, "model.norm.weight", "bytes",
    ),
    "another type": (
        {"model.norm.weight": np.zeros(64, "float16")}, "model.norm.weight", "was BF16",
    ),
    "another shape": (
        {"model.norm.weight": np.zeros(63, ml_dtypes.bfloat16)},
        "model.norm.weight", "was BF16 [64",
    ),
    "a tensor too few": ({"model.norm.weight": None}, "model.norm.weight", "missing"),
    "a tensor too many": ({"new": np.zeros(3, "float32")}, "new", "not in"),
    "another width": (
        {f"{Q}.weight_packed": np.zeros((64, 16), "uint8"),
         f"{Q}.weight_scale": np.zeros((64, 2), F8)}, f"{Q}.weight", "was [64, 64], is [64, 32]",
    ),
    "a scale that is no scale": (
        {f"{Q}.weight_global_scale": np.zeros(1, "float32")}, f"{Q}.weight", "at least 2",
    ),
    "a negative block scale": (
        {f"{Q}.weight_scale": np.full((64, 4), -1, F8)}, f"{Q}.weight", "negative",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_damage_is_a_mismatch_that_names_the_tensor(case: str, toy: Path, tmp_path: Path) -> None:
    changes, name, message = DAMAGES[case]
    result = verify(toy, changed(tmp_path / "bad", toy, **changes))
    wrong = [t for t in result.tensors if t.status != "ok"]
    assert [t.name for t in wrong] == [name]
    assert wrong[0].status == "mismatch"
    assert message in wrong[0].message
    assert not result.passed


def test_values_that_only_the_reader_would_see_wrong_are_seen(toy: Path, tmp_path: Path) -> None:
    # Read as a multiplier, the divisor of compressed-tensors: finite values, all of them garbage.
    with open_checkpoint(toy) as model:
        g = amax_encode_scale(np.asarray(model.array(f"{Q}.weight")), NVFP4)
    result = verify(
        toy, changed(tmp_path / "bad", toy, **{f"{Q}.weight_global_scale": (1 / g).reshape(1)}),
        min_sqnr=10,
    )  # fmt: skip
    assert [t.name for t in result.tensors if t.status == "noise"] == [f"{Q}.weight"]


def test_swapped_nibbles_are_seen(toy: Path, tmp_path: Path) -> None:
    quantize(toy, tmp_path / "x", device="cpu")
    with open_checkpoint(tmp_path / "x") as model:
        codes = np.array(model.array(f"{Q}.weight_packed"))
    swapped = (codes << 4) | (codes >> 4)
    bad = changed(tmp_path / "bad", toy, **{f"{Q}.weight_packed": swapped})
    result = verify(toy, bad, min_sqnr=10)
    assert [t.name for t in result.tensors if t.status == "noise"] == [f"{Q}.weight"]


# --- inspect -----------------------------------------------------------------------------------


def test_inspect_counts_what_was_put_there(tmp_path: Path) -> None:
    codes = np.zeros((4, 32), "uint8")  # 64 columns, 4 blocks a row
    codes[0, :8] = 0x77  # block (0, 0): all +6
    codes[1, 8] = 0x0F  # block (1, 1): one -6
    codes[2, 0] = 0x80  # block (2, 0): zeros, one of them negative
    codes[3, 16] = 0x01
    scales = np.full((4, 4), 0x38, "uint8")  # 1.0
    scales[0, 0] = 0x7E
    scales[1, 2] = 0x7F
    scales[2, 3] = 0
    arrays = {
        "m.weight": codes, "m.weight_scale": scales.view(F8),
        "m.weight_scale_2": np.array(0.25, "float32"), "m.input_scale": np.array(0.5, "float32"),
        "d.weight": np.array([1, -7, np.nan, np.inf, 0], "float32"), "i": np.arange(3),
    }  # fmt: skip
    survey = inspect(write_folder(tmp_path / "in", arrays))
    (r,) = survey.weights
    assert (r.module, r.format, r.convention) == ("m", "nvfp4", "modelopt")
    assert r.shape == (4, 64)
    assert r.blocks == 16
    assert r.dead_blocks == 16 - 3
    assert r.zero_scales == 1
    assert r.full_scales == 1
    assert r.nan_blocks == 1
    assert r.bad_scales == 0
    assert r.saturated == (16 + 1) / 256
    assert r.tensor_scale == (0.25, 0.25)
    assert r.input_scale == 0.5
    assert r.scales == (1.0, 448.0)
    assert r.bytes == 4 * 32 + 16 + 4 + 4
    d, i = sorted(survey.plain, key=lambda p: p.name)
    assert (d.amax, d.nans, d.infinities) == (7.0, 1, 1)
    assert (i.dtype, i.amax, i.nans) == ("I64", None, None)
    assert survey.bytes == sum(a.nbytes for a in arrays.values())


def test_inspect_gives_scales_as_multipliers_in_every_convention(toy: Path, tmp_path: Path) -> None:
    for convention in ("compressed-tensors", "modelopt"):
        quantize(toy, tmp_path / convention, convention=convention, device="cpu")
    a, b = (inspect(tmp_path / c).weights for c in ("compressed-tensors", "modelopt"))
    assert [r.tensor_scale for r in a] == [r.tensor_scale for r in b]
    assert [r.scales for r in a] == [r.scales for r in b]
    assert a[0].tensor_scale[1] < 1e-3  # type: ignore[index]
    survey = inspect(tmp_path / "modelopt")
    assert survey.convention == "modelopt"


def test_inspect_reports_a_tensor_scale_that_is_no_scale(tmp_path: Path) -> None:
    arrays = {
        "m.weight": np.zeros((4, 16), "uint8"), "m.weight_scale": np.full((4, 2), -1, F8),
        "m.weight_scale_2": np.array(0, "float32"),
    }  # fmt: skip
    (r,) = inspect(write_folder(tmp_path / "in", arrays)).weights
    assert "finite and at least" in r.problem
    assert r.bad_scales == 8


def test_inspect_sees_nan_elements_of_fp8(tmp_path: Path) -> None:
    codes = np.zeros((4, 64), "uint8")
    codes[1, 3] = 0xFF
    arrays = {"m.weight": codes.view(F8), "m.weight_scale": np.full((4, 2), 127, "uint8")}
    (r,) = inspect(write_folder(tmp_path / "in", arrays)).weights
    assert r.nan_blocks == 1


# --- the search --------------------------------------------------------------------------------

HEAVY = np.random.default_rng(11).standard_t(4, (64, 512)).astype("float32")


def values(
    codes: np.ndarray, scales: np.ndarray, fmt: BlockFormat, g: np.float32 | None
) -> np.ndarray:
    decode = np.float32(1) / (np.float32(1) if g is None else g)
    return dequantize(codes, scales, decode, fmt, shape=HEAVY.shape, scale_layout="linear")


@pytest.mark.parametrize("name", FORMATS)
def test_no_block_is_worse_than_by_its_largest_element(name: str) -> None:
    fmt = FORMATS[name]
    g = amax_encode_scale(HEAVY, fmt)[()] if fmt is NVFP4 else None
    best = values(*quantize_mse(HEAVY, fmt, g)[:2], fmt, g)
    usual = values(*golden(HEAVY, fmt, encode_scale=g, scale_layout="linear")[:2], fmt, g)

    def errors(y: np.ndarray) -> np.ndarray:
        return ((y.astype("float64") - HEAVY) ** 2).reshape(64, -1, fmt.block).sum(-1)  # type: ignore[no-any-return]

    assert (errors(best) <= errors(usual) * (1 + 1e-6)).all()
    assert quantize_mse(HEAVY, fmt, g)[2] == pytest.approx(errors(best).sum(), rel=1e-5)
    if fmt.codes_per_byte == 2:
        assert sqnr(HEAVY, best) > sqnr(HEAVY, usual) + 0.2


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_the_golden_ones_wherever_the_usual_scale_won(name: str) -> None:
    fmt = FORMATS[name]
    g = np.float32(3.5) if fmt is NVFP4 else None
    codes, scales, _ = quantize_mse(HEAVY, fmt, g)
    want_codes, want_scales, _ = golden(HEAVY, fmt, encode_scale=g, scale_layout="linear")
    same = scales == want_scales
    assert 0.2 < same.mean() <= 1
    width = codes.shape[1] // scales.shape[1]
    by_block = (codes == want_codes).reshape(*scales.shape, width).all(-1)
    assert by_block[same].all()


def test_the_other_choice_of_nvfp4_maps_the_largest_element_to_4() -> None:
    block = np.array([[4, 3, 3, 2, 3, 1, 3, 2, 4, 3, 1, 2, 3, 2, 1, 0.5]], "float32") * 6 / 4
    codes, scales, error = quantize_mse(block, NVFP4, np.float32(1))
    assert scales == 0x3C  # 1.5
    assert error == 0
    assert (
        dequantize(codes, scales, 1, NVFP4, shape=(1, 16), scale_layout="linear") == block
    ).all()
    _, usual, _ = golden(block, NVFP4, scale_layout="linear")
    assert usual == 0x38  # 1.0, under which 3 * 6 / 4 is no element


def test_a_lower_power_of_two_wins_where_few_elements_saturate() -> None:
    block = np.concatenate([[6.1], np.full(31, 1.5)]).astype("float32")[None]
    _, scales, _ = quantize_mse(block, MXFP4, None)
    _, usual, _ = golden(block, MXFP4, scale_layout="linear")
    assert int(scales[0, 0]) == int(usual[0, 0]) - 1


def test_special_values_keep_the_usual_scale() -> None:
    x = np.zeros((6, 32), "float32")
    x[0, 3] = np.nan
    x[1, 3] = np.inf
    x[2] = 1e-45
    x[3] = 3e38
    x[4] = -0.0
    x[5] = 1
    for fmt in FORMATS.values():
        g = np.float32(1) if fmt is NVFP4 else None
        codes, scales, error = quantize_mse(x, fmt, g)
        want_codes, want_scales, _ = golden(x, fmt, encode_scale=g, scale_layout="linear")
        some = [0, 1, 4]
        assert codes[some].tobytes() == want_codes[some].tobytes()
        assert scales[some].tobytes() == want_scales[some].tobytes()
        assert np.isfinite(error) or fmt is not NVFP4


def test_the_encode_scale_found_is_at_most_the_usual_one_and_not_worse() -> None:
    usual = amax_encode_scale(HEAVY, NVFP4)[()]
    best = search_encode_scale(HEAVY, NVFP4, np.float32(np.abs(HEAVY).max()))
    assert usual / 2 <= best <= usual
    assert quantize_mse(HEAVY, NVFP4, best)[2] <= quantize_mse(HEAVY, NVFP4, usual)[2]


@pytest.mark.parametrize(("format", "gain"), [("nvfp4", 1.0), ("mxfp4", 0.3), ("mxfp8", -0.01)])
def test_the_search_gains_on_the_real_model(
    format: str, gain: float, real_model: Path, tmp_path: Path
) -> None:
    found = {}
    for method in ("amax", "mse"):
        quantize(real_model, tmp_path / method, format=format, method=method, device="cpu",
                 include=["encoder.layer.[05].*.weight"], exclude=["*LayerNorm*"])  # fmt: skip
        result = verify(real_model, tmp_path / method)
        assert result.passed
        found[method] = result.sqnr
    assert found["mse"] >= found["amax"] + gain


def test_pieces_of_any_size_give_the_same_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    amax = numeric.amax_of(HEAVY)
    assert amax == np.abs(HEAVY).max()
    assert np.isnan(numeric.amax_of(np.where(abs(HEAVY) == amax, np.nan, HEAVY)))
    for x in (HEAVY, HEAVY.astype("float16"), HEAVY.astype(ml_dtypes.bfloat16), HEAVY * 0):
        assert numeric.encode_scale_of(numeric.amax_of(x)) == amax_encode_scale(x, NVFP4)
    for value in (np.nan, np.inf, 0.0, -1.0):
        assert numeric.encode_scale_of(value) == 1
