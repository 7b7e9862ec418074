"""Durations: validation of those passed by callers (timeouts, leases, intervals), and pauses between attempts.

Random numbers come from the operating system, so that the global `random` state, which the user may have seeded, does
not change."""

from __future__ import annotations

import math
import numbers
import random
from typing import Any

from dataplane.errors import InvalidRequestError

LONGEST_S = 1e9
"""Maximum duration (31 years), which clocks and conditions accept. Longer durations are clamped to
it. As a timeout it stands for none (`as_timeout`)."""
UNLIMITED_S = LONGEST_S / 2
"""A timeout of at least this time stands for none, also after a part of `LONGEST_S` has passed."""


def seconds(name: str, value: Any, *, positive: bool = False) -> float:
    """Return `value` of the argument `name` as seconds, at most `LONGEST_S`. Raises TypeError if it is not a number (a
    bool is rejected), and `InvalidRequestError` (a ValueError) if it is negative, infinite or NaN, or 0 with
    `positive`."""
    duration_s = _number(name, value)
    # The comparison is also false for NaN.
    if not 0 <= duration_s < math.inf or (positive and duration_s == 0):
        least = "more than 0" if positive else "0 or more"
        raise InvalidRequestError(f"{name}={duration_s}: expected seconds, {least} and finite")
    return min(duration_s, LONGEST_S)


def seconds_if_any(name: str, value: Any, *, positive: bool = False) -> float | None:
    """Like `seconds`, but return None for None."""
    return None if value is None else seconds(name, value, positive=positive)


def as_timeout(name: str, value: Any) -> float:
    """Return the timeout `value` of the argument `name` in seconds, at most `LONGEST_S`: this
    stands for None and infinity, which are no timeout. Raises TypeError if it is neither None nor a
    number (a bool is rejected), and `InvalidRequestError` (a ValueError) if it is negative or
    NaN."""
    timeout_s = LONGEST_S if value is None else _number(name, value)
    if not timeout_s >= 0:  # this form also rejects NaN
        expected = "0 or more, or None or infinity for no timeout"
        raise InvalidRequestError(f"{name}={timeout_s}: expected seconds, {expected}")
    return min(timeout_s, LONGEST_S)


def _number(name: str, value: Any) -> float:
    """Return `value` as a float, infinite if it is too large. TypeError for a bool or no number."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number:
        got = type(value).__name__
        raise TypeError(f"{name}={value!r}: expected seconds as a number, got {got}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def jittered(pause_s: float) -> float:
    """Return the pause times a random factor in [0.5, 1], so that many waiting clients do not retry at once."""
    return pause_s * random.SystemRandom().uniform(0.5, 1.0)


class Backoff:
    """Pauses between attempts, in seconds: `first_s` at first, doubled after each attempt, up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.next_s = first_s

    def take(self, most_s: float = float("inf")) -> float:
        """Return the next pause, at most `most_s`, with jitter: between half of the pause and the full pause."""
        pause_s = min(self.next_s, most_s)
        self.next_s = min(2 * self.next_s, self._longest_s)
        return jittered(pause_s)

    def reset(self) -> None:
        """Start again with `first_s`."""
        self.next_s = self._first_s


def pick(first: int, end: int) -> int:
    """Return a random number in [first, end)."""
    return random.SystemRandom().randrange(first, end)
