"""The table of extents: their states (reserved, live, retired) and the release of their bytes.

An extent is a range of one storage unit's arena. A put reserves extents and writes values into them. A cell is one
sample's value in one field; it refers to its extent. A retired extent has no live cells, but pins (reads or copies in
progress) keep its bytes.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dataplane.core.types import GRANULE_BYTES, granules_up
from dataplane.ledger.commands import Int32s, Int64s
from dataplane.ledger.state.arrays import Bools, as_slice, grown, next_capacity, some, tally
from dataplane.ledger.state.units import Unit

FREE = 0
RESERVED = 1
LIVE = 2
RETIRED = 3
FEW = 128
"""Up to this number of dead cells, their extents are first gone through one by one."""

Pieces = list[tuple[int, int]]
"""(start, size) pairs, sorted by address."""


class CellColumns(Protocol):
    """The part of a `Field` that trimming uses: extent and offset of each row's cell."""

    extents: Int32s
    offsets: Int64s

    def bytes_of(self, rows: Int64s) -> Int64s: ...


class Account:
    """Bytes of one partition's extents."""

    def __init__(self, account_id: int) -> None:
        self.account_id = account_id
        # Bytes of the extents with live cells.
        self.live_bytes = 0
        # Bytes of all extents that are not free: reserved for puts, live, or cleared and still
        # read.
        self.used_bytes = 0
        # Maximum of `used_bytes`.
        self.peak_bytes = 0
        # The use reached the high watermark of the budget, and has not fallen below the low one
        # since.
        self.pressed = False
        # A closed account is removed with its last extent.
        self.closed = False

    def charge(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)


class Several:
    """Record of an extent with several values, used to trim it: to free the parts without live
    cells."""

    def __init__(self, cells: CellColumns, rows: Int64s, live_bytes: int, account: Account) -> None:
        self.cells = cells
        # The rows for which the extent was committed: one array for all columns of a put, until
        # trimmed.
        self.rows = rows
        # Sum of the live cells. A shared value counts once per cell.
        self.live_bytes = live_bytes
        # This sum at the last trim.
        self.whole_bytes = live_bytes
        self.account = account
        # The parts that the extent still holds after a trim. None: the whole extent.
        self.pieces: Pieces | None = None

    @property
    def trim_is_due(self) -> bool:
        """Whether more than half of the live bytes at the last trim are dead now."""
        return 2 * self.live_bytes < self.whole_bytes


