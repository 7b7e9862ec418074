"""What is compared with the model after every step: claims, space and reservations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant

from dataplane.core.types import GRANULE_BYTES
from dataplane.ledger import Ledger, Limits
from dataplane.ledger.claims import shares
from dataplane.ledger.commands import Allocate, Allocated, Answer, Claim, Claimed, Output, Preallocate, Preallocated
from dataplane.ledger.state.tasks import Task
from tests.ledger.budget_books import EVICTING, BudgetBooks, wanted_bytes
from tests.ledger.claim_model import Held, Name, Selection
from tests.ledger.model import Model

# --- What claims must be answered, and which of the four each sample is for each task.


LIMITS = Limits(preallocated_divisor=4, steps=3)


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
    """Of the driver: `parked` are the calls that wait, with their deadlines; `fixed` are the selections of steps."""

    ledger: Ledger
    model: Model
    parked: dict[Name, float]
    clients: dict[int, Client]
    fixed: dict[tuple[Task, int], shares.Selection]

    def watch_selections(self) -> None:
        """From now on `fixed` has every selection that the ledger fixes."""
        fix = self.ledger._claims._fix_shares

        def watched(partition: Any, task: Task, command: Claim, chosen: Any) -> shares.Selection:
            selection = fix(partition, task, command, chosen)
            self.fixed[task, command.step or 0] = selection
            return selection

        self.ledger._claims._fix_shares = watched  # type: ignore[method-assign]

    def check_claim(self, name: Name, command: Claim, result: Claimed) -> None:
        if command.step is not None:
            self.check_share(name, command, result)
        elif not self.model.may_be_lost(command):
            expected = self.model.expected_claim(command)
            assert expected is not None, f"{command} was served {result.ids} too early"
            assert result.ids == tuple(sample.id for unit in expected for sample in unit)

    def check_share(self, name: Name, command: Claim, result: Claimed) -> None:
        """The rank's own part of the step's selection, all of it that lives."""
        model, unsure = self.model, self.model.may_be_lost(command)
        partition = model.partitions[command.partition]
        assert command.step is not None
        fixed = partition.selections.get((command.task, command.step))
        if fixed is None and unsure:
            fixed = self.selection_of(command)
        elif fixed is None:
            units = model.expected_claim(command)
            fixed = None if units is None else model.fix(command, units, LIMITS.steps)
        if fixed is None:
            assert not result.ids
            assert not command.blocking
            return
        assert command.dp_rank is not None
        share = model.living_share(partition, fixed, command.dp_rank)
        if unsure:
            chosen = [sample for sample in share if sample.id in result.ids]
            for sample in chosen:
                held = sample.claims.pop(command.task, None)
                assert held is None or held.limbo or held.name == fixed.name
            if chosen:
                fixed.given.setdefault(command.dp_rank, set()).add(name)
        else:
            chosen = model.take_share(name, command, fixed)
        assert list(result.ids) == [sample.id for sample in chosen]

    def selection_of(self, command: Claim) -> Selection | None:
        """What the ledger fixed while the model could not know which samples are free, though it may be forgotten by
        now."""
        partition = self.model.partitions[command.partition]
        kept = self.ledger._state.partitions[command.partition].tasks[command.task]
        fixed = self.fixed.get((kept, command.step or 0))
        if fixed is None:
            return None
        generations = {sample.generation: sample for sample in partition.samples.values()}
        chosen = [generations[generation] for generation in fixed.generations.tolist()]
        for sample in chosen:
            held = sample.claims.get(command.task)
            assert held is None or held.limbo, f"{sample.id} was claimed by {held} and by step {command.step}"
        ranks = fixed.ranks.tolist()
        dealt = [
            [s for s, to in zip(chosen, ranks, strict=True) if to == rank] for rank in range(command.dp_world or 0)
        ]
        return self.model.adopt(command, dealt, LIMITS.steps)

    @invariant()
    def nobody_waits_who_could_be_served(self) -> None:
        for name in self.parked:
            command = self.model.commands[name]
            client = self.clients[name[0]]
            if not isinstance(command, Claim) or client.suspect or not client.alive:
                continue
            partition = self.model.partitions[command.partition]
            fixed = (command.task, command.step) in partition.selections
            assert not fixed, f"{name} waits though its step is fixed: {command}"
            if not self.model.may_be_lost(command):
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
        for name, partition in self.model.partitions.items():
            kept = self.ledger._state.partitions[name]
            for task in partition.tasks:
                rows = [sample.row for sample in partition.samples.values()]
                assert kept.tasks[task].claimed == np.count_nonzero(kept.tasks[task].claim_ids[rows])
                states = [state_of(kept.tasks[task], row) for row in rows]
                counts = (states.count("leased"), states.count("held"))
                assert counts == (kept.tasks[task].leased, kept.tasks[task].held)
                for sample in partition.samples.values():
                    held = sample.claims.get(task)
                    if held is None or not held.limbo:
                        assert state_of(kept.tasks[task], sample.row) == expected_state(held), (task, sample)


def state_of(task: Task, row: int) -> str:
    """What a sample is to a task by the ledger's books."""
    owner = int(task.owners_of(np.array([row]))[0])
    if not task.claim_ids[row]:
        assert not owner, f"row {row} is available and owned by {owner}"
        return "available"
    return "held" if owner < 0 else "leased" if owner else "consumed"


def expected_state(held: Held | None) -> str:
    if held is None:
        return "available"
    if held.until is None:
        return "consumed"
    return "leased" if held.name[0] else "held"


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
        units = [unit for unit in self.ledger._state.units.values() if unit.unit_id not in self.model.draining]
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
        assert command.nbytes * LIMITS.preallocated_divisor <= unit.capacity
        used = sum(size for at, _, size in self.ledger.held_ranges() if at == unit.id)
        assert used <= unit.capacity / 2
