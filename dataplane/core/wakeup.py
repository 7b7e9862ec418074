"""A descriptor that becomes readable when someone calls, and how long a poll may wait for one."""

from __future__ import annotations

import contextlib
import math
import os

LONGEST_MS = 1 << 30
"""Of one poll, which takes no more than 31 bits; whoever has longer to wait looks again then."""


def poll_ms(left_s: float) -> int:
    """A poll's timeout for `left_s` seconds, of any size: rounded up, at least 0, at most `LONGEST_MS`."""
    return math.ceil(1000 * max(0.0, min(LONGEST_MS / 1000, left_s)))


class Waker:
    """Wakes a poll from any thread. `fd` is readable from `wake` until `clear`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        """Make `fd` readable. Does nothing once closed."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make `fd` unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