class Extents:
    """Table of extents. Its columns are indexed by extent id; id 0 means "no extent"."""

    def __init__(self, units: dict[int, Unit]) -> None:
        self.all_units = units
        # Numbers below `high` are in use, or `spare`.
        self.high = 1
        self.spare: list[int] = []
        # Bytes were freed, or may be available, since the last reset.
        self.freed = False
        # Accounts whose extents were reserved, died, were freed or lost their last reader since
        # then.
        self.loosened: set[int] = set()
        # Accounts (including 0) that gained or lost bytes since then.
        self.moved: set[int] = set()
        # Units of which `stirred` is set when an extent becomes live, loses its last pin or is
        # freed; and when any unit is dropped.
        self.watched: frozenset[int] = frozenset()
        self.stirred = False
        # Records of the extents with several values (`is_several`).
        self.several: dict[int, Several] = {}
        # Open accounts, and closed ones that still have bytes, by id. `opened`: the last id.
        self.accounts: dict[int, Account] = {}
        self.opened = 0
        self.units: Int32s = np.zeros(64, np.int32)
        self.starts: Int64s = np.zeros(64, np.int64)
        # Bytes held, in whole granules. An extent of empty values holds none.
        self.sizes: Int64s = np.zeros(64, np.int64)
        # The number of live cells.
        self.live: Int32s = np.zeros(64, np.int32)
        # The number of `pin` calls without `unpin`.
        self.pins: Int32s = np.zeros(64, np.int32)
        # Account ids. 0: space without an account, preallocated or taken for moved cells.
        self.owners: Int32s = np.zeros(64, np.int32)
        self.states = np.zeros(64, np.int8)
        self.is_several: Bools = np.zeros(64, np.bool_)

    def open_account(self) -> Account:
        self.opened += 1
        account = self.accounts[self.opened] = Account(self.opened)
        return account

    def close_account(self, account: Account) -> None:
        """Close the account of a dropped partition."""
        account.closed = True
        if not account.used_bytes:
            del self.accounts[account.account_id]

    def reserve(self, unit: int, start: int, size: int, account: Account | None = None) -> int:
        """Create an extent over bytes that the caller took from the unit's free space, and return its id. account:
        its owner, if any."""
        if self.spare:
            extent_id = self.spare.pop()
        else:
            extent_id = self.high
            self.high += 1
            if extent_id == len(self.units):
                self._grow()
        self.units[extent_id] = unit
        self.starts[extent_id] = start
        self.sizes[extent_id] = size
        self.states[extent_id] = RESERVED
        self.owners[extent_id] = 0 if account is None else account.account_id
        if account is not None:
            account.charge(size)
            self.loosened.add(account.account_id)
        self.moved.add(int(self.owners[extent_id]))
        return extent_id

    @property
    def room(self) -> int:
        """How many extents can be created before the table grows."""
        return len(self.spare) + len(self.units) - self.high

    def create_live(self, unit: int, start: int, size: int, account: Account, cells: int) -> int:
        """Create an extent as `reserve` does, for an account for which no put waits, and make it live as `make_live`
        does. The table has room."""
        if self.spare:
            number = self.spare.pop()
        else:
            number = self.high
            self.high += 1
        self.units[number] = unit
        self.starts[number] = start
        self.sizes[number] = size
        self.states[number] = LIVE
        self.owners[number] = account.account_id
        self.live[number] = cells
        account.live_bytes += size
        account.used_bytes += size
        account.peak_bytes = max(account.peak_bytes, account.used_bytes)
        return number

    def cut(self, extent_id: int, start: int, nbytes: int) -> list[int]:
        """Remove [start, start + nbytes), whole granules, from a reserved extent without an account. The bytes do not
        become free: the caller reserves other extents over them. Return the extents that hold the rest, by address: the
        extent itself, it and a new one, or none."""
        first = int(self.starts[extent_id])
        stop = start + nbytes
        bytes_after = first + int(self.sizes[extent_id]) - stop
        if start > first:  # the extent keeps the part before the range
            self.sizes[extent_id] = start - first
            return (
                [extent_id]
                if not bytes_after
                else [extent_id, self.reserve(int(self.units[extent_id]), stop, bytes_after)]
            )
        if not bytes_after:
            self._clear_entries(np.array([extent_id], np.int32))
            return []
        self.starts[extent_id] = stop
        self.sizes[extent_id] = bytes_after
        return [extent_id]

    def make_live(self, extent_id: int, cells: int, several: Several | None) -> None:
        """Mark a reserved extent as live, with `cells` (> 0) live cells. several: None for an extent of one value. The
        caller adds its size to the account's `live_bytes`."""
        self.states[extent_id] = LIVE
        self.live[extent_id] = cells
        self._note_if_watched(self.units[extent_id : extent_id + 1])
        if several is not None:
            self.several[extent_id] = several
            self.is_several[extent_id] = True

    def release_cells(self, cells: Int32s, nbytes: Int64s, account: Account) -> None:
        """Account for dead cells: `cells[i]` is the extent of a dead cell of `nbytes[i]` bytes (repeats are allowed;
        extent 0 is skipped). The caller has already removed the cells from their field. Extents without live cells
        retire, and are freed unless pinned. Extents with live cells are trimmed if due, unless pinned."""
        count = np.count_nonzero(cells)
        if not count:
            return
        if count < len(cells):
            has_extent = cells > 0
            cells = cells[has_extent]
            nbytes = nbytes[has_extent]
        if len(cells) <= FEW and self._free_if_few(cells.tolist(), account):
            return
        self.loosened.add(account.account_id)
        extent_ids, counts = tally(cells)
        index = as_slice(extent_ids)
        cells_left = self.live[index] - counts
        self.live[index] = cells_left
        retired = extent_ids[cells_left == 0]
        self.states[retired] = RETIRED
        account.live_bytes -= int(self.sizes[retired].sum())
        unpinned = retired[self.pins[retired] == 0]
        if len(unpinned):
            self.free(unpinned)
        partly = (cells_left > 0) & self.is_several[extent_ids]
        if some(partly):
            dead_sums = np.zeros(len(extent_ids), np.int64)
            np.add.at(dead_sums, np.searchsorted(extent_ids, cells), nbytes)
            for extent_id, dead_bytes in zip(extent_ids[partly].tolist(), dead_sums[partly].tolist(), strict=True):
                several = self.several[extent_id]
                several.live_bytes -= dead_bytes
                if several.trim_is_due and not self.pins[extent_id]:
                    self._trim(extent_id, several)

    def _free_if_few(self, cells: list[int], account: Account) -> bool:
        """Free the extents of these dead cells without arrays, which take several times as long for
        a few. Change nothing and return False if an extent has other live cells, is pinned or was
        trimmed."""
        counts: dict[int, int] = {}
        for extent_id in cells:
            counts[extent_id] = counts.get(extent_id, 0) + 1
        for extent_id, count in counts.items():
            if self.live.item(extent_id) != count or self.pins.item(extent_id):
                return False
            if self.is_several.item(extent_id) and self.several[extent_id].pieces is not None:
                return False
        extent_ids = sorted(counts)
        if self.watched:
            self._note_if_watched(self.units[extent_ids])
        ranges: list[tuple[int, int, int]] = []  # (unit, start, end)
        nbytes = 0
        for extent_id in extent_ids:
            size = self.sizes.item(extent_id)
            if size:
                start = self.starts.item(extent_id)
                ranges.append((self.units.item(extent_id), start, start + size))
                nbytes += size
            if self.is_several.item(extent_id):
                del self.several[extent_id]
                self.is_several[extent_id] = False
            self.states[extent_id] = FREE
            self.sizes[extent_id] = 0
            self.live[extent_id] = 0
        account.live_bytes -= nbytes
        self._discharge(account.account_id, nbytes)
        self.spare.extend(extent_ids)
        self.freed = True
        ranges.sort()
        while ranges:
            unit, start, end = ranges.pop(0)
            while ranges and ranges[0][:2] == (unit, end):  # they are adjacent
                end = ranges.pop(0)[2]
            self.all_units[unit].space.give(start, end - start)
        return True

    def adopt(self, extent_id: int, account: Account) -> None:
        """Assign an extent without owner to this account."""
        self.owners[extent_id] = account.account_id
        account.charge(int(self.sizes[extent_id]))
        self.loosened.add(account.account_id)
        self.moved.add(account.account_id)  # but not 0: the unit uses as many bytes as before

    def trim(self, extent_id: int) -> None:
        """Free the parts of the extent without live cells, if live cells use less than half of it and it is not
        pinned."""
        several = self.several.get(extent_id)
        if several is not None and 2 * several.live_bytes < self.sizes[extent_id] and not self.pins[extent_id]:
            self._trim(extent_id, several)

    def pin(self, extent_ids: Int32s) -> None:
        """Add one pin to each of these extents (no repeats), which keeps their bytes in place."""
        self.pins[extent_ids] += 1

    def unpin(self, extent_ids: Int32s) -> None:
        """Undo one `pin`. Extents without pins are freed if retired, and trimmed if due."""
        pins_left = self.pins[extent_ids] - 1
        self.pins[extent_ids] = pins_left
        unpinned = extent_ids[pins_left == 0]
        if not len(unpinned):
            return
        self.loosened.update(self.owners[unpinned].tolist())
        self._note_if_watched(self.units[unpinned])
        retired = self.states[unpinned] == RETIRED
        if some(retired):
            self.free(unpinned[retired])
        for extent_id in unpinned[~retired & self.is_several[unpinned]].tolist():
            several = self.several[extent_id]
            if several.trim_is_due:
                self._trim(extent_id, several)

    def free(self, extent_ids: Int32s) -> None:
        """Remove these extents (no repeats) and free their bytes."""
        if self.watched:
            self._note_if_watched(self.units[extent_ids])
        self._discharge_owners(extent_ids)  # before the code below sets sizes to 0
        with_record = self.is_several[extent_ids]
        if np.count_nonzero(with_record):
            for extent_id in extent_ids[with_record].tolist():
                several = self.several.pop(extent_id)
                if several.pieces is not None:
                    self._free_pieces(int(self.units[extent_id]), several.pieces)
                    self.sizes[extent_id] = 0  # freed here: the code below skips it
        held = extent_ids[self.sizes[extent_ids] > 0]
        if len(held) == 1:
            extent_id = int(held[0])
            self._free_pieces(int(self.units[extent_id]), [(int(self.starts[extent_id]), int(self.sizes[extent_id]))])
        elif len(held):
            self._free_merged(held)
        self._clear_entries(extent_ids)

    def of_unit(self, unit: int) -> Int32s:
        """Return the ids of all extents on the unit."""
        on_unit = (self.units[: self.high] == unit) & (self.states[: self.high] != FREE)
        return np.flatnonzero(on_unit).astype(np.int32)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (unit, offset, nbytes) of all held ranges, for tests. A trimmed extent may have several ranges."""
        ranges: list[tuple[int, int, int]] = []
        for extent_id in np.flatnonzero((self.states[: self.high] != FREE) & (self.sizes[: self.high] > 0)).tolist():
            several = self.several.get(extent_id)
            pieces = None if several is None else several.pieces
            if pieces is None:
                pieces = [(int(self.starts[extent_id]), int(self.sizes[extent_id]))]
            ranges += [(int(self.units[extent_id]), start, size) for start, size in pieces]
        return ranges

    def drop_unit(self, unit: int) -> None:
        """Remove the extents of a dropped unit. No cell refers to them any longer; the unit's bytes are not freed."""
        extent_ids = self.of_unit(unit)
        for extent_id in extent_ids[self.is_several[extent_ids]].tolist():
            del self.several[extent_id]
        self.stirred = True  # has the calls evaluated that wait for a change on a unit
        self._discharge_owners(extent_ids)
        self._clear_entries(extent_ids)

    def _note_if_watched(self, units: Int32s) -> None:
        """Set `stirred` if one of the units is watched."""
        if self.watched and not self.stirred:
            self.stirred = not self.watched.isdisjoint(units.tolist())

    def bytes_of(self, extent_ids: Int32s) -> int:
        return int(self.sizes[extent_ids].sum())

    def _discharge_owners(self, extent_ids: Int32s) -> None:
        """Subtract the bytes of these extents from the accounts of their owners."""
        owners = self.owners[extent_ids]
        sizes = self.sizes[extent_ids]
        if len(owners) and not np.count_nonzero(owners != owners[0]):  # as usual
            self._discharge(int(owners[0]), int(sizes.sum()))
        else:
            for owner in np.unique(owners).tolist():
                self._discharge(owner, int(sizes[owners == owner].sum()))

    def _discharge(self, owner: int, nbytes: int) -> None:
        """Subtract bytes from the account with this id, if any, and remove the account if it is
        closed and empty."""
        self.moved.add(owner)  # also 0, which has no account
        account = self.accounts.get(owner)
        if account is not None:
            account.used_bytes -= nbytes
            self.loosened.add(owner)
            if account.closed and not account.used_bytes:
                del self.accounts[owner]

    def _clear_entries(self, extent_ids: Int32s) -> None:
        """Clear the table entries of these extents, whose ids may then be used again."""
        index = as_slice(extent_ids)
        self.states[index] = FREE
        self.sizes[index] = 0
        self.live[index] = 0
        self.pins[index] = 0
        self.is_several[index] = False
        self.spare.extend(extent_ids.tolist())
        self.freed = True

    def _free_pieces(self, unit: int, pieces: Pieces) -> None:
        space = self.all_units[unit].space
        for start, size in pieces:
            space.give(start, size)

    def _free_merged(self, extent_ids: Int32s) -> None:
        """Free the ranges of these extents, with adjacent ranges merged."""
        order = np.lexsort((self.starts[extent_ids], self.units[extent_ids]))
        extent_ids = extent_ids[order]
        units = self.units[extent_ids]
        starts = self.starts[extent_ids]
        ends = starts + self.sizes[extent_ids]
        # A new merged range begins where the unit changes, or where there is a gap.
        breaks = ((units[1:] != units[:-1]) | (starts[1:] != ends[:-1])).nonzero()[0]
        firsts = [0, *(breaks + 1).tolist()]
        lasts = [*breaks.tolist(), -1]
        for unit, start, end in zip(units[firsts].tolist(), starts[firsts].tolist(), ends[lasts].tolist(), strict=True):
            self.all_units[unit].space.give(start, end - start)

    def _trim(self, extent_id: int, several: Several) -> None:
        """Free the granules without live cells of an extent that is not pinned. Update its record and account."""
        cells = several.cells
        several.rows = several.rows[cells.extents[several.rows] == extent_id]  # those that still have a cell in it
        several.whole_bytes = several.live_bytes
        starts = cells.offsets[several.rows]
        kept = _touched_granules(starts, starts + cells.bytes_of(several.rows))
        held = several.pieces
        if held is None:
            held = [(int(self.starts[extent_id]), int(self.sizes[extent_id]))]
        dead = _subtract_pieces(held, kept)
        if not dead:
            return
        self._free_pieces(int(self.units[extent_id]), dead)
        several.pieces = kept
        nbytes = sum(size for _, size in dead)
        self.sizes[extent_id] -= nbytes
        several.account.live_bytes -= nbytes
        self._discharge(several.account.account_id, nbytes)
        self.freed = True

    def _grow(self) -> None:
        """Enlarge all columns."""
        size = next_capacity(len(self.units), len(self.units) + 1)
        for name in ("units", "starts", "sizes", "live", "pins", "owners", "states", "is_several"):
            setattr(self, name, grown(getattr(self, name), size))


