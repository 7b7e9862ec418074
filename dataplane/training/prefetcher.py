"""A thread that claims and reads micro-batches ahead of the consumer of a `StreamingDataLoader`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from dataplane.errors import (
    CallTimeoutError,
    ClaimTimeoutError,
    ClientClosedError,
    PartitionDroppedError,
    PartitionNotFoundError,
)

T = TypeVar("T")
CLAIM_S = 1.0
"""Longest wait of one claim by the prefetch thread, and thus the longest delay of closing."""


def closed_error() -> ClientClosedError:
    return ClientClosedError(why="the StreamingDataLoader was closed; create another one")


class Prefetcher(Generic[T]):
    """Keeps up to `capacity` micro-batches ready for one consumer. Its thread starts at once, and
    ends with the stream, at an error of a claim, or when it is stopped. After `take` has reported
    the end or an error, the next `take` starts a new thread.

    claim: waits up to the given seconds for the next micro-batch and returns None at the end of the
    stream. release: gives a micro-batch that nobody took back to the task. timeout_s: of the
    consumer, which the message of its TimeoutError states.
    """

    def __init__(
        self,
        claim: Callable[[float], T | None],
        release: Callable[[T], None],
        *,
        capacity: int,
        name: str,
        timeout_s: float,
    ) -> None:
        self._claim = claim
        self._release = release
        self._capacity = capacity
        self._name = name
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._late: ClaimTimeoutError | None = None
        """The error of the last claim, if it timed out."""
        self._ended = False
        """Whether the thread has ended, at the end of the stream or with `_failure`."""
        self._failure: Exception | None = None
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._late = None
        self._ended = False
        self._failure = None
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Claim and read while there is space, until the end, an error or `stop`."""
        # The consumer's timeout error reports why the last claim timed out, so a claim must have timed out before that.
        claim_s = min(CLAIM_S, max(self._timeout_s / 2, 0.05))  # at least 50 ms
        while self._wait_for_space():
            try:
                batch = self._claim(claim_s)
            except ClaimTimeoutError as error:
                self._late = error
                continue
            except Exception as error:
                self._end(error)
                return
            if batch is None:
                self._end(None)
                return
            with self._changed:
                self._ready.append(batch)
                self._late = None
                self._changed.notify_all()
        self._release_rest()  # stopped, perhaps during a claim, whose micro-batch nobody takes

    def _wait_for_space(self) -> bool:
        """Block until there is space. Return False after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._ready) < self._capacity)
            return not self._closed

    def _end(self, failure: Exception | None) -> None:
        with self._changed:
            self._ended = True
            self._failure = failure
            self._changed.notify_all()

    def take(self, timeout_s: float) -> T | None:
        """Remove and return the first micro-batch, None at the end. Raise `ClientClosedError` after
        `stop`, the error that ended the thread, or TimeoutError after `timeout_s`."""
        with self._changed:
            if self._must_start():
                self._start()
            in_time = self._changed.wait_for(lambda: self._ready or self._ended or self._closed, timeout_s)
            if self._closed:
                raise closed_error()
            if self._ready:  # also after the end or an error, which come last
                self._changed.notify_all()  # the thread has space
                return self._ready.popleft()
            if not in_time:
                raise self._timeout_error()
            self._thread = None  # the end is reported now
            if self._failure is not None:
                raise self._failure
            return None

    def _must_start(self) -> bool:
        """Return whether the end was reported, or the partition did not exist: it may exist again."""
        no_partition = isinstance(self._failure, PartitionNotFoundError | PartitionDroppedError)
        return not self._closed and (self._thread is None or (no_partition and not self._ready))

    def _timeout_error(self) -> Exception:
        """Return the error of the last claim, or one without a reason if no claim has timed out."""
        if self._late is None:
            what = "the next micro-batch of a loader"
            return CallTimeoutError(what=what, waited_s=self._timeout_s, peer="the service")
        return ClaimTimeoutError(**{**self._late.facts, "waited_s": self._timeout_s})

    def stop(self) -> None:
        """End the thread, which releases what is ready. Do not wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Stop the thread, wait for its end and release what is ready. Idempotent."""
        self.stop()
        thread = self._thread
        if thread is not None:
            thread.join()
        self._release_rest()

    def _release_rest(self) -> None:
        with self._changed:
            rest = list(self._ready)
            self._ready.clear()
        for batch in rest:
            self._release(batch)
