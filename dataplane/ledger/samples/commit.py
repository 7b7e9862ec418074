"""Commit a put: check everything, then change everything."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dataplane.core.schema import INPUT_LENGTHS, field_of
from dataplane.core.types import FieldKind, Scalar
from dataplane.errors import (
    UNDECLARED,
    InvalidRequestError,
    PartitionDroppedError,
    PartitionSealedError,
    RowsChangedError,
    SampleExistsError,
    SchemaError,
    ServiceRestartedError,
    StaleSchemaError,
    StorageUnitError,
)
from dataplane.ledger.allocation.budgets import Evictions, out_of_space, over
from dataplane.ledger.allocation.reservations import MAX_BYTES, PreallocatedPut
from dataplane.ledger.commands import Commit, CommitColumn, Committed, Int32s, Int64s, Mode, TagColumn, UInt32s
from dataplane.ledger.state.arrays import Bools, every, first_true, some, top, total
from dataplane.ledger.state.extents import Several
from dataplane.ledger.state.fields import Field, cells_of
from dataplane.ledger.state.limits import check_limit
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import Preallocation, PutReservation, ReservedSpace, Session
from dataplane.ledger.state.state import State

INT64_MAX = (1 << 63) - 1
TAG_TYPES = frozenset({str, bool, int, float, type(None)})
TAG_BITS = 4096
"""Maximum size of an integer tag in bits; larger ones cannot be serialized."""
LONGEST = 1 << 53
"""Maximum number of tokens of a sample: floats are exact up to here."""


class Named(NamedTuple):
    """The samples of a commit. `rows` is -1 for samples that do not exist yet; `unborn` are their positions in the
    command."""

    rows: Int64s
    unborn: Int64s


class Commits:
    def __init__(self, state: State) -> None:
        self.state = state

    def commit(self, session: Session, number: int, command: Commit) -> Committed:
        """Commit a put. A fault changes nothing except that the reservation is freed; preallocated space stays
        reserved."""
        held = None if command.reservation is None else session.reservations.get(command.reservation)
        try:
            partition = self.state.partition(command.partition)
            reservation = self._reservation(session, command, partition)
            named = self._names(partition, command, reservation)
            self._check_columns(partition, command, reservation)
            check_tags(self.state, partition, command.tags, len(command.samples))
            if command.located is not None:
                self._check_unchanged(session, partition, command, command.located, named.rows)
        except Exception:
            if held is not None and command.reservation is not None and not isinstance(held, Preallocation):
                self.state.free_reservation(session, command.reservation)
            raise
        evicted = self._admit(partition, reservation, named)
        rows = self._create_rows(partition, command, named)
        if isinstance(reservation, PreallocatedPut):
            reservation.cut(self.state.extents)
        elif command.reservation is not None:
            del session.reservations[command.reservation]
            if reservation is not None:
                self.state.unprotect_targets(reservation)
        written, overwritten_bytes = self._switch(partition, command, reservation, rows)
        partition.tags.merge(rows, command.tags)
        partition.notify_watches(rows)
        fields = [column.name for column in command.columns] if len(rows) else ()
        partition.record_write(session.number, session.name, self.state.now, fields)
        if written or len(named.unborn):
            partition.update_after_write(rows, written, newborn=bool(len(named.unborn)))
        self.state.touch(partition)
        self.state.recheck_puts(partition, rows)
        return Committed(
            rows=rows.copy(),
            generations=partition.generations_of(rows),
            evicted=evicted,
            born=len(named.unborn),
            overwritten_bytes=overwritten_bytes,
            fields=partition.common_fields(rows) if command.listed else (),
            tags=partition.tags.of(rows) if command.listed else (),
        )

    # --- checks

    def _admit(self, partition: Partition, reservation: PutReservation | None, named: Named) -> tuple[str, ...]:
        """Check that preallocated space fits the partition's budget, which counts it from now on. Evict samples if
        necessary, and return the ids of unconsumed ones. CapacityTimeoutError if a put of the partition already waits
        for space, or if the budget is used up and eviction does not help."""
        if not isinstance(reservation, PreallocatedPut) or partition.budget_bytes is None:
            return ()
        update, wanted = not len(named.unborn), sum(reservation.nbytes)
        waits = partition.account.number in self.state.space_waiters[update]
        excess = over(self.state, partition, wanted, update=update)
        made: tuple[str, ...] | None = None if waits else ()
        if excess > 0 and not waits and partition.evicts:
            spare = named.rows[named.rows >= 0]
            made = Evictions(self.state).make_space(partition, excess=excess, short=0, update=update, spare=spare)
        elif excess > 0:
            made = None
        if made is None:
            raise out_of_space(self.state, partition, wanted, 0.0, update=update)
        return made

    def _reservation(self, session: Session, command: Commit, partition: Partition) -> PutReservation | None:
        """Return the reservation of the commit, or None for a tags-only put."""
        if command.reservation is None:
            if command.columns:
                raise InvalidRequestError(f"a commit of {len(command.columns)} columns requires a reservation")
            return None
        reservation = session.reservations.get(command.reservation)
        if reservation is None:
            raise InvalidRequestError(
                f"session {session.number} has no reservation {command.reservation}: "
                "it was aborted, committed before, or never made"
            )
        self.check_units(reservation)
        if isinstance(reservation, Preallocation):
            return PreallocatedPut(self.state, reservation, partition, command)
        assert isinstance(reservation, PutReservation)
        if reservation.moving:
            raise InvalidRequestError(f"reservation {command.reservation} was made for a move, not for a put")
        if command.offset is not None:
            raise InvalidRequestError(f"reservation {command.reservation} is for one put: commit it without offset")
        if reservation.partition is not partition:
            if reservation.partition.name == partition.name:
                raise PartitionDroppedError(partition=partition.name, waiting="a put")
            raise InvalidRequestError(
                f"space was reserved for partition {reservation.partition.name!r}, not for {partition.name!r}"
            )
        return reservation

    def check_units(self, reservation: ReservedSpace) -> None:
        """Check that all bytes of the space still exist. StorageUnitError or ServiceRestartedError otherwise."""
        for number, epoch in reservation.epochs.items():
            self._check_unit(number, epoch)
        if reservation.broken:
            raise ServiceRestartedError(
                expected_epoch=self.state.epoch, got_epoch=0, what="some of the space reserved for this put"
            )

    def _check_unit(self, number: int, epoch: int) -> None:
        unit = self.state.units.get(number)
        if unit is None:
            raise StorageUnitError(unit=number, endpoint="", why="it was dropped from the service with all its data")
        if unit.epoch != epoch:
            what = f"the space reserved in storage unit {number}"
            raise ServiceRestartedError(expected_epoch=unit.epoch, got_epoch=epoch, what=what)
        if not (unit.connected or unit.awaited):
            endpoint = unit.offer.endpoints[0] if unit.offer.endpoints else unit.offer.name
            raise StorageUnitError(unit=number, endpoint=endpoint, why="its connection to the controller is lost")

    def _names(self, partition: Partition, command: Commit, reservation: PutReservation | None) -> Named:
        """Resolve the samples of the commit to rows, and check that its mode allows them."""
        samples = command.samples
        self.state.check_samples(samples)
        if samples.ids is None:
            rows = partition.resolve(samples)
            refuse_repeats(rows)
            return Named(rows, np.zeros(0, np.int64))
        if len(set(samples.ids)) != len(samples.ids):
            seen: set[str] = set()
            for repeated in samples.ids:
                if repeated in seen:
                    break
                seen.add(repeated)
            raise InvalidRequestError(f"sample {repeated!r} is named twice in one put")
        if command.mode is Mode.UPDATE:
            return Named(partition.resolve(samples), np.zeros(0, np.int64))
        rows = partition.rows.find(samples.ids)
        unborn = np.flatnonzero(rows < 0)
        if command.mode is Mode.CREATE and len(unborn) < len(rows):
            living = [samples.ids[i] for i in first_true(rows >= 0)]
            raise SampleExistsError(partition=partition.name, samples=living, total=len(rows) - len(unborn))
        if len(unborn):
            self._check_unborn(partition, [samples.ids[i] for i in unborn.tolist()], reservation)
        return Named(rows, unborn)

    def _check_unborn(self, partition: Partition, ids: list[str], reservation: PutReservation | None) -> None:
        if partition.sealed:
            raise PartitionSealedError(partition=partition.name, samples=ids[:5], total=len(ids))
        if reservation is not None and reservation.update:
            raise InvalidRequestError(
                f"space reserved for updates cannot hold new samples; {ids[0]!r} is not a live sample"
            )
        for name in ids:
            self.state.check_name("sample id", name)

    def _check_columns(self, partition: Partition, command: Commit, reservation: PutReservation | None) -> None:
        if reservation is None:
            return
        names = [column.name for column in command.columns]
        if names != reservation.names:
            raise InvalidRequestError(f"columns {names[:5]} differ from the reserved columns {reservation.names[:5]}")
        for column, sizes in zip(command.columns, reservation.sizes, strict=True):
            self._check_spec(partition, column)
            _check_shape(column, len(command.samples))
            if not isinstance(reservation, PreallocatedPut) and _sizes_differ(column, sizes):
                raise InvalidRequestError(f"column {column.name!r}: lengths differ from the reserved sizes")
        fresh = sum(name not in partition.fields for name in names)
        if fresh:
            what, count = f"fields of partition {partition.name!r}", len(partition.fields) + fresh
            check_limit(what, count, self.state.limits.columns, "Use several partitions.")

    def _check_spec(self, partition: Partition, column: CommitColumn) -> None:
        field = partition.fields.get(column.name)
        if not column.spec.settled:
            raise InvalidRequestError(f"column {column.name!r}: its spec is open ({column.spec})")
        if partition.strict and (field is None or field.declared is None):
            declared = [name for name, other in partition.fields.items() if other.declared is not None]
            raise SchemaError(
                partition=partition.name,
                field=column.name,
                got=UNDECLARED,
                expected=f"one of {', '.join(declared[:8]) or 'no fields at all'}",
                hint="The partition is strict: declare the field in register_partition, or register with strict=False.",
            )
        if field is not None and not field.spec.accepts(column.spec):
            raise SchemaError(
                partition=partition.name, field=column.name, got=str(column.spec), expected=str(field.spec)
            )
        if column.by_schema and not partition.names_kind(column.name):
            raise StaleSchemaError(partition=partition.name, field=column.name)

    def _check_unchanged(
        self, session: Session, partition: Partition, command: Commit, located: int, rows: Int64s
    ) -> None:
        """Check that the cells that a Locate found are unchanged. Its pin keeps other cells from taking their
        places."""
        if located not in session.pins:
            raise InvalidRequestError(
                f"call {located} holds no pins (released or never made): locate the samples again"
            )
        for found in command.expected:
            if not len(found.units) == len(found.offsets) == len(found.lengths) == len(rows):
                raise InvalidRequestError(
                    f"field {found.name!r}: {len(found.lengths)} locations for {len(rows)} samples"
                )
            extents, offsets, lengths = cells_of(partition.fields.get(found.name), rows)
            moved = (offsets != found.offsets) | (self.state.extents.units[extents] != found.units)
            changed = (lengths != found.lengths) | (moved & (lengths > 0))
            if some(changed):
                ids = command.samples.ids
                places = first_true(changed)
                names = partition.rows.names_of(rows[places]) if ids is None else [ids[i] for i in places]
                total = int(np.count_nonzero(changed))
                raise RowsChangedError(partition=partition.name, field=found.name, samples=names, total=total)

    # --- changes

    def _create_rows(self, partition: Partition, command: Commit, named: Named) -> Int64s:
        """Create rows for new samples. Return the rows of all samples of the commit."""
        if not len(named.unborn):
            return named.rows
        ids = command.samples.ids
        assert ids is not None
        new = list(ids) if len(named.unborn) == len(ids) else [ids[i] for i in named.unborn.tolist()]
        rows = named.rows.copy()
        rows[named.unborn] = partition.create_samples(new, self.state.generations + 1, self.state.now)
        self.state.generations += len(new)
        return rows

    def _switch(
        self, partition: Partition, command: Commit, reservation: PutReservation | None, rows: Int64s
    ) -> tuple[set[str], int]:
        """Point the cells at the new bytes. Return the names of fields that are new to some of the rows, and the
        bytes of values that are new to none."""
        written: set[str] = set()
        overwritten_bytes = 0
        dead: list[tuple[Int32s, Int64s]] = []
        if reservation is None:
            return written, 0
        unused: list[int] = []
        own = rows.copy()
        for column, sizes, pieces in zip(command.columns, reservation.sizes, reservation.pieces, strict=True):
            if not len(rows):
                unused += [piece[2] for piece in pieces]
                continue
            field = partition.fields.get(column.name)
            if field is None:
                field = partition.fields[column.name] = Field(None, partition.rows.capacity)
            cells = cells_at(column, sizes, pieces)
            unused += self.make_live(partition, field, column, pieces, own)
            old = field.write(rows, *cells)
            field.settle(column.spec)
            superseded = partition.erase_other_column(column.name, rows)
            if superseded is not None:
                dead.append(superseded)
            if not every(old[0]):
                written.add(field_of(column.name))
            if some(old[0]):
                dead.append(old)
                overwritten_bytes += _replaced(column, old[0] == 0) * column.spec.unit_bytes
        partition.release_cells(dead)
        if unused:
            self.state.extents.free(np.array(unused, np.int32))
        return written, overwritten_bytes

    def make_live(
        self,
        partition: Partition,
        field: Field,
        column: CommitColumn,
        pieces: list[tuple[int, int, int, int]],
        rows: Int64s,
    ) -> list[int]:
        """Make the column's extents live. Return those that no sample points at."""
        extents, unused = self.state.extents, []
        counts = None if column.index is None else np.bincount(column.index, minlength=len(column.lengths))
        for first, last, extent, _ in pieces:
            cells = last - first if counts is None else int(counts[first:last].sum())
            if not cells:
                unused.append(extent)
                continue
            several = None
            if last - first > 1:
                used = column.lengths[first:last] if counts is None else (column.lengths * counts)[first:last]
                mine = rows if len(pieces) == 1 else _pointing(column.index, rows, first, last)
                several = Several(field, mine, total(used) * column.spec.unit_bytes, partition.account)
            extents.make_live(extent, cells, several)
            partition.account.live_bytes += int(extents.sizes[extent])
        return unused


