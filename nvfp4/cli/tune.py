"""``nvfp4 tune``: measure divisions of products on the present GPU, and keep those that are better.

Exit code 2 without a GPU.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .bench import _chosen

if TYPE_CHECKING:
    from ..bench.tuner import Outcome, Product
    from ..tuning import Table

__all__ = ["command"]

_SUITES = ("matmul", "grouped-matmul")


def _suites(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Names, which may stand in one value with commas between them."""
    names = [name for value in values for name in value.split(",")]
    for name in names:
        if name not in _SUITES:
            raise click.BadParameter(
                f"a suite must be one of {', '.join(_SUITES)}; got {name!r}", ctx, param
            )
    return tuple(dict.fromkeys(names))


@click.command(name="tune", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--suite", "suites", multiple=True, callback=_suites, metavar="NAME[,NAME]",
    help="The shapes of `nvfp4 bench matmul` or `grouped-matmul`, those with targets first.",
)  # fmt: skip
@click.option(
    "--only", multiple=True, metavar="TEXT",
    help="Of the suites, only shapes with TEXT in their label. May be repeated.",
)  # fmt: skip
@click.option(
    "--format", "formats", multiple=True, callback=_chosen, metavar="NAME",
    help="Of the suites, only weights of this format. May be repeated.",
)  # fmt: skip
@click.option(
    "--shapes", metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Products of bfloat16 rows, as `nvfp4 compile --shapes` takes them.",
)  # fmt: skip
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="The table to write or add to; by default the card's in the cache directory.",
)  # fmt: skip
@click.option(
    "--budget", type=click.FloatRange(min=0), default=600, show_default=True, metavar="SECONDS",
    help="Begin nothing more after this time, building included.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that build; one a CPU.")
@click.pass_context
def command(
    ctx: click.Context,
    suites: tuple[str, ...],
    only: tuple[str, ...],
    formats: tuple[str, ...],
    shapes: Path | None,
    out: Path | None,
    budget: float,
    jobs: int | None,
) -> None:
    """Search better divisions of products with prepared weights for this GPU, and store them.

    The products are those of a suite, of a file, or both. Plans take divisions from the card's
    table in the cache directory, or from the file that NVFP4_TUNE_TABLE names. What the formulas do
    best has no row, and rows that were measured with other kernels are dropped. The table is
    written after each product, whole.

    \b
    nvfp4 tune --suite grouped-matmul --format mxfp4 --only "512 tokens" --budget 200
    nvfp4 tune --suite matmul,grouped-matmul -o h200.json
    """  # noqa: D301 - click must see the control character
    from .. import tuning, warm
    from ..bench import tuner
    from ..bench.devices import find_device
    from ..bench.run import Options
    from ..bench.timing import Deadline

    if not suites and shapes is None:
        raise click.UsageError("say what to tune: --suite NAME or --shapes FILE", ctx)
    device = find_device("tuning needs")
    deadline = Deadline(budget)
    card, arch = _present()
    try:
        file = out or tuning.file_of_card(card[0])
    except IndexError as error:
        raise click.UsageError("there is no cache directory: name a file by -o", ctx) from error
    table = _table(ctx, file, card)
    try:
        calls = [] if shapes is None else warm.read_shapes(shapes)
        products = [tuner.product_of(call, card, arch) for call in calls]
    except (TypeError, ValueError) as error:
        raise click.BadParameter(str(error), ctx, param_hint="'--shapes'") from error
    products += tuner.suite_products(suites, Options(only, formats), card, arch)
    if not products:
        raise click.UsageError("there is no such shape: see --only and --format", ctx)
    _check_place(ctx, file)
    if table.stale:
        click.echo(f"{file}: {table.stale} rows of other kernels are dropped", err=True)
    results = _search(device, products, table, file, deadline, jobs)
    for line in _summary(results):
        click.echo(line)
    click.echo(f"{file}: {len(table.choices)} rows")
    if out is not None:
        click.echo(f"to use it: {tuning.VARIABLE}={file}")


