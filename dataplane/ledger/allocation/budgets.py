"""Budgets of partitions: eviction, watermarks, and the error of a put that finds no space.

Eviction works in two steps. The first evicts consumed samples, oldest first, in batches of 1, 2, 4
and so on up to `BATCH`, until the put fits; so it may evict a few too many. If none is left and the
policy is EVICT_OLDEST, the second step evicts as many unconsumed samples, oldest first, as
certainly make the put fit, or none at all. The failure of both steps is remembered in an `Outlook`:
a put that waits costs nothing until its partition changes, and then what is proportional to the
change, until what changed may suffice for the put.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dataplane.errors import CapacityTimeoutError
from dataplane.ledger.commands import Int32s, Int64s, Notice, WhenFull
from dataplane.ledger.state.arrays import Bools, some
from dataplane.ledger.state.extents import Account
from dataplane.ledger.state.partition import Outlook, Partition
from dataplane.ledger.state.sessions import ParkedAllocate
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit

FIRST_LOOK = 512
"""This many samples are examined first, oldest first; then twice as many, and so on."""
BATCH = 64
"""At most this many consumed samples are evicted at once."""
REPORTED = 1 << 16
"""An answer names at most this many evicted samples."""
NOTICE_S = 10.0
"""Minimum time between log entries about a partition that loses unconsumed samples."""
NO_ROWS: Int64s = np.zeros(0, np.int64)


def budget_limit(state: State, partition: Partition, *, update: bool) -> int | None:
    """Return how many bytes the partition may occupy after a put of new rows, or after an update (None: no budget)."""
    budget = partition.budget_bytes
    if budget is None or update:
        return budget
    return budget - int(budget * state.reserve_fraction)  # the reserve is for updates


def budget_excess(state: State, partition: Partition, wanted: int, *, update: bool) -> int:
    """Return by how many bytes the partition's budget is too small for `wanted` more; 0 or less if it suffices."""
    limit = budget_limit(state, partition, update=update)
    if limit is None or not wanted:  # a put without bytes always fits
        return 0
    return partition.account.used_bytes + wanted - limit


