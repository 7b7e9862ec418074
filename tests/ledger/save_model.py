"""The model's checkpoints: what a Save must say, what must still be so later, and what a Publish makes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dataplane.ledger.commands import (
    Command,
    Publish,
    ReadSaved,
    Save,
    Saved,
    SavedPartition,
    SavedRows,
    Stage,
)
from tests.ledger.claim_model import LIMITS, Faults, Held, Name, Partition, Sample
from tests.ledger.values import checksums_in

if TYPE_CHECKING:
    from tests.ledger.model import Model

FOR_GOOD = (0, 0)
"""The claim that a published sample's was: nobody's, and final."""


@dataclass
class SaveBooks:
    """`taken` are copies of the samples of each partition, oldest first; `staged` partitions have an owner."""

    model: Model
    taken: dict[Name, dict[str, list[Sample]]] = field(default_factory=dict)
    staged: dict[str, int] = field(default_factory=dict)

    def faults(self, session: int, command: Command) -> Faults | None:
        """None for commands of other kinds."""
        known = self.model.partitions
        match command:
            case Save():
                faults = Faults(set() if known.keys() >= set(command.partitions) else {"PartitionNotFoundError"})
                if sum(name[0] == session for name in self.taken) >= LIMITS.saves:
                    faults.must.add("InvalidRequestError")
                return faults
            case ReadSaved():
                return Faults(set() if (session, command.saved) in self.taken else {"InvalidRequestError"})
            case Stage():
                return Faults({"PartitionExistsError"} if command.partition in known else set())
            case Publish():
                faults = Faults()
                for name, wanted in zip(command.staged, command.partitions, strict=True):
                    if name not in known:
                        faults.must.add("PartitionNotFoundError")
                    elif self.staged.get(name) != session or wanted.live != len(known[name].samples):
                        faults.must.add("InvalidRequestError")
                    if wanted.partition in known and not command.replace:
                        faults.must.add("PartitionExistsError")
                return faults
        return None

    def ended(self, session: int) -> None:
        """What the session staged went with it."""
        for name in [name for name, owner in self.staged.items() if owner == session]:
            del self.staged[name]
            self.model.partitions.pop(name, None)
        self.taken = {name: taken for name, taken in self.taken.items() if name[0] != session}

    def saved(self, name: Name, command: Save, result: Saved) -> None:
        model = self.model
        names = command.partitions or [other for other in model.partitions if other not in self.staged]
        assert [found.partition for found in result.partitions] == list(names)
        for found in result.partitions:
            self.check_described(model.partitions[found.partition], found)
        partitions = [model.partitions[other] for other in names]
        model.pins[name] = {cell for p in partitions for s in p.samples.values() for cell in s.cells.values()}
        self.taken[name] = {
            other: copy.deepcopy(partition.in_order()) for other, partition in zip(names, partitions, strict=True)
        }

    def check_described(self, partition: Partition, found: SavedPartition) -> None:
        facts = (found.live, found.born, found.num_samples, found.strict, found.sealed, found.version)
        kept = (partition.num_samples, partition.strict, partition.sealed, partition.version)
        assert facts == (len(partition.samples), partition.born, *kept)
        declared = {known.name: known.declared for known in found.fields}
        for name, spec in partition.fields.items():
            assert declared[name] == spec
        assert {name for sample in partition.samples.values() for name in sample.cells} <= set(declared)
        assert tuple(task.name for task in found.tasks) == partition.tasks
        assert (found.budget_bytes, found.when_full) == (partition.budget, partition.when_full)
        for task in found.tasks:
            for sample, bit in zip(partition.in_order(), bits_of(task.claimed, found.live), strict=True):
                held = sample.claims.get(task.name)
                assert bit == (held is not None and not self.model.returnable(held)), (task.name, sample)

    def read(self, name: Name, command: ReadSaved, result: SavedRows) -> None:
        samples = self.taken[name[0], command.saved][command.partition][command.first : command.last]
        assert result.ids == (tuple(sample.id for sample in samples) if command.names else ())
        tags: list[dict[str, object]] = [{} for _ in samples]
        for column in result.tags:
            places = range(len(samples)) if column.positions is None else column.positions.tolist()
            for place, value in zip(places, column.values, strict=True):
                tags[place][column.name] = value
        assert tags == [sample.tags if command.names else {} for sample in samples]
        assert [found.name for found in result.fields] == list(command.fields)
        shown = self.model.shown[name] = {}
        for found in result.fields:
            cells = shown[found.name] = [sample.cells.get(found.name) for sample in samples]
            assert checksums_in(found) == [0 if cell is None else cell.checksum for cell in cells]
            for i, cell in enumerate(cells):
                assert int(found.lengths[i]) == (-1 if cell is None else cell.length)
                if cell is not None and cell.nbytes:
                    assert (int(found.units[i]), int(found.offsets[i])) == (cell.unit, cell.offset)
                    assert found.spec == cell.spec

    def stage(self, session: int, command: Stage) -> None:
        self.model.incarnations += 1
        self.model.partitions[command.partition] = Partition({}, None, (), False, self.model.incarnations)
        self.staged[command.partition] = session

    def publish(self, command: Publish) -> None:
        model = self.model
        found = [model.partitions.pop(name) for name in command.staged]
        for name, partition, wanted in zip(command.staged, found, command.partitions, strict=True):
            del self.staged[name]
            assert len(partition.samples) == wanted.live, "other samples were published than staged"
            partition.fields = {kept.name: kept.declared for kept in wanted.fields if kept.declared is not None}
            partition.num_samples, partition.strict, partition.sealed = wanted.num_samples, wanted.strict, wanted.sealed
            partition.born, partition.version = wanted.born, wanted.version
            partition.tasks = tuple(task.name for task in wanted.tasks)
            partition.budget, partition.when_full = wanted.budget_bytes, wanted.when_full
            for task in wanted.tasks:
                for sample, bit in zip(partition.in_order(), bits_of(task.claimed, wanted.live), strict=True):
                    if bit:
                        sample.claims[task.name] = Held(FOR_GOOD, None)
            model.generations.setdefault(wanted.partition, set()).update(
                sample.generation for sample in partition.in_order()
            )
            model.partitions[wanted.partition] = partition


def bits_of(claimed: bytes, count: int) -> list[bool]:
    bits: list[bool] = np.unpackbits(np.frombuffer(claimed, np.uint8), count=count).astype(bool).tolist()
    return bits
