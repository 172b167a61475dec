"""Peers' kernels, compiled ahead by several processes: ``python -m nvfp4.bench.peers_build``.

triton_kernels and Humming compile at their first calls, one kernel after the other. Here a process
a layer makes these calls; the kernels land in the caches that peers keep on disk, where ``nvfp4
bench grouped-matmul`` finds them. Every process has weights on the card: all layers of the suite
together take some 100 GB. Nothing may be timed meanwhile.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

import click

from . import devices
from .activations import Activations, chosen_kinds
from .dense_products import FORMATS_BY_DEFAULT
from .peers_products import chosen_peers, inputs
from .report import Report
from .run import Options, Run
from .shapes import GROUPED_PRODUCTS, TOKENS, Layer
from .timing import Deadline
from .warmup import usable_cpus

__all__ = ["build", "first_calls"]


def first_calls(name: str, fmt: str, rows: str, layer: Layer, counts: Iterable[int]) -> str:
    """Make one call with every number of tokens; what went wrong, empty: nothing."""
    try:
        options = Options(formats=(fmt,), activations=(rows,))
        run = Run(devices.find_device(), options, Deadline(math.inf), Report("peers_build", {}))
        (peer,) = [p for p in chosen_peers(options) if (p.name, p.format) == (name, fmt)]
        made = peer.make(run, layer)
        run.device.release()
        for tokens in counts:
            x, routings, _ = inputs(run, layer, tokens, made)
            made.bind(x, routings[0])()
            run.device.wait()
    except Exception as error:  # a peer's failure is a row of the benchmark's table, no more
        what = f"{layer.name}{Activations(rows).suffix}, {name} {fmt}"
        return f"{what}: {type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def build(
    options: Options,
    *,
    layers: Iterable[Layer] = GROUPED_PRODUCTS,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Have the peers that compile do so.

    Parameters
    ----------
    options
        Shapes and formats, as the suite takes them.
    layers
    jobs
        Processes; as many as CPUs that may be used by default.
    say
        Told how far it is.

    Returns
    -------
    list of str
        What did not work.
    """
    began = time.monotonic()
    compiling = [p for p in chosen_peers(options) if p.compiles]
    tasks = []
    for layer, peer in itertools.product(layers, compiling):
        suffix = peer.rows.suffix
        counts = [t for t in TOKENS if options.wants(layer.label(t) + suffix)]
        if counts:
            tasks.append((peer.name, peer.format, peer.rows.name, layer, counts))
    # The largest first: their weights take longest to make.
    tasks.sort(key=lambda task: -task[3].experts * task[3].columns * task[3].depth)
    jobs = min(jobs or usable_cpus(), len(tasks))
    say(f"{len(tasks)} layers of peers in {jobs} processes")
    if jobs <= 1:
        errors = [first_calls(*task) for task in tasks]
    else:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            doing = [pool.submit(first_calls, *task) for task in tasks]
            errors = [done.result() for done in as_completed(doing)]
    errors = [error for error in errors if error]
    for error in errors:
        say(error)
    say(f"done in {time.monotonic() - began:.1f} s")
    return errors


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", multiple=True, metavar="TEXT", help="Only shapes with TEXT in their label.")
@click.option(
    "--format", "formats", multiple=True, type=click.Choice(FORMATS_BY_DEFAULT),
    help="Only this format. May be repeated.",
)  # fmt: skip
@click.option(
    "--compute", multiple=True, type=click.Choice(["bfloat16", "fp8"]),
    help="Peers of these rows, bfloat16 by default. May be repeated.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; one a CPU.")
def main(
    only: tuple[str, ...], formats: tuple[str, ...], compute: tuple[str, ...], jobs: int | None
) -> None:
    """Compile what peers are timed with in ``nvfp4 bench grouped-matmul``."""
    options = Options(only, formats, activations=chosen_kinds(compute=compute))
    build(options, jobs=jobs, say=lambda text: click.echo(text, err=True))


if __name__ == "__main__":
    main()
