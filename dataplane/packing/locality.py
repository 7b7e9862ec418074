"""Rows nearer to where they are used, at no cost: among assignments that balance as well, the one that moves fewer
tokens between hosts. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.errors import InvalidRequestError
from dataplane.packing.bins import Bins, Int64s

NOWHERE = -1
"""The home of a row that no shard is near to, or that is not known."""
ROUNDS = 8
TRIED = 8
"""A row is exchanged for one of about its length: so many of the nearest lengths are looked at."""
MOST_BINS = 512
"""Whole bins are exchanged up to so many: every pair of them is looked at."""


@dataclass(frozen=True, kw_only=True)
class Locality:
    """Where rows are and where shards are used. rows: the host of each, `[N]`, None where it is not known; shards: the
    host of each shard. lengths: the tokens of each row, `[N]`, where they are known; so much is it worth to have it
    near."""

    rows: Sequence[str | None]
    shards: Sequence[str | None]
    lengths: Sequence[int] | Int64s | None = None

    def numbered(self, size: int, shards: int) -> tuple[Int64s, Int64s]:
        """(the home of each row, that of each shard), as numbers; no row's is that of a shard whose host is not
        known. ValueError unless there are as many as rows and shards."""
        if len(self.rows) != size or len(self.shards) != shards:
            raise InvalidRequestError(
                f"locality of {len(self.rows)} rows and {len(self.shards)} shards for {size} rows over {shards} shards"
            )
        numbers = {host: number for number, host in enumerate(dict.fromkeys(self.shards)) if host is not None}
        homes = np.array([NOWHERE if host is None else numbers.get(host, NOWHERE) for host in self.rows], np.int64)
        hosts = np.array([NOWHERE - 1 if host is None else numbers[host] for host in self.shards], np.int64)
        return homes, hosts

    def sizes(self, size: int) -> Int64s:
        """Tokens of each row; 1 where they are not known."""
        return np.ones(size, np.int64) if self.lengths is None else np.asarray(self.lengths, np.int64)


def exchange_bins(
    bins: Bins, loads: Int64s, dealt: list[list[int]], sizes: Int64s, homes: Int64s, hosts: Int64s
) -> None:
    """Let bins change shards, two at a time, while that brings more tokens home than away, and no shard gets more
    tokens than the one with most had. In place: `dealt`, the bins of each shard."""
    if len(bins) > MOST_BINS or len(set(hosts.tolist())) < 2:
        return
    totals = np.array([int(loads[numbers].sum()) for numbers in dealt])
    most = int(totals.max(initial=0))
    shard_of = np.empty(len(bins), np.int64)
    for shard, numbers in enumerate(dealt):
        shard_of[numbers] = shard
    at_home = np.zeros((len(bins), int(hosts.max()) + 1), np.int64)  # tokens of each bin that are at home on a host
    for number, rows in enumerate(bins):
        known = np.array(rows)[homes[rows] >= 0]
        np.add.at(at_home[number], homes[known], sizes[known])
    for _ in range(ROUNDS):
        if not _exchange_some(at_home, shard_of, loads, totals, hosts, most):
            break
    for shard in range(len(dealt)):
        dealt[shard] = np.flatnonzero(shard_of == shard).tolist()


def _exchange_some(at_home: Int64s, shard_of: Int64s, loads: Int64s, totals: Int64s, hosts: Int64s, most: int) -> bool:
    """One round, each bin once at most; whether there was any exchange."""
    known = hosts >= 0
    near = np.where(known[shard_of][None, :], at_home[:, np.maximum(hosts[shard_of], 0)], 0)  # [bin, beside which bin]
    own = np.diagonal(near)
    gains = np.triu(near + near.T - own[:, None] - own[None, :], 1)
    ones, others = np.nonzero(gains > 0)
    order = np.argsort(-gains[ones, others], kind="stable")
    moved: set[int] = set()
    for one, other in zip(ones[order].tolist(), others[order].tolist(), strict=True):
        if one in moved or other in moved:
            continue
        here, there = shard_of[one], shard_of[other]
        change = loads[one] - loads[other]
        if here == there or totals[there] + change > most or totals[here] - change > most:
            continue
        totals[there] += change
        totals[here] -= change
        shard_of[one], shard_of[other] = there, here
        moved |= {one, other}
    return bool(moved)


@dataclass(kw_only=True)
class Exchange:
    """Single rows that change places, so that more of them are at home.

    bins: the rows of each, changed in place. shards: of each bin the shard that has it; kinds: of each bin a number:
    rows are exchanged within one kind only. sizes: tokens of each row; homes: of each row; hosts: of each shard.
    capacity: what no bin gets beyond (None: there is no bound). No shard gets more tokens than the one with most had.
    """

    bins: Bins
    shards: Sequence[int]
    kinds: Sequence[int]
    sizes: Sequence[int]
    homes: Sequence[int]
    hosts: Sequence[int]
    capacity: int | None = None

    def run(self) -> bool:
        """Exchange while it helps; whether anything was."""
        if len(set(self.hosts)) < 2:
            return False
        self._loads = [sum(self.sizes[row] for row in rows) for rows in self.bins]
        self._totals = [0] * len(self.hosts)
        for shard, load in zip(self.shards, self._loads, strict=True):
            self._totals[shard] += load
        self._most = max(self._totals)
        exchanged = False
        for _ in range(ROUNDS):
            if not self._round():
                break
            exchanged = True
        return exchanged

    def _round(self) -> bool:
        """Rows away from home, by (kind, where they are, their home): (tokens, bin, place), the shortest first."""
        away: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
        for number, rows in enumerate(self.bins):
            here = self.hosts[self.shards[number]]
            for place, row in enumerate(rows):
                if self.homes[row] != here:
                    key = (self.kinds[number], here, self.homes[row])
                    away.setdefault(key, []).append((self.sizes[row], number, place))
        for rows_away in away.values():
            rows_away.sort()
        keys = sorted(key for key in away if key[2] >= 0)
        mutual = [(key, (key[0], key[2], key[1])) for key in keys if 0 <= key[1] < key[2]]
        found = [self._pair(away.get(one, []), away.get(other, [])) for one, other in mutual]
        for key in keys:
            kind, here, home = key
            strangers = [each for each in away if each[0] == kind and each[1] == home and each[2] != here]
            found += [self._pair(away[key], away[each]) for each in sorted(strangers)]
        return any(found)

    def _pair(self, ones: list[tuple[int, int, int]], others: list[tuple[int, int, int]]) -> bool:
        """Exchange rows of the first for rows of the second, about as long; those that were are taken from both."""
        exchanged = False
        for index in range(len(ones) - 1, -1, -1):
            middle = bisect_left(others, ones[index])
            near = range(max(middle - TRIED // 2, 0), min(middle + TRIED // 2, len(others)))
            for other in sorted(near, key=lambda place: abs(others[place][0] - ones[index][0])):
                if self._exchanged(ones[index], others[other]):
                    del ones[index], others[other]
                    exchanged = True
                    break
        return exchanged

    def _exchanged(self, one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
        """Do it, unless a bin or a shard would get too much."""
        change = one[0] - other[0]
        here, there = self.shards[one[1]], self.shards[other[1]]
        if self._totals[there] + change > self._most or self._totals[here] - change > self._most:
            return False
        if (
            self.capacity is not None
            and max(self._loads[other[1]] + change, self._loads[one[1]] - change) > self.capacity
        ):
            return False
        mine, theirs = self.bins[one[1]], self.bins[other[1]]
        mine[one[2]], theirs[other[2]] = theirs[other[2]], mine[one[2]]
        self._loads[other[1]] += change
        self._loads[one[1]] -= change
        self._totals[there] += change
        self._totals[here] -= change
        return True

    def loads(self) -> Int64s:
        """The tokens of each bin, after `run`."""
        return np.array([sum(self.sizes[row] for row in rows) for rows in self.bins], np.int64)
