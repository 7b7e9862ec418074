"""Compaction: a storage unit copies live values within its arena, for a put that waits for a larger free piece.

If enough bytes are free for a waiting put, but in pieces that are too small, the ledger chooses a window of the
arena with few live bytes. It reserves the free bytes of the window, and space for copies outside of it, pins the
values in the window, and orders the unit to copy them. When the unit has done so, unchanged cells are pointed at
the copies, as after a `Move`. The window is free as soon as no reader uses the old bytes.

An order is valid until the unit reports it, even if connections or processes fail, and is sent again under its
number. Until then its source bytes are not reused, and no other writer gets its target bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from dataplane.core.row_copy import merge_copies
from dataplane.core.types import GRANULE_BYTES
from dataplane.ledger.allocation.budgets import waits_for_larger_piece
from dataplane.ledger.allocation.compaction_windows import Spans, Window, windows
from dataplane.ledger.allocation.placement import Piece, give_back, place_in
from dataplane.ledger.commands import CompactArena, Compacted, Int64s, Move, Notice
from dataplane.ledger.samples.drain import Drains, Page, page_of
from dataplane.ledger.state.extents import LIVE
from dataplane.ledger.state.partition import Partition
from dataplane.ledger.state.relocations import Compaction, Relocation
from dataplane.ledger.state.sessions import ParkedAllocate, PutReservation, Want
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit
from dataplane.ledger.state.wait_queues import WaitQueues

MOST_BYTES = 64 << 20
"""One order copies at most this much."""
MOST_RANGES = 1 << 16
"""One order has at most this many ranges."""
MOST_PIECES = 1024
"""The copies of one field's values are split into at most this many pieces."""
PUTS = 4
"""A window is searched for at most this many waiting puts at a time."""
RETRY_S = 1.0
"""Interval between searches while puts wait."""


class _Values(NamedTuple):
    """Values of one field that are to be copied, and the pieces for the copies."""

    partition: Partition
    name: str
    page: Page
    pieces: list[Piece]


