"""The model's claims: which samples a task may take now, and the shares of its steps."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataplane.core.schema import field_of
from dataplane.core.types import FieldSpec, Scalar
from dataplane.ledger import Limits
from dataplane.ledger.claims import samplers
from dataplane.ledger.commands import Claim, Command, Order, Predicate, WhenFull

LIMITS = Limits(preallocated_divisor=4, steps=3)
"""Of the ledger that the model test drives."""
Name = tuple[int, int]
"""(session, number) of a call."""
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
class Location:
    """A cell: what it is and where it lies."""

    unit: int
    offset: int
    nbytes: int
    length: int
    spec: FieldSpec
    value: tuple[Name, str, int]
    checksum: int = 0


@dataclass
class Held:
    """A claimed sample. `claim` is the claim's id, 0 where no client knows it. `acked`: it is final.
    `hold`: it waits for its rank, which is not to acknowledge it."""

    name: Name
    until: float | None
    claim: int = 0
    acked: bool = False
    hold: bool = False

    @property
    def open(self) -> bool:
        """Whether it counts as consumed only once it is acknowledged."""
        return self.until is not None and not self.hold


@dataclass
class Sample:
    id: str
    row: int
    generation: int
    since: float = 0.0
    cells: dict[str, Location] = field(default_factory=dict)
    tags: dict[str, Scalar] = field(default_factory=dict)
    claims: dict[str, Held] = field(default_factory=dict)

    @property
    def fields(self) -> set[str]:
        """A field may have two columns."""
        return set(map(field_of, self.cells))


@dataclass
class Selection:
    """A step's shares by rank. Samples held for a rank are claimed under `name`; `given` are the claims that got them,
    by rank; `late` are groups that were given in part, whatever becomes of them."""

    name: Name
    terms: tuple[Any, ...]
    shares: list[list[Sample]]
    given: dict[int, set[Name]] = field(default_factory=dict)
    late: set[Any] = field(default_factory=set)


@dataclass
class Partition:
    fields: dict[str, FieldSpec]
    num_samples: int | None
    tasks: tuple[str, ...]
    strict: bool
    incarnation: int
    sealed: bool = False
    born: int = 0
    samples: dict[str, Sample] = field(default_factory=dict)
    live: dict[tuple[int, int], Sample] = field(default_factory=dict)
    selections: dict[tuple[str, int], Selection] = field(default_factory=dict)
    forgotten: dict[str, int] = field(default_factory=dict)
    version: int | None = None
    budget: int | None = None
    when_full: WhenFull = WhenFull.WAIT

    @property
    def complete(self) -> bool:
        return self.sealed or (self.num_samples is not None and self.born >= self.num_samples)

    def in_order(self) -> list[Sample]:
        return sorted(self.samples.values(), key=lambda sample: sample.generation)

    def spec_of(self, name: str) -> FieldSpec | None:
        """What a put of the field must agree with."""
        for sample in self.samples.values():
            if name in sample.cells:
                return sample.cells[name].spec
        return self.fields.get(name)

    def names_kind(self, name: str) -> bool:
        """Whether a writer can take the field's kind from the schema."""
        spec = self.spec_of(name)
        return spec is not None and spec.kind is not None


@dataclass
class Faults:
    """Error names a command must be refused with (one of), or may be."""

    must: set[str] = field(default_factory=set)
    may: set[str] = field(default_factory=set)


