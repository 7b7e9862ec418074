"""Budgets of partitions: eviction, watermarks, and the error of a put that finds no space."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dataplane.errors import CapacityTimeoutError
from dataplane.ledger.commands import Int32s, Int64s, Notice, WhenFull
from dataplane.ledger.state.arrays import Bools, some, tally
from dataplane.ledger.state.eviction_outlook import Gain, Outlook
from dataplane.ledger.state.extents import Account
from dataplane.ledger.state.partition import Partition
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


def limit_of(state: State, partition: Partition, *, update: bool) -> int | None:
    """Return how many bytes the partition may occupy after a put of new rows, or after an update (None: no budget)."""
    budget = partition.budget_bytes
    return budget if budget is None or update else budget - int(budget * state.reserve_fraction)


def over(state: State, partition: Partition, wanted: int, *, update: bool) -> int:
    """Return by how many bytes the partition's budget is too small for `wanted` more; 0 or less if it suffices."""
    limit = limit_of(state, partition, update=update)
    return 0 if limit is None or not wanted else partition.account.used_bytes + wanted - limit


class Evictions:
    """A sample may be evicted if no reader pins it, no lease or unconfirmed claim holds it, and no put in progress
    names it. It is consumed if every task of its partition (at least one) has a final claim on it."""

    def __init__(self, state: State) -> None:
        self.state = state

    def make_space(
        self, partition: Partition, *, excess: int, short: int, update: bool, spare: Int64s = NO_ROWS
    ) -> tuple[str, ...] | None:
        """Evict samples of the partition, except `spare`, until it occupies `excess` bytes less and `short` bytes less
        are used in open units. Return the ids of evicted samples that were not consumed, or None if it is impossible.

        Consumed samples are evicted as long as that may help. Others are evicted if the policy allows it, for new rows
        only (an update may be of these very samples), and only if that certainly suffices.
        """
        goal = _Goal(self.state, partition, excess, short)
        consumed, count = self._choose(partition, goal, NO_ROWS, spare, consumed=True)
        if count is not None:
            self._evict(partition, consumed[:count], consumed=True)
            return ()
        most = self._most(partition, goal, consumed)
        if goal.within(most):
            if self._evict_in_steps(partition, goal, consumed):
                return ()
            consumed, most = NO_ROWS, (0, 0)
        if update or partition.when_full is not WhenFull.EVICT_OLDEST:
            if not len(spare):
                self._remember(partition, most, None)
            return None
        both, count = self._choose(partition, goal, consumed, spare, consumed=False)
        if count is None:
            if not len(spare):
                self._remember(partition, most, self._whole(partition, goal, both))
            return None
        self._evict(partition, consumed, consumed=True)
        others = both[len(consumed) : count]
        lost = partition.rows.names_of(others)
        self._evict(partition, others, consumed=False)
        return lost[:REPORTED]

    # --- failed attempts

    def in_vain(self, partition: Partition, *, excess: int, short: int, update: bool) -> bool:
        """Return whether `make_space` for a waiting put certainly fails, because nothing relevant changed since it
        failed. The cost is proportional to the samples that were noted since."""
        outlook = partition.outlook
        if outlook is None or outlook.units != self._open_units():
            return False
        if outlook.noted:
            self._count_potential(partition, outlook, outlook.take_noted())
        consumed_only = update or partition.when_full is not WhenFull.EVICT_OLDEST
        return outlook.rules_out(excess, short, consumed_only=consumed_only)

    def _remember(self, partition: Partition, consumed: Gain, every: Gain | None) -> None:
        """Store the result of a failed attempt. It is kept while puts of the partition wait."""
        extents = self.state.extents
        extents.outlooks += 1
        outlook = partition.outlook = Outlook(extents.outlooks, self._open_units(), consumed, every)
        self._count_potential(partition, outlook, partition.rows.in_order())

    def _count_potential(self, partition: Partition, outlook: Outlook, rows: Int64s) -> None:
        """Add to `hope_bytes` the extents of those rows that may be evicted, or could be without their readers."""
        extents = self.state.extents
        may, consumed = self._standing(partition, rows)
        cells = self._cells(partition, rows[may if partition.when_full is WhenFull.EVICT_OLDEST else may & consumed])
        if cells:
            numbers = np.unique(np.concatenate(cells))
            fresh = numbers[(numbers > 0) & (extents.hoped[numbers] != outlook.number)]
            extents.hoped[fresh] = outlook.number
            outlook.hope_bytes += extents.bytes_of(fresh)

    def _open_units(self) -> tuple[int, ...]:
        return tuple(unit.number for unit in self.state.units.values() if unit.open)

    # --- steps

    def _choose(
        self, partition: Partition, goal: _Goal, rows: Int64s, spare: Int64s, *, consumed: bool
    ) -> tuple[Int64s, int | None]:
        """Return `rows` followed by rows that may be evicted, oldest first, and how many of them suffice (None: all
        are too few)."""
        for part in _by_age(partition):
            found = self._evictable(partition, part, spare, consumed=consumed)
            if len(found):
                rows = np.concatenate([rows, found])
                count = self._enough(partition, goal, rows)
                if count is not None:
                    return rows, count
        return rows, None

    def _evict_in_steps(self, partition: Partition, goal: _Goal, rows: Int64s) -> bool:
        """Evict in steps: if only parts of extents are freed, the required number of samples is unknown."""
        at, step = 0, FIRST_STEP
        while at < len(rows) and not goal.reached:
            self._evict(partition, rows[at : at + step], consumed=True)
            at, step = at + step, 2 * step
        return goal.reached

    # --- selection

    def _evictable(self, partition: Partition, rows: Int64s, spare: Int64s, *, consumed: bool) -> Int64s:
        """Return those of the rows that may be evicted: only consumed ones, or only unconsumed ones."""
        may, claimed = self._standing(partition, rows)
        may &= ~np.isin(rows, spare)
        may &= claimed if consumed else ~claimed
        for cells in self._cells(partition, rows):
            may &= (cells == 0) | (self.state.extents.pins[cells] == 0)
        return rows[may]

    def _standing(self, partition: Partition, rows: Int64s) -> tuple[Bools, Bools]:
        """Return which of the rows no put in progress names and no claim may return, and which are consumed."""
        may, claimed = ~partition.targeted(rows), np.full(len(rows), bool(partition.tasks))
        for task in partition.tasks.values():
            for_good = task.claimed_permanently(rows)
            may &= for_good | (task.claim_ids[rows] == 0)
            claimed &= for_good
        return may, claimed

    def _cells(self, partition: Partition, rows: Int64s) -> list[Int32s]:
        return [field.extents[rows] for field in partition.fields.values() if field.live]

    # --- amounts

    def _most(self, partition: Partition, goal: _Goal, rows: Int64s) -> tuple[int, int]:
        """Return the most that evicting these rows can free: all extents that they lie in."""
        cells = self._cells(partition, rows)
        numbers = np.unique(np.concatenate(cells)) if cells else np.zeros(0, np.int32)
        sizes = self.state.extents.sizes[numbers]
        return int(sizes.sum()), int(sizes[goal.here(numbers)].sum())

    def _enough(self, partition: Partition, goal: _Goal, rows: Int64s) -> int | None:
        """Return how many of the rows, from the first on, must be evicted so that the freed bytes certainly
        suffice. None if all of them are too few."""
        excess, short = goal.left
        gained = self._gains(partition, goal, rows)
        enough = (gained[0] >= excess) & (gained[1] >= short)
        return int(enough.argmax()) + 1 if some(enough) else None

    def _whole(self, partition: Partition, goal: _Goal, rows: Int64s) -> Gain:
        """Return the bytes that are certainly freed if all of the rows are evicted."""
        gained = self._gains(partition, goal, rows)
        return (int(gained[0, -1]), int(gained[1, -1])) if gained.size else (0, 0)

    def _gains(self, partition: Partition, goal: _Goal, rows: Int64s) -> Int64s:
        """Return the bytes, of the partition and in open units, that are certainly freed if the rows up to each are
        evicted: those of extents in which nothing else lives."""
        extents = self.state.extents
        cells = self._cells(partition, rows)
        gained: Int64s = np.zeros((2, len(rows)), np.int64)
        if not cells:
            return gained
        numbers, places = np.concatenate(cells), np.tile(np.arange(len(rows)), len(cells))
        places, numbers = places[numbers > 0], numbers[numbers > 0]
        if not len(numbers):
            return gained
        order = np.lexsort((places, numbers))
        each, counts, _ = tally(numbers[order], places[order])
        last = places[order][counts.cumsum() - 1]
        whole = counts == extents.live[each]
        each, last = each[whole], last[whole]
        np.add.at(gained[0], last, extents.sizes[each])
        np.add.at(gained[1], last, extents.sizes[each] * goal.here(each))
        total: Int64s = gained.cumsum(axis=1)
        return total

    # --- eviction

    def _evict(self, partition: Partition, rows: Int64s, *, consumed: bool) -> None:
        if not len(rows):
            return
        partition.evicted.note(partition.rows.names_of(rows), partition.generations_of(rows), consumed=consumed)
        partition.clear(rows)
        self.state.touch(partition)
        if not consumed and self.state.now >= partition.evicted.noticed + NOTICE_S:
            partition.evicted.noticed = self.state.now
            self.state.out.append(Notice(text=_eviction_text(partition)))


