"""Rate-limited logging of invalid requests. Unauthenticated peers could otherwise fill the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

COMPLAIN_S = 10.0
"""Default interval between messages of one kind."""


class Complaints:
    """Passes one message, then suppresses messages for `every_s` seconds. The next message contains the number of
    suppressed ones. Thread-safe."""

    def __init__(self, every_s: float = COMPLAIN_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next = float("-inf")  # no message before this time
        self._suppressed = 0

    def take(self, text: str) -> str | None:
        """Return `text` as one line to log, with the number of messages suppressed before it, or None if it is
        suppressed itself."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._suppressed += 1
                return None
            suppressed, self._suppressed = self._suppressed, 0
            self._next = now + self._every_s
        line = " ".join(text.split())
        return f"{line} (earlier requests of this kind not logged: {suppressed:,})" if suppressed else line

    def warn(self, log: logging.Logger, text: str) -> None:
        """Log `text` as a warning, unless it is suppressed."""
        line = self.take(text)
        if line is not None:
            log.warning("%s", line)


class OneLine(logging.Filter):
    """A logging filter that reduces tracebacks to one line and limits their rate. Libraries log such tracebacks when a
    peer closes a connection during a call."""

    def __init__(self, complaints: Complaints) -> None:
        super().__init__()
        self._complaints = complaints

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. If it has an exception, change it to one line without a traceback."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:  # no traceback: log it unchanged
            return True
        line = self._complaints.take(f"{record.getMessage()}: {error!r}")
        if line is None:
            return False
        record.msg, record.args, record.exc_info, record.exc_text = line, (), None, None
        return True
