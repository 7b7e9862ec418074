"""Placement of a put's bytes: one piece if it fits, else column by column, else columns split between values."""

from __future__ import annotations

import numpy as np

from dataplane.ledger.commands import Int64s
from dataplane.ledger.state.free_space import granules_up
from dataplane.ledger.state.sessions import Want
from dataplane.ledger.state.units import Unit

MIB = 1 << 20
STEP_BYTES = 64 * MIB
"""Arenas grow by at least this much."""
SLACK_BYTES = 256 * MIB
"""An arena grows in advance if less than this, and less than an eighth of its capacity, is backed and free."""


class Piece:
    """Values [first, last) of a column at `offset` of a unit, where `size` bytes were taken."""

    def __init__(self, column: int, first: int, last: int, unit: Unit, offset: int, size: int) -> None:
        self.column = column
        self.first = first
        self.last = last
        self.unit = unit
        self.offset = offset
        self.size = size


def place(want: Want, units: list[Unit]) -> tuple[list[Piece] | None, list[Unit]]:
    """Take space for all values of a put and return the pieces. `units` are the open units, at least one.

    If the put does not fit now, no space is taken. The result is then None, with the units whose arenas can grow for
    it.
    """
    ordered = want.by_preference(units)
    for unit in ordered:
        if unit.available_bytes(update=want.update) < want.total:
            continue
        pieces = _in_one(want, unit)
        if pieces is None:
            pieces = _by_columns(want, [unit])
        if pieces is not None:
            return pieces, []
        if want.prefers(unit) and can_grow(unit):
            return None, [unit]
    growing = [unit for unit in ordered if can_grow(unit) and unit.available_bytes(update=want.update) > 0]
    whole = [unit for unit in growing if unit.available_bytes(update=want.update) >= want.total]
    if whole:
        return None, whole[:1]
    return _by_columns(want, ordered, split=True), growing


def can_grow(unit: Unit) -> bool:
    return unit.space.backed_bytes < unit.ceiling


def growth(unit: Unit, need: int) -> int | None:
    """Return the backing to request so that the unit has `need` more bytes; None if it was requested or is
    impossible."""
    backed = unit.space.backed_bytes
    if not unit.open or not can_grow(unit) or unit.shrinking:
        return None
    target = min(backed + max(STEP_BYTES, need, backed // 4), unit.ceiling)
    if unit.asked and unit.asked >= min(backed + need, unit.ceiling):
        return None
    return target


def growth_again(unit: Unit, need: int, now: float) -> int | None:
    """Return the backing to request from a unit that failed to grow some time ago, or None."""
    if not unit.problem or unit.asked or unit.shrinking or not unit.open or now < unit.retry_at:
        return None
    return min(unit.space.backed_bytes + max(STEP_BYTES, need), unit.space.capacity_bytes)


def growth_ahead(unit: Unit) -> int | None:
    """Return the backing to request because little of it is left, or None."""
    slack = min(SLACK_BYTES, unit.ceiling // 8)
    return growth(unit, slack) if not unit.asked and unit.space.free_bytes < slack else None


def _in_one(want: Want, unit: Unit) -> list[Piece] | None:
    """Place all columns in one piece of the unit, or return None."""
    offset = 0
    if want.total:
        taken = unit.space.take(want.total)
        if taken is None:
            return None
        offset = taken
    pieces = []
    for column, size in enumerate(want.whole):
        if want.values(column):
            pieces.append(Piece(column, 0, want.values(column), unit, offset if size else 0, size))
        offset += size
    return pieces


def _by_columns(want: Want, units: list[Unit], *, split: bool = False) -> list[Piece] | None:
    """Place each column in one piece where that fits; with `split`, in several pieces elsewhere."""
    pieces: list[Piece] = []
    for column in range(len(want.whole)):
        if want.values(column) and not _column(want, column, units, pieces, split=split):
            give_back(pieces)
            return None
    return pieces


def place_in(unit: Unit, sizes: Int64s, most: int) -> list[Piece] | None:
    """Place the values of one column in at most `most` pieces of one unit. Return None, and take nothing, if that
    is impossible. No value may be empty."""
    pieces: list[Piece] = []
    first, ends = 0, np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    while first < len(sizes):
        last = int(np.searchsorted(ends, ends[first] + unit.space.largest_bytes, side="right")) - 1
        if last == first or len(pieces) == most:
            give_back(pieces)
            return None
        size = granules_up(int(ends[last] - ends[first]))
        offset = unit.space.take(size)
        assert offset is not None, size
        pieces.append(Piece(0, first, last, unit, offset, size))
        first = last
    return pieces


def give_back(pieces: list[Piece]) -> None:
    """Free the space of these pieces."""
    for piece in pieces:
        if piece.size:
            piece.unit.space.give(piece.offset, piece.size)


def _column(want: Want, column: int, units: list[Unit], pieces: list[Piece], *, split: bool) -> bool:
    """Add pieces for one column. Return False if it has no place; pieces taken so far stay in `pieces`."""
    first, last, ends = 0, want.values(column), want.ends[column]
    while first < last:
        taken = _take(want, units, granules_up(int(ends[last] - ends[first])))
        upto = last
        if taken is None and split:
            best = max(units, key=lambda unit: _block(want, unit))
            block = _block(want, best)
            upto = int(np.searchsorted(ends, ends[first] + block, side="right")) - 1
            if upto > first:
                taken = _take(want, [best], granules_up(int(ends[upto] - ends[first])))
        if taken is None:
            return False
        unit, offset, size = taken
        pieces.append(Piece(column, first, upto, unit, offset, size))
        first = upto
    return True


def _block(want: Want, unit: Unit) -> int:
    """Return the largest number of bytes in one piece that the unit has for this put."""
    return max(min(unit.space.largest_bytes, unit.available_bytes(update=want.update) // 64 * 64), 0)


def _take(want: Want, units: list[Unit], size: int) -> tuple[Unit, int, int] | None:
    if not size:
        return units[0], 0, 0
    for unit in units:
        if unit.available_bytes(update=want.update) >= size:
            offset = unit.space.take(size)
            if offset is not None:
                return unit, offset, size
    return None
