"""What must be true, worked out from the ledger's inputs and outputs alone, and checked after every one of them.

The recorder stands between the simulated world and the real ledger. It knows which bytes were granted to whom, which
cell holds which value where, and who has pinned what; it owns the units' memory and poisons what the ledger frees.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from dataplane.core.types import GRANULE_BYTES, granules_up
from dataplane.errors import DataPlaneError, InternalError
from dataplane.ledger import Ledger
from dataplane.ledger.commands import (
    Abort,
    AddUnit,
    Allocate,
    Allocated,
    Answer,
    Bye,
    Call,
    Clear,
    Cleared,
    Command,
    Commit,
    Committed,
    Heartbeat,
    Input,
    Locate,
    Located,
    Move,
    Opened,
    Output,
    Preallocate,
    Preallocated,
    Release,
    Restarted,
    Samples,
    SessionAttached,
    SessionGone,
    Tick,
    Unclaim,
    UnitAdded,
    UnitLost,
)
from tests.ledger.values import canonical, placement_ranges, value_places
from tests.simulation.claims import ClaimBooks
from tests.simulation.moves import MoveBooks
from tests.simulation.places import PlannedColumn, extent, granules, part_places, without
from tests.simulation.rows import POISON, Value, content
from tests.simulation.saves import SaveBooks

TIMEOUT_S = 20.0
"""Silence after which the ledger may give up a session that no unit can prove alive."""
Name = tuple[int, int]
"""(session, number) of a call."""


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
                self.calls.setdefault((item.session, item.number), item.command)
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
            case Abort(reservation=number):
                self.grants.pop((session, number), None)
                self.withdrawn.add((session, number))
            case Commit(reservation=number) if number is not None and (session, item.number) not in self.answers:
                if item.command.offset is None:
                    self.grants.pop((session, number), None)
                elif (session, number) in self.grants:
                    self.grants[session, number] = list(without(self.grants[session, number], *extent(item.command)))
            case Move(located=located, reservation=number) if (session, item.number) not in self.answers:
                self.grants.pop((session, number), None)
                self.pins.pop((session, located), None)
            case Release(located=number):
                self.pins.pop((session, number), None)
                self.saves.taken.pop((session, number), None)
                self.withdrawn.add((session, number))
            case Unclaim(claimed=number):
                self.withdrawn.add((session, number))
                self.claims.unclaimed((session, number))
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
        name = (answer.session, answer.number)
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
            return plan, part_places(plan, allocate.unit, command.offset)
        assert isinstance(allocate, Allocate)
        sizes = [column.sizes.tolist() for column in allocate.columns]
        return self.plans[reservation], value_places(sizes, self.placements[reservation])

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
