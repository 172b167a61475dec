"""``nvfp4 compile``: what the compiler makes of a kernel, on a machine without a GPU too.

Exit code 1 where the gate stops a kernel, 2 for a mistake on the command line.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..cubin import Binary
    from ..program import Program

__all__ = ["command"]


@click.command(name="compile", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("kernel", required=False)
@click.option(
    "--arch", "archs", multiple=True, metavar="ARCH",
    help="A target, such as sm_90a; that of the GPU here by default. May be repeated.",
)  # fmt: skip
@click.option(
    "--set", "constants", multiple=True, metavar="NAME=VALUE",
    help="A compile-time constant of KERNEL. May be repeated.",
)  # fmt: skip
@click.option("--ptx", "show", flag_value="ptx", help="Print the PTX of KERNEL.")
@click.option("--sass", "show", flag_value="sass", help="Print the machine code of KERNEL.")
@click.option(
    "--resources", "show", flag_value="resources", default=None,
    help="Print registers, shared memory, spills and the gate's verdict (the default).",
)  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="Name every kernel and its targets.")
@click.option("--all", "everything", is_flag=True, help="Build every kernel for every target.")
@click.option("--slow", is_flag=True, help="With --all: also the rare variants.")
@click.option(
    "--shapes", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="Build what the calls in FILE need (docs/compile.md says what is in it).",
)  # fmt: skip
@click.option(
    "-o", "--out", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="With --shapes: the cache to fill; NVFP4_CACHE_DIR then names it.",
)  # fmt: skip
@click.option(
    "--card", metavar="NAME",
    help="With --shapes: plan for this card (H200, H20...); the GPU here by default.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; as many as CPUs by default.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    kernel: str | None,
    archs: tuple[str, ...],
    constants: tuple[str, ...],
    show: str | None,
    listing: bool,
    everything: bool,
    slow: bool,
    shapes: Path | None,
    out: Path | None,
    card: str | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Build kernels and show what was built; no GPU is needed.

    \b
    nvfp4 compile --list
    nvfp4 compile quantize --arch sm_100a --ptx
    nvfp4 compile --all --json
    nvfp4 compile --shapes shapes.json --arch sm_90a -o cache
    """  # noqa: D301 - click must see the control character
    given = [bool(kernel), listing, everything, shapes is not None]
    if sum(given) != 1:
        raise click.UsageError("give one of: KERNEL, --list, --all, --shapes FILE", ctx)
    if (shapes is None) != (out is None):
        raise click.UsageError("--shapes and -o go together", ctx)
    if card and shapes is None:
        raise click.UsageError("--card is for --shapes", ctx)
    if show and not kernel:
        raise click.UsageError(f"--{show} is for one KERNEL", ctx)
    if constants and not kernel:
        raise click.UsageError("--set is for one KERNEL", ctx)
    _check_archs(ctx, archs)
    jobs = jobs or os.cpu_count() or 1
    if listing:
        _list(archs, as_json)
    elif kernel:
        ctx.exit(_one(ctx, kernel, archs, constants, show or "resources", as_json))
    elif everything:
        ctx.exit(_print(_build_all(archs, slow, jobs), as_json))
    elif shapes is not None and out is not None:
        ctx.exit(_print(_warm(ctx, shapes, archs, card, out, jobs), as_json))


def _check_archs(ctx: click.Context, archs: Iterable[str]) -> None:
    from ..architectures import capability

    for arch in archs:
        try:
            capability(arch)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param_hint="'--arch'") from error


def _present_arch(ctx: click.Context) -> str:
    """The target of the present GPU."""
    from .. import driver
    from ..errors import ToolchainError

    try:
        return driver.device_info(driver.current_device()).arch
    except ToolchainError as error:
        raise click.UsageError("there is no GPU here: say --arch", ctx) from error


def _for_card(
    ctx: click.Context, archs: tuple[str, ...], card: str | None
) -> tuple[tuple[str, ...], tuple[str, int] | None]:
    """Architectures, and the card whose multiprocessors and tables plans go by."""
    from ..cards import named_card, present_card

    if card is not None:
        found = named_card(card)
        return archs or (found.arch,), found.identity
    if archs:
        return archs, None
    return (_present_arch(ctx),), present_card().identity


# --- what there is --------------------------------------------------------------------------------


def _list(archs: tuple[str, ...], as_json: bool) -> None:
    from ..architectures import architectures_of
    from ..kernels import KERNELS
    from ..kernels.seeds import SEEDS

    named = {**KERNELS, **{name: program.kernel for name, program in SEEDS.items()}}
    table = {
        name: targets
        for name, kernel in sorted(named.items())
        if set(targets := architectures_of(kernel)) & set(archs or targets)
    }
    if as_json:
        click.echo(json.dumps(table, indent=2))
        return
    width = max(map(len, table), default=0)
    for name, targets in table.items():
        click.echo(f"{name:{width}}  {' '.join(targets)}")


# --- one kernel -----------------------------------------------------------------------------------


def _one(
    ctx: click.Context,
    name: str,
    archs: tuple[str, ...],
    constants: tuple[str, ...],
    show: str,
    as_json: bool,
) -> int:
    from .. import compile as compiler
    from .. import kernels

    try:
        made = _program(kernels.program(name), constants)
    except ValueError as error:
        raise click.UsageError(str(error), ctx) from error
    targets = archs or (_present_arch(ctx),)
    if show == "resources":
        return _print([_row(made, arch) for arch in targets], as_json)
    for arch in targets:
        binary, ptx = compiler.inspect(made, arch)
        text = ptx if show == "ptx" else compiler.sass(binary)
        if as_json:
            click.echo(json.dumps({"kernel": made.label, "arch": arch, show: text}))
        else:
            click.echo(text.rstrip("\n"))
    return 0


