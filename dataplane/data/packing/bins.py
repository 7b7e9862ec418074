"""Bin packing over integer lengths: every row into one bin, no bin beyond its capacity.

Each function takes lengths `[N]` of 0 to `capacity` and returns bins as lists of rows; none is empty.
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
"""First-fit looks through so many bins one after another."""


def concatenate(lengths: Int64s, capacity: int) -> Bins:
    """Rows in their order; a new bin where the next row would not fit. O(bins log N)."""
    ends = np.cumsum(lengths).tolist()
    bins: Bins = []
    start = before = 0
    while start < len(ends):
        end = bisect_right(ends, before + capacity, start)
        bins.append(list(range(start, end)))
        start, before = end, ends[end - 1]
    return bins


def first_fit(lengths: Int64s, order: Int64s, capacity: int) -> Bins:
    """Each row of `order` into the first bin with space for it, else into a new one. O(N log bins)."""
    # The few bins with space for most rows are in a short list; those that only the shortest rows may fit, in a tree.
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
    """Longest first (of equal ones the lower row first), each into the first bin with space. O(N log N)."""
    bins: Bins = []
    _fill(lengths, np.arange(len(lengths)), capacity, bins, [])
    return bins


def modified_first_fit_decreasing(lengths: Int64s, capacity: int) -> Bins:
    """First-fit decreasing; where it may take over a thousandth too many bins, and this takes fewer, its modification
    by Johnson and Garey (1985): bins of rows over half the capacity first get a row over a third each, or two over a
    sixth. O(N log N)."""
    plain = first_fit_decreasing(lengths, capacity)
    if len(plain) * 1000 <= fewest_bins(lengths, capacity) * 1001:
        return plain
    bins, residuals, rest = _large_and_their_company(lengths, capacity)
    _fill(lengths, rest, capacity, bins, residuals)
    return bins if len(bins) < len(plain) else plain


def fewest_bins(lengths: Int64s, capacity: int) -> int:
    """A number of bins below which no packing gets: the bound L2 of Martello and Toth (1990). O(N log N).

    For any k up to half the capacity: rows over `capacity - k` are alone, other rows over half of it are in bins of
    their own, and rows from k to half of it must fit into the space that those leave, or into further bins.
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
    """The sum of the lengths in each of `bins`, one or more, none of them empty."""
    rows = np.fromiter(chain.from_iterable(bins), dtype=np.int64)
    sums: Int64s = np.add.reduceat(lengths[rows], [0, *accumulate(map(len, bins[:-1]))])
    return sums


def split(bins: Bins, lengths: Int64s, count: int) -> Bins:
    """`count` bins of the same rows in the same order: while there are fewer, the fullest one of two rows or more is
    cut where its halves are most alike. There must be `count` rows or more."""
    loads = loads_of(bins, lengths)
    several = np.flatnonzero(np.fromiter(map(len, bins), dtype=np.int64) > 1)
    fullest = several[np.argsort(-loads[several], kind="stable")][: count - len(bins)]
    # A piece is (tokens, negated; bin; rows from; to).
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
    """The space left in bins, by their numbers below `most_bins`, to find the first one with enough. O(log bins)."""

    def __init__(self, most_bins: int) -> None:
        self._leaves = 1
        while self._leaves < most_bins:
            self._leaves *= 2
        self._residual = [-1] * (2 * self._leaves)  # of each node the most space of a bin below it

    def first(self, size: int) -> int:
        """The first bin with space for `size`; there must be one."""
        residual, node, leaves = self._residual, 1, self._leaves
        while node < leaves:
            node *= 2
            if residual[node] < size:
                node += 1
        return node - leaves

    def put(self, number: int, free: int) -> int:
        """Bin `number` has `free` left. Gives the most of any bin."""
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
        """`size` of bin `number` is taken. Gives the most that is left in any."""
        return self.put(number, self._residual[number + self._leaves] - size)


def _by_bin(order: Int64s, where: Sequence[int]) -> Bins:
    """The rows of each bin, in `order`; `where` is the bin of each."""
    numbers = np.array(where)
    counts = np.bincount(numbers)
    rows = order[_sorted(numbers)[0]].tolist()
    return [rows[start:end] for start, end in pairwise([0, *np.cumsum(counts).tolist()])]


def _fill(lengths: Int64s, rows: Int64s, capacity: int, bins: Bins, residuals: list[int]) -> None:
    """First-fit decreasing of `rows` into `bins` with `residuals` left, and into as many new ones as it takes.

    Bin after bin, each takes the longest row that fits until none does: what a bin refuses once does not fit it later
    either, so that is what taking row after row comes to. Rows of one length are one class, found by bisection;
    `below[c]` leads from a class that has run out to the next shorter one (a disjoint set; 0 means none is left).
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


def _large_and_their_company(lengths: Int64s, capacity: int) -> tuple[Bins, list[int], Int64s]:
    """(a bin for each row over half the capacity, longest first, with what phases 2 and 3 of the method add; the space
    left in each; all other rows)."""
    rising, sorted_ = _sorted(lengths)
    sixth, third, half = np.searchsorted(sorted_ * 6, [capacity, 2 * capacity, 3 * capacity], side="right")
    large = rising[half:][::-1]
    bins = [[row] for row in large.tolist()]
    residuals = (capacity - lengths[large]).tolist()
    sizes = lengths.tolist()
    company: list[int] = []

    def add(number: int, row: int) -> None:
        bins[number].append(row)
        residuals[number] -= sizes[row]
        company.append(row)

    # The space grows from bin to bin: what fits one fits all later ones, and the last to come in is the longest.
    fitting: list[int] = []
    coming = iter(rising[third:half].tolist())
    following = next(coming, None)
    for number in range(len(bins)):
        while following is not None and sizes[following] <= residuals[number]:
            fitting.append(following)
            following = next(coming, None)
        if fitting:
            add(number, fitting.pop())
    # Backwards it shrinks: a row that is too long beside the shortest one is too long for all bins to come.
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
    rest[large] = rest[company] = False
    return bins, residuals, np.flatnonzero(rest)


def _sorted(lengths: Int64s) -> tuple[Int64s, Int64s]:
    """(rows from the shortest to the longest, of equal ones the lower first; their lengths)."""
    short = not len(lengths) or int(lengths.max()) < 1 << 16
    rows = np.argsort(lengths.astype(np.uint16) if short else lengths, kind="stable")  # 16 bits: a radix sort
    return rows, lengths[rows]
