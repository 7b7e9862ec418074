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
from workers.channels.connection import GRACE_S, ArrivedItems, BrokerConnection, lost_error
from workers.channels.errors import ChannelClosedError, ChannelTimeoutError, disconnected
from workers.channels.items import Parcel
from workers.channels.wire import NOWHERE
from workers.errors import OpenFilesError
from workers.transport.stream import Endpoint, StreamLostError, StreamSilentError

MAX_IDLE_CONNECTIONS = 8
"""Idle connections kept for the next calls."""
BUFFER_POOL_BYTES = 128 << 20
"""Memory of dropped items kept for the next ones."""

MakeRequest = Callable[[int], wire.AnyRequest]


class Taken:
    """Items that were acknowledged and belong to this process."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def take(self) -> list[Any]:
        return self._items


Reply = wire.AnyAnswer | ArrivedItems | Taken


class Link:
    """Sends the requests of one channel handle to one broker. Thread-safe. Each synchronous call uses its own
    connection; all asynchronous calls share one connection and one thread, a `Pump`. A forked child opens new ones.

    what: names the call in errors; make: returns the request for an id; until: deadline of the call. `_idle`,
    `_in_use`: the connections for synchronous calls; `_pump`: the latest one, which may have ended; `_retired`: keep no
    idle connections, calls still work; `_closed`: calls fail; `_memory`: for the bytes of received items.

    Calls raise `ChannelLostError` if the broker is lost, `ChannelTimeoutError` at the time `until`,
    `ChannelClosedError` after `close`, and `OpenFilesError` if this process can open no more files.
    """

    def __init__(self, endpoint: str, channel: str) -> None:
        self.endpoint = Endpoint.parse(endpoint)
        self._channel = channel
        self._reset()
        _register_fork_hook()
        _links.add(self)

    def _reset(self) -> None:
        """Set the state without connections, for a new object and for its copy in a forked child."""
        self._guard = threading.Lock()
        self._memory = BufferPool(BUFFER_POOL_BYTES)
        self._idle: list[BrokerConnection] = []
        self._in_use: set[BrokerConnection] = set()
        self._pump: Pump | None = None
        self._retired = False
        self._closed = False
        # Closes the idle connections with this object. The list is emptied in place, never replaced.
        self._finalizer = weakref.finalize(self, _close_all, self._idle)
        self._finalizer.atexit = False

    # --- synchronous calls

    def ask(self, make: MakeRequest, what: str, until: float) -> Reply:
        """Return the answer to one request. Items are taken and returned as `Taken`."""
        with self._borrowed_connection(what) as connection:
            answer = connection.ask(make(connection.next_request_id()), what, until)
            return Taken(answer.take()) if isinstance(answer, ArrivedItems) else answer

    def ask_after_puts(self, make: MakeRequest, what: str, until: float) -> Reply:
        """Send a request after the pending asynchronous puts of this handle, and return its answer."""
        pump = self._pump
        if pump is None or not pump.putting:  # there are none
            return self.ask(make, what, until)
        # Over the pump's connection, on which the puts were sent before.
        reply: Reply = self.begin(make, what, until)[0].result()
        return reply

    def put(self, request: wire.Put, parcel: Parcel, what: str, until: float) -> Reply:
        """Put `parcel` after the pending asynchronous puts, and return the answer."""
        pump = self._pump
        # Puts over different connections could overtake each other.
        if pump is not None and pump.putting:
            _, future = self.begin_put(request, parcel, what, until)
            reply: Reply = future.result()
            return reply
        with self._borrowed_connection(what) as connection:
            begun = time.monotonic()
            # Small items travel within the request. Others need space at the broker: preallocated by the last put, or
            # reserved now.
            space = NOWHERE if parcel.carried else connection.take_preallocated(parcel.nbytes)
            if space == NOWHERE and not parcel.carried:
                queue_key = (request.channel, request.key)
                reserve = wire.Reserve(connection.next_request_id(), *queue_key, parcel.nbytes, request.nowait)
                answer = connection.ask(reserve, what, until)
                if not isinstance(answer, wire.ItemSpace):
                    return answer
                space = answer.space
            request.request_id, request.item = connection.next_request_id(), parcel.item(space)
            # Request space of the same size for the next put; the answer may have it.
            request.preallocate_bytes = 0 if parcel.carried else parcel.nbytes
            # A request that is sent in part would end the connection, so sending gets `GRACE_S` even beyond `until`.
            connection.put(request, parcel, max(until, begun + GRACE_S))
            reply = connection.await_answer(request.request_id, what, begun, until)
            if isinstance(reply, wire.BrokerDone) and reply.space != NOWHERE:
                connection.preallocated = (reply.space, request.preallocate_bytes)
            return reply

    @contextlib.contextmanager
    def _borrowed_connection(self, what: str) -> Iterator[BrokerConnection]:
        """Yield a connection for one call. It is kept afterwards, or closed if its state is unknown."""
        connection = self._take_connection(what)
        try:
            yield connection
        except (StreamLostError, StreamSilentError) as error:
            self._discard(connection)
            raise self._error_of_loss(what, error) from error
        except ChannelTimeoutError:
            # The broker has confirmed the cancellation, so the connection is reusable.
            self._put_back(connection)
            raise
        except BaseException:
            self._discard(connection)
            raise
        self._put_back(connection)

    def _take_connection(self, what: str) -> BrokerConnection:
        """Return an idle connection or a new one, and note it as in use."""
        with self._guard:
            if self._closed:
                raise disconnected(self._channel)
            if self._idle:
                connection = self._idle.pop()
                self._in_use.add(connection)
                return connection
        connection = self._connect(what)
        with self._guard:
            self._in_use.add(connection)
        return connection

    def _connect(self, what: str) -> BrokerConnection:
        """Open a connection. `ChannelLostError` if the broker cannot be reached."""
        with OpenFilesError.of(what):
            try:
                return BrokerConnection(self.endpoint, self._memory)
            except OSError as error:
                raise self._error_of_loss(what, error) from error

    def _put_back(self, connection: BrokerConnection) -> None:
        """Keep a connection for the next call, or close it if enough are idle or the handle was retired or closed."""
        with self._guard:
            self._in_use.discard(connection)
            keep = not (self._retired or self._closed) and len(self._idle) < MAX_IDLE_CONNECTIONS
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def _discard(self, connection: BrokerConnection) -> None:
        with self._guard:
            self._in_use.discard(connection)
        connection.close()

    def _error_of_loss(self, what: str, error: BaseException) -> Exception:
        """Return the error for a call that failed with `error`: the broker is lost, or this handle was closed."""
        if self._closed or isinstance(error, ChannelClosedError):
            return disconnected(self._channel)
        return lost_error(what, self.endpoint, error)

    def reset_in_child(self) -> None:
        """Close this child's copies of the parent's connections after a fork, so that the broker sees when the parent
        ends."""
        self._finalizer.detach()  # `_reset` makes a new one
        pump = self._pump
        connections = [*self._idle, *self._in_use]
        self._reset()
        for connection in connections:
            connection.close()
        if pump is not None:
            pump.forget()

    # --- asynchronous calls

    def begin(self, make: MakeRequest, what: str, until: float) -> tuple[Future[Any], Callable[[], None]]:
        """Send a request. Return the future of its answer (items as `ArrivedItems`), and a function that cancels
        it."""
        pump, (request_id, future) = self._begin_on_pump(what, lambda pump: pump.begin(make, what, until))
        return future, lambda: pump.drop(request_id)

    def begin_put(self, request: wire.Put, parcel: Parcel, what: str, until: float) -> tuple[int, Future[Any]]:
        """Put `parcel` as it is now. Return the request's id and the future of its answer."""
        request.preallocate_bytes = 0 if parcel.carried else parcel.nbytes
        return self._begin_on_pump(what, lambda pump: pump.begin_put(request, parcel, what, until))[1]

    def _begin_on_pump(
        self, what: str, begin: Callable[[Pump], tuple[int, Future[Any]]]
    ) -> tuple[Pump, tuple[int, Future[Any]]]:
        """Begin a request on a running pump. Return the pump, and the id and future of the request. A pump may end
        before it is used; then the next one is tried."""
        while True:
            pump = self._running_pump(what)
            with contextlib.suppress(PumpEndedError):
                return pump, begin(pump)

    def _running_pump(self, what: str) -> Pump:
        """Return the pump, after starting a new one if there is none or it has ended."""
        with self._guard:
            if self._closed:
                raise disconnected(self._channel)
            if self._pump is None or self._pump.ended is not None:
                connection = self._connect(what)
                try:
                    with OpenFilesError.of(what):
                        self._pump = Pump(connection, self._channel, self._loss_error_factory())
                except OpenFilesError:
                    connection.close()
                    raise
                # The pump ends when this object is garbage-collected.
                weakref.finalize(self, self._pump.close).atexit = False
                if self._retired:  # then it ends once no request is pending
                    self._pump.retire()
            return self._pump

    def _loss_error_factory(self) -> Callable[[str, BaseException], Exception]:
        """Return a function for the pump that makes an error like `_error_of_loss`. It does not refer to this object,
        which can thus be garbage-collected while the pump's thread runs."""
        endpoint = self.endpoint
        channel = self._channel

        def make(what: str, error: BaseException) -> Exception:
            if isinstance(error, ChannelClosedError):
                return disconnected(channel)
            return lost_error(what, endpoint, error)

        return make

    # --- close

    def retire(self) -> None:
        """Close idle connections, and the others as soon as they are unused."""
        with self._guard:
            self._retired = True
            idle = list(self._idle)
            self._idle.clear()
            pump = self._pump
        for connection in idle:
            connection.close()
        if pump is not None:
            pump.retire()

    def close(self) -> None:
        """Close all connections. Pending calls of other threads raise `ChannelClosedError`. Idempotent."""
        self.retire()
        with self._guard:
            self._closed = True  # first: errors of the calls that are ended below say that the handle was closed
            in_use = list(self._in_use)
            pump = self._pump
        for connection in in_use:
            connection.shut()  # its call fails, and then closes it
        if pump is not None:
            pump.close()


_links: weakref.WeakSet[Link] = weakref.WeakSet()
"""The links of this process, for forked children."""


@functools.cache
def _register_fork_hook() -> None:
    os.register_at_fork(after_in_child=_reset_in_child)


def _reset_in_child() -> None:
    for link in list(_links):
        link.reset_in_child()


def _close_all(idle: list[BrokerConnection]) -> None:
    for connection in idle:
        connection.close()
