"""Threads that serve sockets: each waits for its sources, and for other threads that have something for it."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from typing import Any, Protocol

from dataplane.core.wakeup import Waker

JOIN_S = 10.0
"""How long `close` waits for a thread to end, unless it is told otherwise."""

_here = threading.local()


def refuse_waiting(what: str) -> None:
    """RuntimeError in a thread that may not wait for `what`, as others' work is done by it."""
    if getattr(_here, "completes", False):
        raise RuntimeError(f"{what}: a function given to `then` must not wait for other work")


class Poller(Protocol):
    """As `select.poll` and `zmq.Poller`: timeouts are in milliseconds, None is none; finds sources and their events."""

    def register(self, source: Any, events: int, /) -> Any: ...

    def poll(self, timeout_ms: int | None, /) -> Any: ...


class PollThread:
    """Calls `turn`, with what `poller` found, whenever there is something, and after each `wake`.

    patience_ms: how long the next poll may take, None for any time; completes: futures are completed by this thread,
    so that it may not wait for any; ended: called last, with the error of `turn` that ended the thread; None after
    `stop`. `wake` and `stop` are for any thread, and for finalizers.
    """

    def __init__(
        self,
        name: str,
        poller: Poller,
        turn: Callable[[Any], None],
        ended: Callable[[BaseException | None], None],
        *,
        timeout_ms: Callable[[], int | None] = lambda: None,
        completes: bool = False,
    ) -> None:
        self._waker = Waker()
        # Reentrant: a finalizer may come while its thread is here already.
        self._waking = threading.RLock()
        self._stopping = False
        self._completes = completes
        self._thread = threading.Thread(
            target=self._run, args=(poller, turn, ended, timeout_ms), name=name, daemon=True
        )
        poller.register(self._waker.fd, select.POLLIN)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Have it look at what is new. Never after the waker was closed, when its descriptor may be another's."""
        with self._waking:
            self._waker.wake()

    def stop(self) -> None:
        """End after the turn under way."""
        self._stopping = True
        self.wake()

    def join(self, within_s: float | None = None) -> None:
        """Wait for the end of the thread, unless it is the caller's own."""
        if threading.current_thread() is not self._thread:
            self._thread.join(within_s)

    def close(self, within_s: float = JOIN_S) -> None:
        """Both. Idempotent."""
        self.stop()
        self.join(within_s)

    def forget(self) -> None:
        """Give the descriptor back where the thread never ran: before `start`, and in a forked child."""
        self._waker.close()

    def _run(
        self,
        poller: Poller,
        turn: Callable[[Any], None],
        ended: Callable[[BaseException | None], None],
        timeout_ms: Callable[[], int | None],
    ) -> None:
        _here.completes = self._completes
        error: BaseException | None = None
        woken = self._waker.fd
        try:
            while not self._stopping:
                found = poller.poll(timeout_ms())
                for source, _ in found:
                    if source == woken:
                        self._waker.clear()
                turn(found)
        except BaseException as caught:
            error = caught
        try:
            ended(error)
        finally:
            with self._waking:
                self._waker.close()