class Compactions:
    """Orders storage units to compact their arenas, and handles their reports. Sends an order only while no open unit
    is growing or being compacted."""

    def __init__(self, state: State, drains: Drains) -> None:
        self.state = state
        self.drains = drains

    def next_search_at(self) -> float:
        """Return the ledger time at which the next search for a put to help is due; infinity if no put waits, or if
        the free bytes of every open unit are in one piece already."""
        state = self.state
        in_pieces = state.puts_wait and any(unit.open and unit.space.fragments > 1 for unit in state.units.values())
        return state.compact_at if in_pieces else float("inf")

    def search(self) -> None:
        """Order a compaction for one of the first `PUTS` puts that wait for a larger piece, if it helps one. Does
        nothing while an open unit is being compacted, or is ordered to grow, which may make it unnecessary."""
        state = self.state
        if state.now < self.next_search_at():
            return
        state.compact_at = state.now + RETRY_S
        units = [unit for unit in state.units.values() if unit.open]
        if any(unit.asked or unit.number in state.compactions for unit in units):
            return
        # While a unit compares its rows with their checksums, copies would not be used (see `compacted`).
        for parked in islice(self._puts_to_help(), PUTS):
            want = parked.want
            if any(self._order_compaction(unit, want) for unit in want.by_preference(units) if not unit.checking):
                return

    def _puts_to_help(self) -> Iterator[ParkedAllocate]:
        """Yield the puts that wait for a larger piece: updates, then other puts, then moves."""
        state = self.state
        puts = chain(*[WaitQueues(lines.values()) for lines in state.space_waiters.values()], state.moves.values())
        return (parked for parked in puts if waits_for_larger_piece(state, parked))

    # --- ordering

    def _order_compaction(self, unit: Unit, want: Want) -> bool:
        """Order the unit to make a free piece that is large enough for the put or, if that is impossible at once, one
        that is larger than any free piece. Return whether an order was sent."""
        space = unit.space
        usable = min(want.total, space.free_bytes, unit.available_bytes(update=want.update))
        goal = usable // GRANULE_BYTES * GRANULE_BYTES
        least = space.largest_bytes + GRANULE_BYTES
        if goal < max(least, want.largest):  # no larger than a free piece, or too small for the largest value
            return False
        for window in windows(self._used_spans(unit), goal=goal, least=least, most=MOST_BYTES, free=space.free_bytes):
            values = self._values_in(window)
            copies = self._take_space(unit, window, values) if values else None
            if copies is not None:
                self._send_order(unit, window, values, copies)
                return True
        return False

    def _used_spans(self, unit: Unit) -> Spans:
        """Return the used spans of the arena. Spans that are not live, or are pinned, cannot be moved."""
        extents = self.state.extents
        starts, sizes, numbers = extents.spans(unit.number)
        movable = (extents.states[numbers] == LIVE) & (extents.pins[numbers] == 0)
        return Spans(starts, sizes, numbers, movable, unit.space.backed_bytes)

    def _values_in(self, window: Window) -> list[_Values]:
        """Return all values in the window, without pieces yet; empty if they have more cells than `Limits.samples`."""
        extents, cells_left = self.state.extents, self.state.limits.samples
        result: list[_Values] = []
        in_window = np.zeros(extents.high, np.bool_)  # by extent number
        in_window[window.extents] = True
        owners = set(extents.owners[window.extents].tolist())
        for partition in self.state.partitions.values():
            if partition.account.number not in owners:
                continue
            for name, field in partition.fields.items():
                rows = np.flatnonzero(in_window[field.extents]).astype(np.int64)
                # A trimmed extent may have other parts outside the window.
                inside = (field.offsets[rows] >= window.start) & (field.offsets[rows] < window.stop)
                rows = rows[inside & (field.lengths[rows] > 0)]
                cells_left -= len(rows)
                if cells_left < 0:
                    return []
                if len(rows):
                    result.append(_Values(partition, name, page_of(field, rows, len(rows)), []))
        return result

    def _take_space(self, unit: Unit, window: Window, to_copy: list[_Values]) -> list[Int64s] | None:
        """Take the free bytes of the window, so that nothing else is placed there, and space outside the window for
        the copies; add their pieces to `to_copy`.

        Returns three arrays with one entry for each range to copy: its source offset, its target offset, its bytes.
        Returns None, and takes nothing, if there is not enough space, or if the copies would be in more than
        `MOST_PIECES` pieces for a field or `MOST_RANGES` ranges in all."""
        for start, nbytes in window.free:
            unit.space.take_at(start, nbytes)
        for values in to_copy:
            pieces = place_in(unit, _value_sizes(values), MOST_PIECES)
            if pieces is None:
                break
            values.pieces.extend(pieces)
        else:  # all have space
            copies = [np.concatenate(parts) for parts in zip(*map(_copy_ranges, to_copy), strict=True)]
            if len(copies[0]) <= MOST_RANGES:
                return copies
        for values in to_copy:
            give_back(values.pieces)
        for start, nbytes in window.free:
            unit.space.give(start, nbytes)
        return None

    def _send_order(self, unit: Unit, window: Window, to_copy: list[_Values], copies: list[Int64s]) -> None:
        """Pin the values and send the order. All space is already taken: `copies` is the result of `_take_space`."""
        extents = self.state.extents
        unit.compactions += 1
        order = CompactArena(
            unit=unit.number, number=unit.compactions, sources=copies[0], targets=copies[1], sizes=copies[2]
        )
        free_parts = np.array([extents.reserve(unit.number, start, nbytes) for start, nbytes in window.free], np.int32)
        relocations = [self._prepare_relocation(unit, values) for values in to_copy]
        taken_bytes = sum(piece.size for values in to_copy for piece in values.pieces)
        taken_bytes += sum(nbytes for _, nbytes in window.free)
        self.state.compactions[unit.number] = Compaction(
            order, relocations, window=free_parts, nbytes=window.stop - window.start, taken_bytes=taken_bytes
        )
        self.state.out.append(order)

    def _prepare_relocation(self, unit: Unit, values: _Values) -> Relocation:
        """Pin the values, and create the move that points their cells at the copies."""
        extents, partition, page = self.state.extents, values.partition, values.page
        field = partition.fields[values.name]
        pinned = np.unique(field.extents[page.rows])
        extents.pin(pinned)
        reservation = PutReservation(partition, [values.name], [_value_sizes(values)], update=True, moving=True)
        for piece in values.pieces:
            number = extents.reserve(unit.number, piece.offset, piece.size)
            reservation.pieces[0].append((piece.first, piece.last, number, piece.offset))
        first_rows = page.rows[page.firsts]  # one for each value
        command = Move(
            partition=partition.name,
            field=values.name,
            unit=unit.number,
            rows=page.rows,
            generations=partition.generations_of(page.rows),
            index=page.values,
            offsets=field.offsets[first_rows],
            lengths=field.lengths_of(first_rows),
            located=0,  # no calls of a session found the cells and reserved the space
            reservation=0,
        )
        return Relocation(partition, command, reservation, pinned)

    # --- reports

    def order_again(self, unit: Unit) -> None:
        """Send the order again: the unit may not have received it, or lost it with its process."""
        compaction = self.state.compactions.get(unit.number)
        if compaction is not None:
            self.state.out.append(compaction.order)

    def compacted(self, item: Compacted) -> None:
        """Handle the unit's report that it carried out the order, or failed: point the cells at the copies, or free the
        copies. Cells also stay where they are while the unit compares rows with their checksums."""
        state = self.state
        compaction = state.compactions.get(item.unit)
        if compaction is None or item.number != compaction.order.number:
            return
        unit = state.units[item.unit]
        del state.compactions[item.unit]
        for relocation in compaction.relocations:
            if item.error or unit.checking:
                self.drains.drop_copies(relocation.reservation, relocation.pinned)
            else:
                # Before `relocate`, which unpins: an extent with live cells elsewhere must leave the window.
                state.extents.trim_after_last_pin(relocation.pinned)
                self.drains.relocate(
                    relocation.partition, relocation.command, relocation.reservation, relocation.pinned
                )
        if len(compaction.window):
            state.extents.free(compaction.window)
        if item.error:
            what = f"storage unit {unit.number} ({unit.offer.name}) could not be compacted: {item.error}"
            state.out.append(Notice(text=what))
        elif unit.space.largest_bytes >= compaction.nbytes:
            state.compact_at = state.now  # the window is free: the next search need not wait


def _value_sizes(values: _Values) -> Int64s:
    """Return the bytes of each value."""
    field, page = values.partition.fields[values.name], values.page
    return field.bytes_of(page.rows[page.firsts])


def _copy_ranges(values: _Values) -> tuple[Int64s, Int64s, Int64s]:
    """Return source, target and bytes of every range to copy."""
    field, page, sizes = values.partition.fields[values.name], values.page, _value_sizes(values)
    # Offsets as if all values lay back to back from 0, then shifted to where each piece begins.
    targets = np.cumsum(sizes) - sizes
    for piece in values.pieces:
        targets[piece.first : piece.last] += piece.offset - targets[piece.first]
    return merge_copies(field.offsets[page.rows[page.firsts]], targets, sizes)
