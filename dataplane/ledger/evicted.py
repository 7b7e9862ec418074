"""What is remembered of evicted samples, so that whoever asks for one is told."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.ledger.commands import Int64s

REMEMBERED = 4096
"""The last so many of a partition are remembered by name."""


class Evicted:
    """Counts of the `consumed` and the `unconsumed` ones. `births` are of the last `REMEMBERED`, by id, latest last,
    but for ids that live again. `noticed`: when the log heard of it last."""

    def __init__(self) -> None:
        self.consumed = 0
        self.unconsumed = 0
        self.births: dict[str, int] = {}
        self.noticed = float("-inf")

    def note(self, ids: tuple[str, ...], births: Int64s, *, consumed: bool) -> None:
        if consumed:
            self.consumed += len(ids)
        else:
            self.unconsumed += len(ids)
        self.births.update(zip(ids[-REMEMBERED:], births[-REMEMBERED:].tolist(), strict=True))
        for name in list(self.births)[: max(len(self.births) - REMEMBERED, 0)]:
            del self.births[name]

    def born_again(self, ids: Iterable[str]) -> None:
        for name in ids if self.births else ():
            self.births.pop(name, None)

    def among_ids(self, ids: Iterable[str]) -> int:
        """How many of these ids are of samples that were evicted."""
        return sum(name in self.births for name in ids)

    def among_births(self, births: Int64s) -> int:
        return int(np.isin(births, np.array(list(self.births.values()), np.int64)).sum())
