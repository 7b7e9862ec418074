"""What happened in a simulation and what must hold of it: rows, claims, saves, moves, and the bytes of the units."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dataplane.client.operations.sample_names import tags_of
from dataplane.core.checksums import checksums_of
from dataplane.core.types import GRANULE_BYTES, granules_up
from dataplane.errors import DataPlaneError, InternalError, StaleCallError, StaleSampleError
from dataplane.ledger import Ledger
from dataplane.ledger.commands import (
    Abort,
    Ack,
    AddUnit,
    Allocate,
    Allocated,
    Answer,
    Bye,
    Call,
    CheckConsumption,
    Claim,
    Claimed,
    ClaimsSettled,
    Clear,
    Cleared,
    Command,
    Commit,
    Committed,
    Consumption,
    Extend,
    FindCells,
    FoundCells,
    Heartbeat,
    Input,
    Locate,
    Located,
    Move,
    Moved,
    Nack,
    Opened,
    Output,
    Preallocate,
    Preallocated,
    Publish,
    ReadSaved,
    Release,
    Restarted,
    Result,
    Samples,
    Save,
    Saved,
    SavedRows,
    SessionAttached,
    SessionGone,
    SetTags,
    Stage,
    Tick,
    Unclaim,
    UnitAdded,
    UnitLost,
)
from tests.ledger.values import canonical, placement_ranges, value_locations

# --- Rows that describe themselves: a value's bytes follow from whose it is, which field, which
# version, how long.


POISON = 0xDB


class Value(NamedTuple):
    """One value that some client writes. `version` is unique in a run, so no two values have the same bytes."""

    owner: str
    field: str
    version: int
    nbytes: int


@lru_cache(maxsize=4096)
def content(value: Value) -> bytes:
    """The bytes of the value."""
    return hashlib.shake_128(f"{value.owner}/{value.field}/{value.version}".encode()).digest(value.nbytes)


def checksum(data: bytes) -> int:
    """What the writer of these bytes gives them."""
    memory = np.frombuffer(data, np.uint8)
    return int(checksums_of(memory, np.zeros(1, np.int64), np.array([len(data)]))[0])


# --- Where the values of a put lie.


@dataclass
class PlannedColumn:
    """One column of a put: its values, and which value each sample points at."""

    name: str
    values: list[Value]
    index: list[int]


def granules(offset: int, nbytes: int) -> range:
    return range(offset // GRANULE_BYTES, -(-(offset + nbytes) // GRANULE_BYTES))


def portion_locations(plan: list[PlannedColumn], unit: int, offset: int) -> list[list[tuple[int, int]]]:
    """(unit, offset) of every value of columns that lie one after another, each from a granule of its own."""
    places: list[list[tuple[int, int]]] = []
    for column in plan:
        places.append([])
        at = offset
        for value in column.values:
            places[-1].append((unit, at))
            at += value.nbytes
        offset += granules_up(at - offset)
    return places


def extent(command: Commit) -> tuple[int, int]:
    """Where a commit's part of preallocated space begins, and its bytes."""
    assert command.offset is not None
    return command.offset, sum(granules_up(int(c.lengths.sum()) * c.spec.unit_bytes) for c in command.columns)