class ClaimModel:
    """What the model knows of samples and who claimed them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.partitions: dict[str, Partition] = {}
        self.selected = 0

    # --- claims ----------------------------------------------------------------------------------------------

    def unclaimed(self, command: Claim) -> list[Sample]:
        partition = self.partitions[command.partition]
        return [s for s in partition.in_order() if command.task not in s.claims]

    def conditions(self, command: Claim) -> tuple[Predicate, ...]:
        if command.max_lag is None:
            return command.where
        least = (self.partitions[command.partition].version or 0) - command.max_lag
        return (*command.where, Predicate(tag=command.version_tag, op=">=", value=least))

    def units(self, command: Claim) -> list[list[Sample]]:
        """What it could take, in its order: samples, or whole groups."""
        where = self.conditions(command)
        ready = [s for s in self.unclaimed(command) if matches(s, where) and is_ready(s, command)]
        if command.order is Order.FRESHEST:
            ready = ready[::-1]
        if command.group_size is None:
            return [[sample] for sample in ready]
        groups: dict[Any, list[Sample]] = {}
        for sample in ready:
            if command.group_by in sample.tags:
                groups.setdefault(sample.tags[command.group_by], []).append(sample)
        late = self.overdue(command)[0]
        return [
            members[: command.group_size]
            for group, members in groups.items()
            if len(members) >= command.group_size or group in late
        ]

    def overdue(self, command: Claim) -> tuple[set[Any], bool]:
        """Partial groups whose time is over, and whether there are others."""
        late, others = set(), False
        if command.partial_after_s is None:
            return late, others
        groups: dict[Any, list[Sample]] = {}
        for sample in self.unclaimed(command):
            if command.group_by in sample.tags:
                groups.setdefault(sample.tags[command.group_by], []).append(sample)
        where = self.conditions(command)
        for group, members in groups.items():
            ready = sum(is_ready(s, command) for s in members)
            if ready < (command.group_size or 0) and any(matches(s, where) or undecided(s, where) for s in members):
                if members[0].since + command.partial_after_s <= self.now:
                    late.add(group)
                else:
                    others = True
        return late, others

    def more_can_come(self, command: Claim) -> bool:
        """Whether a sample that is unclaimed, or on lease, may still become one that the claim takes."""
        where = self.conditions(command)
        leased = [s for s in self.partitions[command.partition].in_order() if is_leased(s, command.task)]
        return any(
            undecided(s, where)
            or (matches(s, where) and not is_ready(s, command))
            or (matches(s, where) and command.group_size is not None and command.group_by not in s.tags)
            for s in self.unclaimed(command)
        ) or any(undecided(s, where) or matches(s, where) for s in leased)

    def expected_claim(self, command: Claim) -> list[list[Sample]] | None:
        """The units that the claim (or the selection of its step) takes if it is judged now; None: none yet."""
        partition = self.partitions[command.partition]
        size, ranks = command.group_size or 1, command.dp_world or 1
        units = self.units(command)[: command.batch_size // size]
        if len(units) >= (command.min_batch_size or command.batch_size) // (size * ranks) * ranks:
            return units[: len(units) // ranks * ranks]
        if partition.complete and not self.overdue(command)[1] and not self.more_can_come(command):
            return units
        return None if command.blocking or command.step is not None else units

    # --- shares

    def parked_faults(self, command: Command) -> Faults:
        """What a claim that waits may come to be refused with; a schema that became strict meanwhile does not count."""
        faults = Faults()
        if isinstance(command, Claim) and command.step is not None:
            self.share_faults(self.partitions[command.partition], command, faults)
        return faults

    def share_faults(self, partition: Partition, command: Claim, faults: Faults) -> None:
        assert command.step is not None
        assert command.dp_rank is not None
        fixed = partition.selections.get((command.task, command.step))
        if fixed is None:
            if command.step <= partition.forgotten.get(command.task, -1):
                faults.must.add("InvalidRequestError")
            return
        if terms_of(command) != fixed.terms:
            faults.must.add("InvalidRequestError")
            return
        had = fixed.given.get(command.dp_rank, set())
        lost = False
        free = False
        for sample in self.living_share(partition, fixed, command.dp_rank):
            held = sample.claims.get(command.task)
            free |= held is None or held.name == fixed.name
            lost |= held is not None and held.name != fixed.name and held.name not in had
        if lost:
            faults.must.add("ShareConflictError")
        elif had and not free:
            faults.must.add("InvalidRequestError")

    def living_share(self, partition: Partition, fixed: Selection, rank: int) -> list[Sample]:
        return [s for s in fixed.shares[rank] if partition.live.get((s.row, s.generation)) is s]

    def fix(self, command: Claim, units: list[list[Sample]], most: int) -> Selection:
        """The selection of the command's step is these units from now on."""
        assert command.step is not None
        assert command.dp_world is not None
        rows = [sample for unit in units for sample in unit]
        numbers = np.repeat(np.arange(len(units)), [len(unit) for unit in units]).astype(np.int64)
        lengths = [s.tags.get("input_lengths") for s in rows]
        known = all(type(length) in (int, float) for length in lengths)
        name = command.sampler or "length-balanced"
        picked = samplers.Picked(np.arange(len(rows)), numbers)
        ranks = samplers.shares(name, picked, command.dp_world, np.array(lengths, float) if known else None)
        dealt = [[s for s, to in zip(rows, ranks, strict=True) if to == rank] for rank in range(command.dp_world)]
        partition = self.partitions[command.partition]
        self.selected += 1
        fixed = Selection((0, self.selected), terms_of(command), dealt, late=self.overdue(command)[0])
        for sample in [sample for share in dealt for sample in share]:
            until = self.now + (command.lease_s or 600.0)
            sample.claims[command.task] = Held(fixed.name, until, hold=command.lease_s is None)
        partition.selections[command.task, command.step] = fixed
        steps = [step for task, step in partition.selections if task == command.task]
        if len(steps) > most:
            partition.forgotten[command.task] = max(partition.forgotten.get(command.task, -1), min(steps))
            del partition.selections[command.task, min(steps)]
        return fixed

    def take_share(self, name: Name, command: Claim, fixed: Selection) -> list[Sample]:
        """What the rank gets now; it is held for it no more."""
        assert command.dp_rank is not None
        share = []
        for sample in self.living_share(self.partitions[command.partition], fixed, command.dp_rank):
            held = sample.claims.get(command.task)
            if held is None or held.name == fixed.name:
                sample.claims.pop(command.task, None)
                share.append(sample)
        if share:
            fixed.given.setdefault(command.dp_rank, set()).add(name)
        return share


def terms_of(command: Claim) -> tuple[Any, ...]:
    """What all ranks of a step must agree on."""
    where = tuple((p.tag, p.op, p.value) for p in command.where)
    sizes = (command.max_lag, command.batch_size, command.min_batch_size, command.dp_world, command.group_size)
    return (*sizes, frozenset(command.fields), where, command.order, command.sampler or "length-balanced")


def is_leased(sample: Sample, task: str) -> bool:
    return task in sample.claims and sample.claims[task].open


def is_ready(sample: Sample, command: Claim) -> bool:
    return sample.fields.issuperset(command.fields)


def holds(predicate: Predicate, sample: Sample) -> bool:
    """Values that have no order fulfil no ordering."""
    try:
        return OPERATORS[predicate.op](sample.tags[predicate.tag], predicate.value)
    except TypeError:
        return False


def matches(sample: Sample, where: tuple[Predicate, ...]) -> bool:
    return all(p.tag in sample.tags and holds(p, sample) for p in where)


def undecided(sample: Sample, where: tuple[Predicate, ...]) -> bool:
    """It fails no predicate whose tag it carries, and lacks the tag of another."""
    lacks = any(p.tag not in sample.tags for p in where)
    return lacks and not any(p.tag in sample.tags and not holds(p, sample) for p in where)
