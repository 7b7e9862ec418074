"""Functions to call after some time."""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator


class Timers:
    """For one thread, which calls what is `due`. `_heap`: (time, number, function), where the number keeps equal times
    in order."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def schedule(self, seconds: float, work: Callable[[], None]) -> None:
        """Make `work` due after that time."""
        heapq.heappush(self._heap, (time.monotonic() + seconds, next(self._numbers), work))

    @property
    def next_time(self) -> float:
        """The time of the next function on the monotonic clock, infinity if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> Iterator[Callable[[], None]]:
        """Remove and yield the functions whose time has come, in the order of their times."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]
