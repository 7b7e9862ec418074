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

_CLIENT = 0


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
        self._send(wire.AckItems(self._answer.request_id))
        return [item.head for item in self._answer.items]


Reply = wire.AnyAnswer | LocalItems


class LocalLink:
    """The counterpart of `Link` for a channel of this process: applies requests to its own `Broker`. Thread-safe.

    `_last_request_id`: of the latest request; `_open`: the futures of requests without an answer, by id;
    `_arrived`: the gets whose items were neither taken nor returned; `_closed`: set by `close`, requests then fail.
    """

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._state = Broker(NoMemory())
        self._state.join(_CLIENT)
        self._guard = threading.Lock()
        self._last_request_id = 0
        self._open: dict[int, Future[Any]] = {}
        self._arrived: set[int] = set()
        self._closed = False

    def ask(self, make: Callable[[int], wire.AnyRequest], what: str, until: float) -> Reply:
        """Send a request and return its answer. `ChannelTimeoutError` at `until`; the request then had no effect."""
        begun = time.monotonic()
        request_id, future = self._start(make)
        try:
            if not done_within(future, what, until - begun):  # the deadline has passed
                self._apply(wire.Cancel(request_id))
            reply: Reply = future.result()
        except BaseException:  # such as KeyboardInterrupt during the wait
            self._drop_request(request_id)
            raise
        if isinstance(reply, wire.Cancelled):
            raise ChannelTimeoutError(what=what, waited_s=time.monotonic() - begun)
        return reply

    ask_after_puts = ask  # requests are applied in the order of calls

    def put(self, request: wire.Put, value: object, what: str, until: float) -> Reply:
        """Put the object `value` itself."""
        return self.ask(lambda request_id: _with_request_id(request, request_id, value), what, until)

    def begin(
        self, make: Callable[[int], wire.AnyRequest], what: str, until: float
    ) -> tuple[Future[Any], Callable[[], None]]:
        """Send a request. Return the future of its answer, and a function that cancels it. At `until` the request is
        cancelled and the future raises `ChannelTimeoutError`."""
        request_id, inner = self._start(make)
        outer: Future[Any] = Future()
        wait_s = min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX)
        timer = threading.Timer(wait_s, self._apply, (wire.Cancel(request_id),))
        timer.daemon = True
        begun = time.monotonic()

        def complete_outer(answered: Future[Any]) -> None:
            timer.cancel()
            error = answered.exception()
            if error is not None:
                outer.set_exception(error)
            elif isinstance(answered.result(), wire.Cancelled):
                outer.set_exception(ChannelTimeoutError(what=what, waited_s=time.monotonic() - begun))
            else:
                outer.set_result(answered.result())

        # Before the callback is added, which cancels the timer.
        if not inner.done():
            timer.start()
        inner.add_done_callback(complete_outer)
        return outer, lambda: self._drop_request(request_id)

    def begin_put(self, request: wire.Put, value: object, what: str, until: float) -> tuple[int, Future[Any]]:
        """Put the object `value` itself. Return the request's id and the future of its answer."""
        future, _ = self.begin(lambda request_id: _with_request_id(request, request_id, value), what, until)
        return request.request_id, future  # `_with_request_id` has set the id

    def retire(self) -> None:
        """Do nothing: there are no connections."""

    def close(self) -> None:
        """Make pending and later calls raise `ChannelClosedError`. The stored items are lost. Idempotent."""
        with self._guard:
            self._closed = True
            pending = list(self._open.values())
            self._open = {}
        for future in pending:
            future.set_exception(disconnected(self._channel))

    def _start(self, make: Callable[[int], wire.AnyRequest]) -> tuple[int, Future[Any]]:
        """Apply the request that `make` returns for a new id. Return the id and the future of the answer."""
        future: Future[Any] = Future()
        with self._guard:
            if self._closed:
                raise disconnected(self._channel)
            self._last_request_id += 1
            request_id = self._last_request_id
            self._open[request_id] = future
            completions = self._handle_effects(self._state.apply(_CLIENT, make(request_id)))
        _complete_all(completions)
        return request_id, future

    def _apply(self, request: wire.AnyRequest) -> None:
        """Apply a request that concerns an earlier one: an acknowledgement or a cancellation. A no-op after `close`."""
        with self._guard:
            self._arrived.discard(request.request_id)
            completions = [] if self._closed else self._handle_effects(self._state.apply(_CLIENT, request))
        _complete_all(completions)

    def _drop_request(self, request_id: int) -> None:
        """Cancel a waiting request, or return its items to the queue if they have arrived."""
        with self._guard:
            arrived = request_id in self._arrived
        self._apply(wire.NackItems(request_id) if arrived else wire.Cancel(request_id))

    def _handle_effects(self, effects: Effects) -> list[tuple[Future[Any], Reply]]:
        """Return the futures of the answered requests with their replies, to be completed without the lock, because
        callbacks may call this object. Note the gets whose items have arrived."""
        completions: list[tuple[Future[Any], Reply]] = []
        for _, answer in effects:  # the only client is this process
            future = self._open.pop(answer.request_id, None)
            reply: Reply = answer
            if isinstance(answer, wire.Items):
                self._arrived.add(answer.request_id)
                reply = LocalItems(answer, self._apply)
            if future is not None:
                completions.append((future, reply))
        return completions


def _complete_all(completions: list[tuple[Future[Any], Reply]]) -> None:
    for future, reply in completions:
        future.set_result(reply)


def _with_request_id(request: wire.Put, request_id: int, value: object) -> wire.Put:
    """Set the id and the item of `request`, and return it."""
    request.request_id, request.item = request_id, wire.Item(value)
    return request
