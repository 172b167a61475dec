"""``nvfp4 quantize``: a dense checkpoint becomes one that loaders know as NVFP4, MXFP4 or MXFP8."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._files import console as make_console
from ._files import explained, finite, progress, safe, size_of

if TYPE_CHECKING:
    from ..checkpoint.choose import Choice
    from ..checkpoint.jobs import Result

__all__ = ["command", "out_option", "worker_options"]

CONVENTIONS = ("compressed-tensors", "modelopt", "gpt-oss")

out_option = click.option(
    "-o",
    "--out",
    required=True,
    metavar="OUT",
    type=click.Path(path_type=Path),
    help="A .safetensors file, or a folder to be made.",
)


def worker_options(function: Any) -> Any:
    """``--workers``, ``--scheduler``, ``--overwrite`` and ``--json``."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables."),
        click.option("--overwrite", is_flag=True, help="Replace what is at OUT."),
        click.option("--scheduler", metavar="ADDRESS", help="A dask cluster to work on."),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            help="Work on this many files at once, each in a process of its own.",
        ),
    ):
        function = option(function)
    return function


def _override(ctx: click.Context, param: click.Parameter, values: Any) -> list[tuple[str, str]]:
    from ..formats import block_format

    pairs = []
    for value in values:
        pattern, equals, name = value.rpartition("=")
        if not equals or not pattern:
            raise click.BadParameter(f"must be PATTERN=FORMAT; got {value!r}", ctx, param)
        try:
            pairs.append((pattern, name if name == "none" else block_format(name).name))
        except ValueError as error:
            raise click.BadParameter(f"{error} or 'none'", ctx, param) from error
    return pairs


