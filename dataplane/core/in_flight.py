"""Registry of active calls for which `close` waits. A KeyboardInterrupt cannot leave it inconsistent."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class InFlight:
    """The active calls of an object that can be closed. Each call creates a lock and holds it with a `with` statement.
    The interpreter does not raise KeyboardInterrupt between acquiring the lock and entering the block, or between
    leaving the block and releasing the lock. An interrupted call therefore always counts as ended, even if it did not
    call `leave`. Thread-safe: each step is a single set operation."""

    def __init__(self) -> None:
        # The locks of the registered calls. Calls whose lock is held are active.
        self._calls: set[threading.Lock] = set()
        self._shut = False
        self.leave: Callable[[threading.Lock], None] = self._calls.discard
        """Remove the call, if it is registered. It is a method of the set, without a call of ours:
        most callers have not registered."""

    def __len__(self) -> int:
        return sum(call.locked() for call in self._calls.copy())

    def enter(self, call: threading.Lock) -> bool:
        """Register the call that holds this lock; it is active until it calls `leave` or releases the lock. Idempotent.
        Return False after `shut`, unless the call is already registered."""
        if call in self._calls:
            return True
        # Added before `_shut` is read: either the call sees `_shut`, or the `wait` after `shut` sees the call.
        self._calls.add(call)
        if self._shut:
            self.leave(call)
            return False
        return True

    def hand_over(self, call: threading.Lock) -> threading.Lock:
        """Register a new lock and return it held, for background work that continues a registered call and releases the
        lock at its end. Also works after `shut`."""
        assert call in self._calls, "the call is not registered"
        successor = threading.Lock()
        successor.acquire()
        self._calls.add(successor)
        return successor

    def shut(self) -> None:
        """Reject new calls from now on."""
        self._shut = True

    def wait(self, timeout_s: float) -> int:
        """Wait until all calls have ended, for at most `timeout_s`. Return the number of calls still active."""
        end = time.monotonic() + timeout_s
        while True:
            active = sum(not wait_for_end(call, end) for call in self._calls.copy())
            if active or not len(self):  # not: a call has handed over meanwhile
                return active


def wait_for_end(call: threading.Lock, end: float) -> bool:
    """Wait until the call that holds this lock has released it, at most until the time `end`. Return whether it has."""
    if not call.acquire(timeout=max(0.0, end - time.monotonic())):
        return False
    call.release()
    return True