def _replaced(column: CommitColumn, fresh: Bools) -> int:
    """Return the total length of the column's values that no `fresh` sample points at."""
    if column.index is None:
        return total(column.lengths[~fresh])
    kept = column.lengths.copy()
    kept[column.index[fresh]] = 0
    return total(kept)


def _pointing(index: Int64s | None, rows: Int64s, first: int, last: int) -> Int64s:
    """Return the rows whose value is one of [first, last)."""
    return rows[first:last] if index is None else rows[(index >= first) & (index < last)]


def cells_at(
    column: CommitColumn, sizes: Int64s, pieces: list[tuple[int, int, int, int]]
) -> tuple[Int32s, Int64s, Int64s, UInt32s | None]:
    """Return extent, offset, length and checksum of each sample's cell."""
    extents = np.zeros(len(sizes), np.int32)
    offsets = np.zeros(len(sizes), np.int64)
    for first, last, extent, offset in pieces:
        extents[first:last] = extent
        offsets[first] = offset
        if last - first > 1:
            np.cumsum(sizes[first : last - 1], out=offsets[first + 1 : last])
            offsets[first + 1 : last] += offset
    index, sums = column.index, column.checksums
    if index is None:
        return extents, offsets, column.lengths, sums
    return extents[index], offsets[index], column.lengths[index], None if sums is None else sums[index]


