"""What verbs print: one way for JSON, one for tables. Colours are for terminals only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDE = 10_000
"""Columns of a line where no terminal has an opinion: rows are for other programs there, one a line."""


def print_json(value: Any) -> None:
    """One line of JSON; arrays as lists."""
    print(msgspec.json.encode(value, enc_hook=_plain).decode(), flush=True)


def _plain(value: Any) -> Any:
    return value.tolist()


def console() -> Console:
    """For standard output as it is now."""
    from rich.console import Console

    made = Console(highlight=False, markup=False, emoji=False)
    return made if made.is_terminal else Console(highlight=False, markup=False, emoji=False, width=_WIDE)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Columns by their headings; those of numbers begin with ">" and stand to the right."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        made.add_column(Text(column.removeprefix(">")), justify="right" if right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return made


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """See `table`."""
    console().print(table(columns, rows))
