"""What verbs print: one way for JSON, one for tables. Colours are for terminals only."""

from __future__ import annotations

from typing import Any

import msgspec


def print_json(value: Any) -> None:
    """One line of JSON; arrays as lists."""
    print(msgspec.json.encode(value, enc_hook=_plain).decode())


def _plain(value: Any) -> Any:
    return value.tolist()
