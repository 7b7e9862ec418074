"""Calls that take turns, such as the appends to a sample."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from concurrent.futures import Future


class Turn:
    """The turn of a call. ready: done when it is the first turn of all its keys, unless `enter` returned that."""

    def __init__(self, keys: Iterable[Hashable]) -> None:
        self.keys = frozenset(keys)
        self.ready: Future[None] = Future()


class Turns:
    """Turns in the order in which they were entered. Thread-safe. `_queues`: the turns of each key, first to last."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, dict[Turn, None]] = {}
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._queues)

    def enter(self, turn: Turn) -> bool:
        """Add a turn after all others that have a key in common with it. Return whether it is ready at once."""
        with self._guard:
            for key in turn.keys:
                self._queues.setdefault(key, {})[turn] = None
            return self._is_first(turn)

    def leave(self, turn: Turn) -> None:
        """End a turn, ready or not. Turns that are now the first of all their keys become ready."""
        with self._guard:
            for key in turn.keys:
                del self._queues[key][turn]
                if not self._queues[key]:
                    del self._queues[key]
            for first in {next(iter(self._queues[key])) for key in turn.keys & self._queues.keys()}:
                if not first.ready.done() and self._is_first(first):
                    first.ready.set_result(None)

    def _is_first(self, turn: Turn) -> bool:
        """Return whether the turn is the first of all its keys."""
        return all(next(iter(self._queues[key])) is turn for key in turn.keys)
