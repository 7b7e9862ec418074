"""Placement of a put's bytes: one piece if it fits, else column by column, else columns split between values.

`Want` describes the put: `whole` has the size of each column in whole granules, `total` their sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.core.types import GRANULE_BYTES, granules_up
from dataplane.errors import InvalidRequestError
from dataplane.ledger.commands import Int64s
from dataplane.ledger.state.arrays import top
from dataplane.ledger.state.sessions import Want, check_limit
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit

MAX_BYTES = 1 << 62
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

    If the put does not fit now, no space is taken: the pieces are None, and the arenas of the returned units can grow
    for it. Units that are returned with pieces have no meaning.
    """
    ordered = want.by_preference(units)  # best first
    for unit in ordered:
        if unit.available_bytes(update=want.update) < want.total:
            continue
        pieces = _place_in_one_piece(want, unit)
        if pieces is None:
            pieces = _place_by_columns(want, [unit])
        if pieces is not None:
            return pieces, []
        if want.prefers(unit) and can_grow(unit):  # wait for its growth instead of using another unit
            return None, [unit]
    # No unit has all of the put now. One that has it after growth is better than several units.
    growable = [unit for unit in ordered if can_grow(unit) and unit.available_bytes(update=want.update) > 0]
    large_enough = [unit for unit in growable if unit.available_bytes(update=want.update) >= want.total]
    if large_enough:
        return None, large_enough[:1]
    return _place_by_columns(want, ordered, split=True), growable


def can_grow(unit: Unit) -> bool:
    return unit.space.backed_bytes < unit.ceiling


def growth_target(unit: Unit, need: int) -> int | None:
    """Return the backing in bytes to order so that the unit has at least `need` more bytes, as far as its ceiling
    allows; None if enough was ordered already or growth is impossible now."""
    backed = unit.space.backed_bytes
    if not unit.open or not can_grow(unit):
        return None
    if unit.asked and unit.asked >= min(backed + need, unit.ceiling):
        return None
    return min(backed + max(STEP_BYTES, need, backed // 4), unit.ceiling)


def retry_target(unit: Unit, need: int, now: float) -> int | None:
    """Return the backing in bytes to order from a unit that failed to grow and may be tried again now, or None."""
    if not unit.problem or unit.asked or not unit.open or now < unit.retry_at:
        return None
    # Up to the capacity: the failed growth lowered the ceiling to what is backed.
    return min(unit.space.backed_bytes + max(STEP_BYTES, need), unit.space.capacity_bytes)


def advance_target(unit: Unit) -> int | None:
    """Return the backing in bytes to order in advance because little of the present one is free. None: enough is free,
    growth is pending, or it is impossible now."""
    slack = min(SLACK_BYTES, unit.ceiling // 8)
    if unit.asked or unit.space.free_bytes >= slack:
        return None
    return growth_target(unit, slack)


def _place_in_one_piece(want: Want, unit: Unit) -> list[Piece] | None:
    """Place all columns, each in whole granules, one after another in one free range of the unit, or return None."""
    offset = 0  # also of empty values, which take no space
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


def _place_by_columns(want: Want, units: list[Unit], *, split: bool = False) -> list[Piece] | None:
    """Place each column in one piece of the first of the units where it fits; with `split`, a column that fits nowhere
    in several pieces. Return None, and take nothing, if a column has no place."""
    pieces: list[Piece] = []
    for column in range(len(want.whole)):
        if want.values(column) and not _place_column(want, column, units, pieces, split=split):
            give_back(pieces)
            return None
    return pieces


def give_back(pieces: list[Piece]) -> None:
    """Free the space of these pieces."""
    for piece in pieces:
        if piece.size:
            piece.unit.space.give(piece.offset, piece.size)


def _place_column(want: Want, column: int, units: list[Unit], pieces: list[Piece], *, split: bool) -> bool:
    """Add pieces for one column to `pieces`. Return False if it has no place; pieces taken so far stay in `pieces`."""
    # ends[k]: sum of the first k sizes.
    first = 0
    last = want.values(column)
    ends = want.ends[column]
    while first < last:
        # All remaining values in one piece, or with `split` as many as the largest available piece can hold.
        taken = _take_piece(want, units, granules_up(int(ends[last] - ends[first])))
        stop = last
        if taken is None and split:
            best = max(units, key=lambda unit: _largest_usable_piece(want, unit))
            largest = _largest_usable_piece(want, best)
            stop = int(np.searchsorted(ends, ends[first] + largest, side="right")) - 1
            if stop > first:  # at least one value fits
                taken = _take_piece(want, [best], granules_up(int(ends[stop] - ends[first])))
        if taken is None:
            return False
        unit, offset, size = taken
        pieces.append(Piece(column, first, stop, unit, offset, size))
        first = stop
    return True


def _largest_usable_piece(want: Want, unit: Unit) -> int:
    """Return the largest number of bytes in one piece that the unit has for this put."""
    available = unit.available_bytes(update=want.update) // GRANULE_BYTES * GRANULE_BYTES
    return max(min(unit.space.largest_bytes, available), 0)


def _take_piece(want: Want, units: list[Unit], size: int) -> tuple[Unit, int, int] | None:
    """Take `size` bytes in the first unit that has them in one piece. Return (unit, offset, size), or None."""
    if not size:
        return units[0], 0, 0  # empty values take no space
    for unit in units:
        if unit.available_bytes(update=want.update) >= size:
            offset = unit.space.take(size)
            if offset is not None:
                return unit, offset, size
    return None


def check_columns(state: State, columns: Sequence[tuple[str, Int64s]]) -> None:
    """Check the columns of a put, given as (name, value sizes). Raises InvalidRequestError or LimitError."""
    limits = state.limits
    check_limit("columns of one put", len(columns), limits.columns, "Put fewer fields at a time.")
    seen: set[str] = set()
    for name, sizes in columns:
        state.check_name("field", name)
        if name in seen:
            raise InvalidRequestError(f"column {name!r} is named twice in one put")
        seen.add(name)
        check_limit(f"values of column {name!r} in one put", len(sizes), limits.samples, "Put fewer rows at a time.")
        most = top(sizes)  # a negative size counts as a very large one
        # The sum is only computed, in floats that do not overflow, if it may be too large.
        if most > MAX_BYTES or (most * len(sizes) > MAX_BYTES and float(sizes.sum(dtype=np.float64)) > MAX_BYTES):
            raise InvalidRequestError(f"column {name!r}: its values must have 0 to {MAX_BYTES} bytes in total")
