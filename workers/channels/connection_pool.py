"""What a handle asks of one broker: at once, in the calling thread, or in the background."""

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
from workers.channels.errors import ChannelClosedError, ChannelTimeoutError
from workers.channels.items import Parcel
from workers.channels.wire import NOWHERE
from workers.errors import OpenFilesError
from workers.transport.endpoint import Endpoint
from workers.transport.poll_thread import refuse_waiting
from workers.transport.stream import StreamLostError, StreamSilentError

IDLE_LINES = 8
"""Connections kept for the next call."""
WARM_BYTES = 128 << 20
"""Memory of items that are gone, kept for the next ones."""

Make = Callable[[int], wire.AnyRequest]


class Taken:
    """Items that have arrived and are this process's."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def take(self) -> list[Any]:
        return self._items


Reply = wire.AnyAnswer | ArrivedItems | Taken


class Link:
    """Thread-safe. Each call under way in a thread has a connection to itself; all that are in the background share
    one, and a thread. A forked child has its own.

    Calls raise `ChannelLostError` where the broker is gone, `ChannelTimeoutError` at their moment `until`,
    `ChannelClosedError` once this was closed, and `OpenFilesError` where this process may have no more of them.
    """

    def __init__(self, endpoint: str, channel: str) -> None:
        self.endpoint = Endpoint.parse(endpoint)
        self._channel = channel
        self._begin()
        _look_after_forks()
        _all.add(self)

    def _begin(self) -> None:
        self._guard = threading.Lock()
        self._memory = BufferPool(WARM_BYTES)
        self._idle: list[Line] = []
        self._using: set[Line] = set()
        self._pump: Pump | None = None
        self._retired = False
        self._closed = False
        self._finalizer = weakref.finalize(self, _let_go, self._idle)
        self._finalizer.atexit = False

    # --- at once

    def ask(self, make: Make, what: str, until: float) -> Reply:
        """The answer to one request; of items, after they were taken: `Taken`."""
        with self._line(what) as line:
            answer = line.ask(make(line.number()), what, until)
            return Taken(answer.take()) if isinstance(answer, ArrivedItems) else answer

    def ask_after_puts(self, make: Make, what: str, until: float) -> Reply:
        """The same, behind the puts of this handle that are in the background."""
        pump = self._pump
        if pump is None or not pump.putting:
            return self.ask(make, what, until)
        refuse_waiting(what)
        reply: Reply = self.begin(make, what, until)[0].result()
        return reply

    def put(self, request: wire.Put, parcel: Parcel, what: str, until: float) -> Reply:
        """Put `parcel`: what was answered. Follows puts that are in the background."""
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
        line = self._take(what)
        try:
            yield line
        except (StreamLostError, StreamSilentError) as error:
            self._discard(line)
            raise self._gone(what, error) from error
        except ChannelTimeoutError:
            # The broker has confirmed that it waits for nothing.
            self._put_back(line)
            raise
        except BaseException:
            self._discard(line)
            raise
        self._put_back(line)

    def _take(self, what: str) -> Line:
        with self._guard:
            if self._closed:
                raise ChannelClosedError(channel=self._channel, why="this handle let it go")
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
                raise self._gone(what, error) from error

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

    def _gone(self, what: str, error: BaseException) -> Exception:
        if self._closed or isinstance(error, ChannelClosedError):
            return ChannelClosedError(channel=self._channel, why="this handle let it go")
        return lost(what, self.endpoint, error)

    def begin_in_child(self) -> None:
        """After a fork: the parent's connections are its own, and this child's copies of them are closed, so that the
        parent's end can be seen."""
        self._finalizer.detach()
        pump, lines = self._pump, [*self._idle, *self._using]
        self._begin()
        for line in lines:
            line.close()
        if pump is not None:
            pump.forget()

    # --- in the background

    def begin(self, make: Make, what: str, until: float) -> tuple[Future[Any], Callable[[], None]]:
        """The future of an answer (items as `ArrivedItems`), and what to call when nobody wants it any more."""
        pump, (number, future) = self._pumped(what, lambda pump: pump.begin(make, what, until))
        return future, lambda: pump.drop(number)

    def begin_put(self, request: wire.Put, parcel: Parcel, what: str, until: float) -> tuple[int, Future[Any]]:
        """Put `parcel` as it is now: the number, and the future of what is answered."""
        request.want = 0 if parcel.carried else parcel.nbytes
        return self._pumped(what, lambda pump: pump.begin_put(request, parcel, what, until))[1]

    def _pumped(
        self, what: str, begin: Callable[[Pump], tuple[int, Future[Any]]]
    ) -> tuple[Pump, tuple[int, Future[Any]]]:
        """A pump may end between being found and being used; then there is a new one."""
        while True:
            pump = self._running_pump(what)
            with contextlib.suppress(PumpEndedError):
                return pump, begin(pump)

    def _running_pump(self, what: str) -> Pump:
        with self._guard:
            if self._closed:
                raise ChannelClosedError(channel=self._channel, why="this handle let it go")
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
                return ChannelClosedError(channel=channel, why="this handle let it go")
            return lost(what, endpoint, error)

        return make

    # --- the end

    def retire(self) -> None:
        """Keep nothing that is not in use: connections go when what they are used for is done."""
        with self._guard:
            self._retired = True
            idle, self._idle[:] = list(self._idle), []
            pump = self._pump
        for line in idle:
            line.close()
        if pump is not None:
            pump.retire()

    def close(self) -> None:
        """Let go of everything; calls under way in other threads raise `ChannelClosedError`. Idempotent."""
        self.retire()
        with self._guard:
            self._closed = True
            using, pump = list(self._using), self._pump
        for line in using:
            line.shut()
        if pump is not None:
            pump.close()


_all: weakref.WeakSet[Link] = weakref.WeakSet()
"""Those of this process, for its children."""


@functools.cache
def _look_after_forks() -> None:
    os.register_at_fork(after_in_child=_begin_in_child)


def _begin_in_child() -> None:
    for link in list(_all):
        link.begin_in_child()


def _let_go(idle: list[Line]) -> None:
    for line in idle:
        line.close()
