"""A set of integers that is stored as ranges of consecutive numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class NumberSet:
    """A set of integers. `bounds` has the start and the exclusive end of each range, ascending. A number is in the set
    if an odd number of bounds is less than or equal to it. Images of the ledger contain this class."""

    def __init__(self) -> None:
        self.bounds: list[int] = []

    def __contains__(self, number: int) -> bool:
        return bisect_right(self.bounds, number) % 2 == 1

    @property
    def ranges(self) -> int:
        """Number of ranges."""
        return len(self.bounds) // 2

    def add(self, first: int, last: int) -> None:
        """Add all numbers from `first` to `last`, inclusive. Some may already be in the set."""
        bounds, stop = self.bounds, last + 1
        start, end = bisect_left(bounds, first), bisect_right(bounds, stop)
        joined = [] if start % 2 else [first]
        if end % 2 == 0:
            joined.append(stop)
        bounds[start:end] = joined

    def drop_below(self, number: int) -> None:
        """Remove all numbers below `number`."""
        place = bisect_right(self.bounds, number)
        self.bounds[:place] = [number] if place % 2 else []
