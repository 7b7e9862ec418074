"""When a process that serves is to end. Imports little: what asks for the end may come while the rest is imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Stop:
    """Set by SIGTERM and SIGINT (`asked`: by the user), or by `set`.

    A signal handler may interrupt the main thread anywhere, also inside `wait`. With a `threading.Event` the handler
    would block on the lock that the interrupted `wait` holds; the methods of a `SimpleQueue` are reentrant.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked)

    def _asked(self, *_: object) -> None:
        self.asked = True
        self.set()

    def set(self) -> None:
        self._queue.put(None)

    def when(self, event: threading.Event) -> None:
        """Set this as soon as `event` is."""

        def wait() -> None:
            event.wait()
            self.set()

        threading.Thread(target=wait, daemon=True).start()

    def then(self, act: Callable[[], None]) -> None:
        """Have `act` called in a thread of its own as soon as this is set."""

        def wait() -> None:
            self.wait()
            act()

        threading.Thread(target=wait, name="tq-stop", daemon=True).start()

    def wait(self) -> None:
        """Blocks until a signal asks to stop: that is what a server does."""
        self._queue.put(self._queue.get())  # put back for all others who wait
