"""Storage units in the ledger: their endpoints and the free space of their arenas."""

from __future__ import annotations

from dataplane.ledger.commands import AddUnit, UnitInfo
from dataplane.ledger.state.free_space import FreeSpace

LATE_S = 5.0
"""Time after which a pending order to grow an arena is reported as a problem."""


class Unit:
    """State of one storage unit.

    `draining`: the unit accepts no new rows, and its rows are moved to other units. `ceiling`:
    maximum backing of the arena: its capacity, or less after failed growth. `asked`: ordered
    backing that is not reported yet (0: none). `awaited`: the controller was restarted and the unit
    has not registered again; it may still be running. `problem`: why the last growth failed; growth
    is retried at `retry_at` at the earliest. `ordered_at`: time of the pending order (`asked`).
    `peak_bytes`: maximum of the used bytes. `pressed`: the use reached the high watermark (see
    `Pressure`). `offer`: the unit's last offer."""

    draining = False
    ordered_at = 0.0

    def __init__(self, unit_id: int, offer: AddUnit, reserve_fraction: float) -> None:
        self.unit_id = unit_id
        self.reserve_fraction = reserve_fraction
        self.space = FreeSpace(offer.capacity_bytes)
        self.space.back(offer.backed_bytes)
        self.ceiling = self.space.capacity_bytes
        self.asked = 0
        self.problem = ""
        self.retry_at = 0.0
        self.peak_bytes = 0
        self.pressed = False
        self.connected = True
        self.awaited = False
        self.offer = offer

    @property
    def epoch(self) -> int:
        return self.offer.epoch

    @property
    def host(self) -> str:
        return self.offer.host

    @property
    def open(self) -> bool:
        """Whether puts may get space in this unit now."""
        return self.connected and not self.draining

    def growth_problem(self, now: float) -> str:
        """Return why the arena cannot grow now, as text for messages; "" if no reason is known."""
        late_s = now - self.ordered_at
        if self.connected and self.asked and late_s >= LATE_S:
            return f"it has not answered for {late_s:.0f} s; its process may be stopped, or its machine too busy"
        return self.problem

    @property
    def used_bytes(self) -> int:
        return self.space.backed_bytes - self.space.free_bytes

    def limit(self, *, update: bool) -> int:
        """Return the maximum used bytes after a put of new rows, or after an update."""
        return self._without_reserve(self.ceiling, update=update)

    def limit_at_capacity(self, *, update: bool) -> int:
        """Like `limit`, but assuming that the arena can grow to its capacity."""
        return self._without_reserve(self.space.capacity_bytes, update=update)

    def space_requested(self, *, update: bool) -> int:
        """Like `available_bytes`, but assuming that the arena grows as ordered."""
        return self._without_reserve(max(self.ceiling, self.asked), update=update) - self.used_bytes

    def _without_reserve(self, nbytes: int, *, update: bool) -> int:
        """Return the part of `nbytes` that a put may use: all for an update; new rows leave the reserve to updates."""
        return nbytes if update else nbytes - int(nbytes * self.reserve_fraction)

    def available_bytes(self, *, update: bool) -> int:
        """Return the bytes, backed or not, that new rows or an update may still use."""
        return self.limit(update=update) - self.used_bytes

    def info(self) -> UnitInfo:
        """Return the facts that clients and other processes get about the unit."""
        return UnitInfo(
            unit=self.unit_id,
            name=self.offer.name,
            host=self.offer.host,
            epoch=self.offer.epoch,
            endpoints=self.offer.endpoints,
            arena_path=self.offer.arena_path,
            capacity_bytes=self.offer.capacity_bytes,
            curve_key=self.offer.curve_key,
        )

    def record_backing(self, backed_bytes: int, problem: str = "") -> None:
        """Record the backing that the unit reported, which ends the pending order to grow, and the problem if it could
        not grow as ordered. After failed growth, puts can use only what is backed."""
        self.asked = 0
        self.space.back(backed_bytes)
        self.problem = problem
        self.ceiling = self.space.backed_bytes if problem else self.space.capacity_bytes
