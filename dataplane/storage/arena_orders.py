"""Orders to a unit that concern its arena: growing it, giving memory back, copying within it. No sockets."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.ledger.commands import CompactArena, GrowArena, Input, ShrinkArena
from dataplane.storage.arena import Arena
from dataplane.storage.compaction import Copies
from dataplane.storage.growth import Growth

ArenaOrder = GrowArena | ShrinkArena | CompactArena


class ArenaOrders:
    """One thread only: the unit's. `report` gets the outcomes. What takes long is done a step at a time."""

    def __init__(self, arena: Arena, report: Callable[[Input], None]) -> None:
        self._growth = Growth(arena, report)
        self._copies = Copies(arena, report)

    @property
    def in_flight(self) -> bool:
        """Whether there is a step to make."""
        return self._growth.in_flight or self._copies.in_flight

    def begin(self, order: ArenaOrder) -> None:
        """Carry it out, or begin to."""
        match order:
            case GrowArena():
                self._growth.begin(order)
            case ShrinkArena():
                self._growth.shrink(order)
            case CompactArena():
                self._copies.begin(order)

    def step(self) -> None:
        """A little more of everything."""
        if self._growth.in_flight:
            self._growth.step()
        if self._copies.in_flight:
            self._copies.step()
