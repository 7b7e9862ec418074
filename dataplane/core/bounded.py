"""A dict of limited size."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(dict[K, V]):
    """A dict with at most `most` entries, if entries are added by `store` only. Not thread-safe."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def store(self, key: K, value: V) -> V | None:
        """Set an entry and make it the latest one. Above the limit, remove the oldest one and return its value."""
        self.pop(key, None)
        self[key] = value
        return self.pop(next(iter(self))) if len(self) > self._most else None
