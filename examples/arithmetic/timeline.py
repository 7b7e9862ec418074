"""Time spans: their union and their intersection."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""Start and end, in seconds of one clock."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of `spans` as disjoint spans, in ascending order."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def covered(spans: Iterable[Span]) -> float:
    """Return the seconds that the union of `spans` covers."""
    return sum(end - start for start, end in merged(spans))


def common(ones: Iterable[Span], others: Iterable[Span]) -> float:
    """Return the seconds that the unions of `ones` and of `others` have in common."""
    left, right = merged(ones), merged(others)
    return covered(left) + covered(right) - covered([*left, *right])
