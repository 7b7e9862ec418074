"""Columns of numbers that grow with their partition."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
MASK = (1 << 64) - 1
A = TypeVar("A", bound=np.ndarray[Any, Any])


def grown(array: A, size: int) -> A:
    """A copy of `array` with space for `size` items; the new ones are zeros, untouched in memory."""
    larger = np.zeros(size, array.dtype)
    larger[: len(array)] = array
    return larger  # type: ignore[return-value]


def next_capacity(capacity: int, wanted: int) -> int:
    """The next capacity that holds `wanted`."""
    capacity = max(capacity, 64)
    while capacity < wanted:
        capacity += capacity // 2 if capacity >= 1 << 16 else capacity
    return capacity


def some(flags: Bools | np.ndarray[Any, Any]) -> bool:
    """Whether any is set. As `flags.any()`, which costs three times as much where they are few."""
    return bool(np.count_nonzero(flags))


def every(flags: Bools | np.ndarray[Any, Any]) -> bool:
    """Whether all are set. As `flags.all()`, which costs three times as much where they are few."""
    return bool(np.count_nonzero(flags) == len(flags))


def top(values: Int64s) -> int:
    """The largest, 0 of none. A negative one counts as beyond 2^63: one look finds what is too large and too small."""
    if len(values) == 1:
        return int(values[0]) & MASK
    return int(values.view(np.uint64).max()) if len(values) else 0


def total(values: Int64s) -> int:
    """Their sum."""
    return int(values[0]) if len(values) == 1 else int(np.add.reduce(values))


def tally(keys: Int32s, amounts: Int64s) -> tuple[Int32s, Int64s, Int64s]:
    """The keys (at least one) each once, ascending; how often each stood there; and the sum of its amounts."""
    order = keys.argsort(kind="stable")
    ordered = keys[order]
    firsts = np.concatenate(([0], (ordered[1:] != ordered[:-1]).nonzero()[0] + 1))
    counts = np.concatenate((firsts[1:], [len(ordered)])) - firsts
    return ordered[firsts], counts, np.add.reduceat(amounts[order], firsts)


def first_true(flags: Bools) -> list[int]:
    """Positions of the first few set flags."""
    return [int(i) for i in np.flatnonzero(flags)[:5]]
