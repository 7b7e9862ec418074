"""Return memory above the highest used byte to the machine.

The ledger takes the free bytes there out of use before it orders the unit to release them, and numbers the orders.
A unit's report of its backing counts only once it has carried out the last order. A unit that was lost in the
meantime states in its offer which orders it carried out, and receives the last one again.
"""

from __future__ import annotations

import msgspec

from dataplane.errors import InvalidRequestError
from dataplane.ledger.commands import Shrink, ShrinkArena, Shrunk, Shrunken, UnitShrunk
from dataplane.ledger.state.sessions import ParkedShrink, Session
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit

PAGE_BYTES = 4096


class Shrinks:
    """Executes `Shrink` commands and sends the orders to the units. A parked `Shrink` has the results so far, by unit,
    in `found`, and waits for the last order of each unit in `waits_for`. `Unit` explains its counters and flags
    `shrinks`, `shrinking` and `asked`."""

    def __init__(self, state: State) -> None:
        self.state = state

    def shrink(self, session: Session, number: int, command: Shrink) -> Shrunken | None:
        """Order every connected unit to release the free bytes at the end of its arena. Return the result, or None if
        orders are pending: the call is then parked until they have been carried out, or until its timeout."""
        if not command.timeout_s >= 0:  # this form also rejects NaN
            raise InvalidRequestError(f"timeout_s={command.timeout_s}: must not be negative")
        parked = ParkedShrink(session, number, self.state.now, command.timeout_s)
        for unit in self.state.units.values():
            result = UnitShrunk(unit=unit.number, name=unit.offer.name, given_bytes=0, backed_bytes=0)  # see `_result`
            if not unit.connected:
                parked.found[unit.number] = msgspec.structs.replace(result, error="it is not connected")
                continue
            given = self._order_release(unit)
            parked.found[unit.number] = msgspec.structs.replace(result, given_bytes=given)
            if unit.shrinking:  # an order is pending: this one, or that of an earlier call
                parked.waits_for[unit.number] = unit.shrinks
        if not parked.waits_for:
            return self._result(parked)
        self.state.park(parked)
        self.state.shrinkers[parked.key] = parked
        return None

    def _order_release(self, unit: Unit) -> int:
        """Take whole free pages above the highest used byte out of use, and order the unit to release them. Return
        their bytes; 0 if there are none, and then no order is sent."""
        top = -(-unit.space.highest_used_bytes // PAGE_BYTES) * PAGE_BYTES
        given = unit.space.unback(top)
        if given:
            unit.shrinks += 1
            unit.shrinking, unit.asked = True, 0  # 0: the unit discards earlier orders to grow
            self._send_order(unit)
        return given

    def _send_order(self, unit: Unit) -> None:
        unit.ordered_at = self.state.now
        self.state.out.append(ShrinkArena(unit=unit.number, number=unit.shrinks, backed_bytes=unit.space.backed_bytes))

    def handle_offer(self, unit: Unit, shrinks: int) -> bool:
        """Handle the offer of a unit that comes back after it carried out the first `shrinks` orders. Return whether
        the backing that it reports is current; if not, the last order must be sent again (`order_again`)."""
        unit.shrinking = shrinks < unit.shrinks
        unit.shrinks = max(shrinks, unit.shrinks)  # greater if the ledger lost its last orders
        return not unit.shrinking

    def order_again(self, unit: Unit) -> None:
        if unit.shrinking:
            self._send_order(unit)

    def shrunk(self, item: Shrunk) -> None:
        """Handle a unit's report that it carried out an order to shrink, or failed to. Calls that wait for no other
        order end."""
        unit = self.state.units.get(item.unit)
        if unit is None:
            return
        if item.number == unit.shrinks and unit.shrinking:  # the last order, and its first report
            unit.shrinking = False
            unit.space.back(item.backed_bytes)  # more than was ordered, if the memory was not returned
            self.state.extents.freed = True
        self._end_waits(unit.number, item.number, error=item.error or "")

    def unit_gone(self, unit: int) -> None:
        """Handle the loss or removal of a unit: no call waits for it any longer."""
        self._end_waits(unit, number=None, error="its connection to the controller was lost")

    def _end_waits(self, unit: int, number: int | None, error: str) -> None:
        """End the wait of parked calls for the unit's orders up to `number` (None: for all its orders). error: why the
        orders were not carried out, or ""."""
        for parked in list(self.state.shrinkers.values()):
            if unit in parked.waits_for and (number is None or number >= parked.waits_for[unit]):
                del parked.waits_for[unit]
                if error:
                    parked.found[unit] = msgspec.structs.replace(parked.found[unit], given_bytes=0, error=error)
                if not parked.waits_for:
                    self.state.unpark(parked, self._result(parked))

    def timeout_result(self, parked: ParkedShrink) -> Shrunken:
        """Return the result at the deadline, with an error for each unit that has not answered."""
        for unit in parked.waits_for:
            error = f"no answer within {self.state.now - parked.since:.1f} s"
            parked.found[unit] = msgspec.structs.replace(parked.found[unit], given_bytes=0, error=error)
        return self._result(parked)

    def _result(self, parked: ParkedShrink) -> Shrunken:
        """Return the results of all units, with the current backing of each (0: the unit was removed)."""
        units = self.state.units
        results = [
            msgspec.structs.replace(result, backed_bytes=units[number].space.backed_bytes if number in units else 0)
            for number, result in parked.found.items()
        ]
        return Shrunken(units=tuple(results))
