"""Waits in steps, with a log message for each `LOG_EVERY_S` of waiting."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from enum import Enum
from typing import Any, Final, TypeAlias

from dataplane.core.durations import UNLIMITED_S, as_timeout

LOG_EVERY_S = 30.0
"""A wait is logged each time this much more of it has passed."""

_log = logging.getLogger(__name__)


class DefaultTimeout(Enum):
    """The type of `DEFAULT_TIMEOUT`."""

    OF_THE_OBJECT = "the timeout of the object whose method is called"


DEFAULT_TIMEOUT: Final = DefaultTimeout.OF_THE_OBJECT
"""Default of the argument `timeout_s` of methods, of which None means no timeout."""
Timeout: TypeAlias = float | DefaultTimeout | None


def timeout_or(default_s: float, timeout_s: Timeout) -> float:
    """Return `default_s` for `DEFAULT_TIMEOUT`, otherwise `timeout_s` as `as_timeout` does."""
    if timeout_s is DEFAULT_TIMEOUT:
        return default_s
    return as_timeout("timeout_s", timeout_s)


def remaining(left_s: float) -> str:
    """Return how much longer a wait lasts, for logs: "at most 20 s more", or "no timeout"."""
    return f"at most {left_s:.0f} s more" if left_s < UNLIMITED_S else "no timeout"


class LoggedWait:
    """A wait in steps, with a log message for each `LOG_EVERY_S` that it lasts. It begins when this object is made.

    timeout_s: seconds until it is over, None for no limit (the attribute is then infinite); log_level: the level of its
    messages. The caller alternates steps of at most `step_s()` seconds and calls of `over`.
    """

    def __init__(self, timeout_s: float | None, log_level: int = logging.WARNING) -> None:
        self.timeout_s = math.inf if timeout_s is None else timeout_s
        self._log_level = log_level
        self._begun = self._logged = time.monotonic()  # `_logged`: time of the last message, at first of the start

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._begun

    def step_s(self, longest_s: float = math.inf) -> float:
        """Return how many seconds the next step may block: until the timeout or the next log message, at most
        `longest_s`."""
        now = time.monotonic()
        until_timeout_s = self._begun + self.timeout_s - now
        until_log_s = self._logged + LOG_EVERY_S - now
        return max(min(until_timeout_s, until_log_s, longest_s), 0.0)

    def over(self, what: str) -> bool:
        """Return whether the timeout has passed. If not, log `what` when a message is due. Call this after each step
        without a result."""
        now = time.monotonic()
        if now - self._begun >= self.timeout_s:
            return True
        if now - self._logged >= LOG_EVERY_S:
            self._logged = now
            _log.log(self._log_level, "%s: waiting for %.0f s so far", what, now - self._begun)
        return False


def done_within(future: Future[Any], what: str, timeout_s: float | None) -> bool:
    """Wait at most `timeout_s` (None: no limit) for `future`; return whether it is done. what: the operation, for the
    log."""
    wait = LoggedWait(timeout_s)
    while not future.done():
        with contextlib.suppress(FutureTimeout):
            future.exception(wait.step_s())  # waits; an error of the future is returned, not raised
        if not future.done() and wait.over(what):
            return False
    return True
