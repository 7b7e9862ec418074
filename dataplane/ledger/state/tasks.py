"""Consumer tasks: their claimed samples and leases, the samples that are ready for them, and the
terms of their claims."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dataplane.errors import InvalidRequestError
from dataplane.ledger.commands import Claim, Int64s, Order, Predicate, WhyBlocked
from dataplane.ledger.state.arrays import Bools, grown, next_capacity

Float64s = npt.NDArray[np.float64]
HELD = -1
"""Lease owner for shares that are held for their ranks, of claims without `lease_s`."""
HELD_ON_LEASE = -2
"""Lease owner for shares that are held for their ranks, of claims with `lease_s`: the ranks must acknowledge them."""
REPORTED = 1 << 16
"""Maximum number of dropped samples named in the answer to a claim."""
CHUNK = 8192
"""A search for ready samples scans at least this many flags at a time."""
SLACK = 64
"""The heap of lease ends is rebuilt if it has more entries than twice the number of open leases plus this."""
Terms = dict[str, str]
"""The terms that the claims of all ranks of a step must share."""


class Selection:
    """The samples of one step, dealt to its ranks: each rank's part is its share. `rows` and `generations` name the
    samples in order; `ranks` has the rank of each. Held rows, whose rank has not claimed its share yet, have the claim
    id `claim_id`. `given`: by rank, the ids of the claims that received its share, or samples of it that were given
    back."""

    def __init__(self, terms: Terms, rows: Int64s, generations: Int64s, ranks: Int64s, claim_id: int) -> None:
        self.terms = terms
        self.rows = rows
        self.generations = generations
        self.ranks = ranks
        self.claim_id = claim_id
        self.given: dict[int, list[int]] = {}


class Task:
    """State of one consumer task.

    `claim_ids[row]`: id of the claim that holds the row, negated after acknowledgement, 0 if unclaimed. `claimed`
    counts the claimed live rows. `ends[row]`: end of the row's lease, 0 without lease; the array is created with the
    first lease. `leased` counts rows leased to sessions, `held` rows held for ranks, and `unsettled` those of both that
    count as consumed only after acknowledgement. `leases`: the leases of all tasks. `unconfirmed`: ids of claims whose
    answers are not confirmed. `selections`: by step; missing steps up to `forgotten` were forgotten. `dropped`: ids of
    samples cleared with partial groups since the last answer."""

    def __init__(self, name: str, capacity: int, leases: Leases) -> None:
        self.name = name
        self.leases = leases
        self.claimed = 0
        self.leased = 0
        self.held = 0
        self.unsettled = 0
        self.claim_ids: Int64s = np.zeros(capacity, np.int64)
        self.ends: Float64s | None = None
        self.selections: dict[int, Selection] = {}
        self.forgotten = -1
        self.dropped: list[str] = []
        self.unconfirmed: set[int] = set()

    def grow(self, capacity: int) -> None:
        self.claim_ids = grown(self.claim_ids, capacity)
        if self.ends is not None:
            self.ends = grown(self.ends, capacity)

    def take(self, rows: Int64s, claim_id: int) -> None:
        """Claim these unclaimed rows."""
        self.claim_ids[rows] = claim_id
        self.claimed += len(rows)

    def lease(self, rows: Int64s, end: float) -> None:
        """Set the end of the leases of these rows. Their counts, and `leases`, are updated by the caller."""
        if self.ends is None:
            self.ends = np.zeros(len(self.claim_ids), np.float64)
        self.ends[rows] = end

    def give_back(self, rows: Int64s) -> Int64s:
        """Make these rows (no repeats) unclaimed, also acknowledged ones, and end their leases. Return those that were
        claimed."""
        claimed_rows: Int64s = rows[self.claim_ids[rows] != 0]
        if self.ends is not None:
            self.end_leases(claimed_rows)
        self.claim_ids[claimed_rows] = 0
        self.claimed -= len(claimed_rows)
        return claimed_rows

    def acknowledge(self, rows: Int64s) -> None:
        """End the leases of these rows and keep them claimed. The negated id still identifies their claim, which can no
        longer give them back."""
        self.end_leases(rows)
        self.claim_ids[rows] = -self.claim_ids[rows]

    def end_leases(self, rows: Int64s) -> None:
        """End the leases of these rows, if any. The rows stay claimed."""
        if self.ends is not None:
            rows = rows[self.ends[rows] > 0]
            self.leases.remove_rows(self.claim_ids[rows])  # updates `leased`, `held` and `unsettled`, too
            self.ends[rows] = 0.0

    def end_all_leases(self) -> None:
        """End all leases of a removed task."""
        if self.ends is not None:
            self.end_leases(np.flatnonzero(self.ends))

    def count_leased(self, owner: int, change: int) -> None:
        """Add `change` to those of `leased`, `held` and `unsettled` that count rows on lease to this owner."""
        if owner < 0:  # HELD or HELD_ON_LEASE
            self.held += change
        else:
            self.leased += change
        if owner != HELD:
            self.unsettled += change

    def on_lease(self, rows: Int64s) -> Bools:
        """Return which of the rows are on lease or held for a rank."""
        if self.ends is None:
            return np.zeros(len(rows), np.bool_)
        leased: Bools = self.ends[rows] > 0
        return leased

    def not_settled(self, rows: Int64s) -> Bools:
        """Return which of the rows count as consumed only after acknowledgement: those on lease, except rows held
        without `lease_s`."""
        unsettled = self.on_lease(rows)
        # The owners matter only if some rows of the task are held without `lease_s`.
        if self.unsettled < self.leased + self.held:
            unsettled &= self.owners_of(rows) != HELD
        return unsettled

    def ends_of(self, rows: Int64s) -> Float64s:
        """Return the ends of the leases of these leased rows."""
        assert self.ends is not None
        ends: Float64s = self.ends[rows]
        return ends

    def owners_of(self, rows: Int64s) -> Int64s:
        """Return the session that leases each row; `HELD` or `HELD_ON_LEASE` if held for a rank, 0 without lease."""
        owners = np.zeros(len(rows), np.int64)
        leased = np.flatnonzero(self.on_lease(rows))
        claims, claim_index = np.unique(self.claim_ids[rows[leased]], return_inverse=True)
        claim_owners = np.array([self.leases.open[claim].owner for claim in claims.tolist()], np.int64)
        owners[leased] = claim_owners[claim_index]
        return owners

    def claimed_permanently(self, rows: Int64s) -> Bools:
        """Return which of the rows are claimed permanently: not leased, not held for a rank, and not in an unconfirmed
        claim."""
        claim_ids = self.claim_ids[rows]
        claimed: Bools = (claim_ids != 0) & ~self.on_lease(rows)
        # The cheaper of two ways to the same result.
        if len(rows) < len(self.unconfirmed):
            claimed &= np.array([claim_id not in self.unconfirmed for claim_id in claim_ids.tolist()], np.bool_)
        elif self.unconfirmed:
            claimed &= ~np.isin(claim_ids, np.fromiter(self.unconfirmed, np.int64))
        return claimed


class ReadyIndex:
    """Index of the samples that are ready: unclaimed by one task, with all of `fields`. `flags` has a flag for each age
    position (index in `Rows.order`, oldest first).

    All set flags are in [low, high); `count` is their number. `waiters` counts the parked claims that use this index.
    """

    def __init__(self, task: Task, fields: tuple[str, ...], positions: int) -> None:
        self.task = task
        self.fields = fields
        self.flags: Bools = np.zeros(next_capacity(0, positions), np.bool_)
        self.count = 0
        self.low = 0
        self.high = 0
        self.waiters = 0

    def set(self, positions: Int64s, ready: Bools) -> None:
        """Set the flags of these positions (no repeats) to `ready`."""
        if not len(positions):
            return
        end = int(positions.max()) + 1
        if end > len(self.flags):
            self.flags = grown(self.flags, next_capacity(len(self.flags), end))
        # Count these positions as not ready first, then add those that are ready now.
        self.count -= int(np.count_nonzero(self.flags[positions]))
        self.flags[positions] = ready
        added = positions[ready]
        if not len(added):
            return
        # Widen [low, high), or begin it anew if no other flag is set.
        low = int(added.min())
        high = int(added.max()) + 1
        self.low = low if not self.count else min(self.low, low)
        self.high = high if not self.count else max(self.high, high)
        self.count += len(added)

    def unset(self, positions: Int64s) -> None:
        """Clear the flags of these positions (no repeats)."""
        if self.count:
            positions = positions[positions < self.high]  # at `high` and above, no flag is set
            self.count -= int(np.count_nonzero(self.flags[positions]))
            self.flags[positions] = False

    def compact(self, remaining: Int64s) -> None:
        """Renumber the remaining positions, which are ascending: `remaining[i]` becomes i. No other position has a set
        flag, so `count` stays."""
        flags = np.zeros(next_capacity(0, len(remaining)), np.bool_)
        indexed = remaining[remaining < len(self.flags)]  # beyond `flags`, nothing is ready
        flags[: len(indexed)] = self.flags[indexed]
        self.flags = flags
        self.low = 0
        self.high = len(indexed)

    def ready(self) -> Int64s:
        """Return all set positions, oldest first."""
        if not self.count:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.flags[self.low : self.high]) + self.low

    def first(self, wanted: int, order: Order) -> Int64s:
        """Return the first `wanted` set positions (or fewer) in the given order."""
        if wanted >= self.count:
            all_ready = self.ready()
            return all_ready if order is Order.OLDEST else all_ready[::-1]
        return self._oldest_ready(wanted) if order is Order.OLDEST else self._freshest_ready(wanted)

    def _oldest_ready(self, wanted: int) -> Int64s:
        """Return the first `wanted` set positions, in chunks from `low` on. Raise `low` to the first set flag, so that
        the next scan is shorter."""
        arrays: list[Int64s] = []
        at = self.low
        missing = wanted
        while missing > 0 and at < self.high:
            stop = min(at + max(CHUNK, 2 * missing), self.high)
            found = np.flatnonzero(self.flags[at:stop])[:missing] + at
            if len(found) and missing == wanted:  # the first ones of this scan
                self.low = int(found[0])
            arrays.append(found)
            missing -= len(found)
            at = stop
        return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)

    def _freshest_ready(self, wanted: int) -> Int64s:
        """Return the last `wanted` set positions, latest first, in chunks from `high` down. Lower `high` to the end of
        the last set flag, so that the next scan is shorter."""
        arrays: list[Int64s] = []
        at = self.high
        missing = wanted
        while missing > 0 and at > self.low:
            start = max(at - max(CHUNK, 2 * missing), self.low)
            found = (np.flatnonzero(self.flags[start:at]) + start)[::-1][:missing]
            if len(found) and missing == wanted:  # the first ones of this scan
                self.high = int(found[0]) + 1
            arrays.append(found)
            missing -= len(found)
            at = start
        return np.concatenate(arrays) if arrays else np.zeros(0, np.int64)


class Lease:
    """The lease of one claim, while some of its `rows` are on lease; `count` is their number. `owner`: the claiming
    session, or `HELD` or `HELD_ON_LEASE`. `claim`: the claim id. `lease_s`: the longest duration given. `looked_at`:
    ledger time of the next check, not later than the first end of its rows' leases."""

    def __init__(self, partition: str, task: Task, rows: Int64s, claim: int, owner: int, lease_s: float) -> None:
        self.partition = partition
        self.task = task
        self.rows = rows
        self.claim = claim
        self.owner = owner
        self.lease_s = lease_s
        self.count = len(rows)
        self.looked_at = 0.0

    def rows_on_lease(self) -> Int64s:
        """Return the rows that are still on lease."""
        rows: Int64s = self.rows[self.task.claim_ids[self.rows] == self.claim]
        return rows

    def ended_rows(self, now: float) -> Int64s:
        """Return the rows whose leases have ended."""
        rows = self.rows_on_lease()
        ended: Int64s = rows[self.task.ends_of(rows) <= now]
        return ended


