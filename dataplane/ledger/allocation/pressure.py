"""How full units and budgets are: the most that was ever used, and word of it when they fill up."""

from __future__ import annotations

from dataplane.ledger.allocation.budgets import limit_of
from dataplane.ledger.commands import Notice
from dataplane.ledger.state.extents import Account
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit


class Pressure:
    """What is `pressed` uses the high watermark's part of what new rows may take, or did and has not come down to the
    low one's since. Of partitions, those with a budget only."""

    def __init__(self, state: State) -> None:
        self.state = state

    def look(self) -> None:
        """After every input; does nothing unless bytes were taken or came back, and looks only at the partitions whose
        they are."""
        state = self.state
        moved, state.extents.moved = state.extents.moved, set()
        if not moved:
            return
        for unit in state.units.values():
            unit.peak_bytes = max(unit.peak_bytes, unit.used_bytes)
            self._judge(unit, unit.used_bytes, unit.limit(update=False))
        for partition in [state.budgeted[number] for number in sorted(moved) if number in state.budgeted]:
            limit = limit_of(state, partition, update=False)
            self._judge(partition, partition.account.used_bytes, limit or 0)

    def _judge(self, who: Unit | Partition, used: int, limit: int) -> None:
        gauge: Unit | Account = who.account if isinstance(who, Partition) else who
        low, high = self.state.watermarks
        pressed = used > low * limit if gauge.pressed else used >= high * limit > 0
        if pressed != gauge.pressed:
            gauge.pressed = pressed
            self.state.out.append(Notice(text=_text(who, used, limit), warning=pressed))


def _text(who: Unit | Partition, used: int, limit: int) -> str:
    if isinstance(who, Partition):
        name, what = f"partition {who.name!r}", "of its budget "
    else:
        name, what = f"storage unit {who.number} ({who.offer.name})", ""
    share, beyond = min(used / max(limit, 1), 1.0), max(used - limit, 0)
    taken = f"all {limit:,}" if beyond else f"{used:,} of the {limit:,}"
    more = f", and {beyond:,} more" if beyond else ""
    return f"{name} is {100 * share:.0f}% full: {taken} bytes {what}for new rows are used{more}"
