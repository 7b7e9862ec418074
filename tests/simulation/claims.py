"""Who holds which sample, by the answers of claims and of what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.client.operations.sample_names import tags_of
from dataplane.errors import DataPlaneError, StaleSampleError
from dataplane.ledger.commands import (
    Ack,
    CheckConsumption,
    Claim,
    Claimed,
    ClaimsSettled,
    Command,
    Consumption,
    Extend,
    Nack,
    Result,
    SetTags,
)

if TYPE_CHECKING:
    from tests.simulation.record import Name, Recorder

Settling = Ack | Nack | Extend


@dataclass
class Holder:
    """Who has claimed a sample, until when it may keep it, whether it may have lost it since."""

    name: Name
    lease_until: float | None
    lease_s: float = 0.0
    given_back: bool = False
    acked: bool = False


class ClaimBooks:
    """`holders` are by partition, task and generation, `claims` has the call of each claim id, `tags` those of each
    sample."""

    def __init__(self, record: Recorder) -> None:
        self.record = record
        self.holders: dict[tuple[str, str, int], Holder] = {}
        self.claims: dict[int, Name] = {}
        self.tags: dict[tuple[str, int], dict[str, Any]] = {}

    def restarted(self) -> None:
        """All leases begin again."""
        for holder in self.holders.values():
            if holder.lease_until is not None and holder.lease_until > self.record.now:
                holder.lease_until = self.record.now + holder.lease_s

    def unclaimed(self, name: Name) -> None:
        """The client withdrew this claim."""
        for holder in self.holders.values():
            if holder.name == name:
                holder.given_back = True

    def final(self, name: Name) -> None:
        """Its client made another call since it had the answer of this claim: the session's end takes nothing back."""
        session = self.record.ledger._state.sessions.get(name[0])
        assert session is None or name[1] not in session.unconfirmed, f"claim {name} is not final"
        for holder in self.holders.values():
            if holder.name == name and holder.lease_until is None:
                holder.acked = True

    def refused(self, command: Command, error: DataPlaneError) -> None:
        if isinstance(command, Settling) and isinstance(error, StaleSampleError):
            self.settled(command, error.positions)

    def answered(self, name: Name, command: Command, result: Result) -> None:
        match command, result:
            case Claim(), Claimed():
                self.claimed(name, command, result)
            case ((Ack() | Nack() | Extend()), ClaimsSettled()):
                gone = [place for place in range(len(command.samples)) if not self.lives(command, place)]
                assert result.cleared.tolist() == gone, f"{name} was told of others than were cleared"
                self.settled(command, ())
            case SetTags(), _:
                generations = command.samples.generations
                assert generations is not None
                for generation, tags in zip(generations.tolist(), tags_of(command.tags, len(generations)), strict=True):
                    self.tags.setdefault((command.partition, generation), {}).update(tags)
            case CheckConsumption(), Consumption():
                self.check_consumption(command, result)

    def claimed(self, name: Name, command: Claim, result: Claimed) -> None:
        record = self.record
        assert name not in record.withdrawn, f"{name} was withdrawn, then served"
        for generation, tags in zip(result.generations.tolist(), tags_of(result.tags, len(result.ids)), strict=True):
            assert (command.partition, generation) in record.cells, (
                f"{name} claimed a sample that is not there: {generation}"
            )
            assert set(command.fields) <= set(record.cells[command.partition, generation]), f"{name} claimed too early"
            assert tags == self.tags.get((command.partition, generation), {}), (
                f"{name} was told other tags of {generation}"
            )
            key = (command.partition, command.task, generation)
            held = self.holders.get(key)
            assert held is None or self.may_be_back(held), f"{key} was claimed by {held} and again by {name}"
            until = None if command.lease_s is None else record.now + command.lease_s
            self.holders[key] = Holder(name, until, command.lease_s or 0.0)
        if result.claim:
            assert result.claim not in self.claims, f"claim {result.claim} was made twice"
            self.claims[result.claim] = name

    def may_be_back(self, holder: Holder) -> bool:
        """Whether its sample may have gone back to the pool by itself."""
        lost = not holder.acked and (holder.given_back or holder.name[0] in self.record.over)
        return lost or (holder.lease_until is not None and holder.lease_until <= self.record.now)

    def settled(self, command: Settling, refused: Sequence[int]) -> None:
        """Done to all samples that live, but to those that were refused: what those were claimed by does not hold them,
        and what was done was done to samples that their claim holds."""
        assert command.samples.generations is not None
        assert command.claims is not None
        for place, generation in enumerate(command.samples.generations.tolist()):
            key, mine = (command.partition, command.task, generation), self.claims[int(command.claims[place])]
            holder = self.holders.get(key)
            if not self.lives(command, place):
                assert place not in refused, f"{key} was cleared, and holds up the rest"
                continue
            own = holder is not None and holder.name == mine
            unsure = holder is None or holder.acked or self.may_be_back(holder)
            if place in refused:
                assert unsure or not own, f"{key} was refused to {mine}, which holds it"
                continue
            assert own or (isinstance(command, Nack) and unsure), f"{key} was settled by {mine}, and {holder} has it"
            self.settle(key, command)

    def settle(self, key: tuple[str, str, int], command: Settling) -> None:
        if isinstance(command, Nack):
            self.holders.pop(key, None)
        elif isinstance(command, Ack):
            self.holders[key].lease_until, self.holders[key].acked = None, True
        else:
            holder = self.holders[key]
            holder.lease_until = self.record.now + command.lease_s
            holder.lease_s = max(holder.lease_s, command.lease_s)

    def lives(self, command: Settling, place: int) -> bool:
        assert command.samples.generations is not None
        return (command.partition, int(command.samples.generations[place])) in self.record.cells

    def check_consumption(self, command: CheckConsumption, result: Consumption) -> None:
        """What is not claimed, or on lease, is not consumed."""
        self.record.counts[f"consumed: {result.consumed}"] += 1
        samples = [key for key in self.record.cells if key[0] == command.partition] if result.consumed else []
        for partition, generation in samples:
            for task in command.tasks:
                holder = self.holders.get((partition, task, generation))
                assert holder is not None, f"sample {generation} counts as consumed, and nobody has claimed it"
                assert holder.lease_until is None, f"sample {generation} counts as consumed, and is on lease: {holder}"

    def check(self) -> None:
        """A sample that nobody holds can be claimed."""
        for name, partition in self.record.ledger._state.partitions.items():
            for task in partition.tasks.values():
                generations = partition.rows.generations[np.flatnonzero(task.claim_ids)].tolist()
                lost = [generation for generation in generations if (name, task.name, generation) not in self.holders]
                assert not lost, f"samples {lost} of {name} are claimed for {task.name}, and by nobody"
