"""Budgets of partitions: eviction, watermarks, and the error of a put that finds no space."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dataplane.errors import CapacityTimeoutError
from dataplane.ledger.commands import Int32s, Int64s, Notice, WhenFull
from dataplane.ledger.state.arrays import Bools, some, tally
from dataplane.ledger.state.extents import Account
from dataplane.ledger.state.partition import Gain, Outlook, Partition
from dataplane.ledger.state.sessions import ParkedAllocate
from dataplane.ledger.state.state import State
from dataplane.ledger.state.units import Unit

FIRST_LOOK = 512
"""This many samples are examined first, oldest first; then twice as many, and so on."""
FIRST_STEP = 64
"""If it is unknown how many consumed samples are needed, this many are evicted first; then twice as many, and so on."""
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

    A sample may be evicted if no reader pins it, no lease or unconfirmed claim holds it, and no put in progress
    names it. It is consumed if every task of its partition (at least one) has a final claim on it. Bytes are freed in
    whole extents, or in parts of them: an extent is certainly freed only if all samples in it are evicted. Open units
    are those that are connected and not drained: only they give space to puts."""

    def __init__(self, state: State) -> None:
        self.state = state

    def make_space(
        self, partition: Partition, *, excess: int, short: int, update: bool, spare: Int64s = NO_ROWS
    ) -> tuple[str, ...] | None:
        """Evict samples of the partition, except `spare`, until it occupies `excess` bytes less and `short` bytes less
        are used in open units. Return the ids of evicted samples that were not consumed, or None if it is impossible
        (consumed samples may have been evicted nevertheless).

        Consumed samples are evicted as long as that may help. Others are evicted if the policy allows it, for new rows
        only (an update may be of these very samples), and only if that certainly suffices.
        """
        goal = _Goal(self.state, partition, excess, short)
        consumed, count = self._choose_victims(partition, goal, NO_ROWS, spare, consumed=True)
        if count is not None:
            self._evict(partition, consumed[:count], consumed=True)
            return ()
        most = self._freed_at_most(partition, goal, consumed)
        if goal.is_met_by(most):
            # It may suffice, if extents are freed in part.
            if self._evict_in_steps(partition, goal, consumed):
                return ()
            consumed, most = NO_ROWS, (0, 0)  # all of them are evicted
        # An attempt with `spare` says nothing about one without, so its result is not stored.
        if update or partition.when_full is not WhenFull.EVICT_OLDEST:
            if not len(spare):
                self._store_outlook(partition, most, every=None)
            return None
        # `both`: the consumed samples, followed by unconsumed ones.
        both, count = self._choose_victims(partition, goal, consumed, spare, consumed=False)
        if count is None:
            if not len(spare):
                # Unconsumed samples are only evicted for bytes that are certainly freed.
                self._store_outlook(partition, most, every=self._freed_at_least(partition, goal, both))
            return None
        self._evict(partition, consumed, consumed=True)
        others = both[len(consumed) : count]
        lost = partition.rows.names_of(others)
        self._evict(partition, others, consumed=False)
        return lost[:REPORTED]

    # --- failed attempts

    def certainly_fails(self, partition: Partition, *, excess: int, short: int, update: bool) -> bool:
        """Return whether `make_space` for a waiting put certainly fails, because nothing relevant changed since it
        failed. The cost is proportional to the samples noted since (`Outlook.note`)."""
        outlook = partition.outlook
        if outlook is None or outlook.units != self._open_units():  # no failed attempt, or other units are open now
            return False
        if outlook.noted:
            self._count_potential(partition, outlook, outlook.take_noted())
        consumed_only = update or partition.when_full is not WhenFull.EVICT_OLDEST
        return outlook.rules_out(excess, short, consumed_only=consumed_only)

    def _store_outlook(self, partition: Partition, consumed: Gain, every: Gain | None) -> None:
        """Store the result of a failed attempt: what the consumed samples, and all samples that may be evicted (None:
        not computed), would free at most (see `Outlook`). It is kept while puts of the partition wait."""
        extents = self.state.extents
        extents.outlooks += 1  # a new number: extents counted for an earlier outlook count again
        outlook = partition.outlook = Outlook(extents.outlooks, self._open_units(), consumed, every)
        self._count_potential(partition, outlook, partition.rows.in_order())

    def _count_potential(self, partition: Partition, outlook: Outlook, rows: Int64s) -> None:
        """Add to the outlook's `hope_bytes` the extents of those rows that may be evicted, or could be if nobody read
        them. Extents that this outlook counts already (`Extents.hoped` has its number) are skipped."""
        extents = self.state.extents
        evictable, consumed = self._eviction_status(partition, rows)
        if partition.when_full is not WhenFull.EVICT_OLDEST:
            evictable &= consumed
        cells = self._extents_of(partition, rows[evictable])
        if cells:
            numbers = np.unique(np.concatenate(cells))
            # Number 0: no cell.
            fresh = numbers[(numbers > 0) & (extents.hoped[numbers] != outlook.number)]
            extents.hoped[fresh] = outlook.number
            outlook.hope_bytes += extents.bytes_of(fresh)

    def _open_units(self) -> tuple[int, ...]:
        return tuple(unit.number for unit in self.state.units.values() if unit.open)

    # --- steps

    def _choose_victims(
        self, partition: Partition, goal: _Goal, rows: Int64s, spare: Int64s, *, consumed: bool
    ) -> tuple[Int64s, int | None]:
        """Return `rows` followed by rows that may be evicted, oldest first, and how many of them, from the first on,
        suffice (None: all are too few). `consumed`: look for consumed rows, else for unconsumed ones."""
        for part in _rows_by_age(partition):
            evictable = self._evictable(partition, part, spare, consumed=consumed)
            if len(evictable):
                rows = np.concatenate([rows, evictable])
                count = self._count_needed(partition, goal, rows)
                if count is not None:
                    return rows, count
        return rows, None

    def _evict_in_steps(self, partition: Partition, goal: _Goal, rows: Int64s) -> bool:
        """Evict these consumed rows in steps until the goal is reached: if only parts of extents are freed, the
        required number of samples is unknown. Return whether it was reached."""
        start, step = 0, FIRST_STEP
        while start < len(rows) and not goal.reached:
            self._evict(partition, rows[start : start + step], consumed=True)
            start, step = start + step, 2 * step
        return goal.reached

    # --- selection

    def _evictable(self, partition: Partition, rows: Int64s, spare: Int64s, *, consumed: bool) -> Int64s:
        """Return those of the rows, except `spare`, that may be evicted: with `consumed` only consumed ones, else only
        unconsumed ones."""
        evictable, is_consumed = self._eviction_status(partition, rows)
        evictable &= ~np.isin(rows, spare)
        evictable &= is_consumed if consumed else ~is_consumed
        for cells in self._extents_of(partition, rows):
            evictable &= (cells == 0) | (self.state.extents.pins[cells] == 0)
        return rows[evictable]

    def _eviction_status(self, partition: Partition, rows: Int64s) -> tuple[Bools, Bools]:
        """Return which of the rows may be evicted (ignoring pins), and which are consumed. A row may not be evicted if
        a put in progress names it, or if a claim that is not permanent holds it. Without tasks, no row is consumed."""
        evictable, consumed = ~partition.targeted(rows), np.full(len(rows), bool(partition.tasks))
        for task in partition.tasks.values():
            permanent = task.claimed_permanently(rows)
            evictable &= permanent | (task.claim_ids[rows] == 0)
            consumed &= permanent
        return evictable, consumed

    def _extents_of(self, partition: Partition, rows: Int64s) -> list[Int32s]:
        """Return for each field with live cells the extents of the rows' cells (0: no cell)."""
        return [field.extents[rows] for field in partition.fields.values() if field.live]

    # --- amounts

    def _freed_at_most(self, partition: Partition, goal: _Goal, rows: Int64s) -> tuple[int, int]:
        """Return the most bytes that evicting these rows can free, as (of the partition, in open units): the sizes of
        all extents with cells of the rows."""
        cells = self._extents_of(partition, rows)
        numbers = np.unique(np.concatenate(cells)) if cells else np.zeros(0, np.int32)
        sizes = self.state.extents.sizes[numbers]  # number 0 (no cell) has size 0
        return int(sizes.sum()), int(sizes[goal.on_open_units(numbers)].sum())

    def _count_needed(self, partition: Partition, goal: _Goal, rows: Int64s) -> int | None:
        """Return how many of the rows, from the first on, must be evicted so that the freed bytes certainly
        suffice. None if all of them are too few."""
        excess, short = goal.remaining
        freed = self._freed_bytes_by_count(partition, goal, rows)
        enough = (freed[0] >= excess) & (freed[1] >= short)
        return int(enough.argmax()) + 1 if some(enough) else None  # argmax: the first that suffices

    def _freed_at_least(self, partition: Partition, goal: _Goal, rows: Int64s) -> Gain:
        """Return the bytes, of the partition and in open units, that are certainly freed if all of the rows are
        evicted."""
        freed = self._freed_bytes_by_count(partition, goal, rows)
        return (int(freed[0, -1]), int(freed[1, -1])) if freed.size else (0, 0)

    def _freed_bytes_by_count(self, partition: Partition, goal: _Goal, rows: Int64s) -> Int64s:
        """Return an array [2, N]: its entry [0, i] is how many bytes of the partition are certainly freed if the rows 0
        to i are evicted, [1, i] how many bytes in open units. Freed are the extents whose live cells all belong to
        these rows."""
        extents = self.state.extents
        cells = self._extents_of(partition, rows)
        freed: Int64s = np.zeros((2, len(rows)), np.int64)
        if not cells:
            return freed
        # For each cell its extent, and the position of its sample in `rows`.
        numbers, positions = np.concatenate(cells), np.tile(np.arange(len(rows)), len(cells))
        positions, numbers = positions[numbers > 0], numbers[numbers > 0]
        if not len(numbers):
            return freed
        order = np.lexsort((positions, numbers))  # by extent, then by position
        distinct, counts, _ = tally(numbers[order], positions[order])
        last = positions[order][counts.cumsum() - 1]  # the extent is freed with its last sample
        complete = counts == extents.live[distinct]  # no live cell of the extent belongs to another row
        distinct, last = distinct[complete], last[complete]
        np.add.at(freed[0], last, extents.sizes[distinct])
        np.add.at(freed[1], last, extents.sizes[distinct] * goal.on_open_units(distinct))
        total: Int64s = freed.cumsum(axis=1)
        return total

    # --- eviction

    def _evict(self, partition: Partition, rows: Int64s, *, consumed: bool) -> None:
        """Evict these samples, all consumed or all not. Log the loss of unconsumed ones, at most every `NOTICE_S`."""
        if not len(rows):
            return
        partition.evicted.note(partition.rows.names_of(rows), partition.generations_of(rows), consumed=consumed)
        partition.clear(rows)
        self.state.touch(partition)
        if not consumed and self.state.now >= partition.evicted.noticed + NOTICE_S:
            partition.evicted.noticed = self.state.now
            self.state.out.append(Notice(text=_eviction_text(partition)))


