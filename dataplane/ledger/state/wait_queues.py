"""Puts that wait for space: a line for each partition, by its account, in the order in which they came."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from dataplane.ledger.state.sessions import ParkedAllocate

Line = dict[tuple[int, int], ParkedAllocate]
"""By session and number, longest first."""
Lines = dict[int, Line]
"""None of them is empty."""


class WaitQueues:
    """The puts of these lines in the order in which they came. A put may leave its line while it has its turn. The cost
    is proportional to the number of lines, and of puts that have a turn."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self._next: list[tuple[int, ParkedAllocate, Iterator[ParkedAllocate]]] = []
        self._last: Iterator[ParkedAllocate] | None = None
        for line in lines:
            self._queue(_turns(line))

    def __iter__(self) -> WaitQueues:
        return self

    def __next__(self) -> ParkedAllocate:
        if self._last is not None:
            self._queue(self._last)
        if not self._next:
            raise StopIteration
        _, parked, self._last = heapq.heappop(self._next)
        return parked

    def skip_line(self) -> None:
        """No put of the line of the last one has a turn any more."""
        self._last = None

    def _queue(self, turns: Iterator[ParkedAllocate]) -> None:
        parked = next(turns, None)
        if parked is not None:
            heapq.heappush(self._next, (parked.place, parked, turns))


def _turns(line: Line) -> Iterator[ParkedAllocate]:
    first = next(iter(line.values()))
    yield first
    for parked in list(line.values()):  # most often the first is the only one that is looked at
        if parked is not first:
            yield parked
