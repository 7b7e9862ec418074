"""Commit a put: check everything, then change everything."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dataplane.core.schema import INPUT_LENGTHS, field_of
from dataplane.core.types import INT64_MAX, FieldKind, Scalar
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
from dataplane.ledger.allocation.budgets import Evictions, budget_excess, out_of_space
from dataplane.ledger.allocation.placement import MAX_BYTES
from dataplane.ledger.allocation.reservations import PreallocatedPut
from dataplane.ledger.commands import Commit, CommitColumn, Committed, Int32s, Int64s, Mode, TagColumn, UInt32s
from dataplane.ledger.state.arrays import Bools, first_true, some, top, total
from dataplane.ledger.state.extents import DeadCells, Several
from dataplane.ledger.state.fields import Field, cells_of
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import (
    Preallocation,
    PutReservation,
    ReservedPiece,
    ReservedSpace,
    Session,
    check_limit,
)
from dataplane.ledger.state.state import State

TAG_TYPES = frozenset({str, bool, int, float, type(None)})
LONGEST = 1 << 53
"""Maximum number of tokens of a sample: floats are exact up to here."""


class Named(NamedTuple):
    """The samples of a commit. `rows` is -1 for new samples, which do not exist yet; `unborn` are their positions in
    the command."""

    rows: Int64s
    unborn: Int64s


class Commits:
    """Executes `Commit`: makes the bytes of a put the values of its samples."""

    def __init__(self, state: State) -> None:
        self.state = state

    def commit(self, session: Session, call_id: int, command: Commit) -> Committed:
        """Commit a put. After an error, the values of all samples are as before and the reservation is freed;
        preallocated space stays reserved. Consumed samples that were evicted to make space stay evicted."""
        # The space to free after an error. `_find_reservation` checks it, and may refuse it.
        held = None if command.reservation is None else session.reservations.get(command.reservation)
        try:
            partition = self.state.partition(command.partition)
            reservation = self._find_reservation(session, command, partition)
            named = self._resolve_samples(partition, command, reservation)
            self._check_columns(partition, command, reservation)
            check_tags(self.state, partition, command.tags, len(command.samples))
            if command.located is not None:  # the new values were made from cells that the client has read
                self._check_unchanged(session, partition, command, command.located, named.rows)
        except Exception:
            if held is not None and command.reservation is not None and not isinstance(held, Preallocation):
                self.state.free_reservation(session, command.reservation)
            raise
        # Everything is checked now, except whether preallocated space fits the budget.
        evicted = self._make_budget_space(partition, reservation, named)
        rows = self._create_rows(partition, command, named)
        if isinstance(reservation, PreallocatedPut):
            reservation.cut(self.state.extents)  # fills its `pieces`
        elif reservation is not None:
            assert command.reservation is not None
            del session.reservations[command.reservation]
            self.state.unprotect_targets(reservation)
        written, overwritten_bytes = self._write_cells(partition, command, reservation, rows)
        partition.tags.merge(rows, command.tags)
        partition.notify_watches(rows)
        # Record the write for `why_blocked`, and let waiting claims and puts be evaluated again.
        fields = [column.name for column in command.columns] if len(rows) else ()
        partition.record_write(session.session_id, session.name, self.state.now, fields)
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
            tags=partition.tags.of(rows, shared=True) if command.listed else (),
        )

    # --- checks

    def _make_budget_space(
        self, partition: Partition, reservation: PutReservation | None, named: Named
    ) -> tuple[str, ...]:
        """Check that a put into preallocated space fits the partition's budget, which counts its bytes from now on.
        Evict samples if necessary, and return the ids of unconsumed ones. Raises CapacityTimeoutError if another update
        (or put of new rows) of the partition already waits for space, or if the budget is used up and eviction does not
        help. Other puts were checked when their space was reserved."""
        if not isinstance(reservation, PreallocatedPut) or partition.budget_bytes is None:
            return ()
        update = not len(named.unborn)
        wanted = reservation.total_bytes
        another_waits = partition.account.account_id in self.state.space_waiters[update]
        excess = budget_excess(self.state, partition, wanted, update=update)
        evicted: tuple[str, ...] | None = None
        if not another_waits:
            if excess <= 0:
                return ()
            if partition.evicts:
                spare = named.rows[named.rows >= 0]  # the put's own samples
                # short=0: the space itself exists already. The result is None if eviction does not help.
                evicted = Evictions(self.state).make_space(
                    partition, excess=excess, short=0, update=update, spare=spare
                )
        if evicted is None:
            raise out_of_space(self.state, partition, wanted, 0.0, update=update)
        return evicted

    def _find_reservation(self, session: Session, command: Commit, partition: Partition) -> PutReservation | None:
        """Return the reservation of the commit, or None for a tags-only put. Raises the error of a reservation that
        does not exist, was lost, or is not for this commit."""
        if command.reservation is None:
            if command.columns:
                raise InvalidRequestError(f"a commit of {len(command.columns)} columns requires a reservation")
            return None
        reservation = session.reservations.get(command.reservation)
        if reservation is None:
            raise InvalidRequestError(
                f"session {session.session_id} has no reservation {command.reservation}: "
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
        """Check that all bytes of the space still exist. Raises StorageUnitError or ServiceRestartedError."""
        for unit_id, epoch in reservation.epochs.items():
            self._check_unit(unit_id, epoch)
        if reservation.broken:
            raise ServiceRestartedError(  # 0: some earlier epoch
                expected_epoch=self.state.epoch, got_epoch=0, what="some of the space that a unit reserved for this put"
            )

    def _check_unit(self, unit_id: int, epoch: int) -> None:
        """Check that the unit is in use, and in the epoch of the reservation: a later epoch lost the bytes."""
        unit = self.state.units.get(unit_id)
        if unit is None:
            why = "it was dropped from the service, with the space reserved for this put; repeat the put"
            raise StorageUnitError(unit=unit_id, endpoint="", why=why)
        if unit.epoch != epoch:
            what = f"the space reserved in storage unit {unit_id}"
            raise ServiceRestartedError(expected_epoch=unit.epoch, got_epoch=epoch, what=what)
        if not (unit.connected or unit.awaited):  # an awaited unit may still be running
            endpoint = unit.offer.endpoints[0] if unit.offer.endpoints else unit.offer.name
            why = "its connection to the controller is lost; repeat the put"
            raise StorageUnitError(unit=unit_id, endpoint=endpoint, why=why)

    def _resolve_samples(self, partition: Partition, command: Commit, reservation: PutReservation | None) -> Named:
        """Resolve the samples of the commit to rows, and check that its mode allows them. Samples named by row and
        generation must exist whatever the mode."""
        samples = command.samples
        self.state.check_samples(samples)
        if samples.ids is None:
            rows = partition.resolve(samples)
            refuse_repeats(rows)
            return Named(rows, unborn=np.zeros(0, np.int64))
        if len(set(samples.ids)) != len(samples.ids):
            seen: set[str] = set()  # to find the first repeated id, for the error
            for repeated in samples.ids:
                if repeated in seen:
                    break
                seen.add(repeated)
            raise InvalidRequestError(f"sample {repeated!r} is named twice in one put; name each sample once")
        if command.mode is Mode.UPDATE:
            return Named(partition.resolve(samples), unborn=np.zeros(0, np.int64))
        rows = partition.rows.find(samples.ids)
        unborn = np.flatnonzero(rows < 0)
        if command.mode is Mode.CREATE and len(unborn) < len(rows):
            living = [samples.ids[i] for i in first_true(rows >= 0)]
            raise SampleExistsError(partition=partition.name, samples=living, total=len(rows) - len(unborn))
        if len(unborn):
            self._check_new_ids(partition, [samples.ids[i] for i in unborn.tolist()], reservation)
        return Named(rows, unborn)

    def _check_new_ids(self, partition: Partition, ids: list[str], reservation: PutReservation | None) -> None:
        """Check that the partition and the reservation admit new samples, and that their ids are valid."""
        if partition.sealed:
            raise PartitionSealedError(partition=partition.name, samples=ids[:5], total=len(ids))
        if reservation is not None and reservation.update:
            raise InvalidRequestError(
                f"sample {ids[0]!r} does not exist, but this put reserved space for updates of existing samples only; "
                "reserve space with update=false to create samples"
            )
        for name in ids:
            self.state.check_name("sample id", name)

    def _check_columns(self, partition: Partition, command: Commit, reservation: PutReservation | None) -> None:
        """Check the columns against the reservation, the schema and the limits."""
        if reservation is None:  # a tags-only put
            return
        names = [column.name for column in command.columns]
        if names != reservation.names:
            raise InvalidRequestError(f"columns {names[:5]} differ from the reserved columns {reservation.names[:5]}")
        widened = 0
        for column, sizes in zip(command.columns, reservation.sizes, strict=True):
            widened += self._check_spec(partition, column)
            _check_shape(column, len(command.samples))
            # The sizes of a `PreallocatedPut` are those of the commit itself.
            if not isinstance(reservation, PreallocatedPut) and _sizes_differ(column, sizes):
                raise InvalidRequestError(f"column {column.name!r}: lengths differ from the reserved sizes")
        new_fields = sum(name not in partition.fields for name in names) + widened
        if new_fields:
            what = f"fields of partition {partition.name!r}"
            count = len(partition.fields) + new_fields
            check_limit(what, count, self.state.limits.columns, "Use several partitions.")

    def _check_spec(self, partition: Partition, column: CommitColumn) -> bool:
        """Check that the schema admits the column. Return whether the column widens its field. Raises SchemaError,
        InvalidRequestError for an open spec, or StaleSchemaError if the client encoded the column by a schema that the
        partition no longer has."""
        field = partition.fields.get(column.name)
        if not column.spec.settled:
            raise InvalidRequestError(
                f"column {column.name!r}: its spec, {str(column.spec)!r}, is incomplete; send the kind of the rows, "
                "and their dtype and inner shape"
            )
        if partition.strict and (field is None or field.declared is None):
            declared = [name for name, other in partition.fields.items() if other.declared is not None]
            raise SchemaError(
                partition=partition.name,
                field=column.name,
                got=UNDECLARED,
                expected=f"one of {', '.join(declared[:8]) or 'no fields at all'}",
                hint="The partition is strict: declare the field in register_partition, or register with strict=False.",
            )
        widens = field is not None and not field.spec.accepts(column.spec)
        if field is not None and widens and not partition.can_widen(column.name, column.spec):
            raise SchemaError(
                partition=partition.name, field=column.name, got=str(column.spec), expected=str(field.spec)
            )
        if column.by_schema and not partition.determines_kind(column.name):
            raise StaleSchemaError(partition=partition.name, field=column.name)
        return widens

    def _check_unchanged(
        self, session: Session, partition: Partition, command: Commit, located: int, rows: Int64s
    ) -> None:
        """Check that the cells that `Locate` call `located` found (`command.expected`) are unchanged: same
        place and length (empty and missing cells have no place). The call's pins keep other cells from taking their
        places. Raises RowsChangedError."""
        if located not in session.pins:
            raise InvalidRequestError(
                f"call {located} holds no pins (released or never made): locate the samples again"
            )
        for expected in command.expected:
            per_sample = "units", "offsets", "lengths"
            counts = {name: len(getattr(expected, name)) for name in per_sample}
            wrong = [f"{count} {name}" for name, count in counts.items() if count != len(rows)]
            if wrong:
                got = ", ".join(wrong)
                raise InvalidRequestError(f"field {expected.name!r}: {got} for {len(rows)} samples")
            extents, offsets, lengths = cells_of(partition.fields.get(expected.name), rows)
            moved = (offsets != expected.offsets) | (self.state.extents.units[extents] != expected.units)
            changed = (lengths != expected.lengths) | (moved & (lengths > 0))
            if some(changed):
                ids = command.samples.ids
                positions = first_true(changed)
                names = partition.rows.names_of(rows[positions]) if ids is None else [ids[i] for i in positions]
                count = int(np.count_nonzero(changed))
                raise RowsChangedError(partition=partition.name, field=expected.name, samples=names, total=count)

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

    def _write_cells(
        self, partition: Partition, command: Commit, reservation: PutReservation | None, rows: Int64s
    ) -> tuple[set[str], int]:
        """Point the rows' cells at the new bytes, and free the bytes of the cells that they replace. Return the names
        of fields that some of the rows did not have, and the bytes of the new values that only replace others."""
        if reservation is None:  # a tags-only put
            return set(), 0
        written: set[str] = set()
        overwritten_bytes = 0
        dead: list[DeadCells] = []
        unused: list[int] = []  # extents without samples
        rows_copy = rows.copy()  # kept by the extents' records (`Several.rows`)
        # Each cell has granules of its own.
        alone = len(rows) == 1 and isinstance(reservation, PreallocatedPut)
        for column, sizes, pieces in zip(command.columns, reservation.sizes, reservation.pieces, strict=True):
            if not len(rows):
                unused += [piece.extent for piece in pieces]
                continue
            field = partition.fields.get(column.name)
            if field is None:
                field = partition.fields[column.name] = Field(declared=None, capacity=partition.rows.capacity)
            elif not field.spec.accepts(column.spec):  # checked before: it can widen
                field = partition.widen(column.name)
            cells = cells_at(column, sizes, pieces)
            unused += self.make_column_live(
                partition,
                field,
                column,
                pieces,
                rows_copy,
                alone=alone,
            )
            replaced = field.write(rows, *cells)
            field.settle_for_put(column.spec)
            dead += partition.erase_other_columns(column.name, rows)
            if replaced is None or replaced.cells < len(rows):
                written.add(field_of(column.name))
            if replaced is not None:
                dead.append(replaced)
                overwritten_bytes += _overwritten_bytes(column, replaced.extents == 0)
        self.state.extents.release_cells(dead, partition.account)
        if unused:
            self.state.extents.free(np.unique(np.array(unused, np.int32)))
        return written, overwritten_bytes

    def make_column_live(
        self,
        partition: Partition,
        field: Field,
        column: CommitColumn,
        pieces: list[ReservedPiece],
        rows: Int64s,
        *,
        alone: bool = False,
    ) -> list[int]:
        """Make the column's extents live. `pieces`: where its values are; `rows`: the rows of the
        column's samples; `alone`: all other cells of its extent are of this one row, too. Return
        the extents that no sample points at."""
        extents = self.state.extents
        unused = []
        # How many samples share each value.
        counts = None if column.index is None else np.bincount(column.index, minlength=len(column.lengths))
        for first, last, extent, _ in pieces:
            cells = last - first if counts is None else int(counts[first:last].sum())
            if not cells:
                unused.append(extent)
                continue
            several = None  # else the record for trimming an extent with several cells
            # A shared value counts once for each of its samples.
            if not alone and max(last - first, cells) > 1:
                lengths = column.lengths[first:last] if counts is None else (column.lengths * counts)[first:last]
                piece_rows = rows if len(pieces) == 1 else _rows_in_piece(column.index, rows, first, last)
                several = Several((field,), piece_rows, total(lengths) * column.spec.unit_bytes)
            extents.add_cells(extent, cells, several, partition.account)
        return unused


def _overwritten_bytes(column: CommitColumn, fresh: Bools) -> int:
    """Return the bytes of the column's values that no `fresh` sample points at. fresh: which of the
    samples had no value before."""
    lengths = column.lengths.copy()
    lengths[fresh if column.index is None else column.index[fresh]] = 0
    return total(lengths) * column.spec.unit_bytes


def _rows_in_piece(index: Int64s | None, rows: Int64s, first: int, last: int) -> Int64s:
    """Return the rows whose value is one of [first, last)."""
    return rows[first:last] if index is None else rows[(index >= first) & (index < last)]


def cells_at(
    column: CommitColumn, sizes: Int64s, pieces: list[ReservedPiece]
) -> tuple[Int32s, Int64s, Int64s, UInt32s | None]:
    """Return extent, offset, length and checksum of each sample's cell. sizes: bytes of each value;
    pieces: where the values are."""
    # Locate the values first; the index then assigns values to samples.
    extents = np.zeros(len(sizes), np.int32)
    offsets = np.zeros(len(sizes), np.int64)
    for first, last, extent, offset in pieces:
        extents[first:last] = extent
        offsets[first] = offset
        if last - first > 1:
            np.cumsum(sizes[first : last - 1], out=offsets[first + 1 : last])
            offsets[first + 1 : last] += offset
    index = column.index
    checksums = column.checksums
    if index is None:
        return extents, offsets, column.lengths, checksums
    return extents[index], offsets[index], column.lengths[index], None if checksums is None else checksums[index]


def _sizes_differ(column: CommitColumn, sizes: Int64s) -> bool:
    return len(column.lengths) != len(sizes) or some(column.lengths * column.spec.unit_bytes != sizes)


def _check_shape(column: CommitColumn, samples: int) -> None:
    """Check that the column has one value per sample, or an index that assigns them. Lengths are >= 0, and 1 in
    dense columns."""
    values = len(column.lengths)
    longest = top(column.lengths)  # a negative length counts as more than INT64_MAX
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
    """Raise InvalidRequestError if a row is repeated."""
    if len(rows) > 1 and len(np.unique(rows)) != len(rows):
        values, counts = np.unique(rows, return_counts=True)
        first, second = np.flatnonzero(rows == values[counts > 1][0])[:2].tolist()
        raise InvalidRequestError(
            f"the samples at positions {first} and {second} of this call are the same sample; name each sample once"
        )


def check_tags(state: State, partition: Partition, tags: tuple[TagColumn, ...], samples: int) -> None:
    """Check that the tag columns fit `samples` samples and hold allowed values. Raises InvalidRequestError or
    LimitError."""
    new_names = set()
    for column in tags:
        if column.name not in partition.tags.columns:
            state.check_name("tag", column.name)
            new_names.add(column.name)
        if column.index is not None:
            raise InvalidRequestError(f"tag {column.name!r} has an index, which only answers have; send each value")
        if column.positions is None:
            if len(column.values) != samples:
                raise InvalidRequestError(
                    f"tag {column.name!r} has {len(column.values)} values for {samples} samples; pass one per sample"
                )
        elif len(column.positions) and (column.positions.min() < 0 or column.positions.max() >= samples):
            raise InvalidRequestError(f"tag {column.name!r}: a position lies outside the {samples} samples")
        _check_tag_values(state, partition, column.name, column.values)
    if new_names:
        what = f"tags of partition {partition.name!r}"
        count = len(partition.tags.columns) + len(new_names)
        check_limit(what, count, state.limits.columns, "Use fewer tags: store varying data as values of one tag.")


def _check_tag_values(state: State, partition: Partition, name: str, values: tuple[Scalar, ...]) -> None:
    """Check types and sizes of one tag's values, and that they are declared ones if the tag is an enumeration."""
    types = set(map(type, values))
    if not types <= TAG_TYPES:
        wrong = sorted(kind.__name__ for kind in types - TAG_TYPES)
        raise InvalidRequestError(f"tag {name!r}: expected a str, bool, int, float or None, got {wrong[0]}")
    if str in types:
        longest = max(len(value) for value in values if isinstance(value, str))
        hint = "Store long texts in a field."
        check_limit(f"characters of one value of tag {name!r}", longest, state.limits.tag_bytes, hint)
    if name == INPUT_LENGTHS:
        _check_input_lengths(values)
    allowed = partition.enums.get(name)
    if allowed is not None:
        wrong_value = next((value for value in values if value not in allowed), None)
        if wrong_value is not None:
            raise InvalidRequestError(
                f"tag {name!r}: {wrong_value!r} is not one of the values declared with enums: {', '.join(allowed[:8])}"
            )


def is_length(value: Scalar) -> bool:
    """Whether the value can be a number of tokens."""
    return type(value) is int and 0 <= value <= LONGEST


def _check_input_lengths(values: tuple[Scalar, ...]) -> None:
    """Raise InvalidRequestError for an invalid number of tokens. Claims, shares and packing rely on these numbers."""
    for value in values:
        if not is_length(value):
            raise InvalidRequestError(
                f"tag {INPUT_LENGTHS!r}: {repr(value)[:40]} is not a number of tokens; expected an integer from 0 to "
                f"{LONGEST}"
            )
