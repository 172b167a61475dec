"""Quantising a checkpoint: the golden model's bytes, the choice of weights, the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from nvfp4.checkpoint import CheckpointError, TensorFile, numeric, open_checkpoint, quantize, verify
from nvfp4.checkpoint.choose import choose
from nvfp4.errors import ToolchainError, UnsupportedError
from nvfp4.formats import MXFP4, MXFP8_E4M3, NVFP4, block_format
from nvfp4.golden import amax_encode_scale
from nvfp4.golden import quantize as golden
from tests.checkpoint.helpers import contents, tensors, write_folder

FORMATS = {"nvfp4": NVFP4, "mxfp4": MXFP4, "mxfp8": MXFP8_E4M3}
SUFFIXES = {
    ("nvfp4", "compressed-tensors"): ("weight_packed", "U8", "weight_scale", "F8_E4M3"),
    ("mxfp4", "compressed-tensors"): ("weight_packed", "U8", "weight_scale", "U8"),
    ("mxfp8", "compressed-tensors"): ("weight", "F8_E4M3", "weight_scale", "U8"),
    ("nvfp4", "modelopt"): ("weight", "U8", "weight_scale", "F8_E4M3"),
    ("mxfp8", "modelopt"): ("weight", "F8_E4M3", "weight_scale", "U8"),
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("format", "convention"), SUFFIXES)
def test_every_weight_has_the_golden_bytes(
    format: str, convention: str, dtype: str, tmp_path: Path
) -> None:
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype).type
    arrays = tensors(dtype=kind)
    quantize(write_folder(tmp_path / "in", arrays), tmp_path / "out", format=format,
             convention=convention, device="cpu")  # fmt: skip
    codes_name, codes_dtype, scales_name, scales_dtype = SUFFIXES[format, convention]
    fmt = FORMATS[format]
    with TensorFile(tmp_path / "out" / "model.safetensors") as file:
        for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.down"):
            x = arrays[f"{module}.weight"]
            stack = x if x.ndim == 3 else x[None]
            for i, matrix in enumerate(stack):
                codes, scales, decode = golden(
                    matrix, fmt, encode_scale="amax", scale_layout="linear"
                )
                got = file.raw(f"{module}.{codes_name}").reshape(len(stack), -1)[i]
                assert got.tobytes() == codes.tobytes()
                got = file.raw(f"{module}.{scales_name}").reshape(len(stack), -1)[i]
                assert got.tobytes() == scales.tobytes()
                if format == "nvfp4" and convention == "modelopt":
                    got = file.array(f"{module}.weight_scale_2").reshape(-1)[i]
                    assert got.tobytes() == decode.tobytes()
                elif format == "nvfp4":
                    got = file.array(f"{module}.weight_global_scale").reshape(-1)[i]
                    assert got.tobytes() == amax_encode_scale(matrix, fmt).tobytes()
            assert file.entries[f"{module}.{codes_name}"].dtype == codes_dtype
            assert file.entries[f"{module}.{scales_name}"].dtype == scales_dtype
            shape = (*x.shape[:-1], x.shape[-1] // fmt.codes_per_byte)
            assert file.entries[f"{module}.{codes_name}"].shape == shape


def test_a_tensor_scale_has_the_shape_that_readers_expect(toy: Path, tmp_path: Path) -> None:
    for convention, suffix, shape in (
        ("compressed-tensors", "weight_global_scale", (1,)), ("modelopt", "weight_scale_2", ()),
    ):  # fmt: skip
        quantize(toy, tmp_path / convention, convention=convention, device="cpu")
        with TensorFile(tmp_path / convention / "model.safetensors") as file:
            assert file.entries[f"model.layers.0.self_attn.q_proj.{suffix}"].shape == shape
            assert file.entries[f"model.layers.0.mlp.experts.down.{suffix}"].shape == (4, 1, 1)


def test_experts_in_gpt_oss_are_blocks_and_scales(toy: Path, tmp_path: Path) -> None:
    quantize(toy, tmp_path / "out", format="mxfp4", convention="gpt-oss", device="cpu")
    x = tensors()["model.layers.0.mlp.experts.down.weight"]
    codes, scales, _ = golden(x, MXFP4, scale_layout="linear")
    with TensorFile(tmp_path / "out" / "model.safetensors") as file:
        name = "model.layers.0.mlp.experts.down"
        assert file.entries[f"{name}_blocks"].shape == (4, 64, 3, 16)
        assert file.entries[f"{name}_scales"].shape == (4, 64, 3)
        assert file.raw(f"{name}_blocks").tobytes() == codes.tobytes()
        assert file.raw(f"{name}_scales").tobytes() == scales.tobytes()
        # Where there are experts, the rest of such a model stays as it is.
        assert "model.layers.0.self_attn.q_proj.weight" in file.entries
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert "model.layers.0.self_attn.q_proj" in config["modules_to_not_convert"]


def test_gpt_oss_experts_of_transformers_are_transposed(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    up = rng.standard_normal((2, 64, 96)).astype("float32")  # [E, in, out], gate and up in turn
    name = "model.layers.0.mlp.experts.gate_up_proj"
    source = write_folder(tmp_path / "in", {name: up, f"{name}_bias": up[:, 0]})
    quantize(source, tmp_path / "out", format="mxfp4", convention="gpt-oss", device="cpu")
    codes, scales, _ = golden(
        np.ascontiguousarray(up.transpose(0, 2, 1)), MXFP4, scale_layout="linear"
    )
    with TensorFile(tmp_path / "out" / "model.safetensors") as file:
        assert file.entries[f"{name}_blocks"].shape == (2, 96, 2, 16)
        assert file.raw(f"{name}_blocks").tobytes() == codes.tobytes()
        assert file.raw(f"{name}_scales").tobytes() == scales.tobytes()
        assert (file.array(f"{name}_bias") == up[:, 0]).all()
    assert verify(source, tmp_path / "out", min_sqnr=15).passed


def test_what_is_not_quantised_passes_byte_for_byte(sharded: Path, tmp_path: Path) -> None:
    quantize(sharded, tmp_path / "out", device="cpu")
    with open_checkpoint(sharded) as old, open_checkpoint(tmp_path / "out") as new:
        assert new.found.plain
        for name in new.found.plain:
            assert old.raw(name).tobytes() == new.raw(name).tobytes()
            assert old.entries[name].dtype == new.entries[name].dtype
            assert old.entries[name].shape == new.entries[name].shape
        for name, file in new.files.items():
            assert file.metadata == old.files[name].metadata
        assert {m + ".weight" for m in new.found.weights} | set(new.found.plain) == set(old.entries)


def test_a_folder_keeps_its_other_files_but_not_other_weights(
    sharded: Path, tmp_path: Path
) -> None:
    quantize(sharded, tmp_path / "out", device="cpu")
    names = set(contents(tmp_path / "out"))
    assert {"tokenizer.json", "sub/note.txt", "config.json"} <= names
    assert "pytorch_model.bin" not in names
    assert not [n for n in names if n.startswith(".")]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    with open_checkpoint(tmp_path / "out") as model:  # which checks the index against the files
        assert index["metadata"]["total_size"] == sum(e.nbytes for e in model.entries.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "toy"


def test_a_single_file_becomes_a_single_file(toy: Path, tmp_path: Path) -> None:
    quantize(toy / "model.safetensors", tmp_path / "out.safetensors", device="cpu")
    quantize(toy, tmp_path / "folder", device="cpu")
    assert (tmp_path / "out.safetensors").read_bytes() == (
        tmp_path / "folder" / "model.safetensors"
    ).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "out.safetensors", "toy"]


def test_shards_can_become_one_file(sharded: Path, toy: Path, tmp_path: Path) -> None:
    quantize(sharded, tmp_path / "a.safetensors", device="cpu")
    quantize(toy, tmp_path / "b.safetensors", device="cpu")
    with TensorFile(tmp_path / "a.safetensors") as a, TensorFile(tmp_path / "b.safetensors") as b:
        assert a.entries == b.entries
        assert all(a.raw(n).tobytes() == b.raw(n).tobytes() for n in a.entries)


def test_small_pieces_give_the_same_bytes(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize(toy, tmp_path / "a", device="cpu")
    monkeypatch.setattr(numeric.CpuBackend, "chunk", 200)
    monkeypatch.setattr("nvfp4.checkpoint.steps._COPY_BYTES", 100)
    quantize(toy, tmp_path / "b", device="cpu")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


# --- the choice --------------------------------------------------------------------------------


def chosen(path: Path, convention: str = "compressed-tensors", **options: object) -> set[str]:
    with open_checkpoint(path) as model:
        choices = choose(model, NVFP4, convention, **options)  # type: ignore[arg-type]
        return {c.module for c in choices if c.format}


LAYERS = {
    f"model.layers.{i}.{name}"
    for i in range(2)
    for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.experts.down",
    )
}  # fmt: skip


def test_by_default_embeddings_norms_the_head_and_routers_stay(toy: Path) -> None:
    assert chosen(toy) == LAYERS


def test_include_names_exactly_what_is_quantised(toy: Path) -> None:
    assert chosen(toy, include=["lm_head.*"]) == {"lm_head"}
    assert chosen(toy, include=["*"]) == {
        *LAYERS, "lm_head", "model.embed_tokens", "model.layers.0.mlp.gate",
        "model.layers.1.mlp.gate",
    }  # fmt: skip


def test_exclude_wins_over_include(toy: Path) -> None:
    assert chosen(toy, include=["*_proj.weight"], exclude=["*.1.*", "*.[qk]_proj.*"]) == {
        "model.layers.0.self_attn.v_proj", "model.layers.0.self_attn.o_proj",
    }  # fmt: skip


def test_a_pattern_that_matches_nothing_is_an_error(toy: Path) -> None:
    for option in ("include", "exclude"):
        with pytest.raises(ValueError, match=f"{option} 'nope' matches no tensor"):
            chosen(toy, **{option: ["nope"]})


def test_a_name_that_cannot_be_quantised_is_an_error(toy: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.norm\.weight' cannot be quantised: 1 axes"):
        chosen(toy, include=["model.norm.weight"])


def test_a_width_that_no_block_divides_stays_with_a_reason(tmp_path: Path) -> None:
    save_file(
        {"a.weight": np.ones((4, 24), "float32"), "b.weight": np.ones((4, 32), "float32")},
        tmp_path / "m.safetensors",
    )
    with open_checkpoint(tmp_path / "m.safetensors") as model:
        a, b = choose(model, NVFP4, "compressed-tensors")
        assert a.reason == "K = 24 is not a multiple of 16"
        assert b.format is NVFP4
        with pytest.raises(ValueError, match="not a multiple of 16"):
            choose(model, NVFP4, "compressed-tensors", include=["a.weight"])


def test_nothing_to_quantise_is_an_error(tmp_path: Path) -> None:
    save_file({"a.bias": np.ones(32, "float32")}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="nothing to quantise"):
        quantize(tmp_path / "m.safetensors", tmp_path / "o.safetensors")
    save_file({"a.weight": np.ones((4, 24), "float32")}, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"of a\.weight, K = 24 is not a multiple of 16"):
        quantize(tmp_path / "m.safetensors", tmp_path / "o.safetensors", include=["a.*"])


# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil", "even"])
def test_scale_roundings_are_the_golden_models(rounding: str, toy: Path, tmp_path: Path) -> None:
    quantize(toy, tmp_path / "o.safetensors", format="mxfp4", scale_rounding=rounding, device="cpu")
    x = tensors()["model.layers.0.self_attn.q_proj.weight"]
    codes, scales, _ = golden(x, MXFP4, scale_rounding=rounding, scale_layout="linear")
    with TensorFile(tmp_path / "o.safetensors") as file:
        assert (
            file.array("model.layers.0.self_attn.q_proj.weight_scale").tobytes() == scales.tobytes()
        )
        assert (
            file.array("model.layers.0.self_attn.q_proj.weight_packed").tobytes() == codes.tobytes()
        )


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "nvfp5"}, ValueError, "format must be one of"),
        ({"convention": "gguf"}, ValueError, "convention must be one of"),
        ({"scale_rounding": "up"}, ValueError, "scale_rounding must be one of"),
        ({"scale_rounding": "floor"}, ValueError, "with nvfp4 it must be 'rceil'"),
        ({"method": "best"}, ValueError, "method must be one of 'amax', 'mse'"),
        ({"fused_scales": "x"}, ValueError, "fused_scales must be one of"),
        ({"device": "tpu"}, ValueError, "device must be 'auto', 'cpu' or 'cuda'"),
        ({"convention": "gpt-oss"}, UnsupportedError, "gpt-oss has no weights in nvfp4"),
        (
            {"format": "mxfp4", "convention": "modelopt"}, UnsupportedError,
            "mxfp4 can be written as compressed-tensors, gpt-oss",
        ),
        ({"format": "mxfp8_e5m2"}, UnsupportedError, "no weights in mxfp8_e5m2"),
        (
            {"format": "mxfp4", "method": "mse", "scale_rounding": "even"}, ValueError,
            "chooses the scales itself",
        ),
        ({"activation_scales": {"lm_head": 1.0}}, ValueError, "'lm_head', which is not quantised"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_an_error_and_writes_nothing(
    options: dict[str, object], error: type[Exception], message: str, toy: Path, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        quantize(toy, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_fused_matrices_get_one_scale_where_that_is_asked_for(toy: Path, tmp_path: Path) -> None:
    own = quantize(toy, tmp_path / "own", device="cpu")
    assert "--fused-scales shared" in own.notes[0]
    shared = quantize(toy, tmp_path / "shared", fused_scales="shared", device="cpu")
    assert not shared.notes
    arrays = tensors()
    base = "model.layers.0.self_attn"
    three = np.concatenate([arrays[f"{base}.{n}_proj.weight"] for n in "qkv"])
    g = amax_encode_scale(three, NVFP4)
    codes, scales, _ = golden(three, NVFP4, encode_scale=g, scale_layout="linear")
    with TensorFile(tmp_path / "shared" / "model.safetensors") as file:
        for i, n in enumerate("qkv"):
            assert file.array(f"{base}.{n}_proj.weight_global_scale") == g
            some = slice(64 * i, 64 * i + 64)
            assert file.raw(f"{base}.{n}_proj.weight_packed").tobytes() == codes[some].tobytes()
            assert file.raw(f"{base}.{n}_proj.weight_scale").tobytes() == scales[some].tobytes()
    with open_checkpoint(tmp_path / "own") as model:
        weights = model.found.weights
        assert len({float(model.decode_scale(weights[f"{base}.{n}_proj"])) for n in "qkv"}) == 3


def test_shared_scales_reach_across_shards(sharded: Path, toy: Path, tmp_path: Path) -> None:
    quantize(sharded, tmp_path / "a.safetensors", fused_scales="shared", device="cpu")
    quantize(toy, tmp_path / "b.safetensors", fused_scales="shared", device="cpu")
    with TensorFile(tmp_path / "a.safetensors") as a, TensorFile(tmp_path / "b.safetensors") as b:
        assert all(a.raw(n).tobytes() == b.raw(n).tobytes() for n in b.entries)


@pytest.mark.parametrize("convention", ["compressed-tensors", "modelopt"])
def test_activation_scales_are_written_and_change_the_algorithm(
    convention: str, toy: Path, tmp_path: Path
) -> None:
    module = "model.layers.0.self_attn.q_proj"
    quantize(toy, tmp_path / "out", convention=convention, activation_scales={module: 21.0},
             include=[f"{module}.weight"], device="cpu")  # fmt: skip
    with TensorFile(tmp_path / "out" / "model.safetensors") as file:
        if convention == "modelopt":
            value = file.array(f"{module}.input_scale")
            assert value.shape == ()
            assert value == np.float32(1) / np.float32(128)
        else:
            value = file.array(f"{module}.input_global_scale")
            assert value.shape == (1,)
            assert value == np.float32(128)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    if convention == "modelopt":
        assert config["quant_algo"] == "NVFP4"
        hf = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
        assert hf["quantization"]["quant_algo"] == "NVFP4"
    else:
        inputs = config["config_groups"]["group_0"]["input_activations"]
        assert inputs["dynamic"] == "local"
        assert inputs["group_size"] == 16


# --- configuration -----------------------------------------------------------------------------


def test_modelopt_gets_both_configurations_with_all_that_vllm_requires(
    toy: Path, tmp_path: Path
) -> None:
    quantize(toy, tmp_path / "out", convention="modelopt", device="cpu")
    hf = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    quantization = hf["quantization"]
    assert quantization["quant_algo"] == "W4A16_NVFP4"
    assert quantization["group_size"] == 16
    assert quantization["kv_cache_quant_algo"] is None
    assert set(quantization["exclude_modules"]) == {
        "lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate",
    }  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "modelopt"
    assert config["ignore"] == quantization["exclude_modules"]


def test_compressed_tensors_ignores_what_stays_and_the_head(toy: Path, tmp_path: Path) -> None:
    quantize(toy, tmp_path / "out", format="mxfp8", device="cpu")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mxfp8-quantized"
    assert config["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert {"lm_head", "model.layers.0.mlp.gate"} <= set(config["ignore"])


@pytest.mark.parametrize("convention", ["compressed-tensors", "modelopt"])
def test_layers_may_have_algorithms_of_their_own(
    convention: str, toy: Path, tmp_path: Path
) -> None:
    quantize(
        toy, tmp_path / "out", convention=convention, device="cpu",
        overrides=[("*.q_proj.weight", "mxfp8"), ("*.v_proj.weight", "none")],
    )  # fmt: skip
    with open_checkpoint(tmp_path / "out") as model:
        formats = {m: w.scheme.format.name for m, w in model.found.weights.items()}
    q, k, v = (f"model.layers.0.self_attn.{n}_proj" for n in "qkv")
    assert formats[q] == "mxfp8_e4m3"
    assert formats[k] == "nvfp4"
    assert v not in formats
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    targets = [t for g in config["config_groups"].values() for t in g["targets"]]
    assert sorted(targets) == sorted(formats)
    if convention == "modelopt":
        hf = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
        assert hf["quant_algo"] == "MIXED_PRECISION"
        assert hf["quantized_layers"][q] == {"quant_algo": "MXFP8", "group_size": 32}
        assert hf["quantized_layers"][k] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        assert v in hf["exclude_modules"]
    else:
        assert config["format"] == "mixed-precision"
        assert {g["format"] for g in config["config_groups"].values()} == {
            "mxfp8-quantized", "nvfp4-pack-quantized",
        }  # fmt: skip
    assert verify(toy, tmp_path / "out", min_sqnr=15).passed


def test_fp8_weights_pass_through_and_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    fp8 = rng.standard_normal((32, 64)).astype(ml_dtypes.float8_e4m3fn)
    arrays = {
        "a.weight": rng.standard_normal((32, 64)).astype("float32"),
        "b.weight": fp8,
        "b.weight_scale": np.float32(0.5),
        "b.input_scale": np.float32(0.25),
    }
    source = write_folder(tmp_path / "in", arrays)
    for convention in ("compressed-tensors", "modelopt"):
        out = tmp_path / convention
        quantize(source, out, convention=convention, device="cpu")
        with open_checkpoint(out) as model:
            assert model.found.foreign["b"].kind == "fp8"
            assert model.raw("b.weight").tobytes() == fp8.tobytes()
            assert set(model.found.weights) == {"a"}
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        group = next(g for g in config["config_groups"].values() if "b" in g["targets"])
        assert group["weights"]["num_bits"] == 8
        assert verify(source, out).passed


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("method", ["gptq", "fp8", "compressed-tensors", None, ["x"]])
def test_a_configuration_of_another_method_is_not_replaced_without_a_word(
    method: object, fp8: bool, tmp_path: Path
) -> None:
    arrays = {"a.weight": np.ones((16, 32), "float32")}
    if fp8:
        arrays |= {
            "b.weight": np.ones((16, 32), ml_dtypes.float8_e4m3fn),
            "b.weight_scale": np.float32(0.5),
        }
    config = {"quantization_config": {"quant_method": method, "bits": 4}}
    source = write_folder(tmp_path / "in", arrays, config=config)
    notes = quantize(source, tmp_path / "out", device="cpu").notes
    # What FP8 weights say of themselves is in the new configuration too.
    unsaid = method in ("gptq", ["x"]) or (method == "fp8" and not fp8)
    assert len(notes) == unsaid
    if unsaid:
        assert f"quantization_config of the method {method}" in notes[0]
        assert "is replaced by one of the method compressed-tensors" in notes[0]
    # A file has no configuration that could be replaced.
    assert not quantize(source, tmp_path / "out.safetensors", device="cpu").notes


def test_a_configuration_in_a_file_of_its_own_is_not_dropped_without_a_word(
    toy: Path, tmp_path: Path
) -> None:
    (toy / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    notes = quantize(toy, tmp_path / "out", fused_scales="shared", device="cpu").notes
    assert [n for n in notes if "of the method modelopt" in n] == list(notes)
    assert len(notes) == 1


@pytest.mark.parametrize("convention", ["compressed-tensors", "modelopt"])
def test_a_quantised_key_value_cache_stays_configured(convention: str, tmp_path: Path) -> None:
    scheme = {"num_bits": 8, "type": "float"}
    config = {"quantization_config": {"kv_cache_scheme": scheme}}
    arrays = {**tensors(), "model.layers.0.self_attn.k_proj.k_scale": np.float32(0.1)}
    source = write_folder(tmp_path / "in", arrays, config=config)
    quantize(source, tmp_path / "out", convention=convention, device="cpu")
    text = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert text["kv_cache_scheme"]["num_bits"] == 8


def test_a_dead_tensor_and_one_of_tiny_values_are_quantised_without_nan(tmp_path: Path) -> None:
    arrays = {
        "dead.weight": np.zeros((16, 32), "float32"),
        "tiny.weight": np.full((16, 32), 1e-30, "float32"),
        "mixed.weight": np.where(np.eye(16, 32) > 0, 1e-20, 0).astype("float32"),
    }
    source = write_folder(tmp_path / "in", arrays)
    for format in FORMATS:
        quantize(source, tmp_path / format, format=format, device="cpu")
        result = verify(source, tmp_path / format)
        assert result.passed
        assert all(t.nans == 0 for t in result.tensors)


def test_magnitudes_beyond_a_tensor_scale_are_an_error(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", {"a.weight": np.full((16, 32), 1e-37, "float32")})
    with pytest.raises(CheckpointError, match="beyond what a tensor scale"):
        quantize(source, tmp_path / "out", convention="modelopt", device="cpu")
    assert not (tmp_path / "out").exists()


def test_the_formats_names_are_those_of_the_package() -> None:
    assert {block_format(name) for name in FORMATS} == set(FORMATS.values())


# --- where -------------------------------------------------------------------------------------


class FakeCupy:
    """What the GPU's side uses of CuPy, over NumPy: pieces, copies and patterns, not kernels."""

    def __init__(self) -> None:
        self.devices: list[int] = []
        fake = self

        class Device:
            def __init__(self, index: int) -> None:
                self.index = index

            def __enter__(self) -> None:
                fake.devices.append(self.index)

            def __exit__(self, *_: object) -> None:
                return

        class Runtime:
            @staticmethod
            def getDeviceCount() -> int:
                return 2

        self.cuda = type("cuda", (), {"Device": Device, "runtime": Runtime})

    @staticmethod
    def asarray(x: np.ndarray) -> np.ndarray:
        return np.array(x)

    @staticmethod
    def asnumpy(x: np.ndarray) -> np.ndarray:
        return np.array(x)


@pytest.mark.parametrize("format", FORMATS)
def test_the_way_over_a_gpu_gives_the_same_bytes(
    format: str, toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    fake = FakeCupy()
    quantize(toy, tmp_path / "cpu", format=format, device="cpu")
    monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(numeric.GpuBackend, "chunk", 1000)
    for device in ("cuda", "auto"):
        quantize(toy, tmp_path / device, format=format, device=device)
        assert contents(tmp_path / device) == contents(tmp_path / "cpu")
    assert set(fake.devices) == {0}
    assert numeric.backend("cuda", 3).name == "GPU 1"


def test_without_a_gpu_auto_is_the_cpu_and_cuda_an_error(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ToolchainError, match="needs CuPy and a GPU"):
        quantize(toy, tmp_path / "cuda", device="cuda")
    assert not (tmp_path / "cuda").exists()
    quantize(toy, tmp_path / "auto", device="auto")
    quantize(toy, tmp_path / "cpu", device="cpu")
    assert contents(tmp_path / "auto") == contents(tmp_path / "cpu")