@click.command(name="quantize", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["nvfp4", "mxfp4", "mxfp8"]),
    default="nvfp4",
    show_default=True,
)
@click.option(
    "--convention",
    type=click.Choice(CONVENTIONS),
    default="compressed-tensors",
    show_default=True,
    help="Who is to load it.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Quantise exactly the weights whose whole name matches (* ? [...]). May be repeated.",
)
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Leave these as they are. May be repeated."
)
@click.option(
    "--override",
    "overrides",
    multiple=True,
    callback=_override,
    metavar="PATTERN=FORMAT",
    help="Another format, or none, for some of the chosen. May be repeated; the last counts.",
)
@click.option(
    "--scale-rounding",
    type=click.Choice(["rceil", "floor", "ceil", "even"]),
    default="rceil",
    show_default=True,
    help="Of the MX formats' block scales.",
)
@click.option(
    "--method",
    type=click.Choice(["amax", "mse"]),
    default="amax",
    show_default=True,
    help="Scales by the largest element, or by the error that they leave (slower, better).",
)
@click.option(
    "--fused-scales",
    type=click.Choice(["own", "shared"]),
    default="own",
    show_default=True,
    help="Whether matrices that loaders fuse (q/k/v, gate/up) get one nvfp4 tensor scale.",
)
@click.option(
    "--activation-scales",
    "activations",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="JSON: module -> largest magnitude of its input (nvfp4). Without it: weights only.",
)
@click.option("--dry-run", is_flag=True, help="List the choice for every tensor and stop.")
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
@worker_options
@explained
def command(
    model: Path,
    out: Path,
    format_name: str,
    convention: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    overrides: list[tuple[str, str]],
    scale_rounding: str,
    method: str,
    fused_scales: str,
    activations: Path | None,
    dry_run: bool,
    device: str,
    workers: int | None,
    scheduler: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Quantise the weights of MODEL, a .safetensors file or a folder.

    All two-axis (and stacked three-axis) *.weight tensors are quantised, except embeddings, norms,
    output heads and routers; everything else is passed through byte for byte. OUT comes into being
    when it is complete; after an interruption the same command continues.
    """
    from ..checkpoint.jobs import execute
    from ..checkpoint.model import open_checkpoint
    from ..checkpoint.quantize import plan_quantize, read_activation_scales

    amax = None if activations is None else read_activation_scales(activations)
    run_all = cluster(workers, scheduler)
    with open_checkpoint(model) as source:
        plan, choices = plan_quantize(
            source,
            out,
            format=format_name,
            convention=convention,
            include=include,
            exclude=exclude,
            overrides=overrides,
            scale_rounding=scale_rounding,
            method=method,
            fused_scales=fused_scales,
            activation_scales=amax,
        )
        if dry_run:
            _print_choices(choices, as_json)
            return
        total = sum(step.nbytes for _, steps, _ in plan.files for step in steps)
        began = time.monotonic()
        with progress("quantise", total) as report:
            result = execute(
                source, plan, out, overwrite=overwrite, device=device, run_all=run_all,
                report=report,
            )  # fmt: skip
        seconds = time.monotonic() - began
    counts: dict[str, int] = {}
    for choice in choices:
        name = choice.format.name if choice.format else "kept"
        counts[name] = counts.get(name, 0) + 1
    print_result(result, seconds, counts, as_json)


def cluster(workers: int | None, scheduler: str | None) -> Any:
    """How to run the jobs; None for this process."""
    if workers is None and scheduler is None:
        return None
    if workers is not None and scheduler is not None:
        raise click.UsageError("--workers and --scheduler exclude one another")
    from ..checkpoint.cluster import run_on_cluster

    return run_on_cluster(workers, scheduler)


def print_result(result: Result, seconds: float, counts: dict[str, int], as_json: bool) -> None:
    """What was written, for a person or as JSON."""
    if as_json:
        value = {
            "out": str(result.path),
            "tensors": counts,
            "source_bytes": result.source_bytes,
            "bytes": result.bytes,
            "seconds": round(seconds, 3),
            "kept_files": list(result.kept),
            "files": [asdict(record) for record in result.files],
            "notes": list(result.notes),
        }
        click.echo(json.dumps(finite(value), indent=2))
        return
    from rich.table import Table

    console = make_console()
    table = Table(title=safe(result.path))
    for name in ("file", "size", "SHA-256"):
        table.add_column(name, justify="right" if name == "size" else "left")
    for record in result.files:
        table.add_row(safe(record.file), size_of(record.size), record.sha256[:16])
    console.print(table)
    what = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    console.print(f"{what} tensors", soft_wrap=True)
    rate = result.source_bytes / seconds if seconds else 0.0
    console.print(
        f"{size_of(result.source_bytes)} became {size_of(result.bytes)} "
        f"({result.bytes / max(1, result.source_bytes):.1%}) in {seconds:.1f} s "
        f"({size_of(rate)}/s)",
        soft_wrap=True,
    )
    if result.kept:
        console.print(f"{len(result.kept)} files were complete from an earlier run")
    for note in result.notes:
        console.print(f"note: {safe(note)}", style="yellow", soft_wrap=True)


def _print_choices(choices: list[Choice], as_json: bool) -> None:
    if as_json:
        value = [
            {
                "name": c.name,
                "dtype": c.entry.dtype,
                "shape": list(c.entry.shape),
                "bytes": c.entry.nbytes,
                "format": c.format.name if c.format else None,
                "reason": c.reason,
            }
            for c in choices
        ]
        click.echo(json.dumps(value, indent=2))
        return
    from rich.table import Table

    console = make_console()
    table = Table()
    for name in ("tensor", "type", "shape", "becomes"):
        table.add_column(name, overflow="fold")
    for c in choices:
        becomes = c.format.name if c.format else f"kept: {c.reason}"
        shape = " x ".join(map(str, c.entry.shape)) or "scalar"
        style = None if c.format else "dim"
        table.add_row(safe(c.name), c.entry.dtype, shape, safe(becomes), style=style)
    console.print(table)
    chosen = [c for c in choices if c.format]
    console.print(
        f"{len(chosen)} of {len(choices)} tensors would be quantised: "
        f"{size_of(sum(c.entry.nbytes for c in chosen))} of "
        f"{size_of(sum(c.entry.nbytes for c in choices))}",
        soft_wrap=True,
    )
