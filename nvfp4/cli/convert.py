"""``nvfp4 convert``: a quantised checkpoint under another convention's names."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ._files import explained, progress
from .quantize import CONVENTIONS, cluster, out_option, print_result, worker_options

__all__ = ["command"]


@click.command(name="convert", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="IN", type=click.Path(path_type=Path))
@out_option
@click.option("--to", "convention", type=click.Choice(CONVENTIONS), required=True)
@worker_options
@explained
def command(
    source: Path,
    out: Path,
    convention: str,
    workers: int | None,
    scheduler: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write IN (a .safetensors file, a folder, or a .gguf file) in another convention.

    Codes and block scales keep their bytes. Tensor scales that the other convention stores as
    reciprocals are inverted; a note says where that is not exact.
    """
    from ..checkpoint.convert import plan_convert
    from ..checkpoint.jobs import execute
    from ..checkpoint.model import open_checkpoint

    run_all = cluster(workers, scheduler)
    with open_checkpoint(source) as model:
        plan = plan_convert(model, out, convention)
        total = sum(step.nbytes for _, steps, _ in plan.files for step in steps)
        began = time.monotonic()
        with progress("convert", total) as report:
            result = execute(model, plan, out, overwrite=overwrite, run_all=run_all, report=report)
        counts: dict[str, int] = {}
        for weight in model.found.weights.values():
            name = weight.scheme.format.name
            counts[name] = counts.get(name, 0) + 1
        kept = len(model.found.plain) + sum(len(f.names) for f in model.found.foreign.values())
    counts["kept"] = kept
    print_result(result, time.monotonic() - began, counts, as_json)
