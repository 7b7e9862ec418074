"""Parsing and formatting of sizes, times and names for people."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import typer

from dataplane.config import GIB, MIB
from dataplane.core.durations import as_timeout, seconds

_SUFFIXES = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB, "t": GIB << 10}
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400


def size(text: str) -> int:
    """Parse "512m", "4g", "4GiB" or a plain number to bytes."""
    without_unit = text.strip().lower().removesuffix("ib").removesuffix("b")  # ends with a suffix or a digit
    suffix = without_unit[-1:] if without_unit[-1:] in _SUFFIXES else ""
    try:
        return int(float(without_unit.removesuffix(suffix)) * _SUFFIXES[suffix])
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a size; write 512m, 4g or a number of bytes") from None


def duration(text: str) -> float:
    """Parse a finite number of seconds, e.g. "30" or "0.5"."""
    try:
        return seconds("it", float(text))  # the name "it" would be in the error's text, which is replaced below
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a duration; write a number of seconds, 0 or more") from None


def time_limit(text: str) -> float:
    """Parse a time limit in seconds, e.g. "30"; "inf" for none."""
    try:
        return as_timeout("it", float(text))  # as in `duration`
    except ValueError:
        expected = 'write a number of seconds, 0 or more, or "inf" for no limit'
        raise typer.BadParameter(f"{text!r} is not a time limit; {expected}") from None


def readable(count: float) -> str:
    """Format bytes, e.g. 1.5 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def ago(seconds: float) -> str:
    """Format a duration, e.g. 12.3 s, 5 min, 2 h, 3 d; "no end" for infinity."""
    if math.isinf(seconds):
        return "no end"
    for unit, length in (("d", _DAY_S), ("h", _HOUR_S), ("min", _MINUTE_S)):
        if seconds >= 2 * length:  # the largest unit of which there are at least two
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0.0):.1f} s"


def counted(count: int, what: str) -> str:
    """Format a count with its noun: 1 sample, 2 samples."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def shown(name: str) -> str:
    """Make a name safe for a terminal: quote it if it has control characters."""
    return name if name.isprintable() else ascii(name)


def pairs(values: Mapping[str, Any]) -> str:
    """Format a mapping as "a=1 b=2", with names and texts passed through `shown`."""
    return " ".join(f"{shown(name)}={_format_value(value)}" for name, value in values.items())


def _format_value(value: Any) -> str:
    return shown(value) if isinstance(value, str) else repr(value)
