"""Columns of numbers that grow with their partition."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
A = TypeVar("A", bound=np.ndarray[Any, Any])


def grown(array: A, size: int) -> A:
    """A copy of `array` with room for `size` items; the new ones are zeros, untouched in memory."""
    larger = np.zeros(size, array.dtype)
    larger[: len(array)] = array
    return larger  # type: ignore[return-value]


def room_for(capacity: int, wanted: int) -> int:
    """The next capacity that holds `wanted`."""
    capacity = max(capacity, 64)
    while capacity < wanted:
        capacity += capacity // 2 if capacity >= 1 << 16 else capacity
    return capacity


def first_true(flags: Bools) -> list[int]:
    """Positions of the first few set flags."""
    return [int(i) for i in np.flatnonzero(flags)[:5]]
