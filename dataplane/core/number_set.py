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
        # Replace all bounds from `first` to `stop`. `first` becomes a bound unless an earlier range contains
        # or touches it (the number of bounds before it is odd); likewise `stop`, unless a range continues after it.
        bounds = self.bounds
        stop = last + 1
        low = bisect_left(bounds, first)
        high = bisect_right(bounds, stop)
        new_bounds = [] if low % 2 == 1 else [first]
        if high % 2 == 0:
            new_bounds.append(stop)
        bounds[low:high] = new_bounds

    def drop_below(self, number: int) -> None:
        """Remove all numbers below `number`."""
        index = bisect_right(self.bounds, number)
        is_member = index % 2 == 1  # then its range now begins with it
        self.bounds[:index] = [number] if is_member else []
