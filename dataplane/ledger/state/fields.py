"""One field of a partition: the location of each row's cell."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.core.plain_numbers import joined_dtype
from dataplane.core.types import FieldKind, FieldSpec
from dataplane.ledger.commands import Int32s, Int64s, UInt32s
from dataplane.ledger.state.arrays import every, grown, some, top
from dataplane.ledger.state.extents import DeadCells

INT32_MAX = (1 << 31) - 1


class Field:
    """Cells of one column, by row. A cell is the location of one sample's value: extent, offset in the arena, length
    (in units of `unit_bytes`). `extents[row]` is 0 if the row has no cell; `live` counts the cells. `writer`: id
    and name of the last writing session, and the time.

    `declared`: spec in the schema (None: a later schema dropped the field, but live rows have it). `spec`: current
    spec. The first put settles it; it returns to `declared` when the last live cell is removed. `widened`: the kind is
    another one than that of the first put (see `Partition.widen`). Lengths are stored in 32 bits until one needs more.
    `checksums` is None until a cell is written with a checksum; 0 means "no checksum".
    """

    checksums: UInt32s | None = None
    widened = False

    def __init__(self, declared: FieldSpec | None, capacity: int) -> None:
        self.declared = declared
        self.live = 0
        self.writer: tuple[int, str, float] | None = None
        self.settle(declared or FieldSpec())
        self.extents: Int32s = np.zeros(capacity, np.int32)
        self.offsets: Int64s = np.zeros(capacity, np.int64)
        self.lengths: Int32s | Int64s = np.zeros(capacity, np.int32)
        self.checksums = None

    def settle(self, spec: FieldSpec) -> None:
        """Set the current spec."""
        self.spec = spec
        self.unit_bytes = spec.unit_bytes if spec.settled else 0

    def reset(self) -> None:
        """Return to the state after the declaration, because the last cell was removed."""
        self.checksums = None
        self.settle(self.declared or FieldSpec())

    def settle_for_put(self, spec: FieldSpec) -> None:
        """Set the current spec after a put of values of `spec`. Objects remain plain numbers while every put is."""
        if self.spec.kind is FieldKind.OBJECT:
            spec = FieldSpec(FieldKind.OBJECT, joined_dtype(self.spec.dtype, spec.dtype))
        self.settle(spec)

    @property
    def open(self) -> bool:
        """Whether nobody declared the kind, so that it may widen."""
        return self.declared is None or self.declared.kind is None

    def widens_to(self, spec: FieldSpec) -> bool:
        """Whether a put of values of `spec`, which the current spec does not accept, widens the field."""
        return self.open and self.spec.widens_to(spec) and (self.declared or FieldSpec()).accepts(spec)

    def grow(self, capacity: int) -> None:
        """Enlarge the columns to `capacity` rows."""
        self.extents = grown(self.extents, capacity)
        self.offsets = grown(self.offsets, capacity)
        self.lengths = grown(self.lengths, capacity)
        if self.checksums is not None:
            self.checksums = grown(self.checksums, capacity)

    def write(
        self, rows: Int64s, extents: Int32s, offsets: Int64s, lengths: Int64s, checksums: UInt32s | None
    ) -> DeadCells | None:
        """Set the locations of the cells of `rows` (no repeats). Return their previous cells, if
        any of the rows had one."""
        if self.lengths.dtype == np.int32 and top(lengths) > INT32_MAX:
            self.lengths = self.lengths.astype(np.int64)
        replaced = self.present_cells(rows)
        self.live += len(rows) - (replaced.cells if replaced is not None else 0)
        self.extents[rows] = extents
        self.offsets[rows] = offsets
        self.lengths[rows] = lengths
        if checksums is not None and self.checksums is None:
            self.checksums = np.zeros(len(self.extents), np.uint32)
        if self.checksums is not None:
            self.checksums[rows] = 0 if checksums is None else checksums
        return replaced

    def present_cells(self, rows: Int64s | slice) -> DeadCells | None:
        """Return the cells of the rows, to be released once they are replaced or erased; None if no
        row has one. With a slice, offsets and lengths are views."""
        extents = self.extents[rows]
        count = int(np.count_nonzero(extents))
        if not count:
            return None
        lengths = self.lengths[rows]
        return DeadCells(extents.copy(), self.offsets[rows], lengths, self.unit_bytes, count)

    def lengths_of(self, rows: Int64s) -> Int64s:
        return self.lengths[rows].astype(np.int64)

    def bytes_of(self, rows: Int64s) -> Int64s:
        """Return the size in bytes of each row's cell; any number for a row without cell."""
        return self.lengths_of(rows) * self.unit_bytes


def erase(fields: Iterable[Field], rows: Int64s | slice) -> list[DeadCells]:
    """Remove the cells of `rows` (no repeats) in these fields. Return them as
    `Field.present_cells` does."""
    dead = []
    for field in fields:
        removed = field.present_cells(rows)
        if removed is not None:
            dead.append(removed)
            field.extents[rows] = 0
            field.live -= removed.cells
            if not field.live:
                field.reset()
    return dead


def erase_row(fields: Iterable[Field], row: int) -> list[DeadCells]:
    """Remove the cells of one row as `erase` does, which takes several times as long for it."""
    found = []
    for field in fields:
        extent = field.extents.item(row)
        if extent:
            nbytes = field.lengths.item(row) * field.unit_bytes
            found.append((extent, field.offsets.item(row), nbytes))
            field.extents[row] = 0
            field.live -= 1
            if not field.live:
                field.reset()
    cells = np.array(found, np.int64).reshape(-1, 3)
    return [DeadCells(cells[:, 0].astype(np.int32), cells[:, 1], cells[:, 2], 1, len(found))]


def cells_of(field: Field | None, rows: Int64s) -> tuple[Int32s, Int64s, Int64s]:
    """Return extent (0: no cell), offset and length (-1: no cell) of each row's cell. Row -1 has no cell, and without
    a field no row has one."""
    if field is None or not len(field.extents):  # or its partition never had a sample
        return np.zeros(len(rows), np.int32), np.zeros(len(rows), np.int64), np.full(len(rows), -1)
    extents = field.extents[rows]  # row -1 reads the last entry; it is overwritten below
    if every(extents) and every(rows >= 0):
        return extents, field.offsets[rows], field.lengths_of(rows)
    extents = np.where(rows >= 0, extents, 0).astype(np.int32)
    has_cell = extents > 0
    return extents, np.where(has_cell, field.offsets[rows], 0), np.where(has_cell, field.lengths_of(rows), -1)


def checksums_of(field: Field | None, rows: Int64s) -> UInt32s | None:
    """Return the checksum of each row's cell (0: none), or None if no cell has one. Row -1 has no
    cell."""
    if field is None or field.checksums is None:
        return None
    # Row -1 reads the last entry; the condition replaces that by 0.
    found = np.where((rows >= 0) & (field.extents[rows] > 0), field.checksums[rows], 0).astype(np.uint32)
    return found if some(found) else None
