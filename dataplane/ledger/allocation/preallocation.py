"""Commits that take their part of the room that their session allocated ahead."""

from __future__ import annotations

from dataplane.core.types import GRANULE_BYTES
from dataplane.errors import InvalidRequestError
from dataplane.ledger.allocation.reservations import check_columns
from dataplane.ledger.commands import Commit
from dataplane.ledger.state.arrays import total
from dataplane.ledger.state.extents import Extents
from dataplane.ledger.state.free_space import granules_up
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.sessions import Preallocation, PutReservation
from dataplane.ledger.state.state import State


class PreallocatedPut(PutReservation):
    """The reservation that a commit into `room` would have had: its columns one after another from `offset`, `nbytes`
    of each in whole granules, in the room's piece number `place` (None: they are no bytes). Nothing is taken before
    `cut`."""

    def __init__(self, state: State, room: Preallocation, partition: Partition, command: Commit) -> None:
        if command.offset is None or command.offset % GRANULE_BYTES:
            raise InvalidRequestError(
                f"offset {command.offset}: a commit into preallocated space begins at a multiple of {GRANULE_BYTES}"
            )
        sizes = [column.lengths * column.spec.unit_bytes for column in command.columns]
        names = [column.name for column in command.columns]
        check_columns(state, list(zip(names, sizes, strict=True)))
        super().__init__(partition, names, sizes, update=False)
        self.room = room
        self.offset = command.offset
        self.nbytes = [granules_up(total(column)) for column in sizes]
        self.place = self._find(state.extents)

    def _find(self, extents: Extents) -> int | None:
        nbytes = sum(self.nbytes)
        if not nbytes:
            return None
        for place, (_, _, extent, start) in enumerate(self.room.pieces[0]):
            if start <= self.offset and self.offset + nbytes <= start + int(extents.sizes[extent]):
                return place
        raise InvalidRequestError(
            f"{nbytes} bytes at {self.offset} are not, or no longer, within the preallocated space"
        )

    def cut(self, extents: Extents) -> None:
        """Take the bytes out of the room, as an extent for each column."""
        if self.place is not None:
            pieces = self.room.pieces[0]
            left = extents.cut(pieces[self.place][2], self.offset, sum(self.nbytes))
            pieces[self.place : self.place + 1] = [(0, 0, extent, int(extents.starts[extent])) for extent in left]
        offset, account = self.offset, self.partition.account
        for column, sizes, nbytes in zip(self.pieces, self.sizes, self.nbytes, strict=True):
            start = offset if nbytes else 0
            if len(sizes):
                column.append((0, len(sizes), extents.reserve(self.room.unit, start, nbytes, account), start))
            offset += nbytes
