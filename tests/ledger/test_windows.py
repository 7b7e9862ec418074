"""Windows of an arena that are chosen to be emptied, compared with trying all of them."""

from __future__ import annotations

from random import Random

import numpy as np

from dataplane.ledger.allocation.compaction_windows import Spans, windows

GRANULE = 64
END = 40 * GRANULE


def arena(chance: Random) -> Spans:
    """Spans of one to three granules and gaps of none to three, some not movable."""
    starts, sizes, at = [], [], chance.randrange(3)
    while at < 36:
        size = chance.randint(1, 3)
        starts.append(at * GRANULE)
        sizes.append(size * GRANULE)
        at += size + chance.randrange(4)
    count = len(starts)
    movable = np.array([chance.random() < 0.8 for _ in range(count)])
    return Spans(np.array(starts), np.array(sizes), np.arange(1, count + 1, dtype=np.int32), movable, END)


def held(spans: Spans, start: int, stop: int) -> np.ndarray:
    return (spans.starts < stop) & (spans.starts + spans.sizes > start)


def moved(spans: Spans, start: int, stop: int) -> int | None:
    """Bytes of what lies there; None if something cannot be moved, or lies there in part only."""
    here = held(spans, start, stop)
    ends = spans.starts + spans.sizes
    whole = (spans.starts[here] >= start).all() and (ends[here] <= stop).all()
    return int(spans.sizes[here].sum()) if whole and spans.movable[here].all() else None


def test_windows_are_the_cheapest_and_then_the_longest() -> None:
    chance = Random(7)
    for _ in range(200):
        spans = arena(chance)
        free = END - int(spans.sizes.sum())
        begins = [0, *(spans.starts + spans.sizes).tolist()]
        least = max(end - begin for begin, end in zip(begins, [*spans.starts.tolist(), END], strict=True)) + GRANULE
        goal, most = chance.randint(4, 14) * GRANULE, chance.randint(1, 12) * GRANULE
        found = list(windows(spans, goal=max(goal, least), least=least, most=most, free=free))
        costs = []
        for start in begins:
            for stop in range(start + max(goal, least), END + 1, GRANULE):
                cost = moved(spans, start, stop)
                if cost is not None and cost <= most and stop - start <= free:
                    costs.append(cost)
        for window in found:
            cost = moved(spans, window.start, window.stop)
            assert cost is not None
            assert 0 < cost <= most
            assert least <= window.stop - window.start <= free
            assert sum(size for _, size in window.free) == window.stop - window.start - cost
            assert not any(held(spans, at, at + size).any() for at, size in window.free)
            assert set(window.extents) == set(spans.extents[held(spans, window.start, window.stop)])
        if costs:
            first = found[0]
            assert first.stop - first.start >= max(goal, least)
            assert moved(spans, first.start, first.stop) == min(costs)
