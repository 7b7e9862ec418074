"""A put into preallocated space."""

from __future__ import annotations

from itertools import accumulate, pairwise

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
    """The reservation of a commit into preallocated `space`, in the space's piece number `place` (None: the columns are
    empty). The columns are one after another from `offset`, and each part of a column begins at a granule: its values
    [first, last) are a pair of `ranges`, its whole granules in bytes are in `nbytes`, by column. Without parts in the
    commit, each column is one part. Nothing is taken before `cut`. `space.pieces[0]` are the unused pieces, as
    (0, 0, extent, offset)."""

    def __init__(self, state: State, space: Preallocation, partition: Partition, command: Commit) -> None:
        if command.offset is None or command.offset % GRANULE_BYTES:
            raise InvalidRequestError(
                f"offset {command.offset}: a commit into preallocated space must begin at a multiple of {GRANULE_BYTES}"
            )
        sizes = [column.lengths * column.spec.unit_bytes for column in command.columns]
        names = [column.name for column in command.columns]
        check_columns(state, list(zip(names, sizes, strict=True)))
        super().__init__(partition, names, sizes, update=False)
        self.space = space
        self.offset = command.offset
        self.ranges = [_ranges(command, number) for number in range(len(sizes))]
        self.nbytes = [
            [granules_up(total(column[first:last])) for first, last in ranges]
            for column, ranges in zip(sizes, self.ranges, strict=True)
        ]
        self.total_bytes = sum(map(sum, self.nbytes))
        self.place = self._find_piece(state.extents)

    def _find_piece(self, extents: Extents) -> int | None:
        """Return the number of the piece that holds all columns (None: they are empty). Raises InvalidRequestError."""
        nbytes = self.total_bytes
        if not nbytes:
            return None
        for number, (_, _, extent, start) in enumerate(self.space.pieces[0]):
            if start <= self.offset and self.offset + nbytes <= start + int(extents.sizes[extent]):
                return number
        raise InvalidRequestError(
            f"{nbytes} bytes at {self.offset} are not within the unused part of the preallocated space"
        )

    def cut(self, extents: Extents) -> None:
        """Take the bytes out of the space, as one extent per part of a column. The rest of the space's piece stays
        preallocated."""
        if self.place is not None:
            pieces = self.space.pieces[0]
            _, _, piece_extent, _ = pieces[self.place]
            remaining = extents.cut(piece_extent, self.offset, self.total_bytes)
            pieces[self.place : self.place + 1] = [(0, 0, extent, int(extents.starts[extent])) for extent in remaining]
        offset, account, unit = self.offset, self.partition.account, self.space.unit
        for column, ranges, sizes in zip(self.pieces, self.ranges, self.nbytes, strict=True):
            for (first, last), nbytes in zip(ranges, sizes, strict=True):
                start = offset if nbytes else 0  # an extent of empty values holds no bytes
                if last > first:  # a part without values needs no extent
                    column.append((first, last, extents.reserve(unit, start, nbytes, account), start))
                offset += nbytes


def _ranges(command: Commit, number: int) -> list[tuple[int, int]]:
    """Return the values [first, last) of each part of column `number`. Raises InvalidRequestError."""
    column = command.columns[number]
    if not command.parts:
        return [(0, len(column.lengths))]
    ends = [0, *accumulate(command.parts)]
    if column.index is not None or len(column.lengths) != ends[-1] or min(command.parts) < 0:
        raise InvalidRequestError(
            f"column {column.name!r}: a commit of {ends[-1]} samples in parts needs one value for each of them"
        )
    return list(pairwise(ends))
