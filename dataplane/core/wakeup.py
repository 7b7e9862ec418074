"""A file descriptor that wakes a poll, and conversion of poll timeouts."""

from __future__ import annotations

import contextlib
import math
import os

LONGEST_MS = 1 << 30
"""Maximum timeout of one poll, which takes 31 bits. Callers with longer waits poll again."""


def poll_ms(left_s: float) -> int:
    """Convert `left_s` seconds to a poll timeout in milliseconds: rounded up, at least 0, at most `LONGEST_MS`."""
    return math.ceil(1000 * max(0.0, min(LONGEST_MS / 1000, left_s)))


class Waker:
    """Wakes a poll from any thread. `fd` is readable from a call of `wake` until `clear`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        """Make `fd` readable. Does nothing after `close`."""
        if self.fd >= 0:
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make `fd` unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
