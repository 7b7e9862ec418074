"""Who was busy when: spans of time, what they cover together and in common."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""From and to, in seconds of one clock."""


def merged(spans: Iterable[Span]) -> list[Span]:
    """The times that any of `spans` covers, ascending and apart."""
    result: list[Span] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def covered(spans: Iterable[Span]) -> float:
    """Seconds that any of `spans` covers."""
    return sum(end - start for start, end in merged(spans))


def common(ones: Iterable[Span], others: Iterable[Span]) -> float:
    """Seconds that some of `ones` and some of `others` cover at the same time."""
    left, right = merged(ones), merged(others)
    return covered(left) + covered(right) - covered([*left, *right])
