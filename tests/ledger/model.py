"""A plain-dict model of the ledger: what each command must answer, and what each answer changes.

It predicts everything but free choices (where space is found, which waiter is served, when a silent session is given
up); those it only checks against the contract. `Faults` says which errors a command must or may be refused with.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dataplane.core.schema import field_of, variants_of
from dataplane.core.types import GRANULE_BYTES, Scalar
from dataplane.errors import DataPlaneError, StaleCallError, StaleSampleError
from dataplane.ledger import Ledger
from dataplane.ledger.commands import (
    Abort,
    Ack,
    Allocate,
    Allocated,
    Bye,
    Call,
    CheckConsumption,
    Claim,
    Claimed,
    Clear,
    Cleared,
    Command,
    Commit,
    CommitColumn,
    Committed,
    Consumption,
    Done,
    Drain,
    Extend,
    FindCells,
    FoundCells,
    List,
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
    Publish,
    ReadSaved,
    Register,
    Release,
    Samples,
    Save,
    Seal,
    SetTags,
    SetVersion,
    Stage,
    TagColumn,
    Unclaim,
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
    matches,
)
from tests.ledger.save_model import SaveBooks
from tests.ledger.values import checksums_in, granules, placement_ranges, value_locations

Settling = Ack | Nack | Extend


class Model(ClaimModel):
    """All by the names of calls: `reserved` is the space that a put has left, `granted` where its
    values go, `pins` what may be read, `found` the cells that a drain found, `shown` those that an
    answer told of, by field and in its order. `lease_s` is the longest lease of each claim,
    `sessions` are those that live. Without `all_checksums` readers may be told none."""

    def __init__(self, *, all_checksums: bool = True) -> None:
        super().__init__()
        self.all_checksums = all_checksums
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
        self.shown: dict[Name, dict[str, list[Location | None]]] = {}
        self.withdrawn: set[Name] = set()
        self.lease_s: dict[int, float] = {}
        self.sessions: set[int] = set()
        self.saves = SaveBooks(self)
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
        start = command.offset
        total = sum(granules_of(sum(sizes_of(column))) for column in command.columns)
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

    def settle_faults(self, partition: Partition, command: Settling) -> Faults:
        """What is done is done whatever becomes of the rest; samples that their claim does not hold are stale."""
        if command.task not in partition.tasks:
            return Faults({"TaskNotFoundError"})
        settled = self.settled(partition, command)
        held = [(sample.claims.get(command.task), claim) for _, sample, claim in settled]
        fine = all(may_settle(each, command, claim) for each, claim in held)
        return Faults(set() if fine else {"StaleSampleError"})

    def settled(self, partition: Partition, command: Settling) -> list[tuple[int, Sample, int | None]]:
        """The live samples that the command names, each with its place there and its claim."""
        claims: list[int | None] = [None] * len(command.samples) if command.claims is None else command.claims.tolist()
        if command.samples.ids is not None:
            found = [partition.samples.get(name) for name in command.samples.ids]
        else:
            found = [partition.live.get(handle) for handle in handles(command.samples)]
        named = enumerate(zip(found, claims, strict=True))
        return [(place, sample, claim) for place, (sample, claim) in named if sample is not None]

    # --- what inputs change -------------------------------------------------------------------

    def asked(self, call: Call) -> None:
        """The command, and which answers its client has by now."""
        session, number = call.session, call.call_id
        self.commands.setdefault((session, number), call.command)
        if call.watermark <= number:
            self.below[session] = max(self.below.get(session, 1), call.watermark)
            for first, last in zip(call.confirmed[::2], call.confirmed[1::2], strict=True):
                self.told.update((session, other) for other in range(first, last + 1))
            if session in self.sessions:
                self.pins = {name: pins for name, pins in self.pins.items() if not self.has_read(session, name)}

    def has_read(self, session: int, name: Name) -> bool:
        """Whether this session has confirmed the brief read of this name."""
        command = self.commands[name]
        confirmed = name[1] < self.below[session] or name in self.told
        return name[0] == session and confirmed and isinstance(command, Locate) and command.brief

    def passed(self, now: float) -> None:
        """The clock goes on."""
        self.now = now
        self.give_back(lambda held: held.until is not None and held.until <= now)

    def restarted(self) -> None:
        """All leases begin again, each as long as the longest of its claim."""
        for partition in self.partitions.values():
            for sample in partition.samples.values():
                for held in sample.claims.values():
                    if held.open:
                        held.until = self.now + self.lease_s[held.claim]

    def proven_gone(self, session: int, unit: int) -> None:
        """What the session held in this unit is free."""
        for name in [name for name in self.reserved if name[0] == session]:
            self.reserved[name] = [held for held in self.reserved[name] if held[0] != unit]
        for name in [name for name in self.pins if name[0] == session]:
            self.pins[name] = {place for place in self.pins[name] if place.unit != unit}

    def take_ended(self, ledger: Ledger) -> list[int]:
        """Sessions that the ledger has ended since: their claims went back first of all."""
        live = {session.session_id for session in ledger._state.sessions.values() if session.live}
        ended = sorted(self.sessions - live)
        for session in ended:
            self.sessions.discard(session)
            self.give_back(lambda held, mine=session: self.goes_with(mine, held))  # type: ignore[misc]
            self.saves.ended(session)
        return ended

    # --- what answers change ---------------------------------------------------------------------------------

    def answered(self, name: Name, command: Command, result: Any) -> None:
        """The answer is right; what it changes."""
        assert name not in self.withdrawn or isinstance(result, Done), f"{name} was withdrawn"
        match command:
            case Register():
                self.register(command)
            case Seal(partition=partition):
                self.partitions[partition].sealed = True
            case Allocate():
                self.allocated(name, command, result)
            case Preallocate():
                self.preallocated(name, command, result)
            case Commit():
                self.committed(name, command, result)
                if command.reservation is not None and command.offset is None:
                    del self.reserved[name[0], command.reservation]
            case Locate():
                self.located(name, command, result)
            case Claim():
                self.claimed(name, command, result)
            case Clear():
                self.cleared(command, result)
            case List():
                partition = self.partitions[command.partition]
                listed = partition.in_order()[: command.limit]
                if command.samples is not None:
                    listed = self.named(partition, command.samples)
                self.check_view(listed, result)
            case CheckConsumption():
                self.check_consumption(command, result)
            case FindCells():
                self.found_cells(name, command, result)
            case Ack() | Nack() | Extend():
                dead = set(range(len(command.samples))) - self.conclude(command, ())
                assert result.cleared.tolist() == sorted(dead)
            case Move():
                self.moved(name, command, result)
            case Save():
                self.saves.saved(name, command, result)
            case ReadSaved():
                self.saves.read(name, command, result)
            case Stage():
                self.saves.stage(name[0], command)
            case Publish():
                self.saves.publish(command)
            case Drain(unit=unit, undo=undo):
                (self.draining.discard if undo else self.draining.add)(unit)
            case SetVersion():
                self.partitions[command.partition].version = command.version
            case SetTags():
                tagged = self.named(self.partitions[command.partition], command.samples)
                merge_tags(tagged, command.tags)
            case Abort() | Release() | Unclaim() | Bye():
                self.undone(name[0], command)

    def undone(self, session: int, command: Abort | Release | Unclaim | Bye) -> None:
        """The client needs something no more."""
        match command:
            case Abort(reservation=number):
                self.reserved.pop((session, number), None)
                self.withdrawn.add((session, number))
            case Release(located=number):
                self.pins.pop((session, number), None)
                self.saves.taken.pop((session, number), None)
                self.withdrawn.add((session, number))
            case Unclaim(claimed=number):
                if not self.has_answer((session, number)):
                    self.give_back(lambda held: held.name == (session, number) and not held.acked)
                self.withdrawn.add((session, number))
            case Bye():
                for name in [name for name in self.reserved if name[0] == session]:
                    del self.reserved[name]

    def refused(self, name: Name, command: Command, error: DataPlaneError) -> None:
        if isinstance(command, Settling) and isinstance(error, StaleSampleError):
            self.conclude(command, error.positions)
        if isinstance(command, Commit) and (name[0], command.reservation) not in self.ahead:
            self.reserved.pop((name[0], command.reservation or 0), None)
        if isinstance(command, Move):
            self.reserved.pop((name[0], command.reservation), None)
        if isinstance(command, ReadSaved) and (name[0], command.saved) in self.saves.taken:
            assert isinstance(error, StaleCallError), f"{name} cannot read what was saved: {error}"

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
        self.grant(name, placement_ranges(sizes, result))
        self.granted[name] = result
        self.reserved_in[name] = self.partitions[command.partition].incarnation

    def preallocated(self, name: Name, command: Preallocate, result: Preallocated) -> None:
        self.grant(name, [(command.unit, result.offset, granules_of(command.nbytes))])
        self.ahead.add(name)

    def grant(self, name: Name, ranges: list[tuple[int, int, int]]) -> None:
        """A call may write there from now on; nobody uses these bytes."""
        before = {unit: self.in_use(unit) for unit, _, _ in ranges}
        for unit, offset, nbytes in ranges:
            assert unit not in self.draining or not nbytes, f"{name} may write to a drained unit"
            assert not offset % GRANULE_BYTES
            for granule in granules(offset, nbytes):
                assert granule not in before[unit], f"{name} was given bytes of {before[unit][granule]}"
        self.reserved[name] = ranges

    def cells(self) -> set[Location]:
        """All that may be read: what lives, and what is pinned."""
        live = {
            place
            for partition in self.partitions.values()
            for sample in partition.samples.values()
            for place in sample.cells.values()
        }
        return live.union(*self.pins.values())

    def in_use(self, unit: int) -> dict[int, Any]:
        """Granules in use, and by whom; no two values share bytes, no two extents a granule."""
        cells = [cell for cell in self.cells() if cell.unit == unit and cell.nbytes]
        spans = sorted((cell.offset, cell.offset + cell.nbytes, cell.value) for cell in cells)
        used: dict[int, Any] = {}
        end = 0
        for start, stop, value in spans:
            assert start >= end, f"{value} overlaps what ends at {end}"
            end = stop
            for granule in granules(start, stop - start):
                assert used.setdefault(granule, value)[:2] == value[:2], (
                    f"{value} shares a granule with {used[granule]}"
                )
        for name, held in self.reserved.items():
            for at, offset, nbytes in held:
                if at == unit:
                    for granule in granules(offset, nbytes):
                        mine = used.get(granule, (name,))[0] == name
                        assert mine, f"{name} may write to granule {granule} of {used[granule]}"
                        used[granule] = (name, "reserved", granule)
        return used

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
            self.check_contents(samples, result)
        else:
            assert (result.fields, result.tags) == ((), ())

    def cut_preallocated(self, name: Name, command: Commit) -> None:
        """The commit's columns follow each other from its offset, no longer in preallocated
        space."""
        assert command.reservation is not None
        assert command.offset is not None
        space = (name[0], command.reservation)
        unit, at, placements = self.reserved[space][0][0] if self.reserved[space] else 0, command.offset, []
        for number, column in enumerate(command.columns):
            sizes = sizes_of(column)
            last = len(sizes)
            placements.append(Placement(column=number, first=0, last=last, unit=unit, offset=at))
            at += granules_of(sum(sizes))
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
        shown = self.shown[name] = {}
        for found in result.fields:
            cells = [sample.cells[found.name] for sample in samples]
            shown[found.name] = [*cells]
            near = found.checksums is None and not self.all_checksums
            assert near or checksums_in(found) == [cell.checksum for cell in cells]
            for i, cell in enumerate(cells):
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
        assert len(set(result.offsets.tolist())) <= command.max_cells, "more than are the same bytes"
        cells = dict(zip(result.index.tolist(), self.found[name], strict=True))
        self.shown[name] = {result.field: [cells[k] for k in range(len(result.lengths))]}
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
            assert held is None, f"{sample.id} was claimed by {held} and by {name}"
            assert set(command.fields) <= sample.fields, f"{sample.id} was claimed before {command.fields}"
            assert matches(sample, self.conditions(command))
            samples.append(sample)
        assert len({s.id for s in samples}) == len(samples) <= command.batch_size
        assert not result.claim or result.claim not in self.lease_s, "a claim was made twice"
        self.lease_s[result.claim] = command.lease_s or 0.0
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

    def check_contents(self, samples: list[Sample], result: Claimed | Listed | Committed) -> None:
        if samples:
            assert set(result.fields) == set.intersection(*(sample.fields for sample in samples))
        tags: list[dict[str, Scalar]] = [{} for _ in samples]
        for column in result.tags:
            positions = range(len(samples)) if column.positions is None else column.positions.tolist()
            for position, value in zip(positions, column.each, strict=True):
                tags[position][column.name] = value
        assert tags == [s.tags for s in samples]

    def cleared(self, command: Clear, result: Cleared) -> None:
        """A staged partition can go only as a whole."""
        partition = self.partitions.get(command.partition)
        if partition is None:
            assert result.count == 0
            return
        if command.samples is None:
            assert result.count == len(partition.samples)
            del self.partitions[command.partition]
            self.saves.staged.pop(command.partition, None)
            return
        gone = {s.generation: s for s in self.named(partition, command.samples)}
        assert result.count == len(gone)
        for sample in gone.values():
            del partition.samples[sample.id]
            del partition.live[sample.row, sample.generation]

    # --- what follows claims

    def conclude(self, command: Settling, refused: Sequence[int]) -> set[int]:
        """Done to all samples of the command that live, but to those at the places that were
        refused: those that their claim does not hold. The places of all that live."""
        settled = self.settled(self.partitions[command.partition], command)
        for place, sample, claim in settled:
            held = sample.claims.get(command.task)
            allowed = may_settle(held, command, claim)
            assert allowed != (place in refused), f"{sample}: {command}, refused: {refused}"
            if not allowed:
                continue
            if isinstance(command, Nack):
                sample.claims.pop(command.task, None)
                continue
            assert held is not None
            if isinstance(command, Ack):
                held.until = None
                held.acked = True
            else:
                held.until = self.now + command.lease_s
                self.lease_s[held.claim] = max(self.lease_s[held.claim], command.lease_s)
        living = {place for place, _, _ in settled}
        assert living.issuperset(refused), f"cleared samples hold up the rest: {command}, {refused}"
        return living

    def check_consumption(self, command: CheckConsumption, result: Consumption) -> None:
        partition = self.partitions[command.partition]
        claims = [s.claims.get(task) for s in partition.samples.values() for task in command.tasks]
        settled = all(held is not None and not held.open for held in claims)
        assert result.consumed == (partition.complete and settled)

    def check_claims(self, ledger: Ledger) -> None:
        """To each task each sample is available, held for a rank, on lease or consumed."""
        for name, partition in self.partitions.items():
            samples = partition.in_order()
            rows = np.array([sample.row for sample in samples], np.int64)
            for task in partition.tasks:
                kept = ledger._state.partitions[name].tasks[task]
                owners = kept.owners_of(rows).tolist()
                states = list(map(state_of, kept.claim_ids[rows].tolist(), owners))
                expected = [expected_state(sample.claims.get(task)) for sample in samples]
                assert states == expected, (name, task, samples)
                assert kept.claimed == len(states) - states.count("available"), (name, task)
                assert kept.leased == states.count("leased"), (name, task)
                assert kept.held == states.count("held"), (name, task)

    def give_back(self, wanted: Callable[[Held], bool]) -> None:
        """The claims that `wanted` picks are over."""
        for partition in self.partitions.values():
            for sample in partition.samples.values():
                sample.claims = {task: held for task, held in sample.claims.items() if not wanted(held)}

    def claims_of(self, session: int) -> list[Held]:
        """Claims of a session that go back if it dies."""
        samples = [s for partition in self.partitions.values() for s in partition.samples.values()]
        claims = [held for sample in samples for held in sample.claims.values()]
        return [held for held in claims if self.goes_with(session, held)]

    def goes_with(self, session: int, held: Held) -> bool:
        """Whether the claim goes back if the session ends."""
        return held.name[0] == session and self.returnable(held)

    def returnable(self, held: Held) -> bool:
        """Leased, or not yet confirmed."""
        if held.acked:
            return False
        return held.until is not None or not self.has_answer(held.name)

    def has_answer(self, name: Name) -> bool:
        """Whether the client said that it has this answer: by its watermark, or by name."""
        return name[1] < self.below.get(name[0], 1) or name in self.told


def may_settle(held: Held | None, command: Settling, claim: int | None) -> bool:
    """Whether a command of that claim has its way with a sample that is held so."""
    if not isinstance(command, Nack):
        return held is not None and held.open and held.claim == claim != 0
    if held is None:
        return True
    return held.until is None if claim is None else held.claim == claim != 0 and not held.acked


def state_of(claim: int, owner: int) -> str:
    """What a sample is to a task by the ledger's books."""
    if not claim:
        assert not owner, f"a sample is available and owned by {owner}"
        return "available"
    return "held" if owner < 0 else "leased" if owner else "consumed"


def expected_state(held: Held | None) -> str:
    if held is None:
        return "available"
    if held.until is None:
        return "consumed"
    return "leased" if held.name[0] else "held"


def handles(samples: Samples) -> list[tuple[int, int]]:
    assert samples.rows is not None
    assert samples.generations is not None
    return list(zip(samples.rows.tolist(), samples.generations.tolist(), strict=True))


def granules_of(nbytes: int) -> int:
    """`nbytes` rounded up to whole granules."""
    return -(-nbytes // GRANULE_BYTES) * GRANULE_BYTES


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
