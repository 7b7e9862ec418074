"""Who may be given space, and in which order."""

from __future__ import annotations

from dataplane.ledger.commands import Allocate, Allocated, Preallocate, Preallocated
from tests.ledger.budget_books import EVICTING, wanted_bytes
from tests.ledger.claim_checks import LIMITS
from tests.ledger.claim_model import Name
from tests.ledger.space_checks import SpaceChecks


class ReservationChecks(SpaceChecks):
    """Of the driver: its calls that wait, and the bytes that the input under way gave away."""

    parked: dict[Name, float]
    granted_bytes: int

    def check_turn(self, name: Name, command: Allocate) -> None:
        """First come, first served, within new rows and within updates: those of one partition are, and of those that
        are first in theirs who wait for memory of the units, but for what evictions make. Whoever waits for a piece
        that is large enough is passed by all."""
        evicting = self.model.partitions[command.partition].when_full in EVICTING
        heads: set[str] = set()
        for other in sorted(self.parked, key=lambda parked: self.turns[parked]):
            waiting = self.model.commands[other]
            if isinstance(waiting, Allocate) and not waiting.moving and self.may_be_fragmented(waiting):
                continue
            if isinstance(waiting, Allocate) and command.moving and waiting.update and not waiting.moving:
                assert self.budgets.is_over(self.ledger, waiting), f"{name} was moved before {other}"
            elif isinstance(waiting, Allocate) and command.moving and waiting.moving:
                assert self.turns.get(name, self.turns[other] + 1) < self.turns[other], f"{name} passed {other}"
            elif isinstance(waiting, Allocate) and waiting.update == command.update and not waiting.moving:
                passed = waiting.partition in heads or evicting or self.budgets.is_over(self.ledger, waiting)
                heads.add(waiting.partition)
                mine = self.turns.get(name, self.turns[other] + 1)
                behind = mine > self.turns[other] and (waiting.partition == command.partition or not passed)
                assert not behind, f"{name} was served before {other}"

    def may_be_fragmented(self, waiting: Allocate) -> bool:
        """Whether so many bytes were free, before this input gave some of them away, that the put must have waited for
        a piece that is large enough: it holds up nobody."""
        free = sum(size for unit in self.units for _, size in self.ledger.free_ranges(unit))
        free += self.granted_bytes
        over = not waiting.moving and self.budgets.is_over(self.ledger, waiting)
        return free >= wanted_bytes(waiting) and not over

    def grant(self, name: Name, command: Allocate, result: Allocated) -> None:
        """The placements are free by the model's books."""
        before = {unit: self.in_use(unit) for unit in self.units}
        self.model.allocated(name, command, result)
        self.check_granted(name, before)

    def grant_preallocated(self, name: Name, command: Preallocate, result: Preallocated) -> None:
        """The space is free by the model's books, a small part, and nobody who waits can miss it."""
        before = {unit: self.in_use(unit) for unit in self.units}
        self.model.preallocated(name, command, result)
        self.check_granted(name, before)
        for waiting in [self.model.commands[parked] for parked in self.parked]:
            if isinstance(waiting, Allocate) and (waiting.moving or not self.budgets.is_over(self.ledger, waiting)):
                assert self.may_be_fragmented(waiting), f"{name} was served before {waiting}"
        unit = self.units[command.unit]
        assert command.nbytes * LIMITS.preallocated_part <= unit.capacity
        used = sum(size for at, _, size in self.ledger.held_ranges() if at == unit.id)
        assert used <= unit.capacity / 2
