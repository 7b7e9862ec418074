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
    """`births` and `causes` (what became of it, in words) are of the last `REMEMBERED`, by id, latest last, but for ids
    that live again."""

    def __init__(self) -> None:
        self.births: dict[str, int] = {}
        self.causes: dict[str, str] = {}

    def note(self, ids: tuple[str, ...], births: Int64s, cause: str) -> None:
        for name, birth in zip(ids[-REMEMBERED:], births[-REMEMBERED:].tolist(), strict=True):
            self.births.pop(name, None)
            self.births[name], self.causes[name] = birth, cause
        self._forget(list(self.births)[: max(len(self.births) - REMEMBERED, 0)])

    def born_again(self, ids: Iterable[str]) -> None:
        self._forget(ids if self.births else ())

    def among_ids(self, ids: Iterable[str]) -> tuple[int, tuple[str, ...]]:
        """How many of these ids are of samples that were lost, and why the first were."""
        return self._told([name for name in ids if name in self.births])

    def among_births(self, births: Int64s) -> tuple[int, tuple[str, ...]]:
        """The same, of birth numbers."""
        known = np.array(list(self.births.values()), np.int64)
        return self._told([name for name, found in zip(self.births, np.isin(known, births), strict=True) if found])

    def _told(self, names: list[str]) -> tuple[int, tuple[str, ...]]:
        return len(names), tuple(dict.fromkeys(self.causes[name] for name in names))[:NAMED]

    def _forget(self, ids: Iterable[str]) -> None:
        for name in ids:
            self.births.pop(name, None)
            self.causes.pop(name, None)
