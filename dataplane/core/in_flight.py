"""What closing waits for, kept so that an interrupt cannot leave it wrong."""

from __future__ import annotations

import threading
import time


class InFlight:
    """The calls inside something that is going to be closed. Each holds a lock of its own, which it made, by a `with`
    statement: the interpreter raises KeyboardInterrupt neither between taking a lock and entering the block nor between
    leaving the block and releasing it. So a call that was interrupted anywhere is not under way, also where it could
    not `leave`. Thread-safe: each step is one operation of a set."""

    def __init__(self) -> None:
        self._calls: set[threading.Lock] = set()
        self._shut = False

    def __len__(self) -> int:
        return sum(call.locked() for call in self._calls.copy())

    def enter(self, call: threading.Lock) -> bool:
        """The call that holds this lock is under way until it leaves or releases it; also where it is already. False
        after `shut` if it was not."""
        if call in self._calls:
            return True
        # In this order: `wait` finds the call, or the call finds that this is shut.
        self._calls.add(call)
        if self._shut:
            self._calls.discard(call)
            return False
        return True

    def leave(self, call: threading.Lock) -> None:
        """The call, if it entered, is not under way any more."""
        self._calls.discard(call)

    def hand_over(self, call: threading.Lock) -> threading.Lock:
        """A lock that is held, for what goes on with a call that is under way; also after `shut`."""
        assert call in self._calls, "not under way"
        heir = threading.Lock()
        heir.acquire()
        self._calls.add(heir)
        return heir

    def shut(self) -> None:
        """From now on none enters."""
        self._shut = True

    def wait(self, timeout_s: float) -> int:
        """Until all have ended; how many have not, after `timeout_s`."""
        end = time.monotonic() + timeout_s
        return sum(not _ended(call, end) for call in self._calls.copy())


def _ended(call: threading.Lock, end: float) -> bool:
    if not call.acquire(timeout=max(0.0, end - time.monotonic())):
        return False
    call.release()
    return True
