"""What letting samples of a partition go could bring to a put that waits, so that it is not looked for in vain."""

from __future__ import annotations

import numpy as np

from dataplane.ledger.commands import Int64s

Gain = tuple[int, int]
"""Bytes of the partition, and those of them in open units."""


class Outlook:
    """As eviction was tried in vain last: at most `consumed` came back by samples that all tasks have consumed, and
    `every` by all that may go (None: that was not looked at), with `units` open.

    That holds until something is `changed`. From then on only `hope_bytes` does: the size of all extents in which
    samples lie that may go, or could if nobody read them. It grows with the samples that are noted, and each extent
    counts once: those that did have this outlook's `number`.
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
        """These may have come to be samples that may go, or lie elsewhere."""
        self.changed = True
        if len(rows):
            self.noted.append(rows.copy())

    def take_noted(self) -> Int64s:
        """What was noted since, each row once."""
        rows = np.unique(np.concatenate(self.noted)) if self.noted else np.zeros(0, np.int64)
        self.noted = []
        return rows

    def rules_out(self, excess: int, short: int, *, consumed_only: bool) -> bool:
        """Whether eviction cannot bring that much, by what was seen."""
        if self.changed:
            return self.hope_bytes < max(excess, short)
        if reaches(self.consumed, excess, short):
            return False
        return consumed_only or (self.every is not None and not reaches(self.every, excess, short))


def reaches(gain: Gain, excess: int, short: int) -> bool:
    return gain[0] >= excess and gain[1] >= short