class _Goal:
    """The bytes that an eviction must free."""

    def __init__(self, state: State, partition: Partition, excess: int, short: int) -> None:
        self._extents = state.extents
        self._account = partition.account
        self._units = [unit for unit in state.units.values() if unit.open]
        self._numbers = np.array([unit.number for unit in self._units], np.int32)
        self._wanted = partition.account.used_bytes - excess, _used(self._units) - short

    @property
    def left(self) -> tuple[int, int]:
        """Bytes that must still be freed: of the partition, and in open units."""
        return self._account.used_bytes - self._wanted[0], _used(self._units) - self._wanted[1]

    @property
    def reached(self) -> bool:
        return self.within((0, 0))

    def within(self, gained: tuple[int, int]) -> bool:
        excess, short = self.left
        return gained[0] >= excess and gained[1] >= short

    def here(self, numbers: Int32s) -> Bools:
        """Return which of these extents are on open units."""
        found: Bools = np.isin(self._extents.units[numbers], self._numbers)
        return found


def _used(units: list[Unit]) -> int:
    return sum(unit.used_bytes for unit in units)


def _by_age(partition: Partition) -> Iterator[Int64s]:
    """Yield all live rows in parts, oldest first."""
    rows, at, size = partition.rows, 0, FIRST_LOOK
    while at < rows.end:
        part = rows.order[at : min(at + size, rows.end)]
        yield part[part >= 0]
        at, size = at + size, 2 * size


