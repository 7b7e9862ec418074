"""Tests that wait until some thread has logged something."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

WAIT_S = 60.0


def told(caplog: pytest.LogCaptureFixture, package: str = "workers") -> list[str]:
    """What this package logged in the test: Ray's threads log when they come to it."""
    return [record.message for record in caplog.records if record.name.partition(".")[0] == package]


class _Watch(logging.Handler):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.seen = threading.Semaphore(0)

    def emit(self, record: logging.LogRecord) -> None:
        if self.text in record.getMessage():
            self.seen.release()


@contextmanager
def logged(text: str, times: int = 1) -> Iterator[None]:
    """Does not end before the package has logged `text` so often since its beginning."""
    watch = _Watch(text)
    loggers = [logging.getLogger(name) for name in ("dataplane", "workers")]
    for logger in loggers:
        logger.addHandler(watch)
    try:
        yield
        for _ in range(times):
            assert watch.seen.acquire(timeout=WAIT_S), f"nobody logged {text!r}"
    finally:
        for logger in loggers:
            logger.removeHandler(watch)
