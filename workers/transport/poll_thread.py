"""Threads that serve sockets: each polls its sockets and can be woken by other threads."""

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
    """RuntimeError if this thread completes futures, and so must not wait for `what`."""
    if getattr(_here, "completes", False):
        raise RuntimeError(f"{what}: a function given to `then` must not wait for other work")


class Poller(Protocol):
    """What `select.poll` and `zmq.Poller` have in common: timeouts in milliseconds, None for no limit."""

    def register(self, source: Any, events: int, /) -> Any: ...

    def poll(self, timeout_ms: int | None, /) -> Any: ...


class PollThread:
    """Calls `turn` with the events that `poller` found, and after each `wake`.

    timeout_ms: of the next poll, None for no limit; completes: the thread completes futures, so it
    must not wait for any; ended: called last, with the exception of `turn` that ended the thread,
    or None after `stop`. `wake` and `stop` may be called from any thread and from finalizers."""

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
        """Whether the thread runs."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Make the thread call `turn`. Does nothing after the thread has ended."""
        with self._waking:
            self._waker.wake()

    def stop(self) -> None:
        """End the thread after the current turn."""
        self._stopping = True
        self.wake()

    def join(self, within_s: float | None = None) -> None:
        """Wait until the thread has ended; returns at once if it is the calling thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(within_s)

    def close(self, within_s: float = JOIN_S) -> None:
        """`stop` and `join`. Idempotent."""
        self.stop()
        self.join(within_s)

    def forget(self) -> None:
        """Close the descriptor of a thread that never ran: before `start`, or in a forked child."""
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
