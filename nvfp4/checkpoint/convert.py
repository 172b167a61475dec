"""From one convention to another: the same codes and block scales under other names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import UnsupportedError
from .configs import Layer
from .errors import CheckpointError, printable
from .jobs import Plan, Report, Result, copy_step, execute, layout_files
from .model import Checkpoint, open_checkpoint
from .quantize import _configs
from .schemes import StoredWeight, scheme_for
from .steps import ConvertStep, Step

__all__ = ["convert", "plan_convert"]


def plan_convert(model: Checkpoint, out: str | os.PathLike[str], convention: str) -> Plan:
    """What `convert` would do. Parameters are those of `convert`."""
    steps: list[tuple[str, Step]] = []
    layers: list[Layer] = []
    notes: list[str] = []
    weights = model.found.weights
    if not weights:
        raise CheckpointError(f"{printable(model.path)} holds no quantised weight to convert")
    for weight in weights.values():
        step, with_input = _step(model, weight, convention, notes)
        steps.append((model.file_of.get(weight.parts["codes"], model.path.name), step))
        steps += [(model.file_of[n], copy_step(model, n)) for n in weight.extras]
        layers.append(Layer(step.target_module, step.target, with_input=with_input))
    for foreign in model.found.foreign.values():
        if foreign.kind == "other" or convention == "gpt-oss":
            raise UnsupportedError(
                f"{printable(foreign.module)} is quantised in a way that {convention} has no "
                "place for"
            )
        with_input = any(n.endswith(".input_scale") for n in foreign.names)
        layers.append(Layer(foreign.module, None, foreign, with_input))
        steps += [(model.file_of[n], copy_step(model, n)) for n in foreign.names]
    kept = []
    for name in model.found.plain:
        steps.append((model.file_of[name], copy_step(model, name)))
        if name.endswith(".weight") and len(model.entries[name].shape) > 1:
            kept.append(name.removesuffix(".weight"))
    path = Path(out)
    plan = Plan(layout_files(model, path, steps), notes=_summed(notes))
    if path.suffix != ".safetensors":
        plan.configs = _configs(model, convention, layers, kept, plan.notes)
    return plan


def _step(
    model: Checkpoint, weight: StoredWeight, convention: str, notes: list[str]
) -> tuple[ConvertStep, bool]:
    target = scheme_for(convention, weight.scheme.format)
    if weight.extras and convention != weight.scheme.convention:
        raise UnsupportedError(
            f"{printable(weight.module)} has {printable(weight.extras[0])}, which changes its "
            f"product and has no place in {convention}"
        )
    with_input = "input_scale" in weight.parts and target.input_scale is not None
    if "input_scale" in weight.parts and not with_input:
        notes.append(f"activation scales are dropped: {convention} has none for this format")
    for role in ("tensor_scale", "input_scale"):
        values = model.stored_scale(weight, role)
        if values is None or weight.scheme.divides == target.divides:
            continue
        inverse = 1 / values
        if (1 / inverse != values).any():
            notes.append(
                f"{weight.scheme.convention} and {convention} keep reciprocals of each other's "
                "tensor scales, and the reciprocal of some is not exact: those change in the last "
                "bit there and back"
            )
    nbytes = model.entries[weight.parts["scales"]].nbytes if "scales" in weight.parts else 0
    code_entry = model.entries.get(weight.parts["codes"])
    columns = weight.shape[-1]
    fmt = weight.scheme.format
    size = weight.rows * (columns // fmt.codes_per_byte + columns // fmt.block)
    nbytes = code_entry.nbytes + nbytes if code_entry is not None else size
    step = ConvertStep(weight.module, target, weight.module, weight.shape, nbytes, with_input)
    return step, with_input


def _summed(notes: list[str]) -> list[str]:
    """Each note once, with how many weights it is about."""
    return [f"{text} ({notes.count(text)} tensors)" for text in dict.fromkeys(notes)]


def convert(
    model: str | os.PathLike[str],
    out: str | os.PathLike[str],
    convention: str,
    *,
    overwrite: bool = False,
    run_all: Callable[..., None] | None = None,
    report: Report | None = None,
) -> Result:
    """Write a quantised checkpoint in another convention.

    Parameters
    ----------
    model : path
        A .safetensors file, a folder, or a .gguf file.
    out : path
        A .safetensors file, or a folder to be made.
    convention : {"compressed-tensors", "modelopt", "gpt-oss"}
    overwrite : bool
    run_all, report
        As in `nvfp4.checkpoint.quantize`.

    Returns
    -------
    Result
        Its notes say where something is not lossless.

    Raises
    ------
    ValueError
        Unknown convention; its subclass CheckpointError: a file is not what it should be.
    UnsupportedError
        A weight that the convention cannot hold.
    OSError
        Reading or writing failed. The result is then not there; the same call continues.
    """
    with open_checkpoint(model) as source:
        plan = plan_convert(source, out, convention)
        return execute(source, plan, Path(out), overwrite=overwrite, run_all=run_all, report=report)