def without(ranges: list[tuple[int, int, int]], offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """(unit, offset, nbytes) of what is left of ranges of one unit."""
    for unit, start, size in ranges:
        for first, last in ((start, min(offset, start + size)), (max(offset + nbytes, start), start + size)):
            if last > first:
                yield unit, first, last - first


# --- Who holds which sample, by the answers of claims and of what follows them.


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


# --- What the recorder knows of checkpoints: what was saved, which partitions are staged, what a
# publication makes.


Snapshot = list[tuple[str, "dict[str, Cell]"]]
"""(id, cells by field) of each sample, oldest first."""


class SaveBooks:
    """`taken` are the partitions of each Save as they were, until its Release; `staged` names the session of each
    staged partition."""

    def __init__(self, record: Recorder) -> None:
        self.record = record
        self.taken: dict[Name, dict[str, Snapshot]] = {}
        self.staged: dict[str, int] = {}

    @property
    def doubtful(self) -> set[str]:
        """Staged partitions that may have gone with their sessions by now."""
        return {partition for partition, session in self.staged.items() if session in self.record.over}

    def answered(self, name: Name, command: Command, result: Any) -> None:
        match command:
            case Save():
                self.saved(name, command, result)
            case ReadSaved():
                self.read(name, command, result)
            case Stage():
                self.staged[command.partition] = name[0]
            case Publish():
                for staged, wanted in zip(command.staged, command.partitions, strict=True):
                    self.published(staged, wanted.partition, wanted.live)

    def refused(self, name: Name, command: Command, error: DataPlaneError) -> None:
        """What was saved is there until it is released, or its session ends. A call that is too late to be executed has
        a caller that gave up (see `Client.answered`)."""
        late = isinstance(error, StaleCallError)
        if isinstance(command, ReadSaved) and (name[0], command.saved) in self.taken and not late:
            assert name[0] in self.record.over, f"{name} cannot read what call {command.saved} saved: {error}"

    def saved(self, name: Name, command: Save, result: Saved) -> None:
        record = self.record
        assert name not in record.withdrawn, f"{name} was released, then saved"
        self.taken[name] = {partition: self.snapshot(partition) for partition in command.partitions}
        for found in result.partitions:
            snapshot = self.taken[name][found.partition]
            assert found.live == len(snapshot), (found, snapshot)
        record.pins[name] = [
            cell for snapshot in self.taken[name].values() for _, cells in snapshot for cell in cells.values()
        ]

    def snapshot(self, partition: str) -> Snapshot:
        ids = {generation: name for (at, name), (_, generation) in self.record.ids.items() if at == partition}
        return [(ids[generation], dict(self.record.cells[partition, generation])) for generation in sorted(ids)]

    def read(self, name: Name, command: ReadSaved, result: SavedRows) -> None:
        """It says what was there then, whatever was put and cleared since."""
        rows = self.taken[name[0], command.saved][command.partition][command.first : command.last]
        assert list(result.ids) == [each for each, _ in rows], (result.ids, rows)
        self.record.located[name] = {}
        for found in result.fields:
            cells = [cells.get(found.name) for _, cells in rows]
            for i, cell in enumerate(cells):
                nbytes = int(found.lengths[i]) * found.spec.unit_bytes
                assert (cell is None) == (nbytes < 0), (cell, found)
                assert cell is None or nbytes == cell.value.nbytes, (cell, nbytes)
                if cell is not None and nbytes:
                    assert (int(found.units[i]), int(found.offsets[i])) == (cell.unit, cell.offset), (cell, found)
            self.record.located[name][found.name] = cells  # type: ignore[assignment]
        self.record.counts["pieces of saves read"] += 1

    def published(self, staged: str, partition: str, live: int) -> None:
        """What was staged is the partition of that name now, and what was that is no more."""
        record = self.record
        del self.staged[staged]
        record.ids = {key: handle for key, handle in record.ids.items() if key[0] != partition}
        record.cells = {key: cells for key, cells in record.cells.items() if key[0] != partition}
        record.born = {key for key in record.born if key[0] != partition}
        record.ids = {(_named(key[0], staged, partition), key[1]): handle for key, handle in record.ids.items()}
        record.cells = {(_named(key[0], staged, partition), key[1]): cells for key, cells in record.cells.items()}
        record.born = {(_named(key[0], staged, partition), key[1]) for key in record.born}
        assert sum(key[0] == partition for key in record.cells) == live, "other samples were published than staged"
        record.counts["published"] += 1


def _named(name: str, staged: str, partition: str) -> str:
    return partition if name == staged else name


# --- What the recorder knows of draining: which cells were found on a unit, and which of them were
# moved.


class Page(NamedTuple):
    """Cells of a field that were found: whose they are, and which value each is."""

    partition: str
    field: str
    generations: list[int]
    cells: list[Cell]
    index: list[int]


class MoveBooks:
    """`pages` are what each FindCells found."""

    def __init__(self, record: Recorder) -> None:
        self.record = record
        self.pages: dict[Name, Page] = {}

    def answered(self, name: Name, command: Command, result: Any) -> None:
        match command, result:
            case FindCells(), FoundCells():
                self.found(name, command, result)
            case Move(), Moved():
                self.moved(name, command, result)

    def found(self, name: Name, command: FindCells, result: FoundCells) -> None:
        """What is found is there; nothing is found only where nothing is."""
        record = self.record
        assert name not in record.withdrawn, f"{name} was released, then pinned"
        if not len(result.rows):
            left = [why for *_, why in record.in_use(command.unit) if why.startswith("live")]
            assert not left, f"{name} found nothing on unit {command.unit}, where there is {left}"
            return
        generations, index = result.generations.tolist(), result.index.tolist()
        cells = [record.cells[result.partition, generation][result.field] for generation in generations]
        for cell, k in zip(cells, index, strict=True):
            nbytes = int(result.lengths[k]) * result.spec.unit_bytes
            assert nbytes == cell.value.nbytes, (cell, nbytes)
            assert not nbytes or (command.unit, int(result.offsets[k])) == (cell.unit, cell.offset), (cell, result)
        assert len(set(result.offsets.tolist())) <= command.max_cells, "more than are the same bytes"
        self.pages[name] = Page(result.partition, result.field, generations, cells, index)
        record.pins[name] = list(cells)
        values = dict(zip(index, cells, strict=True))
        record.located[name] = {result.field: [values[k] for k in range(len(result.lengths))]}

    def moved(self, name: Name, command: Move, result: Moved) -> None:
        """The cells that were found and not written since are at their copies now; no others."""
        record = self.record
        page = self.pages[name[0], command.located]
        allocate = record.calls[name[0], command.reservation]
        assert isinstance(allocate, Allocate)
        sizes = [column.sizes.tolist() for column in allocate.columns]
        (places,) = value_locations(sizes, record.placements[name[0], command.reservation])
        moved = 0
        for generation, cell, k in zip(page.generations, page.cells, page.index, strict=True):
            cells = record.cells.get((page.partition, generation), {})
            if cells.get(page.field) is cell:
                unit, offset = places[k]
                cells[page.field] = cell._replace(unit=unit, offset=offset)
                moved += 1
            elif page.field in cells:
                record.counts["cells written before they were moved"] += 1
        assert (result.cells, result.skipped) == (moved, len(page.cells) - moved), (result, moved, page)
        record.counts["cells moved"] += moved
        record.counts["cells gone before they were moved"] += result.skipped


# --- What must be true, worked out from the ledger's inputs and outputs alone, and checked after
# every one of them. The recorder stands between the simulated world and the real ledger. It knows
# which bytes were granted to whom, which cell holds which value where, and who has pinned what;
# it owns the units' memory and poisons what the ledger frees.


TIMEOUT_S = 20.0
"""Silence after which the ledger may give up a session that no unit can prove alive."""
Name = tuple[int, int]
"""(session, call id) of a call."""


class Cell(NamedTuple):
    """Where a value lies."""

    value: Value
    unit: int
    offset: int


@dataclass
class Memory:
    """The bytes of one unit's arena, and the call each granule was last granted to."""

    data: bytearray
    granted: list[Name | None] = field(default_factory=list)

    @classmethod
    def of(cls, capacity: int) -> Memory:
        return cls(bytearray([POISON]) * capacity, [None] * (capacity // GRANULE_BYTES))


class Recorder:
    """The real ledger, watched. `plans` says what each reservation will hold, `parts` what lies from each offset of
    preallocated space; clients fill them in before they commit."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.log: list[Input] = []
        self.outputs: list[Output] = []
        self.now = 0.0
        self.memory: dict[int, Memory] = {}
        self.free: dict[int, np.ndarray[Any, np.dtype[np.bool_]]] = {}
        self.plans: dict[Name, list[PlannedColumn]] = {}
        self.parts: dict[tuple[int, int, int], list[PlannedColumn]] = {}
        self.calls: dict[Name, Command] = {}
        self.answers: dict[Name, Any] = {}
        self.grants: dict[Name, list[tuple[int, int, int]]] = {}
        self.placements: dict[Name, Allocated] = {}
        self.pins: dict[Name, list[Cell]] = {}
        self.located: dict[Name, dict[str, list[Cell]]] = {}
        self.withdrawn: set[Name] = set()
        self.ids: dict[tuple[str, str], tuple[int, int]] = {}
        self.cells: dict[tuple[str, int], dict[str, Cell]] = {}
        self.born: set[tuple[str, int]] = set()
        self.claims = ClaimBooks(self)
        self.over: set[int] = set()
        self.heard: dict[int, float] = {}
        self.attached: dict[int, set[int]] = defaultdict(set)
        self.connected: set[int] = set()
        self.epochs: dict[str, int] = {}
        self.counts: dict[str, int] = defaultdict(int)
        self.saves = SaveBooks(self)
        self.moves = MoveBooks(self)
        self.backed: dict[int, int] = {}

    def add_memory(self, unit: int, capacity: int) -> None:
        self.memory[unit] = Memory.of(capacity)
        self.free[unit] = np.zeros(capacity // GRANULE_BYTES, np.bool_)

    # --- the ledger ------------------------------------------------------------------------------------------

    def apply(self, item: Input) -> list[Output]:
        """Give the input to the ledger, take note of what follows, check everything, poison what became free."""
        self.log.append(item)
        self.before(item)
        outputs = self.ledger.apply(item)
        self.outputs.extend(outputs)
        for output in outputs:
            if isinstance(output, Answer):
                self.answered(output)
            if isinstance(output, Opened) and output.error is None:
                self.heard.setdefault(output.session, self.now)
            if isinstance(output, UnitAdded) and isinstance(item, AddUnit):
                self.connected.add(output.unit)
                self.counts["units restarted"] += item.epoch > self.epochs.get(item.cookie, item.epoch)
                self.epochs[item.cookie] = item.epoch
                if output.unit not in self.memory:
                    self.add_memory(output.unit, item.capacity_bytes)
        self.check_space()
        self.claims.check()
        self.sweep()
        return outputs

    def before(self, item: Input) -> None:
        match item:
            case Tick(now=now):
                self.now = now
                for session, heard in self.heard.items():
                    if now >= heard + TIMEOUT_S and not self.attached[session] & self.connected:
                        self.over.add(session)
            case Restarted():
                self.restarted()
            case Heartbeat(session=session):
                self.heard[session] = self.now
            case SessionAttached(unit=unit, session=session):
                self.attached[session].add(unit)
            case UnitLost(unit=unit):
                self.connected.discard(unit)
            case SessionGone():
                self.session_gone(item)
            case Call():
                self.heard[item.session] = self.now
                self.calls.setdefault((item.session, item.call_id), item.command)
                self.end_use(item)

    def restarted(self) -> None:
        """In a new run of the service all sessions have their full time, and all leases begin again."""
        self.connected.clear()
        self.heard = dict.fromkeys(self.heard, self.now)
        self.claims.restarted()

    def end_use(self, item: Call) -> None:
        """A command by which a client says that it no longer uses something."""
        session = item.session
        match item.command:
            case Abort(reservation=call_id):
                self.grants.pop((session, call_id), None)
                self.withdrawn.add((session, call_id))
            case Commit(reservation=call_id) if call_id is not None and (session, item.call_id) not in self.answers:
                if item.command.offset is None:
                    self.grants.pop((session, call_id), None)
                elif (session, call_id) in self.grants:
                    self.grants[session, call_id] = list(without(self.grants[session, call_id], *extent(item.command)))
            case Move(located=located, reservation=call_id) if (session, item.call_id) not in self.answers:
                self.grants.pop((session, call_id), None)
                self.pins.pop((session, located), None)
            case Release(located=call_id):
                self.pins.pop((session, call_id), None)
                self.saves.taken.pop((session, call_id), None)
                self.withdrawn.add((session, call_id))
            case Unclaim(claimed=call_id):
                self.withdrawn.add((session, call_id))
                self.claims.unclaimed((session, call_id))
            case Bye():
                self.over.add(session)
                self.grants = {name: held for name, held in self.grants.items() if name[0] != session}

    def session_gone(self, item: SessionGone) -> None:
        """From now on nothing of the session can touch the unit's bytes."""
        self.over.add(item.session)
        self.nothing_touches(item.session, item.unit)

    def nothing_touches(self, session: int, unit: int) -> None:
        """What the session held there it holds no more."""
        for name in [name for name in self.grants if name[0] == session]:
            self.grants[name] = [held for held in self.grants[name] if held[0] != unit]
        for name in [name for name in self.pins if name[0] == session]:
            self.pins[name] = [cell for cell in self.pins[name] if cell.unit != unit]

    # --- answers ---------------------------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        name = (answer.session, answer.call_id)
        assert not isinstance(answer.result, InternalError), answer.result
        said = canonical(answer.result)
        if name in self.answers:
            kind = type(answer.result).__name__
            withdrawn = kind == "CallCancelledError" and name in self.withdrawn
            over = kind in ("StaleCallError", "SessionExpiredError")
            assert self.answers[name] == said or withdrawn or over, (
                f"call {name} was answered twice, differently: {self.answers[name]} then {said}"
            )
            return
        self.answers[name] = said
        command = self.calls[name]
        kind = type(answer.result).__name__
        self.counts[f"{type(command).__name__}:{kind}"] += 1
        if isinstance(answer.result, DataPlaneError):
            self.saves.refused(name, command, answer.result)
            self.claims.refused(command, answer.result)
            return
        self.claims.answered(name, command, answer.result)
        self.saves.answered(name, command, answer.result)
        self.moves.answered(name, command, answer.result)
        match command, answer.result:
            case Allocate(), Allocated():
                self.allocated(name, command, answer.result)
            case Preallocate(), Preallocated():
                self.preallocated(name, command, answer.result)
            case Commit(), Committed():
                self.committed(name, command, answer.result)
            case Locate(), Located():
                self.locate(name, command, answer.result)
            case Clear(), Cleared():
                self.cleared(command, answer.result)

    def allocated(self, name: Name, command: Allocate, result: Allocated) -> None:
        assert name not in self.withdrawn, f"{name} was aborted, then granted"
        self.granted(name, placement_ranges([column.sizes.tolist() for column in command.columns], result))
        self.placements[name] = result

    def preallocated(self, name: Name, command: Preallocate, result: Preallocated) -> None:
        assert name not in self.withdrawn, f"{name} was aborted, then granted"
        self.granted(name, [(command.unit, result.offset, granules_up(command.nbytes))])

    def granted(self, name: Name, ranges: list[tuple[int, int, int]]) -> None:
        for unit, offset, nbytes in ranges:
            assert offset % GRANULE_BYTES == 0
            assert 0 <= offset <= offset + nbytes <= len(self.memory[unit].data), (unit, offset, nbytes)
            assert self.free_before(unit, offset, nbytes), f"{name} was given bytes in use: {unit, offset, nbytes}"
            for granule in granules(offset, nbytes):
                self.memory[unit].granted[granule] = name
        self.grants[name] = ranges

    def free_before(self, unit: int, offset: int, nbytes: int) -> bool:
        """Whether nothing live, pinned or writable lies there, by the recorder's own books."""
        wanted = set(granules(offset, nbytes))
        return not any(wanted & set(granules(at, size)) for at, size, _ in self.in_use(unit))

    def in_use(self, unit: int) -> list[tuple[int, int, str]]:
        """(offset, nbytes, why) of everything that must not be reused."""
        used = [
            (offset, nbytes, f"granted to {name}")
            for name, held in self.grants.items()
            for at, offset, nbytes in held
            if at == unit
        ]
        used += [
            (cell.offset, cell.value.nbytes, f"live {cell.value}")
            for key, cells in self.cells.items()
            for cell in cells.values()
            if cell.unit == unit and key[0] not in self.saves.doubtful
        ]
        used += [
            (cell.offset, cell.value.nbytes, f"pinned by {name}")
            for name, cells in self.pins.items()
            for cell in cells
            if cell.unit == unit
        ]
        return [entry for entry in used if entry[1]]

    def committed(self, name: Name, command: Commit, result: Committed) -> None:
        handles = list(zip(result.rows.tolist(), result.generations.tolist(), strict=True))
        self.check_handles(command.samples, result)
        for i, (row, generation) in enumerate(handles):
            if command.samples.ids is not None:
                key = (command.partition, command.samples.ids[i])
                if self.ids.get(key) != (row, generation):
                    assert key not in self.ids, f"{key} lives already as {self.ids[key]}"
                    assert (command.partition, generation) not in self.born, f"generation {generation} was used before"
                    self.born.add((command.partition, generation))
                    self.ids[key] = (row, generation)
                    self.cells[command.partition, generation] = {}
            else:
                assert (command.partition, generation) in self.cells, f"a ghost row: {generation}"
        if command.reservation is None:
            return
        plan, places = self.planned(name[0], command)
        for column, at in zip(plan, places, strict=True):
            for i, (_, generation) in enumerate(handles):
                k = column.index[i]
                self.cells[command.partition, generation][column.name] = Cell(column.values[k], *at[k])

    def planned(self, session: int, command: Commit) -> tuple[list[PlannedColumn], list[list[tuple[int, int]]]]:
        """What the commit's client wrote, and where each value of each column lies."""
        assert command.reservation is not None
        reservation = (session, command.reservation)
        allocate = self.calls[reservation]
        if isinstance(allocate, Preallocate):
            assert command.offset is not None
            plan = self.parts[session, command.reservation, command.offset]
            return plan, portion_locations(plan, allocate.unit, command.offset)
        assert isinstance(allocate, Allocate)
        sizes = [column.sizes.tolist() for column in allocate.columns]
        return self.plans[reservation], value_locations(sizes, self.placements[reservation])

    def check_handles(self, asked: Samples, result: Committed | Located) -> None:
        """The samples answered for are those asked for, not others that took their place."""
        assert len(result.generations) == len(asked)
        if asked.generations is not None:
            assert result.generations.tolist() == asked.generations.tolist(), "a stale handle named another sample"

    def locate(self, name: Name, command: Locate, result: Located) -> None:
        self.check_handles(command.samples, result)
        located: dict[str, list[Cell]] = {}
        for found in result.fields:
            cells = []
            for i, generation in enumerate(result.generations.tolist()):
                cell = self.cells[command.partition, generation][found.name]
                nbytes = int(found.lengths[i]) * found.spec.unit_bytes
                assert nbytes == cell.value.nbytes, (cell, nbytes)
                if nbytes:
                    assert (int(found.units[i]), int(found.offsets[i])) == (cell.unit, cell.offset), (cell, found)
                cells.append(cell)
            located[found.name] = cells
        assert set(located) == set(command.fields)
        self.located[name] = located
        assert name not in self.withdrawn, f"{name} was released, then pinned"
        self.pins[name] = [cell for cells in located.values() for cell in cells]

    def cleared(self, command: Clear, result: Cleared) -> None:
        gone = self.named(command.partition, command.samples)
        assert result.count == len(gone), (result.count, gone)
        self.ids = {
            key: handle for key, handle in self.ids.items() if key[0] != command.partition or handle[1] not in gone
        }
        for generation in gone:
            del self.cells[command.partition, generation]

    def named(self, partition: str, samples: Samples | None) -> set[int]:
        """Births of the live samples meant."""
        if samples is None:
            return {generation for at, generation in self.cells if at == partition}
        if samples.ids is not None:
            return {self.ids[partition, i][1] for i in samples.ids if (partition, i) in self.ids}
        assert samples.generations is not None
        return {generation for generation in samples.generations.tolist() if (partition, generation) in self.cells}

    # --- memory ----------------------------------------------------------------------------------------------

    def check_space(self) -> None:
        """Nothing in use is free; what became free is poisoned."""
        for unit, memory in self.memory.items():
            free = np.zeros(len(self.free[unit]), np.bool_)
            for offset, nbytes in self.ledger.free_ranges(unit):
                free[offset // GRANULE_BYTES : (offset + nbytes) // GRANULE_BYTES] = True
            for offset, nbytes, why in self.in_use(unit):
                span = granules(offset, nbytes)
                assert not free[span.start : span.stop].any(), f"unit {unit} [{offset}, +{nbytes}) is free but {why}"
            for granule in np.flatnonzero(free & ~self.free[unit]).tolist():
                memory.data[granule * GRANULE_BYTES : (granule + 1) * GRANULE_BYTES] = bytes([POISON]) * GRANULE_BYTES
                memory.granted[granule] = None
            self.free[unit] = free

    def sweep(self) -> None:
        """Every live or pinned cell holds the bytes of its value."""
        for key, cells in self.cells.items():
            for cell in [] if key[0] in self.saves.doubtful else cells.values():
                self.verify(cell)
        for pinned in self.pins.values():
            for cell in pinned:
                self.verify(cell)

    def verify(self, cell: Cell) -> None:
        if cell.value.nbytes:
            data = self.memory[cell.unit].data[cell.offset : cell.offset + cell.value.nbytes]
            assert data == content(cell.value), f"torn or stale: {cell}"

    def write(self, unit: int, offset: int, data: bytes, grant: Name) -> None:
        """A client's (or a unit's) copy into the arena."""
        for granule in granules(offset, len(data)):
            assert self.memory[unit].granted[granule] == grant, (
                f"{grant} wrote to granule {granule} of unit {unit}, granted to {self.memory[unit].granted[granule]}"
            )
        assert offset + len(data) <= self.backed[unit], f"{grant} wrote to what unit {unit} has given back"
        self.memory[unit].data[offset : offset + len(data)] = data
        self.sweep()

    def read(self, unit: int, offset: int, nbytes: int) -> bytes:
        return bytes(self.memory[unit].data[offset : offset + nbytes])

    def check_read(self, name: Name, field_name: str, position: int, data: bytes) -> None:
        """What a client read through the pin of call `name` is what was there when it was located."""
        cell = self.located[name][field_name][position]
        assert data == content(cell.value), f"{name} read other bytes than {cell}"
        self.counts["rows read"] += 1

    def all_free(self) -> bool:
        """Whether every backed byte of every arena is free."""
        return not self.ledger.held_ranges()
