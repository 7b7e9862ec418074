"""The model test's books of budgets: nobody gets more than there is, and only those samples go that may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from dataplane.errors import DataPlaneError, SampleNotFoundError, StaleSampleError
from dataplane.ledger import Ledger
from dataplane.ledger.commands import (
    Abort,
    Ack,
    Allocate,
    Allocated,
    Answer,
    Bye,
    Call,
    Command,
    Commit,
    Committed,
    Extend,
    Input,
    Nack,
    Samples,
    WhenFull,
)
from dataplane.ledger.state.extents import FREE
from tests.ledger.claim_model import Held, Name, Partition, Sample
from tests.ledger.model import Model, granules_of, handles
from tests.ledger.values import placement_ranges

EVICTING = (WhenFull.EVICT, WhenFull.EVICT_OLDEST)
EVICTED: Counter[str] = Counter()
"""How many samples went in all examples so far, the "consumed" and the others, and how many errors told of it."""


class BudgetBooks:
    """`gone` are the samples that were evicted from each incarnation of a partition and do not live now, by id;
    `unsaid` the unconsumed ones that no answer has named yet. `excused`: a put that may have been to name some was
    refused.

    `targets` are the samples that puts name, by partition: their ids, each with its generation if named by handle, else
    0. Of the input under way: those that puts may have been under way for (`named`), and those (`kept`) that they
    surely were for until its end, each by the put's name."""

    def __init__(self, model: Model, reserve: float) -> None:
        self.model = model
        self.reserve = reserve
        self.counted: dict[tuple[str, int], tuple[int, int]] = {}
        self.gone: dict[tuple[str, int], dict[str, Sample]] = {}
        self.unsaid: list[str] = []
        self.excused = False
        self.targets: dict[Name, tuple[tuple[str, int], set[tuple[str, int]]]] = {}
        self.named: set[Name] = set()
        self.kept: set[Name] = set()

    # --- what puts under way name

    def asked(self, item: Input, in_flight: dict[Name, bool]) -> None:
        """An input, with the calls that wait or have space, and whether their session surely lives."""
        self.named = in_flight.keys() & self.targets.keys()
        self.kept = {name for name in self.named if in_flight[name]}
        if not isinstance(item, Call):
            return
        name, asked = (item.session, item.call_id), item.command
        if isinstance(asked, Allocate | Commit) and asked.samples is not None and name not in self.targets:
            partition = self.model.partitions.get(asked.partition)
            if partition is not None:
                targets = {(each, 0) for each in asked.samples.ids or ()}
                if asked.samples.ids is None:
                    targets = {(sample.id, sample.generation) for sample in self.model.named(partition, asked.samples)}
                self.targets[name] = (asked.partition, partition.incarnation), targets
                self.named.add(name)
                self.kept |= {name} if isinstance(asked, Allocate) else set()
        if isinstance(asked, Abort | Commit):
            self.kept.discard((item.session, asked.reservation or 0))
        if isinstance(asked, Bye):
            self.kept = {other for other in self.kept if other[0] != item.session}

    def answered(self, answers: Sequence[Answer]) -> None:
        """Puts that were refused are over."""
        self.kept -= {(a.session, a.call_id) for a in answers if isinstance(a.result, DataPlaneError)}

    def targets_of(self, names: set[Name], partition: tuple[str, int]) -> set[tuple[str, int]]:
        """What these puts name in this incarnation of a partition."""
        return {each for name in names if self.targets[name][0] == partition for each in self.targets[name][1]}

    # --- what went

    def sync(self, ledger: Ledger) -> None:
        """Samples that the ledger evicted since go, if they may."""
        for name, kept in ledger._state.partitions.items():
            partition = self.model.partitions.get(name)
            if partition is None:
                continue
            self.lost(name)
            generations = set(kept.evicted.generations.values())
            gone = [sample for sample in partition.in_order() if sample.generation in generations]
            before = self.counted.get((name, partition.incarnation), (0, 0))
            counted = self.counted[name, partition.incarnation] = (kept.evicted.consumed, kept.evicted.unconsumed)
            assert sum(counted) - sum(before) == len(gone), (name, counted, before, gone)
            if gone:
                self.evicted(name, partition, gone, counted[0] - before[0])
            self.lost(name)  # an id that lives again is not remembered, even if it goes before anybody asks

    def evicted(self, name: str, partition: Partition, gone: list[Sample], count: int) -> None:
        """`count` of these had been consumed; their holders have had their answers, nobody reads them, and no put under
        way names them."""
        kept = self.targets_of(self.kept, (name, partition.incarnation))
        targets = [(sample.id, generation) for sample in gone for generation in (0, sample.generation)]
        assert kept.isdisjoint(targets), f"puts under way name {kept}, and {gone} were evicted"
        assert partition.when_full in EVICTING, f"{gone} were evicted by policy {partition.when_full}"
        consumed = [sample for sample in gone if self.is_consumed(partition, sample)]
        assert count == len(consumed), (count, consumed, gone)
        assert count == len(gone) or partition.when_full is WhenFull.EVICT_OLDEST, f"unconsumed ones went: {gone}"
        for sample in gone:
            assert self.may_go(sample), f"{sample} was evicted"
            del partition.samples[sample.id], partition.live[sample.row, sample.generation]
        named = self.targets_of(self.named, (name, partition.incarnation))
        self.check_order(partition, gone, {each for each, _ in named})
        self.gone.setdefault((name, partition.incarnation), {}).update({sample.id: sample for sample in gone})
        self.unsaid += [sample.id for sample in gone if not self.is_consumed(partition, sample)]
        EVICTED["consumed"] += count
        EVICTED["unconsumed"] += len(gone) - count

    def check_order(self, partition: Partition, gone: list[Sample], named: set[str]) -> None:
        """No sample stayed that could have gone before one that went: the consumed ones go first, oldest first."""
        last = max((self.rank(partition, sample) for sample in gone), default=(False, 0))
        for sample in partition.in_order():
            if sample.id not in named and self.may_go(sample, whole=True):
                assert self.rank(partition, sample) > last, f"{sample} stayed, though {gone} went"

    def rank(self, partition: Partition, sample: Sample) -> tuple[bool, int]:
        return not self.is_consumed(partition, sample), sample.generation

    def is_consumed(self, partition: Partition, sample: Sample) -> bool:
        held = [sample.claims.get(task) for task in partition.tasks]
        return bool(held) and all(one is not None and self.for_good(one) for one in held)

    def for_good(self, held: Held) -> bool:
        sure = held.acked or self.model.has_answer(held.name)
        return held.until is None and sure

    def may_go(self, sample: Sample, *, whole: bool = False) -> bool:
        """Nobody leases it, has an answer on the way that gives it to him, or reads it. With `whole` nobody reads what
        was put with it, either: it may lie in the same piece."""
        pinned = {place for pins in self.model.pins.values() for place in pins}
        if whole:
            read = {place.value[0] for place in pinned} & {place.value[0] for place in sample.cells.values()}
        else:
            read = {place.value[0] for place in pinned & set(sample.cells.values()) if place.nbytes}
        return not read and all(map(self.for_good, sample.claims.values()))

    # --- who is told

    def check_answers(self, ledger: Ledger, answers: Sequence[Answer]) -> None:
        """They name the unconsumed samples that went for them, and nobody was granted more than there is."""
        for answer in answers:
            if isinstance(answer.result, Allocated | Committed):
                for name in answer.result.evicted:
                    assert name in self.unsaid, f"{name} was not evicted"
                    self.unsaid.remove(name)
        self.excused = self.excused and bool(self.unsaid)
        self.check_grants(ledger, answers)

    def check_told(self, command: Command, error: SampleNotFoundError | StaleSampleError) -> None:
        """An error for samples that are not there counts those that were evicted. (That a lease is over is another.)"""
        name, samples = getattr(command, "partition", ""), getattr(command, "samples", None)
        if isinstance(command, Ack | Nack | Extend):
            return
        if not isinstance(samples, Samples) or name not in self.model.partitions:
            return
        partition = self.model.partitions[name]
        gone = self.lost(name)
        if samples.ids is not None:
            expected = sum(each in gone and each not in partition.samples for each in samples.ids)
        else:
            generations = {sample.generation for sample in gone.values()}
            stale = [handle for handle in handles(samples) if handle not in partition.live]
            expected = sum(generation in generations for _, generation in stale)
        assert error.evicted == expected, (samples, error, gone)
        assert not expected or f"{expected} of them were evicted" in str(error), error
        EVICTED["told"] += bool(expected)

    def lost(self, name: str) -> dict[str, Sample]:
        """Samples of the partition that were evicted, but for ids that live again."""
        partition = self.model.partitions.get(name)
        gone = {} if partition is None else self.gone.get((name, partition.incarnation), {})
        if partition is None:
            return gone
        for sample in [sample for sample in gone.values() if sample.id in partition.samples]:
            del gone[sample.id]
        return gone

    # --- how much there is

    def check_grants(self, ledger: Ledger, answers: Sequence[Answer]) -> None:
        """A partition that was granted space has no more than its budget, less the reserve for updates if there was
        none among them."""
        updates: dict[str, bool] = {}
        for answer in answers:
            command = self.model.commands[answer.session, answer.call_id]
            put = isinstance(command, Allocate) and isinstance(answer.result, Allocated) and not command.moving
            if put and wanted_bytes(command):
                updates[command.partition] = updates.get(command.partition, False) or command.update
        for name, update in updates.items():
            limit = self.limit(name, update=update)
            kept = ledger._state.partitions.get(name)
            assert kept is None or limit is None or kept.account.used_bytes <= limit, (name, update)

    def limit(self, name: str, *, update: bool) -> int | None:
        """Bytes that it may occupy after a put of new rows, or an update."""
        budget = self.model.partitions[name].budget
        return budget if budget is None or update else budget - int(budget * self.reserve)

    def is_over(self, ledger: Ledger, command: Allocate) -> bool:
        """Whether the put does not fit into its partition's budget."""
        limit = self.limit(command.partition, update=command.update)
        used = ledger._state.partitions[command.partition].account.used_bytes
        return limit is not None and used + wanted_bytes(command) > limit

    def check_accounts(self, ledger: Ledger) -> None:
        """What counts is what extents hold."""
        extents = ledger._state.extents
        for account in extents.accounts.values():
            mine = (extents.owners[: extents.high] == account.account_id) & (extents.states[: extents.high] != FREE)
            assert account.used_bytes == int(np.sum(extents.sizes[: extents.high][mine])) <= account.peak_bytes
        for partition in ledger._state.partitions.values():
            assert partition.account.live_bytes <= partition.account.used_bytes


def wanted_bytes(command: Allocate) -> int:
    return sum(granules_of(int(column.sizes.sum())) for column in command.columns)


def given_bytes(command: Allocate, result: Allocated) -> int:
    """More than it wanted where a column lies in several pieces."""
    ranges = placement_ranges([column.sizes.tolist() for column in command.columns], result)
    return sum(granules_of(nbytes) for _, _, nbytes in ranges)
