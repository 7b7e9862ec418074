"""Chance of this library's own: what the program's `random` gives, which its user may have seeded, stays the same."""

from __future__ import annotations

import random


def jittered(pause_s: float, least: float = 0.5, most: float = 1.0) -> float:
    """The pause times something in [least, most], so that many who wait do not all come back at once."""
    return pause_s * random.SystemRandom().uniform(least, most)


def pick(first: int, end: int) -> int:
    """A number in [first, end)."""
    return random.SystemRandom().randrange(first, end)