class Evictions:
    """Evicts samples for waiting puts.

    A sample may be evicted if no reader pins it, no lease or unconfirmed claim holds it, and no put
    in progress names it. It is consumed if every task of its partition (at least one) has a final
    claim on it. Bytes are freed in whole extents, or in parts of them: an extent is certainly freed
    only if all samples in it are evicted. Open units are those that are connected and not drained:
    only they give space to puts."""

    def __init__(self, state: State) -> None:
        self.state = state

    def make_space(
        self,
        partition: Partition,
        *,
        excess: int,
        short: int,
        update: bool,
        spare: Int64s = NO_ROWS,
    ) -> tuple[str, ...] | None:
        """Evict samples of the partition, except `spare`, until it occupies `excess` bytes less and
        `short` bytes less are used in open units. Return the ids of evicted samples that were not
        consumed, or None if it is impossible (then all consumed samples that may be are evicted).

        Unconsumed samples are evicted if the policy allows it, for new rows only (an update may be
        of these very samples), and only if that certainly suffices.
        """
        account_goal = partition.account.used_bytes - excess
        units_goal = self._used_bytes() - short
        unconsumed = [NO_ROWS]
        for rows in _rows_by_age(partition):
            consumed, others = self._evictable(partition, rows, spare)
            unconsumed.append(others)
            for batch in _batches(consumed):
                self._evict(partition, batch, consumed=True)
                if partition.account.used_bytes <= account_goal and self._used_bytes() <= units_goal:
                    return ()
        if partition.when_full is not WhenFull.EVICT_OLDEST:
            unconsumed = [NO_ROWS]
        rows = np.concatenate(unconsumed)
        count, gain = self._count_needed(
            partition,
            rows,
            excess=partition.account.used_bytes - account_goal,
            short=self._used_bytes() - units_goal,
        )
        if update or count is None:
            # An attempt with `spare` says nothing about one without, so its result is not stored.
            if not len(spare):
                at_most = self._potential(partition, partition.rows.in_order())
                # For an update, not all unconsumed rows may have been examined.
                partition.outlook = Outlook(at_most, (at_most, at_most) if update else gain)
            return None
        lost = partition.rows.names_of(rows[:count])
        self._evict(partition, rows[:count], consumed=False)
        return lost[:REPORTED]

    def certainly_fails(self, partition: Partition, *, excess: int, short: int, update: bool) -> bool:
        """Return whether `make_space` for a waiting put certainly fails, because nothing relevant
        changed since it failed. The cost is proportional to the samples noted since then."""
        outlook = partition.outlook
        if outlook is None:  # no attempt failed
            return False
        if outlook.noted:
            outlook.at_most += self._potential(partition, outlook.take_noted())
        if outlook.gain is None:
            return outlook.at_most < max(excess, short)
        return update or outlook.gain[0] < excess or outlook.gain[1] < short

    # --- selection

    def _evictable(self, partition: Partition, rows: Int64s, spare: Int64s) -> tuple[Int64s, Int64s]:
        """Return those of the rows, except `spare`, that may be evicted: the consumed ones, and the
        others."""
        evictable, consumed = self._eviction_status(partition, rows)
        evictable &= ~np.isin(rows, spare)
        for cells in self._extents_of(partition, rows):
            evictable &= (cells == 0) | (self.state.extents.pins[cells] == 0)
        return rows[evictable & consumed], rows[evictable & ~consumed]

    def _eviction_status(self, partition: Partition, rows: Int64s) -> tuple[Bools, Bools]:
        """Return which of the rows may be evicted (ignoring pins), and which are consumed. A row
        may not be evicted if a put in progress names it, or if a claim that is not permanent holds
        it. Without tasks, no row is consumed."""
        evictable = ~partition.targeted(rows)
        consumed = np.full(len(rows), bool(partition.tasks))
        for task in partition.tasks.values():
            permanent = task.claimed_permanently(rows)
            evictable &= permanent | (task.claim_ids[rows] == 0)
            consumed &= permanent
        return evictable, consumed

    def _extents_of(self, partition: Partition, rows: Int64s) -> list[Int32s]:
        """Return for each field with live cells the extents of the rows' cells (0: no cell)."""
        return [field.extents[rows] for field in partition.fields.values() if field.live]

    # --- amounts

    def _used_bytes(self) -> int:
        """Return the bytes used in open units."""
        return sum(unit.used_bytes for unit in self.state.units.values() if unit.open)

    def _potential(self, partition: Partition, rows: Int64s) -> int:
        """Return how many bytes the eviction of these rows can free at most, once nobody reads
        them: the sizes of all extents with cells of those that the policy allows to be evicted."""
        evictable, consumed = self._eviction_status(partition, rows)
        if partition.when_full is not WhenFull.EVICT_OLDEST:
            evictable &= consumed
        cells = self._extents_of(partition, rows[evictable])
        # Number 0 (no cell) has size 0.
        return self.state.extents.bytes_of(np.unique(np.concatenate(cells))) if cells else 0

    def _count_needed(
        self, partition: Partition, rows: Int64s, *, excess: int, short: int
    ) -> tuple[int | None, tuple[int, int]]:
        """Return how many of the rows, from the first on, must be evicted so that `excess` bytes of
        the partition and `short` bytes in open units are certainly freed (None: all of them are too
        few), and the (bytes of the partition, bytes in open units) that the examined rows free."""
        examined = FIRST_LOOK
        while True:
            freed = self._freed_by_count(partition, rows[:examined])
            gain = int(freed[0, -1]), int(freed[1, -1])
            enough = (freed[0] >= excess) & (freed[1] >= short)
            if some(enough):
                return int(enough.argmax()), gain  # argmax: the first that suffices
            if examined >= len(rows):
                return None, gain
            examined *= 2

    def _freed_by_count(self, partition: Partition, rows: Int64s) -> Int64s:
        """Return an array [2, N + 1]: its entry [0, i] is how many bytes of the partition are
        certainly freed if the first i of the N rows are evicted, [1, i] how many bytes in open
        units. Freed are the extents whose live cells all belong to these rows."""
        extents = self.state.extents
        freed: Int64s = np.zeros((2, len(rows) + 1), np.int64)
        cells = self._extents_of(partition, rows)
        if not cells or not len(rows):
            return freed
        # For each cell its extent, and the number of rows up to the cell's.
        extent_ids = np.concatenate(cells)
        counts = np.tile(np.arange(1, len(rows) + 1), len(cells))
        order = np.lexsort((counts, extent_ids))  # by extent, then by row
        distinct, live = np.unique(extent_ids[order], return_counts=True)
        last = counts[order][live.cumsum() - 1]  # the extent is freed with its last row
        complete = live == extents.live[distinct]  # no live cell of the extent belongs to another row
        distinct = distinct[complete]
        last = last[complete]
        open_units = [unit.unit_id for unit in self.state.units.values() if unit.open]
        on_open_units = np.isin(extents.units[distinct], np.array(open_units, np.int32))
        np.add.at(freed[0], last, extents.sizes[distinct])
        np.add.at(freed[1], last, extents.sizes[distinct] * on_open_units)
        total: Int64s = freed.cumsum(axis=1)
        return total

    # --- eviction

    def _evict(self, partition: Partition, rows: Int64s, *, consumed: bool) -> None:
        """Evict these samples, all consumed or all not. Log the loss of unconsumed ones, at most
        every `NOTICE_S`."""
        evicted = partition.evicted
        evicted.note(partition.rows.names_of(rows), partition.generations_of(rows), consumed=consumed)
        partition.clear(rows)
        self.state.touch(partition)
        if not consumed and self.state.now >= evicted.noticed + NOTICE_S:
            evicted.noticed = self.state.now
            self.state.out.append(Notice(text=_eviction_text(partition)))


