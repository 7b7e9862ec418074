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
FEW_SWAPS = 1 << 10
"""Another round follows if the last one exchanged more than 1 in this many of the rows away from home."""
SPACE_SHARE = 4
"""One exchange uses at most this fraction (1 / SPACE_SHARE) of the free space of a bin."""
MOST_BINS = 512
"""With more bins than this, whole bins are not exchanged, because every pair of bins is compared."""


@dataclass(frozen=True, kw_only=True)
class Locality:
    """Hosts of rows and shards. rows: the host that stores each row, `[N]`; shards: the host of each shard; None if
    unknown. lengths: tokens of each row, `[N]`, used as the weight of its locality; None if unknown."""

    rows: Sequence[str | None]
    shards: Sequence[str | None]
    lengths: Sequence[int] | Int64s | None = None

    def number_hosts(self, size: int, shards: int) -> tuple[Int64s, Int64s]:
        """Return (home of each row, host of each shard) as numbers: the home of a row is the number of the host that
        stores it, or `NOWHERE`. Unknown hosts of shards match no row. Raises ValueError unless `size` and `shards`
        match the numbers of rows and shards."""
        if len(self.rows) != size or len(self.shards) != shards:
            raise InvalidRequestError(
                f"row_hosts has {len(self.rows)} entries and rank_hosts {len(self.shards)}; expected {size}, one per "
                f"sample, and {shards}, one per shard"
            )
        numbers = {host: number for number, host in enumerate(dict.fromkeys(self.shards)) if host is not None}
        homes = np.array([NOWHERE if host is None else numbers.get(host, NOWHERE) for host in self.rows], np.int64)
        # Another number than `NOWHERE`, so that an unknown host equals no home.
        hosts = np.array([NOWHERE - 1 if host is None else numbers[host] for host in self.shards], np.int64)
        return homes, hosts

    def sizes(self, size: int) -> Int64s:
        """Return the tokens of each row, or 1 per row if they are unknown."""
        return np.ones(size, np.int64) if self.lengths is None else np.asarray(self.lengths, np.int64)


def shards_of(dealt: Sequence[Sequence[int]], bins: int) -> Int64s:
    """Return the shard of each of `bins` bins. dealt: the bins of each shard."""
    shard_of = np.empty(bins, np.int64)
    for shard, numbers in enumerate(dealt):
        shard_of[numbers] = shard
    return shard_of


def exchange_bins(
    bins: Bins, loads: Int64s, dealt: list[list[int]], sizes: Int64s, homes: Int64s, hosts: Int64s
) -> None:
    """Swap pairs of bins between shards, in at most `ROUNDS` rounds, while a swap increases the tokens at home and no
    shard exceeds the initial maximum of tokens per shard. Changes `dealt`, the bins of each shard, in place.

    bins: the rows of each bin. loads: the tokens of each bin. sizes: the tokens of each row. homes, hosts: see
    `Locality.number_hosts`.
    """
    if len(bins) > MOST_BINS or len(set(hosts.tolist())) < 2:  # with one host, no swap changes the tokens at home
        return
    totals = np.array([int(loads[numbers].sum()) for numbers in dealt])
    most = int(totals.max(initial=0))
    shard_of = shards_of(dealt, len(bins))
    at_home = np.zeros((len(bins), int(hosts.max()) + 1), np.int64)  # [bin, host]: tokens of the bin stored on the host
    for number, rows in enumerate(bins):
        known = np.array(rows)[homes[rows] >= 0]  # rows with a known home
        np.add.at(at_home[number], homes[known], sizes[known])
    for _ in range(ROUNDS):
        if not _run_bin_round(at_home, shard_of, loads, totals, hosts, most):
            break
    for shard in range(len(dealt)):
        dealt[shard] = np.flatnonzero(shard_of == shard).tolist()


