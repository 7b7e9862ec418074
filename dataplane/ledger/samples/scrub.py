"""After a crash of its machine, a storage unit compares its rows with their checksums, and damaged samples are dropped.

The rows stay readable in the meantime: a reader that compares checksums finds damage as well.
"""

from __future__ import annotations

import numpy as np

from dataplane.ledger.commands import CheckRows, Int64s, Notice, RowsChecked
from dataplane.ledger.state.fields import Field
from dataplane.ledger.state.partition import unrepeated
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit

PAGE_ROWS = 16_384
"""One order has at most this many rows."""
NAMED = 5
"""At most this many of the dropped samples are named in the log."""

Place = tuple[str, str, int]
"""Partition, field and row, in the order of the check."""


class Recheck:
    """Orders a storage unit to compare its rows with their checksums, page by page, and drops damaged samples. It keeps
    no state of its own: each report names the last row that was checked."""

    def __init__(self, state: State) -> None:
        self.state = state

    def begin(self, unit: Unit) -> None:
        """Order the check of the first page of a unit's rows, if it has any."""
        self._order_next_page(unit, ("", "", -1))  # before all partitions, fields and rows

    def checked(self, item: RowsChecked) -> None:
        """Drop damaged samples, and order the check of the next page."""
        unit = self.state.units.get(item.unit)
        if unit is None:
            return
        self._drop_damaged(unit, item)
        self._order_next_page(unit, (item.partition, item.field, item.last))

    def _drop_damaged(self, unit: Unit, item: RowsChecked) -> None:
        """Drop the damaged samples that still have their damaged cell on the unit."""
        partition = self.state.partitions.get(item.partition)
        field = None if partition is None else partition.fields.get(item.field)
        if partition is None or field is None or not len(item.rows):
            return
        exists = partition.rows.holds(item.rows, item.generations)
        rows, offsets = item.rows[exists], item.offsets[exists]
        # The row may have been rewritten elsewhere in the meantime.
        unchanged = (self.state.extents.units[field.extents[rows]] == unit.number) & (field.offsets[rows] == offsets)
        rows = unrepeated(rows[unchanged])
        if not len(rows):
            return
        names = ", ".join(map(repr, partition.rows.names_of(rows[:NAMED]))) + (", ..." if len(rows) > NAMED else "")
        partition.clear_lost(rows, f"to damage in storage unit {unit.number} ({unit.offer.name})")
        self.state.touch(partition)
        text = (
            f"samples of partition {partition.name!r} are lost ({len(rows)} in total): {names}. Their field "
            f"{item.field!r} in storage unit {unit.number} ({unit.offer.name}) was damaged when its machine crashed"
        )
        self.state.out.append(Notice(text=text))

    def _order_next_page(self, unit: Unit, after: Place) -> None:
        """Order the check of the next page of rows after `after`, all of one field: fields are checked in the order of
        (partition, field) names, and rows in ascending order. If none is left, the check is complete."""
        last_partition, last_field, last_row = after
        for partition_name in sorted(name for name in self.state.partitions if name >= last_partition):
            partition = self.state.partitions[partition_name]
            for name in sorted(partition.fields):
                if (partition_name, name) < (last_partition, last_field):
                    continue
                field = partition.fields[name]
                same_field = (partition_name, name) == (last_partition, last_field)
                rows = self._next_rows(unit, field, last_row if same_field else -1)
                if len(rows):
                    assert field.checksums is not None
                    self.state.out.append(
                        CheckRows(
                            unit=unit.number,
                            partition=partition_name,
                            field=name,
                            rows=rows,
                            generations=partition.generations_of(rows),
                            offsets=field.offsets[rows],
                            sizes=field.bytes_of(rows),
                            checksums=field.checksums[rows],
                        )
                    )
                    unit.checking = True
                    return
        unit.checking = False

    def _next_rows(self, unit: Unit, field: Field, after: int) -> Int64s:
        """Return the next rows after row `after` that have a checksum and lie on the unit, ascending, at most a
        page."""
        if field.checksums is None:
            return np.zeros(0, np.int64)
        first = after + 1
        extents = field.extents[first:]
        to_check = (extents > 0) & (field.checksums[first:] > 0)
        to_check &= self.state.extents.units[extents] == unit.number
        rows: Int64s = np.flatnonzero(to_check)[:PAGE_ROWS].astype(np.int64) + first
        return rows
