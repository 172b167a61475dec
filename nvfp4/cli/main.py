"""The command ``nvfp4``: finds a subcommand by its name, and says a user's mistake in one line.

A subcommand is a module with a click command named ``command``. It is imported when it is called,
not before: ``nvfp4 --help`` imports none of them.
"""

from __future__ import annotations

import errno
import importlib
import sys
from typing import Any, NoReturn

import click

from ..errors import ToolchainError, UnsupportedError

__all__ = ["COMMANDS", "main", "program"]

# name -> (module, what `nvfp4 --help` says about it)
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("nvfp4.cli.bench", "Measure speed on the present GPU, beside a copy and peers."),
    "compile": ("nvfp4.cli.compile", "Build kernels and show what was built; no GPU is needed."),
    "convert": ("nvfp4.cli.convert", "Write a quantised checkpoint in another convention."),
    "demo": ("nvfp4.cli.demo", "Quantise six experts of a real model and multiply them."),
    "inspect": ("nvfp4.cli.inspect", "List the tensors of a checkpoint and what looks wrong."),
    "plan": ("nvfp4.cli.plan", "Say what a product would run on a card; no GPU is needed."),
    "quantize": ("nvfp4.cli.quantize", "Quantise the weights of a checkpoint."),
    "tune": ("nvfp4.cli.tune", "Measure divisions of products on the present GPU."),
    "verify": ("nvfp4.cli.verify", "Compare a quantised checkpoint with its original."),
}


class Program(click.Group):
    """A group whose members are imported by name, and whose errors are one line and exit code 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all subcommands."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a subcommand, None where there is no such name."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands from the table above, importing none."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])

    def main(self, *args: Any, **options: Any) -> Any:
        """Run and exit: 0, 1 for a failed check, 2 for a mistake, 130 if interrupted."""
        prog_name = options.setdefault("prog_name", "nvfp4") or "nvfp4"
        options["standalone_mode"] = False  # click raises, and the lines below say it
        try:
            code = super().main(*args, **options)
        except click.ClickException as error:
            _fail(_command_path(error, prog_name), error.format_message())
        except (ToolchainError, UnsupportedError) as error:
            _fail(prog_name, str(error))
        except click.Abort:
            click.echo(f"{prog_name}: interrupted", err=True)
            sys.exit(130)
        except OSError as error:
            if error.errno != errno.EPIPE:  # the reader of our output has left: nothing to say
                raise
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def _command_path(error: click.ClickException, default: str) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else default


def _fail(who: str, message: str) -> NoReturn:
    click.echo(f"{who}: {' '.join(message.split())}", err=True)
    sys.exit(2)


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from .. import __version__

        click.echo(f"nvfp4 {__version__}")
        ctx.exit()


@click.command(
    cls=Program,
    name="nvfp4",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version and stop.",
)
@click.pass_context
def program(ctx: click.Context) -> None:
    """Exact NVFP4, MXFP4 and MXFP8: quantisation and matrix products."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> None:
    """Entry point of the console script."""
    program.main()
