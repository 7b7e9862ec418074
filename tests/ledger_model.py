"""A plain-dict model of the ledger: what each command must answer, and what each answer changes.

It predicts everything but free choices (where room is found, which waiter is served, when a silent session is given
up); those it only checks against the contract. `Faults` says which errors a command must or may be refused with.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dataplane.ledger.commands import (
    Ack,
    Allocate,
    Allocated,
    Claim,
    Claimed,
    Clear,
    Cleared,
    Command,
    Commit,
    CommitColumn,
    Committed,
    Listed,
    Locate,
    Located,
    Mode,
    Nack,
    Order,
    Predicate,
    Register,
    Samples,
    SetTags,
    TagColumn,
)
from dataplane.types import FieldSpec, Scalar
from tests.ledger_values import placement_ranges, value_places

Name = tuple[int, int]
OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, choices: value in choices,
}


@dataclass(frozen=True)
class Place:
    """A cell: what it is and where it lies."""

    unit: int
    offset: int
    nbytes: int
    length: int
    spec: FieldSpec
    value: tuple[Name, str, int]


@dataclass
class Held:
    """A claimed sample. `limbo`: its session may have been given up, and this claim with it. `acked`: it is final."""

    name: Name
    until: float | None
    limbo: bool = False
    acked: bool = False


@dataclass
class Sample:
    id: str
    row: int
    birth: int
    cells: dict[str, Place] = field(default_factory=dict)
    tags: dict[str, Scalar] = field(default_factory=dict)
    claims: dict[str, Held] = field(default_factory=dict)


@dataclass
class Partition:
    fields: dict[str, FieldSpec]
    num_samples: int | None
    tasks: tuple[str, ...]
    strict: bool
    life: int
    sealed: bool = False
    born: int = 0
    samples: dict[str, Sample] = field(default_factory=dict)
    live: dict[tuple[int, int], Sample] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.sealed or (self.num_samples is not None and self.born >= self.num_samples)

    def in_order(self) -> list[Sample]:
        return sorted(self.samples.values(), key=lambda sample: sample.birth)

    def spec_of(self, name: str) -> FieldSpec | None:
        """What a put of the field must agree with."""
        for sample in self.samples.values():
            if name in sample.cells:
                return sample.cells[name].spec
        return self.fields.get(name)


@dataclass
class Faults:
    """Error names a command must be refused with (one of), or may be."""

    must: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)


class Model:
    def __init__(self) -> None:
        self.now = 0.0
        self.partitions: dict[str, Partition] = {}
        self.commands: dict[Name, Command] = {}
        self.reserved: dict[Name, list[tuple[int, int, int]]] = {}
        self.granted: dict[Name, Allocated] = {}
        self.lives = 0
        self.reserved_in: dict[Name, int] = {}
        self.pins: dict[Name, set[Place]] = {}
        self.births: dict[str, set[int]] = {}
        self.confirmed: dict[int, int] = {}

    # --- what must happen ------------------------------------------------------------------------------------

    def missing(self, partition: Partition, samples: Samples) -> set[str]:
        """The error for naming samples that are not there."""
        if samples.ids is not None:
            return set() if all(name in partition.samples for name in samples.ids) else {"SampleNotFoundError"}
        return set() if all(h in partition.live for h in handles(samples)) else {"StaleSampleError"}

    def named(self, partition: Partition, samples: Samples) -> list[Sample]:
        """The live samples meant, in order."""
        if samples.ids is not None:
            return [partition.samples[name] for name in samples.ids if name in partition.samples]
        return [partition.live[h] for h in handles(samples) if h in partition.live]

    def faults(self, session: int, command: Command) -> Faults:
        partition = self.partitions.get(getattr(command, "partition", ""))
        if partition is None:
            known = not hasattr(command, "partition") or isinstance(command, Register | Clear)
            if isinstance(command, Clear) and command.samples is not None:
                return Faults(may={"PartitionNotFoundError"})
            return Faults(set() if known else {"PartitionNotFoundError"}, {"InvalidRequestError"})
        match command:
            case Commit():
                return self.commit_faults(session, partition, command)
            case Locate():
                faults = Faults(self.missing(partition, command.samples))
                for name in command.fields:
                    if partition.spec_of(name) is None or any(
                        name not in s.cells for s in self.named(partition, command.samples)
                    ):
                        faults.must |= {"FieldNotFoundError", "FieldNotProducedError"}
                return faults
            case Claim():
                faults = Faults(set() if command.task in partition.tasks else {"TaskNotFoundError"})
                if partition.strict and any(partition.spec_of(name) is None for name in command.fields):
                    faults.must.add("FieldNotFoundError")
                return faults
            case Ack():
                return self.ack_faults(session, partition, command)
            case Nack():
                return self.nack_faults(session, partition, command)
            case Register():
                known = {name: partition.spec_of(name) for name in command.fields}
                clash = any(
                    not spec.accepts(known[name] or spec)
                    for name, spec in command.fields.items()
                    if any(name in s.cells for s in partition.samples.values())
                )
                return Faults({"SchemaError"} if clash else set())
            case SetTags():
                return Faults(self.missing(partition, command.samples))
            case _:
                return Faults()

    def commit_faults(self, session: int, partition: Partition, command: Commit) -> Faults:
        faults = Faults()
        ids = command.samples.ids
        if command.reservation is not None and (session, command.reservation) not in self.reserved:
            faults.must.add("InvalidRequestError")
        elif command.reservation is not None and self.reserved_in[session, command.reservation] != partition.life:
            faults.must.add("PartitionDroppedError")
        if ids is None:
            faults.must |= self.missing(partition, command.samples)
        else:
            if len(set(ids)) < len(ids):
                faults.must.add("InvalidRequestError")
            old = [name in partition.samples for name in ids]
            if command.mode is Mode.CREATE and any(old):
                faults.must.add("SampleExistsError")
            if command.mode is Mode.UPDATE and not all(old):
                faults.must.add("SampleNotFoundError")
            if partition.sealed and not all(old):
                faults.must.add("PartitionSealedError")
        for column in command.columns:
            expected = partition.spec_of(column.name)
            if expected is None and partition.strict:
                faults.must |= {"SchemaError", "InvalidRequestError", "FieldNotFoundError"}
            elif expected is not None and not expected.accepts(column.spec):
                faults.must.add("SchemaError")
            elif partition.strict and column.name not in partition.fields:
                faults.may |= {"SchemaError", "InvalidRequestError"}
        if not self.sizes_agree(session, command):
            faults.must.add("InvalidRequestError")
        return faults

    def sizes_agree(self, session: int, command: Commit) -> bool:
        if command.reservation is None:
            return not command.columns
        allocate = self.commands.get((session, command.reservation))
        if not isinstance(allocate, Allocate):
            return True
        want = [(column.name, column.sizes.tolist()) for column in allocate.columns]
        return want == [(column.name, sizes_of(column)) for column in command.columns]

    def ack_faults(self, session: int, partition: Partition, command: Ack) -> Faults:
        if command.task not in partition.tasks:
            return Faults({"TaskNotFoundError"})
        faults = Faults(self.missing(partition, command.samples))
        for sample in self.named(partition, command.samples):
            held = sample.claims.get(command.task)
            if held is None or held.until is None or held.name[0] != session:
                faults.must.add("StaleSampleError")
            elif held.limbo:
                faults.may.add("StaleSampleError")
        return faults

    def nack_faults(self, session: int, partition: Partition, command: Nack) -> Faults:
        if command.task not in partition.tasks:
            return Faults({"TaskNotFoundError"})
        faults = Faults(self.missing(partition, command.samples))
        for sample in self.named(partition, command.samples):
            held = sample.claims.get(command.task)
            if held is not None and held.until is not None and held.name[0] != session:
                (faults.may if held.limbo else faults.must).add("StaleSampleError")
        return faults

    # --- claims ----------------------------------------------------------------------------------------------

    def unclaimed(self, command: Claim) -> list[Sample]:
        partition = self.partitions[command.partition]
        return [s for s in partition.in_order() if command.task not in s.claims and matches(s, command.where)]

    def ready(self, command: Claim) -> list[Sample]:
        return [s for s in self.unclaimed(command) if all(name in s.cells for name in command.fields)]

    def expected_claim(self, command: Claim) -> list[Sample] | None:
        """What the claim returns if it is judged now; None: it waits. For claims without groups."""
        partition = self.partitions[command.partition]
        ready = self.ready(command)
        wanted = command.min_batch_size or command.batch_size
        served = len(ready) >= wanted or not command.blocking
        if partition.complete and not served:
            left = self.unclaimed(command)
            served = len(left) < wanted and len(ready) == len(left)
        if not served:
            return None
        if command.order is Order.FRESHEST:
            ready = ready[::-1]
        return ready[: command.batch_size]

    def may_be_lost(self, command: Claim) -> bool:
        """Whether some sample's claim is in limbo, so that the ledger may know it as unclaimed."""
        partition = self.partitions[command.partition]
        return any(command.task in s.claims and s.claims[command.task].limbo for s in partition.samples.values())

    # --- what answers change ---------------------------------------------------------------------------------

    def register(self, command: Register) -> None:
        old = self.partitions.get(command.partition)
        self.lives += old is None
        life = self.lives if old is None else old.life
        new = Partition(dict(command.fields), command.num_samples, command.tasks, command.strict, life)
        if old is not None:
            new.samples, new.live = old.samples, old.live
            new.born = len(old.samples)
            for sample in new.samples.values():
                sample.claims = {task: held for task, held in sample.claims.items() if task in command.tasks}
        self.partitions[command.partition] = new

    def allocated(self, name: Name, command: Allocate, result: Allocated) -> None:
        sizes = [column.sizes.tolist() for column in command.columns]
        value_places(sizes, result)
        self.reserved[name] = placement_ranges(sizes, result)
        self.granted[name] = result
        self.reserved_in[name] = self.partitions[command.partition].life

    def committed(self, name: Name, command: Commit, result: Committed) -> None:
        partition = self.partitions[command.partition]
        births = self.births.setdefault(command.partition, set())
        pairs = list(zip(result.rows.tolist(), result.births.tolist(), strict=True))
        assert len(pairs) == len(command.samples)
        samples = []
        for i, (row, birth) in enumerate(pairs):
            if command.samples.ids is None:
                samples.append(partition.live[row, birth])
                assert handles(command.samples)[i] == (row, birth)
                continue
            sample = partition.samples.get(command.samples.ids[i])
            if sample is None:
                assert birth not in births, f"birth {birth} given twice"
                assert (row, birth) not in partition.live
                births.add(birth)
                sample = Sample(command.samples.ids[i], row, birth)
                partition.samples[sample.id] = partition.live[row, birth] = sample
                partition.born += 1
            assert (sample.row, sample.birth) == (row, birth)
            samples.append(sample)
        if command.reservation is not None:
            self.switch(samples, (name[0], command.reservation), command.columns)
        merge_tags(samples, command.tags)

    def switch(self, samples: list[Sample], reservation: Name, columns: tuple[CommitColumn, ...]) -> None:
        places = value_places([sizes_of(column) for column in columns], self.granted[reservation])
        for column, at in zip(columns, places, strict=True):
            index = range(len(samples)) if column.index is None else column.index.tolist()
            for sample, k in zip(samples, index, strict=True):
                length = int(column.lengths[k])
                nbytes = length * column.spec.unit_bytes
                value = (reservation, column.name, k)
                sample.cells[column.name] = Place(*at[k], nbytes, length, column.spec, value)

    def located(self, name: Name, command: Locate, result: Located) -> None:
        samples = self.named(self.partitions[command.partition], command.samples)
        pairs = list(zip(result.rows.tolist(), result.births.tolist(), strict=True))
        assert pairs == [(s.row, s.birth) for s in samples]
        assert [found.name for found in result.fields] == list(command.fields)
        self.pins[name] = set()
        for found in result.fields:
            for i, sample in enumerate(samples):
                cell = sample.cells[found.name]
                assert int(found.lengths[i]) == cell.length
                assert found.spec == cell.spec
                if cell.nbytes:
                    assert (int(found.units[i]), int(found.offsets[i])) == (cell.unit, cell.offset)
                self.pins[name].add(cell)

    def claimed(self, name: Name, command: Claim, result: Claimed) -> None:
        partition = self.partitions[command.partition]
        samples = []
        for row, birth in zip(result.rows.tolist(), result.births.tolist(), strict=True):
            assert (row, birth) in partition.live, f"{name} claimed a sample that is not live"
            sample = partition.live[row, birth]
            held = sample.claims.get(command.task)
            assert held is None or held.limbo, f"{sample.id} was claimed by {held} and by {name}"
            assert set(command.fields) <= set(sample.cells), f"{sample.id} was claimed before {command.fields}"
            assert matches(sample, command.where)
            samples.append(sample)
        assert len({s.id for s in samples}) == len(samples) <= command.batch_size
        for sample in samples:
            until = None if command.lease_s is None else self.now + command.lease_s
            sample.claims[command.task] = Held(name, until)
        self.check_view(samples, result)
        if command.group_size is not None:
            groups = [s.tags.get(command.group_by) for s in samples]
            assert all(groups.count(group) == command.group_size for group in groups), groups

    def check_view(self, samples: list[Sample], result: Claimed | Listed) -> None:
        """Ids, common fields and tags are as the model has them."""
        assert list(result.ids) == [s.id for s in samples]
        common = set.intersection(*(set(s.cells) for s in samples)) if samples else set()
        if samples:
            assert set(result.fields) == common
        tags: list[dict[str, Scalar]] = [{} for _ in samples]
        for column in result.tags:
            positions = range(len(samples)) if column.positions is None else column.positions.tolist()
            for position, value in zip(positions, column.values, strict=True):
                tags[position][column.name] = value
        assert tags == [s.tags for s in samples]

    def cleared(self, command: Clear, result: Cleared) -> None:
        partition = self.partitions.get(command.partition)
        if partition is None:
            assert result.count == 0
            return
        if command.samples is None:
            assert result.count == len(partition.samples)
            del self.partitions[command.partition]
            return
        gone = {s.birth: s for s in self.named(partition, command.samples)}
        assert result.count == len(gone)
        for sample in gone.values():
            del partition.samples[sample.id]
            del partition.live[sample.row, sample.birth]

    def give_back(self, wanted: Callable[[Held], bool]) -> None:
        """The claims that `wanted` picks are over."""
        for partition in self.partitions.values():
            for sample in partition.samples.values():
                sample.claims = {task: held for task, held in sample.claims.items() if not wanted(held)}

    def claims_of(self, session: int) -> Iterable[Held]:
        """Claims of a session that go back if it dies."""
        for partition in self.partitions.values():
            for sample in partition.samples.values():
                for held in sample.claims.values():
                    if held.name[0] == session and self.returnable(held):
                        yield held

    def returnable(self, held: Held) -> bool:
        """Leased, or not yet confirmed by the watermark."""
        if held.acked:
            return False
        return held.until is not None or held.name[1] >= self.confirmed.get(held.name[0], 1)


def handles(samples: Samples) -> list[tuple[int, int]]:
    assert samples.rows is not None
    assert samples.births is not None
    return list(zip(samples.rows.tolist(), samples.births.tolist(), strict=True))


def sizes_of(column: CommitColumn) -> list[int]:
    return [int(length) * column.spec.unit_bytes for length in column.lengths]


def matches(sample: Sample, where: tuple[Predicate, ...]) -> bool:
    return all(p.tag in sample.tags and OPERATORS[p.op](sample.tags[p.tag], p.value) for p in where)


def merge_tags(samples: list[Sample], tags: tuple[TagColumn, ...]) -> None:
    for column in tags:
        positions = range(len(samples)) if column.positions is None else column.positions.tolist()
        for position, value in zip(positions, column.values, strict=True):
            samples[position].tags[column.name] = value
