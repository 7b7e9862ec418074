"""Log lines of limited rate. Peers could otherwise fill the log with invalid requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

EVERY_S = 10.0
"""Interval between lines of one kind."""


class LimitedLog:
    """Writes one line to `log`, then suppresses lines for `EVERY_S` seconds. The next line contains
    the number of suppressed ones. Thread-safe."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._next = float("-inf")  # no line before this time
        self._suppressed = 0

    def take(self, text: str) -> str | None:
        """Return `text` as one line to log, with the number of lines suppressed before it, or None
        if it is suppressed itself."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._suppressed += 1
                return None
            suppressed, self._suppressed = self._suppressed, 0
            self._next = now + EVERY_S
        more = f" (earlier lines of this kind not logged: {suppressed:,})" if suppressed else ""
        return " ".join(text.split()) + more

    def write(self, level: int, text: str, error: Exception | None = None) -> None:
        """Log `text`, and the traceback of `error`, unless the line is suppressed."""
        line = self.take(text)
        if line is not None:
            self._log.log(level, "%s", line, exc_info=error)


class OneLine(logging.Filter):
    """A logging filter that reduces tracebacks to one line and limits their rate. Libraries log such tracebacks when a
    peer closes a connection during a call."""

    def __init__(self, lines: LimitedLog) -> None:
        super().__init__()
        self._lines = lines

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record. If it has an exception, change it to one line without a traceback."""
        error = record.exc_info[1] if record.exc_info else None
        if error is None:  # no traceback: log it unchanged
            return True
        line = self._lines.take(f"{record.getMessage()}: {error!r}")
        if line is None:
            return False
        record.msg = line
        record.args = ()
        record.exc_info = None
        record.exc_text = None
        return True
