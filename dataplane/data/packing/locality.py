"""Locality of shards: among equally balanced assignments, prefer the one that moves fewer tokens between hosts.

A row is at home if its shard is on the host that stores the row. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from dataplane.data.packing.bins import Bins, Int64s
from dataplane.errors import InvalidRequestError

NOWHERE = -1
"""Home of a row whose host is unknown or has no shard."""
ROUNDS = 24
MANY = 1 << 10
"""Another round follows if the last one exchanged more than 1 in this many of the rows away from home."""
PART = 4
"""One exchange uses at most this fraction (1 / PART) of the free space of a bin."""
MOST_BINS = 512
"""With more bins than this, whole bins are not exchanged, because every pair of bins is compared."""


@dataclass(frozen=True, kw_only=True)
class Locality:
    """Hosts of rows and shards. rows: the host that stores each row, `[N]`; shards: the host of each shard; None if
    unknown. lengths: tokens of each row, `[N]`, used as the weight of its locality; None if unknown."""

    rows: Sequence[str | None]
    shards: Sequence[str | None]
    lengths: Sequence[int] | Int64s | None = None

    def numbered(self, size: int, shards: int) -> tuple[Int64s, Int64s]:
        """Return (home of each row, host of each shard) as numbers. Unknown hosts of shards match no row. Raises
        ValueError unless `size` and `shards` match the numbers of rows and shards."""
        if len(self.rows) != size or len(self.shards) != shards:
            raise InvalidRequestError(
                f"locality of {len(self.rows)} rows and {len(self.shards)} shards for {size} rows over {shards} shards"
            )
        numbers = {host: number for number, host in enumerate(dict.fromkeys(self.shards)) if host is not None}
        homes = np.array([NOWHERE if host is None else numbers.get(host, NOWHERE) for host in self.rows], np.int64)
        hosts = np.array([NOWHERE - 1 if host is None else numbers[host] for host in self.shards], np.int64)
        return homes, hosts

    def sizes(self, size: int) -> Int64s:
        """Return the tokens of each row, or 1 per row if they are unknown."""
        return np.ones(size, np.int64) if self.lengths is None else np.asarray(self.lengths, np.int64)


def shards_of(dealt: Sequence[Sequence[int]], bins: int) -> Int64s:
    """Return the shard of each bin."""
    found = np.empty(bins, np.int64)
    for shard, numbers in enumerate(dealt):
        found[numbers] = shard
    return found


def exchange_bins(
    bins: Bins, loads: Int64s, dealt: list[list[int]], sizes: Int64s, homes: Int64s, hosts: Int64s
) -> None:
    """Swap pairs of bins between shards while a swap increases the tokens at home and no shard exceeds the initial
    maximum of tokens per shard. Changes `dealt`, the bins of each shard, in place."""
    if len(bins) > MOST_BINS or len(set(hosts.tolist())) < 2:
        return
    totals = np.array([int(loads[numbers].sum()) for numbers in dealt])
    most = int(totals.max(initial=0))
    shard_of = shards_of(dealt, len(bins))
    at_home = np.zeros((len(bins), int(hosts.max()) + 1), np.int64)  # [bin, host]: tokens of the bin stored on the host
    for number, rows in enumerate(bins):
        known = np.array(rows)[homes[rows] >= 0]
        np.add.at(at_home[number], homes[known], sizes[known])
    for _ in range(ROUNDS):
        if not _exchange_some(at_home, shard_of, loads, totals, hosts, most):
            break
    for shard in range(len(dealt)):
        dealt[shard] = np.flatnonzero(shard_of == shard).tolist()


def _exchange_some(at_home: Int64s, shard_of: Int64s, loads: Int64s, totals: Int64s, hosts: Int64s, most: int) -> bool:
    """Run one round, in which each bin moves at most once. Return whether any bins were swapped."""
    known = hosts >= 0
    # near[a, b]: tokens of bin a that are stored on the host of bin b's shard.
    near = np.where(known[shard_of][None, :], at_home[:, np.maximum(hosts[shard_of], 0)], 0)
    own = np.diagonal(near)
    gains = np.triu(near + near.T - own[:, None] - own[None, :], 1)
    ones, others = np.nonzero(gains > 0)
    changes = loads[ones] - loads[others]
    fit = (totals[shard_of[others]] + changes <= most) & (totals[shard_of[ones]] - changes <= most)
    ones, others = ones[fit], others[fit]
    order = np.argsort(-gains[ones, others], kind="stable")
    moved: set[int] = set()
    for one, other in zip(ones[order].tolist(), others[order].tolist(), strict=True):
        if one in moved or other in moved:
            continue
        here, there = int(shard_of[one]), int(shard_of[other])
        change = int(loads[one] - loads[other])
        if here == there or totals[there] + change > most or totals[here] - change > most:
            continue
        totals[there] += change
        totals[here] -= change
        shard_of[one], shard_of[other] = there, here
        moved |= {one, other}
    return bool(moved)


@dataclass(kw_only=True)
class Exchange:
    """Swaps single rows between bins so that more rows are at home. O(N log N).

    bins: rows of each bin, changed in place. shards: shard of each bin. kinds: a number per bin; only rows of bins with
    equal kinds are swapped. sizes: tokens of each row; homes: home of each row; hosts: host of each shard. capacity:
    maximum tokens per bin (None: unlimited). No shard exceeds the initial maximum of tokens per shard.
    """

    bins: Bins
    shards: Int64s
    kinds: Int64s
    sizes: Int64s
    homes: Int64s
    hosts: Int64s
    capacity: int | None = None

    def run(self) -> bool:
        """Swap rows while it helps, for at most `ROUNDS` rounds. Return whether any rows were swapped."""
        if len(set(self.hosts.tolist())) < 2:
            return False
        counts = np.fromiter(map(len, self.bins), np.int64, len(self.bins))
        self._rows = np.fromiter(chain.from_iterable(self.bins), np.int64, counts.sum())
        self._bin_of = np.repeat(np.arange(len(counts)), counts)
        self._host_of = self.hosts[self.shards[self._bin_of]]
        self._loads = np.bincount(self._bin_of, self.sizes[self._rows], len(counts)).astype(np.int64)
        self._totals = np.bincount(self.shards, self._loads, len(self.hosts)).astype(np.int64)
        self._most = int(self._totals.max())
        exchanged = False
        for _ in range(ROUNDS):
            away, found = self._round()
            exchanged |= found > 0
            if found <= away // MANY:
                break
        ends = np.cumsum(counts).tolist()
        for rows, (start, end) in zip(self.bins, pairwise([0, *ends]), strict=True):
            rows[:] = self._rows[start:end].tolist()
        return exchanged

    def loads(self) -> Int64s:
        """Return the tokens of each bin after `run`."""
        return self._loads

    def _round(self) -> tuple[int, int]:
        """Run one round. Return (number of rows that were away from home, number of swaps). The round first swaps pairs
        of rows that both get home, then rows that get home for rows that stay away."""
        homes, every = self.homes[self._rows], int(self.hosts.max()) + 1
        away = np.flatnonzero(homes != self._host_of)
        homes, here, kinds = homes[away], self._host_of[away], self.kinds[self._bin_of[away]]
        known, there = homes >= 0, here >= 0
        low, high = np.minimum(here, homes), np.maximum(here, homes)
        both = (kinds * every + low) * every + high
        up, down = known & there & (here < homes), known & there & (here > homes)
        moved = bytearray(len(self._rows))
        found = self._pair(away[up], both[up], away[down], both[down], moved)
        known &= ~np.frombuffer(moved, np.bool_)[away]
        there &= ~np.frombuffer(moved, np.bool_)[away]
        wanted, held = kinds * every + homes, kinds * every + here
        found += self._pair(away[known], wanted[known], away[there], held[there], moved)
        return len(away), found

    def _pair(self, ones: Int64s, groups: Int64s, others: Int64s, their_groups: Int64s, moved: bytearray) -> int:
        """Swap rows at the places `ones` with rows of similar length at `others` in the same group. Return the number
        of swaps. Places marked in `moved` are skipped."""
        nearest = [self._longer(ones, groups, others, their_groups), self._longer(others, their_groups, ones, groups)]
        pairs = np.concatenate(nearest)
        sizes = self.sizes[self._rows[pairs]]
        pairs = pairs[np.argsort(sizes[:, 1] - sizes[:, 0], kind="stable")]
        found = 0
        for one, other in pairs.tolist():
            if not (moved[one] or moved[other]) and self._exchanged(one, other):
                moved[one] = moved[other] = 1
                found += 1
        return found

    def _longer(self, ones: Int64s, groups: Int64s, others: Int64s, their_groups: Int64s) -> Int64s:
        """Pair each place of `ones` with a place of `others` in its group whose row is no shorter and fits. Return
        `[P, 2]`.

        The partner is the shortest such row or, with a capacity, the longest that needs at most 1 / `PART` of the free
        space. This spreads free space: many bins with some space are more useful than few bins with much."""
        if not len(ones) or not len(others):
            return np.zeros((0, 2), np.int64)
        sizes, theirs = self.sizes[self._rows[ones]], self.sizes[self._rows[others]]
        width = int(max(sizes.max(), theirs.max())) + 1
        keys = their_groups * width + theirs
        order = np.argsort(keys, kind="stable")
        bins = self._bin_of[ones]
        residual = self._most - self._totals[self.shards[bins]]
        longest = sizes
        if self.capacity is not None:
            residual = np.minimum(residual, self.capacity - self._loads[bins])
            longest = np.minimum(sizes + residual // PART, width - 1)
        places = np.searchsorted(keys[order], groups * width + sizes)
        places = np.maximum(places, np.searchsorted(keys[order], groups * width + longest, "right") - 1)
        near = order[np.minimum(places, len(order) - 1)]
        fit = (places < len(order)) & (their_groups[near] == groups) & (theirs[near] - sizes <= residual)
        return np.stack([ones[fit], others[near[fit]]], axis=1)

    def _exchanged(self, one: int, other: int) -> bool:
        """Swap the rows of two places unless a bin or shard would exceed its limit. Row `other` must be no shorter."""
        rows, loads, totals = self._rows, self._loads, self._totals
        change = self.sizes[rows[other]] - self.sizes[rows[one]]
        if change:
            mine, theirs = self._bin_of[one], self._bin_of[other]
            here, there = self.shards[mine], self.shards[theirs]
            if totals[here] + change > self._most and here != there:
                return False
            if self.capacity is not None and loads[mine] + change > self.capacity:
                return False
            loads[mine] += change
            loads[theirs] -= change
            totals[here] += change
            totals[there] -= change
        rows[one], rows[other] = rows[other], rows[one]
        return True
