"""Plain Python numbers in object fields: the smallest dtype that holds them, and the dtypes to which they convert.

This module imports neither torch nor numpy: the command line loads it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
DIGITS: dict[str, int] = {
    "float8_e4m3fn": 4,
    "float8_e5m2": 3,
    "float16": 11,
    "bfloat16": 8,
    "float32": 24,
    "float64": 53,
    "complex64": 24,
    "complex128": 53,
}
"""Number of binary digits of an integer that each of them holds exactly."""
RANGES: dict[str, tuple[int, int]] = {
    "bool": (0, 1),
    "uint8": (0, (1 << 8) - 1),
    "int8": (-(1 << 7), (1 << 7) - 1),
    "uint16": (0, (1 << 16) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "uint32": (0, (1 << 32) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "uint64": (0, (1 << 64) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
}
"""The smallest and the largest number of each other dtype, narrow ones first."""
_FLOATS = ("float16", "float32", "float64")


def numbers_dtype(values: Sequence[Any]) -> str | None:
    """Return the name of the smallest dtype that holds all of the values: "bool" if all are bools, else an integer type
    if all are integers, else a float type. None if there are no values, if one of them is not a bool, int or float, or
    if no dtype holds them all."""
    types = set(map(type, values))
    if not types or not types <= {bool, int, float}:
        return None
    if types == {bool}:
        return "bool"
    whole = [value for value in values if type(value) is not float]
    integers = _integer_type(min(whole), max(whole)) if whole else "bool"
    if float not in types or integers is None:
        return integers
    largest = max((abs(value) for value in values if type(value) is float and math.isfinite(value)), default=0.0)
    return next((name for name in _FLOATS if largest <= LARGEST[name] and fits(integers, name)), None)


def joined_dtype(one: str | None, other: str | None) -> str | None:
    """Return the smallest dtype that holds the numbers of both, which are results of `numbers_dtype`; None if there is
    none, or if one of them is None (not only numbers)."""
    if one is None or other is None or one == other:
        return one if one == other else None
    if one in RANGES and other in RANGES:
        lows, highs = zip(RANGES[one], RANGES[other], strict=True)
        return _integer_type(min(lows), max(highs))
    return next((name for name in _FLOATS if fits(one, name) and fits(other, name)), None)


def fits(numbers: str, dtype: str) -> bool:
    """Whether every number of the dtype `numbers`, a result of `numbers_dtype`, converts to `dtype`: integers exactly,
    and fractions rounded. A number does not fit a bool, nor a fraction an integer."""
    if numbers == "bool":
        return True
    if dtype == "bool":
        return False
    if numbers in RANGES:
        low, high = RANGES[numbers]
        if dtype in RANGES:
            return RANGES[dtype][0] <= low and high <= RANGES[dtype][1]
        return max(-low, high).bit_length() <= DIGITS[dtype]
    return dtype in LARGEST and LARGEST[numbers] <= LARGEST[dtype]


def number_fits(number: float, dtype: str) -> bool:
    """Whether a plain bool, int or float converts to the dtype: exactly to an integer type and to a bool, an integer
    exactly to a float type, and a fraction rounded to a finite number (infinity and NaN stay what they are)."""
    if dtype in RANGES:
        low, high = RANGES[dtype]
        return math.isfinite(number) and number == int(number) and low <= number <= high
    if isinstance(number, float):
        return not math.isfinite(number) or abs(number) <= LARGEST[dtype]
    size = abs(number)
    digits = size.bit_length() - max((size & -size).bit_length() - 1, 0)
    return size <= LARGEST[dtype] and digits <= DIGITS[dtype]


def _integer_type(low: int, high: int) -> str | None:
    """Return the smallest integer type from `low` to `high`; None if there is none."""
    return next(
        (name for name, (first, last) in RANGES.items() if name != "bool" and first <= low and high <= last), None
    )
