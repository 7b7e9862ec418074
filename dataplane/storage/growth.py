"""The memory behind a unit's arena: growing it as ordered, in steps. No sockets."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from dataplane.core.failpoints import hit
from dataplane.errors import ArenaSpaceError
from dataplane.ledger.commands import GrowArena, Grown, Input
from dataplane.storage.arena import Arena

log = logging.getLogger(__name__)


class Growth:
    """Grow the arena. `report` receives the outcomes. Not thread-safe: used by the unit's thread only."""

    def __init__(self, arena: Arena, report: Callable[[Input], None]) -> None:
        self._arena = arena
        self._report = report
        self._orders: deque[tuple[GrowArena, Iterator[int]]] = deque()  # with their remaining steps
        self._failure_logged = False  # since the last growth that succeeded

    @property
    def in_flight(self) -> bool:
        """Whether growth needs further steps."""
        return bool(self._orders)

    def begin(self, order: GrowArena) -> None:
        """Queue growth after the earlier orders."""
        self._orders.append((order, self._arena.grow_steps(order.backed_bytes)))

    def step(self) -> None:
        """Add one step of memory. The controller repeats growth that fails, so only the first of consecutive failures
        is logged."""
        order, steps = self._orders[0]
        error = None
        try:
            if next(steps, None) is not None:  # further steps may follow
                return
        except ArenaSpaceError as caught:
            error = str(caught)
            if not self._failure_logged:
                log.warning("Storage unit %d cannot grow to %d bytes: %s", order.unit, order.backed_bytes, error)
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
            if not self._failure_logged:
                log.exception("Storage unit %d cannot grow to %d bytes", order.unit, order.backed_bytes)
        self._failure_logged = error is not None
        self._orders.popleft()
        hit("unit.before_grown")
        backed = self._arena.backed_bytes
        self._report(Grown(unit=order.unit, backed_bytes=backed, error=error))
