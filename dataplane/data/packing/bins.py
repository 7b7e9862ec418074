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

Int64s = npt.NDArray[np.int64]
Bins = list[list[int]]
MOST_OPEN = 16
"""Number of open bins that first-fit searches linearly; the others are in a tree."""


def concatenate(lengths: Int64s, capacity: int) -> Bins:
    """Fill bins with rows in order and start a new bin when the next row does not fit. O(bins log N)."""
    ends = np.cumsum(lengths).tolist()
    bins: Bins = []
    start = before = 0
    while start < len(ends):
        end = bisect_right(ends, before + capacity, start)
        bins.append(list(range(start, end)))
        start, before = end, ends[end - 1]
    return bins


def first_fit(lengths: Int64s, order: Int64s, capacity: int) -> Bins:
    """Put each row of `order` into the first bin with space for it, else into a new one. O(N log bins)."""
    # A short list holds the few bins with space for most rows. A tree holds the bins that only the shortest rows fit.
    closes_at = int(np.partition(lengths, len(lengths) // 20)[len(lengths) // 20])
    closed = _Residuals(min(len(order), 2 * int(lengths.sum()) // capacity + 2))
    numbers: list[int] = []
    residuals: list[int] = []
    where: list[int] = []
    count, most = 0, -1
    for size in lengths[order].tolist():
        place = 0
        for residual in residuals:
            if residual >= size:
                break
            place += 1
        if most >= size:
            number = closed.first(size)
            if place == len(residuals) or number < numbers[place]:
                most = closed.take(number, size)
                where.append(number)
                continue
        if place == len(residuals):
            numbers.append(count)
            residuals.append(capacity)
            count += 1
        where.append(numbers[place])
        residuals[place] = residual = residuals[place] - size
        if place == MOST_OPEN:
            place = residuals.index(min(residuals))
        elif residual >= closes_at:
            continue
        most = closed.put(numbers.pop(place), residuals.pop(place))
    return _by_bin(order, where)


def first_fit_decreasing(lengths: Int64s, capacity: int) -> Bins:
    """Put rows, longest first (ties: lower row first), each into the first bin with space. O(N log N)."""
    bins: Bins = []
    _fill(lengths, np.arange(len(lengths)), capacity, bins, [])
    return bins


def modified_first_fit_decreasing(lengths: Int64s, capacity: int) -> Bins:
    """Pack with first-fit decreasing, or with its modification by Johnson and Garey (1985) if that needs fewer bins.

    The modification is tried only if first-fit decreasing exceeds the lower bound by more than 0.1 percent. It first
    adds to each bin with a row over half the capacity one row over a third, or two rows over a sixth. O(N log N)."""
    plain = first_fit_decreasing(lengths, capacity)
    if len(plain) * 1000 <= fewest_bins(lengths, capacity) * 1001:
        return plain
    bins, residuals, rest = _pair_large_rows(lengths, capacity)
    _fill(lengths, rest, capacity, bins, residuals)
    return bins if len(bins) < len(plain) else plain


def fewest_bins(lengths: Int64s, capacity: int) -> int:
    """Return a lower bound for the number of bins: the bound L2 of Martello and Toth (1990). O(N log N).

    For any k up to half the capacity: each row over `capacity - k` fills a bin alone. Every other row over half the
    capacity needs a separate bin. Rows from k to half the capacity use the space left in the latter, or more bins.
    """
    rising = _sorted(lengths)[1]
    sums = np.concatenate([[0], np.cumsum(rising)])
    half = int(np.searchsorted(rising * 2, capacity, side="right"))
    least = np.concatenate([[0], rising[:half]])  # k
    starts = np.searchsorted(rising, least)
    alone = np.searchsorted(rising, capacity - least, side="right")
    residual = (alone - half) * capacity - (sums[alone] - sums[half])
    more = np.maximum(-(-(sums[half] - sums[starts] - residual) // capacity), 0)
    return int((len(rising) - half + more).max())


def loads_of(bins: Bins, lengths: Int64s) -> Int64s:
    """Return the sum of the lengths in each bin. There must be at least one bin, and none may be empty."""
    rows = np.fromiter(chain.from_iterable(bins), dtype=np.int64)
    sums: Int64s = np.add.reduceat(lengths[rows], [0, *accumulate(map(len, bins[:-1]))])
    return sums


def split(bins: Bins, lengths: Int64s, count: int) -> Bins:
    """Split `bins` into `count` bins, keeping the order of rows. There must be at least `count` rows.

    Each step cuts the fullest bin with two or more rows at the position where its two parts are most equal."""
    loads = loads_of(bins, lengths)
    several = np.flatnonzero(np.fromiter(map(len, bins), dtype=np.int64) > 1)
    fullest = several[np.argsort(-loads[several], kind="stable")][: count - len(bins)]
    # A piece is (negated tokens, bin number, first row, end row).
    pieces = [(-int(loads[number]), number, 0, len(bins[number])) for number in fullest.tolist()]
    whole = {number for _, number, _, _ in pieces}
    single: list[tuple[int, int, int, int]] = []
    missing = count - len(bins)
    while missing:
        tokens, number, start, end = heapq.heappop(pieces)
        before = list(accumulate(lengths[bins[number][start : end - 1]].tolist()))
        first = min(range(len(before)), key=lambda cut: abs(tokens + 2 * before[cut]))
        middle = start + first + 1
        for piece in ((-before[first], number, start, middle), (tokens + before[first], number, middle, end)):
            if piece[3] - piece[2] > 1:
                heapq.heappush(pieces, piece)
            else:
                single.append(piece)
        missing -= 1
    cut: dict[int, Bins] = {number: [] for number in whole}
    for _, number, start, end in sorted(pieces + single, key=lambda piece: piece[2]):
        cut[number].append(bins[number][start:end])
    return [part for number, rows in enumerate(bins) for part in cut.get(number, [rows])]


class _Residuals:
    """Free space per bin, for bin numbers below `most_bins`. Finds the first bin with enough space in O(log bins)."""

    def __init__(self, most_bins: int) -> None:
        self._leaves = 1
        while self._leaves < most_bins:
            self._leaves *= 2
        self._residual = [-1] * (2 * self._leaves)  # per node: the largest free space of a bin below it

    def first(self, size: int) -> int:
        """Return the first bin with space for `size`. Such a bin must exist."""
        residual, node, leaves = self._residual, 1, self._leaves
        while node < leaves:
            node *= 2
            if residual[node] < size:
                node += 1
        return node - leaves

    def put(self, number: int, free: int) -> int:
        """Set the free space of bin `number`. Return the largest free space of any bin."""
        residual, node = self._residual, number + self._leaves
        residual[node] = free
        while node > 1:
            other = residual[node ^ 1]
            if other > free:
                free = other
            node //= 2
            if residual[node] == free:
                break
            residual[node] = free
        return residual[1]

    def take(self, number: int, size: int) -> int:
        """Subtract `size` from the free space of bin `number`. Return the largest free space of any bin."""
        return self.put(number, self._residual[number + self._leaves] - size)


def _by_bin(order: Int64s, where: Sequence[int]) -> Bins:
    """Return the rows of each bin. `where[i]` is the bin of row `order[i]`."""
    numbers = np.array(where)
    counts = np.bincount(numbers)
    rows = order[_sorted(numbers)[0]].tolist()
    return [rows[start:end] for start, end in pairwise([0, *np.cumsum(counts).tolist()])]


def _fill(lengths: Int64s, rows: Int64s, capacity: int, bins: Bins, residuals: list[int]) -> None:
    """Pack `rows` first-fit decreasing into `bins` with free space `residuals`, and into new bins as needed. In place.

    The loop fills one bin at a time with the longest row that fits. The result equals row-by-row first-fit, because a
    row that does not fit a bin cannot fit it later. Rows of one length form a class, found by bisection. `below[c]`
    leads from an exhausted class to the next shorter one (a disjoint-set forest; 0 means that no class is left).
    """
    places, rising = _sorted(lengths[rows])
    order = rows[places]
    values, starts = np.unique(rising, return_index=True)
    sizes, nexts = values.tolist(), starts.tolist()
    ends = [*nexts[1:], len(order)]
    ordered = order.tolist()
    below = list(range(len(sizes) + 1))
    left, number = len(ordered), 0
    while left:
        if number == len(bins):
            bins.append([])
            residuals.append(capacity)
        residual, into = residuals[number], bins[number]
        place = len(sizes)
        while True:
            place = bisect_right(sizes, residual, 0, place)
            while below[place] != place:
                below[place] = place = below[below[place]]
            if not place:
                break
            size, start, end = sizes[place - 1], nexts[place - 1], ends[place - 1]
            if size:
                fitting = start + residual // size
                if fitting < end:
                    end = fitting
                residual -= size * (end - start)
            into += ordered[start:end]
            left -= end - start
            nexts[place - 1] = end
            if end == ends[place - 1]:
                below[place] = place - 1
        residuals[number] = residual
        number += 1


def _pair_large_rows(lengths: Int64s, capacity: int) -> tuple[Bins, list[int], Int64s]:
    """Run phases 1 to 3 of the method. Return (a bin for each row over half the capacity, longest first, including the
    rows that phases 2 and 3 add; the free space of each bin; all other rows)."""
    rising, sorted_ = _sorted(lengths)
    sixth, third, half = np.searchsorted(sorted_ * 6, [capacity, 2 * capacity, 3 * capacity], side="right")
    large = rising[half:][::-1]
    bins = [[row] for row in large.tolist()]
    residuals = (capacity - lengths[large]).tolist()
    sizes = lengths.tolist()
    added: list[int] = []

    def add(number: int, row: int) -> None:
        bins[number].append(row)
        residuals[number] -= sizes[row]
        added.append(row)

    # Free space grows from bin to bin: a row that fits one bin fits all later bins, and the last row of `fitting` is
    # the longest.
    fitting: list[int] = []
    candidates = iter(rising[third:half].tolist())
    candidate = next(candidates, None)
    for number in range(len(bins)):
        while candidate is not None and sizes[candidate] <= residuals[number]:
            fitting.append(candidate)
            candidate = next(candidates, None)
        if fitting:
            add(number, fitting.pop())
    # In reverse order free space shrinks: a row that is too long next to the shortest row stays too long.
    small = rising[sixth:third].tolist()
    low, high = 0, len(small) - 1
    for number in range(len(bins) - 1, -1, -1):
        if len(bins[number]) > 1:
            continue
        if low >= high or sizes[small[low]] + sizes[small[low + 1]] > residuals[number]:
            break
        add(number, small[low])
        low += 1
        while sizes[small[high]] > residuals[number]:
            high -= 1
        add(number, small[high])
        high -= 1
    rest = np.ones(len(lengths), dtype=np.bool_)
    rest[large] = rest[added] = False
    return bins, residuals, np.flatnonzero(rest)


def _sorted(lengths: Int64s) -> tuple[Int64s, Int64s]:
    """Return (rows from the shortest to the longest, ties in row order; their lengths)."""
    short = not len(lengths) or int(lengths.max()) < 1 << 16
    rows = np.argsort(lengths.astype(np.uint16) if short else lengths, kind="stable")  # radix sort for 16 bits
    return rows, lengths[rows]