def _present() -> tuple[tuple[str, int], str]:
    """Name and multiprocessors of the present card, and its architecture."""
    from ..cards import present_card

    card = present_card()
    return (card.name, card.processors), card.arch


def _table(ctx: click.Context, file: Path, card: tuple[str, int]) -> Any:
    """The table to add to."""
    from ..tuning import Table, read

    if not file.exists():
        return Table(*card, {}, {})
    try:
        found = read(file)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{file} is no table: {error}", ctx, param_hint="'-o'") from error
    if (found.card, found.processors) != card:
        raise click.BadParameter(
            f"{file} is of {found.card} with {found.processors} multiprocessors, and this is "
            f"{card[0]} with {card[1]}",
            ctx,
            param_hint="'-o'",
        )
    return found


def _check_place(ctx: click.Context, file: Path) -> None:
    """Whether a table can be written there: minutes later it would be late to say so."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
    except OSError as error:
        raise click.BadParameter(
            f"{file} cannot be written: {error}", ctx, param_hint="'-o'"
        ) from error


Result = tuple["Product", "Outcome | str"]


def _search(
    device: Any, products: list[Any], table: Table, file: Path, deadline: Any, jobs: int | None
) -> list[Result]:
    """Search for each product; the table is written after each, so that nothing is lost.

    Returns
    -------
    list of (Product, Outcome or str)
        What was found, or why nothing was searched.
    """
    from .. import tuning
    from ..bench import tuner
    from ..bench.tuner_build import Builder

    def say(text: str) -> None:
        click.echo(f"[{deadline.spent:5.1f} s] {text}", err=True)

    results: list[Result] = []
    builder = Builder(jobs)
    try:
        choices = {}
        first: dict[Any, Product] = {}  # of a table's row
        for product in products:
            if first.setdefault(product.key, product) is product:
                choices[id(product)] = tuner.candidates(product)
                builder.want(product, choices[id(product)])
        say(f"{len(products)} products, {builder.waiting} kernels to build")
        for product in products:
            if (owner := first[product.key]) is not product:
                results.append((product, f"left out, its row is that of {owner.label}"))
                continue
            if deadline.over():
                results.append((product, "left out, the budget is spent"))
                continue
            try:
                left = deadline.budget - deadline.spent
                usable, notes = builder.usable(product, choices[id(product)], left)
                if deadline.over():
                    raise TimeoutError
                measure = tuner.timer(device, product)
                outcome = tuner.search(usable, measure, deadline.over)
            except TimeoutError:
                results.append((product, "left out, its kernels were not built in time"))
                continue
            except Exception as error:  # the other products are worth having
                text = " ".join(str(error).split())
                results.append((product, f"left out, {type(error).__name__}: {text}"[:200]))
                continue
            finally:
                device.release()
            results.append((product, outcome))
            say(tuner.tune(table, product, outcome))
            for note in (*notes, *outcome.notes):
                click.echo(f"  {note}", err=True)
            tuning.write(file, table)
    except KeyboardInterrupt:
        say("stopped; what was found by then is stored")
    finally:
        builder.close()
    return results


def _summary(results: list[Result]) -> list[str]:
    """A line a product: what the formulas choose, what won, by how much."""
    from ..bench.report import duration
    from ..bench.tuner import division, said

    rows = [("product", "formulas", "us", "best of the others", "us", "gain", "")]
    for product, outcome in results:
        own = division(product.launch)
        if isinstance(outcome, str):
            rows.append((product.label, own, "", "", "", "", outcome))
            continue
        best = "none" if outcome.best is None else said(outcome.best)
        gain = outcome.formula_us / outcome.us - 1 if outcome.best is not None else 0.0
        kept = "stored" if outcome.choice is not None else "formulas kept"
        us = "" if outcome.best is None else duration(outcome.us)
        rows.append(
            (product.label, own, duration(outcome.formula_us), best, us, f"{gain:+.1%}", kept)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = (2, 4, 5)
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
