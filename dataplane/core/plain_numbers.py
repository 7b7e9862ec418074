"""Plain Python numbers in object fields: the smallest dtype that holds them, and the dtypes to which they convert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

LARGEST: dict[str, float] = {
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
    "float16": 65504.0,
    "bfloat16": float.fromhex("0x1.fep127"),
    "float32": float.fromhex("0x1.fffffep127"),
    "float64": float.fromhex("0x1.fffffffffffffp1023"),
    "complex64": float.fromhex("0x1.fffffep127"),
    "complex128": float.fromhex("0x1.fffffffffffffp1023"),
}
"""The largest finite number of each dtype that has fractions."""


def numbers_dtype(values: Sequence[Any]) -> str | None:
    """Return the name of the smallest numpy dtype whose range holds all of the values: "bool", an integer type, or a
    float type if one of them is a float. None if there are no values, if one of them is not a bool, int or float, or if
    an integer has more than 64 bits."""
    if not values or not all(type(value) in (bool, int, float) for value in values):
        return None
    ordered = [value for value in values if value == value]  # without NaN
    extremes = [min(ordered), max(ordered)] if ordered else []
    one_of_each_type = {type(value): value for value in values}.values()
    found = [np.min_scalar_type(value) for value in (*extremes, *one_of_each_type)]
    return None if any(dtype.hasobject for dtype in found) else str(np.result_type(*found))


def joined_dtype(one: str | None, other: str | None) -> str | None:
    """Return the dtype that holds the numbers of both; None if one of them is None (not only numbers)."""
    return None if one is None or other is None else str(np.promote_types(one, other))


def fits(numbers: str, dtype: str) -> bool:
    """Whether every number of the dtype `numbers`, a result of `numbers_dtype`, converts to `dtype`. Integers and
    floats are rounded if necessary; fractions do not fit integers, nor numbers a bool."""
    source = np.dtype(numbers)
    if dtype in LARGEST:
        if source.kind == "b":
            return True
        largest = np.iinfo(source).max if source.kind in "iu" else LARGEST[numbers]
        return largest <= LARGEST[dtype]
    return source.kind in "biu" and np.can_cast(source, np.dtype(dtype), "safe")
