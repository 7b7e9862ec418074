"""Requests of a handle to one broker: synchronous in the calling thread, or asynchronous in a background thread."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from dataplane.core.buffer_pool import BufferPool
from workers.channels import wire
from workers.channels.background import Pump, PumpEndedError
from workers.channels.connection import GRACE_S, ArrivedItems, Line, lost
from workers.channels.errors import ChannelClosedError, ChannelTimeoutError, disconnected
from workers.channels.items import Parcel
from workers.channels.wire import NOWHERE
from workers.errors import OpenFilesError
from workers.transport.endpoint import Endpoint
from workers.transport.poll_thread import refuse_waiting
from workers.transport.stream import StreamLostError, StreamSilentError

IDLE_LINES = 8
"""Idle connections kept for the next calls."""
WARM_BYTES = 128 << 20
"""Memory of dropped items kept for the next ones."""

Make = Callable[[int], wire.AnyRequest]


class Taken:
    """Items that were acknowledged and belong to this process."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def take(self) -> list[Any]:
        return self._items


Reply = wire.AnyAnswer | ArrivedItems | Taken


class Link:
    """Thread-safe. Each synchronous call uses its own connection; all asynchronous calls share one connection and one
    thread. A forked child opens new ones.

    Calls raise `ChannelLostError` if the broker is lost, `ChannelTimeoutError` at the time `until`,
    `ChannelClosedError` after `close`, and `OpenFilesError` if this process can open no more files.
    """

    def __init__(self, endpoint: str, channel: str) -> None:
        self.endpoint = Endpoint.parse(endpoint)
        self._channel = channel
        self._begin()
        _register_fork_hook()
        _all.add(self)

    def _begin(self) -> None:
        self._guard = threading.Lock()
        self._memory = BufferPool(WARM_BYTES)
        self._idle: list[Line] = []
        self._using: set[Line] = set()
        self._pump: Pump | None = None
        self._retired = False
        self._closed = False
        self._finalizer = weakref.finalize(self, _close_idle, self._idle)
        self._finalizer.atexit = False

    # --- synchronous calls

    def ask(self, make: Make, what: str, until: float) -> Reply:
        """Return the answer to one request. Items are taken and returned as `Taken`."""
        with self._line(what) as line:
            answer = line.ask(make(line.number()), what, until)
            return Taken(answer.take()) if isinstance(answer, ArrivedItems) else answer

    def ask_after_puts(self, make: Make, what: str, until: float) -> Reply:
        """Send a request after the pending asynchronous puts of this handle, and return its answer."""
        pump = self._pump
        if pump is None or not pump.putting:
            return self.ask(make, what, until)
        refuse_waiting(what)
        reply: Reply = self.begin(make, what, until)[0].result()
        return reply

    def put(self, request: wire.Put, parcel: Parcel, what: str, until: float) -> Reply:
        """Put `parcel` after the pending asynchronous puts, and return the answer."""
        pump = self._pump
        if pump is not None and pump.putting:
            refuse_waiting(what)
            _, future = self.begin_put(request, parcel, what, until)
            reply: Reply = future.result()
            return reply
        with self._line(what) as line:
            begun = time.monotonic()
            space = NOWHERE if parcel.carried else line.take_preallocated(parcel.nbytes)
            if space == NOWHERE and not parcel.carried:
                queue = (request.channel, request.key)
                reserve = wire.Reserve(line.number(), *queue, parcel.nbytes, request.nowait)
                answer = line.ask(reserve, what, until)
                if not isinstance(answer, wire.ItemSpace):
                    return answer
                space = answer.space
            request.number, request.item = line.number(), parcel.item(space)
            request.want = 0 if parcel.carried else parcel.nbytes
            line.put(request, parcel, max(until, begun + GRACE_S))
            reply = line.await_answer(request.number, what, begun, until)
            if isinstance(reply, wire.BrokerDone) and reply.space != NOWHERE:
                line.ahead = (reply.space, request.want)
            return reply

    @contextlib.contextmanager
    def _line(self, what: str) -> Iterator[Line]:
        """Yield a connection for one call. It is kept afterwards, or closed if its state is unknown."""
        line = self._take(what)
        try:
            yield line
        except (StreamLostError, StreamSilentError) as error:
            self._discard(line)
            raise self._lost_error(what, error) from error
        except ChannelTimeoutError:
            # The broker has confirmed the cancellation, so the connection is reusable.
            self._put_back(line)
            raise
        except BaseException:
            self._discard(line)
            raise
        self._put_back(line)

    def _take(self, what: str) -> Line:
        with self._guard:
            if self._closed:
                raise disconnected(self._channel)
            if self._idle:
                line = self._idle.pop()
                self._using.add(line)
                return line
        line = self._connect(what)
        with self._guard:
            self._using.add(line)
        return line

    def _connect(self, what: str) -> Line:
        with OpenFilesError.of(what):
            try:
                return Line(self.endpoint, self._memory)
            except OSError as error:
                raise self._lost_error(what, error) from error

    def _put_back(self, line: Line) -> None:
        with self._guard:
            self._using.discard(line)
            keep = not (self._retired or self._closed) and len(self._idle) < IDLE_LINES
            if keep:
                self._idle.append(line)
        if not keep:
            line.close()

    def _discard(self, line: Line) -> None:
        with self._guard:
            self._using.discard(line)
        line.close()

    def _lost_error(self, what: str, error: BaseException) -> Exception:
        if self._closed or isinstance(error, ChannelClosedError):
            return disconnected(self._channel)
        return lost(what, self.endpoint, error)

    def begin_in_child(self) -> None:
        """Close this child's copies of the parent's connections after a fork, so that the broker sees when the parent
        ends."""
        self._finalizer.detach()
        pump, lines = self._pump, [*self._idle, *self._using]
        self._begin()
        for line in lines:
            line.close()
        if pump is not None:
            pump.forget()

    # --- asynchronous calls

    def begin(self, make: Make, what: str, until: float) -> tuple[Future[Any], Callable[[], None]]:
        """Send a request. Return the future of its answer (items as `ArrivedItems`), and a function that cancels
        it."""
        pump, (number, future) = self._pumped(what, lambda pump: pump.begin(make, what, until))
        return future, lambda: pump.drop(number)

    def begin_put(self, request: wire.Put, parcel: Parcel, what: str, until: float) -> tuple[int, Future[Any]]:
        """Put `parcel` as it is now. Return the request's number and the future of its answer."""
        request.want = 0 if parcel.carried else parcel.nbytes
        return self._pumped(what, lambda pump: pump.begin_put(request, parcel, what, until))[1]

    def _pumped(
        self, what: str, begin: Callable[[Pump], tuple[int, Future[Any]]]
    ) -> tuple[Pump, tuple[int, Future[Any]]]:
        """Begin a request on a running pump. A pump may end before it is used; then a new one is started."""
        while True:
            pump = self._running_pump(what)
            with contextlib.suppress(PumpEndedError):
                return pump, begin(pump)

    def _running_pump(self, what: str) -> Pump:
        with self._guard:
            if self._closed:
                raise disconnected(self._channel)
            if self._pump is None or self._pump.ended is not None:
                line = self._connect(what)
                try:
                    with OpenFilesError.of(what):
                        self._pump = Pump(line, self._channel, self._lost)
                except OpenFilesError:
                    line.close()
                    raise
                weakref.finalize(self, self._pump.close).atexit = False
                if self._retired:
                    self._pump.retire()
            return self._pump

    @property
    def _lost(self) -> Callable[[str, BaseException], Exception]:
        endpoint, channel = self.endpoint, self._channel

        def make(what: str, error: BaseException) -> Exception:
            if isinstance(error, ChannelClosedError):
                return disconnected(channel)
            return lost(what, endpoint, error)

        return make

    # --- close

    def retire(self) -> None:
        """Close idle connections, and the others as soon as they are unused."""
        with self._guard:
            self._retired = True
            idle, self._idle[:] = list(self._idle), []
            pump = self._pump
        for line in idle:
            line.close()
        if pump is not None:
            pump.retire()

    def close(self) -> None:
        """Close all connections. Pending calls of other threads raise `ChannelClosedError`. Idempotent."""
        self.retire()
        with self._guard:
            self._closed = True
            using, pump = list(self._using), self._pump
        for line in using:
            line.shut()
        if pump is not None:
            pump.close()


_all: weakref.WeakSet[Link] = weakref.WeakSet()
"""The links of this process, for forked children."""


@functools.cache
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_child=_begin_in_child)


def _begin_in_child() -> None:
    for link in list(_all):
        link.begin_in_child()


def _close_idle(idle: list[Line]) -> None:
    for line in idle:
        line.close()
