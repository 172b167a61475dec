"""``nvfp4 bench``: measure on the present GPU, beside a copy and whatever peers are installed.

Exit code 1 where a timed call gave a wrong result; 2 without a GPU. A missed target is in the
table, not in the exit code.
"""

from __future__ import annotations

import json
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .demo import PICTURES, _formats

if TYPE_CHECKING:
    from ..bench.report import Report

__all__ = ["command"]


def _chosen(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Canonical names; nothing where none is given."""
    return tuple(_formats(ctx, param, names)) if names else ()


def _chosen_activations(
    ctx: click.Context, param: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Dtypes, or canonical names of formats."""
    from ..bench.activations import DTYPES

    try:
        return tuple(name if name in DTYPES else _formats(ctx, param, (name,))[0] for name in names)
    except click.BadParameter as error:
        message = f"{' or '.join(DTYPES)}, or a format: {error.message}"
        raise click.BadParameter(message, ctx, param) from error


def _file(kinds: tuple[str, ...] = ()) -> Any:
    def check(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:
        """A file that can be written, before minutes are spent."""
        if file is None:
            return None
        if kinds and file.suffix not in kinds:
            raise click.BadParameter(f"{file} must end in {', '.join(kinds)}", ctx, param)
        if not file.resolve().parent.is_dir():
            raise click.BadParameter(f"no folder {file.resolve().parent}", ctx, param)
        return file

    return check


@click.command(name="bench", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("suite", type=click.Choice(["quantize", "matmul", "grouped-matmul"]))
@click.option(
    "--only", multiple=True, metavar="TEXT",
    help="Only shapes with TEXT in their label; 'host' for the host's time. May be repeated.",
)  # fmt: skip
@click.option(
    "--format", "formats", multiple=True, callback=_chosen, metavar="NAME",
    help="Only this format: nvfp4, mxfp4, mxfp8_e4m3, mxfp8_e5m2. May be repeated.",
)  # fmt: skip
@click.option(
    "--activations", multiple=True, callback=_chosen_activations, metavar="KIND",
    help="Rows of products: bfloat16 (the default), float16, nvfp4, mxfp4, mxfp8_e4m3, mxfp8_e5m2. "
    "May be repeated.",
)  # fmt: skip
@click.option(
    "--compute", multiple=True, type=click.Choice(["bfloat16", "fp8"]),
    help="fp8: products of e4m3 rows with one scale each, instead of bfloat16 rows, or beside the "
    "--activations given.",
)  # fmt: skip
@click.option("--batch-invariant", is_flag=True,
              help="Measure each product with a batch-invariant plan too.")  # fmt: skip
@click.option(
    "--budget", type=click.FloatRange(min=0), default=150, show_default=True, metavar="SECONDS",
    help="Start nothing after this time (what is left out is in the table); building apart.",
)  # fmt: skip
@click.option("--no-peers", is_flag=True, help="Do not measure other libraries.")
@click.option("--markdown", is_flag=True, help="Print the tables as Markdown.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    callback=_file(), help="Write all figures to FILE.",
)  # fmt: skip
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    callback=_file(PICTURES), help="Draw the rates into FILE (.png, .svg, .pdf).",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that build; one a CPU.")
@click.pass_context
def command(
    ctx: click.Context,
    suite: str,
    only: tuple[str, ...],
    formats: tuple[str, ...],
    activations: tuple[str, ...],
    compute: tuple[str, ...],
    batch_invariant: bool,
    budget: float,
    no_peers: bool,
    markdown: bool,
    json_file: Path | None,
    plot: Path | None,
    jobs: int | None,
) -> None:
    """Measure SUITE on the present GPU and say which targets are met.

    Builds what is missing, then times CUDA graphs of calls on rotated buffers; every timed call is
    checked against the golden model. Ratios are to what is measured in the same run.
    """
    from ..bench.activations import chosen_kinds
    from ..bench.devices import find_device
    from ..bench.run import Options

    if suite == "quantize" and (activations or compute or batch_invariant):
        raise click.UsageError(
            "--activations, --compute and --batch-invariant are of products, not of quantize", ctx
        )
    device = find_device()
    kinds = chosen_kinds(activations, compute)
    options = Options(only, formats, not no_peers, kinds, batch_invariant)
    report = measure(suite, options, budget, device, jobs)
    if only and not report.rows and not report.stopped:
        raise click.UsageError(f"no shape of {suite} has {' or '.join(only)} in its label", ctx)
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    if plot is not None:
        _draw(report, plot)
    _print(report, markdown)
    if report.wrong or report.stopped:
        ctx.exit(1)


def measure(name: str, options: Any, budget: float, device: Any, jobs: int | None = None) -> Report:
    """Build, measure; what came out so far, too, where something stops it."""
    from ..bench import warmup
    from ..bench.environment import environment
    from ..bench.report import Report
    from ..bench.run import Run, suite
    from ..bench.timing import Deadline

    module = suite(name)
    where = environment(device.library)
    report = Report(name, where)

    def say(text: str) -> None:
        click.echo(f"[{deadline.spent:5.1f} s] {text}", err=True)

    deadline = Deadline(budget)
    card = (where["card"], where["processors"]) if "processors" in where else None
    calls = module.calls(options)
    built, seconds = warmup.build(calls, where["arch"], card=card, jobs=jobs, say=say)
    report.seconds["building"] = seconds
    say(f"{built} kernels built in {seconds:.1f} s")
    deadline = Deadline(budget)
    run = Run(device, options, deadline, report, say)
    try:
        module.measure(run)
    except (KeyboardInterrupt, Exception) as error:  # what there is took minutes: show it
        run.sort()
        report.stopped = f"{type(error).__name__}: {error}".rstrip(": ")
        if not isinstance(error, KeyboardInterrupt):
            traceback.print_exception(error)
    report.seconds["measuring"] = deadline.spent
    return report


def _draw(report: Report, file: Path) -> None:
    from ..bench.plot import draw

    try:
        draw(report, file)
    except ImportError:
        click.echo("no picture: it needs matplotlib (pip install 'nvfp4[plot]')", err=True)
    except (OSError, ValueError) as error:
        click.echo(f"no picture: {error}", err=True)


def _print(report: Report, as_markdown: bool) -> None:
    from ..bench.report import markdown, print_report

    if as_markdown:
        click.echo(markdown(report))
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a log: do not fold what a terminal of 80 columns would
        console = Console(highlight=False, width=200)
    print_report(report, console)