def _eviction_text(partition: Partition) -> str:
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

    def look(self) -> None:
        """Update after an input. Does nothing unless bytes were taken or freed, and examines only the partitions
        that they belong to."""
        state = self.state
        moved, state.extents.moved = state.extents.moved, set()
        if not moved:
            return
        for unit in state.units.values():
            unit.peak_bytes = max(unit.peak_bytes, unit.used_bytes)
            self._judge(unit, unit.used_bytes, unit.limit(update=False))
        for partition in [state.budgeted[number] for number in sorted(moved) if number in state.budgeted]:
            limit = limit_of(state, partition, update=False)
            self._judge(partition, partition.account.used_bytes, limit or 0)

    def _judge(self, owner: Unit | Partition, used: int, limit: int) -> None:
        gauge: Unit | Account = owner.account if isinstance(owner, Partition) else owner
        low, high = self.state.watermarks
        pressed = used > low * limit if gauge.pressed else used >= high * limit > 0
        if pressed != gauge.pressed:
            gauge.pressed = pressed
            self.state.out.append(Notice(text=_text(owner, used, limit), warning=pressed))


def _text(owner: Unit | Partition, used: int, limit: int) -> str:
    if isinstance(owner, Partition):
        name, what = f"partition {owner.name!r}", "of its budget "
    else:
        name, what = f"storage unit {owner.number} ({owner.offer.name})", ""
    share, beyond = min(used / max(limit, 1), 1.0), max(used - limit, 0)
    taken = f"all {limit:,}" if beyond else f"{used:,} of the {limit:,}"
    more = f", and {beyond:,} more" if beyond else ""
    return f"{name} is {100 * share:.0f}% full: {taken} bytes {what}for new rows are used{more}"


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
    """Return the error of a put without space. It describes the budget if that is used up, else the units.
    `earlier` is the put that this one waits for, if any; the error names it if there is space for this one."""
    short = not moving and over(state, partition, wanted, update=update) > 0
    enough = is_fragmented(state, wanted, update=update)
    if short or not enough:
        earlier = None
    behind = "" if earlier is None else _put(earlier)
    if short or (earlier is not None and not waits_for_memory(state, earlier)):
        limit = limit_of(state, partition, update=update)
        assert limit is not None
        return CapacityTimeoutError(
            wanted_bytes=wanted,
            free_bytes=max(limit - partition.account.used_bytes, 0),
            waited_s=waited_s,
            holders=_ranked([(_described(partition), partition.account.live_bytes)], _sessions(state, partition)),
            partition=partition.name,
            budget_bytes=partition.budget_bytes,
            behind=behind,
        )
    units = state.units.values()
    troubles = [(unit, unit.growth_problem(state.now)) for unit in units]
    holes = [unit.space for unit in units if unit.open]
    largest = max((space.largest_bytes for space in holes), default=0)
    lost = [
        (
            f"storage unit {unit.number} ({unit.offer.name}), which is "
            + ("being drained," if unit.connected else "not connected,"),
            unit.space.capacity_bytes,
        )
        for unit in units
        if not unit.open
    ]
    partitions = [(_described(other), other.account.live_bytes) for other in _largest(state)]
    return CapacityTimeoutError(
        wanted_bytes=wanted,
        free_bytes=sum(max(unit.available_bytes(update=update), 0) for unit in units if unit.open),
        waited_s=waited_s,
        holders=_ranked(lost, partitions, _sessions(state, None)),
        fragments=sum(space.fragments for space in holes) if enough and not behind else 0,
        largest_free_bytes=largest,
        arena=" ".join(f"Storage unit {unit.number} cannot grow: {why}" for unit, why in troubles if why),
        behind=behind,
    )