def _touched_granules(starts: Int64s, ends: Int64s) -> Pieces:
    """Return the granules that the [start, end) ranges touch, as disjoint pieces by address."""
    nonempty = ends > starts
    starts = starts[nonempty] // GRANULE_BYTES * GRANULE_BYTES
    ends = granules_up(ends[nonempty])
    if not len(starts):
        return []
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate(ends[order])
    # A new piece begins where a range starts beyond the end of all ranges before it.
    breaks = np.flatnonzero(starts[1:] > ends[:-1]) + 1
    firsts = np.concatenate(([0], breaks))
    lasts = np.concatenate((breaks, [len(starts)])) - 1
    return [(start, end - start) for start, end in zip(starts[firsts].tolist(), ends[lasts].tolist(), strict=True)]


def _subtract_pieces(held: Pieces, kept: Pieces) -> Pieces:
    """Return `held` minus `kept`. Every piece of `kept` lies within one piece of `held`."""
    difference: Pieces = []
    next_kept = 0
    for start, size in held:
        end = start + size
        while next_kept < len(kept) and kept[next_kept][0] < end:
            kept_start, kept_size = kept[next_kept]
            if kept_start > start:
                difference.append((start, kept_start - start))
            start = kept_start + kept_size  # go on with the rest of the held piece
            next_kept += 1
        if start < end:
            difference.append((start, end - start))
    return difference
