"""Drain a storage unit while the service runs: it gets nothing new, and its cells are pointed at copies elsewhere.

A client finds cells on the unit, which pins them, and copies their bytes to space on other units. Then it moves the
cells that are unchanged. The pin keeps other cells from taking their places in the meantime.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from dataplane.core.types import FieldSpec
from dataplane.errors import DrainError, InvalidRequestError, PartitionDroppedError
from dataplane.ledger.commands import CommitColumn, Done, Drain, FindCells, FoundCells, Int32s, Int64s, Move, Moved
from dataplane.ledger.samples.commit import Commits, cells_at, refuse_repeats
from dataplane.ledger.state.arrays import Bools, some
from dataplane.ledger.state.extents import LIVE, RESERVED
from dataplane.ledger.state.fields import Field
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import ParkedFind, PutReservation, Session
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit

HOLDERS = 3
"""At most this many sessions that hold space on a unit are named."""
NO_ROWS: Int64s = np.zeros(0, np.int64)


class Page(NamedTuple):
    """Cells of a field by address. `rows`: the rows of the cells. `values`: for each row the number of its value, 0, 1,
    ... ascending (rows may share a value). `firsts`: for each value the position in `rows` of its first row."""

    rows: Int64s
    values: Int64s
    firsts: Int64s


class Drains:
    """Executes `Drain`, `FindCells` and `Move`. The methods that take (session, call_id, command) execute
    call `call_id` of that session. A reservation is the space for copies, `pinned` are the extents in
    which the cells were found. `commits` has the rules that moves share with puts."""

    def __init__(self, state: State, commits: Commits) -> None:
        self.state = state
        self.commits = commits

    def drain(self, session: Session, call_id: int, command: Drain) -> Done:
        """Mark the unit as draining, or with `undo` end that. Waiting puts are evaluated again. Raises DrainError if no
        other unit has space, unless `force` is set or the unit is draining already."""
        unit = self.state.unit(command.unit)
        if not (command.undo or command.force or unit.draining):
            self._check_space_elsewhere(unit)
        unit.draining = not command.undo
        self.state.recheck_all_puts()
        return Done()

    def _check_space_elsewhere(self, unit: Unit) -> None:
        """Raise `DrainError` if no other unit has space for new rows."""
        others = [other for other in self.state.units.values() if other is not unit and other.open]
        if any(other.available_bytes(update=False) > 0 for other in others):
            return
        full = " (the others are full)" if others else ""
        _, facts = self._unit_facts(unit)
        raise DrainError(
            unit=unit.unit_id,
            cells=facts.cells,
            live=dict(facts.live),
            reserved_bytes=facts.reserved_bytes,
            holders=list(facts.holders),
            why=f"no other storage unit has space for new rows{full}, and puts would wait until they time out",
            marked=False,  # as draining
        )

    # --- finding

    def find(self, session: Session, call_id: int, command: FindCells) -> FoundCells | None:
        """Find and pin cells on the unit. Without cells, return only the facts about it, or None if the call was
        parked."""
        if command.max_cells < 1 or command.max_bytes < 1 or not command.timeout_s >= 0:  # or NaN
            raise InvalidRequestError(
                f"max_cells={command.max_cells}, max_bytes={command.max_bytes}, timeout_s={command.timeout_s}: "
                "max_cells and max_bytes must be at least 1, timeout_s must not be negative"
            )
        unit = self.state.unit(command.unit)
        found = self._pin_first_cells(session, call_id, unit, command)
        # Without cells, only a unit that is still in use can get some, or become empty.
        if found.rows.size or not _reports_use(found) or not command.timeout_s:
            return found
        self.state.park(ParkedFind(session, call_id, self.state.now, command))
        return None

    def serve_waiting(self) -> None:
        """Answer parked calls whose unit has live cells now, or holds nothing."""
        for parked in self.state.finders:
            try:
                result = self._attempt(parked)
            except Exception as error:  # a waiting call must not fail the command of another client
                self.state.fail(parked, error)
                continue
            if result is not None:
                self.state.unpark(parked, result)

    def _attempt(self, parked: ParkedFind) -> FoundCells | InvalidRequestError | None:
        """Return the result of the call, or None if it continues to wait."""
        unit = self.state.units.get(parked.command.unit)
        if unit is None:
            return InvalidRequestError(f"storage unit {parked.command.unit} was dropped while the call waited")
        if len(self._live_extents_on(unit)) or not self._is_in_use(unit):
            return self._pin_first_cells(parked.session, parked.call_id, unit, parked.command)
        return None

    def timeout_result(self, parked: ParkedFind) -> FoundCells:
        """Return the cells that exist at the deadline."""
        unit = self.state.unit(parked.command.unit)
        return self._pin_first_cells(parked.session, parked.call_id, unit, parked.command)

    def _live_extents_on(self, unit: Unit) -> Int32s:
        """Return the unit's extents with live cells."""
        extents = self.state.extents
        extent_ids = extents.of_unit(unit.unit_id)
        live: Int32s = extent_ids[extents.states[extent_ids] == LIVE]
        return live

    def _is_in_use(self, unit: Unit) -> bool:
        """Whether the unit has reserved or pinned extents."""
        extents = self.state.extents
        extent_ids = extents.of_unit(unit.unit_id)
        return some((extents.states[extent_ids] == RESERVED) | (extents.pins[extent_ids] > 0))

    def _pin_first_cells(self, session: Session, call_id: int, unit: Unit, command: FindCells) -> FoundCells:
        """Pin and return the first cells on the unit, or only the facts about it if it has none."""
        partitions, facts = self._unit_facts(unit)
        for partition, name in self._live_fields(partitions, command):
            field = partition.fields[name]
            page = self._first_page(unit, field, command)
            if page is None:
                continue
            # first_rows: one for each value.
            rows = page.rows
            first_rows = page.rows[page.firsts]
            pinned = np.unique(field.extents[rows])
            self.state.pin(session, call_id, pinned)
            return msgspec.structs.replace(
                facts,
                partition=partition.name,
                field=name,
                spec=field.spec,
                rows=rows,
                generations=partition.generations_of(rows),
                index=page.values,
                offsets=field.offsets[first_rows],
                lengths=field.lengths_of(first_rows),
                checksums=None if field.checksums is None else field.checksums[first_rows],
            )
        return facts

    def _unit_facts(self, unit: Unit) -> tuple[list[Partition], FoundCells]:
        """Return the partitions that have cells on the unit, and the result of `FindCells` without cells: how many
        cells and bytes are live, reserved and pinned on the unit."""
        extents = self.state.extents
        extent_ids = extents.of_unit(unit.unit_id)
        states = extents.states[extent_ids]
        sizes = extents.sizes[extent_ids]
        live = extent_ids[states == LIVE]
        reserved = states == RESERVED
        by_account = {partition.account.account_id: partition for partition in self.state.partitions.values()}
        owners = extents.owners[live]
        live_sizes = extents.sizes[live]
        live_bytes = {by_account[owner]: int(live_sizes[owners == owner].sum()) for owner in np.unique(owners).tolist()}
        facts = FoundCells(
            partition="",
            field="",
            spec=FieldSpec(),
            rows=NO_ROWS,
            generations=NO_ROWS,
            index=NO_ROWS,
            offsets=NO_ROWS,
            lengths=NO_ROWS,
            cells=int(extents.live[live].sum()),
            live={partition.name: nbytes for partition, nbytes in live_bytes.items()},
            reserved=int(np.count_nonzero(reserved)),
            reserved_bytes=int(sizes[reserved].sum()),
            pinned_bytes=int(sizes[extents.pins[extent_ids] > 0].sum()),
            holders=self._holding_sessions(unit),
        )
        return list(live_bytes), facts

    def _live_fields(self, partitions: list[Partition], command: FindCells) -> Iterator[tuple[Partition, str]]:
        """Yield the fields of the partitions that have live cells on any unit, the requested one first."""
        requested = command.partition, command.field
        fields = [
            (partition, name) for partition in partitions for name, field in partition.fields.items() if field.live
        ]
        yield from sorted(fields, key=lambda each: (each[0].name, each[1]) != requested)  # False sorts first

    def _first_page(self, unit: Unit, field: Field, command: FindCells) -> Page | None:
        """Return the first cells of the field on the unit, by address, within the command's limits on cells and bytes;
        None if it has none there."""
        rows = np.flatnonzero(self._are_on(unit, field.extents) & (field.extents > 0)).astype(np.int64)
        if not len(rows):
            return None
        if len(rows) > command.max_cells:
            # Keep the lowest `max_cells` offsets, and all rows that share the last one.
            offsets = field.offsets[rows]
            last = np.partition(offsets, command.max_cells - 1)[command.max_cells - 1]
            rows = rows[offsets <= last]
        rows, values, firsts = _page_of(field, rows, self.state.limits.samples)  # very many may share the last value
        ends = np.cumsum(field.bytes_of(rows[firsts]))
        count = max(int(np.searchsorted(ends, command.max_bytes, side="right")), 1)  # at least one value
        return Page(rows[values < count], values[values < count], firsts[:count])

    def _are_on(self, unit: Unit, extent_ids: Int32s) -> Bools:
        on_unit: Bools = self.state.extents.units[extent_ids] == unit.unit_id
        return on_unit

    def _holding_sessions(self, unit: Unit) -> tuple[str, ...]:
        """Return the first few sessions that have reservations or pins on the unit."""
        labels = []
        for session in self.state.sessions.values():
            reserved = [reservation.extents() for reservation in session.reservations.values()]
            if any(some(self._are_on(unit, extent_ids)) for extent_ids in (*reserved, *session.pins.values())):
                labels.append(session.label)
            if len(labels) == HOLDERS:
                break
        return tuple(labels)

    # --- moving

    def move(self, session: Session, call_id: int, command: Move) -> Moved:
        """Point unchanged cells at their copies, and release the pins and the reservation. Cells that changed since
        they were found are skipped. An error frees the reservation, but not the pins."""
        held = session.reservations.get(command.reservation)
        if not isinstance(held, PutReservation) or not held.moving:
            raise InvalidRequestError(
                f"session {session.session_id} has no reservation {command.reservation} for a move"
            )
        try:
            partition, field = self._check_move(session, command, held)
            kept = self._unchanged_positions(command, partition, field, session.pins[command.located])
            # Only the cells that will be moved must have the reserved sizes.
            if field is not None and some(
                self._current_sizes(command, field, kept) != self._reserved_sizes(held, command, kept)
            ):
                raise InvalidRequestError(f"field {command.field!r}: lengths differ from the reserved sizes")
        except Exception:
            self.state.free_reservation(session, command.reservation)
            raise
        del session.reservations[command.reservation]
        pinned = session.pins.pop(command.located)
        if field is not None and len(kept):
            self._repoint_cells(partition, field, command, held, kept, pinned)
        else:  # the copies are not used
            self.state.extents.unpin(pinned)
            if any(held.pieces):
                self.state.extents.free(held.extents())
        return Moved(cells=len(kept), skipped=len(command.rows) - len(kept))

    def _check_move(
        self, session: Session, command: Move, reservation: PutReservation
    ) -> tuple[Partition, Field | None]:
        """Validate a move, and return the partition and field of its cells (None: no sample has the field any
        longer)."""
        cells = len(command.rows)
        values = len(reservation.sizes[0])
        if len(command.generations) != cells or len(command.index) != cells:
            raise InvalidRequestError(
                f"a move of {cells} rows has {len(command.generations)} generations and {len(command.index)} indexes"
            )
        if len(command.offsets) != values or len(command.lengths) != values or reservation.names != [command.field]:
            raise InvalidRequestError(
                f"a move of {len(command.offsets)} values of {command.field!r} does not match its reservation"
            )
        if cells and (command.index.min() < 0 or command.index.max() >= values):
            raise InvalidRequestError(f"an index of a move is outside its {values} values")
        if command.located not in session.pins:
            raise InvalidRequestError(
                f"call {command.located} holds no pins (released or never made): find the cells again"
            )
        refuse_repeats(command.rows)
        self.commits.check_units(reservation)
        partition = self.state.partition(command.partition)
        if reservation.partition is not partition:
            raise PartitionDroppedError(partition=partition.name, waiting="a move")
        return partition, partition.fields.get(command.field)

    def _unchanged_positions(self, command: Move, partition: Partition, field: Field | None, pinned: Int32s) -> Int64s:
        """Return the positions in `command.rows` of the cells that were neither moved, rewritten nor cleared since
        they were found: the sample is live, its extent is pinned and on the unit, offset and length are the same
        (see `Move`)."""
        if field is None:
            return NO_ROWS
        alive = np.flatnonzero(partition.rows.holds(command.rows, command.generations))
        # Row i has the command's value number values[i].
        rows = command.rows[alive]
        values = command.index[alive]
        same = np.isin(field.extents[rows], pinned) & self._are_on(self.state.unit(command.unit), field.extents[rows])
        same &= (field.offsets[rows] == command.offsets[values]) & (field.lengths[rows] == command.lengths[values])
        return alive[same]

    def _current_sizes(self, command: Move, field: Field, kept: Int64s) -> Int64s:
        """Return the bytes of the cells at these positions of the command."""
        sizes: Int64s = command.lengths[command.index[kept]] * field.unit_bytes
        return sizes

    def _reserved_sizes(self, reservation: PutReservation, command: Move, kept: Int64s) -> Int64s:
        """Return the bytes that were reserved for the copies of these cells."""
        sizes: Int64s = reservation.sizes[0][command.index[kept]]
        return sizes

    def _repoint_cells(
        self,
        partition: Partition,
        field: Field,
        command: Move,
        reservation: PutReservation,
        kept: Int64s,
        pinned: Int32s,
    ) -> None:
        """Point cells (`kept`: their positions in the command) at their copies. The partition's account is charged for
        the old bytes until they are freed, then for the new."""
        extents = self.state.extents
        rows = command.rows[kept]
        pieces = reservation.pieces[0]
        column = CommitColumn(
            name=command.field, spec=field.spec, lengths=command.lengths, index=command.index[kept], checksums=None
        )
        new_extents, offsets, lengths, _ = cells_at(column, reservation.sizes[0], pieces)
        unused = self.commits.make_column_live(partition, field, column, pieces, rows)
        checksums = None if field.checksums is None else field.checksums[rows]
        moved = field.write(rows, new_extents, offsets, lengths, checksums)
        assert moved is not None, field
        extents.release_cells([moved], partition.account)
        self.state.recheck_puts(partition, rows)
        extents.unpin(pinned)  # frees the old bytes, unless readers use them: before the new ones are charged
        # Space for moved cells has had no account until now. The values of skipped cells are trimmed.
        for piece in pieces:
            extent_id = piece.extent
            if extent_id not in unused:  # a moved cell points at it
                extents.adopt(extent_id, partition.account)
                extents.trim(extent_id)
        if unused:
            extents.free(np.array(unused, np.int32))


def _page_of(field: Field, rows: Int64s, most: int) -> Page:
    """Return the first `most` of the cells of these rows, by address. Every row must have a cell. Cells with the same
    offset and length share a value."""
    offsets = field.offsets[rows]
    lengths = field.lengths_of(rows)
    order = np.lexsort((lengths, offsets))[:most]
    offsets = offsets[order]
    lengths = lengths[order]
    is_new_value = np.ones(len(order), np.bool_)
    is_new_value[1:] = (offsets[1:] != offsets[:-1]) | (lengths[1:] != lengths[:-1])
    return Page(rows[order], np.cumsum(is_new_value) - 1, np.flatnonzero(is_new_value))


def _reports_use(found: FoundCells) -> bool:
    return bool(found.reserved or found.pinned_bytes)
