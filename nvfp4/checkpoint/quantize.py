"""Quantising a dense checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..errors import UnsupportedError
from ..formats import SCALE_ROUNDINGS, block_format
from .choose import Choice, choose, fused_groups
from .configs import Layer, configuration
from .errors import CheckpointError, printable
from .jobs import Plan, Report, Result, config_text, copy_step, execute, layout_files
from .model import CONFIG, MODELOPT_CONFIG, Checkpoint, open_checkpoint
from .schemes import scheme_for
from .steps import QuantizeStep, Step

__all__ = ["METHODS", "plan_quantize", "quantize", "read_activation_scales"]

METHODS = ("amax", "mse")
# Methods of configurations whose weights are known by their tensors.
_METHODS_OF_TENSORS = ("compressed-tensors", "modelopt", "mxfp4", "fp8", "fbgemm_fp8")


def read_activation_scales(path: str | os.PathLike[str]) -> dict[str, float]:
    """Largest magnitudes of activations: a JSON object, module name -> amax.

    Raises
    ------
    CheckpointError
        It is no such object, or a value is not a positive number.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{printable(path)} is not JSON in UTF-8: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{printable(path)} must map module names to largest magnitudes")
    for name, amax in value.items():
        usable = isinstance(amax, (int, float)) and not isinstance(amax, bool)
        if not usable or not 0 < amax < float(np.finfo(np.float32).max):
            raise CheckpointError(
                f"{printable(path)}: the largest magnitude of {printable(name)} must be a positive "
                f"float32; got {amax!r}"
            )
    return {name: float(amax) for name, amax in value.items()}


def plan_quantize(
    model: Checkpoint,
    out: str | os.PathLike[str],
    *,
    format: str = "nvfp4",
    convention: str = "compressed-tensors",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    overrides: Sequence[tuple[str, str]] = (),
    scale_rounding: str = "rceil",
    method: str = "amax",
    fused_scales: str = "own",
    activation_scales: Mapping[str, float] | None = None,
) -> tuple[Plan, list[Choice]]:
    """What `quantize` would do: the plan, and the choice for every tensor.

    Parameters are those of `quantize`.
    """
    fmt = block_format(format)
    _check_option("scale_rounding", scale_rounding, SCALE_ROUNDINGS)
    _check_option("method", method, METHODS)
    _check_option("fused_scales", fused_scales, ("own", "shared"))
    if fmt.scale == "e4m3" and scale_rounding != "rceil":
        raise ValueError(
            f"scale_rounding is for the MX formats; with nvfp4 it must be 'rceil', "
            f"got {scale_rounding!r}"
        )
    if method == "mse" and scale_rounding != "rceil":
        raise ValueError("method 'mse' chooses the scales itself: leave scale_rounding at 'rceil'")
    scheme_for(convention, fmt)
    choices = choose(model, fmt, convention, include=include, exclude=exclude, overrides=overrides)
    chosen = {c.module: c for c in choices if c.format is not None}
    if not chosen:
        why = "no *.weight with two or three axes was chosen"
        partial = [c for c in choices if c.reason.startswith("K = ")]
        if partial:
            why = f"of {printable(partial[0].name)}, {partial[0].reason}"
        raise CheckpointError(f"{printable(model.path)}: nothing to quantise: {why}")
    activation_scales = dict(activation_scales or {})
    unknown = sorted(set(activation_scales) - set(chosen))
    if unknown:
        raise ValueError(
            f"activation_scales names '{printable(unknown[0])}', which is not quantised"
        )
    notes: list[str] = []
    shares = _shares(chosen, fused_scales, notes)
    steps: list[tuple[str, Step]] = []
    layers: list[Layer] = []
    kept: list[str] = []
    for choice in choices:
        if choice.format is None:
            steps.append((model.file_of[choice.name], copy_step(model, choice.name)))
            if choice.name.endswith(".weight") and len(choice.entry.shape) > 1:
                kept.append(choice.module)
            continue
        scheme = scheme_for(convention, choice.format)
        input_amax = activation_scales.get(choice.module)
        if input_amax is not None and scheme.input_scale is None:
            raise ValueError(
                f"activation_scales: {printable(choice.module)} is {choice.format.name}, which "
                f"has no activation scale in {convention}; only nvfp4 has"
            )
        rounding = "rceil" if choice.format.scale == "e4m3" else scale_rounding
        step = QuantizeStep(
            choice.name, choice.module, scheme, choice.shape, choice.entry.nbytes, rounding,
            method, choice.transposed, shares.get(choice.module, ()), input_amax,
        )  # fmt: skip
        steps.append((model.file_of[choice.name], step))
        layers.append(Layer(choice.module, scheme, with_input=input_amax is not None))
    _pass_quantised(model, convention, steps, layers)
    path = Path(out)
    plan = Plan(layout_files(model, path, steps), notes=notes)
    if path.suffix != ".safetensors":
        plan.configs = _configs(model, convention, layers, kept, plan.notes)
    return plan, choices


