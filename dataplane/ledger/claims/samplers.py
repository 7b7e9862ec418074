"""Named strategies of a claim: which claimable samples it takes, and which rank gets which of them.

Pure functions over arrays. Picking groups the candidates, in the claim's order, into units that are never split (single
samples, or groups). Dealing assigns each unit to a rank; the ranks' numbers of units differ by at most one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.ledger.state.arrays import Bools, Int64s, every

Float64s = npt.NDArray[np.float64]


class Picked(NamedTuple):
    """Candidates picked for a claim. `positions` are positions among the candidates. `units` is the unit of each (a
    single sample or a group, which is never split): 0, 1, ... ascending."""

    positions: Int64s
    units: Int64s

    @property
    def amount(self) -> int:
        """The number of units."""
        return int(self.units[-1]) + 1 if len(self.units) else 0

    def first(self, units: int) -> Picked:
        """Return only the first `units` units."""
        stop = int(np.searchsorted(self.units, units))
        return Picked(self.positions[:stop], self.units[:stop])


def single(count: int) -> Picked:
    """Make each of `count` candidates a unit, in their order."""
    positions = np.arange(count)
    return Picked(positions, positions)


def whole_groups(groups: Int64s, size: int, wanted: int, released: Bools | None = None) -> Picked:
    """Pick the first `wanted` (or fewer) groups that have `size` candidates, each with its first `size`. Groups are
    ordered by their first candidate. `groups[i]` is the group of candidate i, numbered by first appearance (-1: no
    group). A group in which `released` is true for a candidate counts as whole, with the candidates that it has."""
    order = np.argsort(groups, kind="stable")
    order = order[np.searchsorted(groups[order], 0) :]  # without the candidates of no group
    if not len(order):
        return Picked(order, order)
    ordered = groups[order]
    counts = np.bincount(ordered)
    starts = np.cumsum(counts) - counts
    within = np.arange(len(ordered)) - starts[ordered]  # number of the candidate within its group
    whole = counts >= size
    if released is not None:
        whole |= np.bincount(ordered[released[order]], minlength=len(counts)) > 0
    unit_of = np.cumsum(whole) - 1  # by group; valid for whole groups
    taken = whole[ordered] & (within < size) & (unit_of[ordered] < wanted)
    return Picked(order[taken], unit_of[ordered[taken]])


def runs(units: int, ranks: int, weights: Float64s | None = None) -> Int64s:
    """Return the rank of each unit: rank 0 gets the first units, rank 1 the next, and so on. Lower ranks get the
    remainder. `weights` have no effect."""
    counts = np.full(ranks, units // ranks)
    counts[: units % ranks] += 1
    return np.repeat(np.arange(ranks), counts)


def turns(units: int, ranks: int, weights: Float64s | None = None) -> Int64s:
    """Return the rank of each unit in round-robin order, so that early and late units are spread evenly. `weights` have
    no effect."""
    return np.arange(units) % ranks


def balanced(units: int, ranks: int, weights: Float64s | None = None) -> Int64s:
    """Return the rank of each unit so that the ranks' sums of `weights` are about equal; `runs` without weights.

    The heaviest units go first, each to the rank with the smallest sum that still has space for a unit.
    """
    if weights is None:
        return runs(units, ranks)
    # Each rank gets `full` units, and `extras` of the ranks get one more.
    full, extras = divmod(units, ranks)
    counts = [0] * ranks
    sums = [(0.0, rank) for rank in range(ranks)]  # a heap: the smallest sum first
    result = np.zeros(units, np.int64)
    for unit in np.argsort(-weights, kind="stable").tolist():
        smallest_sum, rank = heapq.heappop(sums)
        while counts[rank] >= full + (extras > 0):  # the rank is complete: do not put it back
            smallest_sum, rank = heapq.heappop(sums)
        if counts[rank] == full:
            extras -= 1
        counts[rank] += 1
        result[unit] = rank
        heapq.heappush(sums, (smallest_sum + float(weights[unit]), rank))
    return result


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A strategy. deal(units, ranks, weights): returns the rank of each unit. grouped: it takes whole groups only.
    alone: it takes no groups. If neither is set, the claim decides. shared: it deals to ranks, so the claim must name
    them."""

    deal: Callable[[int, int, Float64s | None], Int64s]
    grouped: bool = False
    alone: bool = False
    shared: bool = False


SAMPLERS: dict[str, Sampler] = {
    "sequential": Sampler(deal=runs, alone=True),
    "group-n": Sampler(deal=runs, grouped=True),
    "length-balanced": Sampler(deal=balanced, shared=True),
    "rank-aware": Sampler(deal=turns, shared=True),
}


def default(*, grouped: bool, shared: bool) -> str:
    """Return the strategy of a claim that names none."""
    if shared:
        return "length-balanced"
    return "group-n" if grouped else "sequential"


def shares(sampler: str, picked: Picked, ranks: int, lengths: Float64s | None) -> Int64s:
    """Return the rank of each picked candidate. `lengths` are those of the picked candidates (None: unknown for some);
    lengths that are not finite count as unknown. The weight of a group is the sum of its members' lengths."""
    weights: Float64s | None = None  # by unit
    if lengths is not None and every(np.isfinite(lengths)):
        weights = np.bincount(picked.units, weights=lengths, minlength=picked.amount).astype(np.float64)
    rank_of_unit = SAMPLERS[sampler].deal(picked.amount, ranks, weights)
    rank_of_candidate: Int64s = rank_of_unit[picked.units]
    return rank_of_candidate
