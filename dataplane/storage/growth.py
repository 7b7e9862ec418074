"""The memory behind a unit's arena: growing it as ordered, a step at a time, and giving it back. No sockets."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from dataplane.core.failpoints import hit
from dataplane.errors import ArenaSpaceError
from dataplane.ledger.commands import GrowArena, Grown, Input, ShrinkArena, Shrunk
from dataplane.storage.arena import Arena

log = logging.getLogger(__name__)


class Growth:
    """One thread only: the unit's. `report` gets the outcomes."""

    def __init__(self, arena: Arena, report: Callable[[Input], None]) -> None:
        self._arena = arena
        self._report = report
        self._orders: deque[tuple[GrowArena, Iterator[int]]] = deque()
        self._shrinks = 0
        self._told = False

    @property
    def in_flight(self) -> bool:
        """Whether there is a step to make."""
        return bool(self._orders)

    def begin(self, order: GrowArena) -> None:
        """Grow, after what was ordered before."""
        self._orders.append((order, self._arena.grow_steps(order.backed_bytes)))

    def step(self) -> None:
        """A little more memory. Growing that fails is tried again and again: the log is told of the first time only,
        until it works."""
        order, steps = self._orders[0]
        error = None
        try:
            if next(steps, None) is not None:
                return
        except ArenaSpaceError as caught:
            error = str(caught)
            if not self._told:
                log.warning("unit %d cannot grow to %d bytes: %s", order.unit, order.backed_bytes, error)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            if not self._told:
                log.exception("unit %d cannot grow to %d bytes", order.unit, order.backed_bytes)
        self._told = error is not None
        self._orders.popleft()
        hit("unit.before_grown")
        backed = self._arena.backed_bytes
        self._report(Grown(unit=order.unit, backed_bytes=backed, error=error, shrinks=self._shrinks))

    def shrink(self, order: ShrinkArena) -> None:
        """Give memory back. Growth that was ordered before is not wanted any more."""
        error = None
        if order.number > self._shrinks:
            self._orders.clear()
            self._shrinks = order.number
            try:
                self._arena.punch(order.backed_bytes)
            except OSError as caught:
                error = str(caught)
                log.warning("unit %d cannot give memory back: %s", order.unit, error)
        backed = self._arena.backed_bytes
        self._report(Shrunk(unit=order.unit, number=order.number, backed_bytes=backed, error=error))
