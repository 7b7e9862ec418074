"""Jitter and backoff. The numbers come from the system: the program's `random`, which its user may have seeded, is not
advanced."""

from __future__ import annotations

import random


def jittered(pause_s: float, least: float = 0.5, most: float = 1.0) -> float:
    """The pause times something in [least, most], so that many who wait do not all come back at once."""
    return pause_s * random.SystemRandom().uniform(least, most)


class Backoff:
    """Pauses between attempts, in seconds: `first_s`, then each twice the last, up to `longest_s`."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.next_s = first_s

    def take(self, most_s: float = float("inf")) -> float:
        """The next pause, or `most_s` if that is shorter, with jitter: somewhere between half of it and all."""
        pause_s, self.next_s = min(self.next_s, most_s), min(2 * self.next_s, self._longest_s)
        return jittered(pause_s)

    def reset(self) -> None:
        """The next pause is the first."""
        self.next_s = self._first_s


def pick(first: int, end: int) -> int:
    """A number in [first, end)."""
    return random.SystemRandom().randrange(first, end)
