"""Calls that take turns, such as the appends to a sample."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from concurrent.futures import Future


class Turn:
    """The turn of a call. ready: done when it is the first turn of all its keys. `blocked`: the number of keys of which
    it is not the first."""

    def __init__(self, keys: Iterable[Hashable]) -> None:
        self.keys = frozenset(keys)
        self.ready: Future[None] = Future()
        self.blocked = 0


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
                queue = self._queues.setdefault(key, {})
                turn.blocked += bool(queue)
                queue[turn] = None
        return not turn.blocked

    def leave(self, turn: Turn) -> None:
        """End a turn, ready or not, entered or not. Turns that are now the first of all their keys become ready."""
        ready = []
        with self._guard:
            for key in turn.keys:
                queue = self._queues.get(key, {})
                was_first = next(iter(queue), None) is turn
                queue.pop(turn, None)
                if not queue:
                    self._queues.pop(key, None)
                elif was_first:
                    first = next(iter(queue))
                    first.blocked -= 1
                    if not first.blocked:
                        ready.append(first)
        for each in ready:
            each.ready.set_result(None)