def _rows_by_age(partition: Partition) -> Iterator[Int64s]:
    """Yield all live rows in parts of increasing size, oldest first. Rows may be removed
    meanwhile."""
    rows = partition.rows
    start = 0
    size = FIRST_LOOK
    while start < rows.end:
        chunk = rows.order[start : min(start + size, rows.end)]
        yield chunk[chunk >= 0]  # without removed rows
        start += size
        size *= 2


def _batches(rows: Int64s) -> Iterator[Int64s]:
    """Yield the rows in batches of 1, 2, 4, ..., `BATCH`, `BATCH`, ... A caller that stops
    early has taken less than twice as many as it needs."""
    start = 0
    size = 1
    while start < len(rows):
        yield rows[start : start + size]
        start += size
        size = min(2 * size, BATCH)


def _eviction_text(partition: Partition) -> str:
    """Return the log message about the loss of unconsumed samples."""
    return (
        f"partition {partition.name!r} is full: samples evicted so far before all of its tasks had consumed them: "
        f"{partition.evicted.unconsumed} (when_full={partition.when_full.value!r}). Increase its budget, or consume "
        "faster"
    )


class Pressure:
    """Maintains `pressed` of units, and of partitions with a budget. It is set when the use reaches the high
    watermark's fraction of the space for new rows, and cleared when the use is down to that of the low watermark."""

    def __init__(self, state: State) -> None:
        self.state = state

    def update(self) -> None:
        """Update `pressed`, and the peaks of the units, after an input that took or freed bytes. Of
        the partitions, it examines only those of these bytes."""
        state = self.state
        # The ids of the accounts that gained or lost bytes.
        moved = state.extents.moved
        state.extents.moved = set()
        for unit in state.units.values():
            used = unit.used_bytes
            unit.peak_bytes = max(unit.peak_bytes, used)
            self._update_gauge(unit, used, unit.limit(update=False))
        for account_id in sorted(moved & state.budgeted.keys()):
            partition = state.budgeted[account_id]
            limit = budget_limit(state, partition, update=False)  # not None: the partition has a budget
            self._update_gauge(partition, partition.account.used_bytes, limit or 0)

    def _update_gauge(self, owner: Unit | Partition, used: int, limit: int) -> None:
        """Set `pressed` of the unit, or of the partition's account, and log a change."""
        gauge: Unit | Account = owner.account if isinstance(owner, Partition) else owner
        low, high = self.state.watermarks
        # Between the watermarks it stays as it is. With a limit of 0 it is never set.
        pressed = used > low * limit if gauge.pressed else used >= high * limit > 0
        if pressed != gauge.pressed:
            gauge.pressed = pressed
            self.state.out.append(Notice(text=_pressure_text(owner, used, limit), warning=pressed))


