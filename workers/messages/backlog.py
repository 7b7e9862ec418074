"""Counts the bytes of messages that a worker keeps for others."""

from __future__ import annotations

import threading

from workers.errors import MessageBacklogError


class Backlog:
    """Bytes of messages that are sent and not received yet, or forwarded. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._waiting = 0
        self._guard = threading.Lock()

    @property
    def waiting_bytes(self) -> int:
        """The bytes that are kept now."""
        return self._waiting

    def admit(self, nbytes: int, what: str) -> None:
        """Count `nbytes` until `free`. `MessageBacklogError`, which names the operation `what`, if they would exceed
        the limit."""
        with self._guard:
            if self._waiting + nbytes > self._limit:
                raise MessageBacklogError(
                    what=what, nbytes=nbytes, waiting_bytes=self._waiting, limit_bytes=self._limit
                )
            self._waiting += nbytes

    def free(self, nbytes: int) -> None:
        with self._guard:
            self._waiting -= nbytes
