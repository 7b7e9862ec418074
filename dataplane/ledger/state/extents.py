"""The table of extents: their states (reserved, live, retired) and the release of their bytes.

An extent is a range of one storage unit's arena. A cell is one sample's value in one field; it
refers to its extent. All columns of a put into preallocated space share one extent; other puts have
one extent, or several, per column. A retired extent has no live cells, but pins (reads or copies in
progress) keep its bytes.

Cells without a `Several` record lie on granules of their own, which are freed with each cell. An
extent with a record is trimmed when more than half of its bytes are dead. `pieces` has what is left
of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from dataplane.core.types import GRANULE_BYTES, granules_up
from dataplane.ledger.commands import Int32s, Int64s
from dataplane.ledger.state.arrays import as_slice, grown, next_capacity, some
from dataplane.ledger.state.units import Unit

FREE = 0
RESERVED = 1
LIVE = 2
RETIRED = 3
RETIRING = 4
"""States of an extent, the last one within `release_cells` only."""
FEW = 128
"""Up to this number of dead cells, their extents are first gone through one by one."""

Pieces = list[tuple[int, int]]
"""(start, size) pairs, sorted by address."""


class DeadCells(NamedTuple):
    """Cells that were removed from their field, by row: extent (0: there was no cell; repeats are
    allowed), offset and length in units of `unit_bytes`. `cells` is their number."""

    extents: Int32s
    offsets: Int64s
    lengths: Int32s | Int64s
    unit_bytes: int
    cells: int

    @property
    def nbytes(self) -> Int64s:
        return np.multiply(self.lengths, self.unit_bytes, dtype=np.int64)


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
    """Record of an extent with cells of several rows, used to trim it: to free the parts without
    live cells."""

    def __init__(self, columns: tuple[CellColumns, ...], rows: Int64s, live_bytes: int) -> None:
        # The columns and rows for which the extent was committed, the rows until trimmed.
        self.columns = columns
        self.rows = rows
        # Sum of the live cells. A shared value counts once per cell.
        self.live_bytes = live_bytes
        # This sum at the last trim.
        self.whole_bytes = live_bytes

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
        # Records of the extents with cells of several rows.
        self.several: dict[int, Several] = {}
        # The parts that partly freed extents still hold.
        self.pieces: dict[int, Pieces] = {}
        # Parts to free with the last pin, by pinned extent; those of a trim are not known yet.
        self.pinned_parts: dict[int, Pieces] = {}
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
        """Create an extent over bytes that the caller took from the unit's free space, and return
        its id. account: its owner, if any."""
        owner = 0 if account is None else account.account_id
        if account is not None:
            account.charge(size)
            self.loosened.add(owner)
        self.moved.add(owner)
        return self._create(unit, start, size, RESERVED, owner, cells=0)

    def create_live(self, unit: int, start: int, size: int, account: Account, cells: int) -> int:
        """Create an extent as `reserve` does, for an account for which no put waits, with live
        cells as `add_cells` does."""
        account.charge(size)
        account.live_bytes += size
        return self._create(unit, start, size, LIVE, account.account_id, cells)

    def _create(self, unit: int, start: int, size: int, state: int, owner: int, cells: int) -> int:
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
        self.states[extent_id] = state
        self.owners[extent_id] = owner
        self.live[extent_id] = cells
        return extent_id

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

    def add_cells(
        self,
        extent_id: int,
        cells: int,
        several: Several | None,
        account: Account,
    ) -> None:
        """Add live cells (> 0) to an extent, which is live from the first ones on. several: their
        record; None if they lie on granules of their own."""
        if self.states.item(extent_id) == RESERVED:
            self.states[extent_id] = LIVE
            account.live_bytes += self.sizes.item(extent_id)
            self._note_if_watched(self.units[extent_id : extent_id + 1])
        self.live[extent_id] += cells
        if several is not None:
            known = self.several.setdefault(extent_id, several)
            if known is not several:  # it is that of other columns, for the same rows
                known.columns += several.columns
                known.live_bytes += several.live_bytes
                known.whole_bytes += several.whole_bytes

    def release_cells(self, dead: Sequence[DeadCells], account: Account) -> None:
        """Account for dead cells of the account's extents. Extents without live cells retire, and
        are freed unless pinned. The dead parts of others are freed when they are due, unless
        pinned."""
        if not dead:
            return
        cells = dead[0].extents
        if len(dead) > 1:
            cells = np.concatenate([each.extents for each in dead])
        if len(cells) <= FEW and self._release_few(cells, dead, account):
            return
        self.loosened.add(account.account_id)
        np.subtract.at(self.live, cells.astype(np.int64), np.int32(1))  # fast for these types
        left = self.live[cells]
        self.states[cells[left == 0]] = RETIRING
        self.live[0] = 0  # extent 0, which `left` has as negative, is none
        retired = np.flatnonzero(self.states[: self.high] == RETIRING).astype(np.int32)
        self.states[retired] = RETIRED
        account.live_bytes -= self.bytes_of(retired)
        unpinned = retired[self.pins[retired] == 0]
        if len(unpinned):
            self.free(unpinned)
        partly = np.flatnonzero(left > 0)
        if len(partly):
            self._release_parts(cells, partly, dead)

    def _release_few(self, cells: Int32s, dead: Sequence[DeadCells], account: Account) -> bool:
        """Release these dead cells without arrays, which take several times as long for a few.
        Change nothing and return False if an extent is pinned."""
        positions: dict[int, list[int]] = {}
        for position, extent_id in enumerate(cells.tolist()):
            if extent_id:
                positions.setdefault(extent_id, []).append(position)
        extent_ids = []
        for extent_id in sorted(positions):
            if self.pins.item(extent_id):
                return False
            if self.live.item(extent_id) == len(positions[extent_id]):
                extent_ids.append(extent_id)
        if self.watched:
            self._note_if_watched(self.units[extent_ids])
        nbytes = sum(map(self.sizes.item, extent_ids))
        for extent_id in extent_ids:
            self._free_pieces(self.units.item(extent_id), self._pieces_of(extent_id))
            self.states[extent_id] = FREE
            self.sizes[extent_id] = 0
            self.live[extent_id] = 0
            self._drop_records([extent_id])
            del positions[extent_id]
        account.live_bytes -= nbytes
        self._discharge(account.account_id, nbytes)
        self.spare.extend(extent_ids)
        self.freed |= bool(extent_ids)
        if positions:
            offsets = [offset for each in dead for offset in each.offsets.tolist()]
            sizes = [length * each.unit_bytes for each in dead for length in each.lengths.tolist()]
            for extent_id, partly in positions.items():
                self.live[extent_id] -= len(partly)
                places = [(offsets[i], granules_up(sizes[i])) for i in partly]
                self._release_part(extent_id, places, sum([sizes[i] for i in partly]))
        return True

    def _release_parts(self, cells: Int32s, partly: Int64s, dead: Sequence[DeadCells]) -> None:
        """Release dead cells of extents that have other live cells. partly: the positions of these
        in `cells`."""
        partly = partly[np.argsort(cells[partly], kind="stable")]
        extent_ids = cells[partly]
        offsets = np.concatenate([each.offsets for each in dead])[partly]
        nbytes = np.concatenate([each.nbytes for each in dead])[partly]
        sizes = granules_up(nbytes)
        firsts = np.flatnonzero(np.diff(extent_ids, prepend=0))  # of the cells of each extent
        sums = np.add.reduceat(nbytes, firsts).tolist()
        ranges = pairwise([*firsts.tolist(), len(partly)])
        for extent_id, dead_bytes, (first, last) in zip(
            extent_ids[firsts].tolist(),
            sums,
            ranges,
            strict=True,
        ):
            places: Pieces = []
            if extent_id not in self.several:
                mine = slice(first, last)
                places = [*zip(offsets[mine].tolist(), sizes[mine].tolist(), strict=True)]
            self._release_part(extent_id, places, dead_bytes)

    def _release_part(self, extent_id: int, places: Pieces, dead_bytes: int) -> None:
        """Free what is due of an extent that has other live cells, after `dead_bytes` at these
        `places` are dead (with a record, these are not looked at)."""
        several = self.several.get(extent_id)
        if several is not None:
            several.live_bytes -= dead_bytes
            if not several.trim_is_due:
                return
        if self.pins.item(extent_id):
            self.pinned_parts.setdefault(extent_id, []).extend(places)
        else:
            self._free_due(extent_id, places)

    def adopt(self, extent_id: int, account: Account) -> None:
        """Assign an extent without owner to this account."""
        self.owners[extent_id] = account.account_id
        account.charge(int(self.sizes[extent_id]))
        self.loosened.add(account.account_id)
        self.moved.add(account.account_id)  # but not 0: the unit uses as many bytes as before

    def trim(self, extent_id: int) -> None:
        """Free the parts of the extent without live cells, if live cells use less than half of it
        and it is not pinned."""
        several = self.several.get(extent_id)
        if several is not None and 2 * several.live_bytes < self.sizes[extent_id] and not self.pins[extent_id]:
            self._trim(extent_id, several)

    def pin(self, extent_ids: Int32s) -> None:
        """Add one pin to each of these extents (no repeats), which keeps their bytes in place."""
        self.pins[extent_ids] += 1

    def unpin(self, extent_ids: Int32s) -> None:
        """Undo one `pin`. Extents without pins are freed if retired, and parts of them if due."""
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
        if self.pinned_parts:
            for extent_id in sorted(self.pinned_parts.keys() & unpinned.tolist()):
                self._free_due(extent_id, self.pinned_parts.pop(extent_id))

    def free(self, extent_ids: Int32s) -> None:
        """Remove these extents (no repeats) and free their bytes."""
        self._note_if_watched(self.units[extent_ids])
        self._discharge_owners(extent_ids)  # before the code below sets sizes to 0
        for extent_id in self.pieces.keys() & extent_ids.tolist():
            self._free_pieces(int(self.units[extent_id]), self.pieces[extent_id])
            self.sizes[extent_id] = 0  # freed here: the code below skips it
        held = extent_ids[self.sizes[extent_ids] > 0]
        if len(held):
            self._free_merged(held)
        self._clear_entries(extent_ids)

    def of_unit(self, unit: int) -> Int32s:
        """Return the ids of all extents on the unit."""
        on_unit = (self.units[: self.high] == unit) & (self.states[: self.high] != FREE)
        return np.flatnonzero(on_unit).astype(np.int32)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (unit, offset, nbytes) of all held ranges, for tests. A partly freed extent may
        have several ranges."""
        return [
            (self.units.item(extent_id), start, size)
            for extent_id in np.flatnonzero(self.states[: self.high] != FREE).tolist()
            for start, size in self._pieces_of(extent_id)
        ]

    def drop_unit(self, unit: int) -> None:
        """Remove the extents of a dropped unit. No cell refers to them any longer; the unit's bytes are not freed."""
        extent_ids = self.of_unit(unit)
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
        for owner in sorted(set(owners.tolist())):
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
        ids = extent_ids.tolist()
        self._drop_records(ids)
        self.spare.extend(ids)
        self.freed = True

    def _drop_records(self, extent_ids: list[int]) -> None:
        """Remove the records of these extents, if they have any."""
        records: dict[int, Several] | dict[int, Pieces]
        for records in (self.several, self.pieces, self.pinned_parts):
            if records:
                for extent_id in records.keys() & extent_ids:
                    del records[extent_id]

    def _pieces_of(self, extent_id: int) -> Pieces:
        """Return the parts that the extent holds."""
        size = self.sizes.item(extent_id)
        return self.pieces.get(extent_id) or ([(self.starts.item(extent_id), size)] if size else [])

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

    def _free_due(self, extent_id: int, due: Pieces) -> None:
        """Free the dead parts of an extent that is not pinned: these, or with a record all that it
        has."""
        several = self.several.get(extent_id)
        if several is not None:
            self._trim(extent_id, several)
        else:
            due = sorted([(start, size) for start, size in due if size])
            left = _subtract_pieces(self._pieces_of(extent_id), due)
            self._free_parts(extent_id, due, left)

    def _trim(self, extent_id: int, several: Several) -> None:
        """Free the granules without live cells of an extent that is not pinned."""
        rows = several.rows
        in_use = np.zeros(len(rows), np.bool_)
        starts = []
        ends = []
        for column in several.columns:
            has_cell = column.extents[rows] == extent_id
            in_use |= has_cell
            starts.append(column.offsets[rows[has_cell]])
            ends.append(starts[-1] + column.bytes_of(rows[has_cell]))
        several.rows = rows[in_use]
        several.whole_bytes = several.live_bytes
        kept = _touched_granules(np.concatenate(starts), np.concatenate(ends))
        dead = _subtract_pieces(self._pieces_of(extent_id), kept)
        if dead:
            self._free_parts(extent_id, dead, kept)

    def _free_parts(self, extent_id: int, dead: Pieces, left: Pieces) -> None:
        """Free these parts of an extent, which holds only what is `left`. Update its account."""
        account = self.accounts[self.owners.item(extent_id)]
        self._free_pieces(self.units.item(extent_id), dead)
        self.pieces[extent_id] = left
        nbytes = sum(size for _, size in dead)
        self.sizes[extent_id] -= nbytes
        account.live_bytes -= nbytes
        self._discharge(account.account_id, nbytes)
        self.freed = True

    def _grow(self) -> None:
        """Enlarge all columns."""
        size = next_capacity(len(self.units), len(self.units) + 1)
        for name in ("units", "starts", "sizes", "live", "pins", "owners", "states"):
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
