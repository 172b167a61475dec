"""``nvfp4 demo``: six experts of a real model, a page of real text, every format.

Standard output gets the result (a table, or JSON); progress goes to standard error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..demo.job import Measured, Place, Simulated
    from ..demo.model import Model, Routing

__all__ = ["command", "duration"]

PICTURES = (".png", ".svg", ".pdf")


def _formats(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> list[str]:
    """Canonical names, in the order given, none twice; all where none is given."""
    from ..formats import FORMATS, block_format

    try:
        return list(dict.fromkeys(block_format(name).name for name in names or FORMATS))
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@click.command(name="demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--format",
    "formats",
    multiple=True,
    callback=_formats,
    metavar="NAME",
    help="A format: nvfp4, mxfp4, mxfp8_e4m3, mxfp8_e5m2. May be repeated; all by default.",
)
@click.option("--rows", type=int, default=512, show_default=True, help="Tokens of the page to use.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("nvfp4-demo.png"),
    show_default=True,
    help="Where the picture goes.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("--cpu", is_flag=True, help="Use NumPy even where there is a GPU.")
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of another BERT encoder: config.json, model.safetensors, tokenizer.json.",
)
@click.pass_context
def command(
    ctx: click.Context,
    formats: list[str],
    rows: int,
    out: Path,
    as_json: bool,
    cpu: bool,
    model: Path | None,
) -> None:
    """Quantise six experts of a real model and multiply them with a page of text.

    The experts are the six feed-forward up-projections of all-MiniLM-L6-v2; each token goes to two
    of them. For every format: bytes, signal to quantisation noise, time. Then a slice of the job
    runs in the simulated GPU kernels, whose bytes must equal the golden model's: exit code 1 if
    they do not.
    """
    from ..demo.model import MissingPackageError, ModelError, default_folder, load, route

    if out.suffix not in PICTURES:
        allowed = ", ".join(PICTURES)
        raise click.BadParameter(f"{out} must end in {allowed}", ctx, param_hint="'--out'")
    if not out.resolve().parent.is_dir():
        raise click.BadParameter(f"no folder {out.resolve().parent}", ctx, param_hint="'--out'")
    try:
        loaded = load(default_folder() if model is None else model, rows)
    except (MissingPackageError, ModelError) as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param_hint="'--rows'") from error

    from ..demo.job import find_place, measure, simulate_slice
    from ..demo.picture import draw

    routing = route(loaded.rows, len(loaded.experts))
    place = find_place(cpu)
    measured: list[Measured] = []
    simulated: list[Simulated] = []
    with _progress(2 * len(formats) + 1) as step:
        for fmt in formats:
            step(f"{fmt}: quantise and multiply ({place.name})")
            measured.append(measure(loaded, routing, fmt, place))
        for fmt in formats:
            step(f"{fmt}: a slice of it in the simulated kernels")
            simulated.append(simulate_slice(loaded, routing, fmt))
        step(f"draw {out}")
        try:
            draw(measured, _title(loaded), out)
        except OSError as error:
            raise click.BadParameter(str(error), ctx, param_hint="'--out'") from error

    good = all(m.good for m in measured) and all(s.good for s in simulated)
    if as_json:
        click.echo(json.dumps(_as_json(loaded, routing, place, measured, simulated, out), indent=2))
    else:
        _print_tables(loaded, routing, place, measured, simulated, out)
    if not good:
        ctx.exit(1)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """Give a function that says what comes next: a bar on a terminal, else a line for each step."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    done = -1
    bar = Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=total)

        def step(text: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done, description=text)
            if bar.disable:
                click.echo(f"[{done + 1}/{total}] {text}", err=True)

        yield step