class _Goal:
    """The bytes that an eviction must free: `excess` of the partition, and `short` in open units. `_wanted`: the used
    bytes at which the goal is reached, as (of the partition, in open units). `_units` and `_numbers`: the units that
    were open when the goal was created, and their numbers."""

    def __init__(self, state: State, partition: Partition, excess: int, short: int) -> None:
        self._extents = state.extents
        self._account = partition.account
        self._units = [unit for unit in state.units.values() if unit.open]
        self._numbers = np.array([unit.number for unit in self._units], np.int32)
        self._wanted = partition.account.used_bytes - excess, _used_bytes(self._units) - short

    @property
    def remaining(self) -> tuple[int, int]:
        """Bytes that must still be freed: of the partition, and in open units."""
        return self._account.used_bytes - self._wanted[0], _used_bytes(self._units) - self._wanted[1]

    @property
    def reached(self) -> bool:
        return self.is_met_by((0, 0))

    def is_met_by(self, freed: tuple[int, int]) -> bool:
        """Whether freeing these bytes more, of the partition and in open units, reaches the goal."""
        excess, short = self.remaining
        return freed[0] >= excess and freed[1] >= short

    def on_open_units(self, numbers: Int32s) -> Bools:
        """Return which of these extents are on open units."""
        on_open: Bools = np.isin(self._extents.units[numbers], self._numbers)
        return on_open


