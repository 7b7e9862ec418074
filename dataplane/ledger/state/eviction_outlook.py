"""Estimate of the space that eviction from a partition can free for a waiting put, which avoids futile searches."""

from __future__ import annotations

import numpy as np

from dataplane.ledger.commands import Int64s

Gain = tuple[int, int]
"""Bytes freed in the partition, and the part of them in open units."""


class Outlook:
    """Result of the last eviction that could not free enough for a put: samples that all tasks have consumed would free
    at most `consumed`, and all evictable samples at most `every` (None: not computed), with `units` open.

    These bounds hold until `changed` is set. After that only the bound `hope_bytes` holds: the size of all extents that
    contain samples which are evictable, or would be if they were not being read. It grows with the noted samples. Each
    extent counts once: counted extents carry the `number` of this outlook.
    """

    def __init__(self, number: int, units: tuple[int, ...], consumed: Gain, every: Gain | None) -> None:
        self.number = number
        self.units = units
        self.consumed = consumed
        self.every = every
        self.changed = False
        self.hope_bytes = 0
        self.noted: list[Int64s] = []

    def note(self, rows: Int64s) -> None:
        """Note rows whose samples may have become evictable or moved to other extents, and set `changed`."""
        self.changed = True
        if len(rows):
            self.noted.append(rows.copy())  # `rows` may be an array of a command

    def take_noted(self) -> Int64s:
        """Remove and return the noted rows, without repeats."""
        rows = np.unique(np.concatenate(self.noted)) if self.noted else np.zeros(0, np.int64)
        self.noted = []
        return rows

    def rules_out(self, excess: int, short: int, *, consumed_only: bool) -> bool:
        """Whether eviction certainly cannot free `excess` bytes of the partition and `short` bytes in open units.
        consumed_only: whether only samples that all tasks have consumed may be evicted. The caller has already added
        the noted rows to `hope_bytes`."""
        if self.changed:
            return self.hope_bytes < max(excess, short)
        if reaches(self.consumed, excess, short):
            return False
        # The consumed samples do not suffice. The others count unless the put may evict consumed ones only.
        return consumed_only or (self.every is not None and not reaches(self.every, excess, short))


def reaches(gain: Gain, excess: int, short: int) -> bool:
    return gain[0] >= excess and gain[1] >= short