def _as_json(
    model: Model,
    routing: Routing,
    place: Place,
    measured: list[Measured],
    simulated: list[Simulated],
    out: Path,
) -> dict[str, Any]:
    return {
        "model": model.name,
        "experts": list(model.experts.shape),
        "tokens": len(model.rows),
        "rows_by_expert": routing.lengths,
        "where": place.name,
        "formats": [
            {
                "format": m.format,
                "weight_bytes": m.weight_bytes,
                "bfloat16_bytes": m.bfloat16_bytes,
                "weights_db": m.weights_db,
                "rows_db": m.rows_db,
                "product_db": m.product_db,
                "product_db_by_expert": m.expert_db,
                "quantize_seconds": m.quantize_seconds,
                "product_seconds": m.product_seconds,
                "where": m.where,
                "bytes_compared": m.bytes_compared,
                "bytes_equal": m.bytes_equal,
            }
            for m in measured
        ],
        "simulated": [
            {
                "format": s.format,
                "arch": s.arch,
                "slice": [s.rows, s.columns, s.depth],
                "bytes_compared": s.bytes_compared,
                "bytes_equal": s.bytes_equal,
                "outputs": s.outputs,
                "exact_outputs": s.exact,
                "exact_outputs_equal": s.exact_equal,
                "other_outputs_within_bound": s.within_bound,
                "equal": s.good,
                "seconds": s.seconds,
            }
            for s in simulated
        ],
        "picture": str(out),
    }


def duration(seconds: float) -> str:
    """Write a time with three significant digits, in the unit that needs no exponent."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def _title(model: Model) -> str:
    experts, columns, depth = model.experts.shape
    return f"{model.name}: {experts} experts of {columns} x {depth}, {len(model.rows)} tokens"


def _print_tables(
    model: Model,
    routing: Routing,
    place: Place,
    measured: list[Measured],
    simulated: list[Simulated],
    out: Path,
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)

    def table(columns: tuple[str, ...]) -> Table:
        made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for i, column in enumerate(columns):
            made.add_column(column, justify="right" if i else "left", no_wrap=True)
        return made

    lengths = ", ".join(map(str, routing.lengths))
    console.print(f"[bold]{_title(model)}[/]\nRows by expert: {lengths} (each token goes to two)")
    console.print(f"Grouped product in: [bold]{place.name}[/]\n")
    one = table(
        (
            "\nformat",
            "\nexperts",
            "of\nbf16",
            "experts\ndB",
            "tokens\ndB",
            "product\ndB",
            "\nquantise",
            "\nmultiply",
        )
    )
    for m in measured:
        one.add_row(
            f"[bold]{m.format}[/]",
            f"{m.weight_bytes / 1e6:.2f} MB",
            f"{m.ratio:.1%}",
            *(f"{db:.1f}" for db in (m.weights_db, m.rows_db, m.product_db)),
            *map(duration, (m.quantize_seconds, m.product_seconds)),
        )
    console.print(one)
    console.print()
    console.print("[dim]dB: signal to quantisation noise; 6 dB are one bit.[/]")
    if place.gpu:
        colour = "green" if all(m.good for m in measured) else "bold red"
        equal = f"{sum(m.bytes_equal for m in measured):,}"
        compared = f"{sum(m.bytes_compared for m in measured):,}"
        said = f"{equal} of {compared} bytes on the GPU equal the golden model's."
        console.print(f"[{colour}]{said}[/]")
    console.print()

    first = simulated[0]
    console.print(
        f"A slice of the same job ({first.rows} rows, {first.columns} columns, sums of "
        f"{first.depth}) in the [bold]simulated {first.arch} kernels[/], against the golden model:"
    )
    console.print()
    two = table(
        (
            "\nformat",
            "quantised bytes\nequal",
            "exact sums\nequal",
            "\nother sums",
            "\ntime",
        )
    )
    for s in simulated:
        two.add_row(
            f"[bold]{s.format}[/]",
            f"{s.bytes_equal:,} of {s.bytes_compared:,}",
            f"{s.exact_equal:,} of {s.exact:,}",
            f"{s.outputs - s.exact:,} " + ("within rounding" if s.within_bound else "WRONG"),
            f"{s.seconds:.1f} s",
            style=None if s.good else "red",
        )
    console.print(two)
    console.print()
    if all(s.good for s in simulated):
        console.print("[green]The simulated kernels gave the golden model's bytes.[/]")
    else:
        console.print("[bold red]The simulated kernels DIFFER from the golden model.[/]")
    console.print(f"Picture: {out}", soft_wrap=True)
