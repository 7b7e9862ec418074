"""What bytes may be given to whom, and that none is lost or given twice."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis.stateful import invariant

from dataplane.core.types import GRANULE_BYTES
from dataplane.ledger import Ledger
from dataplane.ledger.commands import Allocate, Allocated, Answer, Output
from tests.ledger.budget_books import BudgetBooks, wanted_bytes
from tests.ledger.claim_checks import ClaimChecks
from tests.ledger.claim_model import Name

RESERVE = 0.15


@dataclass
class Unit:
    """A storage unit: what it fences, and the orders it has not yet carried out."""

    id: int
    host: str
    capacity: int
    backed: int
    fenced: set[int] = field(default_factory=set)
    orders: deque[Output] = field(default_factory=deque)


class SpaceChecks(ClaimChecks):
    """Of the driver: its units by number, and the order of its calls that waited."""

    units: dict[int, Unit]
    turns: dict[Name, int]
    budgets: BudgetBooks

    def check_granted(self, name: Name, before: dict[int, dict[int, Any]]) -> None:
        for unit, offset, nbytes in self.model.reserved[name]:
            assert unit not in self.model.draining or not nbytes, f"{name} was given space of a unit that is drained"
            assert offset % GRANULE_BYTES == 0
            assert 0 <= offset <= offset + nbytes <= self.units[unit].backed, (unit, offset, nbytes)
            for granule in granules(offset, nbytes):
                assert granule not in before[unit], f"{name} was given bytes of {before[unit][granule]}"

    def check_reserve(self, answer: Answer) -> None:
        """New rows leave the reserve of each unit they went to for updates."""
        if isinstance(answer.result, Allocated):
            for number in {placement.unit for placement in answer.result.placements}:
                used = sum(size for unit, _, size in self.ledger.held_ranges() if unit == number)
                capacity = self.units[number].capacity
                mine = self.model.reserved[answer.session, answer.number]
                wanted = sum(size for unit, _, size in mine if unit == number)
                assert not wanted or used <= capacity - int(capacity * RESERVE)

    # --- invariants ------------------------------------------------------------------------------------------

    @invariant()
    def accounts_are_right(self) -> None:
        self.budgets.check_accounts(self.ledger)
        waiting = any(isinstance(self.model.commands[name], Allocate) for name in self.parked)
        silent = self.budgets.unsaid and not self.budgets.excused
        assert waiting or not silent, f"evicted silently: {self.budgets.unsaid}"

    @invariant()
    def no_put_waits_for_space_that_is_there(self) -> None:
        """The first in line for memory of the units has none that is large enough; who waits for his budget does not
        stand in line."""
        waiting = [(name, self.model.commands[name]) for name in self.parked]
        all_puts = [(name, put) for name, put in waiting if isinstance(put, Allocate) and not put.moving]
        puts = [(name, put) for name, put in all_puts if self.clients[name[0]].speaks]
        for name, put in puts:
            before = [
                other
                for earlier, other in all_puts
                if self.turns[earlier] < self.turns[name] and other.update == put.update
            ]
            passed = all(o.partition != put.partition and self.budgets.is_over(self.ledger, o) for o in before)
            if passed and not self.budgets.is_over(self.ledger, put):
                assert self.largest_space(update=put.update) < wanted_bytes(put), f"{name} waits: {put}"

    @invariant()
    def no_put_waits_only_because_nobody_looked_again(self) -> None:
        if any(isinstance(self.model.commands[name], Allocate) for name in self.parked):
            again = Ledger.restored(self.ledger.image())
            again._reservations.serve_waiting()
            served = [output for output in again._state.out if isinstance(output, Answer)]
            assert not served, f"these could have been answered before: {served}"

    def check_all(self) -> None:
        """Every invariant about space."""
        self.accounts_are_right()
        self.space_is_sound()
        self.no_put_waits_for_space_that_is_there()
        self.no_put_waits_only_because_nobody_looked_again()

    def largest_space(self, *, update: bool) -> int:
        """Bytes that surely can be had in one piece now, once no arena grows any more."""
        units = [unit for unit in self.ledger._state.units.values() if unit.number not in self.model.draining]
        if any(unit.space.backed_bytes < unit.ceiling for unit in units):
            return -1
        return max((min(unit.space.largest_bytes, unit.available_bytes(update=update)) for unit in units), default=-1)

    def in_use(self, unit: int) -> dict[int, Any]:
        """Granules in use by the model's books, and by whom; no two values share bytes, no two extents a granule."""
        cells = {
            place
            for partition in self.model.partitions.values()
            for sample in partition.samples.values()
            for place in sample.cells.values()
        }
        for pinned in self.model.pins.values():
            cells |= pinned
        spans = sorted((p.offset, p.offset + p.nbytes, p.value) for p in cells if p.unit == unit and p.nbytes)
        used: dict[int, Any] = {}
        end = 0
        for start, stop, value in spans:
            assert start >= end, f"{value} overlaps what ends at {end}"
            end = stop
            for granule in granules(start, stop - start):
                assert used.setdefault(granule, value)[:2] == value[:2], (
                    f"{value} shares a granule with {used[granule]}"
                )
        for name, held in self.model.reserved.items():
            for at, offset, nbytes in held:
                if at == unit:
                    for granule in granules(offset, nbytes):
                        mine = used.get(granule, (name,))[0] == name
                        assert mine, f"{name} may write to granule {granule} of {used[granule]}"
                        used[granule] = (name, "reserved", granule)
        return used

    @invariant()
    def space_is_sound(self) -> None:
        for unit in self.units.values():
            free = self.ledger.free_ranges(unit.id)
            held = [(start, size) for at, start, size in self.ledger.held_ranges() if at == unit.id]
            at = 0
            for start, size in sorted([*free, *held]):
                assert start == at, f"unit {unit.id}: a gap or an overlap at {at}, next {start}"
                at = start + size
            assert at == unit.backed, "free + used is not what is backed"
            free_granules = {g for start, size in free for g in granules(start, size)}
            used = self.in_use(unit.id)
            assert not free_granules & set(used), f"in use and free: {[used[g] for g in free_granules & set(used)]}"
            assert all(g < unit.backed // GRANULE_BYTES for g in used)


def granules(offset: int, nbytes: int) -> range:
    return range(offset // GRANULE_BYTES, -(-(offset + nbytes) // GRANULE_BYTES))
