"""Assembles all commands and converts their errors to exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from dataplane.cli.changes import checkpoint, clear, drain, drop, restore
from dataplane.cli.doctor import doctor
from dataplane.cli.flags import typer_command
from dataplane.cli.inspection import ls, show, status, why
from dataplane.cli.output import print_notice
from dataplane.cli.serve import serve, unit
from dataplane.cli.top import top
from dataplane.errors import DataPlaneError

NAME = "tq"
DONE = 0
REFUSED = 1
WRONG_ARGUMENTS = 2

app = typer.Typer(
    name=NAME,
    help="The data plane for RL post-training: run a service, inspect, change, save and check it.",
    epilog=f"Exit codes: {DONE} success, {REFUSED} failure (the message says why), {WRONG_ARGUMENTS} wrong arguments.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

_PANELS: dict[str, list[Callable[..., int]]] = {
    "Run a service": [serve, unit],
    "Look inside": [status, top, ls, show, why],
    "Change and save": [clear, checkpoint, restore, drain, drop],
    "Check": [doctor],
}
for _panel, _functions in _PANELS.items():
    for _function in _functions:
        app.command(rich_help_panel=_panel)(typer_command(_function))


def _print_version(requested: bool) -> None:
    if requested:
        print(f"{NAME} {version('rl-dataplane')}")
        raise typer.Exit


@app.callback()
def _global_options(
    version_requested: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass  # the callback of --version does the work


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console script and return its exit code. Errors are printed as one line on standard error."""
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Not standalone: typer raises its errors and returns the exit code, instead of ending the process.
        code = app(command_line or ["--help"], prog_name=NAME, standalone_mode=False)
        sys.stdout.flush()  # so that a closed pipe is an error here
    except typer.TyperException as error:
        return _print_usage_error(error)
    except typer.Abort:
        _print_error("aborted; nothing was changed")
        return REFUSED
    except BrokenPipeError:  # the reader closed the pipe, e.g. `head`
        # Otherwise Python would fail again when it flushes standard output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except (DataPlaneError, ValueError, OSError) as error:
        _print_error(str(error))
        return REFUSED
    if not command_line:  # the help was printed
        _print_error("a command is required; choose one of the above")
        return WRONG_ARGUMENTS
    return int(code or DONE)


def _print_usage_error(error: typer.TyperException) -> int:
    """Print in one line which argument is wrong and where it is documented. Return the exit code."""
    context = getattr(error, "ctx", None)
    command = NAME if context is None else context.command_path
    text = " ".join(error.format_message().split()).rstrip(".")
    print_notice(f"{command}: {text}; see `{command} --help`")
    return error.exit_code


def _print_error(text: str) -> None:
    print_notice(f"{NAME}: {text}")
