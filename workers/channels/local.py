"""A channel within one process: the same state as a broker's, without a broker. Items are passed by reference."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from workers.channels import wire
from workers.channels.errors import ChannelTimeoutError, disconnected
from workers.channels.queues import Broker, Effects
from workers.transport.waiting import done_within

_US = 0


class NoMemory:
    """Memory without space: items within a process need no broker memory."""

    capacity_bytes = 0
    used_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """Return None: there is no space."""
        return None

    def give(self, space: int, nbytes: int) -> None:
        raise AssertionError("released space that was never reserved")


class LocalItems:
    """Items that a get received, to be taken once."""

    def __init__(self, answer: wire.Items, send: Callable[[wire.AnyRequest], None]) -> None:
        self._answer = answer
        self._send = send

    def take(self) -> list[Any]:
        self._send(wire.AckItems(self._answer.number))
        return [item.head for item in self._answer.items]


Reply = wire.AnyAnswer | LocalItems


class LocalLink:
    """The counterpart of `Link` for a channel of this process. Thread-safe."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._state = Broker(NoMemory())
        self._state.join(_US)
        self._guard = threading.Lock()
        self._number = 0
        self._open: dict[int, Future[Any]] = {}
        self._arrived: set[int] = set()
        self._closed = False

    def ask(self, make: Callable[[int], wire.AnyRequest], what: str, until: float) -> Reply:
        """Send a request and return its answer. `ChannelTimeoutError` at `until`; the request then had no effect."""
        begun = time.monotonic()
        number, future = self._enter(make)
        try:
            if not done_within(future, what, until - begun):
                self._apply(wire.Cancel(number))
            reply: Reply = future.result()
        except BaseException:
            self._drop(number)
            raise
        if isinstance(reply, wire.Cancelled):
            raise ChannelTimeoutError(what=what, waited_s=time.monotonic() - begun)
        return reply

    ask_after_puts = ask

    def put(self, request: wire.Put, value: object, what: str, until: float) -> Reply:
        """Put the object `value` itself."""
        return self.ask(lambda number: _numbered(request, number, value), what, until)

    def begin(
        self, make: Callable[[int], wire.AnyRequest], what: str, until: float
    ) -> tuple[Future[Any], Callable[[], None]]:
        """Send a request. Return the future of its answer, and a function that cancels it."""
        number, inner = self._enter(make)
        outer: Future[Any] = Future()
        wait_s = min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)
        timer = threading.Timer(wait_s, self._apply, (wire.Cancel(number),))
        timer.daemon = True
        begun = time.monotonic()

        def pass_on(done: Future[Any]) -> None:
            timer.cancel()
            error = done.exception()
            if error is not None:
                outer.set_exception(error)
            elif isinstance(done.result(), wire.Cancelled):
                outer.set_exception(ChannelTimeoutError(what=what, waited_s=time.monotonic() - begun))
            else:
                outer.set_result(done.result())

        if not inner.done():
            timer.start()
        inner.add_done_callback(pass_on)
        return outer, lambda: self._drop(number)

    def begin_put(self, request: wire.Put, value: object, what: str, until: float) -> tuple[int, Future[Any]]:
        """Put the object `value` itself. Return the request's number and the future of its answer."""
        future, _ = self.begin(lambda number: _numbered(request, number, value), what, until)
        return request.number, future

    def retire(self) -> None:
        """Do nothing: there are no connections."""

    def close(self) -> None:
        """Make pending calls raise `ChannelClosedError`, and drop the items. Idempotent."""
        with self._guard:
            self._closed = True
            left, self._open = list(self._open.values()), {}
        for future in left:
            future.set_exception(disconnected(self._channel))

    def _enter(self, make: Callable[[int], wire.AnyRequest]) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        with self._guard:
            if self._closed:
                raise disconnected(self._channel)
            self._number += 1
            number = self._number
            self._open[number] = future
            done = self._effects(self._state.apply(_US, make(number)))
        _complete(done)
        return number, future

    def _apply(self, request: wire.AnyRequest) -> None:
        with self._guard:
            self._arrived.discard(request.number)
            done = [] if self._closed else self._effects(self._state.apply(_US, request))
        _complete(done)

    def _drop(self, number: int) -> None:
        """Cancel a waiting request, or return its items to the queue, after its handle was garbage-collected."""
        with self._guard:
            came = number in self._arrived
        self._apply(wire.NackItems(number) if came else wire.Cancel(number))

    def _effects(self, effects: Effects) -> list[tuple[Future[Any], Reply]]:
        done: list[tuple[Future[Any], Reply]] = []
        for _, answer in effects:
            future = self._open.pop(answer.number, None)
            if isinstance(answer, wire.Items):
                self._arrived.add(answer.number)
            if future is not None:
                done.append((future, LocalItems(answer, self._apply) if isinstance(answer, wire.Items) else answer))
        return done


def _complete(done: list[tuple[Future[Any], Reply]]) -> None:
    for future, reply in done:
        future.set_result(reply)


def _numbered(request: wire.Put, number: int, value: object) -> wire.Put:
    request.number, request.item = number, wire.Item(value)
    return request
