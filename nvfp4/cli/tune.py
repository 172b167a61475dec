"""``nvfp4 tune``: measure divisions of products on the present GPU, and keep those that are better.

Exit code 2 without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

__all__ = ["command"]


@click.command(name="tune", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--shapes", required=True, metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Products of bfloat16 rows, as `nvfp4 compile --shapes` takes them.",
)  # fmt: skip
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="The table to write or add to; by default the card's in the cache directory.",
)  # fmt: skip
@click.option(
    "--budget", type=click.FloatRange(min=0), default=600, show_default=True, metavar="SECONDS",
    help="Time nothing more after this; building apart.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="Processes that build; one a CPU.")
@click.pass_context
def command(
    ctx: click.Context, shapes: Path, out: Path | None, budget: float, jobs: int | None
) -> None:
    """Search better divisions of products with prepared weights for this GPU, and store them.

    Plans take them from the card's table in the cache directory, or from the file that
    NVFP4_TUNE_TABLE names. What the formulas do best has no row.
    """
    from .. import tuning, warm
    from ..bench import tuner
    from ..bench.devices import find_device

    device = find_device("tuning needs")
    card, arch = _present()
    file = out or tuning.file_of_card(card[0])
    table = _table(ctx, file, card)
    try:
        products = [tuner.product_of(call, card, arch) for call in warm.read_shapes(shapes)]
    except (TypeError, ValueError) as error:
        raise click.BadParameter(str(error), ctx, param_hint="'--shapes'") from error
    _search(device, products, table, file, budget, jobs)
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
            f"{file} is of {found.card}, and this is {card[0]}", ctx, param_hint="'-o'"
        )
    return found


def _search(
    device: Any, products: list[Any], table: Any, file: Path, budget: float, jobs: int | None
) -> None:
    """Search for each product; the table is written after each, so that nothing is lost."""
    from .. import tuning
    from ..bench import tuner
    from ..bench.timing import Deadline

    spent = 0.0
    for product in products:
        if spent >= budget:
            click.echo(f"{product.label}: left out, the budget is spent")
            continue
        choices, notes = tuner.build(product, tuner.candidates(product), jobs)
        deadline = Deadline(budget - spent)
        outcome = tuner.search(choices, tuner.timer(device, product), deadline.over)
        spent += deadline.spent
        device.release()
        click.echo(tuner.tune(table, product, outcome))
        for note in (*notes, *outcome.notes):
            click.echo(f"  {note}", err=True)
        tuning.write(file, table)