def _run_bin_round(at_home: Int64s, shard_of: Int64s, loads: Int64s, totals: Int64s, hosts: Int64s, most: int) -> bool:
    """Run one round of `exchange_bins`, in which each bin is swapped at most once. Return whether any were swapped.
    Changes `shard_of` (the shard of each bin) and `totals` (tokens per shard) in place. most: maximum of `totals`."""
    known = hosts >= 0  # per shard
    # near[a, b]: tokens of bin a that are stored on the host of bin b's shard.
    # (For an unknown host, `at_home` is read at host 0, and the value is replaced by 0.)
    near = np.where(known[shard_of][None, :], at_home[:, np.maximum(hosts[shard_of], 0)], 0)
    now = np.diagonal(near)  # tokens of each bin that are at home now
    # gains[a, b], a < b: how many more tokens are at home after bins a and b were swapped.
    gains = np.triu(near + near.T - now[:, None] - now[None, :], 1)
    ones, others = np.nonzero(gains > 0)
    changes = loads[ones] - loads[others]
    fit = (totals[shard_of[others]] + changes <= most) & (totals[shard_of[ones]] - changes <= most)
    ones, others = ones[fit], others[fit]
    order = np.argsort(-gains[ones, others], kind="stable")  # the largest gain first
    moved: set[int] = set()
    for one, other in zip(ones[order].tolist(), others[order].tolist(), strict=True):
        if one in moved or other in moved:
            continue
        # Check again: earlier swaps of this round have changed the totals, and can have put both bins in one shard.
        one_shard, other_shard = int(shard_of[one]), int(shard_of[other])
        change = int(loads[one] - loads[other])
        if one_shard == other_shard or totals[other_shard] + change > most or totals[one_shard] - change > most:
            continue
        totals[other_shard] += change
        totals[one_shard] -= change
        shard_of[one], shard_of[other] = other_shard, one_shard
        moved |= {one, other}
    return bool(moved)


