"""Counters and histograms of durations, cheap enough for the thread that does the work; others read them meanwhile."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Upper ends of a histogram's buckets."""


class Histogram:
    """Durations in seconds. One thread adds."""

    __slots__ = ("buckets", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, took_s: float) -> None:
        self.buckets[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s

    def cumulated(self) -> list[tuple[str, float]]:
        """Upper end of each bucket, and how many are not above it."""
        count, found = 0, []
        for bound, more in zip((*map(str, BOUNDS_S), "+Inf"), list(self.buckets), strict=True):
            count += more
            found.append((bound, float(count)))
        return found


class Waited:
    """How often something was waited for, and how long together."""

    __slots__ = ("count", "sum_s")

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0

    def add(self, took_s: float) -> None:
        self.count += 1
        self.sum_s += took_s


class Op:
    """One kind of operation: how often it went well, and with which errors it did not; how long it took."""

    __slots__ = ("errors", "ok", "took")

    def __init__(self) -> None:
        self.ok = 0
        self.errors: dict[str, int] = {}
        self.took = Histogram()

    def failed(self, error: Exception) -> None:
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1

    def outcomes(self) -> dict[str, int]:
        """Counts by outcome: "ok", or the error's name."""
        return {"ok": self.ok, **self.errors}
