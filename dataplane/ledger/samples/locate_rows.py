"""Execute `LocateRows` in the usual case."""

from __future__ import annotations

import numpy as np

from dataplane.ledger.commands.short import LocateRows, RowsLocated, decode_plan
from dataplane.ledger.samples.locate import compares_checksums
from dataplane.ledger.state.arrays import every
from dataplane.ledger.state.sessions import Session
from dataplane.ledger.state.state import State


def locate_rows(state: State, session: Session, call_id: int, command: LocateRows) -> RowsLocated | None:
    """Locate and pin every cell of the samples, as `Reads.locate` does for the expanded command.
    Change nothing and return None for an error, and if the cells have no short form: a field has
    another spec or rows in hidden columns, the cells are on several units, or a complete plan lacks
    a field that all of the samples have."""
    partition = state.partitions.get(command.partition)
    if partition is None:
        return None
    plan = decode_plan(command.plan)
    if not plan.is_valid or not plan.others.isdisjoint(partition.fields):
        return None
    table = partition.rows
    if command.ids:
        get = table.ids.get
        found = [get(name, -1) for name in command.ids]
        if min(found) < 0 or command.rows or command.generations:
            return None
    elif table.hold(command.rows, command.generations):
        found = list(command.rows)
    else:
        return None
    if len(found) > state.limits.samples or len(plan.columns) > state.limits.columns:
        return None
    rows = np.array(found, np.int64)
    extents: list[int] = []
    offsets: list[int] = []
    lengths: list[int] = []
    checksums: list[int] = []
    for column in plan.columns:
        field = partition.fields.get(column.name)
        if field is None or field.widened or (field.spec is not column.spec and field.spec != column.spec):
            return None
        extents += field.extents[rows].tolist()
        offsets += field.offsets[rows].tolist()
        lengths += field.lengths[rows].tolist()
        if field.checksums is not None:
            checksums += [0] * (len(extents) - len(rows) - len(checksums))
            checksums += field.checksums[rows].tolist()
    if not extents or min(extents) <= 0:  # 0: no cell
        return None
    if plan.complete and len(partition.common_fields(rows)) > len(plan.columns):
        return None
    distinct = np.array(sorted(set(extents)), np.int32)
    units = state.extents.units[distinct]
    unit = int(units[0])
    if not every(units == unit):
        return None
    if checksums and compares_checksums(state, session, units):
        checksums += [0] * (len(extents) - len(checksums))
    else:
        checksums = []
    state.pin(session, call_id, distinct, brief=True)
    return RowsLocated(
        rows=tuple(found),
        generations=tuple(table.generations[rows].tolist()),
        unit=unit,
        offsets=tuple(offsets),
        lengths=tuple(lengths),
        checksums=tuple(checksums),
    )
