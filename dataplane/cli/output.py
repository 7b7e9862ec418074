"""Output of commands: JSON, tables, and lines in which control characters are escaped. Colours are used on terminals
only."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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
