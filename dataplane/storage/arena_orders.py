"""Orders to a unit for its arena: growing it, returning memory to the system, copying within it. No sockets."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.ledger.commands import CompactArena, GrowArena, Input, ShrinkArena
from dataplane.storage.arena import Arena
from dataplane.storage.compaction import Copies
from dataplane.storage.growth import Growth

ArenaOrder = GrowArena | ShrinkArena | CompactArena


class ArenaOrders:
    """Execute arena orders; long ones run in steps. `report` receives the outcomes. Not thread-safe: used by the unit's
    thread only."""

    def __init__(self, arena: Arena, report: Callable[[Input], None]) -> None:
        self._growth = Growth(arena, report)
        self._copies = Copies(arena, report)

    @property
    def in_flight(self) -> bool:
        """Whether an order needs further steps."""
        return self._growth.in_flight or self._copies.in_flight

    def begin(self, order: ArenaOrder) -> None:
        """Execute an order, or start one that runs in steps."""
        match order:
            case GrowArena():
                self._growth.begin(order)
            case ShrinkArena():
                self._growth.shrink(order)
            case CompactArena():
                self._copies.begin(order)

    def step(self) -> None:
        """Run one step of every order in progress."""
        if self._growth.in_flight:
            self._growth.step()
        if self._copies.in_flight:
            self._copies.step()
