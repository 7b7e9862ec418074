"""Stop signal of a server process. Imports little, because the signal may arrive while other modules are imported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from queue import SimpleQueue


class Stop:
    """An event that is set by SIGTERM, SIGINT or `set`. `asked`: a signal was received.

    A signal handler may interrupt the main thread anywhere, including inside `wait`. With a `threading.Event`, the
    handler would block on the lock held by the interrupted `wait`. The methods of a `SimpleQueue` are reentrant.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[None] = SimpleQueue()
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.asked = True
        self.set()

    def set(self) -> None:
        """Set the event. Never blocks; may be called from any thread and from signal handlers."""
        self._queue.put(None)

    def when(self, event: threading.Event) -> None:
        """Set this event as soon as `event` is set."""

        def wait() -> None:
            event.wait()
            self.set()

        threading.Thread(target=wait, daemon=True).start()

    def then(self, act: Callable[[], None]) -> None:
        """Call `act` in a background thread as soon as this event is set."""

        def wait() -> None:
            self.wait()
            act()

        threading.Thread(target=wait, name="tq-stop", daemon=True).start()

    def wait(self) -> None:
        """Block until the event is set."""
        self._queue.put(self._queue.get())  # put the item back for other waiting threads