def _pressure_text(owner: Unit | Partition, used: int, limit: int) -> str:
    """Return the log message about a change of `pressed`. Updates may use more than the limit for new rows."""
    if isinstance(owner, Partition):
        name = f"partition {owner.name!r}"
        of_budget = "of its budget "
    else:
        name = f"storage unit {owner.unit_id} ({owner.offer.name})"
        of_budget = ""
    fraction = min(used / max(limit, 1), 1.0)
    beyond = max(used - limit, 0)
    used_text = f"all {limit:,}" if beyond else f"{used:,} of the {limit:,}"
    beyond_text = f", and {beyond:,} more" if beyond else ""
    return f"{name} is {100 * fraction:.0f}% full: {used_text} bytes {of_budget}for new rows are used{beyond_text}"


NAMED = 3
"""At most this many tasks of a partition, and holders of each kind, are named in an error."""


def out_of_space(
    state: State,
    partition: Partition,
    wanted: int,
    waited_s: float,
    *,
    update: bool,
    moving: bool = False,
    earlier: ParkedAllocate | None = None,
) -> CapacityTimeoutError:
    """Return the error of a put of `wanted` bytes without space. It describes the budget if that is used up, else the
    units. `earlier` is the put that this one waits for, if any; the error names it if there is space for this one. A
    move (`moving`) has no budget."""
    over_budget = not moving and budget_excess(state, partition, wanted, update=update) > 0
    enough_free = is_fragmented(state, wanted, update=update)
    if over_budget or not enough_free:  # without the earlier put there would be no space either
        earlier = None
    behind = "" if earlier is None else _put_text(earlier)
    # Describe the budget also if the earlier put waits for one: it is then of the same partition.
    if over_budget or (earlier is not None and not waits_for_memory(state, earlier)):
        limit = budget_limit(state, partition, update=update)
        assert limit is not None
        return CapacityTimeoutError(
            wanted_bytes=wanted,
            free_bytes=max(limit - partition.account.used_bytes, 0),
            waited_s=waited_s,
            holders=_largest_holders(
                [(_partition_text(partition), partition.account.live_bytes)], _session_holdings(state, partition)
            ),
            partition=partition.name,
            budget_bytes=partition.budget_bytes,
            behind=behind,
        )
    # Describe the units: who holds their bytes, their free pieces, and why arenas cannot grow.
    units = state.units.values()
    growth_problems = [(unit, unit.growth_problem(state.now)) for unit in units]
    open_spaces = [unit.space for unit in units if unit.open]
    largest = max((space.largest_bytes for space in open_spaces), default=0)
    closed_units = [
        (
            f"storage unit {unit.unit_id} ({unit.offer.name}), which is "
            + ("being drained," if unit.connected else "not connected,"),
            unit.space.capacity_bytes,
        )
        for unit in units
        if not unit.open
    ]
    partitions = [(_partition_text(other), other.account.live_bytes) for other in _largest_partitions(state)]
    return CapacityTimeoutError(
        wanted_bytes=wanted,
        free_bytes=sum(max(unit.available_bytes(update=update), 0) for unit in units if unit.open),
        waited_s=waited_s,
        holders=_largest_holders(closed_units, partitions, _session_holdings(state, partition=None)),
        # Named only if it is the reason.
        fragments=sum(space.fragments for space in open_spaces) if enough_free and not behind else 0,
        largest_free_bytes=largest,
        arena=" ".join(f"Storage unit {unit.unit_id} cannot grow: {why}" for unit, why in growth_problems if why),
        behind=behind,
    )


