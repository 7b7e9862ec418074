"""How long the machine let a process of a test stand still."""

from __future__ import annotations

import threading
import time

BEAT_S = 0.05


class Pulse:
    """A thread that looks at the clock again and again. `longest_s`: the longest time between two looks since
    `begin_anew`."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._ended = threading.Event()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def begin_anew(self) -> None:
        self.longest_s = 0.0

    def close(self) -> None:
        self._ended.set()

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(BEAT_S):
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now
