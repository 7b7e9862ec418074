"""What closing waits for, kept so that an interrupt cannot leave it wrong."""

from __future__ import annotations

import threading
import time
import weakref


class UnderWay:
    """The calls inside something that is going to be closed. Each holds a lock of its own, which it made, by a `with`
    statement: the interpreter raises KeyboardInterrupt neither between taking a lock and entering the block nor between
    leaving the block and releasing it. So a call that was interrupted anywhere is not under way. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._calls: weakref.WeakSet[threading.Lock] = weakref.WeakSet()
        self._shut = False

    def __len__(self) -> int:
        with self._guard:
            return sum(call.locked() for call in self._calls)

    def enter(self, call: threading.Lock) -> bool:
        """The call that holds this lock is under way until it releases it; also where it is already. False after `shut`
        if it was not."""
        with self._guard:
            if self._shut and call not in self._calls:
                return False
            self._calls.add(call)
            return True

    def hand_over(self, call: threading.Lock) -> threading.Lock:
        """A lock that is held, for what goes on with a call that is under way; also after `shut`."""
        heir = threading.Lock()
        heir.acquire()
        with self._guard:
            assert call in self._calls, "not under way"
            self._calls.add(heir)
        return heir

    def shut(self) -> None:
        """From now on none enters."""
        with self._guard:
            self._shut = True

    def wait(self, timeout_s: float) -> int:
        """Until all have ended; how many have not, after `timeout_s`."""
        with self._guard:
            calls = list(self._calls)
        end = time.monotonic() + timeout_s
        return sum(not _ended(call, end) for call in calls)


def _ended(call: threading.Lock, end: float) -> bool:
    while call.locked():
        if not call.acquire(timeout=max(0.0, end - time.monotonic())):
            return False
        call.release()
    return True
