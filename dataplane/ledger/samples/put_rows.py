"""Execute `PutRows` in the usual case, row by row without arrays.

`put_rows` changes the tables as `Commits.commit` does for the expanded command, and nothing else;
tests compare the states after both. In all other cases it changes nothing and returns None.
"""

from __future__ import annotations

import numpy as np

from dataplane.core.schema import INPUT_LENGTHS
from dataplane.core.types import GRANULE_BYTES
from dataplane.ledger.commands import Committed, Int64s, Mode, TagColumn
from dataplane.ledger.commands.short import Plan, PutRows, decode_plan
from dataplane.ledger.samples.commit import is_length
from dataplane.ledger.state.extents import DeadCells, Extents, Several
from dataplane.ledger.state.fields import INT32_MAX
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import Preallocation, ReservedPiece, Session
from dataplane.ledger.state.state import State

_STORED_AS = {int: "iO", float: "fO", bool: "bO", str: "O", type(None): "O"}
"""By type of a tag's value, the kinds of numpy's dtypes of the columns that hold it."""


def put_rows(state: State, session: Session, command: PutRows) -> Committed | None:
    """Commit a small put. Change nothing and return None for an error, a partition with a budget, a
    waiting put, new fields, tags or kinds, tables that must grow, and space that is used up."""
    partition = state.partitions.get(command.partition)
    if partition is None:
        return None
    account_id = partition.account.account_id
    if (
        partition.budget_bytes is not None
        or account_id in state.space_waiters[True]
        or account_id in state.space_waiters[False]
        or state.extents.watched
    ):
        return None
    plan = decode_plan(command.plan)
    if not plan.is_valid or not plan.others.isdisjoint(partition.fields):
        return None
    found = _find_rows(state, partition, command)
    if found is None:
        return None
    count = len(found)
    sizes = _sizes(state, partition, plan, command, count)
    if sizes is None or not _tags_fit(state, partition, command, count):
        return None
    place = _find_space(state, session, command, sizes) if sizes else None
    if sizes and place is None:
        return None
    # Everything is checked now.
    newborn = found.count(-1)
    if newborn:
        _create_rows(state, partition, command.ids, found)
    rows = np.array(found, np.int64)
    written: set[str] = set()
    overwritten_bytes = 0
    if place is not None:  # else only tags are put
        space, piece = place
        _cut(space, state.extents, piece, command.offset + sum(sizes))
        written, overwritten_bytes = _write_cells(state, partition, plan, command, space.unit, sizes, rows)
    for name, values in command.tags.items():
        tag = partition.tags.columns[name]
        for row, value in zip(found, values, strict=True):
            tag.values[row] = value
            if not tag.present[row]:
                tag.present[row] = True
                tag.count += 1
    partition.record_write(session.session_id, session.name, state.now, plan.names)
    if partition.watches:
        partition.notify_watches(rows)
        state.touch(partition)
    if partition.interests and (written or newborn):
        partition.update_after_write(rows, written, newborn=bool(newborn))
    return Committed(
        rows=rows,
        generations=partition.rows.generations[rows],
        born=newborn,
        overwritten_bytes=overwritten_bytes,
        fields=_fields_of(partition, plan, rows, newborn) if command.listed else (),
        tags=_tags_of(partition, command, rows, newborn) if command.listed else (),
    )


def _find_space(state: State, session: Session, command: PutRows, sizes: list[int]) -> tuple[Preallocation, int] | None:
    """Return the space of the put, and the position of the piece of it that begins at the put's
    offset and is larger than its values; None if the space no longer exists, or no piece is."""
    space = session.reservations.get(command.reservation)
    if type(space) is not Preallocation or space.broken:
        return None
    unit = state.units.get(space.unit)
    if unit is None or unit.offer.epoch != space.epochs[space.unit] or not (unit.connected or unit.awaited):
        return None
    for position, piece in enumerate(space.pieces[0]):
        if piece.offset == command.offset:
            return (space, position) if 0 < sum(sizes) < state.extents.sizes[piece.extent] else None
    return None


def _find_rows(state: State, partition: Partition, command: PutRows) -> list[int] | None:
    """Return the rows of the samples, -1 for each new one; None for an error, or if tables must
    grow."""
    table = partition.rows
    ids = command.ids
    if not ids:
        found = list(command.rows)
        distinct = len(set(found)) == len(found)
        return found if distinct and table.hold(command.rows, command.generations) else None
    if command.rows or command.generations or (len(ids) > 1 and len(set(ids)) != len(ids)):
        return None
    get = table.ids.get
    found = [get(name, -1) for name in ids]
    newborn = found.count(-1)
    if newborn < len(ids) and command.mode is Mode.CREATE:
        return None
    if newborn:
        if command.mode is Mode.UPDATE or partition.sealed or newborn > table.room:
            return None
        for name, row in zip(ids, found, strict=True):
            if row < 0 and not 0 < 4 * len(name) <= state.limits.id_bytes:
                return None
    return found


