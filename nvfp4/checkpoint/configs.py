"""The configuration that tells a loader how the weights of a checkpoint are stored.

Source: ``QuantizationConfig`` of compressed-tensors; ``hf_quant_config.json`` and its form in
config.json as ModelOpt exports them; ``quantization_config`` of gpt-oss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedError
from .errors import printable
from .schemes import Foreign, Scheme

__all__ = ["Layer", "configuration"]


@dataclass(frozen=True)
class Layer:
    """How one module is stored: a scheme, or FP8 that was passed through."""

    module: str
    scheme: Scheme | None
    foreign: Foreign | None = None
    with_input: bool = False


def configuration(
    convention: str,
    layers: Sequence[Layer],
    kept: Sequence[str],
    version: str,
    source: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """``quantization_config`` of config.json, and the content of hf_quant_config.json (or None).

    Parameters
    ----------
    convention : str
    layers : sequence of Layer
        All quantised modules.
    kept : sequence of str
        Modules with a matrix that is not quantised.
    version : str
        Of this package.
    source : mapping, optional
        ``quantization_config`` of the checkpoint that was read; how it keeps keys and values of the
        attention is taken over.

    Raises
    ------
    UnsupportedError
        A module that was passed through, and that the convention has no name for.
    """
    for layer in layers:
        if layer.foreign is not None and layer.foreign.kind == "other":
            raise UnsupportedError(
                f"{printable(layer.module)} is quantised in a way that is neither read nor "
                f"described here (tensors {', '.join(map(printable, layer.foreign.names))}); "
                "fp8 by tensor or channel, nvfp4, mxfp4 and mxfp8 are"
            )
    if convention == "compressed-tensors":
        return _compressed_tensors(layers, kept, source), None
    if convention == "modelopt":
        return _modelopt(layers, kept, version, source)
    if any(layer.foreign for layer in layers):
        raise UnsupportedError("gpt-oss has no place for FP8 weights")
    return {"quant_method": "mxfp4", "modules_to_not_convert": sorted(kept)}, None


def _kv_cache_is_fp8(source: Mapping[str, Any] | None) -> bool:
    if not source:
        return False
    quantization = source.get("quantization")
    scheme = source.get("kv_cache_scheme")
    if isinstance(quantization, dict):
        scheme = scheme or quantization.get("kv_cache_quant_algo")
    return scheme == "FP8" or (isinstance(scheme, dict) and scheme.get("num_bits") == 8)


# --- compressed-tensors --------------------------------------------------------------------------


def _args(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True, **more}


_NVFP4 = {
    "group_size": 16, "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"
}  # fmt: skip
_MX = {"group_size": 32, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}


def _ct_group(layer: Layer) -> dict[str, Any]:
    """A config group without its targets."""
    if layer.foreign is not None:
        weights = _args(8, "tensor" if layer.foreign.kind == "fp8" else "channel", dynamic=False)
        inputs = (
            _args(8, "tensor", dynamic=False)
            if layer.with_input
            else _args(8, "token", dynamic=True)
        )
        return {"weights": weights, "input_activations": inputs, "format": "float-quantized"}
    if layer.scheme is None:
        raise ValueError(f"{layer.module} has no scheme")
    algorithm = layer.scheme.algorithm
    inputs_: dict[str, Any] | None = None
    if algorithm.startswith("nvfp4"):
        weights = _args(4, "tensor_group", dynamic=False, **_NVFP4)
        if layer.with_input:
            inputs_ = _args(4, "tensor_group", dynamic="local", observer="static_minmax", **_NVFP4)
    elif algorithm.startswith("mxfp4"):
        weights = _args(4, "group", dynamic=False, **_MX)
    else:
        weights = _args(8, "group", dynamic=False, **_MX)
        inputs_ = _args(8, "group", dynamic=True, **_MX)
    return {"weights": weights, "input_activations": inputs_, "format": algorithm}


def _compressed_tensors(
    layers: Sequence[Layer], kept: Sequence[str], source: Mapping[str, Any] | None
) -> dict[str, Any]:
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for layer in layers:
        group = _ct_group(layer)
        for known, modules in groups:
            if known == group:
                modules.append(layer.module)
                break
        else:
            groups.append((group, [layer.module]))
    # One kind of weight: name the class and what is left out of it. Several: name each module.
    alone = len(groups) == 1
    config_groups = {
        f"group_{i}": {
            "targets": ["Linear"] if alone else sorted(modules),
            "output_activations": None,
            **group,
        }
        for i, (group, modules) in enumerate(groups)
    }
    formats = {group["format"] for group, _ in groups}
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": config_groups,
        "ignore": sorted(kept),
        "kv_cache_scheme": kv if _kv_cache_is_fp8(source) else None,
        "global_compression_ratio": None,
    }


# --- ModelOpt ------------------------------------------------------------------------------------


def _algorithm(layer: Layer) -> dict[str, Any]:
    if layer.foreign is not None:
        return {"quant_algo": "FP8" if layer.foreign.kind == "fp8" else "FP8_PER_CHANNEL_PER_TOKEN"}
    if layer.scheme is None:
        raise ValueError(f"{layer.module} has no scheme")
    name = layer.scheme.algorithm
    if name == "NVFP4" and not layer.with_input:
        name = "W4A16_NVFP4"
    return {"quant_algo": name, "group_size": layer.scheme.format.block}


def _group(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """One of config.json's groups, which repeat the algorithms in another vocabulary."""
    name = algorithm["quant_algo"]
    bits = 4 if "NVFP4" in name or "MXFP4" in name else 8
    weights = {"dynamic": False, "num_bits": bits, "type": "float"}
    if "group_size" in algorithm:
        weights["group_size"] = algorithm["group_size"]
    if name == "FP8_PER_CHANNEL_PER_TOKEN":
        weights["strategy"] = "channel"
    group = {"weights": weights}
    if not name.startswith("W4A16"):
        inputs = {k: v for k, v in weights.items() if k != "strategy"}
        group["input_activations"] = inputs
    return group


def _modelopt(
    layers: Sequence[Layer], kept: Sequence[str], version: str, source: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    by_module = {layer.module: _algorithm(layer) for layer in layers}
    kinds: list[dict[str, Any]] = []
    for algorithm in by_module.values():
        if algorithm not in kinds:
            kinds.append(algorithm)
    kv = "FP8" if _kv_cache_is_fp8(source) else None
    quantization: dict[str, Any]
    if len(kinds) == 1:
        quantization = {"group_size": None, **kinds[0]}
        groups = [(_group(kinds[0]), ["Linear"])]
    else:
        quantization = {"quant_algo": "MIXED_PRECISION", "group_size": None}
        quantization["quantized_layers"] = dict(sorted(by_module.items()))
        groups = [
            (_group(kind), sorted(m for m, a in by_module.items() if a == kind)) for kind in kinds
        ]
    quantization["kv_cache_quant_algo"] = kv
    quantization["exclude_modules"] = sorted(kept)
    producer = {"name": "nvfp4", "version": version}
    config: dict[str, Any] = {
        "quant_method": "modelopt",
        "quant_algo": quantization["quant_algo"],
        "config_groups": {
            f"group_{i}": {**group, "targets": targets} for i, (group, targets) in enumerate(groups)
        },
        "ignore": sorted(kept),
        "producer": producer,
    }
    if len(kinds) == 1:
        config["group_size"] = quantization["group_size"]
    else:
        config["quantized_layers"] = quantization["quantized_layers"]
    if kv:
        config["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return config, {"producer": producer, "quantization": quantization}
