"""Sets of integers, stored as ranges of consecutive numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Stretches:
    """A set of integers that stores only the first and last number of each range of consecutive numbers."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, first: int, last: int) -> None:
        """Add all numbers from `first` to `last`, inclusive."""
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first, last = min(first, self._firsts[begin]), max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number <= self._lasts[place]

    def __len__(self) -> int:
        """Return the number of ranges."""
        return len(self._firsts)