def _sizes_differ(column: CommitColumn, sizes: Int64s) -> bool:
    return len(column.lengths) != len(sizes) or some(column.lengths * column.spec.unit_bytes != sizes)


def _check_shape(column: CommitColumn, samples: int) -> None:
    """Check that the column has one value per sample, or an index that assigns them. Lengths are >= 0, and 1 in
    dense columns."""
    values = len(column.lengths)
    longest = top(column.lengths)
    if longest > INT64_MAX or longest * column.spec.unit_bytes > MAX_BYTES:
        raise InvalidRequestError(f"column {column.name!r}: a length is negative or exceeds {MAX_BYTES} bytes")
    if column.spec.kind is FieldKind.DENSE and some(column.lengths != 1):
        raise InvalidRequestError(f"column {column.name!r}: dense rows must have length 1")
    if column.checksums is not None and len(column.checksums) != values:
        raise InvalidRequestError(f"column {column.name!r}: {len(column.checksums)} checksums for {values} values")
    if column.index is None:
        if values != samples:
            raise InvalidRequestError(f"column {column.name!r} has {values} rows for {samples} samples")
    elif len(column.index) != samples:
        raise InvalidRequestError(
            f"column {column.name!r}: its index has {len(column.index)} rows for {samples} samples"
        )
    elif samples and (column.index.min() < 0 or column.index.max() >= values):
        raise InvalidRequestError(f"column {column.name!r}: an index is outside its {values} values")


