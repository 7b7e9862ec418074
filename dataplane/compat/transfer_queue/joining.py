"""Batches in parts, and what several have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any


def joined_info(infos: Sequence[Mapping[str, Any]], what: str) -> dict[str, Any]:
    """All entries of all. ValueError where two differ."""
    joined: dict[str, Any] = {}
    for info in infos:
        for key, value in info.items():
            if key in joined and not _same(joined[key], value):
                raise ValueError(f"{what}: extra_info[{key!r}] has conflicting values")
            joined.setdefault(key, value)
    return joined


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if hasattr(one, "tolist"):
        return bool(one.shape == other.shape and one.tolist() == other.tolist())
    return bool(one == other)


def parts_of(size: int, chunks: int) -> list[range]:
    if isinstance(chunks, bool) or not isinstance(chunks, Integral) or chunks < 1:
        raise ValueError(f"chunks={chunks!r}: expected an integer of 1 or more")
    each, longer = divmod(size, chunks)
    ends = [number * each + min(number, longer) for number in range(chunks + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
