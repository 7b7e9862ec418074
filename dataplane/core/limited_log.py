"""Lines of the log about what others send: strangers decide how many there are, so only some of them are written."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

COMPLAIN_S = 10.0


class Complaints:
    """Lets one through, then none for `every_s` seconds; the next says how many were held back. Thread-safe."""

    def __init__(self, every_s: float = COMPLAIN_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._next = float("-inf")
        self._held = 0

    def take(self, text: str) -> str | None:
        """The line to write, without the line breaks of `text`; None: none now."""
        with self._lock:
            now = self._clock()
            if now < self._next:
                self._held += 1
                return None
            held, self._held, self._next = self._held, 0, now + self._every_s
        line = " ".join(text.split())
        return f"{line} (and {held:,} more such requests before)" if held else line


class OneLine(logging.Filter):
    """Makes one line of each traceback that a library logs when a peer ends a call at an unlucky moment."""

    def __init__(self, complaints: Complaints) -> None:
        super().__init__()
        self._complaints = complaints

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return True
        line = self._complaints.take(f"{record.getMessage()}: {error!r}")
        record.msg, record.args, record.exc_info, record.exc_text = line or "", (), None, None
        return line is not None
