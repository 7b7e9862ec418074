"""Storage units as the ledger sees them: an address, and the free space of an arena."""

from __future__ import annotations

from dataplane.ledger.commands import AddUnit, UnitInfo
from dataplane.ledger.space import FreeSpace


class Unit:
    """`ceiling` is how far the arena can be backed: its capacity, or less once growing it has failed.
    `asked` is the backing asked of the unit and not yet reported (0: none). `room` is what new rows or updates may
    still take, backed or not. `awaited`: the controller was restarted, and the unit has not offered itself again; it
    may be there all the time. `checking`: it compares its rows with their checksums. `shrinks` counts the orders to
    give memory back, which it may not have carried out yet (`shrinking`): until then it is not asked to grow, and what
    it says of its backing is from before."""

    def __init__(self, number: int, offer: AddUnit, reserve_fraction: float) -> None:
        self.number = number
        self.reserve_fraction = reserve_fraction
        self.space = FreeSpace(offer.capacity_bytes)
        self.space.back(offer.backed_bytes)
        self.ceiling = self.space.capacity_bytes
        self.asked = 0
        self.shrinks = offer.shrinks
        self.shrinking = False
        self.connected = True
        self.awaited = False
        self.checking = False
        self.offer = offer

    @property
    def epoch(self) -> int:
        return self.offer.epoch

    @property
    def host(self) -> str:
        return self.offer.host

    @property
    def used_bytes(self) -> int:
        return self.space.backed_bytes - self.space.free_bytes

    def limit(self, *, update: bool) -> int:
        """Bytes that may be in use after a put of new rows, or an update."""
        return self.ceiling if update else self.ceiling - int(self.ceiling * self.reserve_fraction)

    def room(self, *, update: bool) -> int:
        return self.limit(update=update) - self.used_bytes

    def info(self) -> UnitInfo:
        return UnitInfo(
            unit=self.number,
            name=self.offer.name,
            host=self.offer.host,
            epoch=self.offer.epoch,
            endpoints=self.offer.endpoints,
            arena_path=self.offer.arena_path,
            capacity_bytes=self.offer.capacity_bytes,
            forced=self.offer.forced,
            curve_key=self.offer.curve_key,
        )

    def back(self, backed_bytes: int, *, failed: bool) -> None:
        """The unit reports its backing."""
        self.asked = 0
        self.space.back(backed_bytes)
        if failed:
            self.ceiling = self.space.backed_bytes
        else:
            self.ceiling = max(self.ceiling, self.space.backed_bytes)
