"""A set of call numbers that takes no more memory than it has gaps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class NumberSet:
    """`bounds` are the first number of each range and the one behind its last, ascending: a number is in the set if an
    odd count of bounds is not above it."""

    def __init__(self) -> None:
        self.bounds: list[int] = []

    def __contains__(self, number: int) -> bool:
        return bisect_right(self.bounds, number) % 2 == 1

    @property
    def ranges(self) -> int:
        """How many there are."""
        return len(self.bounds) // 2

    def add(self, first: int, last: int) -> None:
        """Take in all from `first` to `last`; some may be there."""
        bounds, stop = self.bounds, last + 1
        start, end = bisect_left(bounds, first), bisect_right(bounds, stop)
        joined = [] if start % 2 else [first]
        if end % 2 == 0:
            joined.append(stop)
        bounds[start:end] = joined

    def drop_below(self, number: int) -> None:
        """Forget all that are less."""
        place = bisect_right(self.bounds, number)
        self.bounds[:place] = [number] if place % 2 else []
