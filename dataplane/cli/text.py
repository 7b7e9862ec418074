"""Sizes, as people write and read them."""

from __future__ import annotations

import typer

from dataplane.config import GIB, MIB

_SUFFIXES = {"": 1, "k": 1 << 10, "m": MIB, "g": GIB, "t": GIB << 10}


def size(text: str) -> int:
    """Bytes from "512m", "4g", "4GiB" or a plain number."""
    plain = text.strip().lower().removesuffix("ib").removesuffix("b")
    suffix = plain[-1:] if plain[-1:] in _SUFFIXES else ""
    try:
        return int(float(plain.removesuffix(suffix)) * _SUFFIXES[suffix])
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r} is not a size; write 512m, 4g or a number of bytes") from None


def readable(count: float) -> str:
    """Bytes for a person: 1.5 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
