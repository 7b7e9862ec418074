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
    arena_dir: Annotated[str, typer.Option(metavar="DIR", help="Local directory for arenas.")] = "/dev/shm",
    port: Annotated[int, typer.Option(min=0, max=65534, help="Port for a service on this machine (0: any).")] = 0,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Check this machine, the installed packages and, with an address, a running service for problems.

    Prints the finding of each check, and how to fix a problem. Without an address (or TQ_ADDRESS) a small service is
    started here, used and stopped. Exit code 1 if a check fails.
    """
    config = target.config_if_any("doctor", address)
    findings = list(_run_checks(config, arena_dir, port, quiet=json))
    failed = [finding for finding in findings if not finding.ok]
    if json:
        rows = [
            {"what": finding.what, "ok": finding.ok, "found": finding.found, "mend": finding.mend}
            for finding in findings
        ]
        print_json({"wrong": len(failed), "findings": rows})
    elif failed:
        print(f"\n{len(failed)} of {len(findings)} checks failed")
    else:
        print(f"\nall {len(findings)} checks passed")
    return 1 if failed else 0


def _run_checks(config: DataPlaneConfig, arena_dir: str, port: int, *, quiet: bool) -> Iterator[Finding]:
    """Run all checks and print each finding immediately, unless `quiet`."""
    from dataplane.cli.checks.machine import machine
    from dataplane.cli.checks.packages import packages
    from dataplane.cli.checks.trial import trial

    for finding in itertools.chain(machine(arena_dir, port), packages(), trial(config, arena_dir)):
        if not quiet:
            _print_finding(finding)
        yield finding


def _print_finding(finding: Finding) -> None:
    from rich.text import Text

    mark, style = ("ok   ", "green") if finding.ok else ("WRONG", "bold red")
    line = Text.assemble((mark, style), f"  {shown(finding.what)}: {shown(finding.found)}")
    if finding.mend:
        line.append(f"\n       fix: {shown(finding.mend)}", style="yellow")
    console().print(line, soft_wrap=True)