def is_fragmented(state: State, wanted: int, *, update: bool) -> bool:
    """Return whether `wanted` bytes are free in open units: if a put of this size has no space, it is held up by
    fragmentation. update: the put may use the space reserved for updates."""
    units = [unit for unit in state.units.values() if unit.open]
    free = [min(unit.available_bytes(update=update), unit.space.free_bytes) for unit in units]
    return sum(max(nbytes, 0) for nbytes in free) >= wanted


def waits_for_memory(state: State, parked: ParkedAllocate) -> bool:
    """Return whether this call waits for memory of the units, not for its partition's budget. Moves do not count
    against a budget."""
    command = parked.command
    return command.moving or budget_excess(state, parked.partition, parked.total, update=command.update) <= 0


def waits_for_larger_piece(state: State, parked: ParkedAllocate, *, spare: int = 0) -> bool:
    """Return whether enough bytes, and `spare` more, are free for this waiting call, but in pieces that are too
    small."""
    wanted = parked.total + spare
    return waits_for_memory(state, parked) and is_fragmented(state, wanted, update=parked.command.update)


def _largest_holders(*rankings: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the `NAMED` largest holders of each group, without those of 0 bytes. A holder is (text, bytes)."""
    ranked = [sorted(holders, key=lambda holder: -holder[1]) for holders in rankings]
    return [holder for holders in ranked for holder in holders[:NAMED] if holder[1]]


def _largest_partitions(state: State) -> list[Partition]:
    return sorted(state.partitions.values(), key=lambda partition: -partition.account.live_bytes)[:NAMED]


def _partition_text(partition: Partition) -> str:
    """Describe the partition, and how many of its samples each task has not claimed."""
    live = partition.rows.live
    facts = [f"{live} samples"]
    facts += [f"{live - task.claimed} not claimed by {name!r}" for name, task in list(partition.tasks.items())[:NAMED]]
    if len(partition.tasks) > NAMED:
        facts.append("...")
    return f"partition {partition.name!r} ({', '.join(facts)})"


def _put_text(parked: ParkedAllocate) -> str:
    return (
        f"an earlier put of {parked.total:,} bytes into partition {parked.partition.name!r} by {parked.session.label}"
    )


def _session_holdings(state: State, partition: Partition | None) -> list[tuple[str, int]]:
    """Return the bytes that each session holds by reservations, and those that it holds by pins, as (text, bytes). Only
    bytes of this partition count (None: of any)."""
    holdings = []
    for session in state.sessions.values():
        reserved = sum(
            _bytes_held(state, reservation.extents(), partition) for reservation in session.reservations.values()
        )
        pinned = sum(_bytes_held(state, pins, partition) for pins in session.pins.values())
        holdings += [(f"reservations of {session.label}", reserved), (f"readers of {session.label}", pinned)]
    return holdings


def _bytes_held(state: State, extent_ids: Int32s, partition: Partition | None) -> int:
    """Return the bytes of these extents, or of those among them that belong to the partition."""
    extents = state.extents
    if partition is not None:
        of_partition = extents.owners[extent_ids] == partition.account.account_id
        if not some(of_partition):
            return 0
        extent_ids = extent_ids[of_partition]
    return extents.bytes_of(extent_ids)
