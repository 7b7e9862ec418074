"""Room for puts: reservations, waiting for room, room ahead of small puts, and growing arenas ahead of demand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.errors import CapacityTimeoutError, DataPlaneError, InvalidRequestError, RequestTooLargeError
from dataplane.ledger.arrays import top
from dataplane.ledger.commands import (
    Allocate,
    AllocateAhead,
    Allocated,
    AllocatedAhead,
    GrowArena,
    Int64s,
    OnFull,
    Placement,
)
from dataplane.ledger.integrity import are_wanted
from dataplane.ledger.liveness import Liveness
from dataplane.ledger.placing import Piece, Want, growth, growth_ahead, place
from dataplane.ledger.sessions import ParkedAllocate, Reservation, RoomAhead, Session
from dataplane.ledger.space import granules_up
from dataplane.ledger.state import State
from dataplane.ledger.units import Unit

MAX_BYTES = 1 << 62


class Rooms:
    """Waiters are served first come, first served within updates and within new rows, updates first."""

    def __init__(self, state: State, liveness: Liveness) -> None:
        self.state = state
        self.liveness = liveness

    def allocate(self, session: Session, number: int, command: Allocate) -> Allocated | None:
        """The reservation, or None when the call was parked."""
        partition = self.state.partition(command.partition)
        self._check(command)
        want = Want(session, command)
        self._refuse_hopeless(want)
        waiters = self.state.room_waiters[command.update]
        pieces = None if waiters else self._place(want)
        parked = ParkedAllocate(session, number, self.state.now, command, partition)
        if pieces is not None:
            return self._reserve(parked, pieces)
        self.liveness.probe_silent()
        if self._rejects(want, command):
            raise self.out_of_room(parked)
        self.state.park(parked)
        return None

    def allocate_ahead(self, session: Session, number: int, command: AllocateAhead) -> AllocatedAhead:
        """Room ahead, only where nobody needs it more."""
        unit = self.state.units.get(command.unit)
        if unit is None or unit.number not in session.attached:
            raise InvalidRequestError(f"session {session.number} is not local to a storage unit {command.unit}")
        if not 0 < command.nbytes <= MAX_BYTES:
            raise InvalidRequestError(f"{command.nbytes} bytes of room ahead: must be in [1, {MAX_BYTES}]")
        nbytes, limit = granules_up(command.nbytes), unit.limit(update=False)
        wanted_elsewhere = any(self.state.room_waiters.values()) or not unit.connected
        plenty = nbytes * self.state.limits.ahead_part <= limit and unit.used_bytes + nbytes <= limit // 2
        offset = unit.space.take(nbytes) if plenty and not wanted_elsewhere else None
        if offset is None:
            raise CapacityTimeoutError(
                wanted_bytes=nbytes, free_bytes=max(unit.room(update=False), 0), waited_s=0.0, holders=[]
            )
        extent = self.state.extents.reserve(unit.number, offset, nbytes)
        session.reservations[number] = RoomAhead(unit.number, unit.epoch, extent, offset)
        self.grow_ahead(unit)
        return AllocatedAhead(offset=offset, checksums=are_wanted(self.state, session, [unit]))

    def judge(self) -> None:
        """Room may have come back: serve whoever it is enough for."""
        for update in (True, False):
            for parked in list(self.state.room_waiters[update].values()):
                want = Want(parked.session, parked.command)
                try:
                    self._refuse_hopeless(want)
                except RequestTooLargeError as error:
                    self.state.unpark(parked, error)
                    continue
                pieces = self._place(want)
                if pieces is not None:
                    self.state.unpark(parked, self._reserve(parked, pieces))
                elif self._rejects(want, parked.command):
                    self.state.unpark(parked, self.out_of_room(parked))
                else:
                    break

    def _rejects(self, want: Want, command: Allocate) -> bool:
        """Whether the call will not wait. It does while there is room for it in arenas that are just being grown."""
        if command.on_full is OnFull.WAIT:
            return False
        units = [unit for unit in self.state.units.values() if unit.connected]
        room = sum(max(unit.room(update=want.update), 0) for unit in units)
        return room < want.total or not any(unit.asked for unit in units)

    def grow_ahead(self, unit: Unit) -> None:
        self._ask(unit, growth_ahead(unit))

    def out_of_room(self, parked: ParkedAllocate) -> DataPlaneError:
        """The error that names who holds the room."""
        command = parked.command
        units = self.state.units.values()
        return CapacityTimeoutError(
            wanted_bytes=Want(parked.session, command).total,
            free_bytes=sum(max(unit.room(update=command.update), 0) for unit in units if unit.connected),
            waited_s=self.state.now - parked.since,
            holders=self._holders(),
        )

    def _holders(self) -> list[tuple[str, int]]:
        """Units that are not there, partitions, then sessions with reservations and pins; the largest of each first."""
        state, bytes_of = self.state, self.state.extents.bytes_of
        partitions = [(f"partition {p.name!r}", p.account.live_bytes) for p in state.partitions.values()]
        sessions = []
        for session in state.sessions.values():
            who = f"session {session.number} ({session.name or 'unnamed'}, {session.state})"
            reserved = sum(bytes_of(reservation.extents()) for reservation in session.reservations.values())
            pinned = sum(bytes_of(pins) for pins in session.pins.values())
            sessions += [(f"reservations of {who}", reserved), (f"readers of {who}", pinned)]
        lost = [
            (f"storage unit {unit.number} ({unit.offer.name}), which is not connected,", unit.space.capacity_bytes)
            for unit in state.units.values()
            if not unit.connected
        ]
        ranked = [sorted(group, key=lambda holder: -holder[1]) for group in (lost, partitions, sessions)]
        return [holder for group in ranked for holder in group[:3] if holder[1]]

    def _check(self, command: Allocate) -> None:
        check_columns(self.state, [(column.name, column.sizes) for column in command.columns])
        if not command.timeout_s >= 0:
            raise InvalidRequestError(f"timeout_s={command.timeout_s}: must not be negative")

    def _refuse_hopeless(self, want: Want) -> None:
        """RequestTooLargeError if no amount of clearing would help. Without any unit it may still come: no error."""
        limits = [unit.limit(update=want.update) for unit in self.state.units.values()]
        if not limits:
            return
        if want.total > sum(limits):
            raise RequestTooLargeError(wanted_bytes=want.total, limit_bytes=sum(limits), what="this put")
        if want.largest > max(limits):
            raise RequestTooLargeError(
                wanted_bytes=want.largest, limit_bytes=max(limits), what="the largest value of this put"
            )

    def _place(self, want: Want) -> list[Piece] | None:
        if not want.whole:
            return []
        units = [unit for unit in self.state.units.values() if unit.connected]
        if not units:
            return None
        pieces, growing = place(want, units)
        if pieces is None:
            for unit in growing:
                self._ask(unit, growth(unit, want.total))
            return None
        for unit in {piece.unit.number: piece.unit for piece in pieces}.values():
            self.grow_ahead(unit)
        return pieces

    def _ask(self, unit: Unit, backed_bytes: int | None) -> None:
        if backed_bytes is not None:
            unit.asked = backed_bytes
            self.state.out.append(GrowArena(unit=unit.number, backed_bytes=backed_bytes))

    def _reserve(self, parked: ParkedAllocate, pieces: list[Piece]) -> Allocated:
        command = parked.command
        names, sizes = [column.name for column in command.columns], [column.sizes for column in command.columns]
        reservation = Reservation(parked.partition, names, sizes, update=command.update)
        placements = []
        for piece in pieces:
            unit = piece.unit
            extent = self.state.extents.reserve(unit.number, piece.offset, piece.size)
            reservation.pieces[piece.column].append((piece.first, piece.last, extent, piece.offset))
            reservation.epochs[unit.number] = unit.epoch
            placements.append(
                Placement(
                    column=piece.column, first=piece.first, last=piece.last, unit=unit.number, offset=piece.offset
                )
            )
        parked.session.reservations[parked.number] = reservation
        wanted = are_wanted(self.state, parked.session, [piece.unit for piece in pieces])
        return Allocated(placements=tuple(placements), checksums=wanted)


def check_columns(state: State, columns: Sequence[tuple[str, Int64s]]) -> None:
    """InvalidRequestError unless columns of these names and value sizes can be put."""
    limits = state.limits
    if len(columns) > limits.columns:
        raise InvalidRequestError(f"{len(columns)} columns in one put; the most is {limits.columns}")
    if len({name for name, _ in columns}) != len(columns):
        raise InvalidRequestError("a column is named twice in one put")
    for name, sizes in columns:
        state.check_name("field", name)
        if len(sizes) > limits.samples:
            raise InvalidRequestError(f"{len(sizes)} values in one column; the most is {limits.samples}")
        most = top(sizes)
        if most > MAX_BYTES or (most * len(sizes) > MAX_BYTES and float(sizes.sum(dtype=np.float64)) > MAX_BYTES):
            raise InvalidRequestError(f"column {name!r}: value sizes must be in [0, {MAX_BYTES}]")