class Leases:
    """All open leases. `open`: leases by claim, until their last row is acknowledged, given back or cleared. `ends`:
    heap of (time, claim); entries that differ from the lease's `looked_at` are outdated and skipped."""

    def __init__(self) -> None:
        self.open: dict[int, Lease] = {}
        self.ends: list[tuple[float, int]] = []

    def owned_by(self, session: int) -> list[Lease]:
        """Return the leases of a session's claims."""
        return [lease for lease in self.open.values() if lease.owner == session]

    def begin(self, lease: Lease, end: float) -> None:
        """Add a new lease. All of its rows already have the end `end` (`Task.lease`)."""
        self.open[lease.claim] = lease
        self._schedule_check(lease, end)

    def prolong(self, claims: Int64s, lease_s: float, end: float) -> None:
        """Update the leases of these claims (repeats allowed): the leases of some of their rows were set to end at
        `end`, `lease_s` from now."""
        for claim in np.unique(claims).tolist():
            lease = self.open[claim]
            lease.lease_s = max(lease.lease_s, lease_s)
            # Otherwise the check at `looked_at`, which comes first, schedules the next one.
            if end < lease.looked_at:
                self._schedule_check(lease, end)

    def remove_rows(self, claims: Int64s) -> None:
        """Remove one leased row from each of these claims (a repeated claim loses one row per repeat)."""
        if not len(claims):
            return
        distinct, counts = np.unique(claims, return_counts=True)
        for claim, count in zip(distinct.tolist(), counts.tolist(), strict=True):
            lease = self.open[claim]
            lease.count -= count
            lease.task.count_leased(lease.owner, -count)
            if not lease.count:
                del self.open[claim]
        self._drop_outdated()

    def pop_ended(self, now: float) -> Iterator[Lease]:
        """Yield each lease whose check is due: its `ended_rows`, perhaps none, must be ended by the caller before the
        next iteration. Then the next check is scheduled, if rows of the lease are left."""
        while self.ends and self.ends[0][0] <= now:
            when, claim = heapq.heappop(self.ends)
            lease = self.open.get(claim)
            if lease is not None and lease.looked_at == when:
                yield lease
                if claim in self.open:
                    self._schedule_check(lease, float(lease.task.ends_of(lease.rows_on_lease()).min()))

    def renew(self, now: float) -> None:
        """Restart all leases now, every row of a lease with the lease's longest duration."""
        for lease in self.open.values():
            lease.looked_at = now + lease.lease_s
            lease.task.lease(lease.rows_on_lease(), lease.looked_at)
        self._rebuild()

    def _schedule_check(self, lease: Lease, when: float) -> None:
        """Set the time of the next check of the lease."""
        lease.looked_at = when
        heapq.heappush(self.ends, (when, lease.claim))
        if len(self.ends) > 2 * len(self.open) + SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        """Rebuild the heap without outdated entries."""
        self.ends = [(lease.looked_at, lease.claim) for lease in self.open.values()]
        heapq.heapify(self.ends)

    def _drop_outdated(self) -> None:
        """Remove outdated entries from the top of the heap: the first one is of an open lease."""
        while self.ends:
            when, claim = self.ends[0]
            lease = self.open.get(claim)
            if lease is not None and lease.looked_at == when:
                return
            heapq.heappop(self.ends)


