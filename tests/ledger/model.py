"""A plain-dict model of the ledger: what each command must answer, and what each answer changes.

It predicts everything but free choices (where space is found, which waiter is served, when a silent session is given
up); those it only checks against the contract. `Faults` says which errors a command must or may be refused with.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable

from dataplane.core.schema import field_of, variants_of
from dataplane.core.types import GRANULE_BYTES, Scalar
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
    Extend,
    FieldLocations,
    FindCells,
    FoundCells,
    Listed,
    Locate,
    Located,
    Mode,
    Move,
    Moved,
    Nack,
    Placement,
    Preallocate,
    Preallocated,
    Register,
    Samples,
    SetTags,
    TagColumn,
    WhyBlocked,
)
from tests.ledger.claim_model import (
    ClaimModel,
    Faults,
    Held,
    Location,
    Name,
    Partition,
    Sample,
    fields_of_puts,
    matches,
)
from tests.ledger.values import placement_ranges, sizes_of_puts, value_locations


class Model(ClaimModel):
    def __init__(self) -> None:
        super().__init__()
        self.commands: dict[Name, Command] = {}
        self.reserved: dict[Name, list[tuple[int, int, int]]] = {}
        self.granted: dict[Name, Allocated] = {}
        self.incarnations = 0
        self.reserved_in: dict[Name, int] = {}
        self.ahead: set[Name] = set()
        self.pins: dict[Name, set[Location]] = {}
        self.generations: dict[str, set[int]] = {}
        self.below: dict[int, int] = {}
        self.told: set[Name] = set()
        self.found: dict[Name, list[Location]] = {}
        self.draining: set[int] = set()
        self.past: deque[tuple[str, tuple[int, int], int]] = deque(maxlen=12)

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
        if isinstance(command, FindCells):
            return Faults()
        if isinstance(command, Move):
            return self.move_faults(session, command)
        partition = self.partitions.get(getattr(command, "partition", ""))
        if partition is None:
            known = not getattr(command, "partition", "") or isinstance(command, Register | Clear)
            if isinstance(command, Clear) and command.samples is not None:
                return Faults(may={"PartitionNotFoundError"})
            return Faults(set() if known else {"PartitionNotFoundError"}, {"InvalidRequestError"})
        match command:
            case Commit():
                return self.commit_faults(session, partition, command)
            case Allocate():
                stale = any(column.by_schema and not partition.names_kind(column.name) for column in command.columns)
                return Faults({"StaleSchemaError"} if stale else set())
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
                if command.step is not None and not faults.must:
                    self.share_faults(partition, command, faults)
                return faults
            case WhyBlocked():
                return Faults(set() if command.task in partition.tasks else {"TaskNotFoundError"})
            case Ack() | Nack() | Extend():
                return self.settle_faults(partition, command)
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
        elif command.reservation is not None:
            faults.must |= self.space_faults((session, command.reservation), partition, command)
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
            elif column.by_schema and not partition.names_kind(column.name):
                faults.must.add("StaleSchemaError")
            elif partition.strict and column.name not in partition.fields:
                faults.may |= {"SchemaError", "InvalidRequestError"}
        if not self.sizes_agree(session, command):
            faults.must.add("InvalidRequestError")
        return faults

    def move_faults(self, session: int, command: Move) -> Faults:
        faults = Faults()
        if len(command.offsets) != len(command.lengths) or (session, command.located) not in self.pins:
            faults.must.add("InvalidRequestError")
        if (session, command.reservation) not in self.reserved:
            return Faults({"InvalidRequestError"})
        partition = self.partitions.get(command.partition)
        if partition is None:
            faults.must.add("PartitionNotFoundError")
        elif partition.incarnation != self.reserved_in[session, command.reservation]:
            faults.must.add("PartitionDroppedError")
        return faults

    def space_faults(self, reservation: Name, partition: Partition, command: Commit) -> set[str]:
        """What is wrong with committing this into that space."""
        if (command.offset is not None) != (reservation in self.ahead):
            return {"InvalidRequestError"}
        allocate = self.commands[reservation]
        if isinstance(allocate, Allocate) and allocate.moving:
            return {"InvalidRequestError"}
        if command.offset is None:
            return set() if self.reserved_in[reservation] == partition.incarnation else {"PartitionDroppedError"}
        puts = [put for column in command.columns for put in sizes_of_puts(sizes_of(column), command.put_sizes)]
        start, total = command.offset, sum(granules_of(sum(put)) for put in puts)
        fits = any(at <= start and start + total <= at + nbytes for _, at, nbytes in self.reserved[reservation])
        return set() if not start % GRANULE_BYTES and (fits or not total) else {"InvalidRequestError"}

    def sizes_agree(self, session: int, command: Commit) -> bool:
        if command.reservation is None:
            return not command.columns
        allocate = self.commands.get((session, command.reservation))
        if not isinstance(allocate, Allocate):
            return True
        want = [(column.name, column.sizes.tolist()) for column in allocate.columns]
        return want == [(column.name, sizes_of(column)) for column in command.columns]

    def settle_faults(self, partition: Partition, command: Ack | Nack | Extend) -> Faults:
        """What is done is done whatever becomes of the rest; samples that their claim does not hold are stale."""
        if command.task not in partition.tasks:
            return Faults({"TaskNotFoundError"})
        faults = Faults()
        for _, sample, claim in self.settled(partition, command):
            held = sample.claims.get(command.task)
            if not may_settle(held, command, claim):
                unsure = isinstance(command, Nack) and held is not None and held.limbo
                (faults.may if unsure else faults.must).add("StaleSampleError")
            elif held is not None and held.limbo and not isinstance(command, Nack):
                faults.may.add("StaleSampleError")
        return faults

    def settled(self, partition: Partition, command: Ack | Nack | Extend) -> list[tuple[int, Sample, int | None]]:
        """The live samples that the command names, each with its place there and its claim."""
        claims: list[int | None] = [None] * len(command.samples) if command.claims is None else command.claims.tolist()
        if command.samples.ids is not None:
            found = [partition.samples.get(name) for name in command.samples.ids]
        else:
            found = [partition.live.get(handle) for handle in handles(command.samples)]
        named = enumerate(zip(found, claims, strict=True))
        return [(place, sample, claim) for place, (sample, claim) in named if sample is not None]

    # --- what answers change ---------------------------------------------------------------------------------

    def register(self, command: Register) -> None:
        old = self.partitions.get(command.partition)
        self.incarnations += old is None
        incarnation = self.incarnations if old is None else old.incarnation
        new = Partition(dict(command.fields), command.num_samples, command.tasks, command.strict, incarnation)
        new.budget, new.when_full = command.budget_bytes, command.when_full
        if old is not None:
            new.samples, new.live = old.samples, old.live
            new.born = len(old.samples)
            new.version = old.version
            new.selections = {key: kept for key, kept in old.selections.items() if key[0] in command.tasks}
            new.forgotten = {task: step for task, step in old.forgotten.items() if task in command.tasks}
            for sample in new.samples.values():
                sample.claims = {task: held for task, held in sample.claims.items() if task in command.tasks}
        self.partitions[command.partition] = new

    def allocated(self, name: Name, command: Allocate, result: Allocated) -> None:
        sizes = [column.sizes.tolist() for column in command.columns]
        value_locations(sizes, result)
        self.reserved[name] = placement_ranges(sizes, result)
        self.granted[name] = result
        self.reserved_in[name] = self.partitions[command.partition].incarnation

    def preallocated(self, name: Name, command: Preallocate, result: Preallocated) -> None:
        self.reserved[name] = [(command.unit, result.offset, granules_of(command.nbytes))]
        self.ahead.add(name)

    def committed(self, name: Name, command: Commit, result: Committed) -> None:
        partition = self.partitions[command.partition]
        generations = self.generations.setdefault(command.partition, set())
        pairs = list(zip(result.rows.tolist(), result.generations.tolist(), strict=True))
        assert len(pairs) == len(command.samples)
        samples = []
        for i, (row, generation) in enumerate(pairs):
            if command.samples.ids is None:
                samples.append(partition.live[row, generation])
                assert handles(command.samples)[i] == (row, generation)
                continue
            sample = partition.samples.get(command.samples.ids[i])
            if sample is None:
                assert generation not in generations, f"generation {generation} given twice"
                assert (row, generation) not in partition.live
                generations.add(generation)
                sample = Sample(command.samples.ids[i], row, generation, self.now)
                partition.samples[sample.id] = partition.live[row, generation] = sample
                partition.born += 1
            assert (sample.row, sample.generation) == (row, generation)
            samples.append(sample)
        if command.offset is not None:
            self.cut_preallocated(name, command)
            self.switch(samples, name, command.columns)
        elif command.reservation is not None:
            self.switch(samples, (name[0], command.reservation), command.columns)
        merge_tags(samples, command.tags)
        if command.listed:
            self.check_contents(samples, result, command.put_sizes)
        else:
            assert (result.fields, result.tags, result.put_fields) == ((), (), ())

    def cut_preallocated(self, name: Name, command: Commit) -> None:
        """The commit's columns, or the values of each put in them, follow each other from its offset,
        no longer in preallocated space."""
        assert command.reservation is not None
        assert command.offset is not None
        space = (name[0], command.reservation)
        unit, at, placements = self.reserved[space][0][0] if self.reserved[space] else 0, command.offset, []
        for number, column in enumerate(command.columns):
            last = 0
            for put in sizes_of_puts(sizes_of(column), command.put_sizes):
                first, last = last, last + len(put)
                if put:
                    placements.append(Placement(column=number, first=first, last=last, unit=unit, offset=at))
                at += granules_of(sum(put))
        self.granted[name] = Allocated(placements=tuple(placements))
        left = []
        for _, start, nbytes in self.reserved[space]:
            if start <= command.offset < start + nbytes:
                left += [(unit, start, command.offset - start), (unit, at, start + nbytes - at)]
            else:
                left.append((unit, start, nbytes))
        self.reserved[space] = [piece for piece in left if piece[2]]

    def switch(self, samples: list[Sample], reservation: Name, columns: tuple[CommitColumn, ...]) -> None:
        places = value_locations([sizes_of(column) for column in columns], self.granted[reservation])
        for column, at in zip(columns, places, strict=True):
            index = range(len(samples)) if column.index is None else column.index.tolist()
            for sample, k in zip(samples, index, strict=True):
                length = int(column.lengths[k])
                nbytes = length * column.spec.unit_bytes
                value = (reservation, column.name, k)
                checksum = 0 if column.checksums is None else int(column.checksums[k])
                sample.cells[column.name] = Location(*at[k], nbytes, length, column.spec, value, checksum)
                sample.cells.pop(other_column(column.name), None)

    def located(self, name: Name, command: Locate, result: Located) -> None:
        samples = self.named(self.partitions[command.partition], command.samples)
        pairs = list(zip(result.rows.tolist(), result.generations.tolist(), strict=True))
        assert pairs == [(s.row, s.generation) for s in samples]
        assert [found.name for found in result.fields] == list(command.fields)
        self.pins[name] = set()
        for found in result.fields:
            assert checksums_in(found) == [sample.cells[found.name].checksum for sample in samples]
            for i, sample in enumerate(samples):
                cell = sample.cells[found.name]
                assert int(found.lengths[i]) == cell.length
                assert found.spec == cell.spec
                if cell.nbytes:
                    assert (int(found.units[i]), int(found.offsets[i])) == (cell.unit, cell.offset)
                self.pins[name].add(cell)

    def found_cells(self, name: Name, command: FindCells, result: FoundCells) -> None:
        """They lie there, and are pinned; all cells of one value are the same bytes."""
        live = [cell for p in self.partitions.values() for s in p.samples.values() for cell in s.cells.values()]
        sure = [cell for cell in live if cell.nbytes and cell.unit == command.unit]
        assert len(sure) <= result.cells <= len(sure) + sum(not cell.nbytes for cell in live)
        assert len(result.rows) or not result.cells, "there are cells, and none was found"
        self.found[name], self.pins[name] = [], set()
        for row, generation, k in zip(
            *(a.tolist() for a in (result.rows, result.generations, result.index)), strict=True
        ):
            cell = self.partitions[result.partition].live[row, generation].cells[result.field]
            assert (cell.length, cell.spec) == (int(result.lengths[k]), result.spec)
            assert not cell.nbytes or (cell.unit, cell.offset) == (command.unit, int(result.offsets[k]))
            assert cell.checksum == (0 if result.checksums is None else int(result.checksums[k]))
            self.found[name].append(cell)
            self.pins[name].add(cell)
        values = {cell.value for cell in self.found[name] if cell.nbytes}
        assert len(values) == sum(int(n) * result.spec.unit_bytes > 0 for n in result.lengths), "a value comes once"
        mine = [cell for p in self.partitions.values() for s in p.samples.values() for cell in s.cells.values()]
        assert all(mine.count(cell) == self.found[name].count(cell) for cell in self.found[name] if cell.nbytes)

    def moved(self, name: Name, command: Move, result: Moved) -> None:
        """Cells that are still what was found are the same elsewhere, and nothing else is."""
        partition, reservation = self.partitions[command.partition], (name[0], command.reservation)
        found, sizes = self.found[name[0], command.located], self.commands[reservation].columns[0].sizes.tolist()  # type: ignore[attr-defined]
        (places,) = value_locations([sizes], self.granted[reservation])
        count = 0
        for i, (row, generation) in enumerate(zip(command.rows.tolist(), command.generations.tolist(), strict=True)):
            sample, k = partition.live.get((row, generation)), int(command.index[i])
            if sample is not None and sample.cells.get(command.field) == found[i]:
                unit, offset = places[k]
                value = (reservation, command.field, k)
                sample.cells[command.field] = dataclasses.replace(found[i], unit=unit, offset=offset, value=value)
                count += 1
        assert (result.cells, result.skipped) == (count, len(found) - count)
        del self.reserved[reservation]
        self.pins.pop((name[0], command.located), None)

    def claimed(self, name: Name, command: Claim, result: Claimed) -> None:
        partition = self.partitions[command.partition]
        late = self.overdue(command)[0]
        fixed = None if command.step is None else partition.selections.get((command.task, command.step))
        if fixed is not None:
            late |= fixed.late
        samples = []
        for row, generation in zip(result.rows.tolist(), result.generations.tolist(), strict=True):
            assert (row, generation) in partition.live, f"{name} claimed a sample that is not live"
            sample = partition.live[row, generation]
            held = sample.claims.get(command.task)
            assert held is None or held.limbo, f"{sample.id} was claimed by {held} and by {name}"
            assert set(command.fields) <= sample.fields, f"{sample.id} was claimed before {command.fields}"
            assert matches(sample, self.conditions(command))
            samples.append(sample)
        assert len({s.id for s in samples}) == len(samples) <= command.batch_size
        for sample in samples:
            until = None if command.lease_s is None else self.now + command.lease_s
            held = sample.claims[command.task] = Held(name, until, result.claim)
            if command.partition == "p":
                self.past.append((command.task, (sample.row, sample.generation), held.claim))
        self.check_view(samples, result)
        if command.group_size is not None:
            groups = [s.tags.get(command.group_by) for s in samples]
            assert all(groups.count(group) == command.group_size or group in late for group in groups), groups

    def check_view(self, samples: list[Sample], result: Claimed | Listed) -> None:
        """Ids, common fields and tags are as the model has them."""
        assert list(result.ids) == [s.id for s in samples]
        self.check_contents(samples, result)

    def check_contents(
        self, samples: list[Sample], result: Claimed | Listed | Committed, put_sizes: tuple[int, ...] = ()
    ) -> None:
        if put_sizes:
            assert isinstance(result, Committed)
            assert [set(each.names) for each in result.put_fields] == fields_of_puts(samples, put_sizes)
        elif samples:
            assert [set(result.fields)] == fields_of_puts(samples, (len(samples),))
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
        gone = {s.generation: s for s in self.named(partition, command.samples)}
        assert result.count == len(gone)
        for sample in gone.values():
            del partition.samples[sample.id]
            del partition.live[sample.row, sample.generation]

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
        """Leased, or not yet confirmed."""
        if held.acked:
            return False
        return held.until is not None or not self.has_answer(held.name)

    def has_answer(self, name: Name) -> bool:
        """Whether the client said that it has this answer: by its watermark, or by name."""
        return name[1] < self.below.get(name[0], 1) or name in self.told


def may_settle(held: Held | None, command: Ack | Nack | Extend, claim: int | None) -> bool:
    """Whether a command of that claim has its way with a sample that is held so."""
    if not isinstance(command, Nack):
        return held is not None and held.open and held.claim == claim != 0
    if held is None:
        return True
    return held.until is None if claim is None else held.claim == claim != 0 and not held.acked


def handles(samples: Samples) -> list[tuple[int, int]]:
    assert samples.rows is not None
    assert samples.generations is not None
    return list(zip(samples.rows.tolist(), samples.generations.tolist(), strict=True))


def granules_of(nbytes: int) -> int:
    """`nbytes` rounded up to whole granules."""
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


def checksums_in(found: FieldLocations) -> list[int]:
    """Of each sample; 0 where there is none."""
    return [0] * len(found.lengths) if found.checksums is None else found.checksums.tolist()


def other_column(name: str) -> str:
    """Of the same field: a row has a cell in one of them."""
    field = field_of(name)
    return variants_of(field) if field == name else field


def sizes_of(column: CommitColumn) -> list[int]:
    return [int(length) * column.spec.unit_bytes for length in column.lengths]


def merge_tags(samples: list[Sample], tags: tuple[TagColumn, ...]) -> None:
    for column in tags:
        positions = range(len(samples)) if column.positions is None else column.positions.tolist()
        for position, value in zip(positions, column.values, strict=True):
            samples[position].tags[column.name] = value