def is_fragmented(state: State, wanted: int, *, update: bool) -> bool:
    """Return whether `wanted` bytes are free in open units, so that a put of them without space is held up by
    fragmentation. Bytes taken by a compaction count as free, because they are free again when it ends."""
    units = [unit for unit in state.units.values() if unit.open]
    free = [
        min(unit.available_bytes(update=update), unit.space.free_bytes) + state.compacting_bytes(unit) for unit in units
    ]
    return sum(max(nbytes, 0) for nbytes in free) >= wanted


def waits_for_memory(state: State, parked: ParkedAllocate) -> bool:
    """Return whether this call waits for memory of the units, not for its partition's budget. Moves do not count
    against a budget."""
    command = parked.command
    return command.moving or over(state, parked.partition, parked.total, update=command.update) <= 0


def waits_for_larger_piece(state: State, parked: ParkedAllocate, *, spare: int = 0) -> bool:
    """Return whether enough bytes, and `spare` more, are free for this waiting call, but in pieces that are too
    small."""
    wanted = parked.total + spare
    return waits_for_memory(state, parked) and is_fragmented(state, wanted, update=parked.command.update)


def _ranked(*groups: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the largest of each group, group after group."""
    ranked = [sorted(group, key=lambda holder: -holder[1]) for group in groups]
    return [holder for group in ranked for holder in group[:NAMED] if holder[1]]


def _largest(state: State) -> list[Partition]:
    return sorted(state.partitions.values(), key=lambda partition: -partition.account.live_bytes)[:NAMED]


def _described(partition: Partition) -> str:
    """Describe the partition, and the tasks that have not consumed it."""
    live = partition.rows.live
    behind = [f"{live - task.claimed} not claimed by {name!r}" for name, task in partition.tasks.items()]
    facts = ", ".join([f"{live} samples", *behind[:NAMED], *(["..."] if len(behind) > NAMED else [])])
    return f"partition {partition.name!r} ({facts})"


def _put(parked: ParkedAllocate) -> str:
    return (
        f"an earlier put of {parked.total:,} bytes into partition {parked.partition.name!r} by {parked.session.label}"
    )


def _sessions(state: State, partition: Partition | None) -> list[tuple[str, int]]:
    """Return what each session holds by reservations and pins, of this partition or of all."""
    found = []
    for session in state.sessions.values():
        reserved = sum(_bytes(state, reservation.extents(), partition) for reservation in session.reservations.values())
        pinned = sum(_bytes(state, pins, partition) for pins in session.pins.values())
        found += [(f"reservations of {session.label}", reserved), (f"readers of {session.label}", pinned)]
    return found


def _bytes(state: State, numbers: Int32s, partition: Partition | None) -> int:
    extents = state.extents
    if partition is not None:
        mine = extents.owners[numbers] == partition.account.number
        if not some(mine):
            return 0
        numbers = numbers[mine]
    return extents.bytes_of(numbers)
