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
    def under_way(self) -> bool:
        """Whether there is a step to make."""
        return self._growth.under_way or self._copies.under_way

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
        if self._growth.under_way:
            self._growth.step()
        if self._copies.under_way:
            self._copies.step()
