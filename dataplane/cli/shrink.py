"""`tq shrink`."""

from __future__ import annotations

from dataplane.cli.flags import Address, Json, TargetFlags
from dataplane.cli.formatting import readable, shown
from dataplane.cli.output import print_json
from dataplane.cli.session import ask, session


def shrink(*, address: Address = None, target: TargetFlags, json: Json = False) -> int:
    """Return the unused memory at the end of each arena to the machine.

    Exit code 1 if a storage unit failed to do so; the other units still return theirs.
    """
    from dataplane.ledger import commands as c

    with session(target.config("shrink", address)) as channel:
        result = ask(channel, c.Shrink())
    if json:
        print_json(result)
    else:
        for unit in result.units:
            problem = f" ({unit.error})" if unit.error else ""
            returned, held = readable(unit.given_bytes), readable(unit.backed_bytes)
            print(f"unit {unit.unit} {shown(unit.name)}: {returned} given back, {held} held{problem}")
    return 1 if any(unit.error for unit in result.units) else 0