@dataclass(kw_only=True)
class Exchange:
    """Swaps single rows between bins so that more rows are at home. O(N log N).

    bins: rows of each bin, changed in place. shards: shard of each bin. kinds: a number per bin; only rows of bins with
    equal kinds are swapped. sizes: tokens of each row; homes: home of each row; hosts: host of each shard. capacity:
    maximum tokens per bin (None: unlimited). No shard exceeds the initial maximum of tokens per shard.

    `run` sets the private attributes. A slot is a position in the concatenated bins. Slots stay; the rows in them are
    swapped. _rows, _bin_of, _host_of: of each slot, its row, its bin, and the host of its bin's shard. _loads: tokens
    per bin. _totals: tokens per shard. _most: the limit of `_totals`.
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
        if len(set(self.hosts.tolist())) < 2:  # with one host, no swap brings a row home
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
            away, swaps = self._run_round()
            exchanged |= swaps > 0
            if swaps <= away // FEW_SWAPS:  # too few for another round
                break
        ends = np.cumsum(counts).tolist()
        for rows, (start, end) in zip(self.bins, pairwise([0, *ends]), strict=True):
            rows[:] = self._rows[start:end].tolist()
        return exchanged

    def loads(self) -> Int64s:
        """Return the tokens of each bin after a `run` that returned True."""
        return self._loads

    def _run_round(self) -> tuple[int, int]:
        """Run one round. Return (number of rows that were away from home, number of swaps). The round first swaps pairs
        of rows that both get home, then rows that get home for rows that stay away."""
        homes, host_count = self.homes[self._rows], int(self.hosts.max()) + 1
        away = np.flatnonzero(homes != self._host_of)  # slots
        # From here on, one element per slot of `away`: home of the row, host and kind of the slot's bin.
        homes, slot_hosts, kinds = homes[away], self._host_of[away], self.kinds[self._bin_of[away]]
        home_known, host_known = homes >= 0, slot_hosts >= 0
        moved = bytearray(len(self._rows))  # per slot: 1 once its row was swapped in this round
        # First pairs of rows, each of which is on the home of the other: a group is a pair of hosts, within a kind.
        low, high = np.minimum(slot_hosts, homes), np.maximum(slot_hosts, homes)
        both_hosts = (kinds * host_count + low) * host_count + high
        # up: rows whose home has a higher number than their host; down: a lower one. Pairs have one row of each.
        up = home_known & host_known & (slot_hosts < homes)
        down = home_known & host_known & (slot_hosts > homes)
        swaps = self._swap_pairs(away[up], both_hosts[up], away[down], both_hosts[down], moved)
        # Then rows not swapped yet, each with a row on its home that is away from home too: a group is a host, within
        # a kind.
        home_known &= ~np.frombuffer(moved, np.bool_)[away]
        host_known &= ~np.frombuffer(moved, np.bool_)[away]
        home_groups, host_groups = kinds * host_count + homes, kinds * host_count + slot_hosts
        swaps += self._swap_pairs(
            away[home_known], home_groups[home_known], away[host_known], host_groups[host_known], moved
        )
        return len(away), swaps

    def _swap_pairs(self, ones: Int64s, groups: Int64s, others: Int64s, other_groups: Int64s, moved: bytearray) -> int:
        """Swap rows in the slots `ones` with rows of similar length in the slots `others` of the same group. Return the
        number of swaps. groups, other_groups: a number per slot of `ones` and of `others`; slots with equal numbers are
        of one group. Slots marked in `moved` are skipped, and the swapped ones are marked."""
        # (slot of the shorter row, slot of the longer one); the shorter row can be in `ones` or in `others`.
        pairs = np.concatenate(
            [
                self._find_longer_partners(ones, groups, others, other_groups),
                self._find_longer_partners(others, other_groups, ones, groups),
            ]
        )
        sizes = self.sizes[self._rows[pairs]]
        pairs = pairs[np.argsort(sizes[:, 1] - sizes[:, 0], kind="stable")]  # the most similar lengths first
        swaps = 0
        for shorter, longer in pairs.tolist():
            if not (moved[shorter] or moved[longer]) and self._swap_rows(shorter, longer):
                moved[shorter] = moved[longer] = 1
                swaps += 1
        return swaps

    def _find_longer_partners(self, ones: Int64s, groups: Int64s, others: Int64s, other_groups: Int64s) -> Int64s:
        """Pair each slot of `ones` with a slot of `others` in its group whose row is no shorter and fits. Return
        `[P, 2]`. groups, other_groups: the group of each slot of `ones` and of `others`.

        The partner is the shortest such row or, with a capacity, the longest that needs at most 1 / `SPACE_SHARE` of
        the free space. This spreads free space: many bins with some space are more useful than few bins with much."""
        if not len(ones) or not len(others):
            return np.zeros((0, 2), np.int64)
        sizes, other_sizes = self.sizes[self._rows[ones]], self.sizes[self._rows[others]]
        # One key for (group, length), so that a single binary search finds the partners of all slots.
        width = int(max(sizes.max(), other_sizes.max())) + 1
        keys = other_groups * width + other_sizes
        order = np.argsort(keys, kind="stable")
        bins = self._bin_of[ones]
        residual = self._most - self._totals[self.shards[bins]]  # how much longer a partner's row may be
        longest = sizes  # the longest row to look for
        if self.capacity is not None:
            residual = np.minimum(residual, self.capacity - self._loads[bins])
            longest = np.minimum(sizes + residual // SPACE_SHARE, width - 1)
        # The first row that is no shorter or, if that is later, the last row of up to `longest`.
        found = np.searchsorted(keys[order], groups * width + sizes)
        found = np.maximum(found, np.searchsorted(keys[order], groups * width + longest, "right") - 1)
        # `found` is `len(order)` if no key is large enough; such a slot gets any partner here, and `fit` excludes it.
        partners = order[np.minimum(found, len(order) - 1)]
        fit = (found < len(order)) & (other_groups[partners] == groups) & (other_sizes[partners] - sizes <= residual)
        return np.stack([ones[fit], others[partners[fit]]], axis=1)

    def _swap_rows(self, one: int, other: int) -> bool:
        """Swap the rows of two slots, unless a bin or shard would exceed its limit: then return False. The row in
        `other` must be no shorter than that in `one`."""
        rows, loads, totals = self._rows, self._loads, self._totals
        change = self.sizes[rows[other]] - self.sizes[rows[one]]
        if change:  # rows of equal length change no load and no total
            one_bin, other_bin = self._bin_of[one], self._bin_of[other]
            one_shard, other_shard = self.shards[one_bin], self.shards[other_bin]
            if totals[one_shard] + change > self._most and one_shard != other_shard:
                return False
            if self.capacity is not None and loads[one_bin] + change > self.capacity:
                return False
            loads[one_bin] += change
            loads[other_bin] -= change
            totals[one_shard] += change
            totals[other_shard] -= change
        rows[one], rows[other] = rows[other], rows[one]
        return True
