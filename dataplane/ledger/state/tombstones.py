"""What is remembered of samples that are gone, so that a call that names one is told what became of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.ledger.commands import Int64s

REMEMBERED = 4096
"""The last so many of a partition are remembered by name, of each kind."""
NAMED = 3
"""So many causes are told at a time."""


class Tombstones:
    """`generations` are those of the last `REMEMBERED` samples that went, by id, latest last. An id that lives again is
    forgotten."""

    def __init__(self) -> None:
        self.generations: dict[str, int] = {}

    def remember(self, ids: tuple[str, ...], generations: Int64s) -> None:
        for name, generation in zip(ids[-REMEMBERED:], generations[-REMEMBERED:].tolist(), strict=True):
            self.generations.pop(name, None)
            self.generations[name] = generation
        for name in list(self.generations)[: max(len(self.generations) - REMEMBERED, 0)]:
            self.forget(name)

    def forget(self, name: str) -> None:
        self.generations.pop(name, None)

    def born_again(self, ids: Iterable[str]) -> None:
        for name in ids if self.generations else ():
            self.forget(name)

    def among_ids(self, ids: Iterable[str]) -> list[str]:
        """Those of the ids whose samples are remembered."""
        return [name for name in ids if name in self.generations]

    def among_generations(self, generations: Int64s) -> list[str]:
        """The ids of the remembered samples that have one of these generation numbers."""
        known = np.array(list(self.generations.values()), np.int64)
        return [name for name, found in zip(self.generations, np.isin(known, generations), strict=True) if found]


class Evicted(Tombstones):
    """Evicted samples, and counts of the `consumed` and the `unconsumed` ones. `noticed`: when the log heard of it
    last."""

    def __init__(self) -> None:
        super().__init__()
        self.consumed = 0
        self.unconsumed = 0
        self.noticed = float("-inf")

    def note(self, ids: tuple[str, ...], generations: Int64s, *, consumed: bool) -> None:
        if consumed:
            self.consumed += len(ids)
        else:
            self.unconsumed += len(ids)
        self.remember(ids, generations)


class Lost(Tombstones):
    """Samples that were lost with storage units. `causes`: what became of each, in words, by id."""

    def __init__(self) -> None:
        super().__init__()
        self.causes: dict[str, str] = {}

    def note(self, ids: tuple[str, ...], generations: Int64s, cause: str) -> None:
        self.causes.update(dict.fromkeys(ids[-REMEMBERED:], cause))
        self.remember(ids, generations)

    def forget(self, name: str) -> None:
        super().forget(name)
        self.causes.pop(name, None)

    def causes_of(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Why the first of these remembered samples were lost."""
        return tuple(dict.fromkeys(self.causes[name] for name in ids))[:NAMED]
