"""What is remembered of samples that were lost with storage units, so that whoever asks for one is told."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.ledger.commands import Int64s

REMEMBERED = 4096
"""The last so many of a partition are remembered by name."""
NAMED = 3
"""So many causes are told at a time."""


class Lost:
    """`generations` and `causes` (what became of it, in words) are of the last `REMEMBERED`, by id, latest last, but
    for ids that live again."""

    def __init__(self) -> None:
        self.generations: dict[str, int] = {}
        self.causes: dict[str, str] = {}

    def note(self, ids: tuple[str, ...], generations: Int64s, cause: str) -> None:
        for name, generation in zip(ids[-REMEMBERED:], generations[-REMEMBERED:].tolist(), strict=True):
            self.generations.pop(name, None)
            self.generations[name], self.causes[name] = generation, cause
        self._forget(list(self.generations)[: max(len(self.generations) - REMEMBERED, 0)])

    def born_again(self, ids: Iterable[str]) -> None:
        self._forget(ids if self.generations else ())

    def among_ids(self, ids: Iterable[str]) -> tuple[int, tuple[str, ...]]:
        """How many of these ids are of samples that were lost, and why the first were."""
        return self._told([name for name in ids if name in self.generations])

    def among_generations(self, generations: Int64s) -> tuple[int, tuple[str, ...]]:
        """The same, of generation numbers."""
        known = np.array(list(self.generations.values()), np.int64)
        return self._told(
            [name for name, found in zip(self.generations, np.isin(known, generations), strict=True) if found]
        )

    def _told(self, names: list[str]) -> tuple[int, tuple[str, ...]]:
        return len(names), tuple(dict.fromkeys(self.causes[name] for name in names))[:NAMED]

    def _forget(self, ids: Iterable[str]) -> None:
        for name in ids:
            self.generations.pop(name, None)
            self.causes.pop(name, None)
