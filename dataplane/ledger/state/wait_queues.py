"""Puts that wait for space: one line per partition, by account number, in order of arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from dataplane.ledger.state.sessions import ParkedAllocate

Line = dict[tuple[int, int], ParkedAllocate]
"""Waiting puts by session and call number, longest waiting first."""
Lines = dict[int, Line]
"""Lines by account number. No line is empty."""


class WaitQueues:
    """Iterator over the puts of several lines in order of arrival. The current put may be removed from its line during
    its turn. The cost is proportional to the number of lines and of puts that have a turn. `_next`: heap with the next
    put of each line, as (place, put, the line's iterator). `_last`: iterator of the current put's line, which is queued
    again before the next put is chosen."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._next: list[tuple[int, ParkedAllocate, Iterator[ParkedAllocate]]] = []
        self._last: Iterator[ParkedAllocate] | None = None
        for line in lines:
            self._queue(_iterate_line(line))

    def __iter__(self) -> WaitQueues:
        return self

    def __next__(self) -> ParkedAllocate:
        if self._last is not None:  # the line of the previous put, unless it was skipped
            self._queue(self._last)
        if not self._next:
            raise StopIteration
        _, parked, self._last = heapq.heappop(self._next)
        return parked

    def skip_line(self) -> None:
        """Skip the remaining puts in the line of the current put."""
        self._last = None

    def _queue(self, turns: Iterator[ParkedAllocate]) -> None:
        """Add the line's next put to the heap, if it has one."""
        parked = next(turns, None)
        if parked is not None:
            heapq.heappush(self._next, (parked.place, parked, turns))


def _iterate_line(line: Line) -> Iterator[ParkedAllocate]:
    """Yield the puts of a line (at least one), longest waiting first."""
    first = next(iter(line.values()))
    yield first
    # A copy, because puts leave the line during their turns. Usually only the first put has a turn, and the generator
    # does not come here.
    for parked in list(line.values()):
        if parked is not first:
            yield parked
