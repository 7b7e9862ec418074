"""`tq drop`."""

from __future__ import annotations

from typing import Annotated

import typer

from dataplane.cli.completion import units
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import readable, shown
from dataplane.cli.output import print_either
from dataplane.cli.session import ask, session, unit_stats


def drop(
    *,
    unit: Annotated[
        str, typer.Argument(metavar="UNIT", help="Number or name of the unit (see `tq status`).", autocompletion=units)
    ],
    force: Annotated[bool, typer.Option("--force", help="Drop it even if it has live rows: they are cleared.")] = False,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Remove a storage unit from a service permanently, so that the unit's process can exit.

    Exit code 1 if the unit has live rows and --force is not given, or if the unit does not exist.
    """
    from dataplane.ledger import commands as c

    with session(target.config("drop")) as channel:
        stats = unit_stats(channel, unit)
        ask(channel, c.Forget(unit=stats.unit, force=force))
    facts = {"unit": stats.unit, "name": stats.name, "live_bytes": stats.live_bytes}
    lost = f", and {readable(stats.live_bytes)} of live rows with it" if stats.live_bytes else ""
    print_either(facts, f"dropped storage unit {stats.unit} {shown(stats.name)}{lost}", json=json)
    return 0
