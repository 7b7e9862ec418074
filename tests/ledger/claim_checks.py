"""What claims must be answered, and which of the four each sample is for each task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis.stateful import RuleBasedStateMachine, invariant

from dataplane.ledger import Ledger, Limits
from dataplane.ledger.claims import shares
from dataplane.ledger.commands import Claim, Claimed
from dataplane.ledger.state.tasks import Task
from tests.ledger.claim_model import Held, Name, Selection
from tests.ledger.model import Model

LIMITS = Limits(preallocated_part=4, steps=3)


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
