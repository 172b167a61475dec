"""``nvfp4 plan``: what a product would run on a card, and the floor; no GPU is needed."""

from __future__ import annotations

import click

__all__ = ["command"]


@click.command(name="plan", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("m", type=click.IntRange(min=0))
@click.argument("n", type=click.IntRange(min=1))
@click.argument("k", type=click.IntRange(min=1))
@click.option("-a", "a", default="bfloat16", show_default=True, metavar="KIND",
              help="What A is: bfloat16, float16 or a format.")  # fmt: skip
@click.option("-b", "b", default="mxfp4", show_default=True, metavar="FORMAT",
              help="Format of the weights.")  # fmt: skip
@click.option("--experts", type=click.IntRange(min=1), help="Matrices of a grouped product.")
@click.option("--rows", type=click.IntRange(min=0),
              help="Rows of a grouped result that are gathered from the M of A.")  # fmt: skip
@click.option("--row-counts", is_flag=True,
              help="A is [experts, M, K], of which the first rows of each count.")  # fmt: skip
@click.option("--out", "out_dtype", default="bfloat16", show_default=True, metavar="KIND",
              help="What the result is: a dtype or a format.")  # fmt: skip
@click.option("--compute", type=click.Choice(["bfloat16", "fp8"]),
              help="fp8: rows of e4m3 with a scale each; -a e4m3: given so.")  # fmt: skip
@click.option("--batch-invariant", is_flag=True, help="The plan that does not depend on M.")
@click.option("--plain-weights", is_flag=True, help="The weights are not prepared.")
@click.option("--card", metavar="NAME", help="Such as H200 or H20; by default the present GPU.")
@click.option("--arch", metavar="ARCH", help="Such as sm_90a, instead of a card.")
@click.pass_context
def command(
    ctx: click.Context,
    m: int,
    n: int,
    k: int,
    a: str,
    b: str,
    experts: int | None,
    rows: int | None,
    row_counts: bool,
    out_dtype: str,
    compute: str | None,
    batch_invariant: bool,
    plain_weights: bool,
    card: str | None,
    arch: str | None,
) -> None:
    """Print the plan of A [M, K] times B [N, K] transposed: kernel, division, floor.

    \b
    nvfp4 plan 16 8192 8192 --card H200
    nvfp4 plan 32 5760 2880 --experts 128 --rows 128 -b nvfp4 --card H20
    nvfp4 plan 8192 5760 2880 -a e4m3 --compute fp8 --card H200
    """  # noqa: D301 - click must see the control character
    from ..planned import plan_matmul

    try:
        plan = plan_matmul(
            m, n, k, a=a, b=b, experts=experts, rows=rows, row_counts=row_counts,
            out_dtype=out_dtype, compute=compute, batch_invariant=batch_invariant,
            prepared=not plain_weights, card=card, arch=arch,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error), ctx) from error
    click.echo(str(plan))
