"""Waits for futures, with a log message for each `LOG_EVERY_S` of waiting."""

from __future__ import annotations

import contextlib
import logging
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

LOG_EVERY_S = 30.0
"""A wait is logged whenever so much more of it has passed."""

_log = logging.getLogger(__name__)


def done_within(future: Future[Any], what: str, timeout_s: float | None) -> bool:
    """Wait at most `timeout_s` for `future`; return whether it is done. what: the operation, for the log."""
    begun = time.monotonic()
    while not future.done():
        left_s = LOG_EVERY_S if timeout_s is None else min(LOG_EVERY_S, begun + timeout_s - time.monotonic())
        with contextlib.suppress(FutureTimeout):
            future.exception(max(left_s, 0))
        waited_s = time.monotonic() - begun
        if future.done():
            break
        if timeout_s is not None and waited_s >= timeout_s:
            return False
        _log.warning("%s: waiting for %.0f s so far", what, waited_s)
    return True
