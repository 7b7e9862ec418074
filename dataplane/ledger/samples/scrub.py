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
NAMED = 5
"""At most this many of the dropped samples are named in the log."""

Place = tuple[str, str, int]
"""Partition, field and row, in the order of the check."""


class Recheck:
    def __init__(self, state: State) -> None:
        self.state = state

    def begin(self, unit: Unit) -> None:
        """Order the check of the first page of a unit's rows, if it has any."""
        self._order(unit, ("", "", -1))

    def checked(self, item: RowsChecked) -> None:
        """Drop damaged samples, and order the check of the next page."""
        unit = self.state.units.get(item.unit)
        if unit is None:
            return
        self._drop(unit, item)
        self._order(unit, (item.partition, item.field, item.last))

    def _drop(self, unit: Unit, item: RowsChecked) -> None:
        """Drop the damaged samples that still have their damaged cell on the unit."""
        partition = self.state.partitions.get(item.partition)
        field = None if partition is None else partition.fields.get(item.field)
        if partition is None or field is None or not len(item.rows):
            return
        living = partition.rows.holds(item.rows, item.generations)
        rows, offsets = item.rows[living], item.offsets[living]
        # The row may have been rewritten elsewhere in the meantime.
        here = (self.state.extents.units[field.extents[rows]] == unit.number) & (field.offsets[rows] == offsets)
        rows = unrepeated(rows[here])
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

    def _order(self, unit: Unit, after: Place) -> None:
        """Order the check of the next rows after `after`. If there are none, the check is complete."""
        for partition_name in sorted(name for name in self.state.partitions if name >= after[0]):
            partition = self.state.partitions[partition_name]
            for name in sorted(partition.fields):
                if (partition_name, name) < after[:2]:
                    continue
                field = partition.fields[name]
                rows = self._rows(unit, field, after[2] if (partition_name, name) == after[:2] else -1)
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

    def _rows(self, unit: Unit, field: Field, after: int) -> Int64s:
        """Return the next rows after row `after` that have a checksum and lie on the unit, ascending."""
        if field.checksums is None:
            return np.zeros(0, np.int64)
        extents = field.extents[after + 1 :]
        found = (extents > 0) & (field.checksums[after + 1 :] > 0)
        found &= self.state.extents.units[extents] == unit.number
        rows: Int64s = np.flatnonzero(found)[:PAGE_ROWS].astype(np.int64) + (after + 1)
        return rows
