"""``nvfp4 verify``: how much of a checkpoint was lost, and whether anything else has changed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._files import console as make_console
from ._files import explained, finite, progress, safe

if TYPE_CHECKING:
    import numpy as np

    from ..checkpoint.compare import Verification

__all__ = ["command"]


@click.command(name="verify", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("original", metavar="ORIGINAL", type=click.Path(path_type=Path))
@click.argument("quantised", metavar="QUANTISED", type=click.Path(path_type=Path))
@click.option("--min-sqnr", type=float, help="dB that every quantised weight must reach.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where to draw the errors (PNG, SVG, PDF); needs matplotlib.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.pass_context
@explained
def command(
    ctx: click.Context,
    original: Path,
    quantised: Path,
    min_sqnr: float | None,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Compare QUANTISED with ORIGINAL, files or folders, tensor by tensor.

    Quantised weights: signal to quantisation noise, largest error. All other tensors must be equal
    byte for byte, none missing or added. Exit code 1 on a mismatch, a NaN, or a weight under
    --min-sqnr.
    """
    from ..checkpoint.compare import verify
    from ..checkpoint.model import open_checkpoint

    with open_checkpoint(original) as model:
        total = sum(f.size for f in model.files.values())
    with progress("verify", total) as report:
        result = verify(original, quantised, min_sqnr=min_sqnr, report=report)
    if picture is not None:
        _draw(result, picture)
    if as_json:
        value = {
            "original": str(original),
            "quantised": str(quantised),
            "passed": result.passed,
            "sqnr": result.sqnr if result.errors else None,
            "tensors": [asdict(t) for t in result.tensors],
            "errors": {name: counts.tolist() for name, counts in result.errors.items()},
        }
        click.echo(json.dumps(finite(value), indent=2))
    else:
        _print(result)
    if not result.passed:
        ctx.exit(1)


def _db(value: float) -> str:
    return "exact" if value == math.inf else "-" if math.isnan(value) else f"{value:.2f} dB"


def _print(result: Verification) -> None:
    from rich.table import Table

    console = make_console()
    quantised = [t for t in result.tensors if t.format]
    table = Table(title="Quantised weights")
    table.add_column("tensor", overflow="fold")
    table.add_column("format")
    for name in ("shape", "SQNR", "largest error", "of largest"):
        table.add_column(name, justify="right")
    for t in quantised:
        table.add_row(
            safe(t.name),
            t.format,
            " x ".join(map(str, t.shape)),
            _db(t.sqnr),
            f"{t.max_error:.3g}",
            f"{t.max_error / t.amax:.1%}" if t.amax > 0 else "-",
            style=None if t.status == "ok" else "red",
        )
    if quantised:
        console.print(table)
    for name, counts in result.errors.items():
        if counts.sum():
            console.print(f"{name}: errors in units of the block scale", style="bold")
            for line in bars(counts, 1.0 if "fp4" in name else 16.0):
                console.print(line, style="cyan")
    equal = sum(t.status == "ok" for t in result.tensors if not t.format)
    console.print(f"{equal} other tensors are equal, byte for byte")
    wrong = [t for t in result.tensors if t.status != "ok"]
    for t in wrong:
        console.print(f"{t.status}: {safe(t.name)}: {safe(t.message)}", style="red", soft_wrap=True)
    if quantised:
        console.print(f"All quantised weights together: {_db(result.sqnr)}")
    if wrong:
        console.print(f"FAILED: {len(wrong)} of {len(result.tensors)} tensors", style="bold red")
    else:
        console.print("OK", style="green")


def bars(counts: np.ndarray, half: float, height: int = 6) -> list[str]:
    """A histogram as lines of block characters, with its axis."""
    eighths = " ▁▂▃▄▅▆▇█"
    largest = max(1, int(counts.max()))
    scaled = [round(int(c) * height * 8 / largest) for c in counts]
    lines = []
    for row in reversed(range(height)):
        levels = (min(8, max(0, value - row * 8)) for value in scaled)
        lines.append("".join(eighths[level] for level in levels))
    left, right = f"{-half:g}", f"{half:g}"
    lines.append(left + "0".center(len(counts) - len(left) - len(right)) + right)
    return lines


def _draw(result: Verification, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise click.UsageError("--picture needs matplotlib: install nvfp4[plot]") from error
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, counts in result.errors.items():
        if counts.sum():
            half = 1.0 if "fp4" in name else 16.0
            centres = [(i + 0.5) / len(counts) * 2 - 1 for i in range(len(counts))]
            left.step(centres, counts / counts.sum(), where="mid", label=f"{name} (1 = {half:g})")
    left.set_xlabel("error, in units of the block scale")
    left.set_ylabel("part of the elements")
    if left.get_legend_handles_labels()[0]:
        left.legend()
    values = [t.sqnr for t in result.tensors if t.format and math.isfinite(t.sqnr)]
    if values:
        right.hist(values, bins=min(30, max(5, len(values) // 2)))
    right.set_xlabel("SQNR of a weight, dB")
    right.set_ylabel("weights")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise click.UsageError(f"--picture: {error}") from error
