"""Validation of durations (timeouts, leases, intervals) passed by callers."""

from __future__ import annotations

import math
import numbers
from typing import Any

from dataplane.errors import InvalidRequestError

LONGEST_S = 1e9
"""Maximum duration (31 years), which clocks and conditions accept. Longer durations are clamped to it."""


def seconds(name: str, value: Any, *, positive: bool = False) -> float:
    """Return `value` of the argument `name` as seconds, at most `LONGEST_S`. Raises TypeError if it is not a number (a
    bool is rejected), and `InvalidRequestError` (a ValueError) if it is negative, infinite or NaN, or 0 with
    `positive`."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected seconds as a number, got {type(value).__name__}")
    try:
        duration_s = float(value)
    except OverflowError:
        duration_s = math.inf
    # The comparison is also false for NaN.
    if not 0 <= duration_s < math.inf or (positive and duration_s == 0):
        least = "more than 0" if positive else "0 or more"
        raise InvalidRequestError(f"{name}={duration_s}: expected seconds, {least} and finite")
    return min(duration_s, LONGEST_S)


def seconds_if_any(name: str, value: Any, *, positive: bool = False) -> float | None:
    """Like `seconds`, but return None for None."""
    return None if value is None else seconds(name, value, positive=positive)
