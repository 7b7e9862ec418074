"""What is compared with the model after every step: claims, space and reservations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis.stateful import RuleBasedStateMachine, invariant

from dataplane.core.types import GRANULE_BYTES
from dataplane.ledger import Ledger
from dataplane.ledger.commands import Allocate, Allocated, Answer, Claim, Claimed, Output, Preallocate
from tests.ledger.budget_books import EVICTING, BudgetBooks, wanted_bytes
from tests.ledger.cell_books import check_cells
from tests.ledger.claim_model import LIMITS, Name
from tests.ledger.model import Model
from tests.ledger.oracle import overlooked
from tests.ledger.values import granules

# --- What claims must be answered, and which of the four each sample is for each task.


@dataclass
class Client:
    """A session as its process sees it. `below` is the watermark it sends next, `has` the answers it confirms then."""

    id: int
    host: str
    next: int = 1
    below: int = 1
    has: tuple[int, ...] = ()
    alive: bool = True
    over: bool = False
    suspect: bool = False
    said_bye: bool = False
    attached: set[int] = field(default_factory=set)
    heard: float = 0.0
    unread: set[int] = field(default_factory=set)

    @property
    def speaks(self) -> bool:
        return self.alive and not self.over and not self.said_bye


class ClaimChecks(RuleBasedStateMachine):
    """Of the driver: `parked` are the calls that wait, with their deadlines."""

    ledger: Ledger
    model: Model
    parked: dict[Name, float]
    clients: dict[int, Client]

    def check_claim(self, name: Name, command: Claim, result: Claimed) -> None:
        if command.step is not None:
            self.check_share(name, command, result)
        else:
            expected = self.model.expected_claim(command)
            assert expected is not None, f"{command} was served {result.ids} too early"
            assert result.ids == tuple(sample.id for unit in expected for sample in unit)

    def check_share(self, name: Name, command: Claim, result: Claimed) -> None:
        """The rank's own part of the step's selection, all of it that lives."""
        model = self.model
        partition = model.partitions[command.partition]
        assert command.step is not None
        fixed = partition.selections.get((command.task, command.step))
        if fixed is None:
            units = model.expected_claim(command)
            fixed = None if units is None else model.fix(command, units, LIMITS.steps)
        if fixed is None:
            assert not result.ids
            assert not command.blocking
            return
        assert list(result.ids) == [sample.id for sample in model.take_share(name, command, fixed)]

    @invariant()
    def no_claim_waits_that_the_model_would_serve(self) -> None:
        for name in self.parked:
            command = self.model.commands[name]
            if not isinstance(command, Claim):
                continue
            partition = self.model.partitions[command.partition]
            fixed = (command.task, command.step) in partition.selections
            assert not fixed, f"{name} waits though its step is fixed: {command}"
            assert self.model.expected_claim(command) is None, f"{name} waits: {command}"

    @invariant()
    def tasks_list_the_claims_that_their_sessions_may_never_have_heard_of(self) -> None:
        state = self.ledger._state
        claims = [claim for session in state.sessions.values() for claim in session.unconfirmed.values()]
        for partition in state.partitions.values():
            for task in partition.tasks.values():
                assert task.unconfirmed == {claim.claim_id for claim in claims if claim.task is task}

    @invariant()
    def each_sample_is_available_held_leased_or_consumed(self) -> None:
        self.model.check_claims(self.ledger)


# --- What bytes may be given to whom, and that none is lost or given twice.


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
    """Of the driver: its units by id, and the order of its calls that waited."""

    units: dict[int, Unit]
    turns: dict[Name, int]
    budgets: BudgetBooks

    def check_backed(self, name: Name) -> None:
        """What was given is memory that its unit has."""
        for unit, offset, nbytes in self.model.reserved[name]:
            assert 0 <= offset <= offset + nbytes <= self.units[unit].backed, (unit, offset, nbytes)

    def check_reserve(self, answer: Answer) -> None:
        """New rows leave the reserve of each unit they went to for updates."""
        if isinstance(answer.result, Allocated):
            for unit_id in {placement.unit for placement in answer.result.placements}:
                used = sum(size for unit, _, size in self.ledger.held_ranges() if unit == unit_id)
                capacity = self.units[unit_id].capacity
                mine = self.model.reserved[answer.session, answer.call_id]
                wanted = sum(size for unit, _, size in mine if unit == unit_id)
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
    def nobody_waits_who_could_be_served(self) -> None:
        assert not overlooked(self.ledger)

    def check_all(self) -> None:
        """Every invariant about space."""
        self.accounts_are_right()
        self.space_is_sound()
        self.no_put_waits_for_space_that_is_there()
        self.nobody_waits_who_could_be_served()

    def largest_space(self, *, update: bool) -> int:
        """Bytes that surely can be had in one piece now, once no arena grows any more."""
        units = [unit for unit in self.ledger._state.units.values() if unit.unit_id not in self.model.draining]
        if any(unit.space.backed_bytes < unit.ceiling for unit in units):
            return -1
        return max((min(unit.space.largest_bytes, unit.available_bytes(update=update)) for unit in units), default=-1)

    @invariant()
    def space_is_sound(self) -> None:
        check_cells(self.ledger)
        for unit in self.units.values():
            free = self.ledger.free_ranges(unit.id)
            held = [(start, size) for at, start, size in self.ledger.held_ranges() if at == unit.id]
            at = 0
            for start, size in sorted([*free, *held]):
                assert start == at, f"unit {unit.id}: a gap or an overlap at {at}, next {start}"
                at = start + size
            assert at == unit.backed, "free + used is not what is backed"
            free_granules = {g for start, size in free for g in granules(start, size)}
            used = self.model.in_use(unit.id)
            assert not free_granules & set(used), f"in use and free: {[used[g] for g in free_granules & set(used)]}"
            assert all(g < unit.backed // GRANULE_BYTES for g in used)


# --- Who may be given space, and in which order.


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

    def check_preallocated(self, name: Name, command: Preallocate) -> None:
        """The space is a small part, and nobody who waits can miss it."""
        for waiting in [self.model.commands[parked] for parked in self.parked]:
            if isinstance(waiting, Allocate) and (waiting.moving or not self.budgets.is_over(self.ledger, waiting)):
                assert self.may_be_fragmented(waiting), f"{name} was served before {waiting}"
        unit = self.units[command.unit]
        assert command.nbytes * LIMITS.preallocated_divisor <= unit.capacity
        used = sum(size for at, _, size in self.ledger.held_ranges() if at == unit.id)
        assert used <= unit.capacity / 2
