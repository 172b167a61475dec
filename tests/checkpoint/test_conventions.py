"""Reading and converting: other libraries' bytes, every pair of conventions, what does not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from nvfp4.checkpoint import CheckpointError, convert, open_checkpoint, quantize, verify
from nvfp4.checkpoint.schemes import find_weights, scheme_for
from nvfp4.errors import UnsupportedError
from nvfp4.formats import NVFP4
from nvfp4.golden import quantize as golden
from tests.checkpoint.helpers import ROOT, contents, tensors, write_folder

F8 = ml_dtypes.float8_e4m3fn
VECTORS = ROOT / "tests" / "vectors"


def peer_cases(library: str) -> list[tuple[dict[str, Any], Any]]:
    z = np.load(VECTORS / f"peer_{library}.npz")
    return [(case, z) for case in json.loads(z["cases"].tobytes().decode())]


def stored(convention: str, case: Mapping[str, Any], z: Any) -> dict[str, np.ndarray]:
    """The tensors of a vector as its library stores them in a file."""
    codes, scales = z[case["codes"]], z[case["scales"]]
    if case["format"] == "nvfp4":
        scales = scales.view(F8)
    if convention == "compressed-tensors":
        if case["format"] == "mxfp8_e4m3":
            return {"m.weight": codes.view(F8), "m.weight_scale": scales}
        found = {"m.weight_packed": codes, "m.weight_scale": scales}
        if "global_scale" in case:
            found["m.weight_global_scale"] = z[case["global_scale"]]
        return found
    if case["format"] == "mxfp8_e4m3":
        return {"m.weight": codes.view(F8), "m.weight_scale": scales}
    found = {"m.weight": codes, "m.weight_scale": scales}
    if case["format"] == "nvfp4":
        two = z[case["weight_scale_2"]] if "weight_scale_2" in case else np.ones(1, "float32")
        found["m.weight_scale_2"] = two.reshape(())
    return found


PEERS = [
    pytest.param(library.replace("_", "-") if library != "modelopt" else library, case, z,
                 id=case["name"])
    for library in ("compressed_tensors", "modelopt")
    for case, z in peer_cases(library)
]  # fmt: skip


@pytest.mark.parametrize(("convention", "case", "z"), PEERS)
def test_the_bytes_of_other_libraries_have_the_values_of_the_vectors(
    convention: str, case: dict[str, Any], z: Any, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "in", stored(convention, case, z))
    with open_checkpoint(source) as model:
        q = model.qtensor("m")
        assert q.format == case["format"]
        assert q.codes.tobytes() == z[case["codes"]].tobytes()
        assert q.scales.tobytes() == z[case["scales"]].tobytes()
        decode = np.float32(q.decode_scale)
        assert abs(int(decode.view(np.int32)) - case["decode_scale_bits"]) <= 1
        values = q.dequantize()
        if int(decode.view(np.int32)) == case["decode_scale_bits"]:
            assert np.array_equal(values, z[case["values"]], equal_nan=True)


@pytest.mark.parametrize("case", [c for c, _ in peer_cases("gguf")], ids=lambda c: c["format"])
def test_gguf_blocks_have_the_values_of_the_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    import gguf

    z = np.load(VECTORS / "peer_gguf.npz")
    blocks = z[case["gguf_blocks"]]
    kind = getattr(gguf.GGMLQuantizationType, case["format"].upper())
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "toy")
    writer.add_tensor("blk.0.ffn.weight", blocks, raw_dtype=kind)
    bf16 = z[case["x"]]
    writer.add_tensor("blk.0.norm.weight", bf16.astype("float32"))
    if case["format"] == "nvfp4":
        writer.add_tensor("blk.0.ffn.scale", np.array([0.5], "float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_checkpoint(path) as model:
        q = model.qtensor("blk.0.ffn")
        assert q.codes.tobytes() == z[case["codes"]].tobytes()
        assert q.scales.tobytes() == z[case["scales"]].tobytes()
        factor = 0.5 if case["format"] == "nvfp4" else 1
        assert np.array_equal(q.dequantize(), z[case["values"]] * factor, equal_nan=True)
    convert(path, tmp_path / "out", "compressed-tensors")
    with open_checkpoint(tmp_path / "out") as model:
        assert np.array_equal(
            model.qtensor("blk.0.ffn").dequantize(), z[case["values"]] * factor, equal_nan=True
        )
        assert (model.array("blk.0.norm.weight") == bf16.astype("float32")).all()
    assert verify(path, tmp_path / "out").sqnr == np.inf or case["format"] == "mxfp4"


def test_other_gguf_types_are_an_error_that_names_them(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "toy")
    writer.add_tensor(
        "a.weight", np.zeros((2, 34), "uint8"), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"a\.weight \(Q8_0\)"):
        open_checkpoint(path)
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nothing")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(tmp_path / "bad.gguf")


# --- there and back ----------------------------------------------------------------------------


def scaled(power: bool) -> dict[str, np.ndarray]:
    """The toy's tensors; with ``power``, each weight's amax is 2688 times a power of two."""
    arrays = tensors()
    for i, array in enumerate(arrays.values()):
        if array.ndim < 2 or not power:
            continue
        for matrix in array.reshape(-1, *array.shape[-2:]):
            limit = np.float32(2688 * 2.0 ** (i % 5 - 16))
            matrix[...] = np.clip(matrix.astype("float32"), -limit, limit).astype(array.dtype)
            matrix[0, 0] = limit
    return arrays


@pytest.mark.parametrize(
    ("first", "second"),
    [("compressed-tensors", "modelopt"), ("modelopt", "compressed-tensors")],
)
def test_a_round_trip_is_byte_identical_where_the_scale_inverts_exactly(
    first: str, second: str, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "in", scaled(power=True), shards=3)
    quantize(source, tmp_path / "a", convention=first, device="cpu")
    there = convert(tmp_path / "a", tmp_path / "b", second)
    back = convert(tmp_path / "b", tmp_path / "c", first)
    assert not there.notes
    assert not back.notes
    assert contents(tmp_path / "a") == contents(tmp_path / "c")
    quantize(source, tmp_path / "direct", convention=second, device="cpu")
    assert contents(tmp_path / "b") == contents(tmp_path / "direct")


def test_elsewhere_a_round_trip_moves_the_scale_by_one_ulp_at_most(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", scaled(power=False))
    quantize(source, tmp_path / "a", device="cpu")
    convert(tmp_path / "a", tmp_path / "b", "modelopt")
    convert(tmp_path / "b", tmp_path / "c", "compressed-tensors")
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "c") as c:
        assert a.entries == c.entries
        for name in a.entries:
            if name.endswith("global_scale"):
                x, y = (m.array(name).view(np.int32).astype(int) for m in (a, c))
                assert abs(x - y).max() <= 1
            else:
                assert a.raw(name).tobytes() == c.raw(name).tobytes()


def test_inexact_reciprocals_are_told(tmp_path: Path) -> None:
    inexact = np.float32(2688 / 3)
    while np.float32(1) / (np.float32(1) / inexact) == inexact:
        inexact = np.nextafter(inexact, np.float32(1e9))
    x = np.ones((16, 32), "float32")
    codes, scales, _ = golden(x, NVFP4, encode_scale=inexact, scale_layout="linear")
    arrays = {
        "m.weight_packed": codes, "m.weight_scale": scales.view(F8),
        "m.weight_global_scale": inexact.reshape(1),
    }  # fmt: skip
    source = write_folder(tmp_path / "in", arrays)
    result = convert(source, tmp_path / "out", "modelopt")
    assert "last bit there and back (1 tensors)" in result.notes[0]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp8"])
def test_converting_to_the_same_convention_changes_no_byte(format: str, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tensors(), shards=2)
    for convention in ("compressed-tensors", "modelopt"):
        quantize(source, tmp_path / convention, format=format, convention=convention, device="cpu")
        convert(tmp_path / convention, tmp_path / f"{convention}-2", convention)
        assert contents(tmp_path / convention) == contents(tmp_path / f"{convention}-2")


def test_gpt_oss_and_compressed_tensors_hold_the_same_mxfp4_bytes(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tensors())
    quantize(source, tmp_path / "a", format="mxfp4", convention="gpt-oss", device="cpu")
    convert(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    convert(tmp_path / "b", tmp_path / "c", "gpt-oss")
    assert contents(tmp_path / "a") == contents(tmp_path / "c")
    assert verify(tmp_path / "a", tmp_path / "b").passed
    assert verify(tmp_path / "a", tmp_path / "b").sqnr == np.inf


def test_the_names_of_the_first_gpt_oss_release_are_read(tmp_path: Path) -> None:
    blocks = np.random.default_rng(1).integers(0, 256, (2, 8, 3, 16), "uint8")
    scales = np.full((2, 8, 3), 120, "uint8")
    name = "block.0.mlp.mlp1_weight"
    source = write_folder(
        tmp_path / "in", {f"{name}.blocks": blocks, f"{name}.scales": scales,
                          "block.0.mlp.mlp1_bias": np.zeros(8, "float32")},
    )  # fmt: skip
    convert(source, tmp_path / "out", "gpt-oss")
    with open_checkpoint(tmp_path / "out") as model:
        assert model.entries[f"{name}_blocks"].shape == (2, 8, 3, 16)
        assert model.raw(f"{name}_blocks").tobytes() == blocks.tobytes()


def test_fused_halves_keep_their_own_tensor_scales(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tensors())
    quantize(source, tmp_path / "a", device="cpu")
    convert(tmp_path / "a", tmp_path / "b", "modelopt")
    with open_checkpoint(tmp_path / "a") as a, open_checkpoint(tmp_path / "b") as b:
        scales = set()
        for n in "qkv":
            module = f"model.layers.0.self_attn.{n}_proj"
            decode = float(a.decode_scale(a.found.weights[module]))
            assert decode == float(b.decode_scale(b.found.weights[module]))
            scales.add(decode)
        assert len(scales) == 3


def test_stacked_experts_keep_a_scale_each(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tensors())
    quantize(source, tmp_path / "a", device="cpu")
    convert(tmp_path / "a", tmp_path / "b", "modelopt")
    with open_checkpoint(tmp_path / "b") as model:
        q = model.qtensor("model.layers.0.mlp.experts.down")
        assert q.decode_scale.shape == (4,)
        assert len(set(q.decode_scale.tolist())) == 4
    assert verify(tmp_path / "a", tmp_path / "b").sqnr == np.inf


def test_activation_scales_are_inverted_too(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tensors())
    module = "model.layers.0.self_attn.q_proj"
    quantize(source, tmp_path / "a", activation_scales={module: 42.0}, device="cpu")
    convert(tmp_path / "a", tmp_path / "b", "modelopt")
    with open_checkpoint(tmp_path / "b") as model:
        assert model.array(f"{module}.input_scale") == np.float32(1) / np.float32(64)
    hf = json.loads((tmp_path / "b" / "hf_quant_config.json").read_text())["quantization"]
    assert hf["quantized_layers"][module]["quant_algo"] == "NVFP4"


def test_fp8_layers_pass_from_one_convention_to_the_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    codes, scales, decode = golden(
        rng.standard_normal((32, 64)).astype("float32"), NVFP4, encode_scale="amax",
        scale_layout="linear",
    )  # fmt: skip
    fp8 = rng.standard_normal((32, 64)).astype(F8)
    arrays = {
        "a.weight": codes, "a.weight_scale": scales.view(F8), "a.weight_scale_2": decode,
        "b.weight": fp8, "b.weight_scale": np.array(0.5, "float32"),
        "b.input_scale": np.array(0.25, "float32"),
        "c.weight": fp8, "c.weight_scale": np.full((32, 1), 0.5, "float32"),
    }  # fmt: skip
    source = write_folder(tmp_path / "in", arrays)
    convert(source, tmp_path / "out", "compressed-tensors")
    with open_checkpoint(tmp_path / "out") as model:
        assert model.raw("b.weight").tobytes() == fp8.tobytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    by_target = {t: g for g in config["config_groups"].values() for t in g["targets"]}
    assert by_target["b"]["weights"]["strategy"] == "tensor"
    assert by_target["c"]["weights"]["strategy"] == "channel"
    assert by_target["a"]["format"] == "nvfp4-pack-quantized"
    convert(tmp_path / "out", tmp_path / "back", "modelopt")
    hf = json.loads((tmp_path / "back" / "hf_quant_config.json").read_text())["quantization"]
    algorithms = {m: a["quant_algo"] for m, a in hf["quantized_layers"].items()}
    assert algorithms == {"a": "W4A16_NVFP4", "b": "FP8", "c": "FP8_PER_CHANNEL_PER_TOKEN"}


# --- what does not fit -------------------------------------------------------------------------

U8 = np.zeros((16, 16), "uint8")
S16 = np.zeros((16, 2), F8)  # nvfp4: 32 columns
S32 = np.zeros((16, 1), "uint8")  # mxfp4: 32 columns
G = np.ones(1, "float32")
MISFITS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "no block scales": ({"m.weight_packed": U8}, "m.weight_scale is missing"),
    "no tensor scale": (
        {"m.weight_packed": U8, "m.weight_scale": S16}, "m.weight_global_scale is missing",
    ),
    "no tensor scale, ModelOpt": (
        {"m.weight": U8, "m.weight_scale": S16}, "m.weight_scale_2 is missing",
    ),
    "no scales, ModelOpt": ({"m.weight": U8}, "m.weight_scale is missing"),
    "scales without codes": ({"m.weight_scale": S16, "m.weight_global_scale": G}, "no weight uses"),
    "scales of a dense weight": (
        {"m.weight": np.zeros((16, 32), "float32"), "m.weight_scale": S16}, "no weight uses",
    ),
    "divisor and multiplier": (
        {"m.weight_packed": U8, "m.weight_scale": S16, "m.weight_global_scale": G,
         "m.weight_scale_2": G}, "m.weight_scale_2",
    ),
    "scales of another width": (
        {"m.weight_packed": U8, "m.weight_scale": np.zeros((16, 3), F8),
         "m.weight_global_scale": G}, "one scale is for 16 columns",
    ),
    "scales of another height": (
        {"m.weight_packed": U8, "m.weight_scale": np.zeros((8, 2), F8),
         "m.weight_global_scale": G}, "do not belong",
    ),
    "one axis": (
        {"m.weight_packed": U8[0], "m.weight_scale": S16[0], "m.weight_global_scale": G},
        "must have two axes",
    ),
    "swizzled scales": (
        {"m.weight_packed": U8, "m.weight_scale": np.zeros((128, 4), F8),
         "m.weight_global_scale": G}, "do not belong",
    ),
    "scales of another type": (
        {"m.weight_packed": U8, "m.weight_scale": np.zeros((16, 2), "float16")}, "is F16",
    ),
    "tensor scale of another type": (
        {"m.weight_packed": U8, "m.weight_scale": S16,
         "m.weight_global_scale": np.ones(1, "float64")}, "must be F32",
    ),
    "two tensor scales": (
        {"m.weight_packed": U8, "m.weight_scale": S16,
         "m.weight_global_scale": np.ones(2, "float32")}, "must be F32 with 1 value",
    ),
    "blocks without scales": (
        {"m_blocks": np.zeros((2, 8, 1, 16), "uint8")}, "m_scales is missing",
    ),
    "scales without blocks": ({"m_scales": np.zeros((2, 8, 1), "uint8")}, "no weight uses"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_scales_that_are_missing_or_left_over_are_an_error(case: str, tmp_path: Path) -> None:
    arrays, message = MISFITS[case]
    source = write_folder(tmp_path / "in", {**arrays, "d.weight": np.ones((16, 32), "float32")})
    for action in (
        lambda: quantize(source, tmp_path / "out", device="cpu"),
        lambda: convert(source, tmp_path / "out", "modelopt"),
    ):
        with pytest.raises(CheckpointError, match=message):
            action()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [0.0, -1.0, np.inf, np.nan, 1e-40])
def test_a_tensor_scale_that_is_no_scale_is_an_error(value: float, tmp_path: Path) -> None:
    arrays = {
        "m.weight_packed": U8, "m.weight_scale": S16,
        "m.weight_global_scale": np.array([value], "float32"),
    }  # fmt: skip
    source = write_folder(tmp_path / "in", arrays)
    with pytest.raises(CheckpointError, match="finite and at least 2"):
        convert(source, tmp_path / "out", "modelopt")


def test_a_negative_block_scale_is_an_error(tmp_path: Path) -> None:
    arrays = {
        "m.weight_packed": U8, "m.weight_scale": np.full((16, 2), -1, F8),
        "m.weight_global_scale": G,
    }  # fmt: skip
    source = write_folder(tmp_path / "in", arrays)
    with pytest.raises(CheckpointError, match="negative"):
        convert(source, tmp_path / "out", "modelopt")
    assert not (tmp_path / "out").exists()


def test_parts_of_a_weight_may_lie_in_different_files(tmp_path: Path) -> None:
    arrays = {"m.weight_packed": U8, "m.weight_scale": S16, "m.weight_global_scale": G}
    source = write_folder(tmp_path / "in", arrays, shards=3)
    convert(source, tmp_path / "out", "modelopt")
    with open_checkpoint(tmp_path / "out") as model:
        assert set(model.entries) == {"m.weight", "m.weight_scale", "m.weight_scale_2"}


def test_a_smoothing_scale_has_no_place_in_compressed_tensors(tmp_path: Path) -> None:
    arrays = {
        "m.weight": U8, "m.weight_scale": S16, "m.weight_scale_2": G,
        "m.pre_quant_scale": np.ones(32, "float32"),
    }  # fmt: skip
    source = write_folder(tmp_path / "in", arrays)
    with pytest.raises(UnsupportedError, match=r"m\.pre_quant_scale"):
        convert(source, tmp_path / "out", "compressed-tensors")
    convert(source, tmp_path / "same", "modelopt")
    with open_checkpoint(tmp_path / "same") as model:
        assert "m.pre_quant_scale" in model.entries


def test_four_bit_integers_are_not_ours_and_said_to_be_so(tmp_path: Path) -> None:
    arrays = {
        "m.weight_packed": np.zeros((16, 4), "int32"),
        "m.weight_scale": np.ones((16, 1), "float16"),
        "m.weight_shape": np.array([16, 32]), "d.weight": np.ones((16, 32), "float32"),
    }  # fmt: skip
    source = write_folder(tmp_path / "in", arrays)
    with pytest.raises(UnsupportedError, match="m is quantised in a way"):
        quantize(source, tmp_path / "out", device="cpu")


def test_a_model_quantised_by_another_convention_must_be_converted_first(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tensors())
    quantize(source, tmp_path / "a", include=["*q_proj.weight"], device="cpu")
    with pytest.raises(UnsupportedError, match="convert the checkpoint to modelopt first"):
        quantize(tmp_path / "a", tmp_path / "b", convention="modelopt", device="cpu")
    quantize(tmp_path / "a", tmp_path / "b", format="mxfp8", device="cpu")
    with open_checkpoint(tmp_path / "b") as model:
        formats = {w.scheme.format.name for w in model.found.weights.values()}
    assert formats == {"nvfp4", "mxfp8_e4m3"}


def test_a_dense_checkpoint_has_nothing_to_convert(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no quantised weight"):
        convert(toy, tmp_path / "out", "modelopt")


def test_every_scheme_finds_what_it_writes() -> None:
    from nvfp4.checkpoint.container import Entry
    from nvfp4.checkpoint.schemes import SCHEMES

    for scheme in SCHEMES:
        for shape in ((8, 64), (3, 8, 64)):
            outputs = scheme.outputs("m", shape, with_input=True)
            entries = {name: Entry(dtype, s, 0, 0) for name, dtype, s in outputs.values()}
            found = find_weights(entries, scheme.convention)
            assert found.weights["m"].scheme == scheme
            assert found.weights["m"].shape == shape
            assert found.plain == []
            if scheme.write:
                assert scheme_for(scheme.convention, scheme.format) == scheme
