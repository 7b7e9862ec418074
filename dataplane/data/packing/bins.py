"""Bin packing over integer lengths: every row goes into one bin, and no bin exceeds its capacity.

Each function takes lengths `[N]` of 0 to `capacity` and returns bins as non-empty lists of rows.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np
import numpy.typing as npt

from dataplane.core.types import ceil_div

Int64s = npt.NDArray[np.int64]
Bins = list[list[int]]
MOST_OPEN = 16
"""Number of open bins that first-fit searches linearly; the others are in a tree."""


def concatenate(lengths: Int64s, capacity: int) -> Bins:
    """Fill bins with rows in order and start a new bin when the next row does not fit. O(bins log N)."""
    ends = np.cumsum(lengths).tolist()
    bins: Bins = []
    start = before = 0  # first row of the next bin, sum of the lengths before it
    while start < len(ends):
        end = bisect_right(ends, before + capacity, start)
        bins.append(list(range(start, end)))
        start = end
        before = ends[end - 1]
    return bins


def first_fit(lengths: Int64s, order: Int64s, capacity: int) -> Bins:
    """Put each row of `order` into the first bin with space for it, else into a new one. O(N log bins)."""
    # A short list holds the open bins: the few bins with space for most rows. A tree holds the closed bins: those with
    # less space than `closing_residual`, which only the shortest 5 percent of the rows fit, and bins that do not fit
    # into the list.
    closing_residual = int(np.partition(lengths, len(lengths) // 20)[len(lengths) // 20])
    # First-fit leaves at most one bin half empty or more, which limits the number of bins.
    closed = _Residuals(min(len(order), 2 * int(lengths.sum()) // capacity + 2))
    largest_closed = -1  # the largest free space of a closed bin; -1: no bin is closed
    open_numbers: list[int] = []
    open_residuals: list[int] = []
    bin_of: list[int] = []  # for each row of `order`
    bin_count = 0
    for size in lengths[order].tolist():
        position = 0  # in the open bins: the first one with space, or their number
        for free in open_residuals:
            if free >= size:
                break
            position += 1
        if largest_closed >= size:
            number = closed.first(size)
            # The first bin with space is the one with the lower number, closed or open.
            if position == len(open_residuals) or number < open_numbers[position]:
                largest_closed = closed.take(number, size)
                bin_of.append(number)
                continue
        if position == len(open_residuals):
            open_numbers.append(bin_count)
            open_residuals.append(capacity)
            bin_count += 1
        bin_of.append(open_numbers[position])
        open_residuals[position] = residual = open_residuals[position] - size
        if position == MOST_OPEN:  # the list has grown too long: close its fullest bin
            position = open_residuals.index(min(open_residuals))
        elif residual >= closing_residual:  # the bin stays open
            continue
        largest_closed = closed.put(open_numbers.pop(position), open_residuals.pop(position))
    return _rows_by_bin(order, bin_of)


def first_fit_decreasing(lengths: Int64s, capacity: int) -> Bins:
    """Put rows, longest first (ties: lower row first), each into the first bin with space. O(N log N)."""
    bins: Bins = []
    _fill(lengths, np.arange(len(lengths)), capacity, bins, [])
    return bins


def modified_first_fit_decreasing(lengths: Int64s, capacity: int) -> Bins:
    """Pack with first-fit decreasing, or with its modification by Johnson and Garey (1985) if that needs fewer bins.

    The modification is tried only if first-fit decreasing exceeds the lower bound by more than 0.1 percent. It first
    adds to each bin with a row over half the capacity one row over a third, or two rows over a sixth. O(N log N)."""
    unmodified = first_fit_decreasing(lengths, capacity)
    if len(unmodified) * 1000 <= fewest_bins(lengths, capacity) * 1001:
        return unmodified
    bins, residuals, other_rows = _pair_large_rows(lengths, capacity)
    _fill(lengths, other_rows, capacity, bins, residuals)
    return bins if len(bins) < len(unmodified) else unmodified


def fewest_bins(lengths: Int64s, capacity: int) -> int:
    """Return a lower bound for the number of bins: the bound L2 of Martello and Toth (1990). O(N log N).

    For any k up to half the capacity: each row over `capacity - k` fills a bin alone. Every other row over half the
    capacity needs a separate bin. Rows from k to half the capacity use the space left in these bins, or more bins.
    """
    rising = _sort_by_length(lengths)[1]
    sums = np.concatenate([[0], np.cumsum(rising)])  # sums[i]: the sum of the i shortest lengths
    half = int(np.searchsorted(rising * 2, capacity, side="right"))  # the number of rows up to half the capacity
    # The bound is computed for every k at once. Below, each array has one element per k.
    smallest = np.concatenate([[0], rising[:half]])  # k
    first_of_k = np.searchsorted(rising, smallest)  # rows from here to `half` have a length of k or more
    first_alone = np.searchsorted(rising, capacity - smallest, side="right")  # rows from here on fill a bin alone
    # The free space beside the other rows over half the capacity, and the bins for the shorter rows that exceed it.
    residual = (first_alone - half) * capacity - (sums[first_alone] - sums[half])
    more_bins = np.maximum(ceil_div(sums[half] - sums[first_of_k] - residual, capacity), 0)
    return int((len(rising) - half + more_bins).max())


def loads_of(bins: Bins, lengths: Int64s) -> Int64s:
    """Return the sum of the lengths in each bin. There must be at least one bin, and none may be empty."""
    rows = np.fromiter(chain.from_iterable(bins), dtype=np.int64)
    sums: Int64s = np.add.reduceat(lengths[rows], [0, *accumulate(map(len, bins[:-1]))])
    return sums


def split(bins: Bins, lengths: Int64s, count: int) -> Bins:
    """Split `bins` into `count` bins, keeping the order of rows. There must be at least `count` rows.

    Each step cuts the fullest bin with two or more rows at the position where its two parts are most equal."""
    loads = loads_of(bins, lengths)
    missing = count - len(bins)
    # Only the fullest bins can be cut: at most one bin per cut.
    splittable = np.flatnonzero(np.fromiter(map(len, bins), dtype=np.int64) > 1)
    fullest = splittable[np.argsort(-loads[splittable], kind="stable")][:missing]
    # A piece is (negated tokens, bin number, first row, end row). The heap has the pieces of two or more rows.
    heap = [(-int(loads[number]), number, 0, len(bins[number])) for number in fullest.tolist()]
    cut_bins = {number for _, number, _, _ in heap}
    single_rows: list[tuple[int, int, int, int]] = []
    while missing:  # one cut each
        negated, number, start, end = heapq.heappop(heap)
        # left_sums[i]: the tokens of the left part if the cut is after row `start + i`.
        left_sums = list(accumulate(lengths[bins[number][start : end - 1]].tolist()))
        # `negated + 2 * left_sums[i]` is the tokens of the left part minus those of the right part.
        cut = min(range(len(left_sums)), key=lambda index: abs(negated + 2 * left_sums[index]))
        middle = start + cut + 1
        for piece in ((-left_sums[cut], number, start, middle), (negated + left_sums[cut], number, middle, end)):
            if piece[3] - piece[2] > 1:
                heapq.heappush(heap, piece)
            else:
                single_rows.append(piece)
        missing -= 1
    # Bins that were not cut are kept as they are.
    new_bins: dict[int, Bins] = {number: [] for number in cut_bins}
    for _, number, start, end in sorted(heap + single_rows, key=lambda piece: piece[2]):
        new_bins[number].append(bins[number][start:end])
    return [new_bin for number, rows in enumerate(bins) for new_bin in new_bins.get(number, [rows])]


class _Residuals:
    """Free space per bin, for bin numbers below `most_bins`. Finds the first bin with enough space in O(log bins)."""

    def __init__(self, most_bins: int) -> None:
        # A complete binary tree: node i has the children 2i and 2i + 1, the root is 1, and the leaves are the bins.
        self._leaves = 1
        while self._leaves < most_bins:
            self._leaves *= 2
        self._residual = [-1] * (2 * self._leaves)  # per node: the largest free space of a bin below it; -1: none

    def first(self, size: int) -> int:
        """Return the first bin with space for `size`. Such a bin must exist."""
        residual = self._residual
        node = 1
        leaves = self._leaves
        while node < leaves:
            node *= 2
            if residual[node] < size:  # not in the left child: in the right one
                node += 1
        return node - leaves

    def put(self, number: int, free: int) -> int:
        """Set the free space of bin `number`. Return the largest free space of any bin."""
        residual = self._residual
        node = number + self._leaves
        residual[node] = free
        while node > 1:
            sibling = residual[node ^ 1]
            if sibling > free:
                free = sibling  # from here on: the largest free space below the parent
            node //= 2
            if residual[node] == free:  # this node and all above it stay unchanged
                break
            residual[node] = free
        return residual[1]

    def take(self, number: int, size: int) -> int:
        """Subtract `size` from the free space of bin `number`. Return the largest free space of any bin."""
        return self.put(number, self._residual[number + self._leaves] - size)


def _rows_by_bin(order: Int64s, bin_of: Sequence[int]) -> Bins:
    """Return the rows of each bin. `bin_of[i]` is the bin of row `order[i]`; no bin is empty."""
    numbers = np.array(bin_of)
    counts = np.bincount(numbers)  # rows of each bin
    rows = order[_sort_by_length(numbers)[0]].tolist()  # sorted by bin number, rows of one bin in their order
    return [rows[start:end] for start, end in pairwise([0, *np.cumsum(counts).tolist()])]


def _fill(lengths: Int64s, rows: Int64s, capacity: int, bins: Bins, residuals: list[int]) -> None:
    """Pack `rows` first-fit decreasing into `bins` with free space `residuals`, and into new bins as needed. In place.

    The loop fills one bin at a time with the longest row that fits. The result equals row-by-row first-fit, because a
    row that does not fit a bin cannot fit it later. Rows of one length form a class, found by bisection. Classes count
    from 1, the shortest. `below[c]` leads from an exhausted class to the next shorter one (a disjoint-set forest; 0
    means that no class is left).
    """
    positions, rising = _sort_by_length(lengths[rows])
    order = rows[positions]
    values, starts = np.unique(rising, return_index=True)
    # Of class c: `sizes[c - 1]` is the length, and the rows left are those from `nexts[c - 1]` to `ends[c - 1]`.
    sizes = values.tolist()
    nexts = starts.tolist()
    ends = [*nexts[1:], len(order)]
    ordered = order.tolist()
    below = list(range(len(sizes) + 1))
    rows_left, number = len(ordered), 0  # number: the current bin
    while rows_left:
        if number == len(bins):
            bins.append([])
            residuals.append(capacity)
        residual = residuals[number]
        target = bins[number]
        row_class = len(sizes)
        while True:  # one class after another, until none has a row that fits
            row_class = bisect_right(sizes, residual, 0, row_class)  # the class of the longest rows that can fit
            # Follow `below` to a class with rows left, and shorten the path for later searches. (The assignment goes
            # from left to right, so the left `row_class` is still the old one.)
            while below[row_class] != row_class:
                below[row_class] = row_class = below[below[row_class]]
            if not row_class:
                break
            # Take as many rows of the class as fit, or all that are left.
            size = sizes[row_class - 1]
            start = nexts[row_class - 1]
            end = ends[row_class - 1]
            if size:  # rows of length 0 all fit
                fitting = start + residual // size
                if fitting < end:
                    end = fitting
                residual -= size * (end - start)
            target += ordered[start:end]
            rows_left -= end - start
            nexts[row_class - 1] = end
            if end == ends[row_class - 1]:
                below[row_class] = row_class - 1
        residuals[number] = residual
        number += 1


def _pair_large_rows(lengths: Int64s, capacity: int) -> tuple[Bins, list[int], Int64s]:
    """Run phases 1 to 3 of the method of Johnson and Garey. Return (a bin for each row over half the capacity, longest
    first, including the rows that phases 2 and 3 add; the free space of each bin; all other rows)."""
    rising, rising_lengths = _sort_by_length(lengths)
    # The numbers of rows of up to a sixth, a third and half of the capacity.
    sixth, third, half = np.searchsorted(rising_lengths * 6, [capacity, 2 * capacity, 3 * capacity], side="right")
    large = rising[half:][::-1]
    bins = [[row] for row in large.tolist()]
    residuals = (capacity - lengths[large]).tolist()
    sizes = lengths.tolist()
    added: list[int] = []

    def add(number: int, row: int) -> None:
        """Add the row to bin `number`."""
        bins[number].append(row)
        residuals[number] -= sizes[row]
        added.append(row)

    # Phase 2: add one row over a third to each bin, the longest that fits. Free space grows from bin to bin: a row that
    # fits one bin fits all later bins, and the last row of `fitting` is the longest.
    fitting: list[int] = []
    candidates = iter(rising[third:half].tolist())
    candidate = next(candidates, None)
    for number in range(len(bins)):
        while candidate is not None and sizes[candidate] <= residuals[number]:
            fitting.append(candidate)
            candidate = next(candidates, None)
        if fitting:
            add(number, fitting.pop())
    # Phase 3: add two rows over a sixth to each other bin: the shortest, and the longest that fits beside it. In
    # reverse order free space shrinks: a row that is too long next to the shortest row stays too long.
    small = rising[sixth:third].tolist()
    low = 0
    high = len(small) - 1
    for number in range(len(bins) - 1, -1, -1):
        if len(bins[number]) > 1:
            continue
        if low >= high or sizes[small[low]] + sizes[small[low + 1]] > residuals[number]:
            break
        add(number, small[low])
        low += 1
        while sizes[small[high]] > residuals[number]:  # ends at `low` at the latest, whose row fits
            high -= 1
        add(number, small[high])
        high -= 1
    is_other = np.ones(len(lengths), dtype=np.bool_)
    is_other[large] = is_other[added] = False
    return bins, residuals, np.flatnonzero(is_other)


def _sort_by_length(lengths: Int64s) -> tuple[Int64s, Int64s]:
    """Return (rows from the shortest to the longest, ties in row order; their lengths)."""
    short = not len(lengths) or int(lengths.max()) < 1 << 16  # all lengths fit 16 bits
    rows = np.argsort(lengths.astype(np.uint16) if short else lengths, kind="stable")  # numpy sorts 16 bits by radix
    return rows, lengths[rows]
