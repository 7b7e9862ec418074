"""Storage units as the ledger sees them: an address, and the free space of an arena."""

from __future__ import annotations

from dataplane.ledger.commands import AddUnit, UnitInfo
from dataplane.ledger.state.free_space import FreeSpace

LATE_S = 5.0
"""An order to grow or to give memory back that is not carried out for so long is trouble."""


class Unit:
    """`draining`: it gets nothing new, and what is there is to be moved away.
    `ceiling` is how far the arena can be backed: its capacity, or less once growing it has failed.
    `asked` is the backing asked of the unit and not yet reported (0: none). `available_bytes` is what new rows or
    updates may still take, backed or not. `awaited`: the controller was restarted, and the unit has not offered itself
    again; it may be there all the time. `checking`: it compares its rows with their checksums. `shrinks` counts the
    orders to give memory back, which it may not have carried out yet (`shrinking`): until then it is not asked to grow,
    and what it says of its backing is from before. `compactions` counts the orders to compact. `problem` says why
    growing failed last; it is tried again at `retry_at` at the earliest. `ordered_at`: when the order was given that it
    has not answered (`asked` or `shrinking`). `peak_bytes` is the most that was ever used."""

    draining = False
    ordered_at = 0.0

    def __init__(self, number: int, offer: AddUnit, reserve_fraction: float) -> None:
        self.number = number
        self.reserve_fraction = reserve_fraction
        self.space = FreeSpace(offer.capacity_bytes)
        self.space.back(offer.backed_bytes)
        self.ceiling = self.space.capacity_bytes
        self.asked = 0
        self.shrinks = offer.shrinks
        self.shrinking = False
        self.compactions = offer.compactions
        self.problem = ""
        self.retry_at = 0.0
        self.peak_bytes = 0
        self.pressed = False
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
    def open(self) -> bool:
        """Whether puts may get space there now."""
        return self.connected and not self.draining

    def trouble(self, now: float) -> str:
        """Why the arena gets no memory now, "": nothing is known to keep it from that."""
        late_s = now - self.ordered_at
        if self.connected and (self.asked or self.shrinking) and late_s >= LATE_S:
            return f"it has not answered for {late_s:.0f} s; its process may be stopped, or its machine too busy"
        return self.problem

    @property
    def used_bytes(self) -> int:
        return self.space.backed_bytes - self.space.free_bytes

    def limit(self, *, update: bool) -> int:
        """Bytes that may be in use after a put of new rows, or an update."""
        return self._part_of(self.ceiling, update=update)

    def most(self, *, update: bool) -> int:
        """The same, if it can grow as far as it is to."""
        return self._part_of(self.space.capacity_bytes, update=update)

    def space_requested(self, *, update: bool) -> int:
        """`available_bytes`, if it grows as far as it was asked to."""
        return self._part_of(max(self.ceiling, self.asked), update=update) - self.used_bytes

    def _part_of(self, nbytes: int, *, update: bool) -> int:
        return nbytes if update else nbytes - int(nbytes * self.reserve_fraction)

    def available_bytes(self, *, update: bool) -> int:
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
            fsynced=self.offer.fsynced,
            curve_key=self.offer.curve_key,
        )

    def back(self, backed_bytes: int, problem: str = "") -> None:
        """The unit reports its backing, and why it could not be more."""
        self.asked = 0
        self.space.back(backed_bytes)
        self.problem = problem
        self.ceiling = self.space.backed_bytes if problem else self.space.capacity_bytes