def _program(first: Program, constants: Iterable[str]) -> Program:
    """A program with some of its constants replaced."""
    kernel, values = first.kernel, dict(first.constants)
    for text in constants:
        name, equals, value = text.partition("=")
        if not equals or name not in kernel.constants:
            known = ", ".join(kernel.constants) or "none"
            raise ValueError(f"--set takes NAME=VALUE, NAME one of {known}; got {text!r}")
        allowed = {str(choice): choice for choice in kernel.constants[name]}
        if not allowed:
            allowed = {value: _number(value)}
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        values[name] = allowed[value]
    return kernel.program(**values)


def _number(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# --- many -----------------------------------------------------------------------------------------


def _row(program: Program, arch: str) -> dict[str, Any]:
    """Build a program past the cache; what it needs, and what the gate says of it."""
    from .. import compile as compiler

    row: dict[str, Any] = {"kernel": program.label, "arch": arch}
    try:
        binary, ptx = compiler.inspect(program, arch)
    except Exception as error:  # whatever stops a build is what this command is to report
        return row | {"faults": [f"does not build: {' '.join(str(error).split())}"]}
    return row | _resources(binary) | {"faults": list(compiler.faults(binary, ptx))}


def _resources(binary: Binary) -> dict[str, Any]:
    return {
        "registers": binary.registers,
        "shared_bytes": binary.shared_bytes,
        "stack_bytes": binary.stack_bytes,
        "spill_bytes": sum(binary.spill_bytes),
        "code_bytes": len(binary.cubin),
    }


def _variant_row(name: str, index: int, slow: bool, arch: str) -> dict[str, Any]:
    """:func:`_row` in another process, which finds the program by its place in the register."""
    from .. import kernels

    return _row(kernels.variants(name, slow=slow, arch=arch)[index], arch)


def _build_all(archs: tuple[str, ...], slow: bool, jobs: int) -> Iterator[dict[str, Any]]:
    from .. import kernels
    from ..architectures import architectures_of

    tasks = [
        (name, index, slow, arch)
        for name, kernel in kernels.KERNELS.items()
        for arch in architectures_of(kernel)
        if arch in (archs or (arch,))
        for index in range(len(kernels.variants(kernel, slow=slow, arch=arch)))
    ]
    return _map(_variant_row, tasks, jobs)


def _map(
    work: Callable[..., dict[str, Any]], tasks: list[Any], jobs: int
) -> Iterator[dict[str, Any]]:
    """``work(*task)`` of each task, in order, in several processes."""
    if jobs == 1 or len(tasks) < 2:
        yield from (work(*task) for task in tasks)
        return
    # Fresh processes: a fork of one with threads in it may hang.
    with ProcessPoolExecutor(min(jobs, len(tasks)), get_context("spawn")) as pool:
        yield from pool.map(work, *zip(*tasks, strict=True))


def _warm_row(
    shapes: Path, arch: str, card: tuple[str, int] | None, index: int, out: Path
) -> dict[str, Any]:
    """Build one of the programs of a file of calls into a cache, in another process."""
    from .. import compile as compiler
    from .. import warm
    from ..cache import Cache

    program = warm.programs(warm.read_shapes(shapes), arch, card)[index]
    row: dict[str, Any] = {"kernel": program.label, "arch": arch}
    cached = compiler.find(program, arch, cache=Cache([out])) is not None
    try:
        binary = compiler.build(program, arch, cache=Cache([out]))
    except Exception as error:
        return row | {"faults": [f"does not build: {' '.join(str(error).split())}"]}
    return row | _resources(binary) | {"faults": list(compiler.faults(binary)), "cached": cached}


def _warm(
    ctx: click.Context,
    shapes: Path,
    archs: tuple[str, ...],
    card: str | None,
    out: Path,
    jobs: int,
) -> Iterator[dict[str, Any]]:
    """Fill a cache with what a file of calls needs."""
    from .. import warm

    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise click.BadParameter(
            f"cannot write to {out}: {error.strerror}", ctx, param_hint="'-o'"
        ) from error
    try:
        calls = warm.read_shapes(shapes)
        archs, identity = _for_card(ctx, archs, card)
        tasks = [
            (shapes, arch, identity, index, out)
            for arch in archs
            for index in range(len(warm.programs(calls, arch, identity)))
        ]
    except (ValueError, TypeError) as error:
        where = "; ".join(getattr(error, "__notes__", ()))
        raise click.UsageError(f"{error}{where and f' ({where})'}", ctx) from error
    return _map(_warm_row, tasks, jobs)


def _print(rows: Iterable[dict[str, Any]], as_json: bool) -> int:
    """Print rows as they come; 1 if the gate stops one of them."""
    failed = 0
    count = 0
    if as_json:
        click.echo("[", nl=False)
    for count, row in enumerate(rows, 1):
        failed += bool(row["faults"])
        if as_json:
            click.echo(("," if count > 1 else "") + "\n  " + json.dumps(row), nl=False)
        else:
            click.echo(_line(row))
    if as_json:
        click.echo("\n]")
    elif count > 1:
        click.echo(f"{count} built, {failed} stopped by the gate")
    return 1 if failed else 0


def _line(row: dict[str, Any]) -> str:
    head = f"{row['arch']:8} {row['kernel']}"
    if "registers" not in row:
        return f"{head}: {row['faults'][0]}"
    verdict = "; ".join(row["faults"]) or "ok"
    return (
        f"{head}: {row['registers']} registers, {row['shared_bytes']} bytes of static shared "
        f"memory, {row['spill_bytes']} bytes spilled, {row['code_bytes']} bytes of code: {verdict}"
    )
