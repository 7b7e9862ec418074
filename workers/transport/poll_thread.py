"""Threads that serve sockets: each polls its sockets and can be woken by other threads."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from typing import Any, Protocol

from dataplane.core.zmq_io import Waker

JOIN_S = 10.0
"""Default limit of the wait of `close` for the thread's end."""


class Poller(Protocol):
    """The common interface of `select.poll` and `zmq.Poller`. Timeouts are in milliseconds, None for no limit."""

    def register(self, source: Any, events: int, /) -> Any: ...

    def poll(self, timeout_ms: int | None, /) -> Any: ...


class PollThread:
    """Calls `turn` with the events of each poll: also after a `wake`, and with no events after `timeout_ms`.

    timeout_ms: of the next poll, None for no limit; ended: called last, with the exception of `turn` that ended the
    thread, or None after `stop`. `wake` and `stop` may be called from any thread and from finalizers. `_waker`: the
    descriptor that interrupts the poll.
    """

    def __init__(
        self,
        name: str,
        poller: Poller,
        turn: Callable[[Any], None],
        ended: Callable[[BaseException | None], None],
        *,
        timeout_ms: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._waker = Waker()
        # Keeps `wake` from using `_waker` while the ending thread closes it. Reentrant, because a finalizer may call
        # `wake` while its thread is inside `wake`.
        self._waking = threading.RLock()
        self._stopping = False
        self._thread = threading.Thread(
            target=self._run, args=(poller, turn, ended, timeout_ms), name=name, daemon=True
        )
        poller.register(self._waker.fd, select.POLLIN)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread is running."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Make the thread call `turn`. A no-op after the thread has ended."""
        with self._waking:
            self._waker.wake()

    def stop(self) -> None:
        """End the thread after the current turn."""
        self._stopping = True
        self.wake()

    def join(self, within_s: float | None = None) -> None:
        """Wait until the thread has ended, at most `within_s` seconds; the thread itself returns at once."""
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
        """The thread's loop, until `stop` or an exception of `turn`. In either case it calls `ended` last. Parameters:
        see the class."""
        error: BaseException | None = None
        waker_fd = self._waker.fd
        try:
            while not self._stopping:
                events = poller.poll(timeout_ms())
                for source, _ in events:
                    if source == waker_fd:
                        self._waker.clear()
                turn(events)
        except BaseException as caught:
            error = caught
        try:
            ended(error)
        finally:
            with self._waking:
                self._waker.close()