# --- the terms of a claim as numbers and predicates


def check_terms(command: Claim | WhyBlocked) -> None:
    """Raise `InvalidRequestError` for terms that no sample or group can satisfy."""
    if command.group_size is not None and command.group_size < 1:
        raise InvalidRequestError(f"group_size={command.group_size}: must be at least 1")
    if command.max_lag is not None and command.max_lag < 0:
        raise InvalidRequestError(f"max_lag={command.max_lag}: must not be negative")


def least_of(command: Claim) -> int:
    """Return the number of ready samples that ends the wait of the claim: `min_batch_size`, else
    the batch size, rounded down to whole groups, equally many for each rank."""
    least = command.batch_size if command.min_batch_size is None else command.min_batch_size
    multiple = (command.group_size or 1) * (command.dp_world or 1)
    return least // multiple * multiple


def kind_of(ready_index: ReadyIndex, command: Claim) -> str:
    """Return a key that is equal for claims that wait for the same samples, possibly in different
    numbers."""
    staleness = None if command.max_lag is None else (command.max_lag, command.version_tag)
    groups = None
    if command.group_size is not None:
        groups = command.group_by, command.group_size, command.partial_after_s
    return repr((ready_index.task.name, ready_index.fields, command.where, staleness, groups))


def conditions(version: int | None, command: Claim | WhyBlocked) -> tuple[Predicate, ...]:
    """Return the predicates that a sample's tags must satisfy while the partition is at this
    version (None: as 0): the command's `where`, and the limit of its `max_lag`."""
    if command.max_lag is None:
        return command.where
    oldest = (version or 0) - command.max_lag
    return (*command.where, Predicate(tag=command.version_tag, op=">=", value=oldest))
