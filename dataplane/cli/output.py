"""Parsing and formatting of sizes, times and names for people, and output of commands: JSON, tables, and
lines in which control characters are escaped. Colours are used on terminals only."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import typer

from dataplane.config import GIB, MIB
from dataplane.core.durations import as_timeout, seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_SUFFIXES = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB, "t": GIB << 10}
_MINUTE_S = 60
_HOUR_S = 3600
_DAY_S = 86400


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


_WIDE = 10_000
"""Line width without a terminal, so that other programs read each row as one line."""


def print_json(value: Any) -> None:
    """Print one line of JSON; arrays become lists."""
    print(msgspec.json.encode(value, enc_hook=_to_list).decode(), flush=True)


def print_either(value: Any, text: str, *, json: bool) -> None:
    """Print `value` as one line of JSON if `json` is set, otherwise `text` as one line."""
    if json:
        print_json(value)
    else:
        print(escaped(text), flush=True)


def print_notice(text: str) -> None:
    """Print one line on standard error. Whatever an argument or a service put into `text`, it stays one line and cannot
    control the terminal."""
    print(escaped(text), file=sys.stderr, flush=True)


def escaped(text: str) -> str:
    """Replace characters that are not printable, such as line breaks, by their escape sequences in Python."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _to_list(value: Any) -> Any:
    """Convert a value that msgspec cannot encode, such as an array."""
    return value.tolist()


def console() -> Console:
    """Create a console for the current standard output."""
    from rich.console import Console

    screen = Console(highlight=False, markup=False, emoji=False)
    return screen if screen.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_WIDE)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Create a table with these column headings. A heading that begins with ">" is right-aligned, for numbers."""
    from rich.table import Table
    from rich.text import Text

    result = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        result.add_column(Text(column.removeprefix(">")), justify=justify, overflow="fold")
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return result


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table; see `table` for the arguments."""
    console().print(table(columns, rows))
