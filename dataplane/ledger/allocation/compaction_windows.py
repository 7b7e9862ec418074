"""Choose the window of an arena to empty for a large free piece. Pure arithmetic on the spans of the arena.

A window is a range of the arena that holds whole used spans. To empty it, these are moved to free ranges outside.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from dataplane.ledger.commands import Int32s, Int64s
from dataplane.ledger.state.arrays import Bools

FIXED = 1 << 40
"""Counts as the bytes of an immovable span: more than any order may move."""
CHEAPEST = 3
"""This many windows of the wanted length are tried."""
PARTS = (1, 8, 64)
"""Then the longest windows are tried that need at most all, an eighth or a 64th of the bytes that may be moved."""


class Spans(NamedTuple):
    """Used spans of an arena of `end` bytes, by address: start, bytes, extent, and whether the span can be moved."""

    starts: Int64s
    sizes: Int64s
    extents: Int32s
    movable: Bools
    end: int


class Window(NamedTuple):
    """The range from `start` to `stop` of an arena: the extents in it, and its free pieces (start, bytes)."""

    start: int
    stop: int
    extents: Int32s
    free: list[tuple[int, int]]


class _Edges(NamedTuple):
    """Window (i, j) holds spans i to j - 1. It may begin at `begins[i]` and end at `ends[j]`, and requires moving
    `moved[j] - moved[i]` bytes."""

    begins: Int64s
    ends: Int64s
    moved: Int64s


def windows(spans: Spans, *, goal: int, least: int, most: int, free: int) -> Iterator[Window]:
    """Yield windows to try: first those of `goal` bytes with the fewest bytes to move, then the longest of at least
    `least` bytes. Emptying a window moves at most `most` bytes, and they fit into the free bytes outside of it
    (`free`: all free bytes of the arena)."""
    zero = np.zeros(1, np.int64)
    # Edge i is the gap before span i; the last edge is the gap behind all spans.
    edges = _Edges(
        begins=np.concatenate((zero, spans.starts + spans.sizes)),
        ends=np.concatenate((spans.starts, np.array([spans.end], np.int64))),
        moved=np.concatenate((zero, np.cumsum(np.where(spans.movable, spans.sizes, FIXED)))),
    )
    for first, last, stop in _cheapest_windows(edges, goal, most, free):
        yield _make_window(spans, edges, first, last, stop)
    for part in PARTS:
        for first, last, stop in _longest_window(edges, least, most // part, free):
            yield _make_window(spans, edges, first, last, stop)


def _cheapest_windows(edges: _Edges, goal: int, most: int, free: int) -> Iterator[tuple[int, int, int]]:
    """Yield the windows of `goal` bytes with the fewest bytes to move, as (first edge, last edge, stop): `stop` is the
    window's end."""
    # For each edge where a window may begin, the first edge where it has at least `goal` bytes.
    last = np.searchsorted(edges.ends, edges.begins + goal)
    first = np.flatnonzero(last < len(edges.ends))  # those for which there is such an edge
    last = last[first]
    # The window ends after `goal` bytes, or with its last span if that ends later.
    stops = np.maximum(edges.begins[first] + goal, edges.begins[last])
    moved = edges.moved[last] - edges.moved[first]
    # The bytes to move must fit into the free bytes outside the window. They and the free bytes in it are all of
    # its bytes, so the window must not be larger than the free bytes of the arena.
    fits = np.flatnonzero((moved <= most) & (stops - edges.begins[first] <= free))
    for i in fits[moved[fits].argsort(kind="stable")][:CHEAPEST].tolist():
        yield int(first[i]), int(last[i]), int(stops[i])


def _longest_window(edges: _Edges, least: int, most: int, free: int) -> Iterator[tuple[int, int, int]]:
    """Yield the longest window with at most `most` bytes to move, if it has at least `least` bytes, as (first edge,
    last edge, stop)."""
    # For each first edge, the last edge with at most `most` bytes to move and at most `free` bytes in the window.
    last = np.searchsorted(edges.moved, edges.moved + most, side="right") - 1
    last = np.minimum(last, np.searchsorted(edges.ends, edges.begins + free, side="right") - 1)
    lengths = np.where(last > np.arange(len(last)), edges.ends[last] - edges.begins, 0)  # 0: no span in the window
    first = int(lengths.argmax())
    if lengths[first] >= least:
        yield first, int(last[first]), int(edges.ends[last[first]])


def _make_window(spans: Spans, edges: _Edges, first: int, last: int, stop: int) -> Window:
    """Return the window from edge `first` to edge `last`, which ends at `stop`."""
    # The gaps before, between and behind the window's spans, cut off at its end.
    begins, ends = edges.begins[first : last + 1], np.minimum(edges.ends[first : last + 1], stop)
    nonempty = np.flatnonzero(ends > begins)
    free = list(zip(begins[nonempty].tolist(), (ends - begins)[nonempty].tolist(), strict=True))
    return Window(int(begins[0]), stop, np.unique(spans.extents[first:last]), free)
