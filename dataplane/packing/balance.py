"""Bins to data-parallel ranks: each the same number, with about the same tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from dataplane.packing.bins import Bins, Int64s, concatenate, loads_of, split
from dataplane.packing.packers import SequencePacker

CLOSE_ENOUGH = 1.01
"""The heaviest rank's tokens over the mean, at which nothing more is moved."""
MOVES_PER_RANK = 8


def deal(loads: Int64s, ranks: int) -> list[list[int]]:
    """The bins of each rank, their numbers rising. `loads` `[B]` are the bins' tokens, B a multiple of `ranks`.

    Round by round, from the heaviest bins down, the rank with the fewest tokens so far gets the heaviest of the round.
    """
    rounds = np.argsort(-loads, kind="stable").reshape(-1, ranks).tolist()
    tokens = loads.tolist()
    totals = [0] * ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for bins in rounds:
        for rank, number in zip(sorted(range(ranks), key=totals.__getitem__), bins, strict=True):
            dealt[rank].append(number)
            totals[rank] += tokens[number]
    return [sorted(numbers) for numbers in dealt]


def balanced(packer: SequencePacker, tokens: Int64s, ranks: int) -> tuple[Bins, Int64s, list[list[int]]]:
    """(bins of the rows, whose tokens are `tokens` `[N]`, N at least 1; the tokens of each bin; the bins of each rank).

    `packer` gives a multiple of `ranks` of bins. Dealing evens out many bins a rank; where it does not, single rows
    move, or runs of neighbours are cut anew.
    """
    bins = packer.pack(tokens)
    loads = loads_of(bins, tokens)
    dealt = deal(loads, ranks)
    totals = _totals(loads, dealt)
    if max(totals) * ranks > CLOSE_ENOUGH * sum(totals):
        if packer.keeps_order:
            bins = even_runs(tokens, len(bins))
            loads = loads_of(bins, tokens)
            dealt = deal(loads, ranks)
        else:
            level(bins, loads, dealt, tokens.tolist(), packer.bin_capacity)
    return bins, loads, dealt


def even_runs(tokens: Int64s, count: int) -> Bins:
    """`count` bins of neighbouring rows, the fullest one as empty as can be."""
    low = max(int(tokens.max()), -(-int(tokens.sum()) // count), 1)
    capacities = range(low, int(tokens.sum()) + 1)
    enough = bisect_left(capacities, True, key=lambda capacity: len(concatenate(tokens, capacity)) <= count)
    return split(concatenate(tokens, low + enough), tokens, count)


def level(bins: Bins, loads: Int64s, dealt: Sequence[Sequence[int]], sizes: Sequence[int], capacity: int) -> None:
    """Moves single rows from the heaviest rank to the lightest, in place (`bins` and `loads`), until the ranks are
    close, or nothing that helps fits. No bin is emptied, none exceeds `capacity`; `sizes` are the rows' tokens."""
    totals = _totals(loads, dealt)
    for _ in range(MOVES_PER_RANK * len(totals)):
        heavy, light = totals.index(max(totals)), totals.index(min(totals))
        if totals[heavy] * len(totals) <= CLOSE_ENOUGH * sum(totals):
            return
        gap = totals[heavy] - totals[light]
        into = min(dealt[light], key=loads.__getitem__)
        longest = min(capacity - int(loads[into]), gap - 1)
        movable = [
            (abs(gap - 2 * sizes[row]), number, place)
            for number in dealt[heavy]
            if len(bins[number]) > 1
            for place, row in enumerate(bins[number])
            if 0 < sizes[row] <= longest
        ]
        if not movable:
            return
        _, out_of, place = min(movable)
        row = bins[out_of].pop(place)
        bins[into].append(row)
        for number, rank, change in ((out_of, heavy, -sizes[row]), (into, light, sizes[row])):
            loads[number] += change
            totals[rank] += change


def _totals(loads: Int64s, dealt: Sequence[Sequence[int]]) -> list[int]:
    return [int(loads[numbers].sum()) for numbers in dealt]
