"""Assignment of bins to data-parallel ranks: equal numbers of bins, about equal numbers of tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dataplane.core.types import ceil_div
from dataplane.data.packing.bins import Bins, Int64s, concatenate, loads_of, split
from dataplane.data.packing.packers import SequencePacker

CLOSE_ENOUGH = 1.01
"""Balancing stops when the heaviest rank has at most this many times the mean number of tokens."""
MOVES_PER_RANK = 8
MOST_EXCHANGED = 256
"""With more runs than this, runs do not change ranks during balancing, because every pair of runs is compared."""


def deal(loads: Int64s, ranks: int) -> list[list[int]]:
    """Return the bin numbers of each rank, ascending. `loads` `[B]` are tokens per bin, B a multiple of `ranks`.

    Each round deals one bin to every rank, from the heaviest bins down. Within a round, the rank with the fewest tokens
    so far gets the heaviest bin.
    """
    rounds = np.argsort(-loads, kind="stable").reshape(-1, ranks).tolist()
    bin_tokens = loads.tolist()
    rank_tokens = [0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for round_bins in rounds:
        lightest_first = sorted(range(ranks), key=rank_tokens.__getitem__)
        for rank, bin_number in zip(lightest_first, round_bins, strict=True):
            dealt[rank].append(bin_number)
            rank_tokens[rank] += bin_tokens[bin_number]
    return [sorted(bin_numbers) for bin_numbers in dealt]


def pack_balanced(packer: SequencePacker, tokens: Int64s, ranks: int) -> tuple[Bins, Int64s, list[list[int]]]:
    """Pack and balance rows of `tokens` `[N]`, N >= 1. Return (bins, tokens of each bin, bins of each rank).

    The number of bins that `packer` returns must be a multiple of `ranks`. If `deal` leaves the ranks unbalanced, as
    with few bins, single rows move, or for an order-preserving packer the bin boundaries are recomputed.
    """
    bins = packer.pack(tokens)
    loads = loads_of(bins, tokens)
    dealt = deal(loads, ranks)
    totals = _rank_totals(loads, dealt)
    if max(totals) * ranks > CLOSE_ENOUGH * sum(totals):
        if packer.keeps_order:
            bins, loads, dealt = even_shares(even_runs(tokens, len(bins)), tokens, ranks, packer.bin_capacity)
        else:
            level_ranks(bins, loads, dealt, tokens.tolist(), packer.bin_capacity)  # changes `bins` and `loads`
    return bins, loads, dealt


def even_runs(tokens: Int64s, count: int) -> Bins:
    """Cut the rows into `count` bins of consecutive rows so that the fullest bin has the fewest possible tokens."""
    lowest = max(int(tokens.max()), ceil_div(int(tokens.sum()), count), 1)  # no lower capacity can be enough
    capacities = range(lowest, int(tokens.sum()) + 1)
    # Find the smallest capacity for which `count` bins are enough, by bisection: the key is False below it, then True.
    position = bisect_left(capacities, True, key=lambda capacity: len(concatenate(tokens, capacity)) <= count)
    return split(concatenate(tokens, lowest + position), tokens, count)


def even_shares(runs: Bins, tokens: Int64s, ranks: int, capacity: int) -> tuple[Bins, Int64s, list[list[int]]]:
    """Balance runs of consecutive rows over ranks. Return (the new runs, their tokens, the runs of each rank).

    The runs are dealt to ranks, then balanced in steps until the ranks are close or no step helps. A step moves the row
    at an end of a run to the adjacent run, or swaps two runs between ranks, whichever reduces the imbalance most. The
    number of runs stays the same, no run becomes empty, and none exceeds `capacity`.
    """
    # For each run: its number of rows, its tokens and its rank.
    counts = np.array([len(rows) for rows in runs])
    loads = loads_of(runs, tokens)
    rank_of = np.empty(len(runs), dtype=np.int64)
    for rank, numbers in enumerate(deal(loads, ranks)):
        rank_of[numbers] = rank
    for _ in range(MOVES_PER_RANK * ranks):
        totals = np.zeros(ranks, dtype=np.int64)
        np.add.at(totals, rank_of, loads)
        if totals.max() * ranks <= CLOSE_ENOUGH * totals.sum():
            break
        # Three kinds of steps; each array has the gain of each possible step, 0 if it is not allowed.
        total_of = totals[rank_of]  # for each run: the tokens of its rank
        starts = np.cumsum(counts)[:-1]  # the first row of each run except the first run
        # Cut i is between run i and run i + 1. Move the last row of run i to the right, to the next run, ...
        right_gains = _gains(tokens[starts - 1], total_of[:-1] - total_of[1:])
        # (Not allowed if run i would become empty, or run i + 1 too full.)
        right_gains[(counts[:-1] == 1) | (loads[1:] + tokens[starts - 1] > capacity)] = 0
        # ... or the first row of run i + 1 to the left, ...
        left_gains = _gains(tokens[starts], total_of[1:] - total_of[:-1])
        left_gains[(counts[1:] == 1) | (loads[:-1] + tokens[starts] > capacity)] = 0
        # ... or swap the ranks of two runs (a matrix of all pairs of runs; empty if there are too many).
        compared = slice(0, len(runs) if len(runs) <= MOST_EXCHANGED else 0)
        swap_gains = _gains(
            loads[compared, None] - loads[None, compared], total_of[compared, None] - total_of[None, compared]
        )
        best = max(right_gains.max(initial=0), left_gains.max(initial=0), swap_gains.max(initial=0))
        if best <= 0:
            break
        if best == swap_gains.max(initial=0):
            one, other = divmod(int(swap_gains.argmax()), len(runs))  # row and column
            rank_of[one], rank_of[other] = rank_of[other], rank_of[one]
            continue
        to_right = best == right_gains.max(initial=0)
        cut = int((right_gains if to_right else left_gains).argmax())
        row = starts[cut] - 1 if to_right else starts[cut]
        change = np.array([-1, 1]) if to_right else np.array([1, -1])
        counts[cut : cut + 2] += change
        loads[cut : cut + 2] += change * tokens[row]
    ends = np.cumsum(counts).tolist()
    bins = [list(range(start, end)) for start, end in pairwise([0, *ends])]
    return bins, loads, [np.flatnonzero(rank_of == rank).tolist() for rank in range(ranks)]


def _gains(moved: Int64s, gaps: Int64s) -> Int64s:
    """Return half the decrease of the sum of squared rank totals if `moved` tokens move to a rank that has `gaps` fewer
    tokens. A positive value means that the larger total of the two ranks decreases."""
    return moved * (gaps - moved)


def level_ranks(bins: Bins, loads: Int64s, dealt: Sequence[Sequence[int]], sizes: Sequence[int], capacity: int) -> None:
    """Move single rows from the heaviest rank to the lightest, in place (`bins` and `loads`), until the ranks are close
    or no row that helps fits. No bin becomes empty, none exceeds `capacity`. dealt: the bins of each rank; sizes: the
    tokens of each row."""
    totals = _rank_totals(loads, dealt)
    for _ in range(MOVES_PER_RANK * len(totals)):
        heavy = totals.index(max(totals))
        light = totals.index(min(totals))
        if totals[heavy] * len(totals) <= CLOSE_ENOUGH * sum(totals):
            return
        gap = totals[heavy] - totals[light]
        target = min(dealt[light], key=loads.__getitem__)  # its bin with the fewest tokens
        longest = min(capacity - int(loads[target]), gap - 1)  # a longer row does not fit, or does not reduce the gap
        # (remaining gap, bin, position of the row in the bin)
        candidates = [
            (abs(gap - 2 * sizes[row]), number, position)
            for number in dealt[heavy]
            if len(bins[number]) > 1
            for position, row in enumerate(bins[number])
            if 0 < sizes[row] <= longest
        ]
        if not candidates:
            return
        _, source, position = min(candidates)
        row = bins[source].pop(position)
        bins[target].append(row)
        for number, rank, change in ((source, heavy, -sizes[row]), (target, light, sizes[row])):
            loads[number] += change
            totals[rank] += change


def _rank_totals(loads: Int64s, dealt: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens of each rank."""
    return [int(loads[numbers].sum()) for numbers in dealt]
