"""`tq drop`."""

from __future__ import annotations

from typing import Annotated

import typer

from dataplane.cli.completion import units
from dataplane.cli.flags import Json, TargetFlags
from dataplane.cli.formatting import readable, shown
from dataplane.cli.output import print_json
from dataplane.cli.session import ask, session, unit_stats


def drop(
    *,
    unit: Annotated[
        str, typer.Argument(metavar="UNIT", help="Its number or its name (`tq status`).", autocompletion=units)
    ],
    force: Annotated[bool, typer.Option("--force", help="Also with rows that live on it: these are cleared.")] = False,
    target: TargetFlags,
    json: Json = False,
) -> int:
    """Let a service forget one of its storage units for good, so that the unit's process can end.

    Exit code 1 if rows live on it and --force is not given, or if there is no such unit.
    """
    from dataplane.ledger import commands as c

    with session(target.config("drop")) as channel:
        found = unit_stats(channel, unit)
        ask(channel, c.Forget(unit=found.unit, force=force))
    if json:
        print_json({"unit": found.unit, "name": found.name, "live_bytes": found.live_bytes})
    else:
        lost = f", and {readable(found.live_bytes)} of live rows with it" if found.live_bytes else ""
        print(f"dropped storage unit {found.unit} {shown(found.name)}{lost}")
    return 0
