"""The micro-batches that a thread has fetched ahead of their consumer."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

from dataplane.errors import (
    CallTimeoutError,
    ClaimTimeoutError,
    ClientClosedError,
    PartitionDroppedError,
    PartitionNotFoundError,
)

T = TypeVar("T")


class PrefetchQueue(Generic[T]):
    """At most `capacity` micro-batches between the prefetch thread and the consumer. `_late`: timeout of the last
    claim, if any. `_ended`, `_failure`: the thread has reached the end of the stream, or an error. `_reported`: the
    consumer has received that end or error. `_closed`: `close` was called."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._late: ClaimTimeoutError | None = None
        self._failure: Exception | None = None
        self._ended = self._reported = self._closed = False

    def wait_for_space(self) -> bool:
        """Block until there is space. Return False after the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._capacity)
            return not self._closed

    def put(self, batch: T | None) -> None:
        """Add a micro-batch, or None for the end. What is added after closing is left for `take_rest`."""
        with self._changed:
            if batch is None:
                self._ended = True
            else:
                self._ready.append(batch)
            self._late = None  # the last claim did not time out
            self._changed.notify_all()

    def record_timeout(self, error: ClaimTimeoutError) -> None:
        """Record the error of a claim that timed out, which `take` then raises at its own timeout."""
        with self._changed:
            self._late = error

    def fail(self, error: Exception) -> None:
        """Record the error that ended the prefetch thread."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def take(self, timeout_s: float, *, waited_s: float) -> T | None:
        """Remove and return the first micro-batch, None at the end. Raise `ClientClosedError` after closing, the error
        that ended the prefetch thread, or TimeoutError after `timeout_s`, which reports the time `waited_s`."""
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: self._ready or self._ended or self._failure or self._closed, timeout_s
            )
            self.check_open()
            if self._ready:  # also after the end or an error, which come last
                self._changed.notify_all()  # the thread has space
                return self._ready.popleft()
            if not in_time:
                raise self._timeout_error(waited_s)
            self._reported = True
            if self._failure is not None:
                raise self._failure
            return None

    def reset_if_over(self) -> bool:
        """Reset the end or error of the thread, and return True, if the consumer has received it, or if the error says
        that the partition did not exist: it may exist again now. A new thread is then needed."""
        with self._changed:
            no_partition = isinstance(self._failure, PartitionNotFoundError | PartitionDroppedError) and not self._ready
            is_over = (self._reported or no_partition) and not self._closed
            self._reported = False
            if is_over:
                self._ended, self._failure, self._late = False, None, None
            return is_over

    def _timeout_error(self, waited_s: float) -> Exception:
        """Return the error of the last claim that timed out, or one without a reason if there was none."""
        if self._late is None:
            return CallTimeoutError(what="the next micro-batch of a loader", waited_s=waited_s, peer="the service")
        return ClaimTimeoutError(**{**self._late.facts, "waited_s": waited_s})

    def check_open(self) -> None:
        if self._closed:
            raise ClientClosedError(why="the StreamingDataLoader was closed; create another one")

    def close(self) -> None:
        """Close the queue: `take` fails from now on. The micro-batches stay for `take_rest`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take_rest(self) -> list[T]:
        """Remove and return the micro-batches that were not taken before closing."""
        with self._changed:
            rest, self._ready = list(self._ready), deque()
            return rest
