"""What is remembered of evicted samples, so that whoever asks for one is told."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.ledger.commands import Int64s

REMEMBERED = 4096
"""The last so many of a partition are remembered by name."""


class Evicted:
    """Counts of the `consumed` and the `unconsumed` ones. `generations` are of the last `REMEMBERED`, by id, latest
    last, but for ids that live again. `noticed`: when the log heard of it last."""

    def __init__(self) -> None:
        self.consumed = 0
        self.unconsumed = 0
        self.generations: dict[str, int] = {}
        self.noticed = float("-inf")

    def note(self, ids: tuple[str, ...], generations: Int64s, *, consumed: bool) -> None:
        if consumed:
            self.consumed += len(ids)
        else:
            self.unconsumed += len(ids)
        self.generations.update(zip(ids[-REMEMBERED:], generations[-REMEMBERED:].tolist(), strict=True))
        for name in list(self.generations)[: max(len(self.generations) - REMEMBERED, 0)]:
            del self.generations[name]

    def born_again(self, ids: Iterable[str]) -> None:
        for name in ids if self.generations else ():
            self.generations.pop(name, None)

    def among_ids(self, ids: Iterable[str]) -> int:
        """How many of these ids are of samples that were evicted."""
        return sum(name in self.generations for name in ids)

    def among_generations(self, generations: Int64s) -> int:
        return int(np.isin(generations, np.array(list(self.generations.values()), np.int64)).sum())
