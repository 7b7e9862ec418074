"""All verbs under one name, and what becomes of what they raise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from dataplane.cli.bench import bench
from dataplane.cli.checkpoint import checkpoint, restore
from dataplane.cli.clear import clear
from dataplane.cli.doctor import doctor
from dataplane.cli.drain import drain
from dataplane.cli.drop import drop
from dataplane.cli.flags import verb
from dataplane.cli.ls import ls
from dataplane.cli.serve import serve
from dataplane.cli.show import show
from dataplane.cli.shrink import shrink
from dataplane.cli.status import status
from dataplane.cli.top import top
from dataplane.cli.unit import unit
from dataplane.cli.why import why
from dataplane.errors import DataPlaneError

NAME = "tq"
DONE, REFUSED, WRONG_ARGUMENTS = 0, 1, 2

app = typer.Typer(
    name=NAME,
    help="The data plane for RL post-training: run a service, look inside, change, save and measure it.",
    epilog=f"Exit codes: {DONE} done, {REFUSED} refused or not there (the message says why), {WRONG_ARGUMENTS} wrong"
    " arguments.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

_PANELS: dict[str, list[Callable[..., int]]] = {
    "Run a service": [serve, unit],
    "Look inside": [status, top, ls, show, why],
    "Change and save": [clear, checkpoint, restore, shrink, drain, drop],
    "Check and measure": [doctor, bench],
}
for _panel, _verbs in _PANELS.items():
    for _each in _verbs:
        app.command(rich_help_panel=_panel)(verb(_each))


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"{NAME} {version('rl-dataplane')}")
        raise typer.Exit


@app.callback()
def _top(
    shown: Annotated[
        bool,
        typer.Option("--version", metavar="", callback=_say_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script: the exit code, after one line on standard error where it is not 0."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(given or ["--help"], prog_name=NAME, standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:
        return _wrong(error)
    except typer.Abort:
        _complain("given up; nothing was done")
        return REFUSED
    except BrokenPipeError:  # whoever read it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except (DataPlaneError, ValueError, OSError) as error:
        _complain(str(error))
        return REFUSED
    if not given:
        _complain("name one of these commands")
        return WRONG_ARGUMENTS
    return int(code or DONE)


def _wrong(error: typer.TyperException) -> int:
    """What was wrong with the arguments, in one line, and where they are explained."""
    context = getattr(error, "ctx", None)
    command = NAME if context is None else context.command_path
    text = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    print(f"{command}: {text}; see `{command} --help`", file=sys.stderr)
    return error.exit_code


def _complain(text: str) -> None:
    print(f"{NAME}: {text}", file=sys.stderr)
