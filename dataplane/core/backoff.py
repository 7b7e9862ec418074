"""Jitter and backoff. Random numbers come from the operating system, so that the global `random` state, which the user
may have seeded, does not change."""

from __future__ import annotations

import random


def jittered(pause_s: float) -> float:
    """Return the pause times a random factor in [0.5, 1], so that many waiting clients do not retry at once."""
    return pause_s * random.SystemRandom().uniform(0.5, 1.0)


class Backoff:
    """Pauses between attempts, in seconds: `first_s` at first, doubled after each attempt, up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.next_s = first_s

    def take(self, most_s: float = float("inf")) -> float:
        """Return the next pause, at most `most_s`, with jitter: between half of the pause and the full pause."""
        pause_s, self.next_s = min(self.next_s, most_s), min(2 * self.next_s, self._longest_s)
        return jittered(pause_s)

    def reset(self) -> None:
        """Start again with `first_s`."""
        self.next_s = self._first_s


def pick(first: int, end: int) -> int:
    """Return a random number in [first, end)."""
    return random.SystemRandom().randrange(first, end)
