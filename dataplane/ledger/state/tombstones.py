"""Records of evicted and lost samples, so that errors about them can name the cause."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.ledger.commands import Int64s

REMEMBERED = 4096
"""Maximum number of removed samples per partition and kind that are remembered by id."""
NAMED = 3
"""Maximum number of causes in one error."""


class Tombstones:
    """The last `REMEMBERED` removed samples. `generations`: their generations by sample id, latest last. An id is
    forgotten when a new sample is put under it. The `names` here are sample ids."""

    def __init__(self) -> None:
        self.generations: dict[str, int] = {}

    def remember(self, ids: tuple[str, ...], generations: Int64s) -> None:
        """Add removed samples as the latest ones, and forget the earliest ones beyond `REMEMBERED`."""
        for name, generation in zip(ids[-REMEMBERED:], generations[-REMEMBERED:].tolist(), strict=True):
            self.generations.pop(name, None)  # so that it becomes the latest one
            self.generations[name] = generation
        for name in list(self.generations)[: max(len(self.generations) - REMEMBERED, 0)]:
            self.forget(name)

    def forget(self, name: str) -> None:
        self.generations.pop(name, None)

    def forget_all(self, ids: Iterable[str]) -> None:
        """Forget these ids, because new samples were put under them."""
        if self.generations:  # usually, there is nothing to forget
            for name in ids:
                self.forget(name)

    def among_ids(self, ids: Iterable[str]) -> list[str]:
        """Return those ids whose removed samples are remembered."""
        return [name for name in ids if name in self.generations]

    def among_generations(self, generations: Int64s) -> list[str]:
        """Return the ids of remembered samples with these generations."""
        remembered = np.array(list(self.generations.values()), np.int64)
        return [name for name, found in zip(self.generations, np.isin(remembered, generations), strict=True) if found]


class Evicted(Tombstones):
    """Evicted samples, with counts of `consumed` and `unconsumed` ones. `noticed`: time of the last log message about
    evictions."""

    def __init__(self) -> None:
        super().__init__()
        self.consumed = 0
        self.unconsumed = 0
        self.noticed = float("-inf")

    def note(self, ids: tuple[str, ...], generations: Int64s, *, consumed: bool) -> None:
        """Count and remember evicted samples. consumed: whether all tasks had consumed them."""
        if consumed:
            self.consumed += len(ids)
        else:
            self.unconsumed += len(ids)
        self.remember(ids, generations)


class Lost(Tombstones):
    """Samples lost with storage units. `causes`: readable cause by id."""

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
        """Return the distinct causes of the loss of these remembered samples, at most `NAMED`."""
        return tuple(dict.fromkeys(self.causes[name] for name in ids))[:NAMED]