def _check_option(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def _shares(
    chosen: Mapping[str, Choice], fused_scales: str, notes: list[str]
) -> dict[str, tuple[str, ...]]:
    """The other tensors whose magnitudes count for a module's tensor scale."""
    fused = fused_groups([m for m, c in chosen.items() if c.format and c.format.scale == "e4m3"])
    if fused_scales == "own":
        if fused:
            notes.append(
                f"{len(fused)} groups of matrices such as {', '.join(map(printable, fused[0]))} "
                "keep a tensor scale each; loaders that fuse them may use one for all "
                "(--fused-scales shared gives them the same)"
            )
        return {}
    shares = {}
    for group in fused:
        for module in group:
            shares[module] = tuple(chosen[m].name for m in group if m != module)
    return shares


def _pass_quantised(
    model: Checkpoint, convention: str, steps: list[tuple[str, Step]], layers: list[Layer]
) -> None:
    """Weights that are quantised already stay as they are; the configuration names them too."""
    for weight in model.found.weights.values():
        if weight.scheme.convention != convention:
            raise UnsupportedError(
                f"{printable(weight.module)} is quantised already, by the convention "
                f"{weight.scheme.convention}; convert the checkpoint to {convention} first"
            )
        layers.append(Layer(weight.module, weight.scheme, with_input="input_scale" in weight.parts))
        steps += [(model.file_of[n], copy_step(model, n)) for n in weight.names]
    for foreign in model.found.foreign.values():
        with_input = any(n.endswith(".input_scale") for n in foreign.names)
        layers.append(Layer(foreign.module, None, foreign, with_input))
        steps += [(model.file_of[n], copy_step(model, n)) for n in foreign.names]


def _configs(
    model: Checkpoint,
    convention: str,
    layers: Sequence[Layer],
    kept: Sequence[str],
    notes: list[str],
) -> dict[str, str]:
    """Texts of the configuration files of a folder."""
    # A head that shares the embedding's memory has no tensor, but is a matrix to loaders.
    names = {*kept, "lm_head"} - {layer.module for layer in layers}
    quantization, modelopt = configuration(
        convention, layers, sorted(names), __version__, model.quantization_config
    )
    old = (model.quantization_config or {}).get("quant_method")
    new = quantization["quant_method"]
    # Weights that are quantised already, and say so in their tensors, are in the new one too.
    quantised = bool(model.found.weights or model.found.foreign)
    if old not in (None, new) and not (quantised and old in _METHODS_OF_TENSORS):
        notes.append(
            f"the checkpoint has a quantization_config of the method {printable(old)}, of which "
            f"its tensors show nothing known here; it is replaced by one of the method {new}"
        )
    config: dict[str, Any] = {**(model.config or {}), "quantization_config": quantization}
    texts = {CONFIG: config_text(config)}
    if modelopt is not None:
        texts[MODELOPT_CONFIG] = config_text(modelopt)
    return texts


def quantize(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: str = "nvfp4",
    convention: str = "compressed-tensors",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    overrides: Sequence[tuple[str, str]] = (),
    scale_rounding: str = "rceil",
    method: str = "amax",
    fused_scales: str = "own",
    activation_scales: Mapping[str, float] | None = None,
    overwrite: bool = False,
    device: str = "auto",
    run_all: Callable[..., None] | None = None,
    report: Report | None = None,
) -> Result:
    """Quantise the weights of a checkpoint, and write what loaders of a convention expect.

    Parameters
    ----------
    model : path
        A .safetensors file, or a folder with one or several and their index.
    out : path
        A .safetensors file, or a folder to be made, with the configuration files in it.
    format : str
        "nvfp4", "mxfp4", "mxfp8".
    convention : {"compressed-tensors", "modelopt", "gpt-oss"}
    include, exclude, overrides
        As in `nvfp4.checkpoint.choose.choose`.
    scale_rounding : {"rceil", "floor", "ceil", "even"}
        Of the MX formats.
    method : {"amax", "mse"}
        How scales are chosen: by the largest element, or by the error they leave.
    fused_scales : {"own", "shared"}
        "shared" gives matrices that loaders concatenate (q/k/v, gate/up) one nvfp4 tensor scale.
    activation_scales : mapping of str to float, optional
        Module -> largest magnitude of its input, for nvfp4. Where there is none the weight is for
        activations in 16 bits.
    overwrite : bool
        Replace a result that is there.
    device : {"auto", "cpu", "cuda"}
    run_all : callable, optional
        As in `nvfp4.checkpoint.jobs.execute`.
    report : callable, optional
        Gets the source bytes as they are done.

    Returns
    -------
    Result

    Raises
    ------
    ValueError
        A wrong option; its subclass CheckpointError: a file is not what it should be.
    UnsupportedError
        The convention cannot hold the format.
    OSError
        Reading or writing failed. The result is then not there; the same call continues.
    """
    with open_checkpoint(model) as source:
        plan, _ = plan_quantize(
            source, out, format=format, convention=convention, include=include, exclude=exclude,
            overrides=overrides, scale_rounding=scale_rounding, method=method,
            fused_scales=fused_scales, activation_scales=activation_scales,
        )  # fmt: skip
        return execute(
            source, plan, Path(out), overwrite=overwrite, device=device, run_all=run_all,
            report=report,
        )  # fmt: skip
