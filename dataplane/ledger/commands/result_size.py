"""Estimate the size of an answer in bytes without visiting each of its samples."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from dataplane.errors import DataPlaneError
from dataplane.ledger.commands import Allocated, Result

FEW_ROWS = 32
"""An answer about fewer rows or placements counts as small."""
SMALL_BYTES = 4096
"""Smaller answers count as 0 bytes, because the number of answers is bounded, too."""
_ITEM_BYTES = 64
"""Assumed size of a string, number or tag in a tuple."""


def size_of(result: Result | DataPlaneError) -> int:
    """Return the approximate size of a result in bytes, or 0 for an error or a small result."""
    if isinstance(result, DataPlaneError):
        return 0
    rows = result.placements if type(result) is Allocated else getattr(result, "rows", None)
    if rows is not None and len(rows) < FEW_ROWS:  # small without a look at its fields
        return 0
    size = _approximate_bytes(result)
    return size if size >= SMALL_BYTES else 0


def _approximate_bytes(value: Any) -> int:
    """Return about how many bytes the value takes. Of a tuple, the first item decides whether its items are examined
    one by one."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, msgspec.Struct):
        return sum([_approximate_bytes(getattr(value, name)) for name in value.__struct_fields__])
    if isinstance(value, tuple):
        if value and isinstance(value[0], msgspec.Struct | tuple):
            return sum(map(_approximate_bytes, value))
        return _ITEM_BYTES * len(value)
    if isinstance(value, dict):
        return _ITEM_BYTES * len(value)
    return 8  # a number, or None
