"""``nvfp4 inspect``: what is in a checkpoint, and what looks wrong with it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._files import console as make_console
from ._files import explained, finite, progress, safe, size_of

if TYPE_CHECKING:
    from ..checkpoint.survey import PlainReport, Survey, WeightReport

__all__ = ["command"]


@click.command(name="inspect", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@explained
def command(file: Path, as_json: bool) -> None:
    """List the tensors of FILE: a .safetensors file, a folder, or a .gguf file.

    Of quantised weights: format, range of the scales, how many elements and scales are at the
    largest value, blocks of zeros, blocks with NaN.
    """
    from ..checkpoint.model import open_checkpoint
    from ..checkpoint.survey import inspect

    with open_checkpoint(file) as model:
        total = sum(f.size for f in model.files.values())
    with progress("inspect", total) as report:
        survey = inspect(file, report=report)
    if as_json:
        value = {
            "path": str(survey.path),
            "convention": survey.convention,
            "bytes": survey.bytes,
            "weights": [asdict(r) for r in survey.weights],
            "tensors": [asdict(r) for r in survey.plain],
        }
        click.echo(json.dumps(finite(value), indent=2))
    else:
        _print(survey)


def _range(values: tuple[float, float] | None) -> str:
    if values is None:
        return "-"
    low, high = values
    return f"{low:.3g}" if low == high else f"{low:.3g} .. {high:.3g}"


def _print(survey: Survey) -> None:
    from rich.table import Table

    console = make_console()
    if survey.weights:
        table = Table(title="Quantised weights")
        table.add_column("module", overflow="fold")
        table.add_column("format")
        for name in ("shape", "tensor scale", "block scales", "at max", "dead", "NaN"):
            table.add_column(name, justify="right")
        for r in survey.weights:
            table.add_row(*_weight_row(r), style="red" if r.nan_blocks or r.problem else None)
        console.print(table)
        console.print(
            "at max: elements of the largest magnitude; dead: blocks of zeros; NaN: blocks.",
            style="dim",
        )
        for r in survey.weights:
            if r.problem:
                console.print(f"{safe(r.module)}: {safe(r.problem)}", style="red", soft_wrap=True)
    if survey.plain:
        table = Table(title="Other tensors")
        table.add_column("tensor", overflow="fold")
        table.add_column("type")
        for name in ("shape", "bytes", "largest", "NaN", "Inf"):
            table.add_column(name, justify="right")
        for p in survey.plain:
            table.add_row(*_plain_row(p), style="red" if p.nans or p.infinities else None)
        console.print(table)
    weights = sum(r.bytes for r in survey.weights)
    console.print(
        f"{len(survey.weights)} quantised weights ({size_of(weights)}), {len(survey.plain)} other "
        f"tensors ({size_of(survey.bytes - weights)})"
        + (f"; configured as {safe(survey.convention)}" if survey.convention else ""),
        soft_wrap=True,
    )


def _weight_row(r: WeightReport) -> list[str]:
    return [
        safe(r.module),
        safe(f"{r.format} ({r.convention})"),
        " x ".join(map(str, r.shape)),
        _range(r.tensor_scale),
        _range(r.scales),
        f"{r.saturated:.1%}",
        f"{r.dead_blocks:,}",
        f"{r.nan_blocks:,}",
    ]


def _plain_row(p: PlainReport) -> list[str]:
    return [
        safe(p.name),
        p.dtype + (f" ({p.kind})" if p.kind else ""),
        " x ".join(map(str, p.shape)) or "scalar",
        f"{p.bytes:,}",
        "-" if p.amax is None else f"{p.amax:.3g}",
        "-" if p.nans is None else f"{p.nans:,}",
        "-" if p.infinities is None else f"{p.infinities:,}",
    ]