def _sizes(state: State, partition: Partition, plan: Plan, command: PutRows, count: int) -> list[int] | None:
    """Return the bytes of each column, in whole granules; none for a put of tags. None for an
    error, or a column that its field does not hold as it is."""
    lengths = command.lengths
    checksums = command.checksums
    columns = plan.columns
    if count > state.limits.samples or len(columns) > state.limits.columns:
        return None
    if len(lengths) != count * len(columns) or len(checksums) not in (0, len(lengths)):
        return None
    if not lengths:
        return []
    if (
        min(lengths) < 0
        or max(lengths) > INT32_MAX
        or (checksums and not 0 <= min(checksums) <= max(checksums) < 1 << 32)
    ):
        return None
    fields = partition.fields
    sizes = []
    first = 0
    for column in columns:
        field = fields.get(column.name)
        if field is None or (field.spec is not column.spec and field.spec != column.spec):
            return None
        if (checksums and field.checksums is None) or (partition.strict and field.declared is None):
            return None
        units = lengths[first] if count == 1 else sum(lengths[first : first + count])
        if column.is_dense and lengths[first : first + count] != (1,) * count:
            return None
        sizes.append(-(-units * column.unit_bytes // GRANULE_BYTES) * GRANULE_BYTES)
        first += count
    return sizes


def _tags_fit(state: State, partition: Partition, command: PutRows, count: int) -> bool:
    """Whether the columns of the tags exist and hold these values."""
    columns = partition.tags.columns
    for name, values in command.tags.items():
        tag = columns.get(name)
        if tag is None or name in partition.enums or len(values) != count:
            return False
        kind = tag.values.dtype.kind
        for value in values:
            if kind not in _STORED_AS[type(value)]:
                return False
            if type(value) is str and len(value) > state.limits.tag_bytes:
                return False
            if name == INPUT_LENGTHS and not is_length(value):
                return False
    return True


def _create_rows(state: State, partition: Partition, ids: tuple[str, ...], found: list[int]) -> None:
    """Create a row for each new sample (-1 in `found`), and enter it in `found`."""
    table = partition.rows
    new = []
    for position, name in enumerate(ids):
        if found[position] < 0:
            state.generations += 1
            found[position] = table.create_one(name, state.generations, state.now)
            new.append(name)
    partition.born += len(new)
    partition.evicted.forget_all(new)
    if partition.lost is not None:
        partition.lost.forget_all(new)


def _cut(space: Preallocation, extents: Extents, position: int, start: int) -> None:
    """Let the piece begin at `start`; what follows it stays preallocated."""
    piece = space.pieces[0][position]
    extents.cut(piece.extent, piece.offset, start - piece.offset)
    space.pieces[0][position] = ReservedPiece(0, 0, piece.extent, start)


def _write_cells(
    state: State,
    partition: Partition,
    plan: Plan,
    command: PutRows,
    unit: int,
    sizes: list[int],
    rows: Int64s,
) -> tuple[set[str], int]:
    """Point the cells of the rows at the new bytes, and free the bytes of the cells that they
    replace. Return the fields that some of the rows did not have, and the bytes of the new values
    that replace others."""
    extents = state.extents
    account = partition.account
    count = len(rows)
    index: int | Int64s = int(rows[0]) if count == 1 else rows  # numpy is faster with an int
    written: set[str] = set()
    overwritten_bytes = 0
    dead: list[DeadCells] = []
    offset = command.offset
    extent = extents.create_live(unit, offset, sum(sizes), account, count * len(sizes))
    first = 0
    for column, nbytes in zip(plan.columns, sizes, strict=True):
        field = partition.fields[column.name]
        had_cells = field.extents[rows]
        replaced = int(np.count_nonzero(had_cells))
        if replaced:
            dead.append(
                DeadCells(
                    had_cells,
                    field.offsets[rows],
                    field.lengths[rows],
                    field.unit_bytes,
                    replaced,
                )
            )
        if replaced < count:
            written.add(column.name)
        field.live += count - replaced
        lengths = command.lengths[first : first + count]
        field.extents[index] = extent
        if count == 1:
            field.offsets[index] = offset
            field.lengths[index] = lengths[0]
            overwritten_bytes += lengths[0] * column.unit_bytes if replaced else 0
        else:
            values = np.array(lengths, np.int64)
            value_bytes = values * column.unit_bytes
            field.offsets[index] = np.cumsum(value_bytes) - value_bytes + offset
            field.lengths[index] = values
            overwritten_bytes += int(value_bytes[had_cells > 0].sum()) if replaced else 0
        if field.checksums is not None:
            given = command.checksums[first : first + count]
            field.checksums[rows] = given or 0
        offset += nbytes
        first += count
    if count > 1:
        fields = tuple([partition.fields[name] for name in plan.names])
        extents.several[extent] = Several(fields, rows, plan.nbytes(command.lengths))
    extents.release_cells(dead, account)
    return written, overwritten_bytes


def _fields_of(partition: Partition, plan: Plan, rows: Int64s, newborn: int) -> tuple[str, ...]:
    """Return the fields that all of the rows have. New samples have those of the plan."""
    if newborn < len(rows):
        return partition.common_fields(rows)
    return tuple([name for name in partition.fields if name in plan.names])


def _tags_of(partition: Partition, command: PutRows, rows: Int64s, newborn: int) -> tuple[TagColumn, ...]:
    """Return the tags of the rows. New samples have those of the command."""
    if newborn < len(rows):
        return partition.tags.of(rows)
    tags = command.tags
    return tuple([TagColumn(name=name, values=tags[name]) for name in partition.tags.columns if name in tags])