def refuse_repeats(rows: Int64s) -> None:
    """InvalidRequestError if a row is repeated."""
    if len(rows) > 1 and len(np.unique(rows)) != len(rows):
        raise InvalidRequestError("a sample is named twice in one put")


def check_tags(state: State, partition: Partition, tags: tuple[TagColumn, ...], samples: int) -> None:
    """InvalidRequestError unless the columns fit `samples` samples and hold allowed values."""
    for column in tags:
        state.check_name("tag", column.name)
        if column.positions is None:
            if len(column.values) != samples:
                raise InvalidRequestError(f"tag {column.name!r} has {len(column.values)} values for {samples} samples")
        elif len(column.values) != len(column.positions):
            raise InvalidRequestError(
                f"tag {column.name!r} has {len(column.values)} values for {len(column.positions)} positions"
            )
        elif len(column.positions) and (column.positions.min() < 0 or column.positions.max() >= samples):
            raise InvalidRequestError(f"tag {column.name!r}: a position lies outside the {samples} samples")
        _check_values(state, partition, column.name, column.values)
    fresh = {column.name for column in tags} - partition.tags.columns.keys()
    if fresh:
        what, count = f"tags of partition {partition.name!r}", len(partition.tags.columns) + len(fresh)
        check_limit(what, count, state.limits.columns, "Use fewer tags: store varying data as values of one tag.")


