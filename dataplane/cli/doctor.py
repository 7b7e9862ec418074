"""`tq doctor`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated

import typer

from dataplane.cli.checks import Finding
from dataplane.cli.flags import Address, Json, TargetFlags
from dataplane.cli.formatting import shown
from dataplane.cli.output import console, print_json
from dataplane.config import DataPlaneConfig


def doctor(
    *,
    address: Address = None,
    arena_dir: Annotated[
        str, typer.Option(metavar="DIR", help="The local directory that arenas are to lie in.")
    ] = "/dev/shm",
    port: Annotated[int, typer.Option(min=0, max=65534, help="The port that a service is to have here (0: any).")] = 0,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Look for what is wrong with this machine, what is installed on it and, with an address, with that service.

    Says of each thing what was found, and how to mend what is wrong. Without an address (TQ_ADDRESS counts) a small
    service is started here, used and ended. Exit code 1 if something is wrong.
    """
    config = target.config_if_any("doctor", address)
    found = list(_look(config, arena_dir, port, quiet=json))
    wrong = [finding for finding in found if not finding.ok]
    if json:
        rows = [{"what": each.what, "ok": each.ok, "found": each.found, "mend": each.mend} for each in found]
        print_json({"wrong": len(wrong), "findings": rows})
    elif wrong:
        print(f"\n{len(wrong)} of {len(found)} things are wrong")
    else:
        print(f"\nall {len(found)} are well")
    return 1 if wrong else 0


def _look(config: DataPlaneConfig, arena_dir: str, port: int, *, quiet: bool) -> Iterator[Finding]:
    """Everything, printed as it is found."""
    from dataplane.cli.checks.machine import machine
    from dataplane.cli.checks.packages import packages
    from dataplane.cli.checks.trial import trial

    for finding in itertools.chain(machine(arena_dir, port), packages(), trial(config, arena_dir)):
        if not quiet:
            _print(finding)
        yield finding


def _print(finding: Finding) -> None:
    from rich.text import Text

    mark, style = ("ok   ", "green") if finding.ok else ("WRONG", "bold red")
    line = Text.assemble((mark, style), f"  {shown(finding.what)}: {shown(finding.found)}")
    if finding.mend:
        line.append(f"\n       mend: {shown(finding.mend)}", style="yellow")
    console().print(line, soft_wrap=True)
