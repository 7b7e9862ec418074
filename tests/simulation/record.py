"""What must hold of a simulation, worked out from the ledger's inputs and outputs, and checked after
every one of them. What each answer must say, and what it changes, the ledger's model knows
(`tests/ledger/model.py`); here are the bytes of the units, and the causes for which the ledger may
give up a session.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dataplane.core.checksums import checksums_of
from dataplane.core.types import GRANULE_BYTES, granules_up
from dataplane.errors import DataPlaneError, InternalError
from dataplane.ledger import Ledger
from dataplane.ledger.commands import (
    AddUnit,
    Allocated,
    Answer,
    Bye,
    Call,
    Command,
    Commit,
    Committed,
    Heartbeat,
    Input,
    Move,
    Moved,
    Opened,
    Output,
    Preallocated,
    Restarted,
    SessionAttached,
    SessionGone,
    Tick,
    UnitAdded,
    UnitLost,
)
from tests.ledger.claim_model import Name
from tests.ledger.model import Model
from tests.ledger.values import canonical, granules

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
    """One column of a put."""

    name: str
    values: list[Value]


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


# --- The recorder stands between the simulated world and the real ledger. It owns the units' memory
# and poisons what the ledger frees.


TIMEOUT_S = 20.0
"""Silence after which the ledger may give up a session that no unit can prove alive."""


@dataclass
class Memory:
    """The bytes of one unit's arena, and the call each granule was last granted to."""

    data: bytearray
    granted: list[Name | None] = field(default_factory=list)

    @classmethod
    def of(cls, capacity: int) -> Memory:
        return cls(bytearray([POISON]) * capacity, [None] * (capacity // GRANULE_BYTES))


class Recorder:
    """The real ledger, watched. `plans` says what each reservation will hold, `portions` what lies from
    each offset of preallocated space; clients fill them in before they commit. `values` are those of
    the model's cells, `over` the sessions that the ledger may have ended."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.model = Model(all_checksums=False)
        self.log: list[Input] = []
        self.outputs: list[Output] = []
        self.memory: dict[int, Memory] = {}
        self.free: dict[int, np.ndarray[Any, np.dtype[np.bool_]]] = {}
        self.backed: dict[int, int] = {}
        self.plans: dict[Name, list[PlannedColumn]] = {}
        self.portions: dict[tuple[int, int, int], list[PlannedColumn]] = {}
        self.values: dict[tuple[Name, str, int], Value] = {}
        self.answers: dict[Name, Any] = {}
        self.over: set[int] = set()
        self.heard: dict[int, float] = {}
        self.attached: dict[int, set[int]] = defaultdict(set)
        self.connected: set[int] = set()

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
        ended = self.model.take_ended(self.ledger)
        assert self.over.issuperset(ended), f"sessions {ended} were given up without cause"
        for output in outputs:
            if isinstance(output, Answer):
                self.answered(output)
            if isinstance(output, Opened) and output.error is None:
                self.heard.setdefault(output.session, self.model.now)
                self.model.sessions.add(output.session)
            if isinstance(output, UnitAdded) and isinstance(item, AddUnit):
                self.connected.add(output.unit)
                if output.unit not in self.memory:
                    self.add_memory(output.unit, item.capacity_bytes)
        self.check_space()
        self.model.check_claims(self.ledger)
        self.sweep()
        return outputs

    def before(self, item: Input) -> None:
        match item:
            case Tick(now=now):
                self.model.passed(now)
                for session, heard in self.heard.items():
                    if now >= heard + TIMEOUT_S and not self.attached[session] & self.connected:
                        self.over.add(session)
            case Restarted():  # all sessions have their full time
                self.connected.clear()
                self.heard = dict.fromkeys(self.heard, self.model.now)
                self.model.restarted()
            case Heartbeat(session=session):
                self.heard[session] = self.model.now
            case SessionAttached(unit=unit, session=session):
                self.attached[session].add(unit)
            case UnitLost(unit=unit):
                self.connected.discard(unit)
            case SessionGone(unit=unit, session=session):
                self.over.add(session)
                self.model.proven_gone(session, unit)
            case Call(session=session):
                self.heard[session] = self.model.now
                self.model.asked(item)
                if isinstance(item.command, Bye):
                    self.over.add(session)

    # --- answers ---------------------------------------------------------------------------------------------

    def answered(self, answer: Answer) -> None:
        name = (answer.session, answer.call_id)
        assert not isinstance(answer.result, InternalError), answer.result
        said = canonical(answer.result)
        if name in self.answers:
            kind = type(answer.result).__name__
            withdrawn = kind == "CallCancelledError" and name in self.model.withdrawn
            over = kind in ("StaleCallError", "SessionExpiredError")
            assert self.answers[name] == said or withdrawn or over, (
                f"call {name} was answered twice, differently: {self.answers[name]} then {said}"
            )
            return
        self.answers[name] = said
        command = self.model.commands[name]
        if isinstance(answer.result, DataPlaneError):
            self.model.refused(name, command, answer.result)
            return
        self.name_values(name, command, answer.result)
        self.model.answered(name, command, answer.result)
        if isinstance(answer.result, Allocated | Preallocated):
            for unit, offset, nbytes in self.model.reserved[name]:
                capacity = len(self.memory[unit].data)
                assert 0 <= offset <= offset + nbytes <= capacity, (unit, offset, nbytes)
                for granule in granules(offset, nbytes):
                    self.memory[unit].granted[granule] = name

    def name_values(self, name: Name, command: Command, result: Any) -> None:
        """Which values the model's cells will be that this answer makes."""
        match command, result:
            case Commit(reservation=number), Committed() if number is not None:
                reservation = (name[0], number)
                plan = self.plans.get(reservation)
                if command.offset is not None:
                    plan = self.portions[*reservation, command.offset]
                    reservation = name
                assert plan is not None
                for column in plan:
                    for k, value in enumerate(column.values):
                        self.values[reservation, column.name, k] = value
            case Move(reservation=number), Moved():
                found = self.model.found[name[0], command.located]
                for cell, k in zip(found, command.index.tolist(), strict=True):
                    self.values[(name[0], number), command.field, k] = self.values[cell.value]

    def final(self, name: Name) -> None:
        """Its client made another call since it had the answer of this claim: the session's end takes nothing back."""
        session = self.ledger._state.sessions.get(name[0])
        assert session is None or name[1] not in session.unconfirmed, f"claim {name} is not final"

    # --- memory ----------------------------------------------------------------------------------------------

    def check_space(self) -> None:
        """Nothing in use is free; what became free is poisoned."""
        for unit, memory in self.memory.items():
            free = np.zeros(len(self.free[unit]), np.bool_)
            for offset, nbytes in self.ledger.free_ranges(unit):
                free[offset // GRANULE_BYTES : (offset + nbytes) // GRANULE_BYTES] = True
            used = self.model.in_use(unit)
            lost = {granule: used[granule] for granule in used if free[granule]}
            assert not lost, f"free and in use on unit {unit}: {lost}"
            for granule in np.flatnonzero(free & ~self.free[unit]).tolist():
                memory.data[granule * GRANULE_BYTES : (granule + 1) * GRANULE_BYTES] = bytes([POISON]) * GRANULE_BYTES
                memory.granted[granule] = None
            self.free[unit] = free

    def sweep(self) -> None:
        """Every live or pinned cell holds the bytes of its value."""
        for cell in self.model.cells():
            if cell.nbytes:
                data = self.memory[cell.unit].data[cell.offset : cell.offset + cell.nbytes]
                assert data == content(self.values[cell.value]), f"torn or stale: {cell}"

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
        cell = self.model.shown[name][field_name][position]
        assert cell is not None
        assert data == content(self.values[cell.value]), f"{name} read other bytes than {cell}"

    def all_free(self) -> bool:
        """Whether every backed byte of every arena is free."""
        return not self.ledger.held_ranges()
