"""Snapshot of a partition, taken for a checkpoint."""

from __future__ import annotations

from dataplane.core.types import FieldSpec
from dataplane.ledger import commands as c
from dataplane.ledger.state.tags import Tags


class SavedCells:
    """Locations of the cells of one field, by age of their samples. A length of -1 means "no cell"."""

    checksums: c.UInt32s | None = None

    def __init__(
        self, spec: FieldSpec, units: c.Int32s, offsets: c.Int64s, lengths: c.Int64s, checksums: c.UInt32s | None
    ) -> None:
        self.spec = spec
        self.checksums = checksums
        self.units = units
        self.offsets = offsets
        self.lengths = lengths


class Snapshot:
    """The samples of one partition at the time of the snapshot, oldest first."""

    def __init__(self, ids: tuple[str, ...], tags: Tags, fields: dict[str, SavedCells]) -> None:
        self.ids = ids
        self.tags = tags
        self.fields = fields
