"""What waiting costs."""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 5


def costs_little(wait: Callable[[], None], most_s: float = 0.2) -> bool:
    """Whether a wait takes at most that much processor time in one of a few tries: the process has other threads, too,
    and collects its garbage now and then."""
    for _ in range(TRIES):
        begun = time.process_time()
        wait()
        if time.process_time() - begun < most_s:
            return True
    return False
