"""A descriptor that becomes readable when someone calls."""

from __future__ import annotations

import contextlib
import os


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