def _check_values(state: State, partition: Partition, name: str, values: tuple[Scalar, ...]) -> None:
    types = set(map(type, values))
    if not types <= TAG_TYPES:
        wrong = sorted(kind.__name__ for kind in types - TAG_TYPES)
        raise InvalidRequestError(f"tag {name!r}: a tag is a str, bool, int, float or None, not {wrong[0]}")
    if str in types:
        longest = max(len(value) for value in values if isinstance(value, str))
        hint = "Store long texts in a field."
        check_limit(f"characters of one value of tag {name!r}", longest, state.limits.tag_bytes, hint)
    if int in types and max(value.bit_length() for value in values if isinstance(value, int)) > TAG_BITS:
        raise InvalidRequestError(f"tag {name!r}: an integer of more than {TAG_BITS} bits; store it in a field")
    if name == INPUT_LENGTHS:
        _check_lengths(values)
    allowed = partition.enums.get(name)
    if allowed is not None:
        wrong_value = next((value for value in values if value not in allowed), None)
        if wrong_value is not None:
            raise InvalidRequestError(
                f"tag {name!r}: {wrong_value!r} is not one of its declared values {', '.join(allowed[:8])}"
            )


def _check_lengths(values: tuple[Scalar, ...]) -> None:
    """InvalidRequestError for an invalid number of tokens. Claims, shares and packing rely on these numbers."""
    for value in values:
        if type(value) is not int or not 0 <= value <= LONGEST:
            raise InvalidRequestError(
                f"tag {INPUT_LENGTHS!r}: {repr(value)[:40]} is not a number of tokens; expected an integer from 0 to "
                f"{LONGEST}"
            )
