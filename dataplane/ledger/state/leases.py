"""Leases: which claims still have rows on lease, and when the ledger looks at them next."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from dataplane.ledger.commands import Int64s

if TYPE_CHECKING:
    from dataplane.ledger.state.partition import Partition
    from dataplane.ledger.state.tasks import Task

SLACK = 64
"""Outdated entries that the heap may hold beside as many as there are open leases."""


class Lease:
    """One claim while some of its `rows` are on lease; `count` says how many. `owner` is the session that claimed, or
    who holds them for a rank (see `tasks`). `lease_s` is the longest that it was given, `looked_at` when the ledger
    looks at it next: not later than the first of its rows is over."""

    def __init__(self, partition: Partition, task: Task, rows: Int64s, claim: int, owner: int, lease_s: float) -> None:
        self.partition = partition
        self.task = task
        self.rows = rows
        self.claim = claim
        self.owner = owner
        self.lease_s = lease_s
        self.count = len(rows)
        self.looked_at = 0.0

    def left(self) -> Int64s:
        """Its rows that are on lease."""
        left: Int64s = self.rows[self.task.claim_ids[self.rows] == self.claim]
        return left

    def over(self, now: float) -> Int64s:
        """Those of them whose time is over."""
        left = self.left()
        over: Int64s = left[self.task.ends_of(left) <= now]
        return over


class Leases:
    """`open` has the leases by claim, until their last row is acknowledged, given back or cleared. `ends` is a heap of
    (time, claim); entries that a lease no longer has as its `looked_at` are passed over."""

    def __init__(self) -> None:
        self.open: dict[int, Lease] = {}
        self.ends: list[tuple[float, int]] = []

    def next_end(self) -> float:
        """When the next lease is looked at, infinity if there is none."""
        return self.ends[0][0] if self.ends else float("inf")

    def owned_by(self, session: int) -> list[Lease]:
        """Those of a session's claims."""
        return [lease for lease in self.open.values() if lease.owner == session]

    def begin(self, lease: Lease, end: float) -> None:
        """All rows of a new lease end then."""
        self.open[lease.claim] = lease
        self._look_at(lease, end)

    def prolong(self, claims: Int64s, lease_s: float, end: float) -> None:
        """Rows of these claims (repeats allowed) end then."""
        for claim in np.unique(claims).tolist():
            lease = self.open[claim]
            lease.lease_s = max(lease.lease_s, lease_s)
            if end < lease.looked_at:
                self._look_at(lease, end)

    def close(self, claims: Int64s) -> None:
        """One row of each of these claims (repeats are as many rows) is on lease no more."""
        if not len(claims):
            return
        for claim, count in zip(*[part.tolist() for part in np.unique(claims, return_counts=True)], strict=True):
            lease = self.open[claim]
            lease.count -= count
            lease.task.count_leased(lease.owner, -count)
            if not lease.count:
                del self.open[claim]
        self._drop_outdated()

    def over(self, now: float) -> Iterator[Lease]:
        """Each lease that may have rows that are over; whoever iterates ends those."""
        while self.ends and self.ends[0][0] <= now:
            when, claim = heapq.heappop(self.ends)
            lease = self.open.get(claim)
            if lease is not None and lease.looked_at == when:
                yield lease
                if claim in self.open:
                    self._look_at(lease, float(lease.task.ends_of(lease.left()).min()))

    def renew(self, now: float) -> None:
        """Every lease begins again now, in full."""
        for lease in self.open.values():
            lease.looked_at = now + lease.lease_s
            lease.task.lease(lease.left(), lease.looked_at)
        self._rebuild()

    def _look_at(self, lease: Lease, when: float) -> None:
        lease.looked_at = when
        heapq.heappush(self.ends, (when, lease.claim))
        if len(self.ends) > 2 * len(self.open) + SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        self.ends = [(lease.looked_at, lease.claim) for lease in self.open.values()]
        heapq.heapify(self.ends)

    def _drop_outdated(self) -> None:
        """So that leases that are closed do not wake the shell."""
        while self.ends:
            when, claim = self.ends[0]
            lease = self.open.get(claim)
            if lease is not None and lease.looked_at == when:
                return
            heapq.heappop(self.ends)
