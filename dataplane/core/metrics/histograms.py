"""Counters and histograms of durations. The working thread updates them cheaply; other threads read them meanwhile."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Upper bounds of a histogram's buckets, in seconds."""


class Histogram:
    """A histogram of durations in seconds. Only one thread may call `add`. buckets: the number of durations in each,
    not cumulative; the last one is for durations above all bounds."""

    __slots__ = ("buckets", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, took_s: float) -> None:
        self.buckets[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s

    def cumulated(self) -> list[tuple[str, float]]:
        """Return (upper bound, cumulative count) of each bucket, as Prometheus expects."""
        total, result = 0, []
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        for bound, count in zip(bounds, list(self.buckets), strict=True):  # a copy: another thread may call `add`
            total += count
            result.append((bound, float(total)))
        return result


class Waited:
    """Number and total duration of waits."""

    __slots__ = ("count", "sum_s")

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0

    def add(self, took_s: float) -> None:
        self.count += 1
        self.sum_s += took_s


class Op:
    """Statistics of one kind of operation: successes, failures by error name, and durations."""

    __slots__ = ("errors", "ok", "took")

    def __init__(self) -> None:
        self.ok = 0
        self.errors: dict[str, int] = {}
        self.took = Histogram()

    def failed(self, error: Exception) -> None:
        """Count a failure."""
        name = type(error).__name__
        self.errors[name] = self.errors.get(name, 0) + 1

    def outcomes(self) -> dict[str, int]:
        """Return counts by outcome: "ok", or the name of the error class."""
        return {"ok": self.ok, **self.errors}
