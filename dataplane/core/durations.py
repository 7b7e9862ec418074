"""Waits, leases and intervals as callers give them."""

from __future__ import annotations

import math
import numbers
from typing import Any

from dataplane.errors import InvalidRequestError

LONGEST_S = 1e9
"""What is longer counts as this, 31 years: clocks and conditions take it."""


def seconds(name: str, value: Any, *, positive: bool = False) -> float:
    """`value`, of the argument `name`, as seconds. TypeError if it is no number (a bool is none); `InvalidRequestError`
    (a ValueError) if it is negative, infinite or not a number at all, and if it is 0 and was to be `positive`."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected seconds as a number, got {type(value).__name__}")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not 0 <= found < math.inf or (positive and not found):
        least = "more than 0" if positive else "0 or more"
        raise InvalidRequestError(f"{name}={found}: expected seconds, {least} and finite; a wait has an end")
    return min(found, LONGEST_S)


def seconds_if_any(name: str, value: Any, *, positive: bool = False) -> float | None:
    """The same; None stays None."""
    return None if value is None else seconds(name, value, positive=positive)
