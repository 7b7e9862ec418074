"""Checks of the arguments that callers pass."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

from dataplane.errors import InvalidRequestError


def whole_number(name: str, value: Any, least: int) -> int:
    """Return `value` of the argument `name` as an int. Raises `InvalidRequestError` (a ValueError)
    unless it is an integer (a bool is rejected) of at least `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        shown = reprlib.repr(value)
        raise InvalidRequestError(f"{name}={shown}: expected an integer of {least} or more")
    return number
