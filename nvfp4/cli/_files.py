"""What the commands about checkpoints share: their errors, their progress, their figures."""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "explained", "finite", "progress", "safe", "size_of"]

P = ParamSpec("P")
R = TypeVar("R")


def explained(function: Callable[P, R]) -> Callable[P, R]:
    """A command whose files' and options' errors are one line."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        from ..checkpoint.errors import printable

        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                raise
            where = f": {printable(error.filename)}" if error.filename else ""
            what = error.strerror or str(error)
            raise click.ClickException(f"{what}{where}") from error

    return wrapper


def size_of(count: float) -> str:
    """Bytes in units of 1000: 1.23 GB."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"


def safe(text: object) -> str:
    """A stranger's name as Rich may print it: no control characters, no markup."""
    from rich.markup import escape

    from ..checkpoint.errors import printable

    return escape(printable(text))


def finite(value: Any) -> Any:
    """``value`` as JSON can hold it: None for what is not finite, lists and objects inside too."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value


def console() -> Console:
    """Where tables go; wide where no terminal folds them, so that names can be searched for."""
    from rich.console import Console

    on_terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if on_terminal else 160)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Give a function that takes the bytes that are done: rate and time left on standard error.

    A bar on a terminal; elsewhere a line every few seconds, so that a log shows life.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    errors = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
    began = said = time.monotonic()
    done = 0
    with bar:
        task = bar.add_task(what, total=total)

        def step(count: int) -> None:
            nonlocal done, said
            done += count
            bar.update(task, completed=done)
            now = time.monotonic()
            if bar.disable and now - said >= 5:
                said = now
                rate = done / (now - began)
                left = (total - done) / rate if rate else math.inf
                click.echo(
                    f"{what}: {size_of(done)} of {size_of(total)}, {size_of(rate)}/s, "
                    f"{left:.0f} s left",
                    err=True,
                )

        yield step