def _used_bytes(units: list[Unit]) -> int:
    return sum(unit.used_bytes for unit in units)


def _rows_by_age(partition: Partition) -> Iterator[Int64s]:
    """Yield all live rows in parts of increasing size, oldest first."""
    rows, start, size = partition.rows, 0, FIRST_LOOK
    while start < rows.end:
        part = rows.order[start : min(start + size, rows.end)]
        yield part[part >= 0]  # without removed rows
        start, size = start + size, 2 * size


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
        """Update `pressed`, and the peaks of the units, after an input. Does nothing unless bytes were taken or freed.
        Of the partitions, it examines only those of these bytes."""
        state = self.state
        # The numbers of the accounts that gained or lost bytes.
        moved, state.extents.moved = state.extents.moved, set()
        if not moved:
            return
        for unit in state.units.values():
            unit.peak_bytes = max(unit.peak_bytes, unit.used_bytes)
            self._update_gauge(unit, unit.used_bytes, unit.limit(update=False))
        for partition in [state.budgeted[number] for number in sorted(moved) if number in state.budgeted]:
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
        name, of_budget = f"partition {owner.name!r}", "of its budget "
    else:
        name, of_budget = f"storage unit {owner.number} ({owner.offer.name})", ""
    fraction, beyond = min(used / max(limit, 1), 1.0), max(used - limit, 0)
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
            f"storage unit {unit.number} ({unit.offer.name}), which is "
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
        arena=" ".join(f"Storage unit {unit.number} cannot grow: {why}" for unit, why in growth_problems if why),
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


def _largest_holders(*groups: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the `NAMED` largest holders of each group, without those of 0 bytes. A holder is (text, bytes)."""
    ranked = [sorted(group, key=lambda holder: -holder[1]) for group in groups]
    return [holder for group in ranked for holder in group[:NAMED] if holder[1]]


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


def _bytes_held(state: State, numbers: Int32s, partition: Partition | None) -> int:
    """Return the bytes of these extents, or of those among them that belong to the partition."""
    extents = state.extents
    if partition is not None:
        of_partition = extents.owners[numbers] == partition.account.number
        if not some(of_partition):
            return 0
        numbers = numbers[of_partition]
    return extents.bytes_of(numbers)
